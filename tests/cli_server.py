"""Forks console commands from a process that imported everything; kills them where told.

Orders come as JSON lines on stdin: ``arguments``, and either ``seconds`` (kill after so long) or
``step`` (the process kills itself at its n-th look at the file system, as Python's audit events
count them; zero: count only), ``whole`` (kill the workers at once, not a moment later) and ``here``
(a fleet without workers). Each answer tells exit code, seconds and steps.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

WATCHED = ("open", "os.", "shutil.", "tempfile.")


@contextmanager
def server() -> Iterator[Server]:
    """A running server, ended at the end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    process = Popen([sys.executable, __file__], stdin=PIPE, stdout=PIPE, text=True, env=environment)
    try:
        yield Server(process)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


class Server:
    """The caller's side."""

    def __init__(self, process: Popen[str]) -> None:
        self._process = process

    def __call__(self, *arguments: object, **order: Any) -> dict[str, Any]:
        """Run a console command and say how it ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(
            json.dumps({"arguments": list(map(str, arguments)), **order}) + "\n"
        )
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


def _child(order: dict[str, Any], notes: str) -> None:
    import lsrdecomp.lora.fleet
    from lsrdecomp.cli.main import run
    from lsrdecomp.lora.fleet.fleet_run import run_job

    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(quiet, stream)
    os.dup2(os.open(notes + ".err", os.O_WRONLY | os.O_CREAT), 2)
    if order.get("here"):
        lsrdecomp.lora.fleet.joblib_runner = lambda *_: (
            lambda jobs, plan: (run_job(job, plan) for job in jobs)
        )
    if "step" in order:
        steps = 0

        def watch(event: str, _: Any) -> None:
            nonlocal steps
            if event.startswith(WATCHED):
                steps += 1
                if steps == order["step"]:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
    code = 0
    sys.argv = ["lsrdecomp", *order["arguments"]]
    try:
        run()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    Path(notes).write_text(str(steps if "step" in order else 0))
    sys.stderr.flush()
    os._exit(code)


def _serve() -> None:
    from typer.testing import CliRunner

    from lsrdecomp import analysis, cli, lora, plots
    from lsrdecomp.cli.app import app

    # Loaded here once, not by every child.
    for room in (
        analysis,
        lora.files,
        lora.search,
        lora.compress,
        lora.fleet,
        plots,
    ):
        for name in room.__all__:
            getattr(room, name)
    CliRunner().invoke(app, ["inspect", str(Path(cli.__file__).parent / "demo_adapter")])
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        for line in sys.stdin:
            order = json.loads(line)
            for left in Path(folder).iterdir():
                left.unlink()
            begun = time.perf_counter()
            pid = os.fork()
            if pid == 0:
                _child(order, str(notes))
            status = (
                _killed_after(pid, order["seconds"])
                if "seconds" in order
                else os.waitpid(pid, 0)[1]
            )
            time.sleep(0.0 if order.get("whole", True) else 0.3)
            _end_group(pid)
            answer = {
                "code": os.waitstatus_to_exitcode(status),
                "seconds": time.perf_counter() - begun,
            }
            answer["steps"] = int(notes.read_text()) if notes.exists() else 0
            errors = notes.with_suffix(".err")
            answer["stderr"] = errors.read_text(errors="replace")[-2000:] if errors.exists() else ""
            print(json.dumps(answer), flush=True)


def _killed_after(pid: int, seconds: float) -> int:
    """How a process ended that is killed unless it ends before."""
    ended, status = 0, 0
    while not ended and seconds > 0.0:
        time.sleep(min(seconds, 0.01))
        seconds -= 0.01
        ended, status = os.waitpid(pid, os.WNOHANG)
    if not ended:
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    return status


def _end_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    _serve()
