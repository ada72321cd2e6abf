"""The NELBO perplexity of real text: what a refinement costs in likelihood."""

from __future__ import annotations

import math

import numpy as np
import torch
from transformers import PreTrainedModel

from ..hub.process_tokendrift import stratified_times
from ..objective.corruption import corrupt
from ..objective.nelbo import row_nelbo
from ..objective.noise import EVALUATE, row_noise
from ..objective.predictions import predict


@torch.no_grad()
def nelbo_perplexity(
    model: PreTrainedModel, rows: torch.Tensor, num_draws: int = 1, seed: int = 0, batch_size: int = 32
) -> dict[str, float | list[float] | None]:
    """exp of the NELBO per token on real text, an upper bound on the model's perplexity, with its standard error.

    The times of all N * num_draws losses are stratified: draw d of the row of rank i, the ranks being a random order of
    the rows, has its time in stratum d N + i. So the mean s_i over a row's draws has a trend in i, which does not make
    the mean over rows uncertain, and noise, which does. The standard error sees the noise alone, in the differences
    between neighbours in rank (on a ring, so that each row counts twice): Var = sum_i (s_i - s_(i-1))^2 / (2 N^2). It
    covers the draws of t and x_t, and the choice of the rows as far as they are independent.

    Args:
        model: an MDLM or DUO model.
        rows: clean ids [N, L], a text a row.
        num_draws: draws of t and x_t for every row (n_mc).
        seed: of the noise, which is the same for every model and batch size.
        batch_size: rows at a time.

    Returns:
        `nelbo` in nats per token with `nelbo_se`, `nelbo_ppl` = exp(nelbo) with `nelbo_ppl_se` (delta method), and
        `nelbo_of_texts`, a value in nats per token for each row. One text has no standard error: None. The value of
        one text is unbiased, but with few draws of t it says little.

    Raises:
        ValueError: no text at all.
    """
    if rows.dim() != 2 or not rows.numel():
        raise ValueError(f"The NELBO is of rows of token ids [N, L], at least one; found {list(rows.shape)}.")
    N, L = rows.shape
    model.eval()
    order = torch.from_numpy(np.random.default_rng((seed, EVALUATE)).permutation(N))
    rows = rows[order]
    predicted = model.process.corruptible(rows).sum(1).double().cpu()  # tokens of each row; the others are given
    sums = torch.zeros(N, dtype=torch.float64)
    for draw in range(num_draws):
        for start in range(0, N, batch_size):
            x_0 = rows[start : start + batch_size].to(model.device)
            noise = row_noise((seed, EVALUATE, draw), range(start, start + len(x_0)), L, model.config.vocab_size)
            t = stratified_times(noise.time, first_row=draw * N + start, num_rows=num_draws * N)
            batch = corrupt(model.process, {"input_ids": x_0}, noise, t)
            totals, _ = row_nelbo(model.process, predict(model, model, batch), batch)
            sums[start : start + len(x_0)] += totals.double().cpu() / num_draws
    of_texts = torch.empty_like(sums)
    of_texts[order] = sums / predicted
    shares = sums / predicted.mean()  # whose mean is the NELBO per token
    nelbo, perplexity = float(shares.mean()), float(shares.mean().exp())
    error = float((shares - shares.roll(1)).square().sum().sqrt()) / (math.sqrt(2) * N) if N > 1 else None
    return {
        "nelbo": nelbo,
        "nelbo_se": error,
        "nelbo_ppl": perplexity,
        "nelbo_ppl_se": None if error is None else perplexity * error,
        "nelbo_of_texts": of_texts.tolist(),
    }
