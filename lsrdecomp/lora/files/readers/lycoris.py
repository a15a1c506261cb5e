"""LoHa and LoKr, of LyCORIS and PEFT.

LoHa is exactly a low-rank pair, LoKr exactly a product of one-term separated matrices.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.files.format import Roles, alpha_scale, require_roles
from lsrdecomp.lora.files.records import KroneckerLayer, LoraLayer
from lsrdecomp.lora.files.tensors import Array, StoredTensor, derived_tensor

if TYPE_CHECKING:
    from collections.abc import Callable

HADA_PARTS = {f".hada_{part}": part for part in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")}
LOKR_PARTS = {
    f".lokr_{part}": f"kron {part}" for part in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")
}


def hadamard_layer(name: str, roles: Roles, scale: float | None = None) -> LoraLayer:
    """Make a layer of LoHa, ``(B1 A1) ∘ (B2 A2) = B A``.

    Rows of B and columns of A are Kronecker products of the two pairs' rows and columns.

    Parameters
    ----------
    name : str
    roles : Roles
    scale : float, optional
        PEFT's, alpha / r; without it LyCORIS's own, alpha / rank.
    """
    require_roles(name, roles, ("w1_a", "w1_b", "w2_a", "w2_b"), ("t1", "t2", "alpha"))
    first = _Matrix.product(roles["w1_a"], roles["w1_b"], roles.get("t1"))
    second = _Matrix.product(roles["w2_a"], roles["w2_b"], roles.get("t2"))
    if first.shape != second.shape or first.kernel != second.kernel:
        raise first.up.error(f"factors of {first.shape} and {second.shape}, expected the same size")
    rows, columns = first.shape
    rank = first.rank * second.rank

    def up() -> Array:
        products = first.left()[:, :, None] * second.left()[:, None, :]
        return products.reshape(rows, rank)

    def down() -> Array:
        products = first.right()[:, None] * second.right()[None]
        return products.reshape(rank, columns)

    return LoraLayer(
        name,
        "conv" if first.kernel else "linear",
        rows,
        columns,
        rank,
        _lycoris_scale(roles, first.rank) if scale is None else scale,
        first.up.dtype,
        derived_tensor(first.up, (rows, rank), up),
        derived_tensor(first.down, (rank, columns), down),
        first.kernel,
    )


def kronecker_layer(name: str, roles: Roles, scale: float | None = None) -> KroneckerLayer:
    """Make a layer of LoKr, ``W1 ⊗ W2 = (B1 ⊗ B2)(A1 ⊗ A2)``.

    A side that is stored whole is multiplied by an identity.

    Parameters
    ----------
    name : str
    roles : Roles
    scale : float, optional
        PEFT's, alpha / r, where factors are whole too; without it LyCORIS's own, alpha / rank.
    """
    first = _kronecker_side(name, roles, 1)
    second = _kronecker_side(name, roles, 2)
    if first.kernel:
        raise first.up.error(
            f"shape {first.up.shape} of the first Kronecker factor, expected two sizes"
        )
    if scale is None:
        products = [side for side in (second, first) if side.is_product]
        # LyCORIS ignores alpha where both sides are whole.
        scale = _lycoris_scale(roles, products[0].rank) if products else 1.0
    shape = ProductShape(
        (first.shape[0], second.shape[0]),
        (first.rank, second.rank),
        (first.shape[1], second.shape[1]),  # a kernel runs with the second factor's columns
    )
    sides = (first, second)
    return KroneckerLayer(
        name,
        "conv" if second.kernel else "linear",
        shape,
        1,
        1,
        scale,
        first.up.dtype,
        tuple(_one_term(side.up, (side.shape[0], side.rank), side.left) for side in sides),
        tuple(_one_term(side.down, (side.rank, side.shape[1]), side.right) for side in sides),
        second.kernel,
    )


def _kronecker_side(name: str, roles: Roles, number: int) -> _Matrix:
    """Make W1 or W2 of whatever is stored of it; only W2 may have a core between its halves."""
    whole = f"kron w{number}"
    core = f"kron t{number}"
    halves = f"{whole}_a", f"{whole}_b"
    of_side = {role: tensor for role, tensor in roles.items() if role.startswith((whole, core))}
    if whole in roles:
        require_roles(name, of_side, (whole,))
        return _Matrix.whole(roles[whole])
    require_roles(name, of_side or roles, halves, (core,) if number == 2 else ())
    return _Matrix.product(roles[halves[0]], roles[halves[1]], roles.get(core))


def _lycoris_scale(roles: Roles, rank: int) -> float:
    return alpha_scale(roles["alpha"], rank) if "alpha" in roles else 1.0


class _Matrix:
    """A matrix as the product of a left and a right one; if it is whole, one is an identity.

    Attributes
    ----------
    up, down : StoredTensor
        Where the left and the right one are stored; the same tensor for a whole matrix.
    core : StoredTensor, optional
        A Tucker core between them, as some convolutions have.
    shape : (int, int)
        Of the matrix; a kernel runs with its columns.
    rank : int
        Inner size of the product.
    kernel : tuple of int
        Of a convolution, else empty.
    is_product : bool
        Whether it is stored as two matrices.
    """

    def __init__(
        self,
        up: StoredTensor,
        down: StoredTensor,
        core: StoredTensor | None,
        shape: tuple[int, int],
        rank: int,
        kernel: tuple[int, ...],
        *,
        is_product: bool,
    ) -> None:
        self.up = up
        self.down = down
        self.core = core
        self.shape = shape
        self.rank = rank
        self.kernel = kernel
        self.is_product = is_product

    @classmethod
    def product(cls, up: StoredTensor, down: StoredTensor, core: StoredTensor | None) -> _Matrix:
        """Make a matrix stored as two: (m, r) and (r, n), with a core (r, m), (q, c), (r, q, …)."""
        shapes = f"shapes {up.shape} and {down.shape}"
        if len(up.shape) != 2 or len(down.shape) < 2 or 0 in up.shape or 0 in down.shape:
            raise up.error(f"{shapes} are not a low-rank pair")
        if core is None:
            rows, rank = up.shape
            kernel = down.shape[2:]
            columns = math.prod(down.shape[1:])
            fits = down.shape[0] == rank
        else:
            shapes = f"{shapes} and core {core.shape}"
            rank, rows = up.shape
            kernel = core.shape[2:]
            columns = down.shape[1] * math.prod(kernel)
            fits = (
                core.shape[:2] == (rank, down.shape[0])
                and len(down.shape) == 2
                and 0 not in core.shape
            )
        if not fits:
            raise up.error(f"{shapes} do not multiply")
        return cls(up, down, core, (rows, columns), rank, kernel, is_product=True)

    @classmethod
    def whole(cls, matrix: StoredTensor) -> _Matrix:
        """Make a matrix stored whole, as itself times an identity on its shorter side."""
        if len(matrix.shape) < 2 or 0 in matrix.shape:
            raise matrix.error(f"shape {matrix.shape} is not a matrix")
        shape = matrix.shape[0], math.prod(matrix.shape[1:])
        kernel = matrix.shape[2:]
        return cls(matrix, matrix, None, shape, min(shape), kernel, is_product=False)

    @property
    def _is_left(self) -> bool:
        """Whether a whole matrix stands on the left, and the identity on the right."""
        return self.rank == self.shape[1]

    def left(self) -> Array:
        """Read the left one, (m, r), in float64."""
        up = self.up.load().astype(np.float64)
        if not self.is_product:
            return up.reshape(self.shape) if self._is_left else np.eye(self.rank)
        return up if self.core is None else up.T

    def right(self) -> Array:
        """Read the right one, (r, n), in float64."""
        down = self.down.load().astype(np.float64)
        if not self.is_product:
            return np.eye(self.rank) if self._is_left else down.reshape(self.shape)
        if self.core is not None:
            down = np.moveaxis(np.tensordot(self.core.load(), down, axes=(1, 0)), -1, 1)
        return down.reshape(self.rank, -1)


def _one_term(
    like: StoredTensor, shape: tuple[int, int], compute: Callable[[], Array]
) -> StoredTensor:
    """Describe a matrix as a factor with one term."""
    return derived_tensor(like, (1, *shape), lambda: compute()[None])
