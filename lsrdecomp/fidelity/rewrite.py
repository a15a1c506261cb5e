"""Compressed directories written again: with other numbers, or with what they keep."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints import Checkpoint, open_checkpoint, write_lsr
from lsrdecomp.checkpoints.files import SUMS, read_json
from lsrdecomp.checkpoints.packed_index import stored_layers
from lsrdecomp.checkpoints.provenance import CARD, read_provenance
from lsrdecomp.checkpoints.writing import new_directory
from lsrdecomp.compression.layers import Layer, StatisticsByLayer, open_layers
from lsrdecomp.compression.quantize import stored_like
from lsrdecomp.compression.result import (
    REPORT,
    LayerReport,
    report_layer,
    report_text,
    to_json,
    totals,
)
from lsrdecomp.compression.verify import check_layers
from lsrdecomp.errors import CheckpointError
from lsrdecomp.precision import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lsrdecomp.fidelity.fidelity import Fidelity
    from lsrdecomp.formats.stored import Stored
    from lsrdecomp.kronecker.product import SeparatedProduct


def rewrite(
    out: Path,
    written: Path,
    source: Checkpoint,
    products: Mapping[str, SeparatedProduct],
    *,
    statistics: StatisticsByLayer | None = None,
) -> Path:
    """Write the directory ``written`` again with other factors, rounded as the old ones were.

    Integer codes are solved for afresh: near the new numbers in the norm of the layer, or rounded,
    whichever is nearer.

    Parameters
    ----------
    out : Path
        Must not exist.
    written : Path
        What `compress` wrote from ``source``; a layer that ``products`` lacks keeps its numbers.
    source : Checkpoint
        The LoRA, against which errors are measured.
    products : Mapping of layer name to SeparatedProduct
    statistics : Mapping, optional
        As for `compress`: the norm codes are solved in, and the error that the record tells beside
        Frobenius'.
    """
    # 1. What was written, which must be of this LoRA; and its layers, in whose norms errors count.
    old = open_checkpoint(written)
    check_layers(old, source)
    layers = {layer.name: layer for layer in open_layers(source, statistics)}
    # 2. The new numbers in each layer's own storage: codes solved for afresh, or floats rounded.
    new: dict[str, Stored] = stored_layers(old)
    for name in new:
        if name in products:
            new[name] = stored_like(new[name], products[name], layers[name].norms)
    floats = [stored.storage for stored in new.values() if stored.storage in PRECISIONS]
    # 3. The files, with the record of the old ones and the errors of the new numbers.
    record = read_provenance(old)
    return write_lsr(
        out,
        source=source,
        layers=new.items(),
        storage=floats[-1] if floats else "float32",
        provenance={key: record[key] for key in ("plan",) if key in record},
        dropped=record.get("dropped", ()),
        files=_record(old, source, layers, new),
    )


def publish(
    written: Path,
    out: str | Path,
    report: Mapping[str, Any],
    fidelity: Fidelity,
    *,
    inputs: Iterable[Path] = (),
    force: bool = False,
) -> Path:
    """Copy a directory with what it keeps in its record and on its card, whole or not at all.

    Parameters
    ----------
    written : Path
        What `Compression.save` wrote.
    out : path
        Must not exist, unless ``force``.
    report : Mapping
        JSON values of the new record, beside what is kept.
    fidelity : Fidelity
    inputs : iterable of Path
        What ``out`` must not overwrite.
    """
    out = Path(out)
    # All but the digests, which are made anew: record and card change.
    with new_directory(out, inputs=inputs, force=force) as part:
        for file in written.iterdir():
            if file.is_file() and file.name != SUMS:
                shutil.copyfile(file, part / file.name)
        record = {**report, "promise": fidelity.to_json()}
        (part / REPORT).write_text(report_text(record), encoding="utf-8")
        card = part / CARD
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        card.write_text(
            f"{text.rstrip()}\n\nThis adapter {fidelity.sentence()}.\n", encoding="utf-8"
        )
    return out


def recorded_layers(directory: Path) -> tuple[LayerReport, ...]:
    """Return the reports of layers in a written directory's record, in its order."""
    path = directory / REPORT
    rows = read_json(path).get("layers", [])
    try:
        return tuple(_layer_report(row) for row in rows)
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"is of another release ({error}); write the adapter again", path=path
        ) from None


def _layer_report(row: Mapping[str, Any]) -> LayerReport:
    """Return a row of a record, whose lists are tuples."""
    ranks = tuple(row["separation_ranks"])
    return LayerReport(**{**row, "separation_ranks": ranks})


def _record(
    old: Checkpoint,
    source: Checkpoint,
    layers: Mapping[str, Layer],
    new: Mapping[str, Stored],
) -> dict[str, str]:
    """Return the directory's report with the errors of the new numbers; none where it had none."""
    # Record 1: what the directory said of itself; where it said it of every layer, so does the new
    #           one.
    path = old.weights.parent / REPORT
    if not path.is_file():
        return {}
    annotations: dict[str, Any] = dict(read_json(path))
    detailed = "layers" in annotations
    before = {row.name: row for row in recorded_layers(old.weights.parent)}
    # Record 2: a row a layer, its error measured on the new numbers; shape and storage are the old
    #           ones.
    rows = []
    for source_layer, layer in zip(source.layers, layers.values(), strict=True):
        stored = new.get(source_layer.name)
        row = before.get(source_layer.name)
        if row is not None:
            # A directory that records every layer knows more than its numbers tell.
            row = report_layer(
                source_layer,
                layer,
                stored,
                structure=row.structure,
                storage=row.storage,
                met=row.met,
            )
        elif detailed:
            text = f"has no line of layer {source_layer.name!r}; write the adapter again"
            raise CheckpointError(text, path=path)
        else:
            structure = "drop" if stored is None else stored.structure
            row = report_layer(source_layer, layer, stored, structure=structure)
        rows.append(row)
    # Record 3: the sums. What was known of the budget (the best truncated SVD, the effect) still
    #           holds; what was measured on a base does not: it is measured again.
    sums = annotations.get("totals", {})
    summary = totals(rows, source.extra_parameters, sums.get("low_rank_error"), sums.get("effect"))
    for key in ("totals", "layers", "promise"):
        annotations.pop(key, None)
    return {REPORT: report_text(to_json(rows, summary, every_layer=detailed, **annotations))}
