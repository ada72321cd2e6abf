"""Saving and loading: the released layouts, damaged files, custom code where this package is missing, and a hub."""

from __future__ import annotations

import copy
import json
import logging
import textwrap

import pytest
import torch
from conftest import FIXTURES, TINY, model_class, recorded, released_directory, run_python, start_python, tiny_model
from fakehub import FakeHub
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    PreTrainedConfig,
    Trainer,
    TrainingArguments,
)

from tokendrift_hf import DiffusionGenerationConfig, DUOForMaskedLM, MDLMForMaskedLM
from tokendrift_hf.models.loading import load_encoder, load_judge, load_model, load_tokenizer

KINDS = ("mdlm", "duo")
CODE_FILES = {f"{part}_tokendrift.py" for part in ("configuration", "modeling", "generation", "process")}


def ids_for(model) -> torch.Tensor:
    config = model.config
    generator = torch.Generator().manual_seed(5)
    return torch.randint(config.vocab_size, (2, config.max_position_embeddings), generator=generator)


def logits_of(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ids_for(model), timesteps=torch.tensor([0.2, 0.9])).logits


# The released layouts


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("with_buffer", [True, False])
def test_released_layout_loads_and_saves_as_ours(kind, with_buffer, tmp_path, caplog):
    """Every tensor is used and none is missing; no warning; what is saved has our config and the same keys."""
    weights = recorded(f"{kind}_tiny_weights")
    if not with_buffer:
        del weights["backbone.rotary_emb.inv_freq"]
    released = released_directory(tmp_path / "released", kind, weights)
    model, info = model_class(kind).from_pretrained(released, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    file = recorded(f"{kind}_tiny_io")
    output = model.eval()(file["input_ids"])
    assert not isinstance(output, tuple)  # the released config asks for bare tensors of its own code
    scale = float(file["sigma_zero.logits"].abs().max())
    torch.testing.assert_close(output.logits[..., :-1], file["sigma_zero.logits"][..., :-1], rtol=0, atol=2e-6 * scale)

    model.save_pretrained(tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["model_type"] == model.config.model_type == f"tokendrift_{kind}"
    assert config["architectures"] == [type(model).__name__] and config["hidden_size"] == 64
    assert set(config["auto_map"]) == {"AutoConfig", "AutoModel", "AutoModelForMaskedLM"}
    assert not {"hidden_dim", "n_blocks", "n_heads", "model_length"} & set(config)
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    expected = recorded(f"{kind}_tiny_weights")
    assert saved.keys() == expected.keys() and all(saved[name].equal(expected[name]) for name in expected)
    assert logits_of(model_class(kind).from_pretrained(tmp_path / "ours")).equal(logits_of(model))


def test_released_layout_without_cond_dim_gets_128(tmp_path):
    """The released classes default to 129, a slip; a config.json that leaves the field out means 128."""
    model = MDLMForMaskedLM(MDLMForMaskedLM.config_class(**{**TINY, "cond_dim": 128}))
    fields = dict(vocab_size=23, hidden_dim=32, n_blocks=2, n_heads=2, model_length=16, cond_dim=None)
    released = released_directory(tmp_path / "released", "mdlm", model.state_dict(), **fields)
    assert MDLMForMaskedLM.from_pretrained(released).config.cond_dim == 128
    with pytest.raises(ValueError, match=r"sigma_map.mlp.0.bias has shape \[128\] instead of \[129\]"):
        MDLMForMaskedLM.from_pretrained(released, cond_dim=129)


def test_released_layout_trains(tmp_path):
    """Released checkpoints are said not to be fine-tunable: here a step reaches all weights and lowers the loss."""
    model = DUOForMaskedLM.from_pretrained(released_directory(tmp_path / "released", "duo")).train()
    losses = recorded("duo_losses")
    batch = dict(input_ids=losses["q_xt.duo.xt"], timesteps=losses["q_xt.t"], labels=losses["q_xt.x0"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    model.config.dropout = 0.0
    before = model.eval()(**batch).loss
    before.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    optimizer.step()
    assert model(**batch).loss < before


class ReleasedModule(torch.nn.Module):
    """A network with the names of the released code, for a strict load; its forward does not matter here."""

    def __init__(self, shapes: dict[str, torch.Size]):
        super().__init__()
        for name, shape in shapes.items():
            *path, last = name.split(".")
            module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            if last == "inv_freq":
                module.register_buffer(last, torch.empty(shape))
            else:
                module.register_parameter(last, torch.nn.Parameter(torch.empty(shape)))


@pytest.mark.parametrize("kind", KINDS)
def test_our_checkpoints_load_strictly_into_the_released_code(kind, tmp_path):
    """Names, shapes and, for EMA lists, the order of parameters are those that the released trainers recorded."""
    model = model_class(kind).from_pretrained(released_directory(tmp_path / "released", kind))
    model.save_pretrained(tmp_path / "ours")
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    theirs = ReleasedModule({name: tensor.shape for name, tensor in recorded(f"{kind}_tiny_weights").items()})
    theirs.load_state_dict(saved, strict=True)
    orders = json.loads((FIXTURES / f"{kind}_tiny_config.json").read_text())
    assert [name for name, _ in model.named_parameters()] == orders["parameter_order"]
    assert list(model.state_dict()) == orders["state_dict_order"]


# Damage


def damaged(tmp_path, change: str):
    weights = recorded("mdlm_tiny_weights")
    if change == "missing":
        del weights["backbone.blocks.1.mlp.0.bias"]
    elif change == "renamed":
        weights["backbone.blocks.1.ffn.bias"] = weights.pop("backbone.blocks.1.mlp.0.bias")
    elif change == "reshaped":
        weights["backbone.blocks.1.mlp.0.bias"] = torch.zeros(3)
    elif change == "foreign":
        weights = {"bert.embeddings.weight": torch.zeros(98, 64)}
    path = released_directory(tmp_path / "damaged", "mdlm", weights)
    file = path / "model.safetensors"
    if change == "cut off":
        file.write_bytes(file.read_bytes()[:-1000])
    elif change == "empty":
        file.write_bytes(b"")
    elif change == "no config":
        (path / "config.json").unlink()
    elif change == "no weights":
        file.unlink()
    return path


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ("missing", ValueError, r"backbone\.blocks\.1\.mlp\.0\.bias is missing"),
        ("renamed", ValueError, r"mlp\.0\.bias is missing; backbone\.blocks\.1\.ffn\.bias is not used"),
        ("reshaped", ValueError, r"backbone\.blocks\.1\.mlp\.0\.bias has shape \[3\] instead of \[256\]"),
        ("foreign", ValueError, r"and \d+ more\. They belong to another architecture"),
        ("cut off", ValueError, "cannot be read .*cut off or still being written"),
        ("empty", ValueError, "cannot be read .*cut off or still being written"),
        ("no config", ValueError, "config.json of .* is missing or has no model_type"),
        ("no weights", OSError, "no file named model.safetensors"),
    ],
)
def test_damaged_directories_are_refused(change, error, message, tmp_path):
    with pytest.raises(error, match=message):
        MDLMForMaskedLM.from_pretrained(damaged(tmp_path, change))


def test_sharded_checkpoints_load_and_an_incomplete_one_names_the_shard(tmp_path):
    model = tiny_model("mdlm")
    model.save_pretrained(tmp_path, max_shard_size="30kB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert logits_of(MDLMForMaskedLM.from_pretrained(tmp_path)).equal(logits_of(model))
    shards[1].unlink()
    with pytest.raises(OSError, match=shards[1].name):
        MDLMForMaskedLM.from_pretrained(tmp_path)


def test_what_is_not_ours_is_refused(tmp_path):
    duo = released_directory(tmp_path / "duo", "duo")
    with pytest.raises(ValueError, match="is of model_type 'DUO', but MDLMConfig reads 'tokendrift_mdlm'"):
        MDLMForMaskedLM.from_pretrained(duo)
    bert = released_directory(tmp_path / "bert", "mdlm", model_type="bert")
    with pytest.raises(ValueError, match="is of model_type 'bert'"):
        MDLMForMaskedLM.from_pretrained(bert)
    with pytest.raises(ValueError, match="is a file, .*tokendrift convert"):
        MDLMForMaskedLM.from_pretrained(duo / "model.safetensors")
    causal = released_directory(tmp_path / "causal", "duo", recorded("duo_causal_tiny"), causal=True)
    with pytest.raises(ValueError, match="causal=True is the autoregressive variant"):
        DUOForMaskedLM.from_pretrained(causal)


def test_mismatched_shapes_may_be_ignored_on_request(tmp_path):
    path = damaged(tmp_path, "reshaped")
    model, info = MDLMForMaskedLM.from_pretrained(path, ignore_mismatched_sizes=True, output_loading_info=True)
    assert [key for key, *_ in info["mismatched_keys"]] == ["backbone.blocks.1.mlp.0.bias"]
    assert model.backbone.blocks[1].mlp[0].bias.shape == (256,)


# The usual arguments


@pytest.mark.parametrize("kind", KINDS)
def test_loading_leaves_nothing_to_chance(kind, tmp_path):
    """Built on the meta device, memory that nothing has written is poisoned with NaN: all of it gets written."""
    weights = recorded(f"{kind}_tiny_weights")
    inv_freq = weights.pop("backbone.rotary_emb.inv_freq")
    path = released_directory(tmp_path / "released", kind, weights)
    expected = logits_of(model_class(kind).from_pretrained(path))
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(3).isnan().all()
    try:
        model = model_class(kind).from_pretrained(path)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(model.backbone.rotary_emb.inv_freq, inv_freq, rtol=1e-6, atol=0)
    assert logits_of(model).equal(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_dtype_and_device_map(kind, tmp_path):
    model = tiny_model(kind)
    model.save_pretrained(tmp_path / "float32")
    half = model_class(kind).from_pretrained(tmp_path / "float32", dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    half.save_pretrained(tmp_path / "bfloat16")
    assert model_class(kind).from_pretrained(tmp_path / "bfloat16").dtype == torch.bfloat16
    assert model_class(kind).from_pretrained(tmp_path / "bfloat16", dtype=torch.float32).dtype == torch.float32
    for device_map in ("cpu", {"": "cpu"}, "auto"):
        assert logits_of(model_class(kind).from_pretrained(tmp_path / "float32", device_map=device_map)).equal(
            logits_of(model)
        )
    mapped = {"backbone.vocab_embed": "cpu", "backbone": "cpu"}
    assert logits_of(model_class(kind).from_pretrained(tmp_path / "float32", device_map=mapped)).equal(logits_of(model))
    eager = model_class(kind).from_pretrained(tmp_path / "float32", attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"
    torch.testing.assert_close(logits_of(eager), logits_of(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_save_pretrained_keeps_every_setting(kind, tmp_path):
    """Weights, config and every field of the generation config, through two rounds; and the code files come along."""
    model = tiny_model(kind, dropout=0.3, time_conditioning=True, initializer_range=0.07)
    values = dict(num_steps=5, sampler="psi", temperature=0.7, top_k=4, top_p=0.8, eos_token_id=2, max_new_tokens=9)
    for name, value in DiffusionGenerationConfig.defaults.items():
        changed = {bool: lambda v: not v, int: lambda v: v + 3, float: lambda v: v / 2, list: lambda v: [0.25, 0.5]}
        values.setdefault(name, changed[type(value)](value) if type(value) in changed else value)
    model.generation_config = DiffusionGenerationConfig(**values)
    first = model
    for i in range(2):
        first.save_pretrained(tmp_path / str(i))
        assert CODE_FILES <= {file.name for file in (tmp_path / str(i)).iterdir()}
        first = model_class(kind).from_pretrained(tmp_path / str(i))
    kept = {name: value for name, value in first.generation_config.to_dict().items() if name in values}
    assert kept == values
    ours = {name: value for name, value in model.config.to_dict().items() if name != "_name_or_path"}
    assert ours == {name: value for name, value in first.config.to_dict().items() if name != "_name_or_path"}
    assert logits_of(first).equal(logits_of(model))


def test_importing_the_package_registers_both_types_and_no_released_one(tmp_path):
    for kind in KINDS:
        model = tiny_model(kind)
        model.save_pretrained(tmp_path / kind)
        for auto in (AutoModel, AutoModelForMaskedLM):
            loaded = auto.from_pretrained(tmp_path / kind)
            assert type(loaded) is model_class(kind) and logits_of(loaded).equal(logits_of(model))
        assert type(AutoConfig.from_pretrained(tmp_path / kind)) is type(model.config)
        with pytest.raises(ValueError):  # "mdlm" and "DUO" stay the authors': theirs needs trust_remote_code
            AutoConfig.from_pretrained(released_directory(tmp_path / f"released_{kind}", kind), trust_remote_code=False)


# Custom code, where this package cannot be imported

LOAD = """
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

    def check(path, expected, auto=AutoModel):
        model = auto.from_pretrained(path, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        with torch.no_grad():
            logits = model(expected["ids"], timesteps=torch.tensor([0.2, 0.9])).logits
        assert logits.equal(expected["logits"]), path
        assert model.generate(num_samples=2, num_steps=2, seed=0).equal(expected["samples"]), path
        return model
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One folder per model with `model` and `checkpoint-1` of a Trainer, and what each must give."""
    root = tmp_path_factory.mktemp("saved")
    for kind in KINDS:
        model = tiny_model(kind, seed=3)
        arguments = TrainingArguments(
            output_dir=str(root / kind), max_steps=1, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True
        )
        row = dict(input_ids=torch.zeros(8).long(), timesteps=torch.tensor(0.5), labels=torch.ones(8).long())
        trainer = Trainer(model=copy.deepcopy(model), args=arguments, train_dataset=[row] * 8)
        trainer.train()
        model.save_pretrained(root / kind / "model")
        other = tiny_model(kind, seed=4, hidden_size=16, num_hidden_layers=1, max_position_embeddings=6)
        other.save_pretrained(root / kind / "other" / "model")  # the same last name, another size
        for name, source in (("model", model), ("checkpoint-1", trainer.model), ("other", other)):
            expected = {"ids": ids_for(source), "logits": logits_of(source)}
            expected["samples"] = source.generate(num_samples=2, num_steps=2, seed=0)
            save_file(expected, root / kind / f"{name}.expected")
    return root


def test_custom_code_needs_nothing_but_transformers(saved, tmp_path):
    """Every auto class, both models, bitwise; flash_attn, triton and einops cannot be imported; not without trust."""
    code = textwrap.dedent(LOAD) + textwrap.dedent(f"""
        from pathlib import Path

        root = Path({str(saved)!r})
        for kind in ("mdlm", "duo"):
            path, expected = root / kind / "model", load_file(root / kind / "model.expected")
            for trust in (False, None):
                try:
                    AutoModel.from_pretrained(path, trust_remote_code=trust)
                except ValueError as error:
                    assert "trust_remote_code" in str(error)
                else:
                    raise AssertionError("loaded without being trusted")
            assert AutoConfig.from_pretrained(path, trust_remote_code=True).model_type == f"tokendrift_{{kind}}"
            check(path, expected)
            model = check(path, expected, AutoModelForMaskedLM)
            check(root / kind / "checkpoint-1", load_file(root / kind / "checkpoint-1.expected"))
            small = check(root / kind / "other" / "model", load_file(root / kind / "other.expected"))
            assert small.config.hidden_size == 16 and model.config.hidden_size == 32
            check(path, expected)
            model.save_pretrained(kind)
            check(kind, expected)
            AutoModelForMaskedLM.from_pretrained(kind, trust_remote_code=True).save_pretrained(kind + "_again")
            try:
                AutoModel.from_pretrained(kind, trust_remote_code=True, hidden_size=16)
            except ValueError as error:
                assert "has shape" in str(error)
            else:
                raise AssertionError("wrong shapes were loaded")
    """)
    blocked = "import sys\nsys.modules.update(dict.fromkeys(['flash_attn', 'triton', 'einops', 'omegaconf']))\n"
    run_python(blocked + code, tmp_path / "elsewhere")
    for kind in KINDS:  # and what that process saved is ours again here
        expected = load_file(saved / kind / "model.expected")
        again = model_class(kind).from_pretrained(tmp_path / "elsewhere" / f"{kind}_again")
        assert logits_of(again).equal(expected["logits"])


def test_four_processes_load_at_once_into_an_empty_cache(saved, tmp_path):
    code = textwrap.dedent(LOAD) + "\n".join(
        f"check({str(saved / kind / 'model')!r}, load_file({str(saved / kind / 'model.expected')!r}))" for kind in KINDS
    )
    environment = dict(HF_MODULES_CACHE=str(tmp_path / "modules"))
    processes = [start_python(code, tmp_path / str(i), **environment) for i in range(4)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, outputs


# A hub

READERS = {
    "model": load_model,
    "encoder": load_encoder,
    "tokenizer": load_tokenizer,
    "judge": lambda name: load_judge(name, torch.device("cpu")),
}


@pytest.mark.parametrize("what", READERS)
def test_a_name_that_is_no_folder_is_said_once_before_the_hub_is_asked(what, caplog, monkeypatch):
    said_before = []

    def ask(*args, **kwargs):
        said_before.append(list(caplog.messages))
        raise OSError("no connection")

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", ask)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", ask)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"mistyped-{what}"):
            READERS[what](f"mistyped-{what}")
    assert said_before[0] == caplog.messages
    assert caplog.messages == [f"There is no folder mistyped-{what} here: looking for it on the hub."]


def test_nothing_is_said_of_a_folder_and_of_a_name_with_its_owner(tmp_path, caplog, monkeypatch):
    tiny_model("mdlm").save_pretrained(tmp_path / "here")
    monkeypatch.chdir(tmp_path)
    load_model("here")
    with pytest.raises(ValueError, match="There is no model 'someone/nothing'"):
        load_model("someone/nothing")
    assert caplog.messages == []


def test_push_and_pull(saved, tmp_path):
    """A push from here loads elsewhere with nothing but transformers; a released repository loads here by name."""
    with FakeHub() as hub:
        for kind in KINDS:
            folder = released_directory(tmp_path / kind, kind)
            hub.repos[f"someone/{kind}"] = {file.name: file.read_bytes() for file in folder.iterdir()}
        push = f"""
            import torch
            torch.set_num_threads(1)
            from safetensors.torch import load_file
            import tokendrift_hf as td
            for kind, cls in (("mdlm", td.MDLMForMaskedLM), ("duo", td.DUOForMaskedLM)):
                cls.from_pretrained({str(saved)!r} + f"/{{kind}}/model").push_to_hub(f"tester/{{kind}}")
                released, info = cls.from_pretrained(f"someone/{{kind}}", output_loading_info=True)
                assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
                assert released.config.hidden_size == 64
                released.generation_config.num_steps = 7
                released.push_to_hub(f"tester/released-{{kind}}")
        """
        run_python(push, tmp_path / "push", isolated=False, **hub.environment)
        for kind in KINDS:
            assert CODE_FILES <= set(hub.repos[f"tester/{kind}"]) and "model.safetensors" in hub.repos[f"tester/{kind}"]
        pull = textwrap.dedent(LOAD) + textwrap.dedent(f"""
            for kind in ("mdlm", "duo"):
                expected = load_file({str(saved)!r} + f"/{{kind}}/model.expected")
                check(f"tester/{{kind}}", expected)
                check(f"tester/{{kind}}", expected, AutoModelForMaskedLM).save_pretrained(kind)
                check(kind, expected)
                model = AutoModel.from_pretrained(f"tester/released-{{kind}}", trust_remote_code=True)
                assert model.generation_config.num_steps == 7 and model.config.hidden_size == 64
        """)
        run_python(pull, tmp_path / "pull", **hub.environment)
