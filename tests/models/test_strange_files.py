"""Model folders of strangers: whatever a file holds, loading gives a model or one line that names the folder."""

from __future__ import annotations

import json
import shutil
import struct

import pytest
from conftest import released_directory
from peft import get_peft_model
from toys import word_tokenizer

from tokendrift_hf.models.convert import convert
from tokendrift_hf.models.loading import load_model, load_tokenizer
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
