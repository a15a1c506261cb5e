"""The smallest stored form of a separated matrix, with its error certified."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from lsrdecomp.arrays import as_double, dtype_name, is_differentiated, like, to_numpy
from lsrdecomp.errors import BudgetError, LsrError
from lsrdecomp.formats.allocation import FormatChoice, cheapest_formats
from lsrdecomp.formats.number_formats import FORMATS, StoredFactor, round_factor, storage_format
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.precision import PRECISIONS, rounded_up, tolerance, unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.kronecker.shape import KroneckerShape
    from lsrdecomp.targets.target import Target

SMALL_FORMATS = ("float32", "float16", "float8_e4m3fn", "int8", "int4")
"""Formats that are chosen from unless told: bfloat16 and e5m2 spend bits on range that unit factors
do not need."""

WeightType: TypeAlias = "type[np.float32 | np.float64]"


@dataclass(frozen=True, eq=False)
class StoredTerm:
    """One term as written: a weight, which absorbs all scales, and the factors' codes.

    The weight has four bytes, or eight where its rounding would take too much of the budget.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import ErrorBudget, decompose
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> stored = decompose(hilbert, "4x4, 4x4", budget=ErrorBudget(rtol=1e-2)).stored
    >>> first, last = stored.terms[0], stored.terms[-1]  # a small term bears coarse rounding
    >>> first.bytes > last.bytes
    True
    """

    weight: np.float32 | np.float64
    factors: tuple[StoredFactor, ...]

    @property
    def bytes(self) -> int:
        """Bytes of the weight, of one byte a factor to name its format, and of the codes."""
        codes = sum(factor.bytes for factor in self.factors)
        return self.weight.nbytes + len(self.factors) + codes


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A separated matrix as stored, with the error it is certified for.

    The matrix is 2^exponent Σ_k w_k F_k⁽¹⁾ ⊗ … ⊗ F_k⁽ᵈ⁾ with weights w in float32 or float64 and
    the factors' codes F.

    Attributes
    ----------
    shape : KroneckerShape
    exponent : int
    terms : tuple of StoredTerm
    certified_error : float
        Upper bound on ‖M − M̃‖_F, absolute: a formed residual plus its own rounding.
    norm : float
        ‖M‖_F.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import ErrorBudget, decompose
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> stored = decompose(hilbert, "4x4, 4x4", budget=ErrorBudget(rtol=1e-2)).stored
    >>> stored.relative_error <= 1e-2, stored.bytes < 0.1 * hilbert.nbytes
    (True, True)
    """

    shape: KroneckerShape
    exponent: int
    terms: tuple[StoredTerm, ...]
    certified_error: float
    norm: float

    @property
    def bytes(self) -> int:
        """Bytes of all that is written: terms, and eight for exponent and number of terms."""
        return 8 + sum(term.bytes for term in self.terms)

    @property
    def relative_error(self) -> float:
        """The certified error by the norm of the matrix."""
        return self.certified_error / self.norm if self.norm > 0.0 else self.certified_error

    @property
    def separation_rank(self) -> int:
        """Number of terms that were kept."""
        return len(self.terms)

    @property
    def formats(self) -> tuple[tuple[str, ...], ...]:
        """Format names, term by term."""
        return tuple(tuple(f.format for f in term.factors) for term in self.terms)

    @cached_property
    def approximation(self) -> SeparatedMatrix:
        """The matrix that a reader gets: the stored numbers in float64 or complex128."""
        return _dequantized(self.shape, self.exponent, self.terms)

    def __repr__(self) -> str:
        formats = sorted({name for term in self.formats for name in term})
        return (
            f"StoredMatrix({self.separation_rank} × [{self.shape}], {self.bytes:,} bytes in "
            f"{', '.join(formats)}, relative error ≤ {self.relative_error:.3g})"
        )


def smallest(
    target: Target,
    approximation: SeparatedMatrix,
    *,
    atol: float,
    formats: Sequence[str] | None = None,
) -> StoredMatrix:
    """Return the fewest bytes that keep the *stored* error at most ``atol``.

    For each term: drop it, or choose a format for each factor. Rounding errors ρ are measured,
    factor by factor; the error is predicted by Σ_dropped λ² + Σ_kept λ²(ρ_1² + … + ρ_d²), exact for
    orthogonal terms; weights are refitted to the rounded factors. The certificate is the residual
    of the rounded matrix, formed, so terms that cancel cost bytes but never the certificate. See
    docs/reference/error-budget.md.

    Parameters
    ----------
    target : Target
        M.
    approximation : SeparatedMatrix
        More accurate than ``atol``: its terms are candidates, in their order, orthogonal
        (`canonical`) if d = 2.
    atol : float
        Allowed ‖M − M̃‖_F.
    formats : sequence of str, optional
        Names from `lsrdecomp.formats.number_formats.FORMATS`. Absent, `SMALL_FORMATS`, and float64
        beside them where even float32 is too coarse.

    Returns
    -------
    StoredMatrix

    Raises
    ------
    BudgetError
        If ``atol`` cannot be met, naming the part, truncation or rounding, that exceeds it and what
        would do.

    Examples
    --------
    >>> import numpy as np
    >>> from lsrdecomp import decompose
    >>> i = np.arange(16.0)
    >>> hilbert = 1.0 / (1.0 + i[:, None] + i[None, :])
    >>> from lsrdecomp.targets import as_target
    >>> exact = decompose(hilbert, "4x4, 4x4", rtol=1e-9).approximation
    >>> stored = smallest(as_target(hilbert), exact, atol=1e-2)
    >>> stored.certified_error <= 1e-2, stored.separation_rank, stored.bytes < 0.1 * hilbert.nbytes
    (True, 3, True)
    """
    if not (math.isfinite(atol) and atol >= 0.0):
        raise BudgetError(f"an allowed error must be finite and not negative, got {atol}")
    truncation = target.residual_norm(approximation)
    refusal = ""
    for names in _format_sets(formats):
        rounding = _Rounding.measure(approximation, names)
        for weight_type in rounding.weight_types(atol):
            search = _RoundingSearch(target, approximation, rounding, weight_type)
            stored, closest = search.run(atol, truncation)
            if stored is not None:
                return stored
        if truncation > atol:
            raise BudgetError(_truncation_refusal(atol, truncation, closest, target.norm))
        refusal = rounding.refusal(atol, truncation, closest, target.norm)
    raise BudgetError(refusal)


def _format_sets(formats: Sequence[str] | None) -> list[tuple[str, ...]]:
    """Return the sets of formats to choose from, one after the other while none keeps the error."""
    if formats is None:
        return [SMALL_FORMATS, ("float64", *SMALL_FORMATS)]
    names = tuple(storage_format(name).name for name in formats)
    if not names:
        raise BudgetError(f"no format to choose from; known formats: {', '.join(FORMATS)}")
    return [names]


@dataclass(frozen=True, eq=False)
class _RoundingSearch:
    """The search for the formats of fewest bytes, in one set of formats and one type of weights."""

    target: Target
    approximation: SeparatedMatrix
    rounding: _Rounding
    weight_type: WeightType

    def run(self, atol: float, truncation: float) -> tuple[StoredMatrix | None, float]:
        """Return the stored matrix, or None, and the smallest error that was reached."""
        rounding = self.rounding
        shape = self.approximation.kronecker_shape
        wide = self.approximation.astype(dtype_name(as_double(self.approximation.factors[0])))
        inner_atol = atol
        closest = math.inf
        # Terms that are not orthogonal may round worse than they add up: the inner budget is then
        # tightened, so many times at most. By hand.
        for _ in range(16):
            # Search 1: formats for what truncation leaves of the inner budget.
            squared = rounding.scaled(inner_atol) ** 2 - rounding.scaled(truncation) ** 2
            choices = rounding.choose(math.sqrt(max(squared, 0.0)), self.weight_type)
            terms = rounding.store(choices, self.weight_type)
            # Search 2: the error of what a reader gets, formed.
            read = _dequantized(shape, rounding.exponent, terms)
            error = certified(self.target, _held_like(read, wide))
            closest = min(closest, error)
            if error <= atol:
                norm = self.target.norm
                return StoredMatrix(shape, rounding.exponent, terms, error, norm), closest
            # Search 3: a smaller inner budget.
            if inner_atol <= truncation:
                break
            inner_atol = max(truncation, inner_atol * min(0.99, atol / error))
        return None, closest


def as_stored(matrix: SeparatedMatrix, storage: str) -> SeparatedMatrix:
    """Return what a reader gets of a matrix whose factors are all stored in one format.

    λ lies beside them in its own type. Every factor of every term is first scaled to the upper end
    of the format's range, so that neither large nor small matrices overflow or vanish; integer
    codes carry the scale of their factor. Held in the library and type of ``matrix``. See
    `lsrdecomp.formats.number_formats.storage_format` for names, and for the error of unknown ones.
    """
    chosen = storage_format(storage)
    if matrix.separation_rank == 0:
        return matrix
    if not chosen.is_integer:
        return matrix.round_to(chosen.name, scaled=True)
    rounding = _Rounding.measure(matrix, (chosen.name,))
    choices: list[FormatChoice] = [(0,) * matrix.order] * matrix.separation_rank
    terms = rounding.store(choices, np.float32)
    return _held_like(_dequantized(matrix.kronecker_shape, rounding.exponent, terms), matrix)


def least_bytes(shape: KroneckerShape, rank: int, formats: Sequence[str] = SMALL_FORMATS) -> int:
    """Return the bytes that ``rank`` stored terms take at the very least, whatever the error."""
    allowed = [storage_format(name) for name in formats]
    factors = 0
    for size in shape.sizes:
        factors += min(format_.bytes(size) for format_ in allowed)
    return 8 + rank * (4 + shape.order + factors)


def certified(target: Target, approximation: SeparatedMatrix) -> float:
    """Return an upper bound on ‖M − M̃‖_F: the residual, and a bound on its rounding.

    The residual is formed in double precision. Forming Σ_k λ_k ⊗_i F_k⁽ⁱ⁾ and subtracting errs by
    at most a small multiple of s·d·2⁻⁵³(‖λ‖₁ + ‖M‖).
    """
    size = float(np.sum(to_numpy(as_double(approximation.weights)))) + target.norm
    if size == 0.0:
        return 0.0
    slack = tolerance("float64", approximation.order + approximation.separation_rank) / 8.0
    return float(np.nextafter(target.residual_norm(approximation) + slack * size, math.inf))


@dataclass(frozen=True, eq=False)
class _Rounding:
    """Every factor of every term rounded in every format, with the errors that leaves.

    Attributes
    ----------
    names : tuple of str
        The formats.
    weights : ndarray, shape (s,)
        λ / 2^exponent.
    units : tuple of ndarray, shapes (s, m_i, n_i)
    rounded : tuple
        The stored factor by term, factor and format.
    squares : ndarray, shape (s, d, formats)
        ρ².
    bytes : ndarray, shape (d, formats)
    """

    names: tuple[str, ...]
    exponent: int
    weights: np.ndarray
    units: tuple[np.ndarray, ...]
    rounded: tuple[tuple[tuple[StoredFactor, ...], ...], ...]
    squares: np.ndarray
    bytes: np.ndarray

    @classmethod
    def measure(cls, approximation: SeparatedMatrix, names: tuple[str, ...]) -> _Rounding:
        if is_differentiated(approximation.factors[0]):
            raise LsrError(
                "stored codes pass no gradients; pass matrix.detach(), or leave out budget= and "
                "storage="
            )
        weights = to_numpy(as_double(approximation.weights))
        units = tuple(to_numpy(as_double(factor)) for factor in approximation.factors)
        largest = float(weights[0]) if len(weights) else 1.0
        exponent = math.frexp(largest)[1]
        # Every factor in every format, and its error.
        rounded = []
        squares = np.zeros((len(weights), len(units), len(names)))
        for k in range(len(weights)):
            term = []
            for i, unit in enumerate(units):
                in_formats = [round_factor(unit[k], name) for name in names]
                squares[k, i, :] = [error**2 for _, error in in_formats]
                term.append(tuple(factor for factor, _ in in_formats))
            rounded.append(tuple(term))
        # What a factor takes in each format.
        parts = 2 if any(np.iscomplexobj(unit) for unit in units) else 1
        sizes = []
        for unit in units:
            entries = unit.shape[1] * unit.shape[2] * parts
            sizes.append([storage_format(name).bytes(entries) for name in names])
        scaled = np.ldexp(weights, -exponent)
        return cls(names, exponent, scaled, units, tuple(rounded), squares, np.asarray(sizes))

    def scaled(self, error: float) -> float:
        """Return an error in the units of the weights."""
        return math.ldexp(error, -self.exponent)

    def weight_types(self, atol: float) -> tuple[WeightType, ...]:
        """Return float32, and float64 where the rounding of weights may be in the way.

        It may where it is more than a tenth of the allowed error, a value set by hand.
        """
        rounding = unit_roundoff("float32") * float(np.linalg.norm(self.weights))
        if rounding <= 0.1 * self.scaled(atol):
            return (np.float32,)
        return (np.float32, np.float64)

    def choose(self, budget: float, weight_type: WeightType) -> tuple[FormatChoice, ...]:
        """Return the formats of fewest bytes within an error in the units of the weights."""
        overhead = weight_type().nbytes + len(self.units)
        return cheapest_formats(self.weights, self.squares, self.bytes, budget, overhead)

    def store(
        self, choices: Sequence[FormatChoice], weight_type: WeightType
    ) -> tuple[StoredTerm, ...]:
        """Return the chosen codes, with weights refitted to them and rounded to their type."""
        factors = []
        for k, choice in enumerate(choices):
            if choice is not None:
                factors.append(tuple(self.rounded[k][i][t] for i, t in enumerate(choice)))
        if not factors:
            return ()
        terms = []
        for weight, of_term in zip(self._refitted(factors), factors, strict=True):
            term = StoredTerm(weight_type(weight), of_term)
            if term.weight != 0.0:
                terms.append(term)
        return tuple(terms)

    def refusal(self, atol: float, truncation: float, closest: float, size: float) -> str:
        """Return why rounding alone exceeds an error, and what would do."""
        totals = np.sum(self.squares, axis=(0, 1))
        finest = self.names[int(np.argmin(totals))]
        ways_out = [f"allow a tolerance above {_with_relative(closest, size)}"]
        fine_enough = [name for name in PRECISIONS if self._is_fine_enough(name, finest, atol)]
        if fine_enough:
            ways_out.insert(0, f"store in {' or '.join(fine_enough)}")
        return (
            f"{_stated(atol, size)}: truncation takes {truncation:.3g} of it and rounding, even in "
            f"{finest}, brings the total to {closest:.3g}; {', or '.join(ways_out)}"
        )

    def _is_fine_enough(self, name: str, than: str, atol: float) -> bool:
        """Return whether a type is finer than another, and expected to keep ``atol``."""
        if name not in FORMATS or name == than:
            return False
        roundoff = unit_roundoff(name)
        expected = roundoff * math.sqrt(len(self.units)) * float(np.linalg.norm(self.weights))
        is_finer = than not in PRECISIONS or roundoff < unit_roundoff(than)
        return is_finer and expected <= self.scaled(atol)

    def _refitted(self, factors: list[tuple[StoredFactor, ...]]) -> np.ndarray:
        """Return the weights of least squares for rounded factors."""
        gram: np.ndarray | float = 1.0
        cross: np.ndarray | float = 1.0
        scale = np.ones(len(factors))
        for i, unit in enumerate(self.units):
            values = np.stack([f[i].values.reshape(-1) for f in factors])
            length = np.linalg.norm(values, axis=1)
            values = values / length[:, None]
            scale = scale * length
            gram = gram * (values.conj() @ values.T)
            cross = cross * (values.conj() @ unit.reshape(len(unit), -1).T)
        # Weights are real, so the normal equations are those of the real parts.
        right = np.real(cross @ self.weights)
        solved = np.linalg.lstsq(np.real(gram), right, rcond=None)[0]
        return np.asarray(solved / scale)


def _dequantized(
    shape: KroneckerShape, exponent: int, terms: Sequence[StoredTerm]
) -> SeparatedMatrix:
    """Return the matrix that stored terms stand for, in float64 or complex128."""
    is_complex = any(factor.complex for term in terms for factor in term.factors)
    dtype = np.complex128 if is_complex else np.float64
    factors = []
    for i, (m, n) in enumerate(shape.factors):
        stack = np.zeros((len(terms), m, n), dtype=dtype)
        for k, term in enumerate(terms):
            stack[k] = term.factors[i].values
        factors.append(stack)
    weights = np.asarray([float(term.weight) for term in terms], dtype=np.float64)
    return SeparatedMatrix.from_factors(factors, np.ldexp(weights, exponent))


def _held_like(matrix: SeparatedMatrix, other: SeparatedMatrix) -> SeparatedMatrix:
    """Return the matrix in the library, element type and place of another."""
    weights = like(matrix.weights, other.weights)
    return SeparatedMatrix(weights, tuple(map(like, matrix.factors, other.factors)))


def _truncation_refusal(atol: float, truncation: float, closest: float, size: float) -> str:
    """Return why truncation alone exceeds an error, and what would do."""
    return (
        f"{_stated(atol, size)}: the {truncation:.3g} of truncation alone exceeds it; use more "
        f"terms or a tolerance above {_with_relative(closest, size)}"
    )


def _stated(atol: float, size: float) -> str:
    relative = f" (relative {atol / size:.3g})" if size > 0.0 else ""
    return f"allowed error {atol:.3g}{relative}"


def _with_relative(error: float, size: float) -> str:
    """Return an error, rounded up so that it can be typed, also relative to a norm."""
    text = rounded_up(error)
    return f"{text} (rtol={rounded_up(error / size)})" if size > 0.0 else text
