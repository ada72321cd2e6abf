"""Rows of token ids to batches: clean ones for `DriftTrainer`, noisy ones for a plain `transformers.Trainer`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from ..hub.process_tokendrift import AbsorbingProcess, UniformProcess, check_token_ids, stratified_times

# The columns beside `input_ids`, and what stands in them under padding.
_PADDING = {"attention_mask": 0, "prompt_mask": 0, "labels": -100}


class CleanCollator:
    """Stack rows of clean ids. Rows of different lengths are padded on the right, with an `attention_mask`.

    Args:
        vocab_size: V.
        max_length: the longest row that the model takes.
        mask_id: the id of the mask of a masked model, which clean text must not contain. None: there is none.
    """

    def __init__(self, vocab_size: int, max_length: int, mask_id: int | None = None):
        self.vocab_size, self.max_length, self.mask_id = vocab_size, max_length, mask_id

    @classmethod
    def of(cls, model) -> CleanCollator:
        """The collator of a diffusion model."""
        return cls(model.process.vocab_size, model.longest, model.process.mask_id)

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        """`input_ids` [B, L], and [B, L] `attention_mask`, `prompt_mask` and `labels` where rows have them.

        Raises:
            ValueError: a row without `input_ids`, without tokens or longer than the model, a token id outside the
                vocabulary, the mask in clean text, or a column that some rows lack or that is no list of whole numbers,
                one for each token.
        """
        ids = _column(rows, "input_ids")
        self.check(ids)
        lengths = [len(x) for x in ids]
        batch = {"input_ids": _padded(ids, 0)}
        if any("attention_mask" in row for row in rows) or min(lengths) < max(lengths):
            rows = [{"attention_mask": torch.ones_like(x)} | row for row, x in zip(rows, ids, strict=True)]
        for name, padding in _PADDING.items():
            if any(name in row for row in rows):
                batch[name] = _padded(_column(rows, name, lengths), padding)
        return batch

    def check(self, ids: Iterable[Tensor]) -> None:
        """Raise ValueError unless these rows, at least one, are clean text that the model takes."""
        lengths = [len(x) for x in ids]
        if min(lengths) == 0 or max(lengths) > self.max_length:
            raise ValueError(
                f"A row has {min(lengths) if min(lengths) == 0 else max(lengths)} tokens, but the model takes 1 to "
                f"{self.max_length}. Pack the text into blocks of at most that length."
            )
        check_token_ids(min(int(x.min()) for x in ids), max(int(x.max()) for x in ids), self.vocab_size)
        if self.mask_id is not None and any(bool((x == self.mask_id).any()) for x in ids):
            raise ValueError(
                f"The text contains the mask, id {self.mask_id}, which stands for a corrupted token and has no place "
                "in clean text. Check that the tokenizer has no such token."
            )


class CheckedCollator:
    """A collator of the user's own, whose batches are looked at as `clean` looks at its own."""

    def __init__(self, collate: Callable[[list[dict]], Mapping[str, Tensor]], clean: CleanCollator):
        self.collate, self.clean = collate, clean

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        """The batch, with `input_ids` in int64.

        Raises:
            ValueError: no dictionary with token ids [B, L], noise in them, ids that `CleanCollator` refuses, or masks
                or labels that are not one whole number for each token.
        """
        batch = self.collate(rows)
        # What it is.
        if not isinstance(batch, Mapping):
            raise ValueError(
                f"data_collator gave a {type(batch).__name__}. Needed is a dictionary with input_ids [B, L]."
            )
        if "timesteps" in batch:
            raise ValueError(
                "data_collator gave timesteps, so it adds noise, as one for a plain transformers.Trainer does "
                "(DiffusionCollator). DriftTrainer needs clean text. Leave data_collator out."
            )
        ids = batch.get("input_ids")
        if not _is_whole(ids) or ids.dim() != 2 or ids.dtype == torch.bool or not len(ids):
            raise ValueError(
                f"data_collator gave {sorted(map(str, batch))} with input_ids of kind {_kind(ids)}. Needed is a tensor "
                "[B, L] of clean token ids. Leave data_collator out to have the rows stacked."
            )
        # What the ids are, and the columns beside them.
        ids = ids.long()
        try:
            self.clean.check(ids)
        except ValueError as error:
            raise ValueError(
                f"data_collator gave input_ids that cannot be trained on. {error} Or leave data_collator out, to have "
                "the rows stacked."
            ) from error
        for name in _PADDING:
            if name in batch and not (_is_whole(batch[name]) and batch[name].shape == ids.shape):
                raise ValueError(
                    f"data_collator gave {name} of kind {_kind(batch[name])}. Needed is one whole number for each of "
                    f"the input_ids, {list(ids.shape)}, or no {name}."
                )
        if len(ids) != len(rows):
            raise ValueError(
                f"data_collator gave {len(ids)} rows for {len(rows)}. Needed is one for each, so that every row counts "
                "once. Change the data set instead."
            )
        return {**batch, "input_ids": ids}


def checked(collate: Callable, clean: CleanCollator) -> Callable:
    """`collate` with its batches looked at, unless it is `clean` itself, which looks at its rows."""
    same = type(collate) is CleanCollator and vars(collate) == vars(clean)
    return collate if same else CheckedCollator(collate, clean)


def _is_whole(value) -> bool:
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _kind(value) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _column(rows: list[dict], name: str, lengths: list[int] | None = None) -> list[Tensor]:
    """The whole numbers of a column, a row each. `lengths` says how many there must be."""
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"A batch is a list of rows with their columns by name; found {str(rows)[:80]}.")
    values = []
    for i, row in enumerate(rows):
        if name not in row:
            remedy = "Give it in every row, or in none."
            if name == "input_ids":
                remedy = "Tokenise and pack the text first (tokendrift_hf.data.pack_documents)."
            raise ValueError(f"Row {i} of a batch has no column {name}; found {sorted(map(str, row))}. {remedy}")
        try:
            value = torch.as_tensor(row[name])
        except (TypeError, ValueError, RuntimeError):
            value = None
        empty = value is not None and value.shape == (0,)
        if value is None or value.dim() != 1 or not empty and not _is_whole(value):
            raise ValueError(f"{name} of row {i} is {str(row[name])[:60]}; needed is a list of whole numbers.")
        if lengths is not None and len(value) != lengths[i]:
            raise ValueError(f"A row has {len(value)} values of {name} for {lengths[i]} tokens: give one a token.")
        values.append(value.long())
    return values


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


class DiffusionCollator:
    """Adds the noise: `input_ids` = x_t, `timesteps` = t, `labels` = x_0, which is what a diffusion model's loss takes.

    With it a plain `transformers.Trainer` continues the model's pretraining on its NELBO. t is stratified over the
    batch on [eps, 1] (MDLM, `antithetic_sampling`).

    The noise is a function of `seed` and of the batch's token ids alone, since a collator is told neither the step nor
    the process it serves. Hence it does not depend on `dataloader_num_workers`, continues unchanged after a resume,
    differs between processes (their rows differ) and leaves every global generator untouched. A reshuffled epoch makes
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
        """`rows` with `input_ids` (and `attention_mask`) of one length L. Returns tensors [B, L] and `timesteps` [B].

        Raises:
            ValueError: rows of different lengths.
        """
        ids = _column(rows, "input_ids")
        lengths = sorted({len(row) for row in ids})
        if len(lengths) > 1 or lengths == [0]:
            raise ValueError(f"Rows of lengths {lengths} in one batch. Pack the text with pack_documents.")
        x_0 = torch.stack(ids)
        check_token_ids(int(x_0.min()), int(x_0.max()), self.process.vocab_size)
        digest = hashlib.sha256(f"{self.seed}/".encode() + x_0.numpy().tobytes()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        t = stratified_times(torch.rand(len(rows), generator=generator), self.eps)
        uniforms = torch.rand(x_0.shape, generator=generator)
        random_tokens = torch.randint(self.process.vocab_size, x_0.shape, generator=generator)
        x_t = self.process.corrupt(x_0, t, uniforms, random_tokens)
        batch = {"input_ids": x_t, "timesteps": t, "labels": x_0}
        if any("attention_mask" in row for row in rows):
            batch["attention_mask"] = torch.stack(_column(rows, "attention_mask", [len(row) for row in ids]))
        return batch
