"""Text in blocks from left to right, and rows that end early: at an end of text or where a criterion holds."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY, tiny_model
from tables import enumerate_run, histogram, p_value, psi_laws, stub
from transformers import MaxLengthCriteria, StoppingCriteria, StoppingCriteriaList, TextDiffusionStreamer

from tokendrift_hf.hub.samplers_tokendrift import SAMPLERS

MASK = TINY["vocab_size"] - 1


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


def steps_of(sampler: str, N: int) -> dict:
    return {"sampler": sampler} | ({} if sampler == "first_hitting" else {"num_steps": N})


# Blocks


@pytest.mark.parametrize(
    ("settings", "kappa"),
    [({}, 1.0), ({"noise_removal": "greedy"}, 1.0), ({"sampler": "psi", "psi": "constant-0.3"}, 0.3)],
)
def test_blocks_follow_their_enumerated_law(settings, kappa):
    """Three positions in blocks of two: two steps for the first two, then two for the last."""
    model = stub("mdlm", V=3, L=3, seed=2)
    laws = psi_laws(model.process, 2, [kappa] * 2, removal=settings.get("noise_removal", "ancestral"))
    counts = histogram(model, num_steps=2, block_length=2, **settings)
    law = enumerate_run(model, laws, blocks=[[0, 1], [2]])
    assert p_value(counts, law) > 1e-3
    assert p_value(counts, enumerate_run(model, laws)) < 1e-3, "the test has no power"


def low_confidence_remasking(model, prompt: torch.Tensor, length: int, block_length: int, steps: int) -> torch.Tensor:
    """LLaDA's semi-autoregressive decoding at temperature 0, written from 2502.09992."""
    x = torch.cat([prompt, torch.full((1, length), MASK)], 1)
    for start in range(prompt.shape[1], x.shape[1], block_length):
        for _ in range(steps):
            with torch.no_grad():
                p = model(x).logits[0].double().softmax(-1)
            confidence, tokens = p.max(-1)
            confidence[start + block_length :] = -1  # the blocks to come
            confidence = confidence.masked_fill(x[0] != MASK, -1)
            kept = confidence.topk(block_length // steps).indices
            x[0, kept] = tokens[kept]
    return x


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("block_length", [4, 6, 12])
def test_greedy_blocks_are_those_of_llada(seed, block_length):
    model, prompt = tiny_model("mdlm", seed=seed), torch.tensor([[5, 2, 8]])
    expected = low_confidence_remasking(model, prompt, 12, block_length, 2)
    settings = dict(sampler="confidence", temperature=0.0, num_steps=2, block_length=block_length)
    assert model.generate(prompt, max_new_tokens=12, **settings).equal(expected)


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS])
def test_no_block_begins_before_the_one_to_its_left_is_finished(sampler):
    model, steps = tiny_model("mdlm"), []
    prompt = torch.tensor([[7, 1]])
    x = model.generate(prompt, max_new_tokens=12, block_length=5, seed=0, callback=steps.append, **steps_of(sampler, 3))
    assert {step.block for step in steps} == {0, 1, 2}
    for step in steps:
        left = step.tokens[0, 2 : 2 + 5 * step.block]
        right = step.tokens[0, 2 + 5 * (step.block + 1) :]
        assert left.equal(x[0, 2 : 2 + len(left)])
        assert (right == MASK).all()
    assert (x != MASK).all()


def test_one_block_is_the_plain_run_and_infilling_skips_empty_blocks():
    model = tiny_model("mdlm")
    plain = model.generate(num_samples=2, num_steps=3, seed=0)
    assert model.generate(num_samples=2, num_steps=3, seed=0, block_length=16).equal(plain)
    infill = torch.tensor([[MASK, 3, 4, 5, 6, 7, 8, 9, 1, 2, MASK]])
    output = model.generate(infill, block_length=2, num_steps=1, seed=0, return_dict_in_generate=True)
    assert output.num_forward_calls == 2
    assert output.sequences[0, 1:10].equal(infill[0, 1:10])


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS])
def test_rows_with_fewer_blocks_and_windows_are_their_single_runs(sampler):
    """The streams of rows at rest stay where they are, so what comes later does not depend on other rows."""
    model, settings = tiny_model("mdlm"), dict(max_length=20, stride=7, block_length=3, rows_per_call=1)
    settings |= steps_of(sampler, 2)
    prompts, exists = torch.full((3, 14), 21), torch.zeros(3, 14, dtype=torch.long)
    for row, n in enumerate((14, 2, 9)):
        prompts[row, :n], exists[row, :n] = torch.arange(n) % 11, 1
    batch = model.generate(prompts, attention_mask=exists, generator=generators(1, 2, 3), **settings)
    for row, generator in enumerate(generators(1, 2, 3)):
        alone = model.generate(prompts[row : row + 1, : int(exists[row].sum())], generator=generator, **settings)
        assert batch[row].equal(alone[0]), row


# Ends


def with_likely_eos(kind: str, eos: int, bias: float = 2.5):
    model = tiny_model(kind)
    with torch.no_grad():
        model.backbone.output_layer.linear.bias[eos] += bias
    return model


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS])
@pytest.mark.parametrize("block_length", [None, 4])
def test_ending_early_changes_no_token_and_saves_calls(sampler, block_length):
    """What stands before the first end of text is that of a run which goes on to the end."""
    eos, fewer = 5, 0
    model = with_likely_eos("mdlm", eos)
    settings = dict(num_samples=6, max_new_tokens=14, block_length=block_length, rows_per_call=1)
    settings |= {"return_dict_in_generate": True} | steps_of(sampler, 7)
    prompt = torch.tensor([[7, eos]])
    whole = model.generate(prompt, generator=generators(*range(6)), **settings)
    ended = model.generate(
        prompt, generator=generators(*range(6)), trim_eos=True, eos_token_id=eos, pad_token_id=20, **settings
    )
    for row, (text, n) in enumerate(zip(whole.sequences, ended.lengths.tolist(), strict=True)):
        ends = [i for i in range(2, 16) if text[i] == eos]
        assert n == (ends[0] + 1 if ends else 16)
        assert ended.sequences[row, :n].equal(text[:n])
        assert (ended.sequences[row, n:] == 20).all()
        fewer += int(whole.calls_per_row[row] - ended.calls_per_row[row])
    assert fewer > 0 or (sampler == "psi" and block_length is None), "psi may mask an end again until it is finished"
    assert MASK not in ended.sequences


def test_duo_ends_with_its_window():
    """Tokens of a uniform process may change until the last step, so nothing ends before."""
    model = with_likely_eos("duo", 5, bias=4.0)
    settings = dict(num_samples=3, max_new_tokens=30, stride=7, num_steps=2, seed=0, return_dict_in_generate=True)
    output = model.generate(trim_eos=True, eos_token_id=5, **settings)
    assert output.num_forward_calls < model.generate(**settings).num_forward_calls
    for row, n in zip(output.sequences, output.lengths.tolist(), strict=True):
        assert 5 not in row[1 : n - 1]
        assert row[n - 1] == 5


class Contains(StoppingCriteria):
    """Holds for texts with a token, and notes what it was asked."""

    def __init__(self, token: int):
        self.token, self.asked = token, []

    def __call__(self, input_ids, scores, new_token_length=1, **kwargs):
        self.asked.append((input_ids.clone(), new_token_length))
        return (input_ids == self.token).any(1)


def test_criteria_are_asked_for_each_row_after_each_block():
    model, criterion = tiny_model("mdlm"), Contains(4)
    prompts = torch.tensor([[7, 1], [2, 3]])
    settings = dict(max_new_tokens=12, block_length=5, num_steps=2, pad_token_id=20, return_dict_in_generate=True)
    whole = model.generate(prompts, generator=generators(1, 2), **settings).sequences
    criteria = StoppingCriteriaList([criterion])
    output = model.generate(prompts, generator=generators(1, 2), stopping_criteria=criteria, **settings)
    for row, text in enumerate(whole):
        ends = [end for end in (7, 12, 14) if 4 in text[:end]] + [14]
        assert output.lengths[row] == ends[0]
        assert output.sequences[row, : ends[0]].equal(text[: ends[0]])
        assert (output.sequences[row, ends[0] :] == 20).all()
    first = [(ids.shape, new) for ids, new in criterion.asked[:2]]
    assert first == [((1, 7), 5), ((1, 7), 5)]
    assert all(4 not in ids[:, :-new] for ids, new in criterion.asked), "a row that is done is asked again"


def test_criteria_of_transformers_work():
    model = tiny_model("mdlm")
    criteria = [MaxLengthCriteria(max_length=9)]
    x = model.generate(max_new_tokens=16, block_length=4, num_steps=1, seed=0, stopping_criteria=criteria)
    assert x.shape == (1, 12)


def test_streamers_get_every_block_and_nothing_behind_the_end():
    class Letters:
        def decode(self, ids, **kwargs):
            return "".join(chr(97 + int(i)) for i in torch.as_tensor(ids).flatten())

    class Values(TextDiffusionStreamer):
        def __init__(self):
            super().__init__(Letters())
            self.parts = []

        def put(self, value):
            self.parts.append(value)
            super().put(value)

    eos, prompt, settings = 5, torch.tensor([[7, 1]]), dict(max_new_tokens=12, block_length=4, num_steps=2, seed=1)
    model, streamer = with_likely_eos("mdlm", eos), Values()
    x = model.generate(prompt, streamer=streamer, **settings)
    assert [part.shape[1] for part in streamer.parts] == [2, 4, 4, 4]
    assert torch.cat(streamer.parts, 1).equal(x)
    streamer = Values()
    x = model.generate(prompt, streamer=streamer, trim_eos=True, eos_token_id=eos, **settings)
    assert torch.cat(streamer.parts, 1).equal(x)
    assert x[0, -1] == eos and x.shape[1] < 14
