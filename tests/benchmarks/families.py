"""Do other families learn as MDLM does? Stand-ins of one size, trained from scratch on one text, then refined.

    python tests/benchmarks/families.py                       # MDLM, BERT, Qwen3: 4 blocks of width 128, 64 tokens
    python tests/benchmarks/families.py --steps 100 --refine-steps 0 --families mdlm bert

All get the same rows of the documentation corpus, the same noise, optimizer and number of steps of their own loss
(objective none), and then the same number of steps of an objective. The mask is the last id and no id is kept, so the
NELBO of all is over the same tokens. The judge is the quickstart's.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, Qwen3Config, Qwen3ForCausalLM

from tokendrift_hf import DriftConfig, DriftTrainer, GenPPL, MDLMConfig, MDLMForMaskedLM, as_diffusion
from tokendrift_hf.data import load_text, pack_documents

QUICKSTART = Path(__file__).resolve().parents[2] / "recipes" / "quickstart"


def network(family: str, vocab_size: int, width: int, blocks: int, length: int):
    """A fresh model; every family draws its weights as it does."""
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=blocks,
        num_attention_heads=width // 32,
        max_position_embeddings=length,
    )
    if family == "mdlm":
        return MDLMForMaskedLM(MDLMConfig(**sizes, cond_dim=16, dropout=0.0))
    if family == "bert":
        quiet = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        model = BertForMaskedLM(BertConfig(**sizes, intermediate_size=4 * width, **quiet))
    else:
        # A gated MLP has three matrices: 8/3 of the width makes them as large as the two of the others.
        inner = dict(intermediate_size=8 * width // 3, num_key_value_heads=width // 32, head_dim=32)
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, **inner, is_causal=False, use_cache=False))
    return as_diffusion(model, mask_token_id=vocab_size - 1)


def train(model, rows, validation, folder: str, steps: int, options, **fields) -> list[tuple[int, float]]:
    """(step, NELBO of the validation rows) as the training goes."""
    args = DriftConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=64,
        eval_strategy="steps",
        eval_steps=max(steps // 5, 1),
        save_strategy="no",
        logging_steps=50,
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=False,
        **fields,
    )
    trainer = DriftTrainer(model, args, train_dataset=rows, eval_dataset=validation)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return [(0, before)] + [(x["step"], x["eval_loss"]) for x in trainer.state.log_history if "eval_loss" in x]


def score(model, metric, num_samples: int) -> dict[str, list[float]]:
    """Steps -> Gen.-PPL and entropy of samples."""
    results = {}
    for num_steps in (4, 16):
        ids = model.generate(num_samples=num_samples, num_steps=num_steps, seed=0)
        record = metric.compute(predictions=ids.tolist())
        results[num_steps] = [round(record["gen_ppl"], 1), round(record["entropy"], 3)]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=["mdlm", "bert", "qwen3"])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--refine-steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--objective", default="feature")
    parser.add_argument("--samples", type=int, default=64, help="to be scored; 0: none")
    options = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(QUICKSTART / "tokenizer")
    rows, validation = (
        pack_documents(load_text("documentation", split=split), tokenizer, options.length)
        for split in ("train", "validation")
    )
    validation = validation.select(range(256))
    metric = GenPPL(keep_in_memory=True, tokenizer=tokenizer, model_id=str(QUICKSTART / "judge"))
    for family in options.families:
        model = network(family, len(tokenizer) + 1, options.width, options.blocks, options.length)
        report = {"family": family, "parameters": sum(p.numel() for p in model.parameters())}
        with tempfile.TemporaryDirectory() as folder:
            fields = {"objective": "none", "base_loss_weight": 1.0, "learning_rate": 1e-3, "warmup_steps": 50}
            report["nelbo"] = train(model, rows, validation, folder, options.steps, options, **fields)
            if options.samples:
                report["samples"] = score(model, metric, options.samples)
            if options.refine_steps:
                fields = {"objective": options.objective, "base_loss_weight": 0.1, "learning_rate": 3e-5}
                fields |= {"feature_pooling": "tokens", "feature_layers": [options.blocks // 2], "warmup_steps": 10}
                report["nelbo_refined"] = train(
                    model, rows, validation, folder, options.refine_steps, options, **fields
                )[-1][1]
                if options.samples:
                    report["samples_refined"] = score(model, metric, options.samples)
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
