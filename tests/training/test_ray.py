"""Ray Train around the unchanged trainer: two workers train like one process, hand over checkpoints, and resume."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from safetensors.torch import load_file
from toys import assert_same, make_trainer, toy_rows, weights_of

ray = pytest.importorskip("ray")
TESTS = Path(__file__).parents[1]


def work(config: dict) -> None:
    """What every worker runs. Ray has set the rank and the address, which the Trainer reads as from torchrun."""
    from ray.train.huggingface.transformers import RayTrainReportCallback, prepare_trainer

    trainer = make_trainer(
        Path(config["folder"]) / "run",
        rows=toy_rows(16),
        arguments={"callbacks": [RayTrainReportCallback()]},
        per_device_train_batch_size=2,
        save_strategy="steps",
        save_steps=2,
        max_steps=config["max_steps"],
        ddp_backend="gloo",
    )
    prepare_trainer(trainer).train(resume_from_checkpoint=config["resume"])
    if ray.train.get_context().get_world_rank() == 0:
        trainer.save_model(str(Path(config["folder"]) / config["name"]))


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder of a run of four steps in one go and of one that went on after two, and what Ray reported of each."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    monkeypatch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # or a token would be left in the user's home
    folders = [TESTS.parent, TESTS, Path(__file__).parent]  # where workers find the package and this file
    path = os.pathsep.join([*map(str, folders), os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=3, include_dashboard=False, runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}}
    )
    try:
        reported = {}
        for name, max_steps, resume in (("whole", 4, False), ("cut", 2, False), ("resumed", 4, True)):
            config = {"folder": str(folder / ("whole" if name == "whole" else "cut")), "name": name}
            reported[name] = TorchTrainer(
                work,
                train_loop_config=config | {"max_steps": max_steps, "resume": resume},
                scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
                run_config=RunConfig(name=name, storage_path=str(folder / "storage")),
            ).fit()
    finally:
        ray.shutdown()
        monkeypatch.undo()
    return folder, reported


def test_two_workers_train_like_one_process(results, tmp_path):
    folder, _ = results
    one = make_trainer(tmp_path, rows=toy_rows(16), max_steps=4)
    one.train()
    found = load_file(folder / "whole/whole/model.safetensors")
    assert_same(found, {name: weights_of(one.model)[name] for name in found}, rtol=0, atol=1e-5)


def test_the_callback_hands_every_checkpoint_to_ray(results):
    _, reported = results
    assert reported["whole"].metrics["step"] == 4
    with reported["whole"].checkpoint.as_directory() as checkpoint:
        names = {path.name for path in Path(checkpoint).rglob("*")}
    assert {"model.safetensors", "drift_queues.safetensors"} <= names


def test_a_resumed_run_is_the_one_in_one_go(results):
    folder, _ = results
    whole, resumed = (load_file(folder / name / "model.safetensors") for name in ("whole/whole", "cut/resumed"))
    assert_same(resumed, whole, rtol=0, atol=0)
