"""Joint least squares onto integer codes: blocks are rounded one by one, and those still free make up for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import placed, to_numpy
from lsrdecomp.formats.number_formats import Codes, nearest_codes
from lsrdecomp.solvers.batched_terms import safe_ratio
from lsrdecomp.solvers.pair.initialization import as_factors
from lsrdecomp.solvers.pair.problem import PairProblem
from lsrdecomp.solvers.pair.stacking import Pair, WeightedTargets, start_pair

if TYPE_CHECKING:
    from lsrdecomp.kronecker.separated import SeparatedProduct
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.base import LowRank
    from lsrdecomp.targets.weights import NormWeights

SWEEPS = 2
"""Passes over the free blocks after each rounding."""

CG_STEPS = 8
"""Conjugate gradient steps a block in a weighted norm, as many as `JointALS` takes."""

PASSES = 2
"""Times that every block is freed, solved and rounded once more, where that brings the product
nearer."""

SCALINGS = 2
"""Passes over the numbers that multiply the terms, whenever all blocks are codes."""


CodedSide = tuple[tuple[Codes, ...], NDArray[np.float64]]
"""Σ_k scale_k · Q_k⁽¹⁾ ⊗ … ⊗ Q_k⁽ᵈ⁾: integers Q (s, m_i, n_i), and scales (s,) of any sign."""


def quantize_sequentially(
    target: LowRank,
    product: SeparatedProduct,
    bits: int,
    *,
    weights: NormWeights | None = None,
) -> tuple[CodedSide, CodedSide]:
    """A product with integer factors near a low-rank target, from one with real factors that is near it.

    The block with most entries a term is rounded first and fixed, the others are solved again, the
    next is rounded, and so on: what rounding one block loses the later ones win back in part, as in
    the sequential rounding of [1]_. Then each block in turn is freed, solved and rounded again, and
    the better of the two is kept. Nothing says that the result is nearer than plain rounding of the
    start; compare the two.

    Parameters
    ----------
    target : LowRank, shape (m, n)
    product : SeparatedProduct, shape (m, n)
        The start, real.
    bits : int
        Of the codes, which `nearest_codes` chooses.
    weights : NormWeights, optional
        The norm; Frobenius if absent.

    Returns
    -------
    out side, in side : CodedSide
        Codes of the factors of ``product.left`` and ``product.right``, in their shapes.

    Raises
    ------
    ShapeError
        If shapes, weights and target disagree.

    Notes
    -----
    Cost: about four sweeps of `JointALS` for each of the 2d blocks, in double precision.

    References
    ----------
    .. [1] E. Frantar, S. Ashkboos, T. Hoefler and D. Alistarh, GPTQ: accurate post-training
       quantization for generative pre-trained transformers, ICLR 2023. arXiv:2210.17323
    """
    shape = product.product_shape
    batch = WeightedTargets.of([target], None if weights is None else [weights])
    start = start_pair([product], shape, product.separation_ranks, 1)
    batch, start = placed((batch, start), None)  # codes are NumPy's
    problem = PairProblem.of(batch, shape, CG_STEPS)
    coding = _Coding(problem, problem.state(start).pair, bits)
    # Codes 1: round and fix the largest free block, solve the others again, until all are codes.
    for block in coding.blocks:
        coding.round(block)
        if block != coding.blocks[-1]:
            coding.solve(SWEEPS)
    # Codes 2: the best number for each term.
    coding.scale()
    # Codes 3: free each block once more, and keep what comes nearer.
    for block in coding.blocks * PASSES:
        coding.improve(block)
    codes, scales = coding.side(1, shape.right.transposed)
    return coding.side(0, shape.left), (tuple(code.transpose(0, 2, 1) for code in codes), scales)


class _Coding:
    """A pair some of whose blocks (side, factor) are codes times one number a term, and fixed."""

    def __init__(self, problem: PairProblem, pair: Pair, bits: int) -> None:
        self.problem, self.bits = problem, bits
        self.pair: Pair = list(pair[0]), list(pair[1])
        sizes = {
            (side, i): int(stack.shape[1]) for side in (0, 1) for i, stack in enumerate(pair[side])
        }
        self.blocks = sorted(sizes, key=lambda block: -sizes[block])
        self.codes: dict[tuple[int, int], Codes] = {}

    def round(self, block: tuple[int, int]) -> None:
        side, i = block
        self.codes[block], steps = nearest_codes(to_numpy(self.pair[side][i][0, :, :]).T, self.bits)
        self.pair[side][i] = (self.codes[block] * steps[:, None]).T[None, :, :]

    def solve(self, sweeps: int) -> None:
        fixed = tuple({i for which, i in self.codes if which == side} for side in (0, 1))
        state = self.problem.state(self.pair)
        for _ in range(sweeps):
            state = self.problem.sweep(state, (fixed[0], fixed[1]))
        self.pair = state.pair

    def scale(self) -> None:
        for _ in range(SCALINGS):
            self.pair = self.problem.scaled(self.pair)

    def improve(self, block: tuple[int, int]) -> None:
        """Free one block, solve for it and round it again; as before if that is no nearer."""
        pair, codes = self.pair, dict(self.codes)
        before = self.problem.state(pair).error
        del self.codes[block]
        self.solve(1)
        self.round(block)
        self.scale()
        if not bool(self.problem.state(self.pair).error < before):
            self.pair, self.codes = pair, codes

    def side(self, side: int, shape: KroneckerShape) -> CodedSide:
        codes = [self.codes[side, i] for i in range(shape.order)]
        scales = np.ones(len(codes[0]))
        for stack, code in zip(self.pair[side], codes, strict=True):
            real = code.astype(np.float64)
            scales = scales * safe_ratio(
                np.sum(stack[0, :, :].T * real, axis=1), np.sum(real * real, axis=1)
            )
        return tuple(
            factor[0] for factor in as_factors([code.T[None, :, :] for code in codes], shape)
        ), scales
