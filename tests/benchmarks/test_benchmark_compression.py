"""The benchmark of compression: its arms do what the tools they stand for do, and it runs small."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compression import arms, budgets
from lsrdecomp.lora.search.layers import Layer
from lsrdecomp.targets.target import LowRank

DEMO = Path(__file__).resolve().parents[2] / "lsrdecomp" / "cli" / "demo_adapter"


def some_layers(rng: np.random.Generator, count: int = 4) -> list[Layer]:
    decay = 0.6 ** np.arange(6)
    return [
        Layer.of(
            str(i),
            LowRank(rng.standard_normal((40 + 8 * i, 6)) * decay, rng.standard_normal((6, 48))),
        )
        for i in range(count)
    ]


def errors(layers: list[Layer], forms: list) -> np.ndarray:
    return np.array([layer.squared_error(form) for layer, form in zip(layers, forms, strict=True)])


@pytest.mark.parametrize("rule", ["same_energy", "same_ratio"])
def test_one_threshold_gives_the_ranks_of_the_tools(rule: str, rng: np.random.Generator) -> None:
    layers = some_layers(rng)
    unit = 2 * sum(sum(layer.shape) for layer in layers)
    assert getattr(arms, rule)(layers, unit - 1) is None
    sigmas = [layer.pair.svd[1] for layer in layers]

    def ranks_at(threshold: float) -> list[int]:
        if rule == "same_energy":  # PEFT's _find_cutoff_index, kohya's index_sv_fro at its square
            shares = (np.cumsum(sigma**2) / np.sum(sigma**2) for sigma in sigmas)
            return [min(int(np.searchsorted(share, threshold)) + 1, len(share)) for share in shares]
        return [max(1, int(np.sum(sigma > sigma[0] / threshold))) for sigma in sigmas]

    def size(ranks: list[int]) -> int:
        return 2 * sum(k * sum(layer.shape) for k, layer in zip(ranks, layers, strict=True))

    thresholds = (
        np.linspace(0.0, 1.0, 4001) if rule == "same_energy" else np.geomspace(1.0, 100.0, 4001)
    )
    for budget in (unit, 1.9 * unit, 3.2 * unit, 10 * unit):
        outcome = getattr(arms, rule)(layers, budget)
        ranks = [form.product_shape.inner_rank for form in outcome.forms]
        assert outcome.bytes == size(ranks) <= budget
        assert ranks == max(
            (found for t in thresholds if size(found := ranks_at(t)) <= budget), key=sum
        )


def test_resizing_is_truncation_in_float16(rng: np.random.Generator) -> None:
    layers = some_layers(rng)
    outcome = arms.same_rank(layers, 2 * 3.4 * sum(sum(layer.shape) for layer in layers))
    assert outcome.note == "rank 3"
    for layer, form in zip(layers, outcome.forms, strict=True):
        u, sigma, vh = np.linalg.svd(layer.pair.to_matrix())
        near = (u[:, :3] * sigma[:3]) @ vh[:3]
        assert np.linalg.norm(form.to_matrix() - near) < 2e-3 * np.linalg.norm(near)
        assert layer.squared_error(form) == pytest.approx(np.sum(sigma[3:] ** 2), rel=1e-3)


def test_first_columns_of_a_conversion_are_the_smaller_conversion(rng: np.random.Generator) -> None:
    pytest.importorskip("peft")
    layer = some_layers(rng)[0]
    (b, a), (less_b, less_a) = arms.peft_conversion(layer, 4), arms.peft_conversion(layer, 2)
    np.testing.assert_allclose(less_b @ less_a, b[:, :2] @ a[:2], atol=1e-5 * layer.pair.norm)
    sigma = layer.pair.svd[1]
    assert np.linalg.norm(layer.pair.to_matrix() - b @ a) ** 2 == pytest.approx(
        np.sum(sigma[4:] ** 2), rel=1e-3
    )


@pytest.mark.parametrize(("bits", "block"), [(8, None), (4, 16), (4, 64)])
def test_integers_at_the_largest_entry_are_within_half_a_step(
    bits: int, block: int | None, rng: np.random.Generator
) -> None:
    vectors = rng.standard_normal((3, 50)) * np.array([[1.0], [1e-2], [0.0]])
    values, size = arms.absmax(vectors, bits, block)
    scales = 3 * -(-50 // (block or 50))
    assert size == 150 * bits // 8 + 2 * scales
    largest = np.max(np.abs(vectors), axis=1, keepdims=True)
    assert np.all(
        np.abs(values - vectors) <= 0.5 * largest / (2 ** (bits - 1) - 1) + 1e-3 * largest
    )
    assert np.linalg.norm(values - vectors) > 1e-4 * np.linalg.norm(vectors)


def test_lokr_finds_a_planted_product_and_prices_its_truncation(rng: np.random.Generator) -> None:
    first, second = (
        rng.standard_normal((4, 3)),
        rng.standard_normal((10, 3)) @ rng.standard_normal((3, 16)),
    )
    planted = np.kron(first, second)
    u, sigma, vh = np.linalg.svd(planted, full_matrices=False)
    layer = Layer.of("q", LowRank(u[:, :9] * sigma[:9], vh[:9]))
    fit = arms._LokrFit.of(layer, lambda size, factor: {40: (4, 10), 48: (3, 16)}[size], -1)
    assert fit.parameters(3) == 12 + 3 * 26
    # LyCORIS keeps W2 whole from half its size on.
    assert fit.parameters(None) == fit.parameters(8) == 12 + 160
    assert errors([layer], [fit.form(3)])[0] < 1e-5 * layer.squared_norm
    for dim in (1, 2):
        assert layer.squared_error(fit.form(dim)) == pytest.approx(fit.squared_error(dim), rel=1e-2)


def test_the_benchmark_runs_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "TIMES", (8, 48))
    out = tmp_path / "found.json"
    command = [str(DEMO), "--out", str(out), "--layers", "2"]
    budgets.main(command)
    record = json.loads(out.read_text())
    found = record["adapters"]["demo_adapter"]
    assert record["facts"]["search"] == {"orders": [2, 3], "inner_rank": 8, "rounds": 1}
    assert str(DEMO.parent) not in out.read_text()
    rows = {(row["arm"], row["budget"]): row for row in found["rows"]}
    limits = {f"1/{times}": 2 * found["parameters"] / times for times in budgets.TIMES}
    limits |= {name: rows[name, name]["bytes"] for name in ("LoRA int8", "LoRA int4")}
    for (arm, budget), row in rows.items():
        assert row["error"] <= 1.0 + 1e-9
        if "bytes" in row:
            assert 0 <= row["bytes"] <= limits.get(budget, np.inf)
        if arm.endswith("float16") and "bytes" in row:
            assert row["bytes"] == 2 * row["parameters"]
    for budget in limits:
        for other in ("low rank", "SVD, same rank", "SVD, same energy", "SVD, same ratio"):
            for kind in ("float16", "bits chosen"):
                name = f"{other}, {kind}" if other == "low rank" else other
                if (name, budget) in rows:
                    assert rows[f"ours, {kind}", budget]["error"] <= rows[name, budget]["error"] * (
                        1 + 1e-5
                    )
    assert rows["ours, bits chosen", "LoRA int4"]["error"] < rows["LoRA int4", "LoRA int4"]["error"]
    record["adapters"]["demo_adapter"]["layers"] = "kept"
    out.write_text(json.dumps(record))
    budgets.main(command)
    assert json.loads(out.read_text())["adapters"]["demo_adapter"]["layers"] == "kept"
    budgets.main([*command, "--again"])
    assert json.loads(out.read_text())["adapters"]["demo_adapter"]["layers"] == 2
