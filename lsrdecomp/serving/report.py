"""What a server would make of an adapter, as records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModuleFate:
    """One layer of the adapter in a server.

    Attributes
    ----------
    name : str
        As the file calls it.
    rank : int
    fault : str or None
        Why it would not apply; None if it would.
    factor : float
        By how much the server would scale it beyond what its own format says; 1 where both agree.
    error : float or None
        How far the ΔW that the server's own loader made is from the layer's at that factor,
        relative to its norm; None where no loader was run.

    Examples
    --------
    >>> ModuleFate("lm_head", rank=8, fault="the server adapts no heads").factor
    1.0
    """

    name: str
    rank: int
    fault: str | None = None
    factor: float = 1.0
    error: float | None = None


@dataclass
class ServingCheck:
    """An adapter in one server, on one base.

    Attributes
    ----------
    server, rules : str
        Its name, and what said what it does: its loader, or what was read.
    modules : list of ModuleFate
        A fate for each layer.
    refusals : list of str
        Why the server would not load the file at all; then nothing applies.
    notes : list of str
        What it takes to serve it.
    options : list of str
        That the server must be started with, by its own check.
    loader_version : str or None
        Of the server's package, where its loader was run.
    is_certain : bool
        Whether what is said of the layers is known; False where the loader could not be run and the
        file is not of the form that all servers read alike.

    Examples
    --------
    >>> from pathlib import Path
    >>> head = ModuleFate("lm_head", rank=8, fault="the server adapts no heads")
    >>> modules = [ModuleFate("q_proj", rank=8), head]
    >>> check = ServingCheck("vllm", "its loader", Path("small"), Path("base"), modules)
    >>> [module.name for module in check.applied], [module.name for module in check.ignored]
    (['q_proj'], ['lm_head'])
    """

    server: str
    rules: str
    adapter: Path
    base: Path
    modules: list[ModuleFate] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    loader_version: str | None = None
    is_certain: bool = True

    def refuse(self, reason: str) -> None:
        """Add a reason for refusing the file, once, however many layers give it."""
        if reason not in self.refusals:
            self.refusals.append(reason)

    @property
    def applied(self) -> Sequence[ModuleFate]:
        """The layers that would act on the base."""
        return () if self.refusals else [module for module in self.modules if module.fault is None]

    @property
    def ignored(self) -> Sequence[ModuleFate]:
        """The layers that would not, each with its own fault."""
        return [module for module in self.modules if module.fault is not None]

    @property
    def rescaled(self) -> Sequence[ModuleFate]:
        """The layers that would act at another scale than their own."""
        return [module for module in self.applied if abs(module.factor - 1.0) > 1e-6]

    def to_json(self) -> dict[str, Any]:
        """Return all of it, for machines."""
        return {
            "server": self.server,
            "rules": self.rules,
            "adapter": str(self.adapter),
            "base": str(self.base),
            "layers": len(self.modules),
            "applied": len(self.applied),
            "largest_rank": max((module.rank for module in self.applied), default=0),
            "refusals": self.refusals,
            "notes": self.notes,
            "options": self.options,
            "loader_version": self.loader_version,
            "is_certain": self.is_certain,
            "largest_error": max((module.error or 0.0 for module in self.applied), default=0.0),
            "ignored": [{"name": module.name, "fault": module.fault} for module in self.ignored],
            "rescaled": [
                {"name": module.name, "factor": module.factor} for module in self.rescaled
            ],
        }
