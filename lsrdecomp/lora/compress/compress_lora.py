"""`lsrdecomp.compress`: compress a LoRA to a size, an error, or a measured share that is kept.

Torch is loaded only where a base is given, which runs on texts to measure the kept share.

From ``lsrdecomp compress LORA --base B --data D --keep .9`` to the file:

1. `cli.compress_command` parses the `lora.search.request.Request`, opens the LoRA
   (`lora.files.open_checkpoint`) and calls `compress_request`, which calls `_compress_measured`.
2. `lora.measure.Evaluator` opens the base with the LoRA on it, and keeps the LoRA's outputs on
   held-out texts. On other texts it measures the statistics of the layers (`lora.base.calibrate`):
   the norm in which errors count.
3. `lora.search.search_adapter` solves every layer at many shapes in that norm
   (`lora.search.search`).
4. `goals.ShareGoal` asks that search for variants of several sizes (`size_search`).
   `variants.VariantCache` writes and measures them and, if asked to, trains them
   (`lora.train.distillation`), each once.
5. The smallest variant that keeps the share is measured on the held-out texts, and replaced by a
   larger one where it keeps less there.
6. `MeasuredCompression.save` copies its files to their place (`rewrite.publish`).
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, replace
from functools import partial
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import BudgetError, CheckpointError, needs
from lsrdecomp.fields import refuses_unknown
from lsrdecomp.lora.base.any_adapter import open_adapter
from lsrdecomp.lora.base.base_files import check_reachable, resolved_base
from lsrdecomp.lora.base.dataset import PromptExample
from lsrdecomp.lora.base.text_profile import TextProfile
from lsrdecomp.lora.base.texts import data_for, data_name
from lsrdecomp.lora.compress.rewrite import publish
from lsrdecomp.lora.files import Checkpoint, Journal
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.progress import OnStep, PlannedSteps
from lsrdecomp.lora.files.statistics import Statistics, read_statistics
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.measure.fidelity import AnswerPair, Fidelity, Measurement
from lsrdecomp.lora.search.effort import LIMITS_BESIDE_A_BASE
from lsrdecomp.lora.search.layers import require_lora
from lsrdecomp.lora.search.measured_settings import MeasuredSettings
from lsrdecomp.lora.search.plan import CompressionPlan, Search, share_of_effect
from lsrdecomp.lora.search.request import Request
from lsrdecomp.lora.search.searched import Compression, described, search_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lsrdecomp.lora.base.texts import Item, Texts
    from lsrdecomp.lora.compress.goals import Goal, ShapeSearch
    from lsrdecomp.lora.compress.variants import CompressedVariant, VariantCache
    from lsrdecomp.lora.files.format_table import AdapterSource
    from lsrdecomp.lora.measure.evaluator import Evaluator
    from lsrdecomp.lora.search.layers import StatisticsByLayer


MAX_REPLACEMENTS = 2
"""Maximum variants that take the place of one that keeps less than the target on the held-out
texts; each costs a forward pass over them."""


@partial(refuses_unknown, settings=MeasuredSettings)
def compress(
    checkpoint: Checkpoint | AdapterSource,
    plan: CompressionPlan | None = None,
    *,
    ratio: float | None = None,
    bytes: int | None = None,
    parameters: float | None = None,
    rtol: float | None = None,
    energy: float | None = None,
    kl: float | None = None,
    separation_rank: int | None = None,
    keep: float | None = None,
    keep_answers: float | None = None,
    storage: str | None = None,
    structure: str | None = None,
    max_rank: int | None = None,
    min_rank: int | None = None,
    inner_shape: tuple[int, ...] | None = None,
    base: str | Path | Any | None = None,
    data: str | Path | Texts | None = None,
    distill: int | None = None,
    statistics: Statistics | str | Path | None = None,
    search: Search | None = None,
    settings: MeasuredSettings | None = None,
    seed: int | None = None,
    device: str | None = None,
    workers: int = 1,
    journal: Journal | None = None,
    on_step: OnStep | None = None,
) -> Compression:
    """Compress a LoRA to an LSR adapter of a size, an error, or a measured share that is kept.

    Parameters
    ----------
    checkpoint : str, path, Checkpoint, state dict or PeftModel
        The LoRA: what `open_checkpoint` reads or returned; with ``base``, an adapter of any method
        of PEFT that merges (`lsrdecomp.lora.base.open_adapter`).
    plan : CompressionPlan, optional
        The goal as a value that can be used again, with storage, structure and shapes.
    ratio, bytes, parameters, rtol, energy, kl, separation_rank : number, optional
        The goal, where there is no plan: one of these, as `CompressionPlan` has it, ``keep`` or
        ``keep_answers``. Without one of them ``max_rank`` is the goal.
    keep : float, optional
        With ``base``: find the smallest version that keeps this share of the LoRA's effect.
    keep_answers : float, optional
        With ``base``: find the smallest version that gives this share of the LoRA's whole answers:
        greedy ones, word for word, to prompts that measure nothing else; or its classes.
    storage : str, optional
        As in a plan. Absent, it is the LoRA's dtype; with ``bytes``, ``keep`` or ``keep_answers``,
        the number of bits that suits each layer best.
    structure, max_rank, min_rank, inner_shape : optional
        As in a plan.
    base : str, path, module or Base, optional
        The base model, by name or directory: of transformers, for texts, images, sounds or
        embeddings, or of diffusers. Or any ``nn.Module`` whose outputs are numbers; for other
        outputs of a model of your own a `lora.base.base_model.Base`. With it, the kept share
        is measured: ``result.fidelity``.
    data : path or iterable, optional
        With ``base``: texts of the task, without labels; of fewer than 32 a language model writes
        more, and without any its own. Or a folder of images or sounds; prompts of a diffusion
        model, which needs none; for a model of your own batches of its arguments.
    distill : int, optional
        With ``base``: also train on the LoRA's answers, for this number of steps.
    statistics : Statistics, str or path, optional
        Statistics of the layers, so that errors count by their effect on the model's outputs: a
        directory that `lsrdecomp calibrate` wrote, or what `read_statistics` returned. With
        ``base`` they are measured if they are not given.
    search : Search, optional
        Effort of the search for shapes; without statistics, a base or a structure it asks for
        that search, where truncated SVD would be taken.
    settings : MeasuredSettings, optional
        With ``base``: how texts are read and held out, and what else is measured. An argument here
        of the same name wins.
    seed : int, optional
        With ``base``: seed of the order of the texts, and of which are held out.
    device : str, optional
        Where torch solves, and runs the base; absent, the CPU, where NumPy solves.
    workers : int
        Processes that solve.
    journal : Journal, optional
        Keeps what was solved, measured and trained, so that a killed run can be resumed.
    on_step : callable, optional
        Called with a `ProgressUpdate` before and during each part of the work.

    Returns
    -------
    Compression
        Call its ``save`` to write the adapter. With a base it is a `MeasuredCompression`.

    Raises
    ------
    BudgetError
        If the goal cannot be met, if none is given, or more than one.
    SettingsError
        For a setting that has no use with this goal; the message has the goals where it has one.
    CheckpointError, LsrError
        If files or base cannot be used; for an unknown goal or setting, with the nearest known
        name; if torch, transformers or peft are missing and a base is given.

    Examples
    --------
    >>> import lsrdecomp as lsr
    >>> from importlib.resources import files
    >>> lsr.compress(files("lsrdecomp.cli") / "demo_adapter", ratio=10)
    Compression of demo_adapter, ratio = 10
       12 layers, 4 of them left out: 6,912 of 73,728 parameters (10.7 times fewer), 27,648 ...
       relative error 0.525 in the Frobenius norm
       in int4 the same bytes leave an error of about 0.15..., not 0.525: bytes=...
       not on disk before save(directory)

    With a base: ``lsr.compress("my-lora/", base="smollm2", keep=0.95).save("small/")``, and
    ``data="prompts.jsonl"`` if there are texts.
    """
    # A request refuses settings that have no use with its goal. None and the default number of
    # workers are not settings.
    given = {
        "ratio": ratio,
        "bytes": bytes,
        "parameters": parameters,
        "rtol": rtol,
        "energy": energy,
        "kl": kl,
        "separation_rank": separation_rank,
        "keep": keep,
        "keep_answers": keep_answers,
        "storage": storage,
        "structure": structure,
        "max_rank": max_rank,
        "min_rank": min_rank,
        "inner_shape": inner_shape,
        "base": base,
        "data": data,
        "distill": distill,
        "statistics": statistics,
        "search": search,
        "seed": seed,
        "device": device,
        "workers": None if workers == 1 else workers,
        "journal": journal,
    }
    request = Request.parse(given, plan=plan, settings=settings)
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = open_adapter(checkpoint, request.base, trust_remote_code=request.trusts_code)
    return compress_request(checkpoint, request, on_step)


def compress_request(
    checkpoint: Checkpoint,
    request: Request,
    on_step: OnStep | None = None,
) -> Compression:
    """Compress an open adapter as requested.

    Parameters
    ----------
    checkpoint : Checkpoint
    request : Request
    on_step : callable, optional
        Called with a `ProgressUpdate` before and during each part of the work.
    """
    request = request.for_adapter(checkpoint.storage)
    statistics = request.statistics
    if isinstance(statistics, str | Path):
        statistics = read_statistics(statistics)
    if request.measured is not None:
        for layer in checkpoint.layers:
            require_lora(checkpoint, layer)  # before a base is opened and run
        steps = PlannedSteps(on_step, _step_times(request.measured))
        measured = _compress_measured(checkpoint, request, request.measured, statistics, steps)
        resolved = {**request.resolved(), "base": resolved_base(request.base)}
        return replace(measured, settings=request.to_json(), resolved=resolved)
    assert request.plan is not None
    searched = search_adapter(
        checkpoint,
        [request.plan],
        statistics=statistics,
        search=request.search,
        resources=request.resources(PlannedSteps(on_step, [1.0])),
    )
    return described(searched.compress(request.plan), request, statistics)


def _step_times(settings: MeasuredSettings) -> list[float]:
    """Return the expected times of the steps of a run, in their order.

    Their unit is the time that the base takes to open. They were measured on the demo's LoRA.
    """
    opening, calibrating, searching = 1.0, 1.0, 2.0
    times = [opening]
    for _ in range(settings.passes):
        times += [calibrating, searching]
    if settings.distill:
        times.append(0.05 * settings.distill)
    measuring = 0.1
    if settings.examples:
        measuring += 0.4  # for answers in words, and truncated SVD on the same texts
    return [*times, measuring]


@dataclass(frozen=True, repr=False, kw_only=True)
class MeasuredCompression(Compression):
    """A compression whose fidelity was measured on its base."""

    fidelity: Fidelity
    written: Path
    """Directory of the variant that was measured, for `save` to copy."""
    annotations: dict[str, Any]
    """Entries of the record beside those of the compression: how it was trained."""
    _folder: TemporaryDirectory[str] | None
    """The temporary directory that ``written`` is in, which is deleted with this object."""
    tried: tuple[Measurement, ...] = ()
    """Every variant that was measured, in order."""
    mismatches: tuple[AnswerPair, ...] = ()
    """Texts to which the variant's answer is not the LoRA's. Only the HTML report shows them."""
    answers: tuple[AnswerPair, ...] = ()
    """Answers of LoRA and variant to some texts, those that differ first, for the HTML report."""
    truncated_svd: Measurement | None = None
    """Quantized truncated SVD of as many bytes, on the held-out texts."""

    def __repr__(self) -> str:
        """Return goal, sizes and errors, then what is kept, in ten lines or fewer."""
        *compression, hint_to_save = super().__repr__().split("\n")
        fidelity = [f"   {line.strip()}" for line in repr(self.fidelity).split("\n")]
        return "\n".join([*compression, *fidelity, hint_to_save])

    def _repr_html_(self) -> str:
        """Return the same as HTML, for a notebook."""
        return f"{super()._repr_html_()}<p>It {escape(self.fidelity.sentence())}.</p>"

    def to_json(self, *, every_layer: bool = True) -> dict[str, Any]:
        """Return the report of the compression, with what was measured."""
        report = super().to_json(every_layer=every_layer)
        report |= self.annotations
        report["tried"] = [asdict(measurement) for measurement in self.tried]
        if self.truncated_svd is not None:
            report["truncated_svd"] = asdict(self.truncated_svd)
        report["promise"] = self.fidelity.to_json()
        return report

    def save(
        self, out: str | Path, *, force: bool = False, record: bool = False, bare: bool = False
    ) -> Path:
        """Write the adapter as `Compression.save` does, with its fidelity in record and card."""
        report = self.to_json(every_layer=record)
        inputs = (self.source.path,)
        return publish(
            self.written, out, report, self.fidelity, inputs=inputs, force=force, bare=bare
        )


def _shown_answers(answers: list[AnswerPair], n_differing: int) -> tuple[AnswerPair, ...]:
    """Return answers to show: some that differ, then two that are the same."""
    differing = [pair for pair in answers if not pair.matches][:n_differing]
    matching = [pair for pair in answers if pair.matches]
    return (*differing, *matching[:2])


def _compress_measured(
    checkpoint: Checkpoint,
    request: Request,
    settings: MeasuredSettings,
    statistics: Statistics | None,
    steps: PlannedSteps,
) -> MeasuredCompression:
    """Compress against a base: to a plan, or to the smallest variant that keeps a share."""
    # 1. Open the base with the LoRA on it.
    steps.begin("opening the base")  # announced before torch is loaded, which takes seconds
    check_reachable(request.base)
    texts = data_for(request.base, request.data)
    folder = TemporaryDirectory()
    journal = request.journal or Journal(Path(folder.name) / "journal")
    evaluator = _open_base(checkpoint, request, settings, texts, journal, steps)
    _refuse_other_names(checkpoint, evaluator)
    target_share = _target_share(request, settings, evaluator)
    # 2. Measure the norm in which errors count.
    from lsrdecomp.lora.compress.variants import VariantCache  # with torch, which is loaded by now

    steps.begin("calibrating")
    norm = evaluator.statistics(journal) if statistics is None else statistics
    notes = [*_differences_of_texts(statistics, texts, data_name(request.data)), *norm.doubts]
    variants = VariantCache(evaluator, checkpoint, norm, settings.distill, journal)
    # 3. Find the variant of the plan, or the smallest that keeps the share.
    resources = replace(request.resources(steps), limits=LIMITS_BESIDE_A_BASE)
    search_shapes = partial(search_adapter, checkpoint, search=request.search, resources=resources)
    make_goal = partial(_goal, variants, search_shapes, request, target_share)
    best, goal = _best_of_passes(variants, make_goal, settings.passes, steps)
    # 4. Measure what is reported, on texts that selected nothing before.
    steps.begin("measuring what is reported")
    requested = {"requested": target_share, "requested_answers": settings.keep_answers}

    def measure_held_out(variant: CompressedVariant) -> Fidelity:
        behaviour = variant.behaviour
        if evaluator.selection_reference is not evaluator.reference:
            behaviour = evaluator.measure_held_out(variant.path)
        name = data_name(request.data)
        return evaluator.fidelity(behaviour, variant.path, checkpoint, name, **requested)

    best, fidelity = _held_out_choice(best, goal, measure_held_out)
    # 5. Keep its files, apart from the journal, and compare its answers.
    written = shutil.copytree(best.path, Path(folder.name) / "written")
    answers: list[AnswerPair] = []
    truncated_svd = None
    if settings.examples:
        answers = evaluator.compare_answers(best.path)
        out = Path(folder.name) / "svd"
        truncated_svd = _measure_truncated_svd(
            evaluator, search_shapes, variants.statistics, best.path, out
        )
    mismatches = [pair for pair in answers if not pair.matches]
    # 6. Report what was measured.
    n_measured = len(variants.measurements)
    fidelity = replace(fidelity, distilled=best.steps, measurements=n_measured)
    if evaluator.selection_reference is evaluator.reference:  # few texts: the same ones chose
        fidelity = replace(fidelity, held_out_measurements=n_measured)
    fields = dict(vars(best.compression))
    fields.update(
        fidelity=fidelity,
        written=written,
        annotations=best.annotations,
        _folder=folder,
        tried=variants.measurements,
        mismatches=tuple(mismatches[: settings.examples]),
        answers=_shown_answers(answers, settings.examples),
        truncated_svd=truncated_svd,
        notes=tuple(notes),
    )
    return MeasuredCompression(**fields)


def _open_base(
    checkpoint: Checkpoint,
    request: Request,
    settings: MeasuredSettings,
    texts: Sequence[Item],
    journal: Journal,
    steps: PlannedSteps,
) -> Evaluator:
    """Open the base with the LoRA on it, and run the LoRA on the texts that are held out."""
    with needs("a base", "peft"):
        from lsrdecomp.lora.measure.evaluator import Evaluator
    return Evaluator(
        request.base,
        checkpoint.path,
        texts,
        settings,
        chooses=request.plan is None or request.plan.kl is not None,
        trains=bool(settings.distill),
        by_answers=settings.keep_answers is not None,
        journal=journal,
        on_step=steps,
    )


def _refuse_other_names(checkpoint: Checkpoint, evaluator: Evaluator) -> None:
    """Refuse layers that the base has not under their names, or does not run."""
    run = set(evaluator.source.modules)
    for name, module in evaluator.base.names_in(checkpoint).items():
        if name == module and (name in run or evaluator.base.module_names is None):
            continue
        reason = "does not run on the data, as a text encoder does not"
        if name != module:
            reason = f"is {module} in the base, where LSR would not find it"
        raise CheckpointError(
            f"{reason}; cut the file in its own format, which keeps such layers: --out "
            "small.safetensors, or from Python lsrdecomp.lora.compress.truncate",
            path=checkpoint.path,
            tensor=name,
        )


def _differences_of_texts(
    statistics: Statistics | None, texts: Sequence[Item], name: str
) -> list[str]:
    """Return how texts differ from those that given statistics were measured on, as sentences."""
    if statistics is None:
        return []
    profile = TextProfile.from_json(statistics.metadata.get("settings", {}).get("text_profile"))
    if profile is None:
        return []
    read = [text for text in texts if isinstance(text, tuple | PromptExample)]
    differences = profile.differences(read, name) if read else []
    return [f"{each}: calibrate on texts like those you measure on" for each in differences]


def _target_share(
    request: Request, settings: MeasuredSettings, evaluator: Evaluator
) -> float | None:
    """Return the share of the LoRA's effect to be kept, if one was asked for.

    A divergence is turned into one by the LoRA's effect on the texts of the evaluator.
    """
    if request.plan is not None and request.plan.kl is not None:
        return 1.0 - share_of_effect(request.plan.kl, evaluator.reference.effect)
    return settings.keep


def _goal(
    variants: VariantCache,
    search_shapes: ShapeSearch,
    request: Request,
    target_share: float | None,
) -> Goal:
    """Return the goal of one pass: the share, the whole answers, or the plan."""
    from lsrdecomp.lora.compress.goals import AnswerGoal, PlanGoal, ShareGoal

    if request.plan is not None and request.plan.kl is None:
        return PlanGoal(variants, search_shapes, request.plan)
    plan_options = {
        "storage": request.storage,
        "max_rank": request.max_rank,
        "min_rank": request.min_rank,
        "structure": request.structure,
    }
    if target_share is not None:
        return ShareGoal(variants, search_shapes, target_share, plan_options)
    assert request.measured is not None
    assert request.measured.keep_answers is not None
    return AnswerGoal(variants, search_shapes, request.measured.keep_answers, plan_options)


def _best_of_passes(
    variants: VariantCache, make_goal: Callable[[], Goal], passes: int, steps: PlannedSteps
) -> tuple[CompressedVariant, Goal]:
    """Return the best variant of all passes, and the goal of the last.

    Each pass after the first calibrates with the variant found so far. The errors of layers add up
    along the network, so that the norm measured with it is nearer to the one that counts.
    """
    best: CompressedVariant | None = None
    for number in range(1, passes + 1):
        if best is not None:
            steps.begin("calibrating with the compressed adapter")
            variants.statistics = variants.evaluator.statistics(variants.journal, best.path)
        steps.begin("searching" if best is None else "searching again")
        goal = make_goal()
        # Only in the last pass is the goal met exactly, and a variant trained.
        if number < passes:
            variant = goal.preliminary()
        elif variants.steps:
            steps.begin("training")
            variant = goal.trained()
        else:
            variant = goal.untrained()
        if best is None or goal.is_better(variant, best):
            best = variant
    assert best is not None
    return best, goal


def _held_out_choice(
    best: CompressedVariant,
    goal: Goal,
    measure_held_out: Callable[[CompressedVariant], Fidelity],
) -> tuple[CompressedVariant, Fidelity]:
    """Return the variant to write, and its fidelity on the held-out texts.

    While it keeps less than was asked there, a larger one is measured as well; of those that keep
    less it is the one that keeps most. These texts were found to be harder than the selection
    texts, so they show rather too little of the larger one than too much.
    """
    last, of_last = best, measure_held_out(best)
    fidelity = of_last
    n_measured = 1
    while n_measured <= MAX_REPLACEMENTS and of_last.is_short:
        larger = goal.replacement(last, of_last)
        if larger is None:
            break
        last, of_last = larger, measure_held_out(larger)
        n_measured += 1
        if of_last.shortfall < fidelity.shortfall:
            best, fidelity = last, of_last
    return best, replace(fidelity, held_out_measurements=n_measured)


def _measure_truncated_svd(
    evaluator: Evaluator,
    search_shapes: ShapeSearch,
    statistics: StatisticsByLayer,
    written: Path,
    out: Path,
) -> Measurement | None:
    """Measure the quantized truncated SVD of at most the bytes of a variant, for comparison.

    It is found in the same norm, and each layer chooses its bits, as in the variant. None if even
    the smallest takes more bytes.
    """
    plan = CompressionPlan(bytes=bytes_to_open(written / WEIGHTS), storage="auto")
    evaluator.announce("measuring truncated SVD in as many bytes")
    try:
        searched = search_shapes([plan], statistics=statistics, search=Search(orders=()))
        compression = searched.compress(plan)
    except BudgetError:
        return None
    behaviour = evaluator.measure_held_out(compression.save(out))
    return Measurement(bytes_to_open(out / WEIGHTS), compression.totals.parameters, behaviour.kept)
