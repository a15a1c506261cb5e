"""Results of an unfinished run, in a hidden directory beside its output.

After a kill the same call goes on from there.

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
from lsrdecomp.errors import CheckpointError, PrecisionError
from lsrdecomp.gateway import read_json_text
from lsrdecomp.lora.files.digests import ContentDigests
from lsrdecomp.lora.files.file_checks import read_json
from lsrdecomp.lora.files.tensors import StoredTensor, TensorWriter, file_digests, read_header
from lsrdecomp.lora.files.writing import lock_path, new_file, write_json

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

RECORD = "journal.json"
VERSION = 1


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One result: arrays by name, read when they are asked for, and JSON values."""

    arrays: Mapping[str, StoredTensor]
    values: Any


class Journal:
    """Results of an unfinished run: a context that holds the lock and decides what stays.

    If the block ends well the directory goes. If it ends with an error, the results stay and a note
    on the error says where; a directory without results goes too, and one whose numbers do not fit
    the storage that was asked for.

    Parameters
    ----------
    path : path
        The directory; made when the block is entered.
    reads_only : bool
        Of the processes of one run all but the first: no lock, and nothing is written or removed.

    Attributes
    ----------
    resumes : bool
        Whether a run that was killed left results here.

    Examples
    --------
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Journal.beside(Path(folder.name) / "small") as journal:
    ...     key = content_key("norms", np.eye(2))
    ...     journal.put(key, {"errors": np.ones(2)}, values={"sweeps": 8})
    ...     entry = journal.get(key)
    ...     print(entry.arrays["errors"].read(), entry.values)
    ...     print(journal.get(content_key("norms", np.eye(3))))
    [1. 1.] {'sweeps': 8}
    None
    >>> folder.cleanup()
    """

    def __init__(self, path: str | Path, *, reads_only: bool = False) -> None:
        self.path = Path(path)
        self.resumes = False
        self._reads_only = reads_only
        self._lock: int | None = None

    @classmethod
    def beside(cls, out: str | Path, *, reads_only: bool = False) -> Self:
        """Return the journal of a run that writes ``out``."""
        target = Path(out).absolute()
        return cls(target.with_name(f".{target.name}.journal"), reads_only=reads_only)

    def __enter__(self) -> Self:
        """Lock the directory.

        Raises
        ------
        CheckpointError
            If another run is at work there, or if it is no journal of ours.
        """
        if self._reads_only:
            return self
        record = self._lock_and_read_record()
        try:
            self._take_over(record)
        except CheckpointError:
            self._leave(keep=bool(self._results))
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        """Remove the directory, or say on the error that it stays."""
        if self._reads_only:
            return
        # The same command would be refused again, and another storage has no use for the results.
        is_refused = isinstance(error, PrecisionError)
        keep = error is not None and not is_refused and bool(self._results)
        if error is not None and keep:
            error.add_note(
                f"What was done waits in {self.path}: the same command goes on from there; "
                "remove it to start again"
            )
        self._leave(keep)

    def _lock_and_read_record(self) -> dict[str, Any]:
        """Take the lock, and return the record that was there."""
        record_path = self.path / RECORD
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = lock_path(self.path)
            self._check_lock_is_on_path()
            record = read_json(record_path) if record_path.is_file() else {}
        except FileNotFoundError:  # the run that was here ended meanwhile
            self._unlock()
            return self._lock_and_read_record()
        except CheckpointError:
            self._unlock()
            raise
        except OSError as error:
            raise CheckpointError(
                f"cannot hold what a run has done ({error.strerror}); remove it or choose another "
                "output",
                path=self.path,
            ) from error
        if self._lock is None and os.name == "posix":
            process = record.get("process", "of another run")
            raise CheckpointError(
                f"process {process} is writing this output; wait until it ends, or choose another "
                "output",
                path=self.path,
            )
        return record

    def _check_lock_is_on_path(self) -> None:
        """Raise `FileNotFoundError` if the directory that was locked is gone by now."""
        if self._lock is None:
            return
        if not os.path.samestat(os.fstat(self._lock), self.path.stat()):
            raise FileNotFoundError

    def _take_over(self, record: Mapping[str, Any]) -> None:
        """Write whose the directory is; `CheckpointError` if it is not ours to use."""
        ours = {"version": VERSION, "lsrdecomp": version("lsrdecomp")}
        if not record and self._results:
            raise CheckpointError(
                "is no journal written here; remove it or choose another output", path=self.path
            )
        if record and any(record.get(name) != value for name, value in ours.items()):
            raise CheckpointError(
                f"was left by lsrdecomp {record.get('lsrdecomp')}; finish with that, or remove it "
                "to start again",
                path=self.path,
            )
        self.resumes = bool(self._results)
        with new_file(self.path / RECORD, force=True) as part:
            write_json(part, ours | {"process": os.getpid()})

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
        """Everything beside the record; half a file that a kill left is nothing."""
        return [
            path
            for path in self.path.iterdir()
            if path.name != RECORD and path.suffix != ".partial"
        ]

    def directory(self, key: str) -> Path:
        """Return the place of a result that is a directory of files; who writes it makes it."""
        return self.path / key

    def get(self, key: str) -> JournalEntry | None:
        """Return what was put under a key; None if nothing was, or if the file changed since."""
        path = self.path / f"{key}.safetensors"
        if not path.is_file():
            return None
        try:
            header = read_header(path)
            if ContentDigests.read(header.metadata) != file_digests(path):
                return None
            return JournalEntry(header.tensors, read_json_text(header.metadata["values"]))
        except (CheckpointError, KeyError, ValueError):
            return None

    def put(
        self,
        key: str,
        arrays: Mapping[str, NDArray[Any]] | None = None,
        *,
        values: Any = None,
    ) -> None:
        """Keep a result, in place of one that is there; it is on disk when this returns.

        Parameters
        ----------
        key : str
            From `content_key`.
        arrays : Mapping of name to array, optional
        values : JSON value, optional

        Raises
        ------
        CheckpointError
            If the disk is full.
        """
        if self._reads_only:
            return
        # Among thousands of results none looks for halves of others: they go with the directory.
        path = self.path / f"{key}.safetensors"
        with (
            new_file(path, force=True, clears_leftovers=False) as part,
            TensorWriter(self.path) as writer,
        ):
            for name, array in (arrays or {}).items():
                writer.add(name, array)
            writer.write(part, writer.with_digests({"values": json.dumps(values)}))


def content_key(*values: Any) -> str:
    """Return a digest of all that a result depends on.

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
    >>> content_key("a", [1, 2.0]) == content_key("a", (1, 2.0))
    True
    >>> content_key("a") == content_key("b")
    False
    """
    digest = hashlib.blake2b(digest_size=20)
    _feed(digest, values)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    """Add a value to a digest, with its type or its length."""
    if is_dataclass(value) and not isinstance(value, type):
        members = [getattr(value, member.name) for member in fields(value)]
        value = [type(value).__name__, *members]
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
