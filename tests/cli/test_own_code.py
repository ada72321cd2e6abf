"""Code that lies beside a model, tokenizer, judge or encoder is not run, and nobody is asked on the terminal."""

from __future__ import annotations

import builtins
import json
import re
from pathlib import Path

import pytest

from tokendrift_hf.cli import main
from tokendrift_hf.lock import LOCK

CODE = """
from pathlib import Path
Path({canary!r}).write_text("run")
class C: pass
"""


@pytest.fixture
def hostile(text_files, tmp_path) -> Path:
    """A folder with code for everything in it, which leaves a file where it is run."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    (folder / "code.py").write_text(CODE.format(canary=str(tmp_path / "canary")))
    autos = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM"), "code.C")
    (folder / "config.json").write_text(json.dumps({"model_type": "strange", "auto_map": autos}))
    tokenizer = {"tokenizer_class": "Strange", "auto_map": {"AutoTokenizer": ["code.C", "code.C"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    (folder / "recipe.yaml").write_text(
        f"model: {text_files / 'base'}\ndataset: {text_files / 'corpus.jsonl'}\njudge: {text_files / 'judge'}\n"
        f"output_dir: {tmp_path / 'out'}\nmax_steps: 1\nuse_cpu: true\n"
    )
    return folder


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["generate", "{hostile}"], "code of its own"),
        (["generate", "{base}", "--tokenizer", "{hostile}"], "tokenizer .* code of its own, .* or name another"),
        (["evaluate", "{base}", "--judge", "{hostile}"], "judge .* code of its own, .* Take another judge"),
        (["evaluate", "{base}", "--judge", "{judge}", "--tokenizer", "{hostile}"], "tokenizer .* code of its own"),
        (["train", "{recipe}", "--model", "{hostile}"], "code of its own"),
        (["train", "{recipe}", "--tokenizer", "{hostile}"], "tokenizer .* code of its own"),
        (["train", "{recipe}", "--judge", "{hostile}"], "judge .* code of its own"),
        (["train", "{recipe}", "--encoder", "{hostile}"], "encoder .* code of its own, .* encoder= of DriftTrainer"),
    ],
)
def test_it_is_refused_at_once(words, message, hostile, text_files, tmp_path, capsys, monkeypatch):
    asked = []
    monkeypatch.setattr(builtins, "input", lambda prompt="": asked.append(prompt) or "y")
    places = {"hostile": hostile, "recipe": hostile / "recipe.yaml"}
    places |= {name: text_files / name for name in ("base", "judge")}
    words = [word.format(**places) for word in words] + (
        ["--output_dir", str(tmp_path / "out")] if words[0] == "evaluate" else []
    )
    assert main(words) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert re.search(message, error), error
    assert asked == []
    assert not (tmp_path / "canary").exists()
    written = {path.name for path in tmp_path.rglob("*") if path.is_file() and hostile not in path.parents}
    assert written <= {LOCK}, "nothing is left but, where a training was about to begin, the lock of its folder"
