"""The shape of the code: which module may import which, and what the files shipped with a checkpoint may contain."""

from __future__ import annotations

import ast
import re
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tokendrift_hf"
FILES = sorted(PACKAGE.rglob("*.py"))
HUB_FILES = sorted(path for path in (PACKAGE / "hub").glob("*.py") if path.name != "__init__.py")

# The rooms from low to high: a file imports from its own room and from those on lower floors.
FLOORS = [
    {"hub", "metrics", "files", "lock", "extras", "markdown"},
    {"models", "data", "objective"},
    {"publishing", "evaluation"},
    {"training"},
    {"demo"},
    {"cli"},
]
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
ENTRANCE = PACKAGE / "__init__.py"  # knows where the public names live; every room may read `__version__` from it


def imports(path: Path) -> set[tuple[int, str]]:
    """(level, module) of every import anywhere in a file; `from . import x` counts as (1, "x")."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(0, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {(node.level, name) for name in names}
    return found


def room(path: Path) -> str:
    """The folder of a file, or its own name at the top of the package."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def rooms_imported(path: Path) -> set[str]:
    """The rooms of this package that a file imports from, wherever in the file it does so."""
    folder = path.parent.relative_to(PACKAGE).parts
    targets = set()
    for level, name in imports(path):
        parts = tuple(name.split("."))
        if level:
            targets.add((folder[: len(folder) - level + 1] + parts)[0])
        elif parts[0] == PACKAGE.name:
            targets.add(parts[1] if len(parts) > 1 else "__init__")
    return targets - {"__version__", "_register"}


def outside(path: Path) -> set[str]:
    """The top-level packages outside this one and the standard library that a file imports."""
    own = {PACKAGE.name} | set(sys.stdlib_module_names)
    return {name.partition(".")[0] for level, name in imports(path) if not level} - own


def test_every_room_is_known_and_has_files():
    """A new folder must get its floor, and a floor names no room that is gone."""
    found = {room(path) for path in FILES if path != ENTRANCE}
    assert found == set(FLOOR)
    assert len(FILES) > 40, "the rule below would hold for no files as well"


@pytest.mark.parametrize(
    "path", [path for path in FILES if path != ENTRANCE], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_a_file_imports_from_its_own_room_and_from_lower_floors(path):
    own = room(path)
    for other in rooms_imported(path) - {own}:
        assert FLOOR[other] < FLOOR[own], f"{own} (floor {FLOOR[own]}) imports {other} (floor {FLOOR.get(other)})"


@pytest.mark.parametrize("path", sorted((PACKAGE / "objective").glob("[!_]*.py")), ids=lambda path: path.name)
def test_the_objective_needs_torch_alone(path):
    """The encoder also needs transformers. Noise is numpy's, which gives the same numbers on every device."""
    beside = {"encoder.py": {"transformers"}, "noise.py": {"numpy"}}
    assert outside(path) <= {"torch"} | beside.get(path.name, set())


def test_gradio_is_for_the_page_alone():
    """Who does not open the page needs no gradio and waits for none of it, so one file imports it."""
    users = [path.relative_to(PACKAGE).as_posix() for path in FILES if "gradio" in outside(path)]
    assert users == ["demo/page.py"]
    importers = {room(path) for path in FILES if "demo" in rooms_imported(path) and room(path) != "demo"}
    assert importers == {"cli"}


def test_no_import_cycle():
    """Following the imports among the files of a room one never comes back."""
    for folder in FLOOR:
        files = {path.stem: path for path in (PACKAGE / folder).glob("*.py") if not path.stem.startswith("__")}
        graph = {stem: {n for level, n in imports(path) if level == 1} & set(files) for stem, path in files.items()}

        def visit(name: str, trail: tuple[str, ...], graph=graph):
            assert name not in trail, " -> ".join((*trail, name))
            for other in graph[name]:
                visit(other, (*trail, name))

        for name in graph:
            visit(name, ())


# The files that travel with every checkpoint. transformers finds the files to copy with a regular expression over their
# text, flattens them into one folder, and asks for every package that they import outside a try block.


def test_every_hub_file_is_reached_from_the_model():
    """What the model does not import, directly or not, would not be copied; and nothing is there for nothing."""
    reached, todo = set(), ["modeling_tokendrift"]
    while todo:
        name = todo.pop()
        if name not in reached:
            reached.add(name)
            todo += [module for level, module in imports(PACKAGE / "hub" / f"{name}.py") if level]
    assert reached == {path.stem for path in HUB_FILES}
    assert (PACKAGE / "hub" / "__init__.py").read_text() == ""


@pytest.mark.parametrize("path", HUB_FILES, ids=lambda path: path.name)
def test_hub_files_use_only_imports_that_survive_copying(path):
    tree, text = ast.parse(path.read_text()), path.read_text()
    assert path.name.endswith("_tokendrift.py")
    assert outside(path) <= {"torch", "transformers"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node.module, f"line {node.lineno}: only `from .name import y` is copied"
            assert (PACKAGE / "hub" / f"{node.module}.py").exists(), f"line {node.lineno}: no such sibling"
    at_top = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    everywhere = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert len(at_top) == len(everywhere), "an import inside a function or block is checked, too, or is not copied"
    # The regular expressions of transformers see docstrings and comments as well.
    seen = set(re.findall(r"^\s*import\s+\.(\S+)\s*$", text, re.MULTILINE))
    seen |= set(re.findall(r"^\s*from\s+\.(\S+)\s+import", text, re.MULTILINE))
    assert seen == {module for level, module in imports(path) if level}
    assert not re.search(r"^\s*(import|from)\s+tokendrift_hf", text, re.MULTILINE)


@pytest.mark.parametrize("path", HUB_FILES, ids=lambda path: path.name)
def test_hub_files_do_not_depend_on_the_identity_of_configuration_classes(path):
    """A local directory gives the model and AutoConfig two copies of the class, so isinstance on it would be False."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("isinstance", "issubclass"):
            names = {child.id for child in ast.walk(node.args[1]) if isinstance(child, ast.Name)}
            assert not {name for name in names if name.endswith("Config")}, f"line {node.lineno}"


def test_the_mixin_keeps_the_name_that_transformers_leaves_alone():
    """A class with `generate` gets transformers' GenerationMixin grafted on unless a base has a name like it."""
    tree = ast.parse((PACKAGE / "hub" / "modeling_tokendrift.py").read_text())
    models = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith("ForMaskedLM")]
    assert {node.name for node in models} == {"MDLMForMaskedLM", "DUOForMaskedLM"}
    for node in models:
        assert any(base.id.endswith("GenerationMixin") for base in node.bases)
    configs = [
        statement.value.id
        for node in models
        for statement in node.body
        if isinstance(statement, ast.Assign) and statement.targets[0].id == "config_class"
    ]
    assert sorted(configs) == ["DUOConfig", "MDLMConfig"]  # sharing one, the second load would give the first class


def test_files_that_are_no_python_go_into_the_wheel():
    config = ConfigParser()
    config.read(PACKAGE.parent / "setup.cfg")
    patterns = [pattern.strip() for pattern in config["options.package_data"]["tokendrift_hf"].split(",")]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    others = {path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert shipped == others


# What keeps the code readable: a subject a file, a function that is seen whole, a statement a sentence.

LONGEST = {"file": 450, "function": 60, "DriftTrainer": 260}  # lines
ALONE = {"metrics/gen_ppl/gen_ppl.py"}  # evaluate copies the one file of a metric, so it cannot be cut
PLANTED = '''"""A module."""

class Named:
    """First this; then that."""

    def method(self):
        """Says what it does."""
        one = 1

        return one
'''


def definitions(text: str) -> list[ast.AST]:
    """Everything in a file that can have a docstring, the file itself first."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]


def with_semicolons(text: str) -> list[str]:
    """The docstrings that join statements by a semicolon, where each wants a sentence of its own."""
    return [doc for doc in map(ast.get_docstring, definitions(text)) if doc and ";" in doc]


def lines_of_bodies(text: str) -> dict[str, int]:
    """Lines of every function without its head and docstring, by its name and line."""
    lines = {}
    for node in definitions(text):
        body = node.body[ast.get_docstring(node) is not None :]
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and body:
            lines[f"{node.name}:{node.lineno}"] = body[-1].end_lineno - body[0].lineno + 1
    return lines


def test_the_rules_below_see_what_breaks_them():
    assert with_semicolons(PLANTED) == ["First this; then that."]
    assert lines_of_bodies(PLANTED) == {"method:6": 3}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_and_functions_are_short_and_docstrings_have_no_semicolons(path):
    text = path.read_text()
    assert len(text.splitlines()) <= LONGEST["file"] or path.relative_to(PACKAGE).as_posix() in ALONE
    assert not {name: n for name, n in lines_of_bodies(text).items() if n > LONGEST["function"]}
    assert with_semicolons(text) == []


def test_the_trainer_reads_as_the_method_alone():
    """What makes a run resumable is `ResumableTrainer`'s, and formulas are the objective's."""
    trainer = next(
        node
        for node in definitions((PACKAGE / "training/drift_trainer.py").read_text())
        if getattr(node, "name", "") == "DriftTrainer"
    )
    assert trainer.end_lineno - trainer.lineno + 1 < LONGEST["DriftTrainer"]
