"""CorruptedBatch: which positions may be corrupted, are predicted, and count in the NELBO."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY, tiny_model

from tokendrift_hf.objective.corruption import corrupt
from tokendrift_hf.objective.nelbo import row_nelbo
from tokendrift_hf.objective.noise import row_noise

B, L, V = 4, 6, TINY["vocab_size"]


def inputs():
    """Rows with padding at the end, a prompt at the beginning, both, and nothing free."""
    ids = torch.randint(V - 1, (B, L), generator=torch.Generator().manual_seed(0))
    attention_mask, prompt_mask = torch.ones_like(ids), torch.zeros_like(ids)
    attention_mask[0, 4:] = attention_mask[2, 5:] = 0
    prompt_mask[1, :2] = prompt_mask[2, :2] = prompt_mask[3] = 1
    return {"input_ids": ids, "attention_mask": attention_mask, "prompt_mask": prompt_mask}


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_positions_one_by_one(kind):
    process, batch = tiny_model(kind).process, inputs()
    noise, t = row_noise((1,), range(B), L, V), torch.tensor([0.3, 0.9, 0.6, 0.9])
    found = corrupt(process, batch, noise, t)
    ids = batch["input_ids"]
    for i in range(B):
        for pos in range(L):
            free = bool(batch["attention_mask"][i, pos]) and not batch["prompt_mask"][i, pos]
            assert found.free[i, pos] == free and found.exists[i, pos] == batch["attention_mask"][i, pos]
            noisy = free and float(noise.uniforms[i, pos]) < (1 - 1e-3) * float(t[i])
            token = V - 1 if kind == "mdlm" else noise.random_tokens[i, pos]
            assert found.x_t[i, pos] == (token if noisy else ids[i, pos])
            assert found.predicted[i, pos] == (noisy if kind == "mdlm" else free)
    assert found.predicted.any() and not found.predicted.all() and found.t.dtype == torch.float32
    labels = ids.masked_fill(batch["prompt_mask"].bool(), -100)
    by_labels = corrupt(
        process, {"input_ids": ids, "attention_mask": batch["attention_mask"], "labels": labels}, noise, t
    )
    assert torch.equal(by_labels.x_t, found.x_t) and torch.equal(by_labels.predicted, found.predicted)


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_the_nelbo_of_a_row_is_that_of_the_row_alone(kind):
    """Without its padding, and with its prompt in the input but not in the sum."""
    model, batch = tiny_model(kind), inputs()
    noise, t = row_noise((1,), range(B), L, V), torch.tensor([0.3, 0.9, 0.6, 0.9])
    found = corrupt(model.process, batch, noise, t)
    logits = torch.randn(B, L, V, generator=torch.Generator().manual_seed(1))
    logits[..., -1] = -1e6 if kind == "mdlm" else 0
    totals, counts = row_nelbo(model.process, logits, found)
    assert counts.tolist() == [4, 4, 3, 0] and totals[3] == 0
    for i, kept in enumerate([slice(0, 4), slice(2, 6), slice(2, 5)]):
        row = [x[i : i + 1, kept] for x in (logits, found.x_0, found.x_t)]
        torch.testing.assert_close(totals[i], model.process.nelbo(*row, t[i : i + 1]).sum())
