"""compress with a base: calibrate, search once, measure, and take the smallest form that keeps what was asked."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.calibration.divergence import Behaviour
from lsrdecomp.checkpoints import Checkpoint
from lsrdecomp.checkpoints.statistics import METADATA, Statistics, read_statistics
from lsrdecomp.compression.compress import Compression, SearchedAdapter, search_adapter
from lsrdecomp.compression.plan import CompressionPlan, share_of_effect
from lsrdecomp.compression.report import LayerReport, Totals
from lsrdecomp.compression.search import Search
from lsrdecomp.compression.searched import Resources
from lsrdecomp.errors import BudgetError
from lsrdecomp.promise.bench import Bench, Say
from lsrdecomp.promise.distil import OnStep, promised
from lsrdecomp.promise.forms import Form, FormMaker
from lsrdecomp.promise.keep import MOST_MEASURED, SMALLEST, Measured, loss_at, smallest
from lsrdecomp.promise.publish import publish
from lsrdecomp.promise.record import Promise, Tried
from lsrdecomp.promise.texts import Texts, data_name, read_data

SAMPLES = 512
"""Examples that calibration reads at most."""
FIRST = 6.0
"""Times smaller than the LoRA is the largest form that the search prepares for; larger ones are searched when asked."""
LEFT = 0.4
"""What distillation is guessed to leave of a loss until one is measured: .17 to .42 on SmolLM2, about .5 on MiniLM."""
MOST_DISTILLED = 3
WORTH_TRAINING = 1.2
"""Times smaller that a form must promise to be before it is trained."""


@dataclass(frozen=True, repr=False)
class Promised:
    """A compression with its measured promise: it looks like a `Compression` and is saved like one."""

    compression: Compression
    promise: Promise
    made: Path  # the form as written, in a temporary directory that lives as long as this
    facts: dict[str, Any]
    _folder: TemporaryDirectory[str]
    tried: tuple[Tried, ...] = ()  # every form that was measured, in that order

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
        return {**self.compression.to_json(), **self._told(), "promise": self.promise.to_json()}

    def save(self, out: str | Path, *, force: bool = False, record: bool = False) -> Path:
        """As `Compression.save`; the promise stands in the record and on the card."""
        facts = {**self._told(), **({"layers": self.to_json()["layers"]} if record else {})}
        return publish(self.made, out, self.promise, facts=facts, inputs=(self.source.path,), force=force)

    def _told(self) -> dict[str, Any]:
        return {**self.facts, "tried": [asdict(one) for one in self.tried]}


def compress_measured(
    checkpoint: Checkpoint,
    plan: CompressionPlan | None = None,
    *,
    base: str | Path,
    data: str | Path | Texts,
    keep: float | None = None,
    distil: int = 0,
    statistics: Statistics | None = None,
    storage: str = "float32",
    max_rank: int | None = None,
    search: Search | None = None,
    resources: Resources | None = None,
    workspace: Path | None = None,
    held_out: int = 128,
    batch: int | None = None,
    max_length: int = 128,
    dtype: str = "float32",
    device: str = "cpu",
    seed: int = 0,
    on_stage: Say | None = None,
    on_step: OnStep | None = None,
) -> Promised:
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
        Steps of distillation; see `lsrdecomp.promise.distil`. With ``keep`` the smallest untrained form is found
        first, then at most `MOST_DISTILLED` smaller ones are trained, until one keeps as much.
    statistics : Statistics, optional
        Absent, they are measured first, on the texts that are not held out.
    storage, max_rank
        With ``keep``: as in a plan.
    search, resources
        As for `search_adapter`: how far to look, and where.
    workspace : path, optional
        Where statistics are gathered, and beside it, ending in ``.forms``, what was made and measured, so that a
        killed run goes on; both are removed at the end.
    held_out, batch, max_length, dtype, device, seed
        As for `lsrdecomp.promise.distil`.
    on_stage, on_step : callable, optional
        Called with a few words before each part of the work; and after every step of distillation.

    Returns
    -------
    Promised
        Nothing is written before `Promised.save`.

    Raises
    ------
    BudgetError
        If both or neither of ``plan`` and ``keep`` are given; if no form keeps as much.
    LsrError, CheckpointError
        As `lsrdecomp.promise.distil`.
    """
    if (plan is None) == (keep is None):
        raise BudgetError("one goal is needed with a base: a share to keep, or a size or error")
    if keep is not None and not 0.0 < keep < 1.0:
        raise BudgetError(f"the share to keep lies between 0 and 1, such as 0.95; got {keep:g}")
    say = on_stage or (lambda _: None)
    options: dict[str, Any] = {"held_out": held_out, "batch": batch, "max_length": max_length, "dtype": dtype}
    bench = Bench(base, checkpoint.path, read_data(data), device=device, seed=seed, on_step=say, **options)
    if plan is not None and plan.kl is not None:
        keep, storage, max_rank = 1.0 - share_of_effect(plan.kl, bench.reference.effect), plan.storage, plan.max_rank
        plan = None
    folder = TemporaryDirectory()
    place = workspace or Path(folder.name) / "statistics"
    known = _calibrated(bench, place, say) if statistics is None else statistics
    forms = Path(folder.name) / "forms" if workspace is None else workspace.with_suffix(".forms")
    same = {name: value for name, value in options.items() if name not in ("batch", "max_length")}
    maker = FormMaker(bench, checkpoint, known, distil, forms, same, on_stage=say, on_step=on_step)
    searches = partial(search_adapter, checkpoint, statistics=known, search=search, resources=resources)
    if plan is None:
        assert keep is not None
        chosen = _smallest(maker, checkpoint, searches, keep, {"storage": storage, "max_rank": max_rank})
    else:
        chosen = maker.plain(searches([plan]).compress(plan))
        chosen = maker.distilled(chosen) if distil else chosen
    told: dict[str, Any] = {"distilled": chosen.distilled, "measurements": len(maker.tried), "asked": keep}
    promise = promised(bench, chosen.behaviour, chosen.path, checkpoint, data_name(data), **told)
    made = shutil.copytree(chosen.path, Path(folder.name) / "made")
    shutil.rmtree(forms, ignore_errors=True)
    if workspace is not None and statistics is None:
        shutil.rmtree(workspace, ignore_errors=True)
    return Promised(chosen.compression, promise, made, chosen.facts, folder, maker.tried)


def _smallest(
    maker: FormMaker,
    checkpoint: Checkpoint,
    searches: Callable[[Sequence[CompressionPlan]], SearchedAdapter],
    keep: float,
    shared: Mapping[str, Any],
) -> Form:
    """The smallest form that keeps enough, of those that one search offers."""
    counts_bytes = shared["storage"] == "auto"
    heads = sum(tensor.nbytes for tensor in checkpoint.extras.values())
    whole = float(checkpoint.weights.stat().st_size - heads if counts_bytes else checkpoint.adapter_parameters)

    def plan(size: float) -> CompressionPlan:
        if counts_bytes:
            return CompressionPlan(bytes=heads + math.ceil(size), **shared)
        return CompressionPlan(parameters=size, **shared)

    searched = searches([plan(whole / FIRST), plan(whole / SMALLEST)])

    @cache
    def expected(size: float) -> float:
        total = searched.compress(plan(size), solve=False).totals
        return (total.relative_error if total.functional_error is None else total.functional_error) ** 2

    # 1. The smallest untrained form: a measurement is a forward pass over the held-out texts.
    plain: dict[float, Form] = {}

    def measured(size: float) -> Behaviour:
        plain[size] = maker.plain(searched.compress(plan(size)))
        return plain[size].behaviour

    def told(seen: Sequence[Measured]) -> None:
        maker.say(f"form {len(seen)} of at most {MOST_MEASURED} keeps {seen[-1].kept:.3f}, {keep:g} asked")

    enough: Measured | None = None
    try:
        enough = smallest(keep, whole, expected, measured, on_measured=told)[0]
    except BudgetError:
        if not maker.steps:
            raise
    if enough is not None and not maker.steps:
        return plain[enough.size]

    # 2. Smaller ones, trained: the first where training is guessed to bring enough, the others by what it brought.
    trained: dict[float, Form] = {}

    def untrained_loss(size: float) -> float:
        return loss_at(size, [Measured(at, form.behaviour) for at, form in plain.items()], expected)

    def measured_trained(size: float) -> Behaviour:
        measured(size)
        words = f"training {len(trained) + 1} of at most {MOST_DISTILLED}, "
        words += f"{plain[size].compression.totals.ratio:.3g} times fewer numbers: "
        trained[size] = maker.distilled(plain[size], words)
        return trained[size].behaviour

    settings: dict[str, Any] = {"most": MOST_DISTILLED, "prior": LEFT, "close": WORTH_TRAINING, "enough": enough}
    found = smallest(keep, whole, untrained_loss, measured_trained, **settings)[0]
    return trained.get(found.size) or plain[found.size]


def _calibrated(bench: Bench, out: Path, say: Say) -> Statistics:
    """Statistics of the adapted layers on texts that are not held out; those that a run before finished are taken."""
    source, texts = bench.source, bench.calibration[:SAMPLES]
    asked = {"seed": bench.seed, "samples": len(texts), "base": source.name, "modules": list(source.modules)}
    asked |= {"adapter": source.adapter_sha256}
    if (out / METADATA).exists():
        settings = read_statistics(out).metadata.get("settings", {})
        if any(settings.get(name) != value for name, value in asked.items()):
            shutil.rmtree(out)
    if not (out / METADATA).exists():
        say(f"calibrating on {len(texts)} examples")
        calibrate(
            source.model,
            bench.batches(texts),
            modules=source.modules,
            out=out,
            seed=bench.seed,
            samples=len(texts),
            head=source.head,
            base=source.name,
            adapter_base=source.adapter_base,
            adapter=source.adapter_sha256,
        )
    return read_statistics(out)
