"""Gen.-PPL: equal to the recorded evaluation of MDLM and DUO, independent of batching, and hard to fool."""

from __future__ import annotations

import importlib.util
import json
import math
import pydoc_data.topics
import random
import shutil
from collections import Counter

import evaluate
import mauve
import numpy as np
import pytest
import torch
from conftest import FIXTURES, recorded
from safetensors import safe_open
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from tokendrift_hf.metrics import GenPPL
from tokendrift_hf.metrics.gen_ppl.gen_ppl import Judge, degeneracy, diversity, perplexity, token_weights

pytestmark = pytest.mark.filterwarnings("ignore:gen_ppl")

JUDGE = str(FIXTURES / "genppl_tiny_gpt2")
EOS = 100
WORD_CASES = ["plain", "starts_with_eos", "several_eos"]
TEXT_CASES = ["text", "text_two_chunks"]


@pytest.fixture(scope="module")
def gen_ppl():
    return GenPPL(keep_in_memory=True, model_id=JUDGE)


@pytest.fixture(scope="module")
def judge():
    return AutoModelForCausalLM.from_pretrained(JUDGE).eval()


@pytest.fixture(scope="module")
def judge_tokenizer():
    return AutoTokenizer.from_pretrained(JUDGE)


@pytest.fixture(scope="module")
def metrics():
    return recorded("metrics")


@pytest.fixture(scope="module")
def cases():
    with safe_open(FIXTURES / "metrics.safetensors", "pt") as file:
        return json.loads(file.metadata()["json"])["cases"]


def text_of(ids) -> str:
    return " ".join("<|endoftext|>" if i == EOS else f"w{i}" for i in ids)


def twin(judge, rows, counted):
    """exp of the mean of -log p(token | prefix) over the positions listed in `counted`, one call of the judge each."""
    losses = []
    for row, positions in zip(rows, counted, strict=True):
        for position in positions:
            with torch.no_grad():
                logits = judge(torch.tensor([row[:position]])).logits[0, -1].double()
            losses.append(-logits.log_softmax(-1)[row[position]].item())
    return math.exp(sum(losses) / len(losses)), len(losses)


@pytest.mark.parametrize("case", WORD_CASES)
@pytest.mark.parametrize("form", ["tensor of ids", "ids with tokenizer", "text"])
def test_equals_the_recorded_reference_on_ids(gen_ppl, metrics, judge_tokenizer, case, form):
    ids = metrics[f"{case}.ids"]
    predictions = [text_of(row) for row in ids.tolist()] if form == "text" else ids
    tokenizer = judge_tokenizer if form == "ids with tokenizer" else None
    record = gen_ppl.compute(predictions=predictions, tokenizer=tokenizer, per_sample=True)
    assert record["gen_ppl"] == pytest.approx(metrics[f"{case}.gen_ppl"].item(), rel=1e-6)
    assert record["num_tokens"] == metrics[f"{case}.num_tokens"].item()
    nll = sum(sample["nll"] for sample in record["per_sample"])
    assert nll == pytest.approx(metrics[f"{case}.sum_nll"].item(), rel=1e-6)


@pytest.mark.parametrize("case", TEXT_CASES)
@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_equals_the_recorded_reference_on_texts_of_unequal_length(gen_ppl, metrics, cases, case, batch_size):
    """The reference closes short rows of its batch by an EOS; reference_padded does so at every batch size."""
    record = gen_ppl.compute(
        predictions=cases[case]["texts"],
        max_length=cases[case]["max_length"],
        mode="reference_padded",
        batch_size=batch_size,
    )
    assert record["gen_ppl"] == pytest.approx(metrics[f"{case}.gen_ppl"].item(), rel=1e-6)
    assert record["num_tokens"] == metrics[f"{case}.num_tokens"].item()


def test_default_differs_from_the_padded_reference_by_the_padding_only(gen_ppl, judge, metrics, cases):
    """One row of `text` is padded and has no EOS; without that pad the recorded sum is what remains."""
    ids, mask = metrics["text.ids"], metrics["text.attention_mask"]
    end = int(mask[1].sum())
    with torch.no_grad():
        pad_nll = -judge(ids[1:2, :end]).logits[0, -1].double().log_softmax(-1)[EOS].item()
    record = gen_ppl.compute(predictions=cases["text"]["texts"], max_length=32)
    num_tokens = metrics["text.num_tokens"].item() - 1
    assert record["num_tokens"] == num_tokens
    expected = math.exp((metrics["text.sum_nll"].item() - pad_nll) / num_tokens)
    assert record["gen_ppl"] == pytest.approx(expected, rel=1e-6)
    assert record["num_truncated"] == 1


def test_no_sample_is_dropped(gen_ppl, judge, metrics):
    """The reference leaves out the fifth row at batch size 2; here it counts, and the rest equals the record."""
    ids = metrics["batch_remainder_dropped.ids"]
    kept = gen_ppl.compute(predictions=ids[:4], batch_size=2)
    assert kept["gen_ppl"] == pytest.approx(metrics["batch_remainder_dropped.gen_ppl"].item(), rel=1e-6)
    record = gen_ppl.compute(predictions=ids, batch_size=2)
    expected, num_tokens = twin(judge, ids.tolist(), [range(1, 24)] * 5)
    assert (record["num_samples"], record["num_tokens"]) == (5, num_tokens)
    assert record["gen_ppl"] == pytest.approx(expected, rel=1e-5)


def test_add_batch_accumulates_like_the_reference(gen_ppl, metrics):
    gen_ppl.add_batch(predictions=metrics["plain.ids"])
    gen_ppl.add_batch(predictions=metrics["several_eos.ids"])
    gen_ppl.add(prediction=[3, 4, 5])
    gen_ppl.add(prediction=[])
    record = gen_ppl.compute()
    assert (record["num_samples"], record["num_empty"]) == (10, 1)
    gen_ppl.add_batch(predictions=metrics["plain.ids"])
    record = gen_ppl.compute(predictions=metrics["several_eos.ids"])
    assert record["gen_ppl"] == pytest.approx(metrics["accumulated.gen_ppl"].item(), rel=1e-6)


ROWS = [
    [EOS, 5, 6, 7],  # begins with EOS, as samples of packed models do
    [1, 2, 3, EOS, 4, 5, EOS, 6],  # two documents and the start of a third
    [9, 8, 7, EOS, EOS, EOS],  # EOS run at the end
    [11, 12, 13, 14, 15],  # no EOS
    [EOS, EOS, 5, EOS, 6],
    [17],
    [],
]
COUNTED = {
    "reference": [[1, 2, 3], [1, 2, 3, 4, 5, 7], [1, 2, 3], [1, 2, 3, 4], [2, 4], [], []],
    "reference_padded": [[1, 2, 3], [1, 2, 3, 4, 5, 7], [1, 2, 3], [1, 2, 3, 4, 5], [2, 4], [1], []],
    "first_document": [[1, 2, 3], [1, 2, 3], [1, 2, 3], [1, 2, 3, 4], [2, 3], [], []],
    "all_tokens": [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3, 4], [], []],
}


@pytest.mark.parametrize("mode", COUNTED)
def test_hand_counted_tokens_of_every_mode(gen_ppl, judge, mode):
    record = gen_ppl.compute(predictions=[text_of(row) for row in ROWS], mode=mode, per_sample=True)
    closed = [row + [EOS] for row in ROWS] if mode == "reference_padded" else [list(row) for row in ROWS]
    if mode == "first_document":
        closed[4] = closed[4][1:]  # its context starts at the last leading EOS
        expected, num_tokens = twin(judge, closed, COUNTED[mode][:4] + [[1, 2]] + COUNTED[mode][5:])
    else:
        expected, num_tokens = twin(judge, closed, COUNTED[mode])
    assert [sample["num_tokens"] for sample in record["per_sample"]] == [len(c) for c in COUNTED[mode]]
    assert record["num_tokens"] == num_tokens
    assert record["gen_ppl"] == pytest.approx(expected, rel=1e-5)
    assert (record["num_samples"], record["num_empty"], record["mode"]) == (7, 1, mode)


@pytest.mark.parametrize("mode", COUNTED)
def test_no_dependence_on_batch_size_order_or_padding_side(gen_ppl, mode):
    generator = random.Random(0)
    rows = [[generator.randrange(101) for _ in range(generator.randrange(60))] for _ in range(23)] + ROWS
    texts = [text_of(row) for row in rows]
    expected = gen_ppl.compute(predictions=texts, mode=mode, batch_size=1)
    tokenizer = AutoTokenizer.from_pretrained(JUDGE, padding_side="left", truncation_side="left")
    shuffled = random.Random(1).sample(texts, len(texts))
    for predictions, settings in [
        (texts, {"batch_size": 7}),
        (texts, {"batch_size": 64}),
        (shuffled, {"batch_size": 5}),
        (texts, {"model_tokenizer": tokenizer, "batch_size": 8}),
    ]:
        record = gen_ppl.compute(predictions=predictions, mode=mode, **settings)
        for key in ("gen_ppl", "gen_ppl_se", "entropy", "pooled_entropy", "distinct_2", "rep_2"):
            assert record[key] == pytest.approx(expected[key], rel=1e-5), (key, settings)
        assert record["num_tokens"] == expected["num_tokens"]


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_short_and_long_texts_with_a_tokenizer_that_cannot_pad(judge, judge_tokenizer, batch_size):
    """Lengths 1, 50 and 3000 of a judge with window 1024: cut by default, in windows with a larger max_length."""
    generator = random.Random(2)
    texts = [text_of([generator.randrange(100) for _ in range(n)]) for n in (1, 50, 3000)]
    gen_ppl = GenPPL(keep_in_memory=True, model=judge, model_tokenizer=judge_tokenizer)
    cut = gen_ppl.compute(predictions=texts, batch_size=batch_size)
    assert (cut["num_tokens"], cut["num_truncated"], cut["max_length"], cut["window"]) == (49 + 1023, 1, 1024, 1024)
    whole = gen_ppl.compute(predictions=texts, batch_size=batch_size, max_length=4000)
    assert (whole["num_tokens"], whole["num_truncated"]) == (49 + 2 * 1023 + (3000 - 2048 - 1), 0)
    ids = judge_tokenizer(texts[2])["input_ids"]
    by_hand = gen_ppl.compute(predictions=[texts[1], *(text_of(ids[i : i + 1024]) for i in range(0, 3000, 1024))])
    assert whole["gen_ppl"] == pytest.approx(by_hand["gen_ppl"], rel=1e-5)
    assert judge_tokenizer.pad_token is None


def test_a_loaded_judge_gives_the_same_and_is_left_as_it_was(gen_ppl, judge_tokenizer, metrics):
    """As in a training loop: the judge arrives in train mode, under autocast."""
    model = AutoModelForCausalLM.from_pretrained(JUDGE).train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        record = gen_ppl.compute(predictions=metrics["plain.ids"], model=model, model_tokenizer=judge_tokenizer)
    assert record["gen_ppl"] == pytest.approx(metrics["plain.gen_ppl"].item(), rel=1e-6)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_judge_is_loaded_once(gen_ppl, metrics, monkeypatch):
    gen_ppl.compute(predictions=metrics["plain.ids"])
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("loaded again"))
    gen_ppl.compute(predictions=metrics["several_eos.ids"], batch_size=3)


def test_float32_is_the_default_for_a_bfloat16_checkpoint_and_bfloat16_is_close(
    judge, judge_tokenizer, tmp_path, metrics
):
    stored = AutoModelForCausalLM.from_pretrained(JUDGE, dtype=torch.bfloat16)
    stored.save_pretrained(tmp_path)
    judge_tokenizer.save_pretrained(tmp_path)
    gen_ppl = GenPPL(keep_in_memory=True, model_id=str(tmp_path))
    record = gen_ppl.compute(predictions=metrics["plain.ids"])
    assert record["dtype"] == "float32"
    expected, _ = twin(stored.float().eval(), metrics["plain.ids"].tolist(), [range(1, 24)] * 4)
    assert record["gen_ppl"] == pytest.approx(expected, rel=1e-5)
    half = gen_ppl.compute(predictions=metrics["plain.ids"], dtype="bfloat16")
    assert half["dtype"] == "bfloat16"
    assert half["gen_ppl"] == pytest.approx(record["gen_ppl"], rel=0.01)


def test_entropy_equals_the_recorded_one(gen_ppl, metrics):
    record = gen_ppl.compute(predictions=metrics["entropy.ids"], per_sample=True)
    assert record["entropy"] == pytest.approx(metrics["entropy.mean"].item(), rel=1e-6)
    values = [sample["entropy"] for sample in record["per_sample"]]
    assert values == pytest.approx(metrics["entropy.per_sample"].tolist(), rel=1e-6, abs=1e-7)
    assert record["entropy_tokenizer"] == "judge"


def test_diversity_by_hand():
    result = diversity([[1, 2, 1, 2, 1], [3, 4, 5, 6, 7], []])
    expected = {
        "entropy": (-(0.6 * math.log(0.6) + 0.4 * math.log(0.4)) + math.log(5)) / 3,
        "pooled_entropy": -(0.3 * math.log(0.3) + 0.2 * math.log(0.2) + 5 * 0.1 * math.log(0.1)),
        "distinct_1": 7 / 10,
        "distinct_2": 6 / 8,
        "distinct_3": 5 / 6,
        "rep_2": 0.25,  # (1 - 2/4) and 0
        "rep_3": 1 / 6,  # (1 - 2/3) and 0
        "rep_4": 0.0,
    }
    assert result == pytest.approx(expected)


def other_tokenizer(**special) -> PreTrainedTokenizerFast:
    """A tokenizer of the same words as the judge's, under other ids and with its own special tokens."""
    names = [*special.values(), *(f"w{99 - i}" for i in range(100))]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def test_ids_of_another_tokenizer_are_decoded_its_eos_translated_and_its_padding_removed(gen_ppl, metrics):
    """Equal to the recorded value although every id differs; entropy is that of the ids without padding."""
    tokenizer = other_tokenizer(eos_token="</s>", pad_token="<pad>")
    rows = metrics["several_eos.ids"].tolist()
    ids = [[0 if i == EOS else 2 + 99 - i for i in row] for row in rows]
    padded = [[1] * k + row + [1] * (4 - k) for k, row in enumerate(ids)]
    record = gen_ppl.compute(predictions=padded, tokenizer=tokenizer)
    assert record["gen_ppl"] == pytest.approx(metrics["several_eos.gen_ppl"].item(), rel=1e-6)
    assert record["entropy"] == pytest.approx(diversity(rows)["entropy"])
    assert record["entropy_tokenizer"] == "model"
    texts = [" ".join("</s>" if i == EOS else f"w{i}" for i in row) for row in rows]
    from_text = gen_ppl.compute(predictions=texts, tokenizer=tokenizer)
    assert from_text["gen_ppl"] == record["gen_ppl"]
    assert from_text["entropy"] == pytest.approx(record["entropy"])


def test_standard_error_is_that_of_the_bootstrap():
    generator = np.random.default_rng(0)
    num_tokens = generator.integers(20, 200, size=400)
    nll = num_tokens * generator.normal(3.0, 0.5, size=400)
    value, error = perplexity(list(nll), list(num_tokens))
    picks = generator.integers(0, 400, size=(3000, 400))
    bootstrap = np.exp(nll[picks].sum(1) / num_tokens[picks].sum(1))
    assert value == pytest.approx(math.exp(nll.sum() / num_tokens.sum()))
    assert error == pytest.approx(bootstrap.std(), rel=0.06)
    assert perplexity([6.0], [2]) == (pytest.approx(math.exp(3)), None)
    assert perplexity([0.0, 0.0], [0, 0]) == (None, None)


def test_the_record_is_complete_and_plain_json(gen_ppl, metrics):
    with pytest.warns(UserWarning, match="Only 4 samples"):
        record = gen_ppl.compute(predictions=metrics["plain.ids"], per_sample=True)
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    expected = {
        "gen_ppl",
        "gen_ppl_se",
        "entropy",
        "pooled_entropy",
        "distinct_1",
        "rep_2",
        "distinct_rows",
        "num_samples",
    }
    expected |= {"num_tokens", "num_empty", "num_truncated", "degenerate", "degenerate_reasons", "warnings", "mode"}
    expected |= {"judge_id", "judge_revision", "dtype", "max_length", "window", "versions", "per_sample"}
    assert expected <= set(record)
    assert record["judge_id"] == JUDGE
    assert record["judge_revision"].startswith("sha256:")
    assert record["versions"]["torch"] == torch.__version__ and record["versions"]["gen_ppl"] == 2


def test_text_without_a_counted_token_has_no_perplexity_and_is_degenerate(gen_ppl):
    record = gen_ppl.compute(predictions=["", "<|endoftext|> <|endoftext|>", ""])
    assert (record["gen_ppl"], record["gen_ppl_se"], record["num_tokens"], record["num_empty"]) == (None, None, 0, 2)
    assert record["degenerate"] and record["degenerate_reasons"][0].startswith("empty")
    json.dumps(record, allow_nan=False)


def test_without_an_eos_every_token_counts():
    assert token_weights([1, 2, 3], None, "reference").tolist() == [1, 1]


def test_combine_with_another_metric_and_settings_at_construction(metrics):
    short = GenPPL(keep_in_memory=True, model_id=JUDGE, batch_size=2, mode="all_tokens")
    long = GenPPL(keep_in_memory=True, model_id=JUDGE, mode="reference_padded")
    both = evaluate.combine({"all": short, "padded": long}).compute(predictions=metrics["several_eos.ids"])
    assert both["padded_gen_ppl"] == pytest.approx(metrics["several_eos.gen_ppl"].item(), rel=1e-6)
    assert both["all_num_tokens"] == 4 * 23


REAL = [text for text in pydoc_data.topics.topics.values() if len(text.split()) > 400]


def blocks(num_samples: int, length: int, seed: int = 0) -> list[list[str]]:
    """Blocks of consecutive words from different help topics of Python."""
    generator = random.Random(seed)
    rows = []
    for text in generator.sample(REAL, num_samples):
        words = text.split(" ")
        start = generator.randrange(max(1, len(words) - length))
        rows.append(words[start : start + length])
    return rows


def cycle(rows):
    frequent = [w for w, _ in Counter(w for r in rows for w in r if w.strip()).most_common(40)]
    return [[frequent[(k + i) % len(frequent)] for i in range(len(row))] for k, row in enumerate(rows)]


def long_cycle(rows):
    """Longer than one sample: visible only between samples."""
    words = sorted({w for row in rows for w in row if w.strip()})[:200]
    return [[words[(37 * k + i) % len(words)] for i in range(len(row))] for k, row in enumerate(rows)]


def phrase_bank(rows):
    bank = [row[i : i + 6] for row in rows[:5] for i in range(0, 24, 6)]
    generator = random.Random(3)
    return [sum((generator.choice(bank) for _ in range(len(row) // 6)), []) for row in rows]


def mirrored(rows):
    halves = [" ".join(row[: len(row) // 2]).split() for row in rows]
    return [half + half[::-1] for half in halves]


def flags(texts):
    """The reasons found from the text alone."""
    return degeneracy(texts, [[]] * len(texts))


FAKES = {
    "cycle of frequent tokens": (cycle, "repetition"),
    "cycle longer than a sample": (long_cycle, "phrase bank"),
    "one row over the batch": (lambda rows: [rows[0]] * len(rows), "cloned rows"),
    "half of the batch copied": (lambda rows: rows[: len(rows) // 2] * 2, "cloned rows"),
    "half of every row copied": (lambda rows: [row[: len(row) // 2] * 2 for row in rows], "repetition"),
    "half of every row mirrored": (mirrored, "repetition"),
    "half of the rows copied within": (
        lambda rows: [r[: len(r) // 2] * 2 for r in rows[::2]] + rows[1::2],
        "repetition",
    ),
    "phrase bank": (phrase_bank, "phrase bank"),
    "one character": (lambda rows: [["!" * len(row)] for row in rows], "repetition"),
    "few words in random order": (
        lambda rows: [random.Random(i).choices("a of the in".split(), k=200) for i in range(len(rows))],
        "low entropy",
    ),
}


@pytest.mark.parametrize("fake", FAKES)
@pytest.mark.parametrize("length", [90, 400])
def test_text_that_games_the_score_is_flagged(fake, length):
    make, reason = FAKES[fake]
    texts = [" ".join(row) for row in make(blocks(24, length))]
    reasons = flags(texts)
    assert any(r.startswith(reason) for r in reasons), reasons
    assert sorted(flags(texts[::-1])) == sorted(reasons)


def test_rows_of_ids_mirrored_after_a_bos_are_flagged(gen_ppl):
    """Mirroring subwords gives other words, so the ids are looked at as well."""
    generator = random.Random(4)
    pieces = ["".join(generator.choices("abcdefghij", k=3)) + " " * (i % 3 == 0) for i in range(100)]
    halves = [[generator.randrange(100) for _ in range(60)] for _ in range(6)]
    rows = [half + half[::-1] for half in halves]
    texts = ["".join(pieces[i] for i in row) for row in rows]
    assert flags(texts) == []
    assert degeneracy(texts, [[EOS] + row for row in rows])[0].startswith("repetition")
    assert gen_ppl.compute(predictions=[[EOS] + row for row in rows])["degenerate"]


def test_the_flag_reaches_the_record(gen_ppl):
    texts = [" ".join(row) for row in phrase_bank(blocks(24, 90))]
    with pytest.warns(UserWarning, match="phrase bank"):
        record = gen_ppl.compute(predictions=texts)
    assert record["degenerate"] and record["degenerate_reasons"]


@pytest.mark.parametrize("num_samples", [1, 2, 4, 8, 16, len(REAL)])
def test_real_text_is_not_flagged(num_samples):
    """Help topics of Python, whole and in blocks of the lengths that 128 and 1024 tokens have."""
    for seed in range(5):
        for length in (60, 90, 700):
            assert flags([" ".join(row) for row in blocks(num_samples, length, seed)]) == []
    assert flags(random.Random(num_samples).sample(REAL, num_samples)) == []


def test_real_text_is_not_flagged_through_a_judge_that_does_not_know_its_words(gen_ppl):
    """The tiny judge maps every unknown word to one id, so its ids have no entropy; the flags look at the words."""
    record = gen_ppl.compute(predictions=[" ".join(row) for row in blocks(16, 90)])
    assert record["entropy"] < 0.5
    assert not record["degenerate"]


def word_texts(low, high, seed, n=60):
    generator = random.Random(seed)
    return [" ".join(f"w{generator.randrange(low, high)}" for _ in range(generator.randrange(4, 9))) for _ in range(n)]


@pytest.mark.parametrize("form", ["text", "ids"])
def test_mauve_is_that_of_mauve_text_with_its_own_features(gen_ppl, judge_tokenizer, form):
    """The library loads the judge itself and reads its last hidden state; empty texts have none."""
    ours, real = word_texts(0, 40, 0), word_texts(20, 60, 1, n=70)
    expected = mauve.compute_mauve(p_text=ours, q_text=real, featurize_model_name=JUDGE)
    predictions, references = [[*ours, ""], [*real, "", ""]]
    if form == "ids":
        predictions, references = (
            [judge_tokenizer(t)["input_ids"] for t in texts] for texts in (predictions, references)
        )
    with pytest.warns(UserWarning, match="MAUVE of 60 samples and 70 references"):
        record = gen_ppl.compute(predictions=predictions, mauve_references=references, batch_size=7)
    assert record["mauve"] == pytest.approx(expected.mauve, rel=1e-9) and 0.01 < record["mauve"] < 0.999
    settings = record["mauve_settings"]
    assert (settings["num_buckets"], settings["num_predictions"], settings["num_references"]) == (6, 60, 70)
    assert settings["version"].startswith("0.") and settings["mauve_scaling_factor"] == 5 and settings["seed"] == 25
    assert json.loads(json.dumps(record, allow_nan=False)) == record


def test_mauve_of_equal_texts_is_one_and_of_disjoint_ones_near_zero(gen_ppl):
    """Also of equal sets, where the library's own area under the curve is anything from 0.5 to 1."""
    a, b = word_texts(0, 2, 0), word_texts(90, 92, 1)
    assert gen_ppl.compute(predictions=a, mauve_references=a)["mauve"] == pytest.approx(1)
    assert gen_ppl.compute(predictions=a, mauve_references=word_texts(0, 2, 2))["mauve"] > 0.9
    assert gen_ppl.compute(predictions=a, mauve_references=b)["mauve"] < 0.05


def test_mauve_settings_replace_the_defaults_and_references_are_read_once(judge, judge_tokenizer, monkeypatch):
    references = word_texts(0, 40, 0)
    settings = {"num_buckets": 3, "mauve_scaling_factor": 1}
    metric = GenPPL(
        keep_in_memory=True,
        model=judge,
        model_tokenizer=judge_tokenizer,
        mauve_references=references,
        mauve_settings=settings,
    )
    read, features = [], Judge.features
    monkeypatch.setattr(
        Judge, "features", lambda self, rows, size: read.append(len(rows)) or features(self, rows, size)
    )
    first = metric.compute(predictions=word_texts(0, 40, 1, n=50))
    assert settings.items() <= first["mauve_settings"].items()
    metric.compute(predictions=word_texts(0, 40, 2, n=51))
    assert read == [60, 50, 51]
    metric.compute(predictions=references, mauve_references=word_texts(0, 40, 3, n=52))
    assert read[3:] == [52, 60], "other references are not those kept"


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"mauve_references": word_texts(0, 9, 0, n=3)},
            "2 clusters needs at least 4 samples and references.*60 and 3",
        ),
        ({"mauve_references": word_texts(0, 9, 0), "mauve_settings": {"num_buckets": 31}}, "needs at least 62"),
        ({"mauve_settings": {"buckets": 3}}, r"Unknown mauve_settings \['buckets'\]"),
        ({"mauve_references": "w1 w2"}, "mauve_references is 'w1 w2'"),
        ({"mauve_references": []}, r"mauve_references is \[\]"),
    ],
)
def test_mauve_that_cannot_be(gen_ppl, settings, message):
    with pytest.raises(ValueError, match=message):
        gen_ppl.compute(predictions=word_texts(0, 9, 1), **settings)


def test_without_mauve_text_the_error_names_the_extra(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mauve" else find(name))
    with pytest.raises(ImportError, match=r"pip install \"tokendrift-hf\[mauve\]\""):
        GenPPL(keep_in_memory=True, model_id=JUDGE, mauve_references=["w1"])


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"model_id": None}, "No judge is given"),
        ({"model": torch.nn.Linear(1, 1)}, "without model_tokenizer"),
        ({"mode": "best"}, "mode is 'best'. Use one of"),
        ({"dtype": "int8"}, "dtype is 'int8'. Use one of"),
        ({"batch_size": 0}, "batch_size is 0. Use an integer of at least 1"),
        ({"max_length": 1}, "max_length is 1. Use an integer of at least 2"),
        ({"judge": "gpt2"}, r"Unknown settings \['judge'\]"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        GenPPL(keep_in_memory=True, model_id=JUDGE).compute(predictions=["w1 w2"], **settings)


@pytest.mark.parametrize(
    "predictions, message",
    [
        ([], "predictions is empty"),
        ("w1 w2", "single string"),
        (None, "nothing to score"),
    ],
)
def test_bad_predictions(gen_ppl, predictions, message):
    with pytest.raises(ValueError, match=message):
        gen_ppl.compute(predictions=predictions)


def test_a_judge_without_tokenizer_is_a_clear_error(tmp_path):
    """transformers 5 makes an empty GPT-2 tokenizer out of such a folder."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(f"{JUDGE}/{name}", tmp_path)
    with pytest.raises(ValueError, match="Save the tokenizer beside the model"):
        GenPPL(keep_in_memory=True, model_id=str(tmp_path)).compute(predictions=["w1 w2"])


def test_what_is_no_autoregressive_model_is_no_judge(tmp_path):
    AutoTokenizer.from_pretrained(JUDGE).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match="cannot be loaded. It takes an autoregressive model"):
        GenPPL(keep_in_memory=True, model_id=str(tmp_path)).compute(predictions=["w1 w2"])


def test_non_finite_scores_are_an_error(judge_tokenizer):
    broken = AutoModelForCausalLM.from_pretrained(JUDGE)
    with torch.no_grad():
        broken.transformer.ln_f.weight[0] = float("nan")
    with pytest.raises(ValueError, match="non-finite values in float32"):
        GenPPL(keep_in_memory=True, model=broken, model_tokenizer=judge_tokenizer).compute(predictions=["w1 w2"])
