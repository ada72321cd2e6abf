"""DriftConfig: the paper's defaults, every refusal, and the round trip through JSON."""

from __future__ import annotations

import json

import pytest
from toys import config, make_trainer
from transformers import SchedulerType
from transformers.integrations import integration_utils

from tokendrift_hf import DriftConfig
from tokendrift_hf.objective.mmd_objective import MMDObjective


def test_defaults_are_the_papers(tmp_path):
    args = DriftConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    assert args.objective == "feature" and args.base_loss_weight == 0 and args.encoder_input == "soft"
    assert args.temperatures == [0.02, 0.05, 0.2] and args.queue_size == 1024
    assert args.attraction == args.repulsion == args.drift_scale == 1 and args.feature_layers == [-2, -1]
    assert args.learning_rate == 3e-5 and args.feature_pooling == "mean" and args.encoder_timestep == 0


@pytest.mark.parametrize(
    "fields, match",
    [
        (
            {"objective": "l2"},
            "objective='l2' is not known; choose one of 'feature', 'mirror_kl', 'mirror_mse', 'mmd', 'alpha', 'none'",
        ),
        ({"learning_rate": -1e-5}, "learning_rate=-1e-05 is out of range"),
        ({"max_steps": 0}, "max_steps=0: give the number of steps, or -1"),
        ({"num_train_epochs": 0, "max_steps": -1}, "num_train_epochs=0 trains nothing"),
        ({"encoder_input": "hard"}, "encoder_input='hard' is not known"),
        ({"drift_kernel": "rbf"}, "drift_kernel='rbf' is not known"),
        ({"feature_pooling": "max"}, "feature_pooling='max' is not known"),
        ({"queue_size": -1}, "queue_size=-1 is out of range: it must be at least 0"),
        ({"queue_size": 1.5}, "queue_size must be a whole number, but it is 1.5"),
        ({"base_loss_weight": -0.1}, "base_loss_weight=-0.1 is out of range"),
        ({"drift_scale": 0}, "drift_scale=0 is out of range: it must be above 0"),
        ({"drift_scale": float("nan")}, "drift_scale=nan is out of range"),
        ({"mirror_step_size": 0.0}, "mirror_step_size=0.0 is out of range"),
        ({"mirror_eta": -1.0}, "mirror_eta=-1.0 is out of range"),
        ({"attraction": -1}, "attraction=-1 is out of range"),
        ({"repulsion": "1"}, "repulsion must be a number, but it is '1'"),
        ({"attraction": 0, "repulsion": 0}, "give a field of zero"),
        ({"objective": "mirror_kl", "attraction": 0, "repulsion": 0}, "give a field of zero"),
        ({"temperatures": []}, "temperatures must be a list of positive numbers"),
        ({"temperatures": [0.1, 0]}, "temperatures=0 is out of range: it must be at least 0.0001"),
        ({"temperatures": [0.1, -0.2]}, "temperatures=-0.2 is out of range"),
        ({"temperatures": 0.1}, "temperatures must be a list of positive numbers, but it is 0.1"),
        ({"feature_layers": []}, "feature_layers must be a list of whole numbers"),
        ({"feature_layers": [0.5]}, "feature_layers must be a whole number, but it is 0.5"),
        ({"feature_tokens": 0}, "feature_tokens=0 is out of range: it must be at least 1"),
        ({"encoder_timestep": 1.1}, "encoder_timestep=1.1 is out of range"),
        ({"encoder_timestep": -0.1}, "encoder_timestep=-0.1 is out of range"),
        ({"mmd_groups": 1}, "mmd_groups=1 leaves no other draw for a baseline: give 2 or more"),
        ({"mmd_samples": 1}, "mmd_samples=1 leaves no other draw for a repulsion: give 2 or more"),
        ({"mmd_groups": 2.5}, "mmd_groups must be a whole number, but it is 2.5"),
        ({"mmd_bandwidth": 0}, "mmd_bandwidth=0 is out of range: it must be above 0"),
        ({"mmd_bandwidth": 1e-4}, "mmd_bandwidth=0.0001 is out of range: it must be from 0.01 to 100"),
        ({"mmd_bandwidth": 1e30}, r"mmd_bandwidth=1e\+30 is out of range: .* the gradient is zero or noise"),
        ({"mmd_credit": -1}, "mmd_credit=-1 is out of range: it must be at least 0"),
        ({"mmd_credit": 1.5}, "mmd_credit must be a whole number, but it is 1.5"),
        ({"mmd_credit": "token"}, "mmd_credit='token' is not known: give 'sequence' or a number of tokens"),
        ({"alpha_power": 0}, "alpha_power=0 is out of range: it must be above 0"),
        ({"alpha_window": 0}, "alpha_window=0 is out of range: it must be at least 1"),
        ({"alpha_window": 2.5}, "alpha_window must be a whole number, but it is 2.5"),
        (
            {"objective": "alpha", "feature_pooling": "tokens"},
            "objective='alpha' has no encoder, so feature_pooling='tokens' would do nothing: leave it out",
        ),
        ({"bf16": "no"}, "bf16 must be true or false, but it is 'no'"),
        ({"gather_features": "no"}, "gather_features must be true or false, but it is 'no'"),
        ({"push_to_hub": 0}, "push_to_hub must be true or false, but it is 0"),
        ({"output_dir": 3}, "output_dir must be a path, but it is 3"),
        ({"output_dir": ""}, "output_dir='' names no directory"),
        ({"objective": "alpha", "feature_layers": [2]}, r"no encoder, so feature_layers=\[2\] would do nothing"),
        ({"objective": "alpha", "encoder_timestep": 0.5}, "no encoder, so encoder_timestep=0.5 would do nothing"),
        ({"objective": "alpha", "encoder_input": "hard_st"}, "no encoder, so encoder_input='hard_st' would do nothing"),
        (
            {"objective": "mmd", "encoder_input": "hard_st"},
            "tokens .* so encoder_input='hard_st' would do nothing",
        ),
        ({"objective": "mmd", "feature_pooling": "tokens"}, "one by one, so feature_pooling='tokens' would do nothing"),
        ({"objective": "mmd", "feature_tokens": 8}, "one by one, so feature_tokens=8 would do nothing"),
        ({"ema_decay": 1.0}, "ema_decay=1.0 never takes in a new weight"),
        ({"ema_decay": 0.0}, "ema_decay=0.0 is out of range"),
        (
            {"ema_decay": 0.9, "save_only_model": True, "load_best_model_at_end": True, "eval_strategy": "steps"},
            "leaves the averaged weights out of the checkpoints",
        ),
        ({"objective": "none"}, "leaves nothing to train on"),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "max_steps": 480},
            "'warmup_stable_decay' needs num_decay_steps. Give lr_scheduler_kwargs: .* such as 120 of 480 steps",
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": "x"}},
            "'warmup_stable_decay' does not work with .*={'num_decay_steps': 'x'}: .* It takes num_decay",
        ),
        (
            {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2, "foo": 1}},
            "unexpected keyword argument 'foo'. It takes num_decay_steps, num_stable_steps",
        ),
        ({"lr_scheduler_type": "linear", "lr_scheduler_kwargs": {"foo": 1}}, "'linear' has no settings"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycles": "x"}}, "'cosine' does not work"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": "x"}, "lr_scheduler_kwargs must be settings by name"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": 2}}, "It takes lr_end, power"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "One of min_lr or min_lr_rate should be set"),
        ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"foo": 1}}, "'constant' has no settings. Leave out"),
        (
            {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"foo": 1}, "eval_strategy": "steps"},
            "'reduce_lr_on_plateau' does not work with .*'foo'",
        ),
        ({"log_level": "foo"}, "log_level='foo' is not known; choose one of 'detail', 'debug', "),
        ({"log_level_replica": "loud"}, "log_level_replica='loud' is not known; choose one of"),
        ({"report_to": "foo"}, "report_to='foo' is not known; choose one of .*'wandb'"),
        ({"accelerator_config": {"foo": 1}}, "accelerator_config has no setting 'foo'. It takes split_batches"),
        (
            {"accelerator_config": {"gradient_accumulation_kwargs": {"foo": 1}}},
            "gradient_accumulation_kwargs of accelerator_config has no setting 'foo'. It takes num_steps",
        ),
        (
            {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 0},
            "dataloader_prefetch_factor=0 is out of range",
        ),
        ({"adam_epsilon": -1.0}, "adam_epsilon=-1.0 is out of range"),
        ({"torch_compile_backend": "foo"}, "torch_compile_backend='foo' is not known; choose one of .*'inductor'"),
        ({"torch_compile_mode": "foo"}, "torch_compile_mode='foo' is not known; choose one of 'default'"),
        ({"gen_ppl_num_steps": 4}, r"gen_ppl_num_steps must be a list like \[4, 16\], but it is 4"),
        ({"gen_ppl_num_steps": [0]}, "gen_ppl_num_steps=0 is out of range"),
        (
            {"gen_ppl_num_steps": [10**9]},
            "gen_ppl_num_steps=1000000000 is out of range: .* at least 1, at most 1000000",
        ),
        ({"gen_ppl_num_samples": 0}, "gen_ppl_num_samples=0 is out of range"),
        ({"gen_ppl_judge": "gpt2"}, "gen_ppl_judge needs samples"),
        ({"gen_ppl_min_entropy_ratio": 0.9}, "gen_ppl_min_entropy_ratio needs samples"),
        ({"gen_ppl_num_steps": [4], "gen_ppl_min_entropy_ratio": -1}, "gen_ppl_min_entropy_ratio=-1 is out of range"),
    ],
)
def test_bad_fields_are_refused(fields, match, tmp_path):
    with pytest.raises(ValueError, match=match):
        config(tmp_path, **{"save_strategy": "steps"} | fields)


def test_a_tracker_that_is_not_installed_is_named_with_the_way_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setattr(integration_utils, "is_wandb_available", lambda: False)
    with pytest.raises(ValueError, match="report_to='wandb' does not work here: .*`pip install wandb`"):
        config(tmp_path, report_to="wandb")


def test_what_the_libraries_know_is_taken(tmp_path):
    args = config(tmp_path, log_level="error", accelerator_config={"split_batches": True}, report_to="none")
    assert args.get_process_log_level() == 40
    assert args.accelerator_config.split_batches
    compiled = config(tmp_path, torch_compile_backend="inductor", torch_compile_mode="reduce-overhead")
    assert (compiled.torch_compile_backend, compiled.torch_compile_mode) == ("inductor", "reduce-overhead")
    assert config(tmp_path, torch_compile_backend="aot_eager").torch_compile_backend == "aot_eager"


@pytest.mark.parametrize("kind", SchedulerType)
def test_every_schedule_of_transformers_is_taken_with_settings_that_it_has(kind, tmp_path):
    options = {
        "warmup_stable_decay": {"num_decay_steps": 2, "decay_type": "linear"},
        "cosine_with_restarts": {"num_cycles": 2},
        "cosine_with_min_lr": {"min_lr": 0.1},
        "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
        "reduce_lr_on_plateau": {"patience": 3},
        "polynomial": {"power": 2.0},
    }.get(kind.value)
    fields = {"lr_scheduler_type": kind.value, "lr_scheduler_kwargs": options, "warmup_steps": 1}
    args = config(tmp_path, **fields, eval_strategy="steps")
    assert args.lr_scheduler_type == kind
    assert args.lr_scheduler_kwargs == options


@pytest.mark.parametrize("objective", ["mmd", "alpha", "none"])
def test_a_field_of_zero_is_no_matter_where_there_is_no_field(objective, tmp_path):
    args = config(tmp_path, objective=objective, base_loss_weight=1, attraction=0, repulsion=0)
    assert args.attraction == args.repulsion == 0


def test_the_layers_are_the_objectives_own(tmp_path):
    """Of the paper for the drift, a third up the stack for mmd; the trainer writes them down."""
    assert config(tmp_path).feature_layers == config(tmp_path, objective="mirror_kl").feature_layers == [-2, -1]
    assert config(tmp_path, objective="mmd").feature_layers is None
    assert make_trainer(tmp_path, objective="mmd").args.feature_layers == [1]
    assert make_trainer(tmp_path, objective="mmd", feature_layers=[0, 2]).args.feature_layers == [0, 2]
    assert [MMDObjective.default_layers(blocks) for blocks in (1, 5, 12, 24)] == [(1,), (2,), (4,), (8,)]


def test_survives_json_and_samples_at_the_start(tmp_path):
    """What a recipe or a checkpoint stores makes the same config again; sampling begins before the first step."""
    args = config(
        tmp_path, temperatures=(0.1, 0.3), feature_layers=(0, -1), gen_ppl_num_steps=[4], eval_strategy="steps"
    )
    stored = json.loads(args.to_json_string())
    for name in ("temperatures", "feature_layers", "gen_ppl_num_steps", "objective", "queue_size", "ema_decay"):
        assert stored[name] == getattr(args, name)
    assert args.eval_on_start and not config(tmp_path, gen_ppl_num_steps=[4]).eval_on_start
