"""Hostile and broken input: one line that names the file, whatever is wrong with it."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import PREFIX, lora_pair, write_lora_directory
from damage import FAULTS, SOUND
from damage.headers import VALID
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load

from lsrdecomp.errors import CheckpointError
from lsrdecomp.formats.quantized import QuantizedMatrix, QuantizedProduct
from lsrdecomp.lora.files import open_checkpoint, write_lora, write_lsr
from lsrdecomp.lora.files.adapter_config import CARRIED
from lsrdecomp.lora.files.tensors import read_header


def test_the_grammar_is_large_enough() -> None:
    assert len(FAULTS) >= 400


def load_all(place: Path) -> None:
    """Open an adapter and read every number of its layers."""
    for layer in open_checkpoint(place).layers:
        layer.load()


@pytest.mark.parametrize("sound", SOUND)
def test_what_the_faults_start_from_is_sound(tmp_path: Path, sound: str) -> None:
    load_all(SOUND[sound](tmp_path / "adapter"))


EXPECTED = {  # what the line must speak of, by group
    "bytes": r"truncated|header|JSON|Git-LFS|bytes of data",
    "header": r"dtype|shape|data_offsets|metadata|bytes|hole|overlap",
    "name": r"tensor name",
    "config text": r"JSON|Git-LFS|Exceeds the limit",
    "layers": r"lora_|rank|prefix|NaN|tensors",
    "pickle": r"adapter_model\.bin",
    "place": r"missing|no such|not a regular|directory|leads|symbolic|JSON|weight file|truncated"
    r"|adapter|cannot",
    "lsr": r"lsr_|shape_pattern|rank_pattern|separation_rank|inner_shape|\br is|order|prefix"
    r"|use_dora|alpha",
    "formats": r"incomplete|rank|shape|read|JSON|PEFT|alpha|NaN|names|part|embeddings|size|beside"
    r"|multiply|dora|LO[HK]|r is|target_modules",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_is_one_clear_line(tmp_path: Path, fault: str) -> None:
    if fault.startswith("pickle"):
        pytest.importorskip("torch")
    place = FAULTS[fault](tmp_path / "adapter")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        load_all(place)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    assert message.isprintable()
    group, _, name = fault.partition(": ")
    assert re.search(
        EXPECTED.get(group, rf"\b{name.split()[0]}\b"), message.replace(str(place), "")
    )
    assert str(tmp_path) in message
    assert len(message) < len(str(tmp_path)) + 1000
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/tmp/unpickled-by-a-careless-reader").exists()


@given(st.data())
def test_a_changed_byte_is_refused_or_reads_as_the_library_reads_it(
    tmp_path_factory, data: st.DataObject
) -> None:
    content = bytearray(VALID)
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("b") / "x.safetensors"
    path.write_bytes(content)
    try:
        header = read_header(path)
    except CheckpointError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
        return
    theirs = load(bytes(content))
    assert header.tensors.keys() == theirs.keys()
    for name, tensor in header.tensors.items():
        assert tensor.read().tobytes() == theirs[name].tobytes()


@given(st.binary(max_size=200))
def test_any_bytes_give_our_error_where_the_library_gives_its_own(
    tmp_path_factory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("b") / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SafetensorError):
        load(content)
    with pytest.raises(CheckpointError):
        read_header(path)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.floats(allow_nan=False)
    | st.text("aZ0._*( \n\0é漢", max_size=5)
    | st.just(2**70),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["q", ".*", "(", "out", "inner"]), inner)
    ),
    max_leaves=6,
)


@given(st.sampled_from(["peft", "lsr"]), st.data())
def test_any_value_in_any_field_opens_and_writes_again_or_is_refused(
    tmp_path_factory, kind: str, data
) -> None:
    folder = tmp_path_factory.mktemp("c")
    path = SOUND[kind](folder / "a") / "adapter_config.json"
    config = json.loads(path.read_text())
    field = data.draw(
        st.sampled_from(
            sorted({*config, *CARRIED, "rank_pattern", "alpha_pattern", "shape_pattern"})
        )
    )
    path.write_text(json.dumps(config | {field: data.draw(VALUES)}))
    try:
        source = open_checkpoint(path.parent)
    except CheckpointError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017
        return
    layers = [
        (layer.name, np.ones((layer.out_features, 1)), np.ones((1, layer.in_features)))
        for layer in source.layers
    ]
    assert len(
        open_checkpoint(write_lora(folder / "b", source=source, layers=layers)).layers
    ) == len(layers)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("pickle: an expanded tensor", r"claims more than the 4 bytes behind it"),
        ("pickle: zip bomb", r"torch never compresses"),
        ("lsr: inner sizes that differ", r"inner size 2, but 3"),
        ("header: shape [2, 2] for 24 bytes", r"needs 16 bytes, but 24 are declared"),
    ],
)
def test_some_faults_are_caught_before_they_cost_anything(
    tmp_path: Path, fault: str, words: str
) -> None:
    place = FAULTS[fault](tmp_path / "adapter")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(place)


def test_a_link_as_in_the_hugging_face_cache_is_followed(tmp_path: Path) -> None:
    folder = write_lora_directory(tmp_path / "snapshots" / "main")
    (tmp_path / "blobs").mkdir()
    for file in list(folder.iterdir()):
        file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(tmp_path / "blobs" / file.name)
    assert len(open_checkpoint(folder).layers) == 2


def test_a_file_that_changes_after_opening_is_an_error(tmp_path: Path) -> None:
    folder = write_lora_directory(tmp_path / "a", lora_pair("q"))
    checkpoint = open_checkpoint(folder)
    (folder / "adapter_model.safetensors").write_bytes(VALID[:150])
    with pytest.raises(CheckpointError, match="changed while it was read"):
        checkpoint.layers[0].load()
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="No such file"):
        checkpoint.layers[0].load()


def test_layers_are_read_one_at_a_time(tmp_path: Path) -> None:
    tensors = {
        k: v for i in range(40) for k, v in lora_pair(f"layers.{i}.q", 512, 512, 8, seed=i).items()
    }
    folder = write_lora_directory(tmp_path / "a", tensors, r=8)
    one = 2 * 512 * 8 * 4
    tracemalloc.start()
    for layer in open_checkpoint(folder).layers:
        layer.load()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * one < 0.6 * sum(array.nbytes for array in tensors.values())


def test_a_ceiling_on_memory_is_kept_before_anything_is_read(tmp_path: Path) -> None:
    folder = write_lora_directory(
        tmp_path / "a", {**lora_pair("small"), **lora_pair("large", 64, 64, 2)}
    )
    assert len(open_checkpoint(folder, max_memory=2 * (64 + 64) * 8).layers) == 2
    with pytest.raises(
        CheckpointError, match=r"large: .*256 numbers .* 2048 bytes, above the 2047 allowed"
    ):
        open_checkpoint(folder, max_memory=2047)


def test_the_ceiling_counts_what_a_small_file_expands_to(tmp_path: Path) -> None:
    """Factors of a few numbers stand for a LoRA of many, packed codes for factors in float64."""
    code = QuantizedMatrix(
        (np.ones((1, 64, 1), np.int8), np.ones((1, 64, 1), np.int8)), np.ones(1, np.float16), 0, 4
    )
    across = QuantizedMatrix(
        (np.ones((1, 1, 8), np.int8), np.ones((1, 1, 8), np.int8)), np.ones(1, np.float16), 0, 4
    )
    source = open_checkpoint(
        write_lora_directory(tmp_path / "a", lora_pair("q", 4096, 64, 1), r=1, lora_alpha=1)
    )
    out = write_lsr(tmp_path / "b", source=source, layers=[("q", QuantizedProduct(code, across))])
    assert (out / "adapter_model.safetensors").stat().st_size < 2000
    assert open_checkpoint(out, max_memory=8 * (4096 + 64)).layers[0].parameters == 2 * (64 + 8)
    with pytest.raises(
        CheckpointError, match=r"q: its 4160 numbers take 33280 bytes, above the 33279 allowed"
    ):
        open_checkpoint(out, max_memory=8 * (4096 + 64) - 1)
    with pytest.raises(
        CheckpointError, match=r"lsr: its \d+ bytes are read whole, above the 50 allowed"
    ):
        open_checkpoint(out, max_memory=50)


def test_extras_are_handed_over_untouched_whatever_they_hold(tmp_path: Path) -> None:
    extra = np.array([np.nan, 1.0, -np.inf], np.float16)
    checkpoint = open_checkpoint(
        write_lora_directory(tmp_path / "a", {**lora_pair("q"), f"{PREFIX}head.bias": extra})
    )
    assert checkpoint.extras[f"{PREFIX}head.bias"].read().tobytes() == extra.tobytes()
