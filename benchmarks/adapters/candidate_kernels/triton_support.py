"""Whether Triton kernels can run here, and the few facts they share."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch


@cache
def installed() -> bool:
    return find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton's interpreter stands in for a GPU; read when a kernel's file is first imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def usable(device: str | torch.device) -> bool:
    """Whether a Triton kernel runs on tensors of this device."""
    kind = torch.device(device).type
    return installed() and (kind == "cuda" or (kind == "cpu" and interpreted()))


def tile(size: int) -> int:
    """The least power of two from 16 on that holds ``size``: what a tensor core multiplies."""
    return max(16, 1 << (size - 1).bit_length())


def dot_precision(dtype: torch.dtype) -> str:
    return "ieee" if dtype == torch.float32 else "tf32"
