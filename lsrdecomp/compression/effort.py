"""Choices of a search, each with its unit and where its value comes from.

Numbers only, so that settings are read without NumPy. Values are by hand unless a line says where
they were measured.
"""

from __future__ import annotations

from dataclasses import dataclass

Ranks = tuple[int, int]
"""Terms of the out side and of the in side."""


@dataclass(frozen=True, slots=True)
class ShapeGrid:
    """The shapes that are solved for each size of layer, and at which numbers of terms.

    Attributes
    ----------
    terms_of_two, terms_of_three : tuple of (int, int)
        Terms of even splits into two and into three factors, without an inner rank. Each holds the
        ones before it, so that solutions are nested.
    terms_with_inner : tuple of (int, int)
        Terms of shapes with an inner rank.
    even_inner : tuple of (int, int)
        Inner shapes of even splits besides (1, 1).
    tall : tuple of (int, (int, int))
        Tall shapes, low rank of a reshaped side: the small factor is the divisor nearest to the
        number and has all of the inner rank. On a language model these and the even ones come
        within a hundredth of 116 shapes, from 1/96 to 1/4 of the parameters.
    large_inner : tuple of (int, int)
        Inner shapes that pay only for about as many parameters as one rank of truncated SVD takes,
        or more.
    min_large_ranks : float
        Parameters from which those are solved for, in ranks of truncated SVD.
    """

    terms_of_two: tuple[Ranks, ...] = (
        (1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 3), (4, 4), (6, 6), (8, 8),
    )  # fmt: skip
    terms_of_three: tuple[Ranks, ...] = (
        (1, 1), (2, 1), (1, 2), (2, 2), (3, 2), (2, 3), (3, 3), (4, 4),
    )  # fmt: skip
    terms_with_inner: tuple[Ranks, ...] = (
        (1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8), (12, 12),
    )  # fmt: skip
    even_inner: tuple[Ranks, ...] = ((2, 2), (2, 3))
    tall: tuple[tuple[int, Ranks], ...] = ((12, (2, 1)), (6, (4, 1)), (12, (1, 2)))
    large_inner: tuple[Ranks, ...] = ((2, 3), (4, 1))
    min_large_ranks: float = 0.6


@dataclass(frozen=True, slots=True)
class SolveEffort:
    """Sweeps and starts that one shape is given, and when they stop.

    Attributes
    ----------
    sweeps : int
        Sweeps over both sides at most, from what was solved before.
    tolerance : float
        A sweep that lowers no layer's error by a larger share ends the solve.
    min_gain : float
        So does one that lowers no squared error by more, absolute.
    starts : int
        Starts from singular vectors where nothing was solved before; the nearest goes on.
    cold_sweeps : int
        Sweeps from there.
    cg_steps : int
        Conjugate gradient steps of a block update in a weighted norm.
    """

    sweeps: int = 2
    tolerance: float = 2e-3
    min_gain: float = 0.0
    starts: int = 2
    cold_sweeps: int = 4
    cg_steps: int = 8


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """The steps of a search beyond its first choice, and when they stop.

    Attributes
    ----------
    grid : ShapeGrid
    solve : SolveEffort
        Of shapes on the grid and of neighbours; refining has its own.
    max_layer_share : float
        Most parameters that a layer is given, in units of what the budget gives a layer on average.
    max_grid_passes : int
        Times that the fine grid is solved for a budget: after each, some layers are given more,
        others less.
    size_step : float
        The fine grid is solved up to this factor above the size that a layer was given; from the
        fewest terms, since what grew from fewer terms comes nearer than what starts from singular
        vectors.
    max_groups : int
        Groups of layers of one chosen shape whose neighbours are tried in a round, the largest
        first.
    min_group_share : float
        Smallest such group, as a share of all layers.
    trial_layers : int
        Layers of a group, from all depths of the network, on which a neighbour is tried.
    min_gain : float
        Share by which a neighbour must lower loss and cost on those, weighed against each other as
        the budget does, to be solved for the whole group.
    max_neighbours : int
        Neighbours of one chosen shape that are solved for the whole group at most.
    common_shapes : int
        Shapes that layers of one size share with another adapter, besides each its own: on
        SmolLM2's adapters errors are 1.03 to 1.10 times as large with none, 1.01 with two.
    expected_refinement : float
        Share of its squared error that refining usually leaves of a product: what is chosen is
        chosen for what it may become, against truncated SVD, which is as good as it can be from the
        start. On a language model's layers it leaves 0.4 to 0.9.
    max_refinements : int
        Times that a budget is drawn anew because refining changed what is best.
    refine_tolerance : float
        A sweep that lowers no error by a larger share ends refining.
    min_relative_gain : float
        So does one that lowers no squared error by this share of what a layer loses on average.
    sweeps_per_round : int
        Sweeps of refining at a time; after them only layers go on whose losses fell by as much as
        ends refining each.
    hull_margin : float
        Candidates this factor above the convex hull of a layer's errors are still tried in
        integers.
    max_code_sizes : int
        Sizes of low rank in integers that a layer offers at most.
    consecutive_ranks : int
        Up to this rank each is one of them, where parameters are counted.
    """

    grid: ShapeGrid = ShapeGrid()
    solve: SolveEffort = SolveEffort()
    max_layer_share: float = 8.0
    max_grid_passes: int = 2
    size_step: float = 1.7
    max_groups: int = 3
    min_group_share: float = 0.04
    trial_layers: int = 4
    min_gain: float = 0.02
    max_neighbours: int = 2
    common_shapes: int = 2
    expected_refinement: float = 0.7
    max_refinements: int = 3
    refine_tolerance: float = 3e-4
    min_relative_gain: float = 3e-3
    sweeps_per_round: int = 8
    hull_margin: float = 1.15
    max_code_sizes: int = 24
    consecutive_ranks: int = 16


DEFAULT_EFFORT = SearchEffort()


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits of memory and workers, in numbers of eight bytes unless it says otherwise.

    Attributes
    ----------
    pair_entries : int
        Pairs that are solved together, and pairs that stay read: 8 MiB, or one layer if it is
        larger.
    norm_entries : int
        The same for the weights of their norms.
    leading_entries : int
        The same for the weights in their leading coordinates, which every step of a solve reads:
        about what a processor has at hand without going to memory.
    min_shrinkage : int
        Leading coordinates of a layer that are this many times fewer than the norm's wait in the
        `SpillCache`; others are made again.
    spill_bytes : int
        Bytes that a `SpillCache` holds before it moves to disk.
    tasks_in_flight : int
        Tasks a worker that are read, under way or waiting for their turn, so that not all layers
        are in memory at once. Of those that wait none is in the journal yet: so many are solved
        again after a kill.
    worker_timeout : int
        Seconds after which a worker without work ends.
    """

    pair_entries: int = 2**20
    norm_entries: int = 2**23
    leading_entries: int = 2**19
    min_shrinkage: int = 2
    spill_bytes: int = 8 * 2**20
    tasks_in_flight: int = 4
    worker_timeout: int = 60


DEFAULT_LIMITS = ResourceLimits()


@dataclass(frozen=True, slots=True)
class FileFilling:
    """The files that are tried for a number of bytes.

    Attributes
    ----------
    max_files : int
        Files that are written and measured at most.
    min_fill : float
        A file this full is full enough to stop.
    """

    max_files: int = 8
    min_fill: float = 0.99
