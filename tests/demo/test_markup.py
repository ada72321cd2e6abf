"""Columns as HTML: nothing is lost, nothing is executed, and every mark has its class."""

from __future__ import annotations

import html
import re
from importlib.resources import files

import pytest
import torch

from tokendrift_hf.demo.columns import Column
from tokendrift_hf.demo.markup import SHADES, column_html, pieces, shade

TEXTS = ["Return the key.\n    default: None", "naïve café “quotes” — 日本語 🎉🎉", "  two  spaces\t", "<b>&amp;</b>"]


@pytest.fixture(scope="module")
def tokenizer(text_model):
    return text_model[1]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    cut = list(pieces(ids, tokenizer))
    assert "".join(piece for _, piece in cut) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert [i for place, _ in cut for i in range(len(ids))[place]] == list(range(len(ids)))
    assert all(piece for _, piece in cut)


def test_a_character_of_several_tokens_is_one_piece(tokenizer):
    ids = tokenizer("🎉")["input_ids"]
    assert len(ids) > 1
    assert list(pieces(ids, tokenizer)) == [(slice(0, len(ids)), "🎉")]


def test_random_tokens_lose_nothing(tokenizer):
    """Noise holds bytes that are no text; every token still belongs to one piece."""
    ids = torch.randint(len(tokenizer), (200,), generator=torch.Generator().manual_seed(0)).tolist()
    cut = list(pieces(ids, tokenizer))
    assert [i for place, _ in cut for i in range(len(ids))[place]] == list(range(len(ids)))
    shown, decoded = "".join(piece for _, piece in cut), tokenizer.decode(ids)
    assert shown.replace("\ufffd", "") == decoded.replace("\ufffd", "")


def column(tokenizer, text: str, *, masks: int = 0, confidence=None, kept: int = 0, changed=(), **figures) -> Column:
    ids = tokenizer(text)["input_ids"] + [len(tokenizer)] * masks
    row = torch.tensor([ids])
    confidence = torch.tensor([confidence or [float("nan")] * len(ids)])
    is_changed = torch.tensor([[i in changed for i in range(len(ids))]])
    is_kept = torch.arange(len(ids)) < kept
    return Column(row, len(tokenizer), confidence, is_changed, is_kept, 1.0, 3, 0.25, **figures)


def body(shown: str) -> str:
    """The text as a reader sees it."""
    return html.unescape(re.sub(r"<[^>]+>", "", shown.partition("</h3>")[2].partition("<dl")[0]))


def test_markup_in_texts_and_names_is_text(tokenizer):
    hostile = '<script>alert("x")</script><img src=x onerror=alert(1)>'
    shown = column_html("Base", hostile, column(tokenizer, hostile), tokenizer)
    assert "<script" not in shown and "<img" not in shown
    assert body(shown) == hostile


def test_masks_prompt_change_and_confidence_are_marked(tokenizer):
    text = " of the key"
    n = len(tokenizer(text)["input_ids"])
    assert n == 3
    drawn = column(tokenizer, text, masks=4, kept=1, changed=[1], confidence=[0.5, 0.001, 0.99] + [float("nan")] * 4)
    spans = re.findall(
        r'<span class="([^"]*)"(?: title="([^"]*)")?>([^<]*)</span>', column_html("", "", drawn, tokenizer)
    )
    assert spans == [
        ("td-kept", "", " of"),
        ("td-new td-c0", "0.10% sure", " the"),
        (f"td-c{SHADES - 1}", "99.00% sure", " key"),
        ("td-mask", "4 not written yet", "░░░░"),
    ]


def test_surer_tokens_have_higher_shades_and_each_has_a_style():
    shades = [shade(p) for p in (0.0, 1e-4, 1e-3, 1e-2, 0.1, 0.4, 0.9, 1.0)]
    assert shades == sorted(shades) and shades[0] == 0 and shades[-1] == SHADES - 1
    css = (files("tokendrift_hf.demo") / "page.css").read_text()
    strengths = [float(x) for x in re.findall(r"\.td-c\d \{ background: rgba\(234, 88, 12, ([.\d]+)\)", css)]
    assert len(strengths) == SHADES - 1 and strengths == sorted(strengths, reverse=True)
    assert "http" not in css and "url(" not in css and "@import" not in css


def test_figures_of_a_draft_and_of_a_finished_text(tokenizer):
    draft = column_html("", "", column(tokenizer, "of"), tokenizer)
    assert dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", draft)) == {"T": "1", "seconds": "0.25", "step": "3"}
    record = {"gen_ppl": 123.45, "gen_ppl_se": 6.78, "degenerate_reasons": ["cloned rows: 1 distinct samples of 2"]}
    finished = column(tokenizer, "of", calls=4, entropy=1.5, gen_ppl=record)
    shown = column_html("", "", finished, tokenizer)
    figures = {"T": "1", "seconds": "0.25", "calls": "4", "entropy": "1.500", "Gen.-PPL": "123.5 ± 6.8"}
    assert dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", shown)) == figures
    assert "Degenerate: cloned rows" in shown


def test_several_texts_are_numbered(tokenizer):
    one = column(tokenizer, "of")
    two = Column(*(x.repeat(2, 1) if torch.is_tensor(x) and x.dim() == 2 else x for x in vars(one).values()))
    assert re.findall(r'td-number">(\d)<', column_html("", "", two, tokenizer)) == ["1", "2"]
    assert "td-number" not in column_html("", "", one, tokenizer)
