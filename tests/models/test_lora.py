"""Refinement through adapters: what is trained, what a checkpoint holds, and how others load it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from conftest import run_python, tiny_model
from safetensors.torch import load_file, save_file
from toys import assert_same, make_trainer, weights_of

from tokendrift_hf import FrozenEncoder, MDLMConfig, MDLMForMaskedLM
from tokendrift_hf.models.loading import load_model
from tokendrift_hf.models.lora import TARGETS, lora_config

KINDS = ("mdlm", "duo")
INPUTS = {"input_ids": torch.arange(16)[None], "timesteps": torch.tensor([0.5])}


def saved_base(folder: Path, kind: str = "mdlm"):
    """A tiny model, loaded from the directory where it was saved."""
    tiny_model(kind).save_pretrained(folder / "base")
    return load_model(str(folder / "base"))


def refined(folder: Path, model, lora=None, **fields):
    """A trainer after three steps on adapters of the model."""
    trainer = make_trainer(folder / "run", model=model, arguments={"peft_config": lora or lora_config(r=2)}, **fields)
    trainer.train()
    return trainer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", TARGETS)
def test_targets_are_the_projections_and_never_the_time_conditioning(kind, targets):
    wrapped = peft.get_peft_model(tiny_model(kind), lora_config(targets))
    block = ["attn_out", "attn_qkv"] + (["mlp.0", "mlp.2"] if targets == "linear" else [])
    expected = {f"backbone.blocks.{n}.{name}" for n in (0, 1) for name in block}
    expected |= {"backbone.output_layer.linear"} if targets == "linear" else set()
    assert set(wrapped.base_model.targeted_module_names) == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("targets", TARGETS)
def test_only_adapters_are_trained_and_saved(kind, targets, tmp_path):
    """After training the base is the same bit for bit, every adapter has moved, and the checkpoint holds them alone."""
    trainer = refined(tmp_path, saved_base(tmp_path, kind), lora_config(targets, r=2))
    after = weights_of(trainer.model)
    base = {name.replace(".base_layer", ""): value for name, value in after.items() if "lora_" not in name}
    before = {f"base_model.model.{name}": value for name, value in weights_of(tiny_model(kind)).items()}
    assert_same(base, before, rtol=0, atol=0)
    assert all(value.any() for name, value in after.items() if "lora_B" in name), "an adapter is still at its start"
    assert {name for name, p in trainer.model.named_parameters() if p.requires_grad} == after.keys() - {
        name for name in after if "lora_" not in name
    }
    trainer.save_model()
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= files
    assert not files & {"model.safetensors", "config.json"}
    saved = load_file(tmp_path / "run" / "adapter_model.safetensors")
    assert all("lora_" in name for name in saved) and len(saved) == sum("lora_" in name for name in after)


def test_adapters_of_the_released_size_are_a_few_megabytes():
    """At 170 M parameters: 1.8 MB for attention, 6.4 MB for all linear layers, against 679 MB."""
    megabytes = {}
    for targets in TARGETS:
        with torch.device("meta"):
            wrapped = peft.get_peft_model(MDLMForMaskedLM(MDLMConfig()), lora_config(targets), low_cpu_mem_usage=True)
        megabytes[targets] = sum(p.numel() for name, p in wrapped.named_parameters() if "lora_" in name) * 4 / 1e6
    assert megabytes["attention"] == pytest.approx(1.8, abs=0.1)
    assert megabytes["linear"] == pytest.approx(6.4, abs=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_shared_base_gives_the_features_and_gradients_of_a_copy(kind):
    copy = FrozenEncoder(tiny_model(kind))
    student = peft.get_peft_model(tiny_model(kind), lora_config("linear", init_lora_weights=False)).train()
    assert not torch.equal(student(**INPUTS).logits, copy.model(**INPUTS).logits)
    features, gradients = [], []
    for encoder in (copy, FrozenEncoder.without_adapters(student)):
        torch.manual_seed(1)
        embeddings = torch.randn(3, 16, 32, requires_grad=True)
        h = encoder(embeddings)
        (h * torch.randn(h.shape)).sum().backward()
        features.append(h.detach())
        gradients.append(embeddings.grad)
        assert encoder.embedding.equal(copy.embedding)
    assert features[0].equal(features[1]) and gradients[0].equal(gradients[1])
    assert all(p.grad is None for p in student.parameters()), "the encoder's pass reached a weight"


def test_training_with_the_shared_base_is_training_with_a_copy(tmp_path):
    """Bit for bit, three steps of AdamW with both objectives."""
    for objective in ("feature", "mirror_kl"):
        weights = []
        for encoder in ("base", None):
            torch.manual_seed(len(weights))  # of no consequence: adapters start from the seed of the run
            arguments = {"peft_config": lora_config("linear", r=2), "encoder": encoder}
            fields = {"objective": objective, "optim": "adamw_torch", "learning_rate": 1e-2}
            trainer = make_trainer(tmp_path / "run", model=tiny_model("mdlm"), arguments=arguments, **fields)
            trainer.train()
            assert (trainer.encoder.model is trainer.model) == (encoder == "base")
            weights.append(weights_of(trainer.model))
        assert_same(*weights, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("message", "dropout", "options", "fields"),
    [
        ("dropout=0.1", 0.1, {}, {}),
        ("lora_dropout", 0.0, {"lora_dropout": 0.1}, {}),
        ("gradient_checkpointing", 0.0, {}, {"gradient_checkpointing": True}),
    ],
)
def test_shared_base_is_refused_where_it_would_be_wrong(message, dropout, options, fields, tmp_path):
    arguments = {"peft_config": lora_config(**options), "encoder": "base"}
    with pytest.raises(ValueError, match=message):
        make_trainer(tmp_path, model=tiny_model("mdlm", dropout=dropout), arguments=arguments, **fields)


@pytest.mark.parametrize("wrapped_before", [False, True])
def test_a_shared_base_whose_biases_are_trained_is_refused(wrapped_before, tmp_path):
    model, config = tiny_model("mdlm"), lora_config("attention", bias="all")
    if wrapped_before:
        model, config = peft.get_peft_model(model, config), None
    with pytest.raises(ValueError, match=r"would not stay frozen: .*blocks\.0\.mlp\.0\.bias"):
        make_trainer(tmp_path, model=model, arguments={"peft_config": config, "encoder": "base"})


@pytest.mark.parametrize("name", ["norm1.weight", "vocab_embed.embedding", "sigma_map.mlp.0.weight"])
def test_a_shared_base_of_which_any_other_weight_is_trained_is_refused(name, tmp_path):
    """By what reaches the features, and not by a list of names."""
    model = peft.get_peft_model(tiny_model("mdlm"), lora_config("attention"))
    for full_name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or full_name.endswith(name))
    with pytest.raises(ValueError, match="would not stay frozen"):
        make_trainer(tmp_path, model=model, arguments={"encoder": "base"})


def test_a_shared_base_whose_weights_the_adapters_changed_is_refused(tmp_path):
    """PiSSA moves the largest part of every weight into the adapter."""
    arguments = {"peft_config": lora_config("attention", init_lora_weights="pissa"), "encoder": "base"}
    with pytest.raises(ValueError, match=r"Features differ by 0\.\d+ of their norm, .* leave encoder out"):
        make_trainer(tmp_path, arguments=arguments)


def test_weights_above_the_features_may_be_trained_beside_a_shared_base(tmp_path):
    """Biases of the last block do not reach the features of the first."""
    model = peft.get_peft_model(tiny_model("mdlm"), lora_config("attention"))
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or "blocks.1.mlp" in name)
    make_trainer(tmp_path, model=model, arguments={"encoder": "base"}, feature_layers=[1]).train()


def test_a_trained_copy_of_the_embedding_table_does_not_reach_the_shared_base(tmp_path):
    """modules_to_save trains a copy of the table; the encoder keeps reading the base's own."""
    weights = []
    for encoder in ("base", None):
        arguments = {"peft_config": lora_config("attention", modules_to_save=["vocab_embed"]), "encoder": encoder}
        fields = {"optim": "adamw_torch", "learning_rate": 1e-2}
        trainer = make_trainer(tmp_path / "run", model=tiny_model("mdlm"), arguments=arguments, **fields)
        before = trainer.encoder.embedding.clone()
        trainer.train()
        assert torch.equal(trainer.encoder.embedding, before)
        weights.append(weights_of(trainer.model))
    moved = [name for name in weights[0] if "modules_to_save" in name]
    assert moved and not torch.equal(weights[0][moved[0]], before)
    assert_same(*weights, rtol=0, atol=0)


def test_dropout_acts_on_the_student_and_not_on_the_encoder(tmp_path):
    lora = {"peft_config": lora_config(lora_dropout=0.2)}
    trainer = make_trainer(tmp_path, model=tiny_model("mdlm", dropout=0.2), arguments=lora)
    trainer.model.train()
    embeddings = torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(0))
    assert trainer.encoder(embeddings).equal(trainer.encoder(embeddings))
    assert not trainer.model(**INPUTS).logits.equal(trainer.model(**INPUTS).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_text_through_adapters_equals_text_of_the_merged_model(kind, tmp_path):
    trainer = refined(tmp_path, saved_base(tmp_path, kind), lora_config("linear", r=2))
    draw = {"num_samples": 4, "num_steps": 8, "seed": 0}
    ids = trainer.model.generate(**draw)
    assert not ids.equal(tiny_model(kind).generate(**draw)), "the adapters do nothing"
    trainer.save_model()
    assert load_model(str(tmp_path / "run")).generate(**draw).equal(ids)
    assert trainer.model.merge_and_unload().generate(**draw).equal(ids)


def test_others_load_adapters_and_merged_models_offline(tmp_path):
    """In a process without this package or a network: both ways of peft, the merged model, and no base, no model."""
    trainer = refined(tmp_path, saved_base(tmp_path))
    trainer.save_model()
    config = json.loads((tmp_path / "run/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert config["task_type"] == "FEATURE_EXTRACTION"
    trainer.model.eval()
    save_file({"logits": trainer.model(**INPUTS).logits.detach()}, tmp_path / "expected.safetensors")
    trainer.model.merge_and_unload().save_pretrained(tmp_path / "merged")
    user = peft.LoraConfig(r=2, target_modules=["attn_qkv"], init_lora_weights=False)
    own = make_trainer(tmp_path / "own", model=load_model(str(tmp_path / "base")), arguments={"peft_config": user})
    own.save_model()
    assert user.task_type is None, "the user's own configuration is left alone"
    save_file({"logits": own.model.eval()(**INPUTS).logits.detach()}, tmp_path / "own.safetensors")
    shutil.copytree(tmp_path / "run", tmp_path / "orphan")
    (tmp_path / "orphan/adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": str(tmp_path / "gone")})
    )
    code = f"""
        from peft import AutoPeftModelForFeatureExtraction, PeftModel
        from safetensors.torch import load_file
        from transformers import AutoModel
        folder = {str(tmp_path)!r}
        inputs = {{"input_ids": torch.arange(16)[None], "timesteps": torch.tensor([0.5])}}
        expected = load_file(folder + "/expected.safetensors")["logits"]
        auto = AutoPeftModelForFeatureExtraction.from_pretrained(folder + "/run", trust_remote_code=True)
        own = AutoPeftModelForFeatureExtraction.from_pretrained(folder + "/own", trust_remote_code=True)
        assert torch.equal(own.eval()(**inputs).logits, load_file(folder + "/own.safetensors")["logits"])
        base = AutoModel.from_pretrained(folder + "/base", trust_remote_code=True)
        assert not torch.allclose(base(**inputs).logits, expected)
        by_hand = PeftModel.from_pretrained(base, folder + "/run")
        merged = AutoModel.from_pretrained(folder + "/merged", trust_remote_code=True)
        for model in (auto, by_hand):
            assert torch.equal(model.eval()(**inputs).logits, expected)
        torch.testing.assert_close(merged(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
        draw = dict(num_samples=2, num_steps=4, seed=0)
        assert auto.generate(**draw).equal(merged.generate(**draw))
        try:
            AutoPeftModelForFeatureExtraction.from_pretrained(folder + "/orphan", trust_remote_code=True)
        except (OSError, ValueError) as error:
            assert "gone" in str(error)
        else:
            raise AssertionError("a missing base was replaced by something")
    """
    run_python(code, tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="adapters for the base model .*gone.* cannot be loaded"):
        load_model(str(tmp_path / "orphan"))


def test_resumed_adapters_equal_uninterrupted_ones(tmp_path):
    """Weights, moving average and losses of a run that was stopped after two of four steps, bit for bit."""
    fields = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "ema_decay": 0.9, "optim": "adamw_torch"}
    whole = refined(tmp_path / "whole", saved_base(tmp_path), **fields)
    resumed = make_trainer(
        tmp_path / "resumed",
        model=load_model(str(tmp_path / "base")),
        arguments={"peft_config": lora_config(r=2)},
        **fields,
    )
    checkpoint = tmp_path / "whole/run/checkpoint-2"
    assert not (checkpoint / "model.safetensors").exists() and (checkpoint / "adapter_model.safetensors").exists()
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert_same(weights_of(resumed.model), weights_of(whole.model), rtol=0, atol=0)
    assert_same(resumed.ema.shadow, whole.ema.shadow, rtol=0, atol=0)
    assert all("lora_" in name for name in whole.ema.shadow), "the average covers the adapters alone"
    resumed.save_model()
    saved = load_file(tmp_path / "resumed/adapter_model.safetensors")
    assert_same(saved, {name.replace(".default", ""): value for name, value in resumed.ema.shadow.items()})


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"use_rslora": True, "rank_pattern": {"attn_out": 1}}, {"lora_dropout": 0.1}]
)
def test_other_fields_of_peft_pass_through(options, tmp_path):
    trainer = refined(tmp_path, saved_base(tmp_path), lora_config(r=2, alpha=6, **options))
    trainer.save_model()
    written = json.loads((tmp_path / "run/adapter_config.json").read_text())
    for name, value in ({"r": 2, "lora_alpha": 6} | options).items():
        assert written[name] == value
    weights = weights_of(trainer.model)
    ranks = {value.shape[0] for name, value in weights.items() if "attn_out.lora_A" in name}
    assert ranks == ({1} if "rank_pattern" in options else {2})
    assert any("lora_magnitude" in name for name in weights) == ("use_dora" in options)


def test_wrong_settings_are_refused(tmp_path):
    with pytest.raises(ValueError, match="targets='everything' is not known"):
        lora_config("everything")
    with pytest.raises(ValueError, match="unexpected keyword argument 'rnk'"):
        lora_config(rnk=3)
    for options in ({"rank_pattern": 3}, {"modules_to_save": 3}):
        with pytest.raises(ValueError, match="peft cannot make these adapters, since a setting of LoRA is wrong: "):
            refined(tmp_path, saved_base(tmp_path), lora_config(**options))
    wrapped = peft.get_peft_model(tiny_model("mdlm"), lora_config())
    with pytest.raises(ValueError, match="already has adapters"):
        make_trainer(tmp_path, model=wrapped, arguments={"peft_config": lora_config()})
    trainer = refined(tmp_path, saved_base(tmp_path))
    trainer.save_model()
    tiny_model("mdlm", hidden_size=16).save_pretrained(tmp_path / "base")
    with pytest.raises(ValueError, match="do not fit MDLMForMaskedLM"):
        load_model(str(tmp_path / "run"))
