"""Runs pytest in a child that has torch and its like imported, and a copy of the project to itself.

Importing torch, transformers and PEFT takes longer than most trials. A server process imports them
once, nothing of the project, and forks a child for each run.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PRELOADED = (
    "pytest",
    "hypothesis",
    "numpy",
    "scipy.linalg",
    "scipy.sparse",
    "tensorly",
    "torch",
    "transformers",
    "peft",
)
"""What most tests import, of other packages."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a child may use.

    Attributes
    ----------
    factor : float
        CPU seconds, as a multiple of what the same tests took without a fault.
    start : float
        CPU seconds beside them, for the imports of the package and of the tests.
    waiting : float
        Seconds by the clock, as a multiple of the CPU seconds that are allowed: a fault that makes
        a test wait for ever uses no CPU. The machine may have other work, so a run that was ended
        counts only where one without the fault takes less than half at the same time.
    memory : int
        GiB of address space, so that a wrong size ends in a MemoryError.
    """

    factor: float = 3.0
    start: float = 25.0
    waiting: float = 5.0
    memory: int = 32

    def scaled(self, by: float) -> Limits:
        """Return the same limits with another share of the time."""
        return replace(self, factor=by * self.factor, start=by * self.start)


def server(preloaded: Sequence[str] = PRELOADED) -> Any:
    """Return the context whose children are forked from a process with these modules imported."""
    # Before NumPy is imported there: matrices of tests are small
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preloaded))
    return context


def run(
    context: Any,
    copy: Path,
    work: Callable[..., Any],
    *arguments: Any,
    seconds: float,
    limits: Limits,
) -> Any:
    """Return what ``work(copy, *arguments)`` returns in a child, or None if it was ended.

    The child may use a multiple of ``seconds`` of CPU; it leads a process group, which is ended
    with it.
    """
    allowed = limits.start + limits.factor * seconds
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(
        target=_child, args=(sender, copy, work, arguments, allowed, limits.memory)
    )
    child.start()
    sender.close()
    result = None
    try:
        if receiver.poll(limits.waiting * allowed):
            # Ended by its limit, a child closes the pipe without a word
            with contextlib.suppress(EOFError):
                result = receiver.recv()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
        receiver.close()
    return result


def _child(
    sender: Connection,
    copy: Path,
    work: Callable[..., Any],
    arguments: Sequence[Any],
    allowed: float,
    memory: int,
) -> None:
    os.setsid()
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(allowed), used + int(allowed)))
    resource.setrlimit(resource.RLIMIT_AS, (memory << 30, memory << 30))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.chdir(copy)
    # Of the project nothing but the copy; its environment may lie in it, as .venv.
    original = Path(__file__).resolve().parents[2]
    sources = {str(original), str(original / "tests"), str(original / "benchmarks")}
    sys.path[:] = [str(copy)] + [p for p in sys.path if p and p not in sources]
    os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": ""}
    os.environ["LSRDECOMP_CACHE"] = str(copy / ".pytest_cache" / "lsrdecomp")
    sys.dont_write_bytecode = False
    sender.send(work(copy, *arguments))
    sender.close()
