"""The fresh interpreters of the tests are those of a stranger."""

from __future__ import annotations

import os
from pathlib import Path

from conftest import run_python


def test_a_fresh_interpreter_has_no_modules_that_this_session_has_downloaded(tmp_path, monkeypatch):
    """Code from the hub that an earlier test has loaded leaves its folder on the path, which would hide another one."""
    package = Path(os.environ["HF_HOME"]) / "modules/downloaded_by_a_test"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(package.parent)
    __import__(package.name)
    for isolated in (True, False):
        code = f"import importlib.util; print(importlib.util.find_spec({package.name!r}))"
        assert run_python(code, tmp_path / str(isolated), isolated=isolated).strip() == "None"
