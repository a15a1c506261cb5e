"""The lock on a fleet's output: of two runs of the same part one does the work.

It is a lock of the operating system on a small file, which says whose it is. It ends with its
process, also on another host of a network file system; the file of a killed run is taken over.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError
from lsrdecomp.gateway import read_json_text
from lsrdecomp.lora.files.writing import fcntl

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path


@contextmanager
def fleet_lock(path: Path) -> Iterator[str | None]:
    """Hold the lock of a part of a fleet, in a file that is gone when the block ends.

    Parameters
    ----------
    path : Path
        The file.

    Yields
    ------
    str, or None
        Which run was killed here before, if one was.

    Raises
    ------
    CheckpointError
        If another run holds it, with host and process.

    Notes
    -----
    Not filelock, which is no dependency here and does not say who holds a lock, and not a lock of
    the directory, as `lsrdecomp.lora.files.writing.lock_path` has it: on network file systems that
    is unknown to other hosts.
    """
    handle = _acquire(path)
    try:
        killed = _holder(path)
        os.ftruncate(handle, 0)
        os.write(handle, json.dumps(_this_process()).encode())
        yield None if killed is None else _words(killed)
    finally:
        if os.name == "posix":  # elsewhere an open file cannot be removed
            path.unlink(missing_ok=True)
        os.close(handle)
        if os.name != "posix":
            path.unlink(missing_ok=True)


def _acquire(path: Path) -> int:
    """Return a handle of the file, locked, that is still at its path."""
    while True:
        # Not for reading alone: network file systems lock only what is open for writing.
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(handle, path)
            if os.path.samestat(os.fstat(handle), path.stat()):
                return handle
        except FileNotFoundError:  # the run that was here ended meanwhile
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path) -> None:
    """Lock an open file, or raise `CheckpointError` with whose it is.

    Where the system has no such locks, the process that the file names tells.
    """
    try:
        is_locked = _try_lock(handle)
    except OSError:  # a file system without locks
        is_locked = None
    holder = _holder(path)
    if is_locked is False:
        raise CheckpointError(
            f"{_words(holder or {})} is at work on this output; wait until it ends, or choose "
            "another output",
            path=path.parent,
        )
    if is_locked is None and holder is not None and not _is_dead(holder):
        raise CheckpointError(
            f"{_words(holder)} is at work on this output, or was killed, which this file system "
            f"does not tell; wait until it ends, or remove {path.name} if it has",
            path=path,
        )


def _try_lock(handle: int) -> bool | None:
    """Return whether an open file is locked for us; None where the system has no such locks."""
    if fcntl is None:
        return None
    for _ in range(5):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.05)  # perhaps a run that only looks whether another is at work
        else:
            return True
    return False


def _this_process() -> dict[str, Any]:
    return {"host": socket.gethostname(), "process": os.getpid()}


def _holder(path: Path) -> dict[str, Any] | None:
    """Return what a lock file says of its run, or None if it says nothing."""
    try:
        value = read_json_text(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _words(holder: Mapping[str, Any]) -> str:
    process = str(holder.get("process", "of another run"))
    return f"process {process[:20]} on host {str(holder.get('host', '?'))[:80]}"


def _is_dead(holder: Mapping[str, Any]) -> bool:
    """Return whether a process is known to be gone: one of this host, where the system tells."""
    process = holder.get("process")
    if holder.get("host") != socket.gethostname() or os.name != "posix":
        return False
    if not isinstance(process, int):
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return process == os.getpid()  # of a run that had our number before us
