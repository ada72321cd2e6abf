"""Where the paired MMD ends, with whole-row and with windowed credit: all rows of a toy world, no draws, float64.

    python recipes/study/fixed_point.py

The world: 4 positions of 3 tokens, so 81 rows. q is a random law over them, the posterior of the clean row given one
noisy row. The model is a product of four free laws, as a diffusion model's prediction is. The encoder mixes a token
with its two neighbours and, by a factor `far`, with the mean of its row. Every step follows the exact expectation of
the policy gradient, so that what is left is the objective's alone. A line is a mean over worlds of, per position:
MMD^2 but for a constant, the entropy of the model in nats, and its total variation from the true marginals of q, which
the NELBO would give.
"""

from __future__ import annotations

import itertools

import numpy as np

LENGTH, VOCABULARY, FEATURES = 4, 3, 6
STEPS, RATE, WORLDS = 700, 0.06, 2
ROWS = np.array(list(itertools.product(range(VOCABULARY), repeat=LENGTH)))
ONE_HOT = np.eye(VOCABULARY)[ROWS]


def world(seed: int, far: float) -> tuple[np.ndarray, np.ndarray]:
    """The law q ``[N]`` over all rows, and the kernel between all positions of all rows ``[N, L, N, L]``."""
    rng = np.random.default_rng(seed)
    embedding = rng.normal(size=(VOCABULARY, FEATURES))
    near, mean = rng.normal(size=(2, FEATURES, FEATURES)) / FEATURES**0.5
    q = np.exp(2 * rng.normal(size=len(ROWS)))
    x = embedding[ROWS]
    neighbours = np.zeros_like(x)
    neighbours[:, 1:] += x[:, :-1]
    neighbours[:, :-1] += x[:, 1:]
    features = np.tanh(x + 0.7 * neighbours @ near + far * x.mean(1, keepdims=True) @ mean).reshape(-1, FEATURES)
    squares = ((features[:, None] - features) ** 2).sum(-1)
    kernel = np.exp(-squares / (2 * np.median(squares)))
    return q / q.sum(), kernel.reshape(len(ROWS), LENGTH, len(ROWS), LENGTH)


def end_point(q: np.ndarray, kernel: np.ndarray, window: int, equal_positions: bool) -> tuple[float, float, float]:
    """MMD^2, entropy and total variation where Adam ends.

    `equal_positions`: whether the repulsion counts pairs of equal positions of two draws, which the published form
    leaves out.
    """
    counted = np.ones((LENGTH, LENGTH)) - (0 if equal_positions else np.eye(LENGTH))
    attraction = kernel.mean(3) @ q
    repulsion = np.einsum("ainj,ij->ain", kernel, counted / counted.sum(1, keepdims=True))
    near = abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH)) <= window
    logits, first, second = (np.zeros((LENGTH, VOCABULARY)) for _ in range(3))
    for step in range(1, STEPS + 1):
        p, P = laws(logits)
        credit = (2 * attraction - 2 * repulsion @ P) @ near
        gradient = np.einsum("a,ai,aiv->iv", P, credit, ONE_HOT - p)
        first, second = 0.9 * first + 0.1 * gradient, 0.99 * second + 0.01 * gradient**2
        scale = RATE * (1 - step / STEPS) / (1 - 0.9**step)
        logits = logits + scale * first / (np.sqrt(second / (1 - 0.99**step)) + 1e-10)
    p, P = laws(logits)
    value = (P @ repulsion.mean(1) @ P) - 2 * attraction.mean(1) @ P
    entropy = -(p * np.log(p.clip(1e-300))).sum() / LENGTH
    return value, entropy, abs(p - marginals(q)).sum() / 2 / LENGTH


def laws(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """p ``[L, V]``, and the probability of every row ``[N]``."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return p, np.take_along_axis(p, ROWS.T, axis=1).prod(0)


def marginals(q: np.ndarray) -> np.ndarray:
    return np.einsum("a,aiv->iv", q, ONE_HOT)


def main() -> None:
    worlds = {far: [world(seed, far) for seed in range(WORLDS)] for far in (0.0, 1.0)}
    for (far, cases), equal_positions, window in itertools.product(worlds.items(), (False, True), (0, 1, LENGTH - 1)):
        value, entropy, distance = np.mean([end_point(*case, window, equal_positions) for case in cases], axis=0)
        print(
            f"far {far:g}, {'all pairs' if equal_positions else 'published'}, window {window}: "
            f"MMD^2 {value:.3f}, entropy {entropy:.3f}, distance {distance:.3f}"
        )
    exact = [marginals(q) for q, _ in worlds[0.0]]
    print(f"entropy of the true marginals {-np.mean([(p * np.log(p)).sum() / LENGTH for p in exact]):.3f}")


if __name__ == "__main__":
    main()
