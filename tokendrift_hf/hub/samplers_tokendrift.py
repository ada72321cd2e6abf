"""The samplers: what happens at each position in a step from time t to s < t, and in which order it is computed.

All of them first draw what happens at each position and only then ask the network, at the positions where a token of
its prediction p(x_0 | x_t) is needed. The laws are exactly those of the papers, only the order of the draws differs.

Sources: MDLM (arXiv 2406.07524), DUO (2506.10892), psi samplers (2602.21185), ReMDM (2503.00307), first hitting
(2409.02908), ordered unmasking (2502.06768, MaskGIT 2202.04200, LLaDA 2502.09992).
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .canvas_tokendrift import Canvas
from .denoiser_tokendrift import Denoiser, Prediction, RowStreams, draw, draw_dtype

TIE = 1e-5  # certainties closer than this are one: rounding in float32 networks moves them by up to half of it
LAST_TIME = 1e-5  # where the reference stops; noise removal then goes from here to clean text in one more step


def is_whole(value, least: int) -> bool:
    """Whether `value` is an int of at least `least`. A bool is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value) -> bool:
    """Whether `value` is an int or a float. A bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def time_grid(spec: str | Sequence[float], num_steps: int, fractions: Sequence[float]) -> list[float]:
    """N + 1 times from 1 down to 1e-5.

    Args:
        spec: "linear" (the reference), "cosine" (1 - sin(pi/2 * i/N): small steps at the end), the N + 1 times
            themselves, or "linear-constant-linear-c" (ReMDM's loop): a fraction `fractions[0]` of the N steps goes
            linearly from 1 to c, `fractions[1]` stays there (sampling then only re-noises and denoises), the rest goes
            down to the end. "-inv" at the end means a plateau at 1 - c. (The reference's last part has one point
            less and so stops at c when it has one step.) Without a step for the last part, noise removal starts at c.
    """
    N = num_steps
    if not isinstance(spec, str):
        if not isinstance(spec, (list, tuple)) or not all(is_number(time) for time in spec):
            raise ValueError(f"time_grid={spec!r}. It must be the name of a grid or a list of times.")
        times = [float(time) for time in spec]
        falls = all(t >= s for t, s in zip(times, times[1:], strict=False))
        if len(times) != N + 1 or not falls or times[0] > 1 or times[-1] <= 0:
            raise ValueError(
                f"time_grid holds {len(times)} times from {times[0] if times else None} to "
                f"{times[-1] if times else None}; num_steps={N} needs {N + 1} falling times in (0, 1]."
            )
        return times
    if spec == "linear":
        return torch.linspace(1, LAST_TIME, N + 1, dtype=torch.float64).tolist()
    if spec == "cosine":
        angle = torch.linspace(0, torch.pi / 2, N + 1, dtype=torch.float64)
        return (1 - angle.sin()).clamp_min(LAST_TIME).tolist()
    match = re.fullmatch(r"linear-constant-linear-([0-9]*\.?[0-9]+)(-inv)?", spec)
    if not match or not 0 < float(match[1]) < 1:
        raise ValueError(
            f"Unknown time_grid {spec!r}. Give 'linear', 'cosine', 'linear-constant-linear-c' or "
            "'linear-constant-linear-c-inv' with 0 < c < 1, or a list of times."
        )
    level = 1 - float(match[1]) if match[2] else float(match[1])
    high, middle = (round(fraction * N) for fraction in fractions)
    down = torch.linspace(1, level, high + 1, dtype=torch.float64).tolist() if high else [1.0]
    rest = torch.linspace(level, LAST_TIME, N - high - middle + 1, dtype=torch.float64).tolist()[1:]
    return down + [level] * middle + rest


def are_fractions(values) -> bool:
    """Whether these are the fractions of the steps that are early and middle."""
    two = isinstance(values, (list, tuple)) and len(values) == 2 and all(is_number(value) for value in values)
    return two and min(values) >= 0 and sum(values) <= 1


def kappas(modes: str | Sequence[str], fractions: Sequence[float], alphas: Sequence[float]) -> list[float]:
    """kappa of each step of a psi sampler: the weight of the posterior against a fresh forward noising.

    Args:
        modes: one mode, or three for the first `fractions[0]` of the steps, the next `fractions[1]`, and the rest.
            pure-posterior: 1 (ancestral). pure-pc: 0 (predict, then noise again). constant-eta: eta.
            With ReMDM's probability sigma of masking a present token again, kappa = 1 - sigma / (1 - alpha_s) where
            sigma = eta (constant-remdm-eta), min(eta, (1 - alpha_s) / alpha_t) (max-capped-eta), or
            eta * min(1, (1 - alpha_s) / alpha_t) (max-rescale-eta). The duo repository has eta * min(eta, ...) there,
            in which eta enters twice. kappa is clipped to [0, 1].
        alphas: alpha at the N + 1 times.

    Returns:
        N values. The duo repository sets the last of every segment to 1. Here every step follows its mode.
    """
    N = len(alphas) - 1
    modes = [modes] * 3 if isinstance(modes, str) else modes
    named = isinstance(modes, (list, tuple)) and len(modes) == 3 and all(isinstance(mode, str) for mode in modes)
    if not named or not are_fractions(fractions):
        raise ValueError(
            f"psi={modes!r} with psi_fractions={fractions!r}: give one mode or three (early, middle, late), and two "
            "fractions of the steps, early and middle, of sum at most 1."
        )
    high, middle = (round(fraction * N) for fraction in fractions)
    values = []
    for i, (alpha_t, alpha_s) in enumerate(zip(alphas, alphas[1:], strict=False)):
        mode = modes[0 if i < high else 1 if i < high + middle else 2]
        name, eta = mode, None
        if match := re.fullmatch(r"(constant|constant-remdm|max-capped|max-rescale)-([0-9]*\.?[0-9]+)", mode):
            name, eta = match[1], float(match[2])
        most = (1 - alpha_s) / alpha_t
        if name in ("pure-posterior", "pure-pc"):
            value = float(name == "pure-posterior")
        elif name == "constant" and eta is not None:
            value = eta
        elif eta is not None:
            sigma = {"constant-remdm": eta, "max-capped": min(eta, most), "max-rescale": eta * min(1.0, most)}[name]
            value = 1 - sigma / (1 - alpha_s)
        else:
            raise ValueError(
                f"Unknown psi mode {mode!r}. Give pure-posterior, pure-pc, constant-ETA, constant-remdm-ETA, "
                "max-capped-ETA or max-rescale-ETA, with a number for ETA."
            )
        values.append(min(max(value, 0.0), 1.0))
    return values


def absorbing_rates(alpha_t: float, alpha_s: float, kappa: float) -> tuple[float, float]:
    """P(a mask becomes a token of the prediction) and P(a present token becomes a mask), in a step from t to s."""
    reveal = kappa * (alpha_s - alpha_t) / (1 - alpha_t) + (1 - kappa) * alpha_s
    return reveal, (1 - kappa) * (1 - alpha_s)


def uniform_rates(alpha_t: float, alpha_s: float, vocab_size: int) -> tuple[float, float, float]:
    """DUO's posterior as a mixture of x_t, a uniformly drawn token, and a token of the prediction p = p(x_0 | x_t).

    With a = alpha_t / alpha_s their weights are a (1 - alpha_s) + alpha_t V p(x_t), (1 - a) (1 - alpha_s) and
    alpha_s - alpha_t. The network enters by p(x_t) alone, and as follows.

    Returns:
        pull: the odds that x_t stays for the network's sake are pull * p(x_t), with pull = alpha_t V / (1 - alpha_t).
        keep, uniform: if it does not, P(it is kept all the same) and P(a uniform token). The rest is the prediction.
    """
    a = alpha_t / alpha_s
    keep, uniform = (weight * (1 - alpha_s) / (1 - alpha_t) for weight in (a, 1 - a))
    return alpha_t * vocab_size / (1 - alpha_t), keep, uniform


@dataclass(frozen=True)
class Step:
    """A step from time t to s < t.

    Attributes:
        t: the time that the network is told.
        left: this step and those after it, but for noise removal, which is 0.
        alpha_t, alpha_s: the signal left at both ends. alpha_s = 1 is the last step, which leaves no noise.
        kappa: the weight of the posterior against a fresh forward noising, see `kappas`. 1 is the ancestral step.
    """

    t: float
    left: int
    alpha_t: float
    alpha_s: float
    kappa: float = 1.0


def drawn(prediction: Prediction, uniforms: torch.Tensor) -> torch.Tensor:
    """Tokens [n] drawn from a prediction with random numbers [B, L]."""
    return draw(prediction.p, uniforms[prediction.rows, prediction.columns], prediction.source)


def absorbing_step(canvas: Canvas, denoiser: Denoiser, noise: RowStreams, process, step: Step):
    """MDLM. Which masks fall, and which tokens are masked again if kappa < 1, does not depend on the prediction."""
    event, token = canvas.random(noise, 2).unbind(-1)
    reveal, remask = absorbing_rates(step.alpha_t, step.alpha_s, step.kappa)
    masked = canvas.x == process.mask_id
    again = canvas.free & ~masked & (event < remask)
    wanted = canvas.free & masked & (event < reveal)
    for prediction in denoiser(canvas.x, canvas.at(step.t), wanted, step.left):
        canvas.put(drawn(prediction, token), prediction)
    canvas.x.masked_fill_(again, process.mask_id)
    canvas.confidence.masked_fill_(again, torch.nan)


def uniform_step(canvas: Canvas, denoiser: Denoiser, noise: RowStreams, process, step: Step):
    """DUO. At most positions the outcome is known without the network."""
    # What happens at each position: x_t is kept, or noise comes, or the network decides or gives the token.
    branch, event, odds, token = canvas.random(noise, 4).unbind(-1)
    random_tokens = process.random_tokens(token)
    pull, keep, uniform = uniform_rates(step.alpha_t, step.alpha_s, process.num_states)
    forward = branch >= step.kappa  # instead of the posterior at s: x_0 from the posterior, then noised again to s
    kept = ~forward & (event < keep)
    noised = torch.where(forward, event < 1 - step.alpha_s, ~kept & (event < keep + uniform))
    least = odds / (1 - odds) / pull  # x_t stays where p(x_t) is larger
    unclear = canvas.free & ~kept & ~(forward & noised)
    # The network is asked where it matters. Where noise would come it can only say that x_t stays.
    skip_below = torch.where(noised, least, 0.0)
    for prediction in denoiser(canvas.x, canvas.at(step.t), unclear, step.left, skip_below):
        at, source, p = (prediction.rows, prediction.columns), prediction.source, prediction.p
        new, noised_here = canvas.x[at], noised[at]
        stays = p[source, new] > least[at]
        noised[at] = noised_here & ~stays
        left = (~stays & ~noised_here).nonzero()[:, 0]
        if len(left):
            new[left] = draw(p, token[at][left], source[left])
        canvas.put(new, prediction)
    noised &= canvas.free
    canvas.x = torch.where(noised, random_tokens, canvas.x)
    canvas.confidence.masked_fill_(noised, torch.nan)


def denoise(canvas: Canvas, denoiser: Denoiser, noise: RowStreams, process, settings, on_step: Callable):
    """ancestral and psi: N steps along the time grid, then noise removal."""
    N = settings.num_steps
    times = time_grid(settings.time_grid, N, settings.psi_fractions)
    alphas = process.schedule.alpha(torch.tensor(times, dtype=torch.float64)).tolist()
    kappa = kappas(settings.psi if settings.sampler == "psi" else "pure-posterior", settings.psi_fractions, alphas)
    take = uniform_step if process.mask_id is None else absorbing_step
    for i in range(N):
        take(canvas, denoiser, noise, process, Step(times[i], N - i, alphas[i], alphas[i + 1], kappa[i]))
        on_step(i, times[i + 1])
    if settings.noise_removal == "ancestral":
        take(canvas, denoiser, noise, process, Step(times[N], 0, alphas[N], 1.0))
    elif settings.noise_removal == "greedy":
        wanted = canvas.free & process.predicted_positions(canvas.x)
        for prediction in denoiser(canvas.x, canvas.at(times[N]), wanted, 0):
            canvas.put(prediction.p.argmax(-1)[prediction.source], prediction)
    if settings.noise_removal != "none":
        on_step(N, 0.0)


def first_hitting(canvas: Canvas, denoiser: Denoiser, noise: RowStreams, process, settings, on_step: Callable):
    """One token a call, in uniformly random order, at the exact random times at which masks fall (2409.02908).

    The masked process without time discretisation: the first of n masks falls when the masked fraction 1 - alpha has
    shrunk by u^(1/n). As many calls as the row with most masks has masks.
    """
    start = torch.ones(len(canvas.x), dtype=noise.dtype, device=canvas.x.device)
    masked_fraction = 1 - process.schedule.alpha(start)
    for step in range(canvas.x.shape[1]):
        masked = canvas.free & (canvas.x == process.mask_id)
        left = masked.sum(1)
        if not left.any():
            break
        time, place, token = noise.rows(left > 0, 3).unbind(-1)
        masked_fraction = masked_fraction * time ** (1 / left.clamp_min(1))
        t = process.schedule.time_of_alpha(1 - masked_fraction).clamp_max(1)  # rounding may go beyond
        wanted = masked & (masked.cumsum(1) - 1 == (place * left).long()[:, None])
        for prediction in denoiser(canvas.x, t, wanted, left):
            canvas.put(drawn(prediction, token[:, None].expand_as(wanted)), prediction)
        on_step(step, float(t.min()))


def ordered(canvas: Canvas, denoiser: Denoiser, noise: RowStreams, process, settings, on_step: Callable):
    """Unmask the surest positions first: N steps, floor(n t) of a row's n masks left after the step that ends at t.

    A position's score is how sure the network's own prediction is there, before temperature, top_k and top_p.
    "confidence": the largest probability. "margin": less the second largest (both 2502.06768). "entropy": the smallest
    entropy (2508.15487). Tokens are drawn from the prediction under temperature, top_k and top_p, and the order does
    not depend on what is drawn. Scores closer than 1e-5 count as equal, and of equal ones the left is first: such
    differences are rounding, since a canvas of nothing but masks looks alike from all of its positions.

    With temperature 0 "confidence" is LLaDA's low-confidence remasking (2502.09992), which orders by the probability of
    the token that it chose. This is not the law of the diffusion process: it lowers the entropy of the text.
    """
    times = time_grid(settings.time_grid, settings.num_steps, settings.psi_fractions)[:-1] + [0.0]
    num_masks = (canvas.free & (canvas.x == process.mask_id)).sum(1).tolist()
    for i, (t, s) in enumerate(zip(times, times[1:], strict=False)):
        masked = canvas.free & (canvas.x == process.mask_id)
        left = torch.tensor([int(n * s) for n in num_masks], device=masked.device)
        reveal = masked.sum(1) - left
        token = canvas.random(noise, 1)[..., 0]
        draft = replace(canvas, x=canvas.x.clone(), confidence=canvas.confidence.clone())
        score = torch.full(masked.shape, -torch.inf, dtype=noise.dtype, device=masked.device)
        wanted = masked & (reveal > 0)[:, None]
        for prediction in denoiser(canvas.x, canvas.at(t), wanted, len(times) - 1 - i):
            draft.put(drawn(prediction, token), prediction)
            scores = certainty(settings.sampler, prediction.plain).to(score)
            score[prediction.rows, prediction.columns] = scores[prediction.source]
        chosen = wanted & (ranks(score) < reveal[:, None])
        canvas.x = torch.where(chosen, draft.x, canvas.x)
        canvas.confidence = torch.where(chosen, draft.confidence, canvas.confidence)
        on_step(i, s)


def ranks(scores: torch.Tensor) -> torch.Tensor:
    """The place of each score in its row [B, L], 0 for the largest. Scores with gaps below `TIE` go from the left."""
    best, order = scores.sort(dim=1, descending=True)
    first_of_group = torch.nn.functional.pad(best[:, :-1] - best[:, 1:] >= TIE, (1, 0))
    group = torch.empty_like(order).scatter_(1, order, first_of_group.cumsum(1))
    return group.argsort(dim=1, stable=True).argsort(dim=1)


def certainty(sampler: str, p: torch.Tensor) -> torch.Tensor:
    """How sure predictions p [n, V] are, [n]."""
    if sampler == "entropy":
        return -torch.special.entr(p).sum(-1, dtype=draw_dtype("float64", p.device))
    best = p.topk(2, dim=-1).values
    return best[:, 0] - (best[:, 1] if sampler == "margin" else 0.0)


@dataclass(frozen=True)
class Sampler:
    """One line of the table of samplers.

    Attributes:
        run: called as run(canvas, denoiser, noise, process, settings, on_step). It fills the free positions of the
            canvas, and calls on_step(step, t) after each step, with the time t that it has reached.
        needs_mask: whether it is for masked models only.
        unused: the settings that it does not read.
        keeps: whether a masked model's token stays once it is written.
    """

    run: Callable
    needs_mask: bool = False
    unused: tuple[str, ...] = ()
    keeps: bool = True


SAMPLERS = {
    "ancestral": Sampler(denoise, unused=("psi",)),
    "psi": Sampler(denoise, keeps=False),
    "first_hitting": Sampler(first_hitting, needs_mask=True, unused=("num_steps", "time_grid", "noise_removal", "psi")),
    **dict.fromkeys(
        ("confidence", "margin", "entropy"),
        Sampler(ordered, needs_mask=True, unused=("noise_removal", "psi")),
    ),
}
