"""Joint least squares onto integer codes: blocks are rounded one by one, others solved again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import to_device, to_numpy
from lsrdecomp.formats.number_formats import Codes, nearest_codes
from lsrdecomp.solvers.batched_terms import safe_ratio
from lsrdecomp.solvers.pair.initialization import as_factors
from lsrdecomp.solvers.pair.problem import PairProblem
from lsrdecomp.solvers.pair.stacking import Pair, WeightedTargets, start_pair

if TYPE_CHECKING:
    from lsrdecomp.kronecker.product import SeparatedProduct
    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.target import LowRank
    from lsrdecomp.targets.weights import NormWeights

CodedSide = tuple[tuple[Codes, ...], NDArray[np.float64]]
"""Σ_k scale_k · Q_k⁽¹⁾ ⊗ … ⊗ Q_k⁽ᵈ⁾: integers Q (s, m_i, n_i), and scales (s,) of any sign."""

Block = tuple[int, int]
"""The side, 0 or 1, and the position of a factor in it."""


def quantize_sequentially(
    target: LowRank,
    product: SeparatedProduct,
    bits: int,
    *,
    weights: NormWeights | None = None,
) -> tuple[CodedSide, CodedSide]:
    """Find a product with integer factors near a low-rank target.

    It starts from one with real factors near it. The block with most entries a term is rounded
    first and fixed, the others are solved again, the next is rounded, and so on: what rounding one
    block loses the later ones win back in part, as in the sequential rounding of [1]_. Then each
    block in turn is freed, solved and rounded again, and the better of the two is kept. Nothing
    says that the result is nearer than plain rounding of the start; compare the two.

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
    output side, input side : CodedSide
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
    batch, start = to_device((batch, start), None)  # codes are NumPy's
    problem = PairProblem.of(batch, shape)
    coding = _Coding(problem, problem.state(start).pair, bits)
    # Codes 1: round and fix the largest free block, solve the others again, until all are codes.
    for block in coding.blocks:
        coding.round(block)
        if block != coding.blocks[-1]:
            coding.solve(sweeps=2)
    # Codes 2: the best number for each term.
    coding.scale()
    # Codes 3: free each block twice more, and keep the result that is nearer.
    for block in coding.blocks * 2:
        coding.improve(block)
    input_codes, input_scales = coding.side(1, shape.right.transposed)
    transposed = tuple(code.transpose(0, 2, 1) for code in input_codes)
    return coding.side(0, shape.left), (transposed, input_scales)


class _Coding:
    """A pair some of whose blocks are codes times one number a term, and fixed."""

    def __init__(self, problem: PairProblem, pair: Pair, bits: int) -> None:
        self.problem = problem
        self.bits = bits
        self.pair: Pair = list(pair[0]), list(pair[1])
        sizes: dict[Block, int] = {}
        for side in (0, 1):
            for i, stack in enumerate(pair[side]):
                sizes[side, i] = int(stack.shape[1])
        self.blocks = sorted(sizes, key=lambda block: -sizes[block])
        self.codes: dict[Block, Codes] = {}

    def round(self, block: Block) -> None:
        """Round a block to codes and fix it."""
        side, i = block
        entries = to_numpy(self.pair[side][i][0, :, :]).T
        self.codes[block], step_sizes = nearest_codes(entries, self.bits)
        self.pair[side][i] = (self.codes[block] * step_sizes[:, None]).T[None, :, :]

    def solve(self, sweeps: int) -> None:
        """Sweep over the blocks that are free."""
        fixed: tuple[set[int], set[int]] = (set(), set())
        for side, i in self.codes:
            fixed[side].add(i)
        state = self.problem.state(self.pair)
        for _ in range(sweeps):
            state = self.problem.sweep(state, fixed)
        self.pair = state.pair

    def scale(self) -> None:
        """Multiply each term by its best number, in two passes over both sides."""
        for _ in range(2):
            self.pair = self.problem.with_best_scales(self.pair)

    def improve(self, block: Block) -> None:
        """Free one block, solve for it and round it again; as before if that is no nearer."""
        pair = self.pair
        codes = dict(self.codes)
        before = self.problem.state(pair).error
        del self.codes[block]
        self.solve(1)
        self.round(block)
        self.scale()
        if not bool(self.problem.state(self.pair).error < before):
            self.pair = pair
            self.codes = codes

    def side(self, side: int, shape: KroneckerShape) -> CodedSide:
        """Return the codes of a side's factors, and one scale for each term."""
        codes = [self.codes[side, i] for i in range(shape.order)]
        scales = np.ones(len(codes[0]))
        for stack, code in zip(self.pair[side], codes, strict=True):
            entries = stack[0, :, :].T
            real_code = code.astype(np.float64)
            overlap = np.sum(entries * real_code, axis=1)
            scales = scales * safe_ratio(overlap, np.sum(real_code * real_code, axis=1))
        factors = as_factors([code.T[None, :, :] for code in codes], shape)
        return tuple(factor[0] for factor in factors), scales
