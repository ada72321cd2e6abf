"""Columns as HTML: tokens with their confidence, what changed, what is still masked, and the figures below."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from itertools import groupby

from transformers import PreTrainedTokenizerBase

from .columns import Column, Columns
from .request import MASK

SHADES = 10  # steps of confidence that the style sheet tells apart
_LONGEST_CHARACTER = 4  # tokens, as many as UTF-8 takes bytes


def pieces(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[slice, str]]:
    """Text cut into the pieces that its tokens stand for: positions, and what is written there.

    A token's text depends on the one before, and a character may take several tokens, which then are one piece.

    Args:
        ids: without masks.
        tokenizer: that wrote them.
    """

    def decode(tokens: Sequence[int]) -> str:
        return tokenizer.decode(tokens, clean_up_tokenization_spaces=False)

    start, context = 0, []
    while start < len(ids):
        stop = start + 1
        text = decode([*context, *ids[start:stop]])
        while text.endswith("\ufffd") and stop < min(len(ids), start + _LONGEST_CHARACTER):
            stop += 1
            text = decode([*context, *ids[start:stop]])
        yield slice(start, stop), text[len(decode(context)) if context else 0 :]
        start, context = stop, list(ids[start:stop])


def shade(probability: float) -> int:
    """0 (a thousandth or less) to SHADES - 1 (about half or more), in even steps of the logarithm."""
    return min(max(int(SHADES * (1 + math.log10(max(probability, 1e-9)) / 3)), 0), SHADES - 1)


def column_html(title: str, name: str, column: Column | None, tokenizer: PreTrainedTokenizerBase) -> str:
    """A whole column: its title, its texts, its figures.

    Masks are blocks and the prompt is bold. The less sure a token, the stronger its colour. What changed in the last
    step is underlined.

    Args:
        title: of the column.
        name: of its model.
        column: what the model has written, None at the start.
        tokenizer: of the model.
    """
    heading = f'<h3 class="td-title">{title} <small>{html.escape(name)}</small></h3>'
    if column is None:
        return f'{heading}<div class="td-text td-empty">Nothing written yet.</div>'
    texts = []
    for row in range(len(column.tokens)):
        number = f'<span class="td-number">{row + 1}</span>' if len(column.tokens) > 1 else ""
        texts.append(f'<div class="td-text">{number}{"".join(_spans(column, row, tokenizer))}</div>')
    return f"{heading}{''.join(texts)}{_figures(column)}"


def _spans(column: Column, row: int, tokenizer: PreTrainedTokenizerBase) -> Iterator[str]:
    ids, position = column.tokens[row].tolist(), 0
    confidence, changed, kept = column.confidence[row].tolist(), column.changed[row].tolist(), column.kept.tolist()
    for masked, run in groupby(ids, lambda token: token == column.mask_id):
        run = list(run)
        for place, text in [] if masked else pieces(run, tokenizer):
            at = range(position + place.start, position + place.stop)
            known = [confidence[i] for i in at if not (kept[i] or math.isnan(confidence[i]))]
            classes = ["td-kept"] if all(kept[i] for i in at) else []
            classes += ["td-new"] if any(changed[i] for i in at) else []
            classes += [f"td-c{shade(min(known))}"] if known else []
            hint = f' title="{min(known):.2%} sure"' if known else ""
            yield f'<span class="{" ".join(classes)}"{hint}>{html.escape(text)}</span>'
        if masked:
            yield f'<span class="td-mask" title="{len(run)} not written yet">{MASK * len(run)}</span>'
        position += len(run)


def _figures(column: Column) -> str:
    """The figures below a column, of which a draft has the first three."""
    finished = column.calls is not None
    shown = {"T": f"{column.temperature:g}", "seconds": f"{column.seconds:.2f}"}
    shown |= (
        {"calls": f"{column.calls}", "entropy": f"{column.entropy:.3f}"}
        if finished
        else {"step": f"{column.num_steps}"}
    )
    notes = []
    if column.gen_ppl is not None:
        value, error = column.gen_ppl["gen_ppl"], column.gen_ppl["gen_ppl_se"]
        shown["Gen.-PPL"] = "no text" if value is None else f"{value:.1f}" + (f" ± {error:.1f}" if error else "")
        notes = [f'<p class="td-note">Degenerate: {html.escape(x)}.</p>' for x in column.gen_ppl["degenerate_reasons"]]
    cells = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in shown.items())
    return f'<dl class="td-figures">{cells}</dl>{"".join(notes)}'


def status_html(text: str, wrong: bool = False) -> str:
    """A sentence about what the page is doing, or what is wrong, which a screen reader reads out."""
    kind, role = (" td-wrong", "alert") if wrong else ("", "status")
    return f'<p class="td-status{kind}" role="{role}">{html.escape(text)}</p>'


def legend_html() -> str:
    """What colours and marks mean."""
    colours = "".join(f'<span class="td-c{shade(p)}">{p:.1%} sure</span>' for p in (0.001, 0.01, 0.1))
    return (
        f'<p class="td-legend"><span><span class="td-mask">{MASK}{MASK}</span> not written yet</span>{colours}'
        '<span class="td-new">changed in this step</span><span class="td-kept">prompt</span></p>'
    )


def about_markdown(columns: Columns, names: Mapping[str, str]) -> str:
    """What the models are, how small, and how to read the page."""
    lines = []
    for title, model in columns.models.items():
        kind = "uniform-state diffusion" if model.process.mask_id is None else "masked diffusion"
        lines.append(
            f"- **{title}**: `{names[title]}`, {kind} ({type(model).__name__}), {model.num_parameters():,} parameters, "
            f"texts of at most {model.longest} tokens"
        )
    text = (files(__package__) / "about.md").read_text(encoding="utf-8")
    limits = {"num_samples": columns.limits.num_samples, "num_steps": columns.limits.num_steps}
    return text.format(lines="\n".join(lines), length=columns.length, **limits)
