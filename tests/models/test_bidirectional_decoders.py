"""Decoders that see both sides: Qwen3, Qwen2, Llama with is_causal = False, and tiny-A2D checkpoints."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from stand_ins import MASK, V, decoder, some_ids, text_rows, tiny_tokenizer
from toys import logged, make_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from tokendrift_hf import FrozenEncoder, as_diffusion
from tokendrift_hf.models.adaptation import ADAPTATION
from tokendrift_hf.models.loading import load_model, load_tokenizer
from tokendrift_hf.models.lora import lora_config

DECODERS = ["qwen3", "qwen2", "llama"]
PREDICTED = torch.tensor([i for i in range(V) if i != MASK])


@pytest.mark.parametrize("model_type", [*DECODERS, "gemma3_text"])
@torch.no_grad()
def test_logits_are_the_decoders_own_to_the_bit(model_type):
    own = decoder(model_type)
    model = as_diffusion(copy.deepcopy(own), mask_token_id=MASK)
    ids, exists = some_ids(), torch.ones(2, 12, dtype=torch.long)
    assert model(input_ids=ids).logits[..., PREDICTED].equal(own(input_ids=ids).logits[..., PREDICTED])
    exists[1, 7:] = 0
    ours, theirs = (which(input_ids=ids, attention_mask=exists).logits for which in (model, own))
    assert ours[exists.bool()][:, PREDICTED].equal(theirs[exists.bool()][:, PREDICTED])


@pytest.mark.parametrize("model_type", DECODERS)
@torch.no_grad()
def test_both_sides_are_seen(model_type):
    model = as_diffusion(decoder(model_type), mask_token_id=MASK)
    ids = some_ids(rows=1)
    changed = ids.clone()
    changed[0, 9] = 8 if ids[0, 9] != 8 else 9
    moved = (model(input_ids=ids).logits - model(input_ids=changed).logits)[0, :, PREDICTED].abs().amax(-1)
    assert (moved > 1e-6).all()


@pytest.mark.parametrize("model_type", DECODERS)
def test_only_the_mask_is_ruled_out(model_type):
    """The end of text is predicted by decoders, so no special token is kept, whatever the tokenizer calls special."""
    model = as_diffusion(decoder(model_type), tokenizer=tiny_tokenizer())
    assert model.process.kept_ids == () and model.adaptation.frame is None
    with torch.no_grad():
        p = model(input_ids=some_ids()).logits.softmax(-1)
    assert p[..., MASK].eq(0).all() and p[..., PREDICTED].gt(0).all()


@pytest.mark.parametrize("model_type", DECODERS)
def test_a_decoder_as_released_is_refused(model_type):
    with pytest.raises(ValueError, match="ForCausalLM is causal.*Set config.is_causal = False"):
        as_diffusion(decoder(model_type, is_causal=None), mask_token_id=MASK)


def test_a_class_that_ignores_the_setting_is_refused():
    """Silently causal: the configuration says otherwise, and the forward does not ask it."""

    class Deaf(Qwen3ForCausalLM):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs, is_causal=True)

    Deaf.__module__ = Qwen3ForCausalLM.__module__
    model = decoder("qwen3")
    model.__class__ = Deaf
    with pytest.raises(ValueError, match="Deaf is causal: a later token changes nothing"):
        as_diffusion(model, mask_token_id=MASK)


def test_a_class_that_turns_causal_under_padding_is_refused():
    """As LLaDA2 does when its 2-D mask has zeros."""

    class Turning(Qwen3ForCausalLM):
        def forward(self, *args, attention_mask=None, **kwargs):
            padded = attention_mask is not None and not attention_mask.all()
            return super().forward(*args, attention_mask=attention_mask, is_causal=padded, **kwargs)

    Turning.__module__ = Qwen3ForCausalLM.__module__
    model = decoder("qwen3")
    model.__class__ = Turning
    with pytest.raises(ValueError, match="Turning is causal"):
        as_diffusion(model, mask_token_id=MASK)


@torch.no_grad()
def test_a_scaled_embedding_is_lifted_with_its_scale():
    """Gemma multiplies rows of its table by the root of the width when it looks them up."""
    model = as_diffusion(decoder("gemma3_text"), mask_token_id=MASK)
    E = FrozenEncoder.copy_of(model).embedding
    ids = some_ids()
    assert model(inputs_embeds=E[ids]).logits.equal(model(input_ids=ids).logits)
    assert not E.equal(model.get_input_embeddings().weight)


@pytest.mark.parametrize("encoder", [None, "base"])
def test_a_decoder_refines_with_adapters(encoder, tmp_path):
    model = as_diffusion(decoder("qwen3"), mask_token_id=MASK)
    arguments = {"peft_config": lora_config("linear", r=2), "encoder": encoder}
    trainer = make_trainer(tmp_path, model=model, rows=text_rows(8), arguments=arguments, base_loss_weight=0.5)
    trainer.train()
    adapted = {
        name.partition(".lora_")[0].rpartition(".")[2]
        for name, _ in trainer.model.named_parameters()
        if "lora_" in name
    }
    assert adapted == {f"{x}_proj" for x in "q k v o gate up down".split()} | {"lm_head"}
    assert all(torch.isfinite(torch.tensor(logged(trainer))))


def test_it_saves_as_a_decoder_that_sees_both_sides(tmp_path):
    """The family's class reads it, is_causal included, and its own generation_config.json stays as it was."""
    own = decoder("qwen3")
    own.generation_config.max_new_tokens = 17
    own.save_pretrained(tmp_path / "own")
    model = as_diffusion(own, mask_token_id=MASK)
    model.generation_config.num_steps = 5
    model.save_pretrained(tmp_path / "ours")
    files = {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}
    saved = {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()}
    assert json.loads(saved.pop(ADAPTATION))["generation"] == {"num_steps": 5}
    assert saved == files
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert loaded.config.is_causal is False and type(loaded) is Qwen3ForCausalLM
    with torch.no_grad():
        assert (
            loaded(input_ids=some_ids())
            .logits[..., PREDICTED]
            .equal(model(input_ids=some_ids()).logits[..., PREDICTED])
        )


# tiny-A2D


@pytest.fixture
def a2d(tmp_path):
    """A checkpoint as dllm writes it: its own model type and class, native weights, a tokenizer without the mask."""
    model = decoder("qwen3", is_causal=None, vocab_size=V)
    model.save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer(words=10)
    tokenizer.mask_token = None
    tokenizer.eos_token, tokenizer.bos_token = "[SEP]", "[CLS]"
    tokenizer.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields |= {"model_type": "a2d-qwen3", "architectures": ["A2DQwen3LMHeadModel"]}
    fields["auto_map"] = {
        "AutoConfig": "modeling_qwen3.A2DQwen3Config",
        "AutoModel": "modeling_qwen3.A2DQwen3LMHeadModel",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    return tmp_path, model


def test_a_tiny_a2d_checkpoint_loads_as_the_native_decoder(a2d):
    """No code of its own is asked for or run; its weights are those of Qwen3 and both sides are seen."""
    folder, own = a2d
    model = load_model(str(folder))
    assert isinstance(model, Qwen3ForCausalLM) and model.config.model_type == "qwen3"
    assert all(value.equal(own.state_dict()[name]) for name, value in model.state_dict().items())
    own.config.is_causal = False
    with torch.no_grad():
        ours, theirs = (which(input_ids=some_ids()).logits for which in (model, own))
    predicted = [i for i in range(14) if i != model.process.mask_id]
    assert ours[..., predicted].equal(theirs[..., predicted])


def test_the_mask_of_a_tiny_a2d_checkpoint_is_added_as_its_authors_code_adds_it(a2d):
    """<|mask|>, behind the last token: 4 special ones and 10 words make it 14."""
    folder, _ = a2d
    tokenizer, model = load_tokenizer(str(folder)), load_model(str(folder))
    assert (tokenizer.mask_token, tokenizer.mask_token_id, model.process.mask_id) == ("<|mask|>", 14, 14)
    assert AutoTokenizer.from_pretrained(folder).mask_token is None, "the files are not touched"
    assert model.adaptation.num_tokens == 15


def test_what_is_saved_of_a_tiny_a2d_checkpoint_is_a_plain_decoder(a2d, tmp_path):
    folder, _ = a2d
    model = load_model(str(folder))
    model.save_pretrained(tmp_path / "saved")
    fields = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (fields["model_type"], fields["architectures"]) == ("qwen3", ["Qwen3ForCausalLM"])
    assert fields["is_causal"] is False and "auto_map" not in fields
    assert load_model(str(tmp_path / "saved")).adaptation == model.adaptation
