"""Text by name: a split of the embedded corpus, of files here, of OpenWebText or of any dataset on the hub."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterator
from pathlib import Path

import datasets
import pyarrow as pa
from huggingface_hub.utils import HFValidationError

from .packing import TEXT

logger = logging.getLogger(__name__)

# Earlier commits of the dataset hold a loading script, which datasets 4 no longer runs. The releases of MDLM and DUO
# had 8,013,769 documents.
_OPENWEBTEXT = "Skylion007/openwebtext"
_OPENWEBTEXT_REVISION = "b4325f019c648b1641a1784748667e8b74e5e064"  # the release as parquet
_OPENWEBTEXT_DOCUMENTS = 8_013_769
_OPENWEBTEXT_VALIDATION = 100_000

_BUILDERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}


def load_text(
    name: str,
    *,
    split: str = "train",
    config: str | None = None,
    revision: str | None = None,
    text_column: str = "text",
    prompt_column: str | None = None,
    streaming: bool = False,
) -> datasets.Dataset | datasets.IterableDataset:
    """One split of a corpus as rows with a column `text`, one document a row, and maybe a column `prompt`.

    Args:
        name: one of four. "documentation" is the embedded corpus, with the splits train, validation, judge and
            reference. "openwebtext" is its parquet form, cut as the MDLM and DUO releases do: validation is the last
            100,000 documents. A file or a directory may hold .txt or .md (a file is a document), .jsonl, .json or
            .parquet. Hidden files and folders in a directory are skipped. Anything else is the name of a dataset on
            the hub.
        split: any split expression of `datasets`, e.g. "train[:1%]". Files have the one split "train".
        config: configuration of a hub dataset.
        revision: branch, tag or commit of a hub dataset.
        text_column: the column that holds the text.
        prompt_column: the column that holds the prompts which the text completes. None: there is none.
        streaming: read rows as they are needed instead of preparing an Arrow file first.

    Raises:
        ValueError: an argument that is no text, an unknown or empty split, a column that is missing or not text, files
            that are missing, of several kinds or without a document, or no such data set.
    """
    given = {"name": name, "split": split, "config": config, "revision": revision, "text_column": text_column}
    given |= {"prompt_column": prompt_column}
    for argument, value in given.items():
        optional = argument in ("config", "revision", "prompt_column") and value is None
        if not optional and (not isinstance(value, str) or not value):
            raise ValueError(f"{argument}={value!r}: it must be text.")
    if prompt_column == text_column:
        raise ValueError(f"prompt_column and text_column are both {text_column!r}; they are two columns.")
    try:
        text = _load(name, split, config, revision, streaming)
    except ValueError as error:
        if "corresponds to no data" not in str(error):  # what `datasets` says of a split without rows
            raise
        raise _no_document(name, split) from error
    # The columns under the names that packing expects. A stream may not know its columns before it is read.
    wanted = {text_column: "text"} | ({} if prompt_column is None else {prompt_column: "prompt"})
    for column, role in wanted.items():
        if text.column_names is not None and column not in text.column_names:
            raise ValueError(
                f"{name} has no column {column!r}; it has {text.column_names}. Set {role}_column to one of them."
            )
        if text.features is not None and text.features[column] not in TEXT:
            raise ValueError(f"column {column!r} of {name} is {text.features[column]}, not text.")
    text = text.select_columns(list(wanted))
    return text.rename_columns({old: new for old, new in wanted.items() if old != new})


def _load(
    name: str, split: str, config: str | None, revision: str | None, streaming: bool
) -> datasets.Dataset | datasets.IterableDataset:
    """The split with all its columns. A path comes before the name of a data set on the hub."""
    if name == "documentation":
        return _documentation(split, streaming)
    if Path(name).exists() or Path(name).suffix.lower() in _BUILDERS:
        return _local(name, split, streaming)
    if name in ("openwebtext", _OPENWEBTEXT):
        return _openwebtext(split, revision or _OPENWEBTEXT_REVISION, streaming)
    try:
        return datasets.load_dataset(name, config, split=split, revision=revision, streaming=streaming)
    except (OSError, HFValidationError) as error:  # also: no network, no such data set
        reason = str(error).partition("\n")[0]
        raise ValueError(f"There is no data set {name!r}: no file here, none on the hub ({reason}).") from error


def _no_document(name: str, split: str) -> ValueError:
    return ValueError(f"{name} holds no document in split {split!r}. Check what lies there, or give another split.")


def _documentation(split: str, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
    from .documentation import load_documentation

    parts = load_documentation()
    if split not in parts:
        raise ValueError(f"the documentation corpus has no split {split!r}; it has {list(parts)}.")
    return parts[split].to_iterable_dataset() if streaming else parts[split]


def _openwebtext(split: str, revision: str, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
    if split not in ("train", "validation"):
        raise ValueError(f"openwebtext has no split {split!r}; it has ['train', 'validation'].")
    if streaming:
        text = datasets.load_dataset(_OPENWEBTEXT, split="train", revision=revision, streaming=True)
        first = _OPENWEBTEXT_DOCUMENTS - _OPENWEBTEXT_VALIDATION
        return text.take(first) if split == "train" else text.skip(first)
    part = f"train[:-{_OPENWEBTEXT_VALIDATION}]" if split == "train" else f"train[-{_OPENWEBTEXT_VALIDATION}:]"
    text = datasets.load_dataset(_OPENWEBTEXT, split=part, revision=revision)
    if split == "train" and len(text) != _OPENWEBTEXT_DOCUMENTS - _OPENWEBTEXT_VALIDATION:
        logger.warning(
            "openwebtext at revision %s has %d documents to train on where the releases had %d: another snapshot, "
            "another split.",
            revision, len(text), _OPENWEBTEXT_DOCUMENTS - _OPENWEBTEXT_VALIDATION,
        )  # fmt: skip
    return text


def _local(name: str, split: str, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
    builder, files = _local_files(Path(name))
    # The encoding leaves out a byte order mark, which is no text. `datasets` takes paths for patterns.
    options = {"sample_by": "document", "encoding": "utf-8-sig"} if builder == "text" else {}
    options["data_files"] = [glob.escape(str(path.absolute())) for path in files]
    try:
        text = datasets.load_dataset(builder, split=split, streaming=streaming, **options)
        first = next(iter(text), None)  # a stream, and the bytes of a text, are looked at when they are read
    except (datasets.exceptions.DatasetGenerationError, pa.ArrowException, UnicodeDecodeError) as error:
        raise ValueError(f"{name} cannot be read as {builder}: {error.__cause__ or error}") from error
    if first is None:
        raise _no_document(name, split)
    return text


def _local_files(path: Path) -> tuple[str, list[Path]]:
    """The `datasets` builder for a file or the files below a directory, and their paths in order."""
    if not path.exists():
        raise ValueError(f"there is no file {path}; paths are relative to {Path.cwd()}.")
    files = sorted(_text_files(path)) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"{path} has no text file in it. Files that end in {', '.join(_BUILDERS)} are read.")
    builders = {_BUILDERS.get(p.suffix.lower()) for p in files}
    if len(builders) != 1 or None in builders:
        found = sorted({p.suffix for p in files})
        raise ValueError(
            f"{path}: found files of kinds {found}; give one file, or a directory with text of one kind "
            f"({', '.join(_BUILDERS)})."
        )
    if not any(p.stat().st_size for p in files):
        raise ValueError(f"{path} holds no document: every file is empty.")
    return builders.pop(), files


def _text_files(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if not hidden and path.suffix.lower() in _BUILDERS and path.is_file():
            yield path
