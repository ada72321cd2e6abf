"""MDLM and DUO: one diffusion transformer (DiT) backbone and two thin heads.

Shapes: B sequences, L positions, V vocabulary, D hidden_size, C cond_dim, H heads. State-dict keys are those of the
released checkpoints (kuleshov-group/mdlm-owt, s-sahoo/duo), so weights pass between both codes unchanged.
"""

import math
import os

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import MaskedLMOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import cached_file, extract_commit_hash

from .configuration_tokendrift import DiTConfig, DUOConfig, MDLMConfig
from .generation_tokendrift import DiffusionGenerationMixin
from .process_tokendrift import NEGATIVE_INFINITY, AbsorbingProcess, UniformProcess, check_times
from .settings_tokendrift import DiffusionGenerationConfig


def modulate(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift, x, 1 + scale)


class LayerNorm(nn.Module):
    """Layer norm without bias, always computed in float32."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float()).to(x.dtype)


class VocabEmbedding(nn.Module):
    def __init__(self, vocab_size: int, hidden_size: int):
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocab_size, hidden_size))

    @property
    def weight(self) -> torch.Tensor:  # the name under which transformers and peft look for the table
        return self.embedding

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(input_ids, self.embedding)


class TimestepEmbedder(nn.Module):
    """sigma [B] -> [B, C]: cosines and sines of 128 frequencies, then an MLP."""

    frequency_size = 256

    def __init__(self, cond_dim: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(self.frequency_size, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim))

    def forward(self, sigma: torch.Tensor) -> torch.Tensor:
        half = self.frequency_size // 2
        frequencies = torch.exp(-math.log(10000) * torch.arange(half, device=sigma.device, dtype=torch.float32) / half)
        angles = sigma.float()[:, None] * frequencies
        return self.mlp(torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.mlp[0].weight.dtype))


class RotaryEmbedding(nn.Module):
    """Rotary positions, base 10000, the two halves of a head rotated against each other.

    The buffer is there because the released files hold it. The angles are computed afresh in float32, so that casting
    the model to bfloat16, or building it on the meta device, cannot blur or lose them.
    """

    base = 10000.0

    def __init__(self, head_dim: int):
        super().__init__()
        self.head_dim = head_dim
        self.register_buffer("inv_freq", self.inverse_frequencies(None))

    def inverse_frequencies(self, device) -> torch.Tensor:
        exponents = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32) / self.head_dim
        return 1.0 / self.base**exponents

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, [L, head_dim / 2] each, in float32."""
        positions = torch.arange(x.shape[1], device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inverse_frequencies(x.device))
        return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    (first, second), cos, sin = x.chunk(2, dim=-1), cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([(first * cos).addcmul(second, sin, value=-1), (second * cos).addcmul(first, sin)], dim=-1)


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Attention in plain torch, [B, H, L, D/H] -> [B, L, H, D/H]. `attention_mask` is added to the scores."""
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class ZeroLinear(nn.Linear):
    """A linear layer that starts at zero: with it (adaLN-zero) every block starts as the identity.

    A class of its own, since transformers initialises custom code by the module that holds the parameter and skips
    modules that hold none, such as a block.
    """


class DiTBlock(GradientCheckpointingLayer):
    """x + gate * attention(modulated norm of x), then the same with the MLP. The six modulations come from `c`."""

    is_causal = False  # read by transformers' attention functions, whose own default is causal

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.num_heads, self.head_dim = config.num_attention_heads, size // config.num_attention_heads
        self.dropout = config.dropout
        self.norm1 = LayerNorm(size)
        self.attn_qkv = nn.Linear(size, 3 * size, bias=False)
        self.attn_out = nn.Linear(size, size, bias=False)
        self.norm2 = LayerNorm(size)
        self.mlp = nn.Sequential(nn.Linear(size, 4 * size), nn.GELU(approximate="tanh"), nn.Linear(4 * size, size))
        self.adaLN_modulation = ZeroLinear(config.cond_dim, 6 * size)

    def attention(self, x, cos, sin, attention_mask, positions):
        query, key, value = self.attn_qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(dim=2)
        query, key, value = (y.transpose(1, 2) for y in (query, key, value))
        query = rotate(query, cos, sin)
        if positions is not None:
            query = query.take_along_dim(positions[:, None, :, None], dim=2)
            if attention_mask is not None:
                attention_mask = attention_mask.take_along_dim(positions[:, None, :, None], dim=2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        out, _ = attend(
            self,
            query,
            rotate(key, cos, sin),
            value,
            attention_mask,
            scaling=self.head_dim**-0.5,
            dropout=0.0,
            is_causal=False,
        )
        return self.attn_out(out.flatten(2))

    def forward(self, x, c, cos, sin, attention_mask, positions=None):
        """[B, L, D] -> [B, L, D], or [B, n, D] at `positions` [B, n] only, which still see all L."""
        shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)
        branch = self.attention(modulate(self.norm1(x), shift_1, scale_1), cos, sin, attention_mask, positions)
        x = x if positions is None else x.take_along_dim(positions[..., None], dim=1)
        x = torch.addcmul(x, gate_1, F.dropout(branch, self.dropout, self.training))
        branch = self.mlp(modulate(self.norm2(x), shift_2, scale_2))
        return torch.addcmul(x, gate_2, F.dropout(branch, self.dropout, self.training))


class OutputLayer(nn.Module):
    """Hidden states [B, L, D] -> raw logits [B, L, V]."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.norm_final = LayerNorm(config.hidden_size)
        self.linear = ZeroLinear(config.hidden_size, config.vocab_size)
        self.adaLN_modulation = ZeroLinear(config.cond_dim, 2 * config.hidden_size)

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift, scale = self.adaLN_modulation(c)[:, None].chunk(2, dim=-1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiTBackbone(nn.Module):
    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        self.vocab_embed = VocabEmbedding(config.vocab_size, config.hidden_size)
        self.sigma_map = TimestepEmbedder(config.cond_dim)
        self.rotary_emb = RotaryEmbedding(config.hidden_size // config.num_attention_heads)
        self.blocks = nn.ModuleList(DiTBlock(config) for _ in range(config.num_hidden_layers))
        self.output_layer = OutputLayer(config)

    def forward(self, inputs_embeds, sigma, attention_mask=None, positions=None, num_blocks=None):
        """Embeddings [B, L, D] and sigma [B] -> (L+1 hidden states: the input and each block's output, c [B, C]).

        With `positions` [B, n] only the last block's output at these positions is kept, [B, n, D]. With `num_blocks`
        the blocks after so many are not run.
        """
        c = F.silu(self.sigma_map(sigma))
        cos, sin = self.rotary_emb(inputs_embeds)
        attention_mask = create_bidirectional_mask(
            config=self.config, inputs_embeds=inputs_embeds, attention_mask=attention_mask
        )
        if positions is not None:
            x = inputs_embeds
            for block in self.blocks[:-1]:
                x = block(x, c, cos, sin, attention_mask)
            if attention_mask is None or (isinstance(attention_mask, torch.Tensor) and attention_mask.dim() == 4):
                x = self.blocks[-1](x, c, cos, sin, attention_mask, positions)
            else:  # the masks of flash and flex attention are about whole sequences
                x = self.blocks[-1](x, c, cos, sin, attention_mask).take_along_dim(positions[..., None], dim=1)
            return (x,), c
        hidden_states = (inputs_embeds,)
        for block in list(self.blocks)[:num_blocks]:
            hidden_states += (block(hidden_states[-1], c, cos, sin, attention_mask),)
        return hidden_states, c


class DiffusionPreTrainedModel(PreTrainedModel):
    """What both models share: the backbone, weight initialisation, saving and strict loading."""

    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DiTBlock"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _keys_to_ignore_on_load_missing = [r"rotary_emb\.inv_freq"]  # recomputed; some released files leave it out

    def __init__(self, config: DiTConfig):
        super().__init__(config)
        self.backbone = DiTBackbone(config)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, std=0.0 if isinstance(module, ZeroLinear) else self.config.initializer_range)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, VocabEmbedding):
            init.normal_(module.embedding, std=self.config.initializer_range)
        elif isinstance(module, LayerNorm):
            init.ones_(module.weight)
        elif isinstance(module, RotaryEmbedding):
            init.copy_(module.inv_freq, module.inverse_frequencies(module.inv_freq.device))

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path,
        *args,
        output_loading_info: bool = False,
        ignore_mismatched_sizes: bool = False,
        **kwargs,
    ):
        """As in transformers, but a tensor that is missing, left over or of another shape is an error naming it."""
        name = pretrained_model_name_or_path
        if name is not None and os.path.isfile(name):
            raise ValueError(
                f"{str(name)!r} is a file, but from_pretrained takes a directory or repository with a config.json. "
                "Make one from a bare weights file with `tokendrift convert FILE DIRECTORY`."
            )
        try:
            model, info = super().from_pretrained(
                name, *args, output_loading_info=True, ignore_mismatched_sizes=True, **kwargs
            )
        except Exception as error:
            if type(error).__name__ != "SafetensorError":  # by name: safetensors is not imported by this file
                raise
            raise ValueError(
                f"The weights in {str(name)!r} cannot be read ({error}). The file is cut off or still being written: "
                "copy or download it again."
            ) from error
        # transformers would fill what is missing with random numbers and go on.
        wrong = [f"{key} is missing" for key in sorted(info["missing_keys"])]
        wrong += [f"{key} is not used" for key in sorted(info["unexpected_keys"])]
        if not ignore_mismatched_sizes:
            wrong += [
                f"{key} has shape {list(found)} instead of {list(needed)}"
                for key, found, needed in sorted(info["mismatched_keys"])
            ]
        if wrong:
            wrong[12:] = [f"and {len(wrong) - 12} more"] if len(wrong) > 12 else []
            raise ValueError(
                f"The weights in {str(name)!r} do not fit {cls.__name__}: {'; '.join(wrong)}. They belong to another "
                "architecture or configuration, or the file is damaged; check config.json against the weights."
            )
        model.config._commit_hash = _commit(name, kwargs)
        return (model, info) if output_loading_info else model

    def save_pretrained(self, *args, **kwargs):
        # One code path for every auto class, also when this class was itself loaded as custom code.
        self.config.auto_map = {
            "AutoConfig": f"configuration_tokendrift.{type(self.config).__name__}",
            "AutoModel": f"modeling_tokendrift.{type(self).__name__}",
            "AutoModelForMaskedLM": f"modeling_tokendrift.{type(self).__name__}",
        }
        super().save_pretrained(*args, **kwargs)

    def get_input_embeddings(self):
        return self.backbone.vocab_embed

    def get_output_embeddings(self):
        return self.backbone.output_layer.linear

    def resize_token_embeddings(self, *args, **kwargs):
        raise ValueError(
            f"{type(self).__name__} cannot be resized: the corruption process is defined on exactly vocab_size="
            f"{self.config.vocab_size} ids. Build a new model with another vocab_size."
        )

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        timesteps: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        positions: torch.Tensor | None = None,
        output_attentions: bool | None = None,
    ) -> MaskedLMOutput | tuple:
        """Predict the clean tokens.

        Args:
            input_ids: noisy ids x_t, [B, L].
            timesteps: diffusion time t in [0, 1], [B]. The default is 0. The model turns it into sigma itself.
            attention_mask: [B, L] of any dtype, non-zero where a position exists. None: all exist.
            inputs_embeds: embeddings [B, L, D] instead of `input_ids`.
            labels: clean ids x_0, [B, L]. They need `input_ids` and `timesteps`. -100 or a masked-out position is not
                scored.
            output_hidden_states: also return L+1 tensors [B, L, D]: the embeddings and the output of every block,
                before the final norm.
            positions: ids of n positions a row, [B, n]: for samplers, which need few of them. The head and most of the
                last block are then left out elsewhere: `logits` is None and `hidden_states` the pair (last hidden state
                [B, n, D], time conditioning [B, C]) that `logits(hidden, c)` takes.
            output_attentions: is here for peft, whose wrapper always passes it on. Attention weights are never kept.

        Returns:
            `logits` [B, L, V], raw but for a masked model's mask column, which is pushed to -1e6. With `labels`
            there is also `loss`, the NELBO in nats per scored token.
        """
        # What does not fit together is refused before any work.
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give exactly one of input_ids and inputs_embeds.")
        if output_attentions:
            raise ValueError("output_attentions=True: these models keep no attention weights. Leave it out.")
        if inputs_embeds is None:
            inputs_embeds = self.get_input_embeddings()(input_ids)
        B, L = inputs_embeds.shape[:2]
        if L > self.longest:
            raise ValueError(
                f"The batch is {L} tokens long, but this model takes at most {self.longest}. Cut the text "
                "into blocks, or generate in several windows."
            )
        if timesteps is not None:
            shape = list(timesteps.shape) if isinstance(timesteps, torch.Tensor) else None
            if shape != [B]:
                found = f"is a {type(timesteps).__name__}" if shape is None else f"has shape {shape}"
                raise ValueError(f"timesteps {found}. Needed is a tensor with one time a sequence, [{B}].")
            check_times(timesteps)
        if attention_mask is not None and attention_mask.dim() == 2 and attention_mask.shape != (B, L):
            raise ValueError(f"attention_mask has shape {list(attention_mask.shape)}; needed is [{B}, {L}].")
        if labels is not None and (input_ids is None or timesteps is None):
            raise ValueError("labels (x_0) need input_ids (x_t) and timesteps (t), since the NELBO depends on both.")
        # For a few positions the caller makes the logits itself, from what it draws at a time.
        hidden_states, c = self.hidden_states(inputs_embeds, timesteps, attention_mask, positions)
        if positions is not None:
            return MaskedLMOutput(hidden_states=(hidden_states[-1], c))
        logits = self.logits(hidden_states[-1], c)
        # The NELBO, a mean over the scored positions of the whole batch.
        loss = None
        if labels is not None:
            scored = labels != -100
            if attention_mask is not None and attention_mask.dim() == 2:
                scored = scored & attention_mask.bool()
            nelbo = self.process.nelbo(logits, labels.clamp_min(0), input_ids, timesteps.float())
            loss = (nelbo * scored).sum() / scored.sum().clamp_min(1)
        output = MaskedLMOutput(
            loss=loss, logits=logits, hidden_states=hidden_states if self._wants_hidden(output_hidden_states) else None
        )
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def _wants_hidden(self, output_hidden_states: bool | None) -> bool:
        return self.config.output_hidden_states if output_hidden_states is None else output_hidden_states

    def hidden_states(self, inputs_embeds, timesteps=None, attention_mask=None, positions=None, num_blocks=None):
        """The L+1 hidden states [B, L, D] and the time conditioning c [B, C], without the vocabulary head.

        With `positions` [B, n] only the last one, at these positions. With `num_blocks` only the first num_blocks + 1:
        the blocks after these are not run.
        """
        sigma = torch.zeros(inputs_embeds.shape[0], device=inputs_embeds.device)
        if timesteps is not None and self.config.time_conditioning:
            sigma = self.process.schedule.sigma(timesteps.to(inputs_embeds.device).float())
        return self.backbone(inputs_embeds, sigma, attention_mask, positions, num_blocks)

    def logits(self, hidden: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        """The head on hidden states [B, L, D] (or on any chosen rows [N, 1, D] with c [N, C]) -> [.., .., V]."""
        return self.backbone.output_layer(hidden, c)


def _commit(name, kwargs: dict) -> str | None:
    """The commit of a repository that was just loaded, for adapters and model cards to name. None for directories."""
    if name is None or os.path.isdir(name):
        return None
    options = {key: kwargs[key] for key in ("revision", "cache_dir", "subfolder") if kwargs.get(key) is not None}
    try:
        return extract_commit_hash(cached_file(name, "config.json", local_files_only=True, **options), None)
    except OSError:  # loaded without its config.json
        return None


class MDLMForMaskedLM(DiffusionPreTrainedModel, DiffusionGenerationMixin):
    """Masked diffusion language model (arXiv 2406.07524)."""

    config_class = MDLMConfig
    generation_config_class = DiffusionGenerationConfig

    @property
    def process(self) -> AbsorbingProcess:
        return AbsorbingProcess(self.config.vocab_size, self.config.mask_token_id)

    def logits(self, hidden: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        logits = super().logits(hidden, c)
        value = max(NEGATIVE_INFINITY, torch.finfo(logits.dtype).min)
        if logits.requires_grad:  # written in place, a tensor hook (FSDP2 sets one) would crash torch 2.13
            mask_column = torch.arange(self.config.vocab_size, device=logits.device) == self.config.mask_token_id
            return logits.masked_fill(mask_column, value)
        logits[..., self.config.mask_token_id] = value
        return logits


class DUOForMaskedLM(DiffusionPreTrainedModel, DiffusionGenerationMixin):
    """Uniform-state diffusion language model (arXiv 2506.10892)."""

    config_class = DUOConfig
    generation_config_class = DiffusionGenerationConfig

    @property
    def process(self) -> UniformProcess:
        return UniformProcess(self.config.vocab_size)


MDLMForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
DUOForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
