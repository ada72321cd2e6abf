"""Text to fixed-length blocks of token ids, and the collator that draws the noise for a plain `transformers.Trainer`.

The way from text to training rows is that of the MDLM and DUO releases (kuleshov-group/mdlm, s-sahoo/duo,
`dataloader.py`): every document is followed by eos, all documents are concatenated, cut into chunks of `block_size - 2`
tokens, and each chunk is put between bos and eos. Only the remainder at the very end of the corpus is dropped (the
reference drops one in every map batch of 1000 documents), and it is counted in the log.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from pathlib import Path

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from transformers import PreTrainedTokenizerBase

from ..hub.process_tokendrift import AbsorbingProcess, UniformProcess, stratified_times

logger = logging.getLogger(__name__)

# Earlier commits of the dataset hold a loading script, which datasets 4 no longer runs. The releases of MDLM and DUO
# had 8,013,769 documents.
_OPENWEBTEXT = "Skylion007/openwebtext"
_OPENWEBTEXT_REVISION = "b4325f019c648b1641a1784748667e8b74e5e064"  # the release as parquet
_OPENWEBTEXT_DOCUMENTS = 8_013_769
_OPENWEBTEXT_VALIDATION = 100_000

_BUILDERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_DOCUMENTS_PER_CALL = 1000


def load_text(
    name: str,
    *,
    split: str = "train",
    config: str | None = None,
    revision: str | None = None,
    text_column: str = "text",
    prompt_column: str | None = None,
    sample_by: str = "document",
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """One split of a corpus as rows with a column `text`, one document a row, and maybe a column `prompt`.

    Args:
        name: "documentation" (the embedded corpus, splits train, validation, judge, reference); "openwebtext" (its
            parquet form, cut as the MDLM and DUO releases do: validation is the last 100,000 documents); a file or a
            directory of .txt, .md, .jsonl, .json or .parquet files; or the name of a dataset on the hub.
        split: any split expression of `datasets`, e.g. "train[:1%]". Files have the one split "train".
        config: configuration of a hub dataset.
        revision: branch, tag or commit of a hub dataset.
        text_column: the column that holds the text.
        prompt_column: the column that holds the prompts which the text completes; None: there is none.
        sample_by: for text files, what one document is: the whole file ("document"), a "paragraph" or a "line". A file
            is read whole in the first case, so take "paragraph" for files that do not fit in memory.
        streaming: read rows as they are needed instead of preparing an Arrow file first.

    Raises:
        ValueError: unknown or empty split; column missing or not text; files missing, of several kinds or all empty.
    """
    if name == "documentation":
        text = _documentation(split, streaming)
    elif Path(name).exists() or Path(name).suffix in _BUILDERS:
        builder, files = _local_files(Path(name))
        options = {"sample_by": sample_by} if builder == "text" else {}
        try:
            text = datasets.load_dataset(builder, data_files=files, split=split, streaming=streaming, **options)
        except datasets.exceptions.DatasetGenerationError as error:
            raise ValueError(f"{name} cannot be read as {builder}: {error.__cause__ or error}") from error
    elif name in ("openwebtext", _OPENWEBTEXT):
        text = _openwebtext(split, revision or _OPENWEBTEXT_REVISION, streaming)
    else:
        text = datasets.load_dataset(name, config, split=split, revision=revision, streaming=streaming)
    wanted = {text_column: "text"} | ({} if prompt_column is None else {prompt_column: "prompt"})
    strings = (datasets.Value("string"), datasets.Value("large_string"))
    for column in wanted:
        if text.column_names is not None and column not in text.column_names:
            raise ValueError(
                f"{name} has no column {column!r}; it has {text.column_names}. Set text_column to one of them."
            )
        if text.features is not None and text.features[column] not in strings:
            raise ValueError(f"column {column!r} of {name} is {text.features[column]}, not text.")
    text = text.select_columns(list(wanted))
    return text.rename_columns({old: new for old, new in wanted.items() if old != new})


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
        documents: rows with a column `text`.
        tokenizer: any tokenizer with an eos token; where it has no bos or pad token, eos stands in.
        block_size: tokens in a row, at least 3, bos and eos included.
        wrap: documents flow on from row to row. False: one row per document, cut or padded to `block_size`, with a
            column `attention_mask` (1 = text, 0 = padding).
        insert_eos: put eos after every document before wrapping. No effect with `wrap=False`.
        vocab_size: the model's number of token ids, to refuse a tokenizer that does not fit the model.

    Returns:
        For a `Dataset`, a `Dataset` on disk, made once and found again by later runs and other processes through the
        `datasets` cache; memory use does not grow with the corpus. For an `IterableDataset`, an `IterableDataset` whose
        `state_dict` resumes at the exact row; for several passes give the Trainer `.repeat(None)` of it, as it resumes
        a stream within an epoch only. Column `input_ids`: lists of `block_size` int32.

    Raises:
        ValueError: no document; fewer tokens than fill one row; `block_size` under 3; no eos token; token ids outside
            [0, vocab_size).
    """
    if block_size < 3:
        raise ValueError(f"block_size is {block_size}; a row holds bos, eos and at least one token, so give 3 or more.")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos token, which separates documents; set tokenizer.eos_token.")
    if isinstance(documents, datasets.Dataset) and len(documents) == 0:
        raise ValueError("the corpus holds no document; check the path, the split and the filters.")
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
        return datasets.IterableDataset.from_generator(_rows, gen_kwargs=options, features=features)
    try:
        blocks = datasets.Dataset.from_generator(_rows, gen_kwargs=options, features=features)
    except ValueError as error:  # `datasets` says "corresponds to no data" when no row came
        tokens = sum(len(ids) for ids in _token_lists(documents, tokenizer))
        if tokens >= block_size:
            raise
        raise ValueError(
            f"{len(documents)} documents give {tokens} tokens, which do not fill one row of block_size {block_size}; "
            "give more text, a smaller block_size, or wrap: false (--wrap false), which pads a document to a row."
        ) from error
    if vocab_size is not None:
        check_token_ids(blocks, vocab_size)
    logger.info("%d rows of %d tokens", len(blocks), block_size)
    return blocks


def pack_tokens(
    documents: Iterable[list[int]], block_size: int, *, bos: int, eos: int, insert_eos: bool = True
) -> Generator[dict[str, list[int]], None, int]:
    """The packing rule on token ids: rows of [bos] + (block_size - 2 tokens) + [eos] until fewer tokens are left.

    The value of the generator is the number of tokens dropped at the end, below `block_size - 2`.
    """
    size = block_size - 2
    pending: list[int] = []
    for ids in documents:
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


def check_token_ids(blocks: datasets.Dataset, vocab_size: int) -> None:
    """Raise ValueError if `blocks["input_ids"]` has an id outside [0, vocab_size). Reads the Arrow columns in place."""
    for chunk in blocks.with_format("arrow").select_columns(["input_ids"]).iter(batch_size=_DOCUMENTS_PER_CALL):
        extremes = pc.min_max(pc.list_flatten(chunk["input_ids"]))
        if extremes["min"].is_valid:
            _refuse_outside(extremes["min"].as_py(), extremes["max"].as_py(), vocab_size)


class DiffusionCollator:
    """Adds the noise: `input_ids` = x_t, `timesteps` = t, `labels` = x_0, which is what a diffusion model's loss takes.

    With it a plain `transformers.Trainer` continues the model's pretraining on its NELBO. t is stratified over the
    batch on [eps, 1] (MDLM, `antithetic_sampling`).

    The noise is a function of `seed` and of the batch's token ids alone, since a collator is told neither the step nor
    the process it serves. Hence it does not depend on `dataloader_num_workers`, continues unchanged after a resume,
    differs between processes (their rows differ) and leaves every global generator untouched; a reshuffled epoch makes
    other batches and so draws other noise, and evaluation draws the same noise each time, which makes its losses
    comparable. Only a batch that recurs with the same rows in the same order (no shuffling, or batches of one row)
    draws its old noise again.

    Args:
        process: the model's forward process.
        seed: any integer.
        eps: smallest t, above 0.
    """

    def __init__(self, process: AbsorbingProcess | UniformProcess, seed: int = 0, eps: float = 1e-3):
        self.process = process
        self.seed = seed
        self.eps = eps

    def __call__(self, rows: list[dict]) -> dict[str, torch.Tensor]:
        """`rows` with `input_ids` (and `attention_mask`) of one length L; returns tensors [B, L] and `timesteps` [B].

        Raises:
            ValueError: rows of different lengths.
        """
        lengths = {len(row["input_ids"]) for row in rows}
        if len(lengths) > 1:
            raise ValueError(f"rows of lengths {sorted(lengths)} in one batch; pack the text with pack_documents.")
        x_0 = torch.from_numpy(np.array([row["input_ids"] for row in rows], dtype=np.int64))
        digest = hashlib.sha256(f"{self.seed}/".encode() + x_0.numpy().tobytes()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        t = stratified_times(torch.rand(len(rows), generator=generator), self.eps)
        uniforms = torch.rand(x_0.shape, generator=generator)
        random_tokens = torch.randint(self.process.vocab_size, x_0.shape, generator=generator)
        x_t = self.process.corrupt(x_0, t, uniforms, random_tokens)
        batch = {"input_ids": x_t, "timesteps": t, "labels": x_0}
        if "attention_mask" in rows[0]:
            batch["attention_mask"] = torch.tensor([list(row["attention_mask"]) for row in rows])
        return batch


def _documentation(split: str, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
    from .documentation import load_documentation

    parts = load_documentation()
    if split not in parts:
        raise ValueError(f"the documentation corpus has no split {split!r}; it has {list(parts)}.")
    return parts[split].to_iterable_dataset() if streaming else parts[split]


def _openwebtext(split: str, revision: str, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
    if split not in ("train", "validation"):
        raise ValueError(f"openwebtext has no split {split!r}; it has ['train', 'validation'].")
    if streaming:
        text = datasets.load_dataset(_OPENWEBTEXT, split="train", revision=revision, streaming=True)
        first = _OPENWEBTEXT_DOCUMENTS - _OPENWEBTEXT_VALIDATION
        return text.take(first) if split == "train" else text.skip(first)
    part = f"train[:-{_OPENWEBTEXT_VALIDATION}]" if split == "train" else f"train[-{_OPENWEBTEXT_VALIDATION}:]"
    text = datasets.load_dataset(_OPENWEBTEXT, split=part, revision=revision)
    if split == "train" and len(text) != _OPENWEBTEXT_DOCUMENTS - _OPENWEBTEXT_VALIDATION:
        logger.warning(
            "openwebtext at revision %s has %d documents to train on where the releases had %d: another snapshot, "
            "another split.",
            revision, len(text), _OPENWEBTEXT_DOCUMENTS - _OPENWEBTEXT_VALIDATION,
        )  # fmt: skip
    return text


def _local_files(path: Path) -> tuple[str, list[str]]:
    """The `datasets` builder for a file or the files below a directory, and their paths in order."""
    if not path.exists():
        raise ValueError(f"there is no file {path}; paths are relative to {Path.cwd()}.")
    files = sorted(p for p in path.rglob("*") if p.suffix in _BUILDERS) if path.is_dir() else [path]
    builders = {_BUILDERS.get(p.suffix) for p in files}
    if len(builders) != 1 or None in builders:
        found = sorted({p.suffix for p in files})
        raise ValueError(
            f"{path}: found files of kinds {found}; give one file, or a directory with text of one kind "
            f"({', '.join(_BUILDERS)})."
        )
    if not any(p.stat().st_size for p in files):
        raise ValueError(f"{path} holds no document: every file is empty.")
    return builders.pop(), [str(p) for p in files]


def _token_lists(documents: Iterable[dict], tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int]]:
    texts = (row["text"] or "" for row in documents)
    while batch := list(islice(texts, _DOCUMENTS_PER_CALL)):
        yield from tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def _rows(
    documents: Iterable[dict],
    tokenizer: PreTrainedTokenizerBase,
    block_size: int,
    wrap: bool,
    insert_eos: bool,
    vocab_size: int | None = None,
) -> Iterator[dict[str, list[int]]]:
    """The rows of `pack_documents`; `vocab_size` is checked here only for streams, whose end nobody sees."""
    count = {"documents": 0, "empty": 0, "tokens": 0}

    def counted() -> Iterator[list[int]]:
        for ids in _token_lists(documents, tokenizer):
            if vocab_size is not None and ids:
                _refuse_outside(min(ids), max(ids), vocab_size)
            count["documents"] += 1
            count["empty"] += not ids
            count["tokens"] += len(ids)
            yield ids

    start = time.perf_counter()
    eos = tokenizer.eos_token_id
    bos = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    pad = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    if wrap:
        dropped = yield from pack_tokens(counted(), block_size, bos=bos, eos=eos, insert_eos=insert_eos)
        where = "at the end of the corpus"
    else:
        dropped = yield from pad_tokens(counted(), block_size, bos=bos, eos=eos, pad=pad)
        where = "at the ends of long documents"
    rate = count["tokens"] / (time.perf_counter() - start)
    logger.info(
        "%d documents (%d empty), %d tokens, %d dropped %s, %.0f tokens/s",
        count["documents"], count["empty"], count["tokens"], dropped, where, rate,
    )  # fmt: skip


def _refuse_outside(low: int, high: int, vocab_size: int) -> None:
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token ids run from {low} to {high}, but the model knows 0 to {vocab_size - 1}; "
            "use the tokenizer that the model was trained with."
        )
