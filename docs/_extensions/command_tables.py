"""Tables of what `lsrdecomp compress --base` makes and costs, from runs of the command."""

from __future__ import annotations

from statistics import fmean
from typing import Any

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]

PARTS = {
    "the LoRA's answers": ("the LoRA's",),
    "calibration": ("calibrating",),
    "search": ("solving", "trying", "exchanging", "refining", "searching", "form ", "version "),
    "measuring": ("measuring",),
    "training": ("training",),
}
"""Parts of a run, by how the names of their stages begin."""
REST = "opening, writing"
ADAPTERS = {
    "demo": "demo, MiniLM",
    "smollm2": "E2E, SmolLM2",
    "smollm2 sums": "sums, SmolLM2",
    "smollm2 tickets": "tickets, SmolLM2",
    "smollm2 extraction": "extraction, SmolLM2",
    "gemma-3-270m": "E2E, Gemma-3-270M",
}
"""LoRAs as tables name them, by the beginning of a row's name."""
DRAWS_SHOWN = 3
"""Runs that have a line each; of more draws accuracy.md says how many keep what they print."""
NORM_TASKS = {"e2e": "E2E", "extraction": "extraction", "arithmetic": "sums"}
"""Tasks as tables name them, by their directory."""


def results(record: dict[str, Any]) -> Table:
    """Tabulate what each run was asked, wrote and kept, and its processor minutes."""
    lines = []
    for row in _ordered(record):
        if row["seed"] >= DRAWS_SHOWN:
            continue
        further = "–"
        if row["found"]:
            further = _share(row["found"])
        lines.append(
            (
                _adapter(row),
                _asked(row),
                str(row["seed"]),
                f"{row['bytes']:,}",
                _share(row),
                further,
                f"{row['cpu_seconds'] / 60:.1f}",
                f"{row['peak_bytes'] / 1e9:.1f} GB",
            )
        )
    head = (
        "LoRA",
        "asked",
        "draw",
        "bytes in all",
        "kept, held out",
        "kept, further texts",
        "CPU minutes",
        "memory",
    )
    return head, lines


def parts(record: dict[str, Any]) -> Table:
    """Tabulate the processor seconds of each part, the mean over draws."""
    runs: dict[tuple[str, str], list[dict[str, float]]] = {}
    for row in _ordered(record):
        key = (_adapter(row), _asked(row))
        runs.setdefault(key, []).append(_seconds(row))
    names = [*PARTS, REST]
    lines = []
    for key, seconds in runs.items():
        means = [fmean(each[name] for each in seconds) for name in names]
        cells = [f"{mean:.0f}" for mean in [*means, sum(means)]]
        lines.append((*key, *cells))
    return ("LoRA", "asked", *names, "all"), lines


def norms(record: dict[str, Any]) -> Table:
    """Tabulate what a variant keeps by the strength of the LoRA during calibration."""
    strengths = list(dict.fromkeys(row["strength"] for row in record["norms"]))
    variants: dict[tuple[str, int], dict[float, dict[str, Any]]] = {}
    for row in record["norms"]:
        of_variant = variants.setdefault((row["task"], row["bytes"]), {})
        of_variant[row["strength"]] = row
    lines = []
    for (task, size), rows in variants.items():
        best = max(rows, key=lambda strength: rows[strength]["kept"])
        cells = []
        for strength in strengths:
            cell = _share(rows[strength]).removesuffix(" %")
            cells.append(f"**{cell}**" if strength == best else cell)
        lines.append((f"{NORM_TASKS[task]}, {size / 1000:g} kB", *cells))
    return ("LoRA and size", *(f"strength {strength:g}" for strength in strengths)), lines


def _seconds(row: dict[str, Any]) -> dict[str, float]:
    """Return the processor seconds of a run by part."""
    seconds = dict.fromkeys([*PARTS, REST], 0.0)
    for stage, value in row["stages"].items():
        name = stage.split(" · ")[-1]
        found = [part for part, beginnings in PARTS.items() if name.startswith(beginnings)]
        seconds[found[0] if found else REST] += value
    return seconds


def _ordered(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows by LoRA, request and draw."""
    order = list(ADAPTERS.values())
    return sorted(
        record["rows"],
        key=lambda row: (order.index(_adapter(row)), row["options"], row["seed"]),
    )


def _adapter(row: dict[str, Any]) -> str:
    goal = " answers " if " answers " in row["name"] else " keep "
    return ADAPTERS[row["name"].partition(goal)[0]]


def _asked(row: dict[str, Any]) -> str:
    """Return the options of a row as they are typed now."""
    words = [{"--distil": "--distill"}.get(word, word) for word in row["options"]]
    return f"`{' '.join(words)}`"


def _share(measured: dict[str, Any]) -> str:
    digits = 2 if measured["standard_error"] < 0.001 else 1
    kept = 100 * measured["kept"]
    return f"{kept:.{digits}f} ± {100 * measured['standard_error']:.{digits}f} %"


TABLES = {
    "one-command": ("one_command.json", results),
    "one-command-parts": ("one_command.json", parts),
    "norms": ("one_command.json", norms),
}
"""Name on a page: file of results, and what makes a table of it."""
