"""Operators against dense NumPy and the routes people take now.

python -m benchmarks.operators.solve [accuracy galerkin million samples grid]

Seconds are CPU seconds of one process on one thread (OMP_NUM_THREADS=1), so that other work on the
machine weighs less; ratios are within one run. Writes benchmarks/results/operators-PART.json.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.interpolate
import scipy.linalg
import scipy.sparse.linalg

import lsrdecomp as lsr
from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp import operators as ops

SEED = 23


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    value = work()
    return value, time.process_time() - start


# Accuracy
# ------------------------------------------------------------------------------------------------


def kron(matrices: Any) -> Any:
    total = np.ones((1, 1))
    for matrix in matrices:
        total = np.kron(total, matrix)
    return total


def drawn(rng: np.random.Generator, kind: str, definite: bool = False) -> tuple[Any, Any]:
    """One well conditioned term of one to four square factors, and its matrix."""
    made = []
    for _ in range(rng.integers(1, 5)):
        m = int(rng.integers(1, 5))
        half = rng.standard_normal((2, m, m)) + 1j * (kind == "complex128") * rng.standard_normal(
            (2, m, m)
        )
        q, p = (np.linalg.qr(h)[0] for h in (half if kind == "complex128" else half.real))
        factor = (q * rng.uniform(0.2, 1.0, m)) @ (q.conj().T if definite else p)
        made.append((0.5 * (factor + factor.conj().T) if definite else factor).astype(kind))
    wide = [f.astype(np.result_type(kind, np.float64)) for f in made]
    return lsr.SeparatedMatrix.from_factors([f[None] for f in made]), kron(wide)


def several(rng: np.random.Generator, shape: Any, kind: str) -> tuple[Any, Any]:
    """Three terms of a shape, and their sum."""
    factors = [rng.standard_normal((3, m, n)) for m, n in shape.factors]
    if kind == "complex128":
        factors = [f + 1j * rng.standard_normal(f.shape) for f in factors]
    a = lsr.SeparatedMatrix.from_factors([f.astype(kind) for f in factors])
    wide = [f.astype(np.result_type(kind, np.float64)) for f in a.factors]
    weights = a.weights.astype(float)
    return a, sum(w * kron([f[k] for f in wide]) for k, w in enumerate(weights))


def gaps(rng: np.random.Generator, kind: str) -> dict[str, float]:
    """Return the relative error of every method on one case; sums relative to the terms added."""
    found: dict[str, float] = {}

    def put(name: str, ours: Any, theirs: Any, scale: float | None = None) -> None:
        size = np.linalg.norm(np.atleast_1d(theirs)) if scale is None else scale
        found[name] = float(
            np.linalg.norm(np.atleast_1d(np.asarray(ours) - theirs)) / max(size, 1e-300)
        )

    shape = lsr.KroneckerShape(
        tuple((int(m), int(n)) for m, n in rng.integers(1, 5, (rng.integers(1, 5), 2)))
    )
    a, dense = several(rng, shape, kind)
    b, other = several(rng, shape, kind)
    terms = float(np.sum(a.weights))
    x, y = rng.standard_normal((dense.shape[1], 2)), rng.standard_normal((dense.shape[0], 2))
    both = terms + float(np.sum(b.weights))
    put("matmat", a @ x, dense @ x, terms * np.linalg.norm(x))
    put("rmatmat", a.rmatmat(y), dense.conj().T @ y, terms * np.linalg.norm(y))
    put("x @ A", y.T @ a, y.T @ dense, terms * np.linalg.norm(y))
    put(
        "adjoint test",
        np.vdot(y, a @ x),
        np.vdot(a.rmatmat(y), x),
        terms * np.linalg.norm(x) * np.linalg.norm(y),
    )
    put("to_matrix", a.to_matrix(), dense, terms)
    put("A + B", (a + b).to_matrix(), dense + other, both)
    put("A - B", (a - b).to_matrix(), dense - other, both)
    put("A * B", (a * b).to_matrix(), dense * other, terms * both)
    put("A * 2.5", (a * 2.5).to_matrix(), dense * 2.5, 2.5 * terms)
    put("A / 3", (a / 3).to_matrix(), dense / 3, terms)
    put("A @ Bᴴ", (a @ b.mH).to_matrix(), dense @ other.conj().T, terms * both)
    put(
        "kron",
        (a.truncate(1).kron(b.truncate(1)))[0],
        np.kron(a.truncate(1)[:1], b.truncate(1)[:1])[0],
    )
    put("inner", a.inner(b), np.vdot(dense, other), terms * both)
    put("norm", a.norm, np.linalg.norm(dense), terms)
    put("diagonal", a.diagonal(), np.diagonal(dense), terms)
    put("rows", a[::2], dense[::2], terms)
    put("columns", a[:, ::-2], dense[:, ::-2], terms)
    one, full = drawn(rng, kind)
    rhs = rng.standard_normal(len(full)).astype(one.weights.dtype)
    put("trace", one.trace(), np.trace(full), np.linalg.norm(full) * len(full) ** 0.5)
    put("solve", ops.solve(one, rhs).x, np.linalg.solve(full, rhs))
    put("inv", ops.inv(one).to_matrix(), np.linalg.inv(full))
    put("pinv", ops.pinv(one).to_matrix(), np.linalg.pinv(full))
    put("slogdet", ops.slogdet(one)[1], np.linalg.slogdet(full)[1], len(full))
    put("svd", np.sort(ops.svd(one).S)[::-1], np.linalg.svd(full, compute_uv=False))
    spd, definite = drawn(rng, kind, definite=True)
    values, vectors = ops.eigh(spd)
    put("eigh", (vectors.to_matrix() * values) @ vectors.mH.to_matrix(), definite)
    put("cholesky", ops.cholesky(spd).to_matrix(), np.linalg.cholesky(definite))
    put("sqrtm", (ops.sqrtm(spd) @ ops.sqrtm(spd)).to_matrix(), definite)
    if kind != "float32":
        parts = [f[0] for f in spd.factors]
        total = ops.kronecker_sum(*parts)
        formed = total.to_matrix()
        rhs = rng.standard_normal(len(formed))
        put("solve (Kronecker sum)", ops.solve(total, rhs).x, np.linalg.solve(formed, rhs))
        put("eigenvalues (Kronecker sum)", ops.eigenvalues(total), np.linalg.eigvalsh(formed))
        put(
            "logdet (Kronecker sum)",
            ops.slogdet(total)[1],
            np.linalg.slogdet(formed)[1],
            len(formed),
        )
        put("expm_multiply", ops.expm_multiply(total, rhs, -1.0), scipy.linalg.expm(-formed) @ rhs)
    return found


def accuracy(cases: int = 600) -> dict[str, Any]:
    rows: dict[str, dict[str, float]] = {}
    for kind in ("float64", "complex128", "float32"):
        rng = np.random.default_rng(SEED)
        for _ in range(cases):
            for name, gap in gaps(rng, kind).items():
                rows.setdefault(name, {}).setdefault(kind, 0.0)
                rows[name][kind] = max(rows[name][kind], gap)
    worst = {
        kind: max(row.get(kind, 0.0) for row in rows.values())
        for kind in ("float64", "complex128", "float32")
    }
    return {
        "cases per method and type": cases,
        "largest relative error": rows,
        "largest of all": worst,
    }


# A stochastic Galerkin system
# ------------------------------------------------------------------------------------------------


def legendre_products(variables: int, degree: int) -> list[Any]:
    """Return G_0 = I and G_t = E[ξ_t ψ_i ψ_j] for orthonormal Legendre polynomials."""
    indices = [i for i in np.ndindex(*(degree + 1,) * variables) if sum(i) <= degree]
    place = {i: k for k, i in enumerate(indices)}
    made = [np.eye(len(indices))]
    for t in range(variables):
        matrix = np.zeros((len(indices),) * 2)
        for i in indices:
            above = (*i[:t], i[t] + 1, *i[t + 1 :])
            if above in place:
                k = i[t] + 1
                matrix[place[i], place[above]] = matrix[place[above], place[i]] = k / math.sqrt(
                    4.0 * k * k - 1.0
                )
        made.append(matrix)
    return made


def stiffness(n: int, coefficient: Callable[[Any, Any], Any]) -> Any:
    """−∇·(a∇u) on n × n inner points of the unit square by central differences, dense."""
    h = 1.0 / (n + 1)
    nodes, middles = h * np.arange(1, n + 1), h * (np.arange(n + 1) + 0.5)
    matrix = np.zeros((n, n, n, n))
    x, y = np.meshgrid(middles, nodes, indexing="ij")
    flux = coefficient(x, y)
    other = coefficient(*np.meshgrid(nodes, middles, indexing="ij"))
    for i in range(n):
        for j in range(n):
            matrix[i, j, i, j] = flux[i, j] + flux[i + 1, j] + other[i, j] + other[i, j + 1]
            if i + 1 < n:
                matrix[i, j, i + 1, j] = matrix[i + 1, j, i, j] = -flux[i + 1, j]
            if j + 1 < n:
                matrix[i, j, i, j + 1] = matrix[i, j + 1, i, j] = -other[i, j + 1]
    return matrix.reshape(n * n, n * n) / h**2


def galerkin(points: int = 12, variables: int = 4, degree: int = 3) -> dict[str, Any]:
    """−∇·(a(x, ξ)∇u) = 1 with a = 1 + Σ_t 0.5 t⁻² cos(tπx) cos(tπy) ξ_t, ξ uniform on (−1, 1)."""
    left = legendre_products(variables, degree)
    right = [stiffness(points, lambda x, y: np.ones_like(x))]
    for t in range(1, variables + 1):
        wave = lambda x, y, t=t: 0.5 / t**2 * np.cos(t * np.pi * x) * np.cos(t * np.pi * y)  # noqa: E731
        right.append(stiffness(points, wave))
    a = lsr.SeparatedMatrix.from_factors([np.stack(left), np.stack(right)])
    b = np.zeros(a.shape[0])
    b[: points**2] = 1.0
    rows = []

    def run(name: str, build: Callable[[], Any], residual: Callable[[Any], float | None]) -> None:
        m, setup = timed(build)
        found, seconds = timed(
            lambda: ops.solve(a, b, rtol=1e-8, method="gmres", preconditioner=m, throw=False)
        )
        rows.append(
            {
                "preconditioner": name,
                "iterations": found.iterations,
                "relative residual": found.relative_residual,
                "seconds setup": setup,
                "seconds solve": seconds,
                "‖I − AX‖ / ‖I‖": residual(m),
            }
        )

    run("none", lambda: None, lambda m: None)
    run("mean (I ⊗ K₀)⁻¹", lambda: np_inverse(left[0], right[0]), lambda m: None)
    run(
        "nearest Kronecker",
        lambda: ops.inv(ops.nearest_kronecker(a, a.kronecker_shape)).to_linear_operator(),
        lambda m: None,
    )
    for rank in (1, 2, 3, 5, 8):
        run(
            f"approximate_inverse, {rank}",
            lambda r=rank: ops.approximate_inverse(a, rank=r),
            lambda m: m.residual,
        )
    return {
        "unknowns": a.shape[0],
        "shape": str(a.kronecker_shape),
        "terms": a.separation_rank,
        "rtol": 1e-8,
        "rows": rows,
    }


def np_inverse(*factors: Any) -> Any:
    return ops.inv(
        lsr.SeparatedMatrix.from_factors([f[None] for f in factors])
    ).to_linear_operator()


# 10⁶ unknowns
# ------------------------------------------------------------------------------------------------


def diffusion(n: int) -> Any:
    """−∇·((1 + 30 g(x)g(y)g(z)) ∇u) on n³ inner points, g a bump: six terms of three factors."""
    h = 1.0 / (n + 1)
    nodes, middles = h * np.arange(1, n + 1), h * (np.arange(n + 1) + 0.5)
    bump = lambda x: np.exp(-20.0 * (x - 0.4) ** 2)  # noqa: E731
    stacks: list[list[Any]] = [[], [], []]
    for weight in (lambda x: np.ones_like(x), lambda x: 30.0 ** (1 / 3) * bump(x)):
        flux, mass = weight(middles), np.diag(weight(nodes))
        stiff = (
            np.diag(flux[:-1] + flux[1:]) - np.diag(flux[1:-1], 1) - np.diag(flux[1:-1], -1)
        ) / h**2
        for direction in range(3):
            for axis in range(3):
                stacks[axis].append(stiff if axis == direction else mass)
    return lsr.SeparatedMatrix.from_factors([np.stack(s) for s in stacks])


def spline_masses(n: int, degree: int, densities: tuple[Callable[[Any], Any], ...]) -> list[Any]:
    """Return mass matrices ∫ ρ B_i B_j of n B-splines on (0, 1), one a density ρ, by quadrature."""
    inner = np.linspace(0.0, 1.0, n - degree + 1)
    knots = np.concatenate([np.zeros(degree), inner, np.ones(degree)])
    nodes, weights = np.polynomial.legendre.leggauss(degree + 3)
    half = 0.5 * np.diff(inner)
    x = (inner[:-1, None] + half[:, None] * (nodes + 1.0)).reshape(-1)
    values = scipy.interpolate.BSpline.design_matrix(x, knots, degree).toarray()
    w = (half[:, None] * weights).reshape(-1)
    return [values.T @ (values * (w * density(x))[:, None]) for density in densities]


class Enough(Exception):  # noqa: N818 - the end of a measurement
    """So many times the seconds have passed."""


def million(n: int = 100, rank: int = 3, times: float = 3.5) -> dict[str, Any]:
    """Return the mass matrix of n³ splines of degree 4 under a density of three products.

    The run without preconditioner is broken off after ``times`` the seconds of the other.
    """
    bump = lambda x: np.exp(-20.0 * (x - 0.4) ** 2)  # noqa: E731
    masses = spline_masses(
        n, 4, (np.ones_like, bump, lambda x: 0.7 * (1.0 + np.sin(7.0 * x)) / 2.0)
    )
    a = lsr.SeparatedMatrix.from_factors([np.stack(masses)] * 3)
    b = np.random.default_rng(SEED).standard_normal(a.shape[0])
    inverse, setup = timed(lambda: ops.approximate_inverse(a, rank=rank, max_sweeps=15))
    found, seconds = timed(
        lambda: ops.solve(a, b, rtol=1e-8, method="gmres", preconditioner=inverse, throw=False)
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    limit = time.process_time() + times * (setup + seconds)
    count = 0

    def watch(done: int) -> None:
        nonlocal count
        count = done
        if time.process_time() > limit:
            raise Enough

    def plain() -> float | None:
        try:
            got = ops.solve(
                a,
                b,
                rtol=1e-8,
                method="cg",
                preconditioner=None,
                max_iterations=9999,
                throw=False,
                on_iteration=watch,
            )
        except Enough:
            return None
        return got.relative_residual

    print(found, inverse, setup, seconds, flush=True)
    residual, plain_seconds = timed(plain)
    return {
        "unknowns": a.shape[0],
        "terms": a.separation_rank,
        "rank of the inverse": rank,
        "‖I − AX‖ / ‖I‖": inverse.residual,
        "sweeps": len(inverse.residuals),
        "GMRES with approximate_inverse": {
            "iterations": found.iterations,
            "relative residual": found.relative_residual,
            "seconds setup": setup,
            "seconds solve": seconds,
        },
        "CG without": {
            "iterations": count,
            "relative residual": residual,  # None: broken off above the goal
            "seconds": plain_seconds,
        },
        "times faster, setup included, at least": plain_seconds / (setup + seconds),
        "peak MiB of the process up to the preconditioned solution": peak,
        "MiB of the formed matrix": 8.0 * a.size / 2**20,
    }


# Samples
# ------------------------------------------------------------------------------------------------


def by_svds(a: Any, g: Any) -> Any:
    """Return the leading singular triple of the rearranged sum, from products, by SciPy's svds."""
    m, p = a.shape[1], g.shape[1]

    def forth(x: Any) -> Any:
        y = x.reshape(p, p)
        return (a.T @ (a * np.sum((g @ y) * g, axis=1)[:, None])).reshape(-1)

    def back(x: Any) -> Any:
        y = x.reshape(m, m)
        return (g.T @ (g * np.sum((a @ y) * a, axis=1)[:, None])).reshape(-1)

    operator = scipy.sparse.linalg.LinearOperator(
        (m * m, p * p), matvec=forth, rmatvec=back, dtype=np.float64
    )
    u, sigma, vh = scipy.sparse.linalg.svds(operator, k=1, rng=np.random.default_rng(SEED))
    return sigma[0], u[:, 0].reshape(m, m), vh[0].reshape(p, p)


def samples(count: int = 10_000, m: int = 512, p: int = 512) -> dict[str, Any]:
    rng = np.random.default_rng(SEED)
    a = rng.standard_normal((count, m)) * np.linspace(1.0, 0.05, m)
    g = rng.standard_normal((count, p)) * np.linspace(1.0, 0.05, p)
    found, seconds = timed(lambda: ops.nearest_kronecker_of_samples(a, g))
    (sigma, u, v), peer = timed(lambda: by_svds(a, g))
    agree = float(abs(np.vdot(found.factors[0][0], u)) * abs(np.vdot(found.factors[1][0], v)))
    lowest = [float(np.linalg.eigvalsh(f[0])[0]) for f in found.factors]
    theirs = [float(np.linalg.eigvalsh(np.sign(np.trace(f)) * 0.5 * (f + f.T))[0]) for f in (u, v)]
    return {
        "samples": count,
        "shape": f"{m} ⊗ {p}",
        "seconds": seconds,
        "seconds svds": peer,
        "times faster": peer / seconds,
        "σ₁ relative difference": abs(float(found.weights[0]) - sigma) / sigma,
        "1 − cosine of the two answers": 1.0 - agree,
        "smallest eigenvalues": lowest,
        "smallest eigenvalues svds": theirs,
    }


# Gaussian process on a grid
# ------------------------------------------------------------------------------------------------


def squared_exponential(points: Any, length: float) -> tuple[Any, Any]:
    gap = points[:, None] - points[None, :]
    k = np.exp(-0.5 * (gap / length) ** 2)
    return k, k * gap**2 / length**3


def ours_on_grid(sizes: tuple[int, ...], lengths: Any, noise: float, y: Any) -> tuple[float, Any]:
    pairs = [
        squared_exponential(np.linspace(0, 1, m), length)
        for m, length in zip(sizes, lengths, strict=True)
    ]
    found = ops.log_marginal_likelihood([k for k, _ in pairs], noise, y)
    slopes = [
        float(np.sum(g * dk)) for g, (_, dk) in zip(found.covariance_gradients, pairs, strict=True)
    ]
    return found.value, np.array([*slopes, found.noise_gradient])


def dense_on_grid(sizes: tuple[int, ...], lengths: Any, noise: float, y: Any) -> tuple[float, Any]:
    """Cholesky factor and inverse of the formed covariance: what a dense Gaussian process does."""
    pairs = [
        squared_exponential(np.linspace(0, 1, m), length)
        for m, length in zip(sizes, lengths, strict=True)
    ]
    n = math.prod(sizes)
    full = kron([k for k, _ in pairs])
    full[np.diag_indices(n)] += noise
    lower = scipy.linalg.cho_factor(full, lower=True, overwrite_a=True)
    alpha = scipy.linalg.cho_solve(lower, y.reshape(-1))
    value = (
        -0.5 * float(y.reshape(-1) @ alpha)
        - float(np.sum(np.log(np.diag(lower[0]))))
        - 0.5 * n * math.log(2 * math.pi)
    )
    inner = scipy.linalg.cho_solve(lower, np.eye(n), overwrite_b=True)
    inner = 0.5 * (np.outer(alpha, alpha) - inner)
    slopes = []
    for i, (_, slope) in enumerate(pairs):
        slopes.append(
            float(np.sum(inner * kron([slope if j == i else k for j, (k, _) in enumerate(pairs)])))
        )
    return value, np.array([*slopes, float(np.trace(inner))])


def grid() -> dict[str, Any]:
    rng, lengths, noise = np.random.default_rng(SEED), (0.2, 0.25, 0.3), 0.1
    small, middle, large = (8, 8, 6), (16, 16, 16), (64, 64, 32)
    y = {sizes: rng.standard_normal(sizes) for sizes in (small, middle, large)}
    (value, slopes), (wanted, wanted_slopes) = (
        f(small, lengths, noise, y[small]) for f in (ours_on_grid, dense_on_grid)
    )
    _, dense_seconds = timed(lambda: dense_on_grid(middle, lengths, noise, y[middle]))
    runs = [timed(lambda: ours_on_grid(middle, lengths, noise, y[middle]))[1] for _ in range(20)]
    _, large_seconds = timed(lambda: ours_on_grid(large, lengths, noise, y[large]))
    return {
        "value, relative difference from dense at 384 points": abs(value - wanted) / abs(wanted),
        "gradient, relative difference": float(
            np.linalg.norm(slopes - wanted_slopes) / np.linalg.norm(wanted_slopes)
        ),
        "points": 4096,
        "seconds": float(np.median(runs)),
        "seconds dense (scipy Cholesky)": dense_seconds,
        "times faster": dense_seconds / float(np.median(runs)),
        "points large": math.prod(large),
        "seconds large": large_seconds,
    }


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "accuracy": accuracy,
    "galerkin": galerkin,
    "million": million,
    "samples": samples,
    "grid": grid,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", help=f"some of {', '.join(PARTS)}; all if none is named"
    )
    for part in parser.parse_args().parts or PARTS:
        result = PARTS[part]() | {"clock": "CPU seconds, one thread"}
        records.save(RESULTS / f"operators-{part}.json", result, seed=SEED)
        print(part, json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
