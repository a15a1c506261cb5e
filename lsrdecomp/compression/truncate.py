"""Truncated SVD of a whole adapter with one threshold over all layers, in the source's own format: seconds, no base.

Without a base, closeness of numbers is all there is, and there low rank is hard to beat; so nothing else is worked out.
Each layer is read twice, once for its singular values and once to be written, and no layer stays in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lsrdecomp.checkpoints import Checkpoint, check_same, same_is_directory, write_same
from lsrdecomp.checkpoints.tensors import DTYPES, Array
from lsrdecomp.compression.layers import layer_pair
from lsrdecomp.compression.plan import CompressionPlan
from lsrdecomp.errors import BudgetError, UnsupportedError

Doubles = NDArray[np.float64]
GOALS = ("ratio", "parameters", "bytes", "rtol")
RATIOS = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
"""Of the curve that a dry run shows."""
HEADER = 2048
"""Bytes for our record in the header of the file."""


@dataclass(frozen=True, slots=True)
class Core:
    """What is kept of a layer between its two readings: singular values, and the maps to singular vectors.

    With ``B A = U S V``: ``U S^½ = B @ right`` and ``S^½ V = left @ A``, both r x r.
    """

    shape: tuple[int, int]
    parameters: int
    sigma: Doubles
    right: Doubles
    left: Doubles

    @property
    def step(self) -> int:
        """Numbers of one component."""
        return sum(self.shape)


@dataclass(frozen=True)
class Truncation:
    """An adapter cut to a plan, ready to be written.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> cut = truncate(lora, CompressionPlan(ratio=4))
    >>> cut.parameters <= lora.adapter_parameters / 4, round(cut.relative_error, 3)
    (True, 0.255)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     open_checkpoint(cut.save(f"{folder}/small")).format
    'peft-lora'
    """

    source: Checkpoint
    plan: CompressionPlan
    cores: tuple[Core, ...]
    ranks: tuple[int, ...]
    storage: str | None

    @property
    def parameters(self) -> int:
        return sum(rank * core.step for rank, core in zip(self.ranks, self.cores, strict=True))

    @property
    def relative_error(self) -> float:
        """Over all layers, before rounding to the storage type."""
        return _error(self.cores, self.ranks)

    def curve(self) -> Iterator[tuple[float, int, float]]:
        """(ratio, parameters, relative error) of the whole adapter at other sizes."""
        whole = sum(core.parameters for core in self.cores)
        for ratio in RATIOS:
            ranks = _within(self.cores, whole / ratio)
            if any(ranks):
                used = sum(rank * core.step for rank, core in zip(ranks, self.cores, strict=True))
                yield ratio, used, _error(self.cores, ranks)

    def save(self, out: str | Path, *, force: bool = False, on_layer: Callable[[str], Any] | None = None) -> Path:
        """Write it as the source came, by `lsrdecomp.checkpoints.write_same`; layers of rank 0 are left out."""
        record = {"plan": self.plan.to_json(), "recorded": {"total": self.relative_error, "layers": {}}}
        pairs = self._pairs(on_layer)
        return write_same(out, like=self.source, layers=pairs, storage=self.storage, force=force, provenance=record)

    def _pairs(self, on_layer: Callable[[str], Any] | None) -> Iterator[tuple[str, Array, Array]]:
        for layer, core, rank in zip(self.source.layers, self.cores, self.ranks, strict=True):
            if rank:
                pair = layer_pair(self.source, layer)
                kept = rank == layer.rank
                up = pair.left if kept else pair.left @ core.right[:, :rank]
                down = pair.right if kept else core.left[:rank] @ pair.right
                yield layer.name, up, down
            if on_layer is not None:
                on_layer(layer.name)


def truncate(
    checkpoint: Checkpoint,
    plan: CompressionPlan,
    *,
    storage: str | None = None,
    on_layer: Callable[[str], Any] | None = None,
) -> Truncation:
    """Cut every layer to the rank that one threshold over all singular values gives it.

    Parameters
    ----------
    checkpoint : Checkpoint
        A LoRA in a format that `write_same` writes.
    plan : CompressionPlan
        A ratio, parameters or bytes of the file over all layers, or a relative error of every layer (``rtol``).
    storage : str, optional
        A floating type; absent, that of each layer.
    on_layer : callable, optional
        Called with the name of each layer once its singular values are known.

    Raises
    ------
    BudgetError
        For another goal, or where nothing fits.
    UnsupportedError
        For an adapter that is not plain pairs.

    Notes
    -----
    O((m + n) r²) a layer; between the two readings 2 r² + r numbers a layer are held.
    """
    check_same(checkpoint)
    goal = next((name for name in GOALS if getattr(plan, name) is not None), None)
    if goal is None:
        raise BudgetError(f"a plain LoRA is made to {', '.join(GOALS)}; other goals need a directory of LSR")
    cores = []
    for layer in checkpoint.layers:
        cores.append(_core(checkpoint, layer))
        if on_layer is not None:
            on_layer(layer.name)
    if plan.rtol is not None:
        ranks = tuple(_rank_for(core, plan.rtol) for core in cores)
    else:
        whole = sum(core.parameters for core in cores)
        most = whole / plan.ratio if plan.ratio else plan.parameters or _room(checkpoint, plan, storage)
        ranks = _within(cores, most)
    if plan.max_rank is not None:
        ranks = tuple(min(rank, plan.max_rank) for rank in ranks)
    if not any(ranks):
        raise BudgetError("nothing of the adapter fits into this budget; allow more")
    return Truncation(checkpoint, plan, tuple(cores), ranks, storage)


def single_file(out: Path, checkpoint: Checkpoint) -> bool:
    """Whether ``out`` asks for one file as the source is one; `UnsupportedError` where the source is a directory."""
    if out.suffix != ".safetensors":
        return False
    if same_is_directory(checkpoint):
        text = f"{checkpoint.format} is a directory with a config, no single file: name a directory by --out"
        raise UnsupportedError(text, path=checkpoint.path)
    return True


def _core(checkpoint: Checkpoint, layer: Any) -> Core:
    pair = layer_pair(checkpoint, layer)
    # R of both sides from their Gram matrices: singular values to 1e-8 of the largest, at the price of one product.
    rows, columns = _root(pair.left.T @ pair.left), _root(pair.right @ pair.right.T)
    u, sigma, vh = np.linalg.svd(rows @ columns.T)
    sigma = np.where(sigma > 1e-7 * sigma[0], sigma, 0.0)
    scale = np.divide(1.0, np.sqrt(sigma), where=sigma > 0.0, out=np.zeros_like(sigma))
    right, left = (columns.T @ vh.T) * scale, scale[:, None] * (u.T @ rows)
    return Core(layer.shape, layer.parameters, sigma[: min(layer.rank, *layer.shape)], right, left)


def _root(gram: Doubles) -> Doubles:
    """R with RᵀR the matrix."""
    values, vectors = np.linalg.eigh(gram)
    return np.asarray(np.sqrt(np.maximum(values, 0.0))[:, None] * vectors.T)


def _within(cores: Sequence[Core], most: float) -> tuple[int, ...]:
    """Components in the order of what each removes a parameter, for as long as they fit."""
    gains = np.concatenate([core.sigma**2 / core.step for core in cores])
    owners = np.concatenate([np.full(core.sigma.size, i) for i, core in enumerate(cores)])
    ranks, used = [0] * len(cores), 0
    for place in np.argsort(-gains, kind="stable"):
        i = int(owners[place])
        if gains[place] > 0.0 and used + cores[i].step <= most:
            ranks[i] += 1
            used += cores[i].step
    return tuple(ranks)


def _rank_for(core: Core, rtol: float) -> int:
    """The least rank within a relative error."""
    tails = np.sqrt(np.cumsum((core.sigma**2)[::-1])[::-1])
    return int(np.count_nonzero(tails > rtol * tails[0])) if tails[0] > 0.0 else 0


def _error(cores: Sequence[Core], ranks: Sequence[int]) -> float:
    size = math.fsum(float(core.sigma @ core.sigma) for core in cores)
    lost = math.fsum(float(core.sigma[q:] @ core.sigma[q:]) for core, q in zip(cores, ranks, strict=True))
    return math.sqrt(lost / size) if size > 0.0 else 0.0


def _room(checkpoint: Checkpoint, plan: CompressionPlan, storage: str | None) -> float:
    """Numbers of factors in a file of so many bytes: header, alphas and other tensors go off first."""
    assert plan.bytes is not None
    width = int(DTYPES[storage or checkpoint.storage].itemsize)
    factors = sum(layer.up.nbytes + layer.down.nbytes for layer in checkpoint.layers)
    others = checkpoint.weights.stat().st_size - factors + HEADER
    if plan.bytes <= others:
        raise BudgetError(f"header and other tensors alone take {others:,} bytes; allow more than {plan.bytes:,}")
    room: float = (plan.bytes - others) / width
    return room
