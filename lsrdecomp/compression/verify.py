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
"""Relative difference of a measured and a recorded error that agree.

Both are the same computation on the same stored numbers, and libraries differ by so much.
"""


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """One layer measured anew.

    Attributes
    ----------
    name : str
    parameters : int
        As written.
    norm : float
        ‖ΔW‖_F of the source.
    relative_error : float
        Measured now.
    recorded_error : float or None
        As the writer measured it, if it said.

    Examples
    --------
    >>> check = LayerCheck("encoder.0.query", 88, 9.1, relative_error=0.31, recorded_error=0.25)
    >>> check.agrees
    False
    """

    name: str
    parameters: int
    norm: float
    relative_error: float
    recorded_error: float | None

    @property
    def agrees(self) -> bool:
        """True if the error is a number, and the writer's figure, if there is one."""
        return _agree(self.relative_error, self.recorded_error)


@dataclass(frozen=True, slots=True)
class Verification:
    """All layers of a written adapter against its source.

    Attributes
    ----------
    layers : tuple of LayerCheck
    relative_error : float
        Over all layers together.
    recorded_error : float or None
        The same as the writer measured it, if it said.
    source_matches : bool or None
        Whether the source has the bytes it had when this was made; None: not recorded.
    changed_files : tuple of str
        Files that are not what was written, by their recorded digests.
    changed_tensors : tuple of str
        Tensors carried along that differ from the source's.
    rounding : float
        Of the exports since the error was recorded, over all layers.
    recorded : bool
        Whether anything was written of what this should be; without, nothing is vouched for.

    Examples
    --------
    >>> layer = LayerCheck("encoder.0.query", 88, 9.1, relative_error=0.31, recorded_error=None)
    >>> Verification((layer,), 0.31, None, False, changed_files=(), changed_tensors=()).passed
    False
    """

    layers: tuple[LayerCheck, ...]
    relative_error: float
    recorded_error: float | None
    source_matches: bool | None
    changed_files: tuple[str, ...]
    changed_tensors: tuple[str, ...]
    rounding: float = 0.0
    recorded: bool = True

    @property
    def agrees(self) -> bool:
        """True if the error over all layers is a number, and the writer's figure if any."""
        return _agree(self.relative_error, self.recorded_error, self.rounding)

    @property
    def passed(self) -> bool:
        """True if everything is as it was recorded."""
        if self.changed_files or self.changed_tensors or self.source_matches is False:
            return False
        return self.agrees and all(layer.agrees for layer in self.layers)


@one_blas_thread
def verify(
    source: Checkpoint, written: Checkpoint, *, on_step: OnStep | None = None
) -> Verification:
    """Measure the errors of ``written`` against ``source`` anew, and look for changes since.

    The error of a layer is ‖ΔW − ΔŴ‖_F / ‖ΔW‖_F.

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
    >>> check.passed, len(check.layers)
    (True, 12)
    """
    if source.format == "lsr":
        raise CheckpointError(
            "is an LSR adapter: name first the LoRA that it was made from", path=source.path
        )
    # 1. What was recorded of the written one, and of what it was made from.
    record = _Recorded.of(written)
    # 2. Every layer of the source: what is there in its place, or that it was left out on purpose.
    names = _source_names(source, written, record.names)
    check_layers(written, source, names)
    present = {names.get(layer.name, layer.name): layer for layer in written.layers}
    checks = []
    size = lost = 0.0
    measured = Counter(on_step, "measuring", len(source.layers), "layers")
    for layer in source.layers:
        pair = layer_pair(source, layer)
        error = pair.norm
        parameters = 0
        was_left_out = layer.name not in present and record.allows_to_leave_out(layer.name)
        if not was_left_out:
            other = present.get(layer.name) or written.layer(layer.name)
            error = pair.residual_norm(layer_product(other))
            parameters = other.parameters
        size = math.hypot(size, pair.norm)
        lost = math.hypot(lost, error)
        relative = error / pair.norm if pair.norm > 0.0 else error
        # An export rounds again, so its layers have other errors than were recorded before it.
        recorded = record.layers.get(layer.name)
        if record.is_export and not was_left_out:
            recorded = None
        checks.append(LayerCheck(layer.name, parameters, pair.norm, relative, recorded))
        measured.add()
    # 3. Files and tensors that are not what was written.
    changed = changed_files(written.weights.parent)
    changed_names = list(changed or ())
    if record.sha256 is not None and record.sha256 != data_sha256(written.weights):
        changed_names.append(written.weights.name)
    recorded_total = record.total_for(source)
    has_digests = changed == () or record.sha256 is not None
    is_the_source = written.source_sha256 == source.source_sha256
    return Verification(
        tuple(checks),
        lost / size if size > 0.0 else lost,
        recorded_total,
        source_matches=source.source_sha256 in record.origins if record.origins else None,
        changed_files=tuple(dict.fromkeys(changed_names)),
        changed_tensors=tuple(_changed_tensors(source, written, record.left_out)),
        rounding=record.rounding / size if size > 0.0 else 0.0,
        recorded=recorded_total is not None or has_digests or is_the_source,
    )


@dataclass(frozen=True, slots=True)
class _Recorded:
    """The record of a written adapter, and the records of what it was made from.

    Attributes
    ----------
    layers : dict
        Relative error of each layer, as far as it was recorded.
    total : float or None
        Over all layers.
    origins : set of str
        Digests of the files that it was made from.
    made_in_steps : int
        Records in the chain.
    dropped : set of str
        Layers that were left out on purpose.
    left_out : set of str
        Other tensors that were.
    names : dict
        The source's name of each layer that was given another.
    sha256 : str or None
        Of all tensors as they were written: what is not among them was left out then.
    is_export : bool
    rounding : float
        By how much the exports since the error was recorded moved ΔW, absolute.
    """

    layers: Mapping[str, float]
    total: float | None
    origins: set[str]
    made_in_steps: int
    dropped: set[str]
    left_out: set[str]
    names: Mapping[str, str]
    sha256: str | None
    is_export: bool
    rounding: float

    @classmethod
    def of(cls, written: Checkpoint) -> _Recorded:
        record = read_provenance(written)
        errors = recorded_errors(written)
        chain = list(_chain(record))
        origins: set[str] = set()
        dropped: set[str] = set()
        for entry in chain:
            digest = mapping(entry.get("source")).get("sha256")
            if digest is not None:
                origins.add(digest)
            names = entry.get("dropped")
            if isinstance(names, list):
                dropped.update(map(str, names))
        exports = takewhile(lambda entry: "rounding" in entry, chain)
        return cls(
            layers=errors["layers"],
            total=errors["total"],
            origins=origins,
            made_in_steps=len(chain),
            dropped=dropped,
            left_out=set(map(str, record.get("left_out") or ())),
            names={str(new): str(old) for new, old in mapping(record.get("renamed")).items()},
            sha256=record.get("sha256"),
            is_export="rounding" in record,
            rounding=sum(_rounding(entry) for entry in exports),
        )

    def total_for(self, source: Checkpoint) -> float | None:
        """Return the recorded error over all layers; 0 of an export of the source itself."""
        if self.total is None and self.is_export and self.made_in_steps == 1:
            return 0.0 if source.source_sha256 in self.origins else None
        return self.total

    def allows_to_leave_out(self, name: str) -> bool:
        """Return whether a layer may be missing."""
        return self.sha256 is not None or name in self.dropped


def check_layers(
    written: Checkpoint, source: Checkpoint, names: Mapping[str, str] | None = None
) -> None:
    """Raise `CheckpointError` unless all layers are of the source, and of the same sizes.

    ``names`` are the source's of layers that were given others.
    """
    names = names or {}
    by_name = {layer.name: layer for layer in source.layers}
    for layer in written.layers:
        other = by_name.get(names.get(layer.name, layer.name))
        if other is None:
            text = f"layer {layer.name!r} is not in the source {source.path}"
            raise CheckpointError(text, path=written.path)
        size = f"{layer.out_features} x {layer.in_features}"
        source_size = f"{other.out_features} x {other.in_features}"
        if size != source_size:
            text = f"{size}, but {source_size} in {source.path}"
            raise CheckpointError(text, path=written.path, tensor=layer.name)


def _source_names(
    source: Checkpoint, written: Checkpoint, recorded: Mapping[str, str]
) -> dict[str, str]:
    """Return the source's name of each layer that was given another.

    By the record, or flattened for kohya.
    """
    names = dict(recorded)
    if written.format != "kohya":
        return names
    for sdxl in (False, True):
        for layer in source.layers:
            flat = flat_name(layer.name, sdxl=sdxl)
            if flat is not None:
                names[flat] = layer.name
    in_source = {layer.name for layer in source.layers}
    return {new: old for new, old in names.items() if old in in_source}


def _agree(measured: float, recorded: float | None, rounding: float = 0.0) -> bool:
    """Return whether an error is a number and, if one was recorded, the recorded one."""
    if recorded is None:
        return math.isfinite(measured)
    slack = 1e-12 + (1.0 + AGREEMENT) * rounding
    return math.isclose(measured, recorded, rel_tol=AGREEMENT, abs_tol=slack)


def _changed_tensors(source: Checkpoint, written: Checkpoint, left_out: set[str]) -> Iterator[str]:
    """Yield the names of other tensors that were not carried along bit for bit."""
    expected = set(source.extras) - left_out
    for name in sorted(expected | set(written.extras)):
        if name not in source.extras or name not in written.extras:
            yield name
            continue
        before = source.extras[name].read()
        after = written.extras[name].read()
        if before.dtype != after.dtype or before.tobytes() != after.tobytes():
            yield name


def _rounding(record: dict[str, Any]) -> float:
    """Return by how much rounding moved ΔW when a file was written; 0 where it does not say."""
    moved = record.get("rounding")
    return float(moved) if isinstance(moved, int | float) else 0.0


def _chain(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the record of a file, of the file it was made from, and so on."""
    while record:
        yield record
        record = mapping(record.get("derived_from"))
