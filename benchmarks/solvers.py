"""Two-factor solvers beside numpy, scipy, scikit-learn and torch, in one run: time, excess error, memory.

    python benchmarks/solvers.py --threads 1 --out benchmarks/results
    python benchmarks/solvers.py --threads 2 --only dense

Every library is handed the same rearranged matrix, so what differs is the solver; our times include the rearrangement.
Times are CPU seconds where one thread runs and wall seconds otherwise, medians of ``--runs``.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--size", type=int, default=4096)
    arguments.add_argument("--rank", type=int, default=16)
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--only", choices=("dense", "pair", "batch", "search"))
    arguments.add_argument("--brute", action="store_true", help="also search shapes by brute force (minutes)")
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = arguments.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = str(options.threads)  # read when the libraries are first imported, below
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / f"solvers-threads{options.threads}.json"
    record: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    settings = {name: getattr(options, name) for name in ("threads", "size", "rank", "runs", "seed")}
    parts = {"dense": dense, "pair": pair, "batch": batch, "search": search}
    for name, part in parts.items():
        if options.only in (None, name):  # the parts of one file may be measured one by one
            record[name] = {"settings": settings, "versions": versions(), "rows": part(options)}
            file.write_text(json.dumps(record, indent=1) + "\n")
            print(json.dumps(record[name], indent=1), flush=True)
    if options.only in (None, "dense"):
        figure(record["dense"]["rows"], file.with_suffix(".png"))


def versions() -> dict[str, str]:
    names = ("lsrdecomp", "numpy", "scipy", "scikit-learn", "torch")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


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
    """Rearranged matrices: a 1/k spectrum in random bases (by Householder products), an exponential kernel, noise."""
    import numpy as np

    rng = np.random.default_rng(seed)
    decay = np.diag(1.0 / np.arange(1.0, size + 1))
    for _ in range(32):
        for side in range(2):
            v = rng.standard_normal(size)
            v /= np.linalg.norm(v)
            decay = decay - 2.0 * (np.outer(v, v @ decay) if side else np.outer(decay @ v, v))
    root = round(size**0.5)
    points = np.stack(np.divmod(np.arange(size), root)) / root
    distance = np.sqrt((points[0][:, None] - points[0]) ** 2 + (points[1][:, None] - points[1]) ** 2)
    kernel = np.exp(-3.0 * distance)
    return {"1/k": decay, "exponential kernel": kernel, "noise": rng.standard_normal((size, size))}


def dense(options: argparse.Namespace) -> list[dict[str, Any]]:
    import numpy as np
    import scipy.linalg.interpolative
    import scipy.sparse.linalg
    import torch
    from sklearn.utils.extmath import randomized_svd

    from lsrdecomp import KroneckerShape
    from lsrdecomp.kronecker.rearrange import inverse_rearrange
    from lsrdecomp.solvers.svd.golub_kahan import BlockGolubKahan
    from lsrdecomp.targets.base import Dense

    torch.set_num_threads(options.threads)
    claims: list[Any] = []
    s, root, rows = options.rank, round(options.size**0.5), []
    shape = KroneckerShape(((root, root), (root, root)))
    for name, rearranged in spectra(options.size, options.seed).items():
        matrix, tensor = inverse_rearrange(rearranged, shape), torch.as_tensor(rearranged)
        start = time.process_time()
        full = np.linalg.svd(rearranged)
        full_seconds = time.process_time() - start
        optimum = float(np.linalg.norm(full[1][s:]))
        rows.append({"problem": name, "solver": "numpy svd", "seconds": full_seconds, "excess": 0.0})

        def ours(tolerance: float, matrix: Any = matrix) -> tuple[Any, Any, Any]:
            solution = BlockGolubKahan(tolerance=tolerance).solve(Dense(matrix), shape, rank=s)
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
            "scipy svds": lambda a=rearranged: scipy.sparse.linalg.svds(a, s, random_state=options.seed),
            "scipy svds tol 1e-3": lambda a=rearranged: scipy.sparse.linalg.svds(a, s, tol=1e-3, random_state=0),
            "scipy interpolative": interpolative,
            "sklearn 4": lambda a=rearranged: randomized_svd(a, s, n_iter=4, random_state=options.seed),
            "sklearn 7": lambda a=rearranged: randomized_svd(a, s, n_iter=7, random_state=options.seed),
            "torch lowrank 2": lambda f=low_rank: f(2),
            "torch lowrank 8": lambda f=low_rank: f(8),
        }
        for solver, run in solvers.items():
            claims.clear()
            seconds, (u, sigma, vh) = timed(run, options)
            error = float(np.linalg.norm(rearranged - (u * sigma) @ vh))
            rows.append(
                {"problem": name, "solver": solver, "seconds": seconds, "excess": error / optimum - 1.0,
                 "claimed": claims[-1] if claims else None, "times faster than svd": full_seconds / seconds}
            )  # fmt: skip
    return rows


def pair(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A low-rank product 8192×28672 of inner size 64: implicit against formed."""
    import numpy as np

    from lsrdecomp import KroneckerShape, LowRank
    from lsrdecomp.solvers.svd.golub_kahan import BlockGolubKahan
    from lsrdecomp.targets.base import Dense

    rng = np.random.default_rng(options.seed)
    decay = 1.0 / np.arange(1.0, 65.0)
    left = (rng.standard_normal((8192, 64)) * decay).astype(np.float32)
    right = rng.standard_normal((64, 28672)).astype(np.float32)
    shape = KroneckerShape(((64, 128), (128, 224)))
    solver = BlockGolubKahan()
    tracemalloc.start()
    solver.solve(LowRank(left, right), shape, rank=16)
    extra = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    implicit, found = timed(lambda: solver.solve(LowRank(left, right), shape, rank=16), options)
    formed, other = timed(lambda: solver.solve(Dense(left @ right), shape, rank=16), options)
    target = LowRank(left, right)
    errors = [target.residual_norm(x.approximation) / target.norm for x in (found, other)]
    return [{"implicit seconds": implicit, "formed seconds": formed, "times faster": formed / implicit,
             "extra MB": extra / 1e6, "relative errors": errors, "claimed": found.optimality_gap}]  # fmt: skip


def batch(options: argparse.Namespace) -> list[dict[str, Any]]:
    """224 matrices of 256² together against torch's batched SVD."""
    import numpy as np
    import torch

    from lsrdecomp import KroneckerShape
    from lsrdecomp.solvers.svd.batched import BatchedKrylov

    torch.set_num_threads(options.threads)
    rng = np.random.default_rng(options.seed)
    n, count, rows = 256, 224, []
    k = np.arange(1.0, n + 1)
    shape = KroneckerShape(((16, 16), (16, 16)))
    spectra_of = {"1/k": 1.0 / k, "exponential": np.exp(-k / 8.0), "noise": None}
    for name, sigma in spectra_of.items():
        bases = np.linalg.qr(rng.standard_normal((8, n, n)))[0]
        if sigma is None:
            stack = rng.standard_normal((count, n, n))
        else:
            stack = np.stack([(bases[i % 8] * sigma) @ bases[(i // 8) % 8].T @ bases[5] for i in range(count)])
        for kind in ("float64", "float32"):
            tensor = torch.as_tensor(stack).to(getattr(torch, kind))
            grid = tensor.reshape(count, 16, 16, 16, 16).permute(0, 1, 3, 2, 4).reshape(count, n, n)
            svd, (_, spectrum, _) = timed(lambda t=tensor: torch.linalg.svd(t, full_matrices=False), options)
            for s in (8, 16):
                ours, found = timed(lambda g=grid, s=s: BatchedKrylov().solve_batch(g, shape, rank=s), options)
                best = torch.linalg.vector_norm(spectrum.double()[:, s:], dim=1)
                errors = torch.stack([(g.double() - x.approximation.to_matrix().double()).norm()
                                      for g, x in zip(grid, found, strict=True)])  # fmt: skip
                rows.append({"problem": name, "dtype": kind, "rank": s, "svd seconds": svd, "seconds": ours,
                             "times faster": svd / ours, "worst excess": float((errors / best - 1).max())})  # fmt: skip
    return rows


def search(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Fewest parameters over all shapes; with --brute against the spectrum of every rearrangement."""
    import numpy as np

    from lsrdecomp.kronecker.rearrange import rearrange
    from lsrdecomp.kronecker.shape import kronecker_shapes
    from lsrdecomp.shape_search import best_shape

    i = np.arange(float(options.size))
    distance = np.abs(i[:, None] - i)
    waves = sum(np.outer(np.cos(f * (i / options.size * 3 + 1)), np.sin(f * i / options.size * 4)) / f
                for f in range(1, 60))  # fmt: skip
    rows = []
    for name, matrix in {"1/r kernel": 1.0 / (1.0 + distance), "waves": waves + 1e-3 * np.cos(0.01 * distance)}.items():
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
            row = {"problem": name, "rtol": rtol, "shape": str(found.best.shape), "terms": found.best.rank,
                   "parameters": found.best.parameters, "seconds": time.process_time() - begun,
                   "examined": found.examined, "unresolved": found.unresolved}  # fmt: skip
            if spectra_of:
                allowed = (rtol * np.linalg.norm(matrix)) ** 2
                needs = {shape: shape.parameters(max(int(np.sum(np.cumsum(values) > allowed)), 1))
                         for shape, values in spectra_of.items()}  # fmt: skip
                row |= {"brute seconds": brute, "brute parameters": min(needs.values())}
            rows.append(row)
    return rows


FAMILIES = {
    "lsrdecomp": ("#0072B2", "o"),
    "scipy": ("#D55E00", "s"),
    "sklearn": ("#009E73", "^"),
    "torch": ("#CC79A7", "D"),
}
"""Colour and marker of a library, told apart without colour too; the setting stands beside each point."""


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Excess over the optimum against seconds, one panel a problem, every point with its setting."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullFormatter, PercentFormatter

    from lsrdecomp.plots.labels import End, label_ends

    problems = list(dict.fromkeys(row["problem"] for row in rows))
    drawing = Figure(figsize=(4.3 * len(problems), 4.2), layout="constrained")
    panels = drawing.subplots(1, len(problems), sharey=True, squeeze=False)[0]
    ends: dict[str, list[End]] = {}
    for panel, problem in zip(panels, problems, strict=True):
        panel.axhspan(1e-13, 3e-12, color="0.93")
        for row in (r for r in rows if r["problem"] == problem and r["solver"] != "numpy svd"):
            library, _, setting = row["solver"].partition(" ")
            colour, marker = FAMILIES[library]
            place = 1.0 / row["times faster than svd"], max(row["excess"], 1e-12)
            panel.loglog(*place, marker, color=colour, markersize=6)
            ends.setdefault(problem, []).append(End(*place, setting, colour))
        panel.set(title=problem, xlabel="time, as a share of the full SVD's", ylim=(2e-13, 5.0))
        panel.set_xlim(panel.get_xlim()[0] * 0.8, panel.get_xlim()[1] * 1.8)
        panel.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        panel.xaxis.set_minor_formatter(NullFormatter())
        panel.grid(True, which="major", linewidth=0.4, alpha=0.5)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("error / optimum − 1  (shaded: exact to rounding)")
    found = [name for name in FAMILIES if any(row["solver"].startswith(name) for row in rows)]
    signs = [
        Line2D([], [], color=FAMILIES[name][0], marker=FAMILIES[name][1], linestyle="", label=name) for name in found
    ]
    drawing.legend(handles=signs, loc="outside lower center", ncols=len(signs), frameon=False, fontsize=9)
    for panel, problem in zip(panels, problems, strict=True):
        label_ends(panel, ends[problem])
    drawing.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
