"""The columns: two models write the same request, and what is shown is what they wrote."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import tiny_model

from tokendrift_hf import GenPPL
from tokendrift_hf.demo.columns import BASE, REFINED, Columns
from tokendrift_hf.demo.request import Limits, Request
from tokendrift_hf.evaluation.comparison import ENTROPY_CURVE, matching_temperature
from tokendrift_hf.training.monitor import mean_entropy


@pytest.fixture(scope="module")
def pair(text_model, text_judge) -> Columns:
    base, tokenizer = text_model
    refined = tiny_model("mdlm", seed=1, vocab_size=base.config.vocab_size, num_hidden_layers=3)
    return Columns({BASE: base, REFINED: refined}, tokenizer, text_judge)


def last(iterator):
    *_, value = iterator
    return value


REQUEST = Request(num_samples=2, num_steps=4, seed=5)


def test_both_columns_hold_what_generate_writes_with_this_seed(pair):
    columns = last(pair.write(REQUEST))
    for title, model in pair.models.items():
        expected = model.generate(num_samples=2, num_steps=4, seed=5, return_dict_in_generate=True)
        assert torch.equal(columns[title].tokens, expected.sequences), title
        assert columns[title].calls == expected.num_forward_calls
        assert columns[title].entropy == mean_entropy(expected.sequences)
        assert columns[title].seconds > 0
    assert not torch.equal(columns[BASE].tokens, columns[REFINED].tokens)


def test_gen_ppl_is_the_metrics(pair, text_judge):
    column = last(pair.write_one(BASE, REQUEST))
    with pytest.warns(UserWarning, match="Only 2 samples"):
        record = GenPPL(tokenizer=pair.tokenizer, **text_judge).compute(predictions=column.tokens)
    assert column.gen_ppl["gen_ppl"] == record["gen_ppl"]
    assert column.gen_ppl["entropy"] == pytest.approx(column.entropy, abs=1e-6), "one definition of entropy"


def test_drafts_take_turns_and_lose_their_masks(pair):
    mask_id = pair.models[BASE].process.mask_id
    turns, masks = [], []
    for columns in pair.write(REQUEST):
        turns.append({title: column.num_steps for title, column in columns.items()})
        masks.append(int((columns[BASE].tokens == mask_id).sum()))
    assert turns[:4] == [{BASE: 1}, {BASE: 1, REFINED: 1}, {BASE: 2, REFINED: 1}, {BASE: 2, REFINED: 2}]
    assert masks == sorted(masks, reverse=True) and masks[0] > 0 and masks[-1] == 0


def test_what_changed_is_what_was_a_mask_before(pair):
    mask_id = pair.models[BASE].process.mask_id
    before = torch.full((2, pair.length), mask_id)
    for column in list(pair.write_one(BASE, REQUEST))[:-1]:
        assert torch.equal(column.changed, column.tokens != before)
        before = column.tokens


def test_a_prompt_is_kept_and_marked(pair):
    column = last(pair.write_one(REFINED, replace(REQUEST, prompt="Return [gap 3] of")))
    text = [pair.tokenizer.decode(row[column.kept]) for row in column.tokens]
    assert text == [pair.tokenizer.bos_token + "Return of"] * 2
    assert column.tokens.shape[1] == int(column.kept.sum()) + 3
    assert not column.changed[:, column.kept].any()


@pytest.mark.parametrize("sampler", ["ancestral", "psi", "first_hitting", "confidence", "margin", "entropy"])
def test_every_sampler_offered_ends_without_masks(pair, sampler):
    assert sampler in pair.samplers
    column = last(pair.write_one(BASE, replace(REQUEST, sampler=sampler)))
    assert not (column.tokens == pair.models[BASE].process.mask_id).any()


def test_a_model_without_masks_writes_and_offers_its_own_samplers(text_model):
    tokenizer = text_model[1]
    columns = Columns({BASE: tiny_model("duo", vocab_size=len(tokenizer))}, tokenizer)
    assert columns.samplers == ["ancestral", "psi"]
    drafts = list(columns.write_one(BASE, replace(REQUEST, prompt="Return [gap 9]")))
    assert not drafts[0].changed.any(), "at the start all is noise"
    assert drafts[-1].entropy > 0 and drafts[-1].gen_ppl is None


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_ids_that_the_tokenizer_lacks_are_never_written(text_model, kind):
    """Such as the last one of the released DUO, which would end as no text or as a failure."""
    tokenizer, extra = text_model[1], 2
    model = tiny_model(kind, vocab_size=len(tokenizer) + extra)
    with torch.no_grad():
        model.backbone.output_layer.linear.bias[len(tokenizer) :] = 50.0
    columns = Columns({BASE: model}, tokenizer)
    for column in columns.write_one(BASE, REQUEST):
        written = column.tokens[column.tokens != column.mask_id] if column.mask_id is not None else column.tokens
        assert (written < len(tokenizer)).all()


def test_the_base_meets_the_refined_models_entropy(text_model):
    """The temperature is that of interpolation over the base's own entropies, as in evaluations."""
    tokenizer = text_model[1]
    base = tiny_model("mdlm", vocab_size=len(tokenizer) + 1)
    with torch.no_grad():  # few tokens are likely, so that they recur, and the more so the lower the temperature
        base.backbone.output_layer.linear.bias.copy_(-0.4 * torch.arange(len(tokenizer) + 1))
    pair = Columns({BASE: base}, tokenizer)
    request = replace(REQUEST, num_samples=4, num_steps=2)
    entropies = {t: last(pair.write_one(BASE, replace(request, temperature=t))).entropy for t in ENTROPY_CURVE}
    assert len(set(entropies.values())) == len(entropies), "a model whose entropy depends on the temperature"
    low, high = sorted(entropies.values())[1:3]
    target = (low + high) / 2
    *looking, match = pair.match(request, target)
    assert match.reached and match.request.temperature == round(matching_temperature(entropies, target), 3)
    expected = last(pair.write_one(BASE, match.request))
    assert torch.equal(match.column.tokens, expected.tokens)
    assert {m.request.temperature for m in looking if m.column is None} == set(ENTROPY_CURVE)


def test_an_entropy_out_of_reach_is_said_to_be(pair):
    assert not last(pair.match(REQUEST, 99.0)).reached
    with pytest.raises(ValueError, match="Temperature 0 cannot be lowered"):
        next(pair.match(replace(REQUEST, temperature=0), 1.0))


def test_a_request_is_checked_before_anything_is_written(pair):
    with pytest.raises(ValueError, match="steps = 65"):
        next(pair.write(replace(REQUEST, num_steps=65)))


def test_texts_are_no_longer_than_allowed(text_model):
    columns = Columns({BASE: text_model[0]}, text_model[1], limits=Limits(length=10))
    assert last(columns.write_one(BASE, REQUEST)).tokens.shape == (2, 10)


def test_models_of_different_tokenizers_are_refused(text_model):
    models = {BASE: text_model[0], REFINED: tiny_model("mdlm")}
    with pytest.raises(ValueError, match="different numbers of tokens"):
        Columns(models, text_model[1])
