"""The corruption processes of discrete diffusion: noise schedule, forward noise and NELBO.

Notation: `x_0` clean ids [B, L], `x_t` noisy ids [B, L], `t` and `s < t` diffusion times in [0, 1], `alpha_t` the
fraction of signal left at time t, V the vocabulary size. Randomness is always an argument, so every function is
deterministic. Only torch is needed: this file travels with every checkpoint.

Sources: MDLM (Sahoo et al., 2024, arXiv 2406.07524), DUO (Sahoo et al., 2025, arXiv 2506.10892) and their
repositories kuleshov-group/mdlm and s-sahoo/duo.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

# The finite stand-in for minus infinity of the reference (SUBS) parametrisation. It is finite so that
# 0 * log 0 = 0 and so that float32 arithmetic with it never gives NaN.
NEGATIVE_INFINITY = -1e6


@dataclass(frozen=True)
class LogLinearSchedule:
    """The log-linear schedule alpha(t) = 1 - (1 - eps) t, for t in [0, 1]: nearly all signal is gone at t = 1."""

    eps: float = 1e-3

    def alpha(self, t: torch.Tensor) -> torch.Tensor:
        """alpha(t), in [eps, 1]."""
        return 1 - (1 - self.eps) * t

    def d_alpha(self, t: torch.Tensor) -> torch.Tensor:
        """d alpha / dt, constant and negative."""
        return torch.full_like(t, -(1 - self.eps))

    def sigma(self, t: torch.Tensor) -> torch.Tensor:
        """The total noise sigma(t) = -ln alpha(t), 0 at t = 0: what the network is conditioned on."""
        return -torch.log1p(-(1 - self.eps) * t)

    def time_of_alpha(self, alpha: torch.Tensor) -> torch.Tensor:
        """The inverse of `alpha`."""
        return (1 - alpha) / (1 - self.eps)


def stratified_times(
    uniforms: torch.Tensor, eps: float = 1e-3, first_row: int = 0, num_rows: int | None = None
) -> torch.Tensor:
    """Diffusion times in [eps, 1], one in each of n equal strata (the reference's "antithetic" sampling).

    Args:
        uniforms: independent draws from U(0, 1), shape [B].
        eps: the smallest time. The NELBO weights 1/t of smaller ones would have too large a variance.
        first_row: which of the n strata is the first row's, if these rows are a part of a larger batch.
        num_rows: n, the size of that larger batch. The default is B.

    Raises:
        ValueError: `eps` is not in [0, 1).
    """
    if not 0 <= eps < 1:
        raise ValueError(f"eps={eps}. The smallest time must be in [0, 1).")
    n = num_rows or uniforms.shape[0]
    strata = torch.arange(first_row, first_row + uniforms.shape[0], dtype=uniforms.dtype, device=uniforms.device) / n
    return (1 - eps) * ((uniforms / n + strata) % 1) + eps


def check_token_ids(low: int, high: int, vocab_size: int) -> None:
    """Raise ValueError unless the token ids `low` to `high` all lie in [0, vocab_size)."""
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"Token ids run from {low} to {high}, but the model knows 0 to {vocab_size - 1}. Use the tokenizer that "
            "the model was trained with."
        )


def check_times(t: torch.Tensor) -> None:
    """Refuse times outside [0, 1], such as a sigma.

    On a CUDA device they are refused by the device itself (as ids outside an embedding are), so that nothing waits for
    it. Other devices are not asked.

    Raises:
        ValueError: `t` holds such a time, or nan.
    """
    inside = ((t >= 0) & (t <= 1)).all()
    if t.device.type == "cuda":
        torch._assert_async(inside, "timesteps hold a time outside [0, 1]")
    elif t.device.type == "cpu" and not torch.compiler.is_compiling() and not inside:
        raise ValueError(
            f"timesteps run from {t.min():g} to {t.max():g}. A diffusion time is from 0 (clean text) to 1 (noise). The "
            "model turns it into sigma itself."
        )


def _per_row(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A [B] (or scalar) tensor with trailing axes added, so that it broadcasts over `like` [B, ...]."""
    return value.reshape(value.shape + (1,) * (like.dim() - value.dim())) if value.dim() else value


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The dtype for a softmax over logits of `dtype`: float32 for half precision, else the same."""
    return torch.promote_types(dtype, torch.float32)


def _noise(alpha: torch.Tensor) -> torch.Tensor:
    """1 - alpha, kept above the resolution of float32, so that a row with t = 0 has finite values and gradients."""
    return (1 - alpha).clamp_min(1e-7)


class AbsorbingProcess:
    """Masked diffusion: at time t a token has become the mask with probability 1 - alpha(t) (MDLM).

    Args:
        vocab_size: V, the mask included.
        mask_id: the id of the mask, which never occurs in clean text.
        kept_ids: ids that are never masked, such as the [CLS] and [SEP] of a masked language model.
    """

    def __init__(
        self,
        vocab_size: int,
        mask_id: int,
        schedule: LogLinearSchedule | None = None,
        kept_ids: tuple[int, ...] = (),
    ):
        self.vocab_size, self.mask_id, self.kept_ids = vocab_size, mask_id, kept_ids
        self.schedule = schedule or LogLinearSchedule()

    def corruptible(self, x_0: torch.Tensor) -> torch.Tensor:
        """Where a token can become the mask: everywhere but at the kept ids. Bool [B, L]."""
        free = torch.ones_like(x_0, dtype=torch.bool)
        for kept in self.kept_ids:  # one comparison each: a table of them would have to be copied to the device
            free &= x_0 != kept
        return free

    def without(self, ids: Sequence[int]) -> "AbsorbingProcess":
        """The process on text without these ids. They are no noise either way, so it is this one."""
        return self

    def prior(self, random_tokens: torch.Tensor) -> torch.Tensor:
        """x_1: every position masked. `random_tokens` [B, L] only gives shape, dtype and device."""
        return torch.full_like(random_tokens, self.mask_id)

    def random_tokens(self, uniforms: torch.Tensor) -> torch.Tensor:
        """What noise puts in the place of tokens, from `uniforms` in [0, 1) of any shape: the mask."""
        return torch.full_like(uniforms, self.mask_id, dtype=torch.long)

    def corrupt(
        self, x_0: torch.Tensor, t: torch.Tensor, uniforms: torch.Tensor, random_tokens: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x_t ~ q(x_t | x_0) from `uniforms` in [0, 1), [B, L], at times `t` [B]. `random_tokens` is not used."""
        check_times(t)
        masked = uniforms < 1 - _per_row(self.schedule.alpha(t), x_0)
        return torch.where(masked & self.corruptible(x_0), self.mask_id, x_0)

    def predicted_positions(self, x_t: torch.Tensor) -> torch.Tensor:
        """M, the positions that the network predicts: the masked ones. Bool [B, L]."""
        return x_t == self.mask_id

    def nelbo(self, logits: torch.Tensor, x_0: torch.Tensor, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """The NELBO per token in nats, [B, L]: -alpha'/(1 - alpha) * -log p(x_0) at masked positions, else 0.

        With the log-linear schedule the weight is exactly 1/t.
        """
        check_times(t)
        logits = logits.to(at_least_float32(logits.dtype))
        mask_column = torch.arange(self.vocab_size, device=logits.device) == self.mask_id
        nll = F.cross_entropy(
            logits.masked_fill(mask_column, NEGATIVE_INFINITY).flatten(0, 1), x_0.flatten(), reduction="none"
        ).view(x_0.shape)
        alpha, d_alpha = self.schedule.alpha(t), self.schedule.d_alpha(t)
        return torch.where(self.predicted_positions(x_t), nll * _per_row(-d_alpha / _noise(alpha), x_0), 0.0)


def _excess(log_ratio: torch.Tensor) -> torch.Tensor:
    """e^u - 1 - u >= 0: the price of predicting e^u times the right ratio."""
    return torch.expm1(log_ratio) - log_ratio


class UniformProcess:
    """Uniform-state diffusion: at time t a token has been redrawn from all V ids with probability 1 - alpha(t) (DUO).

    Args:
        vocab_size: V. Every id can occur as noise, also one that never occurs in clean text (DUO's 50257).
        never: ids that are no state of the process, as if the vocabulary had never had them.

    Attributes:
        mask_id: None. No id is a mask, so this is how the two processes are told apart.
        num_states: V without those ids.
    """

    mask_id = None

    def __init__(self, vocab_size: int, schedule: LogLinearSchedule | None = None, never: Sequence[int] = ()):
        self.vocab_size, self.never = vocab_size, sorted(set(never))
        self.num_states = vocab_size - len(self.never)
        self.schedule = schedule or LogLinearSchedule()

    def without(self, ids: Sequence[int]) -> "UniformProcess":
        """The process on text without these ids."""
        return UniformProcess(self.vocab_size, self.schedule, never=[*self.never, *ids])

    def corruptible(self, x_0: torch.Tensor) -> torch.Tensor:
        """Where a token can be redrawn: everywhere. Bool [B, L]."""
        return torch.ones_like(x_0, dtype=torch.bool)

    def prior(self, random_tokens: torch.Tensor) -> torch.Tensor:
        """x_1 given ids drawn uniformly from all V, [B, L]: those ids themselves."""
        return random_tokens

    def random_tokens(self, uniforms: torch.Tensor) -> torch.Tensor:
        """Ids drawn uniformly from all states, from `uniforms` in [0, 1) of any shape."""
        ids = (uniforms * self.num_states).long()
        if self.never:  # the number of states below each of them says by how much the ids from there on are shifted
            below = torch.tensor([state - i for i, state in enumerate(self.never)], device=ids.device)
            ids = ids + torch.searchsorted(below, ids, right=True)
        return ids

    def corrupt(
        self, x_0: torch.Tensor, t: torch.Tensor, uniforms: torch.Tensor, random_tokens: torch.Tensor
    ) -> torch.Tensor:
        """x_t ~ q(x_t | x_0) at times `t` [B], from `uniforms` in [0, 1) and random ids `random_tokens` [B, L]."""
        check_times(t)
        return torch.where(uniforms < 1 - _per_row(self.schedule.alpha(t), x_0), random_tokens, x_0)

    def predicted_positions(self, x_t: torch.Tensor) -> torch.Tensor:
        """M, the positions that the network predicts: all, since none is known to be clean. Bool [B, L]."""
        return torch.ones_like(x_t, dtype=torch.bool)

    def nelbo(self, logits: torch.Tensor, x_0: torch.Tensor, x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        """The NELBO per token in nats, [B, L]. It is not zero where x_t = x_0.

        With y_bar = V alpha y + 1 - alpha, r = y_bar(x_0) / y_bar(x_0)[x_t] and r' the same for the prediction:
        -alpha' / (V alpha) * sum_j r_j (r'_j / r_j - 1 - ln(r'_j / r_j)), every term of which is >= 0
        (equal to equation 15 of the DUO paper, written so that nothing cancels).
        """
        check_times(t)
        log_p = torch.log_softmax(logits, dim=-1, dtype=at_least_float32(logits.dtype))
        alpha, d_alpha = _per_row(self.schedule.alpha(t), log_p), self.schedule.d_alpha(t)
        K = self.vocab_size
        log_noise, log_clean = _noise(alpha).log(), (K * alpha + 1 - alpha).log()  # ln y_bar of one-hot x_0: two values
        log_bar = torch.logaddexp(log_p + torch.log(K * alpha), log_noise)  # ln y_bar of the prediction
        at_x_t, at_x_0 = x_t.unsqueeze(-1), x_0.unsqueeze(-1)
        log_scale = torch.where(at_x_t == at_x_0, log_clean, log_noise)  # ln y_bar(x_0)[x_t]
        shift = log_bar.gather(-1, at_x_t) - log_scale
        at_clean = log_bar.gather(-1, at_x_0) - shift - log_clean  # ln(r'_j / r_j) for j = x_0, and for all other j:
        elsewhere = (log_bar - (shift + log_noise)).scatter(-1, at_x_0, 0.0)
        total = (log_noise - log_scale).exp().squeeze(-1) * _excess(elsewhere).sum(-1)
        total = total + ((log_clean - log_scale).exp() * _excess(at_clean)).squeeze(-1)
        return total * _per_row(-d_alpha / (K * self.schedule.alpha(t)), total)
