"""What DriftTrainer takes: any batch, encoder and model; and what it refuses."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, tiny_model
from datasets import Dataset
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from safetensors.torch import load_file
from toys import CHECKPOINTING, assert_same, config, logged, make_trainer, queues_of, toy_rows, weights_of
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    default_data_collator,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from tokendrift_hf import DriftTrainer, FrozenEncoder
from tokendrift_hf.data import DiffusionCollator
from tokendrift_hf.training import refusals
from tokendrift_hf.training.manifest import last_complete_checkpoint
from tokendrift_hf.training.refusals import refuse_sharing

MASK = TINY["vocab_size"] - 1
EXACT = {"rtol": 0, "atol": 0}


# ---- Any batch -----------------------------------------------------------------------------------------


def loss_and_gradients(trainer, batch: dict[str, list]):
    """compute_loss of one batch with empty queues, and the gradient of every parameter."""
    trainer._micro_step = (-1, 0)
    for queue in (trainer.train_objective.real_queue, trainer.train_objective.generated_queue):
        queue.load_state_dict({"features": torch.empty(0, 0)})
    trainer.model.zero_grad()
    inputs = {name: torch.as_tensor(value) for name, value in batch.items()}
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


BATCH_SETTINGS = [
    {"objective": "feature", "base_loss_weight": 0.5},
    {"objective": "mirror_kl"},
    {"feature_pooling": "tokens", "feature_tokens": 3},
]


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
@pytest.mark.parametrize("fields", BATCH_SETTINGS, ids=["feature", "mirror", "tokens"])
def test_padding_counts_for_nothing(kind, fields, tmp_path):
    """Other ids under the padding, and more of it, change neither the loss nor a gradient."""
    trainer = make_trainer(tmp_path, model=tiny_model(kind), **fields)
    ids = torch.tensor([row["input_ids"] for row in toy_rows(3)])
    mask = torch.ones_like(ids)
    mask[0, 5:] = mask[2, 7:] = 0
    loss, gradients = loss_and_gradients(trainer, {"input_ids": ids, "attention_mask": mask})
    other = torch.where(mask.bool(), ids, (ids + 7) % MASK)
    other = F.pad(other, (0, 3), value=1)
    loss_2, gradients_2 = loss_and_gradients(trainer, {"input_ids": other, "attention_mask": F.pad(mask, (0, 3))})
    torch.testing.assert_close(loss_2, loss, rtol=1e-5, atol=1e-6)
    assert_same(gradients_2, gradients, rtol=2e-3, atol=2e-5)
    assert float(loss) > 0 and all(g.isfinite().all() for g in gradients.values())


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_prompts_are_kept_seen_and_never_predicted(kind, tmp_path):
    trainer = make_trainer(tmp_path, model=tiny_model(kind))
    ids = torch.tensor([row["input_ids"] for row in toy_rows(4)])
    prompt = torch.zeros_like(ids)
    prompt[:, :3] = 1
    prompt[3] = 1  # a row with nothing to predict
    batch = trainer._corrupt({"input_ids": ids, "prompt_mask": prompt}, (0, 0), range(4), 4)
    assert torch.equal(batch.x_t[prompt.bool()], ids[prompt.bool()]) and not (batch.predicted & prompt.bool()).any()
    assert batch.predicted.any() and (batch.x_t != ids).any()

    masked = loss_and_gradients(trainer, {"input_ids": ids, "prompt_mask": prompt})
    by_labels = loss_and_gradients(trainer, {"input_ids": ids, "labels": ids.masked_fill(prompt.bool(), -100)})
    assert torch.equal(masked[0], by_labels[0])
    assert_same(masked[1], by_labels[1], **EXACT)
    other_prompt = torch.where(prompt.bool(), (ids + 5) % MASK, ids)
    other = loss_and_gradients(trainer, {"input_ids": other_prompt, "prompt_mask": prompt})
    name = "backbone.output_layer.linear.weight"
    assert not torch.allclose(other[1][name], masked[1][name])


@pytest.mark.parametrize("objective", ["feature", "mirror_kl", "mirror_mse"])
def test_a_batch_with_nothing_to_predict_changes_nothing(objective, tmp_path):
    trainer = make_trainer(tmp_path, objective=objective, base_loss_weight=1.0)
    ids = torch.tensor([row["input_ids"] for row in toy_rows(3)])
    loss, gradients = loss_and_gradients(trainer, {"input_ids": ids, "prompt_mask": torch.ones_like(ids)})
    assert loss.isfinite() and all((g == 0).all() for g in gradients.values())


@pytest.mark.parametrize("objective", ["feature", "mirror_kl"])
def test_activation_checkpointing_gives_the_same_training(objective, tmp_path):
    results = []
    for checkpointing in (False, True):
        trainer = make_trainer(
            tmp_path / str(checkpointing),
            model=tiny_model("mdlm", dropout=0.1),
            objective=objective,
            max_steps=2,
            **{CHECKPOINTING: checkpointing},
        )
        trainer.train()
        assert trainer.model.backbone.blocks[0].gradient_checkpointing == checkpointing
        results.append(weights_of(trainer.model))
    assert_same(*results, rtol=1e-5, atol=1e-6)


# ---- Encoders and models --------------------------------------------------------------------------------


def test_encoders_by_path_model_and_frozen_encoder_are_one(tmp_path):
    """A path, a model and a FrozenEncoder of the same weights give the same training, and another one than default."""
    other = tiny_model("mdlm", seed=5)
    other.save_pretrained(tmp_path / "encoder")
    path = tmp_path / "encoder"
    losses = []
    for encoder in (path, str(path), copy.deepcopy(other), FrozenEncoder.copy_of(other), None):
        trainer = make_trainer(tmp_path / "out", arguments={"encoder": encoder}, max_steps=2)
        trainer.train()
        losses.append(logged(trainer) + logged(trainer, "feature_distance"))
    assert losses[0] == losses[1] == losses[2] == losses[3] != losses[4]


def test_an_encoder_of_another_architecture_without_the_mask(tmp_path):
    """A BERT of the same tokenizer, which lacks the mask; its features drive every parameter."""
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16)
    BertModel(BertConfig(vocab_size=MASK, max_position_embeddings=16, **sizes)).save_pretrained(tmp_path / "bert")
    trainer = make_trainer(tmp_path, arguments={"encoder": tmp_path / "bert"}, feature_layers=[1, 2])
    trainer.train()
    before = weights_of(tiny_model("mdlm"))
    assert not any(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    assert trainer.train_objective.real_queue.features.shape == (6, 32)


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_trains_a_model_that_was_loaded_as_custom_code(kind, tmp_path):
    """The class comes from the checkpoint's own Python files; training is that of the package's class."""
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "model")
    name = type(model).__name__
    custom_class = get_class_from_dynamic_module(f"modeling_tokendrift.{name}", str(tmp_path / "model"))
    assert custom_class.__module__.startswith("transformers_modules") and custom_class is not type(model)
    trainers = [
        make_trainer(tmp_path / "out", model=m, max_steps=2)
        for m in (model, custom_class.from_pretrained(tmp_path / "model"))
    ]
    for trainer in trainers:
        trainer.train()
    assert logged(trainers[0]) == logged(trainers[1])
    assert_same(weights_of(trainers[0].model), weights_of(trainers[1].model), **EXACT)


def test_half_precision_weights_are_warned_about_when_training_starts(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, "tokendrift_hf.training.refusals"):
        make_trainer(tmp_path, max_steps=1).train()
        assert not caplog.records
        trainer = make_trainer(tmp_path, max_steps=1)
        trainer.model.bfloat16()
        trainer.train()
    assert "bfloat16" in caplog.text
    assert "bf16=True" in caplog.text


def test_mixed_precision_keeps_float32_weights_and_learns_the_same(tmp_path):
    """bf16=True: float32 masters, finite, and the loss of the first step within 2 % of float32."""
    trainers = [make_trainer(tmp_path, bf16=bf16, objective="none", base_loss_weight=1.0) for bf16 in (False, True)]
    for trainer in trainers:
        trainer.train()
    assert {p.dtype for p in trainers[1].model.parameters()} == {torch.float32}
    assert logged(trainers[1])[0] == pytest.approx(logged(trainers[0])[0], rel=0.02)


@pytest.mark.parametrize("objective", ["feature", "mirror_kl", "mirror_mse"])
def test_mixed_precision_gradients_point_where_float64_does(objective, tmp_path):
    """Of all weights, through two networks in bf16: their own rounding (0.9 % for the NELBO alone) and little more."""
    gradients = []
    batch = {"input_ids": [row["input_ids"] for row in toy_rows(12)]}
    for bf16 in (False, True):
        trainer = make_trainer(tmp_path, objective=objective, bf16=bf16)
        if bf16:
            trainer.accelerator.prepare_model(trainer.model)
        else:
            trainer.model.double(), trainer.encoder.model.double()
        _, found = loss_and_gradients(trainer, batch)
        gradients.append(torch.cat([g.flatten().double() for g in found.values()]))
    exact, found = gradients
    assert found.isfinite().all() and (found - exact).norm() < 2e-2 * exact.norm()
    assert F.cosine_similarity(found, exact, dim=0) > 0.9998


# ---- Errors -----------------------------------------------------------------------------------------------


class Poison(TrainerCallback):
    def on_step_begin(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                next(model.parameters()).fill_(float("nan"))


def test_nan_stops_with_the_step_and_keeps_the_last_checkpoint(tmp_path):
    trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1, arguments={"callbacks": [Poison()]})
    with pytest.raises(ValueError, match=r"optimizer step 3 is not finite \(nan.*up to step 2"):
        trainer.train()
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-2" and not (tmp_path / "checkpoint-3").exists()
    assert all(w.isfinite().all() for w in load_file(tmp_path / "checkpoint-2/model.safetensors").values())


def test_what_the_trainer_refuses(tmp_path, monkeypatch):
    model, args = tiny_model("mdlm"), config(tmp_path)

    def refused(match, *, model=model, args=args, **arguments):
        with pytest.raises(ValueError, match=match):
            DriftTrainer(model, args, train_dataset=toy_rows(4), **arguments)

    refused("must be a DriftConfig, but it is a dict", args={})
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    refused("GPT2LMHeadModel has no diffusion process", model=gpt2)
    refused("encoder= is the model that is trained", encoder=model)
    refused("encoder= is the model that is trained", encoder=FrozenEncoder(model))
    refused("embeds 30 ids and the model predicts 23", encoder=tiny_model("mdlm", vocab_size=30))
    refused(
        r"feature_layers=\[7\]: this encoder has hidden states 0 .* to 2", args=config(tmp_path, feature_layers=[7])
    )
    refused("encoder='base' needs adapters", encoder="base")
    monkeypatch.setattr(refusals, "is_deepspeed_zero3_enabled", lambda: True)
    refused("ZeRO-3 .* encoder= ")


def test_adapters(tmp_path):
    """LoRA trains the adapters only; encoder='base' gives the training of a frozen copy, without one."""
    lora = LoraConfig(r=2, target_modules=["attn_qkv"], init_lora_weights=False)
    losses = []
    for encoder in (None, "base"):
        torch.manual_seed(0)
        model = tiny_model("mdlm")
        arguments = {"peft_config": lora, "encoder": encoder}
        trainer = make_trainer(tmp_path, model=model, arguments=arguments)
        before = weights_of(trainer.model)
        trainer.train()
        changed = {name for name, value in weights_of(trainer.model).items() if not torch.equal(value, before[name])}
        assert changed and all("lora_" in name for name in changed)
        losses.append(logged(trainer))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for match, arguments, fields in (
        ("already has adapters", {"peft_config": lora}, {}),
        ("cannot be combined with gradient_checkpointing", {"encoder": "base"}, {CHECKPOINTING: True}),
        ("encoder= is the model that is trained", {"encoder": trainer.model.get_base_model()}, {}),
    ):
        with pytest.raises(ValueError, match=match):
            make_trainer(tmp_path, model=trainer.model, arguments=arguments, **fields)


def test_rows_without_ids_or_too_long_stop_the_training(tmp_path):
    for rows, match in (
        ([{"text": "a"}] * 4, "has no column input_ids"),
        (toy_rows(4, length=17), "17 tokens, but the model takes 1 to 16"),
        ([{"input_ids": [1, 99]}] * 4, "run from 1 to 99, but the model knows 0 to 22"),
        ([{"input_ids": [1, MASK]}] * 4, "contains the mask, id 22"),
    ):
        with pytest.raises(ValueError, match=match):
            make_trainer(tmp_path, rows=rows).train()


@pytest.mark.parametrize(
    "match, arguments, fields",
    [
        ("compute_loss_func has no effect", {"compute_loss_func": print}, {}),
        ("compute_metrics has no effect", {"compute_metrics": print}, {}),
        ("preprocess_logits_for_metrics has no effect", {"preprocess_logits_for_metrics": print}, {}),
        ("model_init has no effect", {"model_init": print}, {}),
        ("label_smoothing_factor=0.1 has no effect", {}, {"label_smoothing_factor": 0.1}),
        ("bf16_full_eval=True casts the weights that are trained", {}, {"bf16_full_eval": True}),
        ("fp16_full_eval=True casts .* Set fp16=True", {}, {"fp16_full_eval": True}),
        (
            "metric_for_best_model='accuracy' is not measured: choose one of loss,",
            {},
            {"metric_for_best_model": "accuracy"},
        ),
        (
            "choose one of loss, entropy_nfe4, or pass a callback",
            {},
            {"metric_for_best_model": "eval_gen_ppl_nfe4", "gen_ppl_num_steps": [4]},
        ),
        (
            "choose one of a_loss, b_loss",
            {"eval_dataset": {"a": toy_rows(2), "b": toy_rows(2)}},
            {"metric_for_best_model": "loss"},
        ),
        ("mmd_credit=16 reaches beyond a row, which has 16 tokens", {}, {"objective": "mmd", "mmd_credit": 16}),
        ("alpha_window=17 is longer than a row", {}, {"objective": "alpha", "alpha_window": 17}),
        ("One row a micro-batch and queue_size=0", {}, {"per_device_train_batch_size": 1, "queue_size": 0}),
    ],
)
def test_arguments_without_effect_are_refused(match, arguments, fields, tmp_path):
    with pytest.raises(ValueError, match=match):
        make_trainer(tmp_path, arguments=arguments, **fields)


def test_a_callback_may_measure_what_selects_the_best(tmp_path):
    class Measures(TrainerCallback):
        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            metrics["eval_mine"] = float(state.global_step == 1)

    fields = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "best", "greater_is_better": True}
    arguments = {"callbacks": [Measures()], "eval_dataset": toy_rows(2)}
    trainer = make_trainer(tmp_path, arguments=arguments, metric_for_best_model="mine", **fields)
    trainer.train()
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-1"]
    trainer = make_trainer(tmp_path, arguments=arguments, metric_for_best_model="other", **fields)
    with pytest.raises(ValueError, match="metric_for_best_model='other' was not measured. There are: eval_.*eval_mine"):
        trainer.train()


@pytest.mark.parametrize("container", ["mixed", "injected"])
def test_adapters_that_are_no_peft_model_are_refused(container, tmp_path):
    lora = LoraConfig(r=2, target_modules=["attn_qkv"])
    if container == "mixed":
        model = get_peft_model(tiny_model("mdlm"), lora, mixed=True)
    else:
        model = inject_adapter_in_model(lora, tiny_model("mdlm"))
    with pytest.raises(ValueError, match="has adapters in a .*Use a PeftModel"):
        make_trainer(tmp_path, model=model)


@pytest.mark.parametrize("what", ["model", "block", "inside adapters"])
def test_a_compiled_model_is_trained_and_saved_under_its_own_names(what, tmp_path):
    """torch.compile's wrapper puts `_orig_mod.` into names that nothing can load. Whole models and parts of them."""
    plain, model = tiny_model("mdlm"), tiny_model("mdlm")
    if what == "block":
        model.backbone.blocks[0] = torch.compile(model.backbone.blocks[0])
    else:
        model = torch.compile(model)
    if what == "inside adapters":
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["attn_qkv"]))
    trainer = make_trainer(tmp_path, model=model, max_steps=1, save_strategy="steps", save_steps=1)
    trainer.train()
    for folder in (tmp_path, tmp_path / "checkpoint-1"):
        trainer.save_model(str(folder))
        names = load_file(next(folder.glob("*model.safetensors"))).keys()
        assert not [name for name in names if "_orig_mod" in name]
        assert what == "inside adapters" or names == plain.state_dict().keys()


@pytest.mark.parametrize(
    "count, split, idle",
    [(8, True, False), (9, True, True), (10, True, True), (11, True, False), (8, False, False)]
    + [(9, False, True), (12, False, True), (13, False, False)],
)
def test_an_epoch_that_leaves_a_process_without_rows_is_refused(count, split, idle, tmp_path):
    """Two processes, batches of 4 (2 and 2, or 4 each), not evened out: the other would wait for ever."""
    args = config(tmp_path, accelerator_config={"split_batches": split, "even_batches": False})
    two = SimpleNamespace(**vars(args) | {"world_size": 2, "train_batch_size": args.train_batch_size})
    if idle:
        with pytest.raises(ValueError, match=f"last batch of {count} rows does not reach all 2 processes"):
            refuse_sharing(two, toy_rows(count), queues=True)
    else:
        refuse_sharing(two, toy_rows(count), queues=True)
    refuse_sharing(SimpleNamespace(**vars(two) | {"dataloader_drop_last": True}), toy_rows(count), queues=True)


def test_rows_that_teach_nothing_are_counted_and_named(tmp_path, caplog):
    """Prompts alone: no weight moves, which is said. Padding alone: in no queue. Others are trained on as ever."""
    prompts = toy_rows(4, prompt_mask=lambda ids: [1] * len(ids))
    padding = toy_rows(4, attention_mask=lambda ids: [0] * len(ids), prompt_mask=lambda ids: [0] * len(ids))
    trainer = make_trainer(tmp_path, rows=prompts, max_steps=2, base_loss_weight=1.0)
    before = weights_of(trainer.model)
    with caplog.at_level(logging.WARNING, "tokendrift_hf.training.drift_trainer"):
        trainer.train()
    assert logged(trainer, "rows_without_text") == [4, 4]
    assert "4 rows since the last log line are padding or prompt alone: they teach nothing" in caplog.text
    assert_same(weights_of(trainer.model), before, **EXACT)
    trainer = make_trainer(tmp_path, rows=padding, max_steps=2, base_loss_weight=1.0)
    trainer.train()
    assert logged(trainer, "rows_without_text") == [4, 4]
    assert len(queues_of(trainer)["real"]) == 0
    trainer = make_trainer(tmp_path, max_steps=2)
    trainer.train()
    assert logged(trainer, "rows_without_text") == []


BAD = [
    ({"model": None}, "NoneType has no diffusion process"),
    ({"model": "gpt2"}, "str has no diffusion process"),
    ({"args": {"output_dir": "x"}}, "args must be a DriftConfig, but it is a dict"),
    ({"train_dataset": []}, "train_dataset has no rows"),
    ({"train_dataset": Dataset.from_dict({"text": ["a"]})}, r"columns \['text'\], but no input_ids. Pack the text"),
    ({"train_dataset": {"train": toy_rows(2)}}, "train_dataset is a dict. Needed is a data set"),
    ({"train_dataset": (row for row in toy_rows(2))}, "train_dataset is a generator"),
    ({"train_dataset": 5}, "train_dataset is a int"),
    ({"train_dataset": "rows.jsonl"}, "train_dataset is a str"),
    ({"eval_dataset": []}, "eval_dataset has no rows"),
    ({"eval_dataset": {"a": toy_rows(2), "b": 3}}, r"eval_dataset\['b'\] is a int"),
    ({"encoder": 3}, "The encoder is '3'. Needed is a model of transformers"),
    ({"encoder": ["a"]}, "Needed is a model of transformers"),
    ({"encoder": torch.nn.Linear(2, 2)}, "Needed is a model of transformers"),
    ({"encoder": GPT2LMHeadModel}, "Needed is a model of transformers"),
    ({"peft_config": {"r": 2}}, "peft_config is .*Needed is a configuration of peft"),
    ({"peft_config": "lora"}, "peft_config is 'lora'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda value: str(value)[:40])
def test_arguments_of_another_type_are_refused_at_once(change, message, tmp_path):
    arguments = {"model": tiny_model("mdlm"), "args": config(tmp_path), "train_dataset": toy_rows(4)} | change
    with pytest.raises(ValueError, match=message):
        DriftTrainer(**arguments)


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda rows: rows, "data_collator gave a list. Needed is a dictionary with input_ids"),
        (lambda rows: None, "data_collator gave a NoneType"),
        (
            lambda rows: {"labels": torch.zeros(2, 8)},
            r"data_collator gave \['labels'\] with input_ids of kind NoneType",
        ),
        (lambda rows: {"input_ids": [row["input_ids"] for row in rows]}, "input_ids of kind list"),
        (
            lambda rows: {"input_ids": torch.zeros(2, 8)},
            r"input_ids of kind torch.float32 \[2, 8\]. Needed is a tensor",
        ),
        (lambda rows: {"input_ids": torch.zeros(8, dtype=torch.long)}, r"of kind torch.int64 \[8\]"),
        (lambda rows: {"input_ids": torch.full((2, 8), MASK)}, "contains the mask, id 22.*leave data_collator out"),
        (lambda rows: {"input_ids": torch.ones(1, 8).long()}, "gave 1 rows for 4. Needed is one for each"),
        (lambda rows: {"input_ids": torch.full((2, 8), -100)}, "run from -100 to -100, but the model knows 0 to 22"),
        (
            lambda rows: {"input_ids": torch.ones(2, 8).long(), "prompt_mask": torch.ones(2, 7).long()},
            r"prompt_mask of kind torch.int64 \[2, 7\]",
        ),
    ],
)
@pytest.mark.parametrize("use", ["train", "evaluate"])
def test_what_a_collator_of_the_users_own_gives_is_looked_at(collate, message, use, tmp_path):
    arguments = {"data_collator": collate, "train_dataset": toy_rows(4), "eval_dataset": toy_rows(4)}
    trainer = DriftTrainer(tiny_model("mdlm"), config(tmp_path), **arguments)
    with pytest.raises(ValueError, match=message):
        getattr(trainer, use)()


@pytest.mark.parametrize("use", ["train", "evaluate"])
@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_noise_of_a_collator_is_not_trained_on_as_text(kind, use, tmp_path):
    """DUO has no mask, so its noisy ids look like text. Given when the trainer is made, or set afterwards."""
    model = tiny_model(kind)
    for given in (True, False):
        collate = DiffusionCollator(model.process)
        arguments = {"eval_dataset": toy_rows(4)} | ({"data_collator": collate} if given else {})
        trainer = make_trainer(tmp_path, model=model, arguments=arguments)
        trainer.data_collator = collate
        with pytest.raises(ValueError, match="data_collator gave timesteps.*DriftTrainer needs clean text"):
            getattr(trainer, use)()


def test_no_collator_is_the_packages_own(tmp_path):
    """None is as good as none, and a collator of the user's own stays the trainer's."""
    trainer = make_trainer(tmp_path, arguments={"data_collator": None})
    assert vars(trainer.data_collator) == {"vocab_size": MASK + 1, "max_length": 16, "mask_id": MASK}
    own = make_trainer(tmp_path, arguments={"data_collator": default_data_collator}, max_steps=1)
    own.train()
    assert own.data_collator is default_data_collator


@pytest.mark.parametrize("rows", [toy_rows(4), tuple(toy_rows(4)), Dataset.from_list(toy_rows(4))], ids=type)
def test_rows_of_any_list_or_data_set_are_trained_on(rows, tmp_path):
    make_trainer(tmp_path, rows=rows, max_steps=1).train()


@pytest.mark.parametrize("asked", [3, ["checkpoint-1"], 2.5, b"checkpoint-1"])
def test_a_checkpoint_is_named_by_a_path(asked, tmp_path):
    with pytest.raises(ValueError, match="resume_from_checkpoint is .*Give the folder of a checkpoint, or True"):
        make_trainer(tmp_path).train(resume_from_checkpoint=asked)


@pytest.mark.parametrize("processes, rows", [(1, 4), (2, 8)])
def test_rows_that_fill_no_batch_are_refused_where_it_would_be_dropped(processes, rows, tmp_path):
    """Batches of 4 on every process. Also with epochs, which such a run would count without a step."""
    args = config(tmp_path, dataloader_drop_last=True, max_steps=-1)
    args = SimpleNamespace(**vars(args) | {"world_size": processes, "train_batch_size": args.train_batch_size})
    with pytest.raises(
        ValueError, match=f"has {rows - 1} rows, and one batch of all processes takes {rows}: .*nothing"
    ):
        refuse_sharing(args, toy_rows(rows - 1), queues=True)
    refuse_sharing(args, toy_rows(rows), queues=True)


def test_a_full_batch_alone_is_trained_where_the_rest_is_dropped(tmp_path):
    trainer = make_trainer(tmp_path, rows=toy_rows(7), dataloader_drop_last=True, max_steps=-1, num_train_epochs=2)
    trainer.train()
    assert trainer.state.global_step == 2
    with pytest.raises(ValueError, match="dataloader_drop_last=True would leave them all out"):
        make_trainer(tmp_path, rows=toy_rows(3), dataloader_drop_last=True)
