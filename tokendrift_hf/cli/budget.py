"""What a training will cost, worked out before it starts: floating-point operations, time and memory."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..training.drift_config import DriftConfig

GIB = 2**30


@dataclass(frozen=True)
class Budget:
    """Of one device.

    Attributes:
        flops: floating-point operations of one micro-batch.
        fixed_bytes: weights, gradients, optimizer state, moving average and the encoder's copy.
        batch_bytes: activations of one micro-batch. Fitted to peaks measured on a CPU for eight models of 8 to 21 M
            parameters (tests/benchmarks/lora_memory.py); the sum of both is within 7 % of them, and within 1 % of
            three at 170 M (--length 1024, float32). Memory that an allocator holds back, and the L x L scores of eager
            attention, come on top.
    """

    flops: float
    fixed_bytes: int
    batch_bytes: int


def budget(model: PreTrainedModel, config: DriftConfig, length: int, *, encoder_copy: bool = True) -> Budget:
    """The cost of one micro-batch of `config.train_batch_size` rows of `length` tokens.

    A product of a [m, k] by a [k, n] matrix is 2mkn operations; backward costs as much again for the gradient of the
    input, and as much for that of the weights where these are trained. The student goes forward and backward through
    everything; the encoder goes forward on real text, forward and backward (to its input) on lifted predictions,
    without the vocabulary head; the lift multiplies probabilities by the embedding matrix, and back.

    Args:
        model: the student; weights that take no gradient count as frozen.
        config: batch size, objective, precision, EMA.
        length: L.
        encoder_copy: whether the encoder is a model of its own.
    """
    size = model.config.hidden_size
    layers, vocab_size = model.config.num_hidden_layers, model.config.vocab_size
    total = sum(p.numel() for p in model.parameters())
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    tokens = config.train_batch_size * length
    blocks = 2.0 * (total - 2 * vocab_size * size) * tokens + 4.0 * length * size * layers * tokens  # one pass forward
    head = 2.0 * vocab_size * size * tokens
    products = 3 if trainable == total else 2  # with adapters the base weights take no gradient
    drift = config.objective != "none"
    flops = products * (blocks + head) + (3 * blocks + 2 * head if drift else 0)

    fixed = 4 * total + 12 * trainable  # float32 weights; their gradient and Adam's two moments
    fixed += 4 * trainable if config.ema_decay is not None else 0
    fixed += 4 * total if drift and encoder_copy else 0
    # Kept for backward, in values a token, block and unit of width (norms, qkv, attention, MLP, branches): 21, or 17
    # where the weights need no gradient, and 13 in the encoder; a checkpointed student keeps next to nothing. Autocast
    # keeps copies of the weights. The peak is either where the encoder's graph is whole and the lift works on 512
    # positions, or where the logits meet their softmax and its gradient.
    half = config.bf16 or config.fp16
    unit = size * layers * tokens * (2 if half else 4)
    logits = vocab_size * tokens
    lift = 13 * unit + (8 if half else 4) * logits + 12 * vocab_size * min(512, tokens) if drift else 0
    softmax = (16 if config.objective.startswith("mirror") else 12) * logits
    activations = max(lift, softmax) + (2 * total * (1 + drift) if half else 0)
    if not config.gradient_checkpointing:
        activations += (21 if trainable == total else 17) * unit
    if config.gradient_accumulation_steps == 1:  # gradients come into being as activations go
        activations -= min(activations, 4 * trainable)
    return Budget(flops, fixed, activations)


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 1024) -> float:
    """Floating-point operations a second that this device reaches in a matrix product of `size` x `size`."""
    a = torch.randn(size, size, device=device, dtype=dtype)
    rounds = 0
    a @ a
    start = time.perf_counter()
    while time.perf_counter() - start < 0.2:
        for _ in range(1 if device.type == "cpu" else 50):
            b = a @ a
            rounds += 1
        b.flatten()[0].item()  # waits for the device
    return rounds * 2 * size**3 / (time.perf_counter() - start)


def describe(cost: Budget, config: DriftConfig, num_steps: int, rate: float) -> str:
    """The batch, the memory and the time of a training, in a line each."""
    per_step = cost.flops * config.gradient_accumulation_steps
    batch = config.train_batch_size * config.gradient_accumulation_steps * config.world_size
    seconds = num_steps * per_step / rate
    return (
        f"Global batch {batch} = {config.train_batch_size} rows a device x {config.gradient_accumulation_steps} "
        f"accumulated x {config.world_size} processes.\n"
        f"Memory of a device: {cost.fixed_bytes / GIB:.2f} GiB for weights, optimizer and encoder, about "
        f"{cost.batch_bytes / GIB:.2f} GiB for activations.\n"
        f"Time: {per_step / 1e12:.2f} TFLOP a step and device, at {rate / 1e12:.2f} TFLOP/s (a matrix product, "
        f"measured now) at least {_duration(seconds)} for {num_steps} steps; two to five times that is usual."
    )


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
