"""Synthetic layers have what they are asked for, and the fit gives back a law that was planted."""

import math

import numpy as np
import pytest

pytest.importorskip("torch")

from benchmarks.cost import synthesis
from lsrdecomp.checkpoints import open_checkpoint, read_statistics
from lsrdecomp.compression.layers import open_layers

LIKE = {"input": 3.0, "output": 9.0, "update": 1.8, "norm": 0.7, "rank": 4}


def test_participation_is_that_of_the_whole_matrix():
    rng = np.random.default_rng(0)
    basis = np.linalg.qr(rng.standard_normal((12, 3)))[0]
    matrix = basis @ np.diag([5.0, 3.0, 2.0]) @ basis.T + 0.25 * (np.eye(12) - basis @ basis.T)
    dense = np.trace(matrix) ** 2 / np.trace(matrix @ matrix)
    assert synthesis.participation(np.array([5.0, 3.0, 2.0]), 0.25, 9) == pytest.approx(
        dense, rel=1e-12
    )


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_synthetic_layer_has_the_ratios_and_the_norm_of_its_model(tmp_path, factor):
    layers = [
        ("layers.0.q_proj", LIKE, (60, 48)),
        ("layers.0.v_proj", LIKE | {"update": 3.6}, (24, 48)),
    ]
    adapter, statistics = synthesis.write_synthetic(tmp_path, layers, factor, seed=3)
    norms = read_statistics(statistics)
    for (_, like, shape), layer in zip(
        layers, open_layers(open_checkpoint(adapter), norms), strict=True
    ):
        weights = norms.measured(layer.name)
        assert layer.shape == shape
        for side, weight in (("input", weights.input), ("output", weights.output)):
            assert synthesis.participation(weight.values) == pytest.approx(
                factor * like[side], rel=1e-4
            )
        pair = layer.pair
        left, right = layer.norms.output.root(pair.left), layer.norms.input.root(pair.right.T)
        values = np.linalg.svd(left @ right.T, compute_uv=False)
        assert synthesis.participation(values**2) == pytest.approx(like["update"], rel=1e-3)
        assert np.linalg.norm(values) == pytest.approx(like["norm"], rel=1e-4)


def loras(noise, models=("a", "b", "c")):
    """Three models, two LoRAs each: numbers = 40 · input^0.5 · (m + n)^0.3, with noise.

    At smaller shares 44 in place of 40.
    """
    rng = np.random.default_rng(1)
    rows = []
    for i, model in enumerate(models):
        for task in ("x", "y"):
            layers = []
            for _ in range(30):
                layer = {
                    name: float(np.exp(rng.uniform(0.1, 3.0)))
                    for name in ("input", "output", "update")
                }
                layer |= {
                    "rows": 200 * (i + 1) + int(rng.integers(99)),
                    "columns": int(rng.integers(100, 900)),
                }
                law = 40 * layer["input"] ** 0.5 * (layer["rows"] + layer["columns"]) ** 0.3
                forms = [{"wanted": 0.5, "numbers": 44}]
                forms.append(
                    {"wanted": 0.9, "numbers": law * math.exp(noise * rng.standard_normal())}
                )
                layers.append(layer | {"forms": forms})
            rows.append({"model": model, "task": task, "layers": layers})
    return rows


def test_the_fit_gives_back_a_planted_law():
    rows = synthesis.observations(loras(noise=0.05))
    fitted = synthesis.fitted(rows, synthesis.MODELS["ratios and size"])
    planted = {"one": math.log(40), "input": 0.5, "output": 0.0, "update": 0.0, "size": 0.3}
    for name, value in planted.items():
        assert (
            abs(fitted["coefficients"][name] - value) < 4 * fitted["standard_errors"][name] + 1e-3
        )
    assert fitted["rms"] == pytest.approx(0.05, rel=0.1)
    assert all(abs(left["rms"] - 0.05) < 0.02 for left in fitted["left_out"].values())
    without = synthesis.fitted(rows, synthesis.MODELS["nothing"])
    assert abs(without["explained"]) < 1e-9
    assert fitted["explained"] > 0.95


def test_a_model_that_is_otherwise_is_missed_when_it_is_left_out():
    record = loras(noise=0.05)
    for lora in record:
        for layer in lora["layers"]:
            for form in layer["forms"]:
                form["numbers"] *= 3.0 if lora["model"] == "c" else 1.0
    left = synthesis.fitted(synthesis.observations(record), synthesis.MODELS["ratios"])["left_out"]
    assert left["c"]["mean"] > 0.8
