"""The harness: cells are reproducible and kept, tables say what the records say."""

from __future__ import annotations

import copy
import json
import math
import multiprocessing
import os
import signal
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_model
from toys import record

import tokendrift_hf
from tokendrift_hf import GenPPL
from tokendrift_hf.evaluation.comparison import (
    ENTROPY_CURVE,
    evaluate_models,
    gen_ppl_at_entropy,
    matching_temperature,
    summarise,
)
from tokendrift_hf.evaluation.grid import Cell, Harness
from tokendrift_hf.evaluation.likelihood import nelbo_perplexity


@pytest.fixture
def harness(tmp_path, text_model, text_judge):
    return Harness({"base": text_model[0]}, text_model[1], text_judge, tmp_path / "cells", batch_size=3)


def test_cells_are_drawn_once_and_equal_whatever_the_batch_size(harness, tmp_path, text_model, text_judge):
    cell = harness.cell("base", 2, 1.0, 0, 4)
    (record,) = harness.run([cell])
    assert record["num_samples"] == 4 and record["gen_ppl"] > 1 and 0 < record["num_forward_calls"] <= 3
    kept = json.loads((tmp_path / "cells" / cell.file_name).read_text())
    assert kept == json.loads(json.dumps(record))
    kept["gen_ppl"] = -1.0
    (tmp_path / "cells" / cell.file_name).write_text(json.dumps(kept))
    assert harness.run([cell])[0]["gen_ppl"] == -1.0, "a finished cell is read, not computed again"
    whole = Harness({"base": text_model[0]}, text_model[1], text_judge, tmp_path / "other", batch_size=4)
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
        names.add(Harness({"m": model}, text_model[1], text_judge, tmp_path).cell("m", 2, 1.0, 0, 4).file_name)
    model.set_attn_implementation("eager")
    names.add(Harness({"m": model}, text_model[1], text_judge, tmp_path).cell("m", 2, 1.0, 0, 4).file_name)
    assert len(names) == 4


def test_a_record_names_the_dtype_of_the_network_and_of_the_judge(text_model, text_judge, tmp_path):
    harness = Harness({"m": text_model[0]}, text_model[1], text_judge, tmp_path, dtype="bfloat16")
    (record,) = harness.run([harness.cell("m", 1, 1.0, 0, 2)])
    assert (record["dtype"], record["judge_dtype"]) == ("bfloat16", "float32")


def test_models_of_different_vocabularies_are_refused(text_model, text_judge, tmp_path):
    with pytest.raises(ValueError, match="different numbers of tokens"):
        Harness({"a": text_model[0], "b": tiny_model("mdlm")}, text_model[1], text_judge, tmp_path)


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
        (found,) = harness.run([harness.cell("base", 2, temperature, 5, 4)])
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
        assert {name: found[name] for name in expected.keys() - {"versions"}} == {
            name: value for name, value in expected.items() if name != "versions"
        }
        assert found["versions"] == expected["versions"] | {"tokendrift_hf": tokendrift_hf.__version__}


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
        harness = Harness({"base": used}, tokenizer, judge, tmp_path)
        values += [found["gen_ppl"] for found in harness.run([harness.cell("base", 2, 1.0, 0, 3)])]
    assert len(set(values[:3])) == 3 and len(list(tmp_path.iterdir())) == 4
    again = Harness({"base": copy.deepcopy(model)}, tokenizer, text_judge | {"batch_size": 1}, tmp_path)
    again.draw = None
    assert again.run([again.cell("base", 2, 1.0, 0, 3)])[0]["gen_ppl"] == values[0]


def test_a_killed_run_loses_the_cell_in_flight_only(harness, tmp_path):
    """SIGKILL in the third of four cells; the rest of a record that was being written is in the way of nothing."""
    cells = harness.grid([1, 2], [1.0], num_seeds=2, num_samples=2)
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
        harness.run([harness.cell("base", 1, 1.0, 0, 2)])
    assert list((tmp_path / "cells").glob("*.json")) == []


def test_summary_is_mean_and_sample_standard_deviation():
    rows = summarise([record("a", 0, 10.0, 3.0), record("a", 1, 14.0, 3.2), record("b", 0, 5.0, 1.0)])
    assert [row["model"] for row in rows] == ["a", "b"]
    assert rows[0]["gen_ppl"] == 12.0 and rows[0]["gen_ppl_sd"] == pytest.approx(8**0.5)
    assert rows[0]["entropy"] == pytest.approx(3.1) and rows[1]["gen_ppl_sd"] is None, "of one seed"


def test_matching_temperature_interpolates_and_stays_on_the_curve():
    curve = {0.5: 2.0, 0.75: 3.0, 1.0: 4.0}
    assert matching_temperature(curve, 3.5) == pytest.approx(0.875)
    assert matching_temperature(curve, 3.0) == pytest.approx(0.75)
    assert matching_temperature(curve, 1.0) == 0.5 and matching_temperature(curve, 9.0) == 1.0


def test_gen_ppl_at_entropy_is_log_linear_between_temperatures():
    rows = summarise([record("a", 0, 100.0, 4.0), record("a", 0, 10.0, 3.0, temperature=0.5), record("b", 0, 7.0, 2.0)])
    values = gen_ppl_at_entropy(rows, 3.5)
    assert values["a", 4] == pytest.approx(1000**0.5)
    assert values["b", 4] is None, "no extrapolation"
    assert gen_ppl_at_entropy(rows, 4.5)["a", 4] is None


def _nelbo_of_uniform_prediction(kind, K=23):
    """By integrating the losses of the two processes over t and x_t, for a prediction that is the same for all ids."""
    if kind == "mdlm":
        return math.log(K - 1)  # the mask is ruled out; the weight 1/t is the inverse of the share that is masked
    t = torch.linspace(1e-3, 1, 100_001, dtype=torch.float64)
    a = 1 - (1 - 1e-3) * t
    noise, clean = 1 - a, K * a + 1 - a
    kept = (K - 1) * (1 - noise / clean + noise / clean * (noise / clean).log())
    changed = 1 - clean / noise + clean / noise * (clean / noise).log()
    density = (1 - 1e-3) / (K * a) * ((a + (1 - a) / K) * kept + (1 - a) * (K - 1) / K * changed)
    return float(torch.trapezoid(density, t)) / (1 - 1e-3)


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_nelbo_of_a_uniform_prediction(kind):
    """A model that predicts all tokens alike has a known NELBO, and more draws lower the standard error."""
    model = tiny_model(kind)
    with torch.no_grad():
        model.backbone.output_layer.linear.weight.zero_()
        model.backbone.output_layer.linear.bias.zero_()
    rows = torch.randint(0, 20, (64, 16), generator=torch.Generator().manual_seed(0))
    few, many = (nelbo_perplexity(model, rows, num_draws=n, seed=1, batch_size=24) for n in (1, 32))
    assert many["nelbo"] == pytest.approx(_nelbo_of_uniform_prediction(kind), abs=0.1)
    assert many["nelbo_ppl"] == pytest.approx(math.exp(many["nelbo"]))
    assert 0 < many["nelbo_ppl_se"] < few["nelbo_ppl_se"]
    assert nelbo_perplexity(model, rows, seed=1, batch_size=64)["nelbo"] == pytest.approx(few["nelbo"], rel=1e-6)


class KnownNelbo(torch.nn.Module):
    """Its NELBO per token is 9 t^2 + x_0 + noise in [-2, 2): on average 3.003 + 11 / 2 with ids from 0 to 11."""

    config, device = SimpleNamespace(vocab_size=12), torch.device("cpu")

    def forward(self, input_ids, timesteps):
        return SimpleNamespace(logits=None)

    @property
    def process(self):
        def nelbo(logits, x_0, x_t, t):
            return 9 * t[:, None] ** 2 + x_0 + 4 * x_t - 2

        return SimpleNamespace(
            corrupt=lambda x_0, t, uniforms, random_tokens: uniforms,
            nelbo=nelbo,
            predicted_positions=lambda x_t: torch.ones_like(x_t, dtype=torch.bool),
        )


@pytest.mark.parametrize("num_draws", [1, 3])
def test_the_standard_error_of_the_nelbo_covers_the_truth(num_draws):
    """400 data sets of 24 rows: the error is the spread of the estimates, and 95 % lie within two of them.

    Rows of text differ (each row here is one token repeated), the noise differs from draw to draw, and the trend in t,
    which stratification removes from the mean, is not counted: the plain spread over rows would be 1.3 times too wide.
    """
    truth = 9 * (1 - 1e-3**3) / (3 * (1 - 1e-3)) + 5.5
    generator = torch.Generator().manual_seed(0)
    estimates, errors = [], []
    for seed in range(400):
        rows = torch.randint(12, (24, 1), generator=generator).expand(-1, 4)
        found = nelbo_perplexity(KnownNelbo(), rows, num_draws, seed=seed)
        estimates.append(found["nelbo"])
        errors.append(found["nelbo_se"])
        assert found["nelbo_ppl_se"] == pytest.approx(found["nelbo_ppl"] * found["nelbo_se"])
    estimates, errors = np.array(estimates), np.array(errors)
    assert estimates.mean() == pytest.approx(truth, abs=3 * estimates.std() / 20)
    assert np.square(errors).mean() ** 0.5 == pytest.approx(estimates.std(), rel=0.12)
    covered = (np.abs(estimates - truth) < 1.96 * errors).mean()
    assert 0.91 < covered < 0.98


def test_nelbo_does_not_depend_on_the_order_in_which_documents_come():
    """Neighbours in the text are alike; ranks are drawn at random, so the error does not mistake that for precision."""
    rows = torch.arange(12).repeat_interleave(8)[:, None].expand(-1, 4)
    found = nelbo_perplexity(KnownNelbo(), rows)
    assert found["nelbo_se"] == pytest.approx((143 / 12 + 4**2 / 12 / 4) ** 0.5 / 96**0.5, rel=0.2)


def test_nelbo_needs_two_rows():
    with pytest.raises(ValueError, match="at least 2 rows"):
        nelbo_perplexity(tiny_model("mdlm"), torch.zeros(1, 16, dtype=torch.long))


def test_evaluating_models_with_real_text(harness, text_model):
    """The interpolated column, the matched rows and the NELBO come from the harness's own records."""
    tokenizer = text_model[1]
    text = [tokenizer(" ".join(dir(str)[i : i + 9]))["input_ids"][:16] for i in range(4)]
    assert {len(row) for row in text} == {16}
    results = evaluate_models(harness, [2], [0.1, 1.0], 2, 3, text=text, num_draws=2, match=("base", "base"))
    cold, warm, matched = results["rows"]
    assert (cold["temperature"], warm["temperature"], matched["model"]) == (0.1, 1.0, "base at equal entropy")
    expected = gen_ppl_at_entropy([cold, warm], results["real_text"]["entropy"])["base", 2]
    assert warm["at_text_entropy"] == expected and "at_text_entropy" not in cold | matched
    assert results["nelbo"]["base"] == nelbo_perplexity(text_model[0], torch.tensor(text), 2)
    assert {row["temperature"] for row in results["curve"]} == set(ENTROPY_CURVE)
    assert len(results["records"]) == 2 * 2 + 3 + 2 * (matched["temperature"] != 1)  # 1.0 of the curve is in the grid
    harness.run = None
    with pytest.raises(ValueError, match="at least 2 rows"):  # before any sampling
        evaluate_models(harness, [2], [1.0], 2, 3, text=text[:1])
    del harness.run
    alone = evaluate_models(harness, [2], [1.0], 2, 3, text=text)
    assert "at_text_entropy" not in alone["rows"][0], "one temperature makes no curve"


def test_mauve_of_every_cell_against_real_text(text_model, text_judge, tmp_path):
    model, tokenizer = text_model
    text = [tokenizer(" ".join(dir(str)[i : i + 9]))["input_ids"][:16] for i in range(8)]
    harness = Harness({"base": model}, tokenizer, text_judge | {"mauve_references": text}, tmp_path)
    row = evaluate_models(harness, [2], [1.0], 2, 8)["rows"][0]
    assert 0 <= row["mauve"] <= 1 and row["mauve_sd"] >= 0
    assert harness.score_text(text)["mauve"] == pytest.approx(1)
    assert harness.scoring != Harness({"base": model}, tokenizer, text_judge, tmp_path).scoring
