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
from lsrdecomp.errors import LsrError, needs
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.files.journal import JournalEntry, content_key
from lsrdecomp.lora.files.progress import Counter
from lsrdecomp.lora.search.layers import Layer, batches
from lsrdecomp.lora.search.shapes import ShapeRequest, clipped
from lsrdecomp.solvers.pair.descent import descend
from lsrdecomp.solvers.pair.problem import PairProblem, PairState
from lsrdecomp.solvers.pair.stacking import WeightedTargets
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from lsrdecomp.lora.search.effort import Ranks
    from lsrdecomp.lora.search.plan import Resources
    from lsrdecomp.targets.target import LowRank
    from lsrdecomp.targets.weights import NormWeights

Factors = tuple[list[NDArray[np.float64]], list[NDArray[np.float64]]]

SIDES = "left", "right"
"""Names of the output side and the input side in the journal."""

THREADS = ("OMP", "OPENBLAS", "MKL", "BLIS", "VECLIB_MAXIMUM", "NUMEXPR")
"""Libraries whose number of threads is set by an environment variable ``…_NUM_THREADS``."""


STARTS = 2
"""Starts from singular vectors where there is no earlier solution. The nearest one is swept."""
COLD_SWEEPS = 4
"""Maximum sweeps from such a start."""
TASKS_IN_FLIGHT = 4
"""Maximum tasks per worker that are read but whose results are not taken yet, so that not all
layers are in memory at once. None of their results is in the journal yet: after a kill they are
solved again."""


@dataclass(frozen=True, slots=True)
class Sweeps:
    """How many sweeps a task makes, and the rules that stop them earlier."""

    limit: int
    """Maximum sweeps over both sides from an earlier solution."""
    tolerance: float
    """Stop after a sweep that lowers no layer's error by a larger share than this."""
    min_gain: float = 0.0
    """Stop after a sweep that lowers no layer's squared error by more than this, absolute."""


GRID_SWEEPS = Sweeps(limit=2, tolerance=2e-3)
"""Sweeps for shapes of the grid and for neighbours."""


@dataclass(frozen=True, eq=False)
class SolveTask:
    """Shapes to solve for layers of one group that fit in memory together.

    Attributes
    ----------
    indices : tuple of int
        Indices of the layers in the adapter.
    requests : sequence of ShapeRequest
    starts : sequence of SeparatedProduct, optional
        A start for each layer, of the shape of the only request and with no more terms.
    sweeps : Sweeps
    device : str, optional
        Device of torch; absent, NumPy solves.
    targets, weights : sequences of LowRank and of NormWeights
        Numbers of the layers, read when the task is begun. Without weights, the Frobenius norm.
    """

    indices: tuple[int, ...]
    requests: Sequence[ShapeRequest]
    starts: Sequence[SeparatedProduct] | None
    sweeps: Sweeps
    device: str | None
    targets: Sequence[LowRank] = ()
    weights: Sequence[NormWeights] | None = None

    @property
    def size(self) -> int:
        """Number of layers times number of shapes."""
        return len(self.indices) * len(self.requests)


@dataclass(frozen=True, eq=False)
class SolvedShape:
    """One shape at one number of terms, solved for each layer of a task."""

    shape: ProductShape
    ranks: Ranks
    errors: NDArray[np.float64]  # in the task's norm, (L,)
    factors: Factors  # of both sides, (L, s, m_i, r_i) and (L, t, r_i, n_i)

    def ranks_of(self, position: int) -> Ranks:
        """Return the numbers of terms of a layer's product that are not zero."""
        left, right = (_count_terms(side, position) for side in self.factors)
        return left, right

    def factors_of(self, position: int) -> Factors:
        """Return the factors of one layer."""
        left, right = (
            [np.ascontiguousarray(factor[position]) for factor in side] for side in self.factors
        )
        return left, right


def _count_terms(side: Sequence[NDArray[np.float64]], position: int) -> int:
    """Return the number of terms of a side without a factor that is zero."""
    count = 0
    for term in range(side[0].shape[1]):
        count += all(factor[position, term].any() for factor in side)
    return count


def product_of(factors: Factors) -> SeparatedProduct:
    """Return the product of factors (s, m_i, r_i) and (t, r_i, n_i), its terms normalised."""
    left, right = (SeparatedMatrix.from_factors(side) for side in factors)
    return SeparatedProduct(left, right)


class _TaskInProgress(NamedTuple):
    """A task whose numbers were read, and which may be running in a worker."""

    task: SolveTask
    journal_key: str
    """Key under which the journal is to keep the result; empty if it has it, or there is none."""
    result: Callable[[], list[SolvedShape]]
    """Returns the result: solves, reads the journal, or waits for the worker."""


class TaskRunner:
    """Runs tasks in this process, or in worker processes of one thread each.

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
                resources.workers,
                timeout=60,  # seconds without work after which a worker ends
                env=threads,
            )

    def tasks(
        self,
        indices: Sequence[int],
        requests: Sequence[ShapeRequest],
        *,
        starts: Mapping[int, SeparatedProduct] | None = None,
        sweeps: Sweeps = GRID_SWEEPS,
    ) -> list[SolveTask]:
        """Return tasks that solve the same shapes for layers of one group.

        Parameters
        ----------
        indices : sequence of int
            The layers. Each task has as many of them as fit in memory together.
        requests : sequence of ShapeRequest
        starts : Mapping of index to SeparatedProduct, optional
            The product that each layer starts from; absent, singular vectors.
        sweeps : Sweeps
        """
        if not requests:
            return []
        # Layers with weights of similar sizes share a batch: the smaller ones are padded.
        ordered = sorted(indices, key=lambda i: self.layers[i].leading_entries)
        layers = [self.layers[i] for i in ordered]
        tasks = []
        for span in batches(layers, self.resources.limits, leading=True):
            members = tuple(ordered[span])
            member_starts = None if starts is None else [starts[i] for i in members]
            tasks.append(SolveTask(members, requests, member_starts, sweeps, self.resources.device))
        return tasks

    def counter(self, tasks: Sequence[SolveTask], stage: str) -> Counter:
        """Return a progress counter of the layers and shapes of tasks."""
        total = sum(task.size for task in tasks)
        return Counter(self.resources.on_step, stage, total, "layers × shapes")

    def results(
        self, tasks: Iterable[SolveTask], counter: Counter | None = None
    ) -> Iterator[tuple[SolveTask, list[SolvedShape]]]:
        """Run tasks, and yield each with its result, in the order of the tasks.

        Results in the journal are not solved again. The order does not depend on which worker is
        fastest, so the table does not either. Raises `LsrError` if a worker is killed.
        """
        resources = self.resources
        max_in_flight = 1
        if self._pool is not None:
            max_in_flight = TASKS_IN_FLIGHT * resources.workers
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
                "a worker was killed, most often for lack of memory; use fewer workers and start "
                "again: what was solved is used again"
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
            entry = journal.get(key)
            if entry is not None:
                return _TaskInProgress(task, "", partial(_unpack, entry))
        if self._pool is None:
            return _TaskInProgress(task, key, partial(solve, task))
        return _TaskInProgress(task, key, self._pool.submit(solve, task).result)


@one_blas_thread
def solve(task: SolveTask) -> list[SolvedShape]:
    """Solve all shapes of a task, each at growing numbers of terms."""
    # Targets are moved to the device and weighted once, for all shapes.
    batch = WeightedTargets.of(task.targets, task.weights, task.device)
    shapes: list[SolvedShape] = []
    for request in task.requests:
        problem = PairProblem.of(batch, request.shape)
        states: dict[Ranks, PairState] = {}
        for requested in request.terms:
            ranks = clipped(request.shape, requested)
            if ranks not in states:
                states[ranks] = _solve_ranks(problem, ranks, states, task)
        for ranks, state in states.items():
            errors, factors = to_device((problem.errors(state), problem.factors(state)), None)
            shapes.append(SolvedShape(request.shape, ranks, errors, factors))
    return shapes


def _solve_ranks(
    problem: PairProblem, ranks: Ranks, states: Mapping[Ranks, PairState], task: SolveTask
) -> PairState:
    """Solve one number of terms, from the best start there is.

    That is the largest solution with fewer terms, else a product that the task brings, else
    singular vectors.
    """
    limit = task.sweeps.limit
    smaller = [solved for solved in states if solved[0] <= ranks[0] and solved[1] <= ranks[1]]
    if smaller:
        start = problem.grown(states[max(smaller, key=sum)], ranks)
    elif task.starts is not None:
        start = problem.from_products(task.starts, ranks)
    else:
        start = problem.best_start(problem.starts(ranks, STARTS), 0)[0]
        limit = COLD_SWEEPS
    return descend(problem, start, limit, task.sweeps.tolerance, task.sweeps.min_gain)


def task_key(task: SolveTask) -> str:
    """Return a digest of everything that the result of a task depends on."""
    pairs = [[target.left, target.right] for target in task.targets]
    shapes = [[request.shape, request.terms] for request in task.requests]
    starts = [[start.left.folded(), start.right.folded()] for start in task.starts or ()]
    return content_key(shapes, astuple(task.sweeps), pairs, task.weights, starts)


def _pack(shapes: Sequence[SolvedShape]) -> tuple[dict[str, NDArray[np.float64]], list[Any]]:
    """Return solved shapes as a journal keeps them: arrays by name, and JSON values.

    The values are the sizes and the terms of each shape.
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
    """Return the solved shapes that `_pack` turned into a journal entry."""
    shapes = []
    for i, (sizes, ranks) in enumerate(result.values):
        shape = ProductShape(*map(tuple, sizes))
        left, right = (
            [result.arrays[f"{i}.{name}.{j}"].read() for j in range(shape.order)] for name in SIDES
        )
        errors = result.arrays[f"{i}.errors"].read()
        shapes.append(SolvedShape(shape, tuple(ranks), errors, (left, right)))
    return shapes
