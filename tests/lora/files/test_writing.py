"""Writing: the old state or the new one, at every moment and whatever goes wrong."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import processes
import pytest
from checkpoint_files import file_contents, lora_pair, write_lora_directory
from hypothesis import given
from hypothesis import strategies as st
from safetensors import deserialize
from safetensors.numpy import load, save

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.files import open_checkpoint, write_lora, writing
from lsrdecomp.lora.files.file_checks import changed_files
from lsrdecomp.lora.files.tensors import TensorWriter
from lsrdecomp.lora.files.writing import new_directory

FILES = ["SHA256SUMS", "adapter_config.json", "adapter_model.safetensors"]
LAYERS = [("q", np.ones((4, 2), np.float32), np.ones((2, 6), np.float32))]


@given(
    st.dictionaries(
        st.text("aZ09_é漢Ⅷ", min_size=1, max_size=6),
        st.tuples(
            st.sampled_from(["float64", "float32", "bfloat16", "int8"]),
            st.lists(st.integers(0, 3), max_size=3),
        ),
        max_size=6,
    )
)
def test_the_writer_gives_the_bytes_of_the_safetensors_library(tmp_path_factory, tensors) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        name: np.asarray(9 * rng.standard_normal(shape)).astype(dtype)
        for name, (dtype, shape) in tensors.items()
    }
    folder = tmp_path_factory.mktemp("w")
    with TensorWriter(folder) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        writer.write(folder / "x.safetensors", {"format": "pt"})
    written = (folder / "x.safetensors").read_bytes()
    expected = save(arrays, {"format": "pt"})
    if all(array.itemsize == 1 for array in arrays.values()):
        # The library pads every header to eight bytes; bytes need no such place.
        end = 8 + int.from_bytes(expected[:8], "little")
        header = expected[8:end].rstrip(b" ")
        expected = len(header).to_bytes(8, "little") + header + expected[end:]
    assert written == expected
    assert {name for name, _ in deserialize(written)} == arrays.keys()
    assert list(folder.iterdir()) == [folder / "x.safetensors"]


def test_tensors_beyond_the_memory_limit_wait_on_disk(tmp_path: Path) -> None:
    arrays = {f"t{i}": np.full((50,), i, np.float32) for i in range(9)}
    with TensorWriter(tmp_path, memory_bytes=100) as writer:
        for name, array in arrays.items():
            writer.add(name, array)
        writer.write(tmp_path / "x", {})
    back = load((tmp_path / "x").read_bytes())
    assert all(np.array_equal(back[name], array) for name, array in arrays.items())


def test_streamed_layers_are_written_in_bounded_memory(tmp_path: Path) -> None:
    one = np.ones((1024, 64), np.float32)
    layers = ((f"l.{i}", one, one.T) for i in range(160))
    tracemalloc.start()
    write_lora(tmp_path / "out", layers=layers)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (tmp_path / "out" / "adapter_model.safetensors").stat().st_size / 3


def test_an_existing_output_stays_unless_forced_and_is_then_replaced_whole(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write_lora(out, layers=LAYERS)
    (out / "notes.txt").write_text("mine")
    before = file_contents(tmp_path)
    with pytest.raises(CheckpointError, match="already exists"):
        write_lora(out, layers=LAYERS, storage="float16")
    assert file_contents(tmp_path) == before
    write_lora(out, layers=LAYERS, storage="float16", force=True)
    assert open_checkpoint(out).layers[0].dtype == "float16"
    assert sorted(file_contents(tmp_path)) == [f"out/{name}" for name in FILES]


def test_force_replaces_also_where_directories_cannot_be_swapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_exchange", lambda first, second: False)
    write_lora(tmp_path / "out", layers=LAYERS)
    write_lora(tmp_path / "out", layers=LAYERS, storage="float16", force=True)
    assert open_checkpoint(tmp_path / "out").layers[0].dtype == "float16"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.skipif(
    sys.platform != "linux", reason="the swap in one step is Linux's renameat2 here"
)
def test_directories_are_swapped_in_one_step(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert writing._exchange(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "a" / "b").exists()
    assert (tmp_path / "b" / "a").exists()


def test_of_two_writers_at_one_place_the_later_says_that_the_other_was_there(
    tmp_path: Path,
) -> None:
    def later() -> None:
        with new_directory(tmp_path / "out") as part:
            (part / "later").write_text("")
            write_lora(tmp_path / "out", layers=LAYERS)

    with pytest.raises(CheckpointError, match="written by another run meanwhile"):
        later()
    assert [file.name for file in tmp_path.iterdir()] == ["out"]
    assert sorted(file.name for file in (tmp_path / "out").iterdir()) == FILES


def test_force_never_removes_what_is_not_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "deep" / "checkpoint-1").mkdir(parents=True)
    (tmp_path / "deep" / "adapter_config.json").write_text("{}")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "home")
    before = file_contents(tmp_path)
    for name in ("home", "deep", "file", "link"):
        with pytest.raises(CheckpointError, match="remove it yourself|symbolic link"):
            write_lora(tmp_path / name, layers=LAYERS, force=True)
    assert file_contents(tmp_path) == before


@pytest.mark.parametrize("out", ["a", "a/inside", "a/x/y", ".", "a/../a", "link", "link/inside"])
def test_the_input_is_never_written_into(tmp_path: Path, out: str) -> None:
    source = open_checkpoint(write_lora_directory(tmp_path / "a", lora_pair("q")))
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = file_contents(tmp_path)
    with pytest.raises(CheckpointError, match="input|symbolic link"):
        write_lora(tmp_path / out, source=source, layers=LAYERS, force=True)
    assert file_contents(tmp_path) == before


def failing_layers(error: BaseException) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    yield LAYERS[0]
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("x"), MemoryError()])
def test_an_interrupted_run_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        write_lora(tmp_path / "new" / "deep" / "out", layers=failing_layers(error))
    assert list(tmp_path.iterdir()) == []
    write_lora(tmp_path / "out", layers=LAYERS)
    before = file_contents(tmp_path)
    with pytest.raises(type(error)):
        write_lora(tmp_path / "out", layers=failing_layers(error), force=True)
    assert file_contents(tmp_path) == before


class FullDisk:
    """Stands for the system calls of writing; the n-th of them finds the disk full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
        self.calls, self.fails_at = 0, fails_at
        for holder, name in (
            (os, "fsync"),
            (os, "rename"),
            (Path, "mkdir"),
            (Path, "write_text"),
            (Path, "open"),
        ):
            monkeypatch.setattr(holder, name, self.wrap(getattr(holder, name)))
        monkeypatch.setattr(writing, "_exchange", self.wrap(writing._exchange))

    def wrap(self, call):
        def wrapped(*args, **kwargs):
            self.calls += 1
            if self.calls == self.fails_at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return call(*args, **kwargs)

        return wrapped


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_at_any_step_leaves_the_old_state(tmp_path: Path, force: bool) -> None:
    steps = 0
    while True:
        steps += 1
        place = tmp_path / str(steps)
        place.mkdir()
        if force:
            write_lora(place / "out", layers=LAYERS)
        before = file_contents(place)
        with pytest.MonkeyPatch.context() as monkeypatch:
            disk = FullDisk(monkeypatch, steps)
            try:
                write_lora(place / "out", layers=LAYERS, storage="float16", force=force)
            except CheckpointError as error:
                assert "No space left on device" in str(error)  # noqa: PT017
                failed = True
            else:
                failed = False
        after = file_contents(place)
        assert len(list(place.iterdir())) == (1 if after else 0)
        if failed:
            # The last fsync comes after the rename: there the new state already stands.
            assert after == before or open_checkpoint(place / "out").layers[0].dtype == "float16"
        if disk.calls < steps:
            break
    assert steps > 6


def test_a_really_full_file_system_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import resource, signal, numpy as np, lsrdecomp.lora.files as c\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        f"c.write_lora({str(tmp_path / 'out')!r}, layers=[('q', np.ones((400, 80)), np.ones((80, "
        "600)))])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "CheckpointError" in result.stderr.splitlines()[-1]
    assert "could not be written: File too large" in result.stderr
    assert list(tmp_path.iterdir()) == []


def write_for_ever(out: Path, started: Path) -> None:
    for turn in range(10**9):
        layers = (
            (f"l.{i}", np.full((40, 2), turn % 200), np.full((2, 60), turn % 200))
            for i in range(20)
        )
        write_lora(out, layers=layers, force=True)
        started.touch()


@pytest.mark.parametrize("kills", [8, pytest.param(250, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_state(tmp_path: Path, kills: int) -> None:
    out, started = tmp_path / "place" / "out", tmp_path / "started"
    chance = random.Random(7)
    for _ in range(kills):
        child = processes.start_process(write_for_ever, out, started)
        while not started.exists() and child.is_alive():
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.05))
        child.kill()
        child.join()
        started.unlink()
        assert sorted(entry.name for entry in out.iterdir()) == FILES
        assert changed_files(out) == ()
        layers = open_checkpoint(out).layers
        assert len(layers) == 20
        assert (
            len(
                {
                    float(value)
                    for layer in layers
                    for half in layer.load()
                    for value in np.unique(half)
                }
            )
            == 1
        )
    for entry in out.parent.iterdir():
        os.utime(entry, (0, 0))
    write_lora(out, layers=LAYERS, force=True)
    assert [entry.name for entry in out.parent.iterdir()] == ["out"]


def test_a_directory_somebody_still_fills_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    with new_directory(tmp_path / "out") as first:
        os.utime(first, (0, 0))
        write_lora(tmp_path / "out", layers=LAYERS)
        assert first.exists()
        (first / "adapter_config.json").write_text("{}")
        writing.shutil.rmtree(tmp_path / "out")
    assert sorted(file_contents(tmp_path)) == ["out/SHA256SUMS", "out/adapter_config.json"]


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    write_lora(tmp_path / "out", layers=LAYERS)
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "plain").stat().st_mode
