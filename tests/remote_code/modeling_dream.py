"""A stand-in for Dream's code with its contract and its faults under transformers 5.

Kept: the names of all modules, logits that predict the next token, a mask that is None, "full" or bool with four
dimensions, frequencies in a buffer that no file holds, its own generate(). Faults: the rope of type "default", which
transformers 5 no longer lists, `_tied_weights_keys` as a list, a generation configuration whose validate() takes no
arguments, read by from_pretrained.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, MaskedLMOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_dream import DreamConfig


class DreamGenerationConfig(GenerationConfig):
    def validate(self, is_init=False):
        pass


class DreamGenerationMixin:
    def diffusion_generate(self, inputs):
        raise NotImplementedError


class DreamRMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class DreamRotaryEmbedding(nn.Module):
    def __init__(self, config, device=None):
        super().__init__()
        self.config, self.rope_kwargs = config, {}
        scaling = config.rope_scaling
        self.rope_type = "default" if scaling is None else scaling.get("rope_type", scaling.get("type"))
        self.rope_init_fn = ROPE_INIT_FUNCTIONS[self.rope_type]
        inv_freq, self.attention_scaling = self.rope_init_fn(config, device, **self.rope_kwargs)
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.original_inv_freq = self.inv_freq

    def reset_parameters(self):
        inv_freq, self.attention_scaling = self.rope_init_fn(self.config, self.inv_freq.device, **self.rope_kwargs)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat([angles, angles], -1)
        return angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


class DreamSdpaAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_heads, size = config.num_attention_heads, config.hidden_size
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size) for _ in range(3))
        self.o_proj = nn.Linear(size, size, bias=False)
        self.rotary_emb = DreamRotaryEmbedding(config)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None):
        heads = (f(hidden_states).unflatten(-1, (self.num_heads, -1)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.transpose(1, 2) for x in heads)
        mask = attention_mask if isinstance(attention_mask, torch.Tensor) else None
        if mask is not None and mask.dtype != torch.bool:
            raise ValueError("the mask must be bool")
        out = F.scaled_dot_product_attention(rotate(q, *position_embeddings), rotate(k, *position_embeddings), v, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class DreamMLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DreamDecoderLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = DreamSdpaAttention(config), DreamMLP(config)
        self.input_layernorm = DreamRMSNorm(config.hidden_size)
        self.post_attention_layernorm = DreamRMSNorm(config.hidden_size)

    def forward(self, hidden_states, attention_mask=None, position_embeddings=None):
        x = hidden_states + self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_embeddings)
        return (x + self.mlp(self.post_attention_layernorm(x)),)


class DreamPreTrainedModel(PreTrainedModel):
    config_class = DreamConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DreamDecoderLayer"]
    _supports_sdpa = True

    def _init_weights(self, module):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.data.normal_(mean=0.0, std=self.config.initializer_range)

    @classmethod
    def from_pretrained(cls, name, *args, **kwargs):
        model = super().from_pretrained(name, *args, **kwargs)
        model.generation_config = DreamGenerationConfig.from_pretrained(name)
        return model


class DreamBaseModel(DreamPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.layers = nn.ModuleList(DreamDecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = DreamRMSNorm(config.hidden_size)
        self.rotary_emb = DreamRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, output_hidden_states=None):
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = self.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
        states = ()
        for layer in self.layers:
            states += (x,)
            if self.gradient_checkpointing and self.training:
                x = self._gradient_checkpointing_func(layer.__call__, x, attention_mask, positions)[0]
            else:
                x = layer(x, attention_mask=attention_mask, position_embeddings=positions)[0]
        x = self.norm(x)
        return BaseModelOutput(last_hidden_state=x, hidden_states=(*states, x) if output_hidden_states else None)


class DreamModel(DreamGenerationMixin, DreamPreTrainedModel):
    _tied_weights_keys = ["lm_head.weight"]

    def __init__(self, config):
        super().__init__(config)
        self.model = DreamBaseModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def reset_rope_parameters(self):
        self.model.rotary_emb.reset_parameters()
        for layer in self.model.layers:
            layer.self_attn.rotary_emb.reset_parameters()

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def get_output_embeddings(self):
        return self.lm_head

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_hidden_states=None,
        return_dict=None,
        num_logits_to_keep=0,
    ):
        outputs = self.model(input_ids, attention_mask, inputs_embeds, output_hidden_states)
        logits = self.lm_head(outputs[0][:, -num_logits_to_keep:, :])
        return MaskedLMOutput(logits=logits, hidden_states=outputs.hidden_states)
