"""Masked language models of transformers as diffusion models: equal to their own forward, and closed to others."""

from __future__ import annotations

import copy
import itertools
import json

import pytest
import torch
from conftest import tiny_model
from stand_ins import CLS, MASK, PAD, SEP, SPECIAL, V, masked_lm, randomised, some_ids, tiny_config
from toys import word_tokenizer
from transformers import AutoModelForMaskedLM, BertForMaskedLM, BertModel, GPT2Config, GPT2LMHeadModel

from tokendrift_hf import as_diffusion
from tokendrift_hf.models.adaptation import ADAPTATION
from tokendrift_hf.objective.corruption import corrupt
from tokendrift_hf.objective.nelbo import row_nelbo
from tokendrift_hf.objective.noise import row_noise

FAMILIES = ["bert", "roberta", "modernbert", "distilbert", "esm", "electra", "eurobert", "deberta-v2"]
PREDICTED = torch.tensor([i for i in range(V) if i > MASK])


def pair(model_type: str, **changes):
    """The family's own model and an adapted copy of it."""
    own = masked_lm(model_type, **changes)
    return own, as_diffusion(copy.deepcopy(own), **SPECIAL)


def calls_of(module: torch.nn.Module) -> list[torch.Size]:
    """The shapes of all completed calls of a module, from now on."""
    shapes = []
    module.register_forward_hook(
        lambda module, args, kwargs, output: shapes.append((args or tuple(kwargs.values()))[0].shape), with_kwargs=True
    )
    return shapes


# Equal to the family's own forward


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_logits_are_the_familys_own_to_the_bit(model_type):
    own, model = pair(model_type)
    ids = some_ids()
    assert model(input_ids=ids).logits[..., PREDICTED].equal(own(input_ids=ids).logits[..., PREDICTED])


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_logits_under_padding_are_the_familys_own_to_the_bit(model_type):
    """Pads of the family's own id, on the right; positions that do not exist are not compared."""
    own, model = pair(model_type)
    ids, exists = some_ids(), torch.ones(2, 12, dtype=torch.long)
    ids[1, 7:], exists[1, 7:] = PAD, 0
    for mask in (exists, exists.bool()):
        ours = model(input_ids=ids, attention_mask=mask).logits
        theirs = own(input_ids=ids, attention_mask=exists).logits
        assert ours[exists.bool()][:, PREDICTED].equal(theirs[exists.bool()][:, PREDICTED])


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_rows_of_the_embedding_table_are_the_ids(model_type):
    """What the lift relies on: it gives rows of E where nothing is predicted, before any layer norm and position."""
    _, model = pair(model_type)
    ids = some_ids()
    E = model.get_input_embeddings().weight
    assert model(inputs_embeds=E[ids]).logits.equal(model(input_ids=ids).logits)


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_the_head_runs_at_the_chosen_positions_alone(model_type):
    _, model = pair(model_type)
    ids, positions = some_ids(), torch.tensor([[1, 5, 3], [7, 2, 9]])
    expected = model(input_ids=ids).logits.take_along_dim(positions[..., None], dim=1)
    shapes = [calls_of(model.get_submodule(name)) for name in model.head_names]
    hidden, c = model(input_ids=ids, positions=positions).hidden_states
    assert not any(shapes), "no part of the head runs before logits are asked for"
    logits = model.logits(hidden.flatten(0, 1)[:, None], c.repeat_interleave(3, 0)).view(2, 3, V)
    assert all(seen[0][:2] == (6, 1) for seen in shapes)
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_hidden_states_are_the_outputs_of_the_blocks(model_type):
    own, model = pair(model_type)
    ids = some_ids()
    outputs = []
    for block in own.get_submodule(model.block_list):
        block.register_forward_hook(lambda module, args, out: outputs.append(out[0] if isinstance(out, tuple) else out))
    own(input_ids=ids)
    states = model(input_ids=ids, output_hidden_states=True).hidden_states
    assert len(states) == 4
    assert all(state.equal(output) for state, output in zip(states[1:], outputs, strict=True))


@pytest.mark.parametrize("model_type", FAMILIES)
@torch.no_grad()
def test_blocks_beyond_the_wanted_one_are_not_run(model_type):
    _, model = pair(model_type)
    embeds = model.get_input_embeddings().weight[some_ids()]
    every = model.hidden_states(embeds)[0]
    runs = [calls_of(block) for block in model.blocks]
    for wanted in range(4):
        for calls in runs:
            calls.clear()
        states = model.hidden_states(embeds, num_blocks=wanted)[0]
        assert [len(calls) for calls in runs] == [1] * wanted + [0] * (3 - wanted)
        assert all(state.equal(other) for state, other in zip(states, every[: wanted + 1], strict=True))


@torch.no_grad()
def test_embeddings_come_before_positions_and_layer_norm():
    """The first hidden state is what the first block is given, not a row of the table."""
    own, model = pair("bert")
    states = model(input_ids=some_ids(), output_hidden_states=True).hidden_states
    assert states[0].equal(own.bert.embeddings(some_ids()))


@torch.no_grad()
def test_roberta_counts_positions_from_its_padding_id():
    """A table of 16 rows of which the first PAD + 1 are never used: 15 tokens fit, and 16 are refused."""
    own, model = pair("roberta")
    assert model.longest == 15
    ids = some_ids(length=15)
    assert model(input_ids=ids).logits[..., PREDICTED].equal(own(input_ids=ids).logits[..., PREDICTED])
    with pytest.raises(ValueError, match="16 tokens long, but this model takes at most 15"):
        model(input_ids=some_ids(length=16))


@torch.no_grad()
def test_esm_keeps_the_embedding_of_its_mask():
    """Its token dropout divides by the share of tokens that are no mask: all masks gave nan."""
    own = masked_lm("esm", token_dropout=True, position_embedding_type="rotary")
    ids = torch.full((1, 8), MASK)
    assert own(input_ids=ids).logits.isnan().all()
    model = as_diffusion(own, **SPECIAL)
    assert model(input_ids=ids).logits.isfinite().all()
    assert model.config.token_dropout is False


def test_gradients_are_the_familys_own():
    own, model = pair("bert")
    ids = some_ids()
    for which in (own, model):
        which(input_ids=ids).logits[..., PREDICTED].square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), own.parameters(), strict=True):
        assert ours.grad.equal(theirs.grad), name


# The process


@torch.no_grad()
def test_special_tokens_are_never_predicted():
    _, model = pair("bert")
    p = model(input_ids=some_ids()).logits.softmax(-1)
    assert p[..., [PAD, CLS, SEP, MASK]].eq(0).all()
    assert p[..., PREDICTED].gt(0).all()


def test_special_tokens_are_never_corrupted_and_never_counted():
    _, model = pair("bert")
    ids = some_ids(rows=4, length=10)
    ids[ids == MASK] = 5
    ids[:, 4] = SEP
    noise = row_noise((0, 0), range(4), 10, V)
    batch = corrupt(model.process, {"input_ids": ids}, noise, torch.ones(4))
    special = ids <= SEP
    assert batch.x_t[special].equal(ids[special])
    assert (batch.x_t[~special] == MASK).float().mean() > 0.9
    assert row_nelbo(model.process, model(input_ids=batch.x_t).logits, batch)[1].eq(7).all()


@torch.no_grad()
def test_ids_beyond_the_tokenizer_are_never_predicted():
    model = as_diffusion(masked_lm("bert"), mask_token_id=MASK, num_tokens=20)
    p = model(input_ids=some_ids()).logits.softmax(-1)
    assert p[..., 20:].eq(0).all() and p[..., [PAD, CLS, SEP]].gt(0).all()


@torch.no_grad()
def test_the_loss_of_labels_is_the_nelbo():
    """By hand: -log p(x_0) / t at the masks, summed, over the tokens that can be corrupted."""
    own, model = pair("bert")
    x_0, t = some_ids(seed=1), torch.tensor([0.3, 0.8])
    x_0[x_0 == MASK] = 7
    x_t = torch.where(
        (torch.rand(x_0.shape, generator=torch.Generator().manual_seed(2)) < 0.5) & (x_0 > SEP), MASK, x_0
    )
    log_p = own(input_ids=x_t).logits[..., PREDICTED].double().log_softmax(-1)
    expected = 0.0
    for b, i in (x_t == MASK).nonzero().tolist():
        expected -= float(log_p[b, i, int(x_0[b, i]) - MASK - 1]) / float(t[b])
    labels = x_0.masked_fill(x_0 <= SEP, -100)
    loss = model(input_ids=x_t, timesteps=t, labels=labels).loss
    assert float(loss) == pytest.approx(expected / int((labels != -100).sum()), rel=1e-5)


# Sampling


def small_vocabulary():
    """pad, cls, sep, mask and three tokens."""
    own = masked_lm("bert", vocab_size=7, seed=4)
    return own, as_diffusion(copy.deepcopy(own), **SPECIAL)


def law_of_ancestral(own, reveals: list[float]) -> torch.Tensor:
    """The law of the two middle tokens, [3, 3]: each mask falls with probability `reveals[i]` in step i."""
    law = torch.zeros(3, 3, dtype=torch.float64)

    def prediction(x):
        with torch.no_grad():
            return own(input_ids=torch.tensor([[CLS, *x, SEP]])).logits[0, 1:3, 4:].double().softmax(-1)

    def walk(x, step, probability):
        if step == len(reveals):
            law[x[0] - 4, x[1] - 4] += probability
            return
        p = prediction(x)
        masked = [i for i in range(2) if x[i] == MASK]
        for falls in itertools.product([False, True], repeat=len(masked)):
            fallen = [i for i, falls_here in zip(masked, falls, strict=True) if falls_here]
            chance = probability * reveals[step] ** len(fallen) * (1 - reveals[step]) ** (len(masked) - len(fallen))
            for tokens in itertools.product(range(3), repeat=len(fallen)) if chance else ():
                y, q = list(x), chance
                for i, token in zip(fallen, tokens, strict=True):
                    y[i], q = token + 4, q * float(p[i, token])
                walk(y, step + 1, q)

    walk([MASK, MASK], 0, 1.0)
    return law


def p_value(x: torch.Tensor, law: torch.Tensor) -> float:
    """Of a chi-squared test of the drawn pairs [n, 2]."""
    counts = torch.bincount((x[:, 0] - 4) * 3 + x[:, 1] - 4, minlength=9).double()
    expected = law.flatten() * len(x)
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor(4.0), statistic / 2))


def test_ancestral_sampling_follows_the_enumerated_law():
    own, model = small_vocabulary()
    alpha = model.process.schedule.alpha(torch.tensor([1.0, 0.5, 1e-5], dtype=torch.float64))
    reveals = [float((alpha[i + 1] - alpha[i]) / (1 - alpha[i])) for i in range(2)] + [1.0]
    x = model.generate(num_samples=3000, num_steps=2, max_new_tokens=4, seed=0)
    assert x[:, 0].eq(CLS).all() and x[:, 3].eq(SEP).all()
    assert p_value(x[:, 1:3], law_of_ancestral(own, reveals)) > 1e-3


def test_first_hitting_follows_the_law_of_random_order():
    own, model = small_vocabulary()
    one_by_one = torch.zeros(3, 3, dtype=torch.float64)
    with torch.no_grad():
        first = own(input_ids=torch.tensor([[CLS, MASK, MASK, SEP]])).logits[0, 1:3, 4:].double().softmax(-1)
        for i, token in itertools.product(range(2), range(3)):
            x = [CLS, MASK, MASK, SEP]
            x[i + 1] = token + 4
            then = own(input_ids=torch.tensor([x])).logits[0, 2 - i, 4:].double().softmax(-1)
            for other in range(3):
                pair_of_tokens = (token, other) if i == 0 else (other, token)
                one_by_one[pair_of_tokens] += 0.5 * float(first[i, token]) * float(then[other])
    x = model.generate(num_samples=3000, max_new_tokens=4, seed=1, sampler="first_hitting")
    assert p_value(x[:, 1:3], one_by_one) > 1e-3


@pytest.mark.parametrize(
    ("model_type", "sampler"),
    [(model_type, "ancestral") for model_type in FAMILIES]
    + [("bert", sampler) for sampler in ("psi", "first_hitting", "confidence", "margin", "entropy")],
)
def test_every_sampler_fills_all_masks_with_tokens(model_type, sampler):
    _, model = pair(model_type)
    x = model.generate(num_samples=3, seed=0, sampler=sampler, max_new_tokens=9)
    assert x.shape == (3, 9)
    assert (x[:, 0] == CLS).all() and (x[:, -1] == SEP).all()
    assert (x[:, 1:-1] > MASK).all()


def test_infilling_keeps_everything_but_the_masks():
    _, model = pair("roberta")
    ids = torch.tensor([[CLS, 5, MASK, MASK, 9, SEP], [CLS, MASK, 8, 7, MASK, SEP]])
    x = model.generate(ids, num_steps=3, seed=0)
    assert x[ids != MASK].equal(ids[ids != MASK])
    assert (x[ids == MASK] > MASK).all()


def test_rows_of_unequal_length_get_what_they_would_get_alone():
    _, model = pair("modernbert")
    ids = torch.tensor([[CLS, 5, 6, 7], [CLS, 9, PAD, PAD]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    seeds = [torch.Generator().manual_seed(i) for i in (3, 4)]
    together = model.generate(ids, attention_mask=mask, max_new_tokens=5, generator=seeds, pad_token_id=PAD)
    alone = model.generate(ids[1:, :2], max_new_tokens=5, generator=torch.Generator().manual_seed(4))
    assert together[1:, :7].equal(alone)


def test_a_prompt_that_keeps_a_mask_is_refused():
    _, model = pair("bert")
    ids = torch.tensor([[CLS, MASK, 5, SEP]])
    with pytest.raises(ValueError, match="prompt_mask keeps positions that hold the mask"):
        model.generate(ids, prompt_mask=torch.tensor([[1, 1, 0, 1]]))


# Saving


@pytest.mark.parametrize("model_type", FAMILIES)
def test_it_saves_in_the_familys_format(model_type, tmp_path):
    """The files are those of the family's own save but for one more, and the family's own class reads them."""
    own, model = pair(model_type)
    own.save_pretrained(tmp_path / "own")
    model.save_pretrained(tmp_path / "ours")
    files = {path.name: path.read_bytes() for path in (tmp_path / "own").iterdir()}
    saved = {path.name: path.read_bytes() for path in (tmp_path / "ours").iterdir()}
    told = json.loads(saved.pop(ADAPTATION))
    assert saved == files
    assert told["mask_token_id"] == MASK and told["kept_token_ids"] == [PAD, CLS, SEP] and told["shift"] is False
    loaded, info = AutoModelForMaskedLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert type(loaded) is type(own)


def test_the_adapted_class_is_the_familys_and_has_its_name():
    own, model = pair("bert")
    assert isinstance(model, BertForMaskedLM) and type(model).__name__ == "BertForMaskedLM"
    assert type(own) is BertForMaskedLM, "the family's class itself is untouched"
    assert "forward" not in vars(own)


def test_adapting_twice_changes_nothing():
    _, model = pair("bert")
    assert as_diffusion(model) is model
    ours = tiny_model("mdlm")
    assert as_diffusion(ours) is ours


# What cannot be adapted


def test_a_model_without_a_mask_token_is_refused():
    with pytest.raises(ValueError, match="BertForMaskedLM has no mask token.*Give mask_token_id.*config.json"):
        as_diffusion(masked_lm("bert"))


def test_a_mask_outside_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="mask_token_id=24 is outside the vocabulary of 24 ids.*resize_token"):
        as_diffusion(masked_lm("bert"), mask_token_id=V)


def test_a_causal_model_is_refused_and_left_as_it_was():
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=V, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    with pytest.raises(ValueError, match="GPT2LMHeadModel is causal: a later token changes nothing"):
        as_diffusion(model, mask_token_id=MASK)
    assert type(model) is GPT2LMHeadModel and not hasattr(model, "process")


def test_an_encoder_decoder_is_refused():
    model = AutoModelForMaskedLM.from_config(tiny_config("bart", d_model=16, encoder_layers=1, decoder_layers=1))
    with pytest.raises(ValueError, match="BartForConditionalGeneration .*is an encoder-decoder"):
        as_diffusion(model, mask_token_id=MASK)


def test_a_model_without_a_head_is_refused():
    with pytest.raises(ValueError, match="BertModel has no vocabulary head.*AutoModelForMaskedLM"):
        as_diffusion(BertModel(tiny_config("bert")), mask_token_id=MASK)


def test_a_model_that_uses_one_block_several_times_is_refused():
    with pytest.raises(ValueError, match="AlbertForMaskedLM has no list of its 3 blocks"):
        as_diffusion(masked_lm("albert"), mask_token_id=MASK)


def test_a_head_that_does_more_than_its_modules_is_refused():
    class Halved(BertForMaskedLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = output.logits / 2
            return output

    Halved.__module__ = BertForMaskedLM.__module__
    with pytest.raises(ValueError, match="give other logits than its own forward"):
        as_diffusion(randomised(Halved(tiny_config("bert"))), mask_token_id=MASK)


def test_a_model_that_sees_padding_is_refused():
    class Careless(BertForMaskedLM):
        def forward(self, *args, attention_mask=None, **kwargs):
            return super().forward(*args, **kwargs)

    Careless.__module__ = BertForMaskedLM.__module__
    with pytest.raises(ValueError, match="Careless sees padding"):
        as_diffusion(randomised(Careless(tiny_config("bert"))), mask_token_id=MASK)


def test_remote_code_of_an_unknown_family_is_refused():
    class Stranger(BertForMaskedLM):
        pass

    with pytest.raises(ValueError, match="Stranger.*is no family that is known here"):
        as_diffusion(Stranger(tiny_config("bert")), mask_token_id=MASK)


@pytest.mark.parametrize("model_type", ["llada2_moe", "sdar", "diffusion_gemma"])
def test_block_models_and_canvases_are_refused_with_what_is_missing(model_type):
    model = masked_lm("bert")
    model.config.model_type = model_type
    with pytest.raises(ValueError, match="cannot be adapted: it .*Missing here: "):
        as_diffusion(model, mask_token_id=MASK)


def test_more_tokens_than_embeddings_are_refused():
    tokenizer = word_tokenizer(bos_token="<s>", eos_token="</s>", mask_token="<m>", pad_token="<p>", sep_token="<x>")
    with pytest.raises(ValueError, match="ids up to 24, but BertForMaskedLM embeds 24.*resize_token_embeddings"):
        as_diffusion(masked_lm("bert"), tokenizer=tokenizer)


def test_an_embedding_and_a_head_of_different_sizes_are_refused():
    model = masked_lm("distilbert", tie_word_embeddings=False)
    model.vocab_projector = torch.nn.Linear(16, V + 2)
    with pytest.raises(ValueError, match="embeds 24 ids, predicts 26 and has vocab_size=24"):
        as_diffusion(model, mask_token_id=MASK)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"kept_token_ids": [-1]},
            r"kept_token_ids=\[-1\] does not fit this model. Needed is a list of ids from 0 to 23",
        ),
        ({"max_length": 17}, "max_length=17: BertForMaskedLM takes 3 to 16 tokens"),
        ({"tokenizer": "bert"}, "tokenizer is 'bert'. Give a tokenizer of transformers"),
        ({"mask_token_id": 3.0}, "mask_token_id=3.0 does not fit"),
        ({"mask_token_id": True}, "mask_token_id=True does not fit"),
    ],
)
def test_impossible_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        as_diffusion(masked_lm("bert"), **{"mask_token_id": MASK} | arguments)


TOLD = {
    "mask_token_id": 23,
    "kept_token_ids": [0, 1],
    "num_tokens": 24,
    "frame": [0, 1],
    "max_length": 16,
    "shift": False,
}


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("mask_token_id", ["2", None, [2], 2.5, True, 24, -1], "mask_token_id=.*(does not fit|outside the vocabulary)"),
        (
            "kept_token_ids",
            ["01", None, {"0": 1}, [0.5], [[0]], [24], 3],
            "kept_token_ids=.* a list of ids from 0 to 23",
        ),
        ("kept_token_ids", [list(range(22))], "leave 1 tokens to predict. At least 3"),
        ("num_tokens", ["24", None, 0, -3, 25, 10**12, 2.5], "num_tokens=.* a whole number from 1 to 24"),
        ("frame", ["ab", 0, [0], {"a": 1, "b": 0}, [0, 24]], "frame=.* two ids from 0 to 23"),
        ("frame", [[23, 1]], "holds the mask"),
        ("max_length", ["16", None, 0, 2, 7.5, [1], 10**12], "max_length="),
        ("shift", ["no", None, [], 1], "shift=.* true or false"),
        ("generation", [[1], None, "x"], "generation=.* an object of settings"),
        ("generation", [{"do_sample": True}], r"Unknown generation settings \['do_sample'\]"),
    ],
)
def test_what_a_file_tells_is_looked_at_before_it_is_used(field, values, message, tmp_path):
    """A huge num_tokens took all memory. Other values ended in IndexError or in a model that writes nonsense."""
    masked_lm("bert").save_pretrained(tmp_path)
    for value in values:
        (tmp_path / ADAPTATION).write_text(json.dumps(TOLD | {field: value}))
        with pytest.raises(ValueError, match=message):
            as_diffusion(BertForMaskedLM.from_pretrained(tmp_path))
    (tmp_path / ADAPTATION).write_text(json.dumps(TOLD))
    assert as_diffusion(BertForMaskedLM.from_pretrained(tmp_path)).longest == 16


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"null", b'"a"', b"\x00", b"\xff\xfe", b"[" * 100_000], ids=lambda x: repr(x)[:8]
)
def test_a_damaged_file_is_named(content, tmp_path):
    masked_lm("bert").save_pretrained(tmp_path)
    (tmp_path / ADAPTATION).write_bytes(content)
    with pytest.raises(ValueError, match="diffusion.json (is damaged|holds)"):
        as_diffusion(BertForMaskedLM.from_pretrained(tmp_path))


def test_anything_but_a_model_of_transformers_is_refused():
    with pytest.raises(ValueError, match="as_diffusion takes a model of transformers, without adapters"):
        as_diffusion(torch.nn.Linear(2, 2), mask_token_id=MASK)
