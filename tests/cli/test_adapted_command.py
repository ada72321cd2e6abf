"""`tokendrift train`, `generate` and `evaluate` on a masked language model of transformers: no flag but its name."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from stand_ins import V, decoder, masked_lm, text_rows, tiny_tokenizer, write_tasks
from transformers import BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from tokendrift_hf.cli.command import main
from tokendrift_hf.models.adaptation import ADAPTATION
from tokendrift_hf.models.loading import load_model

SMALL = "--block_size 12 --max_steps 2 --per_device_train_batch_size 2 --num_steps 2 --num_seeds 1 --num_samples 2"
SMALL += " --save_strategy no --use_cpu true --bf16 false --disable_tqdm true"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A BERT and its tokenizer as released, a judge, and a corpus."""
    folder = tmp_path_factory.mktemp("adapted")
    tokenizer = tiny_tokenizer()
    masked_lm("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0).save_pretrained(folder / "bert")
    torch.manual_seed(0)
    judge = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    judge.save_pretrained(folder / "judge")
    for name in ("bert", "judge"):
        tokenizer.save_pretrained(folder / name)
    texts = [" ".join(f"w{i}" for i in row["input_ids"][1:-1]) for row in text_rows(24)]
    (folder / "corpus.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    recipe = f"model: {folder / 'bert'}\ndataset: {folder / 'corpus.jsonl'}\nvalidation_split: train\n"
    (folder / "recipe.yaml").write_text(recipe + "learning_rate: 1e-3\n")
    return folder


@pytest.fixture(scope="module", params=["full", "lora"])
def run(files, request):
    """The folder of a finished run that was also evaluated."""
    words = ["train", str(files / "recipe.yaml"), *SMALL.split(), "--judge", str(files / "judge")]
    words += ["--output_dir", str(files / request.param)]
    words += ["--lora", "{r: 2}", "--encoder", "base"] if request.param == "lora" else []
    assert main(words) == 0
    return files / request.param


def test_a_run_trains_evaluates_and_says_so(run):
    results = json.loads((run / "results.json").read_text())
    (history,) = results["training"].values()
    assert history["eval_loss"] != history["eval_loss_before"]
    assert {row["model"] for row in results["rows"]} >= {"base", *results["training"]}
    told = json.loads((run / "refined" / ADAPTATION).read_text())
    assert told["max_length"] == 12 and told["frame"] == [1, 2]


def test_generate_needs_no_flag(run, tmp_path, capsys):
    refined, output = str(run / "refined"), tmp_path / "samples.jsonl"
    assert main(["generate", refined, "--num-steps", "3", "--num-samples", "2", "--output", str(output)]) == 0
    samples = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(samples) == 2 and all(sample["text"].count("w") == 10 for sample in samples)
    assert main(["generate", refined, "--prompt", "w5 w6", "--max-new-tokens", "3"]) == 0
    assert capsys.readouterr().out.strip().splitlines()[-1].startswith("w5 w6 w")


def test_evaluate_needs_no_flag(run, files, tmp_path):
    words = ["evaluate", str(run / "refined"), "--judge", str(files / "judge"), "--num-steps", "2", "--num-seeds", "1"]
    words += ["--num-samples", "2", "--text", str(files / "corpus.jsonl"), "--output-dir", str(tmp_path / "out")]
    assert main(words) == 0
    assert json.loads((tmp_path / "out" / "results.json").read_text())["nelbo"]


def test_a_run_goes_on_from_what_a_run_left(run, files, tmp_path):
    """`model: DIR` takes a saved model or adapters, whose diffusion.json says all that is needed."""
    words = ["train", str(files / "recipe.yaml"), *SMALL.split(), "--model", str(run / "refined"), "--max_steps", "1"]
    assert main([*words, "--output_dir", str(tmp_path / "on")]) == 0
    assert (tmp_path / "on" / "refined" / ADAPTATION).read_text() == (run / "refined" / ADAPTATION).read_text()


def test_the_refined_model_is_an_ordinary_bert(files, run):
    if (run / "refined" / "adapter_config.json").exists():
        from peft import PeftModel

        model = PeftModel.from_pretrained(BertForMaskedLM.from_pretrained(files / "bert"), run / "refined")
        model = model.merge_and_unload()
    else:
        model = BertForMaskedLM.from_pretrained(run / "refined")
    assert type(model) is BertForMaskedLM


# Tasks


def test_a_run_reports_accuracy_beside_tokens_per_forward(files, tmp_path, capsys, monkeypatch):
    """For the base and the trained model, at every number of steps, from tasks in a folder."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # runs pip, for seconds
    write_tasks(tmp_path)
    words = ["train", str(files / "recipe.yaml"), *SMALL.split(), "--output_dir", str(tmp_path / "out")]
    words += ["--tasks", "tiny_choice", "tiny_free", "--task_folder", str(tmp_path), "--task_limit", "2"]
    words += ["--task_shots", "0"]
    assert main([*words, "--num_steps", "1", "2"]) == 0
    records = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]
    assert [(x["model"], x["num_steps"]) for x in records] == [
        (label, steps) for label in ("base", "TokenDrift") for steps in (1, 2)
    ]
    for record in records:
        assert 0 <= record["metrics"]["tiny_choice"]["acc,none"] <= 1
        assert record["metrics"]["tiny_free"]["tokens_per_forward"] == 1
    assert "TokenDrift, 2 steps: " in capsys.readouterr().out


def test_tasks_are_written_with_the_sampler_that_has_no_steps(files, tmp_path, monkeypatch):
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # runs pip, for seconds
    write_tasks(tmp_path)
    words = ["train", str(files / "recipe.yaml"), *SMALL.split(), "--output_dir", str(tmp_path / "out")]
    words += ["--tasks", "tiny_free", "--task_folder", str(tmp_path), "--task_limit", "2", "--task_shots", "0"]
    assert main([*words, "--num_steps", "1", "2", "--sampler", "first_hitting"]) == 0
    records = json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]
    assert [(record["model"], record["num_steps"]) for record in records] == [("base", None), ("TokenDrift", None)]


def test_tasks_without_the_extra_are_refused_before_any_work(files, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as if it were not installed
    words = ["train", str(files / "recipe.yaml"), *SMALL.split(), "--output_dir", str(tmp_path / "out")]
    words += ["--tasks", "gsm8k"]
    assert 'pip install "tokendrift-hf[tasks]"' in refused(capsys, *words)


# Chat

TEMPLATE = (
    "{% for m in messages %}[CLS] {{ m['content'] }} [SEP] {% endfor %}{% if add_generation_prompt %}w4 {% endif %}"
)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A decoder that sees both sides, whose tokenizer has a chat template."""
    folder = tmp_path_factory.mktemp("chatty")
    decoder("qwen3").save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_a_chat_is_answered_in_the_tokenizers_template(chatty, tmp_path):
    """What is said and the marks around it are seen by the model, and the answer alone is printed, up to its end."""
    output = tmp_path / "answers.jsonl"
    words = ["generate", str(chatty), "--chat", "w5 w6", "--chat", "w7", "--num-samples", "2", "--num-steps", "4"]
    words += ["--max-new-tokens", "6", "--block-length", "3", "--sampler", "confidence", "--temperature", "0"]
    assert main([*words, "--output", str(output)]) == 0
    samples = [json.loads(line) for line in output.read_text().splitlines()]
    assert [sample["prompt"] for sample in samples] == ["w5 w6", "w5 w6", "w7", "w7"]
    model, rows = load_model(str(chatty)), [[1, 5, 6, 2, 4], [1, 7, 2, 4]]
    settings = {"max_new_tokens": 6, "block_length": 3, "sampler": "confidence", "temperature": 0.0, "num_steps": 4}
    for sample, row in zip(samples[::2], rows, strict=True):
        ids = model.generate(torch.tensor([row]), seed=0, trim_eos=True, eos_token_id=2, **settings)[0, len(row) :]
        assert sample["text"].split() == tiny_tokenizer().decode(ids).replace("[SEP]", "").split()


def test_a_tokenizer_without_a_chat_template_is_refused(files, capsys):
    assert "The tokenizer has no chat template" in refused(capsys, "generate", str(files / "bert"), "--chat", "w5")


def test_a_prompt_and_a_chat_together_are_refused(chatty, capsys):
    line = refused(capsys, "generate", str(chatty), "--chat", "w5", "--prompt", "w6")
    assert "--prompt is continued and --chat is answered" in line


# What is refused


def refused(capsys, *words: str) -> str:
    assert main(list(words)) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()[-1:]
    return line


def test_a_checkpoint_without_a_head_is_refused(files, tmp_path, capsys):
    """transformers would fill it with random numbers."""
    model = masked_lm("bert")
    model.bert.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    line = refused(capsys, "generate", str(tmp_path))
    assert "lack" in line and "cls.predictions" in line and "no vocabulary head" in line


def test_a_causal_checkpoint_is_refused(files, capsys):
    line = refused(capsys, "generate", str(files / "judge"))
    assert "GPT2LMHeadModel is causal" in line


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "(model type 't5') is an encoder-decoder"),
        ({"model_type": "vit"}, "is a model of type 'vit', which predicts no masked tokens"),
        ({"model_type": "llada2_moe"}, "Missing here: that mask in training"),
        ({"model_type": "new", "auto_map": {"AutoModel": "m.M"}}, "for model type 'new', that is not known here"),
        ({"model_type": "llada", "auto_map": {"AutoModel": "m.M"}}, "set trust_remote_code: true"),
    ],
)
@pytest.mark.parametrize("command", ["train", "generate", "evaluate"])
def test_a_family_that_does_not_fit_is_refused_by_its_config_alone(command, config, message, files, tmp_path, capsys):
    """There is neither a tokenizer nor a weight, and neither is asked for."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = [command, str(tmp_path)]
    if command == "train":
        words = [command, str(files / "recipe.yaml"), "--model", str(tmp_path), "--output_dir", str(tmp_path / "out")]
    assert message in refused(capsys, *words)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("source", ["bert", "bert/model.safetensors"])
def test_other_families_need_no_conversion(source, files, tmp_path, capsys):
    line = refused(capsys, "convert", str(files / source), str(tmp_path / "out"))
    assert ("model of type 'bert'" in line) == (source == "bert")
    assert "need no conversion: name" in line
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_a_mask_is_refused(files, tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    tokenizer.save_pretrained(tmp_path)
    line = refused(capsys, "generate", str(files / "bert"), "--tokenizer", str(tmp_path))
    assert "BertForMaskedLM has no mask token" in line


def test_a_tokenizer_with_more_ids_than_the_embedding_is_refused(files, tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["more"])
    tokenizer.save_pretrained(tmp_path)
    line = refused(capsys, "generate", str(files / "bert"), "--tokenizer", str(tmp_path))
    assert "The tokenizer has ids up to 24, but BertForMaskedLM embeds 24" in line


def test_a_prompt_that_holds_the_mask_is_filled_there(files, capsys):
    """A masked model fills the masks of a prompt, as everywhere."""
    assert main(["generate", str(files / "bert"), "--prompt", "w5 [MASK] w7", "--max-new-tokens", "1"]) == 0
    words = capsys.readouterr().out.split()
    assert (words[0], words[2]) == ("w5", "w7") and words[1].startswith("w")


def test_a_damaged_diffusion_json_is_refused(files, tmp_path, capsys):
    masked_lm("bert").save_pretrained(tmp_path)
    for text, message in (("{", "is damaged"), ('{"mask": 3}', r"holds ['mask']"), ("[]", "holds ['list']")):
        (tmp_path / ADAPTATION).write_text(text)
        assert message in refused(capsys, "generate", str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (["--model_dtype", "bfloat16"], "model_dtype=bfloat16 rounds away small updates"),
        (["--model_dtype", "half"], "model_dtype='half' is not known"),
        (["--block_size", "40"], "max_length=40: BertForMaskedLM takes 3 to 16 tokens"),
    ],
)
def test_bad_fields_are_refused(fields, message, files, tmp_path, capsys):
    words = ["train", str(files / "recipe.yaml"), *SMALL.split(), *fields, "--output_dir", str(tmp_path / "out")]
    assert message in refused(capsys, *words)
    assert not (tmp_path / "out").exists()
