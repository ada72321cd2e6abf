"""The published code of LLaDA and Dream, with what it lacks under transformers 5 put in while it is loaded.

Only the classes of that code are changed, never transformers. Each repair says what fails without it, as found with
transformers 5.24 and copies of the published files.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def load_remote(name: str, class_reference: str, config: PretrainedConfig, **kwargs: Any):
    """A model whose code lies beside it, and the loading information: the two things that `from_pretrained` gives.

    Args:
        name: a directory or a hub id.
        class_reference: the entry of `auto_map`, "file.Class".
        config: its configuration, of a model type in `REPAIRS`.
        kwargs: go to `from_pretrained`.
    """
    revision = kwargs.get("revision")
    model_class = get_class_from_dynamic_module(class_reference, name, revision=revision, code_revision=revision)
    model_class.register_for_auto_class("AutoModel")  # so that its code is saved beside the weights
    REPAIRS[config.model_type](model_class, config)
    # Not the class's own from_pretrained: Dream's goes on to read a generation configuration, whose validate() does not
    # take the arguments that transformers 5 gives it.
    model, info = PreTrainedModel.from_pretrained.__func__(
        model_class, name, config=config, output_loading_info=True, **kwargs
    )
    if hasattr(model, "reset_rope_parameters"):
        model.reset_rope_parameters()  # buffers that no file holds are left as they were allocated
    return model, info


def load_remote_config(name: str, revision: str | None) -> PretrainedConfig:
    return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=True)


def _repair_llada(model_class: type, config: PretrainedConfig) -> None:
    # No post_init(): 'LLaDAModelLM' object has no attribute 'all_tied_weights_keys'.
    model_class.all_tied_weights_keys = {}
    # tie_weights() got an unexpected keyword argument 'missing_keys'.
    tie_weights = model_class.__dict__["tie_weights"]
    if not hasattr(tie_weights, "repaired"):

        def tie(self, *args, **kwargs):
            tie_weights(self)

        tie.repaired = True
        model_class.tie_weights = tie
    # The forward reads config.use_cache, which transformers 5 takes for a setting of generation and drops.
    config.use_cache = False
    # The code that is meant to run on a GPU is told so by its configuration; weights go where they are sent later.
    config.init_device = "cpu"

    # LLaDAModelLM does not support activation checkpointing: it has a switch of its own.
    def enable(self, *args, **kwargs):
        self.model.set_activation_checkpointing("whole_layer")

    def disable(self):
        self.model.set_activation_checkpointing(None)

    for word in ("gradient", "activation"):  # transformers renamed it in 5.24
        setattr(model_class, f"{word}_checkpointing_enable", enable)
        setattr(model_class, f"{word}_checkpointing_disable", disable)


def _repair_dream(model_class: type, config: PretrainedConfig) -> None:
    # KeyError: 'default'. The table in the module of the code gets the entry that transformers 5 dropped.
    module = sys.modules[model_class.__module__]
    module.ROPE_INIT_FUNCTIONS = {**ROPE_INIT_FUNCTIONS, "default": _default_frequencies}
    # save_pretrained: 'list' object has no attribute 'keys'. Nothing is tied (tie_word_embeddings is false).
    model_class._tied_weights_keys = {}


def _default_frequencies(config: PretrainedConfig, device=None, **kwargs: Any) -> tuple[torch.Tensor, float]:
    """Inverse frequencies of plain rotary positions, and the factor of the attention, 1."""
    size = config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    return config.rope_theta**-exponents, 1.0


REPAIRS = {"llada": _repair_llada, "Dream": _repair_dream}
