"""compress: every layer of a checkpoint under one plan; what comes out can be looked at, then written."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lsrdecomp.checkpoints import Checkpoint, write_lsr
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.budget import Budget
from lsrdecomp.compression.candidates import Candidate, settled
from lsrdecomp.compression.fit import prepare
from lsrdecomp.compression.html_report import summary_html
from lsrdecomp.compression.layer import SOLVER, at_given_terms, stored_factors, stored_layers
from lsrdecomp.compression.layers import HasWeights, Layer
from lsrdecomp.compression.plan import CompressionPlan
from lsrdecomp.compression.report import LayerReport, Totals, to_json, totals
from lsrdecomp.compression.search import Search
from lsrdecomp.compression.size import fill
from lsrdecomp.compression.spill_cache import Shelf
from lsrdecomp.errors import BudgetError, CheckpointError
from lsrdecomp.formats.quantized import CodedProduct
from lsrdecomp.kronecker.product import SeparatedProduct
from lsrdecomp.targets.weights import NormWeights

EMPTY_FILE = 512
"""Bytes of a header that says where the file comes from."""

REPORT = "compression.json"
"""The report in a written directory; `verify` compares with it."""


@dataclass(frozen=True)
class Compression:
    """The result of `compress`: a report, and the factors ready to be written."""

    source: Checkpoint
    plan: CompressionPlan
    layers: tuple[LayerReport, ...]
    chosen: tuple[Candidate, ...] = field(repr=False)  # as stored
    low_rank_error: float | None = None  # of the best truncated SVD for the same budget, in the plan's norm

    @property
    def totals(self) -> Totals:
        return totals(self.layers, self.source.extra_parameters, self.low_rank_error)

    @property
    def met(self) -> bool:
        """Whether every layer meets the plan."""
        return self.totals.missed == 0

    def to_json(self) -> dict[str, Any]:
        """The report with plan and source, as plain values."""
        return to_json(self.layers, self.totals, plan=self.plan.to_json(), source=self.source.path.name)

    def _repr_html_(self) -> str:
        return summary_html(self)

    def save(self, out: str | Path, *, force: bool = False) -> Path:
        """Write the LSR directory that PEFT opens; other tensors of the source are carried along bit for bit.

        Raises `CheckpointError` if ``out`` exists (unless ``force``) or lies in the source; nothing is half written.
        """
        named = [(layer.name, candidate) for layer, candidate in zip(self.layers, self.chosen, strict=True)]
        return write_lsr(
            out,
            source=self.source,
            layers=(
                (name, *stored_factors(_product(candidate)), 1.0)
                for name, candidate in named
                if candidate.build is not None and candidate.codes is None
            ),
            coded=_ReadWhenAsked({name: one.codes for name, one in named if one.codes is not None}),
            storage=self.plan.float_storage,
            force=force,
            provenance={
                "plan": self.plan.to_json(),
                "dropped": [layer.name for layer in self.layers if layer.structure == "drop"],
            },
            files={REPORT: json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"},
        )


def compress(
    checkpoint: Checkpoint,
    plan: CompressionPlan,
    *,
    statistics: Mapping[str, HasWeights | NormWeights] | None = None,
    search: Search | None = None,
    device: str | None = None,
    on_layer: Callable[[LayerReport], Any] | None = None,
    on_step: Callable[[str], Any] | None = None,
) -> Compression:
    """Turn the LoRA layers of a checkpoint into products of separated matrices, or what serves better at the same size.

    Parameters
    ----------
    checkpoint : Checkpoint
        As returned by `lsrdecomp.open_checkpoint`.
    plan : CompressionPlan
    statistics : Mapping of module name to statistics, optional
        As read by `read_statistics`: errors then count in the K-FAC norm, and layers are weighed against each other by
        what they do. Absent, the Frobenius norm of ΔW.
    search : Search, optional
        How far to look for shapes; with ``separation_rank`` only its solver counts.
    device : str, optional
        Where torch does the joint least squares, such as ``"cuda"``; absent, NumPy. Last digits depend on it.
    on_layer : callable, optional
        Called with each `LayerReport` at the end.
    on_step : callable, optional
        Called with a few words before each part of the work.

    Returns
    -------
    Compression
        Reports and factors; nothing is written before `Compression.save`.

    Notes
    -----
    Layers are read as they are needed, so many at a time as fit in 8 MiB (`open_layers.PAIR_ENTRIES`), at least one.
    What they became waits in memory up to 8 MiB and then in a temporary file. With a budget over all layers, prices of
    all candidates are held too, and the factors of those that took long to find wait in that file.

    Raises
    ------
    CheckpointError
        Naming file and tensor, if the numbers of a layer cannot be used.
    BudgetError
        If the budget cannot be met, saying what can be reached; if ``kl`` is asked without statistics.
    LsrError
        If torch cannot compute in float64 on ``device``.
    """
    if plan.kl is not None and statistics is None:
        raise BudgetError("a divergence (kl) is measured in the K-FAC norm: calibrate first and pass the statistics")
    if search is not None and device is not None:
        search = search.on(device)
    layers = stored_layers(checkpoint, statistics)
    shelf = Shelf()

    def report(place: int, candidate: Candidate) -> tuple[LayerReport, Candidate]:
        best = settled(candidate, shelf)
        source = checkpoint.layers[place]
        return _report(source, layers[place], best, plan, statistics is not None), best

    def finished(found: Iterable[tuple[int, Candidate]], low_rank_error: float | None = None) -> Compression:
        results = {place: report(place, candidate) for place, candidate in found}
        reports, chosen = zip(*(results[place] for place in range(len(layers))), strict=True)
        return Compression(checkpoint, plan, reports, chosen, low_rank_error)

    def under(budget: Budget) -> Compression:
        fit = prepared.fit(budget)
        return finished(enumerate(fitted.candidate for fitted in fit.layers), fit.low_rank_error)

    if plan.separation_rank is not None:
        solver = replace(SOLVER, device=device) if search is None else search.solver
        terms, inner, storage = plan.separation_rank, plan.inner_shape, plan.storages[0]
        result = finished(at_given_terms(layers, terms, inner, storage, solver, shelf))
    else:
        search = search or Search().on(device)
        prepared = prepare(layers, plan.budget, search=search, storages=plan.storages, shelf=shelf, on_step=on_step)
        if plan.bytes is None:
            result = under(plan.budget)
        else:
            result = fill(plan.bytes, lambda left: under(Budget(bytes=left)), _file_size, _error)
    if all(candidate.build is None for candidate in result.chosen):
        least = f": heads and header alone take {_file_size(result):,} bytes" if plan.bytes is not None else ""
        raise BudgetError(f"nothing of the adapter fits into this budget{least}; allow more")
    if on_layer is not None:
        for layer in result.layers:
            on_layer(layer)
    return result


def _file_size(result: Compression) -> int:
    """Bytes of the weight file, by writing it; without any layer, of what it would hold at least."""
    if all(candidate.build is None for candidate in result.chosen):
        return sum(tensor.nbytes for tensor in result.source.extras.values()) + EMPTY_FILE
    with TemporaryDirectory() as folder:
        return (result.save(Path(folder) / "sized") / WEIGHTS).stat().st_size


def _error(result: Compression) -> float:
    total = result.totals
    return total.relative_error if total.functional_error is None else total.functional_error


class _ReadWhenAsked(Mapping[str, CodedProduct]):
    """Codes by layer name, read from the shelf one at a time."""

    def __init__(self, readers: Mapping[str, Callable[[], CodedProduct]]) -> None:
        self._readers = readers

    def __getitem__(self, name: str) -> CodedProduct:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def _product(candidate: Candidate) -> SeparatedProduct:
    form = None if candidate.build is None else candidate.build()
    if not isinstance(form, SeparatedProduct):
        raise CheckpointError(f"a candidate of structure {candidate.structure!r} has no place in an LSR directory")
    return form


def _report(source: Any, layer: Layer, best: Candidate, plan: CompressionPlan, functional: bool) -> LayerReport:
    norm, size = layer.pair.norm, math.sqrt(layer.squared_norm)
    product = None if best.build is None else _product(best)
    if product is not None and best.codes is None:
        # Weights are spread over the factors and those rounded when they are written: this is what a reader then gets.
        product = product.round_to(best.storage)
        best = replace(best, squared_error=layer.squared_error(product))
    error = math.sqrt(best.squared_error)
    frobenius = error
    if functional:
        frobenius = norm if product is None else layer.pair.residual_norm(product)
    in_norm = error / size if size > 0.0 else error
    return LayerReport(
        name=layer.name,
        kind=source.kind,
        rows=source.out_features,
        columns=source.in_features,
        source_rank=source.rank,
        structure=best.structure,
        shape="–" if product is None else str(product.product_shape),
        separation_ranks=(0, 0) if product is None else product.separation_ranks,
        parameters_before=source.parameters,
        parameters=0 if product is None else sum(f.size for side in stored_factors(product) for f in side),
        bytes=best.bytes,
        norm=norm,
        relative_error=frobenius / norm if norm > 0.0 else frobenius,
        functional_norm=size if functional else None,
        functional_error=in_norm if functional else None,
        condition=1.0 if product is None else product.condition,
        storage=best.codes().storage if best.codes is not None else best.storage,
        met=plan.rtol is None or error <= plan.rtol * size * (1.0 + 1e-12),
    )
