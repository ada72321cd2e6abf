"""Pickles read without running them. Nothing that one names is imported, called or given attributes.

A pickle is a program for a small stack machine, and the usual readers run it: they import what it names and call it.
Here its steps are taken one by one, and only those that make containers, text and numbers do anything. Everything else
becomes a `Foreign` object that holds what it was given.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False, repr=False)
class Foreign:
    """An object of a class that is not read.

    Attributes:
        name: module and name of its class, or of itself if it is a class or function.
        arguments: what it would have been called with.
        state: what it would have been given as its attributes.
    """

    name: str
    arguments: tuple = ()
    state: Any = None


def plain_dict(items: Iterable[tuple] = ()) -> dict:
    """A dict of pairs, whose keys are text, numbers or foreign objects."""
    return {_key(key): value for key, value in items}


def _key(value: Any) -> Any:
    """A key of a dict or an item of a set. Hashing a tuple that a stranger nested could take the program down."""
    if not isinstance(value, (str, bytes, int, float, type(None), Foreign)):
        raise TypeError(f"a key is a {type(value).__name__}, where text or a number is needed")
    return value


class PickleReader:
    """The stack machine of pickle, all protocols, without imports, calls and attributes.

    Args:
        persistent_load: gives the object for a reference that the pickle holds, such as a storage.
        builders: "module name" of a function -> what stands in for it. Whatever else is called gives a `Foreign`.
    """

    def __init__(self, persistent_load: Callable[[Any], Any], builders: dict[str, Callable]):
        self.persistent_load, self.builders = persistent_load, builders

    def read(self, data: bytes) -> Any:
        """The object that a pickle holds.

        Raises:
            ValueError: a bad pickle.
            LookupError, TypeError: a step of a bad pickle fails, or has no place in a checkpoint.
        """
        self.stack: list = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return self.stack.pop()
            if opcode.name in _LITERALS:
                self.stack.append(argument)
            else:
                _STEPS[opcode.name](self, argument)  # a KeyError for those that are left out: extensions, buffers
        raise ValueError("a pickle without an end")

    def since_mark(self) -> list:
        start = self.marks.pop()
        items, self.stack[start:] = self.stack[start:], []
        return items

    def collect(self, items: list) -> None:
        """Append to the list on top of the stack, or add to the set there. A foreign object takes nothing in."""
        target = self.stack[-1]
        if isinstance(target, list):
            target.extend(items)
        elif isinstance(target, set):
            target.update(map(_key, items))
        elif not isinstance(target, Foreign):
            raise TypeError(f"items for a {type(target).__name__}")

    @staticmethod
    def pairs(items: list) -> dict:
        """Keys and values in turn as a dict."""
        return plain_dict(zip(items[::2], items[1::2], strict=True))

    def set_items(self, items: list) -> None:
        target = self.stack[-1]
        if isinstance(target, dict):
            target.update(self.pairs(items))
        elif not isinstance(target, Foreign):
            raise TypeError(f"items for a {type(target).__name__}")

    def call(self, function: Any, arguments: Any) -> None:
        if not isinstance(function, Foreign) or not isinstance(arguments, tuple):
            raise TypeError("a call of what is no function")
        builder = self.builders.get(function.name)
        self.stack.append(Foreign(function.name, arguments) if builder is None else builder(*arguments))

    def build(self, state: Any) -> None:
        """A foreign object keeps its state. A dict has one as well (the versions of modules), of which nothing is used.

        The functions and classes that a pickle names are foreign objects of this pickle alone.
        """
        target = self.stack[-1]
        if isinstance(target, Foreign):
            target.state = state
        elif not isinstance(target, dict):
            raise TypeError(f"a state for a {type(target).__name__}")


_LITERALS = {
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"),
}


def _push(make: Callable[[PickleReader], Any]) -> Callable[[PickleReader, Any], None]:
    return lambda reader, argument: reader.stack.append(make(reader))


def _last(reader: PickleReader, count: int) -> tuple:
    """The topmost `count` objects, taken off the stack."""
    return tuple(reversed([reader.stack.pop() for _ in range(count)]))


def _remember(reader: PickleReader, number: int | None) -> None:
    reader.memo[len(reader.memo) if number is None else number] = reader.stack[-1]


def _call_since_mark(reader: PickleReader, name: str | None) -> None:
    """INST and OBJ, of old protocols: a class, and its arguments since the mark."""
    items = reader.since_mark()
    function, *arguments = items if name is None else [Foreign(name), *items]
    reader.call(function, tuple(arguments))


_STEPS: dict[str, Callable[[PickleReader, Any], Any]] = {
    "PROTO": lambda reader, argument: None,
    "FRAME": lambda reader, argument: None,
    "NONE": _push(lambda reader: None),
    "NEWTRUE": _push(lambda reader: True),
    "NEWFALSE": _push(lambda reader: False),
    "EMPTY_LIST": _push(lambda reader: []),
    "EMPTY_TUPLE": _push(lambda reader: ()),
    "EMPTY_DICT": _push(lambda reader: {}),
    "EMPTY_SET": _push(lambda reader: set()),
    "LIST": _push(lambda reader: reader.since_mark()),
    "TUPLE": _push(lambda reader: tuple(reader.since_mark())),
    "TUPLE1": _push(lambda reader: _last(reader, 1)),
    "TUPLE2": _push(lambda reader: _last(reader, 2)),
    "TUPLE3": _push(lambda reader: _last(reader, 3)),
    "FROZENSET": _push(lambda reader: frozenset(map(_key, reader.since_mark()))),
    "DICT": _push(lambda reader: reader.pairs(reader.since_mark())),
    "APPEND": lambda reader, argument: reader.collect([reader.stack.pop()]),
    "APPENDS": lambda reader, argument: reader.collect(reader.since_mark()),
    "ADDITEMS": lambda reader, argument: reader.collect(reader.since_mark()),
    "SETITEM": lambda reader, argument: reader.set_items(list(_last(reader, 2))),
    "SETITEMS": lambda reader, argument: reader.set_items(reader.since_mark()),
    "MARK": lambda reader, argument: reader.marks.append(len(reader.stack)),
    "POP": lambda reader, argument: reader.stack.pop(),
    "POP_MARK": lambda reader, argument: reader.since_mark(),
    "DUP": _push(lambda reader: reader.stack[-1]),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"), _remember),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda reader, number: reader.stack.append(reader.memo[number])),
    "GLOBAL": lambda reader, name: reader.stack.append(Foreign(name)),
    "STACK_GLOBAL": _push(lambda reader: Foreign("{} {}".format(*map(_text, _last(reader, 2))))),
    "REDUCE": lambda reader, argument: reader.call(*_last(reader, 2)),
    "NEWOBJ": lambda reader, argument: reader.call(*_last(reader, 2)),
    "NEWOBJ_EX": lambda reader, argument: reader.call(*_last(reader, 3)[:2]),
    "INST": _call_since_mark,
    "OBJ": _call_since_mark,
    "BUILD": lambda reader, argument: reader.build(reader.stack.pop()),
    "PERSID": lambda reader, reference: reader.stack.append(reader.persistent_load(reference)),
    "BINPERSID": _push(lambda reader: reader.persistent_load(reader.stack.pop())),
}


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a name that is no text")
    return value
