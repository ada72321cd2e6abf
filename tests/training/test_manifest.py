"""Which checkpoints count as complete: every kind of damage to every file; what is removed, set aside, put back."""

from __future__ import annotations

import json
import logging
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendrift_hf.training.manifest import (
    MANIFEST,
    changed_settings,
    checkpoints,
    last_complete_checkpoint,
    read_manifest,
    remove_old_checkpoints,
    replacing,
    set_aside_incomplete,
    write_manifest,
)

RECORD = {"global_step": 4, "settings": {"seed": 0}}


def make_checkpoint(output_dir, step, complete=True):
    """A folder with the kinds of files that a checkpoint has."""
    folder = output_dir / f"checkpoint-{step}"
    (folder / "global_step4").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(range(1, 200)) * 3)
    (folder / "global_step4/shard.bin").write_bytes(b"optimizer" * 9)
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step, "log_history": [1, 2, 3]}))
    (folder / "modeling_tokendrift.py").write_text("import torch\n")
    (folder / "README.md").write_text("A model card.")
    if complete:
        write_manifest(folder, RECORD)
    return folder


def flip_a_bit(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def zero_the_tail(content: bytes) -> bytes:
    kept = len(content) * 3 // 4
    return content[:kept] + bytes(len(content) - kept)


DAMAGE = {
    "deleted": None,
    "half": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "bit flip": flip_a_bit,
    "zero tail": zero_the_tail,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_every_damage_to_every_file_is_noticed(damage, tmp_path, caplog):
    """The checkpoint is passed over with a message, and refused where it is named. The card may be edited."""
    make_checkpoint(tmp_path, 2)
    folder = make_checkpoint(tmp_path, 4)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    assert len(files) == 5
    for path in files:
        content = path.read_bytes()
        path.unlink()
        if DAMAGE[damage] is not None:
            path.write_bytes(DAMAGE[damage](content))
            assert path.read_bytes() != content
        caplog.clear()
        with caplog.at_level(logging.WARNING, "tokendrift_hf.training.manifest"):
            assert last_complete_checkpoint(tmp_path).name == "checkpoint-2"
        assert "Skipping" in caplog.text
        assert path.name in caplog.text
        with pytest.raises(ValueError, match=f"checkpoint-4 is not .*complete.*{path.name}"):
            read_manifest(folder)
        path.write_bytes(content)
        assert last_complete_checkpoint(tmp_path) == folder


def test_an_edited_card_is_no_damage(tmp_path):
    folder = make_checkpoint(tmp_path, 4)
    (folder / "README.md").write_text("My own words.")
    assert last_complete_checkpoint(tmp_path) == folder
    (folder / "README.md").unlink()
    assert last_complete_checkpoint(tmp_path) == folder


def test_the_mark_of_transformers_for_a_checkpoint_under_way_is_not_listed(tmp_path):
    folder = make_checkpoint(tmp_path, 4, complete=False)
    (folder / "checkpoint-is-incomplete.txt").write_text("in progress")
    write_manifest(folder, RECORD)
    (folder / "checkpoint-is-incomplete.txt").unlink()
    assert read_manifest(folder)["global_step"] == 4


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "null",
        "3",
        "{}",
        '{"global_step": 4, "settings": {}, "files": []}',
        '{"global_step": 4, "settings": [], "files": {}}',
        '{"global_step": "4", "settings": {}, "files": {}}',
        '{"global_step": 4, "settings": {}, "files": {"model.safetensors": "597"}}',
        '{"global_step": 4, "settings": {}, "files": {}, "sha256": []}',
        '{"global_step": 4, "settings": {}, "files": {}, "self": 1}',
        "[" * 100_000,
        "\x00\x00",
    ],
    ids=lambda content: content[:40].strip("\x00"),
)
def test_a_manifest_of_the_wrong_form_makes_no_checkpoint(content, tmp_path):
    folder = make_checkpoint(tmp_path, 4)
    (folder / "drift_state.json").write_text(content)
    with pytest.raises(ValueError, match="not a complete DriftTrainer checkpoint.*Resume from an older"):
        read_manifest(folder)


def test_a_manifest_of_the_first_version_counts_by_its_sizes(tmp_path):
    folder = make_checkpoint(tmp_path, 4)
    manifest = json.loads((folder / "drift_state.json").read_text())
    first = {name: manifest[name] for name in ("global_step", "settings", "files")}
    (folder / "drift_state.json").write_text(json.dumps(first))
    assert read_manifest(folder) == first
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="model.safetensors should have 597 bytes, found 5 bytes"):
        read_manifest(folder)


def test_settings_are_compared_where_both_sides_know_them():
    old, new = {"a": 1, "b": 2, "gone": 3}, {"a": 1, "b": 4, "added": 5}
    assert changed_settings(old, new) == {"b": (2, 4)}


def names(output_dir):
    return sorted(path.name for path in output_dir.iterdir())


def test_rotation_counts_complete_checkpoints_alone(tmp_path):
    """An incomplete one with a higher number and the same age never costs the last good one."""
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    for step in (3, 99):
        make_checkpoint(tmp_path, step, complete=False)
    for path in tmp_path.iterdir():
        os.utime(path, (0, 0))
    remove_old_checkpoints(tmp_path, None, [tmp_path / "checkpoint-6"])
    assert len(names(tmp_path)) == 5
    remove_old_checkpoints(tmp_path, 2, [tmp_path / "checkpoint-6"])
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6", "checkpoint-99"]
    remove_old_checkpoints(tmp_path, 1, [tmp_path / "checkpoint-6"])
    assert names(tmp_path) == ["checkpoint-6", "checkpoint-99"]


def test_rotation_keeps_the_best_and_the_one_just_written(tmp_path):
    for step in (2, 4, 6, 8):
        make_checkpoint(tmp_path, step)
    remove_old_checkpoints(tmp_path, 1, [tmp_path / "checkpoint-6", tmp_path / "checkpoint-2"])
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-6"]


def test_without_manifests_rotation_goes_by_number(tmp_path):
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step, complete=False)
    remove_old_checkpoints(tmp_path, 2, [tmp_path / "checkpoint-6"], have_manifests=False)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]


def test_incomplete_checkpoints_beyond_a_step_are_set_aside(tmp_path):
    make_checkpoint(tmp_path, 4)
    make_checkpoint(tmp_path, 8)
    for step in (2, 6, 10):
        make_checkpoint(tmp_path, step, complete=False)
    (tmp_path / "_incomplete-checkpoint-10").mkdir()  # of an earlier time
    set_aside_incomplete(tmp_path, after=4)
    kept = ["checkpoint-2", "checkpoint-4", "checkpoint-8"]
    assert names(tmp_path) == ["_incomplete-checkpoint-10", "_incomplete-checkpoint-6", *kept]
    assert (tmp_path / "_incomplete-checkpoint-10/model.safetensors").is_file()
    assert [path.name for path in checkpoints(tmp_path)] == kept


def test_a_checkpoint_that_is_written_anew_is_not_lost_before_the_new_one_is_complete(tmp_path):
    old = make_checkpoint(tmp_path, 4)
    with pytest.raises(KeyboardInterrupt):
        with replacing(old):
            make_checkpoint(tmp_path, 4, complete=False)
            raise KeyboardInterrupt
    assert names(tmp_path) == ["_replaced-checkpoint-4", "checkpoint-4"]
    assert last_complete_checkpoint(tmp_path) == old
    assert names(tmp_path) == ["checkpoint-4"]
    with replacing(old):
        assert not old.exists()
        make_checkpoint(tmp_path, 4)
    assert names(tmp_path) == ["checkpoint-4"]


def test_a_new_checkpoint_that_is_complete_replaces_the_old_one(tmp_path):
    old = make_checkpoint(tmp_path, 4)
    with pytest.raises(KeyboardInterrupt):
        with replacing(old):
            new = make_checkpoint(tmp_path, 4, complete=False)
            (new / "model.safetensors").write_bytes(b"new")
            write_manifest(new, RECORD)
            raise KeyboardInterrupt
    assert (last_complete_checkpoint(tmp_path) / "model.safetensors").read_bytes() == b"new"
    assert names(tmp_path) == ["checkpoint-4"]


def test_nothing_complete_is_an_error(tmp_path):
    make_checkpoint(tmp_path, 4, complete=False)
    (tmp_path / "checkpoint-old").mkdir()
    with pytest.raises(ValueError, match=r"no complete checkpoint to resume from .*looked at 1"):
        last_complete_checkpoint(tmp_path)


NAMES = st.sampled_from(
    ["weights", "global_step", "settings", "files", "sha256", "self", "frozen", "x" * 300, "../y", "\0"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)


@given(content=VALUES, changed=st.dictionaries(NAMES, VALUES, max_size=3), whole=st.booleans())
@settings(max_examples=200, derandomize=True, deadline=None, database=None)
def test_any_manifest_is_complete_or_refused_in_our_words(content, changed, whole, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "fuzzed-1"
    folder.mkdir(exist_ok=True)
    (folder / "weights").write_bytes(b"1234567")
    (folder / "trainer_state.json").write_text("{}")
    good = {"global_step": 1, "settings": {}, "files": {"weights": 7}}
    (folder / MANIFEST).write_text(json.dumps(good | changed if whole else content))
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        assert "is not" in str(error) and "fuzzed-1" in str(error)
    else:
        assert all((folder / name).stat().st_size == size for name, size in manifest["files"].items())
        assert isinstance(manifest.get("frozen", {}), dict)
