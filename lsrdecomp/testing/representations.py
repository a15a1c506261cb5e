"""What a rearrangement and a separated representation must satisfy, one function each: pass yours and a case.

Conventions: a shape is a `KroneckerShape`; ``rearrange(matrix, shape)`` returns (m_1·n_1, …, m_d·n_d); a representation
is ``(weights, factors)`` with weights (s,) and one stack of factors (s, m_i, n_i) per position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

import numpy as np

from lsrdecomp.arrays import Array, like, norm, to_numpy
from lsrdecomp.kronecker.rearrange import inverse_rearrange
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.testing.agreement import IdentityError, require_agreement

Rearrange = Callable[[Array, KroneckerShape], Array]
Decompose = Callable[[Array, KroneckerShape, int], tuple[Array, Sequence[Array]]]


def isometry(rearrange: Rearrange, matrix: Array, shape: KroneckerShape) -> None:
    """R(M) holds the entries of M in another order, each once: every norm of the entries is kept."""
    tensor = to_numpy(rearrange(matrix, shape))
    if tensor.shape != shape.sizes:
        raise IdentityError("isometry", f"R(M) has shape {tensor.shape}, expected {shape.sizes} for {shape}")
    require_agreement(
        f"isometry, R(M) has the entries of M, {shape}",
        np.sort(tensor, axis=None),
        np.sort(to_numpy(matrix), axis=None),
        bound=0.0,
        inputs=(matrix,),
    )


def outer_product(rearrange: Rearrange, factors: Sequence[Array], columns: bool = False) -> None:
    """R(A ⊗ B) = vec(A) vec(B)ᵀ: a Kronecker product becomes rank one; so for any number of factors.

    vec reads row by row, or column by column with ``columns``.
    """
    hosts = [to_numpy(f) for f in factors]
    shape = KroneckerShape(tuple((f.shape[0], f.shape[1]) for f in hosts))
    vectors = [(f.T if columns else f).reshape(-1) for f in hosts]
    matrix = reduce(np.kron, hosts)
    require_agreement(
        f"outer product, R(A ⊗ B) = vec(A) vec(B)ᵀ, {shape}",
        rearrange(like(matrix, factors[0]), shape),
        reduce(np.multiply.outer, vectors),
        bound=math.prod(norm(f) for f in hosts),
        inputs=tuple(factors),
    )


def rearranged_blocks(rearrange: Rearrange, matrix: Array, shape: KroneckerShape, columns: bool = False) -> None:
    """Row (i, j) of R(M) is the block (i, j) of M read as a vector; for two factors."""
    (m, n), (p, q) = shape.factors
    entries = to_numpy(matrix)
    places = [(i, j) for j in range(n) for i in range(m)] if columns else [(i, j) for i in range(m) for j in range(n)]
    blocks = [entries[i * p : (i + 1) * p, j * q : (j + 1) * q] for i, j in places]
    require_agreement(
        f"blocks, row (i, j) of R(M) is block (i, j) of M, {shape}",
        rearrange(matrix, shape),
        np.stack([(block.T if columns else block).reshape(-1) for block in blocks]),
        bound=0.0,
        inputs=(matrix,),
    )


def inverse_of_rearrange(rearrange: Rearrange, inverse: Rearrange, matrix: Array, shape: KroneckerShape) -> None:
    """Rearranging and back changes no bit."""
    back = inverse(rearrange(matrix, shape), shape)
    require_agreement(f"there and back, {shape}", back, matrix, bound=0.0, inputs=(matrix,))


def sum_of_terms(form: Callable[[Array, Sequence[Array]], Array], weights: Array, factors: Sequence[Array]) -> None:
    """``form(weights, factors)`` is Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾ with every term once."""
    lambdas, stacks = to_numpy(weights), [to_numpy(f) for f in factors]
    terms = [lam * reduce(np.kron, [f[k] for f in stacks]) for k, lam in enumerate(lambdas)]
    require_agreement(
        f"sum of {len(terms)} terms",
        form(weights, factors),
        sum(terms[1:], terms[0]),
        bound=sum(norm(term) for term in terms),
        size=len(terms),
        inputs=(weights, *factors),
    )


def formed_terms(weights: Array, factors: Sequence[Array]) -> np.ndarray:
    """Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾ by ``numpy.kron``, in double precision."""
    lambdas = to_numpy(weights)
    stacks = [(q := to_numpy(f)).astype(np.result_type(q.dtype, np.float64)) for f in factors]
    total = sum(lam * reduce(np.kron, [f[k] for f in stacks]) for k, lam in enumerate(lambdas))
    return np.asarray(total)


def unit_terms(weights: Array, factors: Sequence[Array]) -> None:
    """λ ≥ 0, descending, and every factor of every term has Frobenius norm one, so that γ means something."""
    lambdas = to_numpy(weights)
    if np.iscomplexobj(lambdas) or np.any(lambdas < 0.0) or np.any(np.diff(lambdas) > 0.0):
        raise IdentityError("weights", f"λ must be real, not negative and descending, got {lambdas}")
    for i, stack in enumerate(factors, 1):
        terms = to_numpy(stack)
        lengths = np.asarray([norm(term) for term in terms])
        require_agreement(
            f"unit factors, ‖M_k⁽{i}⁾‖_F = 1",
            lengths,
            np.ones(len(lambdas)),
            bound=math.sqrt(max(len(terms), 1)),
            size=math.prod(terms.shape[1:]),
            inputs=(stack,),
        )


def best_terms(decompose: Decompose, matrix: Array, shape: KroneckerShape, rank: int) -> None:
    """The residual of the best ``rank`` terms has the norm of the tail of the spectrum of R(M) (Eckart and Young).

    For two factors. With all terms the matrix comes back; a wrong conjugate, a transposed factor, a lost term and a
    weight counted twice all show here.
    """
    (m, n), (p, q) = shape.factors
    entries = to_numpy(matrix)
    sigma = np.linalg.svd(entries.reshape(m, p, n, q).transpose(0, 2, 1, 3).reshape(m * n, p * q), compute_uv=False)
    weights, factors = decompose(matrix, shape, rank)
    unit_terms(weights, factors)
    lambdas, (left, right) = to_numpy(weights), (to_numpy(f) for f in factors)
    if len(lambdas) > rank:
        raise IdentityError("rank", f"{len(lambdas)} terms for rank {rank}")
    spread = (left.reshape(len(left), m * n).T * lambdas) @ right.reshape(len(right), p * q)
    residual = entries - to_numpy(inverse_rearrange(spread, shape))
    require_agreement(
        f"best {rank} terms, ‖M − M̂‖ is the tail of the spectrum, {shape}",
        norm(residual),
        math.hypot(*sigma[rank:]),
        bound=norm(entries),
        size=entries.size,
        inputs=(matrix,),
    )
