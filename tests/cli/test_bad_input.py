"""Nonsense in recipes and on the command line: status 2 and one line that says what is wrong, before any work."""

from __future__ import annotations

import errno
import os
import re
import resource

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokendrift_hf.cli import main
from tokendrift_hf.cli.plan import plan_trainings
from tokendrift_hf.cli.recipe import read_recipe
from tokendrift_hf.cli.train import field_flags

# Lines of a recipe beside its model, and what the message has to name.
RECIPES = [
    # no YAML, or YAML that holds something else than fields
    ("[", "not valid YAML"),
    ("{", "not valid YAML"),
    ("a: b: c", "not valid YAML"),
    ("\tmax_steps: 3", "not valid YAML"),
    ("max_steps: 1\nmax_steps: 2", "max_steps is there twice"),
    ("lora: {r: 2, r: 4}", "r is there twice"),
    ("lora: &a {r: *a}", "not valid YAML"),
    ("temperatures: &a [0.1, *a]", "not valid YAML"),
    (
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(f"{y}: &{y} [{', '.join([f'*{x}'] * 10)}]\n" for x, y in zip("abcd", "bcde", strict=True)),
        "more than 10,000",
    ),
    ("learning_rate: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ("run_name: 2026-99-99", "not valid YAML"),
    ("seed: " + "9" * 5000, "not valid YAML"),
    ("? [a, b]\n: 1", "not valid YAML"),
    ("? {a: 1}\n: 1", "not valid YAML"),
    ("max_steps: *nothing", "not valid YAML"),
    ("lora: " + "[" * 3000, "not valid YAML"),
    # names
    ("1: 2", "no field 1"),
    ("null: 2", "no field None"),
    ("true: 2", "no field True"),
    ("Max_steps: 3", "no field 'Max_steps'. Did you mean max_steps"),
    ("learning_rte: 3", "Did you mean learning_rate"),
    ("sampling: {num_steps: [4]}", "no field 'sampling'"),
    ("batch_size: 4", "no field 'batch_size'"),
    ("dtype: float32", "no field 'dtype'"),
    ("continuation: true", "Write instead: trainings"),
    ("full_refinement: {}", "Write instead: trainings"),
    # types
    ("max_steps: many", "max_steps must be int, but it is 'many'"),
    ("max_steps: 2.5", "max_steps must be int"),
    ('max_steps: "2"', "max_steps must be int, but it is '2'"),
    ("max_steps: 1e3", "max_steps must be int, but it is '1e3'"),
    ('num_steps: [4, "8"]', r"num_steps must be list\[int\], but it is \[4, '8'\]"),
    ("max_steps: true", "max_steps must be int"),
    ("max_steps: null", "max_steps must be int"),
    ("max_steps: [3]", "max_steps must be int"),
    ("learning_rate: fast", "learning_rate must be float"),
    ("learning_rate: {}", "learning_rate must be float"),
    ("learning_rate: .nan", "not a number"),
    ("temperatures: [.nan]", "not a number"),
    ("temperatures: 0.1", "temperatures must be list"),
    ("temperatures: [a]", "temperatures must be list"),
    ("gather_features: perhaps", "gather_features must be bool"),
    ("gather_features: 1", "gather_features must be bool"),
    ("bf16: 1", "bf16 must be bool | auto"),
    ("wrap: 0", "wrap must be bool"),
    ("lora: 8", "lora must be dict"),
    ("lora: [r]", "lora must be dict"),
    ("block_size: long", "block_size must be int"),
    ("dataset: 3", "dataset must be str"),
    ("dataset: null", "dataset must be str"),
    ("judge: [gpt2]", "judge must be str"),
    ("revision: 1234567", "revision must be str"),
    ("num_steps: 4", "num_steps must be list"),
    ("num_steps: [4, eight]", "num_steps must be list"),
    ("sampling_temperatures: {a: 1}", "sampling_temperatures must be list"),
    ("match_entropy: 3", "match_entropy must be"),
    ("trainings: [a]", "trainings must be"),
    ("trainings: {a: 3}", "Write 'label"),
    ("trainings: {3: {}}", "Write 'label"),
    # ranges
    ("num_steps: []", "one or more"),
    ("num_steps: [0]", "whole numbers of at least 1"),
    ("num_steps: [1000000000]", "whole numbers of at least 1, at most 1000000"),
    ("num_steps: [4, 4]", "there twice"),
    ("num_samples: 0", "num_samples=0"),
    ("num_samples: -3", "num_samples=-3"),
    ("num_seeds: -1", "num_seeds=-1"),
    ("sampling_batch_size: 0", "sampling_batch_size=0"),
    ("sampling_temperatures: [-1]", "at least 0"),
    ("sampling_temperatures: [.inf]", "finite"),
    ("sampling_dtype: float8", "sampling_dtype='float8'"),
    ("dropout: 1", "dropout=1"),
    ("dropout: -0.1", "dropout=-0.1"),
    ("block_size: 3", "block_size=3"),
    ("block_size: -16", "block_size=-16"),
    ("global_batch_size: 0", "global_batch_size=0"),
    ("global_batch_size: -8", "global_batch_size=-8"),
    ("model_dtype: int8", "model_dtype='int8'"),
    ("judge: x\nsampling_temperatures: [0.5]", "Add 1 to them"),
    ("streaming: true\nvalidation_split: train", "training text only"),
    # settings of the training
    ("objective: magic", "objective='magic'"),
    ("objective: none", "leaves nothing to train on"),
    ("learning_rate: -1", "learning_rate=-1"),
    ("learning_rate: .inf", "learning_rate=inf"),
    ("queue_size: -1", "queue_size=-1"),
    ("max_steps: -5", "max_steps=-5"),
    ("per_device_train_batch_size: 0", "per_device_train_batch_size=0"),
    ("per_device_eval_batch_size: -4", "per_device_eval_batch_size=-4"),
    ("gradient_accumulation_steps: 0", "gradient_accumulation_steps=0"),
    ("num_train_epochs: -1", "num_train_epochs=-1"),
    ("weight_decay: -1", "weight_decay=-1"),
    ("max_grad_norm: -1", "max_grad_norm=-1"),
    ("adam_beta2: 1", "adam_beta2=1"),
    ("dataloader_num_workers: -1", "dataloader_num_workers=-1"),
    ("save_total_limit: -1", "save_total_limit=-1"),
    ("save_steps: -1", "save_steps=-1"),
    ("logging_steps: -1", "logging_steps=-1"),
    ("seed: -1", "seed=-1"),
    ("seed: 4294967296", "seed=4294967296 is out of range: it must be at least 0, at most 4294967295"),
    ("data_seed: -1", "data_seed=-1"),
    ("temperatures: []", "temperatures"),
    ("temperatures: [0]", "temperatures=0"),
    ("temperatures: [1.0e-300]", "temperatures=1e-300 is out of range: it must be at least 0.0001, at most 10000"),
    ("temperatures: [1.0e+300]", r"temperatures=1e\+300 is out of range"),
    ("gen_ppl_num_steps: [2]\ngen_ppl_min_entropy_ratio: 5", "gen_ppl_min_entropy_ratio=5 is out of range"),
    ("trainings: {a: {}, b: {objective: alpha, feature_layers: [1]}}", "training 'b': .*no encoder"),
    ("ema_decay: 1", "ema_decay=1"),
    ("max_steps: 0", "max_steps=0"),
    ("encoder_timestep: 2", "encoder_timestep=2"),
    ("feature_layers: []", "feature_layers"),
    ("drift_kernel: round", "drift_kernel='round'"),
    ("encoder_input: loud", "encoder_input='loud'"),
    ("feature_pooling: none", "feature_pooling='none'"),
    ("attraction: 0\nrepulsion: 0", "attraction=0 and repulsion=0"),
    ("gen_ppl_judge: x", "gen_ppl_judge needs samples"),
    ("lr_scheduler_type: sideways", "sideways"),
    ("lr_scheduler_type: warmup_stable_decay", "needs num_decay_steps. Give lr_scheduler_kwargs"),
    ("torch_compile_backend: foo", "torch_compile_backend='foo'"),
    ("log_level: foo", "log_level='foo'"),
    ("accelerator_config: {foo: 1}", "accelerator_config has no setting 'foo'"),
    ("optim: descent", "descent"),
    ("save_strategy: sometimes", "sometimes"),
    # the trainings of a run
    ("trainings: {}", "has no training"),
    ("trainings: {'': {}}", "A label has no letters"),
    ("trainings: {base: {}}", "cannot be called 'base'"),
    ("trainings: {real text: {}}", "No model can be called 'real text'"),
    ("trainings: {base at equal entropy (b): {}}", "No model can be called 'base at equal entropy .b.'"),
    ("trainings: {a: {}, a (T = 0.5): {}}", "No model can be called 'a .T = 0.5.'"),
    ("judge: x\nsampler: first_hitting", "sampler='first_hitting' makes one network call a token and has no steps"),
    (f"trainings: {{{'a' * 101}: {{}}}}", "has 101 bytes, but folders and files are named after it: at most 100"),
    (f"trainings: {{b: {{}}, {'a' * 300}: {{}}}}", "has 300 bytes"),
    (f"trainings: {{{'é' * 51}: {{}}}}", "has 102 bytes"),
    ("trainings: {a: {max_steps: many}}", "training 'a': max_steps must be int"),
    ("trainings: {a: {dataset: x}}", "no field 'dataset' of one training"),
    ("trainings: {a: {output_dir: x}}", "a matter of the whole run"),
    ("trainings: {a: {hub_token: x}}", "a matter of the whole run"),
    ("trainings: {a: {}, cells: {}}", "where something else lies"),
    ("trainings: {a: {objective: mmd, queue_size: 7}}", "'mmd' has no drift field, so its queue_size would do nothing"),
    (
        "objective: alpha\ntrainings: {a: {}, b: {temperatures: [1]}}",
        "'b': .*so its temperatures would do nothing",
    ),
    ("objective: alpha\nalpha_power: 1000", "alpha_power=1000 is out of range: it must be above 0, at most 100"),
    ("encoder: base", "there is no lora"),
    ("lora: {targets: everything}", "targets='everything'"),
    ("lora: {targets: [q]}", r"targets=\['q'\] is not known; .* names of layers go into target_modules"),
    ("lora: {targets: {}}", "targets={} is not known"),
    ("lora: {targets: linear, r: four}", "r must be a whole number, but it is 'four'"),
    ("lora: {r: 2.5}", "r must be a whole number, but it is 2.5"),
    ("lora: {r: 0}", "r=0: the rank"),
    ("lora: {alpha: much}", "alpha must be a number, but it is 'much'"),
    ("lora: {alpha: -1}", "alpha=-1: it must be above 0"),
    ("lora: {lora_dropout: some}", "lora_dropout must be a number, but it is 'some'"),
    ("lora: {lora_dropout: 1}", "lora_dropout=1: it is a probability below 1"),
    ("lora: {targets: linear, bias: foo}", "bias='foo' is not known; choose one of 'none', 'all', 'lora_only'"),
    ("lora: {depth: 3}", "unexpected keyword argument 'depth'"),
    ("push_to_hub: true", "push_to_hub needs the name"),
    ("resume_from_checkpoint: /nothere", "resume_from_checkpoint='/nothere' does nothing here: --resume goes on"),
    ("trainings: {a: {}, b: {resume_from_checkpoint: x}}", "resume_from_checkpoint='x' does nothing here"),
    ("global_batch_size: 8\ngradient_accumulation_steps: 2", "two ways to say one thing"),
]


@pytest.mark.parametrize(("lines", "message"), RECIPES, ids=lambda value: value[:40])
def test_a_bad_recipe_is_refused(lines, message, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: x\n{lines}")
    with pytest.raises(ValueError, match=message):
        plan_trainings(*_on_a_cpu(*read_recipe(path, {})), tmp_path / "out")


def _on_a_cpu(recipe, arguments):
    return recipe, arguments | {"use_cpu": True, "report_to": "none"}


COMMANDS = [
    ([], "required: COMMAND"),
    (["fly"], "invalid choice: 'fly'"),
    (["train"], "required: RECIPE"),
    (["train", "nowhere.yaml"], "There is no recipe nowhere.yaml"),
    (["train", "."], "There is no recipe"),
    (["train", "{recipe}", "--max_steps"], "--max_steps needs a value"),
    (["train", "{recipe}", "--max_steps", "many"], "max_steps must be int"),
    (["train", "{recipe}", "--max_steps", "1", "2"], "max_steps must be int"),
    (["train", "{recipe}", "--lora", "{{r: 4"], "--lora is not valid YAML"),
    (["train", "{recipe}", "--learning_rate", "nan"], "learning_rate"),
    (["train", "{recipe}", "--learning_rate", ".nan"], "not a number"),
    (["train", "{recipe}", "--model"], "--model needs a value"),
    (["train", "{recipe}", "--speed", "9"], "no field 'speed'"),
    (["train", "{recipe}", "stray"], "unexpected argument 'stray'"),
    (["train", "{recipe}", "--output_dir", "{recipe}"], "is a file"),
    (["train", "{recipe}", "--output_dir", "{dangling}/run"], "run cannot be made: .*dangling is a link to nothing"),
    (["train", "{recipe}", "--output_dir", "{recipe}/run"], "cannot be made: .*good.yaml is a file"),
    (
        ["train", "{recipe}", "--objective", "mmd", "--mmd_credit", "9", "--block_size", "8"],
        "a row, which has 8 tokens",
    ),
    (["train", "{recipe}", "--num_samples", "-1"], "num_samples=-1"),
    (["train", "{recipe}", "--output_dir", ""], "--output_dir needs a value"),
    (["train", "{recipe}", "--output_dir="], "--output_dir needs a value"),
    (["train", "{recipe}", "--output_dir", "''"], "output_dir='' names no directory"),
    (["generate"], "required: model"),
    (["generate", "{here}"], "no config.json|There is no model"),
    (["generate", "nowhere"], "There is no model 'nowhere'"),
    (
        ["generate", "{base}", "--prompt", "fine", "--prompt", os.fsdecode(b"\xff\xfe bad")],
        "--prompt .* not valid UTF-8",
    ),
    (["generate", "{base}", "--chat", os.fsdecode(b"\xff\xfe bad")], "--chat .* not valid UTF-8"),
    (["generate", "{base}", "--num_samples", "0"], "0: it must be at least 1"),
    (["generate", "{base}", "--num_samples", "two"], "invalid int value: 'two'"),
    (["generate", "{base}", "--num_steps", "0"], "num_steps"),
    (["generate", "{base}", "--temperature", "-1"], "temperature"),
    (["generate", "{base}", "--temperature", "nan"], "temperature"),
    (["generate", "{base}", "--top_p", "2"], "top_p"),
    (["generate", "{base}", "--top_k", "-2"], "top_k"),
    (["generate", "{base}", "--sampler", "magic"], "magic"),
    (["generate", "{base}", "--seed", "-1"], "seed=-1"),
    (["generate", "{base}", "--stride", "-1"], "stride"),
    (["generate", "{base}", "--max_new_tokens", "0"], "max_new_tokens"),
    (["generate", "{base}", "--output", "{recipe}"], "nothing is overwritten"),
    (["generate", "{base}", "--watch", "--num_samples", "2"], "--watch shows one text"),
    (["evaluate"], "required: MODEL"),
    (["evaluate", "{base}", "{base}"], "LABEL=MODEL"),
    (["evaluate", os.fsdecode(b"\xff\xfe={base}")], "label .* cannot be shown in one line of text"),
    (["evaluate", "a\nb={base}"], "label .* cannot be shown in one line of text"),
    (["evaluate", "{base}", "--output_dir", "{recipe}"], "good.yaml is a file. Name a directory"),
    (["evaluate", "{base}", "--output_dir", "{recipe}/run/x"], "run/x cannot be made: .*good.yaml is a file"),
    (["evaluate", "{base}", "--num_steps", "0"], "num_steps"),
    (["evaluate", f"{'a' * 101}={{base}}"], "has 101 bytes"),
    (["evaluate", "{base}", "--num_seeds", "0"], "num_seeds=0"),
    (["evaluate", "{base}", "--num_samples", "1.5"], "invalid int value"),
    (["evaluate", "{base}", "--sampling_temperatures", "nan"], "finite"),
    (["evaluate", "{base}", "--sampling_dtype", "int8"], "sampling_dtype='int8'"),
    (["evaluate", "{base}", "--n_mc", "0"], "n_mc=0"),
    (["evaluate", "{base}", "--mauve"], "Name it with --text"),
    (["evaluate", "{base}", "--match_entropy", "other"], "'base' is the only model, .* Name a second model"),
    (["evaluate", "{base}", "b={base}", "--match_entropy", "other"], "'other' is none of"),
    (["evaluate", "real text={base}", "b={base}"], "No model can be called 'real text'"),
    (["evaluate", " real text ={base}"], "No model can be called ' real text '"),
    (["evaluate", "a={base}", "a at equal entropy (b)={base}"], "No model can be called 'a at equal entropy .b.'"),
    (
        ["evaluate", "{base}", "--sampler", "first_hitting"],
        "has no steps.*Take another sampler.*`tokendrift generate",
    ),
    (["evaluate", "nowhere"], "There is no model 'nowhere'"),
    (["convert", "nowhere", "{here}/x"], "nowhere"),
    (["convert", "{recipe}"], "required: DST"),
    (["convert", "{recipe}", "{here}/x", "--model", "gpt"], "invalid choice: 'gpt'"),
]


@pytest.mark.parametrize(("words", "message"), COMMANDS, ids=lambda value: str(value)[:50])
def test_a_bad_command_line_is_status_2_and_says_why(
    words, message, text_files, tmp_path, tmp_path_factory, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    recipe = text_files / "good.yaml"
    recipe.write_text("model: base\ndataset: corpus.jsonl\nmax_steps: 1\nuse_cpu: true\n")
    dangling = tmp_path_factory.mktemp("links") / "dangling"
    dangling.symlink_to(tmp_path / "nothing")
    places = {"recipe": recipe, "here": tmp_path, "base": text_files / "base", "dangling": dangling}
    try:
        status = main([word.format(**places) for word in words])
    except SystemExit as stop:  # of the parser, which shows the usage as well
        status = stop.code
    error = capsys.readouterr().err
    assert status == 2, error
    assert re.search(message, error.splitlines()[-1]), error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_full_disk_is_status_2_and_one_line(text_files, tmp_path, monkeypatch, capsys):
    def full(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    call = ["generate", str(text_files / "base"), "--num_steps", "1", "--output", str(tmp_path / "x.jsonl")]
    assert main(call) == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("tokendrift generate: [Errno 28] No space left")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [0.5, 1.5], ids=["the weights", "the state of the optimizer"])
def test_a_disk_that_fills_up_while_a_checkpoint_is_written_is_status_2(share, text_files, tmp_path, capsys):
    """safetensors and torch then raise errors of their own. The limit on the size of a file stands for the disk."""
    recipe, size = tmp_path / "r.yaml", (text_files / "base/model.safetensors").stat().st_size
    lines = ["model: base", "dataset: corpus.jsonl", "max_steps: 1", "use_cpu: true", "judge: null", "save_steps: 1"]
    recipe.write_text("\n".join(lines).replace(": base", f": {text_files}/base").replace(": c", f": {text_files}/c"))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * size), limits[1]))
    try:
        status = main(["train", str(recipe), "--save_strategy", "steps", "--output_dir", str(tmp_path / "run")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"tokendrift train: a file of tensors could not be .* Is the disk full\?", last), last
    assert (
        main(["train", str(recipe), "--save_strategy", "steps", "--output_dir", str(tmp_path / "run"), "--resume"]) == 0
    )


SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | st.text("ab: {}[]&*!-#'\"\n\t0.", max_size=8)
VALUES = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text("ab", max_size=2), x, max_size=2), max_leaves=5
)
NAMES = st.sampled_from(
    "model revision dataset num_steps num_samples sampling_temperatures lora trainings match_entropy bf16 wrap dropout "
    "learning_rate max_steps temperatures objective queue_size encoder judge block_size seed x".split()
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(fields=st.dictionaries(NAMES, VALUES, max_size=4))
def test_no_value_of_a_field_ends_in_anything_but_a_clear_refusal(fields, tmp_path_factory):
    import yaml

    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_text(yaml.safe_dump({"model": "x"} | fields, allow_unicode=True))
    _read_or_refuse(path, {})


@settings(max_examples=150, deadline=None, derandomize=True)
@given(text=st.text(max_size=60) | st.text("ab: {}[]&*!<-#'\"\n\t0.1?,|>", max_size=60))
def test_no_text_ends_in_anything_but_a_clear_refusal(text, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    _read_or_refuse(path, {})


@settings(max_examples=150, deadline=None, derandomize=True)
@given(words=st.lists(NAMES.map("--{}".format) | st.text("ab:{}[]&*!-0.1 ", max_size=6), max_size=6))
def test_no_flags_end_in_anything_but_a_clear_refusal(words, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "fuzzed.yaml"
    path.write_text("model: x")
    try:
        flags = field_flags(words)
    except ValueError:
        return
    _read_or_refuse(path, flags)


def _read_or_refuse(path, flags):
    try:
        recipe, _ = read_recipe(path, flags)
    except ValueError as error:
        assert len(str(error)) > 10
    else:
        assert isinstance(recipe.model, str)
