"""A separated matrix as a lazy matrix of the package ``linear_operator``, which GPyTorch is on."""

from __future__ import annotations

from typing import Any

import array_api_compat

from lsrdecomp.arrays import Array, is_complex, to_numpy
from lsrdecomp.errors import LsrError, MatrixError, ShapeError
from lsrdecomp.kronecker.separated import SeparatedMatrix
from lsrdecomp.operators.host import check_separated
from lsrdecomp.operators.single_term import positive_factors


def to_gpytorch(matrix: SeparatedMatrix) -> Any:
    """Return a covariance of one or two terms as an operator of GPyTorch's ``linear_operator``.

    Of one term a ``KroneckerProductLinearOperator``, of two a ``SumKroneckerLinearOperator``, with
    torch tensors. It solves through the roots of the second product, so the term with positive
    definite factors, such as noise, is put there. Gradients reach the factors of torch.

    Parameters
    ----------
    matrix : SeparatedMatrix, shape (n, n)
        Symmetric positive definite factors in one term, semidefinite ones in the other; the signs
        of a term may stand anywhere in it.

    Returns
    -------
    linear_operator.operators.LinearOperator, shape (n, n)

    Raises
    ------
    ShapeError
        For more than two terms, or none: it holds two products; factors that are not square.
    MatrixError
        For complex factors, factors that are not symmetric positive semidefinite, or where no term
        is definite: its solutions would be wrong without a word.
    LsrError
        Where ``linear_operator`` is not installed.
    """
    if check_separated(matrix).separation_rank not in (1, 2):
        raise ShapeError(
            "SumKroneckerLinearOperator holds a sum of two Kronecker products, this matrix has "
            f"{matrix.separation_rank} terms: lsrdecomp.recompress(A, rank=2) finds the nearest two"
        )
    if is_complex(matrix.factors[0]):
        raise MatrixError("linear_operator computes with real numbers, and the factors are complex")
    try:
        from linear_operator import operators
    except ImportError as error:
        raise LsrError(
            f"to_gpytorch needs {error.name}: type pip install linear_operator"
        ) from error

    single_terms = []
    for k in range(matrix.separation_rank):
        factors = tuple(stack[k : k + 1, :, :] for stack in matrix.factors)
        single_terms.append(SeparatedMatrix(matrix.weights[k : k + 1], factors))
    definite = _first_definite(single_terms)
    products = []
    for term in [*(t for t in single_terms if t is not definite), definite]:
        what = "an operator of GPyTorch"
        first, *others = positive_factors(term, what, strictly=term is definite)
        tensors = [_as_tensor(factor) for factor in (first * term.weights[0], *others)]
        products.append(operators.KroneckerProductLinearOperator(*tensors))
    if len(products) == 1:
        return products[0]
    return operators.SumKroneckerLinearOperator(*products)


def _first_definite(terms: list[SeparatedMatrix]) -> SeparatedMatrix:
    """Return the first term from the end whose factors are definite.

    Raises `MatrixError` of the last one where there is none.
    """
    failures = []
    for term in reversed(terms):
        try:
            positive_factors(term, "the second product of an operator of GPyTorch", strictly=True)
        except MatrixError as error:
            failures.append(error)
        else:
            return term
    raise failures[0]


def _as_tensor(factor: Array) -> Any:
    """Return a factor as a torch tensor; one of torch keeps its graph."""
    import torch

    if array_api_compat.is_torch_array(factor):
        return factor
    return torch.tensor(to_numpy(factor))
