"""The rival of results in integers is what others write, in as many bytes."""

from __future__ import annotations

from importlib.resources import files

import numpy as np
import pytest

from lsrdecomp import LowRank, compress, open_checkpoint
from lsrdecomp.formats.number_formats import pack, unpack
from lsrdecomp.lora.search import Search
from lsrdecomp.lora.search.layers import Layer, open_layers
from lsrdecomp.lora.search.plain_svd import plain_svd_error

QUICK = Search(orders=())


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
def test_it_is_truncated_svd_with_a_scale_for_each_group(storage, rng):
    pairs = [
        LowRank(rng.standard_normal((64, rank)) * size, rng.standard_normal((rank, 256)))
        for rank, size in ((1, 3.0), (3, 4.0))
    ]
    layers = [Layer.of(str(i), pair) for i, pair in enumerate(pairs)]
    bits = int(storage[3:])
    # Bytes for three components of the larger layer and one of the other, in groups of 128; in
    # smaller groups one component less fits, the last of the larger layer.
    _, most = of_ranks(layers, [1, 3], bits, 128)
    errors = [of_ranks(layers, [1, 3], bits, 128)[0]]
    errors += [of_ranks(layers, [1, 2], bits, group)[0] for group in (32, 64)]
    found = plain_svd_error(layers, [storage], most)
    assert found == pytest.approx(min(errors), rel=2e-3)
    assert plain_svd_error(layers, [storage], 10) is None
    assert plain_svd_error(layers, ["float16"], most) is None


def test_the_size_of_the_numbers_does_not_matter(rng):
    errors = []
    for size in (1.0, 2.0**-40, 2.0**30):
        pair = LowRank(rng.standard_normal((40, 4)) * 0.0 + size * np.eye(40, 4), np.eye(4, 40))
        errors.append(plain_svd_error([Layer.of("q", pair)], ["int4"], 1000.0))
    assert errors[1:] == pytest.approx(errors[:1] * 2, rel=1e-6)


@pytest.mark.parametrize("goal", [{"ratio": 4}, {"bytes": 20_000}])
@pytest.mark.parametrize("storage", ["int4", "int8", "auto"])
def test_a_result_in_integers_is_nearer_and_reported_beside_it(goal, storage):
    demo = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    result = compress(demo, storage=storage, search=QUICK, **goal)
    if storage == "auto" and "ratio" in goal:  # counts numbers, and takes float16
        assert not any("in as many bytes" in text for text in result.sentences())
        return
    storages = [name for name in ("int8", "int4") if name in result.plan.storages]
    rival = plain_svd_error(open_layers(demo), storages, result.totals.bytes)
    assert result.low_rank_error == rival
    assert result.error <= rival
    sentence = next(text for text in result.sentences() if "in as many bytes" in text)
    assert f"{rival:.3g}" in sentence
