"""What integer factors lose: rounded as they are, and solved for in the layer's norm.

    python -m benchmarks.compression.integer_factors [--adapter DIR --statistics DIR] [--out FILE]

The adapter is that of the demo, in the norm of the statistics that ship with it; ``--statistics``
is what `lsrdecomp calibrate` wrote for another.
LSR products in the Fisher norm by a light search, at several budgets over all layers; errors over
all layers in that norm, measured on the factors as a reader gets them. CPU seconds of the solving
beside those of the search.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from benchmarks import record as records
from benchmarks.lab.structures.fit import FittedLayer, fit_layers, make_layers
from benchmarks.record import RESULTS
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.statistics import read_statistics
from lsrdecomp.lora.search.candidates import LowRankCandidate
from lsrdecomp.lora.search.layers import layer_pair
from lsrdecomp.lora.search.plan import CompressionPlan
from lsrdecomp.lora.search.quantize import INTEGER_BITS, quantized_product, refitted_product

RATIOS = (96.0, 48.0, 19.2, 4.36)


def row(fitted: tuple[FittedLayer, ...], storage: str) -> dict[str, Any]:
    """Return relative errors over all layers, and the CPU seconds that solving took.

    The errors are those of the factors as found, rounded, and solved for.
    """
    bits, squares, seconds, size = INTEGER_BITS[storage], [0.0, 0.0, 0.0], 0.0, 0
    for one in fitted:
        layer, form = one.layer, one.product
        if not isinstance(form, SeparatedProduct):
            squares = [square + layer.squared_norm for square in squares]
            continue
        begun = time.process_time()
        solved = refitted_product(layer, form, bits)
        seconds += time.process_time() - begun
        rounded = quantized_product(form, bits)
        size += rounded.bytes
        forms = form, rounded.dequantized(), solved.dequantized()
        squares = [
            square + layer.squared_error(each) for square, each in zip(squares, forms, strict=True)
        ]
    whole = math.fsum(one.layer.squared_norm for one in fitted)
    errors = dict(
        zip(
            ("float64", "rounded", "solved"),
            (math.sqrt(square / whole) for square in squares),
            strict=True,
        )
    )
    return {"storage": storage, "bytes": size, "errors": errors, "seconds_solving": seconds}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shipped = Path(str(files("lsrdecomp.cli")))
    parser.add_argument("--adapter", type=Path, default=shipped / "demo_adapter")
    parser.add_argument("--statistics", type=Path, default=shipped / "demo_statistics")
    parser.add_argument("--out", type=Path, default=RESULTS / "integer_factors.json")
    options = parser.parse_args()
    checkpoint = open_checkpoint(options.adapter)
    pairs = {layer.name: layer_pair(checkpoint, layer) for layer in checkpoint.layers}
    layers = make_layers(pairs, read_statistics(options.statistics))
    rows = []
    for ratio in RATIOS:
        begun = time.process_time()
        budget = CompressionPlan(ratio=ratio).budget(layers)
        fit = fit_layers(
            layers,
            replace(budget, allowed=lambda candidate: not isinstance(candidate, LowRankCandidate)),
        )
        searching = time.process_time() - begun
        for storage in INTEGER_BITS:
            figures = {"ratio": ratio, "parameters": fit.parameters, "seconds_searching": searching}
            rows.append(figures | row(fit.layers, storage))
            print(json.dumps(rows[-1]), flush=True)
    record = {"adapter": options.adapter.name, "layers": len(layers), "rows": rows}
    records.save(options.out, record, seed=None)


if __name__ == "__main__":
    main()
