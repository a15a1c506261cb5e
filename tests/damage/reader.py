"""Readers of strangers' bytes: each one function of the bytes of one file."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from damage.adapter import FAULTS, Files
from lsrdecomp.errors import LsrError

Read = Callable[[bytes, Path], Any]
MAX_BYTES = 2048
"""Bytes of a content that fuzzing makes."""
MAX_MEMORY = 2**24
"""What a layer may take while fuzzing: declared sizes above it are refused, as with
--max-memory."""


@dataclass(frozen=True, slots=True)
class Reader:
    """Something that reads the bytes of a file.

    Attributes
    ----------
    read : callable
        Reads a content in a folder where it may write.
    seeds : callable
        Makes sound contents.
    files : tuple of str
        Files of an adapter that have such contents: those of the faults are fuzzed too.
    torch : bool
        Whether torch is needed.
    """

    read: Read
    seeds: Callable[[], list[bytes]]
    files: tuple[str, ...] = ()
    torch: bool = False

    def __call__(self, content: bytes, folder: Path) -> None:
        """Read; `AssertionError` unless a refusal is one short printable line."""
        try:
            self.read(content, folder)
        except LsrError as error:
            message = str(error).replace(str(folder), "")
            assert message.isprintable(), message
            assert 0 < len(message) < 1500, message

    def damaged(self) -> list[bytes]:
        """Return the contents that such a file has in the faults, but for large ones."""
        contents: dict[bytes, None] = {}
        for fault in FAULTS.values():
            if not isinstance(fault, Files):
                continue
            for name in fault.contents.keys() & set(self.files):
                contents[fault.read(name)] = None
        return [content for content in contents if len(content) <= MAX_BYTES]


READERS: dict[str, Reader] = {}
"""By the name of the function that reads."""
FOUND: dict[str, list[bytes]] = {
    "sums": [b"0" * 64 + b"  " + b"\xff" * 300 + b"\n", b"0" * 64 + b"  a\0b\n"],
    "manifest": [
        b'{"plan": {"rtol": 0.1, "storage": "float32"}}\n{"name": "a/b", "3tate": "done"}\n'
    ],
    # An archive with a password.
    "archive": [
        (
            b"PK\x03\x04\x14\0\x01\0\0\0\0\0\0\0" + bytes(12) + b"\x0c\0\0\0q.lora_a.npy"
            b"PK\x01\x02\x14\0\x14\0\x01\0" + bytes(18) + b"\x0c\0" + bytes(16) + b"q.lora_a.npy"
            b"PK\x05\x06\0\0\0\0\x01\0\x01\0\x3a\0\0\0\x2a\0\0\0\0\0"
        )
    ],
}
"""What fuzzing has found, kept as bytes, by reader."""


def reader(seeds: Callable[[], list[bytes]], **options: Any) -> Callable[[Read], Read]:
    """Enter a function into `READERS` under its own name."""

    def enter(read: Read) -> Read:
        READERS[read.__name__] = Reader(read, seeds, **options)
        return read

    return enter


def corpus(name: str) -> list[bytes]:
    """Return what a long run of fuzzing starts from: sound contents, finds and faults."""
    chosen = READERS[name]
    return [*chosen.seeds(), *FOUND.get(name, []), *chosen.damaged()]
