"""Model folders of strangers: whatever a file holds, loading gives a model or one line that names the folder."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
from conftest import released_directory, tiny_model
from peft import get_peft_model
from stand_ins import masked_lm, tiny_tokenizer
from toys import word_tokenizer

from tokendrift_hf.models.convert import convert
from tokendrift_hf.models.loading import load_encoder, load_model, load_tokenizer
from tokendrift_hf.models.lora import lora_config


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A released model, a tokenizer, and adapters of the model, each in a folder of its own."""
    folder = tmp_path_factory.mktemp("files")
    base = released_directory(folder / "model", "mdlm")
    word_tokenizer(bos_token="<s>", eos_token="</s>").save_pretrained(folder / "tokenizer")
    get_peft_model(load_model(str(base)), lora_config(r=2)).save_pretrained(folder / "adapters")
    return folder


@pytest.fixture
def folder(shared, tmp_path):
    return shutil.copytree(shared, tmp_path / "copy")


def change(path, fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def safetensors(header, body: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


WEIGHTS = {
    "empty": b"",
    "short": b"\0" * 4,
    "a header of 2^60 bytes": struct.pack("<Q", 2**60) + b"{}",
    "a list": safetensors([1]),
    "no JSON": safetensors(b"abc"),
    "behind the end": safetensors({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}),
    "before the start": safetensors({"x": {"dtype": "F32", "shape": [4], "data_offsets": [-4, 12]}}, b"\0" * 16),
    "an unknown type": safetensors({"x": {"dtype": "EVIL", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 4),
    "2^80 numbers": safetensors({"x": {"dtype": "F32", "shape": [2**40] * 2, "data_offsets": [0, 4]}}, b"\0" * 4),
}


@pytest.mark.parametrize("content", WEIGHTS.values(), ids=WEIGHTS)
def test_weights(folder, content):
    (folder / "model/model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read"):
        load_model(str(folder / "model"))
    (folder / "adapters/adapter_model.safetensors").write_bytes(content)
    change(folder / "adapters/adapter_config.json", {"base_model_name_or_path": str(folder.parent / "base")})
    released_directory(folder.parent / "base", "mdlm")
    with pytest.raises(ValueError, match="The adapters in .* do not fit"):
        load_model(str(folder / "adapters"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quantization_config": "x"}, "The files in .* cannot be read"),
        ({"quantization_config": {"quant_method": "gptq"}}, "The files in .* cannot be read"),
        ({"id2label": 3}, "The files in .* cannot be read"),
        ({"num_labels": "x"}, "The files in .* cannot be read"),
        ({"_attn_implementation": "evil/kernel"}, "names code of the hub as its attention"),
        ({"attn_implementation": "evil/kernel:attend"}, "names code of the hub as its attention"),
    ],
    ids=str,
)
def test_configurations(folder, fields, message):
    change(folder / "model/config.json", fields)
    with pytest.raises(ValueError, match=message):
        load_model(str(folder / "model"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "config.json of .* has no model_type, .* Copy it again"),
        ('{"hidden_size": 8}', "config.json of .* has no model_type"),
        ('{"model_type": null}', "config.json of .* has model_type=None"),
        ('{"model_type": ["bert"]}', r"config.json of .* has model_type=\['bert'\]"),
        (None, "There is no config.json in"),
    ],
)
def test_a_config_json_that_is_not_there_and_one_without_a_model_type(folder, content, message):
    (folder / "model/config.json").unlink()
    if content is not None:
        (folder / "model/config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        load_model(str(folder / "model"))


def test_weights_that_are_missing(folder):
    (folder / "model/model.safetensors").unlink()
    for read in (load_model, load_encoder):
        with pytest.raises(ValueError, match="model' lacks weights: there is no model.safetensors. Copy it"):
            read(str(folder / "model"))


@pytest.mark.parametrize("family", ["ours", "bert"])
def test_a_shard_that_is_missing(family, tmp_path):
    model = masked_lm("bert") if family == "bert" else tiny_model("mdlm")
    model.save_pretrained(tmp_path, max_shard_size="10kB")
    tiny_tokenizer().save_pretrained(tmp_path)
    load_model(str(tmp_path))
    name = sorted(tmp_path.glob("model-*.safetensors"))[1].name
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"The folder .* lacks weights: there is no {name}. Copy it again"):
        load_model(str(tmp_path))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text()[:100])
    with pytest.raises(ValueError, match="index.json cannot be read as JSON .* cut off"):
        load_model(str(tmp_path))


def test_weights_of_adapters_that_are_missing(folder):
    change(folder / "adapters/adapter_config.json", {"base_model_name_or_path": str(folder / "model")})
    (folder / "adapters/adapter_model.safetensors").unlink()
    with pytest.raises(ValueError, match="adapters lacks adapter_model.safetensors, .* Copy it again"):
        load_model(str(folder / "adapters"))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_file_of_a_tokenizer_that_is_cut_off(folder, name):
    path = folder / "tokenizer" / name
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=f"tokenizer in .* cannot be read: .*{name} cannot be .* cut off"):
        load_tokenizer(str(folder / "tokenizer"))


@pytest.mark.parametrize(
    "index",
    [
        [1],
        {},
        {"weight_map": ["a"]},
        {"weight_map": {"a": 3}},
        {"weight_map": {"a": "/etc/passwd"}},
        {"metadata": {}, "weight_map": {"a": "/etc/passwd"}},
        {"metadata": {}, "weight_map": {"a": "missing.safetensors"}},
        {"metadata": 3, "weight_map": {}},
    ],
    ids=str,
)
def test_indices_of_weights(folder, index):
    (folder / "model/model.safetensors").unlink()
    (folder / "model/model.safetensors.index.json").write_text(json.dumps(index))
    for read in (load_model, lambda name: convert(name, str(folder / "converted"))):
        with pytest.raises((ValueError, OSError), match="cannot be read|safetensors|/etc/passwd"):
            read(str(folder / "model"))
    assert not (folder / "converted").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", ""),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", "null"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer.json", '{"version": "9"}'),
        ("tokenizer.json", '{"version": "1.0", "model": {"type": "EVIL"}}'),
        ("tokenizer.json", '{"added_tokens": [{"id": 1000000000000000000, "content": "x"}], "model": {"vocab": {}}}'),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '"x"'),
        ("tokenizer_config.json", '{"tokenizer_class": ["x"]}'),
        ("tokenizer_config.json", '{"bos_token": 3}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": 1}}'),
    ],
    ids=lambda text: text[:30],
)
def test_tokenizers(folder, name, content):
    (folder / "tokenizer" / name).write_text(content)
    with pytest.raises(ValueError, match="(The|no) tokenizer in .*(cannot be read|Name one)"):
        load_tokenizer(str(folder / "tokenizer"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"target_modules": "(("}, "do not fit"),
        ({"target_modules": 3}, "do not fit"),
        ({"peft_type": "EVIL"}, "do not fit"),
        ({"r": "2"}, "do not fit"),
        ({"rank_pattern": [1]}, "do not fit"),
        ({"lora_alpha": float("nan")}, "lora_alpha=nan: no weight survives"),
        ({"base_model_name_or_path": "/etc/passwd"}, "cannot be loaded"),
        ({"base_model_name_or_path": "http://169.254.169.254/x"}, "cannot be loaded"),
    ],
    ids=str,
)
def test_adapters(folder, shared, fields, message):
    change(folder / "adapters/adapter_config.json", {"base_model_name_or_path": str(shared / "model")} | fields)
    with pytest.raises(ValueError, match=message):
        load_model(str(folder / "adapters"))
