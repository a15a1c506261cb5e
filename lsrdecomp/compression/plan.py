"""CompressionPlan: what is asked of a compressed adapter."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from lsrdecomp.errors import BudgetError, ShapeError
from lsrdecomp.precision import precision


@dataclass(frozen=True, slots=True)
class CompressionPlan:
    """What is asked: an error for every layer, or one size for every layer.

    Parameters
    ----------
    rtol : float, optional
        Largest ‖ΔW − ΔŴ‖_F / ‖ΔW‖_F of every layer, on the tensors as written.
    separation_rank : int, optional
        Terms of each side; needs no ``rtol``.
    inner_shape : tuple of int, optional
        Split (r1, r2) of the inner rank; absent, the most even split of each layer's own rank.
    storage : str
        Element type of the written factors: float32, float16, bfloat16.
    low_rank : bool
        With ``rtol``: also try plain truncated SVD and take it where it needs fewer parameters.
    """

    rtol: float | None = None
    separation_rank: int | None = None
    inner_shape: tuple[int, ...] | None = None
    storage: str = "float32"
    low_rank: bool = True

    def __post_init__(self) -> None:
        if (self.rtol is None) == (self.separation_rank is None):
            raise BudgetError("say how small or how exact: give a relative error (rtol) or a separation rank, not both")
        if self.rtol is not None and not (math.isfinite(self.rtol) and self.rtol > 0.0):
            raise BudgetError(f"rtol must be a positive number, got {self.rtol}")
        if self.separation_rank is not None and self.separation_rank < 1:
            raise ShapeError(f"a separation rank is a positive integer, got {self.separation_rank}")
        if self.inner_shape is not None:
            inner = tuple(self.inner_shape)
            if len(inner) != 2 or any(q < 1 for q in inner):
                raise ShapeError(f"the inner shape is two positive integers r1, r2, got {inner}")
            object.__setattr__(self, "inner_shape", inner)
        precision(self.storage)

    def to_json(self) -> dict[str, Any]:
        """The plan as written into the provenance."""
        return {key: value for key, value in asdict(self).items() if value is not None}
