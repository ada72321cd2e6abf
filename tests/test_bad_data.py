"""Bad input to data, metric, models and cards: one line in our words, before anything is done."""

from __future__ import annotations

import json

import datasets
import pytest
import torch
from conftest import FIXTURES, released_directory
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import word_tokenizer
from transformers import BatchEncoding

from tokendrift_hf import DUOConfig, MDLMConfig
from tokendrift_hf.data import DiffusionCollator, load_text, pack_documents
from tokendrift_hf.data.collators import CheckedCollator, CleanCollator
from tokendrift_hf.data.prompts import pack_prompts
from tokendrift_hf.files import read_json
from tokendrift_hf.hub.process_tokendrift import AbsorbingProcess
from tokendrift_hf.metrics import GenPPL
from tokendrift_hf.models.convert import convert
from tokendrift_hf.models.loading import load_encoder, load_model
from tokendrift_hf.models.lora import adapter_base

TOKENIZER = word_tokenizer(bos_token="<s>", eos_token="</s>")
TEXT = datasets.Dataset.from_dict({"text": ["w1 w2 w3 w4"]})
PAIRS = datasets.Dataset.from_dict({"prompt": ["w1"], "text": ["w2"]})
NUMBERS = datasets.Dataset.from_dict({"text": [1, 2]})


def refused(message: str, call, *args, **kwargs):
    with pytest.raises((ValueError, TypeError), match=message):
        call(*args, **kwargs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": ["w1 w2"]}, "IterableDataset, as load_text gives it, not a list"),
        ({"documents": None}, "not a NoneType"),
        ({"documents": "text"}, "not a str"),
        ({"documents": datasets.DatasetDict(train=TEXT)}, r"not a DatasetDict. Take one split of it: \['train'\]"),
        ({"documents": TEXT.rename_column("text", "body")}, r"no column 'text'; it has \['body'\]"),
        ({"documents": NUMBERS}, "Column 'text' holds Value.*not text"),
        ({"documents": datasets.Dataset.from_dict({"text": [["w1"]]})}, "Column 'text' holds List.*not text"),
        ({"block_size": 2}, "block_size is 2; it must be a whole number of at least 3"),
        ({"block_size": "16"}, "block_size is '16'"),
        ({"block_size": 8.0}, "block_size is 8.0"),
        ({"block_size": True}, "block_size is True"),
        ({"block_size": None}, "block_size is None"),
        ({"block_size": -5}, "block_size is -5"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"tokenizer": None}, "A tokenizer of transformers is needed, not 'None'"),
        ({"tokenizer": "gpt2"}, "A tokenizer of transformers is needed, not 'gpt2'"),
        ({"tokenizer": word_tokenizer(bos_token="<s>")}, "no eos token.*Set tokenizer.eos_token"),
    ],
)
def test_pack_documents(change, message):
    refused(message, pack_documents, **{"documents": TEXT, "tokenizer": TOKENIZER, "block_size": 6} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": PAIRS.to_iterable_dataset()}, "cannot be a stream"),
        ({"pairs": [("w1", "w2")]}, "not a list"),
        ({"pairs": TEXT}, "no column 'prompt'"),
        ({"pairs": datasets.Dataset.from_dict({"prompt": [1], "text": ["w1"]})}, "Column 'prompt' holds"),
        ({"block_size": 3}, "at least 4"),
        ({"block_size": 1e3}, "block_size is 1000.0"),
        ({"tokenizer": 3}, "A tokenizer of transformers is needed, not '3'"),
    ],
)
def test_pack_prompts(change, message):
    refused(message, pack_prompts, **{"pairs": PAIRS, "tokenizer": TOKENIZER, "block_size": 6} | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": None}, "name=None: it must be text"),
        ({"name": ""}, "name='': it must be text"),
        ({"name": ["a", "b"]}, "name=.*it must be text"),
        ({"name": "someone/nothing"}, "There is no data set 'someone/nothing': no file here, none on the hub"),
        ({"name": "not a name"}, "There is no data set 'not a name'"),
        ({"name": "nowhere.txt"}, "there is no file nowhere.txt"),
        ({"split": 3}, "split=3: it must be text"),
        ({"split": None}, "split=None: it must be text"),
        ({"text_column": 0}, "text_column=0: it must be text"),
        ({"text_column": None}, "text_column=None"),
        ({"prompt_column": ["a"]}, "prompt_column=.*it must be text"),
        ({"prompt_column": "text"}, "prompt_column and text_column are both 'text'"),
        ({"config": 1}, "config=1"),
        ({"revision": 7}, "revision=7"),
    ],
)
def test_load_text(change, message):
    refused(message, load_text, **{"name": "someone/corpus"} | change)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "A batch is a list of rows"),
        ([[1, 2]], "A batch is a list of rows"),
        ([None], "A batch is a list of rows"),
        ([{"text": "a"}], "no column input_ids"),
        ([{"input_ids": [1]}, {}], "Row 1 of a batch has no column input_ids"),
        ([{"input_ids": "w1"}], "input_ids of row 0 is w1; needed is a list of whole numbers"),
        ([{"input_ids": None}], "input_ids of row 0 is None"),
        ([{"input_ids": 3}], "input_ids of row 0 is 3"),
        ([{"input_ids": [1.5, 2.0]}], r"input_ids of row 0 is \[1.5"),
        ([{"input_ids": ["a", "b"]}], "input_ids of row 0 is"),
        ([{"input_ids": [[1, 2]]}], "input_ids of row 0 is"),
        ([{"input_ids": [1, None]}], "input_ids of row 0 is"),
        ([{"input_ids": [1]}, {"input_ids": [1], "prompt_mask": [1]}], "Row 0 of a batch has no column prompt_mask"),
        ([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}], "Row 1 of a batch has no column labels.*or in none"),
        ([{"input_ids": [1, 2], "prompt_mask": "ab"}], "prompt_mask of row 0 is ab"),
        ([{"input_ids": [1, 2], "attention_mask": [0.5, 1]}], "attention_mask of row 0"),
        ([{"input_ids": [1, 2], "attention_mask": [1]}], "1 values of attention_mask for 2 tokens"),
    ],
)
def test_clean_collator(rows, message):
    refused(message, CleanCollator(10, 4, mask_id=9), rows)


LONG = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": [[1, 2]]}, "with input_ids of kind list. Needed is a tensor .* Leave data_collator out"),
        ({"input_ids": LONG.double()}, r"of kind torch.float64 \[2, 3\]"),
        ({"input_ids": LONG > 3}, r"of kind torch.bool \[2, 3\]"),
        ({"input_ids": LONG[:0]}, r"of kind torch.int64 \[0, 3\]"),
        ({"input_ids": LONG[:, :0]}, "A row has 0 tokens, but the model takes 1 to 4.*leave data_collator out"),
        ({"input_ids": LONG.repeat(1, 2)}, "A row has 6 tokens, but the model takes 1 to 4"),
        ({"input_ids": LONG + 4}, "gave input_ids .* Token ids run from 5 to 10, but the model knows"),
        ({"input_ids": LONG - 101}, "Token ids run from -100 to -95"),
        ({"input_ids": LONG.clone().fill_(9)}, "contains the mask, id 9.*leave data_collator out"),
        ({"timesteps": torch.rand(2)}, "gave timesteps.*plain transformers.Trainer.*Leave data_collator out"),
        ({"attention_mask": torch.ones(2, 2).long()}, r"attention_mask of kind torch.int64 \[2, 2\]. Needed is one"),
        ({"attention_mask": torch.zeros(2, 3)}, r"attention_mask of kind torch.float32 \[2, 3\]"),
        (
            {"prompt_mask": torch.ones(3).long()},
            r"prompt_mask of kind torch.int64 \[3\].* input_ids, \[2, 3\], or no p",
        ),
        ({"labels": LONG.T}, r"labels of kind torch.int64 \[3, 2\]"),
        ({"labels": None}, "labels of kind NoneType"),
    ],
)
def test_a_collator_of_the_users_own(change, message):
    clean = CleanCollator(10, 4, mask_id=9)
    refused(f"^data_collator .*{message}", CheckedCollator(lambda rows: {"input_ids": LONG} | change, clean), [])


@pytest.mark.parametrize("kind", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_token_ids_of_any_whole_number_are_looked_up(kind):
    """The batch of a tokenizer too, and masks of booleans, and columns that are none of ours."""
    given = {"input_ids": LONG.to(kind), "attention_mask": LONG > 0, "labels": LONG - 101, "name": "a"}
    batch = CheckedCollator(lambda rows: BatchEncoding(given), CleanCollator(10, 4))([{}] * len(LONG))
    assert batch.keys() == given.keys() and batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], LONG)


def test_masks_of_lists_tensors_and_booleans_are_one_and_none_is_dropped():
    """A mask that the first row lacks counts all the same; an attention mask that is not there is all ones."""
    rows = [{"input_ids": [1, 2]}, {"input_ids": torch.tensor([3, 4]), "attention_mask": torch.tensor([True, False])}]
    assert CleanCollator(10, 4)(rows)["attention_mask"].tolist() == [[1, 1], [1, 0]]
    rows = [{"input_ids": [1, 2], "prompt_mask": mask} for mask in ([1, 0], [True, False], torch.tensor([1, 0]))]
    assert CleanCollator(10, 4)(rows)["prompt_mask"].tolist() == [[1, 0]] * 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "A batch is a list of rows"),
        ([{"x": [1]}], "no column input_ids"),
        ([{"input_ids": [1, 2]}, {"input_ids": [1]}], r"Rows of lengths \[1, 2\] in one batch"),
        ([{"input_ids": []}], r"Rows of lengths \[0\]"),
        ([{"input_ids": [1, 50]}], "Token ids run from 1 to 50"),
        ([{"input_ids": [1.5]}], "needed is a list of whole numbers"),
        ([{"input_ids": [1]}, {"input_ids": [1], "attention_mask": [1]}], "Row 0 of a batch has no column attention_m"),
    ],
)
def test_diffusion_collator(rows, message):
    refused(message, DiffusionCollator(AbsorbingProcess(10, 9)), rows)


@pytest.fixture(scope="module")
def gen_ppl():
    return GenPPL(keep_in_memory=True, model_id=str(FIXTURES / "genppl_tiny_gpt2"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"predictions": 5}, "predictions is 5. Use a list of strings or of lists of ids"),
        ({"predictions": [1, 2]}, r"predictions\[0\] is 1. Use strings alone, or lists of whole numbers"),
        ({"predictions": [None]}, r"predictions\[0\] is None"),
        ({"predictions": ["w1", None]}, r"predictions\[1\] is None"),
        ({"predictions": ["w1", [1, 2]]}, r"predictions\[1\] is \[1, 2\]"),
        ({"predictions": [[1, 2], "w1"]}, r"predictions\[1\] is 'w1'"),
        ({"predictions": [[1, "w1"]]}, r"predictions\[0\] is"),
        ({"predictions": [[1.5, 2.0]]}, r"predictions\[0\] is \[1.5, 2.0\]"),
        ({"predictions": [[True, False]]}, r"predictions\[0\] is \[True"),
        ({"predictions": [[[1]]]}, r"predictions\[0\] is \[\[1\]\]"),
        ({"predictions": {"a": "w1"}}, "predictions is {'a': 'w1'}"),
        ({"predictions": [[2**63]]}, r"predictions\[0\] is \[9223372036854775808\]"),
        ({"predictions": b"w1"}, "predictions is b'w1'"),
        ({"predictions": torch.tensor([1, 2])}, r"predictions\[0\] is 1"),
        ({"predictions": torch.tensor([[1.5]])}, r"predictions\[0\] is \[1.5\]"),
        ({"model_id": 5}, "model_id is 5. Use its name"),
        ({"model_id": ["a"]}, "model_id is"),
        ({"tokenizer": 5}, "tokenizer is 5. Use a tokenizer"),
        ({"device": 3.5}, "device is 3.5"),
        ({"mode": ["reference"]}, "mode is"),
        ({"dtype": ["float32"]}, "dtype is"),
        ({"batch_size": None}, "batch_size is None"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": 2.0}, "batch_size is 2.0"),
        ({"max_length": "all"}, "max_length is 'all'"),
        ({"mauve_settings": None}, "mauve_settings is None"),
        ({"mauve_settings": ["seed"]}, "mauve_settings is"),
        ({"mauve_references": 5}, "mauve_references is 5"),
        ({"mauve_references": [1, 2]}, r"mauve_references\[0\] is 1"),
        ({"mauve_references": ["w1", None]}, r"mauve_references\[1\] is None"),
    ],
)
@pytest.mark.filterwarnings("ignore:gen_ppl")
def test_gen_ppl(gen_ppl, settings, message):
    refused(message, gen_ppl.compute, **{"predictions": ["w1 w2"]} | settings)


def test_one_sample_at_a_time_is_looked_at_as_well(gen_ppl):
    refused(r"predictions\[0\] is None", gen_ppl.add, prediction=None)


# Files


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "config.json cannot be read as JSON"),
        ('{"model_type": "mdl', "config.json cannot be read as JSON.*cut off"),
        ("[1, 2]", "config.json holds a list, where an object"),
        ("null", "config.json holds a NoneType"),
        ("3", "config.json holds a int"),
        ("[" * 100_000, "config.json cannot be read as JSON"),
        ("\x00", "config.json cannot be read as JSON"),
    ],
    ids=["empty", "cut off", "list", "null", "number", "nested", "binary"],
)
@pytest.mark.parametrize("read", [load_model, load_encoder, lambda name: convert(name, f"{name}-x")])
def test_config_files_of_the_wrong_shape(read, content, message, tmp_path):
    folder = released_directory(tmp_path / "model", "mdlm")
    (folder / "config.json").write_text(content)
    refused(message, read, str(folder))


@pytest.mark.parametrize("name", [None, 3, "", ["a"]])
def test_models_are_named_by_text(name):
    refused("A model is named by a directory or hub id", load_model, name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": "many"}, "vocab_size='many' in a configuration"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_attention_heads": 0}, "num_attention_heads=0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers=2.0"),
        ({"cond_dim": -1}, "cond_dim=-1"),
        ({"max_position_embeddings": [16]}, "max_position_embeddings="),
        (
            {"n_blocks": 10**9},
            "num_hidden_layers=1000000000 in a configuration. It must be a whole number from 1 to 10000",
        ),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers=10{30} in a"),
        (
            {"vocab_size": 10**9},
            "vocab_size=1000000000 in a configuration. It must be a whole number from 1 to 16777216",
        ),
        ({"hidden_size": 10**9}, "hidden_size=1000000000"),
        ({"cond_dim": 10**9}, "cond_dim=1000000000"),
        ({"hidden_size": 2**17, "n_heads": 2**17}, "num_attention_heads=131072"),
        ({"model_length": 10**9}, "max_position_embeddings=1000000000"),
        ({"dropout": "none"}, "dropout='none'"),
        ({"dropout": 1.5}, "dropout=1.5"),
        ({"time_conditioning": "x"}, "time_conditioning='x' in a configuration. It must be true or false"),
        ({"time_conditioning": 7}, "time_conditioning=7"),
        ({"time_conditioning": -3}, "time_conditioning=-3"),
        ({"time_conditioning": None}, "time_conditioning=None"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings='no' in a configuration. It must be true or false"),
        ({"mask_token_id": "x"}, "mask_token_id='x' is outside the vocabulary"),
        ({"mask_token_id": 2.5}, "mask_token_id=2.5 is outside the vocabulary"),
    ],
)
def test_configurations(change, message):
    refused(message, MDLMConfig, **change)


@pytest.mark.parametrize("causal", ["no", 0, None])
def test_a_switch_of_duo_is_true_or_false(causal):
    refused(f"causal={causal!r} in a configuration. It must be true or false", DUOConfig, causal=causal)


def test_a_switch_in_config_json_is_true_or_false(tmp_path):
    folder = released_directory(tmp_path / "model", "mdlm", time_conditioning="no")
    refused("time_conditioning='no' in a configuration", load_model, str(folder))


def test_a_model_of_a_billion_blocks_is_refused_before_it_is_built(tmp_path):
    """A stranger's config.json asks for it. It would take all memory."""
    folder = released_directory(tmp_path / "model", "mdlm", n_blocks=10**9)
    refused("num_hidden_layers=1000000000 in a configuration", load_model, str(folder))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([], "adapter_config.json holds a list"),
        ({}, "adapter_config.json has 'None' as its base model.*Put a path or hub id"),
        ({"base_model_name_or_path": ["a"]}, r"has \"\['a'\]\" as its base model"),
        ({"base_model_name_or_path": 5}, "has '5' as its base model"),
        ({"base_model_name_or_path": "gpt2", "revision": 3}, "'3' as its revision"),
        ({"base_model_name_or_path": "SELF"}, "have themselves as their base"),
        ({"base_model_name_or_path": "SELF/."}, "have themselves as their base"),
    ],
)
def test_adapters(fields, message, tmp_path):
    text = json.dumps(fields).replace("SELF", str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(text)
    refused(message, adapter_base, tmp_path)
    refused(message, load_model, str(tmp_path))


def test_adapters_whose_bases_go_round_in_a_circle(tmp_path):
    for name, base in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        fields = {"base_model_name_or_path": str(tmp_path / base)}
        (tmp_path / name / "adapter_config.json").write_text(json.dumps(fields))
    refused("have themselves as their base", load_model, str(tmp_path / "a"))


def test_json_says_which_file(tmp_path):
    refused("nowhere.json cannot be read as JSON.*It is missing", read_json, tmp_path / "nowhere.json")


SAMPLES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.text(max_size=8) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=8,
)


@given(SAMPLES | st.lists(st.text(max_size=20), min_size=1) | st.lists(st.lists(st.integers()), min_size=1))
@settings(derandomize=True, deadline=None, database=None, max_examples=80)
@pytest.mark.filterwarnings("ignore:gen_ppl")
def test_any_predictions_are_scored_or_refused_in_our_words(gen_ppl, predictions):
    try:
        record = gen_ppl.compute(predictions=predictions)
    except (ValueError, TypeError) as error:
        assert "predictions" in str(error) or "nothing to score" in str(error)
    else:
        assert record["num_samples"] == len(predictions)
