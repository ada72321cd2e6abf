"""The feature queue against a plain list, and against the recorded ring buffer of the original drifting code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tokendrift_hf.objective.queue import FeatureQueue

FIXTURES = Path(__file__).parents[1] / "fixtures"


def test_holds_the_newest_rows_in_order_when_pushes_do_not_divide_the_size():
    queue, pushed = FeatureQueue(10), []
    for count in (4, 4, 4, 4, 13, 1, 10):
        rows = (len(pushed) + torch.arange(count))[:, None] * torch.tensor([[1.0, -2.0]])
        queue.push(rows)
        pushed += list(rows)
        torch.testing.assert_close(queue.features, torch.stack(pushed[-10:]), rtol=0, atol=0)
        assert len(queue) == min(10, len(pushed))


def test_holds_what_the_recorded_ring_buffer_holds():
    """The bank of the original code keeps one ring a class; read from its pointer on, a ring is a queue."""
    recorded = json.loads((FIXTURES / "memory_bank.json").read_text())
    size = recorded["max_size"]
    queues = [FeatureQueue(size) for _ in range(recorded["num_classes"])]
    for add in recorded["adds"]:
        samples, labels = torch.tensor(add["samples"]), torch.tensor(add["labels"])
        for label, queue in enumerate(queues):
            if (labels == label).any():
                queue.push(samples[labels == label])
            ring = torch.tensor(add["bank"][label])
            count, pointer = add["count"][label], add["ptr"][label]
            expected = ring.roll(-pointer, dims=0) if count == size else ring[:count]
            assert len(queue) == count
            if count:
                torch.testing.assert_close(queue.features, expected, rtol=0, atol=0)


def test_empty_and_part_filled_queues_add_no_rows_to_the_references():
    current = torch.randn(3, 2)
    queue = FeatureQueue(8)
    assert len(queue) == 0 and queue.features.numel() == 0
    torch.testing.assert_close(queue.union(current), current, rtol=0, atol=0)
    queue.push(current + 1)
    torch.testing.assert_close(queue.union(current), torch.cat([current, current + 1]), rtol=0, atol=0)


def test_size_zero_stays_empty():
    queue, current = FeatureQueue(0), torch.randn(3, 2)
    queue.push(current)
    assert len(queue) == 0
    torch.testing.assert_close(queue.union(current), current, rtol=0, atol=0)
    FeatureQueue(0).load_state_dict(queue.state_dict())


def test_rows_are_detached_float32_copies():
    features = torch.randn(3, 2, dtype=torch.bfloat16, requires_grad=True)
    queue = FeatureQueue(2)
    queue.push(features)
    before = queue.features.clone()
    with torch.no_grad():
        features.zero_()
    assert not queue.features.requires_grad and queue.features.dtype == torch.float32
    torch.testing.assert_close(queue.features, before, rtol=0, atol=0)
    assert queue.features.untyped_storage().nbytes() == 2 * 2 * 4, "the evicted row is still in memory"


@pytest.mark.parametrize("pushes", [[], [3], [4, 4, 4]])
def test_state_survives_a_safetensors_file_and_the_next_push_is_the_same(pushes, tmp_path):
    queue, restored = FeatureQueue(10), FeatureQueue(10)
    for count in pushes:
        queue.push(torch.randn(count, 3))
    save_file(queue.state_dict(), tmp_path / "queue.safetensors")
    restored.load_state_dict(load_file(tmp_path / "queue.safetensors"))
    rows = torch.randn(5, 3)
    for each in (queue, restored):
        each.push(rows)
    torch.testing.assert_close(restored.features, queue.features, rtol=0, atol=0)


def test_a_state_stays_what_it_was_although_nothing_is_copied():
    """A trainer takes one at every step, to come back to it after a bad gradient."""
    queue = FeatureQueue(3)
    queue.push(torch.ones(2, 3))
    state = queue.state_dict()
    assert state["features"].data_ptr() == queue.features.data_ptr()
    queue.push(2 * torch.ones(2, 3))
    assert state["features"].tolist() == [[1.0] * 3] * 2
    queue.load_state_dict(state)
    queue.push(3 * torch.ones(2, 3))
    assert state["features"].tolist() == [[1.0] * 3] * 2


def test_a_smaller_queue_restores_the_newest_rows():
    queue, smaller = FeatureQueue(10), FeatureQueue(4)
    queue.push(torch.arange(10.0)[:, None])
    smaller.load_state_dict(queue.state_dict())
    assert smaller.features.flatten().tolist() == [6, 7, 8, 9]


@pytest.mark.parametrize("size", [-1, 1.5, "4", None, True])
def test_a_size_that_is_no_whole_number_is_refused(size):
    with pytest.raises(ValueError, match=f"0 \\(no queue\\) or more, got {size!r}"):
        FeatureQueue(size)


@pytest.mark.parametrize(
    ("rows", "error", "message"),
    [
        (torch.zeros(3), ValueError, r"\[rows, m\], got shape \[3\]"),
        (torch.zeros(2, 6), ValueError, "size 5, got 6"),
        ([[0.0] * 5], TypeError, "a floating tensor, but they are list"),
        (torch.zeros(2, 5).long(), TypeError, "a floating tensor, but they are torch.int64"),
        (torch.tensor([[0.0] * 5, [float("nan")] * 5]), ValueError, "1 of 2 features hold NaN or infinite numbers"),
    ],
)
def test_rows_that_are_no_features_are_named_and_not_taken_in(rows, error, message):
    queue = FeatureQueue(4)
    queue.push(torch.ones(2, 5))
    with pytest.raises(error, match=message):
        queue.push(rows)
    assert queue.features.tolist() == [[1.0] * 5] * 2
    if "NaN" not in message:
        with pytest.raises(error, match=message):
            queue.union(rows)


@pytest.mark.parametrize("state", [{"rows": torch.zeros(2, 5)}, {"features": [[0.0]]}, {"features": torch.ones(2)}, []])
def test_a_state_of_something_else_is_refused(state):
    with pytest.raises(ValueError, match="A queue state is"):
        FeatureQueue(4).load_state_dict(state)
