"""LLaDA and Dream: stand-ins that keep the contract of their published code, faults included, on transformers 5."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from stand_ins import tiny_tokenizer
from toys import CHECKPOINTING, logged, make_trainer
from transformers import AutoConfig, AutoModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from tokendrift_hf.models.adaptation import ADAPTATION
from tokendrift_hf.models.loading import load_model
from tokendrift_hf.models.lora import lora_config
from tokendrift_hf.models.remote import REPAIRS

CODE = Path(__file__).parents[1] / "remote_code"
KINDS = {"llada": "LLaDAModelLM", "dream": "DreamModel"}
MASK, V = 23, 24
PREDICTED = torch.arange(V - 1)


def checkpoint(folder: Path, kind: str, **changes) -> Path:
    """A directory as published: code, configuration and weights, written without transformers' from_pretrained."""
    folder.mkdir(parents=True)
    for path in CODE.glob(f"*_{kind}.py"):
        shutil.copy(path, folder)
    config_class = {"llada": "LLaDAConfig", "dream": "DreamConfig"}[kind]
    reference = f"modeling_{kind}.{KINDS[kind]}"
    names = ["AutoModel", "AutoModelForCausalLM"] if kind == "llada" else ["AutoModel"]
    auto_map = {"AutoConfig": f"configuration_{kind}.{config_class}"} | dict.fromkeys(names, reference)
    fields = {"model_type": {"llada": "llada", "dream": "Dream"}[kind], "auto_map": auto_map} | changes
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "generation_config.json").write_text("{}")
    save_file(network(folder).state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def network(folder: Path):
    """The published class with random weights, repaired so far that it can be built."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    reference = json.loads((folder / "config.json").read_text())["auto_map"]["AutoModel"]
    model_class = get_class_from_dynamic_module(reference, str(folder))
    REPAIRS[config.model_type](model_class, config)
    torch.manual_seed(0)
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """One checkpoint of each kind. Their names differ, since transformers names the modules of the code after them."""
    return {kind: checkpoint(tmp_path_factory.mktemp("remote") / kind, kind) for kind in KINDS}


@pytest.fixture
def load(folders):
    def load(kind: str, **kwargs):
        return load_model(str(folders[kind]), told={"max_length": 12}, trust_remote_code=True, **kwargs).eval()

    return load


def some_ids() -> torch.Tensor:
    return torch.randint(V - 1, (2, 12), generator=torch.Generator().manual_seed(0))


# The faults of the published code


@pytest.mark.parametrize(("kind", "fault"), [("llada", "all_tied_weights_keys"), ("dream", "default")])
def test_the_published_code_fails_by_itself(kind, fault, tmp_path):
    """What the stand-ins are for: transformers alone cannot load them. A fresh folder has fresh, unrepaired modules."""
    checkpoint(tmp_path / f"unrepaired_{kind}", kind)
    shutil.copytree(tmp_path / f"unrepaired_{kind}", tmp_path / f"fresh_{kind}")
    with pytest.raises((AttributeError, KeyError), match=fault):
        AutoModel.from_pretrained(tmp_path / f"fresh_{kind}", trust_remote_code=True)


@pytest.mark.parametrize("kind", KINDS)
def test_code_beside_a_model_is_not_run_unasked(kind, folders):
    with pytest.raises(ValueError, match=r"comes with code of its own, which is not run unasked.*trust_remote_code"):
        load_model(str(folders[kind]), told={"max_length": 12})


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_every_weight_and_buffer_is_that_of_the_built_model(kind, folders, load):
    """Buffers that no file holds included: transformers 5 builds on the meta device and leaves them as allocated."""
    own, model = network(folders[kind]), load(kind)
    assert all(value.equal(model.state_dict()[name]) for name, value in own.state_dict().items())
    buffers = dict(model.named_buffers())
    assert all(value.equal(buffers[name]) for name, value in own.named_buffers())


# The contract


@torch.no_grad()
def test_llada_logits_are_its_own_to_the_bit(folders, load):
    own, model, ids = network(folders["llada"]), load("llada"), some_ids()
    exists = torch.ones(2, 12)
    exists[1, 7:] = 0
    assert model.process.mask_id == MASK and model.adaptation.shift is False
    assert model(input_ids=ids).logits[..., PREDICTED].equal(own(input_ids=ids).logits[..., PREDICTED])
    ours, theirs = (which(input_ids=ids, attention_mask=exists).logits for which in (model, own))
    assert ours[exists.bool()][:, PREDICTED].equal(theirs[exists.bool()][:, PREDICTED])


@torch.no_grad()
def test_dream_logits_are_its_own_moved_one_to_the_right(folders, load):
    """Position i is predicted from the state at i - 1; the first from its own, as its authors' code does."""
    own, model, ids = network(folders["dream"]), load("dream"), some_ids()
    theirs = own(input_ids=ids).logits
    expected = torch.cat([theirs[:, :1], theirs[:, :-1]], dim=1)
    assert model.process.mask_id == MASK and model.adaptation.shift is True
    assert model(input_ids=ids).logits[..., PREDICTED].equal(expected[..., PREDICTED])


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_padding_is_not_seen(kind, load):
    """Rows of unequal length give what each gives alone, and padding never makes nan."""
    model, ids = load(kind), some_ids()
    exists = torch.ones(2, 12, dtype=torch.bool)
    exists[1, 7:] = False
    logits = model(input_ids=ids, attention_mask=exists).logits
    alone = model(input_ids=ids[1:, :7]).logits
    torch.testing.assert_close(logits[1:, :7, PREDICTED], alone[..., PREDICTED], rtol=1e-4, atol=1e-5)
    assert logits.isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_positions_and_embeddings(kind, load):
    model, ids, positions = load(kind), some_ids(), torch.tensor([[0, 5, 3], [11, 2, 9]])
    logits = model(input_ids=ids).logits
    assert model(inputs_embeds=model.get_input_embeddings().weight[ids]).logits.equal(logits)
    hidden, c = model(input_ids=ids, positions=positions).hidden_states
    torch.testing.assert_close(model.logits(hidden, c), logits.take_along_dim(positions[..., None], dim=1))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_block_outputs_come_before_the_final_norm(kind, folders, load):
    """Their own hidden states end after it."""
    own, model, ids = network(folders[kind]), load(kind), some_ids()
    theirs = own(input_ids=ids, output_hidden_states=True).hidden_states
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(states) == len(theirs) == 4
    assert all(ours.equal(other) for ours, other in zip(states[:-1], theirs[:-1], strict=True))
    norm = own.get_submodule(model.head_names[0])
    last = states[-1] if kind == "llada" else torch.cat([states[-1][:, 1:], states[-1][:, -1:]], dim=1)
    assert norm(last)[:, :-1].equal(theirs[-1][:, :-1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", ["ancestral", "first_hitting", "confidence"])
def test_every_mask_is_filled(kind, sampler, load):
    model = load(kind)
    ids = torch.tensor([[1, 2, MASK, MASK, 5]])
    x = model.generate(ids, num_samples=3, max_new_tokens=4, sampler=sampler, seed=0)
    assert x.shape == (3, 9) and (x != MASK).all()
    assert x[:, [0, 1, 4]].equal(torch.tensor([[1, 2, 5]] * 3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("encoder", [None, "base"])
def test_adapters_train(kind, encoder, load, tmp_path):
    rows = [{"input_ids": row.tolist()} for row in torch.arange(96).view(8, 12) % 23]
    arguments = {"peft_config": lora_config("linear", r=2), "encoder": encoder}
    trainer = make_trainer(tmp_path, model=load(kind), rows=rows, arguments=arguments, base_loss_weight=0.5)
    trainer.train()
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name in trainer.model.state_dict() if "lora_" in name}
    expected = {
        "llada": "q_proj k_proj v_proj attn_out ff_proj up_proj ff_out",
        "dream": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj lm_head",
    }
    assert layers == set(expected[kind].split())
    assert all(torch.isfinite(torch.tensor(logged(trainer))))


@pytest.mark.parametrize("kind", KINDS)
def test_activation_checkpointing_changes_nothing(kind, load, tmp_path):
    rows = [{"input_ids": row.tolist()} for row in torch.arange(96).view(8, 12) % 23]
    losses, switched = [], []
    for on in (False, True):
        trainer = make_trainer(tmp_path / str(on), model=load(kind), rows=rows, max_steps=2, **{CHECKPOINTING: on})
        if on and kind == "llada":
            inner = trainer.model.model
            inner.set_activation_checkpointing = lambda way, inner=inner: (
                switched.append(way),
                setattr(inner, "activation_checkpointing_strategy", way),
            )
        trainer.train()
        losses.append(logged(trainer))
    assert losses[0] == losses[1]
    assert kind != "llada" or switched == ["whole_layer"]


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_is_saved_is_the_familys_own_with_its_code(kind, load, folders, tmp_path):
    model, ids = load(kind), some_ids()
    model.save_pretrained(tmp_path / f"saved_{kind}")
    names = {path.name for path in (tmp_path / f"saved_{kind}").iterdir()}
    assert names >= {f"modeling_{kind}.py", f"configuration_{kind}.py", "config.json", "model.safetensors", ADAPTATION}
    fields = json.loads((tmp_path / f"saved_{kind}" / "config.json").read_text())
    assert fields["architectures"] == [KINDS[kind]]
    assert fields["auto_map"]["AutoModel"] == f"modeling_{kind}.{KINDS[kind]}"
    loaded = load_model(str(tmp_path / f"saved_{kind}"), trust_remote_code=True).eval()
    assert loaded.adaptation == model.adaptation
    assert loaded(input_ids=ids).logits.equal(model(input_ids=ids).logits)


def test_the_mask_of_llada_is_found_by_its_text(folders):
    """Its tokenizer has <|mdm_mask|> and does not call it the mask; config.mask_token_id would be second."""
    from tokendrift_hf.models.adapter import _mask_id
    from tokendrift_hf.models.families import FAMILIES

    tokenizer = tiny_tokenizer(words=10)
    tokenizer.mask_token = None
    tokenizer.add_tokens(["<|mdm_mask|>"])
    model = network(folders["llada"])
    assert _mask_id(model, FAMILIES["llada"], tokenizer, None) == 14
    assert _mask_id(model, FAMILIES["llada"], None, None) == MASK


def test_a_family_whose_code_is_not_known_is_refused_before_its_code_is_run(tmp_path):
    fields = {"model_type": "stranger", "auto_map": {"AutoConfig": "a.B", "AutoModel": "a.C"}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    (tmp_path / "a.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ValueError, match="code of its own, for model type 'stranger', that is not known here"):
        load_model(str(tmp_path), told={"mask_token_id": 3}, trust_remote_code=True)


@pytest.mark.parametrize("model_type", ["llada2_moe", "sdar", "diffusion_gemma"])
def test_block_models_are_refused_before_anything_is_loaded(model_type, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(ValueError, match="cannot be adapted: it .*Missing here: "):
        load_model(str(tmp_path), told={"mask_token_id": 3}, trust_remote_code=True)
