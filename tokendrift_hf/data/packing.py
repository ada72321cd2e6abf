"""Documents to fixed-length rows of token ids.

The way from text to training rows is that of the MDLM and DUO releases (kuleshov-group/mdlm, s-sahoo/duo,
`dataloader.py`): every document is followed by eos, all documents are concatenated, cut into chunks of `block_size - 2`
tokens, and each chunk is put between bos and eos. Two things differ. Only the remainder at the very end of the corpus
is dropped, where the reference drops one in every map batch of 1000 documents, and it is counted in the log. Documents
without text are left out, where the reference makes each of them an eos.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import NoReturn

import datasets
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from ..hub.process_tokendrift import check_token_ids

logger = logging.getLogger(__name__)

_DOCUMENTS_PER_CALL = 1000
TEXT = (datasets.Value("string"), datasets.Value("large_string"), datasets.Value("null"))


def spread_rows(rows: datasets.Dataset, count: int) -> list[list[int]]:
    """Token ids of `count` rows at even distances, or of all of them if there are no more.

    They stand for the whole text, which the first rows do not: these are of the few documents that it begins with.
    """
    count = min(count, len(rows))
    return rows.select([i * len(rows) // count for i in range(count)])[:]["input_ids"]


def pack_documents(
    documents: datasets.Dataset | datasets.IterableDataset,
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    *,
    wrap: bool = True,
    insert_eos: bool = True,
    vocab_size: int | None = None,
) -> datasets.Dataset | datasets.IterableDataset:
    """Rows of exactly `block_size` token ids from documents of any length.

    Args:
        documents: rows with a column `text`. Those without text are left out, with a warning.
        tokenizer: any tokenizer with an eos token. Where it has no bos or pad token, eos stands in.
        block_size: tokens in a row, at least 3, bos and eos included.
        wrap: documents flow on from row to row. False: one row per document, cut or padded to `block_size`, with a
            column `attention_mask` (1 = text, 0 = padding).
        insert_eos: put eos after every document before wrapping. No effect with `wrap=False`.
        vocab_size: the model's number of token ids, to refuse a tokenizer that does not fit the model.

    Returns:
        For a `Dataset`, a `Dataset` on disk, made once and found again by later runs and other processes through the
        `datasets` cache. Memory use does not grow with the corpus. For an `IterableDataset`, an `IterableDataset` whose
        `state_dict` resumes at the exact row. For several passes give the Trainer `.repeat(None)` of it, as it resumes
        a stream within an epoch only. Column `input_ids`: lists of `block_size` int32.

    Raises:
        ValueError: no data set or no column of text, no document, fewer tokens than fill one row, `block_size` under 3,
            no eos token, or token ids outside [0, vocab_size).
    """
    check_text(documents, ["text"])
    check_size("block_size", block_size, at_least=3)
    if vocab_size is not None:
        check_size("vocab_size", vocab_size, at_least=1)
    row_ends(tokenizer)
    options = {
        "documents": documents.select_columns(["text"]),
        "tokenizer": tokenizer,
        "block_size": block_size,
        "wrap": wrap,
        "insert_eos": insert_eos,
    }
    ids = datasets.List(datasets.Value("int32"), length=block_size)
    features = datasets.Features({"input_ids": ids} if wrap else {"input_ids": ids, "attention_mask": ids})
    if isinstance(documents, datasets.IterableDataset):
        options["vocab_size"] = vocab_size
        stream = datasets.IterableDataset.from_generator(_rows, gen_kwargs=options, features=features)
        if next(iter(stream), None) is None:  # looked at now: repeated for ever, it would be read for ever
            _refuse_short(documents, tokenizer, block_size)
        return stream
    try:
        blocks = datasets.Dataset.from_generator(_rows, gen_kwargs=options, features=features)
    except datasets.exceptions.DatasetGenerationError as error:
        raise_own(error)
    except ValueError:  # `datasets` says "corresponds to no data" when no row came
        _refuse_short(documents, tokenizer, block_size)
        raise
    if vocab_size is not None:
        check_blocks(blocks, vocab_size)
    logger.info("%d rows of %d tokens", len(blocks), block_size)
    return blocks


def pack_tokens(
    documents: Iterable[list[int]], block_size: int, *, bos: int, eos: int, insert_eos: bool = True
) -> Generator[dict[str, list[int]], None, int]:
    """The packing rule on token ids: rows of [bos] + (block_size - 2 tokens) + [eos] until fewer tokens are left.

    Documents without tokens are left out.

    The value of the generator is the number of tokens dropped at the end, below `block_size - 2`.
    """
    size = block_size - 2
    pending: list[int] = []
    for ids in filter(None, documents):
        pending += ids
        if insert_eos:
            pending.append(eos)
        whole = len(pending) // size * size
        for start in range(0, whole, size):
            yield {"input_ids": [bos, *pending[start : start + size], eos]}
        pending = pending[whole:]
    return len(pending)


def pad_tokens(
    documents: Iterable[list[int]], block_size: int, *, bos: int, eos: int, pad: int
) -> Generator[dict[str, list[int]], None, int]:
    """One row per document that is not empty: [bos] + at most block_size - 2 tokens + [eos] + padding.

    The value of the generator is the number of tokens cut off.
    """
    cut = 0
    for ids in filter(None, documents):
        kept = [bos, *ids[: block_size - 2], eos]
        cut += len(ids) + 2 - len(kept)
        padding = block_size - len(kept)
        yield {"input_ids": kept + [pad] * padding, "attention_mask": [1] * len(kept) + [0] * padding}
    return cut


def raise_own(error: datasets.exceptions.DatasetGenerationError) -> NoReturn:
    """Raise the ValueError of a generator, which `datasets` wraps. What else it wraps stays as it is."""
    if isinstance(error.__cause__, ValueError):
        raise ValueError(str(error.__cause__)) from error
    raise error


def check_text(rows: datasets.Dataset | datasets.IterableDataset, columns: list[str]) -> None:
    """Raise ValueError unless these are rows of a data set with these columns of text."""
    if not isinstance(rows, datasets.Dataset | datasets.IterableDataset):
        splits = f" Take one split of it: {list(rows)}." if isinstance(rows, dict) else ""
        raise ValueError(
            "Text is a datasets.Dataset or IterableDataset, as load_text gives it, not a "
            f"{type(rows).__name__}.{splits}"
        )
    for column in columns:
        if rows.column_names is not None and column not in rows.column_names:
            raise ValueError(f"The text has no column {column!r}; it has {rows.column_names}. Rename one of them.")
        kind = None if rows.features is None else rows.features[column]
        if kind not in (None, *TEXT):
            raise ValueError(f"Column {column!r} holds {kind}, not text.")


def check_size(name: str, value: int, *, at_least: int) -> None:
    """Raise ValueError unless the value is a whole number of at least this."""
    if type(value) is not int or value < at_least:
        raise ValueError(f"{name} is {value!r}; it must be a whole number of at least {at_least}.")


def row_ends(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """The ids between which every row of this package lies: bos and eos.

    Tokenizers of masked language models call them cls and sep. Where there is neither bos nor cls, eos stands in.

    Raises:
        ValueError: no eos token.
    """
    if not callable(tokenizer) or not hasattr(tokenizer, "eos_token_id"):
        raise ValueError(f"A tokenizer of transformers is needed, not {str(tokenizer)[:60]!r}.")
    eos = tokenizer.sep_token_id if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    if eos is None:
        raise ValueError(
            "The tokenizer has no eos token, which ends documents and completions. Set tokenizer.eos_token to a token "
            "of its vocabulary."
        )
    return next(id_ for id_ in (tokenizer.bos_token_id, tokenizer.cls_token_id, eos) if id_ is not None), eos


def check_blocks(blocks: datasets.Dataset, vocab_size: int) -> None:
    """Raise ValueError if `blocks["input_ids"]` has an id outside [0, vocab_size). Reads the Arrow columns in place."""
    for chunk in blocks.with_format("arrow").select_columns(["input_ids"]).iter(batch_size=_DOCUMENTS_PER_CALL):
        extremes = pc.min_max(pc.list_flatten(chunk["input_ids"]))
        if extremes["min"].is_valid:
            check_token_ids(extremes["min"].as_py(), extremes["max"].as_py(), vocab_size)


def _refuse_short(documents: Iterable[dict], tokenizer: PreTrainedTokenizerBase, block_size: int) -> None:
    """Raise ValueError if the documents fill no row."""
    lengths = [len(ids) for ids in _token_lists(documents, tokenizer)]
    if not lengths:
        raise ValueError("The corpus holds no document. Check the path, the split and the filters.")
    if sum(lengths) < block_size:
        raise ValueError(
            f"{len(lengths)} documents give {sum(lengths)} tokens, which do not fill one row of block_size "
            f"{block_size}. Give more text, a smaller block_size, or wrap: false (--wrap false), which pads a document "
            "to a row."
        )


def _token_lists(documents: Iterable[dict], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    texts = (row["text"] or "" for row in read_rows(documents, "documents"))
    while batch := list(islice(texts, _DOCUMENTS_PER_CALL)):
        yield from tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def read_rows(rows: Iterable[dict], what: str) -> Iterator[dict]:
    """The rows one by one. Raises ValueError where they cannot be read on, after how many of `what` they are."""
    rows, read = iter(rows), 0
    while True:
        try:
            row = next(rows, None)
        except (ValueError, TypeError) as error:  # of pyarrow and datasets. A stream says it only there
            raise ValueError(
                f"The text cannot be read on after {read:,} {what} ({error}). Look at what follows them: it is of "
                "another kind than what came before, or not in UTF-8."
            ) from error
        if row is None:
            return
        read += 1
        yield row


def _rows(
    documents: Iterable[dict],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    wrap: bool,
    insert_eos: bool,
    vocab_size: int | None = None,
) -> Iterator[dict[str, list[int]]]:
    """The rows of `pack_documents`. `vocab_size` is checked here only for streams, whose end nobody sees."""
    count = {"documents": 0, "empty": 0, "tokens": 0}

    def counted() -> Iterator[list[int]]:
        for ids in _token_lists(documents, tokenizer):
            if vocab_size is not None and ids:
                check_token_ids(min(ids), max(ids), vocab_size)
            count["documents"] += 1
            count["empty"] += not ids
            count["tokens"] += len(ids)
            yield ids

    start = time.perf_counter()
    bos, eos = row_ends(tokenizer)
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if wrap:
        dropped = yield from pack_tokens(counted(), block_size, bos=bos, eos=eos, insert_eos=insert_eos)
        where = "at the end of the corpus"
    else:
        dropped = yield from pad_tokens(counted(), block_size, bos=bos, eos=eos, pad=pad)
        where = "at the ends of long documents"
    rate = count["tokens"] / (time.perf_counter() - start)
    if count["empty"]:
        logger.warning("%d of %d documents have no text and are left out.", count["empty"], count["documents"])
    logger.info(
        "%d documents (%d empty), %d tokens, %d dropped %s, %.0f tokens/s",
        count["documents"], count["empty"], count["tokens"], dropped, where, rate,
    )  # fmt: skip
