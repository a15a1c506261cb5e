"""A short run of fuzzing: sound contents are read, others are read or refused in one line."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from damage import FOUND, MAX_BYTES, READERS, mutated

from lsrdecomp.errors import LsrError


@pytest.mark.parametrize("name", READERS)
def test_what_fuzzing_starts_from_is_sound(name: str, tmp_path: Path) -> None:
    if READERS[name].torch:
        pytest.importorskip("torch")
    seeds = READERS[name].seeds()
    assert all(0 < len(seed) <= MAX_BYTES or name == "manifest" for seed in seeds)
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
    contents = [*READERS[name].seeds(), *FOUND.get(name, [])]
    for content in itertools.islice(mutated(contents, 0, MAX_BYTES), 250):
        READERS[name](content, tmp_path)


@pytest.mark.parametrize("name", [name for name, reader in READERS.items() if reader.files])
def test_contents_of_the_faults_are_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    if READERS[name].torch:
        pytest.importorskip("torch")
    damaged = READERS[name].damaged()
    assert len(damaged) > 20
    for content in damaged:
        READERS[name](content, tmp_path)


def test_a_foreign_error_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    """Found by fuzzing: torch quotes the file's bytes in its errors."""
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.ones(2)}, tmp_path / "x.bin")
    content = (tmp_path / "x.bin").read_bytes().replace(b"little", b"\x1b[31me")
    with pytest.raises(LsrError, match="endianness") as caught:
        READERS["torch_file"].read(content, tmp_path)
    assert str(caught.value).isprintable()
