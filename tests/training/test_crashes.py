"""Twenty kills at file operations and micro-batches, spread over a run: the short form of tests/crash_matrix.py."""

from __future__ import annotations

import signal

import pytest
from crash_matrix import survive, whole


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return whole("all weights", tmp_path_factory.mktemp("whole") / "run")


@pytest.mark.parametrize("part", range(4))
def test_a_run_that_is_killed_again_and_again_ends_like_the_one_that_was_not(part, uninterrupted, tmp_path):
    """Five kills for each of four runs, from the first event to the last. No complete checkpoint is ever lost."""
    events = uninterrupted["events"]
    assert events > 60
    kills = [(1 + (4 * i + part) * (events - 1) // 19, signal.SIGKILL, 0) for i in range(5)]
    figures = survive("all weights", tmp_path / "run", kills, uninterrupted)
    assert figures["killed"] >= 3
    assert figures.total() == 5
