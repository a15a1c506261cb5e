"""Solvers: frozen values to pass as ``solver=``, which turn a target into a separated matrix.

Two factors
    `SVD`       singular value decomposition of the rearrangement, dense; the best answer
    `Krylov`    products alone, for few terms: one matrix, a batch, or an implicit matrix
    `Greedy`    terms of different shapes

Any number of factors
    `ALS`              regularized alternating least squares, then Levenberg–Marquardt
    `WeightedALS`      least squares over known or weighted entries, and non-negative factors
    `TensorLyCP`       TensorLy's decompositions: sparse, smooth and monotone factors

Pairs (the two sides of a LoRA layer)
    `JointALS`         least squares of the product, in a weighted norm if there are statistics
    `FactorwiseSVD`    each side by itself

`Solver` and `PairSolver` are the contract, `Solution`, `PairSolution`, `Decomposition`, `Sweep`,
`Event` and `Status` the records; `solvers.base` explains each field.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
