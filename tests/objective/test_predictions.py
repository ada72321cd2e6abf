"""The vocabulary in chunks: the plain form in value and gradient, with every kind of head, and nothing large kept."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, tiny_model
from toys import toy_rows

from tokendrift_hf import FrozenEncoder
from tokendrift_hf.hub.modeling_tokendrift import LayerNorm
from tokendrift_hf.hub.process_tokendrift import stratified_times
from tokendrift_hf.models.lora import lora_config
from tokendrift_hf.objective.corruption import corrupt
from tokendrift_hf.objective.nelbo import ask_for_nelbo, batch_nelbo, row_nelbo
from tokendrift_hf.objective.noise import TRAIN, row_noise
from tokendrift_hf.objective.objectives import make_objective
from tokendrift_hf.objective.predictions import _Reading, predict
from tokendrift_hf.training.drift_config import DriftConfig

EXACT = {"rtol": 1e-10, "atol": 1e-12}
V = TINY["vocab_size"]


@pytest.fixture
def float64_norms(monkeypatch):
    """The models' layer norms are float32 whatever the weights are, which would be all that one sees at 1e-10."""
    monkeypatch.setattr(LayerNorm, "forward", lambda self, x: F.layer_norm(x, self.weight.shape, self.weight))


def corrupted(model, count=5, **inputs):
    ids = torch.tensor([row["input_ids"] for row in toy_rows(count)])
    noise = row_noise((0, TRAIN, 3), range(count), ids.shape[1], V)
    return corrupt(model.process, {"input_ids": ids, **inputs}, noise, stratified_times(noise.time))


def with_head(kind: str, head: str):
    """(what is called, its base): a model in float64 whose head is plain, frozen or wrapped by LoRA."""
    base = tiny_model(kind)
    if head == "lora":
        import peft

        model = peft.get_peft_model(base, lora_config("linear", r=2, init_lora_weights=False)).double()
        return model, model.get_base_model()
    if head == "frozen":
        base.backbone.output_layer.requires_grad_(False)
    return base.double(), base


def gradients(model, loss):
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(named.items(), found, strict=True)}


@pytest.mark.parametrize("objective", ["feature", "mirror_kl", "mirror_mse", "mmd", "alpha", "none"])
@pytest.mark.parametrize("head", ["plain", "frozen", "lora"])
@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_losses_and_gradients_are_those_of_whole_logits(kind, head, objective, tmp_path, float64_norms):
    """Objective and base loss together, from hidden states in chunks of 3 positions and from logits [B, L, V]."""
    model, base = with_head(kind, head)
    batch = corrupted(base)
    fields = {} if objective == "alpha" else {"feature_layers": [1]}
    args = DriftConfig(
        str(tmp_path), use_cpu=True, report_to="none", objective=objective, base_loss_weight=0.5, **fields
    )
    results = []
    for whole in (True, False):
        encoder = FrozenEncoder.copy_of(tiny_model(kind).double(), layers=[1])
        loss = 0
        if whole:
            predictions = model(input_ids=batch.x_t, timesteps=batch.t).logits
            nelbo = base.process.nelbo(predictions, batch.x_0, batch.x_t, batch.t).where(batch.predicted, 0).sum()
        else:
            predictions = predict(model, base, batch, chunk_size=3)
            ask_for_nelbo(base.process, predictions, batch)
        if objective != "none":
            loss, _ = make_objective(args, encoder)(predictions, batch)
        if not whole:
            nelbo = batch_nelbo(base.process, predictions, batch)
        loss = loss + 0.5 * nelbo
        results.append((loss.detach(), gradients(model, loss)))
    (expected, plain), (found, chunked) = results
    torch.testing.assert_close(found, expected, **EXACT)
    for name in plain:
        scale = float(plain[name].abs().max())
        torch.testing.assert_close(chunked[name], plain[name], rtol=1e-8, atol=1e-10 * max(scale, 1), msg=name)


@pytest.mark.parametrize("objective", ["feature", "mirror_kl", "mmd", "alpha", "none"])
def test_no_logits_of_a_whole_batch_are_made_or_kept(objective, tmp_path, monkeypatch):
    """Every head call is of a chunk, and what is saved for backward is of no more rows of vocabulary size."""
    model = tiny_model("mdlm")
    batch = corrupted(model)
    assert len(batch.predicted.nonzero()) > 12
    fields = {} if objective == "alpha" else {"feature_layers": [1]}
    args = DriftConfig(
        str(tmp_path), use_cpu=True, report_to="none", objective=objective, base_loss_weight=0.5, **fields
    )
    largest, saved, head = [], [], type(model).logits
    monkeypatch.setattr(type(model), "logits", lambda *x: largest.append(len(x[1])) or head(*x))

    def pack(x):
        of_the_vocabulary = x.dim() > 1 and x.shape[-1] == V
        is_weight = x.shape == (TINY["hidden_size"], V)
        saved.append(x.numel() if of_the_vocabulary and not is_weight else 0)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        predictions = predict(model, model, batch, chunk_size=4)
        ask_for_nelbo(model.process, predictions, batch)
        loss = 0
        if objective != "none":
            loss, _ = make_objective(args, FrozenEncoder.copy_of(model, layers=[1]))(predictions, batch)
        loss = loss + batch_nelbo(model.process, predictions, batch)
    loss.backward()
    assert max(largest) == 4
    assert max(saved) <= 4 * V
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("objective", ["feature", "mirror_kl", "mirror_mse", "mmd", "alpha", "none"])
def test_a_step_leaves_nothing_in_memory(objective, tmp_path):
    """A graph that held what came out of it was never freed: hidden states and model stayed, more with every step."""
    model = tiny_model("mdlm")
    batch = corrupted(model)
    fields = {} if objective == "alpha" else {"feature_layers": [1]}
    args = DriftConfig(
        str(tmp_path), use_cpu=True, report_to="none", objective=objective, base_loss_weight=0.5, **fields
    )
    predictions, loss, logs = predict(model, model, batch, chunk_size=4), 0, {}
    ask_for_nelbo(model.process, predictions, batch)
    if objective != "none":
        loss, logs = make_objective(args, FrozenEncoder.copy_of(model, layers=[1]))(predictions, batch)
    loss = loss + batch_nelbo(model.process, predictions, batch)
    loss.backward()
    hidden = weakref.ref(predictions.inputs[0])
    del predictions, loss, logs
    gc.collect()
    assert hidden() is None


def test_one_pass_serves_the_lift_and_the_base_loss(tmp_path, monkeypatch):
    """Forward makes the logits of a position once for both."""
    model = tiny_model("mdlm")
    batch, head, positions = corrupted(model), type(model).logits, []
    monkeypatch.setattr(type(model), "logits", lambda *x: positions.append(len(x[1])) or head(*x))
    args = DriftConfig(str(tmp_path), use_cpu=True, report_to="none", base_loss_weight=0.5, feature_layers=[1])
    predictions = predict(model, model, batch, chunk_size=3)
    ask_for_nelbo(model.process, predictions, batch)
    make_objective(args, FrozenEncoder.copy_of(model, layers=[1]))(predictions, batch)
    batch_nelbo(model.process, predictions, batch)
    assert sum(positions) == int(batch.predicted.sum())


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_rows_have_the_nelbo_of_whole_logits(kind, float64_norms):
    model = tiny_model(kind).double()
    mask = torch.ones(5, 8, dtype=torch.long)
    mask[1, 5:] = 0
    batch = corrupted(model, attention_mask=mask)
    logits = model(input_ids=batch.x_t, timesteps=batch.t, attention_mask=mask).logits
    expected = model.process.nelbo(logits, batch.x_0, batch.x_t, batch.t).where(batch.predicted, 0).sum(1)
    with torch.no_grad():
        totals, tokens = row_nelbo(model.process, predict(model, model, batch, chunk_size=3), batch)
    torch.testing.assert_close(totals, expected.detach(), **EXACT)
    assert torch.equal(tokens, batch.free.sum(1))


def test_nothing_to_predict_gives_every_weight_a_zero_gradient():
    model = tiny_model("mdlm")
    batch = corrupted(model, prompt_mask=torch.ones(5, 8, dtype=torch.long))
    loss = batch_nelbo(model.process, predict(model, model, batch), batch)
    loss.backward()
    assert loss == 0
    assert all((p.grad == 0).all() for p in model.parameters())


def test_dropout_in_the_head_is_drawn_again_in_backward():
    """Adapters on the vocabulary layer with dropout: chunks recomputed with other masks would give another gradient."""
    import peft

    model = peft.get_peft_model(
        tiny_model("mdlm"), lora_config("linear", r=2, lora_dropout=0.5, init_lora_weights=False)
    )
    model, base = model.double().train(), model.get_base_model()
    batch = corrupted(base)
    hidden = predict(model, base, batch, chunk_size=3)
    hidden.inputs = tuple(x.detach().requires_grad_() for x in hidden.inputs)
    results = []
    for recomputed in (True, False):
        torch.manual_seed(1)
        reading = [_Reading(lambda ell: (ell.square(),), 0)]
        ells = hidden._mapped(reading, ()) if recomputed else hidden._concatenated(reading, ())
        loss = ells[0][:, :-1].sum()
        results.append((loss.detach(), *torch.autograd.grad(loss, hidden.inputs[0])))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def test_under_bfloat16_autocast_the_gradient_is_within_its_noise_of_float64():
    model = tiny_model("mdlm")
    batch = corrupted(model)
    exact = tiny_model("mdlm").double()
    expected = gradients(exact, batch_nelbo(exact.process, predict(exact, exact, batch), batch))
    with torch.autocast("cpu", torch.bfloat16):
        loss = batch_nelbo(model.process, predict(model, model, batch, chunk_size=3), batch)
    found = gradients(model, loss)
    one, other = (torch.cat([g.flatten().double() for g in x.values()]) for x in (found, expected))
    assert (one - other).norm() < 2e-2 * other.norm()
