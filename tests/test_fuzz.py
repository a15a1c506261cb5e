"""A short run of the fuzz harnesses: mutations are read, or refused in one line."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent / "fuzz"))
from mutation import mutated
from readers import MOST_BYTES, READERS

from lsrdecomp.errors import LsrError

FOUND = {  # what fuzzing has found, kept as bytes
    "sums": [b"0" * 64 + b"  " + b"\xff" * 300 + b"\n", b"0" * 64 + b"  a\0b\n"],
    "manifest": [
        b'{"plan": {"rtol": 0.1, "storage": "float32"}}\n{"name": "a/b", "3tate": "done"}\n'
    ],
    # A scale of zero.
    "packed_index": [b'[["a","terms",[2],[1],[2],[4,0,1],[4,0,1]]]\0' + bytes(8)],
}


@pytest.mark.parametrize("name", READERS)
def test_what_fuzzing_starts_from_is_sound(name: str, tmp_path: Path) -> None:
    if READERS[name].torch:
        pytest.importorskip("torch")
    seeds = READERS[name].seeds()
    assert all(0 < len(seed) <= MOST_BYTES or name == "manifest" for seed in seeds)
    refused = 0
    for number, seed in enumerate(seeds):
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            READERS[name].read(seed, folder)
        except LsrError:
            refused += 1
    assert refused <= len(seeds) // 2


@pytest.mark.parametrize("name", READERS)
def test_mutations_are_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    if READERS[name].torch:
        pytest.importorskip("torch")
    seeds = [*READERS[name].seeds(), *FOUND.get(name, [])]
    for content in itertools.islice(mutated(seeds, 0, MOST_BYTES), 250):
        READERS[name](content, tmp_path)


def test_a_foreign_error_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    """Found by fuzzing: torch quotes the file's bytes in its errors."""
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(2)}, tmp_path / "x.bin")
    content = (tmp_path / "x.bin").read_bytes().replace(b"little", b"\x1b[31me")
    with pytest.raises(LsrError, match="endianness") as caught:
        READERS["torch_file"].read(content, tmp_path)
    assert str(caught.value).isprintable()
