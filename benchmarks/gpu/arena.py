"""PEFT's published rows of Llama-3.2-3B on GSM8K, beside what `script` measured, if it was run.

    python -m benchmarks.gpu.arena
    python -m benchmarks.gpu.arena --prepare MetaMathQA-395K.json test.jsonl --out DIR

The first prints the table in Markdown, the second writes the files for `script`.

The published rows, each with its file and commit, and the protocol are in `peft_arena.json`. A cell
of the table stays "not run" until the record of `script` has that size for that base; of a walk
with ``--small`` or another base nothing is shown. The files to prepare from are MetaMathQA's own
(``query`` and ``response``) and GSM8K's test (``question`` and ``answer``); PEFT leaves out
examples of more than 1,300 characters.
"""

from __future__ import annotations

import argparse
import json
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.record import RESULTS

PUBLISHED: dict[str, Any] = json.loads(
    Path(__file__).with_name("peft_arena.json").read_text("utf-8")
)
SOURCE = next(row for row in PUBLISHED["rows"] if row["kind"] == "source of the conversions")
CONVERTED = {row["parameters"]: row for row in PUBLISHED["rows"] if row["kind"] == "converted"}
COLUMNS = ("LSR", "SVD")
NEAR = 0.02
"""Sizes that count as the same: as shares of the published one."""


def measured(record: dict[str, Any]) -> dict[tuple[str, int], dict[str, Any]]:
    """Rows of a record of `script` by structure and the size that was asked for, in parameters."""
    stages = record.get("stages", {})
    answers = [stage for name, stage in stages.items() if name.startswith("large answers")]
    whole = stages.get("large lora", {}).get("parameters", 0)
    base = PUBLISHED["protocol"]["base"].rpartition("/")[2]
    if record.get("small") or any(Path(stage["model"]).name != base for stage in answers):
        return {}
    return {
        (row["structure"], round(whole / row["ratio"])): row
        for stage in answers
        for row in stage["rows"]
    }


def table(record: dict[str, Any]) -> list[str]:
    """Return the published rows by size in Markdown, accuracy in percent.

    Our LoRA stands beside the source of conversions.
    """
    here = measured(record)
    lines = [
        "| PEFT's row | how | parameters | published | "
        + " | ".join(f"{name} here" for name in COLUMNS)
        + " |"
    ]
    lines.append("|---|---|---|---|" + "---|" * len(COLUMNS))
    for row in sorted(PUBLISHED["rows"], key=lambda row: -row["parameters"]):
        cells = [_cell(here, row["parameters"], structure) for structure in COLUMNS]
        if row is SOURCE:
            cells = [f"LoRA {_cell(here, row['parameters'], 'LoRA')}", *("" for _ in COLUMNS[1:])]
        name = (
            f"`rank={row['method'].removeprefix('rank ')}`"
            if row["kind"] == "converted"
            else row["method"]
        )
        how = "trained" if row is SOURCE else row["kind"]
        lines.append(
            f"| {name} | {how} | {row['parameters']:,} | {row['accuracy']:.2f} | "
            f"{' | '.join(cells)} |"
        )
    return lines


def _cell(here: dict[tuple[str, int], dict[str, Any]], parameters: int, structure: str) -> str:
    sizes = {size: row for (name, size), row in here.items() if name == structure}
    nearest = min(sizes, key=lambda size: abs(size - parameters), default=0)
    return (
        f"{sizes[nearest]['accuracy']:.2f}"
        if abs(nearest - parameters) <= NEAR * parameters
        else "not run"
    )


def examples(path: Path, most: float) -> list[dict[str, str]]:
    """Read prompts and completions, as PEFT writes them, of JSON or JSON lines, up to a length."""
    text = path.read_text("utf-8")
    rows = (
        json.loads(text)
        if text.lstrip().startswith("[")
        else [json.loads(line) for line in text.splitlines()]
    )
    pairs = [
        (row.get("query", row.get("question")), row.get("response", row.get("answer")))
        for row in rows
    ]
    template = PUBLISHED["protocol"]["prompt"]
    kept = [(query, answer) for query, answer in pairs if len(f"{query} {answer}") <= most]
    return [
        {"prompt": template.format(query=query), "completion": answer} for query, answer in kept
    ]


def main(given: list[str] | None = None) -> None:
    """Print the table, or write the two files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--record", type=Path, default=RESULTS / "gpu.json", help="of benchmarks.gpu.script"
    )
    parser.add_argument("--prepare", type=Path, nargs=2, metavar=("TRAIN", "TEST"))
    parser.add_argument("--out", type=Path, default=Path("arena"))
    options = parser.parse_args(given)
    if options.prepare is None:
        print(
            "\n".join(
                table(
                    json.loads(options.record.read_text("utf-8")) if options.record.exists() else {}
                )
            )
        )
        return
    options.out.mkdir(parents=True, exist_ok=True)
    lengths = {"train": PUBLISHED["protocol"]["characters"], "test": inf}
    for (name, most), path in zip(lengths.items(), options.prepare, strict=True):
        rows = examples(path, most)
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (options.out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        print(f"{options.out / name}.jsonl: {len(rows):,} examples")


if __name__ == "__main__":
    main()
