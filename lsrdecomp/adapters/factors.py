"""The trainable factors of one sum of Kronecker products, and the starts they are given."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from lsrdecomp.adapters.kernels import expand, is_traced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.kronecker.shape import KroneckerShape

_formed: ContextVar[dict[KroneckerFactors, Tensor] | None] = ContextVar("formed", default=None)
_latest: WeakKeyDictionary[KroneckerFactors, tuple[list[Tensor], Tensor]] = WeakKeyDictionary()
"""Matrices formed without a graph on a CPU, and copies of the factors they were formed of."""


@contextmanager
def formed_once() -> Iterator[None]:
    """While open, a pair that is formed without a graph is formed once: for all tokens of an answer.

    PEFT's ``generate`` is within one; a decoding loop of your own opens it around itself. Elsewhere
    parameters can be changed unseen, through ``.data`` or by another library's kernels: there a CPU
    forms a pair again once its factors hold other numbers, and a GPU, which the comparison would
    hold up, in every pass.

    Examples
    --------
    >>> with torch.no_grad(), formed_once():                        # doctest: +SKIP
    ...     for _ in range(100):
    ...         token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
    """
    if is_traced():
        yield
        return
    outer = _formed.set({})
    try:
        yield
    finally:
        _formed.reset(outer)


class KroneckerFactors(nn.Module):
    """Parameters ``factor_1 … factor_d`` of shapes (s, m_i, n_i); the first is the outermost.

    They are named rather than numbered: PEFT rewrites keys by text when it inserts an adapter's
    name, and a bare number is also what it writes for layers.
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

    def matrix(self) -> Tensor:
        """The formed sum, in the factors' own precision even under autocast."""
        factors = self.factors
        if torch.is_grad_enabled() or is_traced():
            return expand(factors)
        formed = _formed.get()
        if formed is not None:
            if self not in formed:
                formed[self] = expand(factors)
            return formed[self]
        # A subclass of tensors may be sharded, or hold no numbers at all.
        if any(
            type(factor) is not nn.Parameter or factor.device.type != "cpu" for factor in factors
        ):
            return expand(factors)
        copies, matrix = _latest.get(self, ([], None))
        pairs = zip(copies, factors, strict=False)
        if matrix is None or not all(
            copy.dtype == now.dtype and torch.equal(copy, now) for copy, now in pairs
        ):
            matrix = expand(factors)
            _latest[self] = [factor.clone() for factor in factors], matrix
        return matrix

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
                # A 1 x 1 factor is a coefficient: random ones would rescale whole terms, by nearly
                # nothing at times.
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
