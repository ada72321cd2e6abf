"""Models by name, on a page: what `tokendrift demo` and the app of a Space call."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from ..models.loading import load_judge, load_model, load_tokenizer
from .columns import ALONE, BASE, REFINED, Columns
from .frontier import RESULTS, Results, read_results
from .page import Page
from .request import Limits

logger = logging.getLogger(__name__)


def make_page(
    model: str,
    base: str | None = None,
    *,
    judge: str | None = None,
    results: str | Path | None = None,
    tokenizer: str | None = None,
    max_samples: int | None = None,
    max_length: int | None = None,
) -> Page:
    """Load everything and lay out the page. On a GPU where there is one.

    Args:
        model: directory or hub id: the right column, or the only one.
        base: the model that it was refined from: the left column.
        judge: autoregressive model that scores what is written.
        results: a results.json for the frontier. Default: the one beside a model's directory, where
            `tokendrift train` leaves it.
        tokenizer: if it is not beside the model.
        max_samples, max_length: texts that a request may ask for, and tokens of a text. Default: those of `Limits`.

    Raises:
        ValueError: one of them is not there or does not fit the others.
    """
    given = {"num_samples": max_samples, "length": max_length}
    limits = Limits(**{name: value for name, value in given.items() if value is not None})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sources = {ALONE: model} if base is None else {BASE: base, REFINED: model}
    names = {title: Path(name).name if Path(name).is_absolute() else name for title, name in sources.items()}
    frontier = read_results(Path(results)) if results is not None else _results_beside(Path(model))
    models = {title: load_model(name, tokenizer=tokenizer).to(device).eval() for title, name in sources.items()}
    scorer = None if judge is None else load_judge(judge, device)
    columns = Columns(models, load_tokenizer(tokenizer or model), scorer, limits)
    return Page(columns, names, frontier)


def _results_beside(model: Path) -> Results | None:
    path = model.parent / RESULTS
    if not (model.is_dir() and path.is_file()):
        return None
    try:
        return read_results(path)
    except ValueError as error:  # nobody asked for them
        logger.warning("The page shows no frontier: %s", error)
        return None
