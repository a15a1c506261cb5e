"""SHA256SUMS: a digest of every file we write, in the form the standard tool ``sha256sum -c`` reads."""

from __future__ import annotations

from pathlib import Path

from lsrdecomp.checkpoints.files import sha256
from lsrdecomp.errors import CheckpointError

SUMS = "SHA256SUMS"
LARGEST = 2**20
WRITTEN = ("adapter_model.safetensors", "adapters.safetensors", "adapter_config.json")
"""Files that act on the model: a record that does not name one vouches for nothing."""


def write_sums(directory: Path) -> None:
    """Record the digest of every file in ``directory``."""
    files = sorted(path for path in directory.iterdir() if path.is_file() and path.name != SUMS)
    (directory / SUMS).write_text("".join(f"{sha256(path)}  {path.name}\n" for path in files), encoding="utf-8")


def changed_files(directory: Path) -> tuple[str, ...] | None:
    """Names of files that are not what was written, or gone; ``None`` where nothing was recorded."""
    record = directory / SUMS
    if not record.is_file():
        return None
    if record.stat().st_size > LARGEST:
        raise CheckpointError(f"{record.stat().st_size} bytes of digests; not a file written here", path=record)
    held = {path.name: path for path in directory.iterdir() if path.is_file()}
    lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
    listed = {line.partition("  ")[2] for line in lines}
    changed = [f"{name} (not in {SUMS})" for name in sorted(held) if name in WRITTEN and name not in listed]
    for line in lines:
        digest, _, name = line.partition("  ")
        if name not in held or sha256(held[name]) != digest:
            changed.append(name if name in held else ascii(name or line)[1:81])
    return tuple(changed)
