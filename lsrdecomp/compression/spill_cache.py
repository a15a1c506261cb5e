"""Factors that are wanted again later: in memory while they are few, in a temporary file when they are many."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from lsrdecomp.errors import CheckpointError

IN_MEMORY = 8 * 2**20
"""Bytes held before the cache moves to disk."""

T = TypeVar("T")


class SpillCache:
    """Values put away and read back with the same bits.

    The file has no name (it vanishes with the process, also when that is killed) and nobody else can write to it: that
    is why it may hold pickles. It lies where ``TMPDIR`` says.
    """

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115 - closed when collected
        self._end = 0
        weakref.finalize(self, self._file.close)

    def put(self, value: T) -> Callable[[], T]:
        """Store a value; the answer reads it back. Raises `CheckpointError` if the disk is full."""
        start = self._end
        try:
            self._file.seek(start)
            pickle.dump(value, self._file, protocol=pickle.HIGHEST_PROTOCOL)
            self._end = self._file.tell()
        except OSError as error:
            text = f"factors that wait cannot be kept: {error.strerror}; point TMPDIR to a larger disk"
            raise CheckpointError(text, path=tempfile.gettempdir()) from error
        return partial(self._read, start)

    def _read(self, start: int) -> Any:
        self._file.seek(start)
        return pickle.load(self._file)
