"""DoRA's magnitudes on top of any ΔW: every output row of W + ΔW gets a trained norm (Liu et al., 2024)."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def row_norms(weight: Tensor, delta: Tensor) -> Tensor:
    """Norms of the rows of ``W + ΔW``, both (out, in) matrices, constant for the gradient.

    DoRA treats the norm as a constant (its section 4.3): only the magnitude and the direction's numerator are trained.
    """
    wide = torch.promote_types(delta.dtype, torch.float32)  # 16-bit norms would not even restore W for ΔW = 0
    norms: Tensor = torch.linalg.vector_norm(weight.to(wide) + delta.to(wide), dim=1)
    return norms


def dora_output(result: Tensor, plain: Tensor, delta: Tensor, scale: Tensor) -> Tensor:
    """Add what DoRA changes: ``(s - 1) W x + s ΔW x`` to ``result``, from ``W x`` without bias and ``ΔW x``."""
    return result + (scale - 1) * plain + scale * delta
