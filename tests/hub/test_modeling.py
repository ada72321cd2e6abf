"""The networks: against recorded runs of the reference code, and as citizens of transformers."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from conftest import FIXTURES, TINY, model_class, recorded, tiny_model
from reference import log_probs
from torch.nn.utils import parameters_to_vector
from transformers import Trainer, TrainingArguments

from tokendrift_hf import DUOConfig, MDLMConfig
from tokendrift_hf.hub.process_tokendrift import LogLinearSchedule, stratified_times

KINDS = ("mdlm", "duo")
B, L, V = 2, 16, TINY["vocab_size"]


def recorded_model(kind: str, **config):
    """The tiny network of the recorded files, with dropout off."""
    sizes = json.loads((FIXTURES / f"{kind}_tiny_config.json").read_text())["config"]
    model = model_class(kind)(model_class(kind).config_class(**{**sizes, **config}))
    model.load_state_dict(recorded(f"{kind}_tiny_weights"))
    return model.eval()


def time_of_sigma(sigma: torch.Tensor) -> torch.Tensor:
    return LogLinearSchedule().time_of_alpha((-sigma.double()).exp()).float()


def noisy_batch(kind: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """input_ids (x_t), timesteps and labels (x_0) for a tiny model."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(V - 1, (B, L), generator=generator)
    timesteps = torch.tensor([0.4, 0.8])
    draws = torch.rand(B, L, generator=generator), torch.randint(V, (B, L), generator=generator)
    process = tiny_model(kind).process
    return dict(input_ids=process.corrupt(labels, timesteps, *draws), timesteps=timesteps, labels=labels)


def assert_close(actual, expected, share=2e-6):
    """Within `share` of the largest value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=share * float(expected.abs().max()))


# Parity


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sigma", ["sigma_zero", "sigma_nonzero"])
def test_network_matches_recorded_runs(kind, sigma):
    """Logits, every hidden state, the pooled feature of the last two blocks, and the log-probabilities."""
    file = recorded(f"{kind}_tiny_io")
    model = recorded_model(kind, time_conditioning=True)
    ids = file["input_ids"]
    with torch.no_grad():
        output = model(ids, timesteps=time_of_sigma(file[f"{sigma}.sigma"]), output_hidden_states=True)
    real = slice(None, -1) if kind == "mdlm" else slice(None)  # the mask column of MDLM is -1e6 by design
    assert_close(output.logits[..., real], file[f"{sigma}.logits"][..., real])
    assert len(output.hidden_states) == 3
    for i, hidden in enumerate(output.hidden_states):
        assert_close(hidden, file[f"{sigma}.hidden_{i}"])
    feature = torch.cat([hidden.mean(1) for hidden in output.hidden_states[-2:]], -1)
    assert_close(torch.nn.functional.normalize(feature, dim=-1), file[f"{sigma}.feature"])
    log_p = log_probs(model.process, output.logits, ids)
    assert_close(log_p[..., real], file[f"{sigma}.logprobs"][..., real])


def test_mdlm_ignores_the_time_and_duo_uses_it():
    for kind in KINDS:
        file, model = recorded(f"{kind}_tiny_io"), recorded_model(kind)
        with torch.no_grad():
            logits = model(file["input_ids"], timesteps=time_of_sigma(file["sigma_nonzero.sigma"])).logits
            without = model(file["input_ids"]).logits
        log_p = log_probs(model.process, logits, file["input_ids"])[..., :-1]
        assert_close(log_p, file["forward.logprobs"][..., :-1])
        assert logits.equal(without) == (kind == "mdlm")


def test_gradients_match_recorded_runs():
    file, model = recorded("mdlm_tiny_io"), recorded_model("mdlm")
    logits = model(file["input_ids"]).logits
    weight = file["grad.loss_weight"]
    # The recorded loss weighs the raw mask logit too, which our model replaces: add it by hand.
    hidden, c = model.hidden_states(model.get_input_embeddings()(file["input_ids"]))
    raw_mask_logit = model.backbone.output_layer(hidden[-1], c)[..., -1]
    ((weight * logits)[..., :-1].sum() + (weight[..., -1] * raw_mask_logit).sum()).backward()
    checked = 0
    for name, parameter in model.named_parameters():
        if f"grad.{name}" in file:
            expected = file[f"grad.{name}"]
            gradient = parameter.grad[: len(expected)]
            assert_close(gradient, expected, share=5e-6)
            checked += 1
    assert checked == 5


def test_soft_inputs_match_recorded_runs():
    """A probability vector per position, as the weighted mean of the embedding table, and a sparse one of four rows."""
    file, model = recorded("duo_tiny_io"), recorded_model("duo")
    table, t = model.get_input_embeddings().weight, time_of_sigma(file["sigma_nonzero.sigma"][:1])
    with torch.no_grad():
        soft = model(inputs_embeds=file["soft.input"].softmax(-1) @ table, timesteps=t).logits
        sparse = (file["topk.weights"][..., None] * table[file["topk.indices"]]).sum(-2)
        assert_close(model(inputs_embeds=sparse, timesteps=t).logits, file["topk.logits"])
    assert_close(soft, file["soft.logits"])


@pytest.mark.parametrize("kind", KINDS)
def test_loss_matches_recorded_runs(kind):
    """`labels` give the recorded NELBO, averaged over the positions of the attention mask."""
    losses, prefix = (recorded("mdlm_losses"), "nelbo") if kind == "mdlm" else (recorded("duo_losses"), "e2e.duo")
    x_t = losses["q_xt.xt" if kind == "mdlm" else "q_xt.duo.xt"]
    model = recorded_model(kind)
    with torch.no_grad():
        logits = model(x_t, losses["q_xt.t"]).logits
    per_token = model.process.nelbo(logits, losses["q_xt.x0"], x_t, losses["q_xt.t"])
    assert_close(per_token, losses[f"{prefix}.per_token"], share=1e-5)
    scored = losses[f"{prefix.split('.')[0]}.attention_mask"]
    with torch.no_grad():
        loss = model(x_t, losses["q_xt.t"], labels=losses["q_xt.x0"].masked_fill(scored == 0, -100)).loss
    torch.testing.assert_close(loss, losses[f"{prefix}.token_nll"], rtol=1e-5, atol=0)


# The released sizes


RELEASED_SHAPES = {
    "vocab_embed.embedding": (50258, 768),
    "sigma_map.mlp.0.weight": (128, 256),
    "sigma_map.mlp.0.bias": (128,),
    "sigma_map.mlp.2.weight": (128, 128),
    "sigma_map.mlp.2.bias": (128,),
    "rotary_emb.inv_freq": (32,),
    **{
        f"blocks.{n}.{name}": shape
        for n in range(12)
        for name, shape in {
            "norm1.weight": (768,),
            "attn_qkv.weight": (2304, 768),
            "attn_out.weight": (768, 768),
            "norm2.weight": (768,),
            "mlp.0.weight": (3072, 768),
            "mlp.0.bias": (3072,),
            "mlp.2.weight": (768, 3072),
            "mlp.2.bias": (768,),
            "adaLN_modulation.weight": (4608, 128),
            "adaLN_modulation.bias": (4608,),
        }.items()
    },
    "output_layer.norm_final.weight": (768,),
    "output_layer.linear.weight": (50258, 768),
    "output_layer.linear.bias": (50258,),
    "output_layer.adaLN_modulation.weight": (1536, 128),
    "output_layer.adaLN_modulation.bias": (1536,),
}


def safetensors_size(shapes: dict[str, tuple[int, ...]]) -> int:
    """Bytes of a file of float32 tensors with metadata format=pt: 8 for the header's length, the header, the data."""
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name in sorted(shapes):
        end = offset + 4 * torch.Size(shapes[name]).numel()
        header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [offset, end]}
        offset = end
    length = len(json.dumps(header, separators=(",", ":")))
    return 8 + -(-length // 8) * 8 + offset


@pytest.mark.parametrize("kind", KINDS)
def test_the_defaults_are_the_released_model(kind, tmp_path):
    """Names, order and shapes of the state dict, 169,627,218 parameters, and a file of 678,522,728 bytes."""
    cls = model_class(kind)
    with torch.device("meta"):
        model = cls(cls.config_class())
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert list(shapes.items()) == [(f"backbone.{name}", shape) for name, shape in RELEASED_SHAPES.items()]
    assert sum(parameter.numel() for parameter in model.parameters()) == 169_627_218
    assert len(list(model.parameters())) == 130 and len(shapes) == 131
    assert safetensors_size(shapes) == 678_522_728

    small = tiny_model(kind)
    small.save_pretrained(tmp_path)  # the size formula itself, on a real file
    assert (
        safetensors_size({n: x.shape for n, x in small.state_dict().items()})
        == (tmp_path / "model.safetensors").stat().st_size
    )


# Configuration


def test_released_field_names_are_the_same_fields():
    config = MDLMConfig(hidden_dim=32, n_blocks=3, n_heads=2, model_length=9)
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (32, 3, 2)
    assert config.max_position_embeddings == config.model_length == 9
    assert MDLMConfig().cond_dim == DUOConfig().cond_dim == 128  # the released classes default to 129
    assert not MDLMConfig().time_conditioning and DUOConfig().time_conditioning
    assert MDLMConfig().mask_token_id == 50257 and MDLMConfig(vocab_size=9, mask_token_id=3).mask_token_id == 3


@pytest.mark.parametrize(
    ("config_class", "fields", "message"),
    [
        (MDLMConfig, dict(hidden_size=30, num_attention_heads=4), "cannot be split into num_attention_heads=4"),
        (MDLMConfig, dict(hidden_size=12, num_attention_heads=4), "heads of an even width"),
        (MDLMConfig, dict(mask_token_id=50258), "mask_token_id=50258 is outside the vocabulary of 50258"),
        (MDLMConfig, dict(tie_word_embeddings=True), "tie_word_embeddings=True is not supported"),
        (DUOConfig, dict(causal=True), "causal=True is the autoregressive variant"),
    ],
)
def test_impossible_configurations_are_refused(config_class, fields, message):
    with pytest.raises(ValueError, match=message):
        config_class(**fields)


# forward


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_model_predicts_uniformly(kind):
    """adaLN-zero: every block is the identity and the head is zero, so the first loss is that of knowing nothing."""
    torch.manual_seed(0)
    model = model_class(kind)(model_class(kind).config_class(**TINY))
    batch = noisy_batch(kind)
    output = model(**batch, output_hidden_states=True)
    uniform = model.process.nelbo(torch.zeros(B, L, V), batch["labels"], batch["input_ids"], batch["timesteps"])
    torch.testing.assert_close(output.loss, uniform.mean())
    assert output.hidden_states[0].equal(output.hidden_states[-1])
    assert 0.015 < output.hidden_states[0].std() < 0.025


@pytest.mark.parametrize("kind", KINDS)
def test_outputs(kind):
    model, batch = tiny_model(kind), noisy_batch(kind)
    ids, t = batch["input_ids"], batch["timesteps"]
    output = model(ids, t, output_hidden_states=True)
    assert output.loss is None and len(output.hidden_states) == TINY["num_hidden_layers"] + 1
    assert output.hidden_states[0].equal(model.get_input_embeddings()(ids))
    assert model(ids, t).hidden_states is None
    assert model(inputs_embeds=output.hidden_states[0], timesteps=t).logits.equal(output.logits)
    as_tuple = model(ids, t, labels=batch["labels"], return_dict=False)
    assert len(as_tuple) == 2 and as_tuple[1].equal(output.logits)
    assert as_tuple[0].equal(model(**batch).loss)
    assert model(ids).logits.equal(model(ids, timesteps=torch.zeros(B)).logits)
    model.config.output_hidden_states, model.config.return_dict = True, False
    assert len(model(ids)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_softmax_or_argmax_picks_the_mask(dtype):
    model = tiny_model("mdlm", mask_token_id=5).to(dtype)
    with torch.no_grad():
        model.backbone.output_layer.linear.bias[5] = 1000
        logits = model(torch.full((1, 4), 5)).logits
    assert logits.dtype == dtype and logits.isfinite().all()
    assert logits.argmax(-1).ne(5).all() and logits.softmax(-1)[..., 5].eq(0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [6.9, -1e-6, 1.0001, torch.inf, torch.nan])
def test_a_sigma_for_a_time_is_refused(kind, t):
    """DUO gave nan logits for it, and MDLM, which has no time conditioning, a wrong loss."""
    model, ids = tiny_model(kind), torch.zeros(2, 4, dtype=torch.long)
    times = torch.tensor([0.5, t])
    with pytest.raises(ValueError, match="A diffusion time is from 0 .* to 1"):
        model(ids, timesteps=times)
    with pytest.raises(ValueError, match="A diffusion time is from 0 .* to 1"):
        model(ids, timesteps=times, labels=ids)


def test_bad_calls_say_what_is_needed():
    model, ids = tiny_model("mdlm"), torch.zeros(B, L, dtype=torch.long)
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model(ids, inputs_embeds=torch.zeros(B, L, 32))
    with pytest.raises(ValueError, match="17 tokens long, but this model takes at most 16"):
        model(torch.zeros(1, 17, dtype=torch.long))
    with pytest.raises(ValueError, match="labels .* need input_ids .* and timesteps"):
        model(ids, labels=ids)
    with pytest.raises(
        ValueError, match=r"timesteps has shape \[1\]. Needed is a tensor with one time a sequence, \[2\]"
    ):
        model(ids, timesteps=torch.ones(1))
    with pytest.raises(ValueError, match=r"attention_mask has shape \[2, 15\]; needed is \[2, 16\]"):
        model(ids, attention_mask=torch.ones(B, 15))
    with pytest.raises(ValueError, match="cannot be resized: .* vocab_size=23"):
        model.resize_token_embeddings(30)


def test_dropout_is_active_in_training_only():
    model, ids = tiny_model("duo", dropout=0.5), noisy_batch("duo")["input_ids"]
    assert model(ids).logits.equal(model(ids).logits)
    model.train()
    assert not model(ids).logits.equal(model(ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_unscored_positions_do_not_touch_the_loss(kind):
    """-100 and masked-out positions: neither their labels nor their ids matter, and the mean is over the rest."""
    model, batch = tiny_model(kind), noisy_batch(kind)
    x_t, t = batch["input_ids"], batch["timesteps"]
    nelbo = model.process.nelbo(model(x_t, t).logits, batch["labels"], x_t, t)
    ignored = copy.deepcopy(batch)
    ignored["labels"][:, :5] = -100
    torch.testing.assert_close(model(**ignored).loss, nelbo[:, 5:].mean())

    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, 9:] = 0
    losses = []
    for padding in (0, 7):
        padded = copy.deepcopy(batch)
        padded["labels"][1, 9:] = padded["input_ids"][1, 9:] = padding
        output = model(**padded, attention_mask=mask)
        nelbo = model.process.nelbo(output.logits, padded["labels"], padded["input_ids"], t)
        torch.testing.assert_close(output.loss, nelbo[mask.bool()].mean())
        losses.append(output.loss)
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


# Attention


@pytest.mark.parametrize("kind", KINDS)
def test_attention_masks_of_every_type_agree(kind):
    model, batch = tiny_model(kind), noisy_batch(kind)
    ids, t = batch["input_ids"], batch["timesteps"]
    mask = torch.ones(B, L, dtype=torch.bool)
    assert model(ids, t, attention_mask=mask).logits.equal(model(ids, t).logits)
    mask[0, :3] = mask[1, 10:] = False
    outputs = [model(ids, t, attention_mask=mask.to(dtype)).logits for dtype in (torch.bool, torch.long, torch.float32)]
    assert outputs[0].equal(outputs[1]) and outputs[0].equal(outputs[2])
    assert not outputs[0].equal(model(ids, t).logits)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_padding_on_either_side_does_not_change_a_row(kind, implementation):
    """Rotary positions are relative: a row of 10 tokens gives the same logits alone, padded left and padded right."""
    model, batch = tiny_model(kind), noisy_batch(kind)
    model.set_attn_implementation(implementation)
    row, t = batch["input_ids"][:1, :10], batch["timesteps"][:1]
    alone = model(row, t).logits
    for left in (0, 6):
        padded = torch.nn.functional.pad(row, (left, 6 - left), value=3)
        mask = torch.nn.functional.pad(torch.ones_like(row), (left, 6 - left))
        logits = model(padded, t, attention_mask=mask).logits[:, left : left + 10]
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5 if kind == "duo" else 1)
        torch.testing.assert_close(logits[..., :-1], alone[..., :-1], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_backends_agree():
    """sdpa, eager and flex (uncompiled here, since compiling takes a minute); one that is not installed says so."""
    model, batch = tiny_model("duo"), noisy_batch("duo")
    mask = torch.ones(B, L, dtype=torch.long)
    mask[1, 10:] = 0
    logits = {}
    for implementation in ("sdpa", "eager", "flex_attention"):
        model.set_attn_implementation(implementation)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            calls = (model(batch["input_ids"], batch["timesteps"], attention_mask=m).logits for m in (None, mask))
            logits[implementation] = torch.stack(list(calls))
    for other in ("eager", "flex_attention"):
        assert_close(logits[other], logits["sdpa"])
    assert not logits["sdpa"][0, 1].allclose(logits["sdpa"][1, 1], atol=1e-3)
    with pytest.raises(ImportError, match="(?i)flash"):
        model.set_attn_implementation("flash_attention_2")


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_few_positions_cost_less_and_give_the_same_logits(implementation):
    """`positions`: the hidden states that a sampler asks for are those of the full pass, with and without padding."""
    model, batch = tiny_model("duo"), noisy_batch("duo")
    model.set_attn_implementation(implementation)
    positions = torch.tensor([[0, 7, 9], [5, 5, 2]])
    mask = torch.ones(B, L)
    mask[1, 10:] = 0
    rows = []
    model.backbone.blocks[-1].mlp.register_forward_hook(lambda _m, inputs, _o: rows.append(inputs[0].shape[1]))
    for attention_mask in (None, mask):
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            call = dict(batch, labels=None, attention_mask=attention_mask)
            full = model(**call).logits.take_along_dim(positions[..., None], dim=1)
            few = model(**call, positions=positions)
        assert few.logits is None
        assert_close(model.logits(*few.hidden_states), full)
    if implementation != "flex_attention":  # whose block mask cannot be cut to a few rows
        assert rows == [L, 3, L, 3]


# Training


def gradients(model, batch) -> torch.Tensor:
    model.zero_grad()
    model(**batch).loss.backward()
    return parameters_to_vector(parameter.grad for parameter in model.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_checkpointing_recomputes_the_blocks_and_keeps_the_gradients(kind):
    model, batch = tiny_model(kind).train(), noisy_batch(kind)
    plain = gradients(model, batch)
    calls = []
    model.backbone.blocks[0].norm1.register_forward_hook(lambda *_: calls.append(1))
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    for switch in (enable, model.gradient_checkpointing_enable):
        calls.clear()
        switch()
        torch.testing.assert_close(gradients(model, batch), plain, rtol=0, atol=0)
        assert len(calls) == 2
        disable()
    calls.clear()
    gradients(model, batch)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_autocast_keeps_float32_where_it_matters(kind):
    """Norms, residual stream, rotary angles and loss are float32; only the matrix products are not."""
    model, batch = tiny_model(kind), noisy_batch(kind)
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.__setitem__(name, out))
    exact = model(**batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(**batch, output_hidden_states=True)
    assert {hidden.dtype for hidden in output.hidden_states} == {torch.float32} and output.loss.dtype == torch.float32
    assert seen["backbone.blocks.0.norm1"].dtype == torch.float32
    assert seen["backbone.blocks.0.attn_qkv"].dtype == output.logits.dtype == torch.bfloat16
    assert {table.dtype for table in seen["backbone.rotary_emb"]} == {torch.float32}
    torch.testing.assert_close(output.loss, exact.loss, rtol=2e-2, atol=0)
    recomputed = model.process.nelbo(output.logits.float(), batch["labels"], batch["input_ids"], batch["timesteps"])
    torch.testing.assert_close(output.loss, recomputed.mean())


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_weights_keep_exact_positions(kind):
    """Casting the model casts the inv_freq buffer, but the angles are computed afresh in float32."""
    model, batch = tiny_model(kind), noisy_batch(kind)
    exact = model(**batch).loss
    x = torch.zeros(1, L, TINY["hidden_size"])
    tables = model.backbone.rotary_emb(x)
    model.bfloat16()
    assert all(a.equal(b) for a, b in zip(model.backbone.rotary_emb(x.bfloat16()), tables, strict=True))
    output = model(**batch)
    assert output.logits.dtype == torch.bfloat16 and output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, exact, rtol=3e-2, atol=0)


def test_compiles_without_a_graph_break():
    model, batch = tiny_model("duo"), noisy_batch("duo")
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(**batch).loss, model(**batch).loss)


class NoisyBlocks(torch.utils.data.Dataset):
    """Blocks of one repeated token, already corrupted, as a collator would hand them to the model."""

    def __init__(self, process, n: int = 64):
        self.process, self.n = process, n
        self.times = stratified_times(torch.rand(n, generator=torch.Generator().manual_seed(0)))

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        labels = torch.full((1, L), i % 4)
        draws = torch.rand(1, L, generator=generator), torch.randint(V, (1, L), generator=generator)
        x_t = self.process.corrupt(labels, self.times[i : i + 1], *draws)
        return dict(input_ids=x_t[0], timesteps=self.times[i], labels=labels[0])


@pytest.mark.parametrize("kind", KINDS)
def test_plain_trainer_continues_pretraining(kind, tmp_path):
    """`labels` are enough for transformers.Trainer: the loss falls, evaluation works, accumulation changes nothing."""
    torch.manual_seed(0)
    start = model_class(kind)(model_class(kind).config_class(**TINY))
    data = NoisyBlocks(start.process)
    weights = []
    for accumulation in (1, 4):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), gradient_accumulation_steps=accumulation,
            per_device_train_batch_size=16 // accumulation, max_steps=6, learning_rate=1e-2, optim="sgd",
            lr_scheduler_type="constant", max_grad_norm=1e9, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True, logging_steps=100, seed=1,
        )  # fmt: skip
        trainer = Trainer(model=copy.deepcopy(start), args=arguments, train_dataset=data, eval_dataset=data)
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        weights.append(parameters_to_vector(trainer.model.parameters()).detach())
        assert trainer.evaluate()["eval_loss"] < before
    if kind == "duo":  # every position is scored, so the mean of means is the mean
        torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-6)


def test_parameter_groups_of_the_head_and_the_table():
    """The names under which transformers and peft look for the two tables lead to them, and they are not shared."""
    model = tiny_model("mdlm")
    assert model.get_input_embeddings().weight is model.backbone.vocab_embed.embedding
    assert model.get_output_embeddings() is model.backbone.output_layer.linear
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight
