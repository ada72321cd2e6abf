"""The NELBO perplexity: known values, and a standard error that covers the truth."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import tiny_model
from stand_ins import SPECIAL, V, masked_lm, text_rows

from tokendrift_hf import as_diffusion
from tokendrift_hf.evaluation.likelihood import nelbo_perplexity


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

    head_names = ()

    def forward(self, input_ids, timesteps, **kwargs):
        return SimpleNamespace(hidden_states=(input_ids[..., None], timesteps[:, None]))

    def logits(self, hidden, c):
        return hidden  # of a vocabulary that does not matter

    @property
    def process(self):
        def nelbo(logits, x_0, x_t, t):
            return 9 * t[:, None] ** 2 + x_0 + 4 * x_t - 2

        return SimpleNamespace(
            mask_id=None,
            corruptible=lambda x_0: torch.ones_like(x_0, dtype=torch.bool),
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


def test_one_text_has_a_value_and_no_standard_error():
    rows = torch.arange(16)[None]
    found = nelbo_perplexity(tiny_model("mdlm"), rows, num_draws=4)
    assert found["nelbo_ppl"] == pytest.approx(math.exp(found["nelbo"]))
    assert found["nelbo_of_texts"] == pytest.approx([found["nelbo"]])
    assert found["nelbo_se"] is None
    assert found["nelbo_ppl_se"] is None


def test_every_text_has_its_value_in_the_order_given():
    """Rows of one token each, whose NELBO is known: 9 t^2 on average 3, the token itself, and noise."""
    tokens = torch.tensor([7, 0, 11, 3])
    found = nelbo_perplexity(KnownNelbo(), tokens[:, None].expand(-1, 4), num_draws=2000)
    assert found["nelbo_of_texts"] == pytest.approx((3.003 + tokens).tolist(), abs=0.2)
    assert sum(found["nelbo_of_texts"]) / 4 == pytest.approx(found["nelbo"])


@pytest.mark.parametrize("rows", [torch.zeros(0, 16, dtype=torch.long), torch.zeros(16, dtype=torch.long)])
def test_nelbo_of_no_text_is_refused(rows):
    with pytest.raises(ValueError, match="rows of token ids"):
        nelbo_perplexity(tiny_model("mdlm"), rows)


def test_kept_ids_are_neither_predicted_nor_counted():
    """A model that predicts all tokens alike: the logarithm of their number, which leaves out the kept ids."""
    model = as_diffusion(masked_lm("bert"), **SPECIAL)
    with torch.no_grad():
        for parameter in model.cls.predictions.parameters():
            parameter.zero_()
    rows = torch.tensor([row["input_ids"] for row in text_rows(64)])
    measured = nelbo_perplexity(model, rows, num_draws=32)
    assert measured["nelbo"] == pytest.approx(math.log(V - 4), abs=3 * measured["nelbo_se"])
    assert measured["nelbo_se"] < 0.25
