"""Readers of records: digests, fleets, provenance and statistics."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path

import numpy as np
from checkpoint_files import CONFIG, lora_pair, raw_safetensors
from safetensors.numpy import save

from damage.adapter import LSR_CONFIG, SETTINGS, WEIGHTS, lsr_tensors
from damage.reader import reader
from lsrdecomp.cli.fleet_command import read_plan
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.file_checks import SUMS, changed_files, write_sums
from lsrdecomp.lora.files.statistics import read_statistics
from lsrdecomp.lora.fleet.manifest import MANIFEST, Manifest
from lsrdecomp.lora.measure.verify_files import verify
from lsrdecomp.lora.search.plan import CompressionPlan


def _sums_folder(folder: Path) -> Path:
    place = folder / "sums"
    if not place.exists():
        place.mkdir()
        for name in (SETTINGS, WEIGHTS):
            (place / name).write_bytes(name.encode())
        write_sums(place)
    return place


def sound_sums() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        return [(_sums_folder(Path(folder)) / SUMS).read_bytes()]


@reader(sound_sums)
def sums(content: bytes, folder: Path) -> None:
    """SHA256SUMS: sound only if every line is true."""
    place = _sums_folder(folder)
    (place / SUMS).write_bytes(content)
    changed_files(place)


PLAN = CompressionPlan(rtol=0.1)


def sound_manifests() -> list[bytes]:
    lines = [
        {"plan": PLAN.to_json()},
        {"name": "a/b", "state": "done", "parameters": 3, "relative_error": 0.5},
    ]
    lines.append({"name": "c", "state": "failed", "message": "no", "attempts": 2})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return [text.encode(), text.encode()[:-9], b"", b'{"plan"']


@reader(sound_manifests)
def manifest(content: bytes, folder: Path) -> None:
    """The record of a fleet; what was read can be appended to and read again."""
    path = folder / MANIFEST
    path.write_bytes(content)
    held = Manifest(path, PLAN).recorded
    assert Manifest(path, PLAN).recorded == held


@reader(
    lambda: [
        b"[compress]\nrtol = 0.1\nstorage = 'float16'\n",
        b"[compress]\nseparation_rank=2\ninner_shape=[4,2]",
    ]
)
def plan(content: bytes, folder: Path) -> None:
    """The plan of a fleet."""
    path = folder / "plan.toml"
    path.write_bytes(content)
    read_plan(path)


def sound_records() -> list[bytes]:
    source = {
        "source": {"file": "x", "format": "lsr", "sha256": "0" * 64},
        "kinds": {"q": ["conv", [1, 1]]},
    }
    report = {"layers": [{"name": "q", "relative_error": 0.25}]}
    records = [
        source,
        {"dropped": ["v"], "derived_from": source},
        {"versions": {"lsrdecomp": "0.1"}},
    ]
    return [json.dumps(record).encode() + b"\0" + json.dumps(report).encode() for record in records]


@reader(sound_records)
def record(content: bytes, folder: Path) -> None:
    """Two JSON texts: where an adapter came from and what it measured, as `verify` reads it."""
    own, _, report = content.partition(b"\0")
    source, written = folder / "source", folder / "written"
    for place in (source, written):
        place.mkdir(exist_ok=True)
    if not (source / SETTINGS).exists():
        (source / SETTINGS).write_text(json.dumps(CONFIG))
        (source / WEIGHTS).write_bytes(save(lora_pair("q")))
        (written / SETTINGS).write_text(json.dumps(LSR_CONFIG))
    weights = save(lsr_tensors(np.ones), {"lsrdecomp": own.decode("utf-8", "replace")})
    (written / WEIGHTS).write_bytes(weights)
    (written / "compression.json").write_bytes(report)
    verify(open_checkpoint(source), open_checkpoint(written))


def sound_statistics() -> list[bytes]:
    """Return headers for numbers that are all zero.

    Without eigenpairs they are sound, with one they are not orthonormal.
    """
    headers = []
    for kept in (0, 1):
        tensors = {}
        for side, size in (("input", 3), ("output", 2)):
            tensors |= {
                f"q.{side}.eigenvectors": np.eye(size, kept),
                f"q.{side}.eigenvalues": np.ones(kept),
            }
            tensors[f"q.{side}.rest"] = np.array(0.5)
        content = save(tensors)
        headers.append(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return headers


@reader(sound_statistics)
def statistics(content: bytes, folder: Path) -> None:
    """The header of a file of statistics."""
    size = max((int(text) for text in re.findall(rb"\d{1,4}(?=\])", content)), default=0)
    (folder / "statistics.json").write_text('{"format": "lsrdecomp-statistics", "version": 1}')
    (folder / "statistics.safetensors").write_bytes(raw_safetensors(content, bytes(size)))
    for norm in read_statistics(folder).values():
        assert norm.output.size * norm.input.size > 0
