"""Tables of the benchmarks of operators."""

from __future__ import annotations

from typing import Any

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def naive(results: dict[str, Any]) -> Table:
    """Dense NumPy and `operators` on the same problem."""
    head = (
        "unknowns",
        "dense: seconds",
        "MiB",
        "operators: seconds",
        "MiB",
        "relative difference of x",
    )
    keys = ("seconds dense", "MiB dense", "seconds", "MiB", "relative difference")
    return head, [
        (f"{row['unknowns']:,}", *(f"{row[key]:.2g}" for key in keys)) for row in results["naive"]
    ]


def galerkin(results: dict[str, Any]) -> Table:
    """Preconditioners of one stochastic Galerkin system."""
    head = ("preconditioner", "‖I − AX‖ / ‖I‖", "iterations", "setup, s", "solve, s")
    rows = []
    for row in results["rows"]:
        residual = row["‖I − AX‖ / ‖I‖"]
        times = (f"{row['seconds setup']:.2g}", f"{row['seconds solve']:.2g}")
        rows.append(
            (
                row["preconditioner"],
                f"{residual:.2g}" if residual else "–",
                str(row["iterations"]),
                *times,
            )
        )
    return head, rows


def diffusion(results: dict[str, Any]) -> Table:
    """Preconditioners of diffusion on cubes."""
    head = ("unknowns", "preconditioner", "iterations", "setup, s", "solve, s")
    rows = []
    for problem in results["diffusion"]:
        for row in problem["rows"]:
            times = (f"{row['seconds setup']:.2g}", f"{row['seconds solve']:.2g}")
            rows.append(
                (f"{problem['unknowns']:,}", row["preconditioner"], str(row["iterations"]), *times)
            )
    return head, rows


def million(results: dict[str, Any]) -> Table:
    """With and without an approximate inverse; a run that was broken off has no residual."""
    head = ("", "iterations", "setup, s", "solve, s", "relative residual")
    ours, plain = results["GMRES with approximate_inverse"], results["CG without"]
    times = (f"{ours['seconds setup']:.2g}", f"{ours['seconds solve']:.3g}")
    reached = plain["relative residual"]
    ended = "broken off above 1e-8" if reached is None else f"{reached:.1e}"
    name = f"GMRES with an inverse of {results['rank of the inverse']} terms"
    return head, [
        (name, str(ours["iterations"]), *times, f"{ours['relative residual']:.1e}"),
        ("CG without", str(plain["iterations"]), "–", f"{plain['seconds']:.3g}", ended),
    ]
