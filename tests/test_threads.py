"""Loops over small problems run with one BLAS thread; the caller's number comes back."""

import os
import subprocess
import sys
from importlib.resources import files
from threading import Event, Thread
from typing import ClassVar

import numpy as np
import pytest
import scipy.linalg
from console import run_command

import lsrdecomp
from lsrdecomp import lora, operators, threads
from lsrdecomp.analysis import error_curves, low_rank_curve, rearranged_spectrum, solver_curve
from lsrdecomp.cli import commands
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.search.layers import open_layers
from lsrdecomp.lora.search.plan import CompressionPlan, Resources, Search
from lsrdecomp.lora.search.searched import search_adapter
from lsrdecomp.lora.search.shapes import ShapeRequest
from lsrdecomp.lora.search.solve import TaskRunner
from lsrdecomp.operators import spectrum
from lsrdecomp.targets.target import Dense
from lsrdecomp.threads import (
    MAX_ONE_THREAD_ENTRIES,
    blas_libraries,
    one_blas_thread,
    one_blas_thread_for,
)

DEMO = files("lsrdecomp.cli") / "demo_adapter"
MATRIX = np.random.default_rng(0).standard_normal((64, 64))


def counts():
    """Numbers of threads of the BLAS libraries of this process."""
    return {library.threads for library in blas_libraries()}


@pytest.fixture(autouse=True)
def two_threads():
    """What the caller has set: two threads, in place of the one that tests run with."""
    assert scipy.linalg.lapack  # a BLAS of its own
    before = [(library, library.threads) for library in blas_libraries()]
    for library, _ in before:
        library.controller.set_num_threads(2)
    threads._let_others_set(blas_libraries())
    if counts() != {2}:
        pytest.skip("this BLAS does not take a number of threads")
    yield
    assert counts() == {2}
    for library, count in before:
        library.set_threads(count)
    threads._let_others_set(blas_libraries())


@pytest.fixture(scope="module")
def adapter():
    return lora.files.open_checkpoint(DEMO)


def test_inspect_has_one_thread(monkeypatch):
    seen, inner = [], commands._norm_and_rank
    monkeypatch.setattr(
        commands, "_norm_and_rank", lambda *layer: (seen.append(counts()), inner(*layer))[1]
    )
    assert run_command("inspect", DEMO, "--quiet").returncode == 0
    assert seen == [{1}] * 12


@pytest.mark.parametrize(
    "loop",
    [
        lambda adapter, step: lora.measure.verify(adapter, adapter, on_step=step),
        lambda adapter, step: lora.compress.truncate(adapter, ratio=4, on_step=step),
        lambda adapter, step: lora.search.adapter_curves(adapter, on_step=step),
        lambda adapter, step: search_adapter(
            adapter,
            [CompressionPlan(ratio=48)],
            search=Search(orders=(2,), rounds=0),
            resources=Resources(on_step=step),
        ),
    ],
    ids=["verify", "truncate", "curve", "search_adapter"],
)
def test_a_loop_over_layers_has_one_thread(adapter, loop):
    seen = []
    loop(adapter, lambda step: seen.append(counts()))
    assert seen
    assert set().union(*seen) == {1}


def test_drawing_a_budget_and_writing_have_one_thread(adapter, tmp_path, monkeypatch):
    searched = search_adapter(
        adapter, [CompressionPlan(ratio=48)], search=Search(orders=(2,), rounds=0)
    )
    seen, inner = [], type(searched)._fit
    monkeypatch.setattr(
        type(searched), "_fit", lambda *plan: (seen.append(counts()), inner(*plan))[1]
    )
    searched.compress(CompressionPlan(ratio=60))
    cut = lora.compress.truncate(adapter, ratio=4)
    cut.save(tmp_path / "small", on_step=lambda step: seen.append(counts()))
    assert set().union(*seen) == {1}


@pytest.mark.parametrize(
    "loop",
    [
        lambda: lsrdecomp.decompose(MATRIX, rank=4),
        lambda: lsrdecomp.decompose(MATRIX, "4x4, 4x4, 4x4", rank=2),
        lambda: lsrdecomp.decompose_each([MATRIX, MATRIX], rank=4, rtol=0.5),
        lambda: lsrdecomp.best_shape(MATRIX, rtol=0.5),
        lambda: lsrdecomp.error_curve(MATRIX),
        lambda: error_curves(MATRIX, ["8x8, 8x8"]),
        lambda: solver_curve(MATRIX, "8x8, 8x8", [1, 2]),
        lambda: low_rank_curve(WATCHED),
        lambda: rearranged_spectrum(MATRIX),
    ],
    ids=[
        *("two factors", "three factors", "each", "best_shape", "error_curve"),
        *("error_curves", "solver_curve", "low_rank_curve", "spectrum"),
    ],
)
def test_a_small_matrix_has_one_thread(loop, monkeypatch):
    seen = []
    for name in ("rearranged", "tensor"):
        inner = getattr(Dense, name)
        monkeypatch.setattr(
            Dense, name, lambda *shape, inner=inner: (seen.append(counts()), inner(*shape))[1]
        )
    monkeypatch.setattr(Watched, "seen", seen)
    loop()
    assert seen
    assert set().union(*seen) == {1}


class Watched(Dense):
    """An array that tells what it finds when its norm is asked for."""

    seen: ClassVar[list] = []

    def __getattribute__(self, name):
        if name == "norm":
            Watched.seen.append(counts())
        return super().__getattribute__(name)


WATCHED = Watched(MATRIX)  # made here: what is seen below is of the curve


def test_the_callers_threads_are_back_after_an_error():
    def stop(sweep):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        lsrdecomp.decompose(MATRIX, "4x4, 2x2, 8x8", rank=2, on_sweep=stop)
    assert counts() == {2}


def test_a_large_matrix_keeps_the_callers_threads():
    with one_blas_thread_for(MAX_ONE_THREAD_ENTRIES):
        assert counts() == {1}
    with one_blas_thread_for(MAX_ONE_THREAD_ENTRIES + 1):
        assert counts() == {2}


def test_products_that_the_caller_wrote_keep_the_callers_threads():
    class Products:
        shape, dtype, seen = MATRIX.shape, MATRIX.dtype, []

        def matvec(self, x):
            self.seen.append(counts())
            return MATRIX @ x

        def rmatvec(self, x):
            return MATRIX.T @ x

    products = Products()
    lsrdecomp.decompose(products, "8x8, 8x8", rank=1)
    assert set().union(*products.seen) == {2}


@pytest.mark.parametrize("first_out", [0, 1], ids=["first in, first out", "first in, last out"])
def test_the_last_python_thread_to_leave_gives_back(first_out):
    entered, may_leave, left = ([Event(), Event()] for _ in range(3))
    may_end = Event()  # both live on after they have left

    def run(k):
        with one_blas_thread:
            entered[k].set()
            may_leave[k].wait(60)
        left[k].set()
        may_end.wait(60)

    workers = [Thread(target=run, args=(k,)) for k in range(2)]
    for k in range(2):
        workers[k].start()
        entered[k].wait(60)
    found = []
    for k in (first_out, 1 - first_out):
        may_leave[k].set()
        left[k].wait(60)
        found.append(counts())
    may_end.set()
    for worker in workers:
        worker.join()
    assert found == [{1}, {2}]


def test_decompositions_in_two_python_threads_give_back():
    def run():
        for _ in range(20):
            lsrdecomp.decompose(MATRIX, rank=2)

    workers = [Thread(target=run) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert counts() == {2}


def test_inside_of_itself_it_holds_to_the_end():
    with one_blas_thread:
        with one_blas_thread:
            pass
        assert counts() == {1}


def test_a_number_that_was_set_inside_is_kept():
    with one_blas_thread:
        for library in blas_libraries():
            library.set_threads(3)
    assert counts() == {3}
    for library in blas_libraries():
        library.set_threads(2)


def test_an_abandoned_generator_leaves_nothing_behind(adapter):
    layers = tuple(open_layers(adapter))
    runner = TaskRunner(layers, Resources())
    shape = ProductShape.balanced(layers[0].shape, (2, 4))
    answers = runner.results(
        [task for i in range(2) for task in runner.tasks([i], [ShapeRequest(shape, ((1, 1),))])]
    )
    next(answers)
    assert counts() == {2}


def test_a_generator_function_is_refused():
    with pytest.raises(TypeError, match="steps is a generator: enter within each of its steps"):

        @one_blas_thread
        def steps():
            yield


def test_workers_have_one_thread_each(adapter):
    pytest.importorskip("joblib")
    runner = TaskRunner(tuple(open_layers(adapter)), Resources(workers=2))
    try:
        assert runner._pool.submit(counts).result() == {1}
    finally:
        runner._pool.shutdown(kill_workers=True)


def test_threads_of_torch_are_left_alone():
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_blas_thread:
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_blas_that_is_loaded_inside_has_one_thread_from_the_next_entry_on():
    code = """
import numpy
from lsrdecomp.threads import blas_libraries, one_blas_thread
with one_blas_thread:
    before = len(blas_libraries())
    import scipy.linalg
    with one_blas_thread:
        print(before, len(blas_libraries()), {library.threads for library in blas_libraries()})
print({library.threads for library in blas_libraries()})
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    inside, outside = done.stdout.splitlines()
    before, after, found = inside.split(maxsplit=2)
    assert int(before) <= int(after)
    assert found == "{1}"
    assert outside == "{2}"


@pytest.mark.parametrize(("side", "found"), [(64, {1}), (257, {2})], ids=["small", "large"])
def test_operators_have_one_thread_where_factors_are_small(side, found, monkeypatch):
    seen, inner = [], spectrum.diagonalize
    monkeypatch.setattr(
        spectrum, "diagonalize", lambda matrix: (seen.append(counts()), inner(matrix))[1]
    )
    diagonal = np.diag(np.arange(1.0, side + 1))
    operators.logdet(operators.kronecker_sum(diagonal, np.eye(2)))
    assert seen == [found]


def test_a_solution_that_falls_short_is_told_where_it_was_asked_for(recwarn):
    matrix = lsrdecomp.decompose(MATRIX @ MATRIX.T, "8x8, 8x8", rank=6).approximation
    operators.solve(matrix, np.ones(64), max_iterations=1)
    assert recwarn.pop(RuntimeWarning).filename == __file__
