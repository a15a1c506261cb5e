"""Two-factor solvers beside numpy, scipy, scikit-learn and torch: time, excess error, memory.

    python -m benchmarks.solvers.two_factors --threads 1 --out benchmarks/results
    python -m benchmarks.solvers.two_factors --threads 2 --only dense
    python -m benchmarks.solvers.two_factors --only pictures

Every library is handed the same rearranged matrix, so what differs is the solver; our times include
the rearrangement. Times are CPU seconds where one thread runs and wall seconds otherwise, medians
of ``--runs``; of single dense matrices and of the pair minima of ``--runs`` in which all solvers
take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import record as records
from benchmarks.record import RESULTS


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--size", type=int, default=4096)
    arguments.add_argument("--rank", type=int, default=16)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--matrices", type=int, default=224, help="of the batch")
    arguments.add_argument(
        "--only",
        choices=("dense", "pair", "batch", "leading", "search", "pictures"),
        help="one part; pictures: from the record",
    )
    arguments.add_argument(
        "--brute", action="store_true", help="also search shapes by brute force (minutes)"
    )
    arguments.add_argument("--out", type=Path, default=RESULTS)
    options = arguments.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(options.threads)  # read when the libraries are first imported, below
    options.out.mkdir(parents=True, exist_ok=True)
    size = "" if options.size == 4096 else f"{options.size}-"
    file = options.out / f"solvers-{size}threads{options.threads}.json"
    record = records.load(file)
    settings = {
        name: getattr(options, name)
        for name in ("threads", "size", "rank", "runs", "seed", "matrices")
    }
    parts = {
        "dense": dense,
        "pair": pair,
        "batch": batch,
        "leading": leading,
        "search": search,
    }
    for name, part in parts.items():
        if options.only in (None, name):  # the parts of one file may be measured one by one
            record[name] = {"settings": settings, "rows": part(options)}
            records.save(file, record, "scikit-learn", "torch", seed=options.seed)
            print(json.dumps(record[name], indent=1), flush=True)
    if options.only in (None, "dense", "pictures"):
        figure(record["dense"]["rows"], file.with_suffix(".png"))


def timed(run: Callable[[], Any], options: argparse.Namespace) -> tuple[float, Any]:
    """Median seconds and the last answer."""
    clock = time.process_time if options.threads == 1 else time.perf_counter
    seconds = []
    for _ in range(options.runs):
        start = clock()
        answer = run()
        seconds.append(clock() - start)
    return statistics.median(seconds), answer


def spectra(size: int, seed: int) -> dict[str, Any]:
    """Return rearranged matrices by the name of their spectrum.

    A 1/k spectrum in random bases (by Householder products), an exponential kernel, noise, and two
    geometric spectra whose optimum at 16 terms lies near the rounding of squares, 4e-9, and of
    entries, 1e-12.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    decay = np.diag(1.0 / np.arange(1.0, size + 1))
    for _ in range(32):
        for side in range(2):
            v = rng.standard_normal(size)
            v /= np.linalg.norm(v)
            decay = decay - 2.0 * (np.outer(v, v @ decay) if side else np.outer(decay @ v, v))
    high = 2 ** (round(np.log2(size)) // 2)
    points = np.stack(np.divmod(np.arange(size), high)) / np.array([[size // high], [high]])
    distance = np.sqrt(
        (points[0][:, None] - points[0]) ** 2 + (points[1][:, None] - points[1]) ** 2
    )
    kernel = np.exp(-3.0 * distance)
    noise = rng.standard_normal((size, size))
    left, right = (np.linalg.qr(rng.standard_normal((size, min(64, size))))[0] for _ in range(2))
    fast = {
        f"{base}^k": (left * base ** np.arange(min(64.0, size))) @ right.T for base in (0.3, 0.18)
    }
    return {"1/k": decay, "exponential kernel": kernel, "noise": noise} | fast


def dense(options: argparse.Namespace) -> list[dict[str, Any]]:
    import numpy as np
    import scipy.linalg.interpolative
    import scipy.sparse.linalg
    import torch
    from sklearn.utils.extmath import randomized_svd

    from lsrdecomp import KroneckerShape
    from lsrdecomp.kronecker.rearrange import inverse_rearrange
    from lsrdecomp.solvers import Krylov
    from lsrdecomp.targets.target import Dense

    torch.set_num_threads(options.threads)
    claims: list[Any] = []
    s, high, rows = options.rank, 2 ** (round(np.log2(options.size)) // 2), []
    wide = options.size // high
    shape = KroneckerShape(((high, wide), (wide, high)))
    for name, rearranged in spectra(options.size, options.seed).items():
        matrix, tensor = inverse_rearrange(rearranged, shape), torch.as_tensor(rearranged)
        start = time.process_time()
        full = np.linalg.svd(rearranged)
        full_seconds = time.process_time() - start
        optimum = float(np.linalg.norm(full[1][s:]))
        rows.append(
            {"problem": name, "solver": "numpy svd", "seconds": full_seconds, "excess": 0.0}
        )

        def ours(tolerance: float, matrix: Any = matrix) -> tuple[Any, Any, Any]:
            solution = Krylov(tolerance=tolerance).solve(Dense(matrix), shape, rank=s)
            m = solution.approximation
            left, right = (f.reshape(s, -1) for f in m.factors)
            claims.append(solution.optimality_gap)
            return left.T, m.weights, right

        def interpolative(matrix: Any = rearranged) -> tuple[Any, Any, Any]:
            u, sigma, v = scipy.linalg.interpolative.svd(matrix, s)
            return u, sigma, v.conj().T

        def low_rank(steps: int, tensor: Any = tensor) -> tuple[Any, Any, Any]:
            torch.manual_seed(options.seed)
            u, sigma, v = torch.svd_lowrank(tensor, q=s + 10, niter=steps)
            return u.numpy()[:, :s], sigma.numpy()[:s], v.numpy().T[:s]

        solvers: dict[str, Callable[[], Any]] = {
            "lsrdecomp 1e-3": lambda f=ours: f(1e-3),
            "lsrdecomp 1e-6": lambda f=ours: f(1e-6),
            "scipy svds": lambda a=rearranged: scipy.sparse.linalg.svds(
                a, s, random_state=options.seed
            ),
            "scipy svds tol 1e-3": lambda a=rearranged: scipy.sparse.linalg.svds(
                a, s, tol=1e-3, random_state=0
            ),
            "scipy interpolative": interpolative,
            "sklearn tuned": lambda a=rearranged: randomized_svd(
                a, s, n_iter=2, power_iteration_normalizer="LU", random_state=options.seed
            ),
            "sklearn 1": lambda a=rearranged: randomized_svd(
                a, s, n_iter=1, power_iteration_normalizer="LU", random_state=options.seed
            ),
            "sklearn 4": lambda a=rearranged: randomized_svd(
                a, s, n_iter=4, random_state=options.seed
            ),
            "sklearn 7": lambda a=rearranged: randomized_svd(
                a, s, n_iter=7, random_state=options.seed
            ),
            "torch lowrank 2": lambda f=low_rank: f(2),
            "torch lowrank 8": lambda f=low_rank: f(8),
        }
        clock, taken, found = (
            time.process_time if options.threads == 1 else time.perf_counter,
            {},
            {},
        )
        for _ in range(options.runs):
            for solver, run in solvers.items():
                claims.clear()
                start = clock()
                answer = run()
                taken.setdefault(solver, []).append(clock() - start)
                found[solver] = answer, (claims[-1] if claims else None)
        for solver, ((u, sigma, vh), claimed) in found.items():
            seconds = min(taken[solver])
            error = float(np.linalg.norm(rearranged - (u * sigma) @ vh))
            rows.append(
                {
                    "problem": name,
                    "solver": solver,
                    "seconds": seconds,
                    "excess": error / optimum - 1.0,
                    "claimed": claimed,
                    "times faster than svd": full_seconds / seconds,
                }
            )
    return rows


def pair(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A low-rank product 8192×28672 of inner size 64: implicit against formed."""
    import numpy as np

    from lsrdecomp import KroneckerShape, LowRank, decompose
    from lsrdecomp.solvers import Krylov
    from lsrdecomp.targets.target import Dense

    rng = np.random.default_rng(options.seed)
    decay = 1.0 / np.arange(1.0, 65.0)
    left = (rng.standard_normal((8192, 64)) * decay).astype(np.float32)
    right = rng.standard_normal((64, 28672)).astype(np.float32)
    shape = KroneckerShape(((64, 128), (128, 224)))
    solver = Krylov()
    tracemalloc.start()
    solver.solve(LowRank(left, right), shape, rank=16)
    extra = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    runs = {
        "implicit": lambda: solver.solve(LowRank(left, right), shape, rank=16),
        "whole": lambda: decompose(LowRank(left, right), shape, rank=16),
        "formed": lambda: solver.solve(Dense(left @ right), shape, rank=16),
    }
    clock, taken, found = time.process_time if options.threads == 1 else time.perf_counter, {}, {}
    for _ in range(options.runs):
        for name, run in runs.items():
            start = clock()
            found[name] = run()
            taken.setdefault(name, []).append(clock() - start)
    implicit, whole, formed = (min(taken[name]) for name in runs)
    target = LowRank(left, right)
    errors = [
        target.residual_norm(found[x].approximation) / target.norm for x in ("implicit", "formed")
    ]
    return [
        {
            "implicit seconds": implicit,
            "with measured error": whole,
            "times the solve": whole / implicit,
            "formed seconds": formed,
            "times faster": formed / implicit,
            "extra MB": extra / 1e6,
            "relative errors": errors,
            "claimed": found["implicit"].optimality_gap,
        }
    ]


def batch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time matrices of 256² together against NumPy's and torch's batched SVD."""
    import numpy as np
    import scipy.linalg
    import torch

    from lsrdecomp import KroneckerShape
    from lsrdecomp.kronecker.rearrange import inverse_rearrange
    from lsrdecomp.solvers import Krylov

    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(options.seed)
    n, count, rows = 256, options.matrices, []
    k = np.arange(1.0, n + 1)
    shape = KroneckerShape(((16, 16), (16, 16)))
    bases = np.linalg.qr(rng.standard_normal((8, n, n)))[0]
    spectra_of = {"1/k": 1.0 / k, "exponential": np.exp(-k / 8.0), ".3^k": 0.3**k}
    stacks = {
        name: np.stack([(bases[i % 8] * sigma) @ bases[(i + 1) % 8].T for i in range(count)])
        for name, sigma in spectra_of.items()
    }
    stacks["noise"] = rng.standard_normal((count, n, n))
    lag = np.arange(n)
    stacks["Toeplitz and noise"] = np.stack(
        [scipy.linalg.toeplitz(np.exp(-lag / (5.0 + i % 32))) for i in range(count)]
    )
    stacks["Toeplitz and noise"] += 1e-3 * rng.standard_normal((count, n, n))
    for name, stack in stacks.items():
        for kind in ("float64", "float32"):
            held = stack.astype(kind)
            matrices = inverse_rearrange(held, shape)
            numpy_svd, (_, spectrum, _) = timed(
                lambda a=held: np.linalg.svd(a, full_matrices=False), options
            )
            tensor = torch.as_tensor(held)
            torch_svd, _ = timed(lambda a=tensor: torch.linalg.svd(a, full_matrices=False), options)
            for s in (8, 16):
                ours, found = timed(
                    lambda m=matrices, s=s: Krylov().solve_batch(m, shape, rank=s), options
                )
                best = np.linalg.norm(spectrum[:, s:].astype(float), axis=1)
                errors = np.array(
                    [
                        np.linalg.norm(m.astype(float) - x.approximation.to_matrix())
                        for m, x in zip(matrices, found, strict=True)
                    ]
                )
                floor = 64 * np.finfo(held.dtype).eps * np.linalg.norm(stack, axis=(1, 2))
                rows.append(
                    {
                        "problem": name,
                        "dtype": kind,
                        "rank": s,
                        "seconds": ours,
                        "times faster than numpy": numpy_svd / ours,
                        "times faster than torch": torch_svd / ours,
                        "worst excess": float(np.max((errors - best) / np.maximum(best, floor))),
                    }
                )
    return rows


def leading(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time starts of a pair: `leading_triples`, `Krylov` at two tolerances, and NumPy."""
    import numpy as np

    from lsrdecomp import KroneckerShape
    from lsrdecomp.solvers import Krylov
    from lsrdecomp.solvers.pair.initialization import leading_triples

    rng, rows = np.random.default_rng(options.seed), []
    loose = Krylov(tolerance=1e-2)
    for count, p, q, s in (
        (64, 64, 48, 2),
        (8, 128, 48, 4),
        (24, 96, 96, 8),
        (8, 384, 256, 8),
        (4, 512, 512, 16),
    ):
        shape = KroneckerShape(((p, 1), (1, q)))  # whose rearrangement is the matrix itself
        noise = rng.standard_normal((count, p, q))
        u, spectrum, vh = np.linalg.svd(noise, full_matrices=False)
        for name, sigma in (
            ("noise", spectrum),
            ("1/k", np.broadcast_to(1.0 / np.arange(1.0, q + 1), (count, q))),
        ):
            stack = (u * sigma[:, None, :]) @ vh
            best = np.linalg.norm(sigma[:, s:], axis=1)
            ours, (left, values, right) = timed(lambda m=stack, s=s: leading_triples(m, s), options)
            numpy_svd, _ = timed(lambda m=stack: np.linalg.svd(m, full_matrices=False), options)
            errors = np.linalg.norm(stack - (left * values[:, None, :]) @ right, axis=(1, 2))
            row = {
                "problem": name,
                "count": count,
                "size": [p, q],
                "rank": s,
                "seconds": ours,
                "numpy over ours": numpy_svd / ours,
                "worst excess": float(np.max(errors / best - 1.0)),
            }
            for label, solver in (("krylov", Krylov()), ("loose krylov", loose)):
                theirs, found = timed(
                    lambda m=stack, s=s, k=solver, f=shape: k.solve_batch(m, f, rank=s), options
                )
                errors = np.array(
                    [
                        np.linalg.norm(m - x.approximation.to_matrix())
                        for m, x in zip(stack, found, strict=True)
                    ]
                )
                row |= {
                    f"{label} over ours": theirs / ours,
                    f"{label} excess": float(np.max(errors / best - 1.0)),
                }
            rows.append(row)
    return rows


def search(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Find the fewest parameters over all shapes; with --brute by every shape's spectrum."""
    import numpy as np

    from lsrdecomp.kronecker.rearrange import rearrange
    from lsrdecomp.kronecker.shape import kronecker_shapes
    from lsrdecomp.shape_search import best_shape

    i = np.arange(float(options.size))
    distance = np.abs(i[:, None] - i)
    waves = sum(
        np.outer(np.cos(f * (i / options.size * 3 + 1)), np.sin(f * i / options.size * 4)) / f
        for f in range(1, 60)
    )
    rows = []
    for name, matrix in {
        "1/r kernel": 1.0 / (1.0 + distance),
        "waves": waves + 1e-3 * np.cos(0.01 * distance),
    }.items():
        spectra_of: dict[Any, Any] = {}
        start = time.process_time()
        for shape in kronecker_shapes(matrix.shape) if options.brute else ():
            r = rearrange(matrix, shape)
            gram = r @ r.T if r.shape[0] <= r.shape[1] else r.T @ r
            spectra_of[shape] = np.maximum(np.linalg.eigvalsh(gram), 0.0)
        brute = time.process_time() - start
        for rtol in (1e-1, 1e-2, 1e-3):
            begun = time.process_time()
            found = best_shape(matrix, rtol=rtol)
            row = {
                "problem": name,
                "rtol": rtol,
                "shape": str(found.best.shape),
                "terms": found.best.rank,
                "parameters": found.best.parameters,
                "seconds": time.process_time() - begun,
                "examined": found.examined,
                "unresolved": found.unresolved,
            }
            if spectra_of:
                allowed = (rtol * np.linalg.norm(matrix)) ** 2
                needs = {
                    shape: shape.parameters(max(int(np.sum(np.cumsum(values) > allowed)), 1))
                    for shape, values in spectra_of.items()
                }
                row |= {"brute seconds": brute, "brute parameters": min(needs.values())}
            rows.append(row)
    return rows


SOLVERS = {
    "lsrdecomp": "lsrdecomp",
    "scipy svds": "svds",
    "scipy interpolative": "interpolative",
    "sklearn": "randomized_svd",
    "torch": "svd_lowrank",
}
"""How the picture names solvers, by how their settings begin in the record."""
EXACT = 1e-12
"""Excess that is drawn for what is exact to rounding."""


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw excess over the optimum against time, a panel a problem, a line a solver's settings.

    Problems on which every solver but one is within 1e-9 are left out: there is nothing to see.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter, PercentFormatter

    from lsrdecomp.plots.pictures import COLOURS, MARKERS, name_lines

    problems = {problem: _settings(rows, problem) for problem in _problems(rows)}
    shown = [name for name, settings in problems.items() if _spread_of(settings) > 1]
    drawing = Figure(figsize=(9.6, 3.4 * -(-len(shown) // 2)), layout="constrained")
    panels = drawing.subplots(-(-len(shown) // 2), 2, sharex=True, sharey=True, squeeze=False)
    for panel, problem in zip(panels.flat, shown, strict=False):
        panel.axhspan(EXACT / 300.0, 3.0 * EXACT, color="0.93")
        for i, (label, points) in enumerate(problems[problem].items()):
            times, excesses = zip(*points, strict=True)
            panel.loglog(
                times, excesses, color=COLOURS[i], marker=MARKERS[i], markersize=5, label=label
            )
        panel.set(title=problem, xlim=(0.0025, 0.2), ylim=(EXACT / 300.0, 5.0))
        panel.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(True, which="major", linewidth=0.4, alpha=0.5)
        panel.spines[["top", "right"]].set_visible(False)
        name_lines(panel)
    for panel in panels[-1]:
        panel.set_xlabel("time, as a share of the full SVD's, log scale")
    for panel in panels[:, 0]:
        panel.set_ylabel("error / optimum − 1, log scale\n(shaded: exact to rounding)")
    for panel in panels.flat[len(shown) :]:
        panel.remove()
    drawing.savefig(path, dpi=140)


def _problems(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(row["problem"] for row in rows))


def _settings(rows: list[dict[str, Any]], problem: str) -> dict[str, list[tuple[float, float]]]:
    """Return time and excess of each solver's settings on a problem, the fastest first."""
    points: dict[str, list[tuple[float, float]]] = {}
    for begin, label in SOLVERS.items():
        found = [
            (1.0 / row["times faster than svd"], max(row["excess"], EXACT))
            for row in rows
            if row["problem"] == problem and row["solver"].startswith(begin)
        ]
        if found:
            points[label] = sorted(found)
    return points


def _spread_of(settings: dict[str, list[tuple[float, float]]], visible: float = 1e-9) -> int:
    """Return how many solvers have a setting whose excess is visible."""
    return sum(any(excess > visible for _, excess in points) for points in settings.values())


if __name__ == "__main__":
    main()
