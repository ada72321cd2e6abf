"""A stand-in for Dream's configuration."""

from transformers import PretrainedConfig


class DreamConfig(PretrainedConfig):
    model_type = "Dream"

    def __init__(
        self,
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=16,
        initializer_range=0.02,
        rope_theta=10000.0,
        rope_scaling=None,
        attention_dropout=0.0,
        mask_token_id=23,
        pad_token_id=22,
        use_cache=False,
        tie_word_embeddings=False,
        **kwargs,
    ):
        self.vocab_size, self.hidden_size, self.intermediate_size = vocab_size, hidden_size, intermediate_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.max_position_embeddings, self.initializer_range = max_position_embeddings, initializer_range
        self.rope_theta, self.rope_scaling, self.attention_dropout = rope_theta, rope_scaling, attention_dropout
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)
        self.mask_token_id, self.pad_token_id = mask_token_id, pad_token_id
