"""Memory that an evaluation takes beside the model: 8 rows of 1024 tokens at once, a vocabulary of 50,258.

    python tests/benchmarks/evaluation_memory.py [mdlm|duo] [rows a batch]

The network is tiny, so what is measured is the logits and their softmax. Peak of resident memory, on a CPU.
"""

from __future__ import annotations

import resource
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from conftest import tiny_model  # noqa: E402
from toys import make_trainer, toy_rows  # noqa: E402

LENGTH, VOCABULARY = 1024, 50_258


def peak() -> float:
    """GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(kind: str = "mdlm", batch_size: int = 8) -> None:
    model = tiny_model(kind, vocab_size=VOCABULARY, max_position_embeddings=LENGTH)
    rows = toy_rows(batch_size, length=LENGTH)
    with tempfile.TemporaryDirectory() as folder:
        fields = {"objective": "none", "base_loss_weight": 1.0, "per_device_eval_batch_size": batch_size}
        trainer = make_trainer(Path(folder), model=model, **fields)
        before = peak()
        trainer.evaluate(rows)
    print(f"{kind}, {batch_size} rows of {LENGTH}, vocabulary {VOCABULARY}: +{peak() - before:.2f} GiB")


if __name__ == "__main__":
    main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
