"""Where a written adapter came from: source hash, versions and plan.

They stand in the header of the weight file; of an LSR directory on its card, README.md, since no
byte of that is needed to open the adapter.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError
from lsrdecomp.gateway import read_json_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lsrdecomp.lora.files.records import Checkpoint

KEY = "lsrdecomp"
CARD = "README.md"
REPORT = "compression.json"
"""Name of the report in a written directory; `lsrdecomp.lora.measure.verify` compares with it."""
CARD_SECTION = re.compile(r"^```json lsrdecomp\n(.*?)\n```$", re.DOTALL | re.MULTILINE)
RECORDED_PACKAGES = ("lsrdecomp", "numpy", "safetensors")


def header_metadata(
    source: Checkpoint | None, record: Mapping[str, Any] | None, **fields: Any
) -> dict[str, str]:
    """Return metadata of a header: PEFT's format mark and one JSON text of ours.

    To be asked for when all numbers are read: a source that changed meanwhile is refused.

    Parameters
    ----------
    source : Checkpoint, optional
        What the adapter was made from.
    record : mapping, optional
        JSON values; they win over ``fields``.
    **fields
        Further JSON values.
    """
    return {"format": "pt", KEY: _record_text(source, {**fields, **(record or {})})}


def card_section(source: Checkpoint | None, record: Mapping[str, Any]) -> str:
    """Return the same text as a section of a card."""
    text = _record_text(source, record, indent=1)
    return f"\n## Where it comes from\n\n```json {KEY}\n{text}\n```\n"


def card_with_record(card: str, fields: Mapping[str, Any]) -> str:
    """Return a card with further fields in its record; the card as it is if it has no record."""
    section = CARD_SECTION.search(card)
    if section is None:
        return card
    record = read_json_text(section[1]) | fields
    return f"{card[: section.start(1)]}{record_text(record, indent=1)}{card[section.end(1) :]}"


def record_text(record: Mapping[str, Any], indent: int | None = None) -> str:
    """Return a record as headers and cards hold it."""
    return json.dumps(record, sort_keys=True, allow_nan=False, indent=indent)


def _record_text(
    source: Checkpoint | None, fields: Mapping[str, Any], indent: int | None = None
) -> str:
    versions = {name: installed_version(name) for name in RECORDED_PACKAGES}
    record: dict[str, Any] = {"versions": versions, **fields}
    if source is not None:
        source.check_source()
        record["source"] = {
            "file": source.weights.name,
            "format": source.format,
            "sha256": source.source_sha256,
        }
    try:
        return record_text(record, indent)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the provenance is not JSON: {error}") from None


def read_provenance(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a header or a card records, or an empty dict for a file that is not ours."""
    try:
        record = read_json_text(_recorded_text(checkpoint))
    except (OSError, ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _recorded_text(checkpoint: Checkpoint) -> str:
    text = checkpoint.metadata.get(KEY)
    if text is None and checkpoint.format == "lsr":
        card = (checkpoint.weights.parent / CARD).read_text(encoding="utf-8")
        section = CARD_SECTION.search(card)
        text = None if section is None else section[1]
    return text or "{}"


def installed_version(package: str) -> str:
    """Return the version of a package; "unknown" for one that is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"
