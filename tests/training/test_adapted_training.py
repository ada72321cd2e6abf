"""DriftTrainer on adapted models: the slow twin of a step, every objective, adapters, resuming, saving."""

from __future__ import annotations

import copy
import json

import pytest
import torch
import torch.nn.functional as F
from reference import double_loop
from stand_ins import CLS, MASK, SEP, SPECIAL, V, masked_lm, text_rows, tiny_config, tiny_tokenizer
from toys import CHECKPOINTING, assert_same, logged, make_trainer, queues_of, weights_of
from transformers import BertForMaskedLM, Qwen3ForCausalLM, Trainer

from tokendrift_hf import DriftTrainer, as_diffusion
from tokendrift_hf.models.adaptation import ADAPTATION
from tokendrift_hf.models.loading import load_model
from tokendrift_hf.models.lora import lora_config
from tokendrift_hf.objective.noise import TRAIN, row_noise
from tokendrift_hf.objective.objectives import OBJECTIVES

EXACT = {"rtol": 0, "atol": 0}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ALL_OBJECTIVES = ["none", *sorted(OBJECTIVES)]


def bert(seed: int = 0, **changes):
    return as_diffusion(masked_lm("bert", seed, **NO_DROPOUT | changes), **SPECIAL)


def trainer_of(folder, model=None, rows=None, objective: str = "feature", **fields):
    fields = {"learning_rate": 0.1, "base_loss_weight": 1.0 if objective == "none" else 0.5} | fields
    rows = text_rows(12) if rows is None else rows
    return make_trainer(folder, model=bert() if model is None else model, rows=rows, objective=objective, **fields)


def slow_loss(own, x_0, noise, args):
    """The feature loss and the NELBO of one batch from the family's own model and its own hidden states, by loops."""
    B, L = x_0.shape
    encoder = copy.deepcopy(own).eval().requires_grad_(False)
    E = encoder.bert.embeddings.word_embeddings.weight
    t = [1e-3 + 0.999 * (((float(noise.time[i]) + i) / B) % 1) for i in range(B)]
    x_t = x_0.clone()
    for i in range(B):
        for pos in range(L):
            if x_0[i, pos] not in (CLS, SEP) and float(noise.uniforms[i, pos]) < (1 - 1e-3) * t[i]:
                x_t[i, pos] = MASK
    log_p = own(input_ids=x_t).logits[..., MASK + 1 :].log_softmax(-1)
    lifted = [
        [log_p[i, pos].exp() @ E[MASK + 1 :] if x_t[i, pos] == MASK else E[x_t[i, pos]] for pos in range(L)]
        for i in range(B)
    ]

    def features(embeds):
        states = encoder.bert(inputs_embeds=embeds, output_hidden_states=True).hidden_states
        return F.normalize(torch.cat([states[-2], states[-1]], -1).mean(1), dim=-1)

    h, u = features(torch.stack([torch.stack(row) for row in lifted])), features(E[x_0])
    V_field, _, _ = double_loop(h, u, h.detach(), args.temperatures, torch.arange(B))
    drift = 0.5 * (h - (h + args.drift_scale * V_field).detach()).square().sum(1).mean()
    nelbo = sum(
        -log_p[i, pos, x_0[i, pos] - MASK - 1] / t[i] for i in range(B) for pos in range(L) if x_t[i, pos] == MASK
    )
    return drift + args.base_loss_weight * nelbo / (B * (L - 2))


def test_loss_and_gradients_of_a_step_are_the_slow_twins(tmp_path):
    own = masked_lm("bert", **NO_DROPOUT).double()
    model = as_diffusion(copy.deepcopy(own), **SPECIAL)
    trainer = trainer_of(tmp_path, model, drift_scale=0.7, queue_size=0)
    batch = trainer.data_collator(text_rows(4))
    loss = trainer.compute_loss(trainer.model.train(), batch)
    loss.backward()
    noise = row_noise((trainer.args.seed, TRAIN, 0, 0), range(4), 12, V)
    expected = slow_loss(own.train(), batch["input_ids"], noise, trainer.args)
    expected.backward()
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, theirs.grad, rtol=1e-4, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("objective", ALL_OBJECTIVES)
def test_every_objective_trains_all_weights(objective, tmp_path):
    trainer = trainer_of(tmp_path, objective=objective, max_steps=2)
    before = weights_of(trainer.model)
    trainer.train()
    assert all(torch.isfinite(torch.tensor(logged(trainer))))
    same = [name for name, value in weights_of(trainer.model).items() if value.equal(before[name])]
    assert all(name.endswith("key.bias") for name in same), same  # which moves all scores of a query alike


def test_continuation_is_a_plain_trainer_on_the_familys_own_logits(tmp_path):
    """objective none: SGD on the NELBO, computed here from the family's model."""
    own = masked_lm("bert", **NO_DROPOUT)
    trainer = trainer_of(tmp_path, objective="none", max_steps=1, rows=text_rows(4))
    trainer.train()
    batches = list(trainer.get_train_dataloader())
    assert len(batches) == 1
    x_0 = batches[0]["input_ids"]
    noise = row_noise((trainer.args.seed, TRAIN, 0, 0), range(4), 12, V)
    t = (1e-3 + 0.999 * (((noise.time + torch.arange(4)) / 4) % 1)).float()
    masked = (noise.uniforms < (1 - 1e-3) * t[:, None]) & (x_0 > SEP)
    logits = own(input_ids=x_0.masked_fill(masked, MASK)).logits[..., MASK + 1 :]
    nll = F.cross_entropy(logits.flatten(0, 1), (x_0 - MASK - 1).clamp_min(0).flatten(), reduction="none").view(4, 12)
    ((nll / t[:, None])[masked].sum() / 40).backward()
    with torch.no_grad():
        for parameter in own.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    assert_same(weights_of(trainer.model), weights_of(own), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", ["bert", "roberta", "modernbert", "distilbert", "esm"])
def test_every_family_refines(model_type, tmp_path):
    model = as_diffusion(masked_lm(model_type), **SPECIAL)
    trainer = trainer_of(tmp_path, model, max_steps=2, feature_pooling="tokens", feature_tokens=3)
    trainer.train()
    assert len(logged(trainer)) == 2 and all(torch.isfinite(torch.tensor(logged(trainer))))
    assert trainer.evaluate(text_rows(3))["eval_loss"] > 0


@pytest.mark.parametrize("objective", ["none", "feature", "mirror_kl"])
@pytest.mark.parametrize("targets", ["attention", "linear"])
def test_adapters_train_on_the_base_as_encoder(objective, targets, tmp_path):
    """The base's weights stay, and the encoder is the base with the adapters off: no second copy."""
    arguments = {"peft_config": lora_config(targets, r=2)}
    arguments |= {} if objective == "none" else {"encoder": "base"}
    trainer = trainer_of(tmp_path, objective=objective, arguments=arguments, max_steps=2)
    before = weights_of(trainer.model)
    trainer.train()
    changed = {name for name, value in weights_of(trainer.model).items() if not value.equal(before[name])}
    assert changed and all("lora_" in name for name in changed)
    projections = {name.partition(".lora_")[0].rpartition("layer.")[2][2:] for name in changed if "layer" in name}
    attention = {"attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"}
    assert projections == attention | ({"intermediate.dense", "output.dense"} if targets == "linear" else set())
    if objective != "none":
        assert trainer.encoder.model is trainer.model


def test_the_shared_encoder_gives_what_a_copy_gives(tmp_path):
    def run(encoder):
        arguments = {"peft_config": lora_config(r=2), "encoder": encoder}
        trainer = trainer_of(tmp_path / str(encoder), arguments=arguments, max_steps=2)
        trainer.train()
        return logged(trainer), {name: x for name, x in weights_of(trainer.model).items() if "lora_" in name}

    (loss, shared), (other_loss, copied) = run("base"), run(None)
    assert loss == pytest.approx(other_loss, rel=1e-5)
    assert_same(shared, copied, rtol=1e-4, atol=1e-6)


def test_dropout_is_refused_where_the_base_is_the_encoder(tmp_path):
    model = as_diffusion(masked_lm("bert"), **SPECIAL)
    arguments = {"peft_config": lora_config(r=2), "encoder": "base"}
    with pytest.raises(ValueError, match="whose dropout would reach the encoder.*hidden_dropout_prob=0.1"):
        trainer_of(tmp_path, model, arguments=arguments)


def test_adapters_on_a_head_that_shares_the_embeddings_weights_are_refused(tmp_path):
    from peft import LoraConfig

    arguments = {"peft_config": LoraConfig(target_modules=["query", "decoder"])}
    with pytest.raises(ValueError, match="reaches the head of BertForMaskedLM, which shares the embedding's weights"):
        trainer_of(tmp_path, arguments=arguments)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    results = []
    for checkpointing in (False, True):
        trainer = trainer_of(tmp_path / str(checkpointing), max_steps=2, **{CHECKPOINTING: checkpointing})
        trainer.train()
        results.append((logged(trainer), weights_of(trainer.model)))
    assert results[0][0] == results[1][0]
    assert_same(results[0][1], results[1][1], **EXACT)


def test_a_resumed_run_is_the_uninterrupted_one(tmp_path):
    """With dropout, queues and averages."""
    fields = {"max_steps": 4, "save_steps": 2, "save_strategy": "steps", "ema_decay": 0.9}

    def fresh(name):
        return trainer_of(tmp_path / name, bert(hidden_dropout_prob=0.1), **fields)

    whole = fresh("whole")
    whole.train()
    resumed = fresh("resumed")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert_same(weights_of(resumed.model), weights_of(whole.model), **EXACT)
    assert_same(queues_of(resumed), queues_of(whole), **EXACT)
    assert_same(resumed.ema.state_dict(), whole.ema.state_dict(), **EXACT)


def test_what_is_saved_loads_without_a_word(tmp_path):
    """By the family's class, and by us with all that the adapter was told and the settings of generate()."""
    model = bert(seed=3)
    model.generation_config.num_steps = 3
    trainer = trainer_of(tmp_path / "run", model, max_steps=1, arguments={"processing_class": tiny_tokenizer()})
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    plain = BertForMaskedLM.from_pretrained(tmp_path / "saved").eval()
    loaded = load_model(str(tmp_path / "saved"))
    assert loaded.adaptation == model.adaptation and loaded.generation_config.num_steps == 3
    ids = torch.tensor([[CLS, 5, MASK, 9, SEP]])
    with torch.no_grad():
        expected = model.eval()(input_ids=ids).logits
        assert loaded.eval()(input_ids=ids).logits.equal(expected)
        assert plain(input_ids=ids).logits[..., MASK + 1 :].equal(expected[..., MASK + 1 :])
    assert as_diffusion(plain).adaptation == model.adaptation, "diffusion.json is read beside the weights"


def test_adapters_that_are_saved_load_without_a_word(tmp_path):
    base = bert(seed=3)
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    (tmp_path / "base" / ADAPTATION).unlink()  # as a hub checkpoint that nobody adapted before
    model = load_model(str(tmp_path / "base"), max_length=12)
    model.config.hidden_dropout_prob = model.config.attention_probs_dropout_prob = 0.0
    trainer = trainer_of(tmp_path / "run", model, max_steps=2, arguments={"peft_config": lora_config(r=2)})
    trainer.train()
    trainer.save_model(str(tmp_path / "adapters"))
    assert json.loads((tmp_path / "adapters" / ADAPTATION).read_text())["max_length"] == 12
    loaded = load_model(str(tmp_path / "adapters"))
    assert loaded.adaptation == model.adaptation
    ids = torch.tensor([[CLS, 5, MASK, 9, SEP]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)


def test_a_family_that_was_not_adapted_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"BertForMaskedLM has no diffusion process.*as_diffusion\(model"):
        trainer_of(tmp_path, masked_lm("bert"))


def test_prompts_are_kept_and_never_predicted(tmp_path):
    rows = [row | {"prompt_mask": [1] * 5 + [0] * 7} for row in text_rows(8)]
    trainer = trainer_of(tmp_path, rows=rows, max_steps=1)
    batch = trainer.data_collator(rows[:4])
    corrupted = trainer._corrupt(batch, (0, 0, 0, 0), range(4), 4)
    assert corrupted.x_t[:, :5].equal(batch["input_ids"][:, :5])
    assert corrupted.predicted[:, 5:-1].any() and not corrupted.predicted[:, -1].any()
    trainer.train()


def test_a_plain_trainer_continues_an_adapted_model(tmp_path):
    """`labels`, `timesteps` and x_t from the collator, and the loss of the model: a baseline without this trainer."""
    from transformers import TrainingArguments

    from tokendrift_hf.data import DiffusionCollator

    model = bert()
    arguments = TrainingArguments(str(tmp_path), max_steps=2, use_cpu=True, report_to="none", save_strategy="no")
    arguments.remove_unused_columns = False
    trainer = Trainer(model, arguments, DiffusionCollator(model.process), train_dataset=text_rows(8))
    assert trainer.train().training_loss > 0
    assert isinstance(trainer, Trainer) and not isinstance(trainer, DriftTrainer)


def topics(count: int, seed: int) -> list[dict]:
    """Rows of 12 tokens of one of four topics with five words each: 1.61 nats a token for whoever knows the topic."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(5, (count, 12), generator=generator)
    topic = torch.randint(4, (count, 1), generator=generator)
    return [{"input_ids": row.tolist()} for row in words + 5 * topic]


@pytest.mark.parametrize("model_type", ["bert", "qwen3"])
def test_a_fresh_model_learns_and_then_refines(model_type, tmp_path):
    """From 3.2 nats a token, which is knowing nothing, to below 2; MDLM of this size comes to 1.8 in as many steps."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    if model_type == "bert":
        model = BertForMaskedLM(tiny_config("bert", **size, intermediate_size=128, **NO_DROPOUT))
    else:
        size |= {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 85, "is_causal": False}
        model = Qwen3ForCausalLM(tiny_config("qwen3", **size))
    model = as_diffusion(model, mask_token_id=V - 1)
    fields = {"optim": "adamw_torch", "per_device_train_batch_size": 16, "logging_steps": 40}
    arguments = {"eval_dataset": topics(64, seed=1)}

    def continued(**more):
        trainer = trainer_of(tmp_path, model, topics(256, seed=0), arguments=arguments, **fields | more)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        return before, trainer.evaluate()["eval_loss"]

    start, learned = continued(objective="none", learning_rate=3e-3, max_steps=160, warmup_steps=10)
    assert start == pytest.approx(3.2, abs=0.05)
    assert learned < 2.0
    _, refined = continued(learning_rate=3e-5, max_steps=5, base_loss_weight=0.1, queue_size=64)
    assert refined == pytest.approx(learned, abs=0.05)
