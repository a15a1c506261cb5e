"""Compression of all layers of a checkpoint under one plan.

1. `search_adapter` opens the layers, each with the norm in which its error counts (`open_layers`).
   In a norm of the base, and where LSR is asked for, it solves candidates for all of them
   (`search.search_layers`); else truncated SVD is taken (`storage_choice.choose_storage`).
2. `SearchedAdapter.compress` chooses the candidates that meet a plan (`search.fit_budget` or
   `choose_storage`), rounds their factors to their storage and measures them
   (`candidates.materialize`).
3. It reports every layer (`result.report_layer`) in a `Compression`, which can be saved.

One search serves any number of plans.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from lsrdecomp.arrays import check_device
from lsrdecomp.errors import BudgetError
from lsrdecomp.kronecker.shape import ProductShape, balanced_split
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.progress import Counter
from lsrdecomp.lora.files.statistics import Statistics
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.search.caches import SpillCache
from lsrdecomp.lora.search.candidates import (
    Candidate,
    Materialized,
    keep,
    lsr_candidate,
    materialize,
)
from lsrdecomp.lora.search.effort import DEFAULT_LIMITS, ResourceLimits
from lsrdecomp.lora.search.layers import Layer, StatisticsByLayer, batches, open_layers
from lsrdecomp.lora.search.plain_svd import best_plain_svd
from lsrdecomp.lora.search.plan import STORAGES, Budget, CompressionPlan, Resources, Search
from lsrdecomp.lora.search.quantize import INTEGER_BITS
from lsrdecomp.lora.search.request import check_divergence, check_given_terms
from lsrdecomp.lora.search.result import MIN_FILL, LayerReport, report_layer
from lsrdecomp.lora.search.result import Compression as Compression
from lsrdecomp.lora.search.search import FittedLayers, fit_budget, search_layers
from lsrdecomp.lora.search.search_table import SearchTable
from lsrdecomp.lora.search.storage_choice import PlainTable, choose_storage
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.files.progress import OnStep
    from lsrdecomp.lora.search.request import Request

HEADER_BYTES = 120
"""Bytes of the shortest header and config."""

MAX_FILES = 8
"""Maximum files that are written and measured to fill a number of bytes."""

GIVEN_TERMS_SOLVER = JointALS(tolerance=5e-4, initializations=1, single=True)
"""Solver of layers at given numbers of terms. It ends after about eight sweeps, at errors that are
0.05 % above those after hundreds of sweeps, in the median."""


@one_blas_thread
def search_adapter(
    checkpoint: Checkpoint,
    plans: Sequence[CompressionPlan],
    *,
    statistics: StatisticsByLayer | None = None,
    search: Search | None = None,
    resources: Resources | None = None,
) -> SearchedAdapter:
    """Solve shapes of all layers once, for any number of plans.

    Without statistics, a search or ``structure="lsr"`` nothing is solved: the plans are met by
    truncated SVD.

    Parameters
    ----------
    checkpoint : Checkpoint
        As returned by `lsrdecomp.open_checkpoint`.
    plans : sequence of CompressionPlan
        The plans that the search prepares for, at least one and all in one storage. Shapes too
        large for any of them are not solved. Other plans may be compressed to as well.
    statistics : Mapping of module name to statistics, optional
        As read by `read_statistics`: errors then count in the Fisher norm, which weighs layers by
        their effect on the outputs. Absent, the Frobenius norm of ΔW.
    search : Search, optional
        Effort of the search, which it asks for where there are no statistics; refused if all plans
        give terms (``separation_rank``).
    resources : Resources, optional
        Processes, device, journal and progress.

    Returns
    -------
    SearchedAdapter
        Its `SearchedAdapter.compress` compresses to a plan.

    Raises
    ------
    BudgetError
        If there is no plan, plans differ in storage, or a divergence (``kl``) is asked for without
        statistics.
    SettingsError
        For a search, workers or a journal if all plans give terms.
    CheckpointError
        If a layer is not a LoRA or its numbers cannot be used; the message has file and tensor.
    LsrError
        If torch cannot compute in float64 on the device, or joblib is missing and several workers
        are asked for.

    Notes
    -----
    Layers are read when they are needed, as many at a time as fit in 8 MiB
    (`effort.ResourceLimits`), at least one. Solved factors are kept in memory up to 8 MiB, and
    beyond that in a temporary file.

    Examples
    --------
    One search for two sizes, and a size between them.

    >>> from importlib.resources import files
    >>> from lsrdecomp.lora.files import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> plans = [CompressionPlan(ratio=ratio) for ratio in (96, 48)]
    >>> searched = search_adapter(lora, plans, search=Search(orders=(2,), rounds=0))
    >>> sizes = [searched.compress(plan).totals.parameters for plan in plans]
    >>> sizes.append(searched.compress(CompressionPlan(ratio=61)).totals.parameters)
    >>> [lora.adapter_parameters // size for size in sizes] >= [96, 48, 61]
    True
    """
    # 1. Open the layers, and refuse now what would fail after hours of search.
    resources = resources or Resources()
    effect = None
    if isinstance(statistics, Statistics):
        statistics.check_base(checkpoint.config.get("base_model_name_or_path"))
        effect = statistics.effect(checkpoint.source_sha256)
    checkpoint.watch_source()
    layers = open_layers(checkpoint, statistics, resources.limits)
    cache = SpillCache(resources.limits.spill_bytes)
    plans = [plan.with_default_storage(checkpoint.storage) for plan in plans]
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
    # 2. Solve every layer at the shapes that a budget could choose. Plans that give terms need no
    #    search.
    #    A norm of the base, a search or a structure asks for shapes; else truncated SVD is taken.
    searched_for = [plan for plan in plans if plan.separation_rank is None]
    budgets = [plan.budget(layers, effect) for plan in searched_for]
    asks_for_shapes = any(plan.structure is not None for plan in searched_for)
    table: SearchTable | PlainTable | None = None
    if budgets and statistics is None and search is None and not asks_for_shapes:
        if resources.device is not None:
            check_device(resources.device)  # it is not needed, but a slip is told
        table = PlainTable(layers, storages.pop(), cache, budgets, resources.on_step)
    elif budgets:
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
    """A checkpoint whose layers were solved at many shapes; `compress` chooses among them.

    Attributes
    ----------
    checkpoint : Checkpoint
    layers : sequence of Layer
    table : SearchTable, PlainTable or None
        The solved candidates, or truncated SVDs; None if all plans give terms.
    cache : SpillCache
        Keeps factors.
    resources : Resources
    effect : float, optional
        KL(LoRA ‖ no adapter) in nats per prediction, if the statistics are of this LoRA.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp.lora.files import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> plan = CompressionPlan(separation_rank=1)
    >>> search_adapter(lora, [plan]).compress(plan).totals.layers
    12
    """

    checkpoint: Checkpoint
    layers: Sequence[Layer]
    table: SearchTable | PlainTable | None
    cache: SpillCache
    resources: Resources
    effect: float | None = None

    @one_blas_thread
    def compress(self, plan: CompressionPlan, *, fill: bool = True) -> Compression:
        """Compress the adapter to a plan.

        Parameters
        ----------
        plan : CompressionPlan
            In the storage of the search, unless it gives terms.
        fill : bool
            For a plan of bytes, whether to try files until one nearly fills the bytes. Otherwise
            the first one is returned, which may be some hundred bytes too large.

        Raises
        ------
        BudgetError
            If the plan cannot be met, with what can be reached; if its storage is not that of the
            search; for a divergence without statistics.
        """
        plan = self._checked_plan(plan)
        if plan.bytes is not None and fill:
            return self._beside_plain_svd(self._fill_bytes(plan, plan.bytes))
        return self._beside_plain_svd(self._report(plan, self._fit(plan)))

    def _beside_plain_svd(self, result: Compression) -> Compression:
        """Return a result with the error of the best plain truncated SVD in as many bytes.

        Of LSR in floats that was searched for within a number of parameters, or with given terms,
        or with a bound on the error of each layer, it stays what it is.
        """
        is_plain = isinstance(self.table, PlainTable)
        in_bytes = result.plan.bytes is not None or result.plan.storage in STORAGES
        if result.low_rank_error is None and not is_plain:
            return result
        if not is_plain and not in_bytes:
            return result
        measured = not result.estimates_plain_svd
        best = best_plain_svd(self.layers, result.totals.bytes, measured=measured)
        if best is None:
            return replace(result, low_rank_error=None)
        return replace(result, low_rank_error=best[0], plain_form=best[1])

    @one_blas_thread
    def expected_error(self, plan: CompressionPlan) -> float:
        """Estimate the squared relative error of a plan of parameters or bytes, in milliseconds.

        It is the error of the candidates that were solved, before the chosen ones are refined, and
        so somewhat larger than that of `compress`. Raises `BudgetError` as `compress`.
        """
        plan = self._checked_plan(plan)
        budget = self._budget(plan)
        table = self._table
        if isinstance(table, SearchTable):
            return table.expected_error(budget)
        candidates, _ = table.chosen(budget)
        lost = math.fsum(candidate.squared_error for candidate in candidates)
        return lost / math.fsum(layer.squared_norm for layer in self.layers)

    def _checked_plan(self, plan: CompressionPlan) -> CompressionPlan:
        """Return the plan with a storage; raise `BudgetError` if the search was for another."""
        plan = plan.with_default_storage(self.checkpoint.storage)
        check_divergence(plan, not self.layers[0].is_frobenius)
        if plan.separation_rank is None and plan.storages != self._table.storages:
            searched = " or ".join(self._table.storages)
            raise BudgetError(
                f"the search was in {searched}, and this plan is stored in {plan.storage}: "
                "search once for each storage"
            )
        if plan.structure is not None and isinstance(self.table, PlainTable):
            raise BudgetError(
                f"nothing was searched for, and this plan asks for structure {plan.structure}: "
                "give it to the search"
            )
        return plan

    @property
    def _table(self) -> SearchTable | PlainTable:
        """The table of candidates; raises `BudgetError` if there is none."""
        if self.table is None:
            raise BudgetError("the search was for given terms only; search again for this plan")
        return self.table

    def _budget(self, plan: CompressionPlan, size: float | None = None) -> Budget:
        """Return a plan as a budget for the layers.

        For a plan of bytes that is ``size`` bytes of factors; absent, what is left of the plan's
        bytes beside everything else in a file.
        """
        budget = plan.budget(self.layers, self.effect)
        if plan.bytes is None:
            # Numbers are counted, not their bits: the widest storage is the nearest.
            return budget.without_odd_widths(plan.storages)
        if size is None:
            size = _bytes_for_factors(self.checkpoint, plan.bytes)
        return replace(budget, bytes=size)

    def _fit(self, plan: CompressionPlan, size: float | None = None) -> FittedLayers:
        """Choose the candidate of each layer, make its factors and measure them."""
        if plan.separation_rank is None:
            budget = self._budget(plan, size)
            if isinstance(self._table, SearchTable):
                return fit_budget(self._table, budget)
            return choose_storage(self._table, budget)
        materialized = at_given_terms(
            self.layers,
            plan.separation_rank,
            plan.inner_shape,
            plan.storages[0],
            solver=replace(GIVEN_TERMS_SOLVER, device=self.resources.device),
            cache=self.cache,
            limits=self.resources.limits,
            on_step=self.resources.on_step,
        )
        return FittedLayers(materialized, None, solved_layers=len(materialized))

    def _report(self, plan: CompressionPlan, fitted: FittedLayers) -> Compression:
        """Report every layer; raise `BudgetError` if all were left out."""
        if all(materialized.stored is None for materialized in fitted.chosen):
            if not any(layer.squared_norm for layer in self.layers):
                raise BudgetError(
                    "every layer of the adapter is zero: it does nothing, and there is nothing to "
                    "keep"
                )
            way = "allow more"
            if isinstance(self.table, PlainTable):
                least = min(sum(layer.shape) for layer in self.layers)
                way += f" ({least:,} parameters are one component), or ask for structure lsr"
            raise BudgetError(f"nothing of the adapter fits into this budget; {way}")
        chosen = zip(self.checkpoint.layers, self.layers, fitted.chosen, strict=True)
        return Compression(
            self.checkpoint,
            plan,
            tuple(_reported(plan, *each) for each in chosen),
            fitted.chosen,
            fitted.low_rank_error,
            self.effect,
            is_nearest=fitted.is_nearest,
            solved_layers=fitted.solved_layers,
        )

    def _fill_bytes(self, plan: CompressionPlan, max_bytes: int) -> Compression:
        """Return the best adapter whose weight file and config have at most ``max_bytes`` together.

        The bytes of a file beside its factors are known only once the factors are chosen. So files
        of several sizes of factors are tried.
        """
        best: Compression | None = None
        file_sizes: list[int] = []
        # The size of the factors lies between one whose file fits and one whose file does not.
        low = 0.0
        high = float(_bytes_for_factors(self.checkpoint, max_bytes))
        factor_bytes = high
        for _ in range(MAX_FILES):
            # 1. Make factors of this size, and measure their file.
            try:
                result = self._report(plan, self._fit(plan, factor_bytes))
            except BudgetError:
                if not file_sizes:
                    raise
                break
            file_size = _written_bytes(result)
            file_sizes.append(file_size)
            result = replace(result, file_bytes=file_size)
            # 2. Shrink the interval.
            if file_size <= max_bytes:
                low = max(low, factor_bytes)
                if best is None or result.error <= best.error:
                    best = result
                if file_size >= MIN_FILL * max_bytes or result.is_nearest:
                    break
            else:
                high = min(high, factor_bytes)
            # 3. Guess the next size: add the bytes that the file had to spare. A file may shrink by
            #    less than its factors: until one fits, each surplus counts twice as much as before.
            #    If two sizes made the same file, go nearly to the end of the interval.
            times = 2.0 ** (len(file_sizes) - 1) if best is None else 1.0
            guess = factor_bytes + times * (max_bytes - file_size)
            if file_sizes.count(file_size) > 1:
                guess = low + 0.9 * (high - low)
            # A guess outside of the interval is replaced by its middle.
            is_inside = guess < high and (guess > low or best is None)
            factor_bytes = max(guess, 0.0) if is_inside else 0.5 * (low + high)
            if high - low < 4.0:
                break
        if best is None:
            smallest = min(file_sizes)
            text = f"{max_bytes:,} bytes are too few: the smallest file found has {smallest:,}"
            raise BudgetError(text)
        return best


def _reported(
    plan: CompressionPlan, source_layer: Any, layer: Layer, materialized: Materialized
) -> LayerReport:
    """Return the report of a layer, and whether it meets the plan."""
    candidate = materialized.candidate
    error = math.sqrt(candidate.squared_error)
    meets_plan = True
    if plan.layer_rtol is not None:
        max_error = plan.layer_rtol * math.sqrt(layer.squared_norm)
        meets_plan = error <= max_error * (1.0 + 1e-12)
    return report_layer(
        source_layer,
        layer,
        materialized.stored,
        structure=candidate.structure,
        storage=candidate.storage,
        error=error,
        summary=materialized.summary,
        met=meets_plan,
    )


def described(result: Compression, request: Request, statistics: object) -> Compression:
    """Return a result with the settings of its request, and what its statistics make doubtful."""
    return replace(
        result,
        settings=request.to_json(),
        resolved=request.resolved(),
        notes=statistics.doubts if isinstance(statistics, Statistics) else (),
    )


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
    """Compress every layer to an LSR product of balanced shape with the same number of terms.

    Parameters
    ----------
    layers : sequence of Layer
    terms : int
        Terms of each side; a side that cannot have as many has as many as it can.
    inner_shape : tuple of int, optional
        Inner shape of the products; absent, a balanced split of each layer's rank.
    storage : str
        Element type of the factors.
    solver : JointALS
    cache : SpillCache, optional
        Keeps the factors.
    limits : ResourceLimits
        How many layers are solved together.
    on_step : callable, optional
        Called with a `ProgressUpdate` after each layer.
    """
    cache = cache or SpillCache()
    groups: dict[Any, list[int]] = {}
    for i, layer in enumerate(layers):
        max_inner_rank = min(layer.rank, *layer.shape)
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
                # The product may have more parameters than the pair itself, which is exact.
                if candidate.parameters > layer.parameters and storage not in INTEGER_BITS:
                    candidate = keep(layer)
                results[i] = materialize(layer, replace(candidate, storage=storage), cache)
                done.add()
    return tuple(results[i] for i in range(len(layers)))


def _written_bytes(result: Compression) -> int:
    """Return the bytes of weight file and config of a written adapter."""
    with TemporaryDirectory() as folder:
        return bytes_to_open(result.save(Path(folder) / "sized", bare=True) / WEIGHTS)


def _bytes_for_factors(checkpoint: Checkpoint, size: int) -> int:
    """Return the bytes that files of a size leave for factors; `BudgetError` if there are none."""
    fixed = checkpoint.extra_bytes + HEADER_BYTES
    if size <= fixed:
        text = f"heads, header and config alone take {fixed:,} bytes"
        raise BudgetError(f"nothing of the adapter fits into {size:,} bytes: {text}; allow more")
    return size - fixed
