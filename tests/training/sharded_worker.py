"""One process of an accelerate launch with weights or optimizer split among the processes, on CPUs."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from conftest import tiny_model
from gloo import make_averages_averages
from peft import LoraConfig
from safetensors.torch import save_file
from stand_ins import adapted, text_rows
from toys import REAL_STEPS, make_trainer, queues_of, toy_rows

FIELDS = REAL_STEPS | dict(
    per_device_eval_batch_size=2,
    save_strategy="steps",
    save_steps=2,
    eval_strategy="steps",
    eval_steps=2,
    gen_ppl_num_steps=[2],
    gen_ppl_num_samples=3,
)
CASES = {
    "feature": {},
    "mirror": {"objective": "mirror_kl", "base_loss_weight": 0.5},
    "modernbert": {"base_loss_weight": 0.5},
    "qwen3": {"base_loss_weight": 0.5},
}
ADAPTED = ("modernbert", "qwen3")


def case(name: str, folder: Path, **fields):
    make_rows = text_rows if name in ADAPTED else toy_rows
    fields = {"model": adapted(name) if name in ADAPTED else None} | FIELDS | CASES[name] | fields
    return make_trainer(folder / name, rows=make_rows(24), arguments={"eval_dataset": make_rows(5)}, **fields)


def refusal(folder: Path, arguments: dict | None = None, **fields) -> str:
    try:
        make_trainer(folder / "refused", arguments=arguments, **fields)
    except ValueError as error:
        return str(error)
    return ""


def main():
    folder, is_main = Path(sys.argv[-1]), os.environ["RANK"] == "0"
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        # accelerate has FSDP for accelerators only; all that this replaces is its choice of backend and device.
        torch.distributed.init_process_group("gloo")
        make_averages_averages()
        PartialState._prepare_backend = lambda *args, **kwargs: ("gloo", DistributedType.MULTI_GPU)
        PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    report = {}
    for name in CASES:
        for resume in (False, True) if name == "feature" else (False,):
            trainer = case(name, folder)
            checkpoint = str(folder / name / "checkpoint-2") if resume else None
            trainer.train(resume_from_checkpoint=checkpoint)
            report["kind"] = trainer.accelerator.distributed_type
            weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)
            queues = queues_of(trainer)
            if is_main:
                path = folder / f"{name}{'_resumed' if resume else ''}.safetensors"
                save_file({k: v.clone().contiguous() for k, v in (weights | queues).items()}, path)
            trainer.save_model(str(folder / name / "final"))
            if not resume:
                report[name] = trainer.state.log_history
    report["ema"] = refusal(folder, ema_decay=0.9)
    adapters = {"peft_config": LoraConfig(r=2, target_modules=["attn_qkv"]), "encoder": "base"}
    report["shared"] = refusal(folder, model=adapted("bert"))
    report["base"] = refusal(folder, adapters, model=tiny_model("mdlm"))
    if is_main:
        (folder / "report.json").write_text(json.dumps(report, default=str))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
