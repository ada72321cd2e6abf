"""Ids to text where samples are shown: as where they are scored."""

from __future__ import annotations

import copy

import torch

from tokendrift_hf.data.decoding import decode, ids_to_suppress
from tokendrift_hf.metrics.gen_ppl.gen_ppl import readable


def test_ids_that_the_tokenizer_lacks_are_left_out_and_counted(text_model):
    tokenizer = text_model[1]
    ids = tokenizer("of the name", add_special_tokens=False)["input_ids"]
    noisy = [*ids[:1], len(tokenizer), *ids[1:], -100, len(tokenizer) + 5]
    texts, num_left_out = decode(tokenizer, [torch.tensor(noisy), ids, []])
    assert texts == ["of the name", "of the name", ""]
    assert num_left_out == [3, 0, 0]
    kept, count = readable([noisy, ids], set(tokenizer.get_vocab().values()))
    assert (kept, count) == ([ids, ids], 3), "the metric has another rule"


def test_ids_to_suppress_are_those_without_a_token_and_those_that_the_model_names(text_model):
    model, tokenizer = copy.deepcopy(text_model[0]), text_model[1]
    assert ids_to_suppress(model, tokenizer) == [len(tokenizer)] == [model.process.mask_id]
    assert ids_to_suppress(model, None) == []
    model.generation_config.suppress_tokens = [3]
    assert ids_to_suppress(model, tokenizer) == [3, len(tokenizer)]
