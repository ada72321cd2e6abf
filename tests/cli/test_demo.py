"""`tokendrift demo`: what it shows by default, where it listens, and what it says when it cannot."""

from __future__ import annotations

import json
import re
import sys
import urllib.request

import pytest
from toys import record, results

from tokendrift_hf.cli import main
from tokendrift_hf.demo.page import Page


@pytest.fixture
def visit(monkeypatch):
    """Instead of staying, the command looks at its own page once, and closes it. What the page says of its columns."""
    seen = {}

    def look(page: Page) -> None:
        seen["html"] = urllib.request.urlopen(page.blocks.local_url).read().decode()
        seen["names"], seen["judge"] = page.names, page.columns.metric is not None
        seen["limits"], seen["results"] = page.columns.limits, page.results
        page.blocks.close()

    monkeypatch.setattr(Page, "wait", look)
    return seen


def test_two_models_and_a_judge_are_served_at_the_loopback(text_files, visit, capsys):
    base = str(text_files / "base")
    call = ["demo", base, base, "--judge", str(text_files / "judge"), "--max-samples", "2", "--max-length", "8"]
    assert main(call) == 0
    out = capsys.readouterr().out
    assert "Listening at 127.0.0.1: for this machine alone. Give --host 0.0.0.0 to let others in." in out
    assert re.search(r"The page is at http://127.0.0.1:\d+/", out)
    assert visit["judge"] and list(visit["names"]) == ["Base", "Refined"]
    assert (visit["limits"].num_samples, visit["limits"].length) == (2, 8)
    assert set(visit["names"].values()) == {"base"}, "of an absolute path its last part, since strangers may read it"
    assert str(text_files) not in visit["html"]


def test_without_arguments_it_takes_the_quickstarts_models(text_files, tmp_path, visit, monkeypatch):
    """The base alone, and beside its refinement once there is one, with the frontier of the same run."""
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/quickstart").symlink_to(text_files)
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    assert visit["names"] == {"Model": "recipes/quickstart/base"} and visit["judge"] and visit["results"] is None
    (tmp_path / "out/quickstart").mkdir(parents=True)
    (tmp_path / "out/quickstart/refined").symlink_to(text_files / "base")
    path = tmp_path / "out/quickstart/results.json"
    path.write_text(json.dumps(results([record("base", 0, 9.0, 2.0)])))
    assert main(["demo"]) == 0
    assert visit["names"] == {"Base": "recipes/quickstart/base", "Refined": "out/quickstart/refined"}
    assert visit["results"].rows[0].gen_ppl == 9.0
    path.write_text("of an older version")
    assert main(["demo"]) == 0
    assert visit["results"] is None, "nobody asked for them"


def test_listening_for_everyone_is_said(text_files, visit, capsys):
    assert main(["demo", str(text_files / "base"), "--host", "0.0.0.0"]) == 0
    assert "Listening at 0.0.0.0: everyone who reaches this machine can use the page." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"There is no recipes/quickstart/base here. Name a model: tokendrift demo MODEL \[BASE\]"),
        (["nowhere"], "There is no model 'nowhere'"),
        (["BASE", "--judge", "nowhere"], "The judge 'nowhere' cannot be loaded"),
        (["BASE", "--results", "nowhere.json"], "nowhere.json cannot be read as results"),
        (["BASE", "--max-samples", "0"], "num_samples is 0"),
        (["BASE", "--port", "70000"], "port=70000: it must be from 1 to 65535"),
        (["BASE", "--dry-run"], "Give --space DIR as well"),
        (["--space", "here"], r"Name it: tokendrift demo OWNER/MODEL \[OWNER/BASE\] --space DIR"),
        (["BASE", "--space", "here"], "a local path. A Space loads from the hub"),
    ],
)
def test_bad_input_is_one_clear_line(text_files, tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(["demo", *(str(text_files / "base") if word == "BASE" else word for word in words)]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_it_says_what_to_install(text_files, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)  # as if it were not installed
    for name in ("page", "serving"):
        monkeypatch.delitem(sys.modules, f"tokendrift_hf.demo.{name}", raising=False)
    assert main(["demo", str(text_files / "base")]) == 2
    assert 'The demo needs gradio: pip install "tokendrift-hf[demo]".' in capsys.readouterr().err
