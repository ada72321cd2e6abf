"""Prompt and completion to rows: what is masked, cut and dropped; and that training leaves prompts alone."""

from __future__ import annotations

import copy
import json
import logging

import datasets
import pytest
import torch
from conftest import TINY
from toys import make_trainer, word_tokenizer

from tokendrift_hf import MDLMConfig, MDLMForMaskedLM
from tokendrift_hf.cli import main
from tokendrift_hf.data import load_text
from tokendrift_hf.data.prompts import pack_prompts


def pairs_file(folder, pairs):
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(json.dumps({"question": prompt, "answer": text, "id": 1}) for prompt, text in pairs))
    return load_text(str(path), text_column="answer", prompt_column="question")


def test_the_field_of_a_column_that_is_not_there_is_named(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"question": "a", "answer": "b"}))
    columns = r"it has \['question', 'answer'\]"
    with pytest.raises(ValueError, match=f"no column 'p'; {columns}. Set prompt_column to one of them"):
        load_text(str(path), text_column="answer", prompt_column="p")
    with pytest.raises(ValueError, match=f"no column 'text'; {columns}. Set text_column to one of them"):
        load_text(str(path), prompt_column="question")


def test_rows_hold_prompt_completion_and_mask(text_model, tmp_path, caplog):
    tokenizer = text_model[1]
    long = "of the object " * 20
    pairs = pairs_file(tmp_path, [("Return the", " name"), ("Return the", long), (long, " name"), ("Return", "")])
    assert set(pairs.column_names) == {"prompt", "text"}
    with caplog.at_level(logging.INFO, logger="tokendrift_hf.data.prompts"):
        rows = pack_prompts(pairs, tokenizer, 16)
    assert len(rows) == 2
    eos = tokenizer.eos_token_id
    bos = eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    prompt, name, text = (tokenizer(x, add_special_tokens=False)["input_ids"] for x in ("Return the", " name", long))
    room = 14 - len(prompt)
    assert rows[0]["input_ids"] == [bos, *prompt, *name] + [eos] * (room - len(name) + 1)
    assert rows[0]["prompt_mask"] == [1] * (1 + len(prompt)) + [0] * (room + 1)
    assert rows[1]["input_ids"] == [bos, *prompt, *text[:room], eos]
    assert [len(row["input_ids"]) for row in rows] == [16, 16]
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage().startswith("2 of 4 pairs have no completion, or a prompt that leaves no room for it")
    assert f"4 pairs, 2 dropped, {len(text) - room} tokens cut off" in caplog.text
    unfilled = pack_prompts(pairs, tokenizer, 16, fill_eos=False)
    assert unfilled[0]["input_ids"] == [bos, *prompt, *name, eos]
    assert unfilled[0]["prompt_mask"] == [1] * (1 + len(prompt)) + [0] * (len(name) + 1)
    assert unfilled[1] == rows[1]


def test_pairs_that_do_not_fit_are_an_error(text_model, tmp_path):
    pairs = pairs_file(tmp_path, [("Return the name of the object and its size and its type", "x")])
    with pytest.raises(ValueError, match="none of the 1 pairs"):
        pack_prompts(pairs, text_model[1], 8)
    with pytest.raises(ValueError, match="no column 'prompt'; it has .*question"):
        load_text(str(tmp_path / "pairs.jsonl"), text_column="answer", prompt_column="prompt")


def test_training_never_touches_a_prompt(text_model, tmp_path):
    """The network sees prompts as they are; only completions are corrupted, and only they enter the likelihood."""
    model, tokenizer = copy.deepcopy(text_model[0]), text_model[1]
    pairs = pairs_file(tmp_path, [("Return the", " name of the object"), ("Return", " its size and type")] * 4)
    rows = pack_prompts(pairs, tokenizer, 16, fill_eos=False)
    seen = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    trainer = make_trainer(tmp_path / "run", model=model, rows=rows, base_loss_weight=1.0, max_steps=2)
    batch = trainer.data_collator([rows[i] for i in range(4)])
    outside = batch["prompt_mask"].bool() | ~batch["attention_mask"].bool()
    corrupted = trainer._corrupt(batch, (0, 0, 0, 0), range(4), 4)
    assert corrupted.x_t[outside].equal(batch["input_ids"][outside])
    assert not corrupted.predicted[outside].any() and corrupted.predicted.any()
    trainer.train()
    assert len(seen) == 2 and all((kwargs["input_ids"] == model.config.mask_token_id).any() for kwargs in seen)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def trained_on_completions(folder, tokenizer, fill_eos: bool):
    """A tiny model that has learnt five completions of one to five words by heart, likelihood alone."""
    prompts = [f"w{k}" for k in range(5)]
    answers = [" ".join(f"w{3 * k + j}" for j in range(1 + k)) for k in range(5)]
    pairs = datasets.Dataset.from_dict({"prompt": prompts * 16, "text": answers * 16})
    rows = pack_prompts(pairs, tokenizer, 10, fill_eos=fill_eos)
    torch.manual_seed(0)
    config = MDLMConfig(**TINY | {"vocab_size": len(tokenizer) + 1, "max_position_embeddings": 10})
    settings = dict(objective="none", base_loss_weight=1.0, max_steps=200, per_device_train_batch_size=80)
    settings |= dict(optim="adamw_torch", learning_rate=1e-2, lr_scheduler_type="linear", adam_beta2=0.95)
    trainer = make_trainer(folder / "run", model=MDLMForMaskedLM(config), rows=rows, max_grad_norm=1.0, **settings)
    trainer.train()
    return trainer.model, dict(zip(prompts, answers, strict=True))


@pytest.mark.parametrize("fill_eos", [True, False])
def test_a_model_ends_its_completions_if_its_rows_were_filled(fill_eos, tmp_path, capsys):
    """With the command's default canvas: all five right, or none, although given the length all five are."""
    tokenizer = word_tokenizer(bos_token="<s>", eos_token="</s>")
    model, completions = trained_on_completions(tmp_path, tokenizer, fill_eos)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    written, _ = {}, capsys.readouterr()
    for prompt in completions:
        assert main(["generate", str(tmp_path / "model"), "--temperature", "0", "--prompt", prompt]) == 0
        written[prompt] = capsys.readouterr().out.strip()
    right = [prompt for prompt, text in written.items() if text == f"{prompt} {completions[prompt]}"]
    assert len(right) == (5 if fill_eos else 0)
    if not fill_eos:
        for prompt, answer in completions.items():
            ids = tokenizer(f"<s> {prompt}", return_tensors="pt")["input_ids"]
            row = model.generate(ids, max_new_tokens=len(answer.split()) + 1, temperature=0, seed=0)[0]
            assert tokenizer.decode(row) == f"<s> {prompt} {answer} </s>"
