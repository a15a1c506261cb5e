"""Where a written adapter came from: source hash, versions and plan, kept in the header of the weight file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lsrdecomp.checkpoints.packed import FIELD, read_index
from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.errors import CheckpointError

KEY = "lsrdecomp"


def metadata(source: Checkpoint | None, more: Mapping[str, Any] | None, **facts: Any) -> dict[str, str]:
    """Header metadata: PEFT's format mark and one JSON text of ours."""
    versions = {name: _version(name) for name in ("lsrdecomp", "numpy", "safetensors")}
    record: dict[str, Any] = {"versions": versions, **facts, **(more or {})}
    if source is not None:
        record["source"] = {
            "file": source.weights.name,
            "format": source.format,
            "sha256": source.source_sha256,
        }
    try:
        text = json.dumps(record, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the provenance is not JSON: {error}") from None
    return {"format": "pt", KEY: text}


def provenance(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `metadata` wrote, or an empty dict for a file that is not ours."""
    try:
        record = json.loads(checkpoint.metadata.get(KEY, "{}"))
    except (ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    index = checkpoint.config.get(FIELD)
    return record if index is None else {**record, "dropped": list(read_index(index).dropped)}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
