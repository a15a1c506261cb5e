"""Runs of a suite on disk: finished ones never redone, failed ones told apart and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from lsrdecomp.errors import CheckpointError, LsrError, way_to_install
from lsrdecomp.lora.files.writing import new_file
from lsrdecomp.lora.train.finetune_record import RECORD, FinetuneRecord, read_record
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings

FAILURE = ".failure.json"
"""Ending of the file beside a run's directory that says why there is no such directory."""

INCIDENTAL = ("data", "dev_data", "device", "log_every", "save_every", "logs")
"""Settings that do not change what is measured: a run is the same run with others of these."""
LEFT_TO_THE_MACHINE = (("precision", "auto"), ("gradient_checkpointing", None))
"""Settings whose value the run itself chooses and records."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run to do, and where."""

    settings: FinetuneSettings
    directory: Path


@dataclass(frozen=True, slots=True)
class Failure:
    """A run that ended with an error."""

    kind: str
    message: str


Outcome = FinetuneRecord | Failure


def outcome(run: Run) -> Outcome | None:
    """What a run came to, if it was done.

    Raises
    ------
    CheckpointError
        If its directory holds a run with other settings; the message names them.
    """
    if (run.directory / RECORD).exists():
        record = read_record(run.directory)
        differing = _differing(record.settings, run.settings)
        if differing:
            raise CheckpointError(
                (
                    f"a finished run with other settings ({differing}); choose another output, or "
                    "remove it"
                ),
                path=run.directory,
            )
        return record
    failure = _failure(run)
    if failure.exists():
        return Failure(**json.loads(failure.read_text(encoding="utf-8")))
    return None


def do_runs(
    runs: Sequence[Run],
    *,
    workers: int = 1,
    retry: bool = False,
    on_run: Callable[[Run, Outcome], object] | None = None,
) -> None:
    """Do the runs that were not done yet; one that fails is recorded and does not stop the others.

    Parameters
    ----------
    runs : sequence of Run
    workers : int
        Processes; more than one needs joblib.
    retry : bool
        Do failed runs again.
    on_run : callable, optional
        Called with each run and its outcome, those done before first.

    Raises
    ------
    CheckpointError
        As `outcome`, before anything is run.
    """
    left = []
    for run in runs:
        before = outcome(run)
        if before is None or (retry and isinstance(before, Failure)):
            left.append(run)
        elif on_run is not None:
            on_run(run, before)
    for run, after in (
        _in_processes(left, workers) if workers > 1 else ((run, do_run(run)) for run in left)
    ):
        if on_run is not None:
            on_run(run, after)


def do_run(run: Run) -> Outcome:
    """Do one run, in its directory; an error becomes a `Failure` beside it."""
    from lsrdecomp.lora.train.finetune_run import finetune

    failure = _failure(run)
    try:
        record = finetune(run.settings, run.directory, resume=True)
    # Whatever stops one run is recorded, and the next one begins.
    except Exception as error:  # noqa: BLE001
        found = Failure(type(error).__name__, " ".join(str(error).split())[:1000])
        with new_file(failure, force=True) as part:
            part.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
        return found
    failure.unlink(missing_ok=True)
    return record


def _failure(run: Run) -> Path:
    return run.directory.with_name(run.directory.name + FAILURE)


def _in_processes(runs: Sequence[Run], workers: int) -> Iterator[tuple[Run, Outcome]]:
    try:
        from joblib import Parallel, delayed, parallel_config
    except ImportError as error:
        raise LsrError(f"several workers need joblib: {way_to_install('fleet')}") from error

    with parallel_config(backend="loky", n_jobs=workers, inner_max_num_threads=1):
        yield from Parallel(return_as="generator_unordered")(
            delayed(_labelled)(run) for run in runs
        )


def _labelled(run: Run) -> tuple[Run, Outcome]:
    return run, do_run(run)


def _differing(old: FinetuneSettings, new: FinetuneSettings) -> str:
    """Return the settings of a finished run that are not those asked for.

    What was left to the machine may be anything.
    """
    before, now = old.to_json(), new.to_json()
    names = [name for name in before if before[name] != now[name] and name not in INCIDENTAL]
    names = [name for name in names if (name, now[name]) not in LEFT_TO_THE_MACHINE]
    return ", ".join(f"{name} {str(before[name])[:60]} → {str(now[name])[:60]}" for name in names)
