"""Packed layers: every number and code comes back, PEFT sees the factors, damage is one error."""

import hashlib
import json
import tracemalloc
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from checkpoint_files import lora_pair, write_lora_directory
from hypothesis import given
from hypothesis import strategies as st
from oracles import weighted_svd

from lsrdecomp import LowRank, ProductShape
from lsrdecomp.errors import CheckpointError
from lsrdecomp.formats import FloatProduct
from lsrdecomp.formats.number_formats import step_values
from lsrdecomp.formats.quantized import SpectralCode
from lsrdecomp.lora.files import encodings, open_checkpoint, write_lsr
from lsrdecomp.lora.files.common_names import COMMON_NAMES
from lsrdecomp.lora.files.encodings import ENCODINGS, bytes_of, entry_of
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.packed import named_factors
from lsrdecomp.lora.files.packed_index import (
    decode_index,
    encode_index,
    index_at_the_end,
    read_index,
    read_packed_layers,
    text_of_index,
)
from lsrdecomp.lora.files.provenance import read_provenance
from lsrdecomp.lora.search.layers import Layer
from lsrdecomp.lora.search.quantize import quantized_product
from lsrdecomp.lora.search.spectral_codes import spectral_code, water_fill
from lsrdecomp.solvers.pair.factorwise import FactorwiseSVD


def packed(layers, kinds=None):
    """Index and numbers of coded layers."""
    pieces = [piece for code in layers.values() for piece in bytes_of(code)]
    index = encode_index({name: entry_of(code) for name, code in layers.items()}, kinds)
    return text_of_index(index), np.concatenate([np.zeros(0, np.uint8), *pieces])


def whole(layers):
    """The bytes of the tensor: numbers, index, room for a seal."""
    index = encode_index({name: entry_of(code) for name, code in layers.items()})
    return np.concatenate([packed(layers)[1], np.frombuffer(index_at_the_end(index), np.uint8)])


def read(text, numbers):
    return read_index(text).layers(numbers)


@pytest.fixture(scope="module")
def layers():
    rng = np.random.default_rng(0)
    pair = LowRank(rng.standard_normal((12, 4)), rng.standard_normal((4, 20)))
    sides = FactorwiseSVD().truncations(pair, ProductShape((4, 3), (2, 2), (5, 4)))
    layer = Layer.of("c", pair)
    svd = tuple(np.asarray(part) for part in weighted_svd(pair, layer.norms))
    grouped = spectral_code(layer, svd, *zip(*water_fill(layer)[5], strict=True))
    return {
        "a.q": quantized_product(sides.truncate(3, 2), 4),
        "a.v": quantized_product(sides.truncate(1), 8),
        "b.none": quantized_product(sides.truncate(0), 4),
        "c": grouped,
    }


def test_every_code_comes_back(layers):
    text, numbers = packed(layers)
    for again in (read(text, numbers), read_packed_layers(whole(layers))):
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


def test_an_index_says_kinds_and_what_peft_needs(layers):
    one = {"a.q": layers["a.q"]}
    index = read_index(packed(one, {"a.q": ("conv", (3, 3))})[0])
    assert index.layer_types == {"a.q": ("conv", (3, 3))}
    fields = index.config_fields()
    assert fields["shape_pattern"] == {"^a\\.q": {"out": [4, 3], "inner": [2, 2], "into": [5, 4]}}
    assert fields["separation_rank_pattern"] == {"^a\\.q": [3, 2]}
    assert fields["rank_pattern"] == fields["alpha_pattern"] == {"^a\\.q": 4}
    assert fields["target_modules"] == ["a.q"]


@pytest.mark.parametrize("text", [None, 7, "", "3:c-jL100031", "eJyLVkpUslJQKlGKBQAQhQKZ"])
def test_an_index_of_another_version_is_refused_in_one_line(text):
    with pytest.raises(CheckpointError, match="versions before 0.5 .* compress the LoRA") as error:
        read_index(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["4:", "4:\x7f", "4:c-jL100031"])
def test_a_damaged_index_is_one_line(text):
    with pytest.raises(
        CheckpointError, match="index of packed layers .layers. is damaged"
    ) as error:
        read_index(text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["3:c-jL100031", "eJyLVkpUslJQKlGKBQAQhQKZ"])
def test_a_directory_with_its_index_in_the_config_is_refused_in_one_line(layers, field, tmp_path):
    source = open_checkpoint(
        write_lora_directory(tmp_path / "lora", lora_pair("a.q", 12, 20, 4), r=4)
    )
    written = write_lsr(tmp_path / "small", source=source, layers=[("a.q", layers["a.q"])])
    config = json.loads((written / "adapter_config.json").read_text()) | {"layers": field}
    (written / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="versions before 0.5 .* compress the LoRA") as error:
        open_checkpoint(written)
    assert str(written / "adapter_config.json") in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tensor_of_an_older_version_is_refused_by_name(tmp_path):
    name = "base_model.model.lsr_numbers"
    config = {"peft_type": "LSR"}
    folder = write_lora_directory(tmp_path / "old", {name: np.zeros(9, np.uint8)}, **config)
    with pytest.raises(CheckpointError, match=f"{name}: .*another version"):
        open_checkpoint(folder)


def test_a_structure_of_another_version_is_refused(layers, monkeypatch):
    index = encode_index({"c": entry_of(layers["c"])})
    (number,) = (n for n, row in ENCODINGS.items() if row.kind == "groups")
    monkeypatch.delitem(ENCODINGS, number)
    with pytest.raises(CheckpointError, match=f"structure {number} .* is of another version"):
        decode_index(index)


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
        octaves = int(rng.integers(-2, 3))  # the same on both sides: a joined code stays joined
        left, right = (
            replace(side, exponent=side.exponent + octaves) for side in (code.left, code.right)
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
    names = ["h.10.q", "h.2.v", "head", "h.2.q"]
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


def test_opening_unpacks_no_code():
    """An index of huge layers is refused, or costs nothing until a layer is asked for."""
    empty = SpectralCode((), (), np.zeros(0, np.float16), 0, (), (2**24, 2**24), (), ())
    huge = replace(empty, matrix_shape=(2**49, 2**49))
    with pytest.raises(CheckpointError, match="a layer of 1125899906842624 numbers"):
        decode_index(_index_of(huge))
    content = np.frombuffer(index_at_the_end(_index_of(empty)), np.uint8)
    tracemalloc.start()
    (layer,) = read_packed_layers(content).values()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert layer.factor_shapes == ([(1, 2**24, 1)], [(1, 1, 2**24)])
    assert peak < 2**20


def _index_of(code):
    """The index of one layer, whose size alone is checked when it is read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encodings, "_check_numbers", lambda numbers, allowed: None)
        return encode_index({"q": entry_of(code)})


@given(st.data())
def test_damaged_bytes_are_an_error_of_one_line_or_still_numbers(layers, data):
    content = whole(layers).copy()
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, content.size - 1))
        content[place] = data.draw(st.integers(0, 255))
    content = content[: data.draw(st.integers(0, content.size))]
    found, message = {}, ""
    try:
        found = {name: layer.stored() for name, layer in read_packed_layers(content).items()}
    except CheckpointError as error:
        message = str(error)
    assert "\n" not in message
    assert all(
        np.isfinite(factor).all()
        for code in found.values()
        for side in code.factors()
        for factor in side
    )
