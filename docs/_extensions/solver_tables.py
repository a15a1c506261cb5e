"""Tables of the records of two-factor solvers."""

from __future__ import annotations

from typing import Any

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

OURS = "lsrdecomp 1e-3"


def best_peer(results: dict[str, Any]) -> Table:
    """Tabulate the best peer's time over ours by size and number of terms: median, and least."""
    lines = results["summary"]
    ranks = list(dict.fromkeys(line["rank"] for line in lines))
    cells = {(line["count"], line["size"], line["rank"]): line for line in lines}
    rows = []
    for count, size in dict.fromkeys((line["count"], line["size"]) for line in lines):
        figures = []
        for rank in ranks:
            line = cells.get((count, size, rank))
            figures.append(f"{line['median']:.2f} ({line['least']:.2f})" if line else "–")
        own = cells[count, size, "all"]["over our better solver"]
        rows.append((_stack(count, size), *figures, f"{own:.2f}" if own else "–"))
    first, *others = ranks
    names = (f"{rank} term{'s' * (rank != 1)}" for rank in others)
    return ("matrix", first, *names, "default / our better solver"), rows


def best_peers(results: dict[str, Any]) -> Table:
    """Tabulate how often each peer was the best, by size."""
    of_all = [line for line in results["summary"] if line["rank"] == "all"]
    rows = []
    for line in of_all:
        counts = (f"{name} {count}" for name, count in line["best peers"].items())
        rows.append((_stack(line["count"], line["size"]), ", ".join(counts)))
    return ("matrix", "best peer, times"), rows


def _stack(count: int, size: int) -> str:
    """Return the text of a matrix, or of so many together."""
    return f"{size} × {size}" if count == 1 else f"{count} of {size} × {size}"


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


TABLES = {
    "best-peer": ("best_peer.json", best_peer),
    "best-peers": ("best_peer.json", best_peers),
    "solvers-4096": ("solvers-threads1.json", dense),
    "solvers-2048": ("solvers-2048-threads1.json", dense),
    "solvers-1024": ("solvers-1024-threads1.json", dense),
    "solvers-batch": ("solvers-threads1.json", batch),
}
