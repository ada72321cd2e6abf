"""MMDObjective: the whole loss against its formulas, who takes part, and the runs that it makes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import TINY, tiny_model
from reference import mmd_loss
from toys import assert_same, make_trainer, toy_rows, weights_of

from tokendrift_hf import FrozenEncoder
from tokendrift_hf.hub.process_tokendrift import stratified_times
from tokendrift_hf.objective.corruption import corrupt
from tokendrift_hf.objective.mmd_objective import MMDObjective
from tokendrift_hf.objective.noise import TRAIN, row_noise
from tokendrift_hf.objective.tokens import draw_tokens

MASK = TINY["vocab_size"] - 1
EXACT = {"rtol": 0, "atol": 0}


@dataclass
class Settings:
    mmd_groups: int = 2
    mmd_samples: int = 2
    mmd_bandwidth: float = 1.0
    mmd_credit: int | str = 1


def corrupted(model, ids, step=0, **inputs):
    noise = row_noise((0, TRAIN, step), range(len(ids)), ids.shape[1], TINY["vocab_size"])
    return corrupt(model.process, {"input_ids": ids, **inputs}, noise, stratified_times(noise.time))


def called(kind="mdlm", count=4, inputs=None, **fields):
    """An objective in float64, a batch, and logits in float64 of the model as a leaf."""
    model = tiny_model(kind).double()
    objective = MMDObjective(FrozenEncoder.copy_of(model, layers=[1]), Settings(**fields))
    ids = torch.tensor([row["input_ids"] for row in toy_rows(count)])
    batch = corrupted(model, ids, **(inputs or {}))
    logits = model(input_ids=batch.x_t, timesteps=batch.t).logits.detach().requires_grad_()
    return objective, batch, logits


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
@pytest.mark.parametrize("credit", ["sequence", 0, 1, 100])
def test_the_loss_and_its_gradient_are_their_formulas(kind, credit):
    """Features of the encoder called row by row and draw by draw; the rest in Python floats."""
    fields = dict(mmd_credit=credit, mmd_groups=3, mmd_samples=2, mmd_bandwidth=0.8)
    objective, batch, logits = called(kind, count=3, **fields)
    loss, statistics = objective(logits, batch)
    (gradient,) = torch.autograd.grad(loss, logits)

    drawn, model = draw_tokens(logits, batch.predicted, batch.noise.draws(6)), objective.encoder.model
    E = model.get_input_embeddings().weight
    log_p, real, draws, ids, positions = [], [], [], [], []
    for row in range(3):
        at = batch.predicted[row].nonzero().squeeze(1)
        first = int(batch.predicted[:row].sum())
        own = drawn[first : first + len(at)]
        if len(at) < 2:
            continue

        def phi(row_ids, at=at):
            output = model(inputs_embeds=E[row_ids][None], timesteps=torch.zeros(1), output_hidden_states=True)
            return output.hidden_states[1][0, at].detach()

        log_p.append(logits[row].log_softmax(-1)[at])
        real.append(phi(batch.x_0[row]))
        ids.append(own.T)
        draws.append([phi(batch.x_0[row].index_put((at,), x)) for x in own.T])
        positions.append(at.tolist())
    expected = mmd_loss(
        log_p, real, draws, ids, positions, groups=3, samples=2, bandwidth=float(objective.bandwidth), credit=credit
    )
    (plain,) = torch.autograd.grad(expected, logits)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-9)
    assert (gradient - plain).norm() < 1e-9 * plain.norm()
    assert statistics.keys() == {
        "mmd_attraction",
        "mmd_repulsion",
        "mmd_advantage",
        "mmd_bandwidth",
        "token_entropy",
    }


def test_the_bandwidth_is_a_median_distance_of_real_tokens():
    """Rows of 8 tokens: each counts four times among 32 positions. It is measured once, and then it stays."""
    objective, batch, logits = called(mmd_bandwidth=0.5)
    objective(logits, batch)
    embeds = objective.encoder.embedding[batch.x_0]
    features = objective.encoder.token_features(embeds).flatten(0, 1).repeat_interleave(4, 0)
    distances = torch.pdist(features)
    assert float(objective.bandwidth) == pytest.approx(0.5 * float(distances[distances > 1e-5].median()), rel=1e-5)
    first = objective.bandwidth.clone()
    objective(logits, corrupted(tiny_model("mdlm"), batch.x_0.flip(1)))
    assert torch.equal(objective.bandwidth, first)


@pytest.mark.parametrize("bandwidth, learns", [(100, True), (1e30, False), (1e-4, False)])
def test_far_from_the_bandwidths_that_a_config_takes_there_is_no_gradient(bandwidth, learns):
    objective, batch, logits = called(mmd_bandwidth=bandwidth)
    (gradient,) = torch.autograd.grad(objective(logits, batch)[0], logits)
    assert bool(gradient.any()) is learns


def test_the_state_is_the_bandwidth():
    objective, batch, logits = called()
    assert objective.state_dict() == {}
    loss, _ = objective(logits, batch)
    other = MMDObjective(objective.encoder, objective.config)
    other.load_state_dict({"bandwidth": objective.state_dict()["bandwidth"] * 2})
    assert torch.equal(other.bandwidth, objective.bandwidth * 2)
    assert not torch.equal(other(logits, batch)[0], loss)
    other.load_state_dict({"real": torch.zeros(2, 2)})  # of a run with another objective
    assert torch.equal(other(logits, batch)[0], loss)


def test_an_encoder_that_cannot_tell_tokens_apart_is_refused():
    objective, batch, logits = called()
    with torch.no_grad():
        objective.encoder.model.get_input_embeddings().embedding.zero_()
    with pytest.raises(ValueError, match="gives all tokens of the first batch the same features"):
        objective(logits, batch)


def test_rows_with_fewer_than_two_predicted_positions_take_no_part():
    ids = torch.tensor([row["input_ids"] for row in toy_rows(4)])
    prompt = torch.zeros_like(ids)
    prompt[1] = 1  # nothing to predict
    prompt[2, :-1] = 1  # at most one position
    objective, batch, logits = called(inputs={"prompt_mask": prompt})
    loss, _ = objective(logits, batch)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert (gradient[1] == 0).all() and (gradient[2] == 0).all()
    assert gradient[3].abs().sum() > 0 and (gradient[~batch.predicted] == 0).all()


@pytest.mark.parametrize("credit", ["sequence", 1])
def test_a_batch_with_nothing_to_predict_changes_nothing(credit):
    ids = torch.tensor([row["input_ids"] for row in toy_rows(4)])
    objective, batch, logits = called(inputs={"prompt_mask": torch.ones_like(ids)}, mmd_credit=credit)
    loss, statistics = objective(logits, batch)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss == 0 and (gradient == 0).all()
    assert all(value.isfinite() for value in statistics.values())


@pytest.mark.parametrize("credit", ["sequence", 1])
def test_a_certain_prediction_has_no_gradient(credit):
    """All draws are the same: no advantage, whatever the rounding; and nothing is divided by zero."""
    objective, batch, logits = called(mmd_credit=credit)
    certain = (1e4 * torch.nn.functional.one_hot(batch.x_0, TINY["vocab_size"]).double()).requires_grad_()
    loss, _ = objective(certain, batch)
    (gradient,) = torch.autograd.grad(loss, certain)
    assert gradient.isfinite().all() and gradient.abs().max() < 1e-6


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_padding_counts_for_nothing(kind, tmp_path):
    """Other ids under the padding, and more of it, change neither the loss nor a gradient."""
    results = []
    ids = torch.tensor([row["input_ids"] for row in toy_rows(3)])
    mask = torch.ones_like(ids)
    mask[0, 5:] = mask[2, 7:] = 0
    other = torch.where(mask.bool(), ids, (ids + 7) % MASK)
    wider = torch.nn.functional.pad(other, (0, 3), value=1), torch.nn.functional.pad(mask, (0, 3))
    for x_0, exists in ((ids, mask), wider):
        trainer = make_trainer(tmp_path, model=tiny_model(kind), objective="mmd")
        loss = trainer.compute_loss(trainer.model, {"input_ids": x_0, "attention_mask": exists})
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in trainer.model.named_parameters()}))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-4, atol=1e-5)
    assert_same(results[1][1], results[0][1], rtol=5e-3, atol=5e-5)


def test_the_mean_estimate_is_the_exact_gradient_within_its_standard_error():
    """400 copies of one row with four predicted positions of two likely tokens: 16 rows to enumerate."""
    model = tiny_model("mdlm").double()
    objective = MMDObjective(FrozenEncoder.copy_of(model, layers=[1]), Settings(mmd_credit="sequence"))
    copies, ids = 400, torch.tensor([toy_rows(1)[0]["input_ids"]])
    prompt = torch.tensor([[0, 0, 1, 1, 0, 0, 1, 1]])
    noise = row_noise((1, 0), range(copies), 8, TINY["vocab_size"])
    noise = replace(noise, uniforms=torch.zeros_like(noise.uniforms))  # every mask is set
    inputs = {"input_ids": ids.expand(copies, -1), "prompt_mask": prompt.expand(copies, -1)}
    batch = corrupt(model.process, inputs, noise, torch.ones(copies))
    assert batch.predicted.sum() == 4 * copies
    ell = torch.full((4, TINY["vocab_size"]), -30.0, dtype=torch.float64)
    ell[:, 3:5] = torch.randn(4, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    at = batch.predicted[0].nonzero().squeeze(1)
    logits = torch.zeros(1, 8, TINY["vocab_size"], dtype=torch.float64).index_put((torch.tensor(0), at), ell)
    logits = logits.expand(copies, -1, -1).clone().requires_grad_()
    loss, _ = objective(logits, batch)
    (gradient,) = torch.autograd.grad(loss, logits)
    samples = gradient[:, at, 3:5].flatten(1) * copies

    table = torch.cartesian_prod(*[torch.tensor([3, 4])] * 4)
    rows = ids.repeat(16, 1).index_put((torch.arange(16)[:, None], at), table)
    E = objective.encoder.embedding
    phi, real = objective.encoder.token_features(E[rows])[:, at], objective.encoder.token_features(E[ids])[0, at]
    scale = -1 / (2 * objective.bandwidth**2)
    attraction = ((torch.cdist(phi, real).square() * scale).exp()).mean((1, 2)).double()
    pairs = (torch.cdist(phi[:, None], phi[None]).square() * scale).exp().double()
    repulsion = (pairs.sum((2, 3)) - pairs.diagonal(dim1=2, dim2=3).sum(-1)) / 12
    leaf = ell.clone().requires_grad_()
    p = leaf.log_softmax(-1).gather(1, table.T).sum(0).exp()
    mmd = -2 * p @ attraction + p @ repulsion @ p
    exact = torch.autograd.grad(mmd, leaf)[0][:, 3:5].flatten()
    # Per token: the loss is divided by n, and two groups of two draws have each a reward.
    exact = exact * 2 / (4 * 4)
    error = samples.std(0) / copies**0.5
    assert ((samples.mean(0) - exact).abs() < 4.5 * error).all()
    assert exact.norm() > 5 * error.norm(), "the test would not see a wrong gradient"


@pytest.mark.parametrize("credit", ["sequence", 1])
@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_training_brings_draws_to_the_real_rows(kind, credit, tmp_path):
    """All rows are one text, so draws can only lie nearest to the real ones by being that text."""
    fields = dict(objective="mmd", mmd_credit=credit, optim="adamw_torch", learning_rate=0.01, logging_steps=5)
    fields |= dict(max_steps=30, per_device_train_batch_size=8)
    trainer = make_trainer(tmp_path, model=tiny_model(kind), rows=toy_rows(1) * 8, **fields)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "mmd_attraction" in entry]
    reward = [2 * entry["mmd_attraction"] - entry["mmd_repulsion"] for entry in log]
    assert reward[-1] > reward[0] + 0.01
    assert len({entry["mmd_bandwidth"] for entry in log}) == 1


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """Draws and bandwidth included, with accumulation, base loss and averages."""
    fields = dict(
        objective="mmd", base_loss_weight=0.1, gradient_accumulation_steps=2, ema_decay=0.9, optim="adamw_torch"
    )
    fields |= dict(learning_rate=1e-3, max_steps=4, save_strategy="steps", save_steps=2)
    whole = make_trainer(tmp_path, rows=toy_rows(32), **fields)
    whole.train()
    resumed = make_trainer(tmp_path, rows=toy_rows(32), **fields)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same(weights_of(resumed.model), weights_of(whole.model), **EXACT)
    assert torch.equal(resumed.train_objective.bandwidth, whole.train_objective.bandwidth)


def test_the_encoder_may_be_the_base_of_adapters(tmp_path):
    from peft import LoraConfig

    losses = []
    for encoder in (None, "base"):
        torch.manual_seed(0)
        lora = LoraConfig(r=2, target_modules=["attn_qkv"], init_lora_weights=False)
        arguments = {"peft_config": lora, "encoder": encoder}
        trainer = make_trainer(tmp_path, model=copy.deepcopy(tiny_model("mdlm")), arguments=arguments, objective="mmd")
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
