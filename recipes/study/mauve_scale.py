"""MAUVE of samples against the documentation's reference part, and the same of other real text, which is its scale.

    python recipes/study/mauve_scale.py recipes/quickstart/base recipes/quickstart/base@0.953 --seeds 1 2

A model can be sampled at a temperature: MODEL@0.9. Features are those of the quickstart's judge. The rows of real text
lie at even distances. One JSON line for the train part, for the validation part, also with a tenth and three tenths of
its tokens replaced by others of it, and for each model and seed.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import evaluate
import torch

from tokendrift_hf.data import load_text, pack_documents
from tokendrift_hf.data.packing import spread_rows
from tokendrift_hf.models.loading import load_model, load_tokenizer

QUICKSTART = Path(__file__).resolve().parents[1] / "quickstart"
LENGTH, AT_A_TIME = 128, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL[@TEMPERATURE]")
    parser.add_argument("--num_steps", type=int, default=8)
    parser.add_argument("--num_samples", type=int, default=512)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    tokenizer, metric = load_tokenizer(str(QUICKSTART / "base")), evaluate.load("gen_ppl")

    def rows(part: str) -> list[list[int]]:
        documents = load_text("documentation", split=part)
        return spread_rows(pack_documents(documents, tokenizer, LENGTH), options.num_samples)

    reference = rows("reference")

    def show(name: str, ids: list[list[int]], **more) -> None:
        judge = str(QUICKSTART / "judge")
        record = metric.compute(predictions=ids, model_id=judge, mauve_references=reference)
        figures = {key: round(record[key], 4) for key in ("gen_ppl", "entropy", "mauve")}
        print(json.dumps({"model": name} | more | figures), flush=True)

    for part in ("train", "validation"):
        show(f"real text, {part} part", rows(part))
    text, generator = torch.tensor(rows("validation")), torch.Generator().manual_seed(0)
    for share in (0.1, 0.3):
        tokens = text.flatten()[torch.randint(text.numel(), text.shape, generator=generator)]
        replaced = torch.rand(text.shape, generator=generator) < share
        show(f"validation part, {share:.0%} of its tokens drawn from it", torch.where(replaced, tokens, text).tolist())
    for name in options.models:
        path, _, temperature = name.partition("@")
        model = load_model(path, attn_implementation="eager").to(torch.bfloat16)
        settings = {"num_steps": options.num_steps, "temperature": float(temperature or 1)}
        for seed in options.seeds:
            ids = []
            for start in range(0, options.num_samples, AT_A_TIME):
                count = min(AT_A_TIME, options.num_samples - start)
                ids += model.generate(num_samples=count, seed=1000 * seed + start // AT_A_TIME, **settings).tolist()
            show(name, ids, seed=seed, num_steps=options.num_steps)


if __name__ == "__main__":
    main()
