"""TokenDrift for Hugging Face: refine discrete diffusion language models so that few steps give much better text.

Importing the package registers both model types with transformers' Auto classes. Everything heavier (the trainer,
the metric) is imported when its name is first used.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

__version__ = "0.1.0.dev0"

_MODULE_OF = {
    "MDLMConfig": "hub.configuration_tokendrift",
    "DUOConfig": "hub.configuration_tokendrift",
    "MDLMForMaskedLM": "hub.modeling_tokendrift",
    "DUOForMaskedLM": "hub.modeling_tokendrift",
    "DiffusionGenerationConfig": "hub.settings_tokendrift",
    "DriftConfig": "training.drift_config",
    "DriftObjective": "objective.drift_objective",
    "DriftTrainer": "training.drift_trainer",
    "FeatureQueue": "objective.queue",
    "FrozenEncoder": "objective.encoder",
    "GenPPL": "metrics",
    "as_diffusion": "models.adapter",
    "drift_field": "objective.drift",
}

__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__():
    return sorted({*globals(), *__all__})


def _register() -> None:
    from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM

    from .hub.configuration_tokendrift import DUOConfig, MDLMConfig
    from .hub.modeling_tokendrift import DUOForMaskedLM, MDLMForMaskedLM

    for config_class, model_class in ((MDLMConfig, MDLMForMaskedLM), (DUOConfig, DUOForMaskedLM)):
        AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
        AutoModel.register(config_class, model_class, exist_ok=True)
        AutoModelForMaskedLM.register(config_class, model_class, exist_ok=True)


# The command answers --help in a fraction of a second: it registers the models itself, once it needs them.
if Path(sys.argv[0]).name not in ("tokendrift", "tokendrift.exe"):
    _register()

    from .metrics import install_shim

    install_shim()
