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

from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.lora.files import CONFIG, open_checkpoint
from lsrdecomp.lora.files.file_checks import changed_files
from lsrdecomp.lora.files.format import BESIDE_CONFIG, WEIGHT_SUFFIXES
from lsrdecomp.lora.files.gguf_files import is_gguf_adapter
from lsrdecomp.lora.files.progress import Counter, OnStep
from lsrdecomp.lora.files.statistics import METADATA, read_statistics
from lsrdecomp.lora.files.writing import remove_leftovers
from lsrdecomp.lora.fleet.manifest import MANIFEST, Manifest, Outcome, State
from lsrdecomp.lora.search.plan import CompressionPlan, Resources, Search
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
    on_step: OnStep | None = None,
) -> list[Outcome]:
    """Compress every adapter below ``folder`` into the same place below ``out``.

    Each output appears whole or not at all, and each outcome is one line appended to
    ``out/fleet.jsonl``. Called again after a kill, only what has no line yet runs. One adapter that
    fails never stops the others; one whose worker died is tried once more, alone.

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
    on_step : callable, optional
        Called with a `ProgressUpdate` as adapters end, in whichever state.

    Returns
    -------
    list of Outcome
        Of all adapters, in the order of their names; those done earlier included.

    Raises
    ------
    CheckpointError
        If there is nothing to do, an adapter has no statistics, or the manifest belongs to another
        plan.

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
    plan = plan.with_default_storage()
    folder = Path(folder).resolve()
    out = Path(out).resolve()
    # 1. What there is, and what of it has no line in the manifest yet.
    names = _names_to_compress(folder, out)
    statistics_of = _statistics_of(names, statistics)
    places = _output_directories(out, names)
    out.mkdir(parents=True, exist_ok=True)
    calibrated = None if statistics is None else str(Path(statistics).resolve())
    manifest = Manifest(out / MANIFEST, plan, calibrated)
    pending = {}
    for name in names:
        if not _is_finished(manifest.outcomes.get(name), places[name]):
            source = str(folder / name)
            place = str(places[name])
            pending[name] = Job(name, source, place, max_memory, statistics_of.get(name))
    ended = Counter(on_step, "compressing", len(pending), "adapters")

    def run(jobs: Sequence[Job]) -> None:
        for outcome in _outcomes(jobs, plan, runner):
            manifest.append(outcome)
            ended.add()

    # 2. Of each group of like adapters one, until one is done or none is left.
    has_shapes = statistics is not None or plan.structure is not None
    searches_shapes = has_shapes and plan.separation_rank is None and plan.layer_rtol is None
    groups = []
    if share and searches_shapes and pending:
        groups = _like_adapters({name: str(folder / name) for name in names}, max_memory)
    while leaders := {_leader(group, manifest, pending) for group in groups} & pending.keys():
        run([pending.pop(name) for name in sorted(leaders)])
    # 3. The others, those of a group in the shapes of its leader.
    for group in groups:
        leader = _leader(group, manifest, pending)
        for name in pending.keys() & group:
            pending[name] = replace(pending[name], like=str(places[leader]))
    run(list(pending.values()))
    # 4. What workers that were killed, in this run or an earlier one, left half written.
    for name in names:
        remove_leftovers(places[name], age=0.0)
    return [manifest.outcomes[name] for name in names]


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


def _leader(group: Sequence[str], manifest: Manifest, pending: Collection[str]) -> str:
    """Return the first of a group that is done or still pending; an empty name if there is none."""

    def can_lead(name: str) -> bool:
        outcome = manifest.outcomes.get(name)
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
    source = open_checkpoint(job.source, max_memory=job.max_memory)
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
    return Outcome(job.name, state, message, *sizes, result.error)


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


def _output_directories(out: Path, names: Collection[str]) -> dict[str, Path]:
    """Return the directory that each adapter is written to.

    That of a safetensors file is called without its ending, unless another adapter is called so.
    """
    taken = set(names)
    places = {}
    for name in names:
        stem = name.removesuffix(FILE)
        places[name] = out / (name if stem in taken else stem)
    return places


def _is_finished(outcome: Outcome | None, out: Path) -> bool:
    """Return whether nothing is left to do for an adapter.

    It is done and still there as written, or it cannot be had under this plan.
    """
    if outcome is None or outcome.state == "failed":
        return False
    return outcome.state == "missed" or (out.is_dir() and changed_files(out) == ())


def summary(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Count outcomes, and add up their parameters, for the last line of a run.

    Parameters
    ----------
    outcomes : iterable of Outcome

    Returns
    -------
    dict
        Number of adapters in each state, and of parameters before and after.

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
        "adapters": len(listed),
        "done": counts["done"],
        "missed": counts["missed"],
        "failed": counts["failed"],
        "parameters_before": sum(outcome.parameters_before for outcome in done),
        "parameters": sum(outcome.parameters for outcome in done),
    }
