"""`verify`: measure the errors of a written adapter again, from its files and its source alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.files import Checkpoint, open_checkpoint
from lsrdecomp.lora.files.fused_attention import in_diffusers_names
from lsrdecomp.lora.files.integrity import check_integrity, record_again
from lsrdecomp.lora.files.layer_names import flat_name
from lsrdecomp.lora.files.progress import Counter, OnStep
from lsrdecomp.lora.files.provenance import read_provenance
from lsrdecomp.lora.search.layers import layer_pair, layer_product
from lsrdecomp.lora.search.result import mapping, recorded_errors
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from lsrdecomp.lora.files.records import Layer
    from lsrdecomp.lora.files.tensors import StoredTensor

RECORDS_AND_CONFIG = ("adapter_config.json", "README.md", "compression.json", "SHA256SUMS")
"""Files beside the numbers."""
AGREEMENT = 1e-9
"""Largest relative difference of a measured and a recorded error that agree: the two are the same
computation on the same numbers, perhaps by other libraries."""


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """One layer, measured again.

    Attributes
    ----------
    name : str
    parameters : int
        Parameters of the written layer.
    norm : float
        ‖ΔW‖_F of the source.
    relative_error : float
        The error measured now.
    recorded_error : float or None
        The error that was recorded when the layer was written, if any.

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
        """True if the error is finite and equals the recorded one, if there is one."""
        return _agree(self.relative_error, self.recorded_error)


@dataclass(frozen=True, slots=True)
class Verification:
    """All layers of a written adapter against its source.

    Attributes
    ----------
    layers : tuple of LayerCheck
    relative_error : float
        The error over all layers, measured now.
    recorded_error : float or None
        The same error as it was recorded, if it was.
    source_matches : bool or None
        Whether the source is the file that the adapter was made from; None if none is recorded.
    changed_files : tuple of str
        Files that changed since they were written, by their recorded digests.
    changed_fields : tuple of str
        Fields of adapter_config.json that changed, where a record tells.
    foreign_files : tuple of str
        Files beside the adapter that programs load or run, and that were not written with it.
    missing_records : tuple of str
        Records that were written beside the adapter and are gone: SHA256SUMS.
    changed_tensors : tuple of str
        Copied tensors that differ from the source's.
    rounding : float
        Relative error that later exports may have added to the recorded one.
    recorded : bool
        Whether there is any record to compare with.
    contradicts_header : bool
        Whether the numbers differ from the digest in their own header.

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
    changed_fields: tuple[str, ...] = ()
    foreign_files: tuple[str, ...] = ()
    missing_records: tuple[str, ...] = ()
    contradicts_header: bool = False

    @property
    def agrees(self) -> bool:
        """True if the error over all layers is finite and equals the recorded one, if any."""
        return _agree(self.relative_error, self.recorded_error, self.rounding)

    @property
    def passed(self) -> bool:
        """True if everything is as it was recorded."""
        return not (self.changed_files or self.foreign_files) and self.numbers_hold

    @property
    def numbers_hold(self) -> bool:
        """True if all numbers are those of the source, within the errors that were recorded."""
        if self.changed_tensors or self.contradicts_header or self.source_matches is False:
            return False
        return self.agrees and all(layer.agrees for layer in self.layers)

    @property
    def can_be_accepted(self) -> bool:
        """True if `accept` records the adapter as it is now.

        The numbers hold, with a recorded error to tell, or nobody says that they changed.
        """
        if self.foreign_files or not self.numbers_hold:
            return False
        only_config = all(name.startswith(RECORDS_AND_CONFIG) for name in self.changed_files)
        return only_config or self.recorded_error is not None


@one_blas_thread
def verify(
    source: Checkpoint | str | Path,
    written: Checkpoint | str | Path,
    *,
    on_step: OnStep | None = None,
) -> Verification:
    """Measure the errors of ``written`` against ``source`` again, and look for changed files.

    The error of a layer is ‖ΔW − ΔŴ‖_F / ‖ΔW‖_F.

    Parameters
    ----------
    source : Checkpoint or path
        The LoRA, LoHa or LoKr that ``written`` was made from.
    written : Checkpoint or path
        An LSR directory, a truncated LoRA, or an export of either.
    on_step : callable, optional
        Called with a `ProgressUpdate` as each layer is measured.

    Returns
    -------
    Verification
        ``passed`` if everything is as it was recorded, however large the error.

    Raises
    ------
    CheckpointError
        If the layers of the two differ: one is missing, additional, or of another size.

    Notes
    -----
    One thin QR of both pairs for each layer, O((m + n)(r + q)²) for a written rank q. One layer is
    in memory at a time.

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
    source = _opened(source)
    written = _opened(written)
    if source.format == "lsr":
        raise CheckpointError(
            "is an LSR adapter: name first the LoRA that it was made from", path=source.path
        )
    # 1. Read the records. An export may have q, k and v of Z-Image in one, or apart.
    record = _Records.of(written)
    if {layer.name for layer in written.layers} - {layer.name for layer in source.layers}:
        source = in_diffusers_names(source)
        written = in_diffusers_names(written, known={layer.name for layer in source.layers})
    # 2. Measure every layer of the source.
    names = source_names(source, written)
    check_layers(written, source, names)
    present = {names.get(layer.name, layer.name): layer for layer in written.layers}
    checks = []
    size = lost = 0.0
    measured = Counter(on_step, "measuring", len(source.layers), "layers")
    for layer in source.layers:
        check, error = _measured(source, layer, written, present.get(layer.name), record)
        checks.append(check)
        size = math.hypot(size, check.norm)
        lost = math.hypot(lost, error)
        measured.add()
    # 3. Find changed files and tensors.
    integrity = check_integrity(written)
    recorded_total = record.total_for(source)
    is_the_source = written.source_sha256 == source.source_sha256
    return Verification(
        tuple(checks),
        lost / size if size > 0.0 else lost,
        recorded_total,
        source_matches=source.source_sha256 in record.origins if record.origins else None,
        changed_files=integrity.changed,
        changed_tensors=tuple(_changed_tensors(source, written, record.left_out)),
        rounding=record.rounding / size if size > 0.0 else 0.0,
        recorded=recorded_total is not None or integrity.has_digests or is_the_source,
        changed_fields=integrity.fields,
        foreign_files=integrity.foreign,
        missing_records=integrity.missing,
        contradicts_header=integrity.contradicts_header,
    )


def _measured(
    source: Checkpoint,
    layer: Layer,
    written: Checkpoint,
    other: Layer | None,
    record: _Records,
) -> tuple[LayerCheck, float]:
    """Compare a layer of the source with the written one, and return its absolute error too.

    ``other`` may be missing if the record says so.
    """
    pair = layer_pair(source, layer)
    if other is None and record.may_lack_layer(layer.name):
        parameters = 0
        error = pair.norm
        recorded = record.layers.get(layer.name)
    else:
        # `layer` raises an error for a name that is missing without a record of it.
        other = other or written.layer(layer.name)
        parameters = other.parameters
        error = pair.residual_norm(layer_product(other))
        # An export rounds again: the recorded errors of its layers are those before.
        recorded = None if record.is_export else record.layers.get(layer.name)
    relative = error / pair.norm if pair.norm > 0.0 else error
    return LayerCheck(layer.name, parameters, pair.norm, relative, recorded), error


def _opened(adapter: Checkpoint | str | Path) -> Checkpoint:
    """Return an adapter that is open, or open it, also with tensors that are no pairs."""
    return adapter if isinstance(adapter, Checkpoint) else open_checkpoint(adapter, carry=True)


def accept(written: Checkpoint, verification: Verification) -> None:
    """Record an adapter as it is now, after an edit that was meant: a moved base, a new card.

    Its digests are written anew: in the header of the weight file, on the card, and in SHA256SUMS.

    Parameters
    ----------
    written : Checkpoint
    verification : Verification
        What `verify` found of it.

    Raises
    ------
    CheckpointError
        Unless ``verification.can_be_accepted``: other numbers are another adapter.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress, open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> made = compress(lora, separation_rank=2, inner_shape=(2, 4))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     small = made.save(f"{folder}/small")
    ...     config = small / "adapter_config.json"
    ...     moved = config.read_text().replace("sentence-transformers/", "/models/")
    ...     count = config.write_text(moved)
    ...     check = verify(lora, open_checkpoint(small))
    ...     accept(open_checkpoint(small), check)
    ...     check.changed_fields, verify(lora, open_checkpoint(small)).passed
    (('base_model_name_or_path',), True)
    """
    if not verification.can_be_accepted:
        reason = "its numbers are not those that were written; compress the source again"
        if verification.foreign_files:
            reason = f"{', '.join(verification.foreign_files)} was not written with it; remove it"
        raise CheckpointError(f"is not recorded as it is: {reason}", path=written.path)
    record_again(written)


@dataclass(frozen=True, slots=True)
class _Records:
    """The records of a written adapter: its own, and those of the adapters it was made from.

    Attributes
    ----------
    layers : dict
        Recorded relative error of each layer.
    total : float or None
        Recorded relative error over all layers.
    origins : set of str
        Digests of the files that the adapter was made from.
    n_records : int
        Number of records: 1, and one more for each adapter between the source and this one.
    dropped : set of str
        Layers that a compression left out.
    left_out : set of str
        Tensors other than layers that an export left out.
    has_digest : bool
        Whether there is a digest of all tensors as they were written. If it holds, no layer went
        missing later.
    is_export : bool
        Whether the adapter was exported from another one.
    rounding : float
        Absolute error in ΔW that exports added since the errors were recorded.
    """

    layers: Mapping[str, float]
    total: float | None
    origins: set[str]
    n_records: int
    dropped: set[str]
    left_out: set[str]
    has_digest: bool
    is_export: bool
    rounding: float

    @classmethod
    def of(cls, written: Checkpoint) -> _Records:
        """Read the records of an adapter."""
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
            n_records=len(chain),
            dropped=dropped,
            left_out=set(map(str, record.get("left_out") or ())),
            has_digest=record.get("sha256") is not None,
            is_export="rounding" in record,
            rounding=sum(_rounding(entry) for entry in exports),
        )

    def total_for(self, source: Checkpoint) -> float | None:
        """Return the recorded error over all layers; for an export of the source itself, 0."""
        if self.total is None and self.is_export and self.n_records == 1:
            return 0.0 if source.source_sha256 in self.origins else None
        return self.total

    def may_lack_layer(self, name: str) -> bool:
        """Return whether a layer that is missing was left out when the adapter was written."""
        return self.has_digest or name in self.dropped


def check_layers(
    written: Checkpoint, source: Checkpoint, names: Mapping[str, str] | None = None
) -> None:
    """Raise `CheckpointError` unless all layers are in the source, with the same sizes.

    ``names`` has the source's names of renamed layers.
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


def source_names(source: Checkpoint, written: Checkpoint) -> dict[str, str]:
    """Return the source's names of layers that a kohya file calls by their flattened ones."""
    names: dict[str, str] = {}
    if written.format != "kohya":
        return names
    for sdxl in (False, True):
        for layer in source.layers:
            flat = flat_name(layer.name, sdxl=sdxl)
            if flat is not None:
                names[flat] = layer.name
    return names


def _agree(measured: float, recorded: float | None, rounding: float = 0.0) -> bool:
    """Return whether an error is finite and equals the recorded one, if there is one.

    ``rounding`` is what exports may have added since.
    """
    if recorded is None:
        return math.isfinite(measured)
    tolerance = 1e-12 + (1.0 + AGREEMENT) * rounding
    return math.isclose(measured, recorded, rel_tol=AGREEMENT, abs_tol=tolerance)


def _changed_tensors(source: Checkpoint, written: Checkpoint, left_out: set[str]) -> Iterator[str]:
    """Yield the names of tensors beside the layers that are not copies of the source's."""
    before_by_name = _beside_layers(source)
    after_by_name = _beside_layers(written)
    for name in sorted((before_by_name.keys() - left_out) | after_by_name.keys()):
        if name not in before_by_name or name not in after_by_name:
            yield name
            continue
        before = before_by_name[name].read()
        after = after_by_name[name].read()
        if before.dtype != after.dtype or before.tobytes() != after.tobytes():
            yield name


def _beside_layers(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Return the extras, and the tensors that are no pair."""
    carried = {key: checkpoint.tensors[key] for key in checkpoint.carried}
    return {**checkpoint.extras, **carried}


def _rounding(record: dict[str, Any]) -> float:
    """Return the absolute error in ΔW by the rounding of an export; 0 if none is recorded."""
    error = record.get("rounding")
    return float(error) if isinstance(error, int | float) else 0.0


def _chain(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the record of an adapter, that of the one it was made from, and so on."""
    while record:
        yield record
        record = mapping(record.get("derived_from"))
