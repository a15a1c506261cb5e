"""Truncated SVD of a whole adapter with one threshold over all layers, in the source's own format: seconds, no base.

Without a base, closeness of numbers is all there is, and there low rank is hard to beat; so nothing
else is worked out. Each layer is read twice, once for its singular values and once to be written,
and no layer stays in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

import numpy as np

from lsrdecomp.arrays import tail_norms, to_numpy
from lsrdecomp.checkpoints import Checkpoint, file_or_directory, write_pairs
from lsrdecomp.checkpoints.progress import Counter, OnStep
from lsrdecomp.checkpoints.tensors import DTYPES, Array
from lsrdecomp.checkpoints.writers.pairs import RankRule, rank_rule
from lsrdecomp.compression.layers import Layer, open_layers
from lsrdecomp.compression.request import READ_ON, Request
from lsrdecomp.compression.settings import CompressionPlan, PlanKeywords
from lsrdecomp.errors import BudgetError
from lsrdecomp.fields import accepts_settings
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

RATIOS = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Of the curve that a dry run shows."""
HEADER = 2048
"""Bytes for our record in the header of the file."""


@dataclass(frozen=True)
class Truncation:
    """An adapter cut to a plan, ready to be written.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
    >>> from lsrdecomp.checkpoints import open_checkpoint
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
    sigma: tuple[Array, ...]  # the singular values of each
    ranks: tuple[int, ...]

    @property
    def parameters(self) -> int:
        return sum(
            rank * sum(layer.shape) for layer, rank in zip(self.layers, self.ranks, strict=True)
        )

    @property
    def relative_error(self) -> float:
        """Over all layers, before rounding to the storage type."""
        tails = [tail_norms(sigma) for sigma in self.sigma]
        size = math.hypot(*(tail[0] for tail in tails))
        lost = math.hypot(*(tail[rank] for tail, rank in zip(tails, self.ranks, strict=True)))
        return lost / size if size > 0.0 else 0.0

    def curve(self) -> Iterator[tuple[float, int, float]]:
        """(ratio, parameters, relative error) of the whole adapter at other sizes."""
        rule = rank_rule(self.source)
        for ratio in RATIOS:
            ranks = _ranks_within(
                self.layers, self.sigma, self.source.adapter_parameters / ratio, rule
            )
            if any(ranks):
                other = replace(self, ranks=ranks)
                yield ratio, other.parameters, other.relative_error

    @one_blas_thread
    def save(self, out: str | Path, *, force: bool = False, on_step: OnStep | None = None) -> Path:
        """Write it as the source came, by `lsrdecomp.checkpoints.write_pairs`; layers of rank 0 are left out."""
        record = {
            "plan": self.plan.to_json(),
            "recorded": {"total": self.relative_error, "layers": {}},
        }
        pairs = self._pairs(on_step)
        return write_pairs(
            out,
            source=self.source,
            layers=pairs,
            storage=self.plan.storage,
            force=force,
            provenance=record,
        )

    def _pairs(self, on_step: OnStep | None) -> Iterator[tuple[str, Array, Array]]:
        written = Counter(on_step, "writing", len(self.layers), "layers")
        for layer, rank in zip(self.layers, self.ranks, strict=True):
            if rank == layer.rank:
                yield layer.name, layer.pair.left, layer.pair.right
            elif rank:
                yield (layer.name, *layer.truncated(rank))
            written.add()


@accepts_settings(CompressionPlan, refused_later=READ_ON)
@one_blas_thread
def truncate(
    checkpoint: Checkpoint,
    plan: CompressionPlan | None = None,
    *,
    storage: str | None = None,
    on_step: OnStep | None = None,
    **settings: Unpack[PlanKeywords],
) -> Truncation:
    """Cut every layer to the rank that one threshold over all singular values gives it.

    Parameters
    ----------
    checkpoint : Checkpoint
        A LoRA in a format that `write_pairs` gives back as it came.
    plan : CompressionPlan, optional
        A ratio, parameters or bytes of the file over all layers, or a relative error of every layer
        (``rtol``); otherwise one of these goals as an argument.
    storage : str, optional
        A floating type, here or in the plan; absent, that of each layer.
    on_step : callable, optional
        Called with a `ProgressUpdate` as the singular values of each layer are known.
    **settings
        The fields of `CompressionPlan`.

    Returns
    -------
    Truncation
        Nothing is written before `Truncation.save`.

    Raises
    ------
    BudgetError
        Where nothing fits, or unless there is one goal.
    SettingsError
        For a setting that a cut file does not read, such as ``kl``, or a storage in integers.
    UnsupportedError
        For an adapter that is not plain pairs.
    ArgumentError
        For a name that is no goal, with the nearest that is.

    Notes
    -----
    O((m + n) r²) a layer; between the two readings 2 r² + r numbers a layer wait, in memory or on
    disk.
    """
    request = Request.parse({"storage": storage, **settings}, plan=plan, to_file=True)
    plan = request.plan
    assert plan is not None
    file_or_directory(checkpoint)
    # Truncate 1: the singular values of every layer; they wait in its cache.
    layers, singular_values = tuple(open_layers(checkpoint)), []
    read = Counter(on_step, "reading", len(layers), "layers")
    for layer in layers:
        singular_values.append(to_numpy(layer.gauge[1]))
        read.add()
    # Truncate 2: the rank of each layer, by a tolerance of its own or by one threshold over all of
    # them.
    sigma, rule = tuple(singular_values), rank_rule(checkpoint)
    if plan.rtol is not None:
        ranks = _ranks_for(sigma, plan.rtol, rule)
    else:
        whole = checkpoint.adapter_parameters
        most = whole / plan.ratio if plan.ratio else plan.parameters or _room(checkpoint, plan)
        ranks = _ranks_within(layers, sigma, most, rule)
    if plan.max_rank is not None:
        ranks = tuple(min(rank, plan.max_rank) for rank in ranks)
    if not any(ranks):
        text = "nothing of the adapter fits into this budget; allow more"
        if rule.min_rank:
            every = sum(sum(layer.shape) for layer in layers)
            text += (
                f": a file of {checkpoint.format} has every layer, {every:,} parameters at rank 1"
            )
        raise BudgetError(text + ", or store smaller numbers (--bytes, with --storage float16)")
    return Truncation(checkpoint, plan, layers, sigma, ranks)


def _ranks_for(sigma: Sequence[Array], rtol: float, rule: RankRule) -> tuple[int, ...]:
    """The least ranks within a relative error of each layer."""
    ranks = [
        max(rule.min_rank, next(i for i, lost in enumerate(tails) if lost <= rtol * tails[0]))
        for tails in map(tail_norms, sigma)
    ]
    for group in [range(len(ranks))] if rule.is_common else rule.groups:
        most = max(ranks[i] for i in group)
        for i in group:
            ranks[i] = most
    return tuple(ranks)


def _ranks_within(
    layers: Sequence[Layer], sigma: Sequence[Array], most: float, rule: RankRule
) -> tuple[int, ...]:
    """Components in the order of what each removes a parameter, for as long as they fit; none if the least does not."""
    squares = [[sigma[i] ** 2 for i in group] for group in rule.groups]
    gains = [
        np.sum([np.pad(s, (0, max(map(len, group)) - len(s))) for s in group], axis=0)
        for group in squares
    ]
    sizes = [sum(sum(layers[i].shape) for i in group) for group in rule.groups]
    if rule.is_common:  # the rank with which most is kept
        fills = [
            _fill_with(rank, gains, sizes, most) for rank in range(1, max(map(len, gains)) + 1)
        ]
        chosen = max(
            fills,
            key=lambda fill: sum(
                float(gain[:r].sum()) for gain, r in zip(gains, fill, strict=True)
            ),
        )
    else:
        chosen = _fill(gains, sizes, most, rule.min_rank)
    ranks = [0] * len(layers)
    for group, rank in zip(rule.groups, chosen, strict=True):
        for i in group:
            ranks[i] = rank
    return tuple(ranks)


def _fill(gains: Sequence[Array], sizes: Sequence[int], most: float, least: int = 0) -> list[int]:
    """How many components of each group fit, those first that remove most a parameter; ``gains`` fall in each."""
    counts, used = [least] * len(gains), least * sum(sizes)
    if used > most:
        return [0] * len(gains)
    slopes = [gain[least:] / size for gain, size in zip(gains, sizes, strict=True)]
    owners, steepness = (
        np.repeat(np.arange(len(gains)), list(map(len, slopes))),
        np.concatenate(slopes),
    )
    for component in np.argsort(-steepness, kind="stable"):
        i = int(owners[component])
        if steepness[component] > 0.0 and used + sizes[i] <= most:
            counts[i] += 1
            used += sizes[i]
    return counts


def _fill_with(rank: int, gains: Sequence[Array], sizes: Sequence[int], most: float) -> list[int]:
    """``rank`` for the groups that fit with it, and none for the others."""
    kept = [gain[:rank].sum(keepdims=True) for gain in gains]
    return [rank * count for count in _fill(kept, [rank * size for size in sizes], most)]


def _room(checkpoint: Checkpoint, plan: CompressionPlan) -> float:
    """Numbers of factors in a file of so many bytes: header, alphas and other tensors go off first."""
    assert plan.bytes is not None
    width = int(DTYPES[plan.storage or checkpoint.storage].itemsize)
    factors = sum(layer.up.nbytes + layer.down.nbytes for layer in checkpoint.layers)
    others = checkpoint.weights.stat().st_size - factors + HEADER
    if plan.bytes <= others:
        raise BudgetError(
            f"header and other tensors alone take {others:,} bytes; allow more than {plan.bytes:,}"
        )
    room: float = (plan.bytes - others) / width
    return room
