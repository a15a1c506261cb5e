"""A safetensors file of low-rank pairs, written layer by layer, and how that changes ΔW."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.arrays import norm
from lsrdecomp.errors import CheckpointError, ShapeError
from lsrdecomp.lora.files.provenance import header_metadata
from lsrdecomp.lora.files.stacked_experts import stack_experts
from lsrdecomp.lora.files.tensors import Array, TensorWriter, cast
from lsrdecomp.targets.residual import gram_of, has_twelve_digits, pair_core, pair_distance

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lsrdecomp.lora.files.records import Checkpoint, LoraLayer


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
    layers : dict of str to LoraLayer or KroneckerLayer
        The source's.
    ranks : dict of str to int
        Of the layers that came.
    alphas : dict of str to float
        The lora_alpha that goes with each: its rank, since the scale is in B, but for layers that
        were carried.

    Examples
    --------
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
        self.alphas: dict[str, float] = {}
        self._norm = 0.0
        self._rounding = 0.0

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
        """Add one layer ``ΔW = B @ A``.

        Parameters
        ----------
        name : str
        up, down : Array
            B (m, r) and A (r, n).
        keys : (str, str)
            Of A and of B in the file.
        storage : str
            Type of both.
        rank : int, optional
            Pad with zeros to it.
        scale : float
            What a reader of the file multiplies by: B is stored divided by it.
        transposed : bool
            Store A as (n, r) and B as (r, m).
        """
        down_key, up_key = keys
        layer = self.layers.get(name)
        check_pair(name, up, down, layer)
        if rank is not None:
            up, down = _padded(name, up, down, rank)
        self.ranks[name] = self.alphas[name] = down.shape[0]
        stored_up = cast(up if scale == 1.0 else up / scale, storage, up_key)
        stored_down = cast(down, storage, down_key)
        self._measure(up, down, stored_up, stored_down, scale)
        if transposed:
            stored_up, stored_down = stored_up.T, stored_down.T
        elif layer is not None and layer.kernel:
            ones = (1,) * len(layer.kernel)
            stored_up = stored_up.reshape(*up.shape, *ones)
            stored_down = stored_down.reshape(down.shape[0], -1, *layer.kernel)
        self.add(down_key, stored_down)
        self.add(up_key, stored_up)

    def add_experts(
        self,
        stack: str,
        pairs: Mapping[str, tuple[Array, Array]],
        count: int,
        keys: tuple[str, str],
        storage: str,
        *,
        rank: int | None = None,
    ) -> None:
        """Add the experts of one parameter, in one tensor each for A and B, as PEFT stores them.

        Parameters
        ----------
        stack : str
            The parameter.
        pairs : mapping of str to (B, A)
            By the names of the experts' layers.
        count : int
            How many experts there are; missing ones are zero.
        keys : (str, str)
            Of A and of B in the file.
        storage : str
            Type of both.
        rank : int, optional
            Pad with zeros to it.
        """
        down_key, up_key = keys
        stored = {}
        for name, (up, down) in pairs.items():
            check_pair(name, up, down, self.layers.get(name))
            if rank is not None:
                up, down = _padded(name, up, down, rank)
            stored_up = cast(up, storage, up_key)
            stored_down = cast(down, storage, down_key)
            self._measure(up, down, stored_up, stored_down, 1.0)
            expert = int(name.rpartition(".")[2])
            stored[expert] = stored_up, stored_down
        self.ranks[stack] = self.alphas[stack] = max(down.shape[0] for _, down in stored.values())
        ups, downs = stack_experts(stored, count)
        self.add(down_key, downs)
        self.add(up_key, ups)

    def carry(self, name: str, layer: LoraLayer) -> None:
        """Note the rank and the scale of a layer whose tensors are added as they are."""
        alpha = layer.scale * layer.rank
        self.ranks[name] = layer.rank
        self.alphas[name] = int(alpha) if alpha.is_integer() else alpha

    def _measure(
        self, up: Array, down: Array, stored_up: Array, stored_down: Array, scale: float
    ) -> None:
        """Add ‖ΔW‖_F of a layer, and by how much storing it moves ΔW, to those of all."""
        self._norm = math.hypot(self._norm, _norm_of_pair(up, down))
        if scale == 1.0 and stored_up is up and stored_down is down:
            return
        up = np.asarray(up, np.float64)
        down = np.asarray(down, np.float64)
        read_up = np.asarray(stored_up, np.float64) * scale
        read_down = np.asarray(stored_down, np.float64)
        if not (np.array_equal(read_up, up) and np.array_equal(read_down, down)):
            # B A − B̂ Â = (B − B̂) A − B̂ (Â − A), of which neither term is much larger than the
            # difference.
            moved = pair_distance(up - read_up, down.T, read_up, (read_down - down).T)
            self._rounding = math.hypot(self._rounding, moved)

    def record(self, provenance: Mapping[str, Any] | None, **fields: Any) -> dict[str, str]:
        """Return the header's record, once all tensors are in.

        What `verify` holds the file to stands in it: the digest of all tensors, ‖ΔW‖_F of all
        layers together, and by how much they were moved.
        """
        if not self.ranks:
            raise CheckpointError("no layers to write")
        return header_metadata(
            self.source,
            provenance,
            **fields,
            sha256=self.sha256(),
            norm=self._norm,
            rounding=self._rounding,
        )


def _norm_of_pair(up: Array, down: Array) -> float:
    """Return ‖B A‖_F in double precision, from Gram matrices where these give twelve digits."""
    left_gram, right_gram = gram_of(up), gram_of(down.T)
    squared = float(np.sum(left_gram * right_gram))
    size = math.sqrt(float(np.trace(left_gram)) * float(np.trace(right_gram)))
    if has_twelve_digits(squared, size):
        return math.sqrt(squared)
    return norm(pair_core([up.astype(np.float64)], [down.T.astype(np.float64)]))


def check_pair(name: str, up: Array, down: Array, layer: Any) -> None:
    """Refuse B and A that do not multiply, or not to the size of the layer, if that is known."""
    multiply = (
        up.ndim == 2
        and down.ndim == 2
        and up.shape[1] == down.shape[0]
        and 0 not in (*up.shape, *down.shape)
    )
    if not multiply:
        raise ShapeError(
            f"{name}: B of shape {up.shape} and A of shape {down.shape} do not multiply"
        )
    if layer is None:
        return
    rows, columns = up.shape[0], down.shape[1]
    if (layer.out_features, layer.in_features) != (rows, columns):
        size = f"{layer.out_features} x {layer.in_features}"
        raise ShapeError(f"{name}: B @ A is {rows} x {columns}, but the layer is {size}")


def _padded(name: str, up: Array, down: Array, rank: int) -> tuple[Array, Array]:
    """Return B and A with zeros up to a rank."""
    missing = rank - down.shape[0]
    if missing < 0:
        raise ShapeError(f"{name}: rank {down.shape[0]}, but all layers are to have {rank}")
    return np.pad(up, ((0, 0), (0, missing))), np.pad(down, ((0, missing), (0, 0)))


def check_file_name(out: Path) -> None:
    """Refuse the name of a file that does not end in .safetensors."""
    if out.suffix != ".safetensors":
        raise CheckpointError("the name must end in .safetensors", path=out)
