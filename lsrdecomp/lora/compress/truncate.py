"""Truncated SVD of a whole adapter with one threshold over all layers, in the source's own format.

It takes seconds and needs no base. Without a base only the weights can be matched, and there low
rank is hard to beat, so nothing else is tried. Each layer is read twice, once for its singular
values and once to be written, and no layer stays in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.arrays import tail_norms, to_numpy
from lsrdecomp.errors import BudgetError
from lsrdecomp.fields import refuses_unknown
from lsrdecomp.lora.files import Checkpoint, file_or_directory, write_pairs
from lsrdecomp.lora.files.progress import Counter, OnStep
from lsrdecomp.lora.files.tensors import DTYPES, Array
from lsrdecomp.lora.files.writers.same import RankRule, rank_rule
from lsrdecomp.lora.search.layers import Layer, open_layers
from lsrdecomp.lora.search.plain_svd import ranks_within
from lsrdecomp.lora.search.plan import goals_of
from lsrdecomp.lora.search.request import Request
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lsrdecomp.lora.search.plan import CompressionPlan

RECORD_BYTES = 2048
"""Bytes that are left for our record in the header of the file."""


@dataclass(frozen=True)
class Truncation:
    """An adapter truncated to a plan, ready to be written.

    Attributes
    ----------
    source : Checkpoint
    plan : CompressionPlan
    layers : tuple of Layer
    sigma : tuple of Array
        The singular values of each layer.
    ranks : tuple of int
        The rank that each layer keeps.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
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

    @property
    def parameters(self) -> int:
        """Numbers in the pairs of all layers."""
        pairs = zip(self.layers, self.ranks, strict=True)
        return sum(rank * sum(layer.shape) for layer, rank in pairs)

    @property
    def relative_error(self) -> float:
        """The error over all layers, before rounding to the storage type."""
        tails = [tail_norms(sigma) for sigma in self.sigma]
        size = math.hypot(*(tail[0] for tail in tails))
        lost = math.hypot(*(tail[rank] for tail, rank in zip(tails, self.ranks, strict=True)))
        return lost / size if size > 0.0 else 0.0

    def curve(
        self, ratios: Sequence[float] = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
    ) -> Iterator[tuple[float, int, float]]:
        """Yield ratio, parameters and relative error of the whole adapter at other sizes.

        The ratio of the plan is among them, or the one that the plan came to.
        """
        rule = rank_rule(self.source)
        own_ratio = self.plan.ratio or self.source.adapter_parameters / self.parameters
        for ratio in sorted({*ratios, own_ratio}):
            if ratio == own_ratio:
                yield ratio, self.parameters, self.relative_error
                continue
            max_parameters = self.source.adapter_parameters / ratio
            ranks = _ranks_within_size(
                self.layers, self.sigma, max_parameters, rule, [0] * len(self.layers)
            )
            if any(ranks):
                other = replace(self, ranks=ranks)
                yield ratio, other.parameters, other.relative_error

    @one_blas_thread
    def save(self, out: str | Path, *, force: bool = False, on_step: OnStep | None = None) -> Path:
        """Write the adapter in the format of its source, without layers of rank 0.

        See `lsrdecomp.lora.files.write_pairs`.
        """
        record = {
            "plan": self.plan.to_json(),
            "recorded": {"total": self.relative_error, "layers": {}},
        }
        return write_pairs(
            out,
            source=self.source,
            layers=self._pairs(on_step),
            storage=self.plan.storage,
            force=force,
            provenance=record,
        )

    def _pairs(self, on_step: OnStep | None) -> Iterator[tuple[str, Array, Array]]:
        """Yield name and pair of each layer that is written; a layer of full rank is unchanged."""
        written = Counter(on_step, "writing", len(self.layers), "layers")
        for layer, rank in zip(self.layers, self.ranks, strict=True):
            if rank == layer.rank:
                yield layer.name, layer.pair.left, layer.pair.right
            elif rank:
                yield (layer.name, *layer.truncated(rank))
            written.add()


@refuses_unknown
@one_blas_thread
def truncate(
    checkpoint: Checkpoint,
    plan: CompressionPlan | None = None,
    *,
    ratio: float | None = None,
    bytes: int | None = None,
    parameters: float | None = None,
    rtol: float | None = None,
    energy: float | None = None,
    storage: str | None = None,
    max_rank: int | None = None,
    min_rank: int | None = None,
    on_step: OnStep | None = None,
) -> Truncation:
    """Truncate every layer to the rank that one threshold over all singular values gives it.

    Parameters
    ----------
    checkpoint : Checkpoint
        A LoRA in a format that `write_pairs` can write.
    plan : CompressionPlan, optional
        A ratio, parameters or bytes of the file over all layers; or for every layer a relative
        error (``rtol``), a share of Σσ² (``energy``) or no more than a rank (``max_rank``).
    ratio, bytes, parameters, rtol, energy : number, optional
        The goal, where there is no plan: one of these, or ``max_rank`` alone.
    storage : str, optional
        A floating type, here or in the plan; absent, that of each layer.
    max_rank, min_rank : int, optional
        Maximum and minimum rank of a layer; with a minimum of 1 none is left out.
    on_step : callable, optional
        Called with a `ProgressUpdate` after the singular values of each layer.

    Returns
    -------
    Truncation
        Call its ``save`` to write the adapter.

    Raises
    ------
    BudgetError
        If nothing fits, or unless there is one goal.
    SettingsError
        For a plan with a setting that has no use here, such as ``kl``, or a storage in integers.
    UnsupportedError
        For an adapter that is not made of plain pairs.
    ArgumentError
        For an unknown argument, with the nearest known name.

    Notes
    -----
    O((m + n) r²) a layer. Between the two readings 2 r² + r numbers of each layer are kept, in
    memory or on disk.
    """
    given = {
        "ratio": ratio,
        "bytes": bytes,
        "parameters": parameters,
        "rtol": rtol,
        "energy": energy,
        "storage": storage,
        "max_rank": max_rank,
        "min_rank": min_rank,
    }
    request = Request.parse(given, plan=plan, to_file=True)
    plan = request.plan
    assert plan is not None
    file_or_directory(checkpoint)
    # 1. Compute the singular values of every layer.
    checkpoint.watch_source()
    layers = tuple(open_layers(checkpoint))
    sigma = []
    read = Counter(on_step, "reading", len(layers), "layers")
    for layer in layers:
        sigma.append(to_numpy(layer.gauge[1]))
        read.add()
    # 2. Choose the rank of each layer, by a tolerance of its own or by one threshold over all.
    ranks = _chosen_ranks(checkpoint, plan, layers, sigma)
    if not any(ranks):
        raise BudgetError(
            "nothing of the adapter fits into this budget; allow more, or store smaller numbers "
            "(--bytes, with --storage float16)"
        )
    return Truncation(checkpoint, plan, layers, tuple(sigma), ranks)


def _chosen_ranks(
    checkpoint: Checkpoint, plan: CompressionPlan, layers: Sequence[Layer], sigma: Sequence[Array]
) -> tuple[int, ...]:
    """Return the rank that a plan gives each layer."""
    rule = rank_rule(checkpoint)
    highest = [min(layer.rank, plan.max_rank or layer.rank) for layer in layers]
    floor = [min(plan.min_rank or 0, rank) for rank in highest]
    if not any(float(values[0]) > 0.0 for values in sigma):  # a LoRA of zeros is written as one
        return tuple(max(rank, 1) for rank in floor)
    if plan.layer_rtol is not None:
        ranks = _ranks_within_error(sigma, plan.layer_rtol, rule)
    elif goals_of(plan.to_json()) == ["max_rank"]:
        ranks = _ranks_within_error(sigma, 0.0, rule)
    else:
        max_parameters = _max_parameters(checkpoint, plan)
        shortened = [values[:rank] for values, rank in zip(sigma, highest, strict=True)]
        return _ranks_within_size(layers, shortened, max_parameters, rule, floor)
    bounds = zip(ranks, floor, highest, strict=True)
    return tuple(min(max(rank, lowest), most) for rank, lowest, most in bounds)


def _ranks_within_error(sigma: Sequence[Array], rtol: float, rule: RankRule) -> tuple[int, ...]:
    """Return the smallest ranks at which each layer is within a relative error."""
    ranks = []
    for tails in map(tail_norms, sigma):
        smallest = next(rank for rank, lost in enumerate(tails) if lost <= rtol * tails[0])
        ranks.append(smallest)
    # Layers that must have one rank get the largest.
    groups = [range(len(ranks))] if rule.is_common else rule.groups
    for group in groups:
        largest = max(ranks[i] for i in group)
        for i in group:
            ranks[i] = largest
    return tuple(ranks)


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
    pairs = sum(layer.up.nbytes + layer.down.nbytes for layer in checkpoint.layers)
    others = checkpoint.weights.stat().st_size - pairs + RECORD_BYTES
    if plan.bytes <= others:
        text = f"header and other tensors alone take {others:,} bytes; allow more than"
        raise BudgetError(f"{text} {plan.bytes:,}")
    return float(plan.bytes - others) / number_bytes
