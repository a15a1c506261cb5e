"""Records: what a benchmark measured, and which code on which machine measured it.

A record is a JSON object in ``results/``. Its key ``provenance`` lists the processes that wrote
rows into it, oldest first, each with what `Run` names. Whoever continues a record passes on the
list of the file that was read; whoever starts one leaves the key out.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import tomllib
from dataclasses import asdict, dataclass, fields
from datetime import UTC, date, datetime
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsrdecomp.lora.base.behaviour import Behaviour
    from lsrdecomp.lora.compress.compress_lora import MeasuredCompression

Record = dict[str, Any]

RESULTS = Path(__file__).parent / "results"
"""Where the records are that the pages show."""

THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("BLIS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"),
)
"""What tells linear algebra how many threads to use."""

STARTED = datetime.now(UTC).isoformat(timespec="seconds")
"""When this process began, by which its entry in a record is known."""


@dataclass(frozen=True)
class Run:
    """One process that wrote into a record.

    Parameters
    ----------
    lsrdecomp : str
        Version of this package.
    commit : str
        Twelve digits of the commit that was checked out.
    changes : str, optional
        Digest of the difference to that commit; None for a clean tree.
    started : str
        Date and time, UTC.
    command : str
        What was typed.
    seed : int or list of int, optional
        None where nothing is drawn.
    versions : dict
        Of Python and of the packages that matter.
    threads : dict
        Cores, variables that are set, and what the libraries would use.
    processor : str
    cpu_seconds : float
        Of this process and of those that it started, until the record was written.
    """

    lsrdecomp: str
    commit: str
    changes: str | None
    started: str
    command: str
    seed: int | list[int] | None
    versions: dict[str, str]
    threads: dict[str, Any]
    processor: str
    cpu_seconds: float


def this_run(*packages: str, seed: int | list[int] | None) -> Run:
    """Return what a record says of this process.

    ``packages`` are those whose versions are told beside Python's, NumPy's and SciPy's.
    """
    names = ("numpy", "scipy", *packages)
    return Run(
        lsrdecomp=version_of_clone(),
        commit=CHECKOUT[0],
        changes=CHECKOUT[1],
        started=STARTED,
        command=_command(),
        seed=seed,
        versions={"python": platform.python_version()} | {name: version(name) for name in names},
        threads=threads(),
        processor=_processor(),
        cpu_seconds=round(_cpu_seconds(), 1),
    )


def save(
    path: Path, results: dict[str, Any], *packages: str, seed: int | list[int] | None
) -> dict[str, Any]:
    """Write a record whole, with an entry for this process, and return it.

    Parameters
    ----------
    path : Path
    results : dict
        The record; one that was read from the file goes on with its entries.
    packages : str
        Packages whose versions matter, beside NumPy and SciPy.
    seed : int or list of int, optional
    """
    run = asdict(this_run(*packages, seed=seed))
    earlier = [entry for entry in results.get("provenance", []) if entry["started"] != STARTED]
    results = {**results, "provenance": [*earlier, run]}
    text = json.dumps(results, indent=1, ensure_ascii=False, default=float) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    # The file is replaced whole: a kill leaves the record of before.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
    return results


def load(path: Path) -> Record:
    """Return a record that is to be continued; an empty one if there is no file."""
    if not path.exists():
        return {}
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def problems(record: Record) -> list[str]:
    """Return what is missing or wrong in the provenance of a record; nothing if it is whole."""
    entries = record.get("provenance")
    if not entries:
        return ["no provenance"]
    whole = {field.name for field in fields(Run)}
    found = []
    for place, entry in enumerate(entries):
        missing = whole - set(entry)
        if missing:
            found.append(f"entry {place} lacks {', '.join(sorted(missing))}")
        elif not _is_count(entry["cpu_seconds"]):
            found.append(f"entry {place}: cpu_seconds is {entry['cpu_seconds']!r}")
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, float | int) and value >= 0


def measured_with(record: Record) -> tuple[str, date]:
    """Return the oldest version that wrote rows into a record, and the day on which it began."""
    entries = record["provenance"]
    oldest = min(entries, key=lambda entry: _release(entry["lsrdecomp"]))
    return oldest["lsrdecomp"], datetime.fromisoformat(oldest["started"]).date()


def is_outdated(version_of_record: str, version_now: str) -> bool:
    """Return whether a record is of an earlier minor release than this one.

    Examples
    --------
    >>> is_outdated("0.3.1", "0.4.0.dev0"), is_outdated("0.4.0.dev0", "0.4.2")
    (True, False)
    """
    return _release(version_of_record)[:2] < _release(version_now)[:2]


def _release(version_text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version_text.split(".")[:3] if part.isdigit())


def threads() -> dict[str, Any]:
    """Return how many threads this process could use: cores, variables that are set, and libraries.

    The library itself takes one BLAS thread for small problems, whatever stands here.
    """
    # Some commands set the number of threads before NumPy is imported.
    from lsrdecomp.threads import blas_libraries

    torch = sys.modules.get("torch")
    return {
        "cores": os.cpu_count(),
        "variables": {name: os.environ[name] for name in THREAD_VARIABLES if name in os.environ},
        "blas": [library.threads for library in blas_libraries()],
        "torch": None if torch is None else torch.get_num_threads(),
    }


def version_of_clone() -> str:
    """Return the version that the clone states; what is installed may lag behind it."""
    text = (RESULTS.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    return str(tomllib.loads(text)["project"]["version"])


def _git(*arguments: str) -> str:
    """Return what git prints of this clone; nothing where there is none."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def _digest_of_changes() -> str | None:
    """Return a digest of what differs from the commit, records apart; None if nothing does."""
    changes = _git("diff", "HEAD", "--", ":(top)", ":(top,exclude)benchmarks/results")
    return sha256(changes.encode()).hexdigest()[:12] if changes else None


def _command() -> str:
    """Return the command of this process as it is typed from the clone."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", spec.name.removesuffix(".__main__")] if spec else [Path(sys.argv[0]).name]
    return shlex.join(["python", *program, *map(_without_folder, sys.argv[1:])])


def _without_folder(argument: str) -> str:
    """Return an argument, ``PATH`` or ``NAME=PATH``, without folders that are this machine's own.

    Examples
    --------
    >>> _without_folder("/tmp/lora"), _without_folder("LSR in 3 kB=/tmp/work/LSR")
    ('lora', 'LSR in 3 kB=LSR')
    >>> _without_folder("docs/images")
    'docs/images'
    """
    name, equals, value = argument.rpartition("=")
    if not Path(value).is_absolute():
        return argument
    return name + equals + Path(value).name


def _processor() -> str:
    """Return the model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _cpu_seconds() -> float:
    """Return user and system seconds of this process and of those that it waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


CHECKOUT = (_git("rev-parse", "--short=12", "HEAD") or "unknown", _digest_of_changes())
"""Commit and changes when this process began: another may be checked out before it ends."""


def said_and_found(keep: float, small: MeasuredCompression, found: Behaviour) -> dict[str, Any]:
    """Return what a compression to a share says, and what is found on data that it never saw."""
    said = small.fidelity
    return {
        "keep": keep,
        "bytes": said.bytes_after,
        "bytes_before": said.bytes_before,
        "promised": said.kept,
        "promised_error": said.standard_error,
        "kept": found.kept,
        "standard_error": found.standard_error,
    }
