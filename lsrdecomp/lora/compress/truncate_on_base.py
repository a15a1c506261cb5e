"""Truncated SVD of a LoRA in its own format, by its effect on a base, to a size or a share kept.

1. `Evaluator` opens the base with the LoRA on it, and measures the norm in which errors of the
   layers change its outputs.
2. `truncation` cuts the singular values of all layers in that norm at one threshold, which keeps
   the components that act most for their numbers.
3. For a share, `size_search` finds the fewest numbers that keep it, on selection data. Reported
figures are of others, which are held out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lsrdecomp.errors import BudgetError, CalibrationError
from lsrdecomp.lora.base.base_files import check_reachable
from lsrdecomp.lora.base.texts import Example, data_for, data_name
from lsrdecomp.lora.compress.compress_lora import MAX_REPLACEMENTS
from lsrdecomp.lora.compress.size_search import MeasuredSizes
from lsrdecomp.lora.compress.truncation import Pictures, truncation
from lsrdecomp.lora.files import Journal, file_or_directory
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.writing import weight_file
from lsrdecomp.lora.measure.evaluator import Evaluator
from lsrdecomp.lora.measure.fidelity import Measurement, share_kept
from lsrdecomp.lora.search.plan import CompressionPlan

if TYPE_CHECKING:
    from lsrdecomp.lora.base.behaviour import Behaviour
    from lsrdecomp.lora.compress.truncation import Truncation
    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.files.progress import OnStep
    from lsrdecomp.lora.files.statistics import Statistics
    from lsrdecomp.lora.search.request import Request
    from lsrdecomp.targets.weights import NormWeights


@dataclass(frozen=True, slots=True)
class _MeasuredCut:
    """A truncation that was written, and its behaviour on the selection data."""

    cut: Truncation
    path: Path
    behaviour: Behaviour


class _StatisticsByName(Mapping[str, "NormWeights"]):
    """Statistics under the names that layers have in a file.

    Parameters
    ----------
    statistics : Statistics
        By module.
    modules : Mapping
        The module of each layer, by its name in the file.
    """

    def __init__(self, statistics: Statistics, modules: Mapping[str, str]) -> None:
        self._statistics = statistics
        self._modules = {name: module for name, module in modules.items() if module in statistics}

    def __getitem__(self, name: str) -> NormWeights:
        """Return the weights of a layer's norm."""
        return self._statistics[self._modules[name]]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all layers with statistics."""
        return iter(self._modules)

    def __len__(self) -> int:
        """Return their number."""
        return len(self._modules)


class _CutsOnBase:
    """Writes truncations of one LoRA and measures them, each once."""

    def __init__(self, evaluator: Evaluator, whole: Truncation, folder: Path) -> None:
        self.evaluator = evaluator
        self.whole = whole
        self.folder = folder
        self.measured: dict[tuple[int, ...], _MeasuredCut] = {}

    def write(self, cut: Truncation, name: str) -> Path:
        """Write a truncation to the folder, in the format of the LoRA."""
        is_file = file_or_directory(cut.source) == "file"
        suffix = cut.source.weights.suffix if is_file else ""
        return cut.save(self.folder / f"{name}{suffix}", force=True)

    def measure(self, plan: CompressionPlan) -> _MeasuredCut:
        """Return the truncation to a plan, measured on the selection data."""
        cut = self.whole.resized(plan)
        if cut.ranks not in self.measured:
            number = len(self.measured) + 1
            ratio = cut.parameters_before / max(1, cut.parameters)
            self.evaluator.announce(f"measuring version {number}, {ratio:.3g} times fewer numbers")
            path = self.write(cut, f"cut-{number}")
            self.measured[cut.ranks] = _MeasuredCut(cut, path, self.evaluator.measure(path))
        return self.measured[cut.ranks]

    @property
    def tried(self) -> tuple[Measurement, ...]:
        """Every truncation that was measured, in order."""
        return tuple(
            Measurement(_bytes_of(each.path), each.cut.parameters, each.behaviour.kept)
            for each in self.measured.values()
        )


def _bytes_of(path: Path) -> int:
    """Return the bytes of a written adapter: its weight file, and a config in its directory."""
    return path.stat().st_size if path.is_file() else bytes_to_open(weight_file(path))


def truncate_on_base(
    checkpoint: Checkpoint, request: Request, on_step: OnStep | None = None
) -> Truncation:
    """Truncate a LoRA by its effect on a base, to a plan or to the smallest that keeps a share.

    Raises
    ------
    CalibrationError
        If the base runs none of the LoRA's layers.
    BudgetError
        If no size keeps the share, or nothing fits into the plan.
    """
    assert request.measured is not None
    check_reachable(request.base)
    evaluator = Evaluator(
        request.base,
        checkpoint.path,
        data_for(request.base, request.data),
        request.measured,
        chooses=request.plan is None,
        on_step=on_step,
    )
    with TemporaryDirectory() as name:
        folder = Path(name)
        # 1. The norm in which errors count.
        by_module = evaluator.statistics(Journal(folder / "journal"))
        statistics = _StatisticsByName(by_module, evaluator.base.names_in(checkpoint))
        if not statistics:
            raise CalibrationError(f"the base runs none of the layers of {checkpoint.path}")
        options = {
            key: value
            for key in ("storage", "max_rank", "min_rank", "only")
            if (value := getattr(request.plan or request, key, None)) is not None
        }
        everything = CompressionPlan(
            **{"max_rank": max(layer.rank for layer in checkpoint.layers), **options}
        )
        whole = truncation(checkpoint, everything, statistics=statistics, on_step=on_step)
        cuts = _CutsOnBase(evaluator, whole, folder)
        # 2. The truncation of the plan, or the fewest numbers that keep the share.
        if request.plan is not None:
            found = cuts.measure(request.plan)
            behaviour, n_held_out = found.behaviour, 1
        else:
            found, behaviour, n_held_out = _smallest(cuts, request, options)
        # 3. As many numbers chosen by the weights alone.
        by_energy = _by_energy(cuts, found.cut)
        fidelity = evaluator.fidelity(
            behaviour,
            found.path,
            checkpoint,
            data_name(request.data),
            measurements=len(cuts.measured),
            held_out_measurements=n_held_out,
            requested=request.measured.keep,
        )
        return replace(
            found.cut,
            fidelity=fidelity,
            tried=cuts.tried,
            by_energy=by_energy,
            pictures=_pictures(evaluator, found.path, request.measured.examples),
        )


def _smallest(
    cuts: _CutsOnBase, request: Request, options: Mapping[str, object]
) -> tuple[_MeasuredCut, Behaviour, int]:
    """Return the smallest truncation that keeps the share, and its behaviour on held-out data.

    Where it keeps less than was asked there, a larger one takes its place, as for other structures.
    """
    assert request.measured is not None
    assert request.measured.keep is not None
    target = request.measured.keep
    evaluator = cuts.evaluator

    def plan(size: float) -> CompressionPlan:
        return CompressionPlan(parameters=size, **options)  # type: ignore[arg-type]

    def expected_error(size: float) -> float:
        return cuts.whole.resized(plan(size)).relative_error ** 2

    sizes = MeasuredSizes(
        float(cuts.whole.parameters_before),
        expected_error,
        lambda size: cuts.measure(plan(size)),
    )
    found = sizes.smallest(target)
    if evaluator.selection_reference is evaluator.reference:
        return found, found.behaviour, 1
    behaviour = evaluator.measure_held_out(found.path)
    n_measured = 1
    while share_kept(behaviour) < target and n_measured <= MAX_REPLACEMENTS:
        excess = share_kept(found.behaviour) - share_kept(behaviour)
        try:
            larger = sizes.smallest(min(1.0, target + excess))
        except BudgetError:
            break
        if larger.cut.parameters <= found.cut.parameters:
            break
        found = larger
        behaviour = evaluator.measure_held_out(found.path)
        n_measured += 1
    return found, behaviour, n_measured


def _pictures(evaluator: Evaluator, written: Path, limit: int) -> tuple[Pictures, ...]:
    """Draw held-out images by the base, by the LoRA and by what was written, side by side.

    They are of different prompts as far as there are any.
    """
    draw = evaluator.base.pictures
    if draw is None or limit == 0:
        return ()
    items = [item for item in evaluator.held_out if isinstance(item, Example)]
    by_prompt = {item.inputs: item for item in items}
    first = list(by_prompt.values())
    chosen = [*first, *(item for item in items if item not in first)][:limit]
    evaluator.announce(f"drawing {len(chosen)} images by base, LoRA and what is left")
    bases = (evaluator.base, evaluator.source, evaluator.base.with_adapter(written))
    drawn = zip(*(draw(base, chosen) for base in bases), strict=True)
    return tuple(
        Pictures(item.inputs or "", item.number, *images)
        for item, images in zip(chosen, drawn, strict=True)
    )


def _by_energy(cuts: _CutsOnBase, cut: Truncation) -> Measurement | None:
    """Measure a truncation of the same layers to as many numbers by their singular values."""
    names = tuple(layer.name for layer in cut.layers)
    plan = CompressionPlan(parameters=float(cut.parameters), storage=cut.plan.storage)
    if len(names) < len(cut.source.layers):
        plan = plan.replace(only=names)
    cuts.evaluator.announce("measuring truncation by the weights alone")
    try:
        plain = truncation(cut.source, plan)
    except BudgetError:
        return None
    path = cuts.write(plain, "by-energy")
    behaviour = cuts.evaluator.measure_held_out(path)
    return Measurement(_bytes_of(path), plain.parameters, behaviour.kept)
