"""Joint least squares for a separated product (Σ B1 ⊗ B2)(Σ A1 ⊗ A2) against a low-rank target, in a weighted norm."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lsrdecomp.arrays import Array, as_double, check_device, is_complex, namespace, placed
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.solvers.base import Event, PairSolution, Status, Sweep, pair_terms
from lsrdecomp.solvers.batched_terms import safe_ratio
from lsrdecomp.solvers.pair.initialization import as_factors
from lsrdecomp.solvers.pair.problem import Pair, PairProblem, State
from lsrdecomp.solvers.pair.stacking import given_pair, stacked_norms, stacked_pairs, stacked_triangles
from lsrdecomp.solvers.progress import SolveProgress, Step, iterate
from lsrdecomp.targets.base import LowRank
from lsrdecomp.targets.weights import NormWeights

LENGTHEN = 2.0
"""Growth of the extrapolated step after each success."""

EVERY = 2
"""Sweeps between extrapolated steps, each a third of a sweep: more of them cost what they save."""

SINGLE = 0.05
"""Relative error above which sweeps in single precision see what a sweep gains."""


@dataclass(frozen=True, slots=True)
class JointALS:
    """Alternating least squares over all factors of both sides, from the singular gauge of the norm.

    Both sides of a pair B A are known only up to B G · G⁻¹ A, so the pair is first moved into the gauge of its singular
    values in the norm; each side starts as its largest orthogonal Kronecker terms there. In the Frobenius norm every
    block is solved exactly, in a weighted norm by a few preconditioned conjugate gradient steps from the present block:
    the error never rises, and the result is never worse than the start.

    Parameters
    ----------
    sweeps : int
        Most passes over all blocks; 30 come within a few per cent of the end.
    cg_steps : int
        Conjugate gradient steps per block in a weighted norm.
    ridge : float
        Penalty on λ, as ρ² of the storage's relative rounding error ρ: minimises the expected error after rounding
        instead of the error. Zero: none, and the error itself is monotone.
    tolerance : float
        Stop when a sweep lowers the error of no problem by more than this fraction.
    initializations : int
        Most starts to try; there are four in a weighted norm, two in the Frobenius norm.
    trials : int
        Sweeps from each start before the nearest goes on alone.
    single : bool
        In the Frobenius norm, sweep in single precision, in a third (4096 wide) to nine tenths (768) of the time;
        sweeps in double precision follow only where the relative error is below `SINGLE`. The error of the result is
        measured in double precision all the same, that of the start is not.
    device : str, optional
        Where torch solves, such as ``"cuda"``; what it found comes back as NumPy arrays. Absent: where the
        targets lie, with their own library.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import LowRank, ProductShape
    >>> from lsrdecomp.solvers import FactorwiseSVD
    >>> i, k = np.arange(16.0), np.arange(1.0, 5.0)
    >>> pair = LowRank(np.cos(np.outer(i, k)), np.sin(np.outer(k, i)))         # 16 × 4 and 4 × 16
    >>> shape = ProductShape(out=(4, 4), inner=(2, 2), into=(4, 4))
    >>> for solver in (FactorwiseSVD(), JointALS()):                           # each side alone, both together
    ...     print(f"{solver.solve(pair, shape, 2).relative_error:.2f}")
    0.76
    0.62
    """

    sweeps: int = 30
    cg_steps: int = 8
    ridge: float = 0.0
    tolerance: float = 1e-5
    initializations: int = 4
    trials: int = 2
    single: bool = False
    device: str | None = None

    def solve(
        self,
        target: LowRank,
        shape: ProductShape,
        ranks: int | tuple[int, int],
        *,
        weights: NormWeights | None = None,
        start: SeparatedProduct | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> PairSolution:
        """One pair; the contract is `PairSolver.solve`, the method and its cost stand at `solve_batch`.

        Unlike an SVD of each side (`FactorwiseSVD`) it minimises the error of the *product*, in the norm of
        ``weights``; unlike ``parafac`` it never forms the target.

        Parameters
        ----------
        start : SeparatedProduct, optional
            Where to begin instead of the singular gauge; the result is never farther from the target.

        Returns
        -------
        PairSolution
            ``status`` is `rank_reached` when a sweep gained less than ``tolerance``, else `sweep_limit`;
            ``sweeps`` hold steering errors from inner products, which see nothing below 1e-7.
        """
        starts = None if start is None else [start]
        batch = [target], None if weights is None else [weights]
        return self.solve_batch(batch[0], shape, ranks, weights=batch[1], starts=starts, on_sweep=on_sweep)[0]

    def solve_batch(
        self,
        targets: Sequence[LowRank],
        shape: ProductShape,
        ranks: int | tuple[int, int],
        *,
        weights: Sequence[NormWeights] | None = None,
        starts: Sequence[SeparatedProduct] | None = None,
        on_sweep: Callable[[Sweep], Any] | None = None,
    ) -> list[PairSolution]:
        """Fit targets of one shape together: one pass of array operations serves all of them.

        Parameters
        ----------
        targets : sequence of LowRank, shape (m, n) each
            Real; their ranks may differ.
        shape : ProductShape
            Splits of m, of the inner rank and of n into d ≥ 2 factors.
        ranks : int or (int, int)
            Terms of the out side and of the in side; more than a side can need are clipped.
        weights : sequence of NormWeights, optional
            One norm per target, of one kind; absent, the Frobenius norm.
        starts : sequence of SeparatedProduct, optional
            Of this shape, with at most the asked terms; absent, the singular gauge's orthogonal terms.
        on_sweep : callable, optional
            Called after each sweep with the mean steering error of the batch.

        Returns
        -------
        list of PairSolution

        Raises
        ------
        ShapeError
            If shapes, weights and targets disagree, or the order is below two.
        PrecisionError
            For complex targets.
        LsrError
            If torch cannot compute in float64 on the solver's device.

        Notes
        -----
        Cost of a sweep, per target: O((m + n)(R r + s r) + s²r² + Σ(s·r_i)³), times about ``cg_steps`` in a weighted
        norm, plus the products with the weights. ΔW is never formed.
        """
        ranks = _checked(targets, shape, ranks)
        norms = stacked_norms(targets, weights)
        (left, right), triangles = stacked_pairs(targets), stacked_triangles(targets)
        given = None if starts is None else given_pair(starts, shape, ranks, len(targets))
        if self.device is not None:  # stacked before, so that roots of dense weights are taken once and stay cached
            check_device(self.device)
            left, right, triangles, norms, given = placed((left, right, triangles, norms, given), self.device)
        problem = PairProblem.of((left, right), triangles, shape, norms, self.cg_steps, self.ridge)
        progress, history = SolveProgress(on_sweep), list[Array]()
        begun, first_errors, sweeps = None if given is None else [given], None, self.sweeps
        settled = False
        # JointALS 1: sweeps in single precision, where they see what a sweep gains.
        if self.single and norms.is_frobenius and problem.fits_single:
            begun, first_errors, settled = self._in_single(problem, ranks, begun, history, progress)
            sweeps = 0 if settled else sweeps - len(history)
        # JointALS 2: the nearest of several starts, and sweeps from there in double precision.
        pairs = problem.starts(ranks, self.initializations) if begun is None else begun
        state, errors, start_errors, ended = self._descend(problem, pairs, sweeps, history, progress)
        start_errors = start_errors if first_errors is None else first_errors
        pair, size = state.pair, namespace(left).sqrt(problem.energy)
        status = Status.rank_reached if settled or ended or self.sweeps == 0 else Status.sweep_limit
        if self.device is not None:
            pair, errors, start_errors, size, history = placed((pair, errors, start_errors, size, history), None)
        return _solutions(pair, shape, (errors, start_errors, size), history, progress, status)

    def _in_single(
        self,
        problem: PairProblem,
        ranks: tuple[int, int],
        begun: list[Pair] | None,
        history: list[Array],
        progress: SolveProgress,
    ) -> tuple[list[Pair], Array, bool]:
        """Where sweeps in single precision come to, the error of the start, whether nothing is left to do in double."""
        quick, size = problem.single(), namespace(problem.left).sqrt(problem.energy)
        pairs = (
            quick.starts(ranks, self.initializations) if begun is None else [problem.to_single(pair) for pair in begun]
        )
        state, errors, first_errors, settled = self._descend(quick, pairs, self.sweeps, history, progress)
        done = settled and bool(namespace(errors).all(errors > SINGLE))
        return [problem.from_single(state.pair)], as_double(first_errors) * size, done

    def _descend(
        self,
        problem: PairProblem,
        begun: list[Pair],
        sweeps: int,
        history: list[Array],
        progress: SolveProgress,
    ) -> tuple[State, Array, Array, bool]:
        """Sweeps from the nearest start: where they end, its error, that of the start, whether the sweeps settled."""
        xp = namespace(problem.left)
        first, reached, start_errors = problem.best_start(begun, min(self.trials, sweeps))
        progress.mark(Event.start)
        state, settled = iterate(self._sweeps(problem, first, history), first, progress, most=sweeps)
        errors = problem.errors(state)
        better = errors <= reached
        return State.chosen(better, state, first), xp.where(better, errors, reached), start_errors, settled

    def _sweeps(self, problem: PairProblem, state: State, history: list[Array]) -> Iterator[Step[State]]:
        xp, size = namespace(problem.left), namespace(problem.left).sqrt(problem.energy)
        step, place = xp.ones_like(size), 0
        while True:
            # JointALS 3: every block of the out side, then of the in side, each at its own minimum.
            before, state = state, problem.sweep(state)
            # JointALS 4: now and then one step farther the way the sweep went, kept where the error falls.
            if self.ridge == 0.0 and place % EVERY == 1:
                state, step = extrapolated(problem, before, state, step)
            history.append(safe_ratio(state.error, size))
            settled = place > 0 and bool(xp.all(history[-2] - history[-1] <= self.tolerance * history[-2]))
            mean, place = float(xp.mean(history[-1])), place + 1
            yield Step(state, mean, objective=mean if self.ridge == 0.0 else None, settled=settled)


def extrapolated(problem: PairProblem, before: State, after: State, step: Array) -> tuple[State, Array]:
    """One more step in the direction of the last sweep, kept where the error falls; longer next time if it did [1]_.

    .. [1] R. Bro, Multi-way analysis in the food industry, 1998, section 4.4, line search in alternating least squares.
    """
    xp = namespace(step)
    length = step[:, None, None]
    sides = [
        [new + length * (new - old) for old, new in zip(*side, strict=True)]
        for side in zip(before.pair, after.pair, strict=True)
    ]
    trial = problem.state((sides[0], sides[1]))
    better = trial.error < after.error
    grown = xp.where(better, LENGTHEN * step, xp.maximum(step / LENGTHEN**3, xp.ones_like(step)))
    return State.chosen(better, trial, after), grown


def _checked(targets: Sequence[LowRank], shape: ProductShape, ranks: int | tuple[int, int]) -> tuple[int, int]:
    if shape.order < 2:
        raise ShapeError(f"joint least squares needs two or more Kronecker factors; {shape} has {shape.order}")
    if not targets:
        raise ShapeError("joint least squares needs at least one target")
    for i, target in enumerate(targets):
        if is_complex(target.left) or is_complex(target.right):
            raise PrecisionError(f"target {i} is complex; joint least squares is for real pairs")
        clipped = pair_terms(target, shape, ranks, f"target {i}")
    return clipped


def _solutions(
    pair: Pair,
    shape: ProductShape,
    figures: tuple[Array, Array, Array],
    history: list[Array],
    progress: SolveProgress,
    status: Status,
) -> list[PairSolution]:
    """One record a target from the stacks of the batch, its errors, those of its start, its norm and its sweeps."""
    xp = namespace(*figures)
    left, right = as_factors(pair[0], shape.left), as_factors(pair[1], shape.right.transposed)
    right = [xp.matrix_transpose(factor) for factor in right]
    solutions = []
    for i in range(int(figures[0].shape[0])):
        product = SeparatedProduct(
            SeparatedMatrix.from_factors([factor[i, :, :, :] for factor in left]),
            SeparatedMatrix.from_factors([factor[i, :, :, :] for factor in right]),
        )
        error, start_error, norm = (float(values[i]) for values in figures)
        sweeps = tuple(
            replace(
                sweep, relative_error=float(values[i]), objective=None if sweep.objective is None else float(values[i])
            )
            for sweep, values in zip(progress.sweeps, history, strict=True)
        )
        scale = 1.0 / norm if norm > 0.0 else 0.0
        solutions.append(PairSolution(product, error * scale, start_error * scale, norm, status, sweeps))
    return solutions


def _own(sweep: Sweep, error: float) -> float | None:
    """The objective of one target, where that of the batch is the mean of their errors."""
    return None if sweep.objective is None else error
