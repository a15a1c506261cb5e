"""Action: a separated matrix used as a matrix; products with arrays, transposes, SciPy's and NumPy's protocols."""

from __future__ import annotations

import math
from typing import Any, Self, overload

import array_api_compat
import numpy as np

from lsrdecomp.arrays import Array, as_floating, conjugate, is_complex, namespace, to_numpy
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.rearrange import apply_sum_of_kroneckers
from lsrdecomp.kronecker.terms import Terms

FORMED_ENTRIES = 2**27
"""Most entries that are formed without being asked by name (`Action.to_matrix`): 1 GiB in double
precision."""
OPERATORS = {
    np.matmul: "matmul",
    np.add: "add",
    np.subtract: "sub",
    np.multiply: "mul",
    np.true_divide: "truediv",
}
"""NumPy's names of operators that this class has itself, which need no formed matrix or say what
they form."""


class Action(Terms):
    """Action: products with arrays, transposes, and the protocols of NumPy and SciPy."""

    ndim = 2

    @property
    def size(self) -> int:
        """Entries of the matrix, were it formed."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def mT(self) -> Self:  # noqa: N802 - the array API's name
        """Transpose, term by term."""
        xp = namespace(*self.factors)
        return self._of(self.weights, tuple(xp.matrix_transpose(f) for f in self.factors))

    @property
    def T(self) -> Self:  # noqa: N802
        """Transpose."""
        return self.mT

    def conj(self) -> Self:
        """Complex conjugate, entry by entry."""
        return self._of(self.weights, tuple(conjugate(f) for f in self.factors))

    @property
    def mH(self) -> Self:  # noqa: N802
        """Conjugate transpose."""
        return self.conj().mT

    @property
    def H(self) -> Self:  # noqa: N802
        """Conjugate transpose."""
        return self.mH

    def transpose(self) -> Self:
        """Transpose."""
        return self.mT

    def adjoint(self) -> Self:
        """Conjugate transpose."""
        return self.mH

    def dot(self, x: Any) -> Any:
        """``A @ x``: of an array (n,) or (n, b) the image, of a separated matrix the product of terms."""
        return self @ x

    @overload
    def __matmul__(self, x: Terms) -> Self: ...
    @overload
    def __matmul__(self, x: Any) -> Any: ...
    def __matmul__(self, x: Any) -> Any:
        """The action on a vector (n,) or columns (n, b), never forming the matrix; of another separated matrix A B.

        By (A ⊗ B)(C ⊗ D) = AC ⊗ BD a product of s and t terms has at most s·t;
        `lsrdecomp.recompress` finds how few serve [1]_. Raises `ShapeError` where sizes, or the
        inner splits of two separated matrices, disagree.

        .. [1] G. Beylkin and M. J. Mohlenkamp, SIAM J. Sci. Comput. 26 (2005), sec. 2.
               doi:10.1137/040604959
        """
        if not isinstance(x, Terms):
            return self._image(x)
        inner = self.kronecker_shape.columns, x.kronecker_shape.rows
        if inner[0] != inner[1]:
            raise ShapeError(
                f"inner sizes differ: columns split {inner[0]}, rows split {inner[1]}; form one by to_matrix()"
            )
        return self._every_pair(x, lambda a, b: a @ b)

    def __rmatmul__(self, x: Any) -> Array:
        """``x @ A`` for a row vector (m,) or rows (b, m)."""
        x = self._operand(x)
        if x.ndim == 2:
            xp = namespace(x)
            return xp.matrix_transpose(self.mT._image(xp.matrix_transpose(x)))
        return self.mT._image(x)

    def matvec(self, x: Array) -> Array:
        """A x for x of shape (n,) or (n, 1)."""
        return self._image(x)

    def matmat(self, x: Array) -> Array:
        """A X for X of shape (n, b)."""
        return self._image(x)

    def rmatvec(self, y: Array) -> Array:
        """Aᴴ y for y of shape (m,) or (m, 1)."""
        return self.mH._image(y)

    def rmatmat(self, y: Array) -> Array:
        """Aᴴ Y for Y of shape (m, b)."""
        return self.mH._image(y)

    def to_numpy(self) -> Self:
        """The same terms as NumPy arrays on the host."""
        return self._of(to_numpy(self.weights), tuple(to_numpy(f) for f in self.factors))

    def to_linear_operator(self) -> Any:
        """A ``scipy.sparse.linalg.LinearOperator`` on NumPy arrays, products with blocks of columns included."""
        from scipy.sparse.linalg import LinearOperator

        matrix = self.to_numpy()
        flipped = matrix.mH
        return LinearOperator(
            shape=matrix.shape,
            dtype=matrix.dtype,
            matvec=matrix.matvec,
            rmatvec=flipped.matvec,
            matmat=matrix.matmat,
            rmatmat=flipped.matmat,
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """The matrix, formed, for ``numpy.asarray``; at most `FORMED_ENTRIES` entries.

        Raises `ShapeError` above that, with the bytes it would take and the ways around.
        """
        if copy is False:
            raise ValueError(
                "a separated matrix is formed anew: np.asarray(A, copy=False) cannot be met"
            )
        formed = to_numpy(self._formed("numpy.asarray"))
        return formed if dtype is None else formed.astype(dtype)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """``x @ A``, ``np.matmul(A, x)``, ``2 * A``, … here; any other function of NumPy on the formed matrix."""
        if ufunc in OPERATORS and method == "__call__" and not kwargs:
            left, right = inputs
            if isinstance(left, Terms):
                return getattr(left, f"__{OPERATORS[ufunc]}__")(right)
            return getattr(right, f"__r{OPERATORS[ufunc]}__")(left)
        formed = [np.asarray(x) if isinstance(x, Terms) else x for x in inputs]
        return getattr(ufunc, method)(*formed, **kwargs)

    def _formed(self, verb: str) -> Array:
        """The matrix, formed, unless it is larger than a caller may expect."""
        if self.size > FORMED_ENTRIES:
            rows, columns = self.shape
            width = 16 if is_complex(self.factors[0]) else 8
            raise ShapeError(
                f"{verb} would form {rows:,} × {columns:,} entries ({width * self.size / 2**30:,.3g} GiB in double "
                f"precision; without being asked at most {FORMED_ENTRIES:,} entries are formed). Products, A[rows], "
                "A.diagonal() and lsrdecomp.operators need no formed matrix; A.to_matrix() forms it whatever its size"
            )
        return self.to_matrix()

    def _image(self, x: Any) -> Array:
        x = self._operand(x)
        xp = namespace(x, *self.factors)
        if x.dtype != self.dtype:
            common = xp.result_type(x.dtype, self.dtype)
            x = xp.astype(x, common)
            if common != self.dtype:
                factors = tuple(xp.astype(f, common) for f in self.factors)
                return apply_sum_of_kroneckers(factors, xp.astype(self.weights, common), x)
        return apply_sum_of_kroneckers(self.factors, self._weights(), x)

    def _operand(self, x: Any) -> Array:
        """An array with a floating type in the library of the factors; lists and SciPy's sparse matrices too."""
        if hasattr(x, "toarray"):
            x = x.toarray()
        x = as_floating(x, "x")
        if array_api_compat.is_numpy_array(x) is not array_api_compat.is_numpy_array(
            self.factors[0]
        ):
            own, other = (type(array).__module__.split(".")[0] for array in (self.factors[0], x))
            raise TypeError(
                f"the factors are arrays of {own}, the operand is one of {other}; A.to_numpy() moves A"
            )
        return x
