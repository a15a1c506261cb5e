"""How far to look for shapes, and the full search: many shapes probed on a few layers, the best of each size kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from lsrdecomp.checkpoints import Checkpoint, LsrLayer
from lsrdecomp.compression.candidates import Configuration, solve_together
from lsrdecomp.compression.ladder import parameters
from lsrdecomp.compression.layers import Layer, batches
from lsrdecomp.kronecker.shape import KroneckerShape, ProductShape, splits
from lsrdecomp.solvers.pair.joint_als import JointALS

BIN = 1.3
"""Ratio of parameters between neighbouring size bins."""

TERMS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32)
"""Numbers of terms that are tried."""

EVEN_SPLITS = 6
"""Splits of a side that are tried for three and more factors: the most even ones, in every order."""


@dataclass(frozen=True, slots=True)
class Search:
    """How far to look for shapes.

    Parameters
    ----------
    probes : int
        Shapes tried briefly for each size of layer, of which ``kept`` are solved for; none: a fixed ladder of shapes
        and the neighbours of those that a budget chooses, as good in a fraction of the time (`Search.full` probes).
    rounds : int
        Without probes: times that neighbours of what was chosen are tried.
    kept : int
        Shapes solved for every layer of that size.
    probe_layers, probe_sweeps : int
        Layers and sweeps of a trial.
    orders : tuple of int
        Numbers of Kronecker factors of a term. Three and more pay for very few parameters and have no canonical form.
    inner_rank, terms : int
        Largest inner rank and most terms a side that are tried; the rank of the layer bounds the former too.
    solver : JointALS
        With probes: of the full solve.
    refine : JointALS
        Of the shapes that the budget chose, from where the full solve ended.
    low_rank, direct : bool
        Whether truncated SVD, and the direct sum of the layer itself, compete.
    seed : int
    shapes : Mapping of layer name to configuration, optional
        What the layers of another adapter became: these shapes, and the commonest ones for each size of layer, are
        solved for in place of a ladder and its neighbours; see `Search.like`.

    Examples
    --------
    >>> Search().probes, Search.full().probes
    (0, 128)
    >>> Search(orders=(2,), rounds=0).orders                                # the fastest: two factors, no neighbours
    (2,)
    """

    probes: int = 0
    rounds: int = 1
    kept: int = 24
    probe_layers: int = 4
    probe_sweeps: int = 2
    orders: tuple[int, ...] = (2, 3)
    inner_rank: int = 8
    terms: int = 16
    solver: JointALS = field(default_factory=lambda: JointALS(sweeps=8, trials=1))
    refine: JointALS = field(default_factory=lambda: JointALS(sweeps=40))
    low_rank: bool = True
    direct: bool = False
    seed: int = 0
    shapes: Mapping[str, Configuration] = field(default_factory=dict)

    @classmethod
    def full(cls) -> Search:
        """Hundreds of shapes probed for each size of layer: hours for a large model, where the ladder takes minutes."""
        return cls(probes=128, refine=JointALS(sweeps=45))

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
        products = (layer for layer in compressed.layers if isinstance(layer, LsrLayer) and layer.shape.order > 1)
        return cls(shapes={layer.name: (layer.shape, (layer.left_rank, layer.right_rank)) for layer in products})

    def on(self, device: str | None) -> Search:
        """The same with joint least squares on a device of torch; see `JointALS`."""
        solver, refine = (replace(one, device=device) for one in (self.solver, self.refine))
        return replace(self, solver=solver, refine=refine)


def choose_configurations(layers: Sequence[Layer], search: Search, most: float) -> list[Configuration]:
    """The shapes to solve for layers of one kind, of at most ``most`` parameters each, ascending."""
    probes = probe_configurations(layers[0].shape, max(layer.rank for layer in layers), search, most)
    if len(probes) <= search.kept:
        return probes
    # Strided, so that the probed layers come from all depths of the network.
    sample = layers[:: max(1, len(layers) // search.probe_layers)][: search.probe_layers]
    solver = replace(search.solver, sweeps=search.probe_sweeps, trials=0)
    losses = np.zeros(len(probes))
    for part in batches(sample):
        for place, (shape, ranks) in enumerate(probes):
            solved = solve_together(sample[part], shape, ranks, solver)
            losses[place] += math.fsum(solution.error**2 for solution in solved)
    return _best_of_each_size_bin(probes, losses.tolist(), search.kept)


def probe_configurations(matrix_shape: tuple[int, int], rank: int, search: Search, most: float) -> list[Configuration]:
    """Up to ``search.probes`` shapes spread evenly over the logarithm of their size, ascending.

    In each size bin a third are the most even ones (sides of like cost, factors of like size, terms alike), which win
    below one rank; a third are tall ones (`aspect_penalty`), which win between whole ranks; the others are drawn at
    random.
    """
    bins: dict[int, list[Configuration]] = {}
    for configuration in all_configurations(matrix_shape, rank, search):
        size = parameters(configuration)
        if size <= most:
            bins.setdefault(_size_bin(size), []).append(configuration)
    if not bins:
        return []
    rng = np.random.default_rng(search.seed)
    share = max(2, search.probes // len(bins))
    chosen: list[Configuration] = []
    for size in sorted(bins):
        third = -(-share // 3)
        picked = sorted(bins[size], key=unevenness)[:third]
        picked += sorted(
            (c for c in bins[size] if c not in picked and aspect_penalty(c) < math.inf), key=aspect_penalty
        )[:third]
        rest = [c for c in bins[size] if c not in picked]
        drawn = rng.permutation(len(rest))[: max(0, share - len(picked))]
        chosen += picked + [rest[i] for i in sorted(drawn)]
    return sorted(chosen, key=parameters)


def all_configurations(matrix_shape: tuple[int, int], rank: int, search: Search) -> list[Configuration]:
    """Every shape of the family with at most the search's inner rank and terms, in a fixed order.

    For three and more factors, which are for the smallest sizes, only the most even splits, inner ranks one and two,
    and few terms: there are too many others.
    """
    (m, n), found = matrix_shape, []
    for order in search.orders:
        few = order > 2
        counts = [s for s in TERMS if s <= min(search.terms, 4 if few else search.terms)]
        sides = [sorted(splits(size, order), key=_spread)[: EVEN_SPLITS if few else None] for size in (m, n)]
        for r in range(1, min(rank, 2 if few else search.inner_rank, m, n) + 1):
            for inner in splits(r, order):
                lefts = [(out, KroneckerShape.of(out, inner).max_separation_rank) for out in sides[0]]
                rights = [(into, KroneckerShape.of(inner, into).max_separation_rank) for into in sides[1]]
                for out, most_out in lefts:
                    for into, most_in in rights:
                        shape = ProductShape(out, inner, into)
                        found += [(shape, (s, t)) for s in counts for t in counts if s <= most_out and t <= most_in]
    return found


def unevenness(configuration: Configuration) -> float:
    """Zero for factors of equal size, sides of equal cost and equal terms; grows with the logarithms of the ratios."""
    shape, (s, t) = configuration
    left, right = (
        s * sum(a * b for a, b in zip(shape.out, shape.inner, strict=True)),
        t * sum(a * b for a, b in zip(shape.inner, shape.into, strict=True)),
    )
    return _spread(shape.out) + _spread(shape.into) + abs(math.log(left / right)) + 0.5 * abs(math.log(s / t))


def aspect_penalty(configuration: Configuration) -> float:
    """Small for m/q × 1 ⊗ q × r with small q > 1 on both sides: low rank of a reshaped side, nearly plain low rank.

    Infinite for anything else.
    """
    shape, (s, t) = configuration
    if shape.order != 2 or shape.inner[0] != 1 or shape.inner[1] == 1 or not 1 < shape.out[1] * shape.into[1] <= 64:
        return math.inf
    left, right = (
        s * (shape.out[0] + shape.out[1] * shape.inner[1]),
        t * (shape.into[0] + shape.into[1] * shape.inner[1]),
    )
    return abs(math.log(left / right)) + 0.1 * math.log(shape.out[1] * shape.into[1])


def _spread(sizes: Sequence[int]) -> float:
    return math.log(max(sizes) / min(sizes))


def _size_bin(size: int) -> int:
    return int(math.log(size) / math.log(BIN))


def _best_of_each_size_bin(probes: list[Configuration], losses: list[float], kept: int) -> list[Configuration]:
    """The best of each size bin, then the second best ones, dropping what a cheaper one beats; ``kept`` in all."""
    order = sorted(range(len(probes)), key=lambda i: losses[i])
    places: dict[int, int] = {}
    ranked = []
    for i in order:
        where = _size_bin(parameters(probes[i]))
        places[where] = places.get(where, -1) + 1
        beaten = any(
            losses[j] <= losses[i] and parameters(probes[j]) < parameters(probes[i]) for j in range(len(probes))
        )
        ranked.append((beaten, places[where], losses[i], i))
    picked = sorted(i for *_, i in sorted(ranked)[:kept])
    return sorted((probes[i] for i in picked), key=parameters)
