"""How far a search looks for shapes, what a long run may use, and what it says about itself: a stage, how much is done.

Light enough for the command line, which loads nothing before it works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lsrdecomp.checkpoints import Checkpoint, Journal
    from lsrdecomp.compression.shapes import Configuration


@dataclass(frozen=True, slots=True)
class Search:
    """How far to look for shapes.

    Parameters
    ----------
    rounds : int
        Times that neighbours of what a budget chose are tried.
    orders : tuple of int
        Numbers of Kronecker factors of a term. Three and more pay for very few parameters and have no canonical form.
        Empty: truncated SVD alone.
    inner_rank : int
        Largest inner rank that is tried; the rank of the layer bounds it too.
    sweeps : int
        Sweeps at most of the joint least squares that refine what a budget chose.
    low_rank : bool
        Whether truncated SVD competes.
    shapes : Mapping of layer name to configuration, optional
        What the layers of another adapter became: these shapes, and the commonest ones for each size of layer, are
        solved for in place of the grid and its neighbours; see `Search.like`.

    Examples
    --------
    >>> Search(orders=(2,), rounds=0).orders                                # the fastest: two factors, no neighbours
    (2,)
    """

    rounds: int = 1
    orders: tuple[int, ...] = (2, 3)
    inner_rank: int = 8
    sweeps: int = 40
    low_rank: bool = True
    shapes: Mapping[str, Configuration] = field(default_factory=dict)

    @classmethod
    def like(cls, compressed: Checkpoint) -> Search:
        """The shapes that serve another adapter of the same base and layers, as it was written.

        On LoRAs of a language model errors come within 3 % of those of a search of its own, in half the time
        (``benchmarks/cost/fleet.py``).

        Parameters
        ----------
        compressed : Checkpoint
            What `lsrdecomp.compress` made of the other adapter under the same plan. If none of its layers is a sum of
            Kronecker products, this is the default search.

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
        from lsrdecomp.checkpoints import LsrLayer

        products = (layer for layer in compressed.layers if isinstance(layer, LsrLayer) and layer.shape.order > 1)
        return cls(shapes={layer.name: (layer.shape, (layer.left_rank, layer.right_rank)) for layer in products})


@dataclass(frozen=True, slots=True)
class Step:
    """Where a run stands.

    Examples
    --------
    >>> step = Step("measuring", done=3, total=12, unit="layers")
    >>> f"{step.stage}: {step.done} of {step.total} {step.unit}"
    'measuring: 3 of 12 layers'
    """

    stage: str  # in a few words
    done: int
    total: int  # 0: not known
    unit: str = ""  # what is counted
    part: str = ""  # what is being done now, where stages have parts of their own


OnStep = Callable[[Step], Any]


class Counter:
    """Calls ``on_step`` as the parts of a stage are done; silent without it."""

    def __init__(self, on_step: OnStep | None, stage: str, total: int, unit: str) -> None:
        self._on_step, self._stage, self._total, self._unit = on_step, stage, total, unit
        self._done, self._part = 0, ""
        self.add(0)

    def add(self, count: int = 1) -> None:
        """So many more are done."""
        self._done += count
        if self._on_step is not None:
            self._on_step(Step(self._stage, self._done, self._total, self._unit, self._part))

    def name(self, part: str) -> None:
        """What is being done now."""
        self._part = part
        self.add(0)


@dataclass(frozen=True, slots=True)
class Resources:
    """Where a search solves, what it keeps, whom it tells.

    Examples
    --------
    >>> stages = []
    >>> resources = Resources(on_step=lambda step: stages.append(step.stage))      # one process, nothing kept
    >>> resources.workers, resources.journal
    (1, None)
    """

    workers: int = 1
    device: str | None = None
    journal: Journal | None = None  # entered; what was solved is kept there and used again
    on_step: OnStep | None = None
