"""compress: a LoRA to a size or an error, or, against its base, to the smallest form that keeps what was asked.

`lsrdecomp.compress` is here. Torch is loaded only where a base is given: then the model is asked.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, overload

from lsrdecomp.checkpoints import Checkpoint, open_checkpoint
from lsrdecomp.checkpoints.statistics import Statistics, read_statistics
from lsrdecomp.compression.compress import Compression, search_adapter
from lsrdecomp.compression.compress import compress as compress_alone
from lsrdecomp.compression.plan import GOALS, CompressionPlan, share_of_effect
from lsrdecomp.compression.progress import OnStep
from lsrdecomp.compression.report import LayerReport, Totals
from lsrdecomp.compression.settings import Resources, Search
from lsrdecomp.errors import BudgetError, LsrError, unknown
from lsrdecomp.fidelity.fidelity import Fidelity, Measurement
from lsrdecomp.fidelity.rewrite import publish

if TYPE_CHECKING:
    from lsrdecomp.fidelity.evaluate import Texts
    from lsrdecomp.fidelity.keep import Goal

FORM = ("storage", "max_rank", "inner_shape")
"""What goes with a goal."""


@overload
def compress(
    checkpoint: Checkpoint | str | Path,
    plan: CompressionPlan | None = None,
    *,
    base: None = None,
    data: None = None,
    keep: None = None,
    ratio: float | None = None,
    rtol: float | None = None,
    parameters: float | None = None,
    bytes: int | None = None,
    kl: float | None = None,
    separation_rank: int | None = None,
    **settings: Any,
) -> Compression: ...


@overload
def compress(
    checkpoint: Checkpoint | str | Path,
    plan: CompressionPlan | None = None,
    *,
    base: str | Path,
    data: str | Path | Texts,
    keep: float | None = None,
    ratio: float | None = None,
    rtol: float | None = None,
    parameters: float | None = None,
    bytes: int | None = None,
    kl: float | None = None,
    separation_rank: int | None = None,
    **settings: Any,
) -> MeasuredCompression: ...


def compress(
    checkpoint: Checkpoint | str | Path,
    plan: CompressionPlan | None = None,
    *,
    base: str | Path | None = None,
    data: str | Path | Texts | None = None,
    keep: float | None = None,
    ratio: float | None = None,
    rtol: float | None = None,
    parameters: float | None = None,
    bytes: int | None = None,
    kl: float | None = None,
    separation_rank: int | None = None,
    statistics: Statistics | str | Path | None = None,
    **settings: Any,
) -> Compression | MeasuredCompression:
    """Turn a LoRA into an LSR adapter: to a size or an error, or, with a base and texts, to what it keeps as measured.

    Parameters
    ----------
    checkpoint : str, path or Checkpoint
        A directory or file that `open_checkpoint` reads, or what it returned.
    plan : CompressionPlan, optional
        A size or an error, to be used more than once; otherwise one of the goals below.
    base : str or path, optional
        The base model, by name or directory. What is kept is then measured, and stands in ``result.promise``.
    data : path or sequence of texts, optional
        With ``base``: texts of the task, without labels.
    keep : float, optional
        With ``base`` and in place of a size: the least share of what the adapter does, such as 0.95; the smallest form
        that was found to keep it is the result.
    ratio, rtol, parameters, bytes, kl, separation_rank : number, optional
        One goal, as `CompressionPlan` takes it; with it ``storage`` (absent, the source's type), ``max_rank`` and
        ``inner_shape``.
    statistics : Statistics, str or path, optional
        So that errors count what the network does; a directory that `lsrdecomp calibrate` wrote, or what
        `read_statistics` returned.
    **settings
        Of `lsrdecomp.compression.compress` (``search``, ``workers``, …), or with a base of
        `lsrdecomp.fidelity.compress.compress_measured` (``distil=200``, ``dtype``, ``device``, …).

    Returns
    -------
    Compression, or MeasuredCompression with a base
        Nothing is written before its ``save``.

    Raises
    ------
    BudgetError
        If the goal cannot be met, if none is given, or more than one.
    CheckpointError, LsrError
        If files or base cannot be used; for a name that is no goal or setting, with the nearest that is; if torch,
        transformers or peft are missing and a base is given.

    Examples
    --------
    >>> import lsrdecomp as lsr
    >>> from importlib.resources import files
    >>> lsr.compress(files("lsrdecomp.cli") / "demo_adapter", ratio=10)
    Compression of demo_adapter, ratio = 10
       12 layers, 3 of them left out: 7,3... of 73,728 parameters (10 times fewer), 29,... bytes as float32
       relative error 0.51... in the Frobenius norm; best truncated SVD of that size 0.52...
       not on disk before save(directory)

    With a base: ``lsr.compress("my-lora/", base="smollm2", data="prompts.jsonl", keep=0.95).save("small/")``.
    """
    checkpoint = checkpoint if isinstance(checkpoint, Checkpoint) else open_checkpoint(checkpoint)
    if base is None:
        _check_words(settings, compress_alone)
    by_name = {
        "rtol": rtol,
        "separation_rank": separation_rank,
        "parameters": parameters,
        "ratio": ratio,
        "bytes": bytes,
        "kl": kl,
    }
    goals: dict[str, Any] = {name: value for name, value in by_name.items() if value is not None}
    if goals and plan is not None:
        raise BudgetError(f"a plan was given, and {' and '.join(goals)} beside it: one of the two")
    if goals and keep is not None:
        raise BudgetError(f"one goal is needed, got keep and {' and '.join(goals)}")
    if plan is None and (goals or (base is None and keep is None)):
        form = {name: settings.pop(name) for name in FORM if name in settings}
        chosen = "auto" if base is not None and "bytes" in goals else checkpoint.storage
        plan = CompressionPlan(**goals, **{"storage": chosen, **form})
    if isinstance(statistics, str | Path):
        statistics = read_statistics(statistics)
    if statistics is not None:
        settings["statistics"] = statistics
    if base is None:
        if plan is None or keep is not None or data is not None:
            raise BudgetError("a share to keep is measured: give base= and data= with it, or a size such as ratio=48")
        return compress_alone(checkpoint, plan, **settings)
    if data is None:
        raise BudgetError("what is kept is measured on texts of the task: give data=")
    _check_words(settings, compress_measured)
    return compress_measured(checkpoint, plan, base=base, data=data, keep=keep, **settings)


def _check_words(settings: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Raise `LsrError` with the right word for a goal or setting that is none."""
    known = [*GOALS, *FORM, *list(signature(function).parameters)[2:]]
    for name in settings:
        if name not in known:
            raise LsrError(f"compress takes no {unknown(name, known)}")


@dataclass(frozen=True, repr=False)
class MeasuredCompression:
    """A compression with its measured promise: it looks like a `Compression` and is saved like one."""

    compression: Compression
    promise: Fidelity
    written: Path  # the form as written, in a temporary directory that lives as long as this
    facts: dict[str, Any]
    _folder: TemporaryDirectory[str]
    tried: tuple[Measurement, ...] = ()  # every form that was measured, in that order

    def __repr__(self) -> str:
        """The compression's goal, sizes and errors, then what it keeps, in ten lines or fewer."""
        *compression, unsaved = repr(self.compression).split("\n")
        return "\n".join([*compression, *(f"   {line.strip()}" for line in repr(self.promise).split("\n")), unsaved])

    @property
    def source(self) -> Checkpoint:
        return self.compression.source

    @property
    def plan(self) -> CompressionPlan:
        return self.compression.plan

    @property
    def layers(self) -> tuple[LayerReport, ...]:
        return self.compression.layers

    @property
    def totals(self) -> Totals:
        return self.compression.totals

    @property
    def met(self) -> bool:
        return self.compression.met

    def to_json(self) -> dict[str, Any]:
        """The report of the compression, the promise, and the forms that were measured."""
        return {**self.compression.to_json(), **self._facts(), "promise": self.promise.to_json()}

    def save(self, out: str | Path, *, force: bool = False, record: bool = False) -> Path:
        """As `Compression.save`; the promise stands in the record and on the card."""
        facts = {**self._facts(), **({"layers": self.to_json()["layers"]} if record else {})}
        inputs = (self.source.path,)
        return publish(self.written, out, self.promise, facts=facts, inputs=inputs, force=force, every_layer=record)

    def _facts(self) -> dict[str, Any]:
        return {**self.facts, "tried": [asdict(measurement) for measurement in self.tried]}


def compress_measured(
    checkpoint: Checkpoint,
    plan: CompressionPlan | None = None,
    *,
    base: str | Path,
    data: str | Path | Texts,
    keep: float | None = None,
    distil: int = 0,
    passes: int = 2,
    statistics: Statistics | None = None,
    storage: str = "auto",
    max_rank: int | None = None,
    search: Search | None = None,
    resources: Resources | None = None,
    workspace: Path | None = None,
    held_out: int = 128,
    batch: int | None = None,
    max_length: int | None = None,
    truncate: bool = False,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    on_step: OnStep | None = None,
) -> MeasuredCompression:
    """Compress a LoRA against its base and measure what is kept.

    Parameters
    ----------
    checkpoint : Checkpoint
        The LoRA, a PEFT directory.
    plan : CompressionPlan, optional
        One goal as for `compress`, or none with ``keep``. ``kl`` means the measured divergence here.
    base : str or path
    data : path or sequence of texts
        Texts of the task; no labels.
    keep : float, optional
        The least share of what the adapter does, as measured, in the smallest form that has it.
    distil : int
        Steps of distillation; see `lsrdecomp.distil`. With ``keep`` the smallest untrained form is found
        first, then at most `keep.MOST_DISTILLED` smaller ones are trained, until one keeps as much.
    passes : int
        Times that statistics are measured and shapes searched: first with the LoRA active, then with the form that came
        of it, whose norm tells better what a further change does. The better form is taken.
    statistics : Statistics, optional
        Of the first pass. Absent, they are measured first, on the texts that are not held out.
    storage, max_rank
        With ``keep``: as in a plan; by default the bits of a number are chosen too, and bytes count.
    search, resources
        As for `search_adapter`: how far to look, and where.
    workspace : path, optional
        Where statistics are gathered, and beside it, ending in ``.forms``, what was made and measured, so that a
        killed run goes on; both are removed at the end.
    held_out, batch, max_length, truncate, dtype, device, seed
        As for `lsrdecomp.distil`.
    on_step : callable, optional
        Called with a `Step` before and during each part of the work.

    Returns
    -------
    MeasuredCompression
        Nothing is written before `MeasuredCompression.save`.

    Raises
    ------
    BudgetError
        If both or neither of ``plan`` and ``keep`` are given; if no form keeps as much.
    LsrError, CheckpointError
        As `lsrdecomp.distil`.
    """
    if (plan is None) == (keep is None):
        raise BudgetError("one goal is needed with a base: a share to keep, or a size or error")
    if keep is not None and not 0.0 < keep < 1.0:
        raise BudgetError(f"the share to keep lies between 0 and 1, such as 0.95; got {keep:g}")
    try:
        from lsrdecomp.fidelity.evaluate import Evaluator, data_name, read_data
        from lsrdecomp.fidelity.forms import CompressedFormCache
        from lsrdecomp.fidelity.keep import FormOfSize, SmallestForm
    except ImportError as error:
        raise LsrError(f"a base needs {error.name}: pip install 'lsrdecomp[peft]'") from error
    # 1. Open: the base with the LoRA on it, and how it answers the texts that are held out.
    cut: dict[str, Any] = {"held_out": held_out, "truncate": truncate, "dtype": dtype}
    texts = read_data(data)
    evaluator = Evaluator(
        base,
        checkpoint.path,
        texts,
        batch=batch,
        max_length=max_length,
        device=device,
        seed=seed,
        on_step=on_step,
        **cut,
    )
    if plan is not None and plan.kl is not None:
        keep = 1.0 - share_of_effect(plan.kl, evaluator.reference.effect)
        storage, max_rank, plan = plan.storage, plan.max_rank, None
    folder = TemporaryDirectory()
    first = Path(folder.name) / "statistics" if workspace is None else workspace
    forms_folder = Path(folder.name) / "forms" if workspace is None else workspace.with_suffix(".forms")
    resources = resources or Resources(on_step=on_step)
    norm = evaluator.statistics(first) if statistics is None else statistics
    forms = CompressedFormCache(evaluator, checkpoint, norm, distil, forms_folder, cut)

    # 2. Fit: a search in the norm around the LoRA, then in that around the form that came of it.
    def goal_in(norm: Statistics) -> Goal:
        searches = partial(search_adapter, checkpoint, statistics=norm, search=search, resources=resources)
        if plan is not None:
            return FormOfSize(forms, searches, plan)
        assert keep is not None
        return SmallestForm(forms, searches, checkpoint, keep, storage, max_rank)

    goal = goal_in(norm)
    best = goal.untrained()
    for turn in range(2, passes + 1):
        # Errors add up along the network: what counts is the norm around the compressed adapter, not around the LoRA.
        if best is None:
            break
        norm = evaluator.statistics(forms.folder / f"statistics-{turn}", best.path)
        try:
            next_goal = goal_in(norm)
            new = next_goal.untrained()
        except BudgetError:  # nothing keeps as much in this norm
            break
        if new is None or not goal.is_better(new, best):
            break
        goal, best, forms.statistics = next_goal, new, norm
    if distil or best is None:
        best = goal.trained()
    # 3. Materialize: the files as they were measured.
    written = shutil.copytree(best.path, Path(folder.name) / "written")
    # 4. Report: what these files keep.
    fidelity = evaluator.fidelity(
        best.behaviour,
        best.path,
        checkpoint,
        data_name(data),
        distilled=best.steps,
        measurements=len(forms.measurements),
        asked=keep,
    )
    shutil.rmtree(forms_folder, ignore_errors=True)
    if workspace is not None and statistics is None:
        shutil.rmtree(workspace, ignore_errors=True)
    return MeasuredCompression(best.compression, fidelity, written, best.facts, folder, forms.measurements)
