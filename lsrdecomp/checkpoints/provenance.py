"""Where a written adapter came from: source hash, versions and plan.

In the header of the weight file; of an LSR directory on its card, README.md, since no byte of it is needed to open it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lsrdecomp.checkpoints.packed_index import FIELD, read_index
from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.errors import CheckpointError

KEY = "lsrdecomp"
CARD = "README.md"
SECTION = re.compile(r"^```json lsrdecomp\n(.*?)\n```$", re.DOTALL | re.MULTILINE)


def metadata(source: Checkpoint | None, more: Mapping[str, Any] | None, **facts: Any) -> dict[str, str]:
    """Header metadata: PEFT's format mark and one JSON text of ours."""
    return {"format": "pt", KEY: _text(source, {**facts, **(more or {})})}


def card_section(source: Checkpoint | None, more: Mapping[str, Any]) -> str:
    """The same text as a section of a card."""
    return f"\n## Where it comes from\n\n```json {KEY}\n{_text(source, more, indent=1)}\n```\n"


def _text(source: Checkpoint | None, facts: Mapping[str, Any], indent: int | None = None) -> str:
    versions = {name: _version(name) for name in ("lsrdecomp", "numpy", "safetensors")}
    record: dict[str, Any] = {"versions": versions, **facts}
    if source is not None:
        record["source"] = {
            "file": source.weights.name,
            "format": source.format,
            "sha256": source.source_sha256,
        }
    try:
        return json.dumps(record, sort_keys=True, allow_nan=False, indent=indent)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the provenance is not JSON: {error}") from None


def provenance(checkpoint: Checkpoint) -> dict[str, Any]:
    """What `metadata` or `card_section` wrote, or an empty dict for a file that is not ours."""
    text = checkpoint.metadata.get(KEY)
    try:
        if text is None and checkpoint.format == "lsr":
            section = SECTION.search((checkpoint.weights.parent / CARD).read_text(encoding="utf-8"))
            text = None if section is None else section[1]
        record = json.loads(text or "{}")
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(record, dict):
        return {}
    index = checkpoint.config.get(FIELD)
    dropped = () if index is None else read_index(index).dropped
    return {**record, "dropped": list(dropped)} if dropped else record


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "unknown"
