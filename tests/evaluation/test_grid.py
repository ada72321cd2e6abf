"""The harness: cells are reproducible and kept."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import re
import signal
import time
from dataclasses import replace

import pytest
import torch
from conftest import FIXTURES, tiny_model
from toys import word_tokenizer

import tokendrift_hf
from tokendrift_hf import GenPPL
from tokendrift_hf.evaluation.comparison import summarise
from tokendrift_hf.evaluation.grid import Cell, Harness
from tokendrift_hf.evaluation.sampling import Sampling
from tokendrift_hf.models.loading import load_judge


def test_cells_are_drawn_once_and_equal_whatever_the_batch_size(harness, tmp_path, text_model, text_judge):
    cell = harness.cell("base", 2, 1.0, 0)
    (record,) = harness.run([cell])
    assert record["num_samples"] == 4 and record["gen_ppl"] > 1 and 0 < record["num_forward_calls"] <= 3
    kept = json.loads((tmp_path / "cells" / cell.file_name).read_text())
    assert kept == json.loads(json.dumps(record))
    kept["gen_ppl"] = 1.25
    (tmp_path / "cells" / cell.file_name).write_text(json.dumps(kept))
    assert harness.run([cell])[0]["gen_ppl"] == 1.25, "a finished cell is read, not computed again"
    whole = Harness({"base": text_model[0]}, text_model[1], text_judge, tmp_path / "other", Sampling(batch_size=4))
    assert whole.run([cell])[0]["gen_ppl"] == pytest.approx(record["gen_ppl"], rel=1e-6)


CELL = dict(model="a", weights="w", scoring="s", num_steps=4, temperature=1.0, seed=0, num_samples=8, length=16)


def test_every_setting_has_a_file_of_its_own():
    changes = [
        {"seed": 1},
        {"num_steps": 8},
        {"num_samples": 9},
        {"dtype": "bfloat16"},
        {"weights": "v"},
        {"scoring": "t"},
    ]
    assert len({Cell(**CELL | change).file_name for change in ({}, *changes)}) == 7


def test_a_cell_counts_only_for_the_models_own_defaults_too(text_model, text_judge, tmp_path):
    """generate() takes what is not asked for from the model: with other defaults the old cells are not used."""
    model, names = copy.deepcopy(text_model[0]), set()
    for change in ({}, {"top_k": 1}, {"noise_removal": "greedy"}):
        for name, value in change.items():
            setattr(model.generation_config, name, value)
        names.add(Harness({"m": model}, text_model[1], text_judge, tmp_path, Sampling()).cell("m", 2, 1.0, 0).file_name)
    model.set_attn_implementation("eager")
    names.add(Harness({"m": model}, text_model[1], text_judge, tmp_path, Sampling()).cell("m", 2, 1.0, 0).file_name)
    assert len(names) == 4


def test_a_record_names_the_dtype_of_the_network_and_of_the_judge(text_model, text_judge, tmp_path):
    harness = Harness(
        {"m": text_model[0]}, text_model[1], text_judge, tmp_path, Sampling(num_samples=2, dtype="bfloat16")
    )
    (record,) = harness.run([harness.cell("m", 1, 1.0, 0)])
    assert (record["dtype"], record["judge_dtype"]) == ("bfloat16", "float32")


def test_no_cell_holds_ids_that_the_tokenizer_lacks(text_model, text_judge, tmp_path):
    """The released DUO has one id more than its tokenizer. One such sample ended the run."""
    words = word_tokenizer(bos_token="<s>", eos_token="</s>")
    harness = Harness({"m": text_model[0]}, words, text_judge, tmp_path, Sampling(num_samples=8))
    cell = harness.cell("m", 1, 1.0, 0)
    (record,) = harness.run([cell])
    rows, _ = harness.draw(cell)
    assert record["num_left_out"] == 0
    assert max(max(row) for row in rows) < len(words)
    assert len({token for row in rows for token in row}) > 5


def test_models_of_different_vocabularies_are_refused(text_model, text_judge, tmp_path):
    with pytest.raises(ValueError, match="different numbers of tokens"):
        Harness({"a": text_model[0], "b": tiny_model("mdlm")}, text_model[1], text_judge, tmp_path, Sampling())


@pytest.mark.parametrize(
    ("change", "message"),
    [({"num_steps": 0}, "num_steps=0"), ({"temperature": -0.1}, "0 is greedy"), ({"temperature": math.inf}, "inf")],
)
def test_impossible_cells_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Cell(**CELL | change)


def test_a_cell_is_what_generate_and_the_metric_give_with_the_settings_it_records(harness, text_model, text_judge):
    """Temperature 0 is greedy, as in generate()."""
    model, tokenizer = text_model
    for temperature in (0.0, 0.7):
        (found,) = harness.run([harness.cell("base", 2, temperature, 5)])
        output = model.generate(
            num_samples=4,
            num_steps=found["num_steps"],
            temperature=found["temperature"],
            seed=found["seed"],
            sampler=found["sampler"],
            precision=found["precision"],
            return_dict_in_generate=True,
        )
        expected = GenPPL(keep_in_memory=True, tokenizer=tokenizer, **text_judge).compute(predictions=output.sequences)
        assert found["num_forward_calls"] == output.num_forward_calls
        assert found["calls_per_row"] == output.calls_per_row.double().mean()
        assert {name: found[name] for name in expected.keys() - {"versions"}} == {
            name: value for name, value in expected.items() if name != "versions"
        }
        assert found["versions"] == expected["versions"] | {"tokendrift_hf": tokendrift_hf.__version__}


def test_a_record_says_what_drawing_took(harness, text_model):
    """Four samples in batches of three and one: the passes of both, the seconds, and tokens over seconds."""
    model, passes, seconds = text_model[0], [], time.perf_counter()
    hook = model.register_forward_hook(lambda *_: passes.append(1))
    try:
        ids, cost = harness.draw(harness.cell("base", 3, 1.0, 0))
    finally:
        hook.remove()
    assert len(ids) == 4
    assert cost["num_forward_passes"] == len(passes)
    assert 0 < cost["calls_per_row"] <= cost["num_forward_calls"] <= 4
    assert 0 < cost["seconds"] <= time.perf_counter() - seconds
    assert cost["tokens_per_second"] == pytest.approx(4 * 16 / cost["seconds"])


def test_cells_of_other_weights_or_of_another_judge_are_not_reused(text_model, text_judge, tmp_path):
    """The labels and the folder are the same; a judge or a checkpoint that was exchanged is noticed."""
    model, tokenizer = text_model
    other = tiny_model("mdlm", seed=1, vocab_size=len(tokenizer) + 1, num_hidden_layers=3)
    judge = copy.deepcopy(text_judge["model"])
    with torch.no_grad():
        judge.transformer.wte.weight.mul_(2)
    cases = [(model, text_judge), (other, text_judge), (model, text_judge | {"model": judge})]
    cases.append((model, text_judge | {"mode": "all_tokens"}))
    values = []
    for used, judge in cases:
        harness = Harness({"base": used}, tokenizer, judge, tmp_path, Sampling(num_samples=3))
        values += [found["gen_ppl"] for found in harness.run([harness.cell("base", 2, 1.0, 0)])]
    assert len(set(values[:3])) == 3 and len(list(tmp_path.iterdir())) == 4
    again = Harness(
        {"base": copy.deepcopy(model)}, tokenizer, text_judge | {"batch_size": 1}, tmp_path, Sampling(num_samples=3)
    )
    again.draw = None
    assert again.run([again.cell("base", 2, 1.0, 0)])[0]["gen_ppl"] == values[0]


def test_a_killed_run_loses_the_cell_in_flight_only(harness, tmp_path):
    """SIGKILL in the third of four cells; the rest of a record that was being written is in the way of nothing."""
    cells = harness.grid(Sampling(num_steps=[1, 2], num_seeds=2, num_samples=2))
    drawn, draw = multiprocessing.get_context("fork").Queue(), harness.draw

    def draw_and_hang(cell):
        drawn.put(cell.file_name)
        time.sleep(0 if len(list((tmp_path / "cells").glob("*.json"))) < 2 else 600)
        return draw(cell)

    harness.draw = draw_and_hang
    process = multiprocessing.get_context("fork").Process(target=harness.run, args=(cells,))
    process.start()
    assert [drawn.get(timeout=60) for _ in range(3)] == [cell.file_name for cell in cells[:3]]
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    assert before.keys() == {cell.file_name for cell in cells[:2]}
    (tmp_path / "cells" / cells[2].file_name).with_suffix(".1234").write_text('{"gen_ppl": 1')

    again = []
    harness.draw = lambda cell: again.append(cell) or draw(cell)
    records = harness.run(cells)
    assert again == cells[2:] and [found["seed"] for found in records] == [cell.seed for cell in cells]
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.json")}
    assert len(after) == 4 and before.items() <= after.items()


def test_a_record_appears_whole_or_not_at_all(harness, tmp_path, monkeypatch):
    def killed(source, target):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        harness.run([harness.cell("base", 1, 1.0, 0)])
    assert list((tmp_path / "cells").glob("*.json")) == []


def test_cells_of_the_version_before_are_found(monkeypatch):
    """Three that a3a2724 has left, for the model of its checkpoint and a judge of fixed weights."""
    folder = FIXTURES / "a3a2724"
    model = tokendrift_hf.MDLMForMaskedLM.from_pretrained(folder / "run/checkpoint-2")
    judge = load_judge(str(FIXTURES / "genppl_tiny_gpt2"), torch.device("cpu"))
    sampling = Sampling(num_samples=4)
    harness = Harness({"base": model}, judge["model_tokenizer"], judge, folder / "cells", sampling)
    cells = [harness.cell("base", 2, 0.9, 1), harness.cell("base", 1, 1.0, 0)]
    cells.append(harness.cell("base", 2, 1.0, 0, replace(sampling, dtype="bfloat16")))
    assert {cell.file_name for cell in cells} == {path.name for path in (folder / "cells").iterdir()}
    monkeypatch.setattr(harness, "draw", None)
    monkeypatch.setattr(harness, "metric_version", 1)
    rows = summarise(harness.run(cells))
    assert [row.gen_ppl for row in rows] == [found["gen_ppl"] for found in harness.run(cells)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"versions": {"gen_ppl": 1}}, "was scored by version 1 of the metric, which now is 2"),
        ({"versions": {}}, "was scored by version None"),
        ({"versions": "all"}, "was scored by version None"),
        ({"seed": 1}, "is not the record of this cell"),
        (None, "is not the record of this cell"),
        ({"entropy": "high"}, "is damaged: it lacks figures, or has some that no cell has"),
        ({"entropy": -1}, "is damaged"),
        ({"gen_ppl": None}, "is damaged"),
        ({"gen_ppl": 0.5}, "is damaged"),
        ({"num_forward_calls": None}, "is damaged"),
        ({"calls_per_row": None}, "is damaged"),
        ({"pooled_entropy": "x"}, "is damaged"),
        ({"degenerate": 3}, "is damaged"),
        ('{"model": "ba', "is damaged .*cut off"),
        ("[1]", "is damaged .*holds a list"),
        ("\0" * 9, "is damaged"),
    ],
)
def test_a_cell_that_is_not_what_it_should_be_is_scored_anew(harness, tmp_path, caplog, change, message):
    """Of another version of the metric, of other settings, cut off or damaged.

    Version 1 took the special tokens for others than they are, and its figures stood beside those of version 2.
    """
    cell = harness.cell("base", 1, 1.0, 0)
    (right,) = harness.run([cell])
    path = tmp_path / "cells" / cell.file_name
    if not isinstance(change, str):
        change = json.dumps({} if change is None else right | {"gen_ppl": right["gen_ppl"] + 1} | change)
    path.write_text(change)
    (found,) = harness.run([cell])
    assert found["gen_ppl"] == right["gen_ppl"]
    assert json.loads(path.read_text())["gen_ppl"] == right["gen_ppl"]
    assert re.search(message, caplog.text)
