"""Kernels: the arithmetic of stacked Kronecker factors and of layers that carry them, plain torch and free of PEFT.

``stacked`` forms a sum of Kronecker products or applies it unformed, ``grouped`` forms many, ``grouping`` those of a
model when a pass begins; ``linear`` adds a formed pair to a frozen layer.
"""

from lsrdecomp.adapters.kernels.grouped import expand_all
from lsrdecomp.adapters.kernels.grouping import Expandable, Grouping
from lsrdecomp.adapters.kernels.linear import adapted_linear
from lsrdecomp.adapters.kernels.stacked import apply, expand, kronecker_pays

__all__ = [
    "Expandable",
    "Grouping",
    "adapted_linear",
    "apply",
    "expand",
    "expand_all",
    "kronecker_pays",
]
