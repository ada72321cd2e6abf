"""What a visitor of the page asks for: checked against what the page allows, and put into the words of `generate()`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase

from ..data.packing import row_ends
from ..hub.samplers_tokendrift import is_number, is_whole

MASK = "░"  # how the page shows a position that is not written yet
GAP_TOKENS = 8
_GAP = re.compile(rf"\[gap(?: (\d{{1,6}}))?\]|{MASK}+")
_CHARACTERS_A_TOKEN = 20  # a longer prompt is refused without asking the tokenizer, which could take long


@dataclass(frozen=True)
class Limits:
    """The most that one request may ask for.

    Attributes:
        num_samples: texts.
        length: tokens of a text, its prompt included.
        num_steps: sampling steps.
    """

    num_samples: int = 4
    length: int = 256
    num_steps: int = 64

    def __post_init__(self):
        for name, least in (("num_samples", 1), ("length", 2), ("num_steps", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"The limit {name} is {getattr(self, name)}. It must be at least {least}.")


@dataclass(frozen=True)
class Request:
    """What both columns write.

    Attributes:
        prompt: text to continue, or text with gaps to fill. A gap is "[gap 12]" for 12 tokens, "[gap]" for 8, or
            one mask of the page for each token. Empty: write freely.
        num_samples, num_steps, temperature, seed, sampler: of `generate()`.
    """

    prompt: str = ""
    num_samples: int = 1
    num_steps: int = 8
    temperature: float = 1.0
    seed: int = 0
    sampler: str = "ancestral"

    def check(self, limits: Limits, samplers: Collection[str]) -> None:
        """Raise ValueError, in words for the page, if a value is missing, impossible or beyond the limits."""
        for name, value, least, most in (
            ("texts", self.num_samples, 1, limits.num_samples),
            ("steps", self.num_steps, 1, limits.num_steps),
            ("seed", self.seed, 0, 2**32 - 1),
        ):
            if not is_whole(value, least) or value > most:
                raise ValueError(f"{_said(name, value)}. Give a whole number from {least} to {most}.")
        if not is_number(self.temperature) or not 0 <= self.temperature <= 2:
            raise ValueError(f"{_said('temperature', self.temperature)}. Give a number from 0 (greedy) to 2.")
        if self.sampler not in samplers:
            raise ValueError(f"sampler = {self.sampler}. Give one of {', '.join(samplers)}.")

    def canvas(
        self, tokenizer: PreTrainedTokenizerBase, length: int, reserved: Collection[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What `generate()` starts from: ids and which of them are kept, both [1, L], with zeros where it writes.

        A prompt with gaps is as long as it is. Another one goes on to `length`. Without a prompt nothing is kept.

        Args:
            tokenizer: of the models.
            length: most tokens of a text.
            reserved: ids that no prompt may hold, such as the mask.

        Raises:
            ValueError: too long, or a reserved id, in words for the page.
        """
        if len(self.prompt) > _CHARACTERS_A_TOKEN * length:
            raise ValueError(
                f"The prompt has {len(self.prompt)} characters, too many for the {length} tokens of a text here. "
                "Shorten it."
            )
        if not self.prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in self.prompt):
            raise ValueError("The prompt holds half a character (a lone surrogate), which is no text. Delete it.")
        pieces = list(self._pieces(tokenizer)) if self.prompt.strip() else []
        has_gap = any(isinstance(piece, int) for piece in pieces)
        if pieces:
            pieces.insert(0, [row_ends(tokenizer)[0]])  # with which every row begins that a model was trained on
        total = sum(piece if isinstance(piece, int) else len(piece) for piece in pieces)
        if total > length - (not has_gap):
            none_left = "" if has_gap else " and leaves nothing to write"
            raise ValueError(f"The prompt takes {total} of the {length} tokens of a text here{none_left}. Shorten it.")
        if not has_gap:
            pieces.append(length - total)
        ids, kept = [], []
        for piece in pieces:
            tokens = [0] * piece if isinstance(piece, int) else piece
            ids, kept = ids + tokens, kept + [int(tokens is piece)] * len(tokens)
        forbidden = [token for token, keep in zip(ids, kept, strict=True) if keep and token in reserved]
        if forbidden:
            raise ValueError(
                f"The prompt holds {tokenizer.decode(forbidden[:1])!r}, which stands for what is not written yet. "
                f"Mark a gap with [gap {GAP_TOKENS}] instead."
            )
        return torch.tensor([ids]), torch.tensor([kept])

    def _pieces(self, tokenizer: PreTrainedTokenizerBase) -> Iterator[list[int] | int]:
        """The ids of the text between the gaps, and the number of tokens of each gap, in their order."""
        start, gaps = 0, list(_GAP.finditer(self.prompt))
        for gap in [*gaps, None]:
            text = self.prompt[start : gap.start()] if gap else self.prompt[start:]
            if gap or not gaps:
                text = text.rstrip(" ")  # the word that follows brings its own space
            if text:
                yield tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            if gap:
                yield int(gap[1] or GAP_TOKENS) if gap[0].startswith("[") else len(gap[0])
                start = gap.end()


def _said(name: str, value) -> str:
    """What a visitor has set a control to, in one short line."""
    return f"{name} is empty" if value is None else f"{name} = {str(value)[:40]}"
