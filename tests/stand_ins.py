"""Tiny models with random weights that keep the contract of larger families, and a tokenizer of theirs."""

from __future__ import annotations

import json

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from tokendrift_hf import as_diffusion

V = 24  # 0 pad, 1 cls, 2 sep, 3 mask, then tokens
PAD, CLS, SEP, MASK = range(4)
SPECIAL = {"mask_token_id": MASK, "kept_token_ids": [PAD, CLS, SEP], "frame": (CLS, SEP)}

# The names under which configurations know one and the same size.
SIZES = {
    **dict.fromkeys(("hidden_size", "embedding_size", "dim"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("intermediate_size", "hidden_dim"), 24),
    "vocab_size": V,
    "max_position_embeddings": 16,
    "pad_token_id": PAD,
    "bos_token_id": CLS,
    "cls_token_id": CLS,
    "eos_token_id": SEP,
    "sep_token_id": SEP,
    "mask_token_id": MASK,
}


def tiny_config(model_type: str, **changes):
    known = AutoConfig.for_model(model_type)
    return AutoConfig.for_model(model_type, **{k: v for k, v in SIZES.items() if hasattr(known, k)} | changes)


def randomised(model, seed: int = 0):
    """Every weight random, so that no part of the model is the identity or zero; in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return model.eval()


def masked_lm(model_type: str, seed: int = 0, **changes):
    """A tiny masked language model of transformers, as its own class."""
    return randomised(AutoModelForMaskedLM.from_config(tiny_config(model_type, **changes)), seed)


def some_ids(rows: int = 2, length: int = 12, seed: int = 0) -> torch.Tensor:
    """[rows, length]: [CLS], tokens and masks, [SEP]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(MASK, V, (rows, length), generator=generator)
    ids[:, 0], ids[:, -1] = CLS, SEP
    return ids


def tiny_tokenizer(words: int = V - 4):
    """A tokenizer of whole words, w4 w5 ..., with the special tokens of BERT at the ids above."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"[PAD]": PAD, "[CLS]": CLS, "[SEP]": SEP, "[MASK]": MASK}
    vocabulary |= {f"w{i}": i for i in range(4, 4 + words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w4"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def text_rows(count: int, length: int = 12) -> list[dict]:
    """Rows of [CLS], tokens that count upwards from a random one, [SEP]."""
    starts = torch.randint(V - 4, (count,), generator=torch.Generator().manual_seed(0))
    ids = (starts[:, None] + torch.arange(length)) % (V - 4) + 4
    ids[:, 0], ids[:, -1] = CLS, SEP
    return [{"input_ids": row.tolist()} for row in ids]


def decoder(model_type: str, seed: int = 0, is_causal: bool | None = False, **changes):
    """A tiny decoder of transformers; is_causal: None leaves it out of the configuration, as in released files."""
    config = tiny_config(model_type, **changes)
    if is_causal is not None:
        config.is_causal = is_causal
    return randomised(AutoModelForCausalLM.from_config(config), seed)


def adapted(model_type: str):
    """A tiny model of one of the families as a diffusion model, without dropout."""
    if model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return as_diffusion(decoder(model_type), mask_token_id=MASK)
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    quiet = {name: 0.0 for name in names if hasattr(tiny_config(model_type), name)}
    return as_diffusion(masked_lm(model_type, **quiet), **SPECIAL)


TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: {target}
output_type: {kind}
{more}
"""


def write_tasks(folder) -> None:
    """Two tasks of lm-evaluation-harness as files: tiny_choice, with choices, and tiny_free, answers of one token."""
    data = [{"question": f"w{i} w{i + 1}", "choices": [f"w{i + 2}", "w4"], "answer": f"w{i + 2}"} for i in (5, 6, 7)]
    (folder / "data.json").write_text("\n".join(map(json.dumps, data)))
    free = "generation_kwargs: {until: ['w99'], max_gen_toks: 1, do_sample: false}\n"
    free += "metric_list: [{metric: exact_match}]"
    choice = 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]'
    for name, kind, target, more in (
        ("tiny_choice", "multiple_choice", "0", choice),
        ("tiny_free", "generate_until", '"{{answer}}"', free),
    ):
        text = TASK.format(name=name, data=folder / "data.json", kind=kind, target=target, more=more)
        (folder / f"{name}.yaml").write_text(text)
