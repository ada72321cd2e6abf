"""torch_compile: true compiles the blocks in place: the same training, evaluation, sampling and files."""

from __future__ import annotations

import itertools

import pytest
import torch
from conftest import tiny_model
from toys import assert_same, logged, make_trainer, toy_rows, weights_of

from tokendrift_hf import MDLMForMaskedLM
from tokendrift_hf.models.compiled import compile_blocks


@pytest.fixture
def graphs():
    """The graphs that torch has compiled since the test began, by a backend of this name that runs them as they are."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch._dynamo.register_backend(backend, name="counting")
    yield compiled
    torch._dynamo.reset()
    torch._dynamo.backends.registry._COMPILER_FNS.pop("counting")


@pytest.mark.parametrize("fields", [{}, {"objective": "mirror_kl", "learning_rate": 0.1}], ids=["feature", "mirror"])
def test_a_compiled_run_is_the_plain_one(fields, graphs, tmp_path):
    plain = make_trainer(tmp_path / "plain", **fields)
    compiled = make_trainer(tmp_path / "compiled", torch_compile=True, torch_compile_backend="counting", **fields)
    for trainer in (plain, compiled):
        trainer.train()
    assert graphs
    assert_same(weights_of(compiled.model), weights_of(plain.model), rtol=0, atol=1e-6)
    assert logged(compiled) == pytest.approx(logged(plain), rel=1e-5)
    assert compiled.evaluate(toy_rows(4))["eval_loss"] == pytest.approx(
        plain.evaluate(toy_rows(4))["eval_loss"], rel=1e-5
    )


def test_blocks_of_model_and_encoder_are_compiled_and_nothing_else(graphs, tmp_path):
    trainer = make_trainer(tmp_path, torch_compile=True, torch_compile_backend="counting")
    for model in (trainer.model, trainer.encoder.model):
        compiled = {name for name, module in model.named_modules() if module._compiled_call_impl is not None}
        assert compiled == {f"backbone.blocks.{i}" for i in range(len(model.backbone.blocks))}
    assert trainer.accelerator.state.dynamo_plugin.backend == "NO"


def test_the_delay_of_the_first_step_is_announced(graphs, tmp_path, caplog):
    make_trainer(tmp_path, torch_compile=True, torch_compile_backend="counting")
    assert "the blocks are compiled (counting) while they first run" in caplog.text


def test_what_a_compiled_run_saves_is_a_plain_model(graphs, tmp_path):
    trainer = make_trainer(tmp_path / "run", torch_compile=True, torch_compile_backend="counting")
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    assert_same(
        weights_of(MDLMForMaskedLM.from_pretrained(tmp_path / "saved")), weights_of(trainer.model), rtol=0, atol=0
    )


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
def test_compiled_sampling_draws_the_same_tokens(kind, graphs):
    model = tiny_model(kind)
    plain = model.generate(num_samples=2, num_steps=4, seed=0)
    compile_blocks(model, backend="counting")
    assert torch.equal(model.generate(num_samples=2, num_steps=4, seed=0), plain)
    assert graphs


@pytest.mark.parametrize("kind", ["mdlm", "duo"])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_compiled_sampling_gives_every_call_of_a_block_one_shape(kind, num_samples, graphs):
    """torch would compile another shape anew, and CUDA graphs be recorded for each. 16 steps, at the end few tokens."""
    model = tiny_model(kind)
    compile_blocks(model, backend="counting")
    shapes = set()
    for i, block in enumerate(model.backbone.blocks):
        block.register_forward_pre_hook(
            lambda _, inputs, i=i: shapes.add((i, *(getattr(x, "shape", x) for x in inputs)))
        )
    model.generate(num_samples=num_samples, num_steps=16, seed=0)
    assert len(shapes) == len(model.backbone.blocks)


@pytest.mark.parametrize("lengths", [[3, 9, 5], [4, 4, 4]], ids=["long and short", "of one length"])
def test_compiled_sampling_of_prompts_draws_the_same_tokens(lengths, graphs):
    model = tiny_model("mdlm")
    prompts = [list(range(5, 5 + n)) for n in lengths]
    mask = torch.tensor([[1] * n + [0] * (max(lengths) - n) for n in lengths])
    ids = torch.tensor([p + [0] * (max(lengths) - len(p)) for p in prompts])
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=6, num_steps=4, seed=0)
    compile_blocks(model, backend="counting")
    compiled = model.generate(ids, attention_mask=mask, max_new_tokens=6, num_steps=4, seed=0)
    assert torch.equal(compiled, plain)


def test_a_cuda_graph_is_told_where_every_call_of_a_compiled_model_begins(graphs, tmp_path, monkeypatch):
    """What the call before left is read by then: in sampling the head has run, in training so has backward."""
    calls = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: calls.append("begin"))
    trainer = make_trainer(tmp_path, torch_compile=True, torch_compile_backend="counting", max_steps=2)
    trainer.model.register_forward_pre_hook(lambda *_: calls.append("model"))
    trainer.train()
    trainer.model.generate(num_samples=2, num_steps=4, seed=0)
    marked = [a for a, b in zip(calls, calls[1:], strict=False) if b == "model"]
    assert len(marked) >= 6
    assert set(marked) == {"begin"}
    assert calls.count("begin") == calls.count("model")


def test_a_model_that_is_not_compiled_begins_no_cuda_graph(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: calls.append("begin"))
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.train()
    trainer.model.generate(num_samples=2, num_steps=4, seed=0)
    assert not calls


def test_models_one_after_the_other_are_all_compiled(graphs):
    """They share their blocks' code. After 8 variants of it, torch's own limit, later ones would run as they are."""
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=8):
        for gradient, autocast, frozen, length in itertools.product(
            [True, False], [True, False], [True, False], [5, 8]
        ):
            model = tiny_model("mdlm").requires_grad_(not frozen)
            compile_blocks(model, backend="counting")
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), torch.set_grad_enabled(gradient):
                model(input_ids=torch.zeros(2, length, dtype=torch.long), timesteps=torch.full((2,), 0.5))
        assert len(graphs) > 8
