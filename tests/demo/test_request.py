"""What a visitor asks for: limits, prompts and gaps, and the sentences for what is not possible."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from tokendrift_hf.demo.request import Limits, Request

LENGTH = 32


def canvas(tokenizer, prompt: str, reserved=()) -> tuple[list[int], list[int]]:
    ids, kept = Request(prompt).canvas(tokenizer, LENGTH, reserved)
    return ids[0].tolist(), kept[0].tolist()


@pytest.fixture(scope="module")
def tokenizer(text_model):
    return text_model[1]


@pytest.mark.parametrize("prompt", ["", "  ", "\n"])
def test_without_a_prompt_everything_is_free(tokenizer, prompt):
    assert canvas(tokenizer, prompt) == ([0] * LENGTH, [0] * LENGTH)


def test_a_prompt_follows_bos_and_goes_on_to_the_longest_text(tokenizer):
    words = tokenizer("Return the")["input_ids"]
    ids, kept = canvas(tokenizer, "Return the ")
    assert ids == [tokenizer.bos_token_id, *words] + [0] * (LENGTH - 1 - len(words))
    assert kept == [1] * (1 + len(words)) + [0] * (LENGTH - 1 - len(words))


@pytest.mark.parametrize(
    ("mark", "size"),
    [("[gap 3]", 3), ("[gap]", 8), ("░░", 2), ("[gap 1]░", 2)],
    ids=["number", "default", "masks", "both"],
)
def test_gaps_are_filled_and_nothing_is_added(tokenizer, mark, size):
    """The space before a gap goes, since the first word in it brings its own; the one behind stays."""
    before, behind = (tokenizer(text)["input_ids"] for text in ("Return", " of"))
    ids, kept = canvas(tokenizer, f"Return {mark} of")
    assert ids == [tokenizer.bos_token_id, *before, *[0] * size, *behind]
    assert kept == [1] * (1 + len(before)) + [0] * size + [1] * len(behind)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("the " * 40, r"The prompt takes \d+ of the 32 tokens of a text here and leaves nothing to write. Shorten it"),
        ("the " * 40 + "[gap 1]", r"The prompt takes \d+ of the 32 tokens of a text here. Shorten it"),
        ("of [gap 31]", "The prompt takes 33 of the 32 tokens"),
        ("of [gap 999999]", "The prompt takes 1000001 of the 32 tokens"),
        ("x" * 1_000_000, "The prompt has 1000000 characters, too many for the 32 tokens"),
        ("of \ud83d the", "holds half a character"),
    ],
    ids=["no room", "with a gap", "gap", "huge gap", "huge", "surrogate"],
)
def test_a_prompt_too_long_or_no_text_is_refused(tokenizer, prompt, message):
    with pytest.raises(ValueError, match=message):
        canvas(tokenizer, prompt)


def test_the_longest_prompts_that_fit_do(tokenizer):
    assert canvas(tokenizer, "of [gap 30]")[1].count(0) == 30
    one = tokenizer(" of")["input_ids"]
    assert len(one) == 1
    assert canvas(tokenizer, " of" * (LENGTH - 2))[1] == [1] * (LENGTH - 1) + [0]
    with pytest.raises(ValueError, match="leaves nothing to write"):
        canvas(tokenizer, " of" * (LENGTH - 1))


def test_a_prompt_with_the_mask_is_refused(tokenizer):
    with_mask = copy.deepcopy(tokenizer)
    with_mask.add_special_tokens({"mask_token": "[MASK]"})
    with pytest.raises(
        ValueError, match=r"holds '\[MASK\]', which stands for what is not written yet. Mark a gap with \[gap 8\]"
    ):
        canvas(with_mask, "Return [MASK] of", {with_mask.mask_token_id})
    assert canvas(with_mask, "Return [gap 1] of", {with_mask.mask_token_id})[1].count(0) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_steps": 65}, "steps = 65. Give a whole number from 1 to 64"),
        ({"num_steps": 0}, "steps = 0"),
        ({"num_steps": None}, "steps is empty. Give"),
        ({"num_steps": True}, "steps = True"),
        ({"num_samples": 5}, "texts = 5. Give a whole number from 1 to 4"),
        ({"num_samples": 2.5}, "texts = 2.5"),
        ({"seed": -1}, "seed = -1"),
        ({"seed": "x" * 999}, "seed = x{40}. Give"),
        ({"temperature": 2.1}, r"temperature = 2.1. Give a number from 0 \(greedy\) to 2"),
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": None}, "temperature is empty"),
        ({"temperature": "1"}, "temperature = 1. Give a number"),
        ({"sampler": "magic"}, "sampler = magic. Give one of ancestral, psi"),
    ],
    ids=str,
)
def test_a_value_beyond_the_limits_is_refused(change, message):
    request = Request()
    request.check(Limits(), ["ancestral", "psi"])
    with pytest.raises(ValueError, match=message):
        replace(request, **change).check(Limits(), ["ancestral", "psi"])


def test_limits_that_allow_nothing_are_refused():
    with pytest.raises(ValueError, match="num_samples is 0. It must be at least 1"):
        Limits(num_samples=0)
    with pytest.raises(ValueError, match="length is 1. It must be at least 2"):
        Limits(length=1)
