"""Kernels: the arithmetic of stacked Kronecker factors and of layers that carry them, plain torch and free of PEFT.

``stacked`` forms a sum of Kronecker products or applies it unformed, ``grouped`` forms many, ``grouping`` those of a
model when a pass begins; ``linear`` adds a formed pair to a frozen layer, ``many`` a pair per row of the batch;
``dispatch`` holds what was measured to be faster where.
"""

from lsrdecomp.adapters.kernels.dispatch import choose, kronecker_pays
from lsrdecomp.adapters.kernels.grouped import expand_all
from lsrdecomp.adapters.kernels.grouping import Expandable, Grouping, grouped_expansion
from lsrdecomp.adapters.kernels.linear import adapted_linear
from lsrdecomp.adapters.kernels.many import StackedPairs, add_adapters
from lsrdecomp.adapters.kernels.stacked import apply, expand

__all__ = [
    "Expandable",
    "Grouping",
    "StackedPairs",
    "adapted_linear",
    "add_adapters",
    "apply",
    "choose",
    "expand",
    "expand_all",
    "grouped_expansion",
    "kronecker_pays",
]
