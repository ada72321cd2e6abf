"""Networks whose prediction is a table, and the exact laws of whole runs with them, by enumeration of all states."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import torch
from reference import log_probs, posterior
from torch import nn
from transformers.modeling_outputs import MaskedLMOutput

from tokendrift_hf.hub.generation_tokendrift import DiffusionGenerationMixin
from tokendrift_hf.hub.process_tokendrift import AbsorbingProcess, UniformProcess
from tokendrift_hf.hub.settings_tokendrift import DiffusionGenerationConfig


class Stub(nn.Module, DiffusionGenerationMixin):
    """A network whose prediction is a table: logits [L, V] for each of the V^L possible inputs, and a drift with t."""

    def __init__(self, process, table: torch.Tensor, slope: torch.Tensor | float = 0.0):
        super().__init__()
        self.process, self.table, self.slope = process, table, slope
        self.config = SimpleNamespace(vocab_size=process.vocab_size, max_position_embeddings=table.shape[1])
        self.generation_config = DiffusionGenerationConfig.from_model_config(None)
        self.device = torch.device("cpu")

    def prediction(self, x: torch.Tensor, t: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        """log p(x_0 | x_t) [B, L, V] up to a constant, or at some positions [B, n] only."""
        V, L = self.process.vocab_size, x.shape[1]
        state = (x * V ** torch.arange(L - 1, -1, -1)).sum(1) if len(self.table) > 1 else torch.zeros_like(x[:, 0])
        positions = torch.arange(L).expand(len(x), L) if positions is None else positions
        return self.table[state[:, None], positions] + self.slope * t.to(self.table)[:, None, None]

    def forward(self, input_ids, timesteps, attention_mask, positions, return_dict):
        hidden = self.prediction(input_ids, timesteps, positions)
        return MaskedLMOutput(hidden_states=(hidden, torch.zeros(len(hidden), 1)))

    def logits(self, hidden, c):
        return hidden.clone()


def stub(kind: str, V: int = 4, L: int = 2, seed: int = 0) -> Stub:
    """A stub whose prediction depends on the whole input (and on time, for DUO)."""
    generator = torch.Generator().manual_seed(seed)
    table = 1.5 * torch.randn(V**L, L, V, dtype=torch.float64, generator=generator)
    slope = torch.randn(V, dtype=torch.float64, generator=generator) if kind == "duo" else 0.0
    return Stub(AbsorbingProcess(V, V - 1) if kind == "mdlm" else UniformProcess(V), table, slope)


def independent_stub(kind: str, p: list[float], L: int) -> Stub:
    """The same prediction p at every position, whatever the input. For MDLM the mask is one more id."""
    V = len(p) + (kind == "mdlm")
    p = torch.tensor(p + [0.0] * (V - len(p)), dtype=torch.float64)
    process = AbsorbingProcess(V, V - 1) if kind == "mdlm" else UniformProcess(V)
    return Stub(process, p.log().expand(1, L, V))


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's chi-square test; cells expected below 5 times are pooled."""
    expected = expected * counts.sum() / expected.sum()
    small = expected < 5
    if small.any():
        counts = torch.cat([counts[~small], counts[small].sum(0, keepdim=True)])
        expected = torch.cat([expected[~small], expected[small].sum(0, keepdim=True)])
        if expected[-1] < 1e-9:
            if counts[-1] > 0:
                return 0.0
            counts, expected = counts[:-1], expected[:-1]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2).item()


def histogram(model: Stub, n: int = 12000, **settings) -> torch.Tensor:
    x = model.generate(num_samples=n, seed=3, **settings)
    V, L = model.process.vocab_size, x.shape[1]
    return torch.bincount((x * V ** torch.arange(L - 1, -1, -1)).sum(1), minlength=V**L).double()


def enumerate_run(model: Stub, laws, truncate=lambda logits: logits, blocks=None) -> torch.Tensor:
    """The exact law of a whole run: the chain over all V^L states.

    Args:
        laws: for each step (t, law), where law(p_x0 [S, L, V], x_t [S, L]) gives q(x_s | x_t) [S, L, V].
        blocks: lists of positions that take these steps one after another, while the others stay. None: all at once.
    """
    V, L = model.process.vocab_size, model.config.max_position_embeddings
    states = torch.tensor(list(itertools.product(range(V), repeat=L)))
    if model.process.mask_id is not None:
        law_of_x = (states == model.process.mask_id).all(1).double()
    else:
        law_of_x = torch.full((len(states),), 1.0 / V**L, dtype=torch.float64)
    for block in blocks or [range(L)]:
        for t, law in laws:
            logits = model.prediction(states, torch.full((len(states),), t, dtype=torch.float64))
            p = log_probs(model.process, truncate(logits.masked_fill(mask_column(model), -1e6)), states).exp()
            q = law(p, states)
            transition = torch.ones(len(states), len(states), dtype=torch.float64)
            for position in range(L):
                stays = (states[:, None, position] == states[None, :, position]).double()
                transition = transition * (q[:, position][:, states[:, position]] if position in block else stays)
            law_of_x = law_of_x @ transition
    return law_of_x


def mask_column(model):
    return torch.arange(model.process.vocab_size) == (-1 if model.process.mask_id is None else model.process.mask_id)


def psi_laws(process, N: int, kappa, times=None, removal: str = "ancestral"):
    """The steps of a psi sampler from its formula: kappa q(x_s | x_t) + (1 - kappa) q_s(. | x_0 ~ q(x_0 | x_t))."""
    times = torch.linspace(1, 1e-5, N + 1, dtype=torch.float64).tolist() if times is None else times

    def alpha(time):
        return 1 - (1 - 1e-3) * time

    V = process.vocab_size
    noise = torch.zeros(V, dtype=torch.float64)
    if process.mask_id is not None:
        noise[process.mask_id] = 1
    else:
        noise += 1 / V
    laws = []
    for i in range(N):

        def law(p, x, i=i, k=kappa[i]):
            a_t, a_s = (torch.tensor(alpha(time), dtype=torch.float64) for time in (times[i], times[i + 1]))
            q_s = posterior(process, p, x, a_t, a_s) if a_s > a_t else nn.functional.one_hot(x, V).double()
            clean = posterior(process, p, x, a_t, torch.ones_like(a_s))
            return k * q_s + (1 - k) * (a_s * clean + (1 - a_s) * noise)

        laws.append((times[i], law))
    last = torch.tensor(alpha(times[N]), dtype=torch.float64)
    if removal == "ancestral":
        laws.append((times[N], lambda p, x: posterior(process, p, x, last, torch.ones_like(last))))
    elif removal == "greedy":
        laws.append((times[N], lambda p, x: nn.functional.one_hot(p.argmax(-1), V).double()))
    return laws
