"""Compressed directories written again: with trained factors, or with a measured fidelity."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.files import Checkpoint, open_checkpoint, write_lsr
from lsrdecomp.lora.files.file_checks import SUMS, read_json
from lsrdecomp.lora.files.format import CONFIG
from lsrdecomp.lora.files.packed_index import stored_layers
from lsrdecomp.lora.files.provenance import CARD, REPORT, read_provenance
from lsrdecomp.lora.files.writing import WEIGHTS, new_directory
from lsrdecomp.lora.measure.verify_files import check_layers
from lsrdecomp.lora.search.layers import Layer, StatisticsByLayer, in_memory, open_layers
from lsrdecomp.lora.search.quantize import stored_like
from lsrdecomp.lora.search.result import LayerReport, report_layer, report_text, to_json, totals
from lsrdecomp.precision import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from lsrdecomp.formats.stored import Stored
    from lsrdecomp.kronecker.product import SeparatedProduct
    from lsrdecomp.lora.measure.fidelity import Fidelity


def rewrite(
    out: Path,
    written: Path,
    source: Checkpoint,
    products: Mapping[str, SeparatedProduct],
    *,
    statistics: StatisticsByLayer | None = None,
    removed: Collection[str] = (),
) -> Path:
    """Write a compressed directory again with other factors, in the storage of the old ones.

    Integer codes are solved for again: near the new numbers in the norm of the layer, or rounded,
    whichever is nearer.

    Parameters
    ----------
    out : Path
        Directory to write; must not exist.
    written : Path
        The old directory, which `compress` wrote from ``source``.
    source : Checkpoint
        The LoRA, against which errors are measured.
    products : Mapping of layer name to SeparatedProduct
        The new factors; other layers keep their numbers.
    statistics : Mapping, optional
        As for `compress`: the norm in which codes are solved, and in which the record has errors
        beside those in the Frobenius norm.
    removed : collection of layer names
        Layers that are left out.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    CheckpointError
        If ``written`` was not made from ``source``, or its record is of another release.
    """
    # 1. Open the old directory, and the LoRA's layers with their norms.
    old = open_checkpoint(written)
    check_layers(old, source)
    layers = {layer.name: layer for layer in open_layers(source, statistics)}
    # 2. Bring the new factors to the storage of each layer.
    new: dict[str, Stored] = stored_layers(old)
    for name in removed:
        del new[name]
    for name in new:
        if name in products:
            new[name] = stored_like(new[name], products[name], layers[name].norms)
    float_storages = [stored.storage for stored in new.values() if stored.storage in PRECISIONS]
    # 3. Write them, with the old record and the errors of the new numbers. The card names one
    #    storage: the last of those in floats, or float32 where all layers are codes.
    record = read_provenance(old)
    return write_lsr(
        out,
        source=source,
        layers=new.items(),
        storage=float_storages[-1] if float_storages else "float32",
        provenance={"plan": record["plan"]} if "plan" in record else {},
        dropped=[*record.get("dropped", ()), *removed],
        files=_updated_report(old, source, layers, new),
    )


def publish(
    written: Path,
    out: str | Path,
    report: Mapping[str, Any],
    fidelity: Fidelity,
    *,
    inputs: Iterable[Path] = (),
    force: bool = False,
    bare: bool = False,
) -> Path:
    """Copy a compressed directory, with its fidelity in the record and on the card.

    Parameters
    ----------
    written : Path
        Directory that `Compression.save` wrote.
    out : path
        Directory to write, wholly or not at all.
    report : Mapping
        JSON values of the new record beside the fidelity.
    fidelity : Fidelity
    inputs : iterable of Path
        Paths that ``out`` must not overwrite.
    force : bool
        Replace ``out`` if it exists.
    bare : bool
        Copy the weight file and its config only.

    Returns
    -------
    Path
        ``out``.
    """
    out = Path(out)
    with new_directory(out, inputs=inputs, force=force, sums=not bare) as unfinished:
        # 1. Copy the files. Digests are left out: new ones are written with the directory.
        for file in written.iterdir():
            is_needed = file.name in (WEIGHTS, CONFIG)
            if file.is_file() and file.name != SUMS and (is_needed or not bare):
                shutil.copyfile(file, unfinished / file.name)
        if bare:
            return out  # written when the block ends
        # 2. Write the record and a line on the card.
        record = dict(report)
        record["promise"] = fidelity.to_json()
        (unfinished / REPORT).write_text(report_text(record, directory=out), encoding="utf-8")
        card = unfinished / CARD
        text = card.read_text(encoding="utf-8") if card.is_file() else ""
        card.write_text(
            f"{text.rstrip()}\n\nThis adapter {fidelity.sentence()}.\n", encoding="utf-8"
        )
    return out


def recorded_layers(directory: Path) -> tuple[LayerReport, ...]:
    """Return the layers in the record of a compressed directory.

    Raises
    ------
    CheckpointError
        If another release wrote the record.
    """
    path = directory / REPORT
    rows = read_json(path).get("layers", [])
    try:
        return tuple(_layer_report(row) for row in rows)
    except (TypeError, KeyError) as error:
        raise CheckpointError(
            f"is of another release ({error}); write the adapter again", path=path
        ) from None


def _layer_report(row: Mapping[str, Any]) -> LayerReport:
    """Return a layer of a record, whose tuples JSON turned into lists."""
    fields = dict(row)
    fields["separation_ranks"] = tuple(row["separation_ranks"])
    return LayerReport(**fields)


def _updated_report(
    old: Checkpoint,
    source: Checkpoint,
    layers: Mapping[str, Layer],
    new: Mapping[str, Stored],
) -> dict[str, str]:
    """Return the report of the old directory with the errors of the new numbers.

    Parameters
    ----------
    old : Checkpoint
        The old directory.
    source : Checkpoint
        The LoRA.
    layers : Mapping of name to Layer
        The LoRA's layers with their norms, in their order.
    new : Mapping of name to Stored
        The new numbers.

    Returns
    -------
    dict
        Text of the report by its file name; empty if the old directory had none.
    """
    path = old.weights.parent / REPORT
    if not path.is_file():
        return {}
    report: dict[str, Any] = dict(read_json(path))
    lists_layers = "layers" in report
    old_rows = {row.name: row for row in recorded_layers(old.weights.parent)}
    # 1. Measure the errors of all layers. A report that lists layers knows of each how it was
    #    compressed, which the numbers do not tell.
    rows = []
    for source_layer, layer in zip(source.layers, layers.values(), strict=True):
        layer_stored = new.get(source_layer.name)
        stored = None if layer_stored is None else in_memory(layer_stored)
        old_row = old_rows.get(source_layer.name)
        if old_row is not None:
            row = report_layer(
                source_layer,
                layer,
                stored,
                structure="drop" if stored is None else old_row.structure,
                storage=old_row.storage,
                met=old_row.met,
            )
        elif lists_layers:
            text = f"has no line of layer {source_layer.name!r}; write the adapter again"
            raise CheckpointError(text, path=path)
        else:
            structure = "drop" if layer_stored is None else layer_stored.structure
            row = report_layer(source_layer, layer, stored, structure=structure)
        rows.append(row)
    # 2. Sum them up. What is known of the budget still holds: the error of the best truncated SVD,
    #    and the effect. What was measured on a base does not, and will be measured again.
    old_totals = report.get("totals", {})
    low_rank_error = old_totals.get("low_rank_error")
    new_totals = totals(rows, source.extra_parameters, low_rank_error, old_totals.get("effect"))
    for key in ("totals", "layers", "promise"):
        report.pop(key, None)
    return {REPORT: report_text(to_json(rows, new_totals, every_layer=lists_layers, **report))}
