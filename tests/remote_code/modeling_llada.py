"""A stand-in for LLaDA's code with its contract and its faults under transformers 5.

Kept: the names of all modules, a wrapper that calls the inner forward (no hooks run there), the head inside the inner
model, hidden states whose last is normed, the 2-D mask, positions in a cache that is filled on `init_device`, blocks
that return a pair, activation checkpointing by its own switch. Faults: no post_init(), tie_weights() without
arguments, `config.use_cache` read although transformers 5 drops it.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_llada import LLaDAConfig


class RMSLayerNorm(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.d_model))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)


class RotaryEmbedding(nn.Module):
    def __init__(self, config, cache):
        super().__init__()
        self.__cache = cache
        size, device = config.d_model // config.n_heads, torch.device(config.init_device)
        frequencies = config.rope_theta ** (-torch.arange(0, size, 2, device=device, dtype=torch.float) / size)
        angles = torch.outer(torch.arange(config.max_sequence_length, device=device, dtype=torch.float), frequencies)
        self.__cache["sin"], self.__cache["cos"] = (f(torch.cat([angles] * 2, -1)) for f in (torch.sin, torch.cos))

    def forward(self, x):
        sin, cos = (self.__cache[name][: x.shape[-2]] for name in ("sin", "cos"))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin


class LLaDALlamaBlock(nn.Module):
    def __init__(self, config, cache):
        super().__init__()
        self.config = config
        size, inner = config.d_model, config.mlp_hidden_size
        self.attn_norm, self.ff_norm = RMSLayerNorm(config), RMSLayerNorm(config)
        self.q_proj, self.k_proj, self.v_proj, self.attn_out = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.rotary_emb = RotaryEmbedding(config, cache)
        self.ff_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.ff_out = nn.Linear(inner, size, bias=False)

    def forward(self, x, attention_bias=None, layer_past=None, use_cache=False):
        y = self.attn_norm(x)
        heads = (f(y).unflatten(-1, (self.config.n_heads, -1)) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (x.transpose(1, 2) for x in heads)
        y = F.scaled_dot_product_attention(self.rotary_emb(q), self.rotary_emb(k), v, attention_bias)
        x = x + self.attn_out(y.transpose(1, 2).flatten(2))
        y = self.ff_norm(x)
        return x + self.ff_out(F.silu(self.ff_proj(y)) * self.up_proj(y)), None


class LLaDAOutput(NamedTuple):
    logits: torch.Tensor
    attn_key_values: None
    hidden_states: tuple | None


class LLaDAModel(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config, self.activation_checkpointing_strategy = config, None
        cache, wte = {}, nn.Embedding(config.embedding_size, config.d_model)
        self.transformer = nn.ModuleDict(dict(wte=wte, emb_drop=nn.Dropout(0.0), ln_f=RMSLayerNorm(config)))
        blocks = nn.ModuleList(LLaDALlamaBlock(config, cache) for _ in range(config.n_layers))
        self.transformer.update({"blocks": blocks})
        if not config.weight_tying:
            self.transformer.update({"ff_out": nn.Linear(config.d_model, config.embedding_size, bias=False)})

    def set_activation_checkpointing(self, strategy):
        self.activation_checkpointing_strategy = strategy

    def forward(
        self, input_ids, input_embeddings=None, attention_mask=None, use_cache=False, output_hidden_states=None
    ):
        x = self.transformer.wte(input_ids) if input_embeddings is None else input_embeddings
        x = self.transformer.emb_drop(x)
        bias, states = None, []
        if attention_mask is not None and 0.0 in attention_mask:
            bias = (1.0 - attention_mask.to(x.dtype))[:, None, None, :] * torch.finfo(x.dtype).min
        for block in self.transformer.blocks:
            states.append(x)
            if self.activation_checkpointing_strategy == "whole_layer":
                x, _ = checkpoint(block, x, attention_bias=bias, use_reentrant=False)
            else:
                x, _ = block(x, attention_bias=bias)
        x = self.transformer.ln_f(x)
        states.append(x)
        logits = F.linear(x, self.transformer.wte.weight) if self.config.weight_tying else self.transformer.ff_out(x)
        return LLaDAOutput(logits, None, tuple(states) if output_hidden_states else None)


class LLaDAModelLM(PreTrainedModel):
    config_class = LLaDAConfig
    base_model_prefix = "model"
    _no_split_modules = ["LLaDALlamaBlock"]

    def __init__(self, config):
        super().__init__(config)
        self.model = LLaDAModel(config)

    def forward(
        self,
        input_ids=None,
        inputs_embeds=None,
        attention_mask=None,
        labels=None,
        use_cache=None,
        output_attentions=None,
        output_hidden_states=None,
        return_dict=None,
    ):
        if use_cache is None:
            use_cache = self.config.use_cache
        if output_attentions:
            raise ValueError("output_attentions is not yet supported in LLaDA")
        outputs = self.model.forward(
            input_ids,
            input_embeddings=inputs_embeds,
            attention_mask=attention_mask,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        return CausalLMOutputWithPast(logits=outputs.logits, hidden_states=outputs.hidden_states)

    def can_generate(self):
        return True

    def get_input_embeddings(self):
        return self.model.transformer.wte

    def get_output_embeddings(self):
        return self.model.transformer.wte if self.config.weight_tying else self.model.transformer.ff_out

    def tie_weights(self):
        if self.config.weight_tying:
            self.model.transformer.ff_out = self.model.transformer.wte
