"""Kronecker products in every layer, where they are asked for as a start for fine-tuning."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest
from checkpoint_files import write_lora_directory

from lsrdecomp import compress, open_checkpoint
from lsrdecomp.errors import BudgetError, LsrError
from lsrdecomp.lora.files import KroneckerLayer
from lsrdecomp.lora.files.statistics import read_statistics
from lsrdecomp.lora.search import CompressionPlan, Search

DEMO = files("lsrdecomp.cli") / "demo_adapter"
STATISTICS = files("lsrdecomp.cli") / "demo_statistics"
QUICK = Search(orders=(2,), rounds=0, sweeps=4)


@pytest.mark.parametrize("storage", ["float16", "int8"])
def test_every_layer_is_a_sum_of_kronecker_products_though_low_rank_is_nearer(storage, tmp_path):
    result = compress(DEMO, ratio=8, structure="lsr", storage=storage, search=QUICK)
    assert {row.structure for row in result.layers} == {"LSR"}
    assert result.low_rank_error < result.error < 1.0
    total = result.totals
    assert total.parameters * 8 <= total.parameters_before
    written = open_checkpoint(result.save(tmp_path / "start"))
    assert len(written.layers) == total.layers
    for layer in written.layers:
        assert isinstance(layer, KroneckerLayer)
        assert layer.shape.order == 2


def test_the_result_says_what_the_products_keep():
    result = compress(DEMO, ratio=8, structure="lsr", search=QUICK)
    text = " ".join(result.sentences())
    assert f"keep {100 * (1 - result.error**2):.1f} % of the squared norm" in text
    assert f"truncated SVD keeps {100 * (1 - result.low_rank_error**2):.1f} %" in text
    assert result.to_json()["plan"]["structure"] == "lsr"


def test_shapes_with_an_inner_rank_are_solved_where_low_rank_wins():
    # Without one every layer would have rank one.
    result = compress(DEMO, ratio=8, structure="lsr", search=QUICK)
    ranks = [int(np.prod(chosen.candidate.shape.inner)) for chosen in result.chosen]
    assert max(ranks) > 1


def test_in_the_fisher_norm_every_layer_is_one_too():
    statistics = read_statistics(STATISTICS)
    result = compress(DEMO, ratio=48, structure="lsr", statistics=statistics, search=QUICK)
    assert {row.structure for row in result.layers} == {"LSR"}


def test_a_layer_that_has_no_products_stays_as_it_is(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {}
    for name, rows in (("wide", 64), ("one_row", 1)):
        key = f"base_model.model.{name}"
        tensors[f"{key}.lora_A.weight"] = rng.standard_normal((2, 64)).astype(np.float32)
        tensors[f"{key}.lora_B.weight"] = rng.standard_normal((rows, 2)).astype(np.float32)
    folder = write_lora_directory(tmp_path / "lora", tensors, r=2, target_modules=["wide"])
    result = compress(folder, parameters=220, structure="lsr", search=QUICK)
    structures = {row.name: row.structure for row in result.layers}
    assert structures["wide"] == "LSR"
    assert structures["one_row"] != "LSR"


def test_too_small_a_budget_says_what_every_layer_together_would_cost():
    with pytest.raises(BudgetError, match="the cheapest options cost"):
        compress(DEMO, parameters=300, structure="lsr", search=QUICK)


def test_given_terms_are_lsr_anyway():
    with pytest.raises(BudgetError, match="every layer is LSR"):
        CompressionPlan(separation_rank=2, structure="lsr")
    with pytest.raises(LsrError, match="structure is read with a goal that is searched for"):
        compress(DEMO, separation_rank=2, structure="lsr")
    with pytest.raises(LsrError, match="must be one of lsr"):
        CompressionPlan(ratio=2, structure="svd")
