"""LoHa, exactly a low-rank pair, and LoKr, exactly a product of one-term separated matrices, of LyCORIS and PEFT."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.checkpoints.format import Roles, require_roles, scalar
from lsrdecomp.checkpoints.records import KroneckerLayer, LoraLayer
from lsrdecomp.checkpoints.tensors import Array, StoredTensor, derived
from lsrdecomp.kronecker.shape import ProductShape

if TYPE_CHECKING:
    from collections.abc import Callable

HADA = {f".hada_{part}": part for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")}
LOKR = {
    f".lokr_{part}": f"kron {part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")
}


def hadamard_layer(name: str, roles: Roles, scale: float | None = None) -> LoraLayer:
    """LoHa: ``(B1 A1) ∘ (B2 A2) = B A``, rows of B and columns of A being Kronecker products of the two pairs'.

    Without a ``scale`` it is LyCORIS's own, alpha / rank, here and below; PEFT's is alpha / r
    always, where factors are whole too.
    """
    require_roles(name, roles, ("w1_a", "w1_b", "w2_a", "w2_b"), ("t1", "t2", "alpha"))
    first, second = (_Pair(roles[f"w{i}_a"], roles[f"w{i}_b"], roles.get(f"t{i}")) for i in (1, 2))
    if first.shape != second.shape or first.kernel != second.kernel:
        raise first.up.error(f"factors of {first.shape} and {second.shape}, expected the same size")
    (rows, columns), rank = first.shape, first.rank * second.rank

    def up() -> Array:
        return (first.left()[:, :, None] * second.left()[:, None, :]).reshape(rows, rank)

    def down() -> Array:
        return (first.right()[:, None] * second.right()[None]).reshape(rank, columns)

    scale = _scale(roles, first.rank) if scale is None else scale
    halves = derived(first.up, (rows, rank), up), derived(first.down, (rank, columns), down)
    layer_type = "conv" if first.kernel else "linear"
    return LoraLayer(
        name, layer_type, rows, columns, rank, scale, first.up.dtype, *halves, first.kernel
    )


def kronecker_layer(name: str, roles: Roles, scale: float | None = None) -> KroneckerLayer:
    """LoKr: ``W1 ⊗ W2 = (B1 ⊗ B2)(A1 ⊗ A2)``; a side stored whole is multiplied by an identity."""
    sides: list[_Pair] = []
    for i in (1, 2):
        whole, pair = f"kron w{i}", (f"kron w{i}_a", f"kron w{i}_b")
        own = {
            role: tensor
            for role, tensor in roles.items()
            if role.startswith(("kron w" + str(i), "kron t" + str(i)))
        }
        if whole in roles:
            require_roles(name, own, (whole,))
            sides.append(_Pair.whole(roles[whole]))
        else:
            require_roles(name, own or roles, pair, ("kron t2",) if i == 2 else ())
            sides.append(
                _Pair(roles[pair[0]], roles[pair[1]], roles.get("kron t2") if i == 2 else None)
            )
    first, second = sides
    if first.kernel:
        raise first.up.error(
            f"shape {first.up.shape} of the first Kronecker factor, expected two sizes"
        )
    if scale is None:
        pairs = [side for side in (second, first) if side.stored]
        scale = (
            _scale(roles, pairs[0].rank) if pairs else 1.0
        )  # LyCORIS ignores alpha where both sides are whole
    shape = ProductShape(
        (first.shape[0], second.shape[0]),
        (first.rank, second.rank),
        (first.shape[1], second.shape[1]),
    )  # kernel runs with the second factor's columns
    left = tuple(_one_term(side.up, (side.shape[0], side.rank), side.left) for side in sides)
    right = tuple(_one_term(side.down, (side.rank, side.shape[1]), side.right) for side in sides)
    layer_type = "conv" if second.kernel else "linear"
    return KroneckerLayer(
        name, layer_type, shape, 1, 1, scale, first.up.dtype, left, right, second.kernel
    )


def _scale(roles: Roles, rank: int) -> float:
    alpha = scalar(roles["alpha"]) if "alpha" in roles else 0.0
    return alpha / rank if alpha else 1.0  # LyCORIS takes an alpha of 0 as none


class _Pair:
    """A matrix as stored: whole, or as the product of two, with a Tucker core between them for some convolutions."""

    def __init__(self, up: StoredTensor, down: StoredTensor, core: StoredTensor | None) -> None:
        self.up, self.down, self.core, self.stored = up, down, core, True
        self.kernel: tuple[int, ...] = ()
        shapes = f"shapes {up.shape} and {down.shape}"
        if len(up.shape) != 2 or len(down.shape) < 2 or 0 in up.shape or 0 in down.shape:
            raise up.error(f"{shapes} are not a low-rank pair")
        if core is None:
            self.shape, self.rank = (up.shape[0], math.prod(down.shape[1:])), up.shape[1]
            self.kernel = down.shape[2:]
            fits = down.shape[0] == self.rank
        else:
            self.kernel = core.shape[2:]
            self.shape, self.rank = (
                (up.shape[1], down.shape[1] * math.prod(self.kernel)),
                up.shape[0],
            )
            fits = (
                core.shape[:2] == (up.shape[0], down.shape[0])
                and len(down.shape) == 2
                and 0 not in core.shape
            )
        if not fits:
            middle = f" and core {core.shape}" if core is not None else ""
            raise up.error(f"{shapes}{middle} do not multiply")

    @classmethod
    def whole(cls, matrix: StoredTensor) -> _Pair:
        """A matrix stored whole, as itself times an identity."""
        if len(matrix.shape) < 2 or 0 in matrix.shape:
            raise matrix.error(f"shape {matrix.shape} is not a matrix")
        pair = cls.__new__(cls)
        pair.up = pair.down = matrix
        pair.core, pair.stored, pair.kernel = None, False, matrix.shape[2:]
        pair.shape = matrix.shape[0], math.prod(matrix.shape[1:])
        pair.rank = min(pair.shape)
        return pair

    def left(self) -> Array:
        up = self.up.load().astype(np.float64)
        if self.stored:
            return up if self.core is None else up.T
        return up.reshape(self.shape) if self.rank == self.shape[1] else np.eye(self.rank)

    def right(self) -> Array:
        down = self.down.load().astype(np.float64)
        if not self.stored:
            return np.eye(self.rank) if self.rank == self.shape[1] else down.reshape(self.shape)
        if self.core is not None:
            down = np.moveaxis(np.tensordot(self.core.load(), down, axes=(1, 0)), -1, 1)
        return down.reshape(self.rank, -1)


def _one_term(
    like: StoredTensor, shape: tuple[int, int], compute: Callable[[], Array]
) -> StoredTensor:
    return derived(like, (1, *shape), lambda: compute()[None])
