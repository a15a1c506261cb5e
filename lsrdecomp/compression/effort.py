"""Numbers that steer a search: its grid of shapes, its sweeps and stopping rules, its memory.

Each has its unit. Values were set by hand unless a line says what was measured. The file needs no
NumPy, so that settings are read without it.
"""

from __future__ import annotations

from dataclasses import dataclass

Ranks = tuple[int, int]
"""Numbers of terms of the output side and of the input side of an LSR product."""


@dataclass(frozen=True, slots=True)
class ShapeGrid:
    """The shapes that are solved for each size of layer, and their numbers of terms.

    Attributes
    ----------
    terms_of_two, terms_of_three : tuple of (int, int)
        Numbers of terms at which even splits into two and three factors are solved, without an
        inner rank. In growing order: solutions with more terms start from those with fewer.
    terms_with_inner : tuple of (int, int)
        Numbers of terms of shapes with an inner rank.
    even_inner : tuple of (int, int)
        Inner shapes of even splits besides (1, 1).
    tall : tuple of (int, (int, int))
        Tall shapes, low rank of a reshaped side: their small factor is the divisor nearest to the
        number, and has all of the inner rank. On a language model these and the even shapes come
        within 1 % of the errors of 116 shapes, from 1/96 to 1/4 of the parameters.
    large_inner : tuple of (int, int)
        Inner shapes that are worth a solve only if a layer may have about as many parameters as a
        truncated SVD of rank 1, or more.
    min_large_ranks : float
        Parameters from which they are solved, in units of the parameters of a truncated SVD of
        rank 1.

    Examples
    --------
    >>> grid = ShapeGrid(min_large_ranks=0.8)
    >>> SearchEffort(grid=grid).grid.min_large_ranks
    0.8
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
    """Sweeps and starts for one shape, and the rule that stops them.

    Attributes
    ----------
    sweeps : int
        Maximum sweeps over both sides from an earlier solution.
    tolerance : float
        Stop after a sweep that lowers no layer's error by a larger share than this.
    min_gain : float
        Stop after a sweep that lowers no layer's squared error by more than this, absolute.
    starts : int
        Starts from singular vectors where there is no earlier solution. The nearest one is swept.
    cold_sweeps : int
        Maximum sweeps from such a start.
    cg_steps : int
        Conjugate gradient steps of a block update in a weighted norm.

    Examples
    --------
    >>> effort = SearchEffort(solve=SolveEffort(sweeps=4))              # for `Search(effort=…)`
    >>> effort.solve.sweeps
    4
    """

    sweeps: int = 2
    tolerance: float = 2e-3
    min_gain: float = 0.0
    starts: int = 2
    cold_sweeps: int = 4
    cg_steps: int = 8


@dataclass(frozen=True, slots=True)
class Screening:
    """The layers that are not solved in the Frobenius norm; see `compression.screening`.

    Nothing is left out in other norms, in integers, of ``structure="lsr"`` and with the shapes of
    `Search.like`.

    Attributes
    ----------
    min_advantage : float
        Least estimate of what an LSR product keeps, in units of a truncated SVD of as many
        parameters, for a layer to be solved; 0 leaves out none but by rank. Of 1,128 layers of 15
        adapters 84 have a product above one unit, and their least estimate is 0.92; that product
        was chosen for none of the ratios 4, 8, 16 and 48.
    min_filling_gain : float
        Relative decrease of the error over all layers from which products are also solved to fill
        what truncated SVDs leave of a budget, in ``filling_layers`` layers.
    filling_layers : int
        Layers that are solved for it: those whose products are nearest to the price that a
        parameter has in the budget.

    Examples
    --------
    >>> SearchEffort(screening=Screening(min_advantage=0.0)).screening.min_advantage  # solve all
    0.0
    """

    min_advantage: float = 0.95
    min_filling_gain: float = 5e-4
    filling_layers: int = 24


@dataclass(frozen=True, slots=True)
class SearchEffort:
    """Choices of a search beyond its first allocation of the budget; see `compression.search`.

    Attributes
    ----------
    grid : ShapeGrid
    screening : Screening
        Layers that are left out because truncated SVD is better.
    solve : SolveEffort
        Effort for shapes of the grid and for neighbours.
    max_layer_share : float
        Maximum parameters of a layer, in units of what the budget gives a layer on average.
    max_grid_passes : int
        Maximum times that the fine grid is solved for a budget. After each, some layers get more
        parameters and others fewer.
    size_step : float
        The fine grid is solved up to this factor above the parameters of a layer. It is solved from
        the fewest terms on, since growing solutions come nearer than starts from singular vectors.
    max_groups : int
        Maximum groups of layers with one chosen shape whose neighbours are tried in a round, the
        largest groups first.
    min_group_share : float
        Least layers of such a group, as a share of all layers.
    trial_layers : int
        Layers of a group, from all depths of the network, on which a neighbour is tried.
    min_gain : float
        A neighbour is solved for the whole group if it lowers the Lagrangian of the trial layers
        (squared error plus exchange rate times parameters) by more than this share.
    max_neighbours : int
        Maximum neighbours of one chosen shape that are solved for the whole group.
    common_shapes : int
        Number of the commonest shapes, among layers of its size, that a layer is solved at besides
        its own. With the shapes of another adapter errors on SmolLM2's adapters are 1.03 to 1.10
        times as large with none, 1.01 with two.
    expected_refinement : float
        Share of its squared error that a product is expected to have after refining. Products are
        chosen by it against truncated SVDs, which cannot be refined. On a language model's layers
        0.4 to 0.9 are left.
    max_refinements : int
        Maximum times that the budget is allocated again because refined errors changed what is
        best.
    refine_tolerance : float
        Stop refining after a sweep that lowers no layer's error by a larger share than this.
    min_relative_gain : float
        Stop refining after a sweep that lowers no layer's squared error by more than this share of
        the average squared error of a layer.
    sweeps_per_round : int
        Sweeps between two decisions which layers are refined further: those whose squared errors
        fell on average by more a sweep than the two stopping rules ask for.
    hull_margin : float
        Candidates are tried in integers if their error is at most this many times that of the
        convex hull of their layer.
    width_margin : float
        The same for candidates in other widths of codes than int4, by the error that is predicted
        from that in int4. By hand.
    max_code_sizes : int
        Maximum sizes at which a layer offers truncated SVD in integers.
    min_code_sizes : int
        Sizes that all layers offer together, where each has enough: with few layers each offers
        more, so that a number of bytes can be filled.
    consecutive_ranks : int
        Where parameters are counted, such a size for each rank up to this one; larger ranks are
        spaced evenly in their logarithm.

    Examples
    --------
    >>> from lsrdecomp.compression import Search
    >>> Search(effort=SearchEffort()).effort == SearchEffort()          # the default
    True
    """

    grid: ShapeGrid = ShapeGrid()
    screening: Screening = Screening()
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
    width_margin: float = 1.1
    max_code_sizes: int = 24
    min_code_sizes: int = 288
    consecutive_ranks: int = 16


DEFAULT_EFFORT = SearchEffort()


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """Limits of memory and workers. Entries are numbers of eight bytes.

    Attributes
    ----------
    pair_entries : int
        Maximum entries of LoRA pairs that are solved together, and of those that are kept in
        memory: 8 MiB. One layer may be larger.
    norm_entries : int
        The same for the weights of their norms.
    leading_entries : int
        The same for the reduced weights of their norms (`Layer.leading`), which every step of a
        solve reads: about as much as a processor's cache holds.
    min_shrinkage : int
        Reduced weights are kept in the `SpillCache` if they are this many times smaller than the
        norm's; else they are computed again when needed.
    spill_bytes : int
        Bytes that a `SpillCache` holds in memory before it moves to disk.
    tasks_in_flight : int
        Maximum tasks per worker that are read but whose results are not taken yet, so that not all
        layers are in memory at once. None of their results is in the journal yet: after a kill they
        are solved again.
    worker_timeout : int
        Seconds after which a worker without work ends.

    Examples
    --------
    >>> ResourceLimits(spill_bytes=2**20).spill_bytes                  # for `Resources(limits=…)`
    1048576
    """

    pair_entries: int = 2**20
    norm_entries: int = 2**23
    leading_entries: int = 2**19
    min_shrinkage: int = 2
    spill_bytes: int = 8 * 2**20
    tasks_in_flight: int = 4
    worker_timeout: int = 60


DEFAULT_LIMITS = ResourceLimits()

LIMITS_BESIDE_A_BASE = ResourceLimits(norm_entries=2**24)
"""A base takes more memory than the norms of all layers of a small one, 128 MiB, which the search
for a size reads again and again."""


@dataclass(frozen=True, slots=True)
class FileFilling:
    """Search for the file that fills a number of bytes.

    Attributes
    ----------
    max_files : int
        Maximum files that are written and measured.
    min_fill : float
        Stop at a file that fills this share of the bytes.
    """

    max_files: int = 8
    min_fill: float = 0.99


DEFAULT_FILLING = FileFilling()
