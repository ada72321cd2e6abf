"""How far generate() is from its limit, the backbone calls alone, and from the loop that one would write first.

    python tests/benchmarks/sampling.py [--size small] [--steps 4 16 64] [--batch 8] [--device cuda --compile]

One run prints, for MDLM and DUO with equal random weights and for each N: the time of generate(), of N backbone calls
(embedding and blocks, no vocabulary head), and of the ancestral sampler written straight from the formulas (the whole
posterior in float64 at every position of every step), with the ratios. DUO makes one call more than MDLM: its noise
removal can change any token. The repeats are interleaved and the best of each counts. `--memory` prints instead how far
memory rises above the model: by one backbone call, and by generate().

Measured with torch 2.13 on both cores of an otherwise idle Xeon, float32, B = 1, wall time (`--threads 2`; 170m is
the released size, L = 1024, V = 50258; small has L = 256, V = 5000; N = 64 and 1000 once, else the best of 2):

    size   model    N  generate  backbone x N  generate/backbone  straightforward  straightforward/generate
    170m   mdlm     4     2.99s         2.78s              1.074           13.30s                      4.45
    170m   mdlm    16    10.82s        11.02s              0.982           44.82s                      4.14
    170m   mdlm    64    42.49s        44.66s              0.951                -                         -
    170m   duo      4     4.36s         2.74s              1.591           11.63s                      2.67
    170m   duo     16    12.94s        11.01s              1.175           39.70s                      3.07
    170m   duo     64    45.36s        44.71s              1.015                -                         -
    small  mdlm  1000     2.15s         9.94s              0.217           36.25s                     16.84
    small  duo   1000     7.54s        10.34s              0.729           32.34s                      4.29

On one thread of an AMD EPYC that other programs shared, where products are slow (`--models duo --steps 4 --threads 1
--clock cpu --repeats 1`): generate() 17.54 s, backbone 10.26 s (1.709), straightforward 36.24 s (2.07). DUO makes five
calls at N = 4, so the first ratio cannot fall below 1.25, nor the last one exceed 36.24 / (1.25 x 10.26) = 2.8 there.

The straightforward loop varies most from run to run: an earlier one had 4.61 (MDLM) and 3.38 (DUO) at N = 16, one on a
single thread by CPU time 3.70 and 2.73. The last column cannot exceed straightforward / backbone, 4.1 and 3.6 at N = 16
above, unless generate() takes less time than the backbone calls: it makes a call only where a token is needed, and runs
the last block at wanted positions only. What DUO spends beyond them is noise removal (a 17th call) and the head at some
5 L positions in all.

Memory at 170m, N = 1, B = 8, above the model (`--memory --batch 8 --steps 1 --threads 1`): generate() 169 MB (MDLM) and
161 MB (DUO); with temperature 0.9, top_k 50 and top_p 0.9: 153, 153, 86 and 135, 116, 94 MB. One backbone call of B = 1
alone takes 157 and 101 MB there; what the allocator had free before differs from run to run.

Not run on a GPU yet; meant for it: `--device cuda --batch 8 --steps 16 --dtype bfloat16 --compile`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from reference import log_probs, posterior  # noqa: E402

from tokendrift_hf.hub.configuration_tokendrift import DUOConfig, MDLMConfig  # noqa: E402
from tokendrift_hf.hub.modeling_tokendrift import DUOForMaskedLM, MDLMForMaskedLM  # noqa: E402

SIZES = {
    "170m": {},
    "small": {"vocab_size": 5000, "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    | {"max_position_embeddings": 256},
}
CLASSES = {"mdlm": (MDLMForMaskedLM, MDLMConfig), "duo": (DUOForMaskedLM, DUOConfig)}


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
    """The ancestral sampler as its formulas say; the posterior one sequence at a time, to bound the memory."""
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
        logits = model(x, timesteps=t.expand(batch)).logits
        for row in range(batch):
            x_t = x[row : row + 1]
            p_x0 = log_probs(process, logits[row : row + 1].double(), x_t).exp()
            q_xs = posterior(process, p_x0, x_t, alpha_t.expand(1), alpha_s.expand(1))
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


class Memory:
    """How far memory rises above what was in use when this was made, in MB (CPU: resident, by the Linux kernel)."""

    def __init__(self, device: torch.device):
        self.device = device
        gc.collect()
        self.start = torch.cuda.memory_allocated() / 1e6 if device.type == "cuda" else self._resident("VmRSS")

    @staticmethod
    def _resident(field: str) -> float:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024 / 1e6

    def rise(self, function) -> float:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            function()
            return torch.cuda.max_memory_allocated() / 1e6 - self.start
        Path("/proc/self/clear_refs").write_text("5")
        function()
        return self._resident("VmHWM") - self.start


def build(name: str, args):
    model_class, config_class = CLASSES[name]
    model = random_weights(model_class(config_class(**SIZES[args.size])))
    model = model.to(args.device, getattr(torch, args.dtype))
    if args.compile:  # the blocks that always see the whole batch; the last one sees as many positions as are needed
        for block in model.backbone.blocks[:-1]:
            block.compile(dynamic=False)
    return model


def print_memory(name: str, model, args):
    memory = Memory(model.device)
    alone = memory.rise(lambda: backbone_only(model, 1, 1))
    print(f"{name:5} one backbone call of B=1 {alone:6.0f} MB", end="")
    for settings in ({}, {"temperature": 0.9}, {"top_k": 50}, {"top_p": 0.9}):
        ours = memory.rise(lambda settings=settings: model.generate(num_samples=args.batch, num_steps=1, **settings))
        print(f", generate({', '.join(f'{k}={v}' for k, v in settings.items())}) {ours:.0f} MB", end="", flush=True)
    print()


def print_times(name: str, model, args, clock):
    runs = {"ours": lambda N: model.generate(num_samples=args.batch, num_steps=N, seed=0)}
    runs["limit"] = lambda N: backbone_only(model, args.batch, N)
    if not args.skip_straightforward:
        runs["slow"] = lambda N: straightforward(model, args.batch, N)
    for run in runs.values():  # warm up, and compile
        run(1)
    for N in args.steps:
        best = dict.fromkeys(("ours", "limit", "slow"), float("inf"))
        for _ in range(args.repeats):
            for key, run in runs.items():
                best[key] = min(best[key], seconds(lambda run=run, N=N: run(N), model.device, clock))
        ours, limit, slow = best.values()
        straight = "" if args.skip_straightforward else f"{slow:15.2f}s {slow / ours:24.2f}"
        print(f"{name:5} {N:4} {ours:8.2f}s {limit:12.2f}s {ours / limit:17.3f} {straight}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--size", choices=SIZES, default="170m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of the network")
    parser.add_argument("--compile", action="store_true", help="torch.compile on all blocks but the last")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["mdlm", "duo"], choices=["mdlm", "duo"])
    parser.add_argument("--skip-straightforward", action="store_true", help="it takes several times as long")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: where others share the cores")
    args = parser.parse_args()
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[args.clock]
    torch.set_num_threads(args.threads)
    where = f"{args.device}, {args.dtype}, {args.threads} threads, {args.size}, B={args.batch}, {args.clock} time"
    print(f"torch {torch.__version__}, {where}{', compiled' if args.compile else ''}")
    if not args.memory:
        print("model    N generate backbone x N generate/backbone straightforward straightforward/generate")
    for name in args.models:
        model = build(name, args)
        if args.memory:
            print_memory(name, model, args)
        else:
            print_times(name, model, args, clock)


if __name__ == "__main__":
    main()
