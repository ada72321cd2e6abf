"""The command `tokendrift`: train, generate, evaluate, convert. Heavy libraries are imported once a task is clear."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path

from .recipe import field_help

DESCRIPTION = "Refine discrete diffusion language models with TokenDrift."


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status. A bad input is one clear line on stderr and status 2."""
    parser = build_parser()
    options, rest = parser.parse_known_args(argv)
    if rest and options.command != "train":
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    print("Loading libraries ...", file=sys.stderr, flush=True)
    try:
        from .. import _register

        _register()
        return options.run(options, rest)
    except (ValueError, OSError, ImportError) as error:
        print(f"tokendrift {options.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"tokendrift {options.command}: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokendrift", description=DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="refine a model as a recipe says, and evaluate it",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Refine a model as a recipe says, train the matched continuation beside it if the recipe asks for\n"
        "it, sample and score all of them, and write the models, a table, a plot and results.json.",
        epilog=field_help(),
    )
    train.add_argument("recipe", type=Path, metavar="RECIPE.yaml")
    train.add_argument("--resume", action="store_true", help="go on with the run in output_dir")
    train.add_argument(
        "--push-to-hub", "--push_to_hub", nargs="?", const="true", help="upload the result to hub_model_id"
    )
    train.add_argument(
        "--dry-run", action="store_true", help="say what it would cost and what a push would upload, and stop"
    )
    train.set_defaults(run=run_train)

    generate = commands.add_parser("generate", help="sample text from a model")
    generate.add_argument("model", help="a directory or a hub id")
    generate.add_argument("--prompt", help="text to continue")
    generate.add_argument("--num-samples", type=int, default=1, help="how many (default 1)")
    generate.add_argument("--num-steps", type=int, help="sampling steps (default: the model's setting, else 16)")
    generate.add_argument("--max-new-tokens", type=int, help="after the prompt (default: up to the model's length)")
    generate.add_argument("--stride", type=int, help="write text longer than the model in windows this far apart")
    generate.add_argument("--sampler", help="sampler of generate() (default: the model's, else ancestral)")
    generate.add_argument(
        "--temperature", type=float, help="of the clean-token prediction; 0 is greedy (default: the model's, else 1)"
    )
    generate.add_argument("--top-k", type=int, help="keep the k likeliest tokens")
    generate.add_argument("--top-p", type=float, help="keep the likeliest tokens that hold this much probability")
    generate.add_argument("--seed", type=int, default=0, help="equal seeds give equal text (default 0)")
    generate.add_argument("--tokenizer", help="if it is not beside the model")
    generate.add_argument("--watch", action="store_true", help="show the text taking shape in the terminal")
    generate.add_argument("--output", type=Path, help="write samples and settings to this .jsonl file")
    generate.set_defaults(run=run_generate)

    evaluate = commands.add_parser("evaluate", help="sample and score models over steps, temperatures and seeds")
    evaluate.add_argument("models", nargs="+", metavar="MODEL", help="directories or hub ids (LABEL=MODEL names a row)")
    evaluate.add_argument("--judge", default="gpt2-large", help="model that scores (default gpt2-large)")
    evaluate.add_argument("--num-steps", type=int, nargs="+", default=[4, 8, 16], help="default 4 8 16")
    evaluate.add_argument(
        "--temperatures", type=float, nargs="+", default=[1.0], help="default 1.0; several give the frontier"
    )
    evaluate.add_argument("--seeds", type=int, default=3, help="how many sampling seeds (default 3)")
    evaluate.add_argument("--num-samples", type=int, default=256, help="for each cell (default 256)")
    evaluate.add_argument("--sampler", default="ancestral", help="sampler of generate() (default ancestral)")
    evaluate.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the network")
    evaluate.add_argument("--batch-size", type=int, default=32, help="samples drawn at a time (default 32)")
    evaluate.add_argument("--tokenizer", help="if it is not beside the models")
    evaluate.add_argument(
        "--text",
        help="real text (documentation, openwebtext, a file, a hub data set): adds its own "
        "line, Gen.-PPL at its entropy, and the NELBO perplexity of every model",
    )
    evaluate.add_argument("--text-split", help="split of --text (default validation, for files train)")
    evaluate.add_argument("--mauve", action="store_true", help="MAUVE against --text (needs tokendrift-hf[mauve])")
    evaluate.add_argument(
        "--match", nargs=2, metavar=("A", "B"), help="labels: sample A at B's entropy too, by its temperature"
    )
    evaluate.add_argument("--paper", metavar="N", help="print table N (1 to 6) of the paper beside the results")
    evaluate.add_argument("--n-mc", type=int, default=1, help="noise draws a row for the NELBO (default 1)")
    evaluate.add_argument("--output-dir", type=Path, default=Path("evaluation"), help="default evaluation; resumable")
    evaluate.set_defaults(run=run_evaluate)

    convert = commands.add_parser("convert", help="turn a released or Lightning checkpoint into a model directory")
    convert.add_argument("source", type=Path, metavar="SRC", help="a .ckpt or .safetensors file, or released directory")
    convert.add_argument("destination", type=Path, metavar="DST", help="a directory that does not exist or is empty")
    convert.add_argument("--model", choices=["mdlm", "duo"], help="if nothing in SRC says which it is")
    convert.add_argument("--no-ema", action="store_true", help="take the raw weights, not their moving average")
    convert.set_defaults(run=run_convert)
    for command in commands.choices.values():
        command.set_defaults(parser=command)  # whose usage an error shows
    return parser


def flags(rest: list[str]) -> dict[str, str]:
    """["--max_steps", "3", "--num_steps", "4", "8"] -> {"max_steps": "3", "num_steps": "[4, 8]"}, values as YAML."""
    given: dict[str, list[str]] = {}
    name = None
    for word in rest:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given[name] = [value] if equals else []
        elif name is None:
            raise ValueError(f"unexpected argument {word!r}; fields are given as --field value.")
        else:
            given[name].append(word)
    for name, words in given.items():
        if not words:
            raise ValueError(f"--{name} needs a value, e.g. --{name} VALUE.")
    return {name: words[0] if len(words) == 1 else f"[{', '.join(words)}]" for name, words in given.items()}


def run_train(options: argparse.Namespace, rest: list[str]) -> int:
    from .recipe import read_recipe
    from .train import refine

    logging.basicConfig(format="%(message)s")
    logging.getLogger("tokendrift_hf").setLevel(logging.INFO)  # what packing dropped, which checkpoint is resumed, ...
    pushed = {} if options.push_to_hub is None else {"push_to_hub": options.push_to_hub}
    recipe, arguments = read_recipe(options.recipe, flags(rest) | pushed)
    refine(recipe, arguments, resume=options.resume, dry_run=options.dry_run)
    return 0


def run_generate(options: argparse.Namespace, rest: list[str]) -> int:
    import torch

    from ..data.packing import row_ends
    from ..models.loading import load_model, load_tokenizer
    from .watch import Watch

    if options.output is not None and options.output.exists():
        raise ValueError(f"{options.output} exists, and nothing is overwritten. Name another --output.")
    if options.watch and options.num_samples != 1:
        raise ValueError(f"--watch shows one text, but --num-samples is {options.num_samples}.")
    model = load_model(options.model)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(options.tokenizer or options.model)
    settings = {
        name: getattr(options, name)
        for name in ("num_steps", "max_new_tokens", "stride", "sampler", "temperature", "top_k", "top_p")
        if getattr(options, name) is not None
    }
    inputs = {"num_samples": options.num_samples, "seed": options.seed}
    if options.prompt:
        bos, _ = row_ends(tokenizer)  # with which every row begins that a model was trained on
        prompt = tokenizer(options.prompt, add_special_tokens=False)["input_ids"]
        inputs["input_ids"] = torch.tensor([[bos, *prompt]])
        if "max_new_tokens" not in settings:
            settings["max_length"] = model.config.max_position_embeddings
    if options.watch:
        inputs["callback"] = watch = Watch(tokenizer, getattr(model.process, "mask_id", None))
    output = model.generate(**inputs, **settings, return_dict_in_generate=True)
    if options.watch:
        watch.end()
    start = 1 if options.prompt else 0
    texts = tokenizer.batch_decode([row[start:n] for row, n in zip(output.sequences, output.lengths, strict=True)])
    record = {"model": options.model, "seed": options.seed, "num_forward_calls": output.num_forward_calls}
    record |= {name: value for name, value in output.settings.items() if value is not None}
    if options.output is None:
        print("\n\n".join(texts))
    else:
        lines = [json.dumps({"text": text, "index": i} | record, ensure_ascii=False) for i, text in enumerate(texts)]
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{len(texts)} samples in {options.output}")
    return 0


def run_evaluate(options: argparse.Namespace, rest: list[str]) -> int:
    from datetime import timedelta

    import torch
    from accelerate import PartialState

    from ..data import load_text, pack_documents
    from ..evaluation.comparison import evaluate_models
    from ..evaluation.grid import Harness
    from ..evaluation.report import paper_rows, write_report
    from ..files import write_json
    from ..models.loading import load_judge, load_model, load_tokenizer

    named = {}
    for argument in options.models:
        label, equals, path = argument.partition("=")
        named[label if equals else Path(argument).name] = path if equals else argument
    if len(named) < len(options.models):
        raise ValueError(f"Two models have one label in {options.models}. Name them: LABEL=MODEL.")
    for name in ("seeds", "num_samples", "batch_size", "n_mc"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(options, name)}: it must be at least 1.")
    if options.match is not None and (set(options.match) - set(named) or 1 not in options.temperatures):
        raise ValueError(f"--match {' '.join(options.match)}: two of {list(named)}, sampled at temperature 1 as well.")
    if options.mauve and options.text is None:
        raise ValueError("--mauve compares samples with real text. Name it with --text.")
    if options.paper is not None:
        paper_rows(options.paper, options.num_steps)
    results = {"models": named, "judge": options.judge}
    _refuse_other_content(options.output_dir, results)
    # A process may wait for the others as long as a cell takes, not ten minutes.
    state = PartialState(cpu=not torch.accelerator.is_available(), timeout=timedelta(days=1))
    models = {label: load_model(path).to(state.device) for label, path in named.items()}
    tokenizer = load_tokenizer(options.tokenizer or next(iter(named.values())))
    text = None
    if options.text is not None:  # read now, like the judge, so that a wrong one is noticed before any sampling
        length = next(iter(models.values())).config.max_position_embeddings
        with state.main_process_first():  # the others find the packed rows in the cache
            split = options.text_split or ("train" if Path(options.text).exists() else "validation")
            blocks = pack_documents(load_text(options.text, split=split), tokenizer, length)
        text = blocks[: options.num_samples]["input_ids"]
    judge = load_judge(options.judge, state.device) | ({"mauve_references": text} if options.mauve else {})
    cells = options.output_dir / "cells"
    harness = Harness(models, tokenizer, judge, cells, options.batch_size, options.dtype, options.sampler)
    grid = (options.num_steps, options.temperatures, options.seeds, options.num_samples)
    results |= evaluate_models(harness, *grid, text=text, num_draws=options.n_mc, match=options.match)
    if state.is_main_process:
        print(write_report(results, options.output_dir, options.paper))
        write_json(options.output_dir / "results.json", results)
    return 0


def _refuse_other_content(folder: Path, asked: dict) -> None:
    """Raise ValueError if the folder holds anything but an evaluation of these models by this judge."""
    from ..training.checkpoint import changed_settings

    path = folder / "results.json"
    if path.is_file():
        before = json.loads(path.read_text(encoding="utf-8"))
        if changed_settings(before, asked):
            raise ValueError(
                f"{path} holds the results of {'other models' if 'models' in before else 'a training'}, and nothing is "
                "overwritten. Name another --output-dir."
            )
    elif folder.is_dir() and any(folder.iterdir()) and not (folder / "cells").is_dir():
        raise ValueError(f"{folder} holds something else than an evaluation. Name another --output-dir.")


def run_convert(options: argparse.Namespace, rest: list[str]) -> int:
    from ..models.convert import convert

    print(convert(options.source, options.destination, ema=not options.no_ema, model=options.model))
    return 0
