"""generate() with random arguments, half of them nonsense: text, or an error of ours."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest
import torch
from conftest import TINY, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tokendrift_hf.hub

HUB = Path(tokendrift_hf.hub.__file__).parent
MASK = TINY["vocab_size"] - 1
MODELS = {kind: tiny_model(kind) for kind in ("mdlm", "duo")}
JUNK = st.sampled_from(
    [-1, 0, 2.5, float("nan"), float("inf"), True, "x", "", [], [1], ["a"], (), {}, {"a": 1}, b"x", object(), 10**30]
)


def ids(draw):
    shape = draw(st.sampled_from([(1, 3), (2, 5), (1, 16), (1, 20), (0, 3), (3,), (1, 1, 2)]))
    values = torch.randint(-1, 25, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return draw(st.sampled_from([values, values.clamp(0, MASK), values.int(), values.float(), values.tolist()]))


def mask(draw, like):
    shape = tuple(like.shape) if isinstance(like, torch.Tensor) and draw(st.booleans()) else (1, 3)
    values = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    return draw(st.sampled_from([values, values.bool(), torch.ones(shape), values / 0, values.tolist()]))


SOUND = {
    "num_samples": st.integers(1, 3),
    "num_steps": st.integers(1, 4),
    "sampler": st.sampled_from(["ancestral", "psi", "first_hitting", "confidence", "margin", "entropy"]),
    "temperature": st.floats(0, 3) | st.sampled_from([0, 1e-6, 1e30]),
    "top_k": st.integers(0, 40),
    "top_p": st.floats(0, 1),
    "noise_removal": st.sampled_from(["ancestral", "greedy", "none"]),
    "time_grid": st.sampled_from(
        ["linear", "cosine", "linear-constant-linear-0.3", "linear-constant-linear-.", [1, 0.5]]
    ),
    "psi": st.sampled_from(["pure-pc", "constant-0.3", "max-capped-.", ["pure-pc"] * 3, [1, 2, 3]]),
    "psi_fractions": st.lists(st.floats(0, 1), min_size=1, max_size=3),
    "precision": st.sampled_from(["float64", "float32"]),
    "max_new_tokens": st.integers(1, 18),
    "max_length": st.integers(1, 18),
    "stride": st.integers(1, 17),
    "block_length": st.integers(1, 17),
    "trim_eos": st.booleans(),
    "eos_token_id": st.integers(0, 30) | st.lists(st.integers(0, 30), max_size=3),
    "pad_token_id": st.integers(0, 30),
    "suppress_tokens": st.lists(st.integers(0, 22), max_size=23),
    "output_history": st.booleans(),
    "return_dict_in_generate": st.booleans(),
    "seed": st.integers(-1, 2**65),
    "generator": st.sampled_from([torch.Generator(), [torch.Generator()]]),
    "chunk_size": st.integers(0, 5),
    "rows_per_call": st.integers(0, 5),
    "callback": st.just(lambda step: None),
    "logits_processor": st.sampled_from([[], [lambda input_ids, scores: scores]]),
    "stopping_criteria": st.sampled_from([[], [lambda input_ids, scores, **kwargs: torch.tensor([True])]]),
    "generation_config": st.sampled_from([{}, None]),
    "streamer": st.none(),
}


@st.composite
def arguments(draw) -> dict:
    names = draw(st.lists(st.sampled_from(sorted(SOUND)), max_size=5, unique=True))
    chosen = {name: draw(JUNK if draw(st.integers(0, 3)) == 0 else SOUND[name]) for name in names}
    if draw(st.booleans()):
        chosen["input_ids"] = ids(draw)
        for name in ("attention_mask", "prompt_mask"):
            if draw(st.integers(0, 2)) == 0:
                chosen[name] = mask(draw, chosen["input_ids"])
    return chosen


@pytest.mark.parametrize("kind", MODELS)
@settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(chosen=arguments())
def test_any_arguments_give_text_or_an_error_of_ours(kind, chosen):
    try:
        x = MODELS[kind].generate(**chosen)
    except (ValueError, TypeError) as error:
        file = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        assert file.parent == HUB, f"{type(error).__name__} of another: {error}"
        return
    x = x if isinstance(x, torch.Tensor) else x.sequences
    assert x.dtype == torch.long
    assert x.dim() == 2
