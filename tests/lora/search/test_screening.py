"""Which layers are solved in a norm of the base, and that nothing is lost by leaving others out."""

from __future__ import annotations

import json

import numpy as np
import pytest

from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.tensors import TensorWriter
from lsrdecomp.lora.search import search_adapter
from lsrdecomp.lora.search.layers import Layer
from lsrdecomp.lora.search.plan import Budget, CompressionPlan, Search
from lsrdecomp.lora.search.screening import worth_solving
from lsrdecomp.lora.search.search import fit_budget, search_layers
from lsrdecomp.lora.search.search_table import SearchTable
from lsrdecomp.targets.target import LowRank
from lsrdecomp.targets.weights import Identity, LowRankPlusIdentity, NormWeights

QUICK = Search(orders=(2,), rounds=0)


def with_spectrum(sigma: list[float], cost: int = 100, weight: float = 1.0) -> Layer:
    """A layer of these singular values, in a norm that weighs all outputs alike."""
    size = cost // 2
    pair = LowRank(np.eye(size)[:, : len(sigma)] * sigma, np.eye(size)[: len(sigma)])
    output = LowRankPlusIdentity(np.eye(size)[:, :1], np.array([weight]), weight)
    return Layer.of("layer", pair, NormWeights(output, Identity(size)))


def noise_layer(name: str, seed: int, rank: int = 4, side: int = 256) -> Layer:
    rng = np.random.default_rng(seed)
    columns = rng.standard_normal((side, rank))
    return Layer.of(name, LowRank(columns, rng.standard_normal((rank, side))))


def test_a_layer_that_keeps_a_high_rank_is_not_solved():
    # The budget pays for 12 equal components, and products have rank 8 at most.
    layers = [with_spectrum([1.0] * 12 + [0.1] * 4)]
    budget = Budget(parameters=12.5 * 100)
    assert worth_solving(layers, budget, 8, ["float32"]) == []
    assert worth_solving(layers, budget, 12, ["float32"]) == [0]


def test_the_weights_of_the_norm_count():
    # Of two layers with the same numbers the one that counts gets the rank.
    layers = [with_spectrum([1.0] * 12, weight=100.0), with_spectrum([1.0] * 12)]
    budget = Budget(parameters=12.5 * 100)
    assert worth_solving(layers, budget, 8, ["float32"]) == [1]


def test_a_layer_that_is_left_out_would_not_have_won(monkeypatch):
    rng = np.random.default_rng(0)
    left = np.kron(rng.standard_normal((16, 1)), rng.standard_normal((16, 1)))
    right = np.kron(rng.standard_normal((1, 16)), rng.standard_normal((1, 16)))
    pair = LowRank(
        np.hstack([left, rng.standard_normal((256, 12))]),
        np.vstack([right, rng.standard_normal((12, 256))]),
    )
    noisy = Layer.of("noisy", pair)
    budget = Budget(parameters=12 * 512.0)
    narrow = Search(orders=(2,), rounds=0, inner_rank=2)
    assert search_layers([noisy], [budget], search=narrow).solved == set()
    monkeypatch.setattr(SearchTable, "is_screened", False)
    table = search_layers([noisy], [budget], search=narrow)
    assert table.solved == {0}
    (fitted,) = fit_budget(table, budget).chosen
    assert fitted.candidate.structure == "low rank"


def test_a_tolerance_leaves_out_layers_that_need_a_higher_rank_than_products_have():
    layers = [with_spectrum([1.0] * 4), with_spectrum([1.0] + [1e-3] * 3)]
    assert worth_solving(layers, Budget(layer_rtol=0.1), 2, ["float32"]) == [1]


def test_bytes_count_in_numbers_of_the_storage():
    layers = [with_spectrum([1.0] * 12 + [0.1] * 4)]
    assert worth_solving(layers, Budget(bytes=12.5 * 100 * 4), 8, ["float32"]) == []
    assert worth_solving(layers, Budget(bytes=4 * 250), 8, ["float32"]) == [0]


def test_a_budget_that_pays_for_all_leaves_out_none():
    layers = [with_spectrum([1.0, 0.5]), with_spectrum([1.0, 0.5])]
    assert worth_solving(layers, Budget(parameters=1e4), 8, ["float32"]) == [0, 1]


def test_a_later_budget_may_have_more_layers_solved():
    layers = [noise_layer("noise", 0, rank=8)]
    # The large budget pays for a rank of seven, the small one for no component.
    table = search_layers(
        layers, [Budget(parameters=7.5 * 512)], search=Search(orders=(2,), rounds=0, inner_rank=1)
    )
    assert table.solved == set()
    fitted = fit_budget(table, Budget(parameters=200))
    assert table.solved == {0}
    assert fitted.solved_layers == 1


def test_nothing_is_left_out_in_integers():
    layers = [noise_layer("noise", 0, rank=16)]
    budget = Budget(parameters=15 * 512)
    narrow = Search(orders=(2,), rounds=0, inner_rank=2)
    assert search_layers(layers, [budget], search=narrow).solved == set()
    assert search_layers(layers, [budget], search=narrow, storages=("int8",)).solved == {0}


@pytest.fixture
def small_lora(tmp_path):
    """A PEFT directory of four layers of noise."""
    rng = np.random.default_rng(0)
    with TensorWriter(tmp_path) as writer:
        for i in range(4):
            name = f"base_model.model.layers.{i}.q_proj"
            up = rng.standard_normal((128, 8)) * 0.8 ** np.arange(8)
            writer.add(f"{name}.lora_A.weight", rng.standard_normal((8, 128)).astype(np.float32))
            writer.add(f"{name}.lora_B.weight", up.astype(np.float32))
        writer.write(tmp_path / "adapter_model.safetensors", {})
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    return open_checkpoint(tmp_path)


def test_a_result_says_in_how_many_layers_products_were_solved(small_lora):
    plan = CompressionPlan(ratio=1.5)
    narrow = Search(orders=(2,), rounds=0, inner_rank=2)
    result = search_adapter(small_lora, [plan], search=narrow).compress(plan)
    assert result.solved_layers < len(result.layers)
    assert result.to_json()["solved_layers"] == result.solved_layers
    plan = CompressionPlan(ratio=8)
    result = search_adapter(small_lora, [plan], search=QUICK).compress(plan)
    assert result.solved_layers == len(result.layers)
    assert "were solved for" not in " ".join(result.sentences())


def test_without_statistics_nothing_is_searched_unless_asked_for(small_lora, monkeypatch):
    from lsrdecomp.lora.search import searched

    def searching(*_given, **_named):
        raise AssertionError("searched")

    monkeypatch.setattr(searched, "search_layers", searching)
    goals = [{"ratio": 4}, {"parameters": 2000}, {"bytes": 4000}, {"rtol": 0.3}, {"energy": 0.8}]
    for goal in [*goals, {"max_rank": 3}]:
        for storage in ("float32", "int8", "int4", "auto", None):
            plan = CompressionPlan(**goal, storage=storage)
            result = search_adapter(small_lora, [plan]).compress(plan)
            assert result.solved_layers == 0
            text = f"Truncated SVD in all {len(result.layers)} layers"
            assert text in " ".join(result.sentences())
    asked = CompressionPlan(ratio=4, structure="lsr")
    for plan, search in ((asked, None), (CompressionPlan(ratio=4), QUICK)):
        with pytest.raises(AssertionError, match="searched"):
            search_adapter(small_lora, [plan], search=search)
