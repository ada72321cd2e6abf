"""A model that writes a step at a time: the same text, its own time, and an end when nobody listens."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from conftest import tiny_model

from tokendrift_hf.demo.writer import write_steps

ARGUMENTS = {"num_samples": 2, "num_steps": 6, "seed": 3, "return_dict_in_generate": True}


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_steps_and_result_are_those_of_generate(kind):
    model = tiny_model(kind)
    seen = []
    expected = model.generate(**ARGUMENTS, callback=seen.append)
    *steps, (output, _) = write_steps(model, ARGUMENTS)
    assert [step.step for step, _ in steps] == [step.step for step in seen]
    for (step, _), other in zip(steps, seen, strict=True):
        assert torch.equal(step.tokens, other.tokens)
    assert torch.equal(output.sequences, expected.sequences)
    assert output.num_forward_calls == expected.num_forward_calls


def count_calls(model, monkeypatch, pause: float = 0.0) -> list[int]:
    """A list that grows with every call of the network, each of which takes `pause` seconds longer."""
    calls, logits = [], model.logits

    def counted(*args, **kwargs):
        calls.append(1)
        time.sleep(pause)
        return logits(*args, **kwargs)

    monkeypatch.setattr(model, "logits", counted)
    return calls


def test_closing_ends_the_work_at_the_step_that_it_has_reached(monkeypatch):
    model = tiny_model("mdlm")
    before = threading.active_count()
    calls = count_calls(model, monkeypatch)
    steps = write_steps(model, ARGUMENTS | {"num_steps": 60})
    for _ in range(20):
        next(steps)
    reached = len(calls)
    assert 1 <= reached <= 20
    steps.close()
    assert threading.active_count() == before, "the thread has ended"
    assert len(calls) == reached
    assert not model.training, "generate() has put everything back"


def test_an_iterator_that_was_never_asked_ends_as_well():
    before = threading.active_count()
    write_steps(tiny_model("mdlm"), ARGUMENTS).close()
    assert threading.active_count() == before


def test_only_the_models_own_time_counts(monkeypatch):
    """Between two steps the thread waits, so a slow page or another column costs a model nothing."""
    model = tiny_model("mdlm")
    calls = count_calls(model, monkeypatch, pause=0.02)
    seconds = []
    for _, so_far in write_steps(model, ARGUMENTS):
        time.sleep(0.1)
        seconds.append(so_far)
    assert seconds == sorted(seconds)
    assert 0.02 * len(calls) <= seconds[-1] < 0.02 * len(calls) + 0.1 * (len(seconds) - 1)


def test_an_error_arrives_where_the_steps_are_awaited():
    with pytest.raises(ValueError, match="num_steps=0"):
        list(write_steps(tiny_model("mdlm"), ARGUMENTS | {"num_steps": 0}))
