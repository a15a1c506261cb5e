"""LSR directories: read back with equal bits; the config says exactly what the factors are."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import PREFIX, lora_pair, scaled_factors, write_lora_directory
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from lsrdecomp.errors import CheckpointError, LsrError, ShapeError, UnsupportedError
from lsrdecomp.formats import FloatProduct
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.compress.export import export_lora
from lsrdecomp.lora.files import open_checkpoint, write_lsr
from lsrdecomp.lora.files.format import open_bundle
from lsrdecomp.lora.files.packed_index import split_tensor
from lsrdecomp.lora.files.provenance import read_provenance
from lsrdecomp.lora.measure.verify_files import verify
from lsrdecomp.lora.search.plan import CompressionPlan

STORAGE = {
    name: np.dtype(getattr(ml_dtypes, name, name))
    for name in ("float64", "float32", "float16", "bfloat16")
}


def factors(shape: ProductShape, left: int, right: int, dtype: np.dtype, rng: np.random.Generator):
    """Factors of B and of A, filled with random numbers."""
    return (
        tuple(rng.standard_normal((left, *sizes)).astype(dtype) for sizes in shape.left.factors),
        tuple(rng.standard_normal((right, *sizes)).astype(dtype) for sizes in shape.right.factors),
    )


def kron_sum(arrays) -> np.ndarray:
    """Σ_k ⊗_i arrays[i][k], by numpy.kron."""
    total = 0
    for k in range(arrays[0].shape[0]):
        term = np.ones((1, 1))
        for array in arrays:
            term = np.kron(term, array[k].astype(np.float64))
        total = total + term
    return total


@st.composite
def layer_sets(draw):
    """One to four layers with their own orders, sizes and ranks."""
    seed = draw(st.integers(0, 2**16))
    dtype = draw(st.sampled_from(sorted(STORAGE)))
    layers = {}
    for index in draw(
        st.lists(st.sampled_from([0, 1, 2, 10, 11, 12]), min_size=1, max_size=4, unique=True)
    ):
        order = draw(st.sampled_from([1, 2, 2, 3]))
        sizes = st.lists(st.integers(1, 4), min_size=order, max_size=order)
        shape = ProductShape(tuple(draw(sizes)), tuple(draw(sizes)), tuple(draw(sizes)))
        layers[f"block.{index}.q"] = (shape, draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    return seed, dtype, layers


@given(layer_sets())
def test_what_is_written_is_read_with_equal_bits(case) -> None:
    seed, dtype, layers = case
    rng = np.random.default_rng(seed)
    made = {
        name: factors(shape, s, t, STORAGE[dtype], rng) for name, (shape, s, t) in layers.items()
    }
    sizes = {name: shape.matrix_shape for name, (shape, _, _) in layers.items()}
    with tempfile.TemporaryDirectory() as folder:
        tensors = {k: v for name, (m, n) in sizes.items() for k, v in lora_pair(name, m, n).items()}
        source = open_checkpoint(write_lora_directory(Path(folder) / "a", tensors))
        stream = ((name, left, right) for name, (left, right) in made.items())
        write_lsr(Path(folder) / "b", source=source, layers=stream, storage=dtype)
        back = open_checkpoint(Path(folder) / "b")
        stored = load_file(Path(folder) / "b" / "adapter_model.safetensors")
        held = {
            layer.name: [[tensor.read() for tensor in side] for side in (layer.left, layer.right)]
            for layer in back.layers
        }
    assert {
        layer.name: (layer.shape, layer.left_rank, layer.right_rank) for layer in back.layers
    } == layers
    assert {layer.scale for layer in back.layers} == {1.0}
    assert {layer.dtype for layer in back.layers} == {dtype}
    (tensor,) = stored.values()
    numbers, _ = split_tensor(tensor)
    assert back.adapter_parameters * STORAGE[dtype].itemsize == numbers.size
    for name, sides in made.items():
        for arrays, again in zip(sides, held[name], strict=True):
            assert [array.dtype for array in again] == [array.dtype for array in arrays]
            assert [array.tobytes() for array in again] == [array.tobytes() for array in arrays]


def test_the_modules_are_those_of_the_index_and_heads_those_of_the_source(tmp_path: Path) -> None:
    config = {
        "target_modules": "all-linear",
        "exclude_modules": ["head"],
        "modules_to_save": ["score"],
    }
    tensors = {**lora_pair("q"), f"{PREFIX}score.weight": np.ones((2, 3), np.float16)}
    source = open_checkpoint(write_lora_directory(tmp_path / "a", tensors, **config))
    layer = (
        "q",
        *factors(
            ProductShape.low_rank((4, 6), 2), 1, 1, np.dtype(np.float32), np.random.default_rng(0)
        ),
    )
    write_lsr(tmp_path / "b", source=source, layers=[layer], provenance={"plan": {"rtol": 0.1}})
    back = open_checkpoint(tmp_path / "b")
    written = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert set(written) == {"base_model_name_or_path", "modules_to_save", "peft_type"}
    assert back.config["target_modules"] == ["q"]
    assert back.config["modules_to_save"] == ["score"]
    assert (
        back.extras[f"{PREFIX}score.weight"].read().tobytes()
        == tensors[f"{PREFIX}score.weight"].tobytes()
    )
    record = read_provenance(back)
    assert record["source"] == {
        "file": "adapter_model.safetensors",
        "format": "peft-lora",
        "sha256": source.source_sha256,
    }
    assert record["plan"] == {"rtol": 0.1}
    assert set(record["versions"]) == {"lsrdecomp", "numpy", "safetensors"}


@pytest.mark.parametrize(
    ("bias", "written"), [("none", "none"), ("all", "all"), ("lora_only", "lsr_only")]
)
def test_biases_are_carried_under_their_lsr_name(tmp_path: Path, bias: str, written: str) -> None:
    layer = (
        "q",
        *factors(
            ProductShape.low_rank((4, 6), 2), 1, 1, np.dtype(np.float32), np.random.default_rng(0)
        ),
    )
    for name, extra in (("with", {f"{PREFIX}q.bias": np.ones(4, np.float32)}), ("without", {})):
        source = open_checkpoint(
            write_lora_directory(tmp_path / name, {**lora_pair("q"), **extra}, bias=bias)
        )
        back = open_checkpoint(
            write_lsr(tmp_path / f"{name} written", source=source, layers=[layer])
        )
        assert back.config.get("bias", "none") == (written if extra else "none")
        assert list(back.extras) == list(extra)


@pytest.mark.parametrize(
    ("number", "storage", "words"),
    [
        (7e4, "float16", r"7e\+04 does not fit float16; store as bfloat16 or float32"),
        (3.4e38, "bfloat16", r"does not fit bfloat16; store as float32"),
        (1e60, "float32", r"1e\+60 does not fit float32; no storage here holds it"),
    ],
)
def test_a_number_too_large_for_the_storage_is_said(
    tmp_path: Path, number: float, storage: str, words: str
) -> None:
    source = open_checkpoint(write_lora_directory(tmp_path / "a", lora_pair("q")))
    left, right = factors(
        ProductShape.low_rank((4, 6), 2), 1, 1, np.dtype(np.float64), np.random.default_rng(0)
    )
    large = (left[0] * 0 + number, *left[1:])
    with pytest.raises(CheckpointError, match=rf"lsr_B\.factor_1.*{words}"):
        write_lsr(tmp_path / "b", source=source, layers=[("q", large, right)], storage=storage)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a"]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda left, right: ((left[0],), right), "equally many"),
        (lambda left, right: ((left[0], left[1][:1]), right), "different numbers of terms"),
        (lambda left, right: (left, (right[0][:, :1], right[1])), "do not share their inner sizes"),
        (lambda left, right: ((left[0][:, :1], left[1]), right), "layer of 4 x 6"),
    ],
)
def test_factors_that_do_not_belong_together_are_not_written(
    tmp_path: Path, change, word: str
) -> None:
    source = open_checkpoint(write_lora_directory(tmp_path / "a", lora_pair("q")))
    given = factors(
        ProductShape((2, 2), (2, 1), (3, 2)), 2, 3, np.dtype(np.float32), np.random.default_rng(0)
    )
    left, right = change(*given)
    with pytest.raises((ShapeError, CheckpointError), match=word):
        write_lsr(tmp_path / "b", source=source, layers=[("q", left, right)])
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a"]


def lsr_directory(path: Path) -> Path:
    """Write a directory as PEFT saves LSR: two layers of one shape and one of another."""
    rng = np.random.default_rng(0)
    shapes = {"a.1": ((8, 6), (2, 2)), "a.11": ((8, 6), (2, 2)), "b": ((9, 10), (3, 1))}
    tensors = {}
    for name, (size, inner) in shapes.items():
        sides = factors(ProductShape.balanced(size, inner), 2, 3, np.dtype(np.float32), rng)
        for side, arrays in zip("BA", sides, strict=True):
            tensors |= {
                f"{PREFIX}{name}.lsr_{side}.factor_{i}": array for i, array in enumerate(arrays, 1)
            }
    odd = ProductShape.balanced((9, 10), (3, 1))
    config = {
        "peft_type": "LSR",
        "target_modules": list(shapes),
        "r": 4,
        "lsr_alpha": 4,
        "inner_shape": [2, 2],
        "separation_rank": [2, 3],
        "rank_pattern": {"^b": 3},
        "alpha_pattern": {"^b": 3},
        "shape_pattern": {
            "^b": {"out": list(odd.out), "inner": list(odd.inner), "into": list(odd.into)}
        },
    }
    path.mkdir()
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("r", 6, "r = 6"),
        ("inner_shape", [4, 1], "the config says"),
        ("inner_shape", [2, "2"], "inner_shape"),
        ("separation_rank", 2, r"separation ranks 2 and 3, but the config says \(2, 2\)"),
        ("separation_rank", 0, "should be a positive integer"),
        ("separation_rank", [2, 3, 4], "should be one number or"),
        ("rank_pattern", {"b": 4}, "r = 4"),
        ("rank_pattern", {"(": 3}, "not a pattern"),
        ("shape_pattern", {"b": {"out": [9], "inner": [3], "into": [10]}}, "the config says"),
        ("shape_pattern", {"b": {"out": [9]}}, "shape_pattern.* must be"),
        ("shape_pattern", {"b": {"out": [9], "inner": [3, 1], "into": [10]}}, "equally many"),
        ("lsr_alpha", "4", "lsr_alpha"),
        ("lsr_alpha", 10**400, "lsr_alpha"),
        ("order", 0, "order"),
        ("use_dora", True, "use_dora is set: DoRA rescales every row"),
        (
            "target_parameters",
            ["experts.up"],
            "target_parameters is set: it targets bare parameters",
        ),
    ],
)
def test_a_config_that_does_not_fit_the_factors_is_an_error(
    tmp_path: Path, field: str, value, word: str
) -> None:
    folder = lsr_directory(tmp_path / "b")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(CheckpointError, match=word):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("a.1.lsr_A.factor_2", None),
        ("a.1.lsr_B.factor_1", None),
        ("b.lsr_A.factor_1", "b.lsr_A.factor_3"),
        ("b.lsr_A.factor_1", "b.lsr_A.factor_01"),
        ("b.lsr_A.factor_1", "b.lsr_C.factor_1"),
    ],
)
def test_a_factor_missing_or_misnamed_is_an_error(
    tmp_path: Path, old: str, new: str | None
) -> None:
    folder = lsr_directory(tmp_path / "b")
    tensors = load_file(folder / "adapter_model.safetensors")
    array = tensors.pop(PREFIX + old)
    save_file(
        {**tensors, **({PREFIX + new: array} if new else {})}, folder / "adapter_model.safetensors"
    )
    with pytest.raises(CheckpointError, match="factor_"):
        open_checkpoint(folder)


def test_a_magnitude_beside_the_factors_is_refused_by_name(tmp_path: Path) -> None:
    folder = lsr_directory(tmp_path / "b")
    path = folder / "adapter_model.safetensors"
    save_file({**load_file(path), f"{PREFIX}b.lsr_magnitude_vector": np.ones(9, np.float32)}, path)
    with pytest.raises(
        UnsupportedError, match=r"b\.lsr_magnitude_vector: DoRA rescales every row.*to_lora"
    ):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    "key", ["a.1", "^a.1", "a.1$", "^a.1$", r"a\.1", r"^a\.1", r"a\.1$", r"^a\.1$", r"(^a\.1$)"]
)
def test_an_exact_name_is_a_pattern_in_every_spelling(tmp_path: Path, key: str) -> None:
    folder = lsr_directory(tmp_path / "b")
    path = folder / "adapter_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"lsr_alpha": 4, "alpha_pattern": {key: 8}})
    )
    assert {layer.name: layer.scale for layer in open_checkpoint(folder).layers}["a.1"] == 2.0


def test_an_exact_name_beats_a_pattern_that_stands_before_it(tmp_path: Path) -> None:
    folder = lsr_directory(tmp_path / "b")
    path = folder / "adapter_config.json"
    patterns = {r"a\.\d+": 12, r"^a\.1": 8}
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"lsr_alpha": 4, "alpha_pattern": patterns})
    )
    scales = {layer.name: layer.scale for layer in open_checkpoint(folder).layers}
    assert (scales["a.1"], scales["a.11"]) == (2.0, 3.0)


def test_scales_come_from_alpha_rank_and_rslora(tmp_path: Path) -> None:
    folder = lsr_directory(tmp_path / "b")
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(config | {"lsr_alpha": 6, "alpha_pattern": {"11": 1}, "use_rslora": True})
    )
    assert {layer.name: layer.scale for layer in open_checkpoint(folder).layers} == {
        "a.1": 3.0,
        "a.11": 0.5,
        "b": pytest.approx(6 / 3**0.5),
    }


def test_reading_and_writing_again_gives_the_same_weights_file(tmp_path: Path) -> None:
    folder = lsr_directory(tmp_path / "b")
    source = open_checkpoint(folder)
    layers = [(layer.name, *scaled_factors(layer)) for layer in source.layers]
    first = write_lsr(tmp_path / "c", source=source, layers=layers)
    again = open_checkpoint(first)
    layers = [(layer.name, *scaled_factors(layer)) for layer in again.layers]
    second = write_lsr(tmp_path / "d", source=again, layers=layers)
    for one, two in zip(source.layers, open_checkpoint(second).layers, strict=True):
        assert [one.shape, one.scale] == [two.shape, two.scale]
        for before, after in zip((*one.left, *one.right), (*two.left, *two.right), strict=True):
            assert before.read().tobytes() == after.read().tobytes()
    assert (first / "adapter_config.json").read_bytes() == (
        second / "adapter_config.json"
    ).read_bytes()
    assert issubclass(CheckpointError, LsrError)


def test_layers_as_they_are_stored_stand_beside_factors(tmp_path: Path) -> None:
    source = open_checkpoint(
        write_lora_directory(tmp_path / "a", {**lora_pair("q"), **lora_pair("v", seed=1)})
    )
    rng = np.random.default_rng(0)
    sides = factors(ProductShape((2, 2), (2, 1), (3, 2)), 2, 3, np.dtype(np.float64), rng)
    layers = [("q", *sides), ("v", FloatProduct(*sides, "float16"))]
    written = open_checkpoint(write_lsr(tmp_path / "b", source=source, layers=layers))
    assert [layer.dtype for layer in written.layers] == ["float32", "float16"]


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_beside_the_numbers_a_directory_takes_little(tmp_path, storage):
    """At most 4 kB and 16 bytes a layer, whatever their shapes and however many are left out."""
    tensors, layers, dropped, rng = {}, [], [], np.random.default_rng(0)
    for i in range(120):
        name = f"model.layers.{i // 4}.self_attn.{'qkvo'[i % 4]}_proj"
        tensors |= lora_pair(name, (64, 16, 16, 64)[i % 4], 64, 4, i)
        out = [(8, 8), (64, 1), (4, 4, 4)] if i % 4 in (0, 3) else [(4, 4), (16, 1), (2, 2, 4)]
        into = [(8, 8), (1, 64), (4, 4, 4)]
        kind = int(rng.integers(3))
        inner = (1, 1, 1)[: len(out[kind])] if rng.integers(2) else (2, 1, 2)[: len(out[kind])]
        terms = rng.integers(1, 5, 2)
        left = [
            rng.standard_normal((terms[0], m, r)) for m, r in zip(out[kind], inner, strict=True)
        ]
        right = [
            rng.standard_normal((terms[1], r, n)) for r, n in zip(inner, into[kind], strict=True)
        ]
        if rng.random() < 0.1:
            dropped.append(name)
        else:
            layers.append((name, left, right))
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    given = open_checkpoint(
        write_lora_directory(tmp_path / "a", tensors, r=4, target_modules=targets)
    )
    record = {"plan": CompressionPlan(ratio=6).to_json()}
    options = {"dropped": dropped, "provenance": record, "storage": storage}
    out = write_lsr(tmp_path / "o", source=given, layers=layers, **options)
    written = open_checkpoint(out)
    assert dropped
    assert len(written.layers) == len(layers)
    numbers = sum(tensor.nbytes for tensor in open_bundle(out).tensors.values())
    beside = sum(path.stat().st_size for path in out.iterdir()) - numbers
    report = 500  # compression.json, which `compress` adds
    assert beside + report <= 4096 + 16 * len(layers)
    check = verify(given, written)
    assert {layer.name for layer in check.layers if layer.relative_error == 1.0} == set(dropped)
    lora = export_lora(written, tmp_path / "lora")
    assert verify(given, open_checkpoint(lora)).source_matches
    # Layers that were left out are there too, as zeros: some servers want every layer of a type.
    exported = json.loads((lora / "adapter_config.json").read_text())
    assert exported["target_modules"] == sorted(targets)
