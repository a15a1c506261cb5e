"""Options of joint least squares that seldom need a change: their meaning, unit, and source."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """The solve for one block of factors while all others are fixed."""

    # Proximal term, in units of size × unit roundoff × mean diagonal of the normal matrix: harmless
    # to convergence, and the step stays a descent step however singular that matrix is. By hand.
    damping: float = 64.0
    # Unknowns up to which a block's normal matrix in a weighted norm is formed and solved; from
    # there on conjugate gradient steps are cheaper. By hand.
    max_formed_unknowns: int = 80


@dataclass(frozen=True, slots=True)
class PartialTraceOptions:
    """The small matrices that stand for a weight in preconditioners and starts."""

    # Size above which a partial trace is taken as isotropic, since its root would cost more than it
    # saves. By hand.
    max_size: int = 1024
    # Damping of a partial trace, in units of its mean eigenvalue, so that it has an inverse. By
    # hand.
    damping: float = 1e-6
    # The same for the inverses that precondition a block's solve. By hand.
    inverse_damping: float = 1e-8


@dataclass(frozen=True, slots=True)
class LeadingTripleOptions:
    """The choice between the ways to the leading singular triples that a start is made of.

    All values are by hand; ``benchmarks/solvers/two_factors.py --only leading`` times the ways.
    """

    # Entries of a matrix up to which its SVD is taken as it is; above, an SVD needs too much memory
    max_svd_entries: int = 2**17
    # Columns up to which a large matrix goes through R of its QR factorization, above that through
    # a Krylov space
    max_qr_columns: int = 512
    # A Krylov space is for at most one term in so many columns
    krylov_columns_per_term: int = 8
    # Allowed error of a Krylov space's triples over the optimum, relative: they are starts
    krylov_excess: float = 1e-3
    # Subspace iteration is for at most one vector in so many columns
    iteration_columns_per_vector: int = 4
    # Vectors of its subspace beyond the triples requested: the usual 5 to 10 of range finders
    oversampling: int = 8
    # Passes of subspace iteration, each two products with the matrix
    passes: int = 3


@dataclass(frozen=True, slots=True)
class InnerProductAccuracy:
    """The range in which an error from inner products, ‖M‖² − 2⟨M, M̂⟩ + ‖M̂‖², can be trusted.

    In double precision the three summands carry sixteen digits, of which cancellation takes twice
    as many as the relative error has zeros.
    """

    # Relative error below which inner products tell nothing: about the root of the unit roundoff
    resolution: float = 1e-7
    # Relative error above which they give it to twelve digits, unless large terms cancel
    exact_error: float = 0.03
    # ‖B̂‖‖Â‖/‖M‖ above which terms do cancel: more than seven of the sixteen digits are lost
    max_cancellation: float = 3e3


@dataclass(frozen=True, slots=True)
class ExtrapolationOptions:
    """The line search along a sweep [1]_, set by hand.

    .. [1] R. Bro, Multi-way analysis in the food industry, 1998, section 4.4, line search in
           alternating least squares.
    """

    # Sweeps between extrapolated steps, each of which costs a third of a sweep
    interval: int = 2
    # The step's length is multiplied by this after a success, divided by ``shrinkage`` after a
    # failure, and never shorter than the sweep itself
    growth: float = 2.0
    shrinkage: float = 8.0


@dataclass(frozen=True, slots=True)
class PairOptions:
    """All options of joint least squares below the fields of `JointALS`."""

    block: BlockOptions = field(default_factory=BlockOptions)
    traces: PartialTraceOptions = field(default_factory=PartialTraceOptions)
    start: LeadingTripleOptions = field(default_factory=LeadingTripleOptions)
    accuracy: InnerProductAccuracy = field(default_factory=InnerProductAccuracy)
    extrapolation: ExtrapolationOptions = field(default_factory=ExtrapolationOptions)
