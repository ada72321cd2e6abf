"""`tokendrift convert`: bare weights, Lightning checkpoints and released directories become model directories."""

from __future__ import annotations

import pickle
import shutil

import pytest
import torch
from conftest import FIXTURES, model_class, recorded, released_directory
from safetensors.torch import load_file, save_file

from tokendrift_hf.cli import main
from tokendrift_hf.models.convert import convert

CHECKPOINTS = ("mdlm_lightning_tiny.ckpt", "mdlm_lightning_tiny_pickled.ckpt")
BIAS = "backbone.blocks.0.mlp.0.bias"


def expected(which: str) -> dict[str, torch.Tensor]:
    """The recorded weights of the Lightning run, "raw" or "ema"."""
    tensors = recorded("mdlm_lightning_tiny_expected")
    return {name.removeprefix(f"{which}."): value for name, value in tensors.items() if name.startswith(f"{which}.")}


def written(path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def assert_same(actual, wanted):
    assert actual.keys() == wanted.keys()
    for name in wanted:
        assert actual[name].equal(wanted[name]), name


@pytest.fixture
def payload():
    """The content of a Lightning checkpoint that holds no foreign object."""
    return torch.load(FIXTURES / CHECKPOINTS[0], weights_only=True)


# Lightning


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("ema", [True, False])
def test_lightning_checkpoint(name, ema, tmp_path):
    """The moving average by default, aligned by parameter order; the raw weights on request; sizes from the file."""
    report = convert(FIXTURES / name, tmp_path / "model", ema=ema)
    assert_same(written(tmp_path / "model"), expected("ema" if ema else "raw"))
    model, info = model_class("mdlm").from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    config = model.config
    assert (config.num_attention_heads, config.num_hidden_layers, config.max_position_embeddings) == (2, 1, 8)
    assert model(torch.zeros(1, 8).long()).logits.isfinite().all()
    assert (report.model, report.num_parameters, report.ema_applied) == ("mdlm", 6876, ema)
    text = str(report)
    assert "epoch 0, step 3" in text and "decay 0.9999, 3 updates" in text and str(tmp_path / "model") in text
    assert ("weights: the moving average" if ema else "weights: raw") in text and "ASSUMED" not in text


def test_the_average_is_not_the_raw_weights():
    """Else the test above would prove nothing."""
    raw, ema = expected("raw"), expected("ema")
    assert [name for name in raw if raw[name].equal(ema[name])] == ["backbone.rotary_emb.inv_freq"]


class Bomb:
    """An object whose unpickling writes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_pickled_code_is_not_run(payload, tmp_path):
    """Neither a call in the pickle nor the import of a class that it names happens."""
    trap = tmp_path / "trap"
    payload["hyper_parameters"]["tokenizer"] = Bomb(trap)
    torch.save(payload, tmp_path / "mdlm.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "mdlm.ckpt", weights_only=True)
    convert(tmp_path / "mdlm.ckpt", tmp_path / "model")
    assert not trap.exists()
    assert_same(written(tmp_path / "model"), expected("ema"))
    torch.load(tmp_path / "mdlm.ckpt", weights_only=False)
    assert trap.exists()  # so the trap works
    assert b"module_that_is_not_installed" in (FIXTURES / CHECKPOINTS[1]).read_bytes()


def test_a_mismatched_average_is_refused(payload, tmp_path):
    shadow = payload["ema"]["shadow_params"]
    payload["ema"]["shadow_params"] = shadow[:-1]
    torch.save(payload, tmp_path / "mdlm.ckpt")
    with pytest.raises(ValueError, match="has 19 tensors, but the network has 20 parameters.*--no-ema"):
        convert(tmp_path / "mdlm.ckpt", tmp_path / "model")
    convert(tmp_path / "mdlm.ckpt", tmp_path / "raw", ema=False)
    assert_same(written(tmp_path / "raw"), expected("raw"))
    payload["ema"]["shadow_params"] = [shadow[1], shadow[0], *shadow[2:]]
    torch.save(payload, tmp_path / "mdlm.ckpt")
    with pytest.raises(ValueError, match=r"its tensor 0 has shape .* but vocab_embed.embedding has \[12, 16\]"):
        convert(tmp_path / "mdlm.ckpt", tmp_path / "model")


@pytest.mark.parametrize("prefix", ["", "backbone.", "backbone.backbone.", "student.backbone."])
def test_any_prefix_and_a_teacher(prefix, payload, tmp_path):
    """Published students come without a prefix, nested ones with two; a teacher's tensors are left out and named."""
    bare = {key.removeprefix("backbone."): value for key, value in payload["state_dict"].items()}
    teacher = {f"teacher.{key}": value + 1 for key, value in bare.items()}
    torch.save({"state_dict": {f"{prefix}{key}": value for key, value in bare.items()} | teacher}, tmp_path / "mdlm.pt")
    report = convert(tmp_path / "mdlm.pt", tmp_path / "model")
    assert_same(written(tmp_path / "model"), expected("raw"))
    assert not report.ema_applied and "left out: 21 tensors of a teacher" in str(report)
    assert "no separate moving average" in str(report)


# Bare weights and directories


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_bare_weights(kind, tmp_path):
    """The sizes follow from the shapes, the model from the name; what had to be assumed is said."""
    report = convert(FIXTURES / f"{kind}_tiny_weights.safetensors", tmp_path / "model")
    assert_same(written(tmp_path / "model"), recorded(f"{kind}_tiny_weights"))
    model = model_class(kind).from_pretrained(tmp_path / "model").eval()
    file = recorded(f"{kind}_tiny_io")
    logits, wanted = model(file["input_ids"]).logits[..., :-1], file["sigma_zero.logits"][..., :-1]
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-6 * float(wanted.abs().max()))
    assert report.model == kind and "by its name" in str(report) and "length ASSUMED as released" in str(report)
    assert model.config.max_position_embeddings == 1024


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_a_config_beside_the_weights_counts(kind, tmp_path):
    released = released_directory(tmp_path / "released", kind)
    (released / "model.safetensors").rename(released / "weights.bin")
    report = convert(released / "weights.bin", tmp_path / "model")
    assert "by the config.json beside it" in str(report) and "ASSUMED" not in str(report)
    assert model_class(kind).from_pretrained(tmp_path / "model").config.max_position_embeddings == 32


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_released_directory(kind, tmp_path):
    report = convert(released_directory(tmp_path / "released", kind), tmp_path / "model")
    assert_same(written(tmp_path / "model"), recorded(f"{kind}_tiny_weights"))
    assert report.model == kind and model_class(kind).from_pretrained(tmp_path / "model").config.hidden_size == 64


def test_which_model_it_is(payload, tmp_path):
    """By request, the hyper-parameters, then the nearest name; MDLM is assumed aloud; other algorithms are refused."""

    def model_of(name, algorithm=None, **kwargs):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        payload["hyper_parameters"]["config"]["algo"] = {"name": algorithm, "time_conditioning": True}
        torch.save(payload, tmp_path / name)
        shutil.rmtree(tmp_path / "model", ignore_errors=True)
        return convert(tmp_path / name, tmp_path / "model", **kwargs).model

    assert model_of("duo-distilled.ckpt") == "duo"
    assert model_of("MDLM/a/last.ckpt") == "mdlm" and model_of("DUO/a/last.ckpt") == "duo"
    assert model_of("mdlm.ckpt", algorithm="duo_base") == "duo"
    assert model_of("mdlm.ckpt", model="duo") == "duo"
    assert model_of("x.ckpt", algorithm="mdlm") == "mdlm"
    assert model_class("mdlm").from_pretrained(tmp_path / "model").config.time_conditioning
    with pytest.raises(ValueError, match="was trained as 'sedd'; only MDLM and DUO"):
        model_of("x.ckpt", algorithm="sedd")
    with pytest.raises(ValueError, match="model='gpt' is unknown"):
        model_of("x.ckpt", model="gpt")
    with pytest.raises(ValueError, match="was asked for, but config.json .* is that of 'duo'"):
        convert(released_directory(tmp_path / "released", "duo"), tmp_path / "x", model="mdlm")


def test_heads_that_cannot_be_seen(tmp_path):
    """Without the rotary buffer heads are 64 wide as released, said aloud; where that cannot be, it is an error."""
    weights = recorded("mdlm_tiny_weights")
    del weights["backbone.rotary_emb.inv_freq"]
    save_file(weights, tmp_path / "mdlm.safetensors")
    assert "heads and length ASSUMED as released" in str(convert(tmp_path / "mdlm.safetensors", tmp_path / "model"))
    weights = expected("raw")
    del weights["backbone.rotary_emb.inv_freq"]
    save_file(weights, tmp_path / "mdlm.safetensors")
    with pytest.raises(ValueError, match="does not show the number of attention heads.*Put a config.json beside"):
        convert(tmp_path / "mdlm.safetensors", tmp_path / "other")


# Errors


@pytest.mark.parametrize("name", [*CHECKPOINTS, "mdlm_tiny_weights.safetensors"])
@pytest.mark.parametrize("size", [0, 50, -500])
def test_damaged_files_are_refused(name, size, tmp_path):
    (tmp_path / name).write_bytes((FIXTURES / name).read_bytes()[:size])
    with pytest.raises(ValueError, match=f"{name} cannot be read .*cut off, still being written"):
        convert(tmp_path / name, tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_other_architectures_are_refused(payload, tmp_path):
    def refused(tensors, message):
        torch.save({"state_dict": tensors}, tmp_path / "mdlm.ckpt")
        with pytest.raises(ValueError, match=message):
            convert(tmp_path / "mdlm.ckpt", tmp_path / "model")
        assert not (tmp_path / "model").exists()

    weights = payload["state_dict"]
    refused({"bert.embeddings.weight": torch.zeros(3)}, r"not an MDLM or DUO checkpoint: .*bert\.embeddings\.weight")
    refused({**weights, "head.weight": torch.zeros(3)}, r"tensors outside 'backbone\.' .*head\.weight")
    refused({**weights, "backbone.extra": torch.zeros(3)}, "extra is not used")
    refused({key: value for key, value in weights.items() if key != BIAS}, r"blocks\.0\.mlp\.0\.bias is missing")
    refused({**weights, BIAS: torch.zeros(3)}, r"blocks\.0\.mlp\.0\.bias has shape \[3\] instead of \[64\]")
    refused({**weights, "b.vocab_embed.embedding": torch.zeros(3)}, r"found are 2 networks \(backbone\., b\.\)")
    with pytest.raises(ValueError, match="no sigma_map.mlp.0.bias: it is a causal or another network"):
        weights = {key: x for key, x in recorded("duo_causal_tiny").items() if key.startswith("backbone.")}
        save_file(weights, tmp_path / "duo_causal.safetensors")
        convert(tmp_path / "duo_causal.safetensors", tmp_path / "model")
    torch.save([torch.zeros(3)], tmp_path / "list.ckpt")
    with pytest.raises(ValueError, match="it holds a list instead of named tensors"):
        convert(tmp_path / "list.ckpt", tmp_path / "model")


def test_sources_and_destinations_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="nowhere.ckpt does not exist"):
        convert(tmp_path / "nowhere.ckpt", tmp_path / "model")
    half = released_directory(tmp_path / "half", "mdlm")
    (half / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json of an MDLM or DUO model; it may be half-written"):
        convert(half, tmp_path / "model")
    with pytest.raises(ValueError, match="half exists and is not an empty directory"):
        convert(FIXTURES / CHECKPOINTS[0], half)
    (tmp_path / "empty").mkdir()
    convert(FIXTURES / CHECKPOINTS[0], tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "half"]  # nothing temporary is left


def test_the_command(tmp_path, capsys):
    """`tokendrift convert SRC DST [--no-ema]` prints the report; an error is one line on stderr and a status."""
    arguments = ["convert", str(FIXTURES / CHECKPOINTS[1]), str(tmp_path / "model"), "--no-ema"]
    assert main(arguments) == 0
    assert "weights: raw, not the moving average (decay 0.9999, 3 updates)" in capsys.readouterr().out
    assert_same(written(tmp_path / "model"), expected("raw"))
    assert main(arguments) != 0
    assert "is not an empty directory" in capsys.readouterr().err
