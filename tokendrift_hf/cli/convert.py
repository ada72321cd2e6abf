"""`tokendrift convert`: released and Lightning checkpoints to model directories."""

from __future__ import annotations

import argparse
from pathlib import Path

from .fields import spellings

HELP = "turn a released or Lightning checkpoint into a model directory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="SRC", help="a .ckpt or .safetensors file, or released directory")
    parser.add_argument("destination", type=Path, metavar="DST", help="a directory that does not exist or is empty")
    parser.add_argument("--model", choices=["mdlm", "duo"], help="if nothing in SRC says which it is")
    parser.add_argument(
        *spellings("no_ema"), action="store_true", help="take the raw weights, not their moving average"
    )


def run(options: argparse.Namespace) -> int:
    from ..models.convert import convert

    print(convert(options.source, options.destination, ema=not options.no_ema, model=options.model))
    return 0
