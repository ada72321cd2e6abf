"""The SLURM script of the guide, run by a scheduler that is played: it signals, takes the status, and queues again."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import free_port

from tokendrift_hf.cli import main

ROOT = Path(__file__).parents[2]
RECIPE = """
model: base
dataset: corpus.jsonl
judge: null
max_steps: 80
per_device_train_batch_size: 2
queue_size: 6
dropout: 0.1
optim: adamw_torch
learning_rate: 1e-3
save_steps: 10
use_cpu: true
disable_tqdm: true
"""
PROGRAMS = {
    "srun": 'export SLURM_PROCID=0 SLURM_LOCALID=0\n"$@" &\necho $! > "$SCHEDULER/task"\nwait $!\n',
    "scontrol": 'if [ "$1" = requeue ]; then echo "$2" >> "$SCHEDULER/requeued"; else echo 127.0.0.1; fi\n',
    "tokendrift": f'exec {sys.executable} -m tokendrift_hf.cli "$@"\n',
}


@pytest.fixture
def recipe(text_files) -> Path:
    path = text_files / "scheduled.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def job(recipe, tmp_path):
    """How to start the script of the guide, with this recipe and folder, on a machine with the programs of SLURM."""
    guide = (ROOT / "recipes/README.md").read_text()
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH.*?)```", guide, flags=re.DOTALL)
    assert {"--requeue", "--signal=USR1@600"} <= set(script.split())
    for name, own in (("recipes/mdlm_owt.yaml", str(recipe)), ("out/mdlm", str(tmp_path / "out"))):
        assert name in script
        script = script.replace(name, own)
    (tmp_path / "job.sh").write_text(script)
    (tmp_path / "bin").mkdir()
    for name, text in PROGRAMS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / "bin" / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "SCHEDULER": str(tmp_path),
        "SLURM_NTASKS": "1",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "MASTER_PORT": str(free_port()),
    }

    def start() -> subprocess.Popen:
        log = (tmp_path / "log").open("a")
        return subprocess.Popen(["bash", tmp_path / "job.sh"], cwd=ROOT, env=environment, stdout=log, stderr=log)

    return start


def test_a_job_that_runs_out_of_time_queues_up_again_and_ends_like_one_that_does_not(job, recipe, tmp_path):
    """USR1 in the middle of the training; the job ends with status 75 and is queued. Started again, it ends well."""
    first = job()
    until = time.monotonic() + 240
    while not (tmp_path / "out/refined/checkpoint-10/drift_state.json").is_file():
        assert first.poll() is None and time.monotonic() < until, (tmp_path / "log").read_text()[-3000:]
        time.sleep(0.02)
    os.kill(int((tmp_path / "task").read_text()), signal.SIGUSR1)
    assert first.wait(timeout=240) == 75, (tmp_path / "log").read_text()[-3000:]
    assert (tmp_path / "requeued").read_text() == "17\n"
    assert not (tmp_path / "out/results.json").exists()
    stopped = max(int(path.name.rpartition("-")[2]) for path in (tmp_path / "out/refined").glob("checkpoint-*"))
    assert 10 <= stopped < 80

    assert job().wait(timeout=240) == 0, (tmp_path / "log").read_text()[-3000:]
    assert (tmp_path / "requeued").read_text() == "17\n"
    assert f"Stopped by SIGUSR1 after step {stopped} of 80" in (tmp_path / "log").read_text()
    assert main(["train", str(recipe), "--output_dir", str(tmp_path / "whole")]) == 0
    weights = "refined/model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()
    shutil.rmtree(tmp_path / "out")
