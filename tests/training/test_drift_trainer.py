"""DriftTrainer against Algorithm 1 written out slowly, and the promises that it makes to its users."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, tiny_model
from datasets import Dataset
from reference import double_loop
from safetensors.torch import load_file
from toys import assert_same, logged, make_trainer, toy_rows, uneven_rows, weights_of
from transformers import Trainer

from tokendrift_hf import DriftConfig, DriftTrainer, MDLMForMaskedLM
from tokendrift_hf.data.collators import CleanCollator
from tokendrift_hf.objective import drift_objective, predictions
from tokendrift_hf.objective.drift import DriftField
from tokendrift_hf.objective.noise import EVALUATE, TRAIN, row_noise
from tokendrift_hf.publishing.upload import files_to_publish

MASK = TINY["vocab_size"] - 1
EXACT = {"rtol": 0, "atol": 0}


class Recording(CleanCollator):
    """Keeps the batches in the order in which the trainer asked for them."""

    def __call__(self, rows):
        batch = super().__call__(rows)
        self.batches = getattr(self, "batches", []) + [batch]
        return batch


# ---- Algorithm 1, written out -----------------------------------------------------------------------


def slow_corrupt(x_0, key, vocab_size, masked, num_rows):
    """t [B] and x_t [B, L], position by position."""
    B, L = x_0.shape
    noise = row_noise(key, range(B), L, vocab_size)
    t = [1e-3 + 0.999 * (((float(noise.time[i]) + i) / num_rows) % 1) for i in range(B)]
    x_t = x_0.clone()
    for i in range(B):
        for pos in range(L):
            if float(noise.uniforms[i, pos]) < (1 - 1e-3) * t[i]:
                x_t[i, pos] = vocab_size - 1 if masked else noise.random_tokens[i, pos]
    return torch.tensor(t, dtype=torch.float32), x_t, noise.order


def slow_features(encoder, embeds, order, args: DriftConfig):
    times = torch.full((len(embeds),), args.encoder_timestep)
    states = encoder(inputs_embeds=embeds, timesteps=times, output_hidden_states=True).hidden_states
    x = torch.cat([states[layer] for layer in args.feature_layers], dim=-1)
    if args.feature_pooling == "tokens":
        places = [score.argsort()[-args.feature_tokens :].flip(0) for score in order]
        x = torch.stack([row[place] for row, places in zip(x, places, strict=True) for place in places])
    else:
        x = x.mean(1)
    return F.normalize(x, dim=-1)


def slow_training(model, batches, args: DriftConfig):
    """Losses a step, and the two queues at the end; `model` is trained in place."""
    encoder, masked = copy.deepcopy(model).eval(), model.process.mask_id is not None
    E = encoder.backbone.vocab_embed.embedding.detach()
    real, generated, losses = [], [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=args.learning_rate)
    model.train()
    for step in range(args.max_steps):
        losses.append(0.0)
        for micro in range(args.gradient_accumulation_steps):
            x_0 = batches.pop(0)["input_ids"]
            B, L = x_0.shape
            t, x_t, order = slow_corrupt(x_0, (args.seed, TRAIN, step, micro), len(E), masked, B)
            logits = model(input_ids=x_t, timesteps=t).logits
            predicted = x_t == MASK if masked else torch.ones_like(x_t, dtype=torch.bool)
            p = logits.softmax(-1)
            if args.encoder_input == "hard_st":
                p = F.one_hot(logits.argmax(-1), len(E)) + p - p.detach()
            lifted = torch.stack(
                [
                    torch.stack([p[i, pos] @ E if predicted[i, pos] else E[x_t[i, pos]] for pos in range(L)])
                    for i in range(B)
                ]
            )
            h, u = slow_features(encoder, lifted, order, args), slow_features(encoder, E[x_0], order, args).detach()
            references = torch.stack([*u, *real]), torch.stack([*h.detach(), *generated])
            weights = {"attraction": args.attraction, "repulsion": args.repulsion, "kernel": args.drift_kernel}
            V, _, _ = double_loop(h, *references, args.temperatures, torch.arange(len(h)), **weights)
            if args.objective == "feature":
                loss = 0.5 * (h - (h + args.drift_scale * V.float()).detach()).square().sum(1).mean()
            else:
                (g,) = torch.autograd.grad((h * V.float()).sum(), logits, retain_graph=True)
                mean = (p * g).sum(-1, keepdim=True)
                deviation = (p * (g - mean) ** 2).sum(-1)[predicted].mean().sqrt().detach()
                eta = args.mirror_step_size * V.square().sum(1).mean().sqrt().float() / deviation
                if args.mirror_eta is not None:
                    eta = args.mirror_eta
                ell = logits.double()
                gap = (ell - (ell + eta * g).detach()).square()
                p_star = (ell + eta * g).softmax(-1).detach()
                divergence = p_star * (p_star.clamp_min(1e-300).log() - ell.log_softmax(-1))
                distance = gap if args.objective == "mirror_mse" else divergence.where(p_star > 0, 0)
                loss = distance.sum(-1)[predicted].sum() / B
            if args.base_loss_weight:
                loss = loss + args.base_loss_weight * model(input_ids=x_t, timesteps=t, labels=x_0).loss
            (loss / args.gradient_accumulation_steps).backward()
            losses[-1] += loss.item() / args.gradient_accumulation_steps
            real, generated = (
                (held + list(x))[max(0, len(held) + len(x) - args.queue_size) :]
                for held, x in ((real, u), (generated, h.detach()))
            )
        optimizer.step()
        optimizer.zero_grad()
    return losses, *(torch.stack(held) if held else torch.empty(0, h.shape[1]) for held in (real, generated))


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("mdlm", {"gradient_accumulation_steps": 2, "drift_scale": 0.7}),
        ("duo", {"max_steps": 2, "attraction": 2.0}),
        ("mdlm", {"max_steps": 2, "encoder_input": "hard_st", "repulsion": 2.0}),
        ("duo", {"objective": "mirror_mse", "max_steps": 2, "learning_rate": 0.05}),
        ("mdlm", {"objective": "mirror_kl", "base_loss_weight": 0.5, "max_steps": 2, "learning_rate": 0.1}),
        ("mdlm", {"objective": "mirror_kl", "mirror_eta": 30.0, "max_steps": 2, "learning_rate": 0.1}),
        ("mdlm", {"feature_pooling": "tokens", "feature_tokens": 3, "queue_size": 20, "max_steps": 2}),
        ("mdlm", {"queue_size": 0, "drift_kernel": "drifting", "temperatures": [0.1, 0.5]}),
        ("duo", {"queue_size": 64, "feature_layers": [1], "encoder_timestep": 0.4, "max_steps": 2}),
    ],
    ids="feature duo hard mirror_mse mirror_with_base_loss mirror_raw_eta tokens no_queue other_features".split(),
)
def test_training_is_algorithm_1(kind, fields, tmp_path):
    """Same losses, weights and queues as the algorithm written out; the encoder and its weights stay out of it."""
    start, model = tiny_model(kind), tiny_model(kind)
    collator = Recording(TINY["vocab_size"], 16)
    trainer = make_trainer(tmp_path, model=model, rows=toy_rows(24), arguments={"data_collator": collator}, **fields)
    encoder = weights_of(trainer.encoder.model)
    trainer.train()
    losses, real, generated = slow_training(start, collator.batches, trainer.args)
    assert logged(trainer) == pytest.approx(losses, rel=1e-4)
    assert_same(weights_of(model), weights_of(start), rtol=1e-3, atol=2e-5)
    torch.testing.assert_close(trainer.train_objective.real_queue.features, real, rtol=0, atol=1e-5)
    torch.testing.assert_close(trainer.train_objective.generated_queue.features, generated, rtol=0, atol=1e-4)
    before = weights_of(tiny_model(kind))
    unchanged = [name for name, p in model.named_parameters() if torch.equal(p, before[name])]
    assert not unchanged, "every parameter is trained"
    assert_same(weights_of(trainer.encoder.model), encoder, **EXACT)


@pytest.mark.parametrize("given", ["default", "model", "path"])
def test_the_encoder_is_neither_trained_nor_saved(given, tmp_path):
    """Not in the optimizer, in a checkpoint, in the final save and what a push takes from it; its weights stay."""
    other = tiny_model("mdlm", seed=5)
    other.save_pretrained(tmp_path / "other")
    encoder = {"default": None, "model": other, "path": tmp_path / "other"}[given]
    out = tmp_path / "out"
    trainer = make_trainer(
        out, arguments={"encoder": encoder}, save_strategy="steps", save_steps=3, optim="adamw_torch"
    )
    frozen = trainer.encoder.model
    before = weights_of(frozen)
    assert given == "default" or torch.equal(
        before["backbone.vocab_embed.embedding"], other.get_input_embeddings().weight
    )
    trainer.train()
    trainer.save_model()
    trained = {id(p) for group in trainer.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in trainer.model.parameters()}
    assert not any(id(p) in trained or p.requires_grad or p.grad is not None for p in frozen.parameters())
    assert not frozen.training and not any(module is frozen for module in trainer.model.modules())
    assert_same(weights_of(frozen), before, **EXACT)
    for folder in (out, out / "checkpoint-3"):
        stored = [path.name for path in folder.rglob("*.safetensors") if path.parent == folder]
        assert set(stored) - {"drift_queues.safetensors"} == {"model.safetensors"}
        assert load_file(folder / "model.safetensors").keys() == trainer.model.state_dict().keys()
    moments = torch.load(out / "checkpoint-3/optimizer.pt", weights_only=True)["state"]
    assert len(moments) == len(list(trainer.model.parameters()))
    assert {name for name in files_to_publish(out) if "." in name and not name.endswith((".py", ".json"))} == {
        "README.md",
        "model.safetensors",
        "training_args.bin",
    }


def test_continuation_is_a_plain_trainer_on_the_nelbo(tmp_path):
    """objective none: the weights of `transformers.Trainer` on the model's own loss, given the same noise."""
    ours = make_trainer(tmp_path / "ours", objective="none", base_loss_weight=1.0)
    assert ours.encoder is None
    ours.train()

    class Corrupting(CleanCollator):
        step = 0

        def __call__(self, rows):
            x_0 = super().__call__(rows)["input_ids"]
            t, x_t, _ = slow_corrupt(x_0, (ours.args.seed, TRAIN, self.step, 0), MASK + 1, True, len(x_0))
            self.step += 1
            return {"input_ids": x_t, "timesteps": t, "labels": x_0}

    plain = make_trainer(
        tmp_path / "plain",
        trainer_class=Trainer,
        arguments={"data_collator": Corrupting(TINY["vocab_size"], 16)},
        objective="none",
        base_loss_weight=1.0,
    )
    plain.train()
    assert logged(ours) == pytest.approx(logged(plain), rel=1e-5)
    assert_same(weights_of(ours.model), weights_of(plain.model), rtol=1e-4, atol=1e-6)


def concatenated(things):
    """One out of many: tensors, data classes of them, or something else that has to be equal in all or to be left."""
    if isinstance(things[0], torch.Tensor):
        return torch.cat(things)
    if not dataclasses.is_dataclass(things[0]):
        return things[0]
    return type(things[0])(
        **{f.name: concatenated([getattr(x, f.name) for x in things]) for f in dataclasses.fields(things[0])}
    )


def cut(rows: list[dict], lengths: list[int]) -> list[dict]:
    """The rows cut to these lengths, in turn."""
    return [{name: values[: lengths[i % len(lengths)]] for name, values in row.items()} for i, row in enumerate(rows)]


def prompt_of_two(ids: list[int]) -> list[int]:
    return [1, 1] + [0] * (len(ids) - 2)


SHAPES = {
    "plain": toy_rows(8),
    "labels": toy_rows(8, labels=list),
    "lengths 16 and 3": cut(toy_rows(8, length=16), [16, 3]),
    "prompts": cut(toy_rows(8, length=16, prompt_mask=prompt_of_two), [5, 16, 3]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("objective", ["none", "feature"])
def test_accumulated_gradients_are_those_of_the_whole_batch(objective, shape, tmp_path, monkeypatch):
    """1 x 8 against 8 x 1 rows with SGD: same step, same logged loss. The field, which couples the rows of a
    micro-batch, is replaced by one that does not, and the noise by one that belongs to a row's text."""
    original, forward = DriftTrainer._corrupt, MDLMForMaskedLM.forward
    rows = SHAPES[shape]
    index = {tuple(row["input_ids"]): i for i, row in enumerate(rows)}

    def corrupt_by_text(self, inputs, key, own_rows, num_rows):
        parts = []
        for i, text in enumerate(inputs["input_ids"]):
            text = text[inputs["attention_mask"][i].bool()] if "attention_mask" in inputs else text
            at = index[tuple(text.tolist())]
            row = {name: value[i : i + 1] for name, value in inputs.items()}
            parts.append(original(self, row, (0,), range(at, at + 1), None))
        return concatenated(parts)

    def pull_to_a_point(h, real, generated, *, temperatures, **settings):
        return DriftField(torch.ones_like(h) / 8 - h, h.new_ones(len(temperatures)), h.new_ones(len(temperatures)))

    # A forward that takes anything makes the Trainer believe that the loss is divided by its count of labels.
    monkeypatch.setattr(MDLMForMaskedLM, "forward", lambda self, **kwargs: forward(self, **kwargs))
    monkeypatch.setattr(DriftTrainer, "_corrupt", corrupt_by_text)
    monkeypatch.setattr(drift_objective, "unchecked_drift_field", pull_to_a_point)
    results = []
    for batch_size, accumulation in ((8, 1), (1, 8)):
        trainer = make_trainer(
            tmp_path / str(batch_size),
            rows=rows,
            objective=objective,
            base_loss_weight=float(objective == "none"),
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
            max_steps=1,
        )
        trainer.train()
        results.append((weights_of(trainer.model), logged(trainer)[0], logged(trainer, "grad_norm")[0]))
    (whole, loss, norm), (parts, loss_of_parts, norm_of_parts) = results
    start = weights_of(tiny_model("mdlm"))
    assert max((whole[name] - start[name]).abs().max() for name in start) > 1e-3
    assert_same(parts, whole, rtol=1e-5, atol=1e-5)
    assert loss_of_parts == pytest.approx(loss, rel=1e-5)
    assert norm_of_parts == pytest.approx(norm, rel=1e-4)
    if objective == "none":
        assert logged(trainer, "base_loss")[0] == pytest.approx(loss, rel=1e-5)


def test_the_log_shows_progress_while_the_loss_stays(tmp_path):
    """The normalised loss hardly moves; what is logged beside it does, and is there under the documented names."""
    trainer = make_trainer(
        tmp_path,
        rows=toy_rows(64),
        max_steps=50,
        per_device_train_batch_size=16,
        optim="adamw_torch",
        learning_rate=5e-3,
        logging_steps=5,
        queue_size=64,
        drift_kernel="drifting",
    )
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name in ("drift_norm", "effective_references"):
        assert {f"{name}_{tau}" for tau in ("0.02", "0.05", "0.2")} <= entries[0].keys()
    assert {"feature_distance", "token_entropy", "queue_fill"} <= entries[0].keys()
    assert entries[-1]["queue_fill"] == 64
    first, last = entries[0], entries[-1]
    assert last["feature_distance"] < 0.7 * first["feature_distance"]
    losses = [entry["loss"] for entry in entries]
    assert all(0.3 < loss <= 0.5 + 1e-4 for loss in losses) and abs(losses[-1] - losses[0]) < 0.1 * losses[0]


# ---- Evaluation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_eval_loss_is_the_nelbo_per_token_whatever_the_batch_size(kind, tmp_path):
    """Against the NELBO row by row; rows of unequal length, so that a mean of batch means would depend on batches."""
    rows, model = uneven_rows(7), tiny_model(kind)
    losses = []
    for batch_size in (1, 3, 8):
        trainer = make_trainer(tmp_path, model=model, per_device_eval_batch_size=batch_size)
        losses.append(trainer.evaluate(rows)["eval_loss"])
    total, count = 0.0, 0
    for i, row in enumerate(rows):
        x_0 = torch.tensor([row["input_ids"]])
        noise = row_noise((trainer.args.seed, EVALUATE), range(i, i + 1), x_0.shape[1], TINY["vocab_size"])
        t = torch.tensor([1e-3 + 0.999 * (i * 0.6180339887498949 % 1)])
        x_t = model.process.corrupt(x_0, t, noise.uniforms, noise.random_tokens)
        with torch.no_grad():
            total += float(model(input_ids=x_t, timesteps=t, labels=x_0).loss) * x_0.shape[1]
        count += x_0.shape[1]
    assert losses == pytest.approx([total / count] * 3, rel=1e-5)
    assert trainer.evaluate({"a": rows[:3], "b": rows})["eval_b_loss"] == pytest.approx(losses[0], rel=1e-5)


def test_evaluation_has_few_logits_at_a_time(tmp_path, monkeypatch):
    """Only those of a chunk of predicted positions exist at a time; the loss is the same."""
    trainer, seen = make_trainer(tmp_path, per_device_eval_batch_size=8), []
    whole = trainer.evaluate(uneven_rows(7))["eval_loss"]
    head = MDLMForMaskedLM.logits

    def watched(self, hidden, c):
        logits = head(self, hidden, c)
        seen.append(logits.numel())
        return logits

    monkeypatch.setattr(MDLMForMaskedLM, "logits", watched)
    monkeypatch.setitem(predictions.LOGITS_AT_A_TIME, "cpu", 3 * TINY["vocab_size"])
    assert trainer.evaluate(uneven_rows(7))["eval_loss"] == pytest.approx(whole, rel=1e-6)
    assert len(seen) > 1
    assert max(seen) == 3 * TINY["vocab_size"]


def test_a_stream_is_evaluated_like_its_rows(tmp_path):
    stream = Dataset.from_list(uneven_rows(5)).to_iterable_dataset()
    trainer = make_trainer(tmp_path, per_device_eval_batch_size=2)
    assert trainer.evaluate(stream)["eval_loss"] == trainer.evaluate(uneven_rows(5))["eval_loss"]


@pytest.mark.parametrize("rows, match", [(0, "The 0 rows of held-out"), (3, "The 3 rows .* no token to predict")])
def test_nothing_to_evaluate_is_said(rows, match, tmp_path):
    prompts = toy_rows(rows, prompt_mask=lambda ids: [1] * len(ids))
    with pytest.raises(ValueError, match=match):
        make_trainer(tmp_path).evaluate(prompts)


def test_evaluation_and_sampling_leave_the_training_as_it_was(tmp_path):
    """Dropout draws from the global generator: with and without evaluation the weights are the same, bit for bit."""
    results = []
    guard = {"gen_ppl_num_steps": [2], "gen_ppl_num_samples": 3, "gen_ppl_min_entropy_ratio": 0.01}
    for extra in ({}, {"eval_strategy": "steps", "eval_steps": 1} | guard):
        trainer = make_trainer(
            tmp_path / str(len(extra)),
            model=tiny_model("mdlm", dropout=0.2),
            arguments={"eval_dataset": toy_rows(5)},
            ema_decay=0.9,
            **extra,
        )
        trainer.train()
        results.append((weights_of(trainer.model), logged(trainer), trainer.train_objective.real_queue.features))
    assert logged(trainer, "eval_loss") and logged(trainer, "eval_entropy_nfe2")
    assert_same(results[0][0], results[1][0], **EXACT)
    assert results[0][1] == results[1][1] and torch.equal(results[0][2], results[1][2])
