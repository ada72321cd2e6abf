"""No block of a document or docstring is only text: each is run by a test, or says why it is not."""

from __future__ import annotations

import ast
import doctest
import re
import shlex
from pathlib import Path

import pytest
from conftest import FIXTURES

from tokendrift_hf.cli import main

ROOT = Path(__file__).resolve().parents[1]
METRIC = ROOT / "tokendrift_hf/metrics/gen_ppl"
# Where code is shown -> the test that runs it.
RUN_BY = {
    "README.md": "tests/test_readme.py",
    "recipes/README.md": "tests/test_guide.py",
    "recipes/quickstart/README.md": "tests/test_documents.py",
    "tokendrift_hf/metrics/gen_ppl/README.md": "tests/test_documents.py",
    "tokendrift_hf/metrics/gen_ppl/gen_ppl.py": "tests/test_documents.py",
    "tokendrift_hf/objective/drift_objective.py": "tests/objective/test_drift_objective.py",
    "tokendrift_hf/publishing/model_cards/base.md": "tests/publishing/test_cards.py",
    "tokendrift_hf/publishing/model_cards/full.md": "tests/publishing/test_cards.py",
    "tokendrift_hf/publishing/model_cards/lora.md": "tests/publishing/test_cards.py",
}
FENCE = re.compile(r"(<!-- not run here: [^>]+ -->\n)?```(python|bash|yaml)\n(.*?)```", re.DOTALL)
EXAMPLE = re.compile(r"^\s*>>> |::\n\n", re.MULTILINE)


def docstrings(path: Path) -> list[str]:
    """Every string that is a statement or a value on its own: docstrings, and descriptions such as the metric's."""
    return [
        n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant) and type(n.value) is str
    ]


def test_whatever_shows_code_has_a_test_that_runs_it():
    documents = [*ROOT.glob("*.md"), *(ROOT / "recipes").rglob("*.md"), *(ROOT / "tokendrift_hf").rglob("*.md")]
    found = {path for path in documents if FENCE.search(path.read_text(encoding="utf-8"))}
    found |= {p for p in (ROOT / "tokendrift_hf").rglob("*.py") if any(map(EXAMPLE.search, docstrings(p)))}
    assert {path.relative_to(ROOT).as_posix() for path in found} == set(RUN_BY)


def run_python(code: str, names: dict, title: str) -> dict:
    """Runs code in which judges by the names of the hub are the tiny one of the tests."""
    for judge in ('"gpt2-large"', '"gpt2"'):
        code = code.replace(judge, repr(str(FIXTURES / "genppl_tiny_gpt2")))
    exec(compile(code, title, "exec"), names)
    return names


@pytest.mark.filterwarnings("ignore:gen_ppl")
def test_the_page_of_the_metric_runs(monkeypatch, tmp_path):
    """Its blocks in the order of the page, from the folder that holds the metric, as it tells to do for a path."""
    monkeypatch.chdir(tmp_path)
    blocks = FENCE.findall((METRIC / "README.md").read_text(encoding="utf-8"))
    assert len(blocks) == 2
    names: dict = {}
    for marker, language, block in blocks:
        assert (marker, language) == ("", "python")
        run_python(block.replace("path/to/gen_ppl", str(METRIC)), names, "the metric's README.md")
    assert names["record"]["num_samples"] == len(names["texts"])
    assert names["by_ids"]["entropy_tokenizer"] == "model"
    assert {"small_gen_ppl", "large_gen_ppl"} <= set(names["both"])
    assert 0 <= names["similarity"]["mauve"] <= 1


@pytest.mark.filterwarnings("ignore:gen_ppl")
def test_the_examples_of_the_metric_run():
    from tokendrift_hf.metrics.gen_ppl.gen_ppl import _KWARGS_DESCRIPTION

    examples = doctest.DocTestParser().get_examples(_KWARGS_DESCRIPTION)
    code = "\n".join(example.source for example in examples)
    names = run_python(code, {}, "the metric's examples")
    assert len(examples) == 3
    assert names["record"]["gen_ppl"] > 1


def test_the_readmes_commands_run(text_files, tmp_path, capsys):
    """Its last word but for the installation, which the gate does: the main job, in small."""
    small = (
        "--max_steps 1 --per_device_train_batch_size 2 --num_steps 1 --num_seeds 1 --num_samples 2 --use_cpu true "
        "--bf16 false --disable_tqdm true --train_split train --validation_split train --reference_split train "
        f"--model {text_files / 'base'} --judge {text_files / 'judge'} --dataset {text_files / 'corpus.jsonl'} "
        f"--output_dir {tmp_path / 'out'}"
    )
    ran = []
    for _, language, block in FENCE.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        if language == "bash":
            program, *words = shlex.split(block.rpartition("&&")[2])
            ran.append(Path(program).name)
            if Path(program).name == "tokendrift":
                assert main([word.replace("recipes/", f"{ROOT}/recipes/") for word in words] + small.split()) == 0
    assert ran == ["tokendrift", "python"], "the second one runs the tests"
    assert "Done in" in capsys.readouterr().out


def test_the_quickstarts_page_says_why_its_block_is_not_run():
    for marker, _, block in FENCE.findall((ROOT / "recipes/quickstart/README.md").read_text(encoding="utf-8")):
        assert marker
        assert (ROOT / shlex.split(block)[1]).is_file()
