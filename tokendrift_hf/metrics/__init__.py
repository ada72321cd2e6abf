"""Metrics. Importing this package is cheap: `GenPPL`, which needs `evaluate`, is imported when it is first used."""

from __future__ import annotations

from tokendrift_hf.metrics.shim import install_shim

__all__ = ["GenPPL", "install_shim"]


def __getattr__(name: str):
    if name == "GenPPL":
        from tokendrift_hf.metrics.gen_ppl import GenPPL

        return GenPPL
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
