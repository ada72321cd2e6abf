"""Libraries that only some tasks need, asked for before the work begins, so that none is missing at its end."""

from __future__ import annotations

import importlib.util


def need(library: str, extra: str, task: str) -> None:
    """Look whether a library is installed.

    Args:
        library: its name in an import.
        extra: the one of this package that brings it.
        task: what needs it, as the subject of a sentence.

    Raises:
        ImportError: it is not, and how to install it.
    """
    if importlib.util.find_spec(library) is None:
        raise ImportError(f'{task} needs {library}: pip install "tokendrift-hf[{extra}]".')
