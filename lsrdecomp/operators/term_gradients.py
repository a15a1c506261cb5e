"""Gradients through sums: of solutions, log-determinants and likelihoods, for torch's tensors.

Values come from NumPy; their derivatives have closed forms, which torch gets here. They are
followed once: a second derivative is refused, for the closed forms hold what came from NumPy fixed.
"""

from __future__ import annotations

from functools import cache, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from lsrdecomp.arrays import Array, like, namespace, to_numpy
from lsrdecomp.errors import MatrixError
from lsrdecomp.kronecker.rearrange import khatri_rao
from lsrdecomp.kronecker.separated import SeparatedMatrix

if TYPE_CHECKING:
    from collections.abc import Callable

    from lsrdecomp.operators.diagonal import Diagonalized
    from lsrdecomp.operators.triangular import Triangularized


def requires_gradient(*values: Any) -> bool:
    """Return whether torch follows the gradient of a tensor, or of the terms of a matrix."""
    for value in values:
        arrays = (value,)
        if isinstance(value, SeparatedMatrix):
            arrays = (value.weights, *value.factors)
        if any(getattr(array, "requires_grad", False) for array in arrays):
            return True
    return False


def without_graph(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """Return the same terms as tensors that require no gradient."""
    factors = tuple(factor.detach() for factor in matrix.factors)
    return SeparatedMatrix(matrix.weights.detach(), factors)


def with_derivative(
    value: Array, expression: Array, pull_back: Callable[[Array], Array] | None = None
) -> Array:
    """Return a constant, with the derivative of an expression.

    Parameters
    ----------
    value : tensor
        The result.
    expression : tensor
        Of tensors that are `followed_once`; only its derivative is used.
    pull_back : callable (gradient) -> gradient, optional
        Adjoint of a linear map from the expression to the value; the identity if absent.
    """
    change = expression - expression.detach()  # zero, but for its derivative
    if pull_back is not None:
        change = _functions().linear_map.apply(change, pull_back)
    return value + change


def followed_once(tensor: Array) -> Array:
    """Return a tensor whose gradient is passed on, and cannot be differentiated again."""
    return _functions().followed_once.apply(tensor)


def terms_followed_once(matrix: SeparatedMatrix) -> SeparatedMatrix:
    """Return the same terms, of tensors that are `followed_once`."""
    factors = tuple(followed_once(factor) for factor in matrix.factors)
    return SeparatedMatrix(followed_once(matrix.weights), factors)


class _Functions(NamedTuple):
    """Functions of torch, which is imported when they are needed."""

    linear_map: Any
    followed_once: Any


@cache
def _functions() -> _Functions:
    """Return functions that torch differentiates as they say."""
    from torch import zeros_like
    from torch.autograd import Function

    class LinearMap(Function):
        """The image of zero under a linear map that is known by its adjoint."""

        @staticmethod
        def forward(ctx: Any, change: Array, pull_back: Callable[[Array], Array]) -> Array:
            ctx.pull_back = pull_back
            return zeros_like(change)

        @staticmethod
        def backward(ctx: Any, gradient: Array) -> tuple[Array, None]:
            return ctx.pull_back(gradient), None

    class FollowedOnce(Function):
        """The identity; its gradient depends on the tensor by `NotFollowed`."""

        @staticmethod
        def forward(ctx: Any, tensor: Array) -> Array:
            ctx.save_for_backward(tensor)
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, gradient: Array) -> Array:
            (tensor,) = ctx.saved_tensors
            return NotFollowed.apply(gradient, tensor)  # type: ignore[no-untyped-call]

    class NotFollowed(Function):
        """A gradient as it is, which refuses to be differentiated."""

        @staticmethod
        def forward(ctx: Any, gradient: Array, tensor: Array) -> Array:  # noqa: ARG004
            return gradient.view_as(gradient)

        @staticmethod
        def backward(ctx: Any, gradient: Array) -> Array:  # noqa: ARG004
            raise MatrixError(
                "second derivatives are not followed through sums of Kronecker products; "
                "form the matrix by to_matrix()"
            )

    return _Functions(LinearMap, FollowedOnce)


def solution_with_gradient(
    matrix: SeparatedMatrix,
    b: Array,
    x: Array,
    solve_adjoint: Callable[[np.ndarray], np.ndarray],
) -> Array:
    """Return a solution x of A x = b with its derivative, dx = A⁻¹(db − dA x).

    Parameters
    ----------
    matrix : SeparatedMatrix
    b : tensor, shape (n,) or (n, k)
    x : tensor, like b
        Without a gradient.
    solve_adjoint : callable (y) -> A⁻ᴴ y
        Of NumPy arrays.
    """

    def pull_back(gradient: Array) -> Array:
        return like(solve_adjoint(to_numpy(gradient)), gradient)

    residual = followed_once(b) - terms_followed_once(matrix) @ x
    return with_derivative(x, residual, pull_back)


def log_det_with_gradient(
    matrix: SeparatedMatrix, log_det: float, form: Diagonalized | Triangularized
) -> Array:
    """Return log|det A| with its derivative, Re tr(A⁻¹ dA).

    Parameters
    ----------
    matrix : SeparatedMatrix
    log_det : float
        The value.
    form : Diagonalized or Triangularized
        Of the matrix.
    """
    matrix = terms_followed_once(matrix)
    if hasattr(form, "vectors"):
        expression = _trace_with_inverse(matrix, form)
    else:
        expression = _log_det_by_factors(matrix, form)
    xp = namespace(matrix.weights)
    if xp.isdtype(expression.dtype, "complex floating"):
        expression = xp.real(expression)
    return with_derivative(like(np.asarray(log_det), expression), expression)


def _trace_with_inverse(matrix: SeparatedMatrix, form: Any) -> Array:
    """Return tr(A₀⁻¹ A) for the inverse A₀⁻¹ = V diag(1/v) Vᴴ as it is: Σ_k λ_k Σ_n Π_i d_k⁽ⁱ⁾ / v.

    With d_k⁽ⁱ⁾ the diagonal of V_iᴴ M_k⁽ⁱ⁾ V_i.
    """
    xp = namespace(*matrix.factors)
    products = xp.astype(matrix.weights, matrix.dtype)[:, None]
    for factor, vectors in zip(matrix.factors, form.vectors, strict=True):
        v = like(vectors, factor)
        diagonals = xp.sum(xp.conj(v) * (factor @ v), axis=1)
        pairs = products[:, :, None] * diagonals[:, None, :]
        products = xp.reshape(pairs, (pairs.shape[0], -1))
    return xp.sum(products * like(1.0 / form.values, products))


def _log_det_by_factors(matrix: SeparatedMatrix, form: Any) -> Array:
    """Return an expression with the derivative of log|det A|, a sum over the factors.

    In generalised Schur form all others than factor i are triangles, with diagonals β: then
    det A = Π_j det(Σ_k λ_k β_kj M_k⁽ⁱ⁾), whatever M_k⁽ⁱ⁾ is.
    """
    import torch

    diagonals = [np.diagonal(stack, axis1=1, axis2=2) for stack in form.triangles]
    weights = matrix.weights.to(torch.complex128)
    expression: Any = 0.0
    for i, factor in enumerate(matrix.factors):
        others = [d.T for j, d in enumerate(diagonals) if j != i]
        beta = reduce(khatri_rao, others, np.ones((1, len(weights)))).T
        # λ belongs to one of the factors, or its derivative would be counted several times.
        scale = weights if i == 0 else weights.detach()
        coefficients = scale[:, None] * torch.as_tensor(beta, device=factor.device)
        pencils = torch.einsum("kj,kmn->jmn", coefficients, factor.to(torch.complex128))
        expression = expression + torch.linalg.slogdet(pencils)[1].sum()
    return expression
