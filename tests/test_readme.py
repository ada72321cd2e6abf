"""What the README shows is run, with small stand-ins swapped in for its models and text."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def test_python_of_the_readme_runs(text_files, tmp_path):
    """Both snippets, one after the other as a reader would: refine, then sample and score."""
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    code = "\n".join(blocks)
    for found, stand_in in (
        ("recipes/quickstart/base", text_files / "base"),
        ("recipes/quickstart/judge", text_files / "judge"),
        ('"documentation"', repr(str(text_files / "corpus.jsonl"))),
        ('"refined"', repr(str(tmp_path / "refined"))),
        ("max_steps=100", "max_steps=2, use_cpu=True"),
    ):
        assert found in code, f"the README no longer says {found}"
        code = code.replace(found, str(stand_in))
    names: dict = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["record"]["gen_ppl"] > 1 and names["record"]["num_samples"] == 8


def test_every_folder_has_its_line():
    """The README's list of folders is complete and names nothing that is not there."""
    package = Path(__file__).resolve().parents[1] / "tokendrift_hf"
    folders = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")}
    assert set(re.findall(r"^\| `(\w+/)` \|", README, flags=re.MULTILINE)) == folders


def test_pictures_are_there_and_small_and_the_page_is_on_the_first_screen():
    root = Path(__file__).resolve().parents[1]
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert pictures[0] == "recipes/quickstart/demo.png"
    assert README.index(pictures[0]) < README.index("\n## ")
    for name in pictures:
        assert 20_000 < (root / name).stat().st_size < 300_000, name


def test_quickstart_files_are_those_of_their_records():
    """The sha256 in each training.json is that of the file beside it, and all weights together stay under 33 MB."""
    folder = Path(__file__).resolve().parents[1] / "recipes/quickstart"
    sizes = 0
    for name in ("tokenizer", "judge", "base", "duo"):
        record = json.loads((folder / name / "training.json").read_text())
        for file, digest in record["sha256"].items():
            assert hashlib.sha256((folder / name / file).read_bytes()).hexdigest() == digest, f"{name}/{file}"
        sizes += sum(path.stat().st_size for path in (folder / name).glob("*.safetensors"))
    assert sizes < 33e6
