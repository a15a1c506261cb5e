"""Every solver against every property of the contract, one from CONTRIBUTING.md included."""

import re
from pathlib import Path

import conformance
import numpy as np
import pytest
from conformance import PAIR_PROPERTIES, PROPERTIES, SHAPES, PairRow, Row

import lsrdecomp as lsr
from lsrdecomp import solvers
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.rearrange import inverse_rearrange
from lsrdecomp.solvers.matrix import MatrixSolver
from lsrdecomp.solvers.solver import Event, Sweep
from lsrdecomp.targets.target import Dense

ROWS = [
    Row(solvers.SVD()),
    Row(solvers.SVD(tolerance=1e-6)),
    Row(solvers.Krylov()),
    Row(solvers.Krylov(tolerance=1e-6, seed=4)),
    Row(solvers.Greedy(), orders=(2, 3), excess=1e-2),
    Row(solvers.ALS(storage="float64"), orders=(3,), excess=1e-2, rounding=1e-6),
    Row(solvers.WeightedALS(), orders=(2, 3), excess=1e-2, rounding=1e-4),
    Row(solvers.TensorLyCP(), orders=(3,), libraries=("numpy",), excess=1e-2, rounding=1e-4),
]
PAIR_ROWS = [
    PairRow(solvers.JointALS()),
    PairRow(solvers.JointALS(single=True)),
    PairRow(solvers.FactorwiseSVD()),
]

CASES = [(row, order) for row in ROWS for order in row.orders]


@pytest.mark.parametrize("name", PROPERTIES)
@pytest.mark.parametrize(("row", "order"), CASES, ids=lambda value: str(value))
def test_a_solver_keeps_the_contract(row, order, name):
    if name in row.skips:
        pytest.skip(row.skips[name])
    PROPERTIES[name](row, order)


@pytest.mark.parametrize("xp", ["torch", "array_api_strict"], indirect=True)
@pytest.mark.parametrize(("row", "order"), CASES, ids=lambda value: str(value))
def test_a_solver_works_in_every_library_it_claims(row, order, xp):
    conformance.works_in_every_library(row, order, xp.__name__.rsplit(".", 1)[-1], xp)


@pytest.mark.parametrize("name", PAIR_PROPERTIES)
@pytest.mark.parametrize("row", PAIR_ROWS, ids=str)
def test_a_solver_of_pairs_keeps_the_contract(row, name):
    PAIR_PROPERTIES[name](row)


def test_every_solver_of_the_face_has_a_row():
    rows = {type(row.solver).__name__ for row in (*ROWS, *PAIR_ROWS)}
    public = {name for name in dir(solvers) if hasattr(getattr(solvers, name), "solve")}
    assert rows == public - {"Solver", "PairSolver"}


def test_callbacks_survive_a_hand_over(monkeypatch):
    """Krylov may hand over to the dense way: nobody who listens is left behind."""
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.standard_normal((n, 120)))[0] for n in SHAPES[2].sizes)
    slow = inverse_rearrange((u / np.arange(1.0, 121.0)) @ v.T, SHAPES[2])
    monkeypatch.setattr("lsrdecomp.solvers.svd.block_krylov.MAX_SHARE", 4)
    seen: list[Sweep] = []
    solution = solvers.Krylov(tolerance=1e-9).solve(
        Dense(slow), SHAPES[2], rank=3, on_sweep=seen.append
    )
    events = [sweep.event for sweep in seen]
    assert tuple(seen) == solution.sweeps
    assert events[0] is Event.start
    assert events[-1] is Event.hand_over
    assert seen[-1].relative_error == pytest.approx(
        conformance.dense_error(slow, solution), rel=1e-9
    )


def test_decompose_numbers_the_records_of_all_its_solves(rng):
    matrix = rng.standard_normal((24, 24)) * np.exp(-0.5 * np.arange(24))
    seen: list[Sweep] = []
    lsr.decompose(matrix, rtol=4e-3, storage="bfloat16", on_sweep=seen.append)
    conformance.check_sweeps(seen)


def test_new_terms_and_starts_are_marked():
    target = Dense(conformance.matrix(3))
    solution = solvers.ALS(storage="float16").solve(target, SHAPES[3], rank=4)
    events = [sweep.event for sweep in solution.sweeps]
    assert events.count(Event.new_term) == 3 + (events[0] is Event.new_term)
    assert Event.start in events


def test_a_broken_monotone_objective_is_seen():
    sweeps = [Sweep(1, 0.5, event=Event.start, objective=0.25), Sweep(2, 0.6, objective=0.36)]
    with pytest.raises(AssertionError):
        conformance.check_sweeps(sweeps)


CONTRIBUTING = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_a_solver_written_from_contributing_alone_keeps_the_contract():
    section = CONTRIBUTING.read_text().split("## Adding a solver")[1].split("\n## ")[0]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]
    # Without a name its classes are of the module builtins, and dataclass leaves the builtins among
    # themselves, where torch's compiler walks round and round
    names: dict[str, object] = {"__name__": "contributed"}
    exec(compile(code, str(CONTRIBUTING), "exec"), names)
    row = Row(names["PowerIteration"]())
    for name, check in PROPERTIES.items():
        try:
            check(row, 2)
        except BaseException as error:
            raise AssertionError(f"{name}: {error}") from error
    result = lsr.decompose(conformance.matrix(2), SHAPES[2], rank=3, solver=row.solver)
    assert result.relative_error == pytest.approx(
        lsr.decompose(
            conformance.matrix(2), SHAPES[2], rank=3, solver=solvers.SVD()
        ).relative_error,
        rel=row.excess,
    )


def test_a_solver_of_three_factors_refuses_two():
    class Three(MatrixSolver):
        order = 3

        def _solve(self, problem):
            raise AssertionError("the checks come first")

    target = Dense(np.eye(8))
    with pytest.raises(ShapeError, match="this solver is for 3 factors; 2×2 ⊗ 4×4 has 2"):
        Three().solve(target, lsr.KroneckerShape(((2, 2), (4, 4))), rank=1)
    with pytest.raises(AssertionError, match="the checks come first"):
        Three().solve(target, lsr.KroneckerShape(((2, 2), (2, 2), (2, 2))), rank=1)
