"""A stand-in for LLaDA's configuration: its field names, and what transformers 5 does to `use_cache`."""

from transformers import PretrainedConfig


class LLaDAConfig(PretrainedConfig):
    model_type = "llada"

    def __init__(self, use_cache=False, **kwargs):
        fields = dict(
            d_model=16,
            n_heads=2,
            n_layers=3,
            mlp_hidden_size=24,
            vocab_size=24,
            embedding_size=24,
            max_sequence_length=16,
            rope_theta=10000.0,
            weight_tying=False,
            init_device="cpu",
            residual_dropout=0.0,
            mask_token_id=23,
        )
        super().__init__(**fields | kwargs | {"use_cache": use_cache})

    @property
    def num_attention_heads(self):
        return self.n_heads

    @property
    def num_hidden_layers(self):
        return self.n_layers

    @property
    def hidden_size(self):
        return self.d_model
