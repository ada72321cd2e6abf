"""The embedded corpus: the documentation that every installation of this package carries.

Docstrings and help topics of the standard library and of the installed torch, transformers, numpy, datasets,
accelerate and what those bring along. Files are parsed, never imported, so reading them runs no code. Nothing is
downloaded or redistributed. The text depends on the installed versions: another release of a package gives a slightly
different corpus, so figures are comparable within one environment.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import importlib.util
import inspect
import logging
import os
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

import datasets

logger = logging.getLogger(__name__)

# sympy, another dependency of torch, is left out: a fifth of the corpus would be sums and matrices.
PACKAGES = (
    "torch", "transformers", "numpy", "datasets", "accelerate",
    "huggingface_hub", "networkx", "pandas", "pyarrow", "fsspec",
)  # fmt: skip
# Upper ends of the parts on [0, 1). The judge learns from files that neither refinement nor validation ever sees.
PARTS = {"train": 0.52, "validation": 0.56, "judge": 0.96, "reference": 1.0}

_TOPICS = "help topics"
_SKIPPED_FOLDERS = {"test", "tests", "site-packages", "__pycache__", "idle_test", "lib2to3", "pydoc_data"}
_DOCUMENTING_CALL = re.compile(r"add_?docstr$|add_newdoc$")
_SHINGLE = 8  # words
_MIN_FRESH_CHARACTERS = 60


def load_documentation() -> datasets.DatasetDict:
    """The corpus in four parts that share no file and no paragraph: train, validation, judge, reference.

    Returns:
        `datasets.DatasetDict` with columns `text` and `source` (package and path of a file, or a help topic), one row
        per file: about 16 MB in all. Takes 20 to 40 seconds on two CPUs at first use. Afterwards it is read from the
        `datasets` cache, whose key holds the versions of Python and of the packages.
    """
    versions = {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}
    logger.info("documentation corpus of Python %s and %s", platform.python_version(), versions)
    key = {
        "python": platform.python_version(),
        "packages": versions,
        "rules": hashlib.sha256(Path(__file__).read_bytes()).hexdigest(),
    }
    parsed = datasets.Dataset.from_generator(
        _parsed_rows,
        gen_kwargs={"files": _files(), "key": key},
        features=datasets.Features({"source": datasets.Value("string"), "texts": [datasets.Value("string")]}),
        num_proc=min(8, os.cpu_count() or 1),
    )
    fresh = datasets.Dataset.from_generator(_fresh_rows, gen_kwargs={"parsed": parsed, "key": key})
    part = [part_of(source) for source in fresh["source"]]
    return datasets.DatasetDict({name: fresh.select([i for i, p in enumerate(part) if p == name]) for name in PARTS})


def part_of(source: str) -> str:
    """The part a source belongs to: a function of its name alone, so a new version moves no file between parts."""
    position = int.from_bytes(hashlib.sha256(source.encode()).digest()[:8], "big") / 2**64
    return next(part for part, end in PARTS.items() if position < end)


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a module's source text in the order of the file, with indentation cleaned.

    Includes the texts attached by calls of torch's `add_docstr` and numpy's `add_newdoc`.

    Raises:
        SyntaxError, ValueError: from `ast.parse`, for a text that is not Python.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        stack: list[ast.AST] = [ast.parse(source)]
    while stack:
        node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            if _DOCUMENTING_CALL.search(ast.unparse(node.value.func)):
                for part in ast.walk(node.value):
                    if isinstance(part, ast.Constant) and isinstance(part.value, str) and "\n" in part.value:
                        yield inspect.cleandoc(part.value)
        stack.extend(reversed(getattr(node, "body", [])) if isinstance(node, ast.stmt | ast.Module) else ())


def drop_repeated_paragraphs(text: str, seen: set[int]) -> str:
    """`text` without the paragraphs of which more than half of the runs of eight words are in `seen`. Adds to `seen`.

    Argument descriptions are copied between hundreds of docstrings. Without this the same sentences would stand on
    both sides of the split. Paragraphs under eight words, such as "Returns:", stay unless what follows them goes.
    Returns "" when the new paragraphs have under 60 characters in all.
    """
    kept: list[str] = []
    headings: list[str] = []
    fresh_characters = 0
    for paragraph in re.split(r"\n\s*\n", text):
        words = re.sub(r"[\W\d_]+", " ", paragraph.lower()).split()
        shingles = {hash(tuple(words[i : i + _SHINGLE])) for i in range(len(words) - _SHINGLE + 1)}
        if not shingles:
            headings.append(paragraph)
            continue
        if 2 * len(shingles & seen) <= len(shingles):
            kept += [*headings, paragraph]
            fresh_characters += len(paragraph)
        headings = []
        seen |= shingles
    return "\n\n".join(kept + headings).strip() if fresh_characters >= _MIN_FRESH_CHARACTERS else ""


def _files() -> list[tuple[str, str]]:
    """(source, path) of every file, in a fixed order."""
    roots = {"python": Path(sysconfig.get_paths()["stdlib"])}
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec and spec.submodule_search_locations:
            roots[name] = Path(spec.submodule_search_locations[0])
    files = [(_TOPICS, "")]
    for package, root in roots.items():
        for path in sorted(root.rglob("*.py")):
            relative = path.relative_to(root)
            if _SKIPPED_FOLDERS.isdisjoint(relative.parts):
                files.append((f"{package}/{relative.as_posix()}", str(path)))
    return files


def _parsed_rows(files: list[tuple[str, str]], key: dict) -> Iterator[dict]:
    """One row per file, with all its docstrings. `key` only enters the fingerprint of the cache."""
    for source, path in files:
        if source == _TOPICS:
            from pydoc_data.topics import topics

            for name in sorted(topics):
                yield {"source": f"{_TOPICS}/{name}", "texts": [topics[name]]}
            continue
        try:
            texts = list(docstrings(Path(path).read_text(encoding="utf-8")))
        except (SyntaxError, ValueError):
            logger.info("left out, not Python in UTF-8: %s", path)
            continue
        if texts:
            yield {"source": source, "texts": texts}


def _fresh_rows(parsed: datasets.Dataset, key: dict) -> Iterator[dict]:
    """One row per file that says something new. `key` only enters the fingerprint of the cache."""
    seen: set[int] = set()
    for row in parsed:
        kept = [text for text in (drop_repeated_paragraphs(text, seen) for text in row["texts"]) if text]
        if kept:
            yield {"text": "\n\n".join(kept), "source": row["source"]}
