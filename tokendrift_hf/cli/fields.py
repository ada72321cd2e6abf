"""Fields of dataclasses as YAML files and flags spell them: values read as their types, flags, a list for --help."""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import textwrap
import types
import typing
from dataclasses import fields
from pathlib import Path

import yaml

_MOST_VALUES = 10_000  # in one recipe
# YAML 1.1 reads 1e-4 as text, but everybody means the number.
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")


class _Loader(yaml.SafeLoader):
    """YAML as it is meant: a name that is there twice is a mistake."""


def _unique_mapping(loader: _Loader, node: yaml.MappingNode) -> dict:
    names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
    if twice := {name for name in names if names.count(name) > 1}:
        raise yaml.constructor.ConstructorError(None, None, f"{sorted(twice)[0]} is there twice", node.start_mark)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_mapping)


def read_yaml(text: str, where: str):
    """The value of a YAML text, all of plain dicts, lists and scalars. `where` names its place in messages.

    Raises:
        ValueError: the text is no YAML, or has values that hold themselves, or NaN.
    """
    try:
        value = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{where} is not valid YAML: {reason or type(error).__name__}") from error
    count, todo = 0, [value]
    while todo:
        part, count = todo.pop(), count + 1
        if count > _MOST_VALUES:  # aliases can make much, or something endless, of little
            raise ValueError(f"{where} holds itself, or more than {_MOST_VALUES:,} values. No field needs that.")
        if isinstance(part, dict):
            todo += [*part, *part.values()]
        elif isinstance(part, (list, tuple, set)):
            todo += part
        elif isinstance(part, float) and math.isnan(part):
            raise ValueError(f"{where} has a value that is not a number (nan). Give a number, or leave the field out.")
    return value


def read_as(value, kind, flag: str | None = None):
    """The first reading of a value from YAML that is of a type. `flag` is what the user typed, if it is from a flag."""
    readings = [value] if isinstance(value, str) else []
    readings.append(_with_numbers(value))
    if flag is not None and not isinstance(value, (list, dict)):
        readings.append(flag)  # --revision 1234567, --save_strategy no: YAML sees no text there
    if flag is not None:
        readings.append([_with_numbers(value)])  # --num_steps 4
    if value is False:
        readings.append("no")  # what YAML 1.1 makes of it: save_strategy: no
    return next((reading for reading in readings if is_of(reading, kind)), _with_numbers(value))


def _with_numbers(value):
    if isinstance(value, list):
        return [_with_numbers(x) for x in value]
    if isinstance(value, dict):
        return {name: _with_numbers(x) for name, x in value.items()}
    return float(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else value


def is_of(value, kind) -> bool:
    """Whether a value read from YAML is of an annotated type. Types that YAML cannot express are let through."""
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return any(is_of(value, option) for option in typing.get_args(kind))
    if origin is typing.Literal:
        return value in typing.get_args(kind)
    if origin is list or kind is list:
        items = typing.get_args(kind)
        return isinstance(value, (list, tuple)) and all(is_of(x, items[0]) for x in value if items)
    if origin is dict:
        return isinstance(value, dict)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind in (bool, str, dict, type(None)):
        return isinstance(value, kind)
    return isinstance(value, str) if isinstance(kind, type) else True


def type_name(kind) -> str:
    """A type as recipes would say it."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(map(type_name, typing.get_args(kind)))
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(map(str, typing.get_args(kind)))
    return "null" if kind is type(None) else str(kind) if typing.get_origin(kind) else kind.__name__


def spellings(name: str) -> list[str]:
    """The two ways to write a flag: --num-steps and --num_steps."""
    return list(dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}")))


def add_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """A flag for every field of a dataclass. Flags that are not given leave the field to the class's default."""
    kinds = typing.get_type_hints(cls)
    for f in fields(cls):
        kind, several = kinds[f.name], typing.get_origin(kinds[f.name]) is list
        if not isinstance(kind, type):  # list[int], str | None
            kind = typing.get_args(kind)[0]
        default = getattr(cls(), f.name)
        shown = " ".join(map(str, default)) if several else default
        parser.add_argument(
            *spellings(f.metadata.get("option", f.name)),
            dest=f.name,
            type=kind,
            nargs="+" if several else None,
            default=argparse.SUPPRESS,
            help=f.metadata["help"] + ("" if default is None else f" Default: {shown}."),
        )


def from_options(cls: type, options: argparse.Namespace):
    """The dataclass of what `add_options` read."""
    return cls(**{f.name: getattr(options, f.name) for f in fields(cls) if f.name in options})


def documented_fields(path: Path) -> list[str]:
    """Name, type, default and meaning of every field of the dataclasses in a source file, as lines for --help.

    The source is read and not imported, since `DriftConfig` needs torch and transformers, which take seconds.
    """
    lines = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call)):
            continue
        given = {keyword.arg: keyword.value for keyword in node.value.keywords}
        if "metadata" not in given:
            continue
        metadata, default = ast.literal_eval(given["metadata"]), ""
        if "default" in given:
            default = f" = {json.dumps(ast.literal_eval(given['default']))}"
        elif isinstance(given.get("default_factory"), ast.Lambda):
            default = f" = {ast.unparse(given['default_factory'].body)}"
        name, kind = metadata.get("option", node.target.id), ast.unparse(node.annotation).replace("None", "null")
        lines.append(f"  {name}: {kind}{default}")
        lines.append(textwrap.fill(metadata["help"], 100, initial_indent=" " * 6, subsequent_indent=" " * 6))
    return lines
