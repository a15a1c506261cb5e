"""Forward passes that begin by forming all Kronecker sums of their model, and how long what they formed holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lsrdecomp.adapters.kernels.grouped import expand_all
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


class Expansion:
    """A matrix that was formed for one forward pass, and for the backward pass that belongs to it."""

    def __init__(self, matrix: Tensor, grouping: Grouping) -> None:
        self.matrix, self.grouping = matrix, grouping

    def holds(self) -> bool:
        """Whether it may be used here and now: during its pass, or in backward, where checkpointing runs parts again.

        Nowhere else, for parameters can be changed unseen: through ``.data``, or by another library's kernels.
        """
        here = self.grouping.running or torch._C._current_graph_task_id() != -1
        return here and (self.grouping.with_graph or not torch.is_grad_enabled())

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # copied and pickled as None


class Grouping:
    """Forms the sums of Kronecker products of a model at once, whenever its forward pass begins, within its context.

    Under ``torch.compile`` and ``torch.func`` nothing is grouped: the compiler sees every expansion and arranges them
    itself. Factors that do not lie here whole (sharded, offloaded, swapped for a call) are left to their layers.

    Parameters
    ----------
    model : torch.nn.Module
        Its `Expandable` modules are formed for.
    dtype : torch.dtype, optional
        As for `expand_all`.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None = None) -> None:
        self.model, self.dtype = model, dtype
        self.formed: list[Expandable] = []
        self.running = self.with_graph = False  # the pass that formed them, and whether it recorded a graph
        self.keeps = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def select(self) -> Iterable[tuple[Expandable, torch.dtype | None]]:
        """The modules to form for in this pass, each with the dtype to form it in (None for that of its factors)."""
        return ((module, self.dtype) for module in self.model.modules() if isinstance(module, Expandable))

    def __enter__(self) -> None:
        self._handles = [
            self.model.register_forward_pre_hook(self._before),
            self.model.register_forward_hook(self._after, always_call=True),
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.release()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """While open, what a pass without a graph formed serves the passes after it, as in the tokens of an answer."""
        outer, self.keeps = self.keeps, True
        try:
            yield
        finally:
            self.keeps = outer
            if not outer and not self.with_graph:
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
        self.running, self.with_graph = True, torch.is_grad_enabled()
        for dtype, (modules, lists) in classes.items():
            for module, matrix in zip(modules, expand_all(lists, dtype=dtype), strict=True):
                vars(module)["expansion"] = Expansion(matrix, self)  # a module's own way takes microseconds
            self.formed += modules

    def release(self) -> None:
        """Forget what was formed."""
        for module in self.formed:
            vars(module).pop("expansion", None)
        self.formed.clear()
        self.running = self.with_graph = False

    def _before(self, model: nn.Module, _: Any) -> None:
        serves = self.keeps and self.running and not self.with_graph and not torch.is_grad_enabled()
        if not serves and not is_traced():
            self.form()

    def _after(self, model: nn.Module, _: Any, output: Any) -> None:
        if is_traced():
            return
        if self.with_graph:
            self.running = False
        elif not self.keeps:
            self.release()
