"""What a layer can become, and all under one budget: never worse than truncated SVD."""

from __future__ import annotations

import math

import numpy as np
import pytest
from oracles import weight_of, weighted_truncation

from benchmarks.lab.structures.fit import Fit, fit_layers, lsr_candidates
from lsrdecomp.errors import BudgetError
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.search import candidates as candidates_module
from lsrdecomp.lora.search import search_table
from lsrdecomp.lora.search import shapes as shapes_module
from lsrdecomp.lora.search.caches import SpillCache
from lsrdecomp.lora.search.candidates import (
    LsrCandidate,
    drop,
    equal_bits_candidates,
    keep,
    low_rank_candidates,
    materialize,
    predicted_as,
    priced_as,
    water_filled_candidates,
)
from lsrdecomp.lora.search.layers import Layer
from lsrdecomp.lora.search.plan import Budget, CompressionPlan, Search
from lsrdecomp.lora.search.quantize import INTEGER_BITS
from lsrdecomp.lora.search.search import search_layers
from lsrdecomp.lora.search.search_table import SearchTable
from lsrdecomp.lora.search.shapes import fine_grid, shape_grid
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weighted import weighted_residual_norm
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights

SEARCH = Search(orders=(2,), rounds=1, sweeps=8)
M, N, RANK = 24, 36, 4


def weights(rng: np.random.Generator, m: int = M, n: int = N) -> NormWeights:
    half = rng.standard_normal((m, m)) @ np.diag(0.8 ** np.arange(m))
    basis = np.linalg.qr(rng.standard_normal((n, 5)))[0]
    return NormWeights(
        weight_of(half @ half.T / m),
        LowRankPlusIdentity(basis, np.array([9.0, 5.0, 3.0, 2.0, 1.0]), 0.05),
    )


def layers(rng: np.random.Generator, weighted: bool, count: int = 3) -> list[Layer]:
    found = []
    for i in range(count):
        m, n = (M, N) if i < 2 else (N, M)
        size = 2.0 ** -(i % 3)
        pair = LowRank(
            size * rng.standard_normal((m, RANK)) * 0.7 ** np.arange(RANK),
            rng.standard_normal((RANK, n)),
        )
        found.append(Layer.of(f"layer.{i}", pair, weights(rng, m, n) if weighted else None))
    return found


@pytest.mark.parametrize("weighted", [False, True])
def test_every_price_is_what_its_factors_cost_and_lose(
    weighted: bool, rng: np.random.Generator
) -> None:
    layer = layers(rng, weighted)[0]
    shape = ProductShape((6, 4), (2, 1), (6, 6))
    found = [
        drop(layer),
        keep(layer),
        *low_rank_candidates(layer),
        *lsr_candidates([layer], [(shape, (2, 3))], JointALS(sweeps=5))[0],
    ]
    assert [c.structure for c in found] == ["drop", "keep", *["low rank"] * RANK, "LSR"]
    for candidate in found:
        form = materialize(layer, candidate, SpillCache()).product
        formed = np.zeros((M, N)) if form is None else np.asarray(form.to_matrix())
        difference = layer.pair.to_matrix() - formed
        g, c = (w.apply(np.eye(w.size)) for w in (layer.norms.output, layer.norms.input))
        expected = np.trace(difference.T @ g @ difference @ c)
        assert candidate.squared_error == pytest.approx(
            expected, rel=1e-9, abs=1e-12 * layer.squared_norm
        )
    assert found[0].parameters == 0
    assert found[1].parameters == RANK * (M + N)
    assert found[2].parameters == M + N
    assert found[-1].parameters == shape.parameters(2, 3)


def test_low_rank_is_a_product_shape_of_one_term(rng: np.random.Generator) -> None:
    layer = layers(rng, True)[0]
    candidate = low_rank_candidates(layer)[1]
    form = materialize(layer, candidate, SpillCache()).product
    assert isinstance(form, SeparatedProduct)
    assert form.product_shape == ProductShape.low_rank((M, N), 2)
    assert form.separation_ranks == (1, 1)
    best = weighted_residual_norm(
        layer.pair, weighted_truncation(layer.pair, layer.norms, 2), layer.norms
    )
    assert candidate.squared_error == pytest.approx(best**2, rel=1e-9)


def test_storage_is_paid_for_in_bytes_and_in_error(rng: np.random.Generator) -> None:
    layer = layers(rng, True)[0]
    shape = ProductShape((6, 4), (2, 1), (6, 6))
    (candidate,) = lsr_candidates([layer], [(shape, (2, 3))], JointALS(sweeps=5))[0]
    sizes = {
        name: priced_as(layer, candidate, name) for name in ("float32", "float16", "int8", "int4")
    }
    assert sizes["float32"].bytes == 4 * candidate.parameters
    assert sizes["float16"].bytes == 2 * candidate.parameters
    assert sizes["int4"].bytes < sizes["int8"].bytes < sizes["float16"].bytes
    for stored in sizes.values():
        made = materialize(layer, stored, SpillCache())
        assert layer.squared_error(made.product) == pytest.approx(
            made.candidate.squared_error, rel=1e-12
        )
        assert made.candidate.bytes == stored.bytes
        if stored.storage not in INTEGER_BITS:
            assert made.candidate.squared_error == stored.squared_error
        assert made.candidate.squared_error <= stored.squared_error
    assert priced_as(layer, drop(layer), "int4").bytes == 0


def test_another_width_is_predicted_from_the_one_beside_it(rng: np.random.Generator) -> None:
    layer = layers(rng, False)[0]
    shape = ProductShape((6, 4), (2, 1), (6, 6))
    (candidate,) = lsr_candidates([layer], [(shape, (2, 3))], JointALS(sweeps=20))[0]
    made = {bits: priced_as(layer, candidate, f"int{bits}") for bits in (2, 3, 4, 5, 6, 8)}
    for bits, further in ((4, 3), (3, 2), (4, 5), (5, 6), (6, 8)):
        predicted = predicted_as(candidate, made[bits], f"int{further}")
        assert predicted.storage == made[further].storage
        assert predicted.bytes == made[further].bytes
        added = made[further].squared_error - candidate.squared_error
        ratio = (predicted.squared_error - candidate.squared_error) / added
        assert 1 / 3 < ratio < 3  # 0.46 to 1.90 of thirty drawn layers


def test_the_sizes_of_low_rank_in_integers_are_as_many_as_asked(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = Layer.of("q", LowRank(rng.standard_normal((24, 12)), rng.standard_normal((12, 36))))
    assert len(water_filled_candidates(layer, n_sizes=5)) == 5
    monkeypatch.setattr(candidates_module, "MAX_CODE_SIZES", 5)
    monkeypatch.setattr(candidates_module, "CONSECUTIVE_RANKS", 3)
    ranks = [candidate.rank for candidate in equal_bits_candidates(layer, 4)]
    assert ranks[:3] == [1, 2, 3]
    assert ranks[-1] == 12
    assert len(ranks) <= 5


def table_with_widths(rng: np.random.Generator) -> tuple[SearchTable, Budget]:
    """A table of candidates in all widths of codes."""
    budget = Budget(bytes=150.0)
    table = search_layers(
        layers(rng, True),
        [budget],
        storages=("float16", "int8", "int6", "int5", "int4", "int3", "int2"),
    )
    return table, budget


def test_codes_are_made_in_other_widths_only_near_the_hull(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for margin in (1.0, 1e9):
        monkeypatch.setattr(search_table, "WIDTH_MARGIN", margin)
        table, budget = table_with_widths(np.random.default_rng(1))
        found[margin] = []
        for i in range(len(table.layers)):
            options = [candidate for _, candidate in table.candidates(i, budget, "solved")]
            found[margin].append([c for c in options if isinstance(c, LsrCandidate)])
    widths = [len({one.storage for one in row}) for row in found[1e9]]
    assert set(widths) == {7}  # float16 and all of int8 to int2
    for few, every in zip(found[1.0], found[1e9], strict=True):
        assert len(few) < len(every)
        # What is there has the error of its codes, not the predicted one.
        measured = {(one.shape, one.ranks, one.storage): one.squared_error for one in every}
        for one in few:
            assert one.squared_error == measured[one.shape, one.ranks, one.storage]


def test_of_a_tall_shape_the_small_factors_have_the_inner_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else it is low rank of the large ones, which costs as much as the matrix."""
    monkeypatch.setattr(shapes_module, "EVEN_INNER", ())
    requests = fine_grid((192, 240), 8, (2,), 8, math.inf)
    shapes = {request.shape for request in requests}
    assert len(shapes) == 3
    for shape in shapes:
        thick = max(range(2), key=shape.inner.__getitem__)
        for sizes in (shape.out, shape.into):
            assert sizes[thick] < sizes[1 - thick]
            assert sizes[thick] in (6, 12)


def test_the_grid_of_shapes_tiles_the_matrix_and_fits_the_limit() -> None:
    chains = shape_grid((M, N), RANK, (2, 3), RANK, 150)
    configurations = [(chain.shape, terms) for chain in chains for terms in chain.terms]
    sizes = [shape.parameters(*ranks) for shape, ranks in configurations]
    assert len(set(configurations)) == len(configurations)
    assert min(sizes) < 30
    assert 120 < max(sizes) <= 150
    assert all(shape.matrix_shape == (M, N) for shape, _ in configurations)
    assert {shape.order for shape, _ in configurations} == {2, 3}
    assert max(shape.inner_rank for shape, _ in configurations) <= RANK
    assert shape_grid((M, N), RANK, (2, 3), RANK, 1) == []


@pytest.mark.parametrize(
    ("ranks", "weighted"), [(0.5, False), (0.5, True), (1.0, False), (1.5, True), (3.0, False)]
)
def test_never_worse_than_the_best_truncated_svd_at_the_same_budget_and_norm(
    weighted: bool, ranks: float, rng: np.random.Generator
) -> None:
    some = layers(rng, weighted)
    budget = int(ranks * (M + N)) * len(some)
    fit = fit_layers(some, Budget(parameters=budget), search=SEARCH, storages=("float64",))
    assert fit.parameters <= budget
    assert fit.relative_error <= _best_truncation(some, budget) * (1 + 1e-12)
    assert fit.low_rank_error == pytest.approx(_best_truncation(some, budget), rel=1e-9)
    # Strictly below the staircase between whole ranks.
    if ranks == 0.5 or (weighted and ranks % 1.0):
        assert fit.relative_error < 0.999 * _best_truncation(some, budget)
    _check_errors(fit)


def _best_truncation(some: list[Layer], budget: int) -> float:
    """Return the smallest total error of all ways to give each layer a rank at equal costs."""
    tails = []
    for layer in some:
        errors = [c.squared_error for c in low_rank_candidates(layer)]
        tails.append([layer.squared_norm, *errors])
    ranks = budget // (M + N)
    best = min(
        tails[0][i] + tails[1][j] + tails[2][k]
        for i in range(RANK + 1)
        for j in range(RANK + 1)
        for k in range(RANK + 1)
        if i + j + k <= ranks
    )
    return float(np.sqrt(best / sum(layer.squared_norm for layer in some)))


def error_budget(some: list[Layer], rtol: float) -> Budget:
    """A relative error over all layers together."""
    return Budget(squared_error=rtol**2 * sum(layer.squared_norm for layer in some))


def _check_errors(fit: Fit) -> None:
    for fitted in fit.layers:
        b, a = fitted.pair()
        error = (
            fitted.layer.squared_error(LowRank(b, a)) if np.any(b) else fitted.layer.squared_norm
        )
        assert error == pytest.approx(
            fitted.candidate.squared_error, rel=1e-9, abs=1e-12 * fitted.layer.squared_norm
        )


def test_an_error_budget_is_kept_on_what_is_stored(rng: np.random.Generator) -> None:
    some = layers(rng, True)
    fit = fit_layers(some, error_budget(some, 0.2), search=SEARCH, storages=("float16",))
    assert fit.relative_error <= 0.2
    assert fit.parameters <= next(
        p for p in range(0, 12 * (M + N), M + N) if _best_truncation(some, p) <= 0.2
    )
    kl = 0.5 * 0.3**2 * sum(layer.squared_norm for layer in some)
    assert (
        fit_layers(some, CompressionPlan(kl=kl).budget(some), search=SEARCH).relative_error <= 0.3
    )


def test_a_byte_budget_chooses_few_bits(rng: np.random.Generator) -> None:
    some = layers(rng, False)
    coarse = fit_layers(some, Budget(bytes=300), search=SEARCH, storages=("float16",))
    fine = fit_layers(some, Budget(bytes=300), search=SEARCH, storages=("float16", "int8", "int4"))
    assert max(coarse.bytes, fine.bytes) <= 300
    assert fine.relative_error < 0.9 * coarse.relative_error
    assert any(fitted.candidate.storage.startswith("int") for fitted in fine.layers)
    _check_errors(fine)


def test_what_is_out_of_reach_is_said(rng: np.random.Generator) -> None:
    some = layers(rng, False)
    with pytest.raises(BudgetError, match="out of reach: the best options lose"):
        fit_layers(some, error_budget(some, 1e-5), search=SEARCH, storages=("float16",))
    assert (
        fit_layers(some, CompressionPlan(ratio=4.0).budget(some), search=SEARCH).parameters
        <= sum(x.parameters for x in some) / 4
    )


def test_a_zero_layer_is_dropped(rng: np.random.Generator) -> None:
    some = [
        *layers(rng, False),
        Layer.of("zero", LowRank(np.zeros((M, 2)), rng.standard_normal((2, N)))),
    ]
    fit = fit_layers(some, Budget(parameters=300), search=SEARCH)
    assert fit.layers[-1].candidate.structure == "drop"
    assert fit.layers[-1].product is None
