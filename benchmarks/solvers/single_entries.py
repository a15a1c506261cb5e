"""Non-negative factors beside TensorLy's HALS, and missing entries beside plain ALS and LM.

    python -m benchmarks.solvers.single_entries

writes benchmarks/results/single_entries.json. Every solver has the same number of random starts.
CPU seconds of one process; set OMP_NUM_THREADS=1 for one thread.
"""

from __future__ import annotations

import json
import math
import time
import warnings
from functools import reduce

import numpy as np
import tensorly
from scipy.optimize import least_squares
from tensorly.decomposition import non_negative_parafac_hals

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.decompose import decompose
from lsrdecomp.kronecker.rearrange import rearrange
from lsrdecomp.kronecker.shape import KroneckerShape

STARTS = 4
SEEDS = 5
SHAPES = (("6x5, 5x5", 3), ("8x8, 7x7", 5), ("4x4, 3x3, 3x2", 3))
"""Shapes and terms of the non-negative problems."""
NOISE = (0.0, 0.1, 1.0)
"""Norm of the noise over that of the sum."""
MISSING = (
    *(("8x8, 8x8", 1, 0.1), ("8x8, 8x8", 2, 0.2), ("8x8, 8x8", 3, 0.3)),
    *(("6x6, 6x6", 2, 0.4), ("6x6, 6x6", 3, 0.5), ("4x4, 3x3, 3x3", 2, 0.5)),
)
"""Shapes, terms and the share of entries that are known."""


def drawn_sum(shape: KroneckerShape, terms: int, rng: np.random.Generator, positive: bool):
    total = np.zeros(shape.matrix_shape)
    for _ in range(terms):
        factors = [rng.standard_normal(size) for size in shape.factors]
        if positive:
            # Half of the entries are zero, as in layouts and tiles of images.
            factors = [np.maximum(factor, 0.0) for factor in factors]
        total += reduce(np.kron, factors)
    return total


def non_negative(text: str, terms: int, noise: float, seed: int) -> dict:
    """Return the errors of one problem, ours and TensorLy's."""
    shape = KroneckerShape.parse(text)
    rng = np.random.default_rng(seed)
    matrix = drawn_sum(shape, terms, rng, positive=True)
    error = rng.standard_normal(matrix.shape)
    matrix += noise * np.linalg.norm(matrix) / np.linalg.norm(error) * error
    start = time.process_time()
    result = decompose(matrix, shape, rank=terms, non_negative=True, seed=seed)
    seconds = time.process_time() - start
    smallest = min((float(factor.min()) for factor in result.factors if factor.size), default=0.0)
    tensor = np.ascontiguousarray(rearrange(matrix, shape)) / np.linalg.norm(matrix)
    errors = []
    start = time.process_time()
    for number in range(STARTS):
        fit = non_negative_parafac_hals(
            tensor, terms, n_iter_max=1000, init="random", random_state=number, tol=1e-10
        )
        errors.append(float(np.linalg.norm(tensor - tensorly.cp_to_tensor(fit))))
    return {
        "problem": f"{text}, {terms} terms",
        "noise": noise,
        "seed": seed,
        "ours": result.relative_error,
        "smallest entry": smallest,
        "seconds": seconds,
        "hals": min(errors),
        "hals seconds": time.process_time() - start,
    }


def missing(text: str, terms: int, share: float, seed: int) -> dict:
    """Return the errors on the unknown entries of one exact sum, ours and the plain way's."""
    shape = KroneckerShape.parse(text)
    rng = np.random.default_rng(seed)
    matrix = drawn_sum(shape, terms, rng, positive=False)
    known = rng.random(matrix.shape) < share
    start = time.process_time()
    result = decompose(matrix, shape, rank=terms, known=known, seed=seed)
    seconds = time.process_time() - start
    tensor, mask = rearrange(matrix, shape), rearrange(known, shape).astype(bool)
    start = time.process_time()
    plain = plain_completion(np.where(mask, tensor, 0.0), mask, terms)
    plain_seconds = time.process_time() - start

    def unknown_error(found, whole, hidden):
        return float(np.linalg.norm((found - whole)[hidden]) / np.linalg.norm(whole[hidden]))

    return {
        "problem": f"{text}, {terms} terms, {share:.0%} known",
        "seed": seed,
        "ours": unknown_error(result.to_matrix(), matrix, ~known),
        "status": result.status.name,
        "seconds": seconds,
        "plain": unknown_error(plain, tensor, ~mask),
        "plain seconds": plain_seconds,
    }


def plain_completion(tensor: np.ndarray, mask: np.ndarray, terms: int) -> np.ndarray:
    """Return the best of some starts of least squares by rows and SciPy's Levenberg–Marquardt."""
    sizes = tensor.shape
    best, smallest = np.zeros(sizes), math.inf
    splits = np.cumsum([size * terms for size in sizes])[:-1]

    def columns_of(values):
        parts = np.split(values, splits)
        return [part.reshape(size, terms) for part, size in zip(parts, sizes, strict=True)]

    def misfit(values):
        total = tensorly.cp_to_tensor((None, columns_of(values)))
        return (total - tensor)[mask]

    for number in range(STARTS):
        rng = np.random.default_rng(number)
        columns = [rng.standard_normal((size, terms)) for size in sizes]
        for _ in range(50):
            for mode, size in enumerate(sizes):
                others = tensorly.tenalg.khatri_rao(columns, skip_matrix=mode)
                rows = tensorly.unfold(tensor, mode), tensorly.unfold(mask, mode)
                for i in range(size):
                    values, is_known = rows[0][i], rows[1][i]
                    columns[mode][i] = np.linalg.lstsq(others[is_known], values[is_known])[0]
        start = np.concatenate([column.ravel() for column in columns])
        fit = least_squares(
            misfit, start, method="trf", xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=50
        )
        if fit.cost < smallest:
            best, smallest = tensorly.cp_to_tensor((None, columns_of(fit.x))), fit.cost
    return best


def main() -> None:
    warnings.simplefilter("ignore")
    rows = [
        non_negative(text, terms, noise, seed)
        for text, terms in SHAPES
        for noise in NOISE
        for seed in range(SEEDS)
    ]
    holes = [missing(*case, seed) for case in MISSING for seed in range(SEEDS)]
    record = {"starts": STARTS, "non-negative": rows, "missing": holes}
    records.save(RESULTS / "single_entries.json", record, "tensorly", "scipy", seed=0)
    for row in (*rows, *holes):
        print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
