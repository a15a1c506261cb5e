"""Kernels: the arithmetic of stacked Kronecker factors and of layers that carry them, plain torch and free of PEFT."""

from lsrdecomp.adapters.kernels.arena import ArenaLayer, FactorArena
from lsrdecomp.adapters.kernels.dispatch import Problem, choose, kronecker_pays, structured_pays
from lsrdecomp.adapters.kernels.grouped import expand_all
from lsrdecomp.adapters.kernels.grouping import Expandable, Grouping, grouped_expansion
from lsrdecomp.adapters.kernels.kron import kronecker_linear
from lsrdecomp.adapters.kernels.linear import adapted_linear
from lsrdecomp.adapters.kernels.many import AdapterBank, add_adapters
from lsrdecomp.adapters.kernels.merge import Merged, merge, merge_all, surviving_share
from lsrdecomp.adapters.kernels.stacked import apply, expand

__all__ = [
    "AdapterBank",
    "ArenaLayer",
    "Expandable",
    "FactorArena",
    "Grouping",
    "Merged",
    "Problem",
    "adapted_linear",
    "add_adapters",
    "apply",
    "choose",
    "expand",
    "expand_all",
    "grouped_expansion",
    "kronecker_linear",
    "kronecker_pays",
    "merge",
    "merge_all",
    "structured_pays",
    "surviving_share",
]
