"""`tokendrift generate`: sample text from a model. Heavy libraries are imported once it runs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .fields import spellings

HELP = "sample text from a model"
SAMPLING_FLAGS = ("num_steps", "max_new_tokens", "block_length", "stride", "sampler", "temperature", "top_k", "top_p")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="a directory or a hub id")
    parser.add_argument(
        "--prompt",
        action="append",
        default=[],
        help="text to continue, up to the end of the document; may be there several times",
    )
    parser.add_argument(
        "--chat",
        action="append",
        default=[],
        help="what a user says, in the tokenizer's chat template; may be there several times",
    )
    parser.add_argument(*spellings("num_samples"), type=int, default=1, help="how many, of each prompt (default 1)")
    parser.add_argument(
        *spellings("num_steps"), type=int, help="sampling steps (default: the model's setting, else 16)"
    )
    parser.add_argument(
        *spellings("max_new_tokens"), type=int, help="after the prompt (default: up to the model's length)"
    )
    parser.add_argument(
        *spellings("block_length"), type=int, help="write in blocks of so many tokens from left to right (LLaDA's way)"
    )
    parser.add_argument("--stride", type=int, help="write text longer than the model in windows this far apart")
    parser.add_argument("--sampler", help="sampler of generate() (default: the model's, else ancestral)")
    parser.add_argument(
        "--temperature", type=float, help="of the clean-token prediction; 0 is greedy (default: the model's, else 1)"
    )
    parser.add_argument(*spellings("top_k"), type=int, help="keep the k likeliest tokens")
    parser.add_argument(
        *spellings("top_p"), type=float, help="keep the likeliest tokens that hold this much probability"
    )
    parser.add_argument("--seed", type=int, default=0, help="equal seeds give equal text (default 0)")
    parser.add_argument("--tokenizer", help="if it is not beside the model")
    parser.add_argument(
        *spellings("trust_remote_code"), action="store_true", help="run the code beside the model (LLaDA, Dream)"
    )
    parser.add_argument("--watch", action="store_true", help="show the text taking shape in the terminal")
    parser.add_argument("--output", type=Path, help="write samples and settings to this .jsonl file")


def run(options: argparse.Namespace) -> int:
    import torch

    from ..data.decoding import decode, ids_to_suppress
    from ..models.loading import load_model, load_tokenizer
    from .watch import Watch

    prompts, num_rows = _check(options)
    trusted = options.trust_remote_code
    model = load_model(options.model, tokenizer=options.tokenizer, trust_remote_code=trusted)
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(options.tokenizer or options.model, trusted)
    settings = {name: getattr(options, name) for name in SAMPLING_FLAGS if getattr(options, name) is not None}
    inputs = {"num_samples": num_rows, "seed": options.seed, "suppress_tokens": ids_to_suppress(model, tokenizer)}
    if prompts:
        rows, ends = _prompt_rows(options, tokenizer, prompts)
        inputs |= _padded(rows)
        settings |= {"trim_eos": True, "eos_token_id": ends}
        if "max_new_tokens" not in settings:
            settings["max_length"] = model.longest
    if options.watch:
        inputs["callback"] = watch = Watch(tokenizer, model.process.mask_id)
    output = model.generate(**inputs, **settings, return_dict_in_generate=True)
    if options.watch:
        watch.end()
    written = [row[:n].tolist() for row, n in zip(output.sequences, output.lengths, strict=True)]
    if prompts:  # without the ends, and of a chat the answer alone
        starts = [len(row) if options.chat else 1 for row in rows]
        written = [x[n : -1 if x[-1] in ends else None] for x, n in zip(written, starts, strict=True)]
    texts, num_left_out = decode(tokenizer, written)
    if options.output is None:
        print("\n\n".join(texts))
    else:
        _write(options, texts, num_left_out, prompts, output)
    return 0


def _check(options: argparse.Namespace) -> tuple[list[str], int]:
    """The prompts, each as often as it is continued, and the number of rows. Refuses what cannot be done."""
    if options.output is not None and options.output.exists():
        raise ValueError(f"{options.output} exists, and nothing is overwritten. Name another --output.")
    if options.num_samples < 1:
        raise ValueError(f"--num-samples {options.num_samples}: it must be at least 1.")
    if options.prompt and options.chat:
        raise ValueError("--prompt is continued and --chat is answered. Give one of them.")
    for flag, texts in (("--prompt", options.prompt), ("--chat", options.chat)):
        for text in texts:
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:  # Python keeps a byte that is none as half a character
                raise ValueError(f"{flag} {ascii(text[:60])} is not valid UTF-8. Give it in that encoding.") from None
    prompts = [text for text in options.prompt or options.chat for _ in range(options.num_samples)]
    num_rows = len(prompts) or options.num_samples
    if options.watch and num_rows != 1:
        raise ValueError(f"--watch shows one text, but {num_rows} are asked for.")
    return prompts, num_rows


def _prompt_rows(options: argparse.Namespace, tokenizer, prompts: list[str]) -> tuple[list[list[int]], list[int]]:
    """The ids that the rows begin with, and the ids that end what is written behind them."""
    from ..data.chat import chat_ends, chat_rows
    from ..data.packing import row_ends

    if options.chat:
        return chat_rows(tokenizer, prompts), chat_ends(tokenizer)
    bos, eos = row_ends(tokenizer)  # between which all rows lie that a model was trained on
    return [[bos, *ids] for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]], [eos]


def _padded(rows: list[list[int]]) -> dict:
    """Prompts of unequal length as arguments of `generate()`, both [B, P]."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    ids = [torch.tensor(row) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
    }


def _write(options: argparse.Namespace, texts: list[str], num_left_out: list[int], prompts: list[str], output) -> None:
    """A line of JSON for each sample: its text, and all that it was made with."""
    from ..files import write_text

    record = {"model": options.model, "seed": options.seed, "num_forward_calls": output.num_forward_calls}
    record["num_forward_passes"] = output.num_forward_passes
    record |= {name: value for name, value in output.settings.items() if value is not None}
    samples = [
        {"text": text, "index": i, "num_left_out": n} | ({"prompt": prompts[i]} if prompts else {}) | record
        for i, (text, n) in enumerate(zip(texts, num_left_out, strict=True))
    ]
    write_text(options.output, "".join(json.dumps(sample, ensure_ascii=False) + "\n" for sample in samples))
    print(f"{len(texts)} samples in {options.output}")
