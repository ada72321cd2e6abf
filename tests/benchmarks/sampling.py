"""How far generate() is from its limit, the backbone calls alone, and from the loop that one would write first.

    python tests/benchmarks/sampling.py [--steps 4 16 64] [--size small] [--device cuda] [--batch 8]

One run prints, for MDLM and DUO with equal random weights and for each N: the time of generate(), of N backbone calls
without the vocabulary head, and of the ancestral sampler written straight from the formulas (the whole posterior in
float64 at every position of every step), with the ratios. Interleaved repeats, the best of each counts.
"""

from __future__ import annotations

import argparse
import time

import torch

from tokendrift_hf.hub.configuration_tokendrift import DUOConfig, MDLMConfig
from tokendrift_hf.hub.modeling_tokendrift import DUOForMaskedLM, MDLMForMaskedLM

SIZES = {
    "170m": {},
    "small": {"vocab_size": 5000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    | {"max_position_embeddings": 256},
}


def random_weights(model, scale: float = 0.02):
    """Random, and no layer zero, so that no shortcut is possible; every model gets the same."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model.eval()


@torch.no_grad()
def backbone_only(model, batch: int, num_steps: int):
    length = model.config.max_position_embeddings
    x = torch.randint(model.config.vocab_size, (batch, length), device=model.device)
    for t in torch.linspace(1, 1e-5, num_steps, device=model.device):
        model.hidden_states(model.backbone.vocab_embed(x), t.expand(batch))


@torch.no_grad()
def straightforward(model, batch: int, num_steps: int):
    """The ancestral sampler as its formulas say, one sequence at a time to bound the memory."""
    V, length, process, device = (
        model.config.vocab_size,
        model.config.max_position_embeddings,
        model.process,
        model.device,
    )
    times = torch.linspace(1, 1e-5, num_steps + 1, dtype=torch.float64, device=device)
    x = process.prior(torch.randint(V, (batch, length), device=device))
    for i, t in enumerate(times):
        alpha_t = process.schedule.alpha(t)
        alpha_s = process.schedule.alpha(times[i + 1]) if i < num_steps else torch.ones_like(t)
        for row in range(batch):
            x_t = x[row : row + 1]
            logits = model(x_t, timesteps=t.expand(1)).logits.double()
            p_x0 = process.log_probs(logits, x_t).exp()
            q_xs = process.posterior(p_x0, x_t, alpha_t.expand(1), alpha_s.expand(1))
            exponential = -torch.rand_like(q_xs).log()
            x[row] = (q_xs / exponential).argmax(-1)[0]
    return x


def seconds(function, device: torch.device, clock) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--size", choices=SIZES, default="170m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=["mdlm", "duo"], choices=["mdlm", "duo"])
    parser.add_argument("--skip-straightforward", action="store_true", help="it takes several times as long")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: where others share the cores")
    args = parser.parse_args()
    device = torch.device(args.device)
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    torch.set_num_threads(args.threads)
    where = f"{args.device}, {args.threads} threads, {args.size}, B={args.batch}, {args.clock} time"
    print(f"torch {torch.__version__}, {where}")
    print("model  N     generate  backbone x N  straightforward  generate/backbone  straightforward/generate")
    classes = {"mdlm": (MDLMForMaskedLM, MDLMConfig), "duo": (DUOForMaskedLM, DUOConfig)}
    for name in args.models:
        model_class, config_class = classes[name]
        model = random_weights(model_class(config_class(**SIZES[args.size]))).to(device)
        for N in args.steps:
            runs = {
                "ours": lambda model=model, N=N: model.generate(num_samples=args.batch, num_steps=N, seed=0),
                "limit": lambda model=model, N=N: backbone_only(model, args.batch, N),
            }
            if not args.skip_straightforward:
                runs["slow"] = lambda model=model, N=N: straightforward(model, args.batch, N)
            backbone_only(model, args.batch, 1)
            best = dict.fromkeys(("ours", "limit", "slow"), float("nan"))
            for _ in range(args.repeats):
                for key, run in runs.items():
                    took = seconds(run, device, clock)
                    best[key] = took if best[key] != best[key] else min(best[key], took)
            ours, limit, slow = best.values()
            print(
                f"{name:5} {N:4} {ours:9.2f}s {limit:12.2f}s {slow:15.2f}s {ours / limit:18.3f} {slow / ours:20.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
