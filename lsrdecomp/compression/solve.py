"""Solving many shapes for many layers: tasks that share what their layers share, in one process or several."""

from __future__ import annotations

from collections import deque
from concurrent.futures import BrokenExecutor
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.arrays import to_device
from lsrdecomp.checkpoints.journal import JournalEntry, content_key
from lsrdecomp.checkpoints.progress import Counter
from lsrdecomp.compression.layers import Layer, batches
from lsrdecomp.compression.shapes import Ranks, Request, clipped
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


@dataclass(frozen=True, slots=True)
class Effort:
    """How hard to solve from what was solved before."""

    sweeps: int = 2
    tolerance: float = 2e-3  # a sweep that lowers no error by more ends the solve
    least: float = 0.0  # so does one that lowers no squared error by more


@dataclass(frozen=True, eq=False)
class Task:
    """Requests for layers of one kind that fit in memory together."""

    indices: tuple[int, ...]  # of the layers in the whole adapter
    requests: Sequence[Request]
    starts: (
        Sequence[SeparatedProduct] | None
    )  # one a layer, of the shape of the only request and no more terms
    effort: Effort
    device: str | None
    targets: Sequence[LowRank] = ()  # read when the task is begun, and so are the norms
    weights: Sequence[NormWeights] | None = None  # None: the Frobenius norm

    @property
    def size(self) -> int:
        """Layers times shapes."""
        return len(self.indices) * len(self.requests)


@dataclass(frozen=True, eq=False)
class Answer:
    """What one shape came to, layer by layer of its task."""

    shape: ProductShape
    ranks: Ranks
    errors: NDArray[np.float64]  # in the task's norm, (L,)
    factors: Factors  # of both sides, (L, s, m_i, r_i) and (L, t, r_i, n_i)

    def ranks_of(self, position: int) -> Ranks:
        """Terms of a layer's product, those that vanished not counted."""
        left, right = (
            sum(all(factor[position, k].any() for factor in side) for k in range(side[0].shape[1]))
            for side in self.factors
        )
        return left, right

    def factors_of(self, position: int) -> Factors:
        """The factors of one layer."""
        left, right = (
            [np.ascontiguousarray(factor[position]) for factor in side] for side in self.factors
        )
        return left, right


def product_of(factors: Factors) -> SeparatedProduct:
    """The product of two sides of factors (s, m_i, r_i) and (t, r_i, n_i), its terms normalised."""
    left, right = (SeparatedMatrix.from_factors(side) for side in factors)
    return SeparatedProduct(left, right)


SIDES = "left", "right"

STARTS, COLD_SWEEPS = 2, 4
"""Starts from singular vectors, and sweeps after the nearest, where nothing was solved before."""

CG_STEPS = 8
"""Conjugate gradient steps of a block update in a weighted norm."""

AHEAD = 4
"""Tasks a worker that are read, under way or waiting for their turn, so that not all layers are in memory at once. Of
those that wait none is in the journal yet: so many are solved again after a kill."""

THREADS = ("OMP", "OPENBLAS", "MKL", "BLIS", "VECLIB_MAXIMUM", "NUMEXPR")

IDLE = 60
"""Seconds after which a worker without work ends."""


class TaskRunner:
    """Makes tasks of layers and solves them, here or in processes of one thread each, which end with the runner.

    Raises `LsrError` if several workers are asked for and joblib is missing.
    """

    def __init__(self, layers: Sequence[Layer], resources: Resources) -> None:
        self.layers, self.resources, self._pool = layers, resources, None
        if resources.workers > 1:
            with needs("a pool of workers", "fleet"):
                from joblib.externals.loky import ProcessPoolExecutor
            threads = {f"{library}_NUM_THREADS": "1" for library in THREADS}
            self._pool = ProcessPoolExecutor(resources.workers, timeout=IDLE, env=threads)

    def tasks(
        self,
        indices: Sequence[int],
        requests: Sequence[Request],
        *,
        starts: Mapping[int, SeparatedProduct] | None = None,
        effort: Effort | None = None,
    ) -> list[Task]:
        """The same requests for any number of layers of one kind, in parts that fit in memory together.

        Layers whose norms need as many coordinates lie side by side. With ``starts`` each goes on
        from its own product.
        """
        tasks = []
        ordered = sorted(indices, key=lambda i: self.layers[i].leading_entries) if requests else []
        for span in batches([self.layers[i] for i in ordered], leading=True):
            part = tuple(ordered[span])
            begun = None if starts is None else [starts[i] for i in part]
            tasks.append(Task(part, requests, begun, effort or Effort(), self.resources.device))
        return tasks

    def counter(self, tasks: Sequence[Task], stage: str) -> Counter:
        """Counts the layers and shapes of tasks."""
        return Counter(
            self.resources.on_step, stage, sum(task.size for task in tasks), "layers × shapes"
        )

    def answers(
        self, tasks: Iterable[Task], counter: Counter | None = None
    ) -> Iterator[tuple[Task, list[Answer]]]:
        """Answers to all tasks in their order, on which the table depends; what the journal has is not solved again.

        A worker that is free takes the next task, whatever the others do. Raises `LsrError` if one
        of them is killed.
        """
        journal, ahead = self.resources.journal, deque[Any]()
        left, most = iter(tasks), 1 if self._pool is None else AHEAD * self.resources.workers
        try:
            while True:
                ahead.extend(self._begun(task) for task in islice(left, most - len(ahead)))
                if not ahead:
                    return
                task, key, answers_of = ahead.popleft()
                answers = answers_of()
                if journal is not None and key:
                    arrays, facts = _packed(answers)
                    journal.put(key, arrays, values=facts)
                if counter is not None:
                    counter.add(task.size)
                yield task, answers
        except BrokenExecutor as error:
            text = "a worker was ended from outside, most often for want of memory; take fewer and start again"
            raise LsrError(f"{text}: what was solved is used again") from error
        except BaseException:
            if self._pool is not None:
                self._pool.shutdown(kill_workers=True)
            raise

    def _begun(self, task: Task) -> tuple[Task, str, Callable[[], list[Answer]]]:
        """A task with its numbers, the key its answers are kept under (empty where they are), and how they are had."""
        layers, journal = [self.layers[i] for i in task.indices], self.resources.journal
        norms = [layer.leading for layer in layers if not layer.is_frobenius]
        task = replace(task, targets=[layer.pair for layer in layers], weights=norms or None)
        key = "" if journal is None else task_key(task)
        stored = None if journal is None else journal.get(key)
        if stored is not None:
            return task, "", partial(_unpacked, stored)
        return (
            task,
            key,
            partial(solve, task) if self._pool is None else self._pool.submit(solve, task).result,
        )


@one_blas_thread
def solve(task: Task) -> list[Answer]:
    """All requests of a task in turn; each number of terms starts from the largest solved one that it holds."""
    # Targets are placed on the device and weighted once, for all shapes of the task.
    effort = task.effort
    batch = WeightedTargets.of(task.targets, task.weights, task.device)
    answers: list[Answer] = []
    for request in task.requests:
        problem = PairProblem.of(batch, request.shape, CG_STEPS)
        solved: dict[Ranks, PairState] = {}
        for ranks in request.terms:
            ranks = clipped(request.shape, ranks)
            if ranks in solved:
                continue
            # Solutions of more terms start from those of fewer, which come nearer than singular
            # vectors do.
            inside = [fewer for fewer in solved if fewer[0] <= ranks[0] and fewer[1] <= ranks[1]]
            if inside:
                begun, sweeps = problem.grown(solved[max(inside, key=sum)], ranks), effort.sweeps
            elif task.starts is not None:
                begun, sweeps = problem.from_products(task.starts, ranks), effort.sweeps
            else:
                begun, sweeps = problem.best_start(problem.starts(ranks, STARTS), 0)[0], COLD_SWEEPS
            solved[ranks] = descend(problem, begun, sweeps, effort.tolerance, effort.least)
        for ranks, state in solved.items():
            errors, factors = to_device((problem.errors(state), problem.factors(state)), None)
            answers.append(Answer(request.shape, ranks, errors, factors))
    return answers


def task_key(task: Task) -> str:
    """A digest of all that an answer depends on."""
    pairs = [[target.left, target.right] for target in task.targets]
    shapes = [[request.shape, request.terms] for request in task.requests]
    folded = [[start.left.folded(), start.right.folded()] for start in task.starts or ()]
    return content_key(shapes, astuple(task.effort), pairs, task.weights, folded)


def _packed(answers: Sequence[Answer]) -> tuple[dict[str, NDArray[np.float64]], list[Any]]:
    """Arrays by name, the factors of all layers of an answer stacked; and shape and terms of each."""
    arrays = {}
    for i, answer in enumerate(answers):
        arrays[f"{i}.errors"] = answer.errors
        for name, side in zip(SIDES, answer.factors, strict=True):
            arrays |= {f"{i}.{name}.{j}": factor for j, factor in enumerate(side)}
    return arrays, [[astuple(answer.shape), answer.ranks] for answer in answers]


def _unpacked(result: JournalEntry) -> list[Answer]:
    answers = []
    for i, (sizes, (s, t)) in enumerate(result.values):
        shape = ProductShape(*map(tuple, sizes))
        left, right = (
            [result.arrays[f"{i}.{name}.{j}"].read() for j in range(shape.order)] for name in SIDES
        )
        answers.append(Answer(shape, (s, t), result.arrays[f"{i}.errors"].read(), (left, right)))
    return answers
