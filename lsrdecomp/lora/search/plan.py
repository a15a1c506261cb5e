"""Settings of a compression: its goal, its search, its resources.

`CompressionPlan` is the goal, and `Budget` the same goal for given layers. The file imports nothing
heavy, so that the command line can read settings before it loads NumPy or torch.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

from lsrdecomp.errors import BudgetError
from lsrdecomp.fields import (
    ON_COMMAND_LINE,
    POSITIVE,
    TEXT,
    Flag,
    Settings,
    list_of,
    one_of,
    settings,
    whole_number,
)
from lsrdecomp.lora.files.progress import ProgressUpdate as ProgressUpdate
from lsrdecomp.lora.search.effort import DEFAULT_LIMITS, ResourceLimits

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lsrdecomp.lora.files import Checkpoint, Journal
    from lsrdecomp.lora.files.progress import OnStep
    from lsrdecomp.lora.search.candidates import Candidate
    from lsrdecomp.lora.search.layers import Layer
    from lsrdecomp.lora.search.shapes import Configuration

GOALS = ("rtol", "energy", "separation_rank", "parameters", "ratio", "bytes", "kl")
SHARES_TO_KEEP = ("keep", "keep_answers")
"""Goals that are measured on a base, for which plans are made later."""
"""Goals of which a plan has one. ``max_rank`` is the goal where there is no other."""
ODD_WIDTHS = ("int6", "int5", "int3", "int2")
"""Widths of codes that layers may have where they choose; an adapter as a whole has none."""
STORAGES = {
    "auto": ("float16", "int8", "int4", *ODD_WIDTHS),
    "int8": ("int8",),
    "int4": ("int4",),
}
"""Storages with integers, and the element types that each layer may choose from in them."""
STORAGE_NAMES = ("float32", "float16", "bfloat16", *STORAGES)
"""Names of storages that are offered; other spellings of floating types are read too."""
STORAGE_NAME = TEXT._replace(values=lambda: STORAGE_NAMES)
DEFAULT_STORAGE = "float32"
"""Storage of a plan that names none."""


class Route(Enum):
    """The way from a goal to an adapter, those first that need least."""

    SEARCHED = "searched"
    """Shapes are searched for each layer, to a size or an error."""
    GIVEN_TERMS = "given terms"
    """Every layer gets the same number of terms; nothing is searched."""
    MEASURED = "measured"
    """A base runs on texts, to measure what the result keeps of the LoRA's effect."""
    TRUNCATED = "truncated"
    """A LoRA file is truncated by SVD, and stays in its own format."""
    TRUNCATED_ON_BASE = "truncated on a base"
    """The same where the outputs of its base change least; what is kept is measured."""


class ReadOn(Flag):
    """A note in the annotation of a setting: the routes that read it."""

    def __init__(self, *routes: Route) -> None:
        super().__init__()
        self.routes = frozenset(routes)


ALL_ROUTES = ReadOn(*Route)
TO_DIRECTORY = ReadOn(Route.SEARCHED, Route.GIVEN_TERMS, Route.MEASURED)
"""Routes that write an LSR directory."""
SEARCHING = ReadOn(Route.SEARCHED, Route.MEASURED)
SIZED = ReadOn(Route.SEARCHED, Route.MEASURED, Route.TRUNCATED, Route.TRUNCATED_ON_BASE)
ON_A_BASE = ReadOn(Route.MEASURED, Route.TRUNCATED_ON_BASE)
ON_DEVICE = ReadOn(*TO_DIRECTORY.routes, Route.TRUNCATED_ON_BASE)
"""Routes on which torch solves or runs a base."""
TRAINING = ReadOn(Route.MEASURED)
TO_SOURCE_FORMAT = ReadOn(Route.TRUNCATED, Route.TRUNCATED_ON_BASE)
OF_TERMS = ReadOn(Route.GIVEN_TERMS, Route.MEASURED)

SPLIT = list_of(whole_number(1), "two or more whole numbers, r1, r2, …", min_length=2)


@settings
class CompressionPlan(Settings):
    """A goal, and how factors are stored.

    Errors are in the Frobenius norm of ΔW or, if `compress` is given statistics, in the Fisher
    norm, where they estimate the change of the network's outputs.

    Examples
    --------
    >>> CompressionPlan(ratio=48, storage="float16").ratio
    48
    """

    error = BudgetError

    rtol: Annotated[
        float | None,
        ON_COMMAND_LINE,
        POSITIVE,
        "Maximum relative error of every layer, as written.",
    ] = None
    energy: Annotated[
        float | None,
        ON_COMMAND_LINE,
        POSITIVE,
        "Minimum share of Σσ² that every layer keeps; the square of kohya's sv_fro.",
    ] = None
    separation_rank: Annotated[
        int | None,
        ON_COMMAND_LINE,
        OF_TERMS,
        whole_number(1),
        "Number of terms of every layer, on each side.",
    ] = None
    parameters: Annotated[
        float | None,
        ON_COMMAND_LINE,
        POSITIVE,
        "Maximum parameters of all layers together.",
    ] = None
    ratio: Annotated[
        float | None,
        ON_COMMAND_LINE,
        POSITIVE,
        "Reduce the parameters of all layers together by this factor.",
    ] = None
    bytes: Annotated[
        int | None,
        ON_COMMAND_LINE,
        POSITIVE,
        "Maximum bytes of weight file and config together.",
    ] = None
    kl: Annotated[
        float | None,
        ON_COMMAND_LINE,
        SEARCHING,
        POSITIVE,
        "Maximum KL to the LoRA in nats: measured with --base, else estimated by statistics.",
    ] = None
    inner_shape: Annotated[
        tuple[int, ...] | None,
        ON_COMMAND_LINE,
        OF_TERMS,
        SPLIT,
        "With separation_rank: split of the inner rank, such as 4x2.",
    ] = None
    max_rank: Annotated[
        int | None,
        ON_COMMAND_LINE,
        whole_number(1),
        "Maximum rank of a layer when it is served as a LoRA: kohya's new_rank. Without another "
        "goal it is the goal.",
    ] = None
    min_rank: Annotated[
        int | None,
        ON_COMMAND_LINE,
        whole_number(1),
        "Minimum rank of every layer; 1 leaves no layer out.",
    ] = None
    only: Annotated[
        tuple[str, ...] | None,
        ON_COMMAND_LINE,
        TO_SOURCE_FORMAT,
        "In the original format: cut layers of such names, as '*.attn.*', and copy the others.",
    ] = None
    structure: Annotated[
        str | None,
        ON_COMMAND_LINE,
        SEARCHING,
        one_of(("lsr",)),
        "lsr: Kronecker products in every layer, to fine-tune [default: the nearest structure].",
    ] = None
    storage: Annotated[
        str | None,
        ON_COMMAND_LINE,
        ALL_ROUTES,
        STORAGE_NAME,
        "float32, float16, bfloat16, int8, int4 or auto (float16 or 2 to 8 bits, by layer) "
        "[default: the adapter's own type].",
    ] = None

    def check_together(self) -> None:
        """Refuse more than one goal, and settings that do not go with it."""
        self._check_goal()
        if self.separation_rank is not None:
            self._check_given_terms()
        elif self.inner_shape is not None:
            raise BudgetError(
                "inner_shape goes with separation_rank; other goals choose their shapes"
            )
        self._check_storage()

    def _check_goal(self) -> None:
        """Refuse more than one goal or none, and a goal that nothing meets."""
        goals = goals_of(asdict(self))
        if len(goals) != 1:
            raise BudgetError(
                f"one goal is needed, got {' and '.join(goals) or 'none'}: {GOALS_IN_WORDS}"
            )
        if self.ratio is not None and self.ratio <= 1.0:
            raise BudgetError(
                f"a ratio of {self.ratio:g} makes nothing smaller; ask for one above 1, such as 48"
            )
        if self.rtol is not None and self.rtol >= 1.0:
            raise BudgetError(
                f"no adapter at all has a relative error of 1, so {self.rtol:g} keeps nothing; "
                "ask for less"
            )
        if self.energy is not None and self.energy >= 1.0:
            raise BudgetError(
                f"energy is a share of the squared singular values, below 1, such as 0.95; got "
                f"{self.energy:g}"
            )
        if (self.min_rank or 0) > (self.max_rank or math.inf):
            raise BudgetError(f"min_rank {self.min_rank} is above max_rank {self.max_rank}")

    def _check_given_terms(self) -> None:
        """Refuse choices that the search makes, beside a number of terms for all layers."""
        for name in ("max_rank", "min_rank"):
            if getattr(self, name) is not None:
                raise BudgetError(
                    f"{name} goes with goals that choose their shapes, not with separation_rank"
                )
        if self.structure is not None:
            raise BudgetError(
                "structure goes with goals that choose their shapes; with separation_rank every "
                "layer is LSR"
            )
        if self.storage == "auto":
            raise BudgetError(
                "storage auto chooses among types for each layer, which goals that choose their "
                "shapes do; with separation_rank name one, such as int8"
            )

    def _check_storage(self) -> None:
        """Refuse a storage that is none, and write the name of a floating type in full."""
        if self.storage is None or self.storage in STORAGES:
            return
        # Imported here because NumPy comes with it.
        from lsrdecomp.precision import PRECISIONS, type_name

        floats = [name for name in PRECISIONS if name != "tf32"]
        if type_name(self.storage) not in floats:
            known = ", ".join([*floats, *STORAGES])
            raise BudgetError(f"storage must be one of {known}, got {self.storage!r}")
        object.__setattr__(self, "storage", type_name(self.storage))

    @property
    def storages(self) -> tuple[str, ...]:
        """Element types that each layer may choose from."""
        storage = self.storage or DEFAULT_STORAGE
        return STORAGES.get(storage, (storage,))

    def with_default_storage(self, storage: str = DEFAULT_STORAGE) -> CompressionPlan:
        """Return the plan itself if it names a storage; else with this one, or the best for bytes.

        Parameters
        ----------
        storage : str
            Taken where bytes are no goal.
        """
        if self.storage:
            return self
        return self.replace(storage=storage if self.bytes is None else "auto")

    @property
    def layer_rtol(self) -> float | None:
        """Maximum relative error of every layer, from ``rtol`` or ``energy``; None if neither."""
        return self.rtol if self.energy is None else math.sqrt(1.0 - self.energy)

    @property
    def float_storage(self) -> str:
        """Floating type of the numbers that are not stored in integers."""
        floats = [name for name in self.storages if name.startswith(("float", "bfloat"))]
        return floats[0] if floats else "float16"

    def budget(self, layers: Sequence[Layer], effect: float | None = None) -> Budget:
        """Return the goal as a budget for these layers; not for ``separation_rank``.

        Parameters
        ----------
        layers : sequence of Layer
        effect : float, optional
            KL(LoRA ‖ no adapter) in nats per prediction. A divergence is then estimated as this
            times the squared relative error over all layers. Absent, it is estimated to second
            order as ½ Σ‖G^½ (ΔW − ΔŴ) C^½‖² in the Fisher norm.

        Raises
        ------
        BudgetError
            If the divergence that is asked for is no less than ``effect``.
        """
        budget = Budget(
            self.parameters,
            self.bytes,
            layer_rtol=self.layer_rtol,
            only_lsr=self.structure == "lsr",
            min_rank=self.min_rank or 0,
            max_rank=self.max_rank,
        )
        if goals_of(asdict(self)) == ["max_rank"]:
            return replace(budget, parameters=math.inf)
        if self.ratio is not None:
            parameters = math.fsum(layer.parameters for layer in layers)
            return replace(budget, parameters=parameters / self.ratio)
        if self.kl is None:
            return budget
        if effect is None:
            return replace(budget, squared_error=2.0 * self.kl)
        share = share_of_effect(self.kl, effect)
        squared_norm = math.fsum(layer.squared_norm for layer in layers)
        return replace(budget, squared_error=share * squared_norm)

    def to_json(self) -> dict[str, Any]:
        """Return the settings that are not None, for the provenance of a written adapter."""
        return {key: value for key, value in asdict(self).items() if value is not None}


GOALS_IN_WORDS = (
    "a relative error (rtol) or share of the squared singular values (energy) of every layer, a "
    "rank (max_rank) or number of terms (separation_rank), or a size (parameters, ratio, bytes) or "
    "divergence (kl) for all layers together"
)


def goals_of(given: Mapping[str, Any]) -> list[str]:
    """Return the goals among settings that are not None."""
    goals = [name for name in GOALS if given.get(name) is not None]
    is_measured = any(given.get(name) is not None for name in SHARES_TO_KEEP)
    if not goals and not is_measured and given.get("max_rank") is not None:
        return ["max_rank"]
    return goals


@dataclass(frozen=True, slots=True)
class Budget:
    """A bound on the cost or on the error of all layers: one of the first four is set.

    Attributes
    ----------
    parameters : float, optional
        Maximum parameters in the factors of all layers.
    bytes : float, optional
        Maximum bytes of the factors of all layers as stored.
    squared_error : float, optional
        Maximum Σ‖ΔW − ΔŴ‖² over the layers, in their norm.
    layer_rtol : float, optional
        Maximum ‖ΔW − ΔŴ‖ / ‖ΔW‖ of every layer on its own.
    allowed : callable, optional
        Returns whether a candidate may be chosen; absent, all may.
    only_lsr : bool
        Whether every layer that has LSR products must be one of them.
    storages : tuple of str, optional
        Storages that layers may have; absent, all of the table.
    min_rank, max_rank : int, optional
        Bounds on the rank of a layer; one that has a lower rank keeps it.

    Examples
    --------
    >>> Budget(bytes=6000.0).counts_bytes
    True
    """

    parameters: float | None = None
    bytes: float | None = None
    squared_error: float | None = None
    layer_rtol: float | None = None
    allowed: Callable[[Candidate], bool] | None = None
    only_lsr: bool = False
    storages: tuple[str, ...] | None = None
    min_rank: int = 0
    max_rank: int | None = None

    @property
    def cost(self) -> float | None:
        """Maximum cost in parameters or bytes; None if the error is bounded instead."""
        return self.parameters if self.bytes is None else self.bytes

    def allows(self, candidate: Candidate, rank: int) -> bool:
        """Return whether a candidate may be chosen for a layer of a rank."""
        if candidate.rank < min(self.min_rank, rank):
            return False
        if self.max_rank is not None and candidate.rank > self.max_rank:
            return False
        # Leaving a layer out is one of the things that need no leave.
        return candidate.parameters == 0 or self.allowed is None or self.allowed(candidate)

    def without_odd_widths(self, storages: Sequence[str]) -> Budget:
        """Return the budget in those of these storages that are no `ODD_WIDTHS`."""
        return replace(self, storages=tuple(name for name in storages if name not in ODD_WIDTHS))

    @property
    def counts_bytes(self) -> bool:
        """True if bytes are counted, not parameters."""
        return self.bytes is not None

    @property
    def max_parameters(self) -> float:
        """Most parameters that the cost can pay for; infinite if errors are bounded instead."""
        if self.bytes is not None:
            return 2.0 * self.bytes  # numbers of four bits are the smallest
        return math.inf if self.parameters is None else self.parameters

    @property
    def bounds_error(self) -> bool:
        """True if the error is bounded, not the cost."""
        return self.squared_error is not None or self.layer_rtol is not None


def share_of_effect(kl: float, effect: float) -> float:
    """Return a divergence as a share of that without the adapter.

    Raises `BudgetError` unless it is less than that.
    """
    if kl >= effect:
        text = f"a divergence of {kl:g} nats is no less than that without the adapter, {effect:.3g}"
        raise BudgetError(f"{text}: ask for less")
    return kl / effect


@dataclass(frozen=True, slots=True)
class Search:
    """The shapes that a search tries, and how far they are refined.

    Parameters
    ----------
    rounds : int
        Maximum rounds in which neighbours of the chosen shapes are tried.
    orders : tuple of int
        Numbers of Kronecker factors of a term. Three or more are of use for very few parameters,
        and have no canonical form. Empty: truncated SVD only.
    inner_rank : int
        Maximum inner rank; the rank of a layer bounds it too.
    sweeps : int
        Maximum sweeps of the joint least squares that refine the chosen products.
    shapes : Mapping of layer name to configuration, optional
        Shapes of the layers of another adapter. They, and the commonest of them for each size of
        layer, are solved in place of the grid and its neighbours; see `Search.like`.

    Examples
    --------
    >>> Search(orders=(2,), rounds=0).orders  # the fastest search: two factors, no neighbours
    (2,)
    """

    rounds: int = 1
    orders: tuple[int, ...] = (2, 3)
    inner_rank: int = 8
    sweeps: int = 40
    shapes: Mapping[str, Configuration] = field(default_factory=dict)

    @classmethod
    def like(cls, compressed: Checkpoint) -> Search:
        """Return a search of only the shapes that another adapter of the same base was given.

        On LoRAs of a language model errors come within 3 % of those of a full search, in half the
        time (``benchmarks/cost/fleet.py``).

        Parameters
        ----------
        compressed : Checkpoint
            The other adapter, as `lsrdecomp.compress` wrote it under the same plan. If none of its
            layers is a sum of Kronecker products, this is the default search.

        Examples
        --------
        >>> import tempfile
        >>> from importlib.resources import files
        >>> from lsrdecomp import compress, open_checkpoint
        >>> adapter = files("lsrdecomp.cli") / "demo_adapter"
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = open_checkpoint(compress(adapter, ratio=48).save(f"{folder}/first"))
        ...     second = compress(adapter, ratio=48, search=Search.like(first))
        >>> second.totals.parameters * 48 <= second.totals.parameters_before
        True
        """
        from lsrdecomp.lora.files import KroneckerLayer

        shapes = {}
        for layer in compressed.layers:
            if isinstance(layer, KroneckerLayer) and layer.shape.order > 1:
                shapes[layer.name] = (layer.shape, (layer.left_rank, layer.right_rank))
        return cls(shapes=shapes)


@dataclass(frozen=True, slots=True)
class Resources:
    """Workers, device, journal and progress callback of a search, and its limits of memory.

    Attributes
    ----------
    workers : int
        Processes, of one thread each.
    device : str, optional
        Device of torch; absent, NumPy solves.
    journal : Journal, optional
        An entered journal, which keeps solved shapes for a later run.
    on_step : callable, optional
        Called with a `ProgressUpdate` during the search.
    limits : ResourceLimits

    Examples
    --------
    >>> stages = []
    >>> resources = Resources(on_step=lambda step: stages.append(step.stage))
    >>> resources.workers, resources.journal
    (1, None)
    """

    workers: int = 1
    device: str | None = None
    journal: Journal | None = None
    on_step: OnStep | None = None
    limits: ResourceLimits = DEFAULT_LIMITS
