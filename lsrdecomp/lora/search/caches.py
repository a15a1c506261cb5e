"""Two caches: one of values read last, one that moves to a temporary file when it grows."""

from __future__ import annotations

import pickle
import tempfile
import weakref
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.search.effort import DEFAULT_LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class LRUCache(Generic[T]):
    """Keeps values in memory; the least recently used are dropped first.

    Parameters
    ----------
    max_entries : int
        Maximum entries of all values together. The value read last stays even if it is larger.
    count_entries : callable
        Returns the entries (numbers) of a value.
    """

    def __init__(self, max_entries: int, count_entries: Callable[[T], int]) -> None:
        self.max_entries = max_entries
        self._count_entries = count_entries
        self._values: OrderedDict[str, T] = OrderedDict()
        self._n_entries = 0  # of all values together

    def get(self, name: str, read: Callable[[], T]) -> T:
        """Return the value of a name; read it if it is not in the cache."""
        if name in self._values:
            self._values.move_to_end(name)
            return self._values[name]
        value = read()
        self._n_entries += self._count_entries(value)
        while self._values and self._n_entries > self.max_entries:
            _, oldest = self._values.popitem(last=False)
            self._n_entries -= self._count_entries(oldest)
        self._values[name] = value
        return value


class SpillCache:
    """Stores values outside of the working set, to be read back bit for bit.

    They are in memory while they are few, else in a temporary file of the directory ``TMPDIR``. The
    file has no name: it vanishes with the process, even if that is killed, and nobody else can
    write to it. So it is safe to hold pickles.

    Parameters
    ----------
    max_bytes : int
        Bytes in memory beyond which everything moves to the file.

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
        """Store a value, and return a function that reads it back.

        Raises `CheckpointError` if the disk is full.
        """
        start = self._end
        try:
            self._file.seek(start)
            pickle.dump(value, self._file, protocol=pickle.HIGHEST_PROTOCOL)
            self._end = self._file.tell()
        except OSError as error:
            text = f"a temporary file cannot grow: {error.strerror}; point TMPDIR to a larger disk"
            raise CheckpointError(text, path=tempfile.gettempdir()) from error
        return partial(self._read, start)

    def _read(self, start: int) -> Any:
        self._file.seek(start)
        return pickle.load(self._file)
