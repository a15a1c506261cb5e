"""One safetensors file of low-rank pairs, written layer by layer, and what writing changes in ΔW."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.checkpoints.experts import stack_experts
from lsrdecomp.checkpoints.provenance import header_metadata
from lsrdecomp.checkpoints.tensors import Array, TensorWriter, cast
from lsrdecomp.errors import CheckpointError, ShapeError
from lsrdecomp.targets.residual import pair_distance

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lsrdecomp.checkpoints.records import Checkpoint


class PairWriter(TensorWriter):
    """Gathers the halves of each layer, rounded, and measures by how much that moves ΔW.

    Parameters
    ----------
    directory : Path
        Where bytes wait that memory does not hold: the directory of the file to be.
    source : Checkpoint, optional
        Gives sizes and kernels of layers, and the record's origin.

    Attributes
    ----------
    ranks : dict of str to int
        Of the layers that came.

    >>> from pathlib import Path
    >>> with PairWriter(Path("."), None) as writer:
    ...     writer.add_pair("q", np.ones((4, 1)), np.ones((1, 9)), ("q.down", "q.up"), "float16")
    ...     print(writer.ranks, "rounding" in writer.record(None)["lsrdecomp"])
    {'q': 1} True
    """

    def __init__(self, directory: Path, source: Checkpoint | None) -> None:
        super().__init__(directory)
        self.source = source
        self.layers = {layer.name: layer for layer in source.layers} if source else {}
        self.ranks: dict[str, int] = {}
        self._norm = self._error = 0.0

    def add_pair(
        self,
        name: str,
        up: Array,
        down: Array,
        keys: tuple[str, str],
        storage: str,
        *,
        rank: int | None = None,
        scale: float = 1.0,
        transposed: bool = False,
    ) -> None:
        """One layer ``ΔW = B @ A``, A and B under the two keys.

        Parameters
        ----------
        rank : int, optional
            Pad with zeros to it.
        scale : float
            What a reader of the file multiplies by: B is stored divided by it.
        transposed : bool
            Store A as (n, r) and B as (r, m).
        """
        layer = self.layers.get(name)
        check_pair(name, up, down, layer)
        if rank is not None:
            up, down = _padded(name, up, down, rank)
        self.ranks[name] = down.shape[0]
        stored_up = cast(up if scale == 1.0 else up / scale, storage, keys[1])
        stored_down = cast(down, storage, keys[0])
        self._measure(up, down, stored_up, stored_down, scale)
        if transposed:
            stored_up, stored_down = stored_up.T, stored_down.T
        elif layer is not None and layer.kernel:
            stored_up = stored_up.reshape(*up.shape, *(1 for _ in layer.kernel))
            stored_down = stored_down.reshape(down.shape[0], -1, *layer.kernel)
        self.add(keys[0], stored_down)
        self.add(keys[1], stored_up)

    def add_experts(
        self,
        stack: str,
        pairs: Mapping[str, tuple[Array, Array]],
        count: int,
        keys: tuple[str, str],
        storage: str,
    ) -> None:
        """The experts of one parameter, by the names of their layers, as PEFT stores ``count`` of them."""
        stored = {}
        for name, (up, down) in pairs.items():
            check_pair(name, up, down, self.layers.get(name))
            halves = cast(up, storage, keys[1]), cast(down, storage, keys[0])
            self._measure(up, down, *halves, 1.0)
            stored[int(name.rpartition(".")[2])] = halves
        self.ranks[stack] = max(down.shape[0] for _, down in stored.values())
        up, down = stack_experts(stored, count)
        self.add(keys[0], down)
        self.add(keys[1], up)

    def _measure(
        self, up: Array, down: Array, stored_up: Array, stored_down: Array, scale: float
    ) -> None:
        up, down = np.asarray(up, np.float64), np.asarray(down, np.float64)
        nothing = up[:, :0], down.T[:, :0]
        self._norm = math.hypot(self._norm, pair_distance(up, down.T, *nothing))
        left, right = np.asarray(stored_up, np.float64) * scale, np.asarray(stored_down, np.float64)
        if not (np.array_equal(left, up) and np.array_equal(right, down)):
            # B A − B̂ Â = (B − B̂) A − B̂ (Â − A), of which neither term is much larger than the
            # difference.
            self._error = math.hypot(
                self._error, pair_distance(up - left, down.T, left, (right - down).T)
            )

    def record(self, provenance: Mapping[str, Any] | None, **facts: Any) -> dict[str, str]:
        """The header's record, once all tensors are in: what `verify` holds the file to stands in it.

        That is the digest of all tensors, ‖ΔW‖_F of all layers together, and by how much they were
        moved.
        """
        if not self.ranks:
            raise CheckpointError("no layers to write")
        facts |= {"sha256": self.sha256(), "norm": self._norm, "rounding": self._error}
        return header_metadata(self.source, provenance, **facts)


def check_pair(name: str, up: Array, down: Array, layer: Any) -> None:
    """Raise `ShapeError` unless B and A multiply, to the size of the layer if that is known."""
    if (
        up.ndim != 2
        or down.ndim != 2
        or up.shape[1] != down.shape[0]
        or 0 in (*up.shape, *down.shape)
    ):
        raise ShapeError(
            f"{name}: B of shape {up.shape} and A of shape {down.shape} do not multiply"
        )
    if layer is not None and (layer.out_features, layer.in_features) != (
        up.shape[0],
        down.shape[1],
    ):
        size = f"{layer.out_features} x {layer.in_features}"
        raise ShapeError(
            f"{name}: B @ A is {up.shape[0]} x {down.shape[1]}, but the layer is {size}"
        )


def _padded(name: str, up: Array, down: Array, rank: int) -> tuple[Array, Array]:
    more = rank - down.shape[0]
    if more < 0:
        raise ShapeError(f"{name}: rank {down.shape[0]}, but all layers are to have {rank}")
    return np.pad(up, ((0, 0), (0, more))), np.pad(down, ((0, more), (0, 0)))
