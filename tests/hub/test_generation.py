"""generate(): arguments, prompts and windows, reproducibility, what can be observed, and its settings."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import peft
import pytest
import torch
from conftest import TINY, tiny_model
from tables import Stub
from torch import nn
from transformers import GenerationConfig, TextDiffusionStreamer, TextStreamer
from transformers.modeling_outputs import MaskedLMOutput

from tokendrift_hf import DiffusionGenerationConfig
from tokendrift_hf.hub import samplers_tokendrift
from tokendrift_hf.hub.denoiser_tokendrift import draw_dtype
from tokendrift_hf.hub.process_tokendrift import AbsorbingProcess
from tokendrift_hf.hub.samplers_tokendrift import SAMPLERS

KINDS = ["mdlm", "duo"]
MASK = TINY["vocab_size"] - 1


def generators(*seeds):
    return [torch.Generator().manual_seed(seed) for seed in seeds]


# Shapes, calls and state


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_samples, controls", [(1, {}), (2, {"temperature": 0.7}), (5, {"top_p": 0.9, "top_k": 5})])
def test_shapes_and_ids(kind, num_samples, controls):
    model = tiny_model(kind)
    for length in (1, 7, 16):
        x = model.generate(num_samples=num_samples, max_new_tokens=length, num_steps=4, seed=0, **controls)
        assert x.shape == (num_samples, length) and x.dtype == torch.long and 0 <= x.min() <= x.max() < 23
        assert kind == "duo" or x.max() < MASK
    if num_samples > 1:
        assert not x[0].equal(x[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"sampler": "psi"}, {"noise_removal": "none"}, {"noise_removal": "greedy"}])
def test_reported_calls_are_those_a_hook_counts(kind, settings):
    model, calls = tiny_model(kind), []
    model.register_forward_hook(lambda *args: calls.append("model"))
    model.backbone.register_forward_hook(lambda *args: calls.append("backbone"))
    for N in (1, 4, 40):
        calls.clear()
        output = model.generate(num_samples=3, num_steps=N, seed=0, return_dict_in_generate=True, **settings)
        assert output.num_forward_calls == calls.count("model") == calls.count("backbone")
        last = 0 if settings.get("noise_removal") == "none" else 1
        assert output.num_forward_calls <= N + last
        if kind == "duo" and N <= 4:
            assert output.num_forward_calls == N + last  # DUO's last call can change any token, so it is never skipped


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_batch_takes_part_in_few_calls_and_makes_many_passes(kind):
    model, passes = tiny_model(kind, max_position_embeddings=128), []
    model.register_forward_hook(lambda *args: passes.append(1))
    output = model.generate(num_samples=64, num_steps=4, seed=0, return_dict_in_generate=True)
    calls = 4 if kind == "mdlm" else 5
    assert output.num_forward_calls == calls
    assert output.calls_per_row.tolist() == [calls] * 64
    assert output.num_forward_passes == len(passes) == (1 + 3 * 8 if kind == "mdlm" else 5 * 8)
    assert output.tokens_per_forward.tolist() == pytest.approx([128 / calls] * 64)


def test_tokens_per_forward_counts_generated_tokens_without_padding():
    """A row is charged for the calls that it takes part in, and not for the prompt or for what is cut off."""
    model = tiny_model("mdlm")
    prompt = torch.tensor([[7, 7, 2]])
    settings = dict(max_new_tokens=13, num_steps=30, num_samples=4, seed=0)
    plain = model.generate(prompt, **settings)
    output = model.generate(
        prompt, trim_eos=True, eos_token_id=int(plain[0, 6]), return_dict_in_generate=True, **settings
    )
    assert output.calls_per_row.max() < output.num_forward_calls, "every row reveals something in every step"
    expected = (output.lengths - 3) / output.calls_per_row
    assert output.lengths.min() < 16
    torch.testing.assert_close(output.tokens_per_forward, expected)


def test_a_masked_model_calls_the_network_only_for_tokens():
    """Steps that reveal nothing cost no call, nor does noise removal when no mask is left."""
    output = tiny_model("mdlm").generate(num_steps=1000, seed=0, return_dict_in_generate=True)
    assert output.num_forward_calls <= 16
    assert tiny_model("mdlm").generate(num_steps=4, seed=0, return_dict_in_generate=True).num_forward_calls == 4


def test_one_row_serves_the_first_call_of_a_batch():
    """Without a prompt all rows are masks: the first call sees one of them, and the text is what each gets alone."""
    model, sizes = tiny_model("mdlm"), []
    model.backbone.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    batch = model.generate(num_samples=4, num_steps=4, generator=generators(1, 2, 3, 4))
    assert sizes[0] == 1 and max(sizes) == 4
    for row, generator in zip(batch, generators(1, 2, 3, 4), strict=True):
        assert model.generate(num_steps=4, generator=generator)[0].equal(row)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_is_deterministic_in_training_mode_and_restores_it(kind):
    model = tiny_model(kind, dropout=0.5)
    expected = model.generate(num_steps=3, seed=0)
    model.train()
    model.backbone.blocks[0].eval()  # as when a part is frozen
    assert model.generate(num_steps=3, seed=0).equal(expected)
    assert model.training and model.backbone.blocks[1].training and not model.backbone.blocks[0].training
    with pytest.raises(RuntimeError, match="stop"):
        model.generate(num_steps=3, callback=lambda step: (_ for _ in ()).throw(RuntimeError("stop")))
    assert model.training and not model.backbone.blocks[0].training
    assert not expected.requires_grad and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_chosen_positions_give_the_logits_of_the_whole_forward(kind):
    """The forward that samplers use leaves out most of the last block and the head elsewhere, and changes nothing."""
    model, generator = tiny_model(kind), torch.Generator().manual_seed(0)
    x = torch.randint(22, (3, 12), generator=generator)
    positions = torch.stack([torch.randperm(12, generator=generator)[:5] for _ in range(3)])
    mask = torch.ones(3, 12, dtype=torch.long)
    mask[1, 8:] = 0
    t = torch.tensor([0.9, 0.5, 0.1])
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        for attention_mask in (None, mask):
            whole = model(x, timesteps=t, attention_mask=attention_mask).logits.take_along_dim(positions[..., None], 1)
            hidden, c = model(x, timesteps=t, attention_mask=attention_mask, positions=positions).hidden_states
            torch.testing.assert_close(model.logits(hidden, c), whole, rtol=1e-4, atol=1e-5)


# Prompts


@pytest.mark.parametrize("N", [1, 4, 64])
@pytest.mark.parametrize("sampler", ["ancestral", "psi", "confidence", "first_hitting"])
def test_infilling_keeps_every_given_token_after_every_step(N, sampler):
    model = tiny_model("mdlm")
    prompt = torch.randint(22, (2, 16), generator=torch.Generator().manual_seed(0))
    prompt[0, :3], prompt[0, 8], prompt[1, 10:] = MASK, MASK, MASK
    kept, steps = prompt != MASK, []
    num_steps = {} if sampler == "first_hitting" else {"num_steps": N}
    x = model.generate(prompt, sampler=sampler, seed=0, callback=steps.append, **num_steps)
    assert x.shape == prompt.shape and (x != MASK).all()
    for tokens in [step.tokens for step in steps] + [x]:
        assert tokens[kept].equal(prompt[kept])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", ["ancestral", "psi"])
def test_prompt_mask_frees_positions_of_either_model(kind, sampler):
    """What a free position holds does not matter, and kept tokens stay through every step."""
    model, steps = tiny_model(kind), []
    prompt = torch.randint(22, (2, 16), generator=torch.Generator().manual_seed(0))
    keep = torch.rand(2, 16, generator=torch.Generator().manual_seed(1)) < 0.5
    settings = dict(prompt_mask=keep, num_steps=4, sampler=sampler, seed=0)
    x = model.generate(prompt, callback=steps.append, **settings)
    assert all(step.tokens[keep].equal(prompt[keep]) for step in steps) and x[keep].equal(prompt[keep])
    assert not x[~keep].equal(prompt[~keep])
    assert model.generate(prompt.masked_fill(~keep, 5), **settings).equal(x)
    assert model.generate(prompt.masked_fill(~keep, 9999), **settings).equal(x)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_and_new_tokens(kind):
    model = tiny_model(kind)
    prompt = torch.tensor([[3, 1, 4], [1, 5, 9]])
    x = model.generate(prompt, max_new_tokens=6, num_steps=4, seed=0)
    assert x.shape == (2, 9) and x[:, :3].equal(prompt)
    assert model.generate(prompt, max_length=9, num_steps=4, seed=0).equal(x)
    many = model.generate(prompt[:1], num_samples=3, max_new_tokens=6, num_steps=4, seed=0)
    assert many.shape == (3, 9) and (many[:, :3] == prompt[0]).all() and many[0].equal(x[0])
    assert not many[0].equal(many[1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_of_unequal_length_give_each_row_what_it_would_get_alone(kind, side):
    model = tiny_model(kind)
    prompts = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
    padded, mask = torch.full((3, 5), 21), torch.zeros(3, 5, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        place = slice(0, len(prompt)) if side == "right" else slice(5 - len(prompt), 5)
        padded[row, place], mask[row, place] = torch.tensor(prompt), 1
    output = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=7,
        num_steps=5,
        generator=generators(1, 2, 3),
        return_dict_in_generate=True,
    )
    assert output.lengths.tolist() == [12, 9, 10] and output.sequences.shape == (3, 12)
    for row, (prompt, generator) in enumerate(zip(prompts, generators(1, 2, 3), strict=True)):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=7, num_steps=5, generator=generator)[0]
        assert output.sequences[row, : len(alone)].equal(alone)
        assert (output.sequences[row, len(alone) :] == 21).all()


@pytest.mark.parametrize("kind", KINDS)
def test_texts_longer_than_the_model_are_written_in_windows(kind):
    """Each window sees the last tokens of the text so far, keeps them, and adds `stride`."""
    model, steps, calls = tiny_model(kind), [], []
    model.register_forward_hook(
        lambda module, args, kwargs, output: calls.append(kwargs["input_ids"]), with_kwargs=True
    )
    prompt = torch.tensor([[3, 1, 4]])
    output = model.generate(
        prompt,
        max_new_tokens=30,
        stride=6,
        num_steps=3,
        seed=0,
        callback=steps.append,
        return_dict_in_generate=True,
    )
    x = output.sequences
    assert x.shape == (1, 33) and x[:, :3].equal(prompt) and (kind == "duo" or (x != MASK).all())
    assert {step.window for step in steps} == {0, 1, 2, 3} and max(call.shape[1] for call in calls) == 16
    assert output.num_forward_calls == len(calls)
    for step in steps:
        start = min(6 * step.window, 33 - 16)
        context = 3 if step.window == 0 else 16 - (6 if step.window < 3 else 33 - 28)
        assert step.tokens[0, :context].equal(x[0, start : start + context])


@pytest.mark.parametrize("kind", KINDS)
def test_long_prompts_and_unequal_rows_in_windows(kind):
    model = tiny_model(kind)
    long, short = torch.arange(20) % 7, torch.tensor([5, 6])
    padded = torch.stack([long, nn.functional.pad(short, (0, 18))])
    mask = torch.zeros(2, 20, dtype=torch.long)
    mask[0], mask[1, :2] = 1, 1
    settings = dict(max_new_tokens=18, stride=8, num_steps=3)
    both = model.generate(padded, attention_mask=mask, generator=generators(1, 2), **settings)
    assert both[0, :20].equal(long)
    assert both[0].equal(model.generate(long[None], generator=generators(1), **settings)[0])
    assert both[1, :20].equal(model.generate(short[None], generator=generators(2), **settings)[0])


def test_trim_eos_cuts_after_the_first_generated_end_of_text():
    """Not at one in the prompt, nor at one that opens an unprompted row as the released models' samples do."""
    model = tiny_model("mdlm")
    prompt = torch.tensor([[7, 7, 2]])
    settings = dict(num_samples=8, num_steps=4, seed=0, max_new_tokens=13)
    plain = model.generate(prompt, **settings)
    eos = int(plain[0, 6])
    prompt[0, 0] = eos
    plain = model.generate(prompt, **settings)
    output = model.generate(
        prompt, trim_eos=True, eos_token_id=eos, pad_token_id=20, return_dict_in_generate=True, **settings
    )
    cut = 0
    for row, n, whole in zip(output.sequences, output.lengths.tolist(), plain, strict=True):
        found = [i for i in range(3, 16) if whole[i] == eos]
        assert n == (found[0] + 1 if found else 16)
        assert row[:n].equal(whole[:n]) and (row[n:] == 20).all()
        cut += bool(found)
    assert cut > 0
    with torch.no_grad():
        model.backbone.output_layer.linear.bias[eos] += 100
    output = model.generate(trim_eos=True, eos_token_id=[eos, 4], num_steps=2, return_dict_in_generate=True)
    assert output.lengths.tolist() == [2] and output.sequences.tolist() == [[eos, eos]]
    windows = []
    model.generate(
        max_new_tokens=100,
        stride=8,
        trim_eos=True,
        eos_token_id=eos,
        num_steps=2,
        callback=lambda s: windows.append(s.window),
    )
    assert set(windows) == {0}  # nothing is written behind the end


# Reproducibility


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("controls", [{}, {"temperature": 0.7}, {"top_p": 0.9}, {"sampler": "psi"}])
def test_a_row_of_a_batch_is_the_single_run_with_its_generator(kind, controls):
    model = tiny_model(kind)
    batch = model.generate(num_samples=5, num_steps=4, generator=generators(*range(5)), **controls)
    for seed, row in enumerate(batch):
        assert model.generate(num_steps=4, generator=generators(seed), **controls)[0].equal(row)
        assert model.generate(num_steps=4, seed=seed, **controls)[0].equal(row)


def samplers_of(kind: str) -> list[dict]:
    """Settings for every sampler of a model, in few steps."""
    names = [name for name, sampler in SAMPLERS.items() if kind == "mdlm" or not sampler.needs_mask]
    return [{"sampler": name} | ({} if name == "first_hitting" else {"num_steps": 4}) for name in names]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_in_its_calls_has_the_inputs_and_the_hidden_states_of_its_single_run(kind):
    """So nothing that rounds differently is left, whatever the sampler. In shared calls products do round otherwise."""
    model, seen = tiny_model(kind), []
    prompts = torch.randint(22, (3, 8), generator=torch.Generator().manual_seed(0))
    exists = torch.ones(3, 8, dtype=torch.long)
    exists[1, 5:] = 0
    model.register_forward_hook(
        lambda module, args, kwargs, output: seen.append((kwargs["input_ids"], output.hidden_states[0])),
        with_kwargs=True,
    )
    rounded_otherwise = 0
    for settings in samplers_of(kind):
        settings |= {"temperature": 0.7, "max_new_tokens": 6}
        seen.clear()
        batch = model.generate(
            prompts, attention_mask=exists, generator=generators(1, 2, 3), rows_per_call=1, **settings
        )
        of_batch = list(seen)
        seen.clear()
        for row, generator in enumerate(generators(1, 2, 3)):
            length = int(exists[row].sum())
            alone = model.generate(prompts[row : row + 1, :length], generator=generator, rows_per_call=1, **settings)
            assert batch[row, : length + 6].equal(alone[0]), settings
        assert len(seen) == len(of_batch)
        for ids, hidden in seen:
            assert any(ids.equal(other) and hidden.equal(states) for other, states in of_batch), settings
        model.generate(prompts, attention_mask=exists, generator=generators(1, 2, 3), rows_per_call=3, **settings)
        single = {tuple(ids[0].tolist()): hidden for ids, hidden in of_batch}
        for ids, hidden in seen[len(of_batch) :]:
            for row, states in zip(ids, hidden, strict=True):
                own = single.get(tuple(row.tolist()))
                rounded_otherwise += own is not None and own.shape[1] == len(states) and not own[0].equal(states)
    assert rounded_otherwise, "a batch rounds as single rows do, so this test proves nothing"


class Rounding(Stub):
    """A network whose logits depend on how many rows share a call, as products in floating point do."""

    def forward(self, input_ids, *args, **kwargs):
        output = super().forward(input_ids, *args, **kwargs)
        hidden, c = output.hidden_states
        hidden[:, ::2] += 1e-6 * (len(input_ids) - 1) * torch.arange(hidden.shape[-1])
        return MaskedLMOutput(hidden_states=(hidden, c))


@pytest.mark.parametrize("sampler", ["confidence", "margin", "entropy"])
def test_near_ties_fall_the_same_way_in_a_batch(sampler, monkeypatch):
    """Scores 5e-7 apart, which change their order by rounding when five rows share a call, count as equal."""
    logits = torch.tensor([1.5, 0.5, 0.0, 0.0], dtype=torch.float64).repeat(1, 4, 1)
    logits[0, :, 0] -= torch.arange(4) * 5e-7
    model = Rounding(AbsorbingProcess(4, 3), logits)

    def steps(*seeds):
        prompts, rows = torch.full((len(seeds), 4), 3), generators(*seeds)
        settings = dict(num_steps=4, output_history=True, return_dict_in_generate=True, rows_per_call=5)
        return torch.stack(model.generate(prompts, generator=rows, sampler=sampler, **settings).history, 1)

    assert steps(0, 1, 2, 3, 4).equal(torch.cat([steps(seed) for seed in range(5)]))
    monkeypatch.setattr(samplers_tokendrift, "TIE", 0.0)
    assert not steps(0, 1, 2, 3, 4).equal(torch.cat([steps(seed) for seed in range(5)]))


@pytest.mark.parametrize("kind", KINDS)
def test_seeds_and_global_state(kind):
    model = tiny_model(kind)
    state = torch.random.get_rng_state()
    x = model.generate(num_samples=4, num_steps=3, seed=7)
    assert model.generate(num_samples=4, num_steps=3, seed=7).equal(x)
    assert not model.generate(num_samples=4, num_steps=3, seed=8).equal(x)
    assert model.generate(num_samples=2, num_steps=3, seed=7).equal(x[:2])
    generator = torch.Generator().manual_seed(7)
    parts = [model.generate(num_samples=n, num_steps=3, generator=generator) for n in (1, 3)]
    assert torch.cat(parts).equal(x)  # one generator goes on where it was, however the rows are batched
    assert torch.random.get_rng_state().equal(state)
    torch.manual_seed(1)
    first = model.generate(num_steps=3)
    assert not model.generate(num_steps=3).equal(first)
    torch.manual_seed(1)
    assert model.generate(num_steps=3).equal(first)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_do_not_change_tokens(kind):
    model = tiny_model(kind)
    x = model.generate(num_samples=3, num_steps=4, seed=0)
    for chunk_size in (1, 5, 64):
        assert model.generate(num_samples=3, num_steps=4, seed=0, chunk_size=chunk_size).equal(x)


@pytest.mark.parametrize("kind", KINDS)
def test_precision_is_an_argument(kind):
    model, dtypes = tiny_model(kind), set()
    rand = torch.rand

    def spy(*args, **kwargs):
        dtypes.add(kwargs["dtype"])
        return rand(*args, **kwargs)

    torch.rand = spy
    try:
        output = model.generate(num_steps=2, seed=0, precision="float32", return_dict_in_generate=True)
        assert dtypes == {torch.float32} and output.settings["precision"] == "float32"
        dtypes.clear()
        assert model.generate(num_steps=2, seed=0, return_dict_in_generate=True).settings["precision"] == "float64"
        assert dtypes == {torch.float64}
    finally:
        torch.rand = rand
    assert model.to(torch.bfloat16).generate(num_steps=2, seed=0).shape == (1, 16)


def test_a_device_without_float64_draws_in_float32():
    assert draw_dtype("float64", torch.device("mps")) == draw_dtype("float32", torch.device("cpu")) == torch.float32
    assert draw_dtype("float64", torch.device("cpu")) == draw_dtype("float64", torch.device("cuda")) == torch.float64


def peak_megabytes(function) -> float:
    """How far the memory of this process rises above where it was, by the kernel's count."""

    def field(name):
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
        return int(line.split()[1]) / 1024

    Path("/proc/self/clear_refs").write_text("5")
    before = field("VmRSS")
    function()
    return field("VmHWM") - before


@pytest.mark.parametrize("kind", KINDS)
def test_memory_does_not_grow_with_batch_times_length_times_vocabulary(kind):
    """8 x 1024 x 50258 in float64 would be 3.3 GB, one row of it 412 MB; 200 MB must do."""
    model = tiny_model(kind, vocab_size=50258, max_position_embeddings=1024, num_hidden_layers=1)
    model.generate(max_new_tokens=8, num_steps=1, seed=0)
    assert peak_megabytes(lambda: model.generate(num_samples=8, num_steps=1, seed=0)) < 200


# Observation


@pytest.mark.parametrize("kind", KINDS)
def test_callback_history_and_confidence(kind):
    model, steps = tiny_model(kind), []
    output = model.generate(
        num_samples=2, num_steps=3, seed=0, callback=steps.append, return_dict_in_generate=True, output_history=True
    )
    assert [step.step for step in steps] == [0, 1, 2, 3] and steps[-1].t == 0
    assert all(0 <= later.t < step.t < 1 for step, later in zip(steps, steps[1:], strict=False))
    assert len(output.history) == 5 and all(h.equal(s.tokens) for h, s in zip(output.history[1:], steps, strict=True))
    assert output.history[-1].equal(output.sequences)
    if kind == "mdlm":
        assert (output.history[0] == MASK).all()
        for step in steps:
            assert step.confidence.isnan().equal(step.tokens == MASK)
    assert ((steps[-1].confidence > 0) & (steps[-1].confidence <= 1)).all()
    assert output.settings["num_steps"] == 3 and json.dumps(output.settings)


class Recorder:
    def __init__(self):
        self.drafts, self.values, self.ended = [], [], 0

    def put_draft(self, value, **kwargs):
        self.drafts.append(value)

    def put(self, value):
        self.values.append(value)

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("kind", KINDS)
def test_streamers_get_the_prompt_the_drafts_and_the_text(kind):
    model, streamer = tiny_model(kind), Recorder()
    prompt = torch.tensor([[3, 1, 4]])
    x = model.generate(prompt, max_new_tokens=20, stride=10, num_steps=3, seed=0, streamer=streamer)
    assert torch.cat(streamer.values, 1).equal(x) and streamer.values[0].equal(prompt) and streamer.ended == 1
    assert [draft.shape[1] for draft in streamer.drafts] == [13] * 4 + [7] * 4
    assert streamer.drafts[3].equal(x[:, 3:16]) and streamer.drafts[7].equal(x[:, 16:])


def test_streamers_of_transformers_print_the_text(capsys):
    class Letters:
        """Just what the streamers use of a tokenizer."""

        def decode(self, ids, **kwargs):
            return "".join(chr(97 + int(i)) for i in torch.as_tensor(ids).flatten())

    model = tiny_model("mdlm")
    for streamer in (TextDiffusionStreamer(Letters()), TextStreamer(Letters())):
        x = model.generate(torch.tensor([[3, 1, 4]]), max_new_tokens=6, num_steps=3, seed=0, streamer=streamer)
        printed = capsys.readouterr().out
        assert printed.count("\x1b[J") == (4 if isinstance(streamer, TextDiffusionStreamer) else 0)  # drafts erased
        assert "dbe" in printed, "the prompt"
        # Before transformers 5.24 words were held back until a space, so the prompt may stand behind the last draft.
        text = printed.rpartition("\x1b[J")[2].strip()
        assert text.removeprefix("dbe") == Letters().decode(x[:, 3:])


# Settings


def test_settings_come_from_the_call_then_the_config_then_the_model_then_the_defaults():
    model = tiny_model("mdlm")
    assert model.generation_config.sampler == "ancestral" and model.generation_config.num_steps == 16
    model.generation_config.num_steps, model.generation_config.temperature = 3, 0.5

    def settings(**kwargs):
        return model.generate(seed=0, return_dict_in_generate=True, **kwargs).settings

    own = DiffusionGenerationConfig(num_steps=2)
    assert (settings()["num_steps"], settings()["temperature"], settings()["top_p"]) == (3, 0.5, 1.0)
    assert settings(generation_config=own)["num_steps"] == 2 and settings(generation_config=own)["temperature"] == 0.5
    assert settings(generation_config=own, num_steps=5)["num_steps"] == 5 and own.num_steps == 2
    assert settings(num_steps=None)["num_steps"] == 3
    assert settings(generation_config=copy.deepcopy(model.generation_config), num_steps=4)["num_steps"] == 4
    model.generation_config.max_length = 9
    assert model.generate(seed=0).shape == (1, 9) and model.generate(seed=0, max_new_tokens=5).shape == (1, 5)
    assert model.generate(seed=0, generation_config=DiffusionGenerationConfig(max_new_tokens=7)).shape == (1, 7)


def test_a_stored_empty_list_of_ids_is_none():
    """The Trainer of transformers 5.17 stores it if the tokenizer has no such token."""
    model = tiny_model("mdlm")
    expected = model.generate(num_steps=2, seed=0)
    model.generation_config.eos_token_id = []
    assert model.generate(num_steps=2, seed=0).equal(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_settings_survive_saving_and_loading(kind, tmp_path):
    """Every field, any value: saving never fails, and what was saved is read again."""
    model = tiny_model(kind)
    values = {"num_steps": 7, "sampler": "psi", "psi": ["pure-pc", "constant-0.3", "pure-posterior"]}
    values |= {"psi_fractions": [0.2, 0.3], "temperature": 0.9, "top_k": 5, "top_p": 0.95, "noise_removal": "greedy"}
    values |= {"time_grid": "cosine", "precision": "float32", "stride": 4, "trim_eos": True, "eos_token_id": [1, 2]}
    values |= {"pad_token_id": 0, "bos_token_id": 1, "max_new_tokens": 20, "return_dict_in_generate": True}
    values |= {"output_history": True, "suppress_tokens": [3, 4]} | ({"block_length": 3} if kind == "mdlm" else {})
    for name, value in values.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "generation_config.json").read_text())
    loaded = type(model).from_pretrained(tmp_path)
    for name, value in values.items():
        assert written[name] == value and getattr(loaded.generation_config, name) == value
    assert set(values) | {"max_length", "block_length"} == set(DiffusionGenerationConfig.fields)
    assert loaded.generate(seed=0).sequences.equal(model.generate(seed=0).sequences)
    given = DiffusionGenerationConfig(num_steps=3)
    assert type(model).from_pretrained(tmp_path, generation_config=given).generation_config.num_steps == 3
    (tmp_path / "generation_config.json").unlink()
    assert type(model).from_pretrained(tmp_path).generation_config.num_steps == 16
    model.generation_config.num_steps, model.generation_config.temperature = -1, "hot"
    model.save_pretrained(tmp_path)


def test_settings_with_unknown_names_are_refused():
    with pytest.raises(ValueError, match="Unknown generation settings .*num_beams"):
        DiffusionGenerationConfig(num_beams=2)


def test_an_unknown_setting_is_named_and_does_not_reach_the_file(tmp_path, caplog):
    """Written into generation_config.json it made the checkpoint unreadable."""
    model = tiny_model("mdlm")
    model.generation_config.num_beam_groups = 4
    assert "num_beam_groups=4 is no setting of a diffusion model" in caplog.text
    model.generation_config.num_steps = 3
    model.save_pretrained(tmp_path)
    caplog.clear()
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.generation_config.num_steps == 3
    assert not caplog.records
    assert not hasattr(loaded.generation_config, "num_beam_groups")


def test_a_foreign_file_of_settings_is_read_with_one_warning(tmp_path, caplog):
    model = tiny_model("mdlm")
    model.save_pretrained(tmp_path)
    foreign = GenerationConfig(do_sample=True, num_beams=4, temperature=0.5, max_new_tokens=9, eos_token_id=[3, 4])
    foreign.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).generation_config
    assert (loaded.temperature, loaded.max_new_tokens, loaded.eos_token_id) == (0.5, 9, [3, 4])
    assert [r.getMessage() for r in caplog.records if "do_sample" in r.getMessage()] == [
        "generation_config.json has ['do_sample', 'num_beams'], which no diffusion model knows. They are ignored."
    ]


@pytest.mark.parametrize(
    "content, message", [("[1, 2]", "holds a list"), ('"x"', "holds a str"), ('{"a": ', "is no JSON")]
)
def test_a_damaged_file_of_settings_is_an_error_that_names_it(tmp_path, content, message):
    model = tiny_model("mdlm")
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=f"generation_config.json {message}.* Mend or delete it"):
        type(model).from_pretrained(tmp_path)


def test_settings_of_transformers_are_taken_or_refused():
    model = tiny_model("mdlm")
    theirs = GenerationConfig(max_new_tokens=5, temperature=0.7, top_k=3, eos_token_id=2)
    ours = dict(max_new_tokens=5, temperature=0.7, top_k=3)
    assert model.generate(generation_config=theirs, seed=0).equal(model.generate(**ours, seed=0))
    with pytest.raises(ValueError, match=r"generation_config sets \['do_sample', 'num_beams'\], which no diffusion"):
        model.generate(generation_config=GenerationConfig(do_sample=True, num_beams=2))
    for wrong in ({"num_steps": 3}, "greedy", 4):
        with pytest.raises(ValueError, match=f"generation_config is a {type(wrong).__name__}. Give a Diffusion"):
            model.generate(generation_config=wrong)


@pytest.mark.parametrize(
    "kind, arguments, message",
    [
        ("mdlm", {"num_beams": 4}, "unknown arguments .*num_beams"),
        ("mdlm", {"num_steps": 0}, "num_steps=0. It must be a whole number, at least 1"),
        ("mdlm", {"num_steps": 2.5}, "num_steps=2.5"),
        ("mdlm", {"num_steps": 10**9}, "num_steps=1000000000. It must be at most 1000000"),
        ("mdlm", {"num_samples": 0}, "num_samples=0"),
        ("mdlm", {"temperature": -1.0}, "temperature=-1.0. It must be 0, which is greedy, or a number from 1e-6"),
        ("mdlm", {"temperature": 1e-9}, "temperature=1e-09. It must be 0"),
        ("mdlm", {"temperature": "hot"}, "temperature='hot'. It must be 0"),
        ("mdlm", {"top_p": 0.0}, r"top_p=0.0. It must be a number in \(0, 1\]"),
        ("mdlm", {"top_k": -3}, "top_k=-3"),
        ("mdlm", {"suppress_tokens": [3, 23]}, r"suppress_tokens=\[3, 23\]. It must be a list of ids from 0 to 22"),
        ("mdlm", {"suppress_tokens": "mask"}, "suppress_tokens='mask'. It must be a list of ids"),
        ("mdlm", {"suppress_tokens": list(range(22))}, "holds every id that can be sampled"),
        ("duo", {"suppress_tokens": list(range(23))}, "holds every id that can be sampled"),
        ("mdlm", {"temperature": float("nan")}, "temperature=nan. It must be 0, which is greedy"),
        ("mdlm", {"temperature": True}, "temperature=True. It must be 0"),
        ("mdlm", {"sampler": ["psi"]}, r"sampler=\['psi'\] is not known"),
        ("mdlm", {"time_grid": 3}, "time_grid=3. It must be the name of a grid or a list of times"),
        ("mdlm", {"time_grid": ["a", "b"], "num_steps": 1}, "It must be the name of a grid or a list of times"),
        ("mdlm", {"time_grid": [1.0, float("nan")], "num_steps": 1}, "needs 2 falling times"),
        ("mdlm", {"time_grid": "linear-constant-linear-0.1.2"}, "Unknown time_grid"),
        ("mdlm", {"sampler": "psi", "psi": 3}, "give one mode or three"),
        ("mdlm", {"sampler": "psi", "psi": "constant-0.1.2"}, "Unknown psi mode"),
        ("mdlm", {"sampler": "psi", "psi_fractions": 0.5}, "Give two fractions of the steps"),
        ("mdlm", {"trim_eos": "yes", "eos_token_id": 3}, "trim_eos='yes'. It must be True or False"),
        ("mdlm", {"trim_eos": True, "eos_token_id": "</s>"}, "eos_token_id='</s>'. It must be an id, or a list of ids"),
        ("mdlm", {"generator": 3}, "generator=3. Give a torch.Generator"),
        ("mdlm", {"generator": [3]}, r"generator=\[3\]. Give a torch.Generator"),
        ("mdlm", {"callback": "print"}, "callback is a str. It must be a function"),
        ("mdlm", {"streamer": print}, "streamer is a builtin_function_or_method. It must have put"),
        (
            "mdlm",
            {"input_ids": torch.tensor([[1, MASK]]), "attention_mask": [[1, 1]]},
            "attention_mask is a list or holds nan. It must be a tensor of zeros and ones",
        ),
        (
            "mdlm",
            {"input_ids": torch.tensor([[1, MASK]]), "prompt_mask": torch.tensor([[1.0, float("nan")]])},
            "prompt_mask is a Tensor or holds nan",
        ),
        ("mdlm", {"block_length": 0}, "block_length=0. It must be a positive whole number"),
        ("duo", {"block_length": 4}, "block_length=4 needs a process with masks"),
        ("mdlm", {"logits_processor": 3}, "logits_processor is a int. It must be a LogitsProcessorList"),
        ("mdlm", {"stopping_criteria": [3]}, "stopping_criteria is a list. It must be a StoppingCriteriaList"),
        ("mdlm", {"stopping_criteria": [lambda ids, scores, **kw: False], "num_samples": 2}, "give pad_token_id"),
        ("mdlm", {"chunk_size": 0}, "chunk_size=0"),
        ("mdlm", {"max_new_tokens": 0}, "max_new_tokens=0"),
        ("mdlm", {"max_new_tokens": 17}, "17 tokens long, but this model takes at most 16.*stride"),
        ("mdlm", {"max_length": 10**9}, "1000000000 tokens long, but this model takes at most 16.*stride"),
        ("mdlm", {"input_ids": torch.tensor([[1, 2]]), "max_length": 10**9}, "1000000000 tokens long"),
        ("mdlm", {"input_ids": torch.tensor([[1, 2]]), "max_new_tokens": 10**9}, "1000000002 tokens long"),
        (
            "mdlm",
            {"max_length": 10**9, "stride": 8},
            "1 texts of 1000000000 tokens are 1000000000 positions. A call can",
        ),
        (
            "mdlm",
            {"num_samples": 10**9},
            "1000000000 texts of 16 tokens are 16000000000 positions. A call can generate 2",
        ),
        ("duo", {"num_samples": 10**9, "input_ids": torch.full((1, 4), 1)}, "1000000000 texts of 4 tokens are"),
        ("mdlm", {"max_new_tokens": 17, "stride": 17}, "stride=17"),
        ("mdlm", {"max_new_tokens": 5, "max_length": 6}, "Both max_new_tokens and max_length"),
        ("mdlm", {"sampler": "nucleus"}, "sampler='nucleus' is not known"),
        ("duo", {"sampler": "first_hitting"}, "needs a process with masks"),
        ("duo", {"sampler": "confidence"}, "needs a process with masks"),
        ("mdlm", {"sampler": "first_hitting", "num_steps": 4}, "num_steps=4 has no meaning"),
        ("mdlm", {"sampler": "confidence", "noise_removal": "greedy"}, "noise_removal='greedy' has no meaning"),
        ("mdlm", {"psi": "pure-pc"}, "psi='pure-pc' has no meaning for sampler='ancestral'"),
        ("mdlm", {"sampler": "psi", "psi": "max-capped"}, "Unknown psi mode 'max-capped'"),
        ("mdlm", {"sampler": "psi", "psi": ["pure-pc"]}, "give one mode or three"),
        ("mdlm", {"sampler": "psi", "psi_fractions": [0.8, 0.8]}, "of sum at most 1|of sum at "),
        ("mdlm", {"time_grid": "quadratic"}, "Unknown time_grid 'quadratic'"),
        ("mdlm", {"time_grid": [1.0, 0.5], "num_steps": 4}, "needs 5 falling times"),
        ("mdlm", {"time_grid": [0.2, 0.5], "num_steps": 1}, "needs 2 falling times"),
        ("mdlm", {"noise_removal": "maybe"}, "noise_removal='maybe'"),
        ("mdlm", {"precision": "float16"}, "precision='float16'"),
        ("mdlm", {"trim_eos": True}, "trim_eos=True without an eos_token_id"),
        ("mdlm", {"seed": 1, "generator": torch.Generator()}, "Both seed and generator"),
        ("mdlm", {"seed": -1}, "seed=-1. It must be a whole number from 0"),
        ("mdlm", {"seed": 2**64}, "seed=18446744073709551616"),
        ("mdlm", {"psi_fractions": [0.1, 0.2]}, "They belong to sampler='psi'"),
        ("mdlm", {"output_history": True}, "output_history=True without return_dict_in_generate"),
        ("mdlm", {"num_samples": 3, "generator": [torch.Generator()]}, "1 generators for 3 rows"),
        ("mdlm", {"prompt_mask": torch.ones(1, 4)}, "without input_ids"),
        ("mdlm", {"input_ids": torch.rand(1, 4)}, "tensor of integer ids"),
        ("mdlm", {"input_ids": [[1, 2]]}, "tensor of integer ids"),
        ("mdlm", {"input_ids": torch.zeros(4, dtype=torch.long)}, "tensor of integer ids"),
        ("mdlm", {"input_ids": torch.tensor([[1, 2, 3]])}, "nothing to generate"),
        ("duo", {"input_ids": torch.tensor([[1, 2, 3]])}, "nothing to generate"),
        ("mdlm", {"input_ids": torch.tensor([[1, 99, MASK]])}, "ids run from 1 to 99, but the model knows 0 to 22"),
        ("mdlm", {"input_ids": torch.tensor([[1, -1, MASK]])}, "ids run from -1 to 1"),
        ("duo", {"input_ids": torch.tensor([[1, MASK]]), "max_new_tokens": 2}, "knows no mask"),
        (
            "mdlm",
            {"input_ids": torch.tensor([[1, MASK]]), "prompt_mask": torch.tensor([[0, 1]])},
            "keeps positions that hold the mask",
        ),
        ("mdlm", {"input_ids": torch.tensor([[1, MASK]]), "prompt_mask": torch.ones(1, 3)}, r"prompt_mask is \[1, 3\]"),
        ("mdlm", {"input_ids": torch.tensor([[1, MASK]]), "attention_mask": torch.ones(2, 2)}, "attention_mask is"),
        (
            "mdlm",
            {"input_ids": torch.tensor([[1, 2, MASK]]), "attention_mask": torch.tensor([[1, 0, 1]])},
            "hole or an empty row",
        ),
        (
            "mdlm",
            {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.zeros(1, 2), "max_new_tokens": 2},
            "hole or an empty row",
        ),
        ("mdlm", {"input_ids": torch.full((2, 3), MASK), "num_samples": 3}, "num_samples=3 with 2 prompts"),
        ("mdlm", {"input_ids": torch.tensor([[1, 2, 3]]), "max_length": 2}, "has 3 tokens already"),
        ("mdlm", {"input_ids": torch.full((1, 17), MASK)}, "17 tokens long"),
    ],
)
def test_bad_arguments_say_what_is_wrong(kind, arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model(kind).generate(**arguments)


# Wrapped models


@pytest.mark.parametrize("kind", KINDS)
def test_generate_through_a_peft_model_uses_the_adapter(kind):
    base = tiny_model(kind)
    plain = base.generate(num_samples=2, num_steps=4, seed=0)
    wrapped = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["attn_qkv", "mlp.0", "mlp.2"]))
    assert wrapped.generate(num_samples=2, num_steps=4, seed=0).equal(plain)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    adapted = wrapped.generate(num_samples=2, num_steps=4, seed=0)
    assert not adapted.equal(plain)
    assert wrapped.merge_and_unload().generate(num_samples=2, num_steps=4, seed=0).equal(adapted)


@pytest.mark.parametrize("kind", KINDS)
def test_generate_under_autocast(kind):
    """The caller's autocast reaches every layer: matrix products run in bfloat16."""
    model, dtypes = tiny_model(kind), set()
    model.backbone.blocks[0].attn_qkv.register_forward_hook(lambda *args: dtypes.add(args[2].dtype))
    model.backbone.output_layer.linear.register_forward_hook(lambda *args: dtypes.add(args[2].dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model.generate(num_steps=3, seed=0).shape == (1, 16)
    assert dtypes == {torch.bfloat16}
