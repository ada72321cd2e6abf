"""Does `tokendrift train --dry-run` announce the memory that the training then takes? LoRA on a Qwen2 of 0.5 billion.

    python tests/benchmarks/rehearsed_memory.py
    python tests/benchmarks/rehearsed_memory.py --length 128 --batch-size 8 --config '{"hidden_size": 256,
        "num_attention_heads": 4, "intermediate_size": 1024, "num_hidden_layers": 4, "vocab_size": 32000}'

The weights are random and the text is the guide. The rehearsal and the training run in processes of
their own, on a CPU. Both figures are peaks of resident memory, less that of a process that only imports the libraries:
the one that the rehearsal prints, and the one that the system measured of the training.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
GIB = 2**30

QWEN2_HALF_A_BILLION = dict(
    hidden_size=896,
    intermediate_size=4864,
    num_hidden_layers=24,
    num_attention_heads=14,
    num_key_value_heads=2,
    vocab_size=151936,
    tie_word_embeddings=True,
    is_causal=False,
    use_cache=False,
)
RECIPE = """
model: {folder}/model
dataset: {folder}/text.jsonl
output_dir: {folder}/out
model_dtype: {model_dtype}
block_size: {length}
per_device_train_batch_size: {batch_size}
max_steps: {steps}
lora: {{targets: attention}}
encoder: base
use_cpu: true
disable_tqdm: true
save_strategy: "no"
judge: null
"""
LIBRARIES = "import tokendrift_hf.cli.rehearsal, tokendrift_hf.models.lora, peft, datasets, transformers.trainer"


def write_model(folder: Path, config: dict, dtype: str) -> int:
    """A model with random weights and the quickstart's tokenizer. Returns the number of its parameters."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(RECIPES / "quickstart" / "tokenizer")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**config, mask_token_id=len(tokenizer))).to(getattr(torch, dtype))
    model.save_pretrained(folder)
    return model.num_parameters()


def peak_of(command: list[str], log: Path) -> int:
    """The peak of resident memory of a process, in bytes. Its output goes into `log`."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{log.read_text()[-3000:]}")
    return usage.ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=json.loads, default={}, help="fields of Qwen2Config, as JSON")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--model-dtype", default="float32")
    options, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        # In another process: on Linux the peak of a process counts for those that it starts.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
            config = QWEN2_HALF_A_BILLION | options.config
            parameters = other.submit(write_model, folder / "model", config, options.model_dtype).result()
        recipe = folder / "recipe.yaml"
        recipe.write_text(RECIPE.format(folder=folder, **vars(options)))
        train = [sys.executable, "-m", "tokendrift_hf.cli", "train", str(recipe), *more]
        (folder / "text.jsonl").write_text(json.dumps({"text": (RECIPES / "README.md").read_text()}))
        libraries = peak_of([sys.executable, "-c", LIBRARIES], folder / "log")
        peak_of([*train, "--dry-run"], folder / "log")
        said = float(re.search(r"Peak memory of the process: ([\d.]+) GiB", (folder / "log").read_text())[1])
        print(f"{parameters:,} parameters: announced {said:.2f} GiB, libraries {libraries / GIB:.2f} GiB", flush=True)
        measured = peak_of(train, folder / "log")
    announced, taken = said - libraries / GIB, (measured - libraries) / GIB
    print(f"announced {announced:.2f} GiB, taken {taken:.2f} GiB: {announced / taken:.3f}")


if __name__ == "__main__":
    main()
