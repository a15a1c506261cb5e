"""LoRA files of llama.cpp: read with their scale, cut, through LSR and back, held to digests."""

import shutil

import numpy as np
import pytest
from console import run_command

from lsrdecomp.errors import CheckpointError, LsrError, UnsupportedError
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.writers.gguf import GgufBase, write_gguf
from lsrdecomp.lora.fleet.fleet_run import find_adapters
from lsrdecomp.lora.measure.verify_files import verify

gguf = pytest.importorskip("gguf")

NAMES = ("blk.0.attn_q", "blk.1.attn_q", "blk.1.ffn_down")


def write(path, alpha=None, more=None, kind="adapter", dtype=np.float16):
    """A file as llama.cpp's converter writes it."""
    rng = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(kind)
    if kind == "adapter":
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", 0.0 if alpha is None else alpha)
    pairs = {}
    for name in NAMES:
        down, up = rng.standard_normal((4, 64)), rng.standard_normal((32, 4))
        pairs[name] = up.astype(dtype), down.astype(dtype)
        writer.add_tensor(f"{name}.weight.lora_a", pairs[name][1])
        writer.add_tensor(f"{name}.weight.lora_b", pairs[name][0])
    for name, array in (more or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return pairs


@pytest.mark.parametrize(("alpha", "scale"), [(None, 1.0), (16.0, 4.0)])
def test_pairs_are_read_under_their_names_with_the_scale_of_llama_cpp(tmp_path, alpha, scale):
    pairs = write(tmp_path / "a.gguf", alpha)
    checkpoint = open_checkpoint(tmp_path / "a.gguf")
    assert checkpoint.format == "gguf"
    assert [layer.name for layer in checkpoint.layers] == list(NAMES)
    for layer in checkpoint.layers:
        up, down = layer.load()
        np.testing.assert_array_equal(up, pairs[layer.name][0].astype(np.float32))
        np.testing.assert_array_equal(down, pairs[layer.name][1].astype(np.float32))
        assert (layer.scale, layer.dtype) == (scale, "float16")


@pytest.mark.parametrize("storage", ["f32", "q8_0"])
def test_what_is_written_here_is_read_again(tmp_path, storage):
    pairs = write(tmp_path / "a.gguf", 8.0)
    layers = [(name, *pair) for name, pair in pairs.items()]
    base = GgufBase(tmp_path / "a.gguf", "llama", 2, 2, 2, 64)
    out = write_gguf(tmp_path / "b.gguf", layers=layers, base=base, storage=storage)
    for layer in open_checkpoint(out).layers:
        up, down = layer.load()
        wanted = pairs[layer.name][0].astype(float) @ pairs[layer.name][1]
        # Rows stay in GGUF's order: the attn_q of a llama is not ordered a second time.
        assert layer.scale * (up.astype(float) @ down) == pytest.approx(wanted, abs=0.15)


@pytest.mark.parametrize("alpha", [None, 8.0])
def test_a_file_is_cut_as_it_came(tmp_path, alpha):
    write(tmp_path / "a.gguf", alpha)
    done = run_command("compress", tmp_path / "a.gguf", "--ratio", 2, "--out", tmp_path / "b.gguf")
    assert done.returncode == 0, done.stderr
    source, cut = (open_checkpoint(tmp_path / f"{name}.gguf") for name in "ab")
    check = verify(source, cut)
    assert check.passed
    assert check.recorded
    assert f"weight error {check.relative_error:.3f}" in done.stdout
    assert cut.adapter_parameters <= source.adapter_parameters / 2
    assert {layer.dtype for layer in cut.layers} == {"float16"}
    refused = run_command(
        "compress", tmp_path / "a.gguf", "--ratio", 2, "--out", tmp_path / "b.safetensors"
    )
    assert refused.returncode == 2
    assert "the name must end in .gguf" in refused.stderr


def test_lsr_of_a_file_goes_back_by_the_command_that_is_recommended(tmp_path):
    write(tmp_path / "a.gguf", 8.0)
    done = run_command("compress", tmp_path / "a.gguf", "--ratio", 1.5, "--out", tmp_path / "small")
    assert done.returncode == 0, done.stderr
    command = done.stdout.rpartition("lsrdecomp export ")[2].splitlines()[0].split()
    assert command[:2] == [str(tmp_path / "small"), "--to"]
    back = run_command("export", *command)
    assert back.returncode == 0, back.stderr
    source = open_checkpoint(tmp_path / "a.gguf")
    made = open_checkpoint(tmp_path / "small.gguf")
    small = verify(source, open_checkpoint(tmp_path / "small"))
    assert verify(source, made).relative_error == pytest.approx(small.relative_error, rel=1e-2)


def test_changes_of_a_file_written_here_are_found(tmp_path):
    write(tmp_path / "a.gguf", 8.0)
    run_command("compress", tmp_path / "a.gguf", "--ratio", 2, "--out", tmp_path / "b.gguf")
    source = open_checkpoint(tmp_path / "a.gguf")
    sound = (tmp_path / "b.gguf").read_bytes()
    numbers = len(sound) - open_checkpoint(tmp_path / "b.gguf").adapter_parameters * 2
    missed = []
    for place in np.linspace(numbers, len(sound) - 1, 40).astype(int):
        content = bytearray(sound)
        content[place] ^= 1
        (tmp_path / "b.gguf").write_bytes(content)
        try:
            found = not verify(source, open_checkpoint(tmp_path / "b.gguf")).passed
        except LsrError:
            found = True
        if not found:
            missed.append(int(place))
    # Bytes that pad a tensor to a multiple of 32 hold nothing.
    assert [place for place in missed if sound[place]] == []


REFUSED = {
    "a model": ({"kind": "model"}, "a GGUF model and no adapter"),
    "stacked experts": (
        {"more": {"blk.0.ffn_up_exps.weight.lora_a": np.ones((2, 4, 64), np.float32)}},
        "experts stored stacked",
    ),
    "an embedding": (
        {
            "more": {
                "token_embd.weight.lora_a": np.ones((4, 64), np.float32),
                "token_embd.weight.lora_b": np.ones((32, 4), np.float32),
            }
        },
        "an embedding, whose halves",
    ),
    "a half alone": (
        {"more": {"blk.0.attn_k.weight.lora_a": np.ones((4, 64), np.float32)}},
        "has down without up",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_read_is_refused_by_what_it_is(tmp_path, case):
    options, words = REFUSED[case]
    write(tmp_path / "a.gguf", **options)
    with pytest.raises((UnsupportedError, CheckpointError), match=words):
        open_checkpoint(tmp_path / "a.gguf")


def test_damaged_files_are_one_line(tmp_path):
    write(tmp_path / "a.gguf")
    sound = (tmp_path / "a.gguf").read_bytes()
    rng = np.random.default_rng(0)
    for number in range(300):
        content = bytearray(sound)
        for _ in range(1 + number % 4):
            content[rng.integers(0, 700)] = rng.integers(0, 256)
        if number % 5 == 0:
            del content[rng.integers(0, len(content)) :]
        (tmp_path / "b.gguf").write_bytes(content)
        try:
            for layer in open_checkpoint(tmp_path / "b.gguf", max_memory=2**24).layers:
                layer.load()
        except LsrError as error:
            message = str(error)
            assert message.isprintable(), message


def test_a_fleet_counts_adapters_and_no_models(tmp_path):
    (tmp_path / "in").mkdir()
    write(tmp_path / "in" / "lora.gguf")
    write(tmp_path / "in" / "model.gguf", kind="model")
    shutil.copy(tmp_path / "in" / "lora.gguf", tmp_path / "in" / ".hidden.gguf")
    assert find_adapters(tmp_path / "in") == ["lora.gguf"]
