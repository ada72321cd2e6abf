"""Chat templates: what a user says as ids that a chat model continues, and the ids that end its answer."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

# Ends of a turn in the templates of Qwen and Dream, of LLaDA and Llama, of LLaDA-MoE.
TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|role_end|>")


def chat_rows(tokenizer: PreTrainedTokenizerBase, messages: list[str]) -> list[list[int]]:
    """For each message the ids of a conversation in which a user has said it and the assistant is to answer.

    Raises:
        ValueError: the tokenizer has no chat template.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "The tokenizer has no chat template, so nothing says how this model marks who speaks. Give --prompt, or a "
            "model that was trained to chat."
        )
    conversations = [[{"role": "user", "content": message}] for message in messages]
    texts = tokenizer.apply_chat_template(conversations, add_generation_prompt=True, tokenize=False)
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def chat_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end an answer: end of text, and the ends of a turn that the tokenizer has.

    Raises:
        ValueError: the tokenizer has none of them.
    """
    vocabulary = tokenizer.get_vocab()
    ends = {vocabulary[token] for token in TURN_ENDS if token in vocabulary}
    ends |= {id_ for id_ in (tokenizer.eos_token_id, tokenizer.sep_token_id) if id_ is not None}
    if not ends:
        raise ValueError("The tokenizer has no end of text, which ends answers. Set tokenizer.eos_token.")
    return sorted(ends)
