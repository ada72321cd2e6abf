"""Pairs of prompt and completion to training rows: the prompt is seen, never corrupted and never predicted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

import datasets
from transformers import PreTrainedTokenizerBase

from .packing import check_size, check_text, raise_own, read_rows, row_ends

logger = logging.getLogger(__name__)


def pack_prompts(
    pairs: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int, *, fill_eos: bool = True
) -> datasets.Dataset:
    """One row a pair: [bos] + prompt + completion + [eos], and eos from there to the end of the row.

    A completion that is too long is cut, which the log counts. A pair without a completion, or with a prompt that
    leaves no room for one, is left out with a warning.

    Args:
        pairs: columns `prompt` and `text` (the completion), as `load_text` with `prompt_column` gives them.
        tokenizer: with an eos token, which stands in for a missing bos.
        block_size: the model's length.
        fill_eos: rows are `block_size` tokens long, and the eos that fill them are predicted. So the model learns where
            a completion ends. False: rows end with their completion. Then their length tells the model where the end
            is, and whoever samples has to tell it as well.

    Returns:
        Columns `input_ids` and `prompt_mask` (1: bos and prompt, 0: completion and eos).

    Raises:
        ValueError: no eos token, no pair that fits, or text that cannot be read.
    """
    if isinstance(pairs, datasets.IterableDataset):
        raise ValueError("Pairs of prompt and completion cannot be a stream. Load them with streaming=False.")
    check_text(pairs, ["prompt", "text"])
    check_size("block_size", block_size, at_least=4)
    row_ends(tokenizer)
    options = {"pairs": pairs, "tokenizer": tokenizer, "block_size": block_size, "fill_eos": fill_eos}
    ids = datasets.List(datasets.Value("int32"))
    features = datasets.Features({"input_ids": ids, "prompt_mask": ids})
    try:
        rows = datasets.Dataset.from_generator(_rows, gen_kwargs=options, features=features)
    except datasets.exceptions.DatasetGenerationError as error:
        raise_own(error)
    except ValueError as error:  # `datasets` says "corresponds to no data" when no row came
        raise ValueError(
            f"none of the {len(pairs)} pairs has a completion and a prompt that leaves room for it in {block_size} "
            "tokens; give shorter prompts or a larger block_size."
        ) from error
    logger.info("%d rows of up to %d tokens", len(rows), block_size)
    return rows


def _rows(
    pairs: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int, fill_eos: bool
) -> Iterator[dict[str, list[int]]]:
    bos, eos = row_ends(tokenizer)
    dropped = cut = 0
    rows = read_rows(pairs, "pairs")
    while batch := list(islice(rows, 1000)):
        prompts, completions = (
            tokenizer([row[name] or "" for row in batch], add_special_tokens=False, verbose=False)["input_ids"]
            for name in ("prompt", "text")
        )
        for prompt, completion in zip(prompts, completions, strict=True):
            room = block_size - 2 - len(prompt)
            if room < 1 or not completion:
                dropped += 1
                continue
            cut += max(len(completion) - room, 0)
            completion = completion[:room]
            completion += [eos] * (1 + (room - len(completion) if fill_eos else 0))
            yield {
                "input_ids": [bos, *prompt, *completion],
                "prompt_mask": [1] * (1 + len(prompt)) + [0] * len(completion),
            }
    if dropped:
        logger.warning(
            "%d of %d pairs have no completion, or a prompt that leaves no room for it in %d tokens, and are left out.",
            dropped, len(pairs), block_size,
        )  # fmt: skip
    logger.info("%d pairs, %d dropped, %d tokens cut off", len(pairs), dropped, cut)
