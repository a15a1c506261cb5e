"""Test problems with known answers: how to make each matrix, which shape, which error."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, reduce

import numpy as np

from lsrdecomp.kronecker.rearrange import inverse_rearrange, rearrange
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.kronecker.shape import KroneckerShape


@cache
def kernel(name: str) -> np.ndarray:
    """One of the kernels below as a matrix of 1024 rows, for the shape 32×32 ⊗ 32×32."""
    return KERNELS[name][0](1024)


@dataclass(frozen=True)
class Problem:
    """One row: ALS with ``rank`` terms must reach ``error`` within the factor ``slack``."""

    name: str
    matrix: Callable[[], np.ndarray]
    shape: KroneckerShape
    rank: int
    error: float  # relative Frobenius error; the best known, or the theory's
    slack: float = 1.0
    slow: bool = False

    def __str__(self) -> str:
        return f"{self.name}, {self.rank} terms"


def square(*sides: int) -> KroneckerShape:
    return KroneckerShape(tuple((n, n) for n in sides))


# Sums of one-mode operators [Beylkin and Mohlenkamp 2005, sec. 3].
def sum_operator(d: int, n: int = 2) -> np.ndarray:
    """Σ_i I⊗…⊗A⊗…⊗I for a trace-free A with ‖A‖ = ‖I‖."""
    a = np.diag(np.where(np.arange(n) % 2 == 0, 1.0, -1.0))
    parts = ([a if i == k else np.eye(n) for i in range(d)] for k in range(d))
    return sum(reduce(np.kron, part) for part in parts)


def sum_operator_optimum(d: int, rounding: float) -> tuple[float, float]:
    """Return (√(truncation² + (rounding·γ)²), γ) of two terms at their best step t.

    They are the central difference, to all orders.
    """
    t = np.logspace(-6, 0, 20001)
    truncation = sum(math.comb(d, k) * t ** (2 * (k - 1)) for k in range(3, d + 1, 2)) / d
    condition = math.sqrt(2) * (1 + t**2) ** (d / 2) / (2 * t * math.sqrt(d))
    total = np.sqrt(truncation + (rounding * condition) ** 2)
    best = int(np.argmin(total))
    return float(total[best]), float(condition[best])


# Functions of a sum.
def sine_of_a_sum(d: int, n: int = 2) -> tuple[np.ndarray, KroneckerShape]:
    """sin(x_1 + … + x_d) on a grid: d terms are enough, though the expanded formula has 2^(d−1)."""
    x = np.random.default_rng(d).uniform(-1.0, 1.0, (d, n * n))
    shape = square(*[n] * d)
    return inverse_rearrange(np.sin(reduce(np.add.outer, x)), shape), shape


def one_dimensional_laplacian(n: int) -> np.ndarray:
    return 2.0 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1)


def kronecker_sum(d: int, n: int = 4) -> SeparatedMatrix:
    """Return L ⊗ I ⊗ I + I ⊗ L ⊗ I + …: d terms exactly, two to any accuracy.

    [Beylkin and Mohlenkamp 2005]
    """
    laplacian, identity = one_dimensional_laplacian(n), np.eye(n)
    stacks = [
        np.stack([laplacian if term == factor else identity for term in range(d)])
        for factor in range(d)
    ]
    return SeparatedMatrix.from_factors(stacks)


def inverse_laplacian_tensor(n: int, d: int) -> np.ndarray:
    """Return 1/(λ_i + λ_j + …), of n^d entries instead of n^(2d).

    It is orthogonally equivalent to the rearranged inverse.
    """
    eigenvalues = 4.0 * np.sin(np.arange(1, n + 1) * np.pi / (2 * (n + 1))) ** 2
    return 1.0 / reduce(np.add.outer, [eigenvalues] * d)


def as_matrix(tensor: np.ndarray) -> tuple[np.ndarray, KroneckerShape]:
    """A matrix whose rearrangement is ``tensor``, with one column."""
    shape = KroneckerShape(tuple((n, 1) for n in tensor.shape))
    return inverse_rearrange(tensor, shape), shape


def border_rank_two(d: int = 3) -> np.ndarray:
    """Return a∘a∘b + a∘b∘a + b∘a∘a, of rank d.

    Two terms come as near as one likes while γ grows without bound.
    """
    a, b = np.eye(2)
    return sum(reduce(np.multiply.outer, [b if i == k else a for i in range(d)]) for k in range(d))


def matrix_multiplication(n: int = 2) -> np.ndarray:
    """The tensor of n×n matrix multiplication; rank 7 for n = 2 [Strassen 1969]."""
    tensor = np.zeros((n * n,) * 3)
    for i, j, k in np.ndindex(n, n, n):
        tensor[i * n + j, j * n + k, k * n + i] = 1.0
    return tensor


def strassen() -> list[np.ndarray]:
    """Return seven terms of `matrix_multiplication` for n = 2 [Strassen 1969], by modes."""
    a = [
        [1, 0, 0, 1],
        [0, 0, 1, 1],
        [1, 0, 0, 0],
        [0, 0, 0, 1],
        [1, 1, 0, 0],
        [-1, 0, 1, 0],
        [0, 1, 0, -1],
    ]
    b = [
        [1, 0, 0, 1],
        [1, 0, 0, 0],
        [0, 1, 0, -1],
        [-1, 0, 1, 0],
        [0, 0, 0, 1],
        [1, 1, 0, 0],
        [0, 0, 1, 1],
    ]
    c = [
        [1, 0, 0, 1],
        [0, 1, 0, -1],
        [0, 0, 1, 1],
        [1, 1, 0, 0],
        [-1, 0, 1, 0],
        [0, 0, 0, 1],
        [1, 0, 0, 0],
    ]
    return [np.array(mode, float) for mode in (a, b, c)]


@dataclass(frozen=True)
class DrawnSum:
    """An exact sum of Kronecker products and the tolerance at which to look for it."""

    kind: str
    matrix: np.ndarray
    shape: KroneckerShape
    terms: int
    rtol: float


DRAWN_KINDS = ("independent", "alike by a half", "alike by nine tenths", "one factor at a time")


def drawn_sums(count: int, seed: int = 0) -> Iterator[DrawnSum]:
    """Draw sums of 1 to 8 terms, three to five factors with sides of 1 to 4, and an rtol.

    They are real and complex, rtol lies between 1e-2 and 1e-13.

    Each has fewer numbers than its matrix, so that it is one to look for.
    """
    rng = np.random.default_rng(seed)
    for number in range(count):
        order, kind = 3 + number % 3, DRAWN_KINDS[number // 3 % 4]
        imaginary = 1j * float(rng.integers(2))
        shape = KroneckerShape(tuple((int(m), int(n)) for m, n in rng.integers(1, 5, (order, 2))))

        def draw(shape: KroneckerShape = shape, imaginary: complex = imaginary) -> list[np.ndarray]:
            parts = [rng.standard_normal((2, *size)) for size in shape.factors]
            return [part[0] + imaginary * part[1] if imaginary else part[0] for part in parts]

        # A sum with as many numbers as its matrix is not a short one; of one term it may be.
        most = min(
            order if kind == DRAWN_KINDS[3] else 8, (math.prod(shape.sizes) - 1) // sum(shape.sizes)
        )
        common, terms = draw(), int(rng.integers(1, 1 + max(most, 1)))
        alike = {DRAWN_KINDS[1]: 0.5, DRAWN_KINDS[2]: 0.9}.get(kind, 0.0)
        matrix = np.zeros(shape.matrix_shape)
        for term in range(terms):
            factors = [
                alike * c + math.sqrt(1.0 - alike**2) * f
                for c, f in zip(common, draw(), strict=True)
            ]
            # Σ C ⊗ … ⊗ A_i ⊗ … ⊗ C: its first two terms come as near as one likes.
            if kind == DRAWN_KINDS[3]:
                factors = [
                    f if i == term else c
                    for i, (c, f) in enumerate(zip(common, factors, strict=True))
                ]
            matrix = matrix + reduce(np.kron, factors)
        yield DrawnSum(kind, matrix, shape, terms, float(10.0 ** -rng.uniform(2.0, 13.0)))


# Kernels and operators of two factors.
def lags(n: int) -> np.ndarray:
    i = np.arange(n)
    return i[:, None] - i[None, :]


def hilbert(n: int) -> np.ndarray:
    i = np.arange(n)
    return 1.0 / (i[:, None] + i[None, :] + 1.0)


def log_kernel(n: int) -> np.ndarray:
    distance = np.abs(lags(n)).astype(float)
    np.fill_diagonal(distance, 0.5)
    return np.log(distance / n)


def newton_kernel(n: int, d: int = 2) -> np.ndarray:
    """1/‖x − y‖ on an n^d grid, softened on the diagonal."""
    grid = np.indices((n,) * d).reshape(d, -1).astype(float)
    square_distance = sum((g[:, None] - g[None, :]) ** 2 for g in grid)
    return 1.0 / np.sqrt(square_distance + 0.25)


def blur(n: int, psf: np.ndarray) -> np.ndarray:
    """Return an n²×n² blur with zero boundary.

    Its separation rank is the rank of the point spread function [Kamm, Nagy 1998].
    """
    radius = psf.shape[0] // 2
    u, sigma, vh = np.linalg.svd(psf)

    def toeplitz(column: np.ndarray) -> np.ndarray:
        return sum(column[a + radius] * np.eye(n, k=-a) for a in range(-radius, radius + 1))

    return sum(
        w * np.kron(toeplitz(u[:, k]), toeplitz(vh[k]))
        for k, w in enumerate(sigma)
        if w > 1e-16 * sigma[0]
    )


def gaussian_psf(
    radius: int, wide: float = 3.0, narrow: float = 1.2, angle: float = 0.6
) -> np.ndarray:
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    u, v = x * np.cos(angle) + y * np.sin(angle), -x * np.sin(angle) + y * np.cos(angle)
    psf = np.exp(-(u**2) / (2 * wide**2) - v**2 / (2 * narrow**2))
    return psf / psf.sum()


def disk_psf(radius: int, size: float = 4.5) -> np.ndarray:
    y, x = np.mgrid[-radius : radius + 1, -radius : radius + 1]
    psf = (x * x + y * y <= size * size).astype(float)
    return psf / psf.sum()


def exponential_kernel(n: int, length: float) -> np.ndarray:
    return np.exp(-np.abs(lags(n)) / length)


def variable_coefficient_inverse(n: int) -> np.ndarray:
    """Invert −(a u′)′ on n interior points of [0, 1], a = 1 + 0.9 sin 6πx, zero at the ends."""
    x = (np.arange(n + 1) + 0.5) / (n + 1)
    a = 1.0 + 0.9 * np.sin(6.0 * np.pi * x)
    return np.linalg.inv(np.diag(a[:-1] + a[1:]) - np.diag(a[1:-1], 1) - np.diag(a[1:-1], -1))


def grid_inverse(n: int, d: int, contrast: float = 0.5) -> np.ndarray:
    """Invert −∇·(a∇u) on a grid of n points a side in d dimensions, zero around it.

    a = 1 + contrast Π sin 2πxᵢ.
    """
    place, size = np.indices((n,) * d).reshape(d, -1).T, n**d
    matrix, points = np.zeros((size, size)), np.arange(size)
    for axis in range(d):
        step = np.eye(d)[axis] / 2.0
        before, after = (
            1.0 + contrast * np.prod(np.sin(2.0 * np.pi * (place + 1 + side) / (n + 1)), axis=1)
            for side in (-step, step)
        )
        matrix[points, points] += before + after
        inner = points[place[:, axis] + 1 < n]
        following = inner + n ** (d - 1 - axis)
        matrix[inner, following] -= after[inner]
        matrix[following, inner] -= after[inner]
    return np.linalg.inv(matrix)


def exact_ranks(p: int = 8, q: int = 8) -> list[tuple[str, np.ndarray, int]]:
    """Matrices of n = p·q rows whose separation rank for (p×p) ⊗ (q×q) is known."""
    n = p * q
    i, lag = np.arange(n), lags(n)
    bits = int(math.log2(n))
    reverse = [int(format(k, f"0{bits}b")[::-1], 2) for k in range(n)]
    laplacian = one_dimensional_laplacian
    return [
        ("identity", np.eye(n), 1),
        ("Hadamard", reduce(np.kron, [np.array([[1.0, 1.0], [1.0, -1.0]])] * bits), 1),
        ("cyclic shift", np.roll(np.eye(n), 1, 0), 2),
        ("cumulative sum", np.triu(np.ones((n, n))), 2),
        ("Laplacian in one dimension", laplacian(n), 3),
        (
            "Laplacian in two dimensions",
            np.kron(laplacian(p), np.eye(q)) + np.kron(np.eye(p), laplacian(q)),
            2,
        ),
        ("exponential kernel", np.exp(-0.1 * np.abs(lag)), 3),
        ("absolute difference", np.abs(lag).astype(float), 3),
        ("Brownian covariance", np.minimum(i[:, None], i[None, :]) + 1.0, 4),
        ("cosine Toeplitz", np.cos(0.3 * lag), 2),
        ("cubic Hankel", ((i[:, None] + i[None, :]) / n) ** 3.0, 4),
        ("bit reversal", np.eye(n)[reverse], min(p * p, q * q)),
        ("Fourier", np.exp(-2j * np.pi * np.outer(i, i) / n), min(p * p, q * q)),
        ("perfect shuffle", np.eye(n)[np.arange(n).reshape(p, q).T.ravel()], min(p * p, q * q)),
    ]


# Minimax exponential sums: the optimal uniform error of k exponentials for 1/x on [1, R], checked
# to equioscillate.
EXPONENTIAL_SUMS = {
    10: {1: 8.556e-2, 2: 8.752e-3, 3: 7.145e-4, 4: 5.577e-5, 5: 4.243e-6, 6: 3.173e-7, 7: 2.344e-8},
    1000: {5: 6.385e-4, 9: 7.468e-6},
}


def reciprocal_of_a_sum(interval: float, d: int = 3, n: int = 24) -> np.ndarray:
    """Return 1/(x_1 + … + x_d), the sum in [1, R].

    k exponentials give k terms, so that the minimax error bounds the best.
    """
    x = np.exp(np.linspace(0.0, np.log(interval), n)) / d
    return 1.0 / reduce(np.add.outer, [x] * d)


INVERSE_LAPLACIAN = {1: 0.3726, 3: 0.0206, 7: 1.011e-5}
INVERSE_LAPLACIAN_LONG = {
    2: 0.09626,
    4: 3.872e-3,
    5: 6.304e-4,
    6: 8.650e-5,
    8: 2.66e-6,
    9: 4.633e-7,
}
KERNELS = {
    "Hilbert": (hilbert, {1: 3.9e-1, 2: 3.6e-2, 3: 2.6e-3, 4: 1.4e-4, 6: 2.1e-7, 8: 1.7e-10}),
    "logarithm": (log_kernel, {1: 1.2e-1, 2: 7.9e-2, 3: 1.4e-2, 4: 5.3e-3, 6: 1.2e-4, 8: 1.3e-6}),
    "1/r": (
        lambda n: newton_kernel(math.isqrt(n)),
        {1: 3.1e-1, 2: 9.9e-2, 3: 3.0e-2, 4: 8.1e-3, 6: 4.7e-4, 8: 2.0e-5},
    ),
    "blur": (
        lambda n: blur(math.isqrt(n), gaussian_psf(9)),
        {1: 3.9e-1, 2: 1.6e-1, 3: 6.3e-2, 4: 2.5e-2, 6: 4.1e-3, 8: 6.6e-4, 12: 1.5e-5},
    ),
}


def table() -> list[Problem]:
    """Every row with one matrix, one shape and one expected error."""
    rows = []
    for n, errors, slow in ((16, INVERSE_LAPLACIAN, False), (16, INVERSE_LAPLACIAN_LONG, True)):
        matrix, shape = as_matrix(inverse_laplacian_tensor(n, 3))
        for rank, error in errors.items():
            rows.append(
                Problem(
                    "inverse Laplacian, d = 3", lambda m=matrix: m, shape, rank, error, 1.01, slow
                )
            )
    for d in (2, 3, 4, 5):
        _, shape = sine_of_a_sum(d)
        rows.append(
            Problem(f"sine of a sum of {d}", lambda d=d: sine_of_a_sum(d)[0], shape, d, 5e-15)
        )
    for interval, errors in EXPONENTIAL_SUMS.items():
        matrix, shape = as_matrix(reciprocal_of_a_sum(interval))
        for rank, uniform in errors.items():
            # The minimax error is absolute, and ‖1/x‖ on this grid sets the scale of a root mean
            # square.
            bound = uniform * math.sqrt(matrix.size) / float(np.linalg.norm(matrix))
            name = f"1/(x+y+z) on [1, {interval}]"
            rows.append(
                Problem(name, lambda m=matrix: m, shape, rank, bound, slow=rank not in (1, 4))
            )
    return rows


def relative_error(matrix: np.ndarray, approximation) -> float:
    return float(np.linalg.norm(matrix - approximation.to_matrix()) / np.linalg.norm(matrix))


def rearranged(matrix: np.ndarray, shape: KroneckerShape) -> np.ndarray:
    return rearrange(matrix, shape)
