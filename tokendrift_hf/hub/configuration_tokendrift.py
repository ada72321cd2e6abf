"""Configurations of the two models. The released field names (hidden_dim, n_blocks, ...) are accepted as well."""

from typing import ClassVar

from transformers import PreTrainedConfig

# Far more than any published model has: what a slip or a stranger's file asks for would take all memory, or hours.
LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**17,
    "cond_dim": 2**17,
    "num_hidden_layers": 10_000,
    "num_attention_heads": 2**16,
    "max_position_embeddings": 2**24,
}


def check_switch(name: str, value):
    """Raise ValueError for anything but True and False: `if value` would take "no" for True."""
    if type(value) is not bool:
        raise ValueError(f"{name}={value!r} in a configuration. It must be true or false.")


class DiTConfig(PreTrainedConfig):
    """The diffusion transformer shared by MDLM and DUO. Defaults are the released 170M models.

    Args:
        vocab_size: V, the mask (MDLM) or padding token (DUO) included.
        hidden_size: width of the residual stream (released name: hidden_dim).
        cond_dim: width of the time conditioning. The released classes default to 129, a slip that their files correct.
        num_hidden_layers: number of blocks (released name: n_blocks).
        num_attention_heads: number of heads (released name: n_heads).
        max_position_embeddings: the longest sequence, in tokens (released name: model_length).
        dropout: probability of dropping a value of either branch of a block, while training.
        time_conditioning: whether the network sees the diffusion time. Without it the network always sees sigma = 0.
        initializer_range: standard deviation of freshly drawn embeddings and linear weights.
    """

    released_model_type: ClassVar[str] = ""
    attribute_map: ClassVar[dict[str, str]] = {
        "hidden_dim": "hidden_size",
        "n_blocks": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "model_length": "max_position_embeddings",
    }

    def __init__(
        self,
        vocab_size: int = 50258,
        hidden_size: int = 768,
        cond_dim: int = 128,
        num_hidden_layers: int = 12,
        num_attention_heads: int = 12,
        max_position_embeddings: int = 1024,
        dropout: float = 0.1,
        time_conditioning: bool = False,
        initializer_range: float = 0.02,
        **kwargs,
    ):
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.cond_dim = cond_dim
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.max_position_embeddings = max_position_embeddings
        self.dropout = dropout
        self.time_conditioning = time_conditioning
        self.initializer_range = initializer_range
        if any(name in kwargs for name in self.attribute_map):
            # A released config.json names its own code and asks for bare tensors; neither holds for this class.
            for name in ("auto_map", "architectures", "return_dict", "torch_dtype", "model_type"):
                kwargs.pop(name, None)
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)
        for name, largest in LARGEST.items():
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= largest:
                raise ValueError(f"{name}={value!r} in a configuration. It must be a whole number from 1 to {largest}.")
        for name in ("time_conditioning", "tie_word_embeddings"):
            check_switch(name, getattr(self, name))
        if type(self.dropout) not in (int, float) or not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout!r} in a configuration. It must be a number from 0 to below 1.")
        if self.hidden_size % self.num_attention_heads or (self.hidden_size // self.num_attention_heads) % 2:
            raise ValueError(
                f"hidden_size={self.hidden_size} cannot be split into num_attention_heads={self.num_attention_heads} "
                "heads of an even width (rotary positions need pairs). Choose a hidden_size that is a multiple of "
                "2 * num_attention_heads."
            )
        if self.tie_word_embeddings:
            raise ValueError("tie_word_embeddings=True is not supported: the released layout has two separate tables.")

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs):
        """The content of config.json. A missing or foreign one is an error: its weights would not fit anyway."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        found = config_dict.get("model_type")
        if found not in (cls.model_type, cls.released_model_type):
            what = f"is of model_type {found!r}" if found else "is missing or has no model_type"
            raise ValueError(
                f"The config.json of {str(pretrained_model_name_or_path)!r} {what}, but {cls.__name__} reads "
                f"{cls.model_type!r} and the released {cls.released_model_type!r}. Load it with the class that wrote "
                "it, or copy the directory again."
            )
        return {**config_dict, "model_type": cls.model_type}, kwargs


class MDLMConfig(DiTConfig):
    """A masked diffusion language model (arXiv 2406.07524).

    Args:
        mask_token_id: the id of the mask. The default is the last id, vocab_size - 1.
        others: see `DiTConfig`.
    """

    model_type = "tokendrift_mdlm"
    released_model_type: ClassVar[str] = "mdlm"

    def __init__(self, mask_token_id: int | None = None, **kwargs):
        super().__init__(**kwargs)
        self.mask_token_id = self.vocab_size - 1 if mask_token_id is None else mask_token_id
        if type(self.mask_token_id) is not int or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id={self.mask_token_id!r} is outside the vocabulary of {self.vocab_size} ids (0 to "
                f"{self.vocab_size - 1})."
            )


class DUOConfig(DiTConfig):
    """A uniform-state diffusion language model (arXiv 2506.10892). See `DiTConfig` for the fields."""

    model_type = "tokendrift_duo"
    released_model_type: ClassVar[str] = "DUO"

    def __init__(self, time_conditioning: bool = True, causal: bool = False, **kwargs):
        check_switch("causal", causal)
        if causal:
            raise ValueError("causal=True is the autoregressive variant of the released class, which is not supported.")
        super().__init__(time_conditioning=time_conditioning, **kwargs)
