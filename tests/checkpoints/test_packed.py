"""Packed integer layers: every code comes back, PEFT sees the factors, and damaged bytes are one clear error."""

import json
import tracemalloc
import zlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsrdecomp import CheckpointError, LowRank, ProductShape
from lsrdecomp.checkpoints.packed import decode, encode, factors_of, named_factors, read_index
from lsrdecomp.compression.candidates import Layer
from lsrdecomp.compression.quantize import quantized_product
from lsrdecomp.compression.water_filling import bit_ladder, spectral_code
from lsrdecomp.solvers.pair.factorwise import FactorwiseSVD
from lsrdecomp.targets.weighted import weighted_svd


@pytest.fixture(scope="module")
def layers():
    rng = np.random.default_rng(0)
    pair = LowRank(rng.standard_normal((12, 4)), rng.standard_normal((4, 20)))
    sides = FactorwiseSVD().truncations(pair, ProductShape((4, 3), (2, 2), (5, 4)))
    layer = Layer("c", pair)
    svd = tuple(np.asarray(part) for part in weighted_svd(pair, layer.norms))
    return {
        "a.q": quantized_product(sides.truncate(3, 2), 4),
        "a.v": quantized_product(sides.truncate(1), 8),
        "b.none": quantized_product(sides.truncate(0), 4),
        "c": spectral_code(layer, svd, bit_ladder(layer, *svd)[5]),
    }


def test_every_code_comes_back(layers):
    again = decode(encode(layers))
    assert list(again) == list(layers)
    for name, code in layers.items():
        ours, theirs = again[name].dequantized(), code.dequantized()
        assert np.array_equal(ours.to_matrix(), theirs.to_matrix())
        assert (again[name].storage, again[name].bytes) == (code.storage, code.bytes)


def test_size_is_the_codes_and_a_small_index(layers):
    assert encode(layers).size - sum(code.bytes for code in layers.values()) < 60 + 30 * len(layers)


def test_factors_expand_to_the_same_product(layers):
    for name, code in layers.items():
        left, right = factors_of(code)
        assert {f.shape[0] for f in left} == {max(1, code.dequantized().left.separation_rank)}
        keys = named_factors(name, code)
        assert f"base_model.model.{name}.lsr_B.factor_1" in keys
        assert len(keys) == len(left) + len(right)


def test_a_term_that_rounded_to_zero_stays(layers):
    """Sizes are told by the index, before any code is unpacked."""
    code = layers["a.q"]
    scales = code.left.scales.copy()
    scales[1] = 0.0
    code = replace(code, left=replace(code.left, scales=scales))
    (packed,) = read_index(encode({"q": code})).values()
    left, right = factors_of(packed.decode())
    assert ([f.shape for f in left], [f.shape for f in right]) == packed.factor_shapes
    assert [int(np.count_nonzero(np.any(f, axis=(1, 2)))) for f in left] == [2, 2]


def test_opening_unpacks_no_code(layers):
    """An index of huge layers is refused, or costs nothing until a layer is asked for."""

    def index_of(*entry):
        squeezed = zlib.compress(json.dumps([["q", *entry]]).encode())
        return np.frombuffer(len(squeezed).to_bytes(4, "little") + squeezed, np.uint8)

    with pytest.raises(CheckpointError, match="a layer of 1125899906842624 numbers"):
        read_index(index_of("components", [2**49, 2**49], [], 0))
    side = [4, 0, 0]
    with pytest.raises(CheckpointError, match="numbers"):
        read_index(index_of("terms", [2**20, 2**20], [1, 1], [2**20, 2**20], side, [4, 0, 2**40]))
    tracemalloc.start()
    (layer,) = read_index(index_of("components", [2**24, 2**24], [], 0)).values()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert layer.factor_shapes == ([(1, 2**24, 1)], [(1, 1, 2**24)])
    assert peak < 2**20


@given(st.data())
def test_damaged_bytes_are_an_error_of_one_line_or_still_numbers(layers, data):
    packed = encode(layers).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, packed.size - 1))
        packed[place] = data.draw(st.integers(0, 255))
    packed = packed[: data.draw(st.integers(0, packed.size))]
    found, message = {}, "lsr_packed"
    try:
        found = decode(packed)
    except CheckpointError as error:
        message = str(error)
    assert "lsr_packed" in message
    assert "\n" not in message
    assert all(np.isfinite(factor).all() for code in found.values() for side in factors_of(code) for factor in side)
