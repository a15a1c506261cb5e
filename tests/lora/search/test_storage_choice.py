"""Without a base: truncated SVD, in the storage and at the ranks that a goal asks for."""

from __future__ import annotations

import json
import math
from importlib.resources import files

import numpy as np
import pytest
from checkpoint_files import lora_pair, write_lora_directory

from lsrdecomp import compress, open_checkpoint
from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.quantized import SpectralCode
from lsrdecomp.lora.compress import truncate
from lsrdecomp.lora.search import CompressionPlan, search_adapter
from lsrdecomp.lora.search.caches import SpillCache
from lsrdecomp.lora.search.layers import Layer, layer_product, open_layers
from lsrdecomp.lora.search.plain_svd import best_plain_svd
from lsrdecomp.lora.search.plan import Budget
from lsrdecomp.lora.search.storage_choice import PlainTable, choose_storage
from lsrdecomp.targets.target import LowRank

DEMO = files("lsrdecomp.cli") / "demo_adapter"
STORAGES = ("float32", "float16", "int8", "int4", "auto")
ALL = ("float16", "int8", "int6", "int5", "int4", "int3", "int2")


@pytest.fixture(scope="module")
def demo():
    return open_checkpoint(DEMO)


def falling_layer(seed: int, shape: tuple[int, int] = (96, 160), rank: int = 8) -> Layer:
    rng = np.random.default_rng(seed)
    columns = rng.standard_normal((shape[0], rank)) * 0.7 ** np.arange(rank)
    return Layer.of(str(seed), LowRank(columns, rng.uniform(-1.0, 1.0, (rank, shape[1]))))


def spectra_of(written: object, source: object) -> dict[str, tuple[np.ndarray, float]]:
    """Singular values of each layer of the source, and the relative error as it was written."""
    found = {}
    read = {layer.name: layer_product(layer).to_matrix() for layer in written.layers}
    for layer in source.layers:
        matrix = layer_product(layer).to_matrix()
        other = read.get(layer.name, np.zeros_like(matrix))
        error = np.linalg.norm(matrix - other) / np.linalg.norm(matrix)
        found[layer.name] = np.linalg.svd(matrix, compute_uv=False), float(error)
    return found


# -- bytes -----------------------------------------------------------------------------------------


def test_bytes_choose_the_storage_unless_one_is_given(demo, tmp_path):
    chosen = compress(demo, bytes=12_000)
    assert chosen.plan.storage == "auto"
    told = compress(demo, bytes=12_000, storage="float16")
    assert told.plan.storage == "float16"
    assert chosen.error < 0.5 * told.error
    written = open_checkpoint(chosen.save(tmp_path / "small"))
    lost = [error for _, error in spectra_of(written, demo).values()]
    norms = [layer.norm for layer in chosen.layers]
    total = math.hypot(*(a * b for a, b in zip(lost, norms, strict=True))) / math.hypot(*norms)
    assert total == pytest.approx(chosen.error, rel=1e-4)


def test_the_error_never_rises_with_bytes_and_is_never_above_the_best_plain_svd(demo):
    layers = open_layers(demo)
    errors = []
    for size in (4_500, 6_000, 8_000, 14_000, 25_000, 60_000, 400_000):
        result = compress(demo, bytes=size)
        rival, _ = best_plain_svd(layers, result.totals.bytes)
        assert result.error <= rival
        errors.append(result.error)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3


@pytest.mark.parametrize("bits", [8, 4])
def test_offers_have_the_bytes_and_about_the_error_of_what_is_made(bits):
    layer = falling_layer(0)
    names = [f"int{bits}", *(name for name in ALL[1:] if int(name[3:]) < bits)]
    table = PlainTable([layer], names, SpillCache())
    offers = table.offers(0, Budget(bytes=1e6))
    for k in range(1, len(offers.ranks)):
        made = table.made(0, offers.make(k))
        assert made.stored().bytes == offers.bytes[k] == made.candidate.bytes
        assert made.candidate.rank == offers.ranks[k] <= 8
        error = layer.squared_error(made.product)
        assert made.candidate.squared_error == pytest.approx(error, rel=1e-9)
        assert error == pytest.approx(offers.losses[k], rel=0.5)


@pytest.mark.parametrize("storage", ["float32", "float16", "bfloat16"])
def test_the_error_of_floats_is_that_of_what_is_stored(storage):
    layer = falling_layer(4)
    table = PlainTable([layer], [storage], SpillCache())
    offers = table.offers(0, Budget(bytes=1e6))
    for rank in range(1, 9):
        made = table.made(0, offers.make(rank))
        error = layer.squared_error(made.product)
        assert made.candidate.squared_error == pytest.approx(error, rel=2e-9, abs=1e-22)


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1.0, 1e30])
def test_the_error_of_numbers_of_any_size_is_that_of_what_is_stored(size):
    """Squares of the least and the largest do not fit into single precision."""
    pair = falling_layer(4).pair
    layer = Layer.of("q", LowRank(size * pair.left, size * pair.right))
    table = PlainTable([layer], ["bfloat16"], SpillCache())
    made = table.made(0, table.offers(0, Budget(bytes=1e6)).make(5))
    error = layer.squared_error(made.product)
    assert made.candidate.squared_error == pytest.approx(error, rel=2e-9, abs=0.0)


def test_uniform_rows_are_coded_as_they_are_in_eight_bits():
    rng = np.random.default_rng(0)
    sides = rng.uniform(-1.0, 1.0, (512, 8)), rng.uniform(-1.0, 1.0, (8, 512))
    table = PlainTable([Layer.of("q", LowRank(*sides))], ALL, SpillCache())
    (made,) = choose_storage(table, Budget(bytes=8.3 * 1024)).chosen
    assert made.candidate.unrotated
    assert isinstance(made.stored(), SpectralCode)


def test_bytes_that_nothing_can_use_are_said_with_a_way_to_use_them(demo):
    assert compress(demo, bytes=10_000, storage="int8").unfilled is None
    unfilled = compress(demo, bytes=300_000, storage="int4").unfilled
    assert "in int4 nothing larger is nearer; with storage int8" in unfilled


def test_what_fits_as_it_is_stays_as_it_is(demo):
    result = compress(demo, bytes=10_000_000, storage="float32")
    assert result.error == pytest.approx(0.0, abs=1e-7)
    assert {layer.structure for layer in result.layers} == {"keep"}


@pytest.mark.parametrize("size", [1e-12, 1e9])
def test_numbers_that_float16_does_not_hold_are_coded(size):
    layer = falling_layer(3)
    pair = LowRank(size * layer.pair.left, layer.pair.right)
    table = PlainTable([Layer.of("q", pair)], ALL, SpillCache())
    (made,) = choose_storage(table, Budget(bytes=1e6)).chosen
    assert made.candidate.bits
    assert made.candidate.squared_error < 1e-4 * pair.norm**2


def test_a_pair_of_uneven_sides_is_stored_evenly():
    layer = falling_layer(3)
    pair = LowRank(1e8 * layer.pair.left, 1e-8 * layer.pair.right)
    table = PlainTable([Layer.of("q", pair)], ["float16"], SpillCache())
    (made,) = choose_storage(table, Budget(bytes=1e6)).chosen
    assert made.candidate.rank == 8
    assert made.candidate.squared_error < 1e-6 * pair.norm**2


def test_a_plan_for_kronecker_products_needs_a_search(demo):
    searched = search_adapter(demo, [CompressionPlan(ratio=4)])
    with pytest.raises(BudgetError, match="asks for structure lsr: give it to the search"):
        searched.compress(CompressionPlan(ratio=4, structure="lsr"))


# -- every layer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("goal", [{"rtol": 0.3}, {"energy": 0.91}])
def test_every_layer_is_within_its_error_as_written(goal, storage, demo, tmp_path):
    rtol = goal.get("rtol", 0.3)
    result = compress(demo, storage=storage, **goal)
    assert result.met
    written = open_checkpoint(result.save(tmp_path / "small"))
    errors = [error for _, error in spectra_of(written, demo).values()]
    assert all(error <= rtol * (1.0 + 1e-6) for error in errors)
    assert max(errors) > 0.5 * rtol


def test_an_own_format_cut_is_within_its_error_as_written(demo, tmp_path):
    """Rounding to eight bits takes the first layer above an error that its rank 4 just meets."""
    sigma = open_layers(demo)[0].sigma
    rtol = 1.0005 * float(np.linalg.norm(sigma[4:]) / np.linalg.norm(sigma))
    assert truncate(demo, rtol=rtol).ranks[0] == 4
    cut = truncate(demo, rtol=rtol, storage="float8_e4m3fn")
    assert cut.ranks[0] == 5
    written = open_checkpoint(cut.save(tmp_path / "small"))
    errors = [error for _, error in spectra_of(written, demo).values()]
    assert all(error <= rtol * (1.0 + 1e-6) for error in errors)


def test_energy_and_rtol_are_one_goal(demo):
    by_energy = compress(demo, energy=0.91)
    assert by_energy.error == compress(demo, rtol=0.3).error
    cut = truncate(demo, energy=0.91)
    assert cut.ranks == truncate(demo, rtol=0.3).ranks
    for sigma, rank in zip(cut.sigma, cut.ranks, strict=True):
        shares = np.cumsum(sigma**2) / np.sum(sigma**2)
        assert shares[rank - 1] >= 0.91 > (shares[rank - 2] if rank > 1 else 0.0)


def test_a_layer_that_misses_its_error_in_few_bits_is_said(demo):
    result = compress(demo, rtol=1e-3, storage="int4")
    assert not result.met
    assert result.totals.missed == len(result.layers)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_rank_alone_is_a_goal(storage, demo):
    result = compress(demo, max_rank=2, storage=storage)
    assert [made.candidate.rank for made in result.chosen] == [2] * len(result.layers)
    best = [np.sum(layer.gauge[1][2:] ** 2) for layer in open_layers(demo)]
    lost = [made.candidate.squared_error for made in result.chosen]
    bits = {"float32": 0.0, "float16": 1e-6, "auto": 1e-6, "int8": 1e-3, "int4": 0.2}[storage]
    norms = [layer.squared_norm for layer in open_layers(demo)]
    for one, least, norm in zip(lost, best, norms, strict=True):
        assert one <= least + max(bits, 1e-9) * norm
    assert repr(result).startswith("Compression of demo_adapter, max_rank = 2\n")


def test_a_rank_alone_cuts_a_lora_in_its_own_format(demo, tmp_path):
    cut = truncate(demo, max_rank=3)
    assert cut.ranks == (3,) * len(demo.layers)
    small = open_checkpoint(cut.save(tmp_path / "small"))
    assert {layer.rank for layer in small.layers} == {3}
    assert truncate(demo, max_rank=99).relative_error < 1e-7
    capped = truncate(demo, ratio=2, max_rank=3)
    assert max(capped.ranks) == 3
    assert capped.parameters <= demo.adapter_parameters / 2


def test_what_a_capped_layer_leaves_goes_to_others(demo):
    """One budget: ranks above the cap do not take part in it."""
    cut = truncate(demo, ratio=3, max_rank=3)
    assert cut.parameters > 0.95 * demo.adapter_parameters / 3
    assert max(cut.ranks) == 3


# -- no layer is left out --------------------------------------------------------------------------


@pytest.mark.parametrize("goal", [{"ratio": 7}, {"bytes": 6000}, {"rtol": 0.99}])
def test_a_minimum_rank_leaves_no_layer_out(goal, demo):
    assert compress(demo, **goal).totals.dropped > 0 or "rtol" in goal
    result = compress(demo, **goal, min_rank=1)
    assert result.totals.dropped == 0
    if "ratio" in goal:
        assert result.totals.parameters <= demo.adapter_parameters / 7
    cut = truncate(demo, ratio=8, min_rank=1)
    assert min(cut.ranks) == 1
    assert cut.parameters <= demo.adapter_parameters / 8


def test_a_minimum_rank_that_costs_too_much_is_refused_with_its_price(demo):
    for call in (compress, truncate):
        with pytest.raises(BudgetError, match=r"a rank of 2 in every layer takes 18,432 param"):
            call(demo, ratio=8, min_rank=2)
    with pytest.raises(BudgetError, match="min_rank 3 is above max_rank 2"):
        compress(demo, max_rank=2, min_rank=3)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_layer_of_a_lower_rank_has_the_rank_that_it_has(storage):
    layer = falling_layer(2, rank=1)
    sides = np.hstack([layer.pair.left, 0.0 * layer.pair.left]), np.vstack([layer.pair.right] * 2)
    storages = ALL if storage == "auto" else (storage,)
    table = PlainTable([Layer.of("q", LowRank(*sides))], storages, SpillCache())
    (made,) = choose_storage(table, Budget(bytes=1e6, min_rank=2)).chosen
    assert made.candidate.rank in (1, 2)
    assert made.candidate.squared_error < 1e-2 * layer.squared_norm


# -- a LoRA of zeros -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zeros(tmp_path_factory):
    tensors = {}
    for i in range(3):
        for name, value in lora_pair(f"l.{i}.q", 24, 16, r=4, seed=i).items():
            tensors[name] = value * 0.0 if "lora_B" in name else value
    return open_checkpoint(write_lora_directory(tmp_path_factory.mktemp("z") / "in", tensors, r=4))


@pytest.mark.parametrize("goal", [{"ratio": 4}, {"bytes": 3000}, {"rtol": 0.1}, {"max_rank": 2}])
def test_a_lora_of_zeros_is_written_as_one(goal, zeros, tmp_path):
    for storage in STORAGES:
        result = compress(zeros, storage=storage, **goal)
        written = open_checkpoint(result.save(tmp_path / storage))
        assert len(written.layers) == 3
        for layer in written.layers:
            assert not layer_product(layer).to_matrix().any()
        json.dumps(result.to_json(), allow_nan=False)
        assert "Every layer is zero, and is written as zeros of rank 1." in result.sentences()
    cut = truncate(zeros, **goal)
    assert cut.ranks == (1, 1, 1)
    back = open_checkpoint(cut.save(tmp_path / "own"))
    assert [layer.rank for layer in back.layers] == [1, 1, 1]


def test_a_layer_of_zeros_beside_others_is_left_out_or_kept_as_asked():
    zero = Layer.of("zero", LowRank(np.zeros((32, 4)), np.ones((4, 32))))
    table = PlainTable([zero, falling_layer(1)], ["int8"], SpillCache())
    structures = []
    for min_rank in (0, 1):
        chosen = choose_storage(table, Budget(bytes=3000, min_rank=min_rank)).chosen
        structures.append([made.candidate.structure for made in chosen])
    assert structures == [["drop", "low rank"], ["low rank", "low rank"]]
