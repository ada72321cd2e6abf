"""What the tests share. They need no network and leave nothing behind: every cache is in a temporary directory."""

from __future__ import annotations

import atexit
import gc
import json
import os
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

# Read by huggingface_hub, transformers, datasets and evaluate when they are imported, hence before anything else.
os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=tempfile.mkdtemp(prefix="tokendrift-tests-"), TOKENIZERS_PARALLELISM="0")
atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)

import pytest  # noqa: E402
import torch  # noqa: E402
from processes import Interpreter  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

torch.set_num_threads(1)

FIXTURES = Path(__file__).parent / "fixtures"
TINY = dict(
    vocab_size=23,
    hidden_size=32,
    cond_dim=8,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=16,
    dropout=0.0,
)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """What imports and the collection of tests make stays to the end, so no search for garbage looks at it.

    Every Trainer starts such a search, which took half of the time of its tests.
    """
    gc.disable()
    result = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return result


def recorded(name: str) -> dict[str, torch.Tensor]:
    """The tensors of one recorded file in tests/fixtures."""
    return load_file(FIXTURES / f"{name}.safetensors")


def model_class(kind: str):
    import tokendrift_hf

    return {"mdlm": tokendrift_hf.MDLMForMaskedLM, "duo": tokendrift_hf.DUOForMaskedLM}[kind]


def tiny_model(kind: str, seed: int = 0, **config):
    """A small model whose every weight is random, so that no part of it is the identity or zero."""
    torch.manual_seed(seed)
    cls = model_class(kind)
    model = cls(cls.config_class(**{**TINY, **config}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()


def released_directory(path: Path, kind: str, weights: dict[str, torch.Tensor] | None = None, **changes) -> Path:
    """A directory in the layout of the released checkpoints, by default with the recorded tiny weights.

    `changes` replace fields of config.json; a field set to None is left out.
    """
    sizes = json.loads((FIXTURES / f"{kind}_tiny_config.json").read_text())["config"]
    sizes.pop("mask_token_id")  # no released file has it
    module = {"mdlm": ("configuration_mdlm.MDLMConfig", "modeling_mdlm.MDLM"), "duo": ("config.DUOConfig", "model.DUO")}
    config, code = module[kind]
    fields = dict(
        sizes,
        model_type={"mdlm": "mdlm", "duo": "DUO"}[kind],
        architectures=[code.rpartition(".")[2]],
        auto_map={"AutoConfig": config, "AutoModelForMaskedLM": f"someone/{kind}--{code}"},
        return_dict=False,
        torch_dtype="float32",
        transformers_version="4.38.2",
    )
    fields = {name: value for name, value in {**fields, **changes}.items() if value is not None}
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(fields))
    weights = recorded(f"{kind}_tiny_weights") if weights is None else weights
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def start_python(code: str, cwd: Path, *, isolated: bool = True, **environment: str) -> Interpreter:
    """Run `code` in a fresh interpreter with empty caches in `cwd`; isolated: without this package on its path."""
    cwd.mkdir(parents=True, exist_ok=True)
    prelude = """
        import sys
        import torch
        sys.meta_path[:] = [f for f in sys.meta_path if "__editable__" not in getattr(f, "__module__", "")]
        import importlib.util
        assert importlib.util.find_spec("tokendrift_hf") is None
    """
    code = (textwrap.dedent(prelude) if isolated else "") + textwrap.dedent(code)
    root = FIXTURES.parents[1]
    env = dict(os.environ, HF_HOME=str(cwd / "hf"), OMP_NUM_THREADS="1")
    env.pop("HF_MODULES_CACHE", None)
    env.pop("PYTHONPATH", None) if isolated else env.update(PYTHONPATH=str(root))
    env.update(environment)
    # Not the modules that this session has downloaded: a package of theirs would hide that of the new interpreter.
    ours = (root, os.environ["HF_HOME"])
    elsewhere = [path for path in sys.path if path and not any(Path(path).is_relative_to(folder) for folder in ours)]
    path = elsewhere if isolated else ["", str(root), *elsewhere]
    handle, output = tempfile.mkstemp(prefix="output-", dir=cwd.parent)
    os.close(handle)
    return Interpreter(code, cwd, env, path, Path(output))


def run_python(code: str, cwd: Path, **kwargs) -> str:
    """`start_python`, wait, and return what it printed; a failure shows that output."""
    process = start_python(code, cwd, **kwargs)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="session")
def text_model():
    """A tiny MDLM of length 16 and three blocks for the quickstart's tokenizer, and that tokenizer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FIXTURES.parents[1] / "recipes/quickstart/tokenizer")
    return tiny_model("mdlm", vocab_size=len(tokenizer) + 1, num_hidden_layers=3), tokenizer


@pytest.fixture(scope="session")
def text_judge(text_model):
    """The arguments of `GenPPL` for a tiny judge of the same tokenizer."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokenizer = text_model[1]
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=1, n_head=2)
    return {"model": GPT2LMHeadModel(config).eval(), "model_tokenizer": tokenizer}


@pytest.fixture(scope="session")
def text_files(text_model, text_judge, tmp_path_factory) -> Path:
    """A folder with the two tiny models (base, judge) and a short corpus of real text (corpus.jsonl)."""
    folder = tmp_path_factory.mktemp("text")
    model, tokenizer = text_model
    for name, saved in (("base", model), ("judge", text_judge["model"])):
        saved.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    documents = [json.dumps({"text": textwrap.dedent(f.__doc__)}) for f in (json.dumps, json.loads, textwrap.wrap)] * 3
    (folder / "corpus.jsonl").write_text("\n".join(documents))
    return folder


@pytest.fixture
def harness(tmp_path, text_model, text_judge):
    """A harness of the tiny text model: four samples a cell, drawn three at a time."""
    from tokendrift_hf.evaluation.grid import Harness
    from tokendrift_hf.evaluation.sampling import Sampling

    sampling = Sampling(num_samples=4, batch_size=3)
    return Harness({"base": text_model[0]}, text_model[1], text_judge, tmp_path / "cells", sampling)
