"""Whether an adapter is what was written: by SHA256SUMS, by its header, and by what lies beside it.

`record_again` takes it for written as it is now, after an edit that was meant.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError
from lsrdecomp.gateway import read_json_text
from lsrdecomp.lora.files.digests import ContentDigests, changed_fields, field_digests
from lsrdecomp.lora.files.file_checks import (
    SUMS,
    changed_files,
    listed_files,
    read_json,
    sums_text,
)
from lsrdecomp.lora.files.format import BESIDE_CONFIG, CONFIG
from lsrdecomp.lora.files.gguf_files import gguf_digests, read_gguf
from lsrdecomp.lora.files.packed import NUMBERS
from lsrdecomp.lora.files.provenance import (
    CARD,
    KEY,
    REPORT,
    card_with_record,
    read_provenance,
    record_text,
)
from lsrdecomp.lora.files.tensors import (
    copy_with_digests,
    data_sha256,
    file_digests,
    read_header,
    read_seal,
)
from lsrdecomp.lora.files.writing import new_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from lsrdecomp.lora.files.records import Checkpoint

LOADABLE = (
    ".bin",
    ".ckpt",
    ".gguf",
    ".npz",
    ".pickle",
    ".pkl",
    ".pt",
    ".pth",
    ".py",
    ".safetensors",
)
"""Endings of files that programs load or run from an adapter's directory."""


@dataclass(frozen=True, slots=True)
class Integrity:
    """What became of an adapter's files since they were written.

    Attributes
    ----------
    changed : tuple of str
        Files that are not what was recorded.
    fields : tuple of str
        Fields of adapter_config.json that changed, where a record tells.
    foreign : tuple of str
        Files that lie beside the adapter, that programs load, and that no record has.
    missing : tuple of str
        Records that the directory should have.
    has_digests : bool
        Whether there is any digest that the numbers were held to.
    contradicts_header : bool
        Whether the numbers differ from the digest in their own header.
    """

    changed: tuple[str, ...]
    fields: tuple[str, ...]
    foreign: tuple[str, ...]
    missing: tuple[str, ...]
    has_digests: bool
    contradicts_header: bool


def check_integrity(adapter: Checkpoint) -> Integrity:
    """Hold an adapter's files to what was recorded of them; they are read through.

    Parameters
    ----------
    adapter : Checkpoint
    """
    weights = adapter.weights
    directory = weights.parent
    record = read_provenance(adapter)
    config = _config_beside(weights)
    # 1. All files, by SHA256SUMS.
    by_sums = changed_files(directory)
    changed = list(by_sums or ())
    # 2. Numbers and config, by the header of the weight file.
    in_header = _recorded_digests(adapter)
    contradicts_header = False
    if in_header is not None:
        current = _current_digests(adapter, config)
        contradicts_header = current.tensors != in_header.tensors
        if contradicts_header:
            changed.append(weights.name)
        # Where SHA256SUMS says that the config is the same, its digest in the weights changed.
        is_same_by_sums = by_sums is not None and CONFIG not in by_sums
        if in_header.config and current.config != in_header.config and not is_same_by_sums:
            changed.append(CONFIG)
    # 3. The numbers once more, by the record of an export or of the card.
    recorded_sha256 = record.get("sha256")
    if recorded_sha256 is not None and recorded_sha256 != data_sha256(weights):
        changed.append(weights.name)
    # 4. What the config's record on the card says of its fields.
    fields: tuple[str, ...] = ()
    if CONFIG in changed and config is not None and isinstance(record.get("config_digests"), dict):
        fields = tuple(changed_fields(config, record["config_digests"]))
    # 5. What should be there, and what should not.
    has_digests = by_sums == () or recorded_sha256 is not None or in_header is not None
    foreign: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    has_report = (directory / REPORT).is_file()
    was_written_here = has_digests or by_sums is not None or bool(record) or has_report
    if config is not None and was_written_here:
        foreign = tuple(_foreign_files(weights))
        missing = () if by_sums is not None else (SUMS,)
    return Integrity(
        tuple(dict.fromkeys(changed)), fields, foreign, missing, has_digests, contradicts_header
    )


def _recorded_digests(adapter: Checkpoint) -> ContentDigests | None:
    """Return the digests in an adapter's weight file: in its header, or at its end."""
    if is_sealed(adapter):
        return read_seal(adapter.weights)
    return ContentDigests.read(adapter.metadata)


def _current_digests(adapter: Checkpoint, config: Mapping[str, Any] | None) -> ContentDigests:
    """Return the digests of what an adapter's weight file holds now."""
    if adapter.format != "gguf":
        return file_digests(adapter.weights, config, sealed=is_sealed(adapter))
    tensors, metadata = read_gguf(adapter.weights)
    return gguf_digests({name: tensor.read() for name, tensor in tensors.items()}, metadata)


def is_sealed(adapter: Checkpoint) -> bool:
    """Return whether the digests of an adapter end its weight file: that of an LSR directory."""
    return adapter.format == "lsr" and NUMBERS in read_header(adapter.weights).tensors


def record_again(adapter: Checkpoint) -> None:
    """Record the digests of an adapter as it is now: in its header, on its card, in SHA256SUMS.

    Each file appears whole or not at all; SHA256SUMS comes last.

    Parameters
    ----------
    adapter : Checkpoint
        A safetensors file, or a directory with one. Of a torch file SHA256SUMS alone is written.

    Raises
    ------
    CheckpointError
        For a file of its own that is not safetensors: there is no place for a digest.
    """
    weights = adapter.weights
    config = _config_beside(weights)
    if config is None and weights.suffix != ".safetensors":
        raise CheckpointError(
            f"a file that ends in {weights.suffix} takes no digest later: export it again, or as "
            "safetensors",
            path=weights,
        )
    if weights.suffix == ".safetensors":
        metadata = dict(read_header(weights).metadata)
        if KEY in metadata:
            metadata[KEY] = record_text(
                read_json_text(metadata[KEY]) | {"sha256": data_sha256(weights)}
            )
        with new_file(weights, force=True) as part:
            copy_with_digests(weights, part, metadata, config, sealed=is_sealed(adapter))
    if config is None:
        return
    card = weights.parent / CARD
    if card.is_file():
        record: Mapping[str, Any] = {
            "sha256": data_sha256(weights),
            "config_digests": field_digests(config),
        }
        text = card_with_record(card.read_text(encoding="utf-8"), record)
        with new_file(card, force=True) as part:
            part.write_text(text, encoding="utf-8")
    with new_file(weights.parent / SUMS, force=True) as part:
        part.write_text(sums_text(weights.parent), encoding="utf-8")


def _config_beside(weights: Path) -> dict[str, Any] | None:
    """Return the config that a weight file belongs to, or None for a file of its own."""
    path = weights.parent / CONFIG
    if weights.name not in BESIDE_CONFIG or not path.is_file():
        return None
    return read_json(path)


def _foreign_files(weights: Path) -> Iterator[str]:
    """Yield the names of loadable files beside the weights that SHA256SUMS does not list."""
    written = {weights.name, *listed_files(weights.parent)}
    for path in sorted(weights.parent.iterdir()):
        if path.suffix.lower() in LOADABLE and path.name not in written:
            yield path.name
