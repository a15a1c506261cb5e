"""Packed layers: every number and code comes back, PEFT sees the factors, damage is one error."""

import base64
import hashlib
import json
import tracemalloc
import zlib
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from checkpoint_files import lora_pair, write_lora_directory
from hypothesis import given
from hypothesis import strategies as st
from index_of_03 import index_text
from oracles import weighted_svd

from lsrdecomp import LowRank, ProductShape
from lsrdecomp.checkpoints import open_checkpoint, write_lsr
from lsrdecomp.checkpoints.common_names import COMMON_NAMES
from lsrdecomp.checkpoints.encodings import bytes_of, entry_of
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.packed import named_factors
from lsrdecomp.checkpoints.packed_index import (
    Index,
    decode_index,
    encode_index,
    read_index,
    read_packed,
    text_of_index,
)
from lsrdecomp.checkpoints.provenance import read_provenance
from lsrdecomp.compression.layers import Layer
from lsrdecomp.compression.quantize import quantized_product
from lsrdecomp.compression.spectral_codes import spectral_code, water_fill
from lsrdecomp.errors import CheckpointError
from lsrdecomp.formats import FloatProduct
from lsrdecomp.formats.number_formats import step_values
from lsrdecomp.solvers.pair.factorwise import FactorwiseSVD


def packed(layers, kinds=None):
    """Index and numbers of coded layers."""
    pieces = [piece for code in layers.values() for piece in bytes_of(code)]
    index = encode_index({name: entry_of(code) for name, code in layers.items()}, kinds)
    return text_of_index(index), np.concatenate([np.zeros(0, np.uint8), *pieces])


def packed_by_01(layers):
    """The one tensor of version 0.1."""
    index = json.dumps([[name, *entry_of(code)] for name, code in layers.items()]).encode()
    header = zlib.compress(index, 9)
    return np.concatenate(
        [np.frombuffer(len(header).to_bytes(4, "little") + header, np.uint8), packed(layers)[1]]
    )


def text_of_02(layers, **more):
    """The index as version 0.2 wrote it."""
    index = {
        "version": 2,
        "layers": [[name, *entry_of(code)] for name, code in layers.items()],
        **more,
    }
    return base64.b64encode(zlib.compress(json.dumps(index).encode(), 9)).decode()


def read(text, numbers):
    return read_index(text).layers(numbers)


@pytest.fixture(scope="module")
def layers():
    rng = np.random.default_rng(0)
    pair = LowRank(rng.standard_normal((12, 4)), rng.standard_normal((4, 20)))
    sides = FactorwiseSVD().truncations(pair, ProductShape((4, 3), (2, 2), (5, 4)))
    layer = Layer.of("c", pair)
    svd = tuple(np.asarray(part) for part in weighted_svd(pair, layer.norms))
    grouped = spectral_code(layer, svd, *zip(*water_fill(layer, *svd)[5], strict=True))
    return {
        "a.q": quantized_product(sides.truncate(3, 2), 4),
        "a.v": quantized_product(sides.truncate(1), 8),
        "b.none": quantized_product(sides.truncate(0), 4),
        "c": replace(grouped, groups=(), steps=()),  # as up to version 0.3
        "d": grouped,
    }


def test_every_code_comes_back(layers):
    text, numbers = packed(layers)
    for again in (
        read(text, numbers),
        read(text_of_02(layers), numbers),
        read_packed(packed_by_01(layers)),
    ):
        assert list(again) == list(layers)
        for name, code in layers.items():
            found = again[name].stored()
            assert np.array_equal(found.dequantized().to_matrix(), code.dequantized().to_matrix())
            assert (found.storage, found.bytes) == (code.storage, code.bytes)


def test_size_is_the_codes_and_a_small_index(layers):
    text, numbers = packed(layers)
    assert numbers.size <= sum(code.bytes for code in layers.values())
    assert len(text) < 150
    many = {
        f"model.layers.{i}.self_attn.{x}_proj": layers["a.q"] for i in range(30) for x in "qkvo"
    }
    assert len(encode_index({name: entry_of(code) for name, code in many.items()})) < 50


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"])
def test_floats_keep_their_bits(dtype):
    shape, ranks = ProductShape((4, 3), (2, 2), (5, 4)), (3, 1)
    rng = np.random.default_rng(1)
    sides = [
        tuple(rng.standard_normal((terms, *size)).astype(dtype) for size in side.factors)
        for terms, side in zip(ranks, (shape.left, shape.right), strict=True)
    ]
    numbers = np.concatenate(
        [factor.reshape(-1).view(np.uint8) for side in sides for factor in side]
    )
    stored = FloatProduct(*sides, dtype)
    layer = read(packed({"q": stored})[0], numbers)["q"]
    assert (layer.storage, layer.content.size) == (dtype, numbers.size)
    assert np.array_equal(np.concatenate(list(bytes_of(stored))), numbers)
    for ours, theirs in zip(layer.factors(), sides, strict=True):
        assert [factor.tobytes() for factor in ours] == [factor.tobytes() for factor in theirs]
        assert [factor.dtype for factor in ours] == [dtype] * 2
    named = named_factors({"q": layer})
    assert {factor.dtype.name for factor in named.values()} == {
        "float64" if dtype == "float64" else "float32"
    }


def test_an_index_says_kinds_what_was_dropped_and_what_peft_needs(layers):
    one = {"a.q": layers["a.q"]}
    index = read_index(
        text_of_02(one, kinds={"a.q": ["conv", [3, 3]]}, dropped=["a.v"], exact=True)
    )
    assert (index.layer_types, index.dropped) == ({"a.q": ("conv", (3, 3))}, ("a.v",))
    index = read_index(packed(one, {"a.q": ("conv", (3, 3))})[0])
    assert (index.layer_types, index.dropped) == ({"a.q": ("conv", (3, 3))}, ())
    fields = index.config_fields()
    assert fields["shape_pattern"] == {"^a\\.q": {"out": [4, 3], "inner": [2, 2], "into": [5, 4]}}
    assert fields["separation_rank_pattern"] == {"^a\\.q": [3, 2]}
    assert fields["rank_pattern"] == fields["alpha_pattern"] == {"^a\\.q": 4}
    assert fields["target_modules"] == ["a.q"]
    assert "target_modules" not in Index(index.entries).config_fields()


@pytest.mark.parametrize(
    "index",
    [
        None,
        7,
        [],
        {},
        {"version": 3, "layers": []},
        {"version": 2, "layers": 1},
        {"version": 2, "layers": [["q", "floats", [2], [1], [2], "complex64", 1, 1]]},
        {"version": 2, "layers": [["q", "floats", [2], [1], [2], "float32", 0, 1]]},
        {"version": 2, "layers": [["q", "floats", [2], [1], [2], "float32", 1]]},
        {"version": 2, "layers": [["q", "floats", [2], [1], [2], "float32", 1, 1]] * 2},
        {"version": 2, "layers": [], "kinds": [1]},
        {"version": 2, "layers": [], "dropped": 3},
    ],
)
def test_a_damaged_index_is_one_line(index):
    text = (
        index
        if index is None
        else base64.b64encode(zlib.compress(json.dumps(index).encode())).decode()
    )
    with pytest.raises(
        CheckpointError, match="index of packed layers .layers. is damaged"
    ) as error:
        read_index(text)
    assert "\n" not in str(error.value)


def test_little_is_needed_to_open_a_directory_beside_its_numbers(layers, tmp_path):
    """Header, digests, config and index: 240 bytes and four a layer that is used."""
    names = [f"model.layers.{i}.self_attn.{x}_proj" for i in range(12) for x in "qkvo"]
    tensors = {}
    for i, name in enumerate(names):
        tensors |= lora_pair(name, 12, 20, 4, i)
    targets = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "task_type": "CAUSAL_LM"}
    source = open_checkpoint(
        write_lora_directory(
            tmp_path / "lora", tensors, r=4, base_model_name_or_path="smollm2", **targets
        )
    )
    rng, coded = np.random.default_rng(0), {}
    for i, name in enumerate(names[::2]):
        code = layers["a.q" if i % 3 else "a.v"]
        exponents = rng.integers(-9, -5, 2).tolist()
        left, right = (
            replace(side, exponent=e)
            for side, e in zip((code.left, code.right), exponents, strict=True)
        )
        coded[name] = replace(code, left=left, right=right)
    written = write_lsr(
        tmp_path / "small", source=source, layers=coded.items(), dropped=names[1::2]
    )
    numbers = sum(code.bytes for code in coded.values())
    assert bytes_to_open(written / "adapter_model.safetensors") - numbers <= 240 + 4 * len(coded)
    assert read_provenance(open_checkpoint(written))["dropped"] == names[1::2]


def test_an_index_cut_or_changed_anywhere_is_refused_or_read(layers):
    many = {f"h.{i}.{name}": code for i in (0, 7, 1203) for name, code in layers.items()}
    index = encode_index(
        {name: entry_of(code) for name, code in many.items()}, {"h.0.c": ("conv", (1, 1))}
    )
    refused = 0
    for position in range(len(index)):
        for changed in (index[:position], index[:position] + b"\xff" + index[position + 1 :]):
            with suppress(CheckpointError):  # nothing else is raised
                decode_index(changed).config_fields()
                continue
            refused += 1
    assert refused > len(index)


def test_layers_in_any_order_keep_it(layers):
    """The steps of their places are then of either sign."""
    names = ["h.10.q", "h.2.v", "head", "h.2.q", "h.0.q"]
    many = dict(zip(names, layers.values(), strict=True))
    text, numbers = packed(many)
    again = read(text, numbers)
    assert list(again) == names
    for name, code in many.items():
        expected = code.dequantized().to_matrix()
        assert np.array_equal(again[name].stored().dequantized().to_matrix(), expected)


def test_the_dictionary_of_names_is_part_of_the_format():
    """Other bytes would not open what was written with these."""
    assert hashlib.sha256(COMMON_NAMES).hexdigest()[:16] == "f0f3c0735f6a0327"


def test_an_index_in_the_config_is_read_as_before(layers):
    unjoined = {name: code for name, code in layers.items() if name != "a.q"}
    kinds = {"c": ("conv", (1, 1))}
    entries = {name: entry_of(code) for name, code in unjoined.items()}
    for exact in (False, True):
        index = read_index(index_text(entries, kinds, exact))
        assert (index.layer_types, index.exact) == (kinds, exact)
        again = index.layers(packed(unjoined)[1])
        for name, code in unjoined.items():
            expected = code.dequantized().to_matrix()
            assert np.array_equal(again[name].stored().dequantized().to_matrix(), expected)


def test_factors_expand_to_the_same_product(layers):
    for name, code in layers.items():
        left, right = code.factors()
        assert {f.shape[0] for f in left} == {max(1, code.dequantized().left.separation_rank)}
        keys = named_factors(read(*packed({name: code})))
        assert f"base_model.model.{name}.lsr_B.factor_1" in keys
        assert len(keys) == len(left) + len(right)


def test_a_term_that_rounded_to_zero_stays(layers):
    """Sizes are told by the index, before any code is unpacked."""
    code = layers["a.q"]
    scales = [step_values(side.scales).astype(np.float16) for side in (code.left, code.right)]
    scales[0][1] = 0.0
    code = replace(
        code,
        left=replace(code.left, scales=scales[0]),
        right=replace(code.right, scales=scales[1]),
    )
    (layer,) = read(*packed({"q": code})).values()
    left, right = layer.factors()
    assert ([f.shape for f in left], [f.shape for f in right]) == layer.factor_shapes
    assert [int(np.count_nonzero(np.any(f, axis=(1, 2)))) for f in left] == [2, 2]


def test_opening_unpacks_no_code(layers):
    """An index of huge layers is refused, or costs nothing until a layer is asked for."""

    def index_of(*entry):
        compressed = zlib.compress(json.dumps([["q", *entry]]).encode())
        return np.frombuffer(len(compressed).to_bytes(4, "little") + compressed, np.uint8)

    with pytest.raises(CheckpointError, match="a layer of 1125899906842624 numbers"):
        read_packed(index_of("components", [2**49, 2**49], [], 0))
    side = [4, 0, 0]
    with pytest.raises(CheckpointError, match="numbers"):
        read_packed(index_of("terms", [2**20, 2**20], [1, 1], [2**20, 2**20], side, [4, 0, 2**40]))
    tracemalloc.start()
    (layer,) = read_packed(index_of("components", [2**24, 2**24], [], 0)).values()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert layer.factor_shapes == ([(1, 2**24, 1)], [(1, 1, 2**24)])
    assert peak < 2**20


@given(st.data())
def test_damaged_bytes_are_an_error_of_one_line_or_still_numbers(layers, data):
    content = packed_by_01(layers).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, content.size - 1))
        content[place] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, content.size))]
    found, message = {}, "lsr_packed"
    try:
        found = {name: layer.stored() for name, layer in read_packed(content).items()}
    except CheckpointError as error:
        message = str(error)
    assert "lsr_packed" in message
    assert "\n" not in message
    assert all(
        np.isfinite(factor).all()
        for code in found.values()
        for side in code.factors()
        for factor in side
    )
