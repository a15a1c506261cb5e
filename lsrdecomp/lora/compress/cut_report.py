"""The report of a LoRA that was cut on its base as one HTML file: pictures, sizes, ranks."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING

from lsrdecomp.lora.compress.html_report import asset
from lsrdecomp.lora.files.layer_names import common_prefix
from lsrdecomp.markup import size_text

if TYPE_CHECKING:
    from pathlib import Path

    from lsrdecomp.lora.compress.truncation import Truncation


def cut_report(cut: Truncation, out: Path | None = None) -> str:
    """Return one self-contained page about a truncation that was measured on a base.

    Parameters
    ----------
    cut : Truncation
        With a fidelity, and pictures where the base makes images.
    out : path, optional
        What was written.
    """
    from jinja2 import Environment

    fidelity = cut.fidelity
    assert fidelity is not None
    error = "" if fidelity.standard_error is None else f" ± {100 * fidelity.standard_error:.1f}"
    tiles = [
        ("of the LoRA's effect kept", f"{100 * fidelity.kept:.1f}{error} %"),
        ("before", size_text(fidelity.bytes_before)),
        ("now", size_text(fidelity.bytes_after)),
    ]
    if cut.by_energy is not None and cut.by_energy.kept is not None:
        tiles.append(("as many numbers by the weights alone", f"{100 * cut.by_energy.kept:.1f} %"))
    pictures = [
        (each.prompt, each.seed, *map(_data_address, (each.base, each.lora, each.small)))
        for each in cut.pictures
    ]
    page = Environment(autoescape=True, trim_blocks=True).from_string(asset("cut.html.jinja"))
    return page.render(
        name=cut.source.path.name,
        written="" if out is None else out.name,
        sentence=fidelity.sentence(),
        tiles=tiles,
        pictures=pictures,
        tried=cut.tried,
        layers=list(zip(cut.layers, cut.ranks, strict=True)),
        carried=cut.carried_layers,
        prefix=common_prefix([layer.name for layer in cut.layers]),
        style=asset("report.css"),
    )


def _data_address(png: bytes) -> str:
    """Return an image as an address that holds it."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
