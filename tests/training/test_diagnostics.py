"""Diagnostics: means between two log lines, over micro-steps and processes."""

from __future__ import annotations

import pytest
import torch

from tokendrift_hf.training.diagnostics import Diagnostics


def test_means_are_taken_and_forgotten():
    diagnostics = Diagnostics()
    assert diagnostics.means(lambda x: x) == {}
    for value in (1.0, 2.0, 6.0):
        diagnostics.note(a=torch.tensor(value), b=torch.tensor(2 * value, requires_grad=True))
    assert diagnostics.means(lambda x: x) == {"a": 3.0, "b": 6.0}
    diagnostics.note(a=torch.tensor(5.0))
    assert diagnostics.means(lambda means: [2 * mean for mean in means]) == {"a": 10.0}


def test_a_value_far_below_float32_is_kept():
    diagnostics = Diagnostics()
    diagnostics.note(drift_norm=torch.tensor(1e-60, dtype=torch.float64))
    assert diagnostics.means(lambda x: x)["drift_norm"] == pytest.approx(1e-60, rel=1e-9, abs=0)
