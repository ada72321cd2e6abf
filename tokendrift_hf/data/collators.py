"""CleanCollator: rows of clean token ids to a batch for `DriftTrainer`."""

from __future__ import annotations

import torch
from torch import Tensor


class CleanCollator:
    """Stack rows of clean ids; rows of different lengths are padded on the right, with an `attention_mask`.

    Args:
        vocab_size: V.
        max_length: the longest row that the model takes.
        mask_id: the id of the mask of a masked model, which clean text must not contain; None: there is none.
    """

    def __init__(self, vocab_size: int, max_length: int, mask_id: int | None = None):
        self.vocab_size, self.max_length, self.mask_id = vocab_size, max_length, mask_id

    def __call__(self, rows: list[dict]) -> dict[str, Tensor]:
        """`input_ids` [B, L], and [B, L] `attention_mask`, `prompt_mask` and `labels` where rows have them.

        Raises:
            ValueError: a row without `input_ids`, without tokens or longer than the model; a token id outside the
                vocabulary; the mask in clean text; a mask or labels of another length than the tokens.
        """
        if "input_ids" not in rows[0]:
            raise ValueError(
                f"Training rows need a column input_ids of clean token ids; found {sorted(rows[0])}. Tokenise and pack "
                "the text first (tokendrift_hf.data.pack_documents)."
            )
        ids = [torch.as_tensor(row["input_ids"], dtype=torch.long) for row in rows]
        lengths = [len(x) for x in ids]
        if min(lengths) == 0 or max(lengths) > self.max_length:
            raise ValueError(
                f"A row has {min(lengths) if min(lengths) == 0 else max(lengths)} tokens, but the model takes 1 to "
                f"{self.max_length}. Pack the text into blocks of at most that length."
            )
        low, high = min(int(x.min()) for x in ids), max(int(x.max()) for x in ids)
        if low < 0 or high >= self.vocab_size:
            raise ValueError(
                f"Token ids run from {low} to {high}, but the model knows 0 to {self.vocab_size - 1}. Use the "
                "tokenizer that the model was trained with."
            )
        if self.mask_id is not None and any(bool((x == self.mask_id).any()) for x in ids):
            raise ValueError(
                f"The text contains the mask, id {self.mask_id}, which stands for a corrupted token and has no place "
                "in clean text. Check that the tokenizer has no such token."
            )
        for name in ("attention_mask", "prompt_mask", "labels"):
            for row, length in zip(rows, lengths, strict=True):
                if name in row and len(row[name]) != length:
                    raise ValueError(
                        f"A row has {len(row[name])} values of {name} for {length} tokens: give one a token."
                    )
        batch = {"input_ids": _padded(ids, 0)}
        masks = [
            torch.as_tensor(row["attention_mask"]) if "attention_mask" in row else torch.ones(n, dtype=torch.long)
            for row, n in zip(rows, lengths, strict=True)
        ]
        if "attention_mask" in rows[0] or min(lengths) < max(lengths):
            batch["attention_mask"] = _padded(masks, 0)
        for name, padding in (("prompt_mask", 0), ("labels", -100)):
            if name in rows[0]:
                batch[name] = _padded([torch.as_tensor(row[name], dtype=torch.long) for row in rows], padding)
        return batch


def _padded(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
