"""Ordered unmasking: the surest positions first, by the prediction before temperature, top_k and top_p."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY, tiny_model
from tables import Stub, histogram, mask_column, p_value, stub

from tokendrift_hf.hub.process_tokendrift import AbsorbingProcess

ORDERED = ["confidence", "margin", "entropy"]
MASK = TINY["vocab_size"] - 1
CONTROLS = [{"temperature": 0.0}, {"temperature": 1e-3}, {"temperature": 1.0}, {"top_k": 1}, {"top_p": 0.01}]
GREEDY = [controls for controls in CONTROLS if controls != {"temperature": 1.0}]


def scores(sampler: str, p: torch.Tensor) -> list[float]:
    """How sure the rows of p [n, V] are, in float64, by the definitions of the papers."""
    top = p.double().sort(-1, descending=True).values
    if sampler == "entropy":
        return (p.double() * p.double().clamp_min(1e-300).log()).sum(-1).tolist()
    return (top[:, 0] - (top[:, 1] if sampler == "margin" else 0)).tolist()


def surest_first(score: dict[int, float]) -> list[int]:
    """Positions by falling score. Where scores follow each other within 1e-5, from left to right."""
    groups, last = [], None
    for position in sorted(score, key=lambda position: -score[position]):
        if last is None or last - score[position] >= 1e-5:
            groups.append([])
        groups[-1].append(position)
        last = score[position]
    return [position for group in groups for position in sorted(group)]


def canvases() -> dict[str, dict]:
    """Arguments of generate(): nothing, a prompt, and masks between tokens."""
    infill = torch.tensor([[3, MASK, MASK, 4, MASK, 5, MASK, MASK, MASK, 6, MASK, 1, 2, MASK]])
    return {
        "unprompted": {"max_new_tokens": 13},
        "prompt": {"input_ids": torch.tensor([[7, 1, 4]]), "max_new_tokens": 11},
        "infill": {"input_ids": infill},
    }


@pytest.mark.parametrize("sampler", ORDERED)
@pytest.mark.parametrize("controls", CONTROLS, ids=lambda controls: "-".join(map(str, *controls.items())))
@pytest.mark.parametrize("canvas", canvases())
def test_the_order_is_that_of_the_plain_prediction_recomputed_by_hand(sampler, controls, canvas):
    model, steps, N = tiny_model("mdlm"), [], 5
    output = model.generate(
        sampler=sampler,
        num_steps=N,
        seed=1,
        callback=steps.append,
        output_history=True,
        return_dict_in_generate=True,
        **controls,
        **canvases()[canvas],
    )
    num_masks, order = int((output.history[0] == MASK).sum()), []
    for i, (before, after, step) in enumerate(zip(output.history, output.history[1:], steps, strict=False)):
        masked = (before[0] == MASK).nonzero()[:, 0].tolist()
        with torch.no_grad():
            p = model(before, timesteps=torch.tensor([1 - i / N])).logits[0].softmax(-1)
        score = dict(zip(masked, scores(sampler, p[masked]), strict=True))
        count = len(masked) - num_masks * (N - 1 - i) // N
        revealed = (before[0] != after[0]).nonzero()[:, 0].tolist()
        assert sorted(surest_first(score)[:count]) == revealed, f"step {i}"
        tokens = after[0, revealed]
        torch.testing.assert_close(step.confidence[0, revealed], p[revealed, tokens], rtol=1e-4, atol=1e-6)
        if controls in GREEDY:
            assert tokens.equal(p[revealed].argmax(-1))
        order += revealed
    assert len(order) == num_masks
    assert canvas == "unprompted" or order != sorted(order), "from left to right"


@pytest.mark.parametrize("sampler", ORDERED)
def test_equal_scores_are_revealed_from_the_left(sampler):
    table = torch.zeros(1, 6, 5, dtype=torch.float64)
    model = Stub(AbsorbingProcess(5, 4), table)
    output = model.generate(sampler=sampler, num_steps=3, seed=0, output_history=True, return_dict_in_generate=True)
    left = [(x[0] == 4).nonzero()[:, 0].tolist() for x in output.history]
    assert left == [[0, 1, 2, 3, 4, 5], [2, 3, 4, 5], [4, 5], []]


def low_confidence_remasking(model, prompt: torch.Tensor, length: int, num_steps: int) -> torch.Tensor:
    """LLaDA's decoding at temperature 0, written from 2502.09992: of the chosen tokens keep the likeliest ones."""
    x = torch.cat([prompt, torch.full((1, length), MASK)], 1)
    for _ in range(num_steps):
        with torch.no_grad():
            p = model(x).logits[0].double().softmax(-1)
        confidence, tokens = p.max(-1)
        confidence = confidence.masked_fill(x[0] != MASK, -1)
        kept = confidence.topk(length // num_steps).indices
        x[0, kept] = tokens[kept]
    return x


@pytest.mark.parametrize("seed", range(4))
def test_greedy_confidence_is_low_confidence_remasking(seed):
    model, prompt = tiny_model("mdlm", seed=seed), torch.tensor([[5, 2, 8]])
    expected = low_confidence_remasking(model, prompt, 12, 4)
    x = model.generate(prompt, max_new_tokens=12, num_steps=4, sampler="confidence", temperature=0.0, seed=0)
    assert x.equal(expected)


@pytest.mark.parametrize("sampler", ORDERED)
def test_ordered_unmasking_follows_its_enumerated_law(sampler):
    """Two positions in two steps: the surer position first."""
    model = stub("mdlm", V=4, L=2, seed=5)
    mask = model.process.mask_id
    law = torch.zeros(16, dtype=torch.float64)

    def prediction(x):
        return model.prediction(torch.tensor([x]), torch.zeros(1))[0].masked_fill(mask_column(model), -1e9).softmax(-1)

    first = prediction([mask, mask])
    top = first.topk(2, -1).values
    scores = {"confidence": top[:, 0], "margin": top[:, 0] - top[:, 1], "entropy": -torch.special.entr(first).sum(-1)}
    surest = int(scores[sampler].argmax())
    for token, p in enumerate(first[surest].tolist()):
        x = [mask, mask]
        x[surest] = token
        for other, q in enumerate(prediction(x)[1 - surest].tolist()):
            y = list(x)
            y[1 - surest] = other
            law[y[0] * 4 + y[1]] += p * q
    assert p_value(histogram(model, num_steps=2, sampler=sampler), law) > 1e-3
