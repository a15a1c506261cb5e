"""compress with a base: calibrate, search once, measure, and take the smallest form that keeps what was asked."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lsrdecomp.checkpoints import Checkpoint
from lsrdecomp.checkpoints.statistics import Statistics
from lsrdecomp.compression.compress import Compression, search_adapter
from lsrdecomp.compression.plan import CompressionPlan, share_of_effect
from lsrdecomp.compression.progress import OnStep
from lsrdecomp.compression.report import LayerReport, Totals
from lsrdecomp.compression.settings import Resources, Search
from lsrdecomp.errors import BudgetError
from lsrdecomp.promise.bench import Bench
from lsrdecomp.promise.distil import promised
from lsrdecomp.promise.forms import FormMaker
from lsrdecomp.promise.norms import calibrated
from lsrdecomp.promise.publish import publish
from lsrdecomp.promise.record import Promise, Tried
from lsrdecomp.promise.sizes import GivenSize, Goal, SmallestSize
from lsrdecomp.promise.texts import Texts, data_name, read_data


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
        given: dict[str, Any] = {"facts": facts, "inputs": (self.source.path,), "force": force}
        return publish(self.made, out, self.promise, **given, every_layer=record)

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
        first, then at most `sizes.MOST_DISTILLED` smaller ones are trained, until one keeps as much.
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
        As for `lsrdecomp.promise.distil`.
    on_step : callable, optional
        Called with a `Step` before and during each part of the work.

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
    options: dict[str, Any] = {"held_out": held_out, "batch": batch, "max_length": max_length}
    options |= {"truncate": truncate, "dtype": dtype}
    bench = Bench(base, checkpoint.path, read_data(data), device=device, seed=seed, on_step=on_step, **options)
    if plan is not None and plan.kl is not None:
        keep, storage, max_rank = 1.0 - share_of_effect(plan.kl, bench.reference.effect), plan.storage, plan.max_rank
        plan = None
    folder = TemporaryDirectory()
    place = workspace or Path(folder.name) / "statistics"
    resources = resources or Resources(on_step=on_step)
    known = calibrated(bench, place) if statistics is None else statistics
    forms = Path(folder.name) / "forms" if workspace is None else workspace.with_suffix(".forms")
    same = {name: value for name, value in options.items() if name not in ("batch", "max_length")}
    maker = FormMaker(bench, checkpoint, known, distil, forms, same)

    def goal(norm: Statistics) -> Goal:
        searches = partial(search_adapter, checkpoint, statistics=norm, search=search, resources=resources)
        if plan is not None:
            return GivenSize(maker, searches, plan)
        assert keep is not None
        return SmallestSize(maker, searches, checkpoint, keep, storage, max_rank)

    asked = goal(known)
    chosen = asked.untrained()
    for turn in range(2, passes + 1):
        # Errors add up along the network: what counts is the norm around the compressed adapter, not around the LoRA.
        if chosen is None:
            break
        again = calibrated(bench, maker.folder / f"statistics-{turn}", chosen.path)
        try:
            other = goal(again)
            new = other.untrained()
        except BudgetError:  # nothing keeps as much in this norm
            break
        if new is None or not asked.is_better(new, chosen):
            break
        asked, chosen, maker.statistics = other, new, again
    if distil or chosen is None:
        chosen = asked.trained()
    told: dict[str, Any] = {"distilled": chosen.distilled, "measurements": len(maker.tried), "asked": keep}
    promise = promised(bench, chosen.behaviour, chosen.path, checkpoint, data_name(data), **told)
    made = shutil.copytree(chosen.path, Path(folder.name) / "made")
    shutil.rmtree(forms, ignore_errors=True)
    if workspace is not None and statistics is None:
        shutil.rmtree(workspace, ignore_errors=True)
    return Promised(chosen.compression, promise, made, chosen.facts, folder, maker.tried)
