"""Markdown in which what users name is text and never markup."""

from __future__ import annotations

import re
from collections.abc import Sequence

# Letters, digits, signs without a meaning, underscores between letters, and nothing that becomes a link by itself.
PLAIN = re.compile(r"(?!.*www\.)(?:[^\W_]|(?<=[^\W_])_(?=[^\W_])|[ .,=()+-])+", re.IGNORECASE)


def quoted(value) -> str:
    """A code span in one line, in which nothing of the value is markup, also in the cell of a table."""
    text = " ".join(str(value).split()).replace("|", r"\|") or " "
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence} {text} {fence}" if "`" in text else f"{fence}{text}{fence}"


def shown(value: str) -> str:
    """A label as it is where it is words and numbers alone, in which nothing can be markup, else as a code span."""
    return value if PLAIN.fullmatch(value) else quoted(value)


def table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells as a table, the first one as its header. No cell holds a bar or a line break of its own."""
    header, *body = lines
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, ["---"] * len(header), *body))
