"""What a long run has done so far, in one hidden directory beside its output: after a kill the same call goes on there.

Results lie under the digest of all that they depend on (`content_key`), so that none is ever taken
for another's. One run at a time works in a directory; when its output is whole the directory goes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from lsrdecomp.arrays import to_numpy
from lsrdecomp.checkpoints.files import read_json
from lsrdecomp.checkpoints.tensors import StoredTensor, TensorWriter, read_header
from lsrdecomp.checkpoints.writing import lock_directory, new_file, write_json
from lsrdecomp.errors import CheckpointError

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

RECORD = "journal.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Result:
    """Arrays by name, read when they are asked for, and JSON values."""

    arrays: Mapping[str, StoredTensor]
    facts: Any


class Journal:
    """Results of an unfinished run; a context that holds the lock and decides at its end what stays.

    If the block ends well the directory goes. If it ends with an error, the results stay and a note
    on the error says where; a directory without results goes too.

    Parameters
    ----------
    path : path
        The directory; made when the block is entered.
    reads_only : bool
        Of the processes of one run all but the first: no lock, and nothing is written or removed.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, Journal.beside(Path(folder) / "small") as journal:
    ...     key = content_key("norms", np.eye(2))
    ...     journal.put(key, {"errors": np.ones(2)}, facts={"sweeps": 8})
    ...     result, other = journal.get(key), journal.get(content_key("norms", np.eye(3)))
    ...     print(result.arrays["errors"].read(), result.facts, other)
    [1. 1.] {'sweeps': 8} None
    """

    def __init__(self, path: str | Path, *, reads_only: bool = False) -> None:
        self.path, self._reads_only = Path(path), reads_only
        self._lock: int | None = None
        self.resumes = False  # whether a run that was killed left results here

    @classmethod
    def beside(cls, out: str | Path, *, reads_only: bool = False) -> Self:
        """The journal of a run that writes ``out``."""
        target = Path(out).absolute()
        return cls(target.with_name(f".{target.name}.journal"), reads_only=reads_only)

    def __enter__(self) -> Self:
        """Lock the directory; `CheckpointError` if another run is at work there, or if it is no journal of ours."""
        if self._reads_only:
            return self
        record = self._locked()
        try:
            self._enter(record)
        except CheckpointError:
            self._leave(keep=bool(self._results))
            raise
        return self

    def _locked(self) -> dict[str, Any]:
        """Take the lock; the record that was there."""
        record = self.path / RECORD
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(self.path)
            if self._lock is not None and not os.path.samestat(
                os.fstat(self._lock), self.path.stat()
            ):
                raise FileNotFoundError  # the lock is on a directory that is gone
            about = read_json(record) if record.is_file() else {}
        except FileNotFoundError:  # the run that was here ended meanwhile
            self._unlock()
            return self._locked()
        except CheckpointError:
            self._unlock()
            raise
        except OSError as error:
            text = f"cannot hold what a run has done ({error.strerror}); remove it or choose another output"
            raise CheckpointError(text, path=self.path) from error
        if self._lock is None and os.name == "posix":
            text = f"process {about.get('process', 'of another run')} is writing this output"
            raise CheckpointError(
                f"{text}; wait until it ends, or choose another output", path=self.path
            )
        return about

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Remove the directory, or say on the error that it stays."""
        if self._reads_only:
            return
        keep = error is not None and bool(self._results)
        if error is not None and keep:
            waits = f"What was done waits in {self.path}"
            error.add_note(
                f"{waits}: the same command goes on from there; remove it to start again"
            )
        self._leave(keep)

    def _enter(self, record: Mapping[str, Any]) -> None:
        """Say whose the directory is; `CheckpointError` if it is not ours to use."""
        about = {"version": VERSION, "lsrdecomp": version("lsrdecomp")}
        if not record and self._results:
            raise CheckpointError(
                "is no journal written here; remove it or choose another output", path=self.path
            )
        if record and any(record.get(name) != value for name, value in about.items()):
            text = f"was left by lsrdecomp {record.get('lsrdecomp')}; finish with that, or remove it to start again"
            raise CheckpointError(text, path=self.path)
        self.resumes = bool(self._results)
        with new_file(self.path / RECORD, force=True) as part:
            write_json(part, about | {"process": os.getpid()})

    def _leave(self, keep: bool) -> None:
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def _results(self) -> list[Path]:
        """What is there beside the record; half a file that a kill left is nothing."""
        entries = (entry for entry in self.path.iterdir() if entry.name != RECORD)
        return [entry for entry in entries if not entry.name.endswith(".partial")]

    def directory(self, key: str) -> Path:
        """The place of a result that is a directory of files; whoever writes it makes it."""
        return self.path / key

    def get(self, key: str) -> Result | None:
        """What was put under a key; None if nothing was, or if the file is damaged."""
        path = self.path / f"{key}.safetensors"
        if not path.is_file():
            return None
        try:
            header = read_header(path)
            return Result(header.tensors, json.loads(header.metadata["facts"]))
        except (CheckpointError, KeyError, ValueError):
            return None

    def put(
        self, key: str, arrays: Mapping[str, NDArray[Any]] | None = None, *, facts: Any = None
    ) -> None:
        """Keep a result, in place of one that is there; it is on disk when this returns.

        Parameters
        ----------
        key : str
            From `content_key`.
        arrays : Mapping of name to array, optional
        facts : JSON value, optional

        Raises
        ------
        CheckpointError
            If the disk is full.
        """
        if self._reads_only:
            return
        with (
            new_file(self.path / f"{key}.safetensors", force=True) as part,
            TensorWriter(self.path) as writer,
        ):
            for name, array in (arrays or {}).items():
                writer.add(name, array)
            writer.write(part, {"facts": json.dumps(facts)})


def content_key(*values: Any) -> str:
    """A digest of all that a result depends on.

    Parameters
    ----------
    *values
        Arrays, plain values, and records, mappings and sequences of such.

    Returns
    -------
    str
        40 hexadecimal digits, the same in every process.

    Examples
    --------
    >>> content_key("a", [1, 2.0]) == content_key("a", (1, 2.0)), content_key("a") == content_key("b")
    (True, False)
    """
    digest = hashlib.blake2b(digest_size=20)
    _feed(digest, values)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if is_dataclass(value) and not isinstance(value, type):
        value = [type(value).__name__, *(getattr(value, member.name) for member in fields(value))]
    if isinstance(value, Mapping):
        value = sorted(value.items())
    if isinstance(value, list | tuple):
        digest.update(f"[{len(value)}]".encode())
        for part in value:
            _feed(digest, part)
    elif hasattr(value, "shape"):
        array = np.ascontiguousarray(to_numpy(value))
        digest.update(f"{array.dtype.str}{array.shape}".encode() + array.tobytes())
    elif value is None or isinstance(value, str | int | float | bytes):
        digest.update(f"{value!r};".encode())
    else:
        raise TypeError(f"a {type(value).__name__} has no content that could be a key")
