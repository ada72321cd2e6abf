"""`tokendrift demo`: models in a browser, or the folder of a Space. Heavy libraries are imported once it runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from .fields import spellings

HELP = "show a model beside its base in a browser, step by step"
QUICKSTART, REFINED = Path("recipes/quickstart"), Path("out/quickstart/refined")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Two columns write with the same seed, step by step. Without a model: the quickstart's base and judge, and "
        f"{REFINED} where there is one."
    )
    parser.add_argument("model", nargs="?", help="a directory or a hub id")
    parser.add_argument("base", nargs="?", help="the model that it was refined from, for the column beside it")
    parser.add_argument("--judge", help="model that scores what is written (Gen.-PPL)")
    parser.add_argument("--results", type=Path, help="results.json of the frontier (default: the one beside MODEL)")
    parser.add_argument("--tokenizer", help="if it is not beside the model")
    parser.add_argument("--host", default="127.0.0.1", help="default 127.0.0.1: this machine alone; 0.0.0.0: everyone")
    parser.add_argument("--port", type=int, help="default: the first free one from 7860")
    parser.add_argument(*spellings("max_samples"), type=int, help="texts that a request may ask for (default 4)")
    parser.add_argument(*spellings("max_length"), type=int, help="tokens of a text at most (default 256)")
    parser.add_argument("--space", type=Path, metavar="DIR", help="write the folder of a Space instead (hub ids only)")
    parser.add_argument(
        *spellings("dry_run"), action="store_true", help="with --space: list the files, and write nothing"
    )


def run(options: argparse.Namespace) -> int:
    if options.dry_run and options.space is None:
        raise ValueError("--dry-run lists the files of a Space. Give --space DIR as well.")
    if options.port is not None and not 0 < options.port < 2**16:
        raise ValueError(f"port={options.port}: it must be from 1 to {2**16 - 1}.")
    shown = {name: getattr(options, name) for name in ("judge", "results", "tokenizer", "max_samples", "max_length")}
    if options.space is not None:
        return _write_space(options, shown)
    from ..demo.serving import make_page

    model, base = options.model, options.base
    if model is None:
        model, base, judge = quickstart()
        shown["judge"] = shown["judge"] or judge
    page = make_page(model, base, **shown)
    if options.host in LOOPBACK:
        print(f"Listening at {options.host}: for this machine alone. Give --host 0.0.0.0 to let others in.")
    else:
        print(f"Listening at {options.host}: everyone who reaches this machine can use the page.")
    print(f"The page is at {page.launch(options.host, options.port)}", flush=True)
    page.wait()
    return 0


def quickstart() -> tuple[str, str | None, str]:
    """Model, base and judge of the quickstart, as they lie below the current directory."""
    base, judge = str(QUICKSTART / "base"), str(QUICKSTART / "judge")
    if not Path(base).is_dir():
        raise ValueError(f"There is no {base} here. Name a model: tokendrift demo MODEL [BASE].")
    return (str(REFINED), base, judge) if (REFINED / "config.json").is_file() else (base, None, judge)


def _write_space(options: argparse.Namespace, shown: dict) -> int:
    from ..demo.space import space_files, write_space

    if options.model is None:
        raise ValueError(
            "A Space shows a model of the hub. Name it: tokendrift demo OWNER/MODEL [OWNER/BASE] --space DIR."
        )
    files = space_files(options.model, options.base, **shown)
    if not options.dry_run:
        write_space(files, options.space)
    print(f"{'Would write' if options.dry_run else 'Wrote'} to {options.space}:")
    print("\n".join(f"{len(content):>9} bytes  {name}" for name, content in files.items()))
    print(f"Upload it: hf upload --repo-type space OWNER/SPACE {options.space} .")
    return 0
