"""Fleets: thousands of adapters under one plan, on this host or on a Ray cluster, resumable, none lost."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.checkpoints.files import read_json, sha256
from lsrdecomp.checkpoints.provenance import provenance
from lsrdecomp.checkpoints.sums import changed_files
from lsrdecomp.checkpoints.writing import remove_leftovers
from lsrdecomp.compression.compress import REPORT, compress
from lsrdecomp.compression.plan import CompressionPlan
from lsrdecomp.errors import CheckpointError, LsrError

MANIFEST = "fleet.jsonl"
FIRST = b'{"plan":'
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "pytorch_lora_weights.safetensors")
State = Literal["done", "missed", "failed"]


@dataclass(frozen=True, slots=True)
class Job:
    """One adapter to compress."""

    name: str  # path below the input directory
    source: str
    out: str
    max_memory: int | None = None  # as for `open_checkpoint`
    device: str | None = None  # as for `compress`; set by the runner


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one adapter ended.

    Examples
    --------
    >>> Outcome("style-7", "failed", "adapter_model.safetensors: truncated").parameters
    0
    """

    name: str
    state: State
    message: str = ""  # why it missed or failed
    parameters_before: int = 0
    parameters: int = 0
    relative_error: float = 0.0
    attempts: int = 1


Runner = Callable[[Sequence[Job], CompressionPlan], Iterator["Outcome | Broken"]]


@dataclass(frozen=True, slots=True)
class Broken:
    """A job whose worker died (killed, out of memory): to be tried again on its own."""

    job: Job
    message: str


def find_adapters(folder: Path) -> list[str]:
    """Names, relative to ``folder``, of all directories below it that hold adapter weights; sorted.

    Hidden directories are left out: what a killed run left half written is one.

    Examples
    --------
    >>> from importlib.resources import files
    >>> find_adapters(Path(str(files("lsrdecomp") / "cli")))
    ['demo_adapter']
    """
    if not folder.is_dir():
        raise CheckpointError("is not a directory of adapters", path=folder)
    found = {path.parent.relative_to(folder).as_posix() for name in WEIGHTS for path in folder.rglob(name)}
    return sorted(name for name in found - {"."} if not any(part.startswith(".") for part in name.split("/")))


def run_fleet(
    folder: str | Path,
    out: str | Path,
    plan: CompressionPlan,
    *,
    runner: Runner,
    retries: int = 1,
    max_memory: int | None = None,
    on_outcome: Callable[[Outcome, int], Any] | None = None,
) -> list[Outcome]:
    """Compress every adapter below ``folder`` into the same place below ``out``.

    Each output appears whole or not at all, and each outcome is one line appended to ``out/fleet.jsonl``. Called again
    after a kill, only what is not yet done runs; an output whose line was lost is recognised by its own record. One
    adapter that fails, or kills its worker, never stops the others.

    Parameters
    ----------
    folder, out : path
        ``out`` must not lie inside ``folder``.
    plan : CompressionPlan
        One for all; a manifest of another plan is refused.
    runner : callable
        Where jobs run: `lsrdecomp.fleet.runners.joblib_runner`, `ray_runner`.
    retries : int
        Further attempts, each in a process of its own, for a job whose worker died.
    max_memory : int, optional
        Bytes that one layer in float64, or one other tensor, may take; an adapter with a larger one fails unread.
    on_outcome : callable, optional
        Called with each new outcome and the number of jobs of this run.

    Returns
    -------
    list of Outcome
        Of all adapters, in the order of their names; those done earlier included.

    Raises
    ------
    CheckpointError
        If there is nothing to do, or the manifest belongs to another plan.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from shutil import copytree
    >>> from tempfile import TemporaryDirectory
    >>> from lsrdecomp.fleet import joblib_runner
    >>> with TemporaryDirectory() as place:
    ...     for name in ("first", "second"):
    ...         _ = copytree(files("lsrdecomp.cli") / "demo_adapter", Path(place) / "in" / name)
    ...     plan = CompressionPlan(separation_rank=1)
    ...     done = run_fleet(Path(place) / "in", Path(place) / "out", plan, runner=joblib_runner(1))
    >>> [(one.name, one.state, one.parameters_before // one.parameters) for one in done]
    [('first', 'done', 24), ('second', 'done', 24)]
    """
    folder, out = Path(folder).resolve(), Path(out).resolve()
    if out == folder or folder in out.parents:
        raise CheckpointError(f"lies inside the input {folder}; choose another output", path=out)
    names = find_adapters(folder)
    if not names:
        raise CheckpointError(f"holds no adapters (directories with {' or '.join(WEIGHTS)})", path=folder)
    out.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(out / MANIFEST, plan)
    known = manifest.outcomes
    jobs = [
        Job(name, str(folder / name), str(out / name), max_memory)
        for name in names
        if not _settled(known.get(name), out / name)
    ]
    pending: list[Job] = []
    for job in jobs:
        finished = _recognise(job, plan)
        if finished is None:
            pending.append(job)
        else:
            manifest.append(finished)
    total = len(pending)
    for attempt in range(1, retries + 2):
        broken: list[Job] = []
        for result in _rounds(pending, plan, runner, alone=attempt > 1):
            if isinstance(result, Broken) and attempt <= retries:
                broken.append(result.job)
                continue
            if isinstance(result, Broken):
                result = Outcome(result.job.name, "failed", result.message)
            outcome = replace(result, attempts=attempt)
            manifest.append(outcome)
            if on_outcome is not None:
                on_outcome(outcome, total)
        pending = broken
    for name in names:  # what workers that were killed, in this run or an earlier one, left half written
        remove_leftovers(out / name, age=0.0)
    return [manifest.outcomes[name] for name in names]


def run_job(job: Job, plan: CompressionPlan) -> Outcome:
    """Compress one adapter; every fault becomes an outcome of one line."""
    try:
        result = compress(open_checkpoint(job.source, max_memory=job.max_memory), plan, device=job.device)
        total = result.totals
        figures = total.parameters_before, total.parameters, total.relative_error
        if not result.met:
            worst = f"{total.worst_layer} at {total.worst_error:.3g}"
            text = f"{total.missed} of {total.layers} layers above the tolerance, {worst}"
            return Outcome(job.name, "missed", text, *figures)
        result.save(job.out, force=True)
        return Outcome(job.name, "done", "", *figures)
    except (LsrError, OSError, ArithmeticError, ValueError, MemoryError) as error:
        return Outcome(job.name, "failed", " ".join(str(error).split()) or type(error).__name__)


class Manifest:
    """Outcomes as JSON lines after a first line with the plan; only ever appended to, each line flushed to disk.

    A last line cut by a kill is ignored and overwritten by the next one.
    """

    def __init__(self, path: Path, plan: CompressionPlan) -> None:
        self.path = path
        self.outcomes: dict[str, Outcome] = {}
        lines = self._sound_lines()
        if lines:
            held = lines[0].get("plan")
            if held != _plain(plan):
                text = f"belongs to another plan, {json.dumps(held)[:400]}; choose another output"
                raise CheckpointError(text, path=path)
        else:
            self._write(json.dumps({"plan": _plain(plan)}))
        for line in lines[1:]:
            outcome = _outcome(line)
            if outcome is None:
                text = f"{json.dumps(line)[:200]} is not an outcome written here; choose another output"
                raise CheckpointError(text, path=path)
            self.outcomes[outcome.name] = outcome

    def append(self, outcome: Outcome) -> None:
        self.outcomes[outcome.name] = outcome
        self._write(json.dumps(asdict(outcome)))

    def _sound_lines(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
        except (ValueError, RecursionError):
            lines = [None]
        if not all(isinstance(line, dict) for line in lines) or (not lines and content[:8] != FIRST[: len(content)]):
            raise CheckpointError("is not a manifest written here; choose another output", path=self.path)
        if len(whole) < len(content):
            os.truncate(self.path, len(whole))
        return lines

    def _write(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())


def _outcome(line: Mapping[str, Any]) -> Outcome | None:
    """The outcome of a line of a manifest, if it is one."""
    kinds = {"name": str, "state": str, "message": str, "relative_error": int | float}
    fits = set(line) <= set(Outcome.__slots__) and {"name", "state"} <= set(line)
    fits = fits and all(isinstance(value, kinds.get(key, int)) for key, value in line.items())
    return Outcome(**line) if fits and line["state"] in get_args(State) else None


def _rounds(jobs: Sequence[Job], plan: CompressionPlan, runner: Runner, *, alone: bool) -> Iterator[Outcome | Broken]:
    """All jobs together, or each in a run of its own, so that a job that kills its worker takes no other with it."""
    for group in [[job] for job in jobs] if alone else [jobs] if jobs else []:
        yield from runner(group, plan)


def _settled(outcome: Outcome | None, out: Path) -> bool:
    """Whether nothing is left to do: done and still there, or not to be had under this plan."""
    return outcome is not None and (outcome.state == "missed" or (outcome.state == "done" and out.is_dir()))


def _recognise(job: Job, plan: CompressionPlan) -> Outcome | None:
    """The outcome of an output that was written but not recorded before a kill."""
    if not Path(job.out).is_dir():
        return None
    try:
        source, written = open_checkpoint(job.source), open_checkpoint(job.out)
        record, report = provenance(written), read_json(Path(job.out) / REPORT)
        origin = record.get("source")
        same_source = isinstance(origin, dict) and origin.get("sha256") == sha256(source.weights)
        if not same_source or record.get("plan") != _plain(plan) or changed_files(Path(job.out)) != ():
            return None
    except (LsrError, OSError):
        return None
    totals = report.get("totals")
    error = totals.get("relative_error") if isinstance(totals, dict) else None
    figures = source.adapter_parameters, written.adapter_parameters, float(error or 0.0)
    return Outcome(job.name, "done", "", *figures)


def _plain(plan: CompressionPlan) -> Any:
    """The plan as JSON would give it back."""
    return json.loads(json.dumps(plan.to_json()))


def summary(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Counts and sums for the last line of a run.

    Examples
    --------
    >>> done = Outcome("a", "done", parameters_before=73728, parameters=1536)
    >>> summary([done, Outcome("b", "failed", "truncated")])
    {'adapters': 2, 'done': 1, 'missed': 0, 'failed': 1, 'parameters_before': 73728, 'parameters': 1536}
    """
    listed = list(outcomes)
    done = [outcome for outcome in listed if outcome.state == "done"]
    return {
        "adapters": len(listed),
        **{state: sum(outcome.state == state for outcome in listed) for state in ("done", "missed", "failed")},
        "parameters_before": sum(outcome.parameters_before for outcome in done),
        "parameters": sum(outcome.parameters for outcome in done),
    }
