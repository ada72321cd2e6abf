"""logits_processor: transformers' processors on the clean-token prediction."""

from __future__ import annotations

import pytest
import torch
from conftest import TINY, tiny_model
from tables import enumerate_run, histogram, p_value, psi_laws, stub
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
)
from transformers.models.diffusion_gemma.generation_diffusion_gemma import LinearTemperatureScheduleLogitsProcessor

from tokendrift_hf.hub.samplers_tokendrift import SAMPLERS

KINDS = ["mdlm", "duo"]
MASK = TINY["vocab_size"] - 1


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


class Spy(LogitsProcessor):
    """Changes nothing, and notes what it was given."""

    def __init__(self):
        self.calls = []

    def __call__(self, input_ids, scores, cur_step):
        self.calls.append((input_ids.clone(), scores.clone(), cur_step))
        return scores


@pytest.mark.parametrize("kind", KINDS)
def test_processors_act_on_the_prediction_with_the_enumerated_law(kind):
    """Not on the posterior: a processor that sharpens is the temperature."""
    model = stub(kind, V=4, seed=2)
    processors = LogitsProcessorList([TemperatureLogitsWarper(0.6)])
    law = enumerate_run(model, psi_laws(model.process, 2, [1.0] * 2), lambda logits: (logits / 0.6).clamp_min(-1e6))
    assert p_value(histogram(model, num_steps=2, logits_processor=processors), law) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_processor_sees_the_row_its_logits_and_the_steps_that_are_left(kind):
    model, spy, N = tiny_model(kind), Spy(), 4
    plain = model.generate(num_samples=3, num_steps=N, seed=0, rows_per_call=1)
    seen = model.generate(num_samples=3, num_steps=N, seed=0, rows_per_call=1, logits_processor=[spy])
    assert seen.equal(plain)
    assert {left for _, _, left in spy.calls} == ({1, 2, 3, 4} if kind == "mdlm" else {0, 1, 2, 3, 4})
    for ids, scores, left in spy.calls:
        assert ids.shape == (len(scores), 16) and scores.shape == (len(scores), 23)
        assert (ids == ids[0]).all(), "positions of more than one row"
        t = torch.tensor([max(left / N, 1e-5)])
        with torch.no_grad():
            logits = model(ids[:1], timesteps=t).logits[0]
        for line in scores:  # each is the prediction at one of the row's positions
            assert (logits[:, :MASK] - line[:MASK]).abs().amax(1).min() < 1e-4


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS])
def test_rows_of_a_batch_see_only_themselves(sampler):
    """A repetition penalty looks at the row's ids: padding and other rows have no part in it."""
    model = tiny_model("mdlm")
    prompts, exists = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 0, 0, 0]]), torch.tensor([[1] * 5, [1, 1, 0, 0, 0]])
    settings = dict(max_new_tokens=8, rows_per_call=1, sampler=sampler, pad_token_id=0)
    settings |= {} if sampler == "first_hitting" else {"num_steps": 4}
    processors = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(3.0)])
    batch = model.generate(
        prompts, attention_mask=exists, generator=generators(1, 2), logits_processor=processors, **settings
    )
    for row, generator in enumerate(generators(1, 2)):
        n = int(exists[row].sum())
        alone = model.generate(prompts[row : row + 1, :n], generator=generator, logits_processor=processors, **settings)
        assert batch[row, : n + 8].equal(alone[0])
    without = model.generate(prompts, attention_mask=exists, generator=generators(1, 2), **settings)
    assert not batch.equal(without)


@pytest.mark.parametrize("kind", KINDS)
def test_processors_of_transformers_do_what_the_settings_of_their_name_do(kind):
    model = tiny_model(kind)
    processors = [SuppressTokensLogitsProcessor([3, 4, 5], device="cpu")]
    x = model.generate(num_samples=8, num_steps=3, seed=0, logits_processor=processors)
    assert not torch.isin(x, torch.tensor([3, 4, 5])).any()
    schedule = LinearTemperatureScheduleLogitsProcessor(t_min=1e-4, t_max=2e-4, max_denoising_steps=3)
    cold = model.generate(num_steps=3, seed=0, logits_processor=[schedule])
    assert cold.equal(model.generate(num_steps=3, seed=0, temperature=0.0))


def test_certainty_is_that_after_the_processors():
    """What a processor forbids can make no position sure, and confidence is what the processors leave."""
    model, steps = tiny_model("mdlm"), []
    model.generate(
        num_steps=4,
        seed=0,
        sampler="confidence",
        logits_processor=[TemperatureLogitsWarper(1e-3)],
        callback=steps.append,
    )
    confidence = steps[-1].confidence
    assert (confidence > 0.99).float().mean() > 0.8


def test_the_mask_is_never_predicted_whatever_a_processor_says():
    class Everything(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.zeros_like(scores)

    x = tiny_model("mdlm").generate(num_samples=20, num_steps=3, seed=0, logits_processor=[Everything()])
    assert (x != MASK).all()


def test_processors_that_break_the_logits_are_named():
    class Less(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores[:, :3]

    class Nothing(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return torch.full_like(scores, -torch.inf)

    model = tiny_model("duo")
    with pytest.raises(ValueError, match=r"logits_processor made \[\d+, 3\] of logits \[\d+, 23\]. It must keep"):
        model.generate(num_steps=2, seed=0, logits_processor=[Less()])
    with pytest.raises(ValueError, match="or logits_processor ruled out every token"):
        model.generate(num_steps=2, seed=0, logits_processor=[Nothing()])
