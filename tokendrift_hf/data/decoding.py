"""Token ids back to text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase


def ids_to_suppress(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Ids that `generate(suppress_tokens=)` keeps out: the model's own setting, and ids that the tokenizer lacks."""
    suppressed = set(model.generation_config.suppress_tokens or ())
    if tokenizer is not None:
        suppressed |= set(range(model.config.vocab_size)) - set(tokenizer.get_vocab().values())
    return sorted(suppressed)


def check_one_vocabulary(models: Mapping[str, PreTrainedModel]) -> None:
    """Raise ValueError if the models, by their labels, cannot be of one tokenizer. The mask counts as no token."""
    sizes = {label: m.config.vocab_size - (m.process.mask_id is not None) for label, m in models.items()}
    if len(set(sizes.values())) > 1:
        raise ValueError(f"The models have different numbers of tokens, so different tokenizers: {sizes}.")


def decode(tokenizer: PreTrainedTokenizerBase, rows: Iterable[Sequence[int]]) -> tuple[list[str], list[int]]:
    """The text of every row of ids, and how many of its ids were left out because the tokenizer does not know them.

    A model can have ids that its tokenizer lacks: the mask of MDLM, one more in the released DUO. `GenPPL`, in a file
    that stands alone, reads samples by the same rule.
    """
    known = set(tokenizer.get_vocab().values())
    kept, num_left_out = [], []
    for row in rows:
        ids = [int(token) for token in row]
        kept.append([token for token in ids if token in known])
        num_left_out.append(len(ids) - len(kept[-1]))
    return tokenizer.batch_decode(kept, clean_up_tokenization_spaces=False), num_left_out
