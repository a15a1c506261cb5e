"""Truncated SVD of a whole adapter with one threshold over all layers, in the source's own format.

It takes seconds and needs no base. Without a base only the weights can be matched, and there low
rank is hard to beat, so nothing else is tried. Each layer is read twice, once for its singular
values and once to be written, and no layer stays in memory.

With a base the singular values are those of the norm in which errors change its outputs (see
`Evaluator.statistics`), so that one threshold over all layers keeps the components that act most,
and the kept share is measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import tail_norms
from lsrdecomp.errors import BudgetError, StorageRangeError, UnsupportedError
from lsrdecomp.gateway import read_json_text
from lsrdecomp.lora.files import Checkpoint, open_checkpoint, write_pairs
from lsrdecomp.lora.files.progress import Counter, OnStep
from lsrdecomp.lora.files.tensors import DTYPES, Array, cast, read_header
from lsrdecomp.lora.files.writers.same import (
    RankRule,
    carried_tensors,
    is_pair,
    rank_rule,
    stored_type,
)
from lsrdecomp.lora.measure.verify_files import verify
from lsrdecomp.lora.search.layers import Layer, layer_pair, open_layers
from lsrdecomp.lora.search.plain_svd import ranks_within
from lsrdecomp.lora.search.plan import goals_of
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from lsrdecomp.lora.files import LoraLayer
    from lsrdecomp.lora.files.tensors import StoredTensor
    from lsrdecomp.lora.measure.fidelity import Fidelity, Measurement
    from lsrdecomp.lora.search.layers import StatisticsByLayer
    from lsrdecomp.lora.search.plan import CompressionPlan

RECORD_BYTES = 2048
"""Bytes that are left for our record in the header of the file."""
NOTHING_FITS = (
    "nothing of the adapter fits into this budget; allow more, or store smaller numbers "
    "(--bytes, with --storage float16)"
)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Images of one prompt and seed, as PNG files: by the base, the LoRA and its remainder."""

    prompt: str
    seed: int
    base: bytes
    lora: bytes
    small: bytes


@dataclass(frozen=True)
class Truncation:
    """An adapter truncated to a plan, ready to be written.

    Attributes
    ----------
    source : Checkpoint
    plan : CompressionPlan
    layers : tuple of Layer
        The truncated ones; others of the source are carried as they are.
    sigma : tuple of Array
        The singular values of each layer.
    ranks : tuple of int
        The rank that each layer keeps.
    carried_norm : float
        ‖ΔW‖_F of the layers that are carried.
    to : str
        The format that is written: "same", the source's, or "mlx".
    fidelity : Fidelity, optional
        With a base: the share of the LoRA's effect that the files keep.
    tried : tuple of Measurement
        With a base: every size that was measured, in order.
    by_energy : Measurement, optional
        With a base: a truncation to as many numbers by the weights alone, for comparison.
    pictures : tuple of Pictures
        With a base that makes images and ``examples``: that number of images side by side.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
    >>> from lsrdecomp.lora.compress import truncate
    >>> from lsrdecomp.lora.files import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> cut = truncate(lora, ratio=4)
    >>> cut.parameters <= lora.adapter_parameters / 4, round(cut.relative_error, 3)
    (True, 0.255)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     open_checkpoint(cut.save(f"{folder}/small")).format
    'peft-lora'
    """

    source: Checkpoint
    plan: CompressionPlan
    layers: tuple[Layer, ...]
    sigma: tuple[Array, ...]
    ranks: tuple[int, ...]
    carried_norm: float
    to: str = "same"
    fidelity: Fidelity | None = None
    tried: tuple[Measurement, ...] = ()
    by_energy: Measurement | None = None
    pictures: tuple[Pictures, ...] = ()

    @property
    def parameters(self) -> int:
        """Numbers in the pairs of the layers that are truncated."""
        pairs = zip(self.layers, self.ranks, strict=True)
        return sum(rank * sum(layer.shape) for layer, rank in pairs)

    @property
    def parameters_before(self) -> int:
        """Numbers in the same pairs of the source."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def norm(self) -> float:
        """‖ΔW‖_F of the layers that are truncated."""
        return math.hypot(*(layer.frobenius_norm for layer in self.layers))

    @property
    def relative_error(self) -> float:
        """The error over all layers, before rounding to the storage type.

        With a base it is in the norm in which errors change its outputs, of the layers that are
        truncated.
        """
        tails = [tail_norms(sigma) for sigma in self.sigma]
        lost = math.hypot(*(tail[rank] for tail, rank in zip(tails, self.ranks, strict=True)))
        if self.layers[0].is_frobenius:
            return self._relative(lost)
        whole = math.hypot(*(tail[0] for tail in tails))
        return lost / whole if whole > 0.0 else 0.0

    def resized(self, plan: CompressionPlan) -> Truncation:
        """Return the truncation of the same layers to another plan.

        Raises
        ------
        BudgetError
            If nothing fits.
        """
        part = _with_layers(self.source, self.layers)
        smallest = [_smallest_rank(part, layer, plan, self.to) for layer in self.layers]
        ranks = _chosen_ranks(part, plan, self.to, self.layers, self.sigma, smallest)
        if not any(ranks):
            raise BudgetError(NOTHING_FITS)
        return replace(self, plan=plan, ranks=ranks)

    @property
    def carried_layers(self) -> tuple[str, ...]:
        """Names of the pairs of the source that are not truncated."""
        truncated = {layer.name for layer in self.layers}
        pairs = filter(is_pair, self.source.layers)
        return tuple(layer.name for layer in pairs if layer.name not in truncated)

    @property
    def carried(self) -> dict[str, StoredTensor]:
        """Tensors that are no part of a truncated layer, by their keys in the source."""
        extras = {tensor.name: tensor for tensor in self.source.extras.values()}
        return carried_tensors(self.source, self.carried_layers) | extras

    def _relative(self, lost: float) -> float:
        """Return an error as a share of ‖ΔW‖_F of all layers, the carried ones included."""
        size = math.hypot(self.norm, self.carried_norm)
        return lost / size if size > 0.0 else 0.0

    def curve(
        self, ratios: Sequence[float] = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    ) -> Iterator[tuple[float, int, float]]:
        """Yield ratio, parameters and relative error of the whole adapter at other sizes.

        The ratio of the plan is among them, or the one that the plan came to.
        """
        rule = rank_rule(_with_layers(self.source, self.layers), self.to)
        own_ratio = self.plan.ratio or self.parameters_before / self.parameters
        for ratio in sorted({*ratios, own_ratio}):
            if ratio == own_ratio:
                yield ratio, self.parameters, self.relative_error
                continue
            max_parameters = self.parameters_before / ratio
            ranks = _ranks_within_size(
                self.layers, self.sigma, max_parameters, rule, [0] * len(self.layers)
            )
            if any(ranks):
                other = replace(self, ranks=ranks)
                yield ratio, other.parameters, other.relative_error

    @one_blas_thread
    def save(self, out: str | Path, *, force: bool = False, on_step: OnStep | None = None) -> Path:
        """Write the adapter in the format of its source, or in ``to``, without layers of rank 0.

        Its record has the error of the written numbers. See `lsrdecomp.lora.files.write_pairs`.
        """
        recorded: dict[str, Any] = {"layers": {}}  # gets its total when the last pair was measured
        return write_pairs(
            out,
            source=self.source,
            layers=self._pairs(recorded, on_step),
            names=self.to,
            storage=self._storage,
            force=force,
            provenance=self._provenance(recorded),
            carried=self.carried_layers,
        )

    def _provenance(self, recorded: dict[str, Any]) -> dict[str, Any]:
        provenance: dict[str, Any] = {"plan": self.plan.to_json(), "recorded": recorded}
        if self.fidelity is not None:
            provenance["promise"] = self.fidelity.to_json()
        return provenance

    def written_error(self, out: str | Path) -> float:
        """Return ‖ΔW − ΔŴ‖_F / ‖ΔW‖_F of what `save` wrote, after rounding."""
        out = Path(out)
        if out.suffix == ".gguf":  # whose header has no record: it is measured
            return verify(self.source, open_checkpoint(out)).relative_error
        weights = open_checkpoint(out).weights if out.is_dir() else out
        record = read_json_text(read_header(weights).metadata["lsrdecomp"])
        return float(record["recorded"]["total"])

    @property
    def _storage(self) -> str | None:
        """Type of all numbers; None where each layer keeps its own."""
        return _written_storage(self.source, self.plan, self.to)

    def _pairs(
        self, recorded: dict[str, Any], on_step: OnStep | None
    ) -> Iterator[tuple[str, Array, Array]]:
        """Yield name and pair of each layer, rounded as it is stored, and record their error."""
        source = self.source
        common_rank = max(self.ranks) if rank_rule(source, self.to).is_common else None
        lost = 0.0
        written = Counter(on_step, "writing", len(self.layers), "layers")
        for layer, rank in zip(self.layers, self.ranks, strict=True):
            if rank == 0:
                lost = math.hypot(lost, layer.frobenius_norm)
            else:
                stored, error = _as_written(
                    source, layer, rank, self._storage, self.to, common_rank
                )
                lost = math.hypot(lost, error)
                yield (layer.name, *stored)
            written.add()
        recorded["total"] = self._relative(lost)


def _written_storage(source: Checkpoint, plan: CompressionPlan, to: str) -> str | None:
    """Return the type that a cut is written in; None where each layer keeps its own."""
    if to == "same":
        return plan.storage
    return plan.storage or source.storage


def _as_written(
    source: Checkpoint,
    layer: Layer,
    rank: int,
    storage: str | None,
    to: str,
    common_rank: int | None = None,
) -> tuple[tuple[Array, Array], float]:
    """Return a truncation of a layer as a reader of the file gets it, and its error.

    A layer of full rank is unchanged but for its rounding. Raises `StorageRangeError` if a number
    overflows, with the layer and a storage that holds it.
    """
    name, scale = stored_type(source, layer.name, storage=storage, rank=common_rank or rank, to=to)
    is_whole = rank == layer.rank
    (left, right), error = layer.rounded(None if is_whole else rank, DTYPES[name], scale)
    if not math.isfinite(error):
        pair = layer.pair
        sides = (pair.left, pair.right) if is_whole else layer.truncated(rank)
        try:
            cast(sides[0] / scale, name, layer.name)
            cast(sides[1], name, layer.name)
        except StorageRangeError as refusal:
            raise refusal.in_file(source.path) from None
    if scale != 1.0:
        left = left.astype(np.float64) * scale
    return (left, right), error


def truncation(
    checkpoint: Checkpoint,
    plan: CompressionPlan,
    *,
    to: str = "same",
    statistics: StatisticsByLayer | None = None,
    on_step: OnStep | None = None,
) -> Truncation:
    """Truncate every layer to a plan; with statistics those alone that have any.

    See `lsrdecomp.lora.compress.truncate`.
    """
    # 1. Compute the singular values of every layer.
    checkpoint.watch_source()
    matching = _matching(checkpoint, plan.only or ())
    if statistics is not None:
        matching = [layer for layer in matching if layer.name in statistics]
        _refuse_split_stacks(checkpoint, matching)
    part = _with_layers(checkpoint, matching)
    layers = tuple(open_layers(part, statistics))
    sigma = []
    smallest = []  # while the numbers of a layer are in memory
    read = Counter(on_step, "reading", len(layers), "layers")
    for layer in layers:
        sigma.append(layer.sigma)
        smallest.append(_smallest_rank(part, layer, plan, to))
        read.add()
    # 2. Choose the rank of each layer, by a tolerance of its own or by one threshold over all.
    ranks = _chosen_ranks(part, plan, to, layers, sigma, smallest)
    if not any(ranks):
        raise BudgetError(NOTHING_FITS)
    truncated = {layer.name for layer in layers}
    carried = [layer for layer in checkpoint.layers if layer.name not in truncated]
    if to != "same" and carried:
        raise UnsupportedError(
            f"is left as it is by only=, and a cut to {to} writes all layers anew; cut to 'same'",
            path=checkpoint.path,
            tensor=carried[0].name,
        )
    carried_norm = math.hypot(*(layer_pair(checkpoint, layer).norm for layer in carried))
    return Truncation(checkpoint, plan, layers, tuple(sigma), ranks, carried_norm, to)


def _with_layers(checkpoint: Checkpoint, layers: Iterable[Layer | LoraLayer]) -> Checkpoint:
    """Return a checkpoint of some of its layers, and nothing beside them."""
    names = {layer.name for layer in layers}
    kept = tuple(layer for layer in checkpoint.layers if layer.name in names)
    return replace(checkpoint, layers=kept, carried={})


def _matching(checkpoint: Checkpoint, patterns: Sequence[str]) -> list[LoraLayer]:
    """Return the pairs whose names match one of some patterns; all of them if there is none."""
    pairs: list[LoraLayer] = list(filter(is_pair, checkpoint.layers))
    if not patterns:
        _refuse_common_rank(checkpoint, checkpoint.carried, "no pair")
        return pairs
    matching = []
    for pattern in patterns:
        # As PEFT reads the names of modules, the end of a name from a dot on is enough.
        found = [layer for layer in pairs if fnmatchcase(f".{layer.name}", f"*.{pattern}")]
        if not found:
            examples = ", ".join(layer.name for layer in pairs[:: max(1, len(pairs) // 3)][:3])
            raise BudgetError(
                f"only={pattern!r} matches none of {len(pairs)} layers, such as {examples}; "
                "* stands for anything, as in '*.attn.*'"
            )
        matching += found
    names = {layer.name for layer in matching}
    _refuse_split_stacks(checkpoint, matching)
    return [layer for layer in pairs if layer.name in names]


def _refuse_split_stacks(checkpoint: Checkpoint, matching: Sequence[LoraLayer]) -> None:
    """Refuse to copy layers beside others that are cut, where the format does not allow it."""
    names = {layer.name for layer in matching}
    pairs: list[LoraLayer] = list(filter(is_pair, checkpoint.layers))
    others = [layer for layer in pairs if layer.name not in names]
    # Tensors are copied whole, into formats that hold several ranks and scales.
    _refuse_common_rank(checkpoint, [layer.name for layer in others], "not matched by only")
    if checkpoint.format in ("gguf", "peft-adalora") and others:
        raise UnsupportedError(
            f"only= copies tensors, which is not done for {checkpoint.format}; cut the adapter "
            "that it was made from, or a plain LoRA of it (export --to lora)",
            path=checkpoint.path,
        )
    stacked = {key for layer in matching for key in layer.keys}
    for layer in others:
        if stacked.intersection(layer.keys):
            raise UnsupportedError(
                "only= leaves it out of a stack of experts, which is cut as a whole; match all of "
                "them",
                path=checkpoint.path,
                tensor=layer.name,
            )


def _refuse_common_rank(checkpoint: Checkpoint, names: Collection[str], what: str) -> None:
    """Refuse to carry layers where all have one rank."""
    if names and rank_rule(checkpoint).is_common:
        raise UnsupportedError(
            f"is {what}, and cannot be carried as it is: a {checkpoint.format} file has one rank "
            "for all layers; export it first (export --to lora)",
            path=checkpoint.path,
            tensor=next(iter(names)),
        )


def _chosen_ranks(
    part: Checkpoint,
    plan: CompressionPlan,
    to: str,
    layers: Sequence[Layer],
    sigma: Sequence[Array],
    smallest: Sequence[int],
) -> tuple[int, ...]:
    """Return the rank that a plan gives each layer of the part that is cut."""
    rule = rank_rule(part, to)
    highest = [min(layer.rank, plan.max_rank or layer.rank) for layer in layers]
    floor = [min(plan.min_rank or 0, rank) for rank in highest]
    if not any(float(values[0]) > 0.0 for values in sigma):  # a LoRA of zeros is written as one
        return tuple(max(rank, 1) for rank in floor)
    if plan.layer_rtol is None and goals_of(plan.to_json()) != ["max_rank"]:
        max_parameters = _max_parameters(part, plan)
        shortened = [values[:rank] for values, rank in zip(sigma, highest, strict=True)]
        return _ranks_within_size(layers, shortened, max_parameters, rule, floor)
    # Layers that must have one rank get the largest.
    ranks = list(smallest)
    for group in [range(len(layers))] if rule.is_common else rule.groups:
        largest = max(smallest[i] for i in group)
        for i in group:
            ranks[i] = largest
    bounds = zip(ranks, floor, highest, strict=True)
    return tuple(min(max(rank, lowest), most) for rank, lowest, most in bounds)


def _smallest_rank(part: Checkpoint, layer: Layer, plan: CompressionPlan, to: str) -> int:
    """Return the smallest rank at which a layer is within its tolerance as written, or its own.

    Without a tolerance the rank of its numbers.
    """
    tails = tail_norms(layer.sigma)
    allowed = (plan.layer_rtol or 0.0) * tails[0]
    rank = next(rank for rank, lost in enumerate(tails) if lost <= allowed)
    if plan.layer_rtol is None:
        return rank
    storage = _written_storage(part, plan, to)
    while 0 < rank < len(layer.sigma):
        name, scale = stored_type(part, layer.name, storage=storage, rank=rank, to=to)
        if layer.rounded_bound(rank, DTYPES[name], scale) <= allowed:
            break
        _, error = _as_written(part, layer, rank, storage, to)
        if error <= allowed * (1.0 + 1e-12):
            break
        rank += 1
    return rank


def _ranks_within_size(
    layers: Sequence[Layer],
    sigma: Sequence[Array],
    max_parameters: float,
    rule: RankRule,
    floor: Sequence[int],
) -> tuple[int, ...]:
    """Return the ranks that keep most within a number of parameters, none below its floor."""
    # Layers of a group have one rank, so a component of a group is one of each of its layers.
    gains = [_component_gains([sigma[i] for i in group]) for group in rule.groups]
    sizes = [sum(sum(layers[i].shape) for i in group) for group in rule.groups]
    lowest = [floor[group[0]] for group in rule.groups]
    needed = sum(rank * size for rank, size in zip(lowest, sizes, strict=True))
    if needed > max_parameters:
        raise BudgetError(
            f"a rank of {max(lowest)} in every layer takes {needed:,} parameters, and "
            f"{max_parameters:,.0f} are allowed: allow more, or layers to be left out"
        )
    if rule.is_common and any(lowest):
        common = int(max_parameters // sum(sizes))
        group_ranks = [min(common, len(gain)) for gain in gains]
    elif rule.is_common:
        group_ranks = _best_common_rank(gains, sizes, max_parameters)
    else:
        beyond = [gain[rank:] for gain, rank in zip(gains, lowest, strict=True)]
        more = ranks_within(beyond, sizes, max_parameters - needed)
        group_ranks = [rank + extra for rank, extra in zip(lowest, more, strict=True)]
    ranks = [0] * len(layers)
    for group, rank in zip(rule.groups, group_ranks, strict=True):
        for i in group:
            ranks[i] = rank
    return tuple(ranks)


def _component_gains(sigma: Sequence[Array]) -> Array:
    """Return the squared error that each component of a group of layers removes."""
    length = max(len(values) for values in sigma)
    squares = [np.pad(values**2, (0, length - len(values))) for values in sigma]
    return np.asarray(np.sum(squares, axis=0))


def _best_common_rank(
    gains: Sequence[Array], sizes: Sequence[int], max_parameters: float
) -> list[int]:
    """Return the rank of each group where all groups that are kept have the same rank."""
    best: list[int] = []
    best_gain = -math.inf
    for rank in range(1, max(map(len, gains)) + 1):
        # With a given rank each group is one component: kept or left out.
        group_gains = [gain[:rank].sum(keepdims=True) for gain in gains]
        group_sizes = [rank * size for size in sizes]
        is_kept = ranks_within(group_gains, group_sizes, max_parameters)
        ranks = [rank * kept for kept in is_kept]
        kept_gain = sum(float(gain[:count].sum()) for gain, count in zip(gains, ranks, strict=True))
        if kept_gain > best_gain:
            best = ranks
            best_gain = kept_gain
    return best


def _max_parameters(checkpoint: Checkpoint, plan: CompressionPlan) -> float:
    """Return the maximum parameters of all pairs together under a plan."""
    if plan.ratio is not None:
        return checkpoint.adapter_parameters / plan.ratio
    if plan.parameters is not None:
        return plan.parameters
    # Bytes of the file that are not of pairs: header, alphas and other tensors.
    assert plan.bytes is not None
    number_bytes = int(DTYPES[plan.storage or checkpoint.storage].itemsize)
    keys = {key for layer in checkpoint.layers for key in layer.keys}
    alphas = {layer.alpha.name for layer in checkpoint.layers if layer.alpha is not None}
    pairs = sum(checkpoint.tensors[key].nbytes for key in keys - alphas)
    others = checkpoint.weights.stat().st_size - pairs + RECORD_BYTES
    if plan.bytes <= others:
        text = f"header and other tensors alone take {others:,} bytes; allow more than"
        raise BudgetError(f"{text} {plan.bytes:,}")
    return float(plan.bytes - others) / number_bytes
