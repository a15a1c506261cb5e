"""Fleets: thousands of adapters under one plan, resumable, and none is lost.

They run on this host or on a Ray cluster.
"""

from __future__ import annotations

import os
from collections import Counter as Counts
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lsrdecomp.errors import CheckpointError, LsrError, UnsupportedError
from lsrdecomp.lora.compress.truncate import truncate
from lsrdecomp.lora.files import CONFIG, Checkpoint, content_key, open_checkpoint
from lsrdecomp.lora.files.file_checks import changed_files, read_json
from lsrdecomp.lora.files.format import BESIDE_CONFIG, WEIGHT_SUFFIXES
from lsrdecomp.lora.files.gguf_files import is_gguf_adapter
from lsrdecomp.lora.files.integrity import check_integrity
from lsrdecomp.lora.files.progress import Counter, OnStep
from lsrdecomp.lora.files.statistics import METADATA, read_statistics
from lsrdecomp.lora.files.writing import remove_leftovers
from lsrdecomp.lora.fleet.fleet_lock import fleet_lock
from lsrdecomp.lora.fleet.manifest import MANIFEST, Manifest, Outcome, State
from lsrdecomp.lora.search.plan import CompressionPlan, Resources, Search
from lsrdecomp.lora.search.request import Request
from lsrdecomp.lora.search.searched import search_adapter

FILE = ".safetensors"
NAMED_BY_DIRECTORY = (*BESIDE_CONFIG, "pytorch_lora_weights.safetensors")
"""Weights that programs save under one name, each in a directory of its own."""
CONFIGS = (CONFIG, "config.json", METADATA)
"""Of an adapter, of a model and of statistics: a file beside one is no adapter of its own."""


@dataclass(frozen=True, slots=True)
class Job:
    """One adapter to compress."""

    name: str  # path below the input directory
    source: str
    out: str
    max_memory: int | None = None  # as for `open_checkpoint`
    statistics: str | None = None  # their directory; None: the Frobenius norm
    like: str | None = None  # a compressed adapter of the same layers whose shapes are taken
    to: str | None = None  # "same": a LoRA in the source's own format; None: an LSR directory
    device: str | None = None  # as for `compress`; set by the runner


Runner = Callable[[Sequence[Job], CompressionPlan], Iterator[Outcome]]
"""Runs jobs somewhere, and yields their outcomes as they end."""


def find_adapters(folder: Path) -> list[str]:
    """Find all adapters below a folder: whatever `open_checkpoint` may read, or refuse by name.

    They are the directories with an adapter_config.json, with or without weights, and all weight
    files that no config lies beside, of an adapter, a model or statistics. Hidden directories are
    left out: what a killed run left half written is one.

    Parameters
    ----------
    folder : Path

    Returns
    -------
    list of str
        Paths relative to ``folder``, sorted.

    Raises
    ------
    CheckpointError
        If it is no directory.

    Examples
    --------
    >>> from importlib.resources import files
    >>> find_adapters(Path(str(files("lsrdecomp") / "cli")))
    ['demo_adapter']
    """
    if not folder.is_dir():
        raise CheckpointError("is not a directory of adapters", path=folder)
    found: list[Path] = []
    for directory, _, files in os.walk(folder):
        place = Path(directory).relative_to(folder)
        if not _is_hidden(place):
            visible = [name for name in files if not name.startswith(".")]
            found += _adapters_of(place, visible)
            for name in visible:
                if name.endswith(".gguf") and is_gguf_adapter(Path(directory, name)):
                    found.append(place / name)
    return sorted(path.as_posix() for path in found if path != Path())


def _adapters_of(place: Path, files: Sequence[str]) -> list[Path]:
    """Return the adapters in one directory: itself, or its weight files, or none."""
    if CONFIG in files:
        return [place]
    weights = [name for name in files if Path(name).suffix in WEIGHT_SUFFIXES]
    if len(weights) == 1 and weights[0] in NAMED_BY_DIRECTORY and place != Path():
        return [place]
    if any(config in files for config in CONFIGS):
        return [place / name for name in weights if name in NAMED_BY_DIRECTORY]
    return [place / name for name in weights]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def run_fleet(
    folder: str | Path,
    out: str | Path,
    plan: CompressionPlan,
    *,
    runner: Runner,
    max_memory: int | None = None,
    statistics: str | Path | None = None,
    share: bool = True,
    to: str | None = None,
    shard: tuple[int, int] | None = None,
    on_step: OnStep | None = None,
    on_note: Callable[[str], Any] | None = None,
) -> list[Outcome]:
    """Compress every adapter below ``folder`` into the same place below ``out``.

    Each output appears whole or not at all, and each outcome is one line appended to
    ``out/fleet.jsonl``. Called again after a kill, only what has no line yet runs, and what was
    made of a source that changed since. One adapter that fails never stops the others; one whose
    worker died is tried once more, alone. An output whose source is gone is named and stays.

    Parameters
    ----------
    folder, out : path
        ``out`` must not lie inside ``folder``.
    plan : CompressionPlan
        One for all; a manifest of another plan is refused.
    runner : callable
        Where jobs run: `lsrdecomp.lora.fleet.runners.joblib_runner`, `ray_runner`.
    max_memory : int, optional
        Bytes that one layer in float64, or one other tensor, may take; an adapter with a larger one
        fails unread.
    statistics : path, optional
        Statistics for all adapters, or a directory with those of each at its own place: errors then
        count in the Fisher norm.
    share : bool
        Whether adapters of one base and the same layers share their search: the first of them, by
        name, is searched before the others, which take its shapes (`Search.like`). Of no use to
        plans of given terms or of a tolerance.
    to : str, optional
        "same": each is cut by truncated SVD and stays in its own format, see `truncate`. Absent,
        LSR directories are written.
    shard : (int, int), optional
        Which part of the names, and of how many: ``(3, 8)`` is the third of eight. Hosts that share
        a file system can each run one at the same time, and a call without it, when they are done,
        runs the rest and returns the outcomes of all. Each part searches for itself.
    on_step : callable, optional
        Called with a `ProgressUpdate` as adapters end, in whichever state.
    on_note : callable, optional
        Called with a sentence on a run that was killed here before, and one on sources that
        changed.

    Returns
    -------
    list of Outcome
        Of all adapters, or those of the part, in the order of their names; those done earlier
        included. Then, without ``shard``, those whose sources are gone and whose outputs are left.

    Raises
    ------
    CheckpointError
        If there is nothing to do, an adapter has no statistics, the manifest belongs to another
        plan, or another run is at work on this output.
    SettingsError
        For settings of the plan, or statistics, that ``to`` has no use for.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from shutil import copytree
    >>> from tempfile import TemporaryDirectory
    >>> from lsrdecomp.lora.fleet import joblib_runner
    >>> with TemporaryDirectory() as folder:
    ...     for name in ("first", "second"):
    ...         _ = copytree(files("lsrdecomp.cli") / "demo_adapter", Path(folder) / "in" / name)
    ...     plan = CompressionPlan(separation_rank=1)
    ...     runner = joblib_runner(workers=1)
    ...     done = run_fleet(Path(folder) / "in", Path(folder) / "out", plan, runner=runner)
    >>> [(end.name, end.state, end.parameters_before // end.parameters) for end in done]
    [('first', 'done', 24), ('second', 'done', 24)]
    """
    if to is None:
        plan = plan.with_default_storage()
    elif to == "same":
        Request.parse({"statistics": statistics}, plan=plan, to_file=True)
        share = False
    else:
        raise UnsupportedError(f"a fleet is written as LSR, or as same; got {to!r}")
    folder = Path(folder).resolve()
    out = Path(out).resolve()
    all_names = _names_to_compress(folder, out)
    names = all_names if shard is None else _part(all_names, shard)
    statistics_of = _statistics_of(all_names, statistics)
    calibrated = None if statistics is None else str(Path(statistics).resolve())
    manifest_path = out / _manifest_name(shard)
    out.mkdir(parents=True, exist_ok=True)
    with fleet_lock(_lock_path(manifest_path)) as killed:
        note = on_note or (lambda _: None)
        if killed is not None:
            note(f"A run here was killed ({killed}); this one goes on from there.")
        _check_other_runs(manifest_path, shard)
        # 1. What there is, and what of it is not done yet.
        manifest = Manifest(manifest_path, plan, calibrated, to)
        gone = manifest.recorded.keys() - set(all_names)
        places = _output_places(folder, out, [*all_names, *sorted(gone)], to)
        pending = {}
        for name in names:
            source = str(folder / name)
            place = str(places[name])
            pending[name] = Job(name, source, place, max_memory, statistics_of.get(name), to=to)
        finished = _take_finished(pending, manifest)
        if changed := [name for name in pending if _was_done(manifest, name, places[name])]:
            note(_changed_words(changed))
        ended = Counter(on_step, "compressing", len(pending), "adapters")

        def run(jobs: Sequence[Job]) -> None:
            for outcome in _outcomes(jobs, plan, runner):
                manifest.append(outcome)
                finished[outcome.name] = outcome
                ended.add()

        # 2. Of each group of like adapters one, until one is done or none is left.
        has_shapes = statistics is not None or plan.structure is not None
        searches_shapes = has_shapes and plan.separation_rank is None and plan.layer_rtol is None
        groups = []
        if share and searches_shapes and pending:
            groups = _like_adapters({name: str(folder / name) for name in names}, max_memory)
        while leaders := {_leader(group, finished, pending) for group in groups} & pending.keys():
            run([pending.pop(name) for name in sorted(leaders)])
        # 3. The others, those of a group in the shapes of its leader.
        for group in groups:
            leader = _leader(group, finished, pending)
            for name in pending.keys() & group:
                pending[name] = replace(pending[name], like=str(places[leader]))
        run(list(pending.values()))
        # 4. What workers that were killed, in this run or an earlier one, left half written.
        for name in names:
            remove_leftovers(places[name], age=0.0)
    outcomes = [finished[name] for name in names]
    if shard is None:
        outcomes += [_orphan(name, places[name]) for name in sorted(gone) if places[name].exists()]
    return outcomes


def _part(names: Sequence[str], shard: tuple[int, int]) -> list[str]:
    """Return every ``count``-th of the sorted names, so that like neighbours are spread."""
    number, count = shard
    if not 1 <= number <= count:
        raise LsrError(f"shard {number}/{count}: the first number runs from 1 to the second")
    return list(names[number - 1 :: count])


def _manifest_name(shard: tuple[int, int] | None) -> str:
    if shard is None:
        return MANIFEST
    number, count = shard
    return f"fleet-{number}-of-{count}.jsonl"


def _lock_path(manifest: Path) -> Path:
    return manifest.with_name(f".{manifest.stem}.lock")


def _check_other_runs(manifest: Path, shard: tuple[int, int] | None) -> None:
    """Raise `CheckpointError` if a run is at work here that may have names in common with ours.

    Only parts of equally many have none.
    """
    ours = _lock_path(manifest)
    beside = [] if shard is None else [f"-of-{shard[1]}.lock"]
    for lock in sorted(manifest.parent.glob(".fleet*.lock")):
        if lock != ours and not lock.name.endswith(tuple(beside)):
            with fleet_lock(lock):
                pass


def _changed_words(names: Sequence[str]) -> str:
    """Return a sentence on outputs that are made anew."""
    shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
    subject = "1 output is" if len(names) == 1 else f"{len(names)} outputs are"
    return f"{subject} made anew, because source or output changed since: {shown}."


def _orphan(name: str, place: Path) -> Outcome:
    return Outcome(name, "orphaned", f"its source is gone; if it is to go too, remove {place}")


def _names_to_compress(folder: Path, out: Path) -> list[str]:
    """Return the names of the adapters below a folder.

    Raise `CheckpointError` if it has none, or the output lies in it.
    """
    if out == folder or folder in out.parents:
        raise CheckpointError(
            f"the output must not be inside the input {folder}; choose another", path=out
        )
    names = find_adapters(folder)
    if names:
        return names
    if (folder / CONFIG).is_file():
        raise CheckpointError(
            f"is one adapter, and no directory of such; lsrdecomp compress {folder} makes it small",
            path=folder,
        )
    raise CheckpointError(
        f"holds no adapters: no directory with {CONFIG}, and no file that ends in "
        f"{', '.join(WEIGHT_SUFFIXES)}",
        path=folder,
    )


def _leader(group: Sequence[str], finished: Mapping[str, Outcome], pending: Collection[str]) -> str:
    """Return the first of a group that is done or still pending; an empty name if there is none."""

    def can_lead(name: str) -> bool:
        outcome = finished.get(name)
        return name in pending or (outcome is not None and outcome.state == "done")

    return next(filter(can_lead, group), "")


def run_job(job: Job, plan: CompressionPlan) -> Outcome:
    """Compress one adapter; every fault becomes an outcome of one line."""
    try:
        return _compress(job, plan)
    except (LsrError, OSError, ArithmeticError, ValueError, MemoryError) as error:
        message = " ".join(str(error).split())
        return Outcome(job.name, "failed", message or type(error).__name__)


def _compress(job: Job, plan: CompressionPlan) -> Outcome:
    source = open_checkpoint(job.source, max_memory=job.max_memory, carry=job.to is not None)
    made_from = _digest(source, job)
    if job.to is not None:
        cut = truncate(source, plan)
        cut.save(job.out, force=True)
        return Outcome(
            job.name,
            "done",
            parameters_before=source.adapter_parameters,
            parameters=cut.parameters,
            relative_error=cut.written_error(job.out),
            made_from=made_from,
        )
    searched = search_adapter(
        source,
        [plan],
        statistics=None if job.statistics is None else read_statistics(job.statistics),
        search=None if job.like is None else Search.like(open_checkpoint(job.like)),
        resources=Resources(device=job.device),
    )
    settings = plan.to_json()
    if job.statistics is not None:
        settings["statistics"] = job.statistics
    result = replace(searched.compress(plan), settings=settings)
    total = result.totals
    if result.met:
        result.save(job.out, force=True)
        state: State = "done"
        message = ""
    else:
        state = "missed"
        worst = f"{total.worst_layer} at {total.worst_error:.3g}"
        message = f"{total.missed} of {total.layers} layers above the tolerance, {worst}"
    sizes = total.parameters_before, total.parameters
    return Outcome(job.name, state, message, *sizes, result.error, made_from=made_from)


def _digest(source: Checkpoint, job: Job) -> str:
    """Return a digest of all that a job reads: weights, config and statistics."""
    config = source.weights.parent / CONFIG
    config_values = read_json(config) if config.is_file() else None
    # What statistics say of themselves has a digest of their numbers.
    metadata = None if job.statistics is None else read_json(Path(job.statistics) / METADATA)
    return content_key(source.source_sha256, config_values, metadata)


def _outcomes(jobs: Sequence[Job], plan: CompressionPlan, runner: Runner) -> Iterator[Outcome]:
    """Yield what becomes of jobs.

    Those whose worker died are tried once more, each alone, so that it takes no other with it: one
    that dies alone too would die again.
    """
    if not jobs:
        return
    by_name = {job.name: job for job in jobs}
    died: list[Job] = []
    for outcome in runner(list(jobs), plan):
        if outcome.state == "died":
            died.append(by_name[outcome.name])
        else:
            yield outcome
    for job in died:
        for outcome in runner([job], plan):
            state: State = "failed" if outcome.state == "died" else outcome.state
            yield replace(outcome, state=state, attempts=2)


def _like_adapters(sources: Mapping[str, str], max_memory: int | None = None) -> list[list[str]]:
    """Group the names of adapters of one base with the same layers, where there are several.

    Reads the headers of their files, and leaves out what cannot be read: its job will say why.
    """
    groups: dict[Any, list[str]] = {}
    for name, source in sources.items():
        try:
            adapter = open_checkpoint(source, max_memory=max_memory)
        except (LsrError, OSError):
            continue
        layers = sorted(
            (layer.name, layer.out_features, layer.in_features, layer.rank)
            for layer in adapter.layers
        )
        group_key = adapter.config.get("base_model_name_or_path"), tuple(layers)
        groups.setdefault(group_key, []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _statistics_of(names: Sequence[str], folder: str | Path | None) -> dict[str, str]:
    """Return the directory of statistics of each adapter."""
    if folder is None:
        return {}
    folder = Path(folder).resolve()
    if (folder / METADATA).is_file():
        return dict.fromkeys(names, str(folder))
    missing = [name for name in names if not (folder / name / METADATA).is_file()]
    if missing:
        raise CheckpointError(
            f"has no statistics for {len(missing)} of {len(names)} adapters, and none for all of "
            f"them; calibrate {missing[0]} with --out {folder / missing[0]}",
            path=folder,
        )
    return {name: str(folder / name) for name in names}


def _output_places(
    folder: Path, out: Path, names: Collection[str], to: str | None
) -> dict[str, Path]:
    """Return the directory or file that each adapter is written to.

    A directory made of a safetensors file is called without its ending, unless another adapter is
    called so.
    """
    taken = set(names)
    places = {}
    for name in names:
        if to is None:
            stem = name.removesuffix(FILE)
            place = name if stem in taken else stem
        else:
            place = _file_name(folder, name, taken)
        places[name] = out / place
    return places


def _file_name(folder: Path, name: str, taken: Collection[str]) -> str:
    """Return where an adapter is written in its own format: a directory only if it has a config."""
    source = folder / name
    if source.is_dir() and not (source / CONFIG).is_file():
        # Weights under a name that programs give, in a directory of their own.
        weights = next(weights for weights in NAMED_BY_DIRECTORY if (source / weights).is_file())
        name = f"{name}/{weights}"
    path = Path(name)
    if path.suffix not in WEIGHT_SUFFIXES or path.suffix == FILE:
        return name
    safe = path.with_suffix(FILE).as_posix()
    return f"{name}{FILE}" if safe in taken else safe


def _take_finished(pending: dict[str, Job], manifest: Manifest) -> dict[str, Outcome]:
    """Take the jobs for which nothing is left to do out of the pending ones."""
    finished = {}
    for name, job in list(pending.items()):
        outcome = _finished(manifest.recorded.get(name, ()), job)
        if outcome is not None:
            finished[name] = outcome
            del pending[name]
    return finished


def _was_done(manifest: Manifest, name: str, place: Path) -> bool:
    """Return whether an adapter has an output of an earlier run."""
    is_done = any(outcome.state == "done" for outcome in manifest.recorded.get(name, ()))
    return is_done and place.exists()


def _finished(recorded: Sequence[Outcome], job: Job) -> Outcome | None:
    """Return the outcome of an adapter for which nothing is left to do.

    It is done and still there as written, or it cannot be had under this plan; and what was read
    for it is the same.
    """
    candidates = [outcome for outcome in recorded if outcome.state in ("done", "missed")]
    if not candidates:
        return None
    try:
        source = open_checkpoint(job.source, max_memory=job.max_memory)
        made_from = _digest(source, job)
    except (LsrError, OSError):
        return None  # its job will say why
    for outcome in reversed(candidates):
        is_done = outcome.state == "missed" or _is_intact(Path(job.out))
        if outcome.made_from == made_from and is_done:
            return outcome
    return None


def _is_intact(out: Path) -> bool:
    """Return whether an output is there as it was written, by the digests in it."""
    if out.is_dir():
        return changed_files(out) == ()
    try:
        integrity = check_integrity(open_checkpoint(out))
    except (LsrError, OSError):
        return False
    return integrity.has_digests and not integrity.changed


def summary(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Count outcomes, and add up their parameters, for the last line of a run.

    Parameters
    ----------
    outcomes : iterable of Outcome

    Returns
    -------
    dict
        Number of adapters in each state, and of parameters before and after. Orphaned ones
        are counted apart.

    Examples
    --------
    >>> done = Outcome("a", "done", parameters_before=73728, parameters=1536)
    >>> total = summary([done, Outcome("b", "failed", "truncated")])
    >>> total["done"], total["failed"], total["parameters"]
    (1, 1, 1536)
    """
    listed = list(outcomes)
    counts = Counts(outcome.state for outcome in listed)
    done = [outcome for outcome in listed if outcome.state == "done"]
    return {
        "adapters": len(listed) - counts["orphaned"],
        "done": counts["done"],
        "missed": counts["missed"],
        "failed": counts["failed"],
        "orphaned": counts["orphaned"],
        "parameters_before": sum(outcome.parameters_before for outcome in done),
        "parameters": sum(outcome.parameters for outcome in done),
    }
