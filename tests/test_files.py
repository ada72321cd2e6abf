"""Files are written whole: what was there stays until what replaces it is complete."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from toys import record

from tokendrift_hf.evaluation.comparison import Comparison, summarise
from tokendrift_hf.evaluation.report import write_report
from tokendrift_hf.files import write_json, write_text, written_whole
from tokendrift_hf.publishing.cards import Card
from tokendrift_hf.training.monitor import plot_dynamics

ROWS = summarise([record("a", 0, 9.0, 3.0)])
POINTS = [{"step": 0, "eval_entropy_nfe4": 3.0}]
WRITERS = {
    "file.json": lambda folder: write_json(folder / "file.json", {"a": 1}),
    "file.txt": lambda folder: write_text(folder / "file.txt", "text"),
    "table.md": lambda folder: write_report(Comparison(ROWS), folder),
    "dynamics.png": lambda folder: plot_dynamics(POINTS, folder / "dynamics.png"),
    "README.md": lambda folder: Card(kind="full", model_class="MDLMForMaskedLM").save(folder),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_what_was_there(name, tmp_path, monkeypatch):
    """The disk is full when the last byte is out and the file is to take its place."""

    def full(source, target):
        assert Path(source).stat().st_size > 0
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / name).write_text("before")
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        WRITERS[name](tmp_path)
    assert (tmp_path / name).read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == [name], "no half of a file is left"


@pytest.mark.parametrize("name", WRITERS)
def test_a_new_file_is_there_whole_in_a_folder_that_is_made(name, tmp_path):
    folder = tmp_path / "new"
    folder.mkdir()
    WRITERS[name](folder)
    assert (folder / name).stat().st_size > 0
    write_json(tmp_path / "a/b/c.json", {"x": [1.5, None]})
    assert json.loads((tmp_path / "a/b/c.json").read_text()) == {"x": [1.5, None]}


def test_an_error_while_writing_leaves_nothing_behind(tmp_path):
    with pytest.raises(KeyboardInterrupt), written_whole(tmp_path / "file") as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
