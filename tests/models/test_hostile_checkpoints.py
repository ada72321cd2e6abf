"""Checkpoints made to do harm, in every container: nothing of them runs, and torch is afterwards what it was."""

from __future__ import annotations

import collections
import io
import json
import pickle
import shutil
import warnings
import zipfile

import pytest
import torch
from conftest import FIXTURES, released_directory
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendrift_hf.models.archive import load_archive
from tokendrift_hf.models.convert import convert
from tokendrift_hf.models.loading import load_encoder, load_model
from tokendrift_hf.models.pickles import Foreign, PickleReader

CHECKPOINT = FIXTURES / "mdlm_lightning_tiny.ckpt"
SEEDED = settings(derandomize=True, deadline=None, database=None)


def fingerprint() -> dict:
    """What a pickle could change in the modules that it can name: their names, and every function's attributes."""
    modules = {m.__name__: m for m in (torch, torch._utils, torch.serialization, torch.storage, collections, pickle)}
    state = {}
    for module, holder in modules.items():
        for name, value in vars(holder).items():
            if name == "__warningregistry__":  # Python's own, once a warning was raised there
                continue
            state[module, name] = id(value)
            if hasattr(value, "__code__"):
                inside = (value.__code__, value.__defaults__, value.__kwdefaults__, value.__globals__)
                state[module, name, "inside"] = (*map(id, inside), dict(vars(value)))
    return state


@pytest.fixture(autouse=True)
def torch_is_left_alone():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = fingerprint()
        yield
        assert fingerprint() == before


class Canary:
    """An object whose unpickling calls `open(path, "w")`."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


class Stateful:
    """An object whose `__setstate__`, found by name in this module, writes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __setstate__(self, state):
        open(state["path"], "w").close()


def global_(module: str, name: str) -> bytes:
    return f"c{module}\n{name}\n".encode()


def text(value) -> bytes:
    data = str(value).encode()
    return b"X" + len(data).to_bytes(4, "little") + data


def pickles(canary) -> dict[str, bytes]:
    """Pickles that write the canary, or change torch, as soon as an ordinary reader reads them."""
    arguments = b"(" + text(canary) + text("w") + b"t"
    inner = pickle.dumps(Canary(canary))
    inner_bytes = b"B" + len(inner).to_bytes(4, "little") + inner
    attribute = b"}" + text("canary") + b"I1\ns"  # {"canary": 1}
    rebuild = global_("torch._utils", "_rebuild_tensor_v2")
    return {
        "REDUCE": b"\x80\x02" + global_("io", "open") + arguments + b"R.",
        "REDUCE by STACK_GLOBAL": b"\x80\x04" + text("io") + text("open") + b"\x93" + arguments + b"R.",
        "OBJ": b"(" + global_("io", "FileIO") + text(canary) + text("w") + b"o.",
        "INST": b"(" + text(canary) + text("w") + b"iio\nFileIO\n.",
        "NEWOBJ": b"\x80\x02" + global_("pathlib", "Path") + b")\x81.",
        "BUILD of an object": pickle.dumps(Stateful(canary), protocol=2),
        "BUILD of a function": b"\x80\x02" + rebuild + attribute + b"b.",
        "BUILD of a function's slots": b"\x80\x02" + rebuild + b"N}" + text("__defaults__") + b"Nsb\x86b.",
        "BUILD of slots": b"\x80\x02" + rebuild + b"N}" + text("__defaults__") + b"Ns\x86b.",
        "BUILD of a class": b"\x80\x02" + global_("collections", "Counter") + attribute + b"b.",
        "a pickle in a pickle": b"\x80\x03" + global_("pickle", "loads") + inner_bytes + b"\x85R.",
        "torch.jit in a pickle": b"\x80\x02" + global_("torch.jit", "load") + text(canary) + b"\x85R.",
        "an extension": b"\x80\x02\x82\x01.",
    }  # fmt: skip


NAMES = list(pickles("x"))


def zipped(data: bytes, path, more=()):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
        for name, content in more:
            archive.writestr(name, content)
    return path


def as_payload(data: bytes) -> bytes:
    """{"state_dict": {}, "hyper_parameters": <that pickle>}: where a stranger would put it."""
    body = data[2:] if data.startswith(b"\x80") else data
    return b"\x80\x04}(" + text("state_dict") + b"}" + text("hyper_parameters") + body[:-1] + b"u."


def refused(source, folder):
    """`convert` says no (there are no weights), and leaves nothing."""
    with pytest.raises(ValueError, match=str(source.name)):
        convert(source, folder / "model")
    assert not (folder / "model").exists()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", [bytes, as_payload], ids=["as the whole", "in a payload"])
def test_nothing_of_a_hostile_pickle_runs(name, place, tmp_path):
    canary = tmp_path / "canary"
    refused(zipped(place(pickles(canary)[name]), tmp_path / "mdlm.ckpt"), tmp_path)
    assert not canary.exists()


@pytest.mark.parametrize("name", [*NAMES[:4], "BUILD of an object", "a pickle in a pickle"])
def test_the_canaries_sing(name, tmp_path):
    """An ordinary reader runs these pickles, so the test above can fail."""
    pickle.loads(pickles(tmp_path / "canary")[name])
    assert (tmp_path / "canary").exists()


def test_weights_beside_a_hostile_object_are_converted_and_the_object_stays_asleep(tmp_path):
    payload = torch.load(CHECKPOINT, weights_only=True)
    payload["hyper_parameters"] |= {"tokenizer": Canary(tmp_path / "canary"), "x": Stateful(tmp_path / "canary")}
    payload["callbacks"] = [Canary(tmp_path / "canary")]
    torch.save(payload, tmp_path / "mdlm.ckpt")
    assert convert(tmp_path / "mdlm.ckpt", tmp_path / "model").ema_applied
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("ending", ["ckpt", "pt", "bin", "safetensors"])
def test_a_legacy_file_is_refused_unread(ending, tmp_path):
    payload = {"state_dict": {"a": torch.zeros(1)}, "x": Canary(tmp_path / "canary")}
    torch.save(payload, tmp_path / f"mdlm.{ending}", _use_new_zipfile_serialization=False)
    refused(tmp_path / f"mdlm.{ending}", tmp_path)
    assert not (tmp_path / "canary").exists()
    torch.load(io.BytesIO((tmp_path / f"mdlm.{ending}").read_bytes()), weights_only=False)
    assert (tmp_path / "canary").exists()


def test_a_legacy_pickle_with_an_archive_behind_it_is_refused(tmp_path):
    """A file that is one thing to one reader and another to the next."""
    torch.save({"x": Canary(tmp_path / "canary")}, tmp_path / "front", _use_new_zipfile_serialization=False)
    shutil.copy(CHECKPOINT, tmp_path / "back")
    (tmp_path / "mdlm.ckpt").write_bytes((tmp_path / "front").read_bytes() + (tmp_path / "back").read_bytes())
    refused(tmp_path / "mdlm.ckpt", tmp_path)
    assert not (tmp_path / "canary").exists()


class Program(torch.nn.Module):
    """Compiled, it writes a file whenever it is loaded."""

    def __init__(self, path: str):
        super().__init__()
        self.x, self.path = torch.zeros(1), path

    def forward(self):
        return self.x

    @torch.jit.export
    def __getstate__(self):
        return (self.x, self.path, self.training)

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, str, bool]):
        self.x = state[0]
        self.path = state[1]
        self.training = state[2]
        torch.ops.aten.save(state[0], state[1])


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A TorchScript archive whose `__setstate__` writes a file when it is loaded, and that file's path."""
    folder = tmp_path_factory.mktemp("script")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(Program(str(folder / "canary"))), folder / "script.pt")
    return folder / "script.pt", folder / "canary"


def test_a_torchscript_archive_is_refused_before_its_program_runs(script, tmp_path):
    path, canary = script
    canary.unlink(missing_ok=True)
    shutil.copy(path, tmp_path / "mdlm.ckpt")
    with pytest.raises(ValueError, match="TorchScript archive, which holds a program"):
        convert(tmp_path / "mdlm.ckpt", tmp_path / "model")
    assert not canary.exists()
    torch.jit.load(path)
    assert canary.exists(), "the program is not one that runs"


@pytest.mark.parametrize("marker", ["constants.pkl", "code/__torch__.py"])
def test_either_mark_of_torchscript_is_enough(script, marker, tmp_path):
    data = pickle.dumps({"state_dict": {}}, protocol=2)
    zipped(data, tmp_path / "mdlm.ckpt", [(f"archive/{marker}", b"\x80\x02).")])
    with pytest.raises(ValueError, match="TorchScript"):
        convert(tmp_path / "mdlm.ckpt", tmp_path / "model")


def test_an_archive_in_an_archive_is_only_bytes(script, tmp_path):
    path, canary = script
    canary.unlink(missing_ok=True)
    as_tensor = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    payload = {"state_dict": {}, "x": path.read_bytes(), "y": as_tensor}
    torch.save(payload, tmp_path / "mdlm.ckpt")
    refused(tmp_path / "mdlm.ckpt", tmp_path)
    assert not canary.exists()


def damaged(change, path):
    """The tiny Lightning checkpoint with its pickle or one of its other files changed."""
    with zipfile.ZipFile(CHECKPOINT) as source, zipfile.ZipFile(path, "w") as target:
        for info in source.infolist():
            name, content, kind = change(info.filename, source.read(info))
            if name is not None:
                target.writestr(name, content, kind)
    return path


def without(ending):
    return lambda name, data: (None if name.endswith(ending) else name, data, STORED)


STORED = zipfile.ZIP_STORED
CHANGES = {
    "compressed": (lambda name, data: (name, data, zipfile.ZIP_DEFLATED), "is compressed"),
    "no pickle": (without("data.pkl"), "0 files data.pkl"),
    "a storage is missing": (without("data/3"), "is missing"),
    "a storage is shorter": (lambda name, data: (name, data[: 4 if "/3" in name else None], STORED), "does not fit"),
    "big endian": (lambda name, data: (name, b"big" if name.endswith("byteorder") else data, STORED), "big-endian"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_damaged_archives_say_what_is_wrong(change, tmp_path):
    make, message = CHANGES[change]
    with pytest.raises(ValueError, match=f"cannot be read .*{message}"):
        convert(damaged(make, tmp_path / "mdlm.ckpt"), tmp_path / "model")


def test_a_flipped_bit_in_a_weight_is_noticed(tmp_path):
    data = bytearray(CHECKPOINT.read_bytes())
    with zipfile.ZipFile(CHECKPOINT) as archive:
        info = archive.getinfo("mdlm_lightning_tiny/data/3")
    data[info.header_offset + 30 + 200] ^= 1
    with zipfile.ZipFile(io.BytesIO(data)) as archive, pytest.raises(zipfile.BadZipFile):
        archive.read(info.filename)  # so the bit is one of the weight's
    (tmp_path / "mdlm.ckpt").write_bytes(data)
    with pytest.raises(ValueError, match="data/3 has another checksum than when it was written"):
        convert(tmp_path / "mdlm.ckpt", tmp_path / "model")


@pytest.mark.parametrize(
    ("size", "stride", "offset"),
    [((7,), (1,), 0), ((2, 3), (3, 1), 1), ((10**12,), (0,), 0), ((2**40, 2**40), (2**40, 1), 0), ((2,), (1,), 2**63)],
)
def test_tensors_outside_their_storage_are_refused(size, stride, offset, tmp_path):
    """Neither memory beyond the file is shown, nor is one value spread over terabytes."""

    class Tensor:
        def __reduce__(self):
            return torch._utils._rebuild_tensor_v2, (Storage(), offset, size, stride, False, collections.OrderedDict())

    class Storage:
        pass

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return ("storage", torch.FloatStorage, "0", "cpu", 6) if isinstance(value, Storage) else None

    file = io.BytesIO()
    Pickler(file, protocol=2).dump({"x": Tensor()})
    zipped(file.getvalue(), tmp_path / "mdlm.ckpt", [("archive/data/0", bytes(24))])
    with pytest.raises(ValueError, match="does not fit into its storage of 6 values"):
        load_archive(tmp_path / "mdlm.ckpt")


@pytest.mark.parametrize("protocol", range(6))
def test_plain_values_of_every_protocol_come_in_as_they_are(protocol):
    value = {
        "text": ["a", "ä€😀", ""],
        "numbers": (0, -1, 255, 2**31, 10**30, -(2**70), 0.5, float("inf"), True, None),
        "bytes": b"ab" * 200,
        3: {"nested": [[], {}, (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]},
        None: [list(range(2000))] * 2,
    }
    if protocol < 3:  # where bytes are the result of a call
        del value["bytes"]
    if protocol >= 4:  # before, a set is the result of a call
        value["sets"] = [{1, "a"}, frozenset({2.5})]
    read = PickleReader(lambda reference: reference, {}).read(pickle.dumps(value, protocol=protocol))
    assert read == value
    assert read[None][0] is read[None][1], "what was one object is one object"


def test_objects_come_in_as_what_they_were_given():
    read = PickleReader(lambda reference: reference, {}).read(pickle.dumps([Stateful("p"), Stateful], protocol=2))
    assert [type(item) for item in read] == [Foreign, Foreign]
    assert read[0].state == {"path": "p"}
    assert read[1].name.endswith(" Stateful")


def test_deep_and_self_containing_pickles_end(tmp_path):
    """Hashing, printing or walking them would take for ever, or the program down."""
    deep = b"\x80\x02})" + b"\x85" * 100_000
    zipped(deep + b"Ns.", tmp_path / "mdlm.ckpt")
    with pytest.raises(ValueError, match="a key is a tuple"):
        load_archive(tmp_path / "mdlm.ckpt")
    doubling = b"]" + b"".join(b"2\x86" for _ in range(200))
    payload = b"\x80\x02}(" + text("state_dict") + doubling + text("epoch") + doubling + b"u."
    refused(zipped(payload, tmp_path / "mdlm.ckpt"), tmp_path)
    itself = b"\x80\x02}q\x00(" + text("state_dict") + b"h\x00" + text("hyper_parameters") + b"h\x00u."
    refused(zipped(itself, tmp_path / "mdlm.ckpt"), tmp_path)


# Bytes and values at random


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz")


def only_a_value_error(path, folder):
    """Either the file is converted, or a ValueError says in our words which file is wrong."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    try:
        convert(path, folder / "model")
    except ValueError as error:
        assert path.name in str(error)
        assert not (folder / "model").exists()


POSITIONS = st.one_of(st.integers(0, 9000), st.integers(0, CHECKPOINT.stat().st_size - 1))


@given(st.lists(st.tuples(POSITIONS, st.integers(0, 255)), min_size=1, max_size=8), st.integers(0, 3))
@settings(SEEDED, max_examples=150)
def test_changed_bytes_are_refused_or_harmless(scratch, changes, cut):
    """The first 9,000 bytes of the file are its pickle."""
    data = bytearray(CHECKPOINT.read_bytes())
    for position, byte in changes:
        data[position] = byte
    (scratch / "mdlm.ckpt").write_bytes(data[: len(data) - 1000 * cut])
    only_a_value_error(scratch / "mdlm.ckpt", scratch)


@given(st.binary(max_size=60), st.integers(0, 300))
@settings(SEEDED, max_examples=300)
def test_any_pickle_is_refused_or_harmless(scratch, noise, position):
    """Bytes in the middle of a real pickle, with a true checksum: what a writer with bad intentions would make."""
    with zipfile.ZipFile(CHECKPOINT) as archive:
        data = archive.read("mdlm_lightning_tiny/data.pkl")
    zipped(data[:position] + noise + data[position:], scratch / "mdlm.ckpt", [("archive/data/0", bytes(400))])
    try:
        load_archive(scratch / "mdlm.ckpt")
    except ValueError as error:
        assert str(error)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(torch.zeros(2)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PLACES = [
    ("state_dict",), ("epoch",), ("global_step",), ("ema",), ("ema", "shadow_params"), ("ema", "decay"),
    ("ema", "num_updates"), ("hyper_parameters",), ("hyper_parameters", "config"),
    *(("hyper_parameters", "config", name) for name in ("algo", "model", "parameterization", "time_conditioning")),
    *(("hyper_parameters", "config", "model", name) for name in ("length", "n_heads", "dropout")),
    *(("state_dict", f"backbone.{name}") for name in ("vocab_embed.embedding", "sigma_map.mlp.0.bias")),
    ("state_dict", "backbone.rotary_emb.inv_freq"),
]  # fmt: skip


@given(st.sampled_from(PLACES), VALUES)
@settings(SEEDED, max_examples=60)
def test_any_value_in_any_place_is_refused_or_harmless(scratch, place, value):
    payload = torch.load(CHECKPOINT, weights_only=True)
    *path, last = place
    holder = payload
    for name in path:
        if not isinstance(holder.get(name), dict):
            holder[name] = {}
        holder = holder[name]
    holder[last] = value
    torch.save(payload, scratch / "mdlm.ckpt")
    only_a_value_error(scratch / "mdlm.ckpt", scratch)


# What else reads weights


@pytest.mark.parametrize("reader", [load_model, load_encoder, lambda path: convert(path, path / "model")])
@pytest.mark.parametrize("container", ["zip", "legacy", "script"])
def test_a_directory_of_pickled_weights_runs_nothing(reader, container, script, tmp_path):
    """A model directory that has pytorch_model.bin in the place of its safetensors."""
    folder = released_directory(tmp_path / "model", "mdlm")
    (folder / "model.safetensors").unlink()
    path, canary = script
    canary.unlink(missing_ok=True)
    if container == "script":
        shutil.copy(path, folder / "pytorch_model.bin")
    else:
        weights = {"backbone.x": torch.zeros(1), "y": Canary(canary)}
        torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=container == "zip")
    with pytest.raises(ValueError, match="model"):
        reader(str(folder) if reader in (load_model, load_encoder) else folder)
    assert not canary.exists()


def test_adapters_cannot_name_a_module_to_import(tmp_path, monkeypatch):
    """Older versions of peft import the module in megatron_core, which here would write a file."""
    (tmp_path / "module_of_a_stranger.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()")
    monkeypatch.syspath_prepend(str(tmp_path))
    base = released_directory(tmp_path / "base", "mdlm")
    (tmp_path / "adapters").mkdir()
    fields = {"peft_type": "LORA", "r": 2, "target_modules": ["attn_qkv"], "base_model_name_or_path": str(base)}
    fields |= {"megatron_config": {"x": 1}, "megatron_core": "module_of_a_stranger"}
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="asks for Megatron layers"):
        load_model(str(tmp_path / "adapters"))
    assert not (tmp_path / "canary").exists()


def test_adapters_of_pickled_weights_run_nothing(tmp_path):
    (tmp_path / "adapters").mkdir()
    base = released_directory(tmp_path / "base", "mdlm")
    fields = {"peft_type": "LORA", "r": 2, "target_modules": ["attn_qkv"], "base_model_name_or_path": str(base)}
    (tmp_path / "adapters/adapter_config.json").write_text(json.dumps(fields))
    torch.save({"x": Canary(tmp_path / "canary")}, tmp_path / "adapters/adapter_model.bin")
    with pytest.raises(ValueError, match="adapters"):
        load_model(str(tmp_path / "adapters"))
    assert not (tmp_path / "canary").exists()
