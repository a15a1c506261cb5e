"""The rival of every result is what others write, in as many bytes and the best storage."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest

from lsrdecomp import LowRank, compress, open_checkpoint
from lsrdecomp.formats.number_formats import pack, unpack
from lsrdecomp.lora.search import plain_svd
from lsrdecomp.lora.search.layers import Layer, open_layers
from lsrdecomp.lora.search.plain_svd import PLAIN_FORMS, best_plain_svd


def of_ranks(layers: list[Layer], ranks: list[int], bits: int, group: int) -> tuple[float, int]:
    """The error of truncated SVDs of these ranks in codes, all written out, and its bytes."""
    lost = size = 0.0
    n_bytes = 0
    top = 2 ** (bits - 1) - 1
    for layer, rank in zip(layers, ranks, strict=True):
        matrix = layer.pair.to_matrix()
        u, sigma, vh = np.linalg.svd(matrix)
        halves = []
        for vectors in (u[:, :rank].T, vh[:rank]):
            rows = np.sqrt(sigma[:rank, None]) * vectors
            read = np.zeros_like(rows)
            for k, row in enumerate(rows):
                for start in range(0, len(row), group):
                    part = row[start : start + group]
                    scale = float(np.float16(np.abs(part).max() / top))
                    codes = np.rint(part / scale).clip(-top, top).astype(np.int8)
                    packed = pack(codes, bits)
                    read[k, start : start + group] = scale * unpack(packed, bits, codes.shape)
                    n_bytes += 2 + packed.size
            halves.append(read)
        lost += np.linalg.norm(matrix - halves[0].T @ halves[1]) ** 2
        size += np.linalg.norm(matrix) ** 2
    return float(np.sqrt(lost / size)), n_bytes


@pytest.mark.parametrize("storage", ["int4", "int8"])
def test_it_is_truncated_svd_with_a_scale_for_each_group(storage, rng, monkeypatch):
    pairs = [
        LowRank(rng.standard_normal((64, rank)) * size, rng.standard_normal((rank, 256)))
        for rank, size in ((1, 3.0), (3, 4.0))
    ]
    layers = [Layer.of(str(i), pair) for i, pair in enumerate(pairs)]
    bits = int(storage[3:])
    # Bytes for three components of the larger layer and one of the other, in groups of 128; in
    # smaller groups one component less fits, the last of the larger layer.
    _, most = of_ranks(layers, [1, 3], bits, 128)
    errors = {128: of_ranks(layers, [1, 3], bits, 128)[0]}
    errors |= {group: of_ranks(layers, [1, 2], bits, group)[0] for group in (32, 64)}
    forms = [form for form in PLAIN_FORMS if form.storage == storage]
    monkeypatch.setattr(plain_svd, "PLAIN_FORMS", forms)
    found, form = best_plain_svd(layers, most)
    assert found == pytest.approx(min(errors.values()), rel=2e-3)
    assert errors[form.group] == min(errors.values())
    assert best_plain_svd(layers, 10) is None


def test_the_best_of_all_storages_counts(rng):
    pair = LowRank(rng.standard_normal((256, 8)), rng.standard_normal((8, 256)))
    layer = Layer.of("q", pair)
    storages = [best_plain_svd([layer], size)[1].storage for size in (700, 4600, 8192)]
    assert storages == ["int4", "int8", "float16"]


def test_an_estimate_is_near_what_is_measured(rng):
    pairs = [
        LowRank(rng.standard_normal((512, 8)), rng.uniform(-1.0, 1.0, (8, 512))) for _ in range(200)
    ]
    layers = [Layer.of(str(i), pair) for i, pair in enumerate(pairs)]
    measured, form = best_plain_svd(layers, 900_000)
    estimate, same_form = best_plain_svd(layers, 900_000, measured=False)
    assert same_form == form
    assert estimate == pytest.approx(measured, rel=0.02)
    assert estimate != measured


def test_the_size_of_the_numbers_does_not_matter(rng):
    errors = []
    for size in (1.0, 2.0**-40, 2.0**30):
        pair = LowRank(rng.standard_normal((40, 4)) * 0.0 + size * np.eye(40, 4), np.eye(4, 40))
        errors.append(best_plain_svd([Layer.of("q", pair)], 200.0)[0])
    assert errors[1:] == pytest.approx(errors[:1] * 2, rel=1e-6)


@pytest.mark.parametrize("goal", [{"ratio": 4}, {"bytes": 20_000}])
@pytest.mark.parametrize("storage", ["int4", "int8", "auto", None])
def test_every_result_is_reported_beside_the_best_of_all_storages(goal, storage):
    demo = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    result = compress(demo, storage=storage, **goal)
    rival, form = best_plain_svd(
        open_layers(demo), result.totals.bytes, measured=not result.estimates_plain_svd
    )
    assert (result.low_rank_error, result.plain_form) == (rival, form)
    lines = [text for text in result.sentences() if f"{rival:.3g}" in text]
    if result.better_bytes is None:
        assert f"; plain truncated SVD of that size {rival:.3g}" in repr(result)
        assert result.error <= rival or "bytes" not in goal
        text = f"Truncated SVD in as many bytes: {rival:.3g} in the same norm"
        assert lines == [f"{text} ({form.name}, the best of its storages)."]
    else:  # the line says how to have it, which is true
        assert "bytes" not in goal
        assert lines == [list(result.sentences())[-1]]
        better = compress(demo, bytes=result.better_bytes)
        assert better.error <= rival < result.error
        assert f"--bytes {result.better_bytes}" in lines[0]


def test_the_best_truncated_svd_is_called_so_where_it_is_no_other_form():
    demo = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    result = compress(demo, ratio=48, structure="lsr")
    assert result.plain_form is None
    assert f"; best truncated SVD of that size {result.low_rank_error:.3g}" in repr(result)


def test_the_error_that_a_plan_speaks_of_comes_first():
    demo = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    totals = replace(compress(demo, ratio=4).totals, functional_error=0.125)
    names = [name for name, _ in totals.facts]
    assert names[1:3] == ["error in the Fisher norm", "relative error, all layers"]
    assert dict(totals.facts)["error in the Fisher norm"] == f"{totals.plan_error:.3g}"


@pytest.mark.parametrize("size", [1e-3, 1.0])
@pytest.mark.parametrize("form", PLAIN_FORMS, ids=str)
def test_of_one_layer_the_estimate_is_what_is_measured(form, size, rng, monkeypatch):
    """Signs are rounded better than the Gaussian numbers that are expected."""
    monkeypatch.setattr(plain_svd, "PLAIN_FORMS", [form])
    up, down = (rng.choice([-1.0, 1.0], (2, 256)) for _ in range(2))
    layer = Layer.of("q", LowRank(size * up.T, down))
    estimate, _ = best_plain_svd([layer], 4000, measured=False)
    assert estimate == pytest.approx(best_plain_svd([layer], 4000)[0], rel=1e-6)
