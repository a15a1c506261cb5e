"""What comes after a decomposition: exact in closed form where one exists, else by iteration.

Solve
    `solve`    A x = b: by factors, common bases, generalised Schur forms, or CG, MINRES, GMRES
    `logdet`, `slogdet`, `eigenvalues`, `expm_multiply`: of one term, Kronecker sums, commuting
    terms, two terms

One term
    `inv`, `pinv`, `det`, `eigh`, `svd`, `cholesky`, `sqrtm`

Preconditioners
    `nearest_kronecker`               the nearest single product, positive definite if the matrix is
    `nearest_kronecker_of_samples`    of Σ (a aᵀ) ⊗ (g gᵀ), which is never formed
    `approximate_inverse`             an inverse of few terms that makes ‖I − A X‖ small

Structures
    `kronecker_sum`, `blur`, `covariance_on_grid`

Gaussian processes on grids
    `log_marginal_likelihood`, with its gradient; `to_gpytorch` for an operator of GPyTorch

Records are `LinearSolution`, `ApproximateInverse`, `GridLikelihood`, `Eigen`, `Svd`.
`lsrdecomp.recompress` finds fewer terms for a sum or product that has too many.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
