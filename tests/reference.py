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
