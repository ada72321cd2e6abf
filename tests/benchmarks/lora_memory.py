"""Peak memory of one training step: all weights, LoRA with a copied encoder, LoRA with the base as encoder.

    python tests/benchmarks/lora_memory.py            # 170 M parameters, 2 x 1024 tokens; a GPU if there is one
    python tests/benchmarks/lora_memory.py --length 128

Each case runs in a process of its own: peak resident memory on a CPU, peak allocated memory on a GPU. Two steps, so
that Adam's moments are there.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile

CASES = ("full", "lora, copy", "lora, shared base")


def measure(case: str, length: int, batch_size: int, bf16: bool) -> dict:
    import torch

    from tokendrift_hf import DriftConfig, DriftTrainer, MDLMConfig, MDLMForMaskedLM
    from tokendrift_hf.budget import GIB, budget
    from tokendrift_hf.lora import lora_config

    torch.manual_seed(0)
    model = MDLMForMaskedLM(MDLMConfig(dropout=0.0))
    rows = torch.randint(50257, (2 * batch_size, length)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        args = DriftConfig(
            output_dir=folder, max_steps=2, per_device_train_batch_size=batch_size, report_to="none", bf16=bf16,
            save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(), dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = DriftTrainer(
            model=model,
            args=args,
            train_dataset=[{"input_ids": ids} for ids in rows],
            peft_config=None if case == "full" else lora_config("linear"),
            encoder="base" if case == "lora, shared base" else None,
        )
        trainer.train()
    cost = budget(trainer.model, args, length, encoder_copy=case != "lora, shared base")
    on_gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "case": case,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "peak_gib": round(peak / GIB, 2),
        "expected_gib": round((cost.fixed_bytes + cost.batch_bytes) / GIB, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="only this one, in this process")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.length, options.batch_size, options.bf16)))
        return
    for case in CASES:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--case", case], check=True)


if __name__ == "__main__":
    main()
