"""A file in the modules cache of `evaluate` that lets `evaluate.load("gen_ppl")` find the metric of this package."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import uuid
from pathlib import Path

# Does not depend on the version: every writer writes the same bytes, and whatever version is importable is used.
SHIM = '''"""Written by tokendrift_hf so that evaluate.load("gen_ppl") finds its metric."""

from tokendrift_hf.metrics.gen_ppl import GenPPL  # noqa: F401
'''


def modules_cache() -> Path:
    """The folder of dynamic modules, resolved as `evaluate.config` does, without the seconds that its import takes."""
    if "evaluate.config" in sys.modules:
        return Path(sys.modules["evaluate.config"].HF_MODULES_CACHE)
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    return Path(os.environ.get("HF_MODULES_CACHE", os.path.join(os.path.expanduser(home), "modules")))


def install_shim() -> Path | None:
    """Write the shim where `evaluate` looks after it found neither `./gen_ppl` nor a Space of that name.

    Returns its path, or None if `evaluate` is not installed, the environment has TOKENDRIFT_NO_EVALUATE_SHIM=1, or the
    cache cannot be written (then nothing that `evaluate` loads by name works either). Safe with many processes at once.
    """
    if os.environ.get("TOKENDRIFT_NO_EVALUATE_SHIM") == "1" or importlib.util.find_spec("evaluate") is None:
        return None
    root = modules_cache() / "evaluate_modules"
    # evaluate takes sub-folders whose names have 64 characters for versions of the module
    folder = root / "metrics" / "evaluate-metric--gen_ppl" / hashlib.sha256(SHIM.encode()).hexdigest()
    path = folder / "gen_ppl.py"
    try:
        if path.is_file() and path.read_text(encoding="utf-8") == SHIM:
            return path
        folder.mkdir(parents=True, exist_ok=True)
        for package in (root, folder.parents[1], folder.parent, folder):
            (package / "__init__.py").touch()
        temporary = folder / f".gen_ppl.{uuid.uuid4().hex}"
        temporary.write_text(SHIM, encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        return None
    return path
