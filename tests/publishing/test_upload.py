"""Pushes against a hub on the loopback interface: code and card travel along, and others can load what arrived."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from conftest import run_python
from fakehub import FakeHub

from tokendrift_hf import GenPPL

ROOT = Path(__file__).resolve().parents[2]
CODE = {"modeling_tokendrift.py", "configuration_tokendrift.py", "generation_tokendrift.py", "process_tokendrift.py"}

TOKEN = "hf_CANARYcanaryCANARY"

TRAINERS = """
    import os
    import torch
    torch.set_num_threads(1)
    from safetensors.torch import save_file
    from transformers import AutoTokenizer
    from tokendrift_hf import DriftConfig, DriftTrainer, MDLMForMaskedLM
    from tokendrift_hf.models.lora import lora_config

    tokenizer = AutoTokenizer.from_pretrained(BASE)
    inputs = {"input_ids": torch.arange(16)[None], "timesteps": torch.tensor([0.5])}
    MDLMForMaskedLM.from_pretrained(BASE).push_to_hub("tester/base")

    rows = [{"input_ids": list(range(i, i + 8))} for i in range(8)]
    best = dict(eval_strategy="steps", eval_steps=1, load_best_model_at_end=True)

    def trained(name, base, lora=None, **fields):
        args = DriftConfig(
            output_dir=os.path.abspath(name), hub_token=TOKEN, max_steps=2, save_steps=1,
            use_cpu=True, report_to="none", disable_tqdm=True,
            per_device_train_batch_size=2, queue_size=4, hub_model_id="tester/" + name, hub_always_push=True,
            dataloader_pin_memory=False, **fields,
        )
        trainer = DriftTrainer(
            model=MDLMForMaskedLM.from_pretrained(base), args=args, processing_class=tokenizer,
            train_dataset=rows, eval_dataset=rows[:2], peft_config=lora,
        )
        trainer.train()
        trainer._finish_current_push()
        return trainer

    for name in ("every_save", "checkpoint"):
        trainer = trained(name, BASE, push_to_hub=True, hub_strategy=name, **best)
        trainer.model.eval()
        save_file({"logits": trainer.model(**inputs).logits.detach()}, name + ".expected")
    trainer = trained("lora", "tester/base", lora_config(r=2))
    trainer.push_to_hub()
    trainer.model.eval()
    save_file({"logits": trainer.model(**inputs).logits.detach()}, "lora.expected")
    trained("lora-local", BASE, lora_config(r=2), push_to_hub=True, hub_strategy="checkpoint").push_to_hub()
"""

PULL = """
    from peft import AutoPeftModelForFeatureExtraction
    from safetensors.torch import load_file
    from transformers import AutoModel, AutoTokenizer

    inputs = {"input_ids": torch.arange(16)[None], "timesteps": torch.tensor([0.5])}
    for name in ("every_save", "checkpoint"):
        model = AutoModel.from_pretrained("tester/" + name, trust_remote_code=True)
        torch.testing.assert_close(model(**inputs).logits, load_file(PUSHED + name + ".expected")["logits"])
        assert AutoTokenizer.from_pretrained("tester/" + name)("of the")["input_ids"]
    model = AutoPeftModelForFeatureExtraction.from_pretrained("tester/lora", trust_remote_code=True).eval()
    torch.testing.assert_close(model(**inputs).logits, load_file(PUSHED + "lora.expected")["logits"])
    assert model.generate(num_samples=1, num_steps=2, seed=0).shape == (1, 16)
    try:
        AutoPeftModelForFeatureExtraction.from_pretrained("tester/lora-local", trust_remote_code=True)
    except (OSError, ValueError) as error:
        assert "a local directory, base" in str(error), error
    else:
        raise AssertionError("an adapter without a base loaded")
"""


def assert_nothing_of_this_machine(hub: FakeHub, folder: Path) -> None:
    """No byte of any file on the hub tells the token, the home, or where anything lay: all are below one folder."""
    for repo, files in hub.repos.items():
        for path, content in files.items():
            for secret in (TOKEN, str(folder)):
                assert secret.encode() not in content, f"{repo}/{path} holds {secret}"


def test_trainers_push_code_and_card_and_others_load_them(text_files, tmp_path, tmp_path_factory):
    with FakeHub() as hub:
        given = f"    BASE = {str(text_files / 'base')!r}\n    TOKEN = {TOKEN!r}\n"
        home = {"HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
        run_python(given + TRAINERS, tmp_path / "push", isolated=False, **hub.environment | home)
        assert_nothing_of_this_machine(hub, tmp_path_factory.getbasetemp())
        for name in ("every_save", "checkpoint"):
            files = hub.repos[f"tester/{name}"]
            assert CODE | {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(files)
            assert "| trained_steps | `2` |" in files["README.md"].decode()
            state = {path for path in files if path.startswith("last-checkpoint/")}
            assert bool(state) == (name == "checkpoint")
            if state:
                assert {
                    "last-checkpoint/" + file for file in ("trainer_state.json", "drift_queues.safetensors")
                } <= state
        adapters = hub.repos["tester/lora"]
        config = json.loads(adapters["adapter_config.json"])
        assert config["base_model_name_or_path"] == "tester/base" and len(config["revision"]) == 40
        card = adapters["README.md"].decode()
        assert "base_model: tester/base" in card and config["revision"] in card
        assert "model.safetensors" not in adapters and len(adapters["adapter_model.safetensors"]) < 10_000
        assert hub.repos["tester/lora-local"]
        run_python(f"    PUSHED = {str(tmp_path / 'push')!r} + '/'\n" + PULL, tmp_path / "pull", **hub.environment)


RECIPE = """
model: base
dataset: corpus.jsonl
judge: judge
max_steps: 1
per_device_train_batch_size: 2
queue_size: 4
num_steps: [2]
num_seeds: 1
num_samples: 2
use_cpu: true
disable_tqdm: true
hub_model_id: tester/cli
hub_strategy: end
"""


@pytest.mark.parametrize(
    ("lora", "promised"),
    [("", CODE | {"model.safetensors"}), ("lora: {r: 2}", {"adapter_config.json", "adapter_model.safetensors"})],
    ids=["full", "lora"],
)
def test_command_line_rehearses_a_push_and_pushes(lora, promised, text_files, tmp_path, tmp_path_factory):
    """--dry-run names every file that the push then uploads, and touches neither the disk nor the hub."""
    (text_files / "push.yaml").write_text(RECIPE + lora)
    code = f"""
        import os, torch
        torch.set_num_threads(1)
        from tokendrift_hf.cli import main
        call = ["train", {str(text_files / "push.yaml")!r}, "--output_dir", "out", "--push_to_hub"]
        call += ["--hub_token", {TOKEN!r}]
        assert main([*call, "--dry-run"]) == 0
        assert not os.path.exists("out")
        print("=====")
        assert main(call) == 0
        assert main([*call, "--resume"]) == 0
    """
    with FakeHub() as hub:
        output = run_python(code, tmp_path / "run", isolated=False, **hub.environment)
    rehearsal, real = output.split("=====")
    assert "A push would upload to tester/cli:" in rehearsal and "Pushed to" not in rehearsal
    assert real.count("Pushed to") == 2
    files = hub.repos["tester/cli"]
    listed = {line.split(" bytes  ")[1].strip() for line in rehearsal.splitlines() if " bytes  " in line}
    assert promised <= listed and set(files) - listed == {"training.json"} and listed <= set(files)
    card = files["README.md"].decode()
    assert "name: Gen.-PPL at 2 steps" in card and "judge: a local model named judge" in card
    assert_nothing_of_this_machine(hub, tmp_path_factory.getbasetemp())


def test_metric_as_a_space(text_files, tmp_path):
    """Pushed by the guide's line, `evaluate.load("owner/name")` scores text where this package is not installed."""
    text = "Return the name of the object and its size."
    with FakeHub() as hub:
        guide = (ROOT / "recipes/README.md").read_text(encoding="utf-8")
        (line,) = re.findall(r"^hf upload .*$", guide, flags=re.MULTILINE)
        words = line.replace("me/", "tester/").replace("tokendrift_hf/", f"{ROOT}/tokendrift_hf/").split()[1:]
        call = f"import sys; sys.argv = ['hf', *{words}]; from huggingface_hub.cli.hf import main; main()"
        run_python(call, tmp_path / "push", isolated=False, **hub.environment)
        files = hub.repos["tester/gen_ppl"]
        assert set(files) == {"gen_ppl.py", "README.md"} and b"sdk: static" in files["README.md"]
        load = f"""
            import evaluate
            record = evaluate.load("tester/gen_ppl").compute(
                predictions=[{text!r}], model_id={str(text_files / "judge")!r}, device="cpu"
            )
            print(record["gen_ppl"])
        """
        output = run_python(load, tmp_path / "load", **hub.environment)
    expected = GenPPL(model_id=str(text_files / "judge"), device="cpu").compute(predictions=[text])["gen_ppl"]
    assert float(output.splitlines()[-1]) == pytest.approx(expected, rel=1e-5)
