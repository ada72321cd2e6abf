"""Diagnostics: means between two log lines, over micro-steps and processes."""

from __future__ import annotations

import pytest
import torch

from tokendrift_hf.objective.drift import DriftField
from tokendrift_hf.training.diagnostics import Diagnostics


def test_means_are_taken_and_forgotten():
    diagnostics = Diagnostics()
    assert diagnostics.means(lambda x: x) == {}
    for value in (1.0, 2.0, 6.0):
        diagnostics.note(a=torch.tensor(value), b=torch.tensor(2 * value, requires_grad=True))
    assert diagnostics.means(lambda x: x) == {"a": 3.0, "b": 6.0}
    diagnostics.note(a=torch.tensor(5.0))
    assert diagnostics.means(lambda x: 2 * x) == {"a": 10.0}


def test_the_drift_is_noted_per_temperature_however_small():
    """A norm of 1e-60 is far below every float32."""
    drift = DriftField(torch.zeros(1, 2), torch.tensor([1e-60, 0.5], dtype=torch.float64), torch.tensor([1.0, 3.0]))
    real, generated = torch.tensor([[0.0, 0.0], [2.0, 0.0]]), torch.tensor([[1.0, 3.0]])
    diagnostics = Diagnostics()
    diagnostics.note_drift(drift, real, generated, [0.02, 1])
    found = diagnostics.means(lambda x: x)
    assert found.keys() == {
        "drift_norm_0.02",
        "drift_norm_1",
        "effective_references_0.02",
        "effective_references_1",
        "feature_distance",
    }
    assert found["drift_norm_0.02"] == pytest.approx(1e-60, rel=1e-9, abs=0)
    assert found["effective_references_1"] == 3 and found["feature_distance"] == 3
