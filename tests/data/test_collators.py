"""CleanCollator: padding, masks, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from tokendrift_hf.data.collators import CheckedCollator, CleanCollator, checked

COLLATE = CleanCollator(vocab_size=10, max_length=4, mask_id=9)


def test_rows_of_one_length_need_no_mask():
    batch = COLLATE([{"input_ids": [1, 2]}, {"input_ids": torch.tensor([3, 4])}])
    assert batch.keys() == {"input_ids"} and batch["input_ids"].tolist() == [[1, 2], [3, 4]]


def test_shorter_rows_are_padded_and_masks_kept():
    rows = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0], "prompt_mask": [1, 0, 0], "labels": [-100, 2, 3]},
        {"input_ids": [4], "attention_mask": [1], "prompt_mask": [0], "labels": [4]},
    ]
    batch = COLLATE(rows)
    assert batch["input_ids"][0].tolist() == [1, 2, 3] and batch["input_ids"][1, 0] == 4
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 0, 0]]
    assert batch["prompt_mask"].tolist() == [[1, 0, 0], [0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, 2, 3], [4, -100, -100]]
    assert COLLATE([{"input_ids": [1, 2]}, {"input_ids": [3]}])["attention_mask"].tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize(
    "rows, match",
    [
        ([{"text": "a"}], r"no column input_ids; found \['text'\].*pack_documents"),
        ([{"input_ids": []}], "A row has 0 tokens, but the model takes 1 to 4"),
        ([{"input_ids": [1] * 5}], "A row has 5 tokens, but the model takes 1 to 4"),
        ([{"input_ids": [-1, 2]}], "Token ids run from -1 to 2, but the model knows 0 to 9"),
        ([{"input_ids": [3, 10]}], "Token ids run from 3 to 10, but the model knows 0 to 9"),
        ([{"input_ids": [1, 9]}], "contains the mask, id 9"),
        ([{"input_ids": [1, 2], "prompt_mask": [1]}], "1 values of prompt_mask for 2 tokens"),
        ([{"input_ids": [1, 2], "labels": [1, 2, 3]}], "3 values of labels for 2 tokens"),
    ],
)
def test_bad_rows_are_refused(rows, match):
    with pytest.raises(ValueError, match=match):
        COLLATE(rows)


def test_without_a_mask_token_every_id_is_text():
    assert CleanCollator(10, 4)([{"input_ids": [9, 0]}])["input_ids"].tolist() == [[9, 0]]


def test_only_a_collator_that_knows_the_model_is_not_looked_at_again():
    """One for another model, or a class made of it, may give anything."""

    class Own(CleanCollator):
        pass

    same = CleanCollator(10, 4, 9)
    assert checked(same, COLLATE) is same
    for other in (CleanCollator(10, 4), Own(10, 4, 9), COLLATE.__call__):
        assert isinstance(checked(other, COLLATE), CheckedCollator)
