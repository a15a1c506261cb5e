"""Which sizes one layer gets: the settings and their patterns, resolved for a module of a given name and shape."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from peft.utils.other import get_pattern_key

from lsrdecomp.adapters.config import LsrConfig, positive, product_shape, separation_ranks
from lsrdecomp.checkpoints.config import spellings
from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.shape import ProductShape

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Sizes and scale of the adapter of one layer."""

    shape: ProductShape
    separation_ranks: tuple[int, int]  # out side, in side
    alpha: float
    scaling: float
    r: int


def layer_layout(config: LsrConfig, name: str, matrix_shape: tuple[int, int], copies: int = 1) -> LayerLayout:
    """Resolve the settings for the module ``name``, whose ΔW is ``matrix_shape`` as a matrix (out, in).

    With ``copies`` such matrices side by side, the inner rank of the shape is ``r`` times as many.

    Raises
    ------
    ShapeError
        Naming the layer and the numbers, if a pattern's sizes do not tile the layer or contradict ``rank_pattern``.
    """
    given = find(config.shape_pattern, name)
    rank = find(config.rank_pattern, name)
    if given is None:
        r = positive(f"{name}: r", config.r if rank is None else rank)
        shape = ProductShape.balanced(matrix_shape, config.inner_split(r * copies))
    else:
        shape = product_shape(f"{name}: shape_pattern", given)
        r = shape.inner_rank // copies
        if r * copies != shape.inner_rank or rank not in (None, r):
            sizes = " x ".join(map(str, shape.inner))
            several = f" for {copies} matrices" if copies > 1 else ""
            asked = f"rank_pattern says {rank}" if rank is not None else "that is no whole rank each"
            raise ShapeError(f"{name}: inner {sizes} = {shape.inner_rank}{several} in shape_pattern, but {asked}")
        shape.left.check((matrix_shape[0], shape.inner_rank), f"{name}, out side")
        shape.right.check((shape.inner_rank, matrix_shape[1]), f"{name}, in side")
    alpha = find(config.alpha_pattern, name)
    alpha = config.lsr_alpha if alpha is None else alpha
    terms = find(config.separation_rank_pattern, name)
    terms = config.separation_rank if terms is None else terms
    return LayerLayout(
        shape=shape,
        separation_ranks=separation_ranks(f"{name}: separation_rank", terms),
        alpha=alpha,
        scaling=alpha / (math.sqrt(r) if config.use_rslora else r),
        r=r,
    )


def find(pattern: Mapping[str, T], name: str) -> T | None:
    """The value for a module: of its exact name, else of the first pattern that matches as PEFT matches.

    An exact name, ``^`` and ``$`` around it and its dots escaped or not, is looked up and beats every pattern, so that
    a map of all layers of a model costs each of them no search. `lsrdecomp.checkpoints` reads by the same rule.
    """
    for key in spellings(name):
        if key in pattern:
            return pattern[key]
    return pattern.get(get_pattern_key(list(pattern), name))
