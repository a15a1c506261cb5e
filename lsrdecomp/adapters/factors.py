"""The trainable factors of one sum of Kronecker products, and the starts they are given."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lsrdecomp.adapters.kernels.grouping import Expandable
from lsrdecomp.kronecker.shape import KroneckerShape


class KroneckerFactors(Expandable):
    """Parameters ``factor_1 … factor_d`` of shapes (s, m_i, n_i); the first is the outermost.

    They are named rather than numbered: PEFT rewrites keys by text when it inserts an adapter's name, and a bare number
    is also what it writes for layers.
    """

    def __init__(self, shape: KroneckerShape, separation_rank: int) -> None:
        super().__init__()
        self.shape = shape
        self.separation_rank = separation_rank
        self.names = tuple(f"factor_{index}" for index in range(1, shape.order + 1))
        for name, (rows, columns) in zip(self.names, shape.factors, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(separation_rank, rows, columns)))

    @property
    def factors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.names]

    @torch.no_grad()
    def initialize(self, std: float, zero: int | None = None) -> None:
        """Random factors whose expanded sum has entries of standard deviation ``std``.

        Parameters
        ----------
        std : float
            Standard deviation of the entries, as if no factor were zero.
        zero : int, optional
            Index of one factor to set to zero; the rest then keep their share.
        """
        random = [index for index in range(self.shape.order) if index != zero]
        share = (std**2 / self.separation_rank) ** (0.5 / max(1, len(random)))
        for index, factor in enumerate(self.factors):
            if index == zero:
                nn.init.zeros_(factor)
            elif factor[0].numel() == 1:
                # A 1 x 1 factor is a coefficient: random ones would rescale whole terms, by nearly nothing at times.
                nn.init.constant_(factor, share)
            else:
                nn.init.normal_(factor, std=share)

    def extra_repr(self) -> str:
        return f"{self.shape}, separation_rank={self.separation_rank}"


def zero_factor(shape: KroneckerShape) -> int:
    """Index of the factor that the default start sets to zero: the largest, the last of equals.

    The largest, so that plain low rank, ``m×r ⊗ 1×1``, starts as LoRA does.
    """
    return max(range(shape.order), key=lambda index: (shape.sizes[index], index))
