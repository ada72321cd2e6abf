"""From text to blocks: the packing of the reference, its options, the corpora, and the noise of the collator."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments

from tokendrift_hf.data import DiffusionCollator, documentation, load_text, pack_documents, packing, text
from tokendrift_hf.data.packing import check_blocks, pack_tokens, pad_tokens, row_ends, spread_rows
from tokendrift_hf.data.prompts import pack_prompts
from tokendrift_hf.hub.process_tokendrift import AbsorbingProcess, UniformProcess

FIXTURE = json.loads((Path(__file__).parents[1] / "fixtures" / "data_pipeline.json").read_text())
EOS = 50


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer():
    """Token ids written as words: "7 31 50" is [7, 31, 50]. Id 50 is eos, and no bos or pad token exists."""
    words = Tokenizer(models.WordLevel({str(i): i for i in range(EOS)} | {"<eos>": EOS}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")


def as_text(token_lists) -> datasets.Dataset:
    texts = {"text": [" ".join(map(str, ids)) for ids in token_lists]}
    return datasets.Dataset.from_dict(texts, features=datasets.Features({"text": datasets.Value("string")}))


def stream(text):
    yield from text


# packing


@pytest.mark.parametrize("block_size", sorted(FIXTURE["blocks_by_block_size"], key=int))
def test_packing_equals_the_recorded_reference(tokenizer, block_size):
    """Text through the whole pipeline gives the blocks recorded from the reference's group_texts."""
    expected = FIXTURE["blocks_by_block_size"][block_size]
    if not expected:  # more than the corpus holds: the reference went on with no rows
        with pytest.raises(ValueError, match=f"do not fill one row of block_size {block_size}"):
            pack_documents(as_text(FIXTURE["docs"]), tokenizer, int(block_size))
        return
    blocks = pack_documents(as_text(FIXTURE["docs"]), tokenizer, int(block_size))
    assert list(blocks["input_ids"]) == expected
    assert blocks.column_names == ["input_ids"]
    assert blocks.features["input_ids"] == datasets.List(datasets.Value("int32"), length=int(block_size))


def test_packing_loses_only_the_final_tail_and_counts_it(tokenizer, caplog):
    """2500 documents span three calls of the tokenizer (and would be three map batches of the reference)."""
    docs = [[i % 49] * (1 + i % 7) for i in range(2500)]
    stream = [token for ids in docs for token in [*ids, EOS]]
    with caplog.at_level(logging.INFO, "tokendrift_hf.data.packing"):
        blocks = pack_documents(as_text(docs), tokenizer, 32)
    packed = [token for row in blocks["input_ids"] for token in row[1:-1]]
    assert packed == stream[: len(packed)]
    assert 0 <= len(stream) - len(packed) < 30
    assert (
        f"2500 documents (0 empty), {len(stream) - 2500} tokens, {len(stream) - len(packed)} dropped at the end"
        in caplog.text
    )


def test_without_insert_eos_documents_touch():
    rows = list(pack_tokens([[1, 2], [3], [4, 5, 6]], 5, bos=8, eos=9, insert_eos=False))
    assert rows == [{"input_ids": [8, 1, 2, 3, 9]}, {"input_ids": [8, 4, 5, 6, 9]}]


def test_documents_without_text_are_left_out_and_counted(tokenizer, caplog):
    """Rows of a JSONL file that lack the field are None: each would be an eos, so a broken file would teach eos."""
    rows = list(pack_tokens([[1, 2], [], [3]], 5, bos=8, eos=9))
    assert rows == [{"input_ids": [8, 1, 2, 9, 9]}]
    documents = datasets.Dataset.from_dict({"text": [None, "1 2 3", "", None, "4 5"]})
    with caplog.at_level(logging.WARNING, "tokendrift_hf.data.packing"):
        (row,) = pack_documents(documents, tokenizer, 8)
    assert row["input_ids"].count(tokenizer.eos_token_id) == 2 + 1
    assert "3 of 5 documents have no text and are left out." in caplog.text


def test_without_wrap_every_document_has_its_own_padded_row(tokenizer, caplog):
    """Long documents are cut (and counted), short ones padded with attention_mask 0, empty ones have no row."""
    with caplog.at_level(logging.INFO, "tokendrift_hf.data.packing"):
        blocks = pack_documents(as_text([[1, 2], [], [3, 4, 5, 6, 7]]), tokenizer, 5, wrap=False)
    assert list(blocks["input_ids"]) == [[50, 1, 2, 50, 50], [50, 3, 4, 5, 50]]
    assert list(blocks["attention_mask"]) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert "3 documents (1 empty), 7 tokens, 2 dropped at the ends" in caplog.text


def test_padding_uses_its_own_token():
    assert list(pad_tokens([[4]], 5, bos=1, eos=2, pad=3)) == [
        {"input_ids": [1, 4, 2, 3, 3], "attention_mask": [1, 1, 1, 0, 0]}
    ]


def test_packed_blocks_are_found_again(tokenizer, monkeypatch):
    """The second call reads the cache: it tokenises nothing. Another option makes other blocks."""
    documents = as_text(FIXTURE["docs"])
    first = pack_documents(documents, tokenizer, 16)
    without_eos = pack_documents(documents, tokenizer, 16, insert_eos=False)
    assert list(without_eos["input_ids"]) != list(first["input_ids"])

    def fail(*_):
        raise AssertionError("tokenised again")

    monkeypatch.setattr(packing, "_token_lists", fail)
    again = pack_documents(documents, tokenizer, 16)
    assert list(again["input_ids"]) == list(first["input_ids"])
    assert again.cache_files == first.cache_files


def test_streamed_blocks_are_the_same_and_resume_exactly(tokenizer):
    expected = FIXTURE["blocks_by_block_size"]["10"]
    stream = pack_documents(as_text(FIXTURE["docs"]).to_iterable_dataset(), tokenizer, 10)
    rows = iter(stream)
    seen = [next(rows)["input_ids"] for _ in range(5)]
    state = stream.state_dict()
    assert seen == expected[:5]
    resumed = pack_documents(as_text(FIXTURE["docs"]).to_iterable_dataset(), tokenizer, 10)
    resumed.load_state_dict(state)
    assert [row["input_ids"] for row in resumed] == expected[5:]


def test_without_wrap_a_corpus_below_one_block_has_rows(tokenizer):
    padded = pack_documents(as_text([[1, 2], [3]]), tokenizer, 16, wrap=False)
    assert len(padded) == 2


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("documents", "wrap", "message"),
    [
        ([], True, "holds no document"),
        ([[], []], False, "2 documents give 0 tokens"),
        ([[1, 2], [3]], True, "2 documents give 3 tokens, which do not fill one row of block_size 16.*--wrap false"),
    ],
)
def test_a_corpus_without_a_row_is_refused(tokenizer, documents, wrap, message, streaming):
    """At once, by the same words, whether it is stored or a stream, which repeated would never end."""
    text = as_text(documents)
    if streaming:
        text = datasets.IterableDataset.from_generator(stream, gen_kwargs={"text": text}, features=text.features)
    with pytest.raises(ValueError, match=message):
        pack_documents(text, tokenizer, 16, wrap=wrap)


@pytest.mark.parametrize(("bos", "first"), [("7", 7), (None, EOS)])
def test_rows_of_text_and_of_prompts_lie_between_the_same_ends(tokenizer, bos, first):
    """Bos and eos; where a tokenizer has no bos, eos stands in."""
    tokenizer.bos_token = bos
    assert row_ends(tokenizer) == (first, EOS)
    wrapped = pack_documents(as_text([[1, 2, 3]]), tokenizer, 5)
    padded = pack_documents(as_text([[1, 2, 3]]), tokenizer, 5, wrap=False)
    pairs = pack_prompts(datasets.Dataset.from_dict({"prompt": ["1 2"], "text": ["3"]}), tokenizer, 5)
    for rows in (wrapped, padded, pairs):
        assert rows[0]["input_ids"] == [first, 1, 2, 3, EOS]


def test_block_size_and_eos_are_checked(tokenizer):
    with pytest.raises(ValueError, match="block_size is 2; it must be a whole number of at least 3"):
        pack_documents(as_text([[1]]), tokenizer, 2)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no eos token"):
        pack_documents(as_text([[1]]), tokenizer, 16)
    with pytest.raises(ValueError, match="no eos token"):
        pack_prompts(datasets.Dataset.from_dict({"prompt": ["1"], "text": ["2"]}), tokenizer, 16)


def test_token_ids_out_of_range_are_refused(tokenizer):
    """The largest id that fits passes; one more does not, in stored blocks, in streams, and below zero."""
    documents = as_text(FIXTURE["docs"])
    assert len(pack_documents(documents, tokenizer, 16, vocab_size=51)) == 11
    with pytest.raises(ValueError, match="run from 1 to 50, but the model knows 0 to 49"):
        pack_documents(documents, tokenizer, 16, vocab_size=50)
    with pytest.raises(ValueError, match="the model knows 0 to 9"):
        pack_documents(documents.to_iterable_dataset(), tokenizer, 16, vocab_size=10)
    with pytest.raises(ValueError, match="run from -100 to 3"):
        check_blocks(datasets.Dataset.from_dict({"input_ids": [[0, 3], [2, -100]]}), 50)


# corpora


def test_local_files(tmp_path):
    """A text file is one document or several, jsonl has one per row, a directory is read in order, parquet as is."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "b.txt").write_text("second\nline\n\nparagraph")
    (folder / "a.txt").write_text("first")
    assert list(load_text(str(folder))["text"]) == ["first", "second\nline\n\nparagraph"]

    rows = [{"body": f"document {i}", "id": i} for i in range(20)]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(json.dumps(row) for row in rows))
    corpus = load_text(str(lines), text_column="body", split="train[:10]")
    assert corpus.column_names == ["text"]
    assert list(corpus["text"]) == [f"document {i}" for i in range(10)]
    streamed = load_text(str(lines), text_column="body", streaming=True)
    assert isinstance(streamed, datasets.IterableDataset)
    assert [row["text"] for row in streamed] == [f"document {i}" for i in range(20)]

    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    assert list(load_text(str(tmp_path / "rows.parquet"), text_column="body")["text"])[-1] == "document 19"


def test_a_file_is_known_by_its_ending_in_capitals_too(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "A.TXT").write_text("first")
    (folder / "b.txt").write_text("second")
    assert list(load_text(str(folder / "A.TXT"))["text"]) == ["first"]
    assert list(load_text(str(folder))["text"]) == ["first", "second"]
    with pytest.raises(ValueError, match="there is no file .*C.JSONL"):
        load_text(str(tmp_path / "C.JSONL"))


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "taken_for"), [("b1[0-9]", "b15"), ("b[!x]", "bc"), ("b*", "bcd"), ("b?", "bc"), ("b**", "b"), ("b]", "b")]
)
@pytest.mark.parametrize("where", ["file", "folder"])
def test_the_file_that_was_named_is_read(where, name, taken_for, streaming, tmp_path):
    """`datasets` takes a path for a pattern, in which brackets, stars and question marks stand for something else."""
    for stem, words in ((name, "this"), (taken_for, "the other")):
        path = tmp_path / (f"{stem}.jsonl" if where == "file" else f"{stem}/rows.jsonl")
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"text": words}))
    named = tmp_path / (f"{name}.jsonl" if where == "file" else name)
    assert [row["text"] for row in load_text(str(named), streaming=streaming)] == ["this"]


def test_a_relative_path_is_read_in_a_folder_with_brackets(tmp_path, monkeypatch):
    (tmp_path / "run[1]").mkdir()
    (tmp_path / "run[1]" / "a.txt").write_text("this")
    monkeypatch.chdir(tmp_path / "run[1]")
    assert list(load_text("a.txt")["text"]) == ["this"]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_folder_gives_its_text_files_alone(streaming, tmp_path):
    """No folders with the name of a file, and nothing that is hidden. The folder itself may lie in a hidden one."""
    folder = tmp_path / ".runs" / "texts"
    for name in ("a.txt", "notes.txt/b.txt", ".git/x.md", "notes.txt/.c.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    assert [row["text"] for row in load_text(str(folder), streaming=streaming)] == ["a.txt", "notes.txt/b.txt"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", ["a.txt", "a.md"])
def test_a_byte_order_mark_is_no_text(name, streaming, tmp_path):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbfcaf\xc3\xa9")
    (row,) = load_text(str(tmp_path / name), streaming=streaming)
    assert row["text"] == "caf\xe9"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_of_blank_lines_holds_no_document(streaming, tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n\n")
    with pytest.raises(ValueError, match="a.jsonl holds no document in split 'train'. Check what lies there"):
        load_text(str(tmp_path / "a.jsonl"), streaming=streaming)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cut.jsonl", b'{"text": "a"}\n{"text": "b"\n{"te'),
        ("latin.txt", "caf\xe9 au lait".encode("latin-1")),
        ("latin.jsonl", '{"text": "caf\xe9"}'.encode("latin-1")),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, content, streaming, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name} cannot be read as (json|text): .*(JSON parse error|utf-8)"):
        load_text(str(tmp_path / name), streaming=streaming)


def test_where_a_stream_breaks_off_is_said(tokenizer, tmp_path):
    """Its first file is good, so that only reading on shows it."""
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "1 2 3 4 5 6 7"}\n' * 1001)
    (folder / "b.jsonl").write_text('{"body": "1"}\n')
    stream = pack_documents(load_text(str(folder), streaming=True), tokenizer, 8)
    with pytest.raises(ValueError, match="cannot be read on after 1,001 documents (?s:.*)body"):
        list(stream)


def test_where_text_cannot_be_decoded_is_said(tokenizer, tmp_path):
    """Arrow takes in bytes that are not UTF-8, which show when a document is read: `datasets` wraps what is raised."""
    lines = tmp_path / "rows.jsonl"
    lines.write_bytes(b'{"text": "1 2 3", "p": "4"}\n' * 3 + '{"text": "caf\xe9", "p": "4"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match="cannot be read on after 3 documents (.*utf-8.*)"):
        pack_documents(load_text(str(lines)), tokenizer, 4)
    with pytest.raises(ValueError, match="cannot be read on after 3 pairs (.*utf-8.*)"):
        pack_prompts(load_text(str(lines), prompt_column="p"), tokenizer, 8)


def test_what_else_stops_the_packing_keeps_its_own_error(tokenizer, monkeypatch):
    def full(*_):
        raise OSError("no space left")
        yield

    monkeypatch.setattr(packing, "_token_lists", full)
    with pytest.raises(datasets.exceptions.DatasetGenerationError) as raised:
        pack_documents(as_text([[1, 2, 3]]), tokenizer, 4)
    assert "no space left" in str(raised.value.__cause__)


def test_a_bad_local_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no file .*missing.jsonl"):
        load_text(str(tmp_path / "missing.jsonl"))
    lines = tmp_path / "rows.jsonl"
    lines.write_text('{"body": "x", "id": 1}')
    with pytest.raises(ValueError, match=r"no column 'text'; it has \['body', 'id'\]"):
        load_text(str(lines))
    with pytest.raises(ValueError, match="'id' .* not text"):
        load_text(str(lines), text_column="id")
    with pytest.raises(ValueError, match="validation"):
        load_text(str(lines), text_column="body", split="validation")
    with pytest.raises(ValueError, match=r"rows.jsonl holds no document in split 'train\[:0\]'"):
        load_text(str(lines), text_column="body", split="train[:0]")
    (tmp_path / "nothing.jsonl").touch()
    with pytest.raises(ValueError, match="nothing.jsonl holds no document"):
        load_text(str(tmp_path / "nothing.jsonl"))
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text("x")
    (tmp_path / "mixed" / "b.jsonl").write_text("{}")
    with pytest.raises(ValueError, match=r"kinds \['.jsonl', '.txt'\]"):
        load_text(str(tmp_path / "mixed"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no text file in it. Files that end in .txt, .md, .* are read"):
        load_text(str(tmp_path / "empty"))


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the hub: records how `load_dataset` is called and gives ten rows."""
    calls = []

    def load_dataset(*args, **kwargs):
        calls.append((args, kwargs))
        rows = datasets.Dataset.from_dict({"text": [str(i) for i in range(10)]})
        return rows.to_iterable_dataset() if kwargs.get("streaming") else rows

    monkeypatch.setattr(text.datasets, "load_dataset", load_dataset)
    return calls


def test_openwebtext_is_read_from_its_parquet_form(hub, caplog):
    """The splits are the reference's, the revision can be overridden, and nothing asks for remote code.

    Another number of documents than the releases had is another split, which the log says.
    """
    load_text("openwebtext")
    assert "has 10 documents to train on where the releases had 7913769" in caplog.text
    load_text("openwebtext", split="validation", revision="abc")
    for (args, kwargs), split, revision in zip(
        hub, ["train[:-100000]", "train[-100000:]"], ["b4325f019c648b1641a1784748667e8b74e5e064", "abc"], strict=True
    ):
        assert args == ("Skylion007/openwebtext",)
        assert kwargs == {"split": split, "revision": revision}
    with pytest.raises(ValueError, match="no split 'test'"):
        load_text("openwebtext", split="test")


def test_streamed_openwebtext_is_cut_at_the_same_document(hub, monkeypatch):
    monkeypatch.setattr(text, "_OPENWEBTEXT_DOCUMENTS", 10)
    monkeypatch.setattr(text, "_OPENWEBTEXT_VALIDATION", 3)
    train = [row["text"] for row in load_text("openwebtext", streaming=True)]
    validation = [row["text"] for row in load_text("openwebtext", split="validation", streaming=True)]
    assert (train, validation) == ([str(i) for i in range(7)], ["7", "8", "9"])


def test_a_split_of_the_hub_without_rows_is_named(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ValueError('Instruction "train[:0]" corresponds to no data!')

    monkeypatch.setattr(text.datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"someone/corpus holds no document in split 'train\[:0\]'"):
        load_text("someone/corpus", split="train[:0]")


def test_a_hub_name_keeps_its_options(hub):
    load_text("someone/corpus", config="en", split="test", revision="v1", streaming=True)
    assert hub == [(("someone/corpus", "en"), {"split": "test", "revision": "v1", "streaming": True})]


# the documentation corpus


def test_docstrings_come_in_the_order_of_the_file():
    source = '''"""Module."""
if True:
    def f():
        """First.

            Indented.
        Not indented.
        """
        def inner():
            """Inner."""
try:
    class A:
        """Second."""
        async def g(self): "Third."
except ImportError:
    pass
add_docstr(torch.abs, r"""
    abs(x) -> \\alpha

    Fourth {x}.
""".format(**args))
print("""not
documentation""")
'''
    assert list(documentation.docstrings(source)) == [
        "Module.",
        "First.\n\n    Indented.\nNot indented.",
        "Inner.",
        "Second.",
        "Third.",
        "abs(x) -> \\alpha\n\nFourth {x}.",
    ]


def test_repeated_paragraphs_are_dropped_with_their_headings():
    common = "The hidden size of the encoder layers, which defaults to 768 and must divide by the number of heads."
    seen: set[int] = set()
    first = f"Builds a model from a configuration of the first kind, and returns it ready to use.\n\nArgs:\n\n{common}"
    assert documentation.drop_repeated_paragraphs(first, seen) == first
    changed = common.replace("768", "1024")  # another number does not make it new
    own = "Trains the network of the second kind until its validation loss no longer improves, then stops."
    assert documentation.drop_repeated_paragraphs(f"{own}\n\nArgs:\n\n{changed}", seen) == own
    assert documentation.drop_repeated_paragraphs(f"Args:\n\n{common}", seen) == ""


def test_parts_have_their_shares_and_depend_on_the_name_alone():
    names = [f"torch/{i}.py" for i in range(20_000)]
    parts = [documentation.part_of(name) for name in names]
    shares = {part: parts.count(part) / len(parts) for part in documentation.PARTS}
    assert shares == pytest.approx({"train": 0.52, "validation": 0.04, "judge": 0.40, "reference": 0.04}, abs=0.015)
    assert documentation.part_of("torch/nn/modules/linear.py") == documentation.part_of("torch/nn/modules/linear.py")


def test_documentation_parts_share_no_file_and_no_paragraph(monkeypatch):
    """The whole way through `load_text`, against one plain loop over the files of `accelerate` and `asyncio`."""
    monkeypatch.setattr(documentation, "PACKAGES", ("accelerate",))
    monkeypatch.setattr(documentation.sysconfig, "get_paths", lambda: {"stdlib": str(Path(asyncio.__file__).parent)})
    corpus = {name: load_text("documentation", split=name) for name in documentation.PARTS}
    rows = list(documentation._fresh_rows(list(documentation._parsed_rows(documentation._files(), {})), {}))
    for name, part in corpus.items():
        assert list(part["text"]) == [row["text"] for row in rows if documentation.part_of(row["source"]) == name]
    sources = {row["source"] for row in rows}
    assert len(sources) == len(rows) == sum(map(len, corpus.values())) > 100
    assert {"help topics/lambda", "accelerate/accelerator.py", "python/tasks.py"} <= sources
    assert sum(len(row["text"]) for row in rows) > 500_000

    def paragraphs_of(part):
        paragraphs = [p for text in corpus[part]["text"] for p in text.split("\n\n")]
        return {" ".join(p.split()) for p in paragraphs if len(p) > 80}

    judge, train = paragraphs_of("judge"), paragraphs_of("train")
    assert not judge & train
    with pytest.raises(ValueError, match=r"no split 'test'; it has \['train', 'validation', 'judge', 'reference'\]"):
        load_text("documentation", split="test")


def test_reading_the_documentation_imports_none_of_the_packages():
    """Only parsed: the module's own imports are the standard library and `datasets`."""
    tree = ast.parse(Path(documentation.__file__).read_text())
    modules = {alias.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for alias in n.names}
    modules |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert modules.isdisjoint(set(documentation.PACKAGES) - {"datasets"})


# the collator


MASK = 40


def rows_of(count, length=24, seed=0):
    ids = torch.randint(MASK, (count, length), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row} for row in ids.tolist()]


def test_collator_gives_the_models_own_loss_its_arguments():
    """x_t has the mask with probability (1 - 1e-3) t and equals x_0 elsewhere; t is stratified on [eps, 1]."""
    rows = rows_of(512, length=64)
    batch = DiffusionCollator(AbsorbingProcess(MASK + 1, MASK), seed=3, eps=0.01)(rows)
    x_t, t, x_0 = batch["input_ids"], batch["timesteps"], batch["labels"]
    assert sorted(batch) == ["input_ids", "labels", "timesteps"]
    assert x_0.tolist() == [row["input_ids"] for row in rows]
    assert torch.equal(x_t[x_t != MASK], x_0[x_t != MASK])
    assert torch.equal((t.sort().values * 512 / 0.99 - 0.01 * 512 / 0.99).floor().clamp(0, 511), torch.arange(512.0))
    masked = (x_t == MASK).double().mean(1)
    slope = (masked * t.double()).sum() / (t.double() ** 2).sum()
    assert abs(slope - 0.999) < 0.01
    assert (masked - 0.999 * t).abs().max() < 5 * (0.25 / 64) ** 0.5


def test_collator_redraws_uniform_noise_from_all_ids():
    process = UniformProcess(16)
    rows = [{"input_ids": [3] * 500} for _ in range(8)]
    batch = DiffusionCollator(process, seed=1)(rows)
    changed = (batch["input_ids"] != 3).double().mean(1)
    expected = 0.999 * batch["timesteps"].double() * 15 / 16
    assert (changed - expected).abs().max() < 5 * (0.25 / 500) ** 0.5
    assert set(batch["input_ids"].flatten().tolist()) == set(range(16))


def test_noise_is_a_function_of_seed_and_batch():
    collate = DiffusionCollator(AbsorbingProcess(MASK + 1, MASK), seed=3)
    one, torch_state = collate(rows_of(8)), torch.get_rng_state()
    torch.manual_seed(999)
    again = DiffusionCollator(AbsorbingProcess(MASK + 1, MASK), seed=3)(rows_of(8))
    assert all(torch.equal(one[k], again[k]) for k in one)
    state = torch.get_rng_state()
    collate(rows_of(8))
    assert torch.equal(torch.get_rng_state(), state) and not torch.equal(torch_state, state)
    other_seed = DiffusionCollator(AbsorbingProcess(MASK + 1, MASK), seed=4)(rows_of(8))
    other_rows, reversed_rows = collate(rows_of(8, seed=1)), collate(rows_of(8)[::-1])
    for other in (other_seed, other_rows, reversed_rows):
        assert not torch.equal(one["timesteps"].sort().values, other["timesteps"].sort().values)


class Recorder(Trainer):
    """A stock Trainer that keeps the batches it was given; the model is one number."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        self.__dict__.setdefault("batches", []).append({k: v.clone() for k, v in inputs.items()})
        return model.weight.sum()


@pytest.mark.parametrize("process", [AbsorbingProcess(MASK + 1, MASK), UniformProcess(MASK + 1)], ids=["mdlm", "duo"])
def test_trainer_batches_do_not_depend_on_the_number_of_workers(tmp_path, process):
    """Two epochs through the stock Trainer with 0 and with 2 worker processes; the second epoch has other noise."""
    dataset = datasets.Dataset.from_list(rows_of(32))

    def batches(workers):
        arguments = TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=2, per_device_train_batch_size=8, seed=5, report_to="none",
            dataloader_num_workers=workers, remove_unused_columns=False, save_strategy="no", disable_tqdm=True,
            use_cpu=True,
        )  # fmt: skip
        trainer = Recorder(
            torch.nn.Linear(1, 1), arguments, data_collator=DiffusionCollator(process, seed=5), train_dataset=dataset
        )
        trainer.train()
        return trainer.batches

    alone, with_workers = batches(0), batches(2)
    assert len(alone) == len(with_workers) == 8
    for one, two in zip(alone, with_workers, strict=True):
        assert all(torch.equal(one[k], two[k]) for k in one)
    times = torch.stack([batch["timesteps"] for batch in alone])
    assert len(times.flatten().unique()) == times.numel()


def test_padded_rows_keep_their_attention_mask():
    rows = [
        {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 0]},
        {"input_ids": [4, 5, 6], "attention_mask": [1, 1, 1]},
    ]
    batch = DiffusionCollator(AbsorbingProcess(MASK + 1, MASK))(rows)
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_rows_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match=r"lengths \[2, 3\]"):
        DiffusionCollator(AbsorbingProcess(MASK + 1, MASK))([{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3]}])


@pytest.mark.parametrize(
    ("count", "expected"), [(3, [0, 3, 6]), (9, [*range(9)]), (10, [*range(10)]), (99, [*range(10)])]
)
def test_rows_for_a_table_come_from_the_whole_text(count, expected):
    """The first ones are of one or two documents: 64 of the quickstart's had a Gen.-PPL of 68, all 1,528 have 40."""
    rows = datasets.Dataset.from_dict({"input_ids": [[i] for i in range(10)]})
    assert spread_rows(rows, count) == [[i] for i in expected]
