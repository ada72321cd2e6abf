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


def drifting_force(gen, pos, neg=None, w_gen=None, w_pos=None, w_neg=None, *, temperatures):
    """`force_scaled` of the original drifting code in float64, batched and with weights: a plain transcription.

    Shapes are those of the recordings: gen [B, G, S], pos [B, P, S], neg [B, N, S], weights without the last one.
    """
    neg = gen[:, :0] if neg is None else neg
    weights = [(x if w is None else w) for x, w in ((gen[..., 0] * 0 + 1, w_gen), (neg[..., 0] * 0 + 1, w_neg))]
    weights.append(pos[..., 0] * 0 + 1 if w_pos is None else w_pos)
    gen, targets, weights = gen.double(), torch.cat([gen, neg, pos], 1).double(), torch.cat(weights, 1).double()
    num_negatives, m = targets.shape[1] - pos.shape[1], gen.shape[-1]
    distance = (gen[:, :, None] - targets[:, None]).norm(dim=-1).clamp_min(1e-4)
    mean_distance = (distance * weights[:, None]).mean() / weights.mean()
    cost = distance / mean_distance.clamp_min(1e-3)
    for i in range(gen.shape[1]):
        cost[:, i, i] += 100
    scale = mean_distance / m**0.5
    total = 0
    for tau in temperatures:
        affinity = ((-cost / tau).softmax(-1) * (-cost / tau).softmax(-2)).sqrt().clamp_min(1e-3) * weights[:, None]
        minus, plus = affinity[..., :num_negatives], affinity[..., num_negatives:]
        coefficients = torch.cat([-minus * plus.sum(-1, keepdim=True), plus * minus.sum(-1, keepdim=True)], -1)
        force = (coefficients @ targets - coefficients.sum(-1, keepdim=True) * gen) / scale
        total = total + force / force.square().mean().sqrt().clamp_min(1e-30)
    return total


def mmd_loss(log_p, real, draws, ids, positions, *, groups, samples, bandwidth, credit):
    """The policy-gradient loss of the paired MMD from its formulas, over rows, in float64 and by loops over everything.

    Each list has an entry a row: log_p [n, V] with a graph, real [n, m], draws [D][n, m], ids [D][n], positions [n].
    """
    tokens, advantages, chosen = 0, [], []
    for row in range(len(log_p)):
        n, D = len(real[row]), groups * samples
        phi = [real[row].double().tolist()] + [x.double().tolist() for x in draws[row]]

        def k(a, i, b, j, phi=phi):
            return math.exp(-(math.dist(phi[a][i], phi[b][j]) ** 2) / (2 * bandwidth**2))

        if credit == "sequence":
            rewards = []
            for g in range(groups):
                members = range(1 + g * samples, 1 + (g + 1) * samples)
                pull = sum(k(0, j, b, i) for b in members for i in range(n) for j in range(n)) * 2 / (samples * n * n)
                push = sum(
                    k(b, i, c, j)
                    for b in members
                    for c in members
                    if b != c
                    for i in range(n)
                    for j in range(n)
                    if i != j
                ) / (samples * (samples - 1) * n * (n - 1))
                rewards.append(pull - push)
            for b in range(D):
                g = b // samples
                others = [r for h, r in enumerate(rewards) if h != g]
                advantages += [rewards[g] - sum(others) / len(others)] * n
        else:
            for b in range(1, D + 1):
                rest = [c for c in range(1, D + 1) if c != b]

                def share(a, i, rivals, n=n, k=k):
                    pull = 2 * sum(k(a, i, 0, j) for j in range(n)) / n
                    pairs = [k(a, i, c, j) for c in rivals for j in range(n) if j != i]
                    return pull - 2 * (sum(pairs) / len(pairs) if pairs else 0)

                for i in range(n):
                    near = [j for j in range(n) if abs(positions[row][j] - positions[row][i]) <= credit]
                    own = sum(share(b, j, rest) for j in near) / len(near)
                    others = [share(c, j, [d for d in rest if d != c]) for c in rest for j in near]
                    advantages.append(own - sum(others) / len(others))
        chosen += [log_p[row][i, ids[row][b][i]] for b in range(D) for i in range(n)]
        tokens += n * D
    scale = 1.0 if credit == "sequence" else math.sqrt(sum(a * a for a in advantages) / tokens)
    return -sum(a / scale * x for a, x in zip(advantages, chosen, strict=True)) / tokens
