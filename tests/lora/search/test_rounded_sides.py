"""Layers in a storage type: their error is that of the numbers as written, and its bound holds."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from lsrdecomp.arrays import all_finite
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.tensors import TensorWriter
from lsrdecomp.lora.search.layers import Layer, open_layers
from lsrdecomp.targets.residual import pair_distance
from lsrdecomp.targets.target import LowRank

STORAGES = (
    np.float16,
    ml_dtypes.bfloat16,
    np.float32,
    np.float64,
    ml_dtypes.float8_e4m3fn,
    ml_dtypes.float8_e5m2,
)
HALF_TYPES = tuple(dtype for dtype in STORAGES if np.dtype(dtype).itemsize <= 2)


def layer_of(dtype: Any, size: float = 1.0) -> Layer:
    """Return a layer of 3000 × 2500, so that a side takes several blocks."""
    rng = np.random.default_rng(5)
    columns = size * np.geomspace(1.0, 0.01, 16) * rng.standard_normal((3000, 16))
    rows = 0.1 * rng.standard_normal((16, 2500))
    return Layer.of("q", LowRank(columns.astype(dtype), rows.astype(dtype)))


def distance_of(layer: Layer, stored: tuple[np.ndarray, np.ndarray], scale: float) -> float:
    """Return ‖ΔW − B̂ Â‖ from whole matrices in double precision."""
    left, right = (side.astype(np.float64) for side in stored)
    return pair_distance(layer.pair.left, layer.pair.right.T, scale * left, right.T)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_error_is_that_of_the_numbers_as_written(dtype: Any, storage: Any) -> None:
    layer = layer_of(dtype)
    for scale in (1.0, 16 / 12, 0.5, -2.0):
        for rank in (None, 3, 12, 16):
            stored, error = layer.rounded(rank, storage, scale)
            assert {side.dtype for side in stored} == {np.dtype(storage)}
            expected = distance_of(layer, stored, scale)
            assert error == pytest.approx(expected, rel=1e-7, abs=1e-12 * layer.frobenius_norm)


@pytest.mark.parametrize("seed", range(4))
def test_terms_that_cancel_are_measured_whatever_their_size(seed: int) -> None:
    """A millionth millionth of them is left, and rounding takes it: no digit in sums of squares."""
    rng = np.random.default_rng(seed)
    column, row = rng.standard_normal((200, 1)), rng.standard_normal((1, 150))
    pair = LowRank(np.hstack([column, column]), np.vstack([row, -(1.0 + 1e-12) * row]))
    layer = Layer.of("q", pair)
    stored, error = layer.rounded(None, np.float16)
    assert not np.any(stored[0].astype(np.float64) @ stored[1].astype(np.float64))
    assert error == pytest.approx(distance_of(layer, stored, 1.0), rel=1e-2)


@pytest.mark.parametrize("storage", STORAGES)
def test_no_error_is_above_its_bound(storage: Any) -> None:
    for size in (1.0, 1e-3):  # the small one has numbers near the smallest of the types
        layer = layer_of(np.float32, size)
        for scale in (1.0, 16 / 12, 0.5, -2.0):
            for rank in (3, 12, 15):
                _, error = layer.rounded(rank, storage, scale)
                assert error <= layer.rounded_bound(rank, storage, scale) * (1.0 + 1e-9)


def test_a_bound_in_a_wide_type_is_hardly_above_the_error() -> None:
    layer = layer_of(np.float32)
    _, error = layer.rounded(3, ml_dtypes.bfloat16)
    assert layer.rounded_bound(3, ml_dtypes.bfloat16, 1.0) <= 1.01 * error


def test_a_number_that_overflows_makes_the_error_infinite_and_has_no_bound() -> None:
    layer = layer_of(np.float32, 1e12)
    assert layer.rounded(4, np.float16)[1] == math.inf
    assert layer.rounded_bound(4, np.float16, 1.0) == math.inf
    assert math.isfinite(layer.rounded(4, ml_dtypes.bfloat16)[1])


@pytest.mark.parametrize("alpha", [8.0, 12.0, 1e-60])
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_numbers_stay_in_their_type_and_the_scale_beside_them(
    tmp_path: Any, dtype: Any, alpha: float
) -> None:
    rng = np.random.default_rng(2)
    path = tmp_path / "lora.safetensors"
    up = rng.standard_normal((64, 8)).astype(dtype)
    down = rng.standard_normal((8, 48)).astype(dtype)
    with TensorWriter(tmp_path) as writer:
        writer.add("lora_unet_q.lora_up.weight", up)
        writer.add("lora_unet_q.lora_down.weight", down)
        writer.add("lora_unet_q.alpha", np.array(alpha))
        writer.write(path, {})
    checkpoint = open_checkpoint(path)
    layer = open_layers(checkpoint)[0]
    if alpha > 1.0:
        assert layer.pair_as_read.left.dtype == layer.pair_as_read.right.dtype == dtype
    product = alpha / 8 * up.astype(np.float64) @ down.astype(np.float64)
    expected = np.linalg.svd(product, compute_uv=False)[:8]
    assert layer.sigma == pytest.approx(expected, rel=1e-9, abs=0.0)
    for rank in (None, 5):
        stored, error = layer.rounded(rank, np.float32)
        expected = distance_of(layer, stored, 1.0)
        assert error == pytest.approx(expected, rel=1e-7, abs=1e-12 * layer.frobenius_norm)
    assert_array_equal(layer.pair.left, alpha / 8 * up.astype(np.float64))
    assert_array_equal(layer.pair.right, down.astype(np.float64))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_numbers_of_two_bytes_or_one_are_known_to_be_finite(dtype: Any) -> None:
    largest = float(ml_dtypes.finfo(dtype).max)
    numbers = np.array([[0.0, -largest], [largest, 1.0]], dtype)
    assert all_finite(numbers)
    assert all_finite(numbers.T)
    assert all_finite(numbers[:0])
    for bad in (math.nan, -math.nan, math.inf, -math.inf):
        assert not all_finite(np.array([1.0, bad], dtype))
