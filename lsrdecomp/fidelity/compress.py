"""compress: a LoRA to a size or an error, or, against its base, to the smallest form that keeps what was asked.

`lsrdecomp.compress` is here. Torch is loaded only where a base is given: then the model is asked.

From ``lsrdecomp compress LORA --base B --data D --keep .9`` to the file:

1. `cli.compress` opens the LoRA (`checkpoints.open_checkpoint`) and calls `compress`, which calls
   `_measured`.
2. `evaluate.Evaluator` opens the base with the LoRA on it, keeps its answers to texts that are held
   out, and measures on others what its layers do (`calibration.calibrate`): the norm that errors
   count in.
3. `compression.search_adapter` solves every layer at many shapes in that norm
   (`compression.search`).
4. `keep.SmallestForm` asks that search for forms of several sizes, which
   `forms.CompressedFormCache` writes, measures and, if that is asked for, trains
   (`calibration.distil`), each once.
5. `MeasuredCompression.save` puts the files of the smallest that keeps enough in their place
   (`rewrite.publish`).
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Unpack, overload

from lsrdecomp.checkpoints import Checkpoint, Journal, open_checkpoint
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.progress import OnStep, ProgressUpdate
from lsrdecomp.checkpoints.statistics import Statistics, read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.compress import Compression, SearchedAdapter, search_adapter
from lsrdecomp.compression.measured_settings import MeasuredKeywords, MeasuredSettings
from lsrdecomp.compression.request import Request
from lsrdecomp.compression.settings import (
    CompressionPlan,
    PlanKeywords,
    Search,
    share_of_effect,
)
from lsrdecomp.errors import BudgetError, needs
from lsrdecomp.fidelity.fidelity import Answered, Fidelity, Measurement
from lsrdecomp.fidelity.rewrite import publish
from lsrdecomp.fields import takes

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.checkpoints.format_table import AdapterSource
    from lsrdecomp.fidelity.evaluate import Texts
    from lsrdecomp.fidelity.forms import CompressedForm, CompressedFormCache
    from lsrdecomp.fidelity.keep import FormOfPlan, SmallestForm


@overload
def compress(
    checkpoint: Checkpoint | AdapterSource,
    plan: CompressionPlan | None = None,
    *,
    base: None = None,
    data: None = None,
    storage: str | None = None,
    statistics: Statistics | str | Path | None = None,
    search: Search | None = None,
    workers: int = 1,
    journal: Journal | None = None,
    on_step: OnStep | None = None,
    device: str | None = None,
    **settings: Unpack[PlanKeywords],
) -> Compression: ...


@overload
def compress(
    checkpoint: Checkpoint | AdapterSource,
    plan: CompressionPlan | None = None,
    *,
    base: str | Path,
    data: str | Path | Texts,
    storage: str | None = None,
    statistics: Statistics | str | Path | None = None,
    search: Search | None = None,
    workers: int = 1,
    journal: Journal | None = None,
    on_step: OnStep | None = None,
    **settings: Unpack[MeasuredKeywords],
) -> MeasuredCompression: ...


@takes(CompressionPlan, MeasuredSettings)
def compress(
    checkpoint: Checkpoint | AdapterSource,
    plan: CompressionPlan | None = None,
    *,
    base: str | Path | None = None,
    data: str | Path | Texts | None = None,
    storage: str | None = None,
    statistics: Statistics | str | Path | None = None,
    search: Search | None = None,
    workers: int = 1,
    journal: Journal | None = None,
    on_step: OnStep | None = None,
    **settings: Any,
) -> Compression | MeasuredCompression:
    """Turn a LoRA into an LSR adapter: to a size or an error, or, with a base and texts, to what it keeps as measured.

    Parameters
    ----------
    checkpoint : str, path, Checkpoint, state dict or PeftModel
        What `open_checkpoint` reads, or what it returned.
    plan : CompressionPlan, optional
        A size or an error, to be used more than once; otherwise one of the goals below.
    base : str or path, optional
        The base model, by name or directory. What is kept is then measured, and stands in
        ``result.promise``.
    data : path or sequence of texts, optional
        With ``base``: texts of the task, without labels.
    storage : str, optional
        As in a plan; absent, the LoRA's type, or with a base and ``keep`` or ``bytes`` the bits
        that suit each layer.
    statistics : Statistics, str or path, optional
        So that errors count what the network does; a directory that `lsrdecomp calibrate` wrote, or
        what `read_statistics` returned. With ``base`` they are measured, unless they are given.
    search : Search, optional
        How far to look for shapes.
    workers : int
        Processes that solve.
    journal : Journal, optional
        Where what was solved, measured and trained waits, so that a killed run goes on.
    on_step : callable, optional
        Called with a `ProgressUpdate` before and during each part of the work.
    **settings
        The fields of `CompressionPlan` and `MeasuredSettings`.

    Returns
    -------
    Compression, or MeasuredCompression with a base
        Nothing is written before its ``save``.

    Raises
    ------
    BudgetError
        If the goal cannot be met, if none is given, or more than one.
    SettingsError
        For a setting that is not read on the road to this goal, with the one where it is.
    CheckpointError, LsrError
        If files or base cannot be used; for a name that is no goal or setting, with the nearest
        that is; if torch, transformers or peft are missing and a base is given.

    Examples
    --------
    >>> import lsrdecomp as lsr
    >>> from importlib.resources import files
    >>> lsr.compress(files("lsrdecomp.cli") / "demo_adapter", ratio=10)
    Compression of demo_adapter, ratio = 10
       12 layers, ... of them left out: 7,3... of 73,728 parameters (10 times fewer), 29,...
       relative error 0.51... in the Frobenius norm; best truncated SVD of that size 0.52...
       not on disk before save(directory)

    With a base: ``lsr.compress("my-lora/", base="smollm2", data="prompts.jsonl",
    keep=0.95).save("small/")``.
    """
    given = {
        "base": base,
        "data": data,
        "storage": storage,
        "statistics": statistics,
        "search": search,
        "workers": None if workers == 1 else workers,
        "journal": journal,
        **settings,
    }
    request = Request.parse(given, plan=plan)
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_checkpoint(checkpoint)
    return fulfil(checkpoint, request, on_step)


def fulfil(
    checkpoint: Checkpoint, request: Request, on_step: OnStep | None = None
) -> Compression | MeasuredCompression:
    """Compress an open adapter as requested."""
    request = request.for_adapter(checkpoint.storage)
    statistics = request.statistics
    if isinstance(statistics, str | Path):
        statistics = read_statistics(statistics)
    if request.measured is not None:
        return _measured(checkpoint, request, request.measured, statistics, on_step)
    assert request.plan is not None
    searched = search_adapter(
        checkpoint,
        [request.plan],
        statistics=statistics,
        search=request.search,
        resources=request.resources(on_step),
    )
    return searched.compress(request.plan)


class NumberedSteps:
    """Says before each stage which step of the run it belongs to."""

    def __init__(self, on_step: OnStep | None, steps: int) -> None:
        self._on_step, self._steps, self._number = on_step, steps, 0

    def begin(self, stage: str) -> None:
        """The next step."""
        self._number += 1
        self._steps = max(
            self._steps, self._number
        )  # more than was foreseen, where training did not bring enough
        self(ProgressUpdate(stage, 0, 0))

    def __call__(self, step: ProgressUpdate) -> None:
        """What is done in it."""
        if self._on_step is not None:
            self._on_step(
                replace(step, stage=f"step {self._number} of {self._steps} · {step.stage}")
            )


@dataclass(frozen=True, repr=False, kw_only=True)
class MeasuredCompression(Compression):
    """A compression with its measured promise."""

    promise: Fidelity
    written: Path  # the form as written, in a temporary directory that lives as long as this
    facts: dict[str, Any]
    _folder: TemporaryDirectory[str] | None
    tried: tuple[Measurement, ...] = ()  # every form that was measured, in that order
    differing: tuple[
        Answered, ...
    ] = ()  # examples that the form answers differently; in no file but the report
    truncated_svd: Measurement | None = (
        None  # in bits, of as many bytes, on the texts of the promise
    )

    def __repr__(self) -> str:
        """The compression's goal, sizes and errors, then what it keeps, in ten lines or fewer."""
        *compression, unsaved = super().__repr__().split("\n")
        return "\n".join(
            [
                *compression,
                *(f"   {line.strip()}" for line in repr(self.promise).split("\n")),
                unsaved,
            ]
        )

    def _repr_html_(self) -> str:
        """The same for a notebook."""
        return f"{super()._repr_html_()}<p>It {escape(self.promise.sentence())}.</p>"

    def to_json(self, *, every_layer: bool = True) -> dict[str, Any]:
        """The report of the compression, the promise, and the forms that were measured."""
        rival = {} if self.truncated_svd is None else {"truncated_svd": asdict(self.truncated_svd)}
        measured = {
            **self.facts,
            "tried": [asdict(measurement) for measurement in self.tried],
            **rival,
        }
        return {
            **super().to_json(every_layer=every_layer),
            **measured,
            "promise": self.promise.to_json(),
        }

    def save(self, out: str | Path, *, force: bool = False, record: bool = False) -> Path:
        """As `Compression.save`; the promise stands in the record and on the card."""
        report = self.to_json(every_layer=record)
        return publish(
            self.written, out, report, self.promise, inputs=(self.source.path,), force=force
        )


def _measured(
    checkpoint: Checkpoint,
    request: Request,
    settings: MeasuredSettings,
    statistics: Statistics | None,
    on_step: OnStep | None,
) -> MeasuredCompression:
    """Compress against a base: to a plan, or to the smallest form that keeps a share."""
    steps = NumberedSteps(on_step, 1 + 2 * settings.passes + (settings.distil > 0))
    search = partial(
        search_adapter, checkpoint, search=request.search, resources=request.resources(steps)
    )
    steps.begin("opening the base")  # said before torch is loaded, which takes seconds
    with needs("a base", "peft"):
        from lsrdecomp.fidelity.evaluate import Evaluator, data_name, read_data
        from lsrdecomp.fidelity.forms import CompressedFormCache
        from lsrdecomp.fidelity.keep import FormOfPlan, SmallestForm
    # 1. Open: the base with the LoRA on it, and how it answers the texts that are held out.
    keep, plan = settings.keep, request.plan
    plan_fields = {"storage": request.storage, "max_rank": request.max_rank}
    chooses = keep is not None or (plan is not None and plan.kl is not None)
    evaluator = Evaluator(
        request.base,
        checkpoint.path,
        read_data(request.data),
        settings,
        chooses=chooses,
        on_step=steps,
    )
    if plan is not None and plan.kl is not None:
        # A share as well, now that the LoRA's effect on these texts is known.
        keep, plan = 1.0 - share_of_effect(plan.kl, evaluator.reference.effect), None
    folder = TemporaryDirectory()
    journal = request.journal or Journal(Path(folder.name) / "journal")
    steps.begin("calibrating")
    norm = evaluator.statistics(journal) if statistics is None else statistics
    forms = CompressedFormCache(evaluator, checkpoint, norm, settings.distil, journal)

    # 2. Fit: the form to a plan, or the smallest that keeps enough.
    def goal() -> FormOfPlan | SmallestForm:
        return (
            FormOfPlan(forms, search, plan)
            if plan
            else SmallestForm(forms, search, keep or 0.0, plan_fields)
        )

    best = _fitted(forms, goal, settings.passes, steps)
    # 3. Materialize: the files as they were measured.
    written = shutil.copytree(best.path, Path(folder.name) / "written")
    # 4. Report: what these files keep of what the LoRA does to texts that chose nothing.
    answered, rival = [], None
    if settings.examples:
        answered, size = evaluator.answered(best.path), bytes_to_open(best.path / WEIGHTS)
        rival = _truncated_svd(forms, search, size, Path(folder.name) / "svd")
    differing = [each for each in answered if each.form != each.lora]
    fidelity = evaluator.fidelity(
        best.behaviour
        if evaluator.chooser is evaluator.reference
        else evaluator.measure_held_out(best.path),
        best.path,
        checkpoint,
        data_name(request.data),
        distilled=best.steps,
        measurements=len(forms.measurements),
        asked=keep,
        answered=len(answered),
        alike=len(answered) - len(differing),
    )
    return MeasuredCompression(
        **vars(best.compression)
        | {
            "promise": fidelity,
            "written": written,
            "facts": best.facts,
            "_folder": folder,
            "tried": forms.measurements,
            "differing": tuple(differing[: settings.examples]),
            "truncated_svd": rival,
        }
    )


def _fitted(
    forms: CompressedFormCache,
    goal_in_norm: Callable[[], FormOfPlan | SmallestForm],
    passes: int,
    steps: NumberedSteps,
) -> CompressedForm:
    """Fit: the best form of all passes, each in the norm around the form of the one before, since errors add up."""
    best: CompressedForm | None = None
    for turn in range(1, passes + 1):
        if best is not None:
            steps.begin("calibrating with the compressed adapter")
            forms.statistics = forms.evaluator.statistics(forms.journal, best.path)
        steps.begin("searching" if best is None else "searching again")
        goal = goal_in_norm()
        # How large exactly a form must be is asked in the last norm alone, and only what came of it
        # is trained.
        if turn < passes:
            form = goal.first()
        elif forms.steps:
            steps.begin("training")
            form = goal.trained()
        else:
            form = goal.untrained()
        if best is None or goal.is_better(form, best):
            best = form
    assert best is not None
    return best


def _truncated_svd(
    forms: CompressedFormCache, search: Callable[..., SearchedAdapter], size: int, out: Path
) -> Measurement | None:
    """What truncated SVD in bits keeps in at most ``size`` bytes of the texts that chose nothing; None: none fits."""
    # In bits that each layer chooses, as the forms have: structures are compared, not storages.
    plan, evaluator = CompressionPlan(bytes=size, storage="auto"), forms.evaluator
    evaluator.say("measuring truncated SVD in as many bytes")
    try:
        made = search([plan], statistics=forms.statistics, search=Search(orders=())).compress(plan)
    except BudgetError:
        return None
    behaviour = evaluator.measure_held_out(made.save(out))
    return Measurement(bytes_to_open(out / WEIGHTS), made.totals.parameters, behaviour.kept)
