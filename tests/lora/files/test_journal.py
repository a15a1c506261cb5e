"""The journal of a run: found under what it depends on, of one run at a time, gone at the end."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Barrier, Semaphore

import numpy as np
import pytest
from checkpoint_files import lora_pair, write_lora_directory
from console import run_command

from lsrdecomp.errors import CheckpointError, PrecisionError, StorageRangeError
from lsrdecomp.lora.files import Journal, content_key
from lsrdecomp.lora.files.writing import lock_path

ARRAYS = {
    "sums": np.arange(6.0).reshape(2, 3),
    "half": np.ones(2, np.float16),
    "none": np.zeros((0, 3)),
}


def killed(out: Path) -> str:
    """A journal with one result, left by an exception; what was noted on it."""

    def run() -> None:
        with Journal.beside(out) as journal:
            journal.put("a", ARRAYS, values=[1, "two"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        run()
    (note,) = stopped.value.__notes__
    return note


def test_results_wait_for_the_next_run_and_go_with_the_finished_output(tmp_path: Path) -> None:
    note = killed(tmp_path / "out")
    assert str(tmp_path / ".out.journal") in note
    assert "remove it to start again" in note
    with Journal.beside(tmp_path / "out") as journal:
        result = journal.get("a")
        assert journal.get("b") is None
        assert result is not None
        assert result.values == [1, "two"]
        assert result.arrays.keys() == ARRAYS.keys()
        for name, array in ARRAYS.items():
            assert result.arrays[name].read().dtype == array.dtype
            assert np.array_equal(result.arrays[name].read(), array)
    assert list(tmp_path.iterdir()) == []


def test_an_error_before_any_result_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="early") as refused, Journal.beside(tmp_path / "out"):
        raise ValueError("early")
    assert list(tmp_path.iterdir()) == []
    assert not hasattr(refused.value, "__notes__")


@pytest.mark.skipif(os.name != "posix", reason="no locks on directories")
def test_of_four_runs_at_one_output_one_works_and_three_are_told_by_which(tmp_path: Path) -> None:
    start, refused = Barrier(4), Semaphore(0)

    def run(number: int) -> str | None:
        start.wait()
        try:
            with Journal.beside(tmp_path / "out") as journal:
                for _ in range(3):
                    # The others are all refused while this one works.
                    assert refused.acquire(timeout=60)
                journal.put(str(number), ARRAYS)
                raise KeyboardInterrupt  # as if stopped: its results stay
        except KeyboardInterrupt:
            return None
        except CheckpointError as error:
            refused.release()
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        said = list(threads.map(run, range(4)))
    (winner,) = (number for number, words in enumerate(said) if words is None)
    for words in filter(None, said):
        assert re.search(
            rf"process ({os.getpid()}|of another run) is writing this output; wait until it ends",
            words,
        )
        assert "\n" not in words
    with Journal.beside(tmp_path / "out") as journal:
        assert journal.get(str(winner)) is not None


@pytest.mark.skipif(os.name != "posix", reason="no locks on directories")
def test_a_second_run_is_refused_by_the_number_of_the_first_and_its_helpers_only_read(
    tmp_path: Path,
) -> None:
    with (
        Journal.beside(tmp_path / "out") as journal,
        Journal.beside(tmp_path / "out", reads_only=True) as reader,
    ):
        journal.put("a", ARRAYS)
        with pytest.raises(
            CheckpointError,
            match=f"process {os.getpid()} is writing this output; wait until it ends",
        ):
            Journal.beside(tmp_path / "out").__enter__()
        reader.put("a", values=1)
        reader.put("b")
        assert journal.get("a").values is None  # type: ignore[union-attr]
        assert journal.get("b") is None


@pytest.mark.skipif(os.name != "posix", reason="no locks on directories")
@pytest.mark.parametrize("when", ["before its lock", "after it"])
def test_a_run_that_begins_as_another_ends_has_a_directory_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    lock, ended = lock_path, []

    def meanwhile(path: Path) -> int | None:
        handle = lock(path) if when == "after it" or ended else None
        if not ended:
            ended.append(path)
            path.rmdir()
        return handle or lock(path)

    monkeypatch.setattr("lsrdecomp.lora.files.journal.lock_path", meanwhile)
    with Journal.beside(tmp_path / "out") as journal:
        journal.put("a", ARRAYS)
        with pytest.raises(CheckpointError, match="is writing this output"):
            Journal.beside(tmp_path / "out").__enter__()
        assert journal.get("a") is not None
    assert ended
    assert not list(tmp_path.iterdir())


def test_what_is_no_journal_or_of_another_release_is_refused_and_stays(tmp_path: Path) -> None:
    place = tmp_path / ".out.journal"
    place.mkdir()
    (place / "mine.txt").write_text("not yours")
    with (
        pytest.raises(CheckpointError, match="no journal written here; remove it"),
        Journal.beside(tmp_path / "out"),
    ):
        pass
    (place / "journal.json").write_text(
        json.dumps({"version": 1, "lsrdecomp": "0.0.1", "process": 1})
    )
    with pytest.raises(
        CheckpointError, match=r"left by lsrdecomp 0\.0\.1; finish with that, or remove"
    ):
        Journal.beside(tmp_path / "out").__enter__()
    assert (place / "mine.txt").exists()
    (tmp_path / ".file.journal").write_text("a file")
    with pytest.raises(CheckpointError, match="remove it or choose another output"):
        Journal.beside(tmp_path / "file").__enter__()


def test_a_kill_before_the_record_was_whole_does_not_block_the_output(tmp_path: Path) -> None:
    path = tmp_path / ".out.journal"
    path.mkdir()
    (path / ".journal.json.0123456789ab.partial").write_text("{")
    with Journal.beside(tmp_path / "out") as journal:
        journal.put("key", values=1)
    assert not list(tmp_path.iterdir())


def test_a_damaged_result_is_none(tmp_path: Path) -> None:
    killed(tmp_path / "out")
    (tmp_path / ".out.journal" / "a.safetensors").write_bytes(b"cut")
    with Journal.beside(tmp_path / "out") as journal:
        assert journal.get("a") is None
        journal.put("a", values=3)
        assert journal.get("a").values == 3  # type: ignore[union-attr]


@dataclass
class Settings:
    steps: int
    weights: np.ndarray


@pytest.mark.parametrize("part", ["header", "numbers"])
def test_a_result_of_which_a_bit_changed_is_none(tmp_path: Path, part: str) -> None:
    with Journal.beside(tmp_path / "out") as journal:
        path = tmp_path / ".out.journal" / "a.safetensors"
        journal.put("a", ARRAYS, values=[1, "two"])
        sound = path.read_bytes()
        # One bit of the values ("1" becomes "0" or "3"), and each bit of the numbers.
        values = sound.index(b"[1,") + 1
        end_of_header = 8 + int.from_bytes(sound[:8], "little")
        places = [values] if part == "header" else range(end_of_header, len(sound))
        for place in places:
            for bit in (0, 1) if part == "header" else (0, 7):
                content = bytearray(sound)
                content[place] ^= 1 << bit
                path.write_bytes(content)
                assert journal.get("a") is None, (place, bit)
        path.write_bytes(sound)
        assert journal.get("a") is not None


def test_a_journal_of_numbers_that_do_not_fit_their_storage_goes(tmp_path: Path) -> None:
    """The same command would be refused again; the next storage has no use for it."""
    tensors = {key: 3e5 * array for key, array in lora_pair("q", 24, 24, 4).items()}
    source = write_lora_directory(tmp_path / "in", tensors, r=4)
    options = ("--ratio", "1.5", "--storage", "float16", "--out", tmp_path / "out")
    done = run_command("compress", source, *options)
    assert done.returncode == 2
    assert "float16: the entry" in done.stderr
    assert "journal" not in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("error", [PrecisionError("overflow"), StorageRangeError("overflow")])
def test_results_of_what_can_never_be_stored_are_not_kept(
    tmp_path: Path, error: PrecisionError
) -> None:

    def run() -> None:
        with Journal.beside(tmp_path / "out") as journal:
            journal.put("a", ARRAYS)
            raise error

    with pytest.raises(PrecisionError, match="overflow"):
        run()
    assert list(tmp_path.iterdir()) == []
    assert not hasattr(error, "__notes__")


def test_keys_differ_where_anything_does() -> None:
    ones = np.ones(4)
    keys = [
        content_key(*values)
        for values in (
            ("a", 1),
            ("a", 1.0),
            ("a", "1"),
            (["a"], 1),
            ("a", None),
            (ones,),
            (ones.reshape(2, 2),),
            (ones.astype(np.float32),),
            (Settings(1, ones),),
            (Settings(2, ones),),
            ({"steps": 1, "weights": ones},),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert content_key({"a": 1, "b": 2}) == content_key({"b": 2, "a": 1})
    with pytest.raises(TypeError, match="no content"):
        content_key(object())
