"""Which layers are solved in the Frobenius norm, and that nothing is lost by leaving others out."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from lsrdecomp.lora.search.effort import Screening
from lsrdecomp.lora.search.layers import Layer
from lsrdecomp.lora.search.plan import Budget, CompressionPlan, Search
from lsrdecomp.lora.search.screening import LayerSpectrum, estimated_advantage, worth_solving
from lsrdecomp.lora.search.search import fit_budget, search_layers
from lsrdecomp.lora.search.search_table import SearchTable
from lsrdecomp.lora.search.searched import search_adapter
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weights import Identity, LowRankPlusIdentity, NormWeights

NO_FILLING = Screening(min_filling_gain=math.inf)
QUICK = Search(orders=(2,), rounds=0, screening=NO_FILLING)


def noise_layer(name: str, seed: int, rank: int = 4, side: int = 1024) -> Layer:
    rng = np.random.default_rng(seed)
    columns = rng.standard_normal((side, rank))
    return Layer.of(name, LowRank(columns, rng.standard_normal((rank, side))))


def kronecker_layer(name: str, scale: float = 1.0) -> Layer:
    """A 1024 × 1024 layer of rank one, both sides products of two factors, and a little noise."""
    rng = np.random.default_rng(3)
    left = np.kron(rng.standard_normal((32, 1)), rng.standard_normal((32, 1)))
    right = np.kron(rng.standard_normal((1, 32)), rng.standard_normal((1, 32)))
    small = 1e-3 * rng.standard_normal((1024, 3))
    pair = LowRank(
        np.hstack([scale * left, small]), np.vstack([right, rng.standard_normal((3, 1024))])
    )
    return Layer.of(name, pair)


def spectrum(sigma: list[float], advantage: float = 0.5, cost: int = 100) -> LayerSpectrum:
    pair = LowRank(np.eye(cost // 2)[:, : len(sigma)] * sigma, np.eye(cost // 2)[: len(sigma)])
    return replace(LayerSpectrum.of(Layer.of("layer", pair), advantage), cost=cost)


def test_the_advantage_of_a_kronecker_product_is_that_of_its_fewer_parameters():
    advantage = estimated_advantage(kronecker_layer("planted"), (2,))
    assert advantage == pytest.approx((1024 + 1024) / 128, rel=1e-3)


def test_the_advantage_of_three_factors_is_found_too():
    rng = np.random.default_rng(5)
    sides = []
    for _ in range(2):
        factors = [rng.standard_normal(8) for _ in range(3)]
        sides.append(np.kron(np.kron(factors[0], factors[1]), factors[2]))
    layer = Layer.of("cube", LowRank(sides[0][:, None], sides[1][None, :]))
    assert estimated_advantage(layer, (3,)) == pytest.approx(1024 / 48)
    assert estimated_advantage(layer, (2,)) < 1024 / 48


def test_noise_has_no_advantage():
    assert estimated_advantage(noise_layer("noise", 0), (2, 3)) < Screening().min_advantage


def test_a_layer_of_zeros_or_of_one_row_has_none():
    zeros = Layer.of("zeros", LowRank(np.zeros((4, 2)), np.zeros((2, 4))))
    row = Layer.of("row", LowRank(np.ones((1, 1)), np.ones((1, 8))))
    assert [estimated_advantage(layer, (2,)) for layer in (zeros, row)] == [0.0, 0.0]


def test_only_layers_in_which_a_product_may_win_are_solved():
    layers = [noise_layer(f"noise {i}", i) for i in range(5)] + [kronecker_layer("planted", 2.0)]
    budget = Budget(parameters=sum(layer.parameters for layer in layers) / 16)
    table = search_layers(layers, [budget], search=QUICK)
    assert table.solved == {5}
    fitted = fit_budget(table, budget)
    structures = [materialized.candidate.structure for materialized in fitted.chosen]
    assert structures[5] == "LSR"
    assert "LSR" not in structures[:5]
    assert fitted.solved_layers == 1


def test_where_none_may_win_the_result_is_truncated_svd_and_says_so(small_lora):
    plan = CompressionPlan(ratio=8)
    result = search_adapter(small_lora, [plan], search=QUICK).compress(plan)
    assert result.solved_layers == 0
    assert result.error == pytest.approx(result.low_rank_error, rel=1e-6)
    assert f"Truncated SVD in all {len(result.layers)} layers" in " ".join(result.sentences())
    assert result.to_json()["solved_layers"] == 0


def test_a_result_says_in_how_many_layers_products_were_solved(small_lora):
    plan = CompressionPlan(ratio=8)
    all_solved = replace(QUICK, screening=Screening(min_advantage=0.0))
    result = search_adapter(small_lora, [plan], search=all_solved).compress(plan)
    assert result.solved_layers == len(result.layers)
    assert "were solved for" not in " ".join(result.sentences())


@pytest.fixture
def small_lora(tmp_path):
    """A PEFT directory of four layers of noise."""
    import json

    from lsrdecomp.lora.files import open_checkpoint
    from lsrdecomp.lora.files.tensors import TensorWriter

    rng = np.random.default_rng(0)
    with TensorWriter(tmp_path) as writer:
        for i in range(4):
            name = f"base_model.model.layers.{i}.q_proj"
            up = rng.standard_normal((1024, 8)) * 0.8 ** np.arange(8)
            writer.add(f"{name}.lora_A.weight", rng.standard_normal((8, 1024)).astype(np.float32))
            writer.add(f"{name}.lora_B.weight", up.astype(np.float32))
        writer.write(tmp_path / "adapter_model.safetensors", {})
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return open_checkpoint(tmp_path)


def test_a_layer_that_keeps_a_high_rank_is_not_solved_however_structured():
    # The budget pays for 12 equal components, and products have rank 8 at most.
    spectra = [spectrum([1.0] * 12 + [0.1] * 4, advantage=10.0)]
    budget = Budget(parameters=12.5 * 100)
    assert worth_solving(spectra, budget, 8, ["float32"], NO_FILLING) == set()
    assert worth_solving(spectra, budget, 12, ["float32"], NO_FILLING) == {0}


def test_a_bound_on_the_rank_is_never_beaten_by_products(monkeypatch):
    # What the rule leaves out would not have won: the layer is solved, and low rank is taken.
    layer = kronecker_layer("planted")
    rng = np.random.default_rng(0)
    pair = LowRank(
        np.hstack([layer.pair.left, rng.standard_normal((1024, 12))]),
        np.vstack([layer.pair.right, rng.standard_normal((12, 1024))]),
    )
    noisy = Layer.of("noisy", pair)
    budget = Budget(parameters=12 * 2048.0)
    narrow = replace(QUICK, inner_rank=2)
    advantage = estimated_advantage(noisy, (2,))
    spectra = [LayerSpectrum.of(noisy, advantage)]
    solve_all = Screening(min_advantage=0.0, min_filling_gain=math.inf)
    assert worth_solving(spectra, budget, 2, ["float32"], solve_all) == set()
    monkeypatch.setattr(SearchTable, "is_screened", False)
    table = search_layers([noisy], [budget], search=narrow)
    assert table.solved == {0}
    (fitted,) = fit_budget(table, budget).chosen
    assert fitted.candidate.structure == "low rank"


def test_a_tolerance_leaves_out_layers_that_need_a_higher_rank_than_products_have():
    spectra = [spectrum([1.0] * 4), spectrum([1.0] + [1e-3] * 3)]
    assert worth_solving(spectra, Budget(layer_rtol=0.1), 2, ["float32"], Screening()) == {1}


def test_what_is_left_of_a_small_budget_is_filled_in_the_layers_next_to_its_edge():
    spectra = [spectrum([10.0]), spectrum([1.0]), spectrum([0.5]), spectrum([0.01])]
    budget = Budget(parameters=150)
    assert worth_solving(spectra, budget, 8, ["float32"], NO_FILLING) == set()
    two = replace(Screening(), filling_layers=2)
    assert worth_solving(spectra, budget, 8, ["float32"], two) == {1, 2}


def test_a_product_gains_by_the_largest_component_of_its_layer():
    spectra = [spectrum([10.0]), spectrum([0.9, 0.02]), spectrum([0.3, 0.29])]
    one = replace(Screening(), filling_layers=1)
    assert worth_solving(spectra, Budget(parameters=150), 8, ["float32"], one) == {1}


def test_bytes_count_in_numbers_of_the_storage():
    spectra = [spectrum([1.0] * 12 + [0.1] * 4, advantage=10.0)]
    budget = Budget(bytes=12.5 * 100 * 4)
    assert worth_solving(spectra, budget, 8, ["float32"], NO_FILLING) == set()
    assert worth_solving(spectra, replace(budget, bytes=4 * 250), 8, ["float32"], NO_FILLING) == {0}


def test_a_budget_that_pays_for_all_leaves_the_choice_to_the_advantage():
    spectra = [spectrum([1.0, 0.5], advantage=2.0), spectrum([1.0, 0.5])]
    assert worth_solving(spectra, Budget(parameters=1e4), 8, ["float32"], Screening()) == {0}


def test_a_later_budget_may_have_more_layers_solved():
    planted = kronecker_layer("planted", 5.0).pair
    others = noise_layer("others", 0, rank=6).pair
    sides = np.hstack([planted.left, others.left]), np.vstack([planted.right, others.right])
    layers = [Layer.of("both", LowRank(*sides))]
    # The large budget pays for a rank of seven, the small one for no component.
    large = Budget(parameters=7.5 * 2048)
    table = search_layers(layers, [large], search=replace(QUICK, inner_rank=1))
    assert table.solved == set()
    fitted = fit_budget(table, Budget(parameters=500))
    assert table.solved == {0}
    assert fitted.chosen[0].candidate.structure == "LSR"


def test_nothing_is_left_out_in_another_norm_or_in_integers():
    layers = [noise_layer("noise", 0)]
    budget = Budget(parameters=1600)
    assert search_layers(layers, [budget], search=QUICK).solved == set()
    assert search_layers(layers, [budget], search=QUICK, storages=("int8",)).solved == {0}
    identity = LowRankPlusIdentity(np.eye(1024)[:, :1], np.ones(1), 1.0)
    weights = NormWeights(identity, Identity(1024))
    weighted = [Layer.of("weighted", layers[0].pair, weights)]
    assert search_layers(weighted, [budget], search=QUICK).solved == {0}
