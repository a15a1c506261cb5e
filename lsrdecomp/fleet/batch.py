"""Fleets: thousands of adapters under one plan, on this host or on a Ray cluster, resumable, none lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lsrdecomp.checkpoints import CONFIG, open_checkpoint
from lsrdecomp.checkpoints.files import changed_files
from lsrdecomp.checkpoints.progress import Counter, OnStep
from lsrdecomp.checkpoints.statistics import METADATA, read_statistics
from lsrdecomp.checkpoints.writing import remove_leftovers
from lsrdecomp.compression.compress import search_adapter
from lsrdecomp.compression.settings import CompressionPlan, Resources, Search
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.fleet.manifest import MANIFEST, Manifest, Outcome

FILE = ".safetensors"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "pytorch_lora_weights.safetensors")


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


def find_adapters(folder: Path) -> list[str]:
    """Names, relative to ``folder``, of all directories below it that hold adapter weights, and of LoRA files; sorted.

    A file is one where no config lies beside it, of an adapter, a model or statistics. Hidden
    directories are left out: what a killed run left half written is one.

    Parameters
    ----------
    folder : Path

    Returns
    -------
    list of str

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
    names = {
        path.parent.relative_to(folder).as_posix()
        for name in WEIGHTS
        for path in folder.rglob(name)
    }
    configs = (CONFIG, "config.json", METADATA)
    for path in folder.rglob(f"*{FILE}"):
        if path.name not in WEIGHTS and not any(
            (path.parent / config).exists() for config in configs
        ):
            names.add(path.relative_to(folder).as_posix())
    return sorted(
        name for name in names - {"."} if not any(part.startswith(".") for part in name.split("/"))
    )


def run_fleet(
    folder: str | Path,
    out: str | Path,
    plan: CompressionPlan,
    *,
    runner: Runner,
    retries: int = 1,
    max_memory: int | None = None,
    statistics: str | Path | None = None,
    share: bool = True,
    on_step: OnStep | None = None,
) -> list[Outcome]:
    """Compress every adapter below ``folder`` into the same place below ``out``.

    Each output appears whole or not at all, and each outcome is one line appended to
    ``out/fleet.jsonl``. Called again after a kill, only what has no line yet runs. One adapter that
    fails, or kills its worker, never stops the others.

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
    >>> from lsrdecomp.fleet import joblib_runner
    >>> with TemporaryDirectory() as folder:
    ...     for name in ("first", "second"):
    ...         _ = copytree(files("lsrdecomp.cli") / "demo_adapter", Path(folder) / "in" / name)
    ...     plan = CompressionPlan(separation_rank=1)
    ...     done = run_fleet(Path(folder) / "in", Path(folder) / "out", plan, runner=joblib_runner(1))
    >>> [(end.name, end.state, end.parameters_before // end.parameters) for end in done]
    [('first', 'done', 24), ('second', 'done', 24)]
    """
    plan = plan.with_default_storage()
    folder, out = Path(folder).resolve(), Path(out).resolve()
    if out == folder or folder in out.parents:
        raise CheckpointError(f"lies inside the input {folder}; choose another output", path=out)
    # Fleet 1: what there is, and what of it has no line in the manifest yet.
    names = find_adapters(folder)
    if not names:
        raise CheckpointError(
            f"holds no adapters (directories with {' or '.join(WEIGHTS)})", path=folder
        )
    measured = _statistics_of(names, statistics)
    out.mkdir(parents=True, exist_ok=True)
    manifest = Manifest(
        out / MANIFEST, plan, None if statistics is None else str(Path(statistics).resolve())
    )
    jobs = [
        Job(name, str(folder / name), str(_place(out, name)), max_memory, measured.get(name))
        for name in names
    ]
    left = {
        job.name: job
        for job in jobs
        if not _settled(manifest.outcomes.get(job.name), Path(job.out))
    }
    ended = Counter(on_step, "compressing", len(left), "adapters")

    def work(jobs: Sequence[Job]) -> None:
        for outcome in _outcomes(jobs, plan, runner, retries):
            manifest.append(outcome)
            ended.add()

    searches = plan.separation_rank is None and plan.rtol is None
    groups = (
        _like_adapters({job.name: job.source for job in jobs}, max_memory)
        if share and searches and left
        else []
    )

    def leader(names: Sequence[str]) -> str:
        """The first of a group that is done, or still left to be tried; no name if there is none."""
        done = (name for name, outcome in manifest.outcomes.items() if outcome.state == "done")
        able = {*left, *done}
        return next((name for name in names if name in able), "")

    # Fleet 2: of each group of like adapters one, until one is done or none is left; then the
    # others, in its shapes.
    while first := {leader(group) for group in groups} & left.keys():
        work([left.pop(name) for name in sorted(first)])
    for group in groups:
        lead = leader(group)
        left |= {
            name: replace(left[name], like=str(_place(out, lead))) for name in group if name in left
        }
    work(list(left.values()))
    for (
        name
    ) in names:  # what workers that were killed, in this run or an earlier one, left half written
        remove_leftovers(_place(out, name), age=0.0)
    return [manifest.outcomes[name] for name in names]


def run_job(job: Job, plan: CompressionPlan) -> Outcome:
    """Compress one adapter; every fault becomes an outcome of one line."""
    try:
        source = open_checkpoint(job.source, max_memory=job.max_memory)
        statistics = None if job.statistics is None else read_statistics(job.statistics)
        search = None if job.like is None else Search.like(open_checkpoint(job.like))
        resources = Resources(device=job.device)
        searched = search_adapter(
            source, [plan], statistics=statistics, search=search, resources=resources
        )
        result = searched.compress(plan)
        total = result.totals
        figures = total.parameters_before, total.parameters, result.error
        if not result.met:
            worst = f"{total.worst_layer} at {total.worst_error:.3g}"
            text = f"{total.missed} of {total.layers} layers above the tolerance, {worst}"
            return Outcome(job.name, "missed", text, *figures)
        result.save(job.out, force=True)
        return Outcome(job.name, "done", "", *figures)
    except (LsrError, OSError, ArithmeticError, ValueError, MemoryError) as error:
        return Outcome(job.name, "failed", " ".join(str(error).split()) or type(error).__name__)


def _outcomes(
    jobs: Sequence[Job], plan: CompressionPlan, runner: Runner, retries: int
) -> Iterator[Outcome]:
    """What becomes of jobs; those whose worker died are tried again, each alone, so that it takes no other with it."""
    by_name, rounds = {job.name: job for job in jobs}, [list(jobs)] if jobs else []
    for attempt in range(1, retries + 2):
        died: list[Job] = []
        for outcome in (outcome for group in rounds for outcome in runner(group, plan)):
            if outcome.state == "died" and attempt <= retries:
                died.append(by_name[outcome.name])
            else:
                state = "failed" if outcome.state == "died" else outcome.state
                yield replace(outcome, state=state, attempts=attempt)
        rounds = [[job] for job in died]


def _like_adapters(sources: Mapping[str, str], max_memory: int | None = None) -> list[list[str]]:
    """Names of adapters of one base with the same layers, where there are several.

    Reads the headers of their files, and leaves out what cannot be read: its job will say why.
    """
    groups: dict[Any, list[str]] = {}
    for name, source in sources.items():
        try:
            adapter = open_checkpoint(source, max_memory=max_memory)
        except (LsrError, OSError):
            continue
        layers = (
            (layer.name, layer.out_features, layer.in_features, layer.rank)
            for layer in adapter.layers
        )
        groups.setdefault(
            (adapter.config.get("base_model_name_or_path"), tuple(sorted(layers))), []
        ).append(name)
    return [names for names in groups.values() if len(names) > 1]


def _statistics_of(names: Sequence[str], folder: str | Path | None) -> dict[str, str]:
    """The directory of statistics of each adapter."""
    if folder is None:
        return {}
    folder = Path(folder).resolve()
    if (folder / METADATA).is_file():
        return dict.fromkeys(names, str(folder))
    missing = [name for name in names if not (folder / name / METADATA).is_file()]
    if missing:
        text = f"has no statistics for {len(missing)} of {len(names)} adapters, and none for all of them"
        raise CheckpointError(
            f"{text}; calibrate {missing[0]} with --out {folder / missing[0]}", path=folder
        )
    return {name: str(folder / name) for name in names}


def _place(out: Path, name: str) -> Path:
    """The directory that an adapter is written to: of a file its name without the ending."""
    return out / name.removesuffix(FILE)


def _settled(outcome: Outcome | None, out: Path) -> bool:
    """Whether nothing is left to do: done and still there as written, or not to be had under this plan."""
    if outcome is None or outcome.state == "failed":
        return False
    return outcome.state == "missed" or (out.is_dir() and changed_files(out) == ())


def summary(outcomes: Iterable[Outcome]) -> dict[str, Any]:
    """Counts and sums for the last line of a run.

    Parameters
    ----------
    outcomes : iterable of Outcome

    Returns
    -------
    dict
        Numbers of adapters by their state, and of parameters before and after.

    Examples
    --------
    >>> done = Outcome("a", "done", parameters_before=73728, parameters=1536)
    >>> total = summary([done, Outcome("b", "failed", "truncated")])
    >>> total["done"], total["failed"], total["parameters"]
    (1, 1, 1536)
    """
    listed = list(outcomes)
    done = [outcome for outcome in listed if outcome.state == "done"]
    return {
        "adapters": len(listed),
        **{
            state: sum(outcome.state == state for outcome in listed)
            for state in ("done", "missed", "failed")
        },
        "parameters_before": sum(outcome.parameters_before for outcome in done),
        "parameters": sum(outcome.parameters for outcome in done),
    }
