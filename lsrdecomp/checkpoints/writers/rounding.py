"""What writing changes in ΔW, measured while it is written, so that `verify` can hold a file to it."""

from __future__ import annotations

import math

import numpy as np

from lsrdecomp.checkpoints.tensors import Array
from lsrdecomp.kronecker.product import low_rank_product
from lsrdecomp.targets.base import LowRank


class Rounding:
    """Sizes over all layers, each added when its halves are rounded.

    >>> rounding = Rounding()
    >>> up, down = np.ones((4, 1)), np.ones((1, 9))
    >>> rounding.add(up, down, up.astype(np.float16), down.astype(np.float16))
    >>> rounding.to_json()
    {'norm': 6.0, 'rounding': 0.0}
    """

    def __init__(self) -> None:
        self.norm = 0.0
        self.error = 0.0

    def add(self, up: Array, down: Array, stored_up: Array, stored_down: Array) -> None:
        """One layer: ``B @ A`` as it was, and as a reader will get it."""
        pair = LowRank(np.asarray(up, np.float64), np.asarray(down, np.float64))
        self.norm = math.hypot(self.norm, pair.norm)
        stored = np.asarray(stored_up, np.float64), np.asarray(stored_down, np.float64)
        if not (np.array_equal(stored[0], pair.left) and np.array_equal(stored[1], pair.right)):
            self.error = math.hypot(self.error, pair.residual_norm(low_rank_product(*stored)))

    def to_json(self) -> dict[str, float]:
        """‖ΔW‖_F of all layers together, and by how much they were moved."""
        return {"norm": self.norm, "rounding": self.error}
