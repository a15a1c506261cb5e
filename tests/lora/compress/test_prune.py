"""Pruning: the terms that matter least go first, and what is left is a valid adapter."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from test_measured import SETTINGS, TEXTS
from tiny_bases import write_directories

import lsrdecomp as lsr
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.lora.compress import goals, variants
from lsrdecomp.lora.compress.prune import prune, pruned
from lsrdecomp.lora.compress.variants import DistilledVariant
from lsrdecomp.lora.measure import Evaluator, verify
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_directories(tmp_path_factory.mktemp("classifier"), "SEQ_CLS", layers=1)


def product(rng, weights_left, weights_right, order=2):
    """A product whose terms have such norms, and orthogonal factors."""

    def side(weights, sizes):
        count = len(weights)
        factors = []
        for rows, columns in sizes:
            basis = np.linalg.qr(rng.standard_normal((rows * columns, count)))[0].T
            factors.append(basis.reshape(count, rows, columns))
        return SeparatedMatrix.from_factors(factors, np.array(weights))

    out, inner = [(6, 2)] + [(4, 1)] * (order - 1), [(2, 6)] + [(1, 4)] * (order - 1)
    return SeparatedProduct(side(weights_left, out), side(weights_right, inner))


def error(before, after, norms):
    """Squared error of each layer in its norm, summed."""
    total = 0.0
    for name, whole in before.items():
        difference = whole.to_matrix()
        if name in after:
            difference = difference - after[name].to_matrix()
        weights = norms[name]
        columns = weights.output.root(difference)
        total += float(np.linalg.norm(weights.input.root(columns.T)) ** 2)
    return total


def weights(rng, size, scale=1.0):
    basis = np.linalg.qr(rng.standard_normal((size, 3)))[0]
    return LowRankPlusIdentity(basis, scale * np.array([9.0, 4.0, 2.0]), scale * 0.1)


@pytest.mark.parametrize("order", [2, 3])
def test_of_all_single_terms_the_one_with_the_smallest_norm_goes(order):
    rng = np.random.default_rng(0)
    products = {name: product(rng, [3.0, 2.0, 1.0], [2.0, 1.5], order) for name in "ab"}
    size = products["a"].shape[0]
    norms = {
        name: NormWeights(weights(rng, size, scale), weights(rng, size))
        for name, scale in (("a", 1.0), ("b", 0.5))
    }
    after = pruned(products, norms, {"a": 0.5, "b": 0.5}, 1e-6)
    alternatives = []
    for name, whole in products.items():
        for side, terms in (("left", 3), ("right", 2)):
            for index in range(terms):
                kept = [other for other in range(terms) if other != index]
                old = getattr(whole, side)
                new = SeparatedMatrix(old.weights[kept], tuple(f[kept] for f in old.factors))
                changed = SeparatedProduct(
                    **({"left": whole.left, "right": whole.right} | {side: new})
                )
                cost = error(products, products | {name: changed}, norms)
                alternatives.append(cost / (old.parameters / terms))
    removed = sum(whole.parameters - after[name].parameters for name, whole in products.items())
    assert error(products, after, norms) / removed == pytest.approx(min(alternatives))


def test_as_much_goes_as_was_asked_and_layers_of_little_norm_go_whole():
    rng = np.random.default_rng(1)
    products = {"large": product(rng, [8.0, 5.0], [3.0]), "small": product(rng, [0.01], [0.01])}
    size = products["large"].shape[0]
    norms = {name: NormWeights(weights(rng, size), weights(rng, size)) for name in products}
    prices = {"large": 0.5, "small": 1.0}
    before = sum(prices[name] * whole.parameters for name, whole in products.items())
    for share in (0.1, 0.3, 0.5):
        after = pruned(products, norms, prices, share)
        left = sum(prices[name] * whole.parameters for name, whole in after.items())
        assert left <= (1.0 - share) * before
        assert "large" in after
        assert "small" not in after


@pytest.mark.parametrize("storage", ["float16", "int4", "auto"])
def test_a_pruned_directory_is_a_valid_adapter_and_says_what_it_left_out(folder, tmp_path, storage):
    source = lsr.open_checkpoint(folder / "lora")
    made = lsr.compress(source, bytes=1500, storage=storage)
    made.save(tmp_path / "made", record=True)
    prune(tmp_path / "out", tmp_path / "made", source, 0.4)
    old, new = lsr.open_checkpoint(tmp_path / "made"), lsr.open_checkpoint(tmp_path / "out")
    assert 0 < new.adapter_parameters < old.adapter_parameters
    assert new.weights.stat().st_size < old.weights.stat().st_size
    assert verify(source, new).passed
    rows = variants.recorded_layers(tmp_path / "out")
    assert sum(row.parameters for row in rows) == new.adapter_parameters
    dropped = {row.name for row in rows if row.structure == "drop"}
    assert dropped == {layer.name for layer in source.layers} - {layer.name for layer in new.layers}


def distill_to(monkeypatch, shares):
    """Replace training: the n-th one ends with the n-th share; the list has what was asked."""
    trained = []

    def distilled(evaluator, written, source, out, data, *, steps, rate, before, **_):
        import shutil

        from lsrdecomp.lora.train.distillation import Distillation

        shutil.copytree(written, out)
        after = replace(before, kl=(1.0 - shares[len(trained)]) * before.effect)
        trained.append((steps, rate))
        return DistilledVariant(
            written, out, before, after, Distillation(steps, 0.1, 0.0, 0.0, 0.0)
        )

    monkeypatch.setattr(variants, "distill_variant", distilled)
    return trained


def keeping(measure, share):
    """Return a measurement that finds the same share of whatever is written."""

    def measured(evaluator, written):
        behaviour = measure(evaluator, written)
        return replace(behaviour, kl=(1.0 - share) * behaviour.effect)

    return measured


def kept_of_nine_tenths(folder, monkeypatch):
    monkeypatch.setattr(goals, "MAX_TRAINED", 1)
    # Of so few texts a standard error is larger than what is left to spend.
    monkeypatch.setattr(goals, "STD_ERRORS", 0.0)
    # Nor is what is kept untrained, or of the held-out texts, part of what is tried here.
    for name, share in (("measure", 0.8), ("measure_held_out", 0.95)):
        monkeypatch.setattr(Evaluator, name, keeping(getattr(Evaluator, name), share))
    return lsr.compress(
        folder / "lora",
        base=folder / "base",
        data=TEXTS,
        keep=0.9,
        distill=40,
        storage="float32",
        **SETTINGS,
    )


@pytest.mark.parametrize("keeps", [True, False])
def test_what_keeps_more_than_was_asked_is_pruned_and_trained_a_little(folder, monkeypatch, keeps):
    trained = distill_to(monkeypatch, [0.975, 0.903 if keeps else 0.89])
    result = kept_of_nine_tenths(folder, monkeypatch)
    assert trained == [(40, None), (12, 0.05)]
    first, second = (one for one in result.tried if one.steps)
    assert second.parameters < first.parameters
    assert result.totals.parameters == (second if keeps else first).parameters
    assert result.fidelity.distilled == (52 if keeps else 40)
    origin = result.to_json()["distillation"].get("pruned_from")
    if keeps:
        assert origin["parameters"] == first.parameters
        assert origin["distillation"]["steps"] == 40
    else:
        assert origin is None


def test_what_keeps_hardly_more_is_not_trained_again(folder, monkeypatch):
    trained = distill_to(monkeypatch, [0.904, 0.9])
    assert kept_of_nine_tenths(folder, monkeypatch).fidelity.distilled == 40
    assert trained == [(40, None)]
