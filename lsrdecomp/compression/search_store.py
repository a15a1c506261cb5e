"""What a search has solved, in one file beside the output: a killed search goes on where it was."""

from __future__ import annotations

import io
import sqlite3
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.errors import CheckpointError

SUFFIX = ".search"
TABLE = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, arrays BLOB NOT NULL)"


class SearchStore:
    """Answers by the digest of all that they depend on, so that nothing of another search is ever taken for one.

    Parameters
    ----------
    path : path
        Made when there is something to keep, its directory too.

    Attributes
    ----------
    reused : int
        How many answers came from the file.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     store = SearchStore(store_beside(Path(place) / "small"))
    ...     store.put("a digest", {"errors": np.ones(2)})
    ...     found = store.get("a digest"), store.get("another"), store.reused
    ...     store.remove()
    >>> found
    ({'errors': array([1., 1.])}, None, 1)
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reused = 0
        self._connection: sqlite3.Connection | None = None

    @property
    def _file(self) -> sqlite3.Connection:
        """The open file. Raises `CheckpointError` if it is no store, or cannot be written."""
        if self._connection is None:
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._connection = sqlite3.connect(self.path)
                self._connection.execute(TABLE)
                self._connection.commit()
            except (sqlite3.Error, OSError) as error:
                text = f"cannot hold what a search has solved ({error}); remove it or choose another output"
                raise CheckpointError(text, path=self.path) from error
        return self._connection

    def get(self, key: str) -> dict[str, NDArray[np.float64]] | None:
        """The arrays put under this key; None if there are none."""
        if self._connection is None and not self.path.exists():
            return None
        found = self._file.execute("SELECT arrays FROM answers WHERE key = ?", (key,)).fetchone()
        if found is None:
            return None
        self.reused += 1
        with np.load(io.BytesIO(found[0]), allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}

    def put(self, key: str, arrays: dict[str, NDArray[np.float64]]) -> None:
        """Keep arrays; on disk when this returns. Raises `CheckpointError` if the disk is full."""
        content = io.BytesIO()
        np.savez(content, **arrays)  # type: ignore[arg-type]
        try:
            with self._file:
                self._file.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, content.getvalue()))
        except sqlite3.Error as error:
            raise CheckpointError(f"what was solved cannot be kept: {error}", path=self.path) from error

    def remove(self) -> None:
        """Close and delete: the search is written out."""
        if self._connection is not None:
            self._connection.close()
        self.path.unlink(missing_ok=True)
        self.path.with_name(f"{self.path.name}-journal").unlink(missing_ok=True)


def store_beside(out: Path) -> Path:
    """Where a search for this output waits.

    Examples
    --------
    >>> store_beside(Path("small")).name
    '.small.search'
    """
    return out.with_name(f".{out.name}{SUFFIX}")
