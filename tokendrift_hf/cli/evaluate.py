"""`tokendrift evaluate`: sample and score models over a grid. Heavy libraries are imported once it runs."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from pathlib import Path

from ..evaluation.sampling import Sampling
from ..files import check_folder, read_json, write_json
from .fields import add_options, from_options, spellings

HELP = "sample and score models over steps, temperatures and seeds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="directories or hub ids (LABEL=MODEL names a row)")
    parser.add_argument("--judge", default="gpt2-large", help="model that scores (default gpt2-large)")
    add_options(parser, Sampling)
    parser.add_argument("--tokenizer", help="if it is not beside the models")
    parser.add_argument(
        *spellings("max_length"),
        type=int,
        help="tokens of a sample of models of other families that do not say it (default: their own limit)",
    )
    parser.add_argument(
        *spellings("trust_remote_code"), action="store_true", help="run the code beside the models (LLaDA, Dream)"
    )
    parser.add_argument(
        "--text",
        help="real text (documentation, openwebtext, a file, a hub data set): adds its own line, Gen.-PPL at its "
        "entropy, and the NELBO perplexity of every model",
    )
    parser.add_argument(*spellings("text_split"), help="split of --text (default validation, for files train)")
    parser.add_argument("--mauve", action="store_true", help="MAUVE against --text (needs tokendrift-hf[mauve])")
    parser.add_argument(
        *spellings("match_entropy"),
        nargs="+",
        default=[],
        metavar="LABEL",
        help="sample the first MODEL also at the temperatures that give it the entropy of these models",
    )
    parser.add_argument(*spellings("n_mc"), type=int, default=1, help="noise draws a row for the NELBO (default 1)")
    parser.add_argument(
        *spellings("output_dir"), type=Path, default=Path("evaluation"), help="default evaluation; resumable"
    )


def run(options: argparse.Namespace) -> int:
    from datetime import timedelta

    import torch
    from accelerate import PartialState

    from ..data import load_text, pack_documents
    from ..data.packing import spread_rows
    from ..evaluation.comparison import check_matches, evaluate_models
    from ..evaluation.grid import Harness, check_label
    from ..evaluation.report import PLOT, write_report
    from ..extras import need
    from ..lock import locked_by_first
    from ..models.loading import load_judge, load_model, load_tokenizer

    named = {}
    for argument in options.models:
        label, equals, path = argument.partition("=")
        named[label if equals else Path(argument).name] = path if equals else argument
    if len(named) < len(options.models):
        raise ValueError(f"Two models have one label in {options.models}. Name them: LABEL=MODEL.")
    for label in named:
        check_label(label)
    options.output_dir = Path(os.path.expanduser(options.output_dir))
    sampling = from_options(Sampling, options)
    sampling.check_steps()
    if options.n_mc < 1:
        raise ValueError(f"n_mc={options.n_mc}: it must be a whole number of at least 1.")
    check_matches(options.match_entropy, next(iter(named)), named, sampling.temperatures)
    if options.mauve and options.text is None:
        raise ValueError("--mauve compares samples with real text. Name it with --text.")
    need("matplotlib", "eval", PLOT)
    results = {"models": named, "judge": options.judge}
    _refuse_other_content(options.output_dir, results)
    # A process may wait for the others as long as a cell takes, not ten minutes.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=1))
    how = {name: getattr(options, name) for name in ("tokenizer", "max_length", "trust_remote_code")}
    models = {label: load_model(path, **how).to(state.device) for label, path in named.items()}
    tokenizer = load_tokenizer(options.tokenizer or next(iter(named.values())), options.trust_remote_code)
    text = None
    if options.text is not None:  # read now, like the judge, so that a wrong one is noticed before any sampling
        length = next(iter(models.values())).longest
        with state.main_process_first():  # the others find the packed rows in the cache
            split = options.text_split or ("train" if Path(options.text).exists() else "validation")
            blocks = pack_documents(load_text(options.text, split=split), tokenizer, length)
        text = spread_rows(blocks, sampling.num_samples)
    judge = load_judge(options.judge, state.device) | ({"mauve_references": text} if options.mauve else {})
    with locked_by_first(options.output_dir):
        _refuse_other_content(options.output_dir, results)  # which may have come while the models were loaded
        harness = Harness(models, tokenizer, judge, options.output_dir / "cells", sampling)
        comparison = evaluate_models(harness, text, options.n_mc, options.match_entropy)
        if state.is_main_process:
            print(write_report(comparison, options.output_dir))
            write_json(options.output_dir / "results.json", results | asdict(comparison))
        state.wait_for_everyone()
    return 0


def _refuse_other_content(folder: Path, asked: dict) -> None:
    """Raise ValueError if the folder holds anything but an evaluation of these models by this judge."""
    from ..lock import LOCK

    check_folder("output_dir", folder)
    path = folder / "results.json"
    if path.is_file():
        before = read_json(path)
        if any(before.get(name) != value for name, value in asked.items()):
            raise ValueError(
                f"{path} holds the results of {'other models' if 'models' in before else 'a training'}, and nothing is "
                "overwritten. Name another --output-dir."
            )
    elif folder.is_dir() and {path.name for path in folder.iterdir()} - {LOCK} and not (folder / "cells").is_dir():
        raise ValueError(f"{folder} holds something else than an evaluation. Name another --output-dir.")
