"""Tasks that solve many shapes for many layers, in one process or several."""

from __future__ import annotations

from collections import deque
from concurrent.futures import BrokenExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import to_device
from lsrdecomp.checkpoints.journal import JournalEntry, content_key
from lsrdecomp.checkpoints.progress import Counter
from lsrdecomp.compression.effort import DEFAULT_EFFORT, Ranks, SolveEffort
from lsrdecomp.compression.layers import Layer, batches
from lsrdecomp.compression.shapes import ShapeRequest, clipped
from lsrdecomp.errors import LsrError, needs
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.solvers.pair.descent import descend
from lsrdecomp.solvers.pair.problem import PairProblem, PairState
from lsrdecomp.solvers.pair.stacking import WeightedTargets
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from lsrdecomp.compression.settings import Resources
    from lsrdecomp.targets.base import LowRank
    from lsrdecomp.targets.weights import NormWeights

Factors = tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]

SIDES = "left", "right"
"""Names of the sides in the journal."""

THREADS = ("OMP", "OPENBLAS", "MKL", "BLIS", "VECLIB_MAXIMUM", "NUMEXPR")
"""Libraries whose threads a variable ``…_NUM_THREADS`` counts."""


@dataclass(frozen=True, eq=False)
class SolveTask:
    """Shapes to solve for layers of one group that fit in memory together.

    Attributes
    ----------
    indices : tuple of int
        Of the layers in the whole adapter.
    requests : sequence of ShapeRequest
    starts : sequence of SeparatedProduct, optional
        One a layer, of the shape of the only request and no more terms.
    effort : SolveEffort
    device : str, optional
        Of torch; absent, NumPy.
    targets, weights : sequences of LowRank and of NormWeights
        Read when the task is begun. Without weights, the Frobenius norm.
    """

    indices: tuple[int, ...]
    requests: Sequence[ShapeRequest]
    starts: Sequence[SeparatedProduct] | None
    effort: SolveEffort
    device: str | None
    targets: Sequence[LowRank] = ()
    weights: Sequence[NormWeights] | None = None

    @property
    def size(self) -> int:
        """Layers times shapes."""
        return len(self.indices) * len(self.requests)


@dataclass(frozen=True, eq=False)
class SolvedShape:
    """One shape at one number of terms, solved for each layer of a task."""

    shape: ProductShape
    ranks: Ranks
    errors: NDArray[np.float64]  # in the task's norm, (L,)
    factors: Factors  # of both sides, (L, s, m_i, r_i) and (L, t, r_i, n_i)

    def ranks_of(self, position: int) -> Ranks:
        """Return the terms of a layer's product, those that vanished not counted."""
        left, right = (_count_terms(side, position) for side in self.factors)
        return left, right

    def factors_of(self, position: int) -> Factors:
        """Return the factors of one layer."""
        left, right = (
            [np.ascontiguousarray(factor[position]) for factor in side] for side in self.factors
        )
        return left, right


def _count_terms(side: Sequence[NDArray[np.float64]], position: int) -> int:
    """Return how many terms of a side have no factor of zeros."""
    count = 0
    for term in range(side[0].shape[1]):
        count += all(factor[position, term].any() for factor in side)
    return count


def product_of(factors: Factors) -> SeparatedProduct:
    """Return the product of factors (s, m_i, r_i) and (t, r_i, n_i), its terms normalised."""
    left, right = (SeparatedMatrix.from_factors(side) for side in factors)
    return SeparatedProduct(left, right)


class _TaskInProgress(NamedTuple):
    """A task with its numbers, and how its result is had."""

    task: SolveTask
    journal_key: (
        str  # under which the result is kept; empty where there is no journal or it is known
    )
    result: Callable[[], list[SolvedShape]]


class TaskRunner:
    """Solver of tasks, here or in processes of one thread each, which end with it.

    Raises `LsrError` if several workers are asked for and joblib is missing.
    """

    def __init__(self, layers: Sequence[Layer], resources: Resources) -> None:
        self.layers = layers
        self.resources = resources
        self._pool: Any = None
        if resources.workers > 1:
            with needs("a pool of workers", "fleet"):
                from joblib.externals.loky import ProcessPoolExecutor
            threads = {f"{library}_NUM_THREADS": "1" for library in THREADS}
            self._pool = ProcessPoolExecutor(
                resources.workers, timeout=resources.limits.worker_timeout, env=threads
            )

    def tasks(
        self,
        indices: Sequence[int],
        requests: Sequence[ShapeRequest],
        *,
        starts: Mapping[int, SeparatedProduct] | None = None,
        effort: SolveEffort = DEFAULT_EFFORT.solve,
    ) -> list[SolveTask]:
        """Return the same requests for layers of one group, in parts that fit in memory together.

        Layers whose norms need as many coordinates lie side by side. With ``starts`` each goes on
        from its own product.
        """
        if not requests:
            return []
        ordered = sorted(indices, key=lambda i: self.layers[i].leading_entries)
        layers = [self.layers[i] for i in ordered]
        tasks = []
        for span in batches(layers, self.resources.limits, leading=True):
            part = tuple(ordered[span])
            own_starts = None if starts is None else [starts[i] for i in part]
            tasks.append(SolveTask(part, requests, own_starts, effort, self.resources.device))
        return tasks

    def counter(self, tasks: Sequence[SolveTask], stage: str) -> Counter:
        """Return what counts the layers and shapes of tasks."""
        total = sum(task.size for task in tasks)
        return Counter(self.resources.on_step, stage, total, "layers × shapes")

    def results(
        self, tasks: Iterable[SolveTask], counter: Counter | None = None
    ) -> Iterator[tuple[SolveTask, list[SolvedShape]]]:
        """Yield all tasks with their results, in their order, on which the table depends.

        What the journal has is not solved again. A worker that is free takes the next task,
        whatever the others do. Raises `LsrError` if one of them is killed.
        """
        resources = self.resources
        max_in_flight = 1
        if self._pool is not None:
            max_in_flight = resources.limits.tasks_in_flight * resources.workers
        in_flight: deque[_TaskInProgress] = deque()
        remaining = iter(tasks)
        try:
            while True:
                for task in islice(remaining, max_in_flight - len(in_flight)):
                    in_flight.append(self._begin(task))
                if not in_flight:
                    return
                task, key, result = in_flight.popleft()
                shapes = result()
                if resources.journal is not None and key:
                    arrays, values = _pack(shapes)
                    resources.journal.put(key, arrays, values=values)
                if counter is not None:
                    counter.add(task.size)
                yield task, shapes
        except BrokenExecutor as error:
            raise LsrError(
                "a worker was ended from outside, most often for want of memory; take fewer and "
                "start again: what was solved is used again"
            ) from error
        except BaseException:
            if self._pool is not None:
                self._pool.shutdown(kill_workers=True)
            raise

    def _begin(self, task: SolveTask) -> _TaskInProgress:
        """Read the numbers of a task and begin it, unless the journal has its result."""
        layers = [self.layers[i] for i in task.indices]
        norms = [layer.leading for layer in layers if not layer.is_frobenius]
        task = replace(task, targets=[layer.pair for layer in layers], weights=norms or None)
        journal = self.resources.journal
        key = ""
        if journal is not None:
            key = task_key(task)
            stored = journal.get(key)
            if stored is not None:
                return _TaskInProgress(task, "", partial(_unpack, stored))
        if self._pool is None:
            return _TaskInProgress(task, key, partial(solve, task))
        return _TaskInProgress(task, key, self._pool.submit(solve, task).result)


@one_blas_thread
def solve(task: SolveTask) -> list[SolvedShape]:
    """Solve all requests of a task in turn.

    Each number of terms starts from the largest solved one that it holds.
    """
    # Targets are placed on the device and weighted once, for all shapes of the task.
    batch = WeightedTargets.of(task.targets, task.weights, task.device)
    shapes: list[SolvedShape] = []
    for request in task.requests:
        problem = PairProblem.of(batch, request.shape, task.effort.cg_steps)
        states: dict[Ranks, PairState] = {}
        for asked in request.terms:
            ranks = clipped(request.shape, asked)
            if ranks not in states:
                states[ranks] = _solve_ranks(problem, ranks, states, task)
        for ranks, state in states.items():
            errors, factors = to_device((problem.errors(state), problem.factors(state)), None)
            shapes.append(SolvedShape(request.shape, ranks, errors, factors))
    return shapes


def _solve_ranks(
    problem: PairProblem, ranks: Ranks, states: Mapping[Ranks, PairState], task: SolveTask
) -> PairState:
    """Solve one number of terms, from what was solved before if there is anything."""
    effort = task.effort
    sweeps = effort.sweeps
    # Solutions of more terms start from those of fewer, which come nearer than singular vectors do.
    fewer = [solved for solved in states if solved[0] <= ranks[0] and solved[1] <= ranks[1]]
    if fewer:
        start = problem.grown(states[max(fewer, key=sum)], ranks)
    elif task.starts is not None:
        start = problem.from_products(task.starts, ranks)
    else:
        start = problem.best_start(problem.starts(ranks, effort.starts), 0)[0]
        sweeps = effort.cold_sweeps
    return descend(problem, start, sweeps, effort.tolerance, effort.min_gain)


def task_key(task: SolveTask) -> str:
    """Return a digest of all that a result depends on."""
    pairs = [[target.left, target.right] for target in task.targets]
    shapes = [[request.shape, request.terms] for request in task.requests]
    starts = [[start.left.folded(), start.right.folded()] for start in task.starts or ()]
    return content_key(shapes, astuple(task.effort), pairs, task.weights, starts)


def _pack(shapes: Sequence[SolvedShape]) -> tuple[dict[str, NDArray[np.float64]], list[Any]]:
    """Return arrays by name, and sizes and terms of each shape.

    The factors of all layers of a shape are stacked.
    """
    arrays = {}
    values = []
    for i, solved in enumerate(shapes):
        arrays[f"{i}.errors"] = solved.errors
        for name, side in zip(SIDES, solved.factors, strict=True):
            for j, factor in enumerate(side):
                arrays[f"{i}.{name}.{j}"] = factor
        values.append([astuple(solved.shape), solved.ranks])
    return arrays, values


def _unpack(result: JournalEntry) -> list[SolvedShape]:
    """Return what `_pack` was given."""
    shapes = []
    for i, (sizes, ranks) in enumerate(result.values):
        shape = ProductShape(*map(tuple, sizes))
        left, right = (
            [result.arrays[f"{i}.{name}.{j}"].read() for j in range(shape.order)] for name in SIDES
        )
        errors = result.arrays[f"{i}.errors"].read()
        shapes.append(SolvedShape(shape, tuple(ranks), errors, (left, right)))
    return shapes
