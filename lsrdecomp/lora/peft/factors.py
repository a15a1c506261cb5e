"""The trainable factors of one sum of Kronecker products, and the starts they are given."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lsrdecomp.lora.peft.kernels import apply, expand, is_traced

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lsrdecomp.kronecker.shape import KroneckerShape

_formed: ContextVar[dict[KroneckerFactors, Tensor] | None] = ContextVar("formed", default=None)
"""Matrices formed so far within the outermost `formed_once`; None outside."""


@contextmanager
def formed_once() -> Iterator[None]:
    """Form each sum without a graph once while open: for all tokens of a completion.

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
    # A pass of a PEFT model opens one of its own, within that of a decoding loop.
    if is_traced() or _formed.get() is not None:
        yield
        return
    token = _formed.set({})
    try:
        yield
    finally:
        _formed.reset(token)


@dataclass(frozen=True, slots=True)
class FormedSum:
    """A sum of Kronecker products, formed, and copies of the factors that it was formed of."""

    factors: list[Tensor]
    matrix: Tensor

    def is_of(self, factors: list[Tensor]) -> bool:
        """Return whether the sum was formed of these numbers and dtypes."""
        return all(
            copy.dtype == factor.dtype and torch.equal(copy, factor)
            for copy, factor in zip(self.factors, factors, strict=True)
        )


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
        self._last_formed: FormedSum | None = None
        for name, (rows, columns) in zip(self.names, shape.factors, strict=True):
            self.register_parameter(name, nn.Parameter(torch.empty(separation_rank, rows, columns)))

    def __getstate__(self) -> dict[str, Any]:
        """Return what is copied and pickled: the parameters, not the matrix formed of them."""
        return self.__dict__ | {"_last_formed": None}

    @property
    def factors(self) -> list[Tensor]:
        """The parameters, in the order of the Kronecker product."""
        return [getattr(self, name) for name in self.names]

    def forward(self, x: Tensor | None = None) -> Tensor:
        """Return the formed sum, in the factors' own precision; or its product with an input.

        It is called as a module wherever the numbers are needed: hooks of accelerate and of ZeRO
        bring parameters for the time of a call alone.

        Parameters
        ----------
        x : Tensor, shape (..., n_1···n_d), optional
            Applied without forming the sum, in its own precision.
        """
        factors = self.factors
        if x is not None:
            return apply([factor.to(x.dtype) for factor in factors], x)
        if torch.is_grad_enabled() or is_traced():
            return expand(factors)
        formed = _formed.get()
        if formed is None:
            return self._matrix_without_graph(factors)
        if self not in formed:
            formed[self] = self._matrix_without_graph(factors)
        return formed[self]

    def _matrix_without_graph(self, factors: list[Tensor]) -> Tensor:
        """Return the formed sum: on a CPU the last one, where no number of the factors changed."""
        for factor in factors:
            # A subclass of tensors may be sharded, or hold no numbers at all.
            if type(factor) is not nn.Parameter or factor.device.type != "cpu":
                return expand(factors)
        last = self._last_formed
        if last is None or not last.is_of(factors):
            last = FormedSum([factor.clone() for factor in factors], expand(factors))
            self._last_formed = last
        return last.matrix

    @torch.no_grad()
    def initialize(self, std: float, zero: int | None = None) -> None:
        """Draw random factors whose expanded sum has entries of standard deviation ``std``.

        Parameters
        ----------
        std : float
            Standard deviation of the entries, as if no factor were zero.
        zero : int, optional
            Index of one factor to set to zero.
        """
        # A sum of s products of d independent factors has entries of variance s · σ^(2d).
        n_random = self.shape.order if zero is None else self.shape.order - 1
        factor_std = (std**2 / self.separation_rank) ** (0.5 / max(1, n_random))
        for index, factor in enumerate(self.factors):
            if index == zero:
                nn.init.zeros_(factor)
            elif factor[0].numel() == 1:
                # A 1 x 1 factor is a coefficient: random ones would rescale whole terms, by nearly
                # nothing at times.
                nn.init.constant_(factor, factor_std)
            else:
                nn.init.normal_(factor, std=factor_std)

    def extra_repr(self) -> str:
        """Return the shape and the number of terms."""
        return f"{self.shape}, separation_rank={self.separation_rank}"


class Magnitudes(nn.ParameterDict):
    """Trained row norms of DoRA by the name of the adapter, which are called as a module too."""

    __call__ = nn.Module.__call__  # torch's own refuses calls

    def forward(self, adapter: str) -> Tensor:
        """Return those of one adapter, which stay when a hook takes the parameter away."""
        return self[adapter].clone()  # type: ignore[no-any-return]


def zero_factor(shape: KroneckerShape) -> int:
    """Return the index of the factor that the default start sets to zero.

    The largest, the last of equals: so plain low rank, ``m×r ⊗ 1×1``, starts as LoRA does.
    """
    return max(range(shape.order), key=lambda index: (shape.sizes[index], index))
