"""`tokendrift train`: refine a model as a recipe says. Heavy libraries are imported once it runs."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from .fields import documented_fields, spellings

HELP = "refine a model as a recipe says, and evaluate it"
DESCRIPTION = (
    "Refine a model as a recipe says, train the matched continuation beside it if the recipe asks for\n"
    "it, sample and score all of them, and write the models, a table, a plot and results.json."
)


def field_help() -> str:
    """Every field of a recipe, for `tokendrift train --help`."""
    here = Path(__file__).parent
    lines = [
        "Fields of a recipe. Each is also a flag, whose value is YAML: --num_steps 4 8 --lora '{r: 4}' --judge null",
        *documented_fields(here / "recipe.py"),
        *documented_fields(here.parent / "evaluation" / "sampling.py"),
        "",
        "Fields of the training (DriftConfig)",
        *documented_fields(here.parent / "training" / "drift_config.py"),
        "",
        "and every field of transformers' TrainingArguments (max_steps, per_device_train_batch_size, bf16, seed,",
        "save_steps, hub_model_id, ...), which this prints: python -m pydoc transformers.TrainingArguments",
    ]
    return "\n".join(lines)


class _HelpWithFields(argparse.Action):
    """--help, with the fields of a recipe: they are read from source files only when somebody asks."""

    def __init__(self, option_strings, dest):
        super().__init__(option_strings, dest, nargs=0, help="show this help message and exit")

    def __call__(self, parser, namespace, values, option_string=None):
        parser.epilog = field_help()
        parser.print_help()
        parser.exit()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = DESCRIPTION, argparse.RawDescriptionHelpFormatter
    parser.add_argument("-h", "--help", action=_HelpWithFields, dest=argparse.SUPPRESS)
    parser.add_argument("recipe", type=Path, metavar="RECIPE.yaml")
    parser.add_argument("--resume", action="store_true", help="go on with the run in output_dir")
    parser.add_argument(*spellings("push_to_hub"), nargs="?", const="true", help="upload the result to hub_model_id")
    parser.add_argument(
        *spellings("dry_run"),
        action="store_true",
        help="do two steps, say what the run would cost and what a push would upload, and leave nothing",
    )
    parser.set_defaults(rest=[])  # what the parser does not know: fields of the recipe


def run(options: argparse.Namespace) -> int:
    from ..training.stopping import TrainingStopped, ended_by_signals
    from .folder import is_saved, run_folder
    from .recipe import read_recipe
    from .rehearsal import rehearse
    from .run import Run, refine

    logging.basicConfig(format="%(message)s")
    logging.getLogger("tokendrift_hf").setLevel(logging.INFO)  # what packing dropped, which checkpoint is resumed, ...
    pushed = {} if options.push_to_hub is None else {"push_to_hub": options.push_to_hub}
    recipe, arguments = read_recipe(options.recipe, field_flags(options.rest) | pushed)
    again = "Begin it anew." if options.dry_run else "The same command with --resume goes on."
    try:
        with ended_by_signals():
            if options.dry_run:
                rehearse(Run.open(recipe, arguments, resume=options.resume))
            else:
                refine(recipe, arguments, resume=options.resume)
    except TrainingStopped as stop:
        print(f"tokendrift train: {stop} {again}", file=sys.stderr)
        return stop.code
    except KeyboardInterrupt:
        saved = not options.dry_run and is_saved(run_folder(arguments))
        if not options.dry_run:
            again = f"The same command with --resume {'goes on from the last save' if saved else 'begins anew'}."
        print(f"tokendrift train: Interrupted. {'' if saved else 'Nothing was saved. '}{again}", file=sys.stderr)
        return 130
    return 0


def field_flags(rest: list[str]) -> dict[str, str]:
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
        if words in ([], [""]):  # such as an unset variable of a shell, which would count as null
            raise ValueError(f"--{name} needs a value, e.g. --{name} VALUE.")
    return {name: words[0] if len(words) == 1 else f"[{', '.join(words)}]" for name, words in given.items()}
