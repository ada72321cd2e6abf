"""Cards of adapted models: the snippet runs with the family's own class."""

from __future__ import annotations

import re

import pytest
from huggingface_hub import ModelCard
from stand_ins import masked_lm, text_rows, tiny_tokenizer
from toys import make_trainer

from tokendrift_hf.models.loading import load_model
from tokendrift_hf.models.lora import lora_config
from tokendrift_hf.publishing.cards import Card


@pytest.fixture(params=["full", "lora", "base"])
def folder(request, tmp_path):
    """The directory of a BERT that was trained for one step, from a directory that nobody had adapted."""
    masked_lm("bert").save_pretrained(tmp_path / "my-base")
    tiny_tokenizer().save_pretrained(tmp_path / "my-base")
    model = load_model(str(tmp_path / "my-base"), max_length=12)
    arguments = {"processing_class": tiny_tokenizer()}
    arguments |= {"peft_config": lora_config(r=2)} if request.param == "lora" else {}
    fields = {"objective": "none", "base_loss_weight": 1.0} if request.param == "base" else {}
    trainer = make_trainer(tmp_path / "run", model=model, rows=text_rows(4), arguments=arguments, max_steps=1, **fields)
    trainer.train()
    trainer.save_model()
    return tmp_path / "run"


def test_snippet_on_the_card_runs(folder, capsys):
    text = (folder / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert "AutoModelForMaskedLM" in code and "as_diffusion" in code
    code = code.replace("path/to/this/directory", str(folder)).replace(
        "path/to/my-base", str(folder.parent / "my-base")
    )
    exec(compile(code, "README.md", "exec"), {})
    assert len(capsys.readouterr().out) > 10


def test_metadata_say_what_it_is(folder):
    data = ModelCard.load(folder / "README.md").data.to_dict()
    assert "masked-diffusion" in data["tags"] and "custom_code" not in data["tags"]


def test_a_model_with_code_of_its_own_is_loaded_by_us():
    """The published code of LLaDA and Dream does not load on transformers 5 by itself."""
    for kind in ("full", "lora"):
        text = Card(kind=kind, model_class="LLaDAModelLM", auto_class="", base="GSAI-ML/LLaDA-8B-Base").render().text
        assert "from tokendrift_hf.models.loading import load_model" in text
        assert "trust_remote_code=True)" in text
