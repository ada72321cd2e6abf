"""Nothing that is pushed or written holds a token, nor does a push tell where things lie on this machine."""

from __future__ import annotations

import json

from conftest import run_python
from fakehub import FakeHub

TOKEN = "hf_CANARYtoken"

RECIPE = """
model: {home}/base
tokenizer: {home}/base
dataset: {home}/corpus.jsonl
judge: {home}/judge
encoder: {home}/base
validation_split: train
reference_split: train
max_steps: 2
per_device_train_batch_size: 2
queue_size: 4
num_steps: [2]
num_seeds: 1
num_samples: 2
match_entropy: []
eval_strategy: steps
eval_steps: 1
save_steps: 1
load_best_model_at_end: true
metric_for_best_model: eval_loss
greater_is_better: false
gen_ppl_num_steps: [1]
gen_ppl_num_samples: 2
gen_ppl_judge: {home}/judge
use_cpu: true
disable_tqdm: true
dataloader_pin_memory: false
hub_token: {token}
hub_always_push: true
"""

RUNS = """
    import os, torch
    torch.set_num_threads(1)
    from tokendrift_hf import MDLMForMaskedLM
    from tokendrift_hf.cli import main

    def train(name, *flags):
        call = ["train", "recipe.yaml", "--output_dir", os.path.join(os.getcwd(), name), "--push_to_hub"]
        assert main([*call, "--hub_model_id", "tester/" + name, *flags]) == 0

    train("checkpoints", "--hub_strategy", "checkpoint")
    lora = ["--lora", "{r: 2}", "--encoder", "base", "--dropout", "0", "--judge", "null"]
    train("adapters", "--hub_strategy", "all_checkpoints", *lora)
    train("end", "--hub_strategy", "end", "--hub_token", "hf_CANARYtoken2", "--wrap", "false")
    MDLMForMaskedLM.from_pretrained(os.environ["HOME"] + "/base").push_to_hub("tester/model")
"""


def test_every_byte_of_every_push_and_result(text_files, tmp_path):
    """A token as field and flag, absolute paths everywhere; checkpoints, adapters, the end, and a model alone."""
    home, folder = tmp_path / "CANARYhome", tmp_path / "CANARYwork"
    home.mkdir()
    for name in ("base", "judge", "corpus.jsonl"):
        (home / name).symlink_to(text_files / name)
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE.format(home=home, token=TOKEN))
    with FakeHub() as hub:
        run_python(RUNS, folder, isolated=False, HOME=str(home), **hub.environment)
    assert hub.repos.keys() == {f"tester/{name}" for name in ("checkpoints", "adapters", "end", "model")}
    pushed = {f"{repo}: {path}": data for repo, files in hub.repos.items() for path, data in files.items()}
    for promised in ("checkpoints: last-checkpoint/trainer_state.json", "adapters: checkpoint-2/training_args.bin"):
        assert f"tester/{promised}" in pushed
    for place, data in pushed.items():
        assert b"CANARY" not in data, f"{place} tells a token, or a folder of this machine"
        assert str(text_files).encode() not in data, f"{place} tells where the base lies"
    written = [path for path in folder.rglob("*") if path.is_file() and path.name != "recipe.yaml"]
    names = {path.name for path in written}
    assert {"results.json", "settings.json", "training_args.bin", "trainer_state.json"} <= names
    for path in written:
        assert b"CANARYtoken" not in path.read_bytes(), f"{path} holds the token"
    state = json.loads((folder / "checkpoints/refined/checkpoint-2/trainer_state.json").read_text())
    assert state["best_model_checkpoint"] is None
    assert state["best_global_step"] in (1, 2)
