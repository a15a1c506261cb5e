"""One search for many budgets: measured errors, kept bounds, nothing solved twice."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from lsrdecomp.errors import BudgetError, LsrError
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.files import Journal, open_checkpoint, write_lora
from lsrdecomp.lora.files.progress import ProgressUpdate
from lsrdecomp.lora.search import search as search_module
from lsrdecomp.lora.search import search_steps, solve
from lsrdecomp.lora.search.candidates import LsrCandidate
from lsrdecomp.lora.search.effort import ResourceLimits
from lsrdecomp.lora.search.layers import Layer, open_layers
from lsrdecomp.lora.search.plan import Budget, CompressionPlan, Resources, Search
from lsrdecomp.lora.search.search import FittedLayers, fit_budget, search_layers
from lsrdecomp.lora.search.search_steps import exchange_shapes
from lsrdecomp.lora.search.search_table import Allocation, Losses, SearchTable
from lsrdecomp.lora.search.shapes import coarse_grid, fine_grid, neighbours, shape_grid
from lsrdecomp.solvers.pair.descent import descend
from lsrdecomp.solvers.pair.problem import PairProblem
from lsrdecomp.solvers.pair.stacking import WeightedTargets
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weighted import leading_norms
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights

M, N, RANK, COUNT = 24, 36, 4, 3
LONG = Search(orders=(2,), rounds=0, sweeps=20)
QUICK = Search(orders=(2,), rounds=0, sweeps=3)


def weight(rng: np.random.Generator, size: int) -> LowRankPlusIdentity:
    """Falling eigenvalues with a flat tail, as layers have."""
    basis = np.linalg.qr(rng.standard_normal((size, size)))[0]
    return LowRankPlusIdentity(basis, 0.6 ** np.arange(size) + 1e-4, 0.0)


@pytest.fixture
def layers(rng: np.random.Generator) -> list[Layer]:
    return [
        Layer.of(
            f"l.{i}",
            LowRank(rng.standard_normal((M, RANK)), rng.standard_normal((RANK, N))),
            NormWeights(weight(rng, M), weight(rng, N)),
        )
        for i in range(COUNT)
    ]


def error(layers: Sequence[Layer], fitted: FittedLayers) -> float:
    """From the factors themselves, in the whole norm."""
    lost = [
        layer.squared_norm if (form := one.product) is None else layer.squared_error(form)
        for layer, one in zip(layers, fitted.chosen, strict=True)
    ]
    return math.sqrt(sum(lost) / sum(layer.squared_norm for layer in layers))


def smaller(layers: list[Layer], ratio: float) -> Budget:
    return CompressionPlan(ratio=ratio).budget(layers)


def test_one_search_serves_many_budgets_and_beats_svd_at_each(layers: list[Layer]) -> None:
    budgets = [smaller(layers, ratio) for ratio in (20.0, 8.0)]
    searched = search_layers(layers, budgets, search=QUICK)
    errors = []
    for budget in budgets:
        fitted = fit_budget(searched, budget)
        assert sum(one.candidate.parameters for one in fitted.chosen) <= budget.parameters
        measured = error(layers, fitted)
        recorded = math.sqrt(sum(one.candidate.squared_error for one in fitted.chosen))
        assert recorded == pytest.approx(
            measured * math.sqrt(sum(x.squared_norm for x in layers)), rel=1e-9
        )
        assert fitted.low_rank_error is not None
        assert measured < 0.95 * fitted.low_rank_error
        errors.append(measured)
    assert errors == sorted(errors, reverse=True)


def test_no_product_is_solved_that_is_larger_than_the_whole_budget(layers: list[Layer]) -> None:
    budget = smaller(layers, 12.0)
    searched = search_layers(layers, [budget], search=QUICK)
    for i in range(COUNT):
        sizes = [product.parameters for product in searched.products(i)]
        assert sizes
        assert max(sizes) <= budget.max_parameters


def test_the_scale_of_all_layers_changes_no_choice(layers: list[Layer]) -> None:
    """What stops a search is relative, so a large adapter is solved no better than a small one."""
    sizes, losses = [], []
    for scale in (1.0, 2.0**-20, 2.0**20):
        scaled = [
            Layer.of(layer.name, LowRank(scale * layer.pair.left, layer.pair.right), layer.norms)
            for layer in layers
        ]
        budget = smaller(scaled, 12.0)
        fitted = fit_budget(search_layers(scaled, [budget], search=LONG), budget)
        sizes.append([one.candidate.parameters for one in fitted.chosen])
        losses.append([one.candidate.squared_error / scale**2 for one in fitted.chosen])
    assert sizes[1:] == sizes[:1] * 2
    np.testing.assert_allclose(losses[1:], losses[:1] * 2, rtol=1e-6)


def test_prices_say_what_any_size_would_lose_and_make_nothing(
    layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = search_layers(layers, [smaller(layers, 12.0)], search=QUICK)
    budgets = [smaller(layers, ratio) for ratio in (12.0, 9.0)]
    drawn = [
        error(layers, FittedLayers(searched.materialized(searched.allocated(budget)), None))
        for budget in budgets
    ]
    monkeypatch.setattr(searched, "materialized", lambda *_: pytest.fail("made"))
    monkeypatch.setattr(solve, "solve", lambda task: pytest.fail("solved"))
    for budget, measured in zip(budgets, drawn, strict=True):
        assert searched.expected_error(budget) == pytest.approx(measured**2, rel=0.05)
    with pytest.raises(BudgetError, match="nothing of the adapter fits"):
        searched.expected_error(Budget(parameters=1.0))


def test_no_layer_has_a_larger_rank_than_allowed(layers: list[Layer]) -> None:
    searched = search_layers(layers, [smaller(layers, 3.0)], search=QUICK)
    free, bound = (
        fit_budget(searched, replace(smaller(layers, 3.0), allowed=allowed))
        for allowed in (None, lambda one: one.rank <= 1)
    )
    assert max(one.candidate.rank for one in free.chosen) > 1
    assert max(one.candidate.rank for one in bound.chosen) == 1


def test_a_killed_search_goes_on_where_it_was(
    layers: list[Layer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = solve.solve, []

    def counted(task: solve.SolveTask) -> list[solve.SolvedShape]:
        seen.append(solve.task_key(task))
        return real(task)

    def killed(task: solve.SolveTask) -> list[solve.SolvedShape]:
        if len(seen) == 2:
            raise KeyboardInterrupt
        return counted(task)

    budget = smaller(layers, 12.0)
    monkeypatch.setattr(solve, "solve", killed)
    with pytest.raises(KeyboardInterrupt), Journal.beside(tmp_path / "out") as journal:
        fit_budget(
            search_layers(layers, [budget], search=QUICK, resources=Resources(journal=journal)),
            budget,
        )
    monkeypatch.setattr(solve, "solve", counted)
    with Journal.beside(tmp_path / "out") as journal:
        assert all(journal.get(key) for key in seen[:2])
        resumed = fit_budget(
            search_layers(layers, [budget], search=QUICK, resources=Resources(journal=journal)),
            budget,
        )
    assert len(seen) == len(set(seen))
    calm = fit_budget(search_layers(layers, [budget], search=QUICK), budget)
    assert error(layers, resumed) == pytest.approx(error(layers, calm), rel=1e-6)
    assert list(tmp_path.iterdir()) == []


def test_steps_count_up_to_their_totals(layers: list[Layer]) -> None:
    steps: list[ProgressUpdate] = []
    budget = smaller(layers, 12.0)
    fit_budget(
        search_layers(layers, [budget], search=QUICK, resources=Resources(on_step=steps.append)),
        budget,
    )
    stages = dict.fromkeys(step.stage for step in steps)
    assert next(iter(stages)) == "solving shapes"
    for stage in stages:
        last = [step for step in steps if step.stage == stage][-1]
        assert last.done == last.total


def test_fewer_coordinates_give_the_same_errors_to_a_thousandth(layers: list[Layer]) -> None:
    for layer in layers:
        part = leading_norms(layer.norms)
        assert part.input.values.size < N
        for whole, few in ((layer.norms.output, part.output), (layer.norms.input, part.input)):
            assert few.trace == pytest.approx(whole.trace, rel=1e-12)
    batches = [
        WeightedTargets.of([x.pair for x in layers], norms)
        for norms in (None, [x.leading for x in layers])
    ]
    assert batches[0].norms.is_frobenius
    problem = PairProblem.of(batches[1], ProductShape((4, 6), (1, 1), (6, 6)), 8)
    state = descend(problem, problem.state(problem.starts((2, 2), 1)[0]), 4, 1e-4)
    answer = solve.SolvedShape(problem.shape, (2, 2), problem.errors(state), problem.factors(state))
    for place, layer in enumerate(layers):
        product = solve.product_of(answer.factors_of(place))
        assert answer.ranks_of(place) == product.separation_ranks
        assert answer.errors[place] ** 2 == pytest.approx(layer.squared_error(product), rel=0.03)


def test_refining_goes_on_with_the_layers_that_still_gain(
    layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    refined: list[tuple[int, tuple[int, ...]]] = []

    def counted(task: solve.SolveTask) -> list[solve.SolvedShape]:
        if task.starts is not None:
            refined.append((task.sweeps.limit, task.indices))
        return solved(task)

    solved = solve.solve
    monkeypatch.setattr(solve, "solve", counted)
    monkeypatch.setattr(search_module, "MAX_REFINEMENTS", 1)
    monkeypatch.setattr(search_steps, "REFINE_TOLERANCE", 1e-9)
    budget = smaller(layers, 8.0)
    for min_gain, goes_on in ((1e-9, True), (1e9, False)):
        monkeypatch.setattr(search_steps, "MIN_RELATIVE_GAIN", min_gain)
        refined.clear()
        fitted = fit_budget(search_layers(layers, [budget], search=LONG), budget)
        count = sum(isinstance(one.candidate, LsrCandidate) for one in fitted.chosen)
        assert count > 0
        assert any(len(places) > 1 for _, places in refined)
        together = next(places for _, places in refined if len(places) > 1)
        taken = [[sweeps for sweeps, places in refined if i in places] for i in together]
        assert all(sweeps[0] == search_steps.SWEEPS_PER_ROUND for sweeps in taken)
        assert (max(map(len, taken)) > 1) == goes_on
        assert max(map(sum, taken)) == (20 if goes_on else search_steps.SWEEPS_PER_ROUND)


def test_terms_that_vanished_are_not_counted(rng: np.random.Generator) -> None:
    left, right = (
        [rng.standard_normal((2, 3, 4, 1)), rng.standard_normal((2, 3, 5, 1))] for _ in range(2)
    )
    left[1][1, 2] = 0.0
    right = [factor.swapaxes(2, 3) for factor in right]
    answer = solve.SolvedShape(
        ProductShape((4, 5), (1, 1), (4, 5)), (3, 3), np.zeros(2), (left, right)
    )
    assert [answer.ranks_of(place) for place in range(2)] == [(3, 3), (2, 3)]
    assert solve.product_of(answer.factors_of(1)).separation_ranks == (2, 3)


def test_sweeps_end_where_they_lower_the_loss_by_nothing(layers: list[Layer]) -> None:
    targets = WeightedTargets.of([x.pair for x in layers], [x.leading for x in layers])
    problem = PairProblem.of(targets, ProductShape((4, 6), (1, 1), (6, 6)), 8)
    begun = problem.state(problem.starts((2, 2), 1)[0])
    short, long = (descend(problem, begun, sweeps, 0.0) for sweeps in (2, 12))
    assert np.all(long.error < short.error)
    assert np.array_equal(
        descend(problem, begun, 12, 0.0, min_square_gain=np.inf).error, short.error
    )


def test_statistics_are_read_once_for_a_search_and_once_for_each_measurement(
    rng: np.random.Generator, tmp_path: Path
) -> None:
    m, n, reads = 48, 64, dict.fromkeys(("a", "b", "c"), 0)
    pairs = [
        (name, rng.standard_normal((m, RANK)), rng.standard_normal((RANK, n))) for name in reads
    ]
    write_lora(tmp_path / "lora", layers=pairs, config={"base_model_name_or_path": "base"})
    norms = {name: NormWeights(weight(rng, m), weight(rng, n)) for name in reads}

    class Counting(Mapping[str, NormWeights]):
        def __getitem__(self, name: str) -> NormWeights:
            reads[name] += 1
            return norms[name]

        def __contains__(self, name: object) -> bool:
            return name in norms

        def __iter__(self) -> Iterator[str]:
            return iter(norms)

        def __len__(self) -> int:
            return len(norms)

    one_at_a_time = ResourceLimits(norm_entries=1)
    opened = open_layers(open_checkpoint(tmp_path / "lora"), Counting(), one_at_a_time)
    budgets = [smaller(opened, ratio) for ratio in (20.0, 8.0)]
    searched = search_layers(opened, budgets, search=QUICK)
    assert set(reads.values()) == {1}
    for count, budget in enumerate(budgets, 1):
        fit_budget(searched, budget)
        assert max(reads.values()) <= 1 + 2 * count


def test_more_terms_are_never_farther(layers: list[Layer]) -> None:
    targets = WeightedTargets.of([x.pair for x in layers], [x.leading for x in layers])
    problem = PairProblem.of(targets, ProductShape((4, 6), (2, 1), (6, 6)), 8)
    state = descend(problem, problem.state(problem.starts((1, 1), 1)[0]), 3, 1e-4)
    for ranks in ((2, 1), (2, 2), (4, 4)):
        more = problem.grown(state, ranks)
        assert np.all(problem.errors(more) <= problem.errors(state) * (1 + 1e-9))
        state = descend(problem, more, 2, 1e-4)
        assert np.all(problem.errors(state) <= problem.errors(more) * (1 + 1e-9))


@pytest.mark.parametrize("size", [(576, 192), (11008, 4096), (7, 1024), (2, 3)])
def test_the_grid_tiles_any_matrix_within_its_limit(size: tuple[int, int]) -> None:
    chains = shape_grid(size, 8, (2, 3), 8, 900)
    assert len({chain.shape for chain in chains}) == len(chains)
    for chain in chains:
        assert chain.shape.matrix_shape == size
        assert all(chain.shape.parameters(*ranks) <= 900 for ranks in chain.terms)


def test_the_grid_is_coarse_and_fine() -> None:
    whole = shape_grid((576, 576), 8, (2, 3), 8, 2000)
    first, upper = coarse_grid((576, 576), (2, 3), 2000), fine_grid((576, 576), 8, (2, 3), 8, 2000)
    assert [*first, *upper] == whole
    assert all(max(chain.shape.inner) == 1 for chain in first)
    assert all(max(chain.shape.inner) > 1 for chain in upper)


def test_the_coarse_grid_favours_no_side() -> None:
    for chain in coarse_grid((576, 576), (2, 3), 4000):
        assert set(chain.terms) == {(into, out) for out, into in chain.terms}
        assert len(chain.terms) > 3


def test_the_fine_grid_is_solved_at_the_sizes_that_a_budget_chose(layers: list[Layer]) -> None:
    searched = search_layers(layers, [smaller(layers, 6.0)], search=QUICK)
    entries = [
        entry.exact
        for row in searched.rows
        for entry in row
        if isinstance(entry.exact, LsrCandidate)
    ]
    assert {max(one.shape.inner) for one in entries} == {1}
    fitted = fit_budget(searched, smaller(layers, 6.0))
    entries = [
        entry.exact
        for row in searched.rows
        for entry in row
        if isinstance(entry.exact, LsrCandidate)
    ]
    assert max(max(one.shape.inner) for one in entries) > 1
    largest = max(one.parameters for one in entries if max(one.shape.inner) > 1)
    assert largest <= search_steps.SIZE_STEP ** (2 * search_module.MAX_GRID_PASSES) * max(
        one.candidate.parameters for one in fitted.chosen
    )


@pytest.mark.parametrize("kronecker", [False, True])
def test_the_fine_grid_is_left_out_where_low_rank_wins(
    rng: np.random.Generator, kronecker: bool
) -> None:
    def side(m: int) -> np.ndarray:
        return np.kron(rng.standard_normal((16, 4)), rng.standard_normal((m // 16, 2)))

    layers = [Layer.of(f"l.{i}", LowRank(side(384), side(384).T)) for i in range(2)]
    if not kronecker:
        layers = open_layers(open_checkpoint(files("lsrdecomp.cli") / "demo_adapter"), None)[:2]
    stages: list[str] = []
    budget = smaller(layers, 4.0)
    resources = Resources(on_step=lambda step: stages.extend([step.stage] * step.done))
    fitted = fit_budget(search_layers(layers, [budget], search=QUICK, resources=resources), budget)
    assert ("solving more shapes" in stages) == kronecker
    assert fitted.low_rank_error is not None
    assert error(layers, fitted) < (0.9 if kronecker else 1.0 + 1e-9) * fitted.low_rank_error


def test_neighbours_are_one_step_away() -> None:
    shape = ProductShape((24, 24), (1, 2), (8, 6))
    found = [other for other, _ in neighbours((shape, (2, 2)), 4)]
    assert shape not in found
    assert ProductShape((24, 24), (1, 3), (8, 6)) in found
    assert ProductShape((12, 48), (1, 2), (8, 6)) in found
    assert ProductShape((24, 24), (1, 2), (6, 8)) in found
    assert all(other.matrix_shape == (576, 48) and other.inner_rank <= 4 for other in found)


def test_what_was_chosen_for_some_is_solved_for_the_others_of_their_size(
    layers: list[Layer],
) -> None:
    searched = search_layers(layers, [smaller(layers, 4.0)], search=LONG)
    table, shape = searched, ProductShape((3, 8), (1, 1), (4, 9))  # not on the grid
    table.solve(table.runner.tasks([0], [solve.ShapeRequest(shape, ((1, 1), (2, 2)))]), "solving")

    def asked() -> list[set[tuple[int, int]]]:
        entries = [[entry.exact for entry in row] for row in table.rows]
        return [
            {one.ranks for one in row if isinstance(one, LsrCandidate) and one.shape == shape}
            for row in entries
        ]

    assert asked() == [{(1, 1), (2, 2)}, set(), set()]
    found = [
        one
        for one in table.rows[0]
        if isinstance(one.exact, LsrCandidate) and one.exact.configuration == (shape, (2, 2))
    ]
    even = next(
        one
        for one in table.rows[1]
        if isinstance(one.exact, LsrCandidate) and one.exact.ranks == (2, 2)
    )
    left_out = table.rows[2][0]
    steps: list[ProgressUpdate] = []
    table.runner.resources = Resources(on_step=steps.append)
    exchange_shapes(table, [found[0], even, left_out])
    assert (2, 2) in asked()[1]
    assert asked()[2] == set()  # of no parameters, so nothing is near its size
    assert steps[-1].total > 0
    exchange_shapes(table, [found[0], even, left_out])
    assert steps[-1].total == 0


class Ended:
    """What takes the process down that receives it, as a want of memory does."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (1,)

    def widened(self) -> Ended:
        return self


def test_a_worker_that_is_killed_is_one_clear_error(layers: list[Layer]) -> None:
    requests = [solve.ShapeRequest(ProductShape((4, 6), (1, 1), (6, 6)), ((1, 1),))]
    of_layers = [*layers, Layer("ended", layers[0].shape, 1, Ended)]  # type: ignore[arg-type]

    def solved(*indices: Sequence[int]) -> list[solve.SolvedShape]:
        runner = solve.TaskRunner(of_layers, Resources(workers=2))
        tasks = [task for each in indices for task in runner.tasks(each, requests)]
        return [answer for _, answers in runner.results(tasks) for answer in answers]

    answers = solved(range(COUNT), range(COUNT))
    assert [answer.errors.shape for answer in answers] == [(COUNT,), (COUNT,)]
    with pytest.raises(LsrError, match=r"a worker was killed.*use fewer workers"):
        solved(range(COUNT), [COUNT], range(COUNT))
    assert solved(range(COUNT))[0].errors.tolist() == answers[0].errors.tolist()


def test_workers_of_a_search_leave_those_of_joblib_alone(layers: list[Layer]) -> None:
    joblib = pytest.importorskip("joblib", reason="several workers need joblib")
    requests = [solve.ShapeRequest(ProductShape((4, 6), (1, 1), (6, 6)), ((1, 1),))]
    runner = solve.TaskRunner(layers, Resources(workers=2))
    assert len(list(runner.results(runner.tasks([0], requests)))) == 1
    assert joblib.Parallel(n_jobs=2)(joblib.delayed(math.sqrt)(x) for x in (1.0, 4.0)) == [1.0, 2.0]


def test_in_many_widths_shapes_are_found_for_few_widths_too_and_refined_once(
    layers: list[Layer], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = CompressionPlan(bytes=400, storage="auto")
    budget = replace(plan.budget(layers), bytes=200.0)
    table = search_layers(layers, [budget], search=QUICK, storages=plan.storages)
    asked = []
    allocated = SearchTable.allocated

    def spy(table: SearchTable, budget: Budget, losses: Losses = "solved") -> Allocation:
        asked.append((budget.storages is None, losses))
        return allocated(table, budget, losses)

    monkeypatch.setattr(SearchTable, "allocated", spy)
    fitted = fit_budget(table, budget)
    few_widths = {losses for is_whole, losses in asked if not is_whole}
    all_widths = {losses for is_whole, losses in asked if is_whole}
    assert few_widths == {"solved"}
    assert all_widths == {"solved", "expected", "measured"}
    assert sum(chosen.candidate.bytes for chosen in fitted.chosen) <= 200
