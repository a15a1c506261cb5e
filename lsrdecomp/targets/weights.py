"""Positive semidefinite weights of a norm: the identity, and leading eigenpairs beside one value.

The weighted norm of a layer's change is ‖G^½ X C^½‖_F with an output weight G and an input weight C
(`NormWeights`). Every weight knows how it acts, how its root acts and its trace, and may carry
leading batch axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from lsrdecomp.arrays import Array, as_double, device, namespace
from lsrdecomp.errors import PrecisionError, ShapeError


@dataclass(frozen=True, slots=True)
class Identity:
    """The weight of the plain Frobenius norm."""

    size: int

    @property
    def trace(self) -> float:
        """n, the trace of the identity."""
        return float(self.size)

    def apply(self, x: Array) -> Array:
        """Return x."""
        return x

    def root(self, x: Array) -> Array:
        """Return x."""
        return x

    def gram(self, x: Array, projection: Array | None = None) -> Array:
        """Return xᵀ x, (…, b, b), for x of shape (…, n, b)."""
        del projection  # there is nothing that it could save
        return namespace(x).matrix_transpose(x) @ x


@dataclass(frozen=True, eq=False)
class LowRankPlusIdentity:
    """V diag(λ) Vᵀ + rest·(I − V Vᵀ): leading eigenpairs, and one value for all other directions.

    Parameters
    ----------
    basis : Array, shape (…, n, q)
        V, orthonormal columns (or zero columns, as padding).
    values : Array, shape (…, q)
        λ ≥ 0.
    rest : Array, shape (…), or float
        Eigenvalue of the complement, ≥ 0.

    Examples
    --------
    >>> import numpy as np
    >>> weight = LowRankPlusIdentity(np.eye(4)[:, :1], np.array([9.0]), 1.0)  # diag(9, 1, 1, 1)
    >>> weight.apply(np.ones((4, 1)))[:, 0], weight.root(np.ones((4, 1)))[:, 0]
    (array([9., 1., 1., 1.]), array([3., 1., 1., 1.]))
    """

    basis: Array
    values: Array
    rest: Array

    def __post_init__(self) -> None:
        basis = _finite(as_double(self.basis), "basis of a weight")
        values = _not_negative(as_double(self.values), "values of a weight")
        rest = self.rest
        if not hasattr(rest, "shape"):
            xp = namespace(basis)
            rest = xp.asarray(rest, dtype=xp.float64, device=device(basis))
        rest = _not_negative(as_double(rest), "rest of a weight")
        if tuple(values.shape) != (*basis.shape[:-2], basis.shape[-1]):
            raise ShapeError(
                f"basis {tuple(basis.shape)} of a weight against values {tuple(values.shape)}"
            )
        object.__setattr__(self, "basis", basis)
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "rest", rest)

    @property
    def size(self) -> int:
        """n, rows of the basis."""
        return int(self.basis.shape[-2])

    @property
    def trace(self) -> Array:
        """Sum of all eigenvalues, shape (…)."""
        xp = namespace(self.basis)
        lengths = xp.sum(self.basis * self.basis, axis=-2)  # one, or zero where padded
        excess = self.values - self.rest[..., None]
        return self.size * self.rest + xp.sum(lengths * excess, axis=-1)

    def apply(self, x: Array) -> Array:
        """Return W X for X of shape (…, n, b)."""
        return self._act(self.values, self.rest, x)

    def root(self, x: Array) -> Array:
        """Return a square root times X: ‖root(X)‖² = tr(XᴴWX)."""
        xp = namespace(self.basis)
        return self._act(xp.sqrt(self.values), xp.sqrt(self.rest), x)

    def gram(self, x: Array, projection: Array | None = None) -> Array:
        """Return xᵀ W x, (…, b, b), for x of shape (…, n, b).

        Half the cost of `apply`, and little if the ``projection`` Vᵀx is known.
        """
        xp = namespace(self.basis)
        if projection is None:
            projection = xp.matrix_transpose(self.basis) @ x
        excess = (self.values - self.rest[..., None])[..., :, None]
        spectral = xp.matrix_transpose(projection) @ (excess * projection)
        return spectral + self.rest[..., None, None] * (xp.matrix_transpose(x) @ x)

    def _act(self, values: Array, rest: Array, x: Array) -> Array:
        """Return V diag(values) Vᵀx + rest·(x − V Vᵀx)."""
        projection = namespace(self.basis).matrix_transpose(self.basis) @ x
        excess = (values - rest[..., None])[..., :, None]
        return rest[..., None, None] * x + self.basis @ (excess * projection)


Weight: TypeAlias = Identity | LowRankPlusIdentity
"""A symmetric positive semidefinite matrix C of shape (size, size), known by its action in double
precision."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The two weights of the norm ‖G^½ X C^½‖_F of matrices X of shape (m, n).

    Parameters
    ----------
    output : Weight of size m
        G, for instance the covariance of the gradients at a layer's output.
    input : Weight of size n
        C, for instance the covariance of a layer's inputs.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import LowRank
    >>> from lsrdecomp.targets import weighted_norm
    >>> nine_fold = LowRankPlusIdentity(np.eye(4)[:, :1], np.array([9.0]), 1.0)  # diag(9, 1, 1, 1)
    >>> identity = LowRankPlusIdentity(np.zeros((5, 1)), np.array([0.0]), 1.0)
    >>> weights = NormWeights(output=nine_fold, input=identity)
    >>> pair = LowRank(np.eye(4)[:, :1], np.ones((1, 5)))
    >>> round(weighted_norm(pair, weights) / pair.norm, 6)
    3.0
    """

    output: Weight
    input: Weight

    @classmethod
    def frobenius(cls, matrix_shape: tuple[int, int]) -> NormWeights:
        """Return identities on both sides: the plain Frobenius norm."""
        return cls(Identity(matrix_shape[0]), Identity(matrix_shape[1]))

    @property
    def is_frobenius(self) -> bool:
        """Whether both weights are `Identity`."""
        return isinstance(self.output, Identity) and isinstance(self.input, Identity)

    def check(self, matrix_shape: tuple[int, int]) -> None:
        """Raise `ShapeError` unless the weights fit matrices of this shape."""
        m, n = matrix_shape
        if (self.output.size, self.input.size) != (m, n):
            raise ShapeError(
                f"weights of sizes {self.output.size} (output) and {self.input.size} (input) "
                f"for a matrix of shape {m}×{n}"
            )


def _finite(array: Array, name: str) -> Array:
    """Return the array; raise `PrecisionError` unless all entries are finite."""
    xp = namespace(array)
    if not bool(xp.all(xp.isfinite(array))):
        raise PrecisionError(f"{name}: entries are not finite; calibrate again or remove the layer")
    return array


def _not_negative(array: Array, name: str) -> Array:
    """Return the array; raise `PrecisionError` where an entry is negative or not finite."""
    xp = namespace(array)
    if bool(xp.any(_finite(array, name) < 0)):
        smallest = float(xp.min(array))
        raise PrecisionError(
            f"{name}: an entry of {smallest:.3g}; a weight must be positive semidefinite"
        )
    return array
