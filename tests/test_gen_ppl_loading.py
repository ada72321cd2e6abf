"""Ways to load the metric: by name from any directory, by path, in many processes, and distributed."""

from __future__ import annotations

import ast
import json
import sys

import evaluate
import pytest
from conftest import FIXTURES, recorded, run_python, start_python

from tokendrift_hf.metrics.shim import SHIM, install_shim

ROOT = FIXTURES.parents[1]
FOLDER = ROOT / "tokendrift_hf" / "metrics" / "gen_ppl"
JUDGE = str(FIXTURES / "genppl_tiny_gpt2")
SCORE = f"""
import json
record = metric.compute(predictions=["w1 w2 w3", "w4 w5 <|endoftext|> w6"], model_id={JUDGE!r})
print("NUM_TOKENS", record["num_tokens"])
"""
BY_NAME = (
    """
from tokendrift_hf.metrics import install_shim
install_shim()
import evaluate
metric = evaluate.load("gen_ppl")
"""
    + SCORE
)


def test_by_name_offline_from_an_empty_directory_in_six_processes_at_once(tmp_path):
    """One fresh cache for all of them; then also from a process that never imports the package itself."""
    shared = dict(isolated=False, HF_EVALUATE_OFFLINE="1", HF_HOME=str(tmp_path / "home"))
    running = [start_python(BY_NAME, tmp_path / str(i), **shared) for i in range(6)]
    for process in running:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert "NUM_TOKENS 5" in output
    later = "import evaluate\nmetric = evaluate.load('gen_ppl')\n" + SCORE
    assert "NUM_TOKENS 5" in run_python(later, tmp_path / "later", **shared)
    versions = (tmp_path / "home/modules/evaluate_modules/metrics/evaluate-metric--gen_ppl").iterdir()
    assert len([path for path in versions if path.is_dir() and len(path.name) == 64]) == 1


def test_by_path_without_the_package(tmp_path):
    """The folder alone is enough, as in a Space: `evaluate` copies it, and the package is not importable."""
    (tmp_path / "space" / "gen_ppl").mkdir(parents=True)
    (tmp_path / "space" / "gen_ppl" / "gen_ppl.py").write_bytes((FOLDER / "gen_ppl.py").read_bytes())
    code = f"import evaluate\nmetric = evaluate.load({str(tmp_path / 'space' / 'gen_ppl')!r}, batch_size=1)\n" + SCORE
    assert "NUM_TOKENS 5" in run_python(code, tmp_path / "cwd", HF_EVALUATE_OFFLINE="1")


def test_settings_at_load_and_on_disk_storage(tmp_path):
    metric = evaluate.load(str(FOLDER), model_id=JUDGE, mode="all_tokens", cache_dir=str(tmp_path))
    record = metric.compute(predictions=recorded("metrics")["several_eos.ids"])
    assert (record["num_tokens"], record["mode"]) == (4 * 23, "all_tokens")


def test_distributed_compute_scores_the_samples_of_all_processes(tmp_path):
    """Two processes with two rows each give the recorded value of the four rows on process 0, None on process 1."""
    ids = recorded("metrics")["several_eos.ids"].tolist()
    code = """
    import json
    from tokendrift_hf.metrics import GenPPL
    metric = GenPPL(num_process=2, process_id={rank}, experiment_id="two", cache_dir={cache!r}, model_id={judge!r})
    metric.add_batch(predictions={first})
    record = metric.compute(predictions={second})
    print("RECORD", json.dumps(record and [record["gen_ppl"], record["num_samples"]]))
    """
    running = []
    for rank in range(2):
        first, second = [ids[2 * rank]], [ids[2 * rank + 1]]
        text = code.format(rank=rank, cache=str(tmp_path / "cache"), judge=JUDGE, first=first, second=second)
        running.append(start_python(text, tmp_path / str(rank), isolated=False))
    outputs = [process.communicate(timeout=300)[0] for process in running]
    results = [json.loads(output.split("RECORD ")[1].splitlines()[0]) for output in outputs]
    assert results[0] == [pytest.approx(recorded("metrics")["several_eos.gen_ppl"].item(), rel=1e-6), 4]
    assert results[1] is None


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


def test_the_cache_is_found_as_evaluate_finds_it(tmp_path):
    """Without importing evaluate, for every environment variable that moves the cache."""
    code = """
    import sys
    from tokendrift_hf.metrics.shim import modules_cache
    found = modules_cache()
    assert not {"evaluate", "transformers", "datasets"} & set(sys.modules)
    import evaluate.config
    assert found == evaluate.config.HF_MODULES_CACHE, (found, evaluate.config.HF_MODULES_CACHE)
    """
    for i, environment in enumerate([{}, {"HF_HOME": "~/elsewhere"}, {"HF_MODULES_CACHE": str(tmp_path / "m")}]):
        run_python(code, tmp_path / str(i), isolated=False, HOME=str(tmp_path), **environment)


def test_the_module_file_is_self_contained():
    """`evaluate` finds imports by lines, takes the first metric class it sees, and copies one file."""
    tree = ast.parse((FOLDER / "gen_ppl.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports]
    third_party = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert third_party == {"datasets", "evaluate", "numpy", "torch", "transformers"}
    assert all(len(node.names) == 1 for node in imports)
