"""verify: the errors of a written adapter, measured anew from the two directories alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.files import changed_files
from lsrdecomp.checkpoints.names import flat_name
from lsrdecomp.checkpoints.progress import Counter, OnStep
from lsrdecomp.checkpoints.provenance import read_provenance
from lsrdecomp.checkpoints.tensors import data_sha256
from lsrdecomp.compression.layers import layer_pair, layer_product
from lsrdecomp.compression.result import mapping, recorded_errors
from lsrdecomp.errors import CheckpointError
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from lsrdecomp.checkpoints import Checkpoint

AGREEMENT = 1e-9
"""Measured and recorded errors are the same computation on the same stored numbers; this much may
differ by library."""


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """One layer measured anew.

    Examples
    --------
    >>> LayerCheck("encoder.0.query", parameters=88, norm=9.1, relative_error=0.31, recorded_error=0.25).agrees
    False
    """

    name: str
    parameters: int
    norm: float  # ‖ΔW‖_F of the source
    relative_error: float  # measured now
    recorded_error: float | None  # as the writer measured it, if it said

    @property
    def agrees(self) -> bool:
        """Whether the error is a number, and the writer's figure, if there is one, is what is measured now."""
        return _agree(self.relative_error, self.recorded_error)


@dataclass(frozen=True, slots=True)
class Verification:
    """All layers of a written adapter against its source.

    Examples
    --------
    >>> layer = LayerCheck("encoder.0.query", parameters=88, norm=9.1, relative_error=0.31, recorded_error=None)
    >>> Verification((layer,), 0.31, None, source_matches=False, changed_files=(), changed_tensors=()).passed
    False
    """

    layers: tuple[LayerCheck, ...]
    relative_error: float  # over all layers together
    recorded_error: float | None  # the same as the writer measured it, if it said
    source_matches: (
        bool | None
    )  # the source has the bytes it had when this was made; None: not recorded
    changed_files: tuple[str, ...]  # files that are not what was written, by their recorded digests
    changed_tensors: tuple[str, ...]  # tensors carried along that differ from the source's
    rounding: float = 0.0  # of the exports since the error was recorded, over all layers
    recorded: bool = (
        True  # whether anything was written of what this should be; without, nothing is vouched for
    )

    @property
    def agrees(self) -> bool:
        """Whether the error over all layers is a number, and the writer's figure if there is one."""
        return _agree(self.relative_error, self.recorded_error, self.rounding)

    @property
    def passed(self) -> bool:
        sound = not self.changed_files and not self.changed_tensors and self.agrees
        return (
            sound
            and self.source_matches is not False
            and all(layer.agrees for layer in self.layers)
        )


@one_blas_thread
def verify(
    source: Checkpoint, written: Checkpoint, *, on_step: OnStep | None = None
) -> Verification:
    """Measure ‖ΔW − ΔŴ‖_F / ‖ΔW‖_F of every layer of ``written`` against ``source``, and look for changes since.

    Parameters
    ----------
    source : Checkpoint
        The LoRA that ``written`` was made from.
    written : Checkpoint
        An LSR directory, a truncated LoRA, or an export of either.
    on_step : callable, optional
        Called with a `ProgressUpdate` as each layer is measured.

    Returns
    -------
    Verification
        ``passed`` if all is as the writer recorded it; an error that is larger than asked for is no
        failure here.

    Raises
    ------
    CheckpointError
        If a layer of the source is missing or has another size, or a layer is not in the source.

    Notes
    -----
    One thin QR of both pairs a layer, O((m + n)(r + q)²) for rank q as written; one layer is in
    memory at a time.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress, open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> made = compress(lora, separation_rank=2, inner_shape=(2, 4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     check = verify(lora, open_checkpoint(made.save(f"{folder}/small")))
    >>> check.passed, len(check.layers), abs(check.relative_error - made.totals.relative_error) < 1e-6
    (True, 12, True)
    """
    if source.format == "lsr":
        raise CheckpointError(
            "is an LSR adapter: name first the LoRA that it was made from", path=source.path
        )
    # 1. What was recorded of the written one, and of what it was made from.
    record, errors = read_provenance(written), recorded_errors(written)
    recorded, recorded_total = errors["layers"], errors["total"]
    chain = tuple(_chain(record))
    origins = {mapping(entry.get("source")).get("sha256") for entry in chain} - {None}
    exported = "rounding" in record
    if (
        exported and len(chain) == 1 and source.source_sha256 in origins
    ):  # an export of the source itself
        recorded_total = recorded_total or 0.0
    dropped = {
        name
        for entry in chain
        if isinstance(entry.get("dropped"), list)
        for name in map(str, entry["dropped"])
    }
    whole = (
        "sha256" in record
    )  # of all tensors as they were written: what is not among them was left out then
    # 2. Every layer of the source: what is there in its place, or that it was left out on purpose.
    names = _source_names(source, written, record)
    check_layers(written, source, names)
    present = {names.get(layer.name, layer.name): layer for layer in written.layers}
    checks, size, lost = [], 0.0, 0.0
    measured = Counter(on_step, "measuring", len(source.layers), "layers")
    for layer in source.layers:
        pair, left_out = (
            layer_pair(source, layer),
            layer.name not in present and (whole or layer.name in dropped),
        )
        error, parameters = pair.norm, 0
        if not left_out:
            other = present.get(layer.name) or written.layer(layer.name)
            error, parameters = pair.residual_norm(layer_product(other)), other.parameters
        size, lost = math.hypot(size, pair.norm), math.hypot(lost, error)
        relative = error / pair.norm if pair.norm > 0.0 else error
        before = None if exported and not left_out else recorded.get(layer.name)
        checks.append(LayerCheck(layer.name, parameters, pair.norm, relative, before))
        measured.add()
    # 3. Files and tensors that are not what was written.
    changed = changed_files(written.weights.parent)
    altered = whole and record["sha256"] != data_sha256(written.weights)
    exports = takewhile(lambda entry: "rounding" in entry, chain)
    rounding = sum(_rounding(entry) for entry in exports)
    return Verification(
        tuple(checks),
        lost / size if size > 0.0 else lost,
        recorded_total,
        source_matches=source.source_sha256 in origins if origins else None,
        changed_files=tuple(
            dict.fromkeys([*(changed or ()), *([written.weights.name] if altered else [])])
        ),
        changed_tensors=tuple(
            _changed_tensors(source, written, set(map(str, record.get("left_out") or ())))
        ),
        rounding=rounding / size if size > 0.0 else 0.0,
        recorded=recorded_total is not None
        or bool(
            changed == () or "sha256" in record or written.source_sha256 == source.source_sha256
        ),
    )


def check_layers(
    written: Checkpoint, source: Checkpoint, names: Mapping[str, str] | None = None
) -> None:
    """Raise `CheckpointError` unless the layers of ``written`` are layers of ``source``, of the same sizes.

    ``names`` are the source's of layers that were given others.
    """
    of_source = {layer.name: layer for layer in source.layers}
    for layer in written.layers:
        other = of_source.get((names or {}).get(layer.name, layer.name))
        if other is None:
            raise CheckpointError(
                f"layer {layer.name!r} is not in the source {source.path}", path=written.path
            )
        ours, theirs = ((each.out_features, each.in_features) for each in (layer, other))
        if ours != theirs:
            text = f"{ours[0]} x {ours[1]}, but {theirs[0]} x {theirs[1]} in {source.path}"
            raise CheckpointError(text, path=written.path, tensor=layer.name)


def _source_names(
    source: Checkpoint, written: Checkpoint, record: dict[str, Any]
) -> dict[str, str]:
    """The source's name of each layer that was given another: by the record, or flattened for kohya."""
    names = {str(new): str(old) for new, old in mapping(record.get("renamed")).items()}
    if written.format == "kohya":
        for sdxl in (False, True):
            flat = {flat_name(layer.name, sdxl=sdxl): layer.name for layer in source.layers}
            names |= {new: old for new, old in flat.items() if new is not None}
        names = {
            new: old for new, old in names.items() if old in {layer.name for layer in source.layers}
        }
    return names


def _agree(measured: float, recorded: float | None, rounding: float = 0.0) -> bool:
    if recorded is None:
        return math.isfinite(measured)
    return math.isclose(
        measured, recorded, rel_tol=AGREEMENT, abs_tol=1e-12 + (1.0 + AGREEMENT) * rounding
    )


def _changed_tensors(source: Checkpoint, written: Checkpoint, left_out: set[str]) -> Iterator[str]:
    for name in sorted((set(source.extras) - left_out) | set(written.extras)):
        both = [
            checkpoint.extras[name].read()
            for checkpoint in (source, written)
            if name in checkpoint.extras
        ]
        if (
            len(both) < 2
            or both[0].dtype != both[1].dtype
            or both[0].tobytes() != both[1].tobytes()
        ):
            yield name


def _rounding(record: dict[str, Any]) -> float:
    """Return by how much rounding moved ΔW when a file was written, all layers together; 0 where it does not say."""
    moved = record.get("rounding")
    return float(moved) if isinstance(moved, int | float) else 0.0


def _chain(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The record of a file, of the file it was made from, and so on."""
    while record:
        yield record
        record = mapping(record.get("derived_from"))
