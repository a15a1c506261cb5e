"""Compress a LoRA to a size or an error, or, against its base, to a share that is kept.

`lsrdecomp.compress` is here. Torch is loaded only where a base is given: then the model is asked.

From ``lsrdecomp compress LORA --base B --data D --keep .9`` to the file:

1. `cli.compress` parses the `compression.request.Request`, opens the LoRA
   (`checkpoints.open_checkpoint`) and calls `fulfil`, which calls `_measured`.
2. `evaluate.Evaluator` opens the base with the LoRA on it, keeps its answers to texts that are held
   out, and measures on others what its layers do (`calibration.calibrate`): the norm that errors
   count in.
3. `compression.search_adapter` solves every layer at many shapes in that norm
   (`compression.search`).
4. `goals.SmallestVariant` asks that search for variants of several sizes (`size_search`), which
   `variants.VariantCache` writes, measures and, if that is asked for, trains
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
from lsrdecomp.fidelity.fidelity import AnswerPair, Fidelity, Measurement
from lsrdecomp.fidelity.rewrite import publish
from lsrdecomp.fields import accepts_settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.checkpoints.format_table import AdapterSource
    from lsrdecomp.fidelity.goals import SmallestVariant, VariantOfPlan
    from lsrdecomp.fidelity.size_search import SizeSearch, TrainedSizeSearch
    from lsrdecomp.fidelity.texts import Texts
    from lsrdecomp.fidelity.variants import CompressedVariant, VariantCache


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


@accepts_settings(CompressionPlan, MeasuredSettings)
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
    """Turn a LoRA into an LSR adapter: to a size, an error, or a measured share that is kept.

    Parameters
    ----------
    checkpoint : str, path, Checkpoint, state dict or PeftModel
        What `open_checkpoint` reads, or what it returned.
    plan : CompressionPlan, optional
        A size or an error, to be used more than once; otherwise one of the goals below.
    base : str or path, optional
        The base model, by name or directory. What is kept is then measured, and stands in
        ``result.fidelity``.
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
    checkpoint: Checkpoint,
    request: Request,
    on_step: OnStep | None = None,
    *,
    sizes: SizeSearch | None = None,
    training: TrainedSizeSearch | None = None,
) -> Compression | MeasuredCompression:
    """Compress an open adapter as requested.

    Parameters
    ----------
    checkpoint : Checkpoint
    request : Request
    on_step : callable, optional
    sizes, training : SizeSearch, TrainedSizeSearch, optional
        How the smallest variant is looked for where a share is to be kept.
    """
    request = request.for_adapter(checkpoint.storage)
    statistics = request.statistics
    if isinstance(statistics, str | Path):
        statistics = read_statistics(statistics)
    if request.measured is not None:
        steps = NumberedSteps(on_step, request.measured)
        return _measured(checkpoint, request, request.measured, statistics, steps, sizes, training)
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
    """Puts before the name of each stage which step of the run it belongs to."""

    def __init__(self, on_step: OnStep | None, settings: MeasuredSettings) -> None:
        self._on_step = on_step
        self._number = 0
        # The base is opened; each pass calibrates and searches; training comes last.
        self._total = 1 + 2 * settings.passes + (settings.distil > 0)

    def begin(self, stage: str) -> None:
        """Begin the next step."""
        self._number += 1
        # There are more than was foreseen where training did not bring enough.
        self._total = max(self._total, self._number)
        self(ProgressUpdate(stage, 0, 0))

    def __call__(self, step: ProgressUpdate) -> None:
        """Tell what is done in this step."""
        if self._on_step is not None:
            stage = f"step {self._number} of {self._total} · {step.stage}"
            self._on_step(replace(step, stage=stage))


@dataclass(frozen=True, repr=False, kw_only=True)
class MeasuredCompression(Compression):
    """A compression with what it keeps, as measured on its base."""

    fidelity: Fidelity
    written: Path
    """The variant as written, in a temporary directory that lives as long as this."""
    annotations: dict[str, Any]
    """What the record says beside the compression: how it was distilled."""
    _folder: TemporaryDirectory[str] | None
    tried: tuple[Measurement, ...] = ()
    """Every variant that was measured, in that order."""
    mismatches: tuple[AnswerPair, ...] = ()
    """Examples that the variant answers differently; in no file but the report."""
    truncated_svd: Measurement | None = None
    """Quantized truncated SVD of as many bytes, on the held-out texts."""

    def __repr__(self) -> str:
        """Return goal, sizes and errors, then what is kept, in ten lines or fewer."""
        *compression, unsaved = super().__repr__().split("\n")
        kept = [f"   {line.strip()}" for line in repr(self.fidelity).split("\n")]
        return "\n".join([*compression, *kept, unsaved])

    def _repr_html_(self) -> str:
        """Return the same for a notebook."""
        return f"{super()._repr_html_()}<p>It {escape(self.fidelity.sentence())}.</p>"

    def to_json(self, *, every_layer: bool = True) -> dict[str, Any]:
        """Return the report of the compression, with what was measured beside it."""
        report = super().to_json(every_layer=every_layer)
        report |= self.annotations
        report["tried"] = [asdict(measurement) for measurement in self.tried]
        if self.truncated_svd is not None:
            report["truncated_svd"] = asdict(self.truncated_svd)
        report["promise"] = self.fidelity.to_json()
        return report

    def save(self, out: str | Path, *, force: bool = False, record: bool = False) -> Path:
        """Write it as `Compression.save` does, with what it keeps in the record and on the card."""
        report = self.to_json(every_layer=record)
        inputs = (self.source.path,)
        return publish(self.written, out, report, self.fidelity, inputs=inputs, force=force)


def _measured(
    checkpoint: Checkpoint,
    request: Request,
    settings: MeasuredSettings,
    statistics: Statistics | None,
    steps: NumberedSteps,
    sizes: SizeSearch | None,
    training: TrainedSizeSearch | None,
) -> MeasuredCompression:
    """Compress against a base: to a plan, or to the smallest variant that keeps a share."""
    search_shapes = partial(
        search_adapter, checkpoint, search=request.search, resources=request.resources(steps)
    )
    steps.begin("opening the base")  # said before torch is loaded, which takes seconds
    with needs("a base", "peft"):
        from lsrdecomp.fidelity.evaluate import Evaluator
        from lsrdecomp.fidelity.goals import SmallestVariant, VariantOfPlan
        from lsrdecomp.fidelity.texts import data_name, read_data
        from lsrdecomp.fidelity.variants import VariantCache
    # 1. Open: the base with the LoRA on it, how it answers the texts that are held out, and the
    #    norm that errors count in.
    plan = request.plan
    target_share = settings.keep
    selects = target_share is not None or (plan is not None and plan.kl is not None)
    texts = read_data(request.data)
    evaluator = Evaluator(
        request.base, checkpoint.path, texts, settings, chooses=selects, on_step=steps
    )
    if plan is not None and plan.kl is not None:
        # A divergence is a share as well, now that the LoRA's effect on these texts is known.
        target_share = 1.0 - share_of_effect(plan.kl, evaluator.reference.effect)
        plan = None
    folder = TemporaryDirectory()
    journal = request.journal or Journal(Path(folder.name) / "journal")
    steps.begin("calibrating")
    norm = evaluator.statistics(journal) if statistics is None else statistics
    variants = VariantCache(evaluator, checkpoint, norm, settings.distil, journal)

    # 2. Fit: the variant of the plan, or the smallest that keeps enough.
    def goal_in_norm() -> VariantOfPlan | SmallestVariant:
        if plan is not None:
            return VariantOfPlan(variants, search_shapes, plan)
        plan_options = {"storage": request.storage, "max_rank": request.max_rank}
        share = target_share or 0.0
        return SmallestVariant(variants, search_shapes, share, plan_options, sizes, training)

    best = _fitted(variants, goal_in_norm, settings.passes, steps)
    # 3. Materialize: the files as they were measured.
    written = shutil.copytree(best.path, Path(folder.name) / "written")
    # 4. Report: what these files keep of the LoRA's effect on texts that selected nothing.
    answers: list[AnswerPair] = []
    rival = None
    if settings.examples:
        answers = evaluator.compare_answers(best.path)
        size = bytes_to_open(best.path / WEIGHTS)
        rival = _truncated_svd(variants, search_shapes, size, Path(folder.name) / "svd")
    behaviour = best.behaviour
    if evaluator.selection_reference is not evaluator.reference:
        behaviour = evaluator.measure_held_out(best.path)
    mismatches = [pair for pair in answers if not pair.matches]
    fidelity = evaluator.fidelity(
        behaviour,
        best.path,
        checkpoint,
        data_name(request.data),
        distilled=best.steps,
        measurements=len(variants.measurements),
        requested=target_share,
        answered=len(answers),
        n_matching=len(answers) - len(mismatches),
    )
    unmeasured = vars(best.compression)
    measured = {
        "fidelity": fidelity,
        "written": written,
        "annotations": best.annotations,
        "_folder": folder,
        "tried": variants.measurements,
        "mismatches": tuple(mismatches[: settings.examples]),
        "truncated_svd": rival,
    }
    return MeasuredCompression(**(unmeasured | measured))


def _fitted(
    variants: VariantCache,
    goal_in_norm: Callable[[], VariantOfPlan | SmallestVariant],
    passes: int,
    steps: NumberedSteps,
) -> CompressedVariant:
    """Return the best variant of all passes, each in the norm around the one before.

    Errors add up along the network, so the norm around a compressed variant is another.
    """
    best: CompressedVariant | None = None
    for number in range(1, passes + 1):
        if best is not None:
            steps.begin("calibrating with the compressed adapter")
            variants.statistics = variants.evaluator.statistics(variants.journal, best.path)
        steps.begin("searching" if best is None else "searching again")
        goal = goal_in_norm()
        # The exact size of the variant is asked in the last norm alone, and only what came of it
        # is trained.
        if number < passes:
            variant = goal.first()
        elif variants.steps:
            steps.begin("training")
            variant = goal.trained()
        else:
            variant = goal.untrained()
        if best is None or goal.is_better(variant, best):
            best = variant
    assert best is not None
    return best


def _truncated_svd(
    variants: VariantCache, search_shapes: Callable[..., SearchedAdapter], size: int, out: Path
) -> Measurement | None:
    """Return what quantized truncated SVD of at most ``size`` bytes keeps; None if none fits."""
    # In bits that each layer chooses, as the variants have: structures are compared, not storages.
    plan = CompressionPlan(bytes=size, storage="auto")
    evaluator = variants.evaluator
    evaluator.announce("measuring truncated SVD in as many bytes")
    try:
        searched = search_shapes([plan], statistics=variants.statistics, search=Search(orders=()))
        compression = searched.compress(plan)
    except BudgetError:
        return None
    behaviour = evaluator.measure_held_out(compression.save(out))
    return Measurement(bytes_to_open(out / WEIGHTS), compression.totals.parameters, behaviour.kept)
