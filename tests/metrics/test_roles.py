"""From a model's ids to what the judge reads: special tokens by their role, and ids that stand for no text."""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from toys import word_tokenizer
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from tokendrift_hf.metrics import GenPPL
from tokendrift_hf.metrics.gen_ppl.gen_ppl import Judge, tokenize

pytestmark = pytest.mark.filterwarnings("ignore:gen_ppl")


def judge_of(tokenizer) -> Judge:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=8, n_layer=1, n_head=1)
    return Judge(GPT2LMHeadModel(config).eval(), tokenizer)


MODELS = {
    "bos and eos": word_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>", mask_token="<mask>"),
    "one end": word_tokenizer(bos_token="<|end|>", eos_token="<|end|>", pad_token="<|end|>"),
    "cls and sep": word_tokenizer(cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", mask_token="[MASK]"),
    "eos alone": word_tokenizer(eos_token="</s>", pad_token="<pad>"),
}
JUDGES = {
    "bos and eos": word_tokenizer(bos_token="<s>", eos_token="</s>"),
    "bos and eos, added": word_tokenizer("<s> $A </s>", bos_token="<s>", eos_token="</s>"),
    "bos, added": word_tokenizer("[B] $A", bos_token="[B]", eos_token="[E]"),
    "one end": word_tokenizer(bos_token="<|end|>", eos_token="<|end|>"),
    "one end, added in front": word_tokenizer("</s> $A", bos_token="</s>", eos_token="</s>"),
    "eos alone": word_tokenizer(eos_token="<eos>"),
    "none": word_tokenizer(unk_token="<unk>"),
}


def ids_of(tokenizer, *items) -> list[int]:
    """Roles and numbers of words to ids: ("bos", 3, "eos") -> [0, 5, 1]. A role that is not there is left out."""
    stand_in = {"bos": "cls", "eos": "sep"}
    tokens = [
        f"w{item}" if isinstance(item, int) else getattr(tokenizer, f"{item}_token")
        or getattr(tokenizer, f"{stand_in.get(item, item)}_token")
        for item in items
    ]  # fmt: skip
    return tokenizer.convert_tokens_to_ids([token for token in tokens if token is not None])


@pytest.mark.parametrize("form", ["ids", "text"])
@pytest.mark.parametrize("judge", JUDGES)
@pytest.mark.parametrize("model", MODELS)
def test_every_role_of_a_model_is_that_of_the_judge(model, judge, form):
    """A row with bos and two eos, one without either, and a padded one, for every pair of tokenizers."""
    ours, theirs = MODELS[model], JUDGES[judge]
    rows = [("bos", 1, 2, "eos", 3, "eos"), (4, 5), ("pad", "pad", "bos", 6, "mask", 7, "pad")]
    if model == "one end":
        rows[2] = ("bos", 6, 7)  # its padding is its eos, which stays
    predictions = [ids_of(ours, *row) for row in rows]
    if form == "text":
        predictions = ours.batch_decode(predictions)
    added = theirs("w0")["input_ids"]
    in_front = "bos" if added[0] != theirs.convert_tokens_to_ids("w0") else None
    behind = "eos" if added[-1] != theirs.convert_tokens_to_ids("w0") else None
    opens = in_front or (None if model == "eos alone" else "bos")
    expected = [(opens, 1, 2, "eos", 3, "eos"), (in_front, 4, 5, behind), (opens, 6, 7, behind)]
    expected = [ids_of(theirs, *(item for item in row if item is not None)) for row in expected]
    assert tokenize(predictions, judge_of(theirs), ours)[1] == expected


def test_a_bos_that_the_judge_adds_is_not_there_twice():
    """Eight rows of one tokenizer: the likelihood is over 8 tokens fewer than with two bos, and is that by hand."""
    tokenizer = word_tokenizer("<s> $A", bos_token="<s>", eos_token="</s>")
    judge = judge_of(tokenizer)
    rows = [ids_of(tokenizer, "bos", *range(i, i + 8)) for i in range(8)]
    metric = GenPPL(keep_in_memory=True, model=judge.model, model_tokenizer=tokenizer, tokenizer=tokenizer)
    record = metric.compute(predictions=rows)
    losses = []
    for row in rows:
        log_p = judge.model(torch.tensor([row])).logits[0].double().log_softmax(-1)
        losses += [-log_p[i - 1, row[i]].item() for i in range(1, len(row))]
    assert record["num_tokens"] == len(losses) == 64
    assert record["gen_ppl"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-6)
    assert metric.compute(predictions=tokenizer.batch_decode(rows))["gen_ppl"] == record["gen_ppl"]
    assert metric.compute(predictions=tokenizer.batch_decode(rows), tokenizer=None)["gen_ppl"] == record["gen_ppl"]


@pytest.mark.parametrize("form", ["ids", "text"])
def test_markers_of_a_model_do_not_reach_a_judge_of_pieces_as_text(form, text_judge):
    """The quickstart's tokenizer would spell <s> in three pieces. The scores are those of its own marker."""
    theirs = text_judge["model_tokenizer"]
    ours = AutoTokenizer.from_pretrained(theirs.name_or_path, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    assert len(theirs("<s>")["input_ids"]) == 3
    texts = ["Return the name of the object and its size.", "Raise an error if there is no name."]
    marked = [f"<s>{text}</s><pad><pad>" for text in texts]
    predictions = marked if form == "text" else [ours(text, add_special_tokens=False)["input_ids"] for text in marked]
    metric = GenPPL(keep_in_memory=True, **text_judge)
    record = metric.compute(predictions=predictions, tokenizer=ours, per_sample=True)
    end = theirs.eos_token
    expected = metric.compute(predictions=[f"{end}{text}{end}" for text in texts], per_sample=True)
    assert record["gen_ppl"] == expected["gen_ppl"]
    assert [s["nll"] for s in record["per_sample"]] == [s["nll"] for s in expected["per_sample"]]


@pytest.mark.parametrize("tokenizer", ["the model's", "the judge's"])
def test_ids_that_stand_for_no_text_are_left_out_and_counted(tokenizer):
    """Beyond the vocabulary, as the id that DUO has more than its tokenizer, and below it."""
    ours = word_tokenizer(bos_token="<s>", eos_token="</s>")
    settings = {} if tokenizer == "the judge's" else {"tokenizer": ours}
    metric = GenPPL(keep_in_memory=True, model=judge_of(ours).model, model_tokenizer=ours, **settings)
    outside = len(ours)
    rows = [[0, 5, outside, 6, 7, 1], [outside] * 4, [0, 8, -100, 9, 10, outside + 99, 1]]
    with pytest.warns(UserWarning, match="7 ids were left out"):
        record = metric.compute(predictions=rows)
    clean = metric.compute(predictions=[[0, 5, 6, 7, 1], [], [0, 8, 9, 10, 1]])
    assert (record["num_left_out"], clean["num_left_out"]) == (7, 0)
    for name in ("gen_ppl", "num_tokens", "entropy", "distinct_2", "num_empty"):
        assert record[name] == clean[name], name


def test_masks_left_in_a_sample_are_counted():
    ours = MODELS["bos and eos"]
    metric = GenPPL(keep_in_memory=True, model=judge_of(ours).model, model_tokenizer=ours, tokenizer=ours)
    record = metric.compute(predictions=[ids_of(ours, "bos", 1, "mask", 2, "mask", 3, "eos")])
    assert record["num_left_out"] == 2
    assert record["num_tokens"] == metric.compute(predictions=[ids_of(ours, "bos", 1, 2, 3, "eos")])["num_tokens"]


def test_samples_of_nothing_else_have_no_perplexity_and_end_nothing():
    """A model collapsed to the id that its tokenizer lacks: the record says so, and the run goes on."""
    ours = word_tokenizer(bos_token="<s>", eos_token="</s>")
    metric = GenPPL(keep_in_memory=True, model=judge_of(ours).model, model_tokenizer=ours, tokenizer=ours)
    record = metric.compute(predictions=[[len(ours)] * 6] * 3)
    assert (record["gen_ppl"], record["num_left_out"], record["num_empty"]) == (None, 18, 3)
    assert record["degenerate"]


def test_ids_with_a_hole_below_them_are_known():
    """A vocabulary whose last id lies beyond its size."""
    ours = word_tokenizer(eos_token="</s>")
    model = Tokenizer(models.WordLevel({"</s>": 0, "w1": 1, "w2": 40}))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    holes = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")
    texts, _, _, num_left_out = tokenize([[1, 40, 17]], judge_of(ours), holes)
    assert (texts, num_left_out) == (["w1 w2"], 1)


def test_references_of_mauve_are_read_as_samples_are():
    """Ids of the model with masks and ids outside it, in samples and references alike."""
    ours = MODELS["bos and eos"]
    judge = judge_of(word_tokenizer("[B] $A", bos_token="[B]", eos_token="[E]"))
    settings = dict(model=judge.model, model_tokenizer=judge.tokenizer, tokenizer=ours)
    rows = [ids_of(ours, "bos", *(i % 7 + j for j in range(5)), "eos") for i in range(12)]
    noisy = [[len(ours), *row[:3], ours.mask_token_id, *row[3:], ours.pad_token_id] for row in rows]
    metric = GenPPL(keep_in_memory=True, mauve_settings={"num_buckets": 2}, **settings)
    one = metric.compute(predictions=rows, mauve_references=rows[::-1])
    other = metric.compute(predictions=noisy, mauve_references=noisy[::-1])
    assert one["mauve"] == pytest.approx(other["mauve"])
