"""The command `tokendrift`: its tasks, and what becomes of their errors."""

from __future__ import annotations

import argparse
import sys

from . import convert, demo, evaluate, generate, train

DESCRIPTION = "Refine discrete diffusion language models with TokenDrift."
TASKS = {"train": train, "generate": generate, "evaluate": evaluate, "convert": convert, "demo": demo}


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return the exit status. A bad input is one clear line on stderr and status 2."""
    options, rest = build_parser().parse_known_args(argv)
    if rest and "rest" not in options:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest
    print("Loading libraries ...", file=sys.stderr, flush=True)
    try:
        from .. import _register

        _register()
        return options.run(options)
    except (ValueError, OSError, ImportError) as error:
        print(f"tokendrift {options.task}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"tokendrift {options.task}: interrupted", file=sys.stderr)
        return 130


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokendrift", description=DESCRIPTION)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="COMMAND")
    for name, module in TASKS.items():
        task = tasks.add_parser(name, help=module.HELP, add_help=module is not train)  # which has fields to list
        module.add_arguments(task)
        task.set_defaults(run=module.run, parser=task)  # the parser shows its usage with an error
    return parser
