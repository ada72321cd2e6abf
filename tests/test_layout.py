"""The shape of the code: which module may import which, and what the files shipped with a checkpoint may contain."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "tokendrift_hf"
HUB_FILES = sorted(path for path in (PACKAGE / "hub").glob("*.py") if path.name != "__init__.py")
MODULES = sorted(path for path in PACKAGE.glob("*.py") if path.name != "__init__.py")

# What each module of computations may import from this package.
ARROWS = {"drift": set(), "lift": set(), "queue": set(), "objectives": {"drift", "lift"}}
TORCH_ONLY = [PACKAGE / f"{name}.py" for name in ("drift", "lift", "objectives")] + [
    PACKAGE / "hub" / "process_tokendrift.py"
]


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


def own(path: Path) -> set[str]:
    """The modules of this package that a top-level module imports, "hub" for all of hub/."""
    found = {name for level, name in imports(path) if level == 1}
    found |= {name.partition(".")[2] for level, name in imports(path) if not level and name.startswith("tokendrift_hf")}
    return {name.partition(".")[0] for name in found}


def outside(path: Path) -> set[str]:
    """The top-level packages outside this one and the standard library that a file imports."""
    return {name.partition(".")[0] for level, name in imports(path) if not level} - set(sys.stdlib_module_names)


@pytest.mark.parametrize("name", ARROWS)
def test_computations_import_only_what_is_below_them(name):
    assert own(PACKAGE / f"{name}.py") <= ARROWS[name]


@pytest.mark.parametrize("path", TORCH_ONLY, ids=lambda path: path.name)
def test_formulas_need_torch_only(path):
    assert outside(path) == {"torch"}


def test_no_import_cycle():
    """Following the imports among the top-level modules one never comes back."""
    graph = {path.stem: own(path) & {other.stem for other in MODULES} for path in MODULES}

    def visit(name: str, trail: tuple[str, ...]):
        assert name not in trail, " -> ".join((*trail, name))
        for other in graph[name]:
            visit(other, (*trail, name))

    for name in graph:
        visit(name, ())


def test_only_the_entry_points_import_the_command_line_or_the_trainer():
    allowed = {"cli": set(), "drift_trainer": {"cli", "run", "recipe", "harness"}}
    for target, importers in allowed.items():
        found = {path.stem for path in MODULES if target in own(path)}
        assert found <= importers, (target, found)


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
