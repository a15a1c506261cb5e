"""`SeparatedMatrix`, Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾: used as a matrix, never formed unasked."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, overload

import array_api_compat
import numpy as np

from lsrdecomp.arrays import (
    MAX_FORMED_ENTRIES,
    Array,
    as_double,
    as_floating,
    conjugate,
    device,
    is_complex,
    is_jax,
    is_traced_by_jax,
    like,
    namespace,
    norm,
    refuse_traced,
    to_numpy,
    with_common_dtype,
)
from lsrdecomp.errors import ArgumentError, PrecisionError, ShapeError, unknown
from lsrdecomp.kronecker.entries import diagonal_entries, get_entries
from lsrdecomp.kronecker.files import read_terms, write_terms
from lsrdecomp.kronecker.forming import warn_of_forming, warn_of_scipy
from lsrdecomp.kronecker.normalization import (
    check_weights,
    normalized_terms,
    triangular_core,
)
from lsrdecomp.kronecker.pytree import register_pytree
from lsrdecomp.kronecker.rearrange import (
    apply_sum_of_kroneckers,
    factor_columns,
    factor_shape,
    sum_of_kroneckers,
)
from lsrdecomp.precision import precision, round_to

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from lsrdecomp.kronecker.shape import KroneckerShape

COMPUTING_TYPES = ("float32", "float64", "complex64", "complex128")

OTHER_NAMES = {
    "A": "toarray()",
    "B": "factors[0]",
    "C": "factors[1]",
    "U": "factors[0]",
    "V": "factors[1]",
    "full": "to_matrix()",
    "gamma": "condition",
    "rank": "separation_rank",
    "s": "weights",
    "singular_values": "weights",
}
"""Names of other libraries for attributes of ours."""

RECORD_NAMES = (
    "bytes",
    "error",
    "error_kind",
    "gap_kind",
    "note",
    "optimality_gap",
    "relative_error",
    "remark",
    "status",
    "storage",
    "stored",
    "stored_bytes",
    "summary",
    "sweeps",
    "target_norm",
)
"""What the record of `decompose` has beside a matrix, which within ``jax.jit`` there is not."""

UFUNC_OPERATORS = {
    np.matmul: "matmul",
    np.add: "add",
    np.subtract: "sub",
    np.multiply: "mul",
    np.true_divide: "truediv",
}
"""NumPy's functions that the operators of `SeparatedMatrix` stand for."""


@dataclass(frozen=True, eq=False, repr=False)
class SeparatedMatrix:
    """A matrix as a sum of s Kronecker products of d factors, on arrays of any library.

    Parameters
    ----------
    weights : Array, shape (s,)
        λ, not negative, descending.
    factors : tuple of Array, shapes (s, m_i, n_i)
        Each factor of each term has Frobenius norm one.

    Use `from_factors` to build one from factors of any norm. With no terms (s = 0) it is the zero
    matrix. It is never formed unasked.

    **Contents.** A chapter each, in this order below:

    - *Terms*: ``from_factors weights factors terms separation_rank order kronecker_shape shape
      dtype parameters nbytes norm condition to_matrix max_formed_entries``
    - *Form*: ``canonical truncate folded round_to astype in_double``
    - *Algebra*: ``+ - * /`` with numbers, arrays and each other, ``kron``, ``inner``
    - *Action*: ``@ dot matvec matmat rmatvec rmatmat``, ``A @ B``, ``T mT H mH conj transpose
      adjoint``, ``ndim size to_numpy toarray todense to_linear_operator``; NumPy, SciPy and torch
      take it as it is; ``==`` compares the terms
    - *Entries*: ``A[i, j]``, rows and columns, ``diagonal``, ``trace``
    - *Files*: ``save``, ``load``

    Every operation returns a new matrix. With numbers and separated matrices the result of
    ``+ - * /`` is separated; with an array it is an array, and the matrix is formed, as it is for
    ``numpy.asarray`` and NumPy's functions: up to `max_formed_entries`.

    Solving, determinants, eigenvalues, functions and preconditioners are in `lsrdecomp.operators`.

    Examples
    --------
    >>> import numpy as np
    >>> import lsrdecomp as lsr
    >>> A = lsr.SeparatedMatrix.from_factors([np.eye(3)[None], np.ones((1, 2, 2))])
    >>> A
    SeparatedMatrix(6×6 as 1 × [3×3 ⊗ 2×2], 13 parameters, γ = 1)
    >>> A @ np.ones(6)
    array([2., 2., 2., 2., 2., 2.])
    """

    weights: Array
    factors: tuple[Array, ...]

    ndim: ClassVar[int] = 2
    max_formed_entries: ClassVar[int] = MAX_FORMED_ENTRIES
    """Most entries that are formed without being asked by name (`to_matrix`): 1 GiB in double
    precision."""

    # --- Terms ---------------------------------------------------------------------------------

    def __post_init__(self) -> None:
        try:
            shape = factor_shape(self.factors)
            check_weights(shape, self.factors, self.weights)
        except AttributeError as error:
            raise ArgumentError(
                "a SeparatedMatrix holds arrays: weights (s,) and factors (s, m_i, n_i) of norm "
                "one; SeparatedMatrix.from_factors(factors, weights) takes lists, and any norm"
            ) from error
        object.__setattr__(self, "kronecker_shape", shape)
        if is_jax(self.weights):
            register_pytree(SeparatedMatrix, SeparatedMatrix)

    @staticmethod
    def from_factors(factors: Sequence[Array], weights: Array | None = None) -> SeparatedMatrix:
        """Build the normal form of a sum of terms.

        Factors become unit factors, norms and signs are gathered in λ, terms come in descending
        order, and zero terms are dropped.

        Parameters
        ----------
        factors : sequence of Array, shapes (s, m_i, n_i)
        weights : Array, shape (s,), optional
            Multiplies the terms; may have any sign.

        Raises
        ------
        PrecisionError
            If a factor or weight is not finite.
        """
        return SeparatedMatrix(*normalized_terms(factors, weights))

    @cached_property
    def kronecker_shape(self) -> KroneckerShape:
        """Sizes of the factors of a term."""
        return factor_shape(self.factors)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the matrix."""
        return self.kronecker_shape.matrix_shape

    @property
    def order(self) -> int:
        """d, the number of Kronecker factors of a term."""
        return len(self.factors)

    @property
    def separation_rank(self) -> int:
        """s, the number of terms."""
        return int(self.factors[0].shape[0])

    @property
    def dtype(self) -> Any:
        """Element type of the factors, and of the matrix."""
        return self.factors[0].dtype

    @property
    def size(self) -> int:
        """Entries of the matrix, were it formed."""
        return math.prod(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def parameters(self) -> int:
        """Numbers in the factors; the weights are folded in when stored."""
        return self.kronecker_shape.parameters(self.separation_rank)

    @cached_property
    def norm(self) -> float:
        """‖M̂‖_F in double precision.

        From QR factors, so that cancellation between terms costs γ·2⁻⁵³ and not γ²·2⁻⁵³.
        """
        refuse_traced(self.weights, "the norm")
        scale = norm(self.weights)
        if scale == 0.0:
            return 0.0
        core, weights = with_common_dtype(
            triangular_core(self.factors), as_double(self.weights) / scale
        )
        return scale * norm(core @ weights)

    @property
    def condition(self) -> float:
        """γ = (Σλ²)^½ / ‖M̂‖_F: how much larger the terms are than their sum [1]_.

        One for orthogonal terms.

        .. [1] G. Beylkin and M. J. Mohlenkamp, SIAM J. Sci. Comput. 26 (2005), eq. (3.11).
               doi:10.1137/040604959
        """
        if self.separation_rank == 0:
            return 1.0
        return norm(self.weights) / self.norm if self.norm > 0.0 else math.inf

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and factors as they are in memory."""
        return sum(int(array.nbytes) for array in (self.weights, *self.factors))

    def terms(self) -> list[tuple[Array, ...]]:
        """Return the factors of each term, d matrices, λ_k in the first.

        >>> import numpy as np
        >>> import lsrdecomp as lsr
        >>> matrix = np.arange(36.0).reshape(6, 6)
        >>> terms = lsr.decompose(matrix, "2x2, 3x3", rank=4).terms()
        >>> np.allclose(sum(np.kron(A, B) for A, B in terms), matrix)
        True
        """
        first, *others = self.factors
        scaled = first * self._coefficients[:, None, None]
        stacks = (scaled, *others)
        return [tuple(stack[k] for stack in stacks) for k in range(self.separation_rank)]

    def to_matrix(self) -> Array:
        """Return the matrix, formed; shape (rows, columns)."""
        return sum_of_kroneckers(self.factors, self._coefficients)

    @property
    def _coefficients(self) -> Array:
        """λ in the element type of the factors, which may be complex."""
        if not is_complex(self.factors[0]):
            return self.weights
        return namespace(*self.factors).astype(self.weights, self.dtype)

    def __eq__(self, other: object) -> bool:
        """Whether the other is a sum of the same terms, bit for bit, in the same order."""
        if not isinstance(other, SeparatedMatrix):
            return NotImplemented
        if self.kronecker_shape != other.kronecker_shape:
            return False
        pairs = zip((self.weights, *self.factors), (other.weights, *other.factors), strict=True)
        return all(np.array_equal(to_numpy(a), to_numpy(b)) for a, b in pairs)

    def __hash__(self) -> int:
        return hash((self.kronecker_shape, self.separation_rank))

    def __getattr__(self, name: str) -> Any:
        """Tell where an attribute of another library, or of a record, is found here."""
        if name == "approximation":
            # Within `jax.jit` decompose answers with this class, and code reads on as outside.
            return self
        if name in RECORD_NAMES:
            raise AttributeError(
                f"a SeparatedMatrix has no {name!r}: it is of the record that decompose returns, "
                "and within jax.jit, which knows no numbers, decompose returns the matrix alone"
            )
        if name in OTHER_NAMES:
            raise AttributeError(f"a separated matrix has no {name!r}: see {OTHER_NAMES[name]}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __repr__(self) -> str:
        rows, columns = self.shape
        terms = f"{self.separation_rank} × [{self.kronecker_shape}]"
        condition = ""
        if not is_traced_by_jax(self.weights):
            condition = f", γ = {self.condition:.3g}"
        return (
            f"SeparatedMatrix({rows}×{columns} as {terms}, "
            f"{self.parameters:,} parameters{condition})"
        )

    # --- Form ----------------------------------------------------------------------------------

    def truncate(self, rank: int) -> SeparatedMatrix:
        """Return the first ``rank`` terms: the best where terms are orthogonal (`canonical`)."""
        if rank < 0:
            raise ShapeError(f"a separation rank cannot be negative, got {rank}")
        terms = min(rank, self.separation_rank)
        return SeparatedMatrix(self.weights[:terms], tuple(f[:terms, :, :] for f in self.factors))

    def canonical(self) -> SeparatedMatrix:
        """Return the same matrix with orthogonal terms, γ = 1, for two factors.

        The SVD of the rearrangement from QR factors; cost O((p + q)·s²) for factors of p and q
        entries. Raises `ShapeError` for another number of factors, where no such form exists.
        """
        if self.order != 2:
            raise ShapeError(
                f"orthogonal terms exist for two factors; this matrix has {self.order}"
            )
        xp = namespace(*self.factors)
        left_columns, right_columns = (as_double(c) for c in factor_columns(self.factors))
        left, left_triangle = xp.linalg.qr(left_columns)
        right, right_triangle = xp.linalg.qr(right_columns)
        core = (left_triangle * as_double(self.weights)) @ xp.matrix_transpose(right_triangle)
        u, sigma, vh = xp.linalg.svd(core, full_matrices=False)

        terms = sigma.shape[0]
        (m, n), (p, q) = self.kronecker_shape.factors
        first = xp.reshape(xp.matrix_transpose(left @ u), (terms, m, n))
        second = xp.reshape(vh @ xp.matrix_transpose(right), (terms, p, q))
        factors = xp.astype(first, self.dtype), xp.astype(second, self.dtype)
        return self.from_factors(factors, xp.astype(sigma, self.weights.dtype))

    def folded(self) -> tuple[Array, ...]:
        """Return factors with λ_k^{1/d} folded into each, as they are stored and trained."""
        root = self._coefficients ** (1.0 / self.order)
        return tuple(f * root[:, None, None] for f in self.factors)

    def round_to(self, storage: str, *, scaled: bool = False) -> SeparatedMatrix:
        """Return the matrix that a reader of factors stored as ``storage`` gets.

        The folded factors are rounded, or unit factors beside λ where ``scaled``.

        Parameters
        ----------
        storage : str
            A floating type.
        scaled : bool
            Round unit factors instead, each multiplied by a power of two that brings its largest
            entry to the upper end of the range of ``storage``; the powers and λ are kept apart.
            Nothing overflows, and nothing small is lost.

        Raises
        ------
        PrecisionError
            If a folded factor overflows, or the type is not for storage.
        """
        refuse_traced(self.weights, "rounding")
        if not scaled or self.separation_rank == 0:
            return self.from_factors([round_to(f, storage) for f in self.folded()])
        weights = self.weights
        rounded = []
        for factor in self.factors:
            power = like(_power_to_upper_end(factor, storage), self.weights)
            rounded.append(round_to(factor * power[:, None, None], storage))
            weights = weights / power
        return self.from_factors(rounded, weights)

    def astype(self, dtype: Any) -> SeparatedMatrix:
        """Return the same terms in another element type for computing.

        ``float32``, ``float64``, ``complex64`` or ``complex128``: the name, or a type of any
        library such as ``numpy.float32``. Raises `PrecisionError` for another.
        """
        xp = namespace(*self.factors)
        full_name = str(getattr(dtype, "__name__", dtype))
        name = full_name.rpartition(".")[2]  # "torch.float32"
        with suppress(TypeError):
            name = np.dtype(name).name  # NumPy's other words, such as "f4"
        if name not in COMPUTING_TYPES:
            raise PrecisionError(
                f"astype: a type for computing is {unknown(name, COMPUTING_TYPES)}; "
                "round_to rounds to types for storage"
            )
        dtype = getattr(xp, name)
        real_name = {"complex64": "float32", "complex128": "float64"}.get(name, name)
        weights = xp.astype(self.weights, getattr(xp, real_name))
        return SeparatedMatrix(weights, tuple(xp.astype(f, dtype) for f in self.factors))

    def in_double(self) -> SeparatedMatrix:
        """Return the same terms in float64 or complex128."""
        factors = with_common_dtype(*(as_double(f) for f in self.factors))
        return SeparatedMatrix(as_double(self.weights), tuple(factors))

    # --- Algebra -------------------------------------------------------------------------------

    @overload
    def __add__(self, other: SeparatedMatrix | complex) -> SeparatedMatrix: ...
    @overload
    def __add__(self, other: Any) -> Any: ...
    def __add__(self, other: Any) -> Any:
        """Add entry by entry: the terms of both; a number adds one term of ones."""
        if isinstance(other, SeparatedMatrix):
            self._require_same_shape(other, "add")
            xp = namespace(*self.factors, *other.factors)
            pairs = zip(self.factors, other.factors, strict=True)
            factors = [xp.concat(with_common_dtype(f, g), axis=0) for f, g in pairs]
            weights = xp.concat(with_common_dtype(self.weights, other.weights))
            return self.from_factors(factors, weights)
        if _is_number(other):
            return self if _is_zero(other) else self + self._ones() * other
        return self._form("adding an array") + self._as_operand(other)

    def __radd__(self, other: Any) -> Any:
        return self + other

    def __neg__(self) -> SeparatedMatrix:
        return SeparatedMatrix(self.weights, (-self.factors[0], *self.factors[1:]))

    def __pos__(self) -> SeparatedMatrix:
        return self

    @overload
    def __sub__(self, other: SeparatedMatrix | complex) -> SeparatedMatrix: ...
    @overload
    def __sub__(self, other: Any) -> Any: ...
    def __sub__(self, other: Any) -> Any:
        if _is_sparse(other):
            other = other.toarray()
        return self + (-other)

    def __rsub__(self, other: Any) -> Any:
        return (-self) + other

    @overload
    def __mul__(self, other: SeparatedMatrix | complex) -> SeparatedMatrix: ...
    @overload
    def __mul__(self, other: Any) -> Any: ...
    def __mul__(self, other: Any) -> Any:
        """Multiply entry by entry: by (A ⊗ B) ∘ (C ⊗ D) = (A ∘ C) ⊗ (B ∘ D) at most s·t terms."""
        if isinstance(other, SeparatedMatrix):
            self._require_same_shape(other, "multiply")
            return self._combine_terms(other, lambda a, b: a * b)
        if _is_number(other):
            return self.from_factors((self.factors[0] * other, *self.factors[1:]), self.weights)
        return self._form("multiplying by an array") * self._as_operand(other)

    @overload
    def __rmul__(self, other: complex) -> SeparatedMatrix: ...
    @overload
    def __rmul__(self, other: Any) -> Any: ...
    def __rmul__(self, other: Any) -> Any:
        return self * other

    @overload
    def __truediv__(self, other: SeparatedMatrix | complex) -> SeparatedMatrix: ...
    @overload
    def __truediv__(self, other: Any) -> Any: ...
    def __truediv__(self, other: Any) -> Any:
        """Divide entry by entry.

        By a number, an array, or a separated matrix of one term without zero entries.
        """
        if isinstance(other, SeparatedMatrix):
            self._require_same_shape(other, "divide")
            if other.separation_rank != 1:
                raise ShapeError(
                    "an entrywise quotient is a sum of Kronecker products for a divisor of one "
                    f"term; this one has {other.separation_rank}. Divide formed matrices: "
                    "A / B.to_matrix()"
                )
            return self * other._reciprocal()
        if _is_number(other):
            if _is_zero(other):
                raise ZeroDivisionError("a separated matrix divided by zero")
            return self * (1.0 / other)
        return self._form("dividing by an array") / self._as_operand(other)

    def __rtruediv__(self, other: Any) -> Any:
        """Return ``c / A`` entry by entry; separated for a number over one term, else an array."""
        if not _is_number(other):
            return self._as_operand(other) / self._form("dividing by a separated matrix")
        if self.separation_rank == 1:
            return self._reciprocal() * other
        return other / self._form("dividing by a separated matrix")

    def _reciprocal(self) -> SeparatedMatrix:
        """Return the entrywise reciprocal of a matrix of one term."""
        for i, factor in enumerate(self.factors, 1):
            if bool(namespace(factor).any(factor == 0)):
                raise PrecisionError(
                    f"factor {i} of the divisor has zero entries: the quotient is not finite"
                )
        return self.from_factors([1.0 / f for f in self.factors], 1.0 / self.weights)

    def kron(self, other: SeparatedMatrix) -> SeparatedMatrix:
        """Return A ⊗ B: the factors of both one after the other, s·t terms."""
        s, t = self.separation_rank, other.separation_rank
        left = [_repeat_terms(f[:, None, :, :], s, t) for f in self.factors]
        right = [_repeat_terms(g[None, :, :, :], s, t) for g in other.factors]
        return self.from_factors((*left, *right), self._weight_pairs(other))

    def inner(self, other: SeparatedMatrix) -> Any:
        """Return ⟨A, B⟩ = tr(Aᴴ B), a number in double precision.

        Σ_k Σ_l λ_k κ_l Π_i ⟨A_k⁽ⁱ⁾, B_l⁽ⁱ⁾⟩, at a cost of s·t·Σ m_i n_i. Rounding errors are of the
        size γ_A γ_B 2⁻⁵³‖A‖‖B‖; for a norm use ``norm``, which loses only γ.
        """
        self._require_same_shape(other, "multiply")
        xp = namespace(*self.factors, *other.factors)
        gram: Array = 1.0
        for f, g in zip(self.factors, other.factors, strict=True):
            a, b = with_common_dtype(as_double(f), as_double(g))
            a_rows = xp.reshape(a, (a.shape[0], a.shape[1] * a.shape[2]))
            b_rows = xp.reshape(b, (b.shape[0], b.shape[1] * b.shape[2]))
            gram = gram * (conjugate(a_rows) @ xp.matrix_transpose(b_rows))
        weights = as_double(self.weights)[:, None] * as_double(other.weights)[None, :]
        return xp.sum(gram * weights)

    def _combine_terms(
        self, other: SeparatedMatrix, operation: Callable[[Array, Array], Array]
    ) -> SeparatedMatrix:
        """Return Σ_k Σ_l of an operation on the factors of term k of this and l of the other."""
        xp = namespace(*self.factors, *other.factors)
        terms = self.separation_rank * other.separation_rank
        factors = []
        for f, g in zip(self.factors, other.factors, strict=True):
            a, b = with_common_dtype(f, g)
            combined = operation(a[:, None, :, :], b[None, :, :, :])
            factors.append(xp.reshape(combined, (terms, *combined.shape[2:])))
        return self.from_factors(factors, self._weight_pairs(other))

    def _weight_pairs(self, other: SeparatedMatrix) -> Array:
        """Return λ_k κ_l of every pair of terms, shape (s·t,)."""
        xp = namespace(*self.factors, *other.factors)
        products = self.weights[:, None] * other.weights[None, :]
        return xp.reshape(products, (self.separation_rank * other.separation_rank,))

    def _require_same_shape(self, other: SeparatedMatrix, verb: str) -> None:
        if self.kronecker_shape != other.kronecker_shape:
            raise ShapeError(
                f"cannot {verb} {self.kronecker_shape} and {other.kronecker_shape}: "
                "the factor sizes differ"
            )

    def _ones(self) -> SeparatedMatrix:
        xp = namespace(*self.factors)
        factors = []
        for factor in self.factors:
            size = (1, *factor.shape[1:])
            factors.append(xp.ones(size, dtype=factor.dtype, device=device(factor)))
        return self.from_factors(factors)

    # --- Action --------------------------------------------------------------------------------

    @property
    def mT(self) -> SeparatedMatrix:  # noqa: N802 - the array API's name
        """Transpose, term by term."""
        xp = namespace(*self.factors)
        return SeparatedMatrix(self.weights, tuple(xp.matrix_transpose(f) for f in self.factors))

    @property
    def T(self) -> SeparatedMatrix:  # noqa: N802
        """Transpose."""
        return self.mT

    def conj(self) -> SeparatedMatrix:
        """Return the complex conjugate, entry by entry."""
        return SeparatedMatrix(self.weights, tuple(conjugate(f) for f in self.factors))

    @property
    def mH(self) -> SeparatedMatrix:  # noqa: N802
        """Conjugate transpose."""
        return self.conj().mT

    @property
    def H(self) -> SeparatedMatrix:  # noqa: N802
        """Conjugate transpose."""
        return self.mH

    def transpose(self) -> SeparatedMatrix:
        """Return the transpose."""
        return self.mT

    def adjoint(self) -> SeparatedMatrix:
        """Return the conjugate transpose."""
        return self.mH

    def dot(self, x: Any) -> Any:
        """Return ``A @ x`` for an array (n,) or (n, b), or another separated matrix."""
        return self @ x

    @overload
    def __matmul__(self, x: SeparatedMatrix) -> SeparatedMatrix: ...
    @overload
    def __matmul__(self, x: NDArray[Any]) -> NDArray[Any]: ...
    @overload
    def __matmul__(self, x: Any) -> Any: ...
    def __matmul__(self, x: Any) -> Any:
        """Apply to a vector (n,) or columns (n, b); multiply by another separated matrix.

        The matrix is never formed. By (A ⊗ B)(C ⊗ D) = AC ⊗ BD a product of s and t terms has at
        most s·t; `lsrdecomp.recompress` finds how few serve [1]_. Raises `ShapeError` where sizes,
        or the inner splits of two separated matrices, disagree.

        .. [1] G. Beylkin and M. J. Mohlenkamp, SIAM J. Sci. Comput. 26 (2005), sec. 2.
               doi:10.1137/040604959
        """
        if not isinstance(x, SeparatedMatrix):
            return self.matmat(x)
        columns = self.kronecker_shape.columns
        rows = x.kronecker_shape.rows
        if columns != rows:
            raise ShapeError(
                f"inner sizes differ: columns split {columns}, rows split {rows}; "
                "form one by to_matrix()"
            )
        return self._combine_terms(x, lambda a, b: a @ b)

    def __rmatmul__(self, x: Any) -> Array:
        """Return ``x @ A`` for a row vector (m,) or rows (b, m)."""
        x = self._as_operand(x)
        if x.ndim != 2:
            return self.mT.matmat(x)
        xp = namespace(x)
        return xp.matrix_transpose(self.mT.matmat(xp.matrix_transpose(x)))

    def matvec(self, x: Array) -> Array:
        """Return A x for x of shape (n,) or (n, 1)."""
        return self.matmat(x)

    def matmat(self, x: Array) -> Array:
        """Return A X for X of shape (n, b)."""
        return apply_sum_of_kroneckers(self.factors, self._coefficients, self._as_operand(x))

    def rmatvec(self, y: Array) -> Array:
        """Return Aᴴ y for y of shape (m,) or (m, 1)."""
        return self.mH.matmat(y)

    def rmatmat(self, y: Array) -> Array:
        """Return Aᴴ Y for Y of shape (m, b)."""
        return self.mH.matmat(y)

    def to_numpy(self) -> SeparatedMatrix:
        """Return the same terms as NumPy arrays on the host."""
        return SeparatedMatrix(to_numpy(self.weights), tuple(to_numpy(f) for f in self.factors))

    def to_linear_operator(self) -> Any:
        """Return a ``scipy.sparse.linalg.LinearOperator`` on NumPy arrays.

        `lsrdecomp.operators.to_gpytorch` makes one of GPyTorch's.
        """
        from scipy.sparse.linalg import LinearOperator

        matrix = self.to_numpy()
        adjoint = matrix.mH
        return LinearOperator(
            shape=matrix.shape,
            dtype=matrix.dtype,
            matvec=matrix.matvec,
            rmatvec=adjoint.matvec,
            matmat=matrix.matmat,
            rmatmat=adjoint.matmat,
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Form the matrix for ``numpy.asarray``; at most `max_formed_entries` entries.

        SciPy's linear algebra warns of it. Raises `ShapeError` above that, with the bytes it would
        take and the ways around.
        """
        if copy is False:
            raise ValueError(
                "a separated matrix is formed anew: np.asarray(A, copy=False) cannot be met"
            )
        warn_of_scipy(self.shape)
        formed = to_numpy(self._form("numpy.asarray"))
        return formed if dtype is None else formed.astype(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        """Form the matrix for ``torch.as_tensor``, with the limit of `__array__`."""
        return self._form("DLPack").__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, int]:
        """Return the device on which the formed matrix will lie."""
        device_of_factors: tuple[Any, int] = self.factors[0].__dlpack_device__()
        return device_of_factors

    def toarray(self) -> np.ndarray:
        """Return the formed matrix as a NumPy array, whatever its size; as SciPy's matrices do."""
        return to_numpy(self.to_matrix())

    def todense(self) -> np.ndarray:
        """Return the formed matrix as a NumPy array: `toarray`."""
        return self.toarray()

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Answer ``x @ A``, ``np.matmul(A, x)``, ``2 * A``, … by the operators of this class.

        Any other function of NumPy takes the formed matrix.
        """
        if ufunc in UFUNC_OPERATORS and method == "__call__" and not kwargs:
            operator = UFUNC_OPERATORS[ufunc]
            left, right = inputs
            if isinstance(left, SeparatedMatrix):
                return getattr(left, f"__{operator}__")(right)
            return getattr(right, f"__r{operator}__")(left)
        formed = [np.asarray(x) if isinstance(x, SeparatedMatrix) else x for x in inputs]
        return getattr(ufunc, method)(*formed, **kwargs)

    def __array_function__(
        self, function: Any, types: Any, arguments: Any, options: dict[str, Any]
    ) -> Any:
        """Let NumPy's functions take the formed matrix; those of linear algebra warn of it."""
        name = function.__name__
        if function.__module__ == "numpy.linalg":
            warn_of_forming(f"numpy.linalg.{name}", self.shape, stacklevel=2)
        array = np.empty(0)
        return array.__array_function__(function, (np.ndarray,), arguments, options)

    def _form(self, verb: str) -> Array:
        """Return the matrix, formed, unless it is larger than a caller may expect."""
        if self.size > self.max_formed_entries:
            rows, columns = self.shape
            entry_bytes = 16 if is_complex(self.factors[0]) else 8
            gibibytes = entry_bytes * self.size / 2**30
            raise ShapeError(
                f"{verb} would form {rows:,} × {columns:,} entries ({gibibytes:,.3g} GiB in double "
                f"precision; without being asked at most {self.max_formed_entries:,} entries are "
                "formed). Products, A[rows], A.diagonal() and lsrdecomp.operators need no formed "
                "matrix; A.to_matrix() forms it whatever its size"
            )
        return self.to_matrix()

    def _as_operand(self, x: Any) -> Array:
        """Return an operand as an array of floats, from lists and SciPy's sparse matrices too.

        Raises `TypeError` for an array of another library than that of the factors.
        """
        if _is_sparse(x):
            x = x.toarray()
        x = as_floating(x, "x")
        factor = self.factors[0]
        if array_api_compat.is_numpy_array(x) is not array_api_compat.is_numpy_array(factor):
            own_library, other_library = (type(a).__module__.split(".")[0] for a in (factor, x))
            raise TypeError(
                f"the factors are arrays of {own_library}, the operand is one of {other_library}; "
                "A.to_numpy() moves A"
            )
        return x

    # --- Entries -------------------------------------------------------------------------------

    def __getitem__(self, key: Any) -> Array:
        """Return rows, columns, blocks and entries as for a NumPy array, as an array.

        ``A[i]``, ``A[:, j]``, ``A[2:5, ::3]``, ``A[rows]``, ``A[i, j]``; two lists name entries one
        by one. A row costs s·n, a block (rows, columns) s·d operations an entry.

        Raises
        ------
        IndexError
            For an index outside the matrix, or more than two.
        """
        return get_entries(self.kronecker_shape, self.factors, self._coefficients, key)

    def diagonal(self) -> Array:
        """Return A[i, i], shape (min(m, n),); for square factors Σ_k λ_k ⊗_i diag M_k⁽ⁱ⁾."""
        return diagonal_entries(self.kronecker_shape, self.factors, self._coefficients)

    def trace(self) -> Any:
        """Return tr A = Σ_k λ_k Π_i tr M_k⁽ⁱ⁾ for square factors, a number in double precision.

        Raises `ShapeError` unless the matrix is square.
        """
        rows, columns = self.shape
        if rows != columns:
            raise ShapeError(f"a matrix of {rows} × {columns} has no trace")
        xp = namespace(*self.factors)
        if any(m != n for m, n in self.kronecker_shape.factors):
            return xp.sum(as_double(self.diagonal()))
        traces = as_double(self._coefficients)
        for factor in self.factors:
            traces = traces * xp.linalg.trace(as_double(factor))
        return xp.sum(traces)

    # --- Files ---------------------------------------------------------------------------------

    def save(
        self,
        path: str | Path,
        *,
        provenance: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> Path:
        """Write weights and factors as they are to one safetensors file, whole or not at all.

        Parameters
        ----------
        path : path
        provenance : mapping, optional
            Where the matrix came from, anything JSON can hold; `read_provenance` gives it back.
        overwrite : bool
            Replace a file of this kind that is there.

        Raises
        ------
        CheckpointError
            If there is something at ``path`` (but for a regular file with ``overwrite``), or its
            directory is missing.
        """
        path = Path(path)
        write_terms(path, self.weights, self.factors, provenance=provenance, overwrite=overwrite)
        return path

    @staticmethod
    def load(path: str | Path) -> SeparatedMatrix:
        """Read a file of `save`; NumPy arrays, bit for bit.

        Raises
        ------
        CheckpointError
            If the file is missing, damaged, or no separated matrix.
        """
        return SeparatedMatrix(*read_terms(Path(path)))


def _power_to_upper_end(factor: Array, storage: str) -> np.ndarray:
    """Return the powers of two that bring the largest entries to the upper end of a format."""
    xp = namespace(factor)
    peak = to_numpy(xp.max(xp.abs(factor), axis=(1, 2))).astype(np.float64)
    largest = precision(storage).largest
    if largest >= 1e30:  # the range of float32: unit factors lose nothing in it
        return np.ones_like(peak)
    power: np.ndarray = np.exp2(np.floor(np.log2(largest / peak)))
    return power


def _repeat_terms(factor: Array, s: int, t: int) -> Array:
    """Return the matrices of a stack that broadcasts to (s, t, …) as a stack of s·t."""
    xp = namespace(factor)
    sizes = factor.shape[2:]
    return xp.reshape(xp.broadcast_to(factor, (s, t, *sizes)), (s * t, *sizes))


def _is_sparse(value: Any) -> bool:
    """Return whether a value is a sparse matrix of SciPy, or like one."""
    return hasattr(value, "toarray") and not isinstance(value, SeparatedMatrix)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number, or an array without dimensions."""
    return isinstance(value, int | float | complex | np.number) or getattr(value, "ndim", None) == 0


def _is_zero(value: Any) -> bool:
    return bool(value == 0)
