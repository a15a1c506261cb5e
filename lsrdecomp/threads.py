"""One BLAS thread for loops over small problems, and the caller's own number back afterwards.

A BLAS starts its threads for products that are far too small for them, and the threads then wait
for more work at full speed. Beside other work on the machine, a loop over the layers of an adapter
took 10 to 40 times its CPU seconds that way (``benchmarks/results/threads.json``). Threads of other
libraries, torch's among them, are left alone.
"""

from __future__ import annotations

import sys
from contextlib import ContextDecorator, nullcontext
from dataclasses import dataclass
from functools import cache
from inspect import isgeneratorfunction
from threading import Lock, local
from typing import TYPE_CHECKING, Any, Self, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

F = TypeVar("F", bound="Callable[..., Any]")

MAX_ONE_THREAD_ENTRIES = 4096 * 4096
"""Entries of a matrix up to which one BLAS thread decomposes it; this and the other sizes from
``benchmarks/results/threads.json``."""


@dataclass(frozen=True, eq=False, slots=True)
class BlasLibrary:
    """A BLAS that this process has loaded, by its controller in threadpoolctl."""

    controller: Any
    counts_each_thread: bool  # the number holds for one Python thread, not for the whole process

    @property
    def threads(self) -> int:
        """Number of threads that it may use now."""
        return int(self.controller.get_num_threads())

    def set_threads(self, count: int) -> None:
        """Set that number."""
        self.controller.set_num_threads(count)

    @classmethod
    def of(cls, controller: Any) -> BlasLibrary:
        """Describe the library of a controller."""
        on_openmp = getattr(controller, "threading_layer", "") == "openmp"
        return cls(controller, on_openmp or controller.internal_api == "mkl")


def blas_libraries() -> tuple[BlasLibrary, ...]:
    """Return the BLAS libraries of this process.

    They are looked for once, and once more when SciPy's, mostly another than NumPy's, is there too.
    """
    return _find_libraries(hasattr(sys.modules.get("scipy.linalg"), "lapack"))


@cache
def _find_libraries(_with_scipy: bool) -> tuple[BlasLibrary, ...]:
    """Look for BLAS libraries, in milliseconds; the argument only tells two answers apart."""
    from threadpoolctl import ThreadpoolController

    controllers = ThreadpoolController().select(user_api="blas").lib_controllers
    return tuple(map(BlasLibrary.of, controllers))


class OneBlasThread(ContextDecorator):
    """A context manager and decorator within which BLAS libraries compute with one thread.

    The number of threads of most libraries holds for the whole process. The first Python thread to
    enter therefore stores the numbers, and the last one to leave gives them back, in whatever order
    they leave; a number that somebody else has set meanwhile is kept. Where a library counts for
    each Python thread (MKL, OpenBLAS on OpenMP), each of them stores and gives back its own. While
    another Python thread is inside ``threadpoolctl.threadpool_limits``, its number stays.

    Entering costs some microseconds, entering once more inside about one. Generator functions are
    refused: a generator would keep the limit while its caller computes.

    Examples
    --------
    >>> with one_blas_thread:
    ...     {library.threads for library in blas_libraries()} <= {1}
    True
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._n_inside = 0  # Python threads
        self._found: dict[BlasLibrary, int] = {}  # of libraries that count for the whole process
        self._python_thread = _PythonThread()

    def __call__(self, function: F) -> F:
        """Return the function so that it runs inside.

        Raises
        ------
        TypeError
            For a generator function.
        """
        if isgeneratorfunction(function):
            raise TypeError(f"{function.__name__} is a generator: enter within each of its steps")
        return super().__call__(function)

    def __enter__(self) -> Self:
        here = self._python_thread
        libraries = blas_libraries()
        if here.depth == 0 or here.n_libraries < len(libraries):
            with self._lock:
                self._n_inside += here.depth == 0
                self._limit(libraries, here)
            here.n_libraries = len(libraries)
        here.depth += 1
        return self

    def __exit__(self, *exception: object) -> None:
        here = self._python_thread
        here.depth -= 1
        if here.depth:
            return
        with self._lock:
            self._n_inside -= 1
            _give_back(here.found)
            if self._n_inside == 0:
                _give_back(self._found)

    def _limit(self, libraries: Sequence[BlasLibrary], here: _PythonThread) -> None:
        """Store the number of threads of each library that has no limit yet, and set it to one."""
        changed = False
        for library in libraries:
            found = here.found if library.counts_each_thread else self._found
            if library not in found:
                found[library] = library.threads
                if found[library] != 1:
                    library.set_threads(1)
                    changed = True
        if changed:
            _let_others_set(libraries)


class _PythonThread(local):
    """The depth of one Python thread inside `OneBlasThread`, and the numbers that it found."""

    def __init__(self) -> None:
        self.depth = 0
        self.n_libraries = 0
        self.found: dict[BlasLibrary, int] = {}


def _give_back(found: dict[BlasLibrary, int]) -> None:
    """Restore the numbers of threads, but for those that somebody else has changed."""
    changed = [library for library, count in found.items() if count != 1 and library.threads == 1]
    for library in changed:
        library.set_threads(found[library])
    if changed:
        _let_others_set(changed)
    found.clear()


def _let_others_set(libraries: Sequence[BlasLibrary]) -> None:
    """Let other Python threads set the number of threads of OpenBLAS, too.

    From threadpoolctl 3.8 on, the one that set it last is the only one that may, until it says so.
    """
    for library in libraries:
        release = getattr(library.controller, "clear_controlling_thread", None)
        if release is not None:
            release()
            return


one_blas_thread = OneBlasThread()
"""The one guard of this process, for ``with`` and as a decorator."""

_NO_GUARD = nullcontext()


def one_blas_thread_for(entries: int) -> AbstractContextManager[object]:
    """Return the guard for decomposing a matrix of that size, or one that does nothing.

    Returns
    -------
    context manager
        `one_blas_thread` up to `MAX_ONE_THREAD_ENTRIES`. Above, and up to 32 × 32, for whose
        products OpenBLAS starts no thread anyway, threads are left as they are.

    Examples
    --------
    >>> one_blas_thread_for(256 * 256) is one_blas_thread
    True
    """
    if 32 * 32 < entries <= MAX_ONE_THREAD_ENTRIES:
        return one_blas_thread
    return _NO_GUARD
