"""compress: every layer of a checkpoint under one plan; what comes out can be looked at, then written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lsrdecomp.checkpoints import Checkpoint
from lsrdecomp.checkpoints.statistics import Statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.budget import Budget
from lsrdecomp.compression.candidates import Candidate
from lsrdecomp.compression.layer import SOLVER, at_given_terms, stored_factors, stored_layers
from lsrdecomp.compression.layers import HasWeights, Layer
from lsrdecomp.compression.materialize import Materialized, as_read
from lsrdecomp.compression.plan import CompressionPlan
from lsrdecomp.compression.progress import OnStep
from lsrdecomp.compression.report import LayerReport
from lsrdecomp.compression.result import REPORT as REPORT
from lsrdecomp.compression.result import Compression as Compression
from lsrdecomp.compression.result import product_of
from lsrdecomp.compression.search import Fitted, Searched, search_layers
from lsrdecomp.compression.search_store import SearchStore
from lsrdecomp.compression.settings import Resources, Search
from lsrdecomp.compression.size import fill
from lsrdecomp.compression.spill_cache import SpillCache
from lsrdecomp.errors import BudgetError, UnsupportedError
from lsrdecomp.targets.weights import NormWeights

EMPTY_FILE = 512
"""Bytes of a header that says where the file comes from."""


def compress(
    checkpoint: Checkpoint,
    plan: CompressionPlan,
    *,
    statistics: Mapping[str, HasWeights | NormWeights] | None = None,
    search: Search | None = None,
    device: str | None = None,
    workers: int = 1,
    store: SearchStore | None = None,
    on_layer: Callable[[LayerReport], Any] | None = None,
    on_step: OnStep | None = None,
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
        How far to look for shapes; of no meaning with ``separation_rank``.
    device : str, optional
        Where torch does the joint least squares, such as ``"cuda"``; absent, NumPy. Last digits depend on it.
    workers : int
        Processes that solve, each with one thread of linear algebra; layers are independent.
    store : SearchStore, optional
        What was solved is kept there and used again.
    on_layer : callable, optional
        Called with each `LayerReport` at the end.
    on_step : callable, optional
        Called with a `Step` as the parts of the work are done.

    Returns
    -------
    Compression
        Reports and factors; nothing is written before `Compression.save`.

    Notes
    -----
    For several plans over one adapter, `search_adapter` solves once. Layers are read as they are needed, so many at a
    time as fit in 8 MiB (`layers.PAIR_ENTRIES`), at least one. What they became waits in memory up to 8 MiB and then in
    a temporary file, as do the factors of all products that were solved for.

    Raises
    ------
    CheckpointError
        Naming file and tensor, if the numbers of a layer cannot be used.
    BudgetError
        If the budget cannot be met, saying what can be reached; if ``kl`` is asked without statistics.
    LsrError
        If torch cannot compute in float64 on ``device``, or joblib is missing and several workers are asked for.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import CompressionPlan, open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> result = compress(lora, CompressionPlan(separation_rank=2, inner_shape=(2, 4), storage="float16"))
    >>> result.totals.parameters, result.totals.bytes
    (5376, 10752)
    """
    resources = Resources(workers, device, store, on_step)
    result = search_adapter(checkpoint, [plan], statistics=statistics, search=search, resources=resources).compress(
        plan
    )
    if on_layer is not None:
        for layer in result.layers:
            on_layer(layer)
    return result


def search_adapter(
    checkpoint: Checkpoint,
    plans: Sequence[CompressionPlan],
    *,
    statistics: Mapping[str, HasWeights | NormWeights] | None = None,
    search: Search | None = None,
    resources: Resources | None = None,
) -> SearchedAdapter:
    """Solve the shapes that these plans could want, once; any number of budgets is then drawn from the answer.

    Parameters
    ----------
    checkpoint, statistics, search
        As for `compress`.
    plans : sequence of CompressionPlan
        What will be asked, all in one storage: larger shapes than they could want are not solved. Other plans may be
        drawn as well.
    resources : Resources, optional
        Processes, device, store and progress.

    Examples
    --------
    One search, two sizes; after that another budget between them solves nothing.

    >>> from importlib.resources import files
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> plans = [CompressionPlan(ratio=ratio) for ratio in (96, 48)]
    >>> searched = search_adapter(lora, plans, search=Search(orders=(2,), rounds=0))
    >>> sizes = [searched.compress(plan).totals.parameters for plan in plans]
    >>> sizes.append(searched.compress(CompressionPlan(ratio=61), solve=False).totals.parameters)
    >>> [size * ratio <= lora.adapter_parameters for size, ratio in zip(sizes, (96, 48, 61), strict=True)]
    [True, True, True]
    """
    if checkpoint.config.get("trainable_token_indices"):  # now, not after hours when it is written
        text = "trainable_token_indices is set: single token embeddings are not carried by an LSR adapter yet"
        raise UnsupportedError(text, path=checkpoint.path)
    if isinstance(statistics, Statistics):
        statistics.check_base(checkpoint.config.get("base_model_name_or_path"))
    layers, resources, cache = stored_layers(checkpoint, statistics), resources or Resources(), SpillCache()
    storages = {plan.storages for plan in plans}
    if len(storages) > 1:
        raise BudgetError("plans that share a search share their storage: search once for each storage")
    effect = statistics.effect(checkpoint.source_sha256) if isinstance(statistics, Statistics) else None
    budgets = [plan.budget_for(effect) for plan in plans if plan.separation_rank is None]
    if any(plan.kl is not None for plan in plans) and statistics is None:
        raise BudgetError("a divergence (kl) is measured in the K-FAC norm: calibrate first and pass the statistics")
    searched = None
    if budgets or not plans:
        kinds = storages.pop() if storages else ("float32",)
        searched = search_layers(layers, budgets, search=search, storages=kinds, cache=cache, resources=resources)
    return SearchedAdapter(checkpoint, layers, searched, resources.device, cache, statistics is not None, effect)


@dataclass(frozen=True, eq=False)
class SearchedAdapter:
    """A checkpoint whose layers were solved at many shapes; `compress` draws a plan from them.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> plan = CompressionPlan(separation_rank=1)
    >>> search_adapter(lora, [plan]).compress(plan).totals.layers                # `search_adapter` makes one
    12
    """

    checkpoint: Checkpoint
    layers: Sequence[Layer]
    searched: Searched | None  # None: every layer at given terms
    device: str | None  # of torch, where joint least squares are solved
    cache: SpillCache
    functional: bool  # errors count in the K-FAC norm
    effect: float | None = None  # KL(LoRA ‖ no adapter) in nats an answer, where the statistics are of this LoRA

    def compress(self, plan: CompressionPlan, *, solve: bool = True) -> Compression:
        """The adapter under one plan.

        Parameters
        ----------
        plan : CompressionPlan
            In the storage that was searched for.
        solve : bool
            Whether to try neighbours of the shapes that this plan chooses and to refine those it takes. Without, what
            was solved already is allocated, rounded and measured: milliseconds a layer, so a bisection over budgets
            costs little. The errors reported are measured on the stored factors either way.

        Raises
        ------
        BudgetError
            If the plan cannot be met; says what is reachable.
        """
        if plan.separation_rank is not None:
            solver = replace(SOLVER, device=self.device)
            terms, inner, storage = plan.separation_rank, plan.inner_shape, plan.storages[0]
            found = dict(at_given_terms(self.layers, terms, inner, storage, solver, self.cache))
            return self._reported(plan, Fitted(tuple(found[i] for i in range(len(self.layers))), None))
        if plan.bytes is not None:
            return self._filled(plan, solve)
        return self._drawn(plan, plan.budget_for(self.effect), solve)

    def expected_error(self, plan: CompressionPlan) -> float:
        """Squared relative error of a plan by the prices of what was solved: the same table answers for every size.

        In the norm that was searched in, before refining, so somewhat above what `compress` comes to; milliseconds.
        The plan has a number of parameters or bytes. Raises `BudgetError` as `compress`.
        """
        searched, budget = self._searched, plan.budget_for(self.effect)
        if plan.bytes is not None:
            budget = Budget(bytes=max(0, plan.bytes - self._fixed))
        return searched.expected_error(budget, allowed=_allowed(plan))

    @property
    def _searched(self) -> Searched:
        if self.searched is None:
            raise BudgetError("the search was for given terms only; search again for this plan")
        return self.searched

    @property
    def _fixed(self) -> int:
        """Bytes of a weight file whatever its layers are: heads and the header."""
        return sum(tensor.nbytes for tensor in self.checkpoint.extras.values()) + EMPTY_FILE

    def _drawn(self, plan: CompressionPlan, budget: Budget, solve: bool) -> Compression:
        return self._reported(plan, self._searched.fit(budget, solve=solve, allowed=_allowed(plan)))

    def _filled(self, plan: CompressionPlan, solve: bool) -> Compression:
        """The largest file of at most so many bytes: what heads and header take goes off first."""
        assert plan.bytes is not None
        fixed = self._fixed
        if plan.bytes <= fixed:
            least = f"heads and header alone take {fixed:,} bytes"
            raise BudgetError(f"nothing of the adapter fits into {plan.bytes:,} bytes: {least}; allow more")
        return fill(plan.bytes, fixed, partial(self._within, plan, solve), _file_size, _error)

    def _within(self, plan: CompressionPlan, solve: bool, left: float) -> Compression:
        return self._drawn(plan, Budget(bytes=left), solve)

    def _reported(self, plan: CompressionPlan, fitted: Fitted) -> Compression:
        rows = zip(self.checkpoint.layers, self.layers, fitted.chosen, strict=True)
        reports = tuple(_report(source, layer, best, plan, self.functional) for source, layer, best in rows)
        if all(chosen.stored is None for chosen in fitted.chosen):
            if not any(layer.squared_norm for layer in self.layers):
                raise BudgetError("every layer of the adapter is zero: it does nothing, and there is nothing to keep")
            raise BudgetError("nothing of the adapter fits into this budget; allow more")
        return Compression(self.checkpoint, plan, reports, fitted.chosen, fitted.low_rank_error, self.effect)


def _allowed(plan: CompressionPlan) -> Callable[[Candidate], bool] | None:
    return None if plan.max_rank is None else partial(_within_rank, plan.max_rank)


def _within_rank(most: int, candidate: Candidate) -> bool:
    return candidate.served_rank <= most


def _file_size(result: Compression) -> int:
    """Bytes of the weight file, by writing it."""
    with TemporaryDirectory() as folder:
        return (result.save(Path(folder) / "sized") / WEIGHTS).stat().st_size


def _error(result: Compression) -> float:
    total = result.totals
    return total.relative_error if total.functional_error is None else total.functional_error


def _report(source: Any, layer: Layer, chosen: Materialized, plan: CompressionPlan, functional: bool) -> LayerReport:
    best, norm, size = chosen.candidate, layer.pair.norm, math.sqrt(layer.squared_norm)
    product = None if chosen.stored is None else as_read(product_of(chosen), best.storage, coded=chosen.coded)
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
        storage=best.storage if (codes := chosen.codes) is None else codes.storage,
        met=plan.rtol is None or error <= plan.rtol * size * (1.0 + 1e-12),
    )
