"""Peak memory of one training step: all weights, LoRA with a copied encoder, LoRA with the base as encoder.

    python tests/benchmarks/lora_memory.py            # 170 M parameters, 2 x 1024 tokens; a GPU if there is one
    python tests/benchmarks/lora_memory.py --config '{"hidden_size": 256, "vocab_size": 8192}' --args '{"bf16": true}'

Each case runs in a process of its own, two steps so that Adam's moments are there. peak_gib is what the training added:
on a CPU the peak of resident memory above that of the imported libraries (with freed tensors given back at once, which
glibc otherwise puts off), on a GPU the peak of allocated memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile

CASES = ("full", "lora, copy", "lora, shared base")


def measure(case: str, length: int, batch_size: int, config: dict, args: dict) -> dict:
    import torch

    from tokendrift_hf import DriftConfig, DriftTrainer, MDLMConfig, MDLMForMaskedLM
    from tokendrift_hf.cli.measure import GIB
    from tokendrift_hf.models.lora import lora_config

    libraries = _resident_peak()
    torch.manual_seed(0)
    model = MDLMForMaskedLM(MDLMConfig(**{"dropout": 0.0, "max_position_embeddings": length} | config))
    rows = torch.randint(model.config.vocab_size - 1, (2 * batch_size, length)).tolist()
    with tempfile.TemporaryDirectory() as folder:
        training = DriftConfig(
            output_dir=folder, max_steps=2, per_device_train_batch_size=batch_size, report_to="none",
            save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
            dataloader_pin_memory=False, **args,
        )  # fmt: skip
        trainer = DriftTrainer(
            model=model,
            args=training,
            train_dataset=[{"input_ids": ids} for ids in rows],
            peft_config=None if case == "full" else lora_config("linear"),
            encoder="base" if case == "lora, shared base" else None,
        )
        trainer.train()
    on_gpu = torch.cuda.is_available()
    peak = torch.cuda.max_memory_allocated() if on_gpu else _resident_peak() - libraries
    return {
        "case": case,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "peak_gib": round(peak / GIB, 2),
    }


def _resident_peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help="only this one, in this process")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--config", type=json.loads, default={}, help="fields of MDLMConfig, as JSON")
    parser.add_argument("--args", type=json.loads, default={}, help="fields of DriftConfig, as JSON")
    options = parser.parse_args()
    if options.case:
        print(json.dumps(measure(options.case, options.length, options.batch_size, options.config, options.args)))
        return
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    for case in CASES:
        subprocess.run([sys.executable, __file__, *sys.argv[1:], "--case", case], check=True, env=environment)


if __name__ == "__main__":
    main()
