"""A digest of weights: equal for equal models, whatever their path."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


def weights_digest(tensors: Mapping[str, Tensor]) -> str:
    """The first 12 digits of a SHA-256 over names, types, shapes and bytes, in the order of the mapping."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:12]
