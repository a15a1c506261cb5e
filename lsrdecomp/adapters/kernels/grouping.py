"""Forward passes that begin by forming all Kronecker sums of their model, and how long what they formed holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lsrdecomp.adapters.kernels.grouped import LARGEST_GROUP, expand_all
from lsrdecomp.adapters.kernels.stacked import expand, is_traced, without_autocast


class Expandable(nn.Module):
    """A module that holds the factors of one sum of Kronecker products and may be handed the formed matrix."""

    expansion: Expansion | None = None

    @property
    def factors(self) -> list[Tensor]:
        """The factors, shapes (s, m_i, n_i), the outermost first."""
        raise NotImplementedError

    def matrix(self) -> Tensor:
        """The formed sum, in the factors' own precision even under autocast; from `Grouping` while it holds."""
        if is_traced():
            return self._composed()
        if self.expansion is not None and self.expansion.holds():
            return self.expansion.matrix
        # The same node as a group's: what is formed alone may stand in for it when a checkpoint computes again.
        factors = self.factors
        return expand_all([factors])[0] if _groupable(factors) else self._composed()

    def _composed(self) -> Tensor:
        factors = self.factors
        if factors[0].is_meta:  # low-memory loading; autocast knows no such device
            return expand(factors)
        with without_autocast(factors[0].device.type):
            return expand(factors)


def _groupable(factors: list[Tensor]) -> bool:
    """Whether factors are parameters that lie here whole: not sharded, offloaded, or replaced by a transform."""
    return all(type(factor) is nn.Parameter and factor.ndim == 3 and not factor.is_meta for factor in factors)


class Run:
    """One forward pass of a model: whether it is still running, and whether it recorded a graph."""

    def __init__(self) -> None:
        self.running, self.with_graph = True, torch.is_grad_enabled()


class Expansion:
    """A matrix that was formed for one forward pass, and for the backward pass that belongs to it."""

    def __init__(self, matrix: Tensor, run: Run) -> None:
        self.matrix, self.run = matrix, run

    def holds(self) -> bool:
        """Whether it may be used here and now: during its pass, or in backward, where checkpointing runs parts again.

        Nowhere else, for parameters can be changed unseen: through ``.data``, or by another library's kernels.
        """
        here = self.run.running or torch._C._current_graph_task_id() != -1
        return here and (self.run.with_graph or not torch.is_grad_enabled())

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # copied and pickled as None


Select = Callable[[], Iterable[tuple[Expandable, torch.dtype | None]]]


class Grouping:
    """Forms the sums of Kronecker products of a model at once, whenever its forward pass begins.

    Under ``torch.compile`` and ``torch.func`` nothing is grouped: the compiler sees every expansion and arranges them
    itself. Factors that do not lie here whole (sharded, offloaded, swapped for a call) are left to their layers.

    Parameters
    ----------
    select : callable
        The modules to form for in this pass, each with the dtype to form it in (None for that of its factors).
    entries : int
        As for `expand_all`.
    """

    def __init__(self, select: Select, entries: int = LARGEST_GROUP) -> None:
        self.select, self.entries = select, entries
        self.formed: list[Expandable] = []
        self.run: Run | None = None
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self, model: nn.Module) -> None:
        """Let every forward pass of ``model`` begin with `form`."""
        self._handles = [
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def detach(self) -> None:
        """Take the hooks off the model, and what was formed off its modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.release()

    def form(self) -> None:
        """Form what is selected, in place of what was formed for the pass before."""
        classes: dict[torch.dtype | None, tuple[list[Expandable], list[list[Tensor]]]] = {}
        selected = False
        for module, dtype in self.select():
            selected, factors = True, module.factors
            if _groupable(factors):
                modules, lists = classes.setdefault(dtype, ([], []))
                modules.append(module)
                lists.append(factors)
        if not selected:
            return  # adapters are off: an earlier pass may still wait for its backward
        self.release()
        self.run = Run()
        for dtype, (modules, lists) in classes.items():
            matrices = expand_all(lists, entries=self.entries, dtype=dtype)
            for module, matrix in zip(modules, matrices, strict=True):
                vars(module)["expansion"] = Expansion(matrix, self.run)  # a module's own way takes microseconds
            self.formed += modules

    def release(self) -> None:
        """Forget what was formed."""
        for module in self.formed:
            vars(module).pop("expansion", None)
        self.formed.clear()

    def _before(self, model: nn.Module, _: Any) -> None:
        if not is_traced():
            self.form()

    def _after(self, model: nn.Module, _: Any, output: Any) -> None:
        if is_traced() or self.run is None:
            return
        self.run.running = False
        if not self.run.with_graph:
            self.release()


@contextmanager
def grouped_expansion(
    model: nn.Module, *, entries: int = LARGEST_GROUP, dtype: torch.dtype | None = None
) -> Iterator[None]:
    """While open, every forward pass of ``model`` first forms all its Kronecker sums at once; see `Grouping`.

    Parameters
    ----------
    model : torch.nn.Module
        Its `Expandable` modules are formed for, each once.
    entries, dtype
        As for `expand_all`.
    """
    grouping = Grouping(lambda: ((m, dtype) for m in model.modules() if isinstance(m, Expandable)), entries)
    grouping.attach(model)
    try:
        yield
    finally:
        grouping.detach()
