"""Options of `ALS` that seldom need a change: their meaning, unit, and source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreOptions:
    """The compression of a tensor to a small core, of norm one, before terms are fitted to it.

    All values were set by hand.
    """

    # With a tolerance the core is first made for this many terms, and for twice as many each time
    # that it loses too much
    initial_rank: int = 8
    # Share of the allowed error that a core may lose; a larger loss means that more terms will be
    # needed
    loss_share: float = 0.5
    # A core that lost less than this share of the error is not improved by sweeps over the whole
    # tensor
    negligible_share: float = 1e-3
    # Unit roundoffs of the tensor's type below which a core's loss cannot be told from rounding
    rounding_margin: float = 16.0
    # Unit roundoffs of the tensor's type below which a tolerance is not one for terms of that type:
    # they are computed in double precision
    double_margin: float = 64.0
    # Columns of the random sketch beyond the rank: the usual 5 to 10 of randomised range finders
    oversampling: int = 8
    # A core of 2s directions that loses more of the norm than this holds little of what s terms
    # could: the tensor is noise, swept as a whole from several starts. On noise in three factors
    # that reached 0.9468 where the core led to 0.948 and six starts of peers to 0.947.
    flat_loss: float = 0.5
    # Entries of a tensor up to which that is done
    max_flat_entries: int = 2**20
    # Excess of a symmetric answer over one that is not, up to which it is taken for a symmetric
    # matrix: what two factors may exceed their optimum by
    max_symmetric_excess: float = 1e-3
    # Entries of a core spanned by given terms up to which it is formed: 1 GiB in double precision
    max_spanned_entries: int = 2**27


@dataclass(frozen=True, slots=True)
class TermGrowthOptions:
    """The growth of a sum, term by term from the residual of the terms before.

    All values were set by hand on the problems of ``tests/problems.py``.
    """

    # Rank-one fits to the residual from which a new term is chosen: one from the leading singular
    # vectors of its unfoldings, which are mostly the best start, the others from random vectors
    starts_per_term: int = 3
    # Alternating steps of each of these fits; the term is moved with all others afterwards
    rank_one_steps: int = 12
    # They end where none of them raises the weight of its term by more than this share; weights
    # that differ by less are alike
    rank_one_rtol: float = 2e-3
    # While terms are being added γ is held so low that the penalty is about this share of the error
    guide_share: float = 0.1
    # From that guiding penalty to the requested one α falls by this factor at a time
    path_factor: float = 1e-2
    # A penalty below this share of the squared misfit no longer holds the terms up: α falls to the
    # requested one at once
    negligible_penalty: float = 1e-3
    # Newton steps at most at the requested α, where a path that ends early left most of the way
    max_final_steps: int = 130
    # Relative difference of the objectives of two fits below which no further one is tried
    agreement: float = 1e-6
    # A misfit within this factor of the goal is worth refining before another term is added
    near_goal_factor: float = 2.5
    # So is one that fell below this share of the misfit before: the true rank may be reached, and
    # the guiding penalty alone may hold it up
    large_gain_share: float = 0.3
    # Unknowns up to which a Newton step costs about as much as a sweep: sums are refined after
    # each term, and several fits are tried
    max_cheap_unknowns: int = 800
    # Relative distance between the halves of a term that is split in two
    split_distance: float = 0.1
    # Sweeps at most of a fit that no Newton step will finish
    max_settling_sweeps: int = 100


@dataclass(frozen=True, slots=True)
class LevenbergMarquardtOptions:
    """The damped Gauss–Newton finisher of a small core."""

    # Unknowns up to which it is used: its normal matrix is dense, 54 MB at this size, and costs
    # n³/3 operations a step. By hand.
    max_unknowns: int = 2600
    # Unknowns from which the part of a step outside the span of a mode's columns is solved by
    # itself: with fewer, the small factors cost more than they save. Measured at 96 to 600.
    min_split_unknowns: int = 200
    # Damping at the first step, in units of the normal matrix's diagonal. By hand.
    initial_damping: float = 1e-4
    # Growth of the damping after a step that was refused; the growth doubles with each refusal
    # (Nielsen's rule)
    damping_growth: float = 2.0
    # Smallest factor by which a step that was accepted lowers the damping (Nielsen's rule: 1/3)
    min_damping_factor: float = 1.0 / 5.0
    # Refusals after which the search ends. By hand.
    max_refusals: int = 12
    # Steps in a row that gain little before it ends: one short step may be the damping's doing.
    # After a step of which the damping holds back less than this share, one is enough. By hand.
    patience: int = 3
    full_step_share: float = 0.1
    # Length of the finite difference along the step for its second-order part, and the largest
    # ratio of that part to the step. By hand; the GNU Scientific Library takes 0.02 and 0.75.
    difference_length: float = 0.1
    max_acceleration: float = 0.75
