"""SIGTERM and SIGUSR1 stop a run after the step under way: saved, told apart from a finished one, resumed exactly."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest
import torch
from conftest import tiny_model
from toys import REAL_STEPS, assert_same, logged, make_trainer, queues_of, toy_rows, weights_of
from transformers import TrainerCallback

from tokendrift_hf.training.manifest import checkpoints, last_complete_checkpoint
from tokendrift_hf.training.stopping import STOPPED, StopSignals, TrainingStopped, ended_by_signals

EXACT = {"rtol": 0, "atol": 0}


class Send(TrainerCallback):
    """Sends a signal to this process in the middle of a step."""

    def __init__(self, step: int, number: int = signal.SIGTERM):
        self.step, self.number = step, number

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


def run(folder, *callbacks, **fields):
    """Eight steps of two micro-batches in epochs of three, with dropout, averages and queues."""
    return make_trainer(
        folder,
        model=tiny_model("mdlm", dropout=0.1),
        arguments={"callbacks": list(callbacks), "eval_dataset": toy_rows(3)},
        **REAL_STEPS | dict(max_steps=8, ema_decay=0.9) | fields,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """State and losses of the run that nobody stopped."""
    trainer = run(tmp_path_factory.mktemp("whole"), save_strategy="no")
    trainer.train()
    return weights_of(trainer.model) | queues_of(trainer), logged(trainer)


STRATEGIES = {
    "no": {"save_strategy": "no"},
    "steps, one kept": {"save_strategy": "steps", "save_steps": 3, "save_total_limit": 1},
    "best": {"save_strategy": "best", "metric_for_best_model": "loss", "eval_strategy": "steps", "eval_steps": 1},
    "best, one kept": {
        "save_strategy": "steps",
        "save_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "metric_for_best_model": "loss",
        "greater_is_better": True,
        "load_best_model_at_end": True,
        "save_total_limit": 1,
    },
    "epoch": {"save_strategy": "epoch", "eval_strategy": "epoch"},
    "transformers' own": {"save_strategy": "no", "enable_jit_checkpoint": True},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_signal_stops_after_the_step_and_the_run_goes_on_bit_for_bit(strategy, whole, tmp_path):
    """Whatever else is saved. The step is finished: SIGTERM came between its two micro-batches."""
    stopped = run(tmp_path, Send(5), **STRATEGIES[strategy])
    with pytest.raises(TrainingStopped, match="Stopped by SIGTERM after step 5 of 8. It is saved in .*checkpoint-5"):
        stopped.train()
    assert last_complete_checkpoint(tmp_path).name == "checkpoint-5"
    best = STRATEGIES[strategy] | {"load_best_model_at_end": False}
    resumed = run(tmp_path, **best)
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights_of(resumed.model) | queues_of(resumed), whole[0], **EXACT)
    assert logged(resumed) == whole[1]


@pytest.mark.parametrize("step", [3, 8], ids=["end of an epoch", "last step"])
def test_a_signal_in_the_last_step_of_an_epoch_or_run_is_heeded(step, whole, tmp_path):
    """Also where nothing is left to train, the run does not go on to what follows. SIGUSR1 does the same."""
    with pytest.raises(TrainingStopped) as stop:
        run(tmp_path, Send(step, signal.SIGUSR1), save_strategy="epoch", eval_strategy="epoch").train()
    assert stop.value.code == STOPPED == 75
    assert "SIGUSR1" in str(stop.value)
    resumed = run(tmp_path, save_strategy="epoch", eval_strategy="epoch")
    resumed.train(resume_from_checkpoint=True)
    assert_same(weights_of(resumed.model) | queues_of(resumed), whole[0], **EXACT)
    assert [entry["step"] for entry in resumed.state.log_history if "eval_loss" in entry] == [3, 6, 8]
    assert not list(tmp_path.glob("_replaced*"))


def test_handlers_are_put_back_and_the_same_trainer_can_go_on(whole, tmp_path):
    def mine(number, frame):
        raise AssertionError("not while training")

    before = [signal.signal(number, mine) for number in (signal.SIGTERM, signal.SIGUSR1)]
    try:
        trainer = run(tmp_path, Send(4), enable_jit_checkpoint=True, save_strategy="no")
        with pytest.raises(TrainingStopped):
            trainer.train()
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGUSR1) is mine
        trainer.remove_callback(Send)
        trainer.train(resume_from_checkpoint=True)
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), before, strict=True):
            signal.signal(number, handler)
    assert_same(weights_of(trainer.model) | queues_of(trainer), whole[0], **EXACT)


def test_without_the_state_of_the_optimizer_there_is_nothing_to_resume_from(tmp_path):
    with pytest.raises(TrainingStopped, match="save_only_model=True leaves nothing to resume from"):
        run(tmp_path, Send(2), save_strategy="steps", save_only_model=True, ema_decay=None).train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-2"]


def test_outside_training_a_signal_ends_the_program_where_it_stands():
    with pytest.raises(TrainingStopped, match="Stopped by SIGTERM. What was finished is kept") as stop:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            raise AssertionError("not reached")
    assert stop.value.code == STOPPED
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize("context", [StopSignals, ended_by_signals])
def test_a_worker_that_was_forked_can_still_be_ended(context):
    """Even one that waits for a lock, where no handler in Python would run: so datasets ends its pool of workers."""
    ready, started = os.pipe()
    with context() as signals:
        worker = os.fork()
        if not worker:
            try:
                handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)]
                os.write(started, b"." if handlers == [signal.SIG_DFL] * 2 else b"!")
                multiprocessing.get_context("fork").Semaphore(0).acquire(timeout=10)
            finally:
                os._exit(1)
        assert os.read(ready, 1) == b".", "the worker has inherited the handlers"
        os.kill(worker, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
        assert signals is None or signals.received is None
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL, "the parent has lost its handler"


# ---- What is not finite ----------------------------------------------------------------------------------


class PoisonGradient(TrainerCallback):
    """The loss is finite and the gradient of one weight is not, from one step on while it is switched on."""

    def __init__(self, model, step):
        self.step, self.on, self.poisoned = step, True, False
        next(model.parameters()).register_hook(lambda grad: grad * float("nan") if self.poisoned else grad)

    def on_step_begin(self, args, state, control, **kwargs):
        self.poisoned = self.on and state.global_step == self.step - 1


def test_a_gradient_that_is_not_finite_reaches_no_weight_and_no_queue(whole, tmp_path):
    """Not even the features of its first micro-batch stay. Once its cause is gone, the same trainer goes on exactly."""
    trainer = run(tmp_path, save_strategy="steps", save_steps=2)
    poison = PoisonGradient(trainer.model, step=5)
    trainer.add_callback(poison)
    with pytest.raises(ValueError, match=r"gradient at optimizer step 5 is not finite \(its norm is nan.*up to step 4"):
        trainer.train()
    saved = run(tmp_path / "other", save_strategy="no")
    saved._load_from_checkpoint(str(tmp_path / "checkpoint-4"))
    assert_same(weights_of(trainer.model), weights_of(saved.model), **EXACT)
    after_four = run(tmp_path / "four", save_strategy="steps", save_steps=4, max_steps=4, lr_scheduler_type="constant")
    after_four.train()
    assert queues_of(trainer)["real"].shape == queues_of(after_four)["real"].shape
    assert torch.equal(queues_of(trainer)["real"], queues_of(after_four)["real"])
    assert all(p.grad is None for p in trainer.model.parameters())
    poison.on = False
    trainer.train(resume_from_checkpoint=True)
    assert_same(weights_of(trainer.model) | queues_of(trainer), whole[0], **EXACT)


class PoisonWeight(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == 2:
            with torch.no_grad():
                next(model.parameters())[0] = float("inf")


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    trainer = run(tmp_path, PoisonWeight(), save_strategy="steps", save_steps=2)
    with pytest.raises(ValueError, match="weights after step 2 are not finite, so they are not saved"):
        trainer.train()
    assert checkpoints(tmp_path) == []
    with pytest.raises(ValueError, match="not finite, so they are not saved"):
        trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_after_a_loss_that_is_not_finite_training_can_begin_anew(tmp_path):
    """The micro-batches of the failed step do not count: noise, queues and log are those of a first attempt."""
    first = run(tmp_path / "first", save_strategy="no", max_steps=2)
    start = weights_of(first.model)
    first.train()
    trainer = run(tmp_path / "second", save_strategy="no", max_steps=2, ema_decay=None)
    compute, calls = trainer.train_objective.__call__, []

    class OnceNan:
        def __init__(self, objective):
            self.objective = objective

        def __getattr__(self, name):
            return getattr(self.objective, name)

        def __call__(self, *args):
            loss, statistics = compute(*args)
            calls.append(1)
            return (loss * float("nan") if len(calls) == 2 else loss), statistics

    trainer.train_objective = OnceNan(trainer.train_objective)
    with pytest.raises(ValueError, match=r"loss at optimizer step 1 is not finite \(nan on this process\)"):
        trainer.train()
    assert_same(weights_of(trainer.model), start, **EXACT)
    assert len(queues_of(trainer)["real"]) == 0
    torch.manual_seed(trainer.args.seed)  # the failed attempt has drawn its dropout
    trainer.train()
    assert logged(trainer) == pytest.approx(logged(first), rel=1e-6)
