"""Model cards: valid metadata, true figures, a snippet that runs, and nothing of this machine."""

from __future__ import annotations

import json
import math
import os
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from conftest import tiny_model
from huggingface_hub import ModelCard
from toys import make_trainer

from tokendrift_hf.evaluation.comparison import ResultRow
from tokendrift_hf.models.loading import load_model
from tokendrift_hf.models.lora import lora_config
from tokendrift_hf.publishing.cards import Card, _public_name

ROWS = [
    ResultRow(label, steps, 1.0, 3, 100.0 / steps, 1.5, 5.25, 0.02, None, None, False, steps)
    for label in ("base", "TokenDrift")
    for steps in (4, 16)
]
TABLE = "| model | NFE 4 | NFE 16 |\n|---|---|---|\n| TokenDrift | 25.0 | 6.2 |\n"
KINDS = {"full": {}, "lora": {}, "base": {"objective": "none", "base_loss_weight": 1.0}}


def card_of(kind: str, folder: Path, text_model, **fields) -> Path:
    """The directory of a model that was trained for one step from a local base on a local file."""
    model, tokenizer = text_model
    model.save_pretrained(folder / "my-base")
    base = load_model(str(folder / "my-base"))
    arguments = {"processing_class": tokenizer} | ({"peft_config": lora_config(r=2)} if kind == "lora" else {})
    rows = [{"input_ids": tokenizer("of the object and its size")["input_ids"][:8]}] * 8
    trainer = make_trainer(
        folder / "run", model=base, rows=rows, arguments=arguments, max_steps=1, **KINDS[kind] | fields
    )
    (folder / "corpus.jsonl").write_text(json.dumps({"text": "x"}))
    trainer.card.describe_data({"dataset": str(folder / "corpus.jsonl"), "train_split": "train", "wrap": True})
    trainer.card.add_losses(4.5, float("nan"))
    trainer.train()
    trainer.card.add_results(ROWS, "TokenDrift", str(folder / "my-judge"), 64, "ancestral", TABLE)
    trainer.save_model()
    return folder / "run"


@pytest.mark.parametrize("kind", KINDS)
def test_card_of_a_run(kind, text_model, tmp_path):
    folder = card_of(kind, tmp_path, text_model)
    text = (folder / "README.md").read_text()
    for secret in (str(tmp_path), "/tmp", os.path.expanduser("~") + "/", os.getcwd()):
        assert secret not in text, "a path of this machine is on the card"
    card = ModelCard.load(folder / "README.md")
    data = card.data.to_dict()
    assert data["library_name"] == ("peft" if kind == "lora" else "transformers")
    assert not [name for name in ("base_model", "datasets", "license") if name in data], "a local asset is no hub id"
    assert None not in data.values() and [] not in data.values()
    found = {(result.metric_type, result.metric_args["num_steps"]): result for result in card.data.eval_results}
    assert {key: result.metric_value for key, result in found.items()} == {
        ("gen_ppl", 4): 25.0, ("gen_ppl", 16): 6.25, ("entropy", 4): 5.25, ("entropy", 16): 5.25,
    }  # fmt: skip
    settings = {"num_steps": 4, "temperature": 1.0, "num_seeds": 3}
    settings |= {"judge": "a local model named my-judge", "num_samples": 64, "sampler": "ancestral"}
    assert found["gen_ppl", 4].metric_args == settings
    for promised in (
        "local checkpoint named `my-base`", "`corpus.jsonl`", TABLE, "4.5000 before", "| learning_rate | `1.0` |",
        "| queue_size | `6` |", "| trained_steps | `1` |", "| global_batch_size | `4` |", "in 4, 16 sampling steps",
        "## Limits and risks", "## Licences", "arXiv:2605.19470",
    ):  # fmt: skip
        assert promised in text, promised
    assert "nan" not in text and "None" not in re.sub(r"`None`", "", text)
    assert ("| r | `2` |" in text) == (kind == "lora")


@pytest.mark.parametrize("kind", KINDS)
def test_snippet_on_the_card_runs(kind, text_model, tmp_path, capsys):
    folder = card_of(kind, tmp_path, text_model)
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), flags=re.DOTALL)
    code = code.replace("path/to/this/directory", str(folder)).replace("path/to/my-base", str(tmp_path / "my-base"))
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 10


def test_card_of_released_assets_names_them_and_their_licences():
    card = Card(
        kind="full", model_class="DUOForMaskedLM", repo="me/duo-drift", base="s-sahoo/duo", base_revision="ef8ad7a",
        settings={"learning_rate": 5e-5},
    )  # fmt: skip
    card.describe_data({"dataset": "openwebtext", "train_split": "train"})
    card.add_results(ROWS, "TokenDrift", "gpt2-large", 256, "ancestral", TABLE)
    rendered = card.render()
    data = rendered.data.to_dict()
    assert (data["license"], data["base_model"], data["base_model_relation"]) == (
        "apache-2.0",
        "s-sahoo/duo",
        "finetune",
    )
    assert data["datasets"] == ["Skylion007/openwebtext"]
    assert data["model-index"][0]["name"] == "duo-drift"
    assert "uniform-state-diffusion" in data["tags"] and "tokendrift" in data["tags"]
    for line in ("DUO checkpoint and code: Apache-2.0", "OpenWebText: CC0-1.0", "Modified MIT", "revision `ef8ad7a`"):
        assert line in rendered.text
    assert 'repo = "me/duo-drift"' in rendered.text


METHODS = [  # fields, the objective's name in two titles, what the text says, what it must not say
    ({}, "TokenDrift", "TokenDrift", "to soft-token embeddings", "mirror|bound has"),
    ({"encoder_input": "hard_st", "base_loss_weight": 0.1}, "TokenDrift", "TokenDrift",
     "of the likeliest tokens.*has the weight `0.1` beside it", "soft-token"),
    ({"objective": "mirror_kl"}, "mirror KL", "Mirror KL", "teacher.* by KL", "pulls"),
    ({"objective": "mirror_mse"}, "mirror L2", "Mirror L2", "squared distance", "KL"),
    ({"objective": "mmd", "mmd_credit": 2}, "local MMD", "Local MMD",
     "features within `2` tokens.*abs/2610.06648", "soft-token|TokenDrift|as a whole"),
    ({"objective": "mmd", "mmd_credit": "sequence"}, "MMD", "MMD",
     "rewarded as a whole.*abs/2610.06648", "soft-token|TokenDrift|within"),
    ({"objective": "alpha"}, "alpha", "Alpha",
     "window of `8` predicted positions.*no encoder.*abs/2609.38066", "soft-token|TokenDrift|lets a frozen encoder"),
    ({"objective": "alpha", "alpha_window": None}, "alpha", "Alpha",
     "A whole row counts", "soft-token|TokenDrift|window of"),
    ({"objective": "none", "base_loss_weight": 1.0}, None, "Continuation",
     "likelihood bound alone", "soft-token|TokenDrift|writes better"),
]  # fmt: skip


@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
@pytest.mark.parametrize(("fields", "name", "name_of_adapters", "says", "never"), METHODS, ids=str)
def test_card_tells_the_objective_of_the_training(fields, name, name_of_adapters, says, never, adapters, tmp_path):
    arguments = {"peft_config": lora_config(r=2)} if adapters else {}
    card = make_trainer(tmp_path, arguments=arguments, **fields).card.render()
    start = card.text.partition("## How to load")[0]
    whole = "MDLM diffusion language model" if name is None else f"MDLM refined with {name}"
    assert f"# {f'{name_of_adapters} adapters for MDLM' if adapters else whole}\n" in start
    assert re.search(says, start, flags=re.DOTALL), start
    assert not re.search(never, start), start
    assert ("tokendrift" in card.data.tags) == (name == "TokenDrift")
    other = re.search(r"abs/[\d.]+", says)
    assert other is None or f"The objective is that of [arXiv {other[0][4:]}]" in card.text


def test_figures_that_are_not_finite_are_left_out():
    card = Card(kind="full", model_class="MDLMForMaskedLM")
    rows = [replace(ROWS[2], gen_ppl=math.inf), replace(ROWS[3], entropy=math.nan)]
    card.add_results(rows, "TokenDrift", "gpt2-large", 8, "ancestral")
    results = card.render().data.eval_results
    assert [(result.metric_type, result.metric_args["num_steps"]) for result in results] == [("gen_ppl", 16)]


def test_card_before_any_evaluation(tmp_path):
    """A model that was never saved, no data described, no result: still a valid card."""
    trainer = make_trainer(tmp_path, model=tiny_model("duo"))
    trainer.create_model_card(model_name="ignored")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.eval_results is None
    assert (
        "made in the program that trained it" in card.text and "No samples of this model have been scored" in card.text
    )


def test_templates_travel_with_the_package():
    """The folder in the root of the repository is the package's own."""
    root = Path(__file__).resolve().parents[2]
    names = {path.name for path in (root / "model_cards").glob("*.md")}
    assert names == {"full.md", "lora.md", "base.md", "rest.md"}
    assert (root / "model_cards").resolve() == root / "tokendrift_hf/publishing/model_cards"
    assert "publishing/model_cards/*.md" in (root / "setup.cfg").read_text()


HOSTILE = "a`b``c\n\n# heading\n<script>alert(1)</script> | x ![i](http://e.vil/x)"


def test_what_users_name_is_text_and_never_markup():
    """Backticks, line breaks, pipes and HTML in names and settings stay inside one code span, one line, one cell."""
    card = Card(kind="lora", model_class="MDLMForMaskedLM", base=HOSTILE, base_is_local=True, base_revision=HOSTILE)
    card.settings = card.adapters = {"optim": HOSTILE}
    card.data = {"dataset": HOSTILE, "is_local": True, "text_column": HOSTILE}
    card.results = [asdict(ROWS[0])]
    card.evaluation = {"judge": HOSTILE, "num_samples": 2, "sampler": HOSTILE}
    text = card.render().text
    code = re.findall(r"```python\n(.*?)\n```", text, flags=re.DOTALL)
    assert len(code) == 1, "a name has closed the block"
    compile(code[0], "card", "exec")
    prose = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    assert prose.count("<script>") == 7, "not every value is shown"
    for line in prose.splitlines():
        assert "<" not in re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", line), f"markup outside a code span: {line}"
    assert "\n# heading" not in text


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("s-sahoo/duo", ("s-sahoo/duo", False)),
        ("gpt2", ("gpt2", False)),
        ("https://me:secret@host.org/models/tiny?key=secret", ("tiny", True)),
        ("https://huggingface.co/gpt2", ("gpt2", True)),
        ("s3://bucket/secret/model", ("model", True)),
        ("C:\\Users\\me\\model", ("model", True)),
        ("/home/me/model", ("model", True)),
        ("../me/model", ("model", True)),
        ("~/model", ("model", True)),
        ("a/b/c", ("c", True)),
        ("", ("", False)),
    ],
)
def test_only_valid_ids_are_shown_as_ids(name, shown):
    assert _public_name(name) == shown
