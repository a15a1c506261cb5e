"""Caches of values that stay read while they fit, and of values in a temporary file."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lsrdecomp.compression.effort import DEFAULT_LIMITS
from lsrdecomp.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class LRUCache(Generic[T]):
    """Values as they were last read; those not used for longest are forgotten first.

    Parameters
    ----------
    max_entries : int
        Numbers that all values together hold at most; the one read last stays whatever it holds.
    count_entries : callable
        Counts the numbers of a value.
    """

    def __init__(self, max_entries: int, count_entries: Callable[[T], int]) -> None:
        self.max_entries = max_entries
        self._count_entries = count_entries
        self._values: OrderedDict[str, T] = OrderedDict()

    def get(self, name: str, read: Callable[[], T]) -> T:
        """Return the value of a name, read if it is not held."""
        value = self._values.pop(name, None)
        if value is None:
            value = read()
            while self._values and self._entries_with(value) > self.max_entries:
                self._values.popitem(last=False)
        self._values[name] = value
        return value

    def _entries_with(self, value: T) -> int:
        held = sum(map(self._count_entries, self._values.values()))
        return held + self._count_entries(value)


class SpillCache:
    """Values put away and read back with the same bits.

    They lie in memory while they are few, else in a temporary file. The file has no name (it
    vanishes with the process, also when that is killed) and nobody else can write to it: that is
    why it may hold pickles. It lies where ``TMPDIR`` says.

    Parameters
    ----------
    max_bytes : int
        Held in memory; beyond it everything moves to the file.

    Examples
    --------
    >>> read = SpillCache().put([1.0, 2.0])
    >>> read()
    [1.0, 2.0]
    """

    def __init__(self, max_bytes: int = DEFAULT_LIMITS.spill_bytes) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=max_bytes)  # noqa: SIM115 - closed when collected
        self._end = 0
        weakref.finalize(self, self._file.close)

    def put(self, value: T) -> Callable[[], T]:
        """Store a value and return what reads it back; `CheckpointError` if the disk is full."""
        start = self._end
        try:
            self._file.seek(start)
            pickle.dump(value, self._file, protocol=pickle.HIGHEST_PROTOCOL)
            self._end = self._file.tell()
        except OSError as error:
            text = (
                f"factors that wait cannot be kept: {error.strerror}; point TMPDIR to a larger disk"
            )
            raise CheckpointError(text, path=tempfile.gettempdir()) from error
        return partial(self._read, start)

    def _read(self, start: int) -> Any:
        self._file.seek(start)
        return pickle.load(self._file)
