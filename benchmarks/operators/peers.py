"""Preconditioners beside SciPy's incomplete LU and PyAMG on 3-D diffusion, and the dense way.

python -m benchmarks.operators.peers

The sparse matrix of the same problem serves the peers, so each works on what suits it. CPU seconds
on one thread (OMP_NUM_THREADS=1), within one run. Writes benchmarks/results/operators-peers.json.
Needs pyamg.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pyamg
import scipy.sparse
import scipy.sparse.linalg

import lsrdecomp as lsr
from benchmarks import record as records
from benchmarks.operators.solve import SEED, diffusion, squared_exponential, timed
from benchmarks.record import RESULTS
from lsrdecomp import operators as ops

GOAL = 1e-8


def as_sparse(a: lsr.SeparatedMatrix) -> Any:
    """The same matrix as CSR."""
    total: Any = 0
    for k, weight in enumerate(a.weights):
        term: Any = scipy.sparse.csr_array([[weight]])
        for factor in a.factors:
            term = scipy.sparse.kron(term, scipy.sparse.csr_array(factor[k]), format="csr")
        total = total + term
    return scipy.sparse.csr_array(total)


def row(
    name: str, setup: float, seconds: float, iterations: int, residual: float
) -> dict[str, Any]:
    return {
        "preconditioner": name,
        "iterations": iterations,
        "relative residual": residual,
        "seconds setup": setup,
        "seconds solve": seconds,
        "seconds": setup + seconds,
    }


def with_scipy(
    name: str, method: Any, sparse: Any, b: Any, build: Callable[[], Any]
) -> dict[str, Any]:
    """CG or GMRES of SciPy on the sparse matrix."""
    m, setup = timed(build)
    count = 0

    def product(x: Any) -> Any:
        nonlocal count
        count += 1
        return sparse @ x

    operator = scipy.sparse.linalg.LinearOperator(sparse.shape, matvec=product, dtype=np.float64)
    (x, _), seconds = timed(lambda: method(operator, b, rtol=GOAL, maxiter=5000, M=m))
    return row(
        name, setup, seconds, count, float(np.linalg.norm(b - sparse @ x) / np.linalg.norm(b))
    )


def poisson(n: int) -> dict[str, Any]:
    """Diffusion with a coefficient from 1 to 31 on n³ points."""
    a = diffusion(n)
    sparse = as_sparse(a)
    b = np.random.default_rng(SEED).standard_normal(a.shape[0])
    cg, gmres = scipy.sparse.linalg.cg, scipy.sparse.linalg.gmres
    rows = [with_scipy("none (CG, sparse)", cg, sparse, b, lambda: None)]

    def ilu() -> Any:
        found = scipy.sparse.linalg.spilu(
            scipy.sparse.csc_matrix(sparse), drop_tol=1e-3, fill_factor=10
        )
        return scipy.sparse.linalg.LinearOperator(
            sparse.shape, matvec=found.solve, dtype=np.float64
        )

    rows.append(with_scipy("scipy spilu (GMRES, sparse)", gmres, sparse, b, ilu))
    rows.append(
        with_scipy(
            "pyamg smoothed aggregation (CG, sparse)",
            cg,
            sparse,
            b,
            lambda: pyamg.smoothed_aggregation_solver(
                scipy.sparse.csr_matrix(sparse)
            ).aspreconditioner(),
        )
    )
    for rank in (2, 4, 6):
        inverse, setup = timed(lambda rank=rank: ops.approximate_inverse(a, rank=rank))
        found, seconds = timed(
            lambda m=inverse: ops.solve(
                a, b, rtol=GOAL, method="gmres", preconditioner=m, throw=False
            )
        )
        name = f"approximate_inverse, {rank} terms (GMRES, Kronecker)"
        rows.append(row(name, setup, seconds, found.iterations, found.relative_residual))
    return {"unknowns": a.shape[0], "nonzeros": int(sparse.nnz), "goal": GOAL, "rows": rows}


def naive(sizes: tuple[int, ...] = (8, 12, 16)) -> list[dict[str, Any]]:
    """Time solve, log-determinant and a product with K₁ ⊗ K₂ ⊗ K₃ + 0.1 I, dense and by ours."""
    rows = []
    for m in sizes:
        k = squared_exponential(np.linspace(0, 1, m), 0.3)[0]
        a = lsr.SeparatedMatrix.from_factors(
            [k[None]] * 3
        ) + 0.1 * lsr.SeparatedMatrix.from_factors([np.eye(m)[None]] * 3)
        b = np.random.default_rng(SEED).standard_normal(m**3)

        def dense(k: Any = k, b: Any = b) -> tuple[Any, float]:
            full = np.kron(np.kron(k, k), k) + 0.1 * np.eye(len(b))
            return np.linalg.solve(full, b), float(np.linalg.slogdet(full)[1])

        (x, log), ours = timed(lambda a=a, b=b: (ops.solve(a, b).x, ops.logdet(a)))
        (wanted, wanted_log), theirs = timed(dense)
        rows.append(
            {
                "unknowns": m**3,
                "seconds dense": theirs,
                "seconds": ours,
                "MiB dense": 8.0 * m**6 / 2**20,
                "MiB": 8.0 * (2 * 3 * m * m + 4 * m**3) / 2**20,
                "relative difference": float(np.linalg.norm(x - wanted) / np.linalg.norm(wanted)),
                "difference of log det": abs(log - wanted_log) / max(1.0, abs(wanted_log)),
            }
        )
    return rows


def main() -> None:
    result = {
        "diffusion": [poisson(n) for n in (20, 40)],
        "naive": naive(),
        "clock": "CPU seconds, one thread",
    }
    records.save(RESULTS / "operators-peers.json", result, "pyamg", seed=SEED)
    print(json.dumps(result, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
