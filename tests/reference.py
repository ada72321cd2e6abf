"""Slow, obvious twins of what the package computes."""

from __future__ import annotations

import math

import torch


def double_loop(h, u, v, temperatures, self_index=None, attraction=1.0, repulsion=1.0, kernel="paper"):
    """The field, the RMS norms and the effective numbers from the formulas, in Python floats, with eps = 0."""
    anchors, references, num_positives = h.tolist(), u.tolist() + v.tolist(), len(u)
    indices, dims = range(len(references)), range(len(anchors[0]))

    def is_self(i, j):
        return self_index is not None and j == num_positives + int(self_index[i])

    distance = [[max(math.dist(a, r), 1e-4 if kernel == "drifting" else 0) for r in references] for a in anchors]
    mean_distance = sum(map(sum, distance)) / (len(anchors) * len(references))
    fields, rms, effective = [], [], []
    for tau in temperatures:
        affinity = []
        for i in range(len(anchors)):
            if kernel == "paper":
                affinity.append([0.0 if is_self(i, j) else math.exp(-(distance[i][j] ** 2) / tau) for j in indices])
            else:
                affinity.append(
                    [math.exp(-(distance[i][j] / mean_distance + 100 * is_self(i, j)) / tau) for j in indices]
                )
        column_sum = [sum(row[j] for row in affinity) for j in indices]
        field, number = [], 0.0
        for a, row in zip(anchors, affinity, strict=True):
            row_sum = sum(row)
            number += math.exp(-sum(x / row_sum * math.log(x / row_sum) for x in row if x > 0))
            weight = [math.sqrt(x / row_sum * x / c) if c > 0 else 0.0 for x, c in zip(row, column_sum, strict=True)]
            if kernel == "drifting":
                weight = [max(w, 1e-3) for w in weight]
            plus, minus = sum(weight[:num_positives]), sum(weight[num_positives:])
            v_i = [0.0 for _ in dims]
            for j in indices:
                w = attraction * weight[j] * minus if j < num_positives else -repulsion * weight[j] * plus
                v_i = [v_i[d] + w * (references[j][d] - a[d]) for d in dims]
            field.append(v_i)
        rms.append(math.sqrt(sum(x * x for v_i in field for x in v_i) / len(anchors)))
        effective.append(number / len(anchors))
        fields.append(torch.tensor(field, dtype=torch.float64) / rms[-1])
    return torch.stack(fields).mean(dim=0), torch.tensor(rms, dtype=torch.float64), torch.tensor(effective)


def log_probs(process, logits, x_t):
    """log p(x_0 | x_t) [B, L, V] in float32 or float64. A masked model never predicts the mask, and keeps tokens."""
    logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    if process.mask_id is None:
        return torch.log_softmax(logits, dim=-1)
    mask_column = torch.arange(process.vocab_size) == process.mask_id
    log_p = torch.log_softmax(logits.masked_fill(mask_column, -1e6), dim=-1)
    stays = torch.full_like(log_p, -1e6).scatter_(-1, x_t.unsqueeze(-1), 0.0)
    return torch.where((x_t == process.mask_id).unsqueeze(-1), log_p, stays)


def posterior(process, p_x0, x_t, alpha_t, alpha_s):
    """q(x_s | x_t, x_0 ~ p_x0) [B, L, V].

    MDLM: a mask stays with probability (1 - alpha_s) / (1 - alpha_t). DUO: proportional to
    [a 1{k = x_t} + (1 - a)/V] * [alpha_s p_x0(k) + (1 - alpha_s)/V] with a = alpha_t / alpha_s, in which p_x0 is put
    into the posterior of a clean token.

    Args:
        p_x0: clean-token probabilities [B, L, V], for MDLM without mass on the mask.
        x_t: [B, L].
        alpha_t, alpha_s: [B] or scalars, alpha_s > alpha_t. alpha_s = 1 is the last step, which leaves no noise.
    """
    alpha_t, alpha_s = (alpha.reshape(-1, 1, 1) for alpha in (alpha_t, alpha_s))
    at_x_t, V = x_t.unsqueeze(-1), process.vocab_size
    if process.mask_id is not None:
        unmasked = (alpha_s - alpha_t) / (1 - alpha_t) * p_x0
        unmasked[..., process.mask_id] += ((1 - alpha_s) / (1 - alpha_t)).squeeze(-1)
        stays = torch.zeros_like(unmasked).scatter_(-1, at_x_t, 1.0)
        return torch.where(at_x_t == process.mask_id, unmasked, stays)
    a = alpha_t / alpha_s
    noisy = alpha_s * p_x0 + (1 - alpha_s) / V
    weights = (noisy * ((1 - a) / V)).scatter_add(-1, at_x_t, a * noisy.gather(-1, at_x_t))
    return weights / weights.sum(dim=-1, keepdim=True)
