"""The contract as a table: every solver a row, every property a function of a row.

CONTRIBUTING.md says how to join.

A row says what its solver is for; a property that does not hold for it stands in ``skips`` with the
reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from oracles import kron_sum

from lsrdecomp import KroneckerShape, LowRank, ProductShape
from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import BudgetError, ShapeError
from lsrdecomp.kronecker.rearrange import inverse_rearrange
from lsrdecomp.solvers.solver import Event, Status, Sweep
from lsrdecomp.targets.target import Dense

SHAPES = {2: KroneckerShape(((12, 10), (11, 13))), 3: KroneckerShape(((3, 2), (2, 4), (3, 3)))}
"""The first has a rearrangement of 120 × 143: large enough for a Krylov space to be one."""

ALL = ("numpy", "torch", "array_api_strict")


@dataclass(frozen=True)
class Row:
    """A solver of a matrix, and what it claims."""

    solver: Any
    orders: tuple[int, ...] = (2,)  # numbers of factors
    libraries: tuple[str, ...] = ALL
    excess: float = 2e-3  # of the error of three terms over the best known, on the matrices here
    rounding: float = 1e-12  # the relative error at which as many terms as there can be end
    skips: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return type(self.solver).__name__


def matrix(order: int, kind: Any = float) -> np.ndarray:
    """Return a matrix whose rearrangement has a falling spectrum, or six falling terms."""
    rng, shape = np.random.default_rng(order), SHAPES[order]
    if order == 2:
        u, v = (np.linalg.qr(rng.standard_normal((n, 120)))[0] for n in shape.sizes)
        if kind is complex:
            u, v = (side * np.exp(1j * rng.random((side.shape[0], 1))) for side in (u, v))
        return np.asarray(inverse_rearrange((u * np.exp(-np.arange(120) / 4.0)) @ v.T, shape))
    factors = [rng.standard_normal((6, m, n)) for m, n in shape.factors]
    if kind is complex:
        factors = [factor + 1j * rng.standard_normal(factor.shape) for factor in factors]
    return sum(
        0.3**k * np.kron(np.kron(factors[0][k], factors[1][k]), factors[2][k]) for k in range(6)
    )


def formed(approximation: Any) -> np.ndarray:
    """By `numpy.kron`, term by term; a sum of several shapes part by part."""
    parts = getattr(approximation, "parts", (approximation,))
    return sum(kron_sum(part.weights, part.factors) for part in parts)


def factors_of(approximation: Any) -> tuple[Any, ...]:
    return getattr(approximation, "parts", (approximation,))[0].factors


def dense_error(given: np.ndarray, solution: Any) -> float:
    return float(np.linalg.norm(given - formed(solution.approximation)) / np.linalg.norm(given))


def solved(
    row: Row, order: int, given: np.ndarray | None = None, **goal: Any
) -> tuple[np.ndarray, Any]:
    given = matrix(order) if given is None else given
    return given, row.solver.solve(Dense(given), SHAPES[order], **goal)


@cache
def three_terms(solver: Any, order: int) -> tuple[np.ndarray, Any]:
    """What most properties look at; solved once."""
    given = matrix(order)
    return given, solver.solve(Dense(given), SHAPES[order], rank=3)


# Each property is a function of (row, order), or of a row alone.


def returns_what_its_record_says(row: Row, order: int) -> None:
    given, solution = three_terms(row.solver, order)
    assert solution.status is Status.rank_reached
    assert solution.approximation.separation_rank == 3
    assert solution.approximation.shape == given.shape
    if solution.relative_error is not None:
        assert solution.relative_error == pytest.approx(
            dense_error(given, solution), rel=1e-9, abs=1e-15
        )
    if order == 2:
        best = np.linalg.norm(np.exp(-np.arange(3, 120) / 4.0)) / np.linalg.norm(
            np.exp(-np.arange(120) / 4.0)
        )
        assert best * (1 - 1e-9) <= dense_error(given, solution) <= best * (1 + row.excess)


def a_tolerance_is_met_or_the_status_says_why(row: Row, order: int) -> None:
    given = matrix(order)
    for rtol, rank in ((0.2, None), (1e-3, 2)):
        _, solution = solved(row, order, given, atol=rtol * np.linalg.norm(given), rank=rank)
        error = dense_error(given, solution)
        assert (solution.status is Status.converged) == (error <= rtol * (1 + 1e-12))
        assert rank is None or solution.status is Status.rank_exhausted
        if solution.relative_error is not None:
            assert solution.relative_error == pytest.approx(error, rel=1e-9)


def weights_descend_and_factors_have_unit_norm(row: Row, order: int) -> None:
    _, solution = three_terms(row.solver, order)
    for part in getattr(solution.approximation, "parts", (solution.approximation,)):
        weights = to_numpy(part.weights)
        assert np.all(weights > 0)
        assert np.all(np.diff(weights) <= 1e-12 * weights[0])
        for factor in part.factors:
            assert np.linalg.norm(to_numpy(factor), axis=(1, 2)) == pytest.approx(1.0, abs=1e-9)


def the_same_seed_gives_the_same_bits(row: Row, order: int) -> None:
    first, second = three_terms(row.solver, order)[1], solved(row, order, rank=3)[1]
    assert np.array_equal(formed(first.approximation), formed(second.approximation))
    assert first.sweeps == second.sweeps


def a_solve_changes_nothing(row: Row, order: int) -> None:
    given, before = matrix(order), repr(row.solver)
    kept = given.copy()
    solved(row, order, given, rank=2)
    assert np.array_equal(given, kept)
    assert repr(row.solver) == before


def more_terms_than_there_can_be_are_clipped(row: Row, order: int) -> None:
    shape = KroneckerShape(((2, 2), (3, 2)) if order == 2 else ((2, 1), (2, 2), (1, 3)))
    given = np.random.default_rng(0).standard_normal(shape.matrix_shape)
    solution = row.solver.solve(Dense(given), shape, rank=10**6)
    assert solution.approximation.separation_rank <= shape.max_separation_rank
    assert dense_error(given, solution) <= row.rounding


def callbacks_come_in_order_and_marked(row: Row, order: int) -> None:
    given = matrix(order)
    for goal in ({"rank": 3}, {"atol": 0.1 * np.linalg.norm(given)}):
        seen: list[Sweep] = []
        _, solution = solved(row, order, given, **goal, on_sweep=seen.append)
        assert tuple(seen) == solution.sweeps
        check_sweeps(seen)


def check_sweeps(sweeps: Iterable[Sweep]) -> None:
    """Check that sweeps are numbered, begin with a mark, and rise only where a mark says why."""
    sweeps = list(sweeps)
    assert sweeps
    assert [sweep.index for sweep in sweeps] == list(range(1, len(sweeps) + 1))
    assert sweeps[0].event in (Event.start, Event.new_term, Event.hand_over)
    for before, after in itertools.pairwise(sweeps):
        if after.event is Event.step and None not in (before.objective, after.objective):
            assert after.objective <= before.objective * (1 + 1e-9) + 1e-13


def foreign_shapes_and_goals_are_refused(row: Row, order: int) -> None:
    target, shape = Dense(matrix(order)), SHAPES[order]
    with pytest.raises(ShapeError, match=r"rows, but the matrix has|columns, but the matrix has"):
        row.solver.solve(Dense(np.ones((5, 7))), shape, rank=1)
    with pytest.raises(ShapeError, match="positive"):
        row.solver.solve(target, shape, rank=0)
    with pytest.raises(BudgetError, match="rank= or atol="):
        row.solver.solve(target, shape)
    for atol in (-1.0, np.nan):
        with pytest.raises(BudgetError, match="atol"):
            row.solver.solve(target, shape, atol=atol)
    if row.orders == (2,):
        other = KroneckerShape.balanced(target.shape, 3)
        with pytest.raises(ShapeError, match="has 3"):
            row.solver.solve(target, other, rank=1)


def a_zero_matrix_needs_no_terms(row: Row, order: int) -> None:
    given = np.zeros(SHAPES[order].matrix_shape)
    for goal in ({"rank": 2}, {"atol": 0.0}):
        solution = row.solver.solve(Dense(given), SHAPES[order], **goal)
        assert solution.approximation.separation_rank == 0
        assert solution.status is (Status.rank_reached if "rank" in goal else Status.converged)
        assert solution.relative_error in (0.0, None)


def single_rows_and_columns_are_no_special_case(row: Row, order: int) -> None:
    rest = ((1, 1),) * (order - 2)
    for factors in (
        ((1, 1), (1, 12)),
        ((1, 3), (1, 4)),
        ((4, 1), (3, 1)),
        ((1, 1), (1, 1)),
        ((1, 7), (5, 1)),
    ):
        shape = KroneckerShape((*factors, *rest))
        given = np.random.default_rng(1).standard_normal(shape.matrix_shape)
        solution = row.solver.solve(Dense(given), shape, rank=shape.max_separation_rank)
        assert dense_error(given, solution) <= row.rounding


def complex_matrices_stay_complex(row: Row, order: int) -> None:
    given, solution = solved(row, order, matrix(order, complex), rank=3)
    _, real = three_terms(row.solver, order)
    assert all(np.iscomplexobj(factor) for factor in factors_of(solution.approximation))
    parts = getattr(solution.approximation, "parts", (solution.approximation,))
    assert not any(np.iscomplexobj(to_numpy(part.weights)) for part in parts)
    if order == 2:  # the same spectrum
        assert dense_error(given, solution) == pytest.approx(
            dense_error(matrix(2), real), rel=4 * row.excess
        )
    else:
        assert dense_error(given, solution) < 0.3


PROPERTIES: dict[str, Callable[[Row, int], None]] = {
    check.__name__: check
    for check in (
        returns_what_its_record_says,
        a_tolerance_is_met_or_the_status_says_why,
        weights_descend_and_factors_have_unit_norm,
        the_same_seed_gives_the_same_bits,
        a_solve_changes_nothing,
        more_terms_than_there_can_be_are_clipped,
        callbacks_come_in_order_and_marked,
        foreign_shapes_and_goals_are_refused,
        a_zero_matrix_needs_no_terms,
        single_rows_and_columns_are_no_special_case,
        complex_matrices_stay_complex,
    )
}


def works_in_every_library(row: Row, order: int, name: str, xp: ModuleType) -> None:
    """Check for NumPy's numbers in the library they came in, unless the row names a refusal."""
    if name not in row.libraries:
        pytest.skip(f"{row} does not claim {name}")
    given = matrix(order)
    solution = row.solver.solve(Dense(xp.asarray(given)), SHAPES[order], rank=3)
    assert all(
        type(factor) is type(xp.asarray(given)) for factor in factors_of(solution.approximation)
    )
    here = three_terms(row.solver, order)[1]
    assert dense_error(given, solution) == pytest.approx(dense_error(given, here), rel=row.excess)


@dataclass(frozen=True)
class PairRow:
    """A solver of a pair, and what it claims."""

    solver: Any
    libraries: tuple[str, ...] = ALL
    skips: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        name = type(self.solver).__name__
        return f"{name}-single" if getattr(self.solver, "single", False) else name


PAIR_SHAPE = ProductShape((6, 5), (2, 3), (4, 7))


def pair(xp: Any = np) -> LowRank:
    rng = np.random.default_rng(5)
    return LowRank(
        xp.asarray(rng.standard_normal((30, 4))), xp.asarray(rng.standard_normal((4, 28)))
    )


def formed_product(solution: Any) -> np.ndarray:
    left, right = solution.product.left, solution.product.right
    return kron_sum(left.weights, left.factors) @ kron_sum(right.weights, right.factors)


def pair_returns_what_its_record_says(row: PairRow) -> None:
    target = pair()
    whole = target.left @ target.right
    solution = row.solver.solve(target, PAIR_SHAPE, (3, 2))
    assert solution.product.separation_ranks == (3, 2)
    error = np.linalg.norm(whole - formed_product(solution))
    assert solution.relative_error == pytest.approx(error / np.linalg.norm(whole), rel=1e-9)
    assert solution.norm == pytest.approx(np.linalg.norm(whole), rel=1e-12)
    assert solution.error == pytest.approx(error, rel=1e-9)
    assert solution.relative_error <= solution.start_error * (1 + 1e-6)


def pair_callbacks_come_in_order_and_marked(row: PairRow) -> None:
    seen: list[Sweep] = []
    solution = row.solver.solve(pair(), PAIR_SHAPE, 3, on_sweep=seen.append)
    assert tuple(seen) == solution.sweeps
    check_sweeps(seen)


def pair_is_deterministic_and_clips_its_ranks(row: PairRow) -> None:
    first, second = (row.solver.solve(pair(), PAIR_SHAPE, 10**6) for _ in range(2))
    most = PAIR_SHAPE.left.max_separation_rank, PAIR_SHAPE.right.max_separation_rank
    assert all(a <= b for a, b in zip(first.product.separation_ranks, most, strict=True))
    assert first.relative_error <= 1e-6
    assert np.array_equal(formed_product(first), formed_product(second))


def pair_refuses_foreign_shapes_and_ranks(row: PairRow) -> None:
    with pytest.raises(ShapeError, match="30×28"):
        row.solver.solve(pair(), ProductShape((6, 5), (2, 2), (4, 4)), 1)
    with pytest.raises(ShapeError, match="positive"):
        row.solver.solve(pair(), PAIR_SHAPE, 0)


def pair_zero_target_has_no_error(row: PairRow) -> None:
    solution = row.solver.solve(LowRank(np.zeros((30, 2)), np.zeros((2, 28))), PAIR_SHAPE, 2)
    assert (solution.relative_error, solution.norm) == (0.0, 0.0)
    assert np.all(formed_product(solution) == 0.0)


PAIR_PROPERTIES: dict[str, Callable[[PairRow], None]] = {
    check.__name__: check
    for check in (
        pair_returns_what_its_record_says,
        pair_callbacks_come_in_order_and_marked,
        pair_is_deterministic_and_clips_its_ranks,
        pair_refuses_foreign_shapes_and_ranks,
        pair_zero_target_has_no_error,
    )
}
