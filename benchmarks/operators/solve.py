"""Operators against dense NumPy and the routes people take now.

python -m benchmarks.operators.solve [galerkin million]

Seconds are CPU seconds of one process on one thread (OMP_NUM_THREADS=1), so that other work on the
machine weighs less; ratios are within one run. Writes benchmarks/results/operators-PART.json.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
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


def kron(matrices: Any) -> Any:
    total = np.ones((1, 1))
    for matrix in matrices:
        total = np.kron(total, matrix)
    return total


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


def squared_exponential(points: Any, length: float) -> tuple[Any, Any]:
    gap = points[:, None] - points[None, :]
    k = np.exp(-0.5 * (gap / length) ** 2)
    return k, k * gap**2 / length**3


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


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "galerkin": galerkin,
    "million": million,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "parts", nargs="*", help=f"some of {', '.join(PARTS)}; all if none is named"
    )
    parser.add_argument("--again", action="store_true", help="replace a record that is there")
    options = parser.parse_args()
    for part in options.parts or PARTS:
        result = PARTS[part]() | {"clock": "CPU seconds, one thread"}
        print(part, json.dumps(result, indent=1, ensure_ascii=False))
        path = RESULTS / f"operators-{part}.json"
        if path.exists() and not options.again:
            print(f"{path} stays as it was; --again replaces it", file=sys.stderr)
        else:
            records.save(path, result, seed=SEED)


if __name__ == "__main__":
    main()
