"""Ways that others offer to find the first singular triples of a matrix, by library and setting."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeAlias

Triples: TypeAlias = tuple[Any, Any, Any]
"""U (p, s), σ (s,) and Vᴴ (s, q); of a stack with its axis in front."""

Way: TypeAlias = Callable[[Any], Triples]

MAX_DENSE_ENTRIES = 2**20
"""Entries of a matrix up to which all its singular values are found; above, it takes 20 times as
long as others."""

MAX_GRAM_SIDE = 1024
"""Side up to which eigenvectors of a Gram matrix are found, for the same reason."""

OPTIONAL = ("primme",)
"""Packages whose ways are left out where they are not installed."""


def left_out() -> list[str]:
    """Return the optional packages that are not installed."""
    return [name for name in OPTIONAL if find_spec(name) is None]


def ways(shape: tuple[int, int], rank: int, seed: int) -> dict[str, Way]:
    """Return the ways to find so many triples of a matrix of this shape, by their names."""
    warnings.simplefilter("ignore")  # of LOBPCG, where it stops early
    found = _dense(shape, rank) | _sparse(shape, rank, seed) | _randomized(shape, rank, seed)
    if find_spec("primme") is not None:
        found["primme 1e-3"] = _primme(rank)
    return found


def batched_ways(shape: tuple[int, int], rank: int) -> dict[str, Way]:
    """Return the ways to find so many triples of each matrix of a stack at once."""
    import numpy as np
    import torch

    torch.set_num_threads(1)
    side = min(shape)

    def full(stack: Any) -> Triples:
        return _first(*np.linalg.svd(stack, full_matrices=False), rank)

    def full_of_torch(stack: Any) -> Triples:
        u, sigma, vh = torch.linalg.svd(torch.from_numpy(stack), full_matrices=False)
        return _first(u.numpy(), sigma.numpy(), vh.numpy(), rank)

    def gram(stack: Any) -> Triples:
        is_wide = stack.shape[-2] == side
        transposed = stack.swapaxes(-1, -2)
        squared = stack @ transposed if is_wide else transposed @ stack
        vectors = np.linalg.eigh(squared)[1][..., -rank:]
        return _projected(stack, vectors, is_wide)

    return {"numpy svd, batched": full, "torch svd, batched": full_of_torch, "numpy eigh": gram}


def _first(u: Any, sigma: Any, vh: Any, rank: int) -> Triples:
    return u[..., :, :rank], sigma[..., :rank], vh[..., :rank, :]


def _projected(matrix: Any, vectors: Any, is_wide: bool) -> Triples:
    """Return a matrix projected on orthonormal columns of its short side, as U, ones and Vᴴ."""
    import numpy as np

    ones = np.ones(vectors.shape[-1])
    if is_wide:
        return vectors, ones, vectors.swapaxes(-1, -2) @ matrix
    return matrix @ vectors, ones, vectors.swapaxes(-1, -2)


def _dense(shape: tuple[int, int], rank: int) -> dict[str, Way]:
    """Return LAPACK's ways: all triples, or a range of eigenvectors of the Gram matrix."""
    import numpy as np
    import scipy.linalg

    side = min(shape)

    def full(matrix: Any) -> Triples:
        return _first(*np.linalg.svd(matrix, full_matrices=False), rank)

    def full_of_scipy(matrix: Any) -> Triples:
        triples = scipy.linalg.svd(matrix, full_matrices=False, check_finite=False)
        return _first(*triples, rank)

    def gram(matrix: Any) -> Triples:
        is_wide = matrix.shape[0] == side
        _, vectors = scipy.linalg.eigh(
            matrix @ matrix.T if is_wide else matrix.T @ matrix,
            subset_by_index=(side - rank, side - 1),
            driver="evr",
            overwrite_a=True,
            check_finite=False,
        )
        return _projected(matrix, vectors, is_wide)

    found: dict[str, Way] = {}
    if shape[0] * shape[1] <= MAX_DENSE_ENTRIES:
        found |= {"numpy svd": full, "scipy svd": full_of_scipy}
    if side <= MAX_GRAM_SIDE:
        found["scipy eigh of the Gram matrix"] = gram
    return found


def _sparse(shape: tuple[int, int], rank: int, seed: int) -> dict[str, Way]:
    """Return SciPy's iterations, at the tolerance of ours."""
    import numpy as np
    from scipy.sparse.linalg import svds

    rng = np.random.default_rng(seed)

    def way(solver: str, **options: Any) -> Way:
        return lambda matrix: svds(matrix, rank, tol=1e-3, solver=solver, rng=rng, **options)

    found = {"svds arpack 1e-3": way("arpack"), "svds propack 1e-3": way("propack")}
    if 5 * rank < min(shape):
        found["svds lobpcg 1e-3"] = way("lobpcg", maxiter=60)
    return found


def _randomized(shape: tuple[int, int], rank: int, seed: int) -> dict[str, Way]:
    """Return the randomized methods, by their number of power steps."""
    import numpy as np
    import torch
    from sklearn.utils.extmath import randomized_svd

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    random = np.random.RandomState(seed)
    columns = min(rank + 8, min(shape))

    def of_sklearn(steps: int) -> Way:
        scheme = "LU" if steps > 1 else "none"
        return lambda matrix: randomized_svd(
            matrix,
            rank,
            n_iter=steps,
            power_iteration_normalizer=scheme,
            random_state=random,
        )

    def of_torch(steps: int) -> Way:
        def way(matrix: Any) -> Triples:
            u, sigma, v = torch.svd_lowrank(torch.from_numpy(matrix), q=columns, niter=steps)
            return _first(u.numpy(), sigma.numpy(), v.numpy().T, rank)

        return way

    found = {f"randomized_svd {steps}": of_sklearn(steps) for steps in (0, 1, 2, 4)}
    return found | {f"torch svd_lowrank {steps}": of_torch(steps) for steps in (1, 2)}


def _primme(rank: int) -> Way:
    """Return PRIMME's iteration, at the tolerance of ours."""
    import primme

    def way(matrix: Any) -> Triples:
        u, sigma, vh = primme.svds(matrix, rank, tol=1e-3)
        return u, sigma, vh

    return way
