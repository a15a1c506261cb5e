"""Packed integer layers: every code comes back, PEFT sees the factors, and damaged bytes are one clear error."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lsrdecomp import CheckpointError, LowRank, ProductShape
from lsrdecomp.checkpoints.packed import decode, encode, factors_of, named_factors
from lsrdecomp.compression.candidates import Layer
from lsrdecomp.compression.quantize import quantized_product
from lsrdecomp.compression.spectral import bit_ladder, spectral_code
from lsrdecomp.solvers.factorwise import FactorwiseSVD
from lsrdecomp.weighted import weighted_svd


@pytest.fixture(scope="module")
def layers():
    rng = np.random.default_rng(0)
    pair = LowRank(rng.standard_normal((12, 4)), rng.standard_normal((4, 20)))
    sides = FactorwiseSVD(pair, ProductShape((4, 3), (2, 2), (5, 4)))
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
