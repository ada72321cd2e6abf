"""Samples during training: what is measured and kept, and the guard against a collapse of entropy."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
import torch
from conftest import tiny_model
from toys import config, logged, make_trainer, toy_rows
from transformers import TrainerCallback

from tokendrift_hf import GenPPL
from tokendrift_hf.training.monitor import SampleMonitor, entropy_ratio, mean_entropy, plot_dynamics, sampled_points


class Collapse(TrainerCallback):
    """Makes one token all but certain from step 2 on."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                model.backbone.output_layer.linear.bias[3] += 100


def test_entropy_is_that_of_the_token_counts():
    rows = [[1, 1, 2, 3], [5, 5, 5, 5], [0, 1, 2, 3]]
    expected = [-sum(n / 4 * math.log(n / 4) for n in Counter(row).values()) for row in rows]
    assert mean_entropy(torch.tensor(rows)) == pytest.approx(sum(expected) / 3, rel=1e-6)


def test_logs_gen_ppl_and_entropy_and_writes_the_dynamics(text_model, text_files, tmp_path):
    """The logged values are those of GenPPL on samples from the fixed seed; they select the best model."""
    model, tokenizer = text_model
    rows = [{"input_ids": tokenizer("one two three four five six")["input_ids"][:8]}] * 8
    trainer = make_trainer(
        tmp_path,
        model=type(model)(model.config),
        rows=rows,
        arguments={"eval_dataset": rows[:2], "processing_class": tokenizer},
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_gen_ppl_nfe2",
        greater_is_better=False,
        per_device_eval_batch_size=2,
        gen_ppl_num_steps=[1, 2],
        gen_ppl_num_samples=3,
        gen_ppl_judge=str(text_files / "judge"),
        ema_decay=0.5,
    )
    trainer.train()
    values = logged(trainer, "eval_gen_ppl_nfe2")
    assert len(values) == 3 and trainer.state.best_metric == min(values[1:])
    points = json.loads((tmp_path / "dynamics.json").read_text())
    assert [point["step"] for point in points] == [0, 1, 2]
    names = {f"eval_{kind}_nfe{n}" for kind in ("gen_ppl", "entropy") for n in (1, 2)}
    assert all(point.keys() == names | {"step"} for point in points)
    assert (tmp_path / "dynamics.png").read_bytes().startswith(b"\x89PNG")

    metrics = trainer.evaluate()
    with trainer.ema.applied(trainer.model):
        ids = trainer.model.generate(num_samples=3, num_steps=2, seed=trainer.args.seed)
    metric = GenPPL(model_id=str(text_files / "judge"), tokenizer=tokenizer)
    with pytest.warns(UserWarning, match="Only 3 samples"):
        record = metric.compute(predictions=ids)
    assert metrics["eval_gen_ppl_nfe2"] == pytest.approx(record["gen_ppl"], rel=1e-5)
    assert metrics["eval_entropy_nfe2"] == pytest.approx(record["entropy"], rel=1e-5)


def test_a_collapse_stops_the_run_and_is_never_the_best(tmp_path, caplog):
    """The metric would call the collapsed model the best; the guard keeps the one before."""
    trainer = make_trainer(
        tmp_path,
        arguments={"eval_dataset": toy_rows(4), "callbacks": [Collapse()]},
        learning_rate=1e-3,
        max_steps=6,
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="eval_entropy_nfe2",
        greater_is_better=False,
        gen_ppl_num_steps=[2],
        gen_ppl_num_samples=4,
        gen_ppl_min_entropy_ratio=0.5,
    )
    trainer.train()
    entropies = logged(trainer, "eval_entropy_nfe2")
    assert trainer.state.global_step == 2 and entropies[-1] < 0.5 * entropies[0] <= entropies[1]
    assert trainer.state.best_global_step == 1 and trainer.state.best_metric == entropies[1]
    assert trainer.model.backbone.output_layer.linear.bias[3] < 50
    assert "Stopping at step 2" in caplog.text and "gen_ppl_min_entropy_ratio asks for 50 %" in caplog.text


def test_the_monitor_draws_no_id_that_the_tokenizer_lacks(text_model, tmp_path):
    """The released DUO has one id more than its tokenizer, and here it is by far the likeliest."""
    tokenizer = text_model[1]
    model = tiny_model("duo", vocab_size=len(tokenizer) + 1)
    with torch.no_grad():
        model.backbone.output_layer.linear.bias[-1] += 100
    args = config(tmp_path, gen_ppl_num_samples=3)
    ids = SampleMonitor(args, tokenizer).draw(model, 2)
    assert ids.shape == (3, 16)
    assert ids.max() < len(tokenizer)
    assert (SampleMonitor(args, None).draw(model, 2) == len(tokenizer)).all()


def test_a_collapse_to_the_end_of_text_is_seen_and_stops_the_run(text_model, text_files, tmp_path):
    """Samples of nothing but eos have no Gen.-PPL: it is logged as nan, and the guard goes by their entropy."""
    model, tokenizer = text_model

    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            with torch.no_grad():
                model.backbone.output_layer.linear.bias[tokenizer.eos_token_id] += 1000

    rows = [{"input_ids": tokenizer("one two three four five six")["input_ids"][:8]}] * 4
    trainer = make_trainer(
        tmp_path,
        model=type(model)(model.config),
        rows=rows,
        arguments={"eval_dataset": rows[:2], "processing_class": tokenizer, "callbacks": [Ends()]},
        learning_rate=1e-3,
        eval_strategy="steps",
        eval_steps=1,
        gen_ppl_num_steps=[2],
        gen_ppl_num_samples=3,
        gen_ppl_judge=str(text_files / "judge"),
        gen_ppl_min_entropy_ratio=0.5,
    )
    trainer.train()
    assert trainer.state.global_step == 1
    before, after = logged(trainer, "eval_gen_ppl_nfe2")
    assert math.isfinite(before)
    assert math.isnan(after)
    first, last = json.loads((tmp_path / "dynamics.json").read_text())
    assert last.keys() == first.keys() - {"eval_gen_ppl_nfe2"}
    assert (tmp_path / "dynamics.png").is_file()


def test_the_ratio_is_of_the_worst_number_of_steps():
    log = [
        {"loss": 1.0, "step": 0},
        {"eval_entropy_nfe4": 4.0, "eval_entropy_nfe16": 5.0, "eval_gen_ppl_nfe4": 9.0, "eval_loss": 1.0, "step": 0},
        {"eval_entropy_nfe4": 3.0, "eval_entropy_nfe16": 4.5, "eval_gen_ppl_nfe4": 8.0, "eval_loss": 1.0, "step": 5},
    ]
    assert entropy_ratio(log) == 0.75 and entropy_ratio(log[:1]) == 1.0
    assert sampled_points(log)[1] == {
        "eval_entropy_nfe4": 3.0,
        "eval_entropy_nfe16": 4.5,
        "eval_gen_ppl_nfe4": 8.0,
        "step": 5,
    }


def test_the_dynamics_figure_has_a_line_for_every_number_of_steps(tmp_path):
    points = [{"step": step} for step in (0, 5)]
    for n in (4, 16):
        points[0] |= {f"eval_gen_ppl_nfe{n}": 90.0 + n, f"eval_entropy_nfe{n}": 4.0}
        points[1] |= {f"eval_gen_ppl_nfe{n}": 50.0 + n, f"eval_entropy_nfe{n}": 3.5}
    axes = plot_dynamics(points, tmp_path / "dynamics.png").axes
    assert [axis.get_ylabel() for axis in axes] == ["Gen.-PPL", "entropy (nats)"]
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes[0].lines}
    assert lines == {"4": ([0, 5], [94.0, 54.0]), "16": ([0, 5], [106.0, 66.0])}
    assert [list(line.get_ydata()) for line in axes[1].lines] == [[4.0, 3.5]] * 2


def test_samples_do_not_depend_on_the_batch_size(tmp_path):
    values = []
    for batch_size in (1, 2, 8):
        trainer = make_trainer(
            tmp_path,
            model=tiny_model("duo"),
            gen_ppl_num_steps=[3],
            gen_ppl_num_samples=5,
            per_device_eval_batch_size=batch_size,
        )
        values.append(trainer.monitor.draw(trainer.model, 3))
    assert torch.equal(values[0], values[1]) and torch.equal(values[0], values[2]) and values[0].shape == (5, 16)
