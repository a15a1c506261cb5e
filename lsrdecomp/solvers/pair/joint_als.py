"""Joint least squares for a product (Σ B1 ⊗ B2)(Σ A1 ⊗ A2), in a weighted norm."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lsrdecomp.arrays import Array, as_double, is_complex, namespace, to_device
from lsrdecomp.errors import PrecisionError, ShapeError
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.solvers.batched_terms import safe_ratio
from lsrdecomp.solvers.iteration import IterationStep, SolveProgress, iterate
from lsrdecomp.solvers.pair.block_update import CG_STEPS
from lsrdecomp.solvers.pair.descent import steps
from lsrdecomp.solvers.pair.problem import PairProblem, PairState
from lsrdecomp.solvers.pair.stacking import Pair, WeightedTargets, start_pair
from lsrdecomp.solvers.solver import (
    Event,
    PairSolution,
    Status,
    Sweep,
    require_product_shape,
    validate_pair_request,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lsrdecomp.kronecker.shape import ProductShape
    from lsrdecomp.targets.target import LowRank
    from lsrdecomp.targets.weights import NormWeights


@dataclass(frozen=True, slots=True)
class JointALS:
    """Alternating least squares over all factors of both sides, from the singular gauge.

    Both sides of a pair B A are known only up to B G · G⁻¹ A, so the pair is first moved into the
    gauge of its singular values in the norm; each side starts as its largest orthogonal Kronecker
    terms there. In the Frobenius norm every block is solved exactly, in a weighted norm by a few
    preconditioned conjugate gradient steps from the present block: the error never rises, and the
    result is never worse than the start.

    Parameters
    ----------
    sweeps : int
        Maximum passes over all blocks; 30 come within a few per cent of the end.
    cg_steps : int
        Conjugate gradient steps per block in a weighted norm.
    tolerance : float
        Stop when a sweep lowers the error of no problem by more than this fraction.
    initializations : int
        Maximum number of starts; there are four in a weighted norm, two in the Frobenius norm.
    trials : int
        Sweeps from each start before the nearest goes on alone.
    single : bool
        In the Frobenius norm, sweep in single precision, in a third (4096 wide) to nine tenths
        (768) of the time; sweeps in double precision follow only where the relative error is below
        0.05. The error of the result is measured in double precision all the same, that of the
        start is not.
    device : str, optional
        Where torch solves, such as ``"cuda"``; what it found comes back as NumPy arrays. Absent:
        where the targets lie, with their own library.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import LowRank, ProductShape
    >>> from lsrdecomp.solvers import FactorwiseSVD
    >>> i, k = np.arange(16.0), np.arange(1.0, 5.0)
    >>> pair = LowRank(np.cos(np.outer(i, k)), np.sin(np.outer(k, i)))         # 16 × 4 and 4 × 16
    >>> shape = ProductShape(out=(4, 4), inner=(2, 2), into=(4, 4))
    >>> for solver in (FactorwiseSVD(), JointALS()):             # each side alone, both together
    ...     print(f"{solver.solve(pair, shape, 2).relative_error:.2f}")
    0.76
    0.62
    """

    sweeps: int = 30
    cg_steps: int = CG_STEPS
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
        """Solve for one pair: see `PairSolver.solve`, and `solve_batch` for method and cost.

        Unlike an SVD of each side (`FactorwiseSVD`) it minimises the error of the *product*, in the
        norm of ``weights``; unlike ``parafac`` it never forms the target.

        Parameters
        ----------
        start : SeparatedProduct, optional
            Where to begin instead of the singular gauge; the result is never farther from the
            target.

        Returns
        -------
        PairSolution
            ``status`` is `rank_reached` when a sweep gained less than ``tolerance``, else
            `sweep_limit`; ``sweeps`` hold steering errors from inner products, which see nothing
            below 1e-7.
        """
        solutions = self.solve_batch(
            [target],
            shape,
            ranks,
            weights=None if weights is None else [weights],
            starts=None if start is None else [start],
            on_sweep=on_sweep,
        )
        return solutions[0]

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
            Terms of the output side and of the input side; more than a side can need are clipped.
        weights : sequence of NormWeights, optional
            One norm per target, of one kind; absent, the Frobenius norm.
        starts : sequence of SeparatedProduct, optional
            Of this shape, with at most the asked terms; absent, the singular gauge's orthogonal
            terms.
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
        Cost of a sweep, per target: O((m + n)(R r + s r) + s²r² + Σ(s·r_i)³), times about
        ``cg_steps`` in a weighted norm, plus the products with the weights. ΔW is never formed.
        """
        ranks = _checked(targets, shape, ranks)
        batch = WeightedTargets.of(targets, weights, self.device)
        problem = PairProblem.of(batch, shape, self.cg_steps)
        initial: list[Pair] | None = None
        if starts is not None:
            initial = [batch.placed(start_pair(starts, shape, ranks, len(targets)))]
        progress = SolveProgress(on_sweep)
        history = list[Array]()
        start_errors: Array | None = None
        sweeps = self.sweeps
        converged = False
        # JointALS 1: sweeps in single precision, where they see what a sweep gains.
        if self.single and batch.norms.is_frobenius and problem.fits_single:
            initial, start_errors, converged = self._in_single(
                problem, ranks, initial, history, progress
            )
            sweeps = 0 if converged else sweeps - len(history)
        # JointALS 2: the nearest of several starts, and sweeps from there in double precision.
        if initial is None:
            initial = problem.starts(ranks, self.initializations)
        descent = self._descend(problem, initial, sweeps, history, progress)
        # JointALS 3: errors measured, of each target by itself.
        if start_errors is None:
            start_errors = descent.start_errors
        is_finished = converged or descent.converged or self.sweeps == 0
        status = Status.rank_reached if is_finished else Status.sweep_limit
        norms = namespace(batch.left).sqrt(batch.energy)
        figures = descent.errors, start_errors, norms
        sides = problem.factors(descent.state)
        if self.device is not None:
            sides, figures, history = to_device((sides, figures, history), None)
        return _solutions(sides, figures, history, progress, status)

    def _in_single(
        self,
        problem: PairProblem,
        ranks: tuple[int, int],
        initial: list[Pair] | None,
        history: list[Array],
        progress: SolveProgress,
    ) -> tuple[list[Pair], Array, bool]:
        """Sweep in single precision.

        Returns
        -------
        list of Pair
            The one pair that the sweeps have reached.
        Array, shape (L,)
            The error of the start.
        bool
            Whether nothing is left to do in double precision.
        """
        single = problem.single()
        xp = namespace(problem.targets.left)
        if initial is None:
            pairs = single.starts(ranks, self.initializations)
        else:
            pairs = [problem.to_single(pair) for pair in initial]
        descent = self._descend(single, pairs, self.sweeps, history, progress)
        # Above this error sweeps in single precision see what a sweep gains. By hand.
        is_visible = bool(xp.all(descent.errors > 0.05))
        start_errors = as_double(descent.start_errors) * xp.sqrt(problem.targets.energy)
        pair = problem.from_single(descent.state.pair)
        return [pair], start_errors, descent.converged and is_visible

    def _descend(
        self,
        problem: PairProblem,
        starts: list[Pair],
        sweeps: int,
        history: list[Array],
        progress: SolveProgress,
    ) -> _Descent:
        """Sweep from the nearest start."""
        xp = namespace(problem.targets.left)
        norms = xp.sqrt(problem.targets.energy)

        def recorded_steps() -> Iterator[IterationStep[PairState]]:
            for step in steps(problem, first, self.tolerance):
                history.append(safe_ratio(step.state.error, norms))
                mean = float(xp.mean(history[-1]))
                yield replace(step, relative_error=mean, objective=mean)

        trials = min(self.trials, sweeps)
        first, first_errors, start_errors = problem.best_start(starts, trials)
        progress.mark(Event.start)
        state, converged = iterate(recorded_steps(), first, progress, max_steps=sweeps)
        errors = problem.errors(state)
        is_better = errors <= first_errors
        return _Descent(
            state=PairState.select(is_better, state, first),
            errors=xp.where(is_better, errors, first_errors),
            start_errors=start_errors,
            converged=converged,
        )


@dataclass(frozen=True, slots=True)
class _Descent:
    """The end of a descent: its state, its error, and the error of the start."""

    state: PairState
    errors: Array
    start_errors: Array
    converged: bool


def _checked(
    targets: Sequence[LowRank], shape: ProductShape, ranks: int | tuple[int, int]
) -> tuple[int, int]:
    require_product_shape(shape)
    if shape.order < 2:
        raise ShapeError(
            f"joint least squares needs two or more Kronecker factors; {shape} has {shape.order}"
        )
    if not targets:
        raise ShapeError("joint least squares needs at least one target")
    for i, target in enumerate(targets):
        clipped = validate_pair_request(target, shape, ranks, f"target {i}")
        if is_complex(target.left) or is_complex(target.right):
            raise PrecisionError(f"target {i} is complex; joint least squares is for real pairs")
    return clipped


def _solutions(
    sides: tuple[list[Array], list[Array]],
    figures: tuple[Array, Array, Array],
    history: list[Array],
    progress: SolveProgress,
    status: Status,
) -> list[PairSolution]:
    """Make one record a target, from the arrays of the batch.

    Parameters
    ----------
    sides : (list of Array, list of Array)
        Factors of both sides.
    figures : (Array, Array, Array), shape (L,) each
        Errors, errors of the start, and norms of the targets.
    history : list of Array, shape (L,) each
        Relative errors after each sweep.
    """
    solutions = []
    for i in range(int(figures[0].shape[0])):
        left = SeparatedMatrix.from_factors([factor[i, :, :, :] for factor in sides[0]])
        right = SeparatedMatrix.from_factors([factor[i, :, :, :] for factor in sides[1]])
        error, start_error, norm = (float(values[i]) for values in figures)
        scale = 1.0 / norm if norm > 0.0 else 0.0
        sweeps = []
        for sweep, errors in zip(progress.sweeps, history, strict=True):
            figure = float(errors[i])
            sweeps.append(replace(sweep, relative_error=figure, objective=figure))
        solution = PairSolution(
            product=SeparatedProduct(left, right),
            relative_error=error * scale,
            start_error=start_error * scale,
            norm=norm,
            status=status,
            sweeps=tuple(sweeps),
        )
        solutions.append(solution)
    return solutions
