"""The corruption noise depends on its key and position alone, and is uniform."""

from __future__ import annotations

import pytest
import torch

from tokendrift_hf.objective.noise import row_noise, spread_times


def test_a_position_has_its_noise_whatever_is_around_it():
    """Rows of a slice, of one process, of a longer padded batch: always the same numbers."""
    whole = row_noise((3, 0, 5, 1), range(6), 9, 50)
    part = row_noise((3, 0, 5, 1), range(2, 5), 4, 50)
    for name in ("uniforms", "random_tokens", "order"):
        assert torch.equal(getattr(part, name), getattr(whole, name)[2:5, :4])
    assert torch.equal(part.time, whole.time[2:5])


def test_every_part_of_the_key_gives_other_noise():
    keys = [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]
    draws = [row_noise(key, range(1), 4, 50).uniforms for key in keys]
    assert not any(torch.equal(a, b) for i, a in enumerate(draws) for b in draws[:i])
    assert len(row_noise(keys[0], range(8), 1, 50).time.unique()) == 8


def test_the_noise_is_uniform_and_independent():
    """40000 draws: means, and correlations between what one position draws, within five standard errors."""
    noise = row_noise((0,), range(400), 100, 7)
    draws = torch.stack([noise.uniforms.flatten(), noise.order.flatten(), (noise.random_tokens.flatten() + 0.5) / 7])
    assert draws.mean(1).tolist() == pytest.approx([0.5] * 3, abs=5 * (1 / 12 / 40000) ** 0.5)
    assert (torch.corrcoef(draws) - torch.eye(3)).abs().max() < 5 / 40000**0.5
    assert noise.random_tokens.flatten().bincount().tolist() == pytest.approx([40000 / 7] * 7, rel=0.07)
    assert float(noise.time.mean()) == pytest.approx(0.5, abs=5 * (1 / 12 / 400) ** 0.5)


def test_spread_times_cover_the_interval_evenly_at_every_size():
    for count in (10, 100, 1000):
        times = spread_times(range(count)).sort().values
        gaps = torch.diff(times, prepend=torch.zeros(1, dtype=torch.float64), append=torch.ones(1, dtype=torch.float64))
        assert gaps.max() < 2.7 / count
