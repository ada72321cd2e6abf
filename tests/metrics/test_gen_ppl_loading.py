"""Ways to load the metric: by name from any directory, by path, in many processes, and distributed."""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import sys

import evaluate
import pytest
from conftest import FIXTURES, recorded, run_python, start_python

from tokendrift_hf.metrics import GenPPL
from tokendrift_hf.metrics.shim import SHIM, install_shim, modules_cache

ROOT = FIXTURES.parents[1]
FOLDER = ROOT / "tokendrift_hf" / "metrics" / "gen_ppl"
JUDGE = str(FIXTURES / "genppl_tiny_gpt2")
SCORE = f"""
record = metric.compute(predictions=["w1 w2 w3", "w4 w5 <|endoftext|> w6"], model_id={JUDGE!r})
print("NUM_TOKENS", record["num_tokens"])
"""
INSTALL_AND_LOAD = """
from tokendrift_hf.metrics import install_shim
install_shim()
import evaluate
print("LOADED", type(evaluate.load("gen_ppl")).__name__)
"""


def test_by_name_offline_from_an_empty_directory_in_three_processes_at_once(tmp_path):
    """One fresh cache for all of them; then also from a process that never imports the package itself."""
    shared = dict(isolated=False, HF_EVALUATE_OFFLINE="1", HF_HOME=str(tmp_path / "home"))
    running = [start_python(INSTALL_AND_LOAD, tmp_path / str(i), **shared) for i in range(3)]
    for process in running:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output
        assert "LOADED GenPPL" in output
    later = "import evaluate\nmetric = evaluate.load('gen_ppl')\n" + SCORE
    assert "NUM_TOKENS 5" in run_python(later, tmp_path / "later", **shared)
    versions = (tmp_path / "home/modules/evaluate_modules/metrics/evaluate-metric--gen_ppl").iterdir()
    assert len([path for path in versions if path.is_dir() and len(path.name) == 64]) == 1


def test_by_path_without_the_package(tmp_path):
    """The folder alone is enough, as in a Space: `evaluate` copies it, and the package is not importable."""
    (tmp_path / "space" / "gen_ppl").mkdir(parents=True)
    (tmp_path / "space" / "gen_ppl" / "gen_ppl.py").write_bytes((FOLDER / "gen_ppl.py").read_bytes())
    code = f"import evaluate\nprint('LOADED', type(evaluate.load({str(tmp_path / 'space' / 'gen_ppl')!r})).__name__)"
    assert "LOADED GenPPL" in run_python(code, tmp_path / "cwd", HF_EVALUATE_OFFLINE="1")


def test_settings_at_load_and_on_disk_storage(tmp_path):
    metric = evaluate.load(str(FOLDER), model_id=JUDGE, mode="all_tokens", cache_dir=str(tmp_path))
    record = metric.compute(predictions=recorded("metrics")["several_eos.ids"])
    assert (record["num_tokens"], record["mode"]) == (4 * 23, "all_tokens")


def score_as_process(rank, cache, results):
    ids = recorded("metrics")["several_eos.ids"].tolist()
    metric = GenPPL(num_process=2, process_id=rank, experiment_id="two", cache_dir=cache, model_id=JUDGE)
    metric.add_batch(predictions=[ids[2 * rank]])
    results.put((rank, metric.compute(predictions=[ids[2 * rank + 1]], per_sample=True)))


def test_distributed_compute_scores_the_samples_of_all_processes(tmp_path):
    """Two processes with two rows each give the recorded value of the four rows on process 0, None on process 1."""
    rows = recorded("metrics")["several_eos.ids"]
    context = multiprocessing.get_context("fork")  # what they import is already here
    results = context.Queue()
    running = [context.Process(target=score_as_process, args=(rank, str(tmp_path), results)) for rank in range(2)]
    for process in running:
        process.start()
    records = dict(results.get(timeout=120) for _ in running)
    for process in running:
        process.join()
    assert records[0]["gen_ppl"] == pytest.approx(recorded("metrics")["several_eos.gen_ppl"].item(), rel=1e-6)
    assert records[0]["num_samples"] == 4
    alone = GenPPL(keep_in_memory=True, model_id=JUDGE).compute(predictions=rows, per_sample=True)
    for found, expected in zip(records[0]["per_sample"], alone["per_sample"], strict=True):
        assert found == pytest.approx(expected, rel=1e-6), "in order: the rows of process 0, then those of process 1"
    assert records[1] is None


def test_the_shim_is_written_once_and_repaired(tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path)
    path = install_shim()
    assert path.read_text() == SHIM
    before = path.stat().st_mtime_ns
    assert install_shim() == path and path.stat().st_mtime_ns == before
    path.write_text("broken")
    assert install_shim() == path and path.read_text() == SHIM
    assert sorted(file.name for file in path.parent.iterdir()) == ["__init__.py", "gen_ppl.py"]


def test_the_shim_can_be_declined_and_an_unwritable_cache_is_no_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path / "file")
    assert install_shim() is None
    monkeypatch.setattr(evaluate.config, "HF_MODULES_CACHE", tmp_path / "cache")
    monkeypatch.setenv("TOKENDRIFT_NO_EVALUATE_SHIM", "1")
    assert install_shim() is None
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "environment", [{"HF_HOME": "~/elsewhere"}, {"HF_MODULES_CACHE": "m"}, {"XDG_CACHE_HOME": "x"}]
)
def test_the_cache_is_found_as_evaluate_finds_it(tmp_path, environment, monkeypatch):
    """The rule for a process that has not imported evaluate gives what evaluate.config computes on import."""
    for name in ("HF_HOME", "HF_MODULES_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": str(tmp_path), **environment}.items():
        monkeypatch.setenv(name, value)
    spec = importlib.util.spec_from_file_location("evaluate.fresh_config", evaluate.config.__file__)
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    monkeypatch.delitem(sys.modules, "evaluate.config")
    assert modules_cache() == fresh.HF_MODULES_CACHE


def test_the_shim_needs_neither_evaluate_nor_transformers():
    """Its file imports the standard library only, so installing it takes no time."""
    tree = ast.parse((FOLDER.parent / "shim.py").read_text())
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    assert {name.split(".")[0] for name in names} <= set(sys.stdlib_module_names)


def test_the_module_file_is_self_contained():
    """`evaluate` finds imports by lines, takes the first metric class it sees, and copies one file."""
    tree = ast.parse((FOLDER / "gen_ppl.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]
    third_party = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert third_party == {"datasets", "evaluate", "numpy", "torch", "transformers"}
    assert all(len(node.names) == 1 for node in imports)
