"""A judge of another kind: how likely samples are under an interpolated 4-gram model, and how varied they are.

    python recipes/study/second_judge.py recipes/quickstart/base out/quickstart/refined --num_steps 4 16

A model can be sampled at a temperature: recipes/quickstart/base@0.9. The 4-gram model is trained on the train and judge
parts of the documentation. It mixes the orders 0 to 4 with weights that are fitted to the validation part by EM, so its
perplexity rewards what occurs in text, word for word, and nothing else. One JSON line a model and number of steps.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from tokendrift_hf.data import load_text, pack_documents
from tokendrift_hf.data.packing import spread_rows
from tokendrift_hf.metrics.gen_ppl.gen_ppl import diversity
from tokendrift_hf.models.loading import load_model, load_tokenizer

ORDER, LENGTH = 4, 128


class NGrams:
    """An interpolated n-gram model of rows of ids ``[N, L]``."""

    def __init__(self, rows: np.ndarray, vocab_size: int):
        self.vocab_size = vocab_size
        self.counts = [self._count(rows, n) for n in range(1, ORDER + 1)]
        self.contexts = [None, *(self._count(rows[:, :-1], n) for n in range(1, ORDER))]
        self.total = rows.size
        self.weights = np.full(ORDER + 1, 1 / (ORDER + 1))

    def _codes(self, rows: np.ndarray, n: int) -> np.ndarray:
        """One number for the n ids that end at each position from ORDER - 1 on; 4095^4 < 2^63."""
        start, stop = ORDER - n, rows.shape[1] - ORDER + 1
        parts = (rows[:, start + i : start + i + stop].astype(np.int64) for i in range(n))
        code = np.zeros((len(rows), stop), np.int64)
        for part in parts:
            code = code * self.vocab_size + part
        return code

    def _count(self, rows: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        windows = np.lib.stride_tricks.sliding_window_view(rows, n, axis=1).astype(np.int64)
        return np.unique(windows @ self.vocab_size ** np.arange(n)[::-1], return_counts=True)

    @staticmethod
    def _look_up(table: tuple[np.ndarray, np.ndarray], codes: np.ndarray) -> np.ndarray:
        place = np.searchsorted(table[0], codes).clip(max=len(table[0]) - 1)
        return np.where(table[0][place] == codes, table[1][place], 0)

    def parts(self, rows: np.ndarray) -> np.ndarray:
        """The probability that each order gives every position from ORDER - 1 on, ``[ORDER + 1, M]``."""
        found = [np.full(self._codes(rows, 1).size, 1 / self.vocab_size)]
        for n in range(1, ORDER + 1):
            codes = self._codes(rows, n).ravel()
            above = self.total if n == 1 else self._look_up(self.contexts[n - 1], codes // self.vocab_size)
            found.append(self._look_up(self.counts[n - 1], codes) / np.maximum(above, 1))
        return np.stack(found)

    def fit(self, rows: np.ndarray, rounds: int = 20) -> None:
        parts = self.parts(rows)
        for _ in range(rounds):
            shares = self.weights[:, None] * parts
            self.weights = (shares / shares.sum(0)).mean(1)

    def perplexity(self, rows: np.ndarray) -> float:
        return float(np.exp(-np.log(self.weights @ self.parts(rows)).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL[@TEMPERATURE]")
    parser.add_argument("--num_steps", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--num_samples", type=int, default=128)
    parser.add_argument("--seed", type=int, default=100, help="of sampling; the quickstart's tables use 0, 1 and 2")
    options = parser.parse_args()
    tokenizer = load_tokenizer(str(Path(__file__).resolve().parents[1] / "quickstart" / "base"))
    blocks = {
        part: pack_documents(load_text("documentation", split=part), tokenizer, LENGTH)
        for part in ("train", "judge", "validation", "reference")
    }
    rows = {part: np.array(blocks[part]["input_ids"]) for part in ("train", "judge", "validation")}
    judge = NGrams(np.concatenate([rows["train"], rows["judge"]]), len(tokenizer))
    judge.fit(rows["validation"])
    show("real text", None, judge, np.array(spread_rows(blocks["reference"], options.num_samples)))
    for name in options.models:
        path, _, temperature = name.partition("@")
        model = load_model(path, attn_implementation="eager").eval()
        for num_steps in options.num_steps:
            with torch.autocast("cpu", torch.bfloat16):
                ids = model.generate(
                    num_samples=options.num_samples,
                    num_steps=num_steps,
                    temperature=float(temperature or 1),
                    generator=torch.Generator().manual_seed(options.seed),
                )
            show(name, num_steps, judge, ids.numpy())


def show(name: str, num_steps: int | None, judge: NGrams, rows: np.ndarray) -> None:
    figures = {"ngram_ppl": judge.perplexity(rows)} | diversity(rows.tolist())
    print(
        json.dumps({"model": name, "num_steps": num_steps} | {k: round(v, 4) for k, v in figures.items()}), flush=True
    )


if __name__ == "__main__":
    main()
