"""The command `tokendrift`: its tasks, and what becomes of their errors."""

from __future__ import annotations

import argparse
import re
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
    except KeyboardInterrupt:
        print(f"tokendrift {options.task}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        message = " ".join(str(error).split())
        if _is_of_the_disk(error):
            message = f"a file of tensors could not be read or written. Is the disk full? ({message})"
        elif not isinstance(error, ValueError | OSError | ImportError):
            raise
        print(f"tokendrift {options.task}: {message}", file=sys.stderr)
        return 2


def _is_of_the_disk(error: Exception) -> bool:
    """Whether weights could not be written: safetensors and torch have errors of their own for a full disk."""
    from safetensors import SafetensorError

    of_torch = isinstance(error, RuntimeError) and re.search("inline_container|PytorchStreamWriter", str(error))
    return isinstance(error, SafetensorError) or bool(of_torch)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokendrift", description=DESCRIPTION)
    tasks = parser.add_subparsers(dest="task", required=True, metavar="COMMAND")
    for name, module in TASKS.items():
        task = tasks.add_parser(name, help=module.HELP, add_help=module is not train)  # which has fields to list
        module.add_arguments(task)
        task.set_defaults(run=module.run, parser=task)  # the parser shows its usage with an error
    return parser
