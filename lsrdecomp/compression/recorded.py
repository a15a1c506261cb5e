"""What a written adapter says of its own errors: in the report beside it, or in the header of an export."""

from __future__ import annotations

from typing import Any

from lsrdecomp.checkpoints import Checkpoint
from lsrdecomp.checkpoints.files import read_json
from lsrdecomp.checkpoints.provenance import provenance
from lsrdecomp.compression.result import REPORT


def recorded_errors(written: Checkpoint) -> dict[str, Any]:
    """``{"total": …, "layers": {name: …}}``, relative errors as far as they were recorded.

    The report of a directory holds them, and an export of that directory repeats them.
    """
    path = written.weights.parent / REPORT
    if path.is_file():
        report = read_json(path)
        layers = report.get("layers")
        rows = [mapping(row) for row in layers] if isinstance(layers, list) else []
        found = {row["name"]: row["relative_error"] for row in rows if {"name", "relative_error"} <= row.keys()}
        total = mapping(report.get("totals")).get("relative_error")
    else:
        record = mapping(provenance(written).get("recorded"))
        found, total = mapping(record.get("layers")), record.get("total")
    named = {str(name): float(error) for name, error in found.items() if isinstance(error, int | float)}
    return {"total": float(total) if isinstance(total, int | float) else None, "layers": named}


def mapping(value: Any) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one: files may say anything."""
    return value if isinstance(value, dict) else {}
