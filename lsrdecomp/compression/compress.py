"""Every layer of a checkpoint under one plan; what comes out can be looked at, then written.

1. Open: the layers of the checkpoint, each with the norm its error counts in (`open_layers`).
2. Fit: candidates of all layers, solved once (`search_layers`), and which of them a plan takes.
3. Materialize: the factors of those taken, rounded to their storage and measured
   (`candidates.materialize`).
4. Report: a row a layer (`report_layer`), in a `Compression` that can be saved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.progress import Counter
from lsrdecomp.checkpoints.statistics import Statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.caches import SpillCache
from lsrdecomp.compression.candidates import (
    Candidate,
    Materialized,
    keep,
    lsr_candidate,
    materialize,
)
from lsrdecomp.compression.effort import DEFAULT_LIMITS, FileFilling, ResourceLimits
from lsrdecomp.compression.layers import Layer, StatisticsByLayer, batches, open_layers
from lsrdecomp.compression.quantize import INTEGER_BITS
from lsrdecomp.compression.request import check_divergence, check_given_terms
from lsrdecomp.compression.result import Compression as Compression
from lsrdecomp.compression.result import report_layer
from lsrdecomp.compression.search import FittedLayers, fit_budget, search_layers
from lsrdecomp.compression.settings import Budget, CompressionPlan, Resources, Search
from lsrdecomp.errors import BudgetError
from lsrdecomp.kronecker.shape import ProductShape, balanced_split
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.checkpoints import Checkpoint
    from lsrdecomp.checkpoints.progress import OnStep
    from lsrdecomp.compression.search_table import SearchTable

HEADER_BYTES = 320
"""Bytes of a header and a config that say little."""

GIVEN_TERMS_SOLVER = JointALS(tolerance=5e-4, initializations=1, single=True)
"""Of layers at given terms: ends after about eight sweeps, in the median half a thousandth above
where hundreds end."""

DEFAULT_FILLING = FileFilling()


@one_blas_thread
def search_adapter(
    checkpoint: Checkpoint,
    plans: Sequence[CompressionPlan],
    *,
    statistics: StatisticsByLayer | None = None,
    search: Search | None = None,
    resources: Resources | None = None,
) -> SearchedAdapter:
    """Solve the shapes that these plans could want, once, for any number of budgets.

    Parameters
    ----------
    checkpoint : Checkpoint
        As returned by `lsrdecomp.open_checkpoint`.
    plans : sequence of CompressionPlan
        What will be asked, at least one and all in one storage: larger shapes than they could want
        are not solved. Other plans may be drawn as well.
    statistics : Mapping of module name to statistics, optional
        As read by `read_statistics`: errors then count in the Fisher norm, and layers are weighed
        against each other by what they do. Absent, the Frobenius norm of ΔW.
    search : Search, optional
        How far to look for shapes; refused where all plans give terms (``separation_rank``).
    resources : Resources, optional
        Processes, device, journal and progress.

    Returns
    -------
    SearchedAdapter
        Its `SearchedAdapter.compress` draws a plan.

    Raises
    ------
    BudgetError
        If there is no plan, plans differ in storage, or a divergence (``kl``) is asked for without
        statistics.
    SettingsError
        For a search, workers or a journal where all plans give terms.
    CheckpointError
        Naming file and tensor, if a layer is not a LoRA or its numbers cannot be used.
    LsrError
        If torch cannot compute in float64 on the device, or joblib is missing and several workers
        are asked for.

    Notes
    -----
    Layers are read as they are needed, so many at a time as fit in 8 MiB (`effort.ResourceLimits`),
    at least one. What they became waits in memory up to 8 MiB and then in a temporary file, as do
    the factors of all products that were solved for.

    Examples
    --------
    One search, two sizes, and another between them of what was solved.

    >>> from importlib.resources import files
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> plans = [CompressionPlan(ratio=ratio) for ratio in (96, 48)]
    >>> searched = search_adapter(lora, plans, search=Search(orders=(2,), rounds=0))
    >>> sizes = [searched.compress(plan).totals.parameters for plan in plans]
    >>> sizes.append(searched.compress(CompressionPlan(ratio=61)).totals.parameters)
    >>> [lora.adapter_parameters // size for size in sizes] >= [96, 48, 61]
    True
    """
    # Compress 1, open: what cannot be written or shared is refused now, not after hours of search.
    resources = resources or Resources()
    effect = None
    if isinstance(statistics, Statistics):
        statistics.check_base(checkpoint.config.get("base_model_name_or_path"))
        effect = statistics.effect(checkpoint.source_sha256)
    layers = open_layers(checkpoint, statistics, resources.limits)
    cache = SpillCache(resources.limits.spill_bytes)
    plans = [plan.with_default_storage() for plan in plans]
    storages = {plan.storages for plan in plans}
    if len(storages) != 1:
        text = f"a search is for plans of one storage, and {len(plans)} plans have {len(storages)}"
        raise BudgetError(f"{text}: search once for each storage")
    if all(plan.separation_rank is not None for plan in plans):
        check_given_terms(resources, search)
    for plan in plans:
        check_divergence(plan, statistics is not None)
        if plan.bytes is not None:
            _bytes_for_factors(checkpoint, plan.bytes)
    # Compress 2, fit: every layer at the shapes that a budget could want. Plans of given terms
    # search for none.
    budgets = [plan.budget(layers, effect) for plan in plans if plan.separation_rank is None]
    table = None
    if budgets:
        table = search_layers(
            layers,
            budgets,
            search=search,
            storages=storages.pop(),
            cache=cache,
            resources=resources,
        )
    return SearchedAdapter(checkpoint, layers, table, cache, resources, effect)


@dataclass(frozen=True, eq=False)
class SearchedAdapter:
    """A checkpoint whose layers were solved at many shapes; `compress` draws a plan from them.

    Attributes
    ----------
    checkpoint : Checkpoint
    layers : sequence of Layer
    table : SearchTable or None
        None: every layer at given terms.
    cache : SpillCache
        Where factors wait.
    resources : Resources
        What it solves with.
    effect : float, optional
        KL(LoRA ‖ no adapter) in nats an answer, where the statistics are of this LoRA.
    filling : FileFilling
        The files that are tried for a number of bytes.
    solver : JointALS
        Of plans that give terms.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> plan = CompressionPlan(separation_rank=1)
    >>> search_adapter(lora, [plan]).compress(plan).totals.layers  # `search_adapter` makes one
    12
    """

    checkpoint: Checkpoint
    layers: Sequence[Layer]
    table: SearchTable | None
    cache: SpillCache
    resources: Resources
    effect: float | None = None
    filling: FileFilling = DEFAULT_FILLING
    solver: JointALS = GIVEN_TERMS_SOLVER

    @one_blas_thread
    def compress(self, plan: CompressionPlan, *, fill: bool = True) -> Compression:
        """Return the adapter under one plan.

        Parameters
        ----------
        plan : CompressionPlan
            In the storage that was searched for, unless it gives terms.
        fill : bool
            Of a plan of bytes, whether files are tried, and solved for, till one is as full as may
            be. Without, it is the first, which may be some hundred bytes larger.

        Raises
        ------
        BudgetError
            If the plan cannot be met; says what is reachable. For another storage than was searched
            in, and for a divergence without statistics.
        """
        plan = self._checked(plan)
        if plan.bytes is not None and fill:
            return self._filled(plan, plan.bytes)
        return self._reported(plan, self._fit(plan))

    @one_blas_thread
    def expected_error(self, plan: CompressionPlan) -> float:
        """Return the squared relative error of a plan by the prices of what was solved.

        The same table answers for every size. In the norm that was searched in, before refining, so
        somewhat above what `compress` comes to; milliseconds. The plan has a number of parameters
        or bytes. Raises `BudgetError` as `compress`.
        """
        plan = self._checked(plan)
        return self._searched.expected_error(self._budget(plan))

    def _checked(self, plan: CompressionPlan) -> CompressionPlan:
        """Return the plan with its storage; `BudgetError` if the search cannot answer for it."""
        plan = plan.with_default_storage()
        check_divergence(plan, not self.layers[0].is_frobenius)
        if plan.separation_rank is None and plan.storages != self._searched.storages:
            searched = " or ".join(self._searched.storages)
            raise BudgetError(
                f"the search was in {searched}, and this plan is stored in {plan.storage}: "
                "search once for each storage"
            )
        return plan

    @property
    def _searched(self) -> SearchTable:
        if self.table is None:
            raise BudgetError("the search was for given terms only; search again for this plan")
        return self.table

    def _budget(self, plan: CompressionPlan, size: float | None = None) -> Budget:
        """Return what a plan allows the layers.

        Of a plan of bytes, factors of ``size``, or what its files leave for them.
        """
        budget = plan.budget(self.layers, self.effect)
        if plan.bytes is None:
            return budget
        if size is None:
            size = _bytes_for_factors(self.checkpoint, plan.bytes)
        return replace(budget, bytes=size)

    def _fit(self, plan: CompressionPlan, size: float | None = None) -> FittedLayers:
        """Compress 2 and 3: choose what each layer becomes, make its factors and measure them."""
        if plan.separation_rank is None:
            return fit_budget(self._searched, self._budget(plan, size))
        materialized = at_given_terms(
            self.layers,
            plan.separation_rank,
            plan.inner_shape,
            plan.storages[0],
            solver=replace(self.solver, device=self.resources.device),
            cache=self.cache,
            limits=self.resources.limits,
            on_step=self.resources.on_step,
        )
        return FittedLayers(materialized, None)

    def _reported(self, plan: CompressionPlan, fitted: FittedLayers) -> Compression:
        """Compress 4, report: a row a layer."""
        rows = []
        for source_layer, layer, materialized in zip(
            self.checkpoint.layers, self.layers, fitted.chosen, strict=True
        ):
            candidate = materialized.candidate
            error = math.sqrt(candidate.squared_error)
            meets_plan = True
            if plan.rtol is not None:
                max_error = plan.rtol * math.sqrt(layer.squared_norm)
                meets_plan = error <= max_error * (1.0 + 1e-12)
            rows.append(
                report_layer(
                    source_layer,
                    layer,
                    None if materialized.stored is None else materialized.stored(),
                    structure=candidate.structure,
                    storage=candidate.storage,
                    error=error,
                    met=meets_plan,
                )
            )
        if all(materialized.stored is None for materialized in fitted.chosen):
            if not any(layer.squared_norm for layer in self.layers):
                raise BudgetError(
                    "every layer of the adapter is zero: it does nothing, and there is nothing to "
                    "keep"
                )
            raise BudgetError("nothing of the adapter fits into this budget; allow more")
        return Compression(
            self.checkpoint, plan, tuple(rows), fitted.chosen, fitted.low_rank_error, self.effect
        )

    def _filled(self, plan: CompressionPlan, max_bytes: int) -> Compression:
        """Return the best adapter whose weight file and config have at most so many bytes together.

        What a file holds beside its factors is known only once the factors are chosen, so files are
        tried.
        """
        best: Compression | None = None
        sizes: list[int] = []
        # The answer lies between factors that made a file that fits and factors that made one that
        # does not.
        low = 0.0
        high = float(_bytes_for_factors(self.checkpoint, max_bytes))
        factor_bytes = high
        for _ in range(self.filling.max_files):
            # Fill 1: factors of so many bytes, and the file they make.
            try:
                result = self._reported(plan, self._fit(plan, factor_bytes))
            except BudgetError:
                if not sizes:
                    raise
                break
            size = _written_bytes(result)
            sizes.append(size)
            # Fill 2: the interval becomes smaller.
            if size <= max_bytes:
                low = max(low, factor_bytes)
                if best is None or result.error <= best.error:
                    best = result
                if size >= self.filling.min_fill * max_bytes:
                    break
            else:
                high = min(high, factor_bytes)
            # Fill 3: so many bytes more as the file had to spare; where that changed no layer's
            # choice, nearly all that may be; where it leads out of the interval, its middle.
            guess = factor_bytes + max_bytes - size
            if sizes.count(size) > 1:
                guess = low + 0.9 * (high - low)
            is_inside = guess < high and (guess > low or best is None)
            factor_bytes = max(guess, 0.0) if is_inside else 0.5 * (low + high)
            if high - low < 4.0:
                break
        if best is None:
            text = f"{max_bytes:,} bytes are too few: the smallest file found has {min(sizes):,}"
            raise BudgetError(text)
        return best


def at_given_terms(
    layers: Sequence[Layer],
    terms: int,
    inner_shape: tuple[int, ...] | None,
    storage: str,
    *,
    solver: JointALS = GIVEN_TERMS_SOLVER,
    cache: SpillCache | None = None,
    limits: ResourceLimits = DEFAULT_LIMITS,
    on_step: OnStep | None = None,
) -> tuple[Materialized, ...]:
    """Return every layer as an LSR product of balanced shape, of so many terms a side.

    A shape that needs fewer gets as many as it needs. Layers that can be solved together are; their
    factors wait in the cache.
    """
    cache = cache or SpillCache()
    groups: dict[Any, list[int]] = {}
    for i, layer in enumerate(layers):
        max_inner_rank = min(layer.rank, *layer.shape)  # a larger one is of no use
        inner = inner_shape or balanced_split(max_inner_rank)
        shape = ProductShape.balanced(layer.shape, inner)
        groups.setdefault((layer.group_key, shape), []).append(i)
    results: dict[int, Materialized] = {}
    done = Counter(on_step, "solving", len(layers), "layers")
    for (_, shape), indices in groups.items():
        for span in batches([layers[i] for i in indices], limits):
            batch = [layers[i] for i in indices[span]]
            weights = None if batch[0].is_frobenius else [layer.norms for layer in batch]
            pairs = [layer.pair for layer in batch]
            solved = solver.solve_batch(pairs, shape, (terms, terms), weights=weights)
            for i, solution in zip(indices[span], solved, strict=True):
                layer = layers[i]
                candidate: Candidate = lsr_candidate(solution, cache)
                # So many terms may take more numbers than the pair itself, which is exact.
                if candidate.parameters > layer.parameters and storage not in INTEGER_BITS:
                    candidate = keep(layer)
                results[i] = materialize(layer, replace(candidate, storage=storage), cache)
                done.add()
    return tuple(results[i] for i in range(len(layers)))


def _written_bytes(result: Compression) -> int:
    """Return how many bytes open an adapter once it is written."""
    with TemporaryDirectory() as folder:
        return bytes_to_open(result.save(Path(folder) / "sized") / WEIGHTS)


def _bytes_for_factors(checkpoint: Checkpoint, size: int) -> int:
    """Return the bytes for factors in files of so many; `BudgetError` if there are none."""
    fixed = checkpoint.extra_bytes + HEADER_BYTES
    if size <= fixed:
        text = f"heads, header and config alone take {fixed:,} bytes"
        raise BudgetError(f"nothing of the adapter fits into {size:,} bytes: {text}; allow more")
    return size - fixed
