"""Tables of the records of two-factor solvers."""

from __future__ import annotations

from statistics import median
from typing import Any

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

OURS = "lsrdecomp 1e-3"


def best_peer(results: dict[str, Any]) -> Table:
    """Tabulate the best peer's time over ours by side and number of terms: median, and worst."""
    ranks = list(dict.fromkeys(str(line["rank"]) for line in results["summary"]))
    cells = {(line["size"], str(line["rank"])): line for line in results["summary"]}
    rows = []
    for size in dict.fromkeys(line["size"] for line in results["summary"]):
        lines = [cells.get((size, rank)) for rank in ranks]
        figures = (f"{line['median']:.2f} ({line['worst']:.2f})" if line else "–" for line in lines)
        rows.append((f"{size} × {size}", *figures))
    names = (rank if not rank.isdigit() else f"{rank} term{'s' * (rank != '1')}" for rank in ranks)
    return ("matrix", *names), rows


def dense(results: dict[str, Any]) -> Table:
    """Tabulate each solver's time over that of the default, and its excess over the optimum."""
    rows = results["dense"]["rows"]
    problems = list(dict.fromkeys(row["problem"] for row in rows))
    found = {(row["problem"], row["solver"]): row for row in rows}
    table = []
    for solver in dict.fromkeys(row["solver"] for row in rows):
        cells = []
        for problem in problems:
            row = found.get((problem, solver))
            if row is None:
                cells.append("–")
                continue
            ratio = row["seconds"] / found[problem, OURS]["seconds"]
            excess = max(row["excess"], 0.0)
            shown = f"{excess:.0e}".replace("-", "−") if excess else "0"
            # One line a cell: a minus sign and blanks at which nothing breaks.
            cells.append(f"{ratio:.2g}\N{NO-BREAK SPACE}×\N{NO-BREAK SPACE}({shown})")
        table.append((solver, *cells))
    return ("solver", *problems), table


def batch(results: dict[str, Any]) -> Table:
    """Tabulate how many times faster a batch is than those of NumPy and torch."""
    rows = results["batch"]["rows"]
    head = ("spectrum", "element type", "terms", "NumPy", "torch", "largest excess")
    table = []
    for row in rows:
        faster = (f"{row[f'times faster than {peer}']:.1f}" for peer in ("numpy", "torch"))
        excess = f"{max(row['worst excess'], 0.0):.0e}"
        problem = row["problem"].replace(".3^k", "0.3^k")
        table.append((problem, row["dtype"], str(row["rank"]), *faster, excess))
    return head, table


def sizes(results: dict[str, Any]) -> Table:
    """Tabulate our time over the better peer's by side: median, least and most over spectra."""
    rows = results["sizes"]["rows"]
    table = []
    for size, count in dict.fromkeys((row["size"], row["count"]) for row in rows):
        of_size = [row for row in rows if (row["size"], row["count"]) == (size, count)]
        ratios = [row["times the best peer"] for row in of_size]
        what = f"{size} × {size}" if count == 1 else f"{count} of {size} × {size}"
        figures = (f"{figure:.2g}" for figure in (median(ratios), min(ratios), max(ratios)))
        table.append((what, str(of_size[0]["rank"]), *figures))
    return ("R(M)", "terms", "median", "least", "most"), table


TABLES = {
    "best-peer": ("best_peer.json", best_peer),
    "solvers-4096": ("solvers-threads1.json", dense),
    "solvers-2048": ("solvers-2048-threads1.json", dense),
    "solvers-1024": ("solvers-1024-threads1.json", dense),
    "solvers-batch": ("solvers-threads1.json", batch),
    "solvers-sizes": ("solvers-threads1.json", sizes),
}
