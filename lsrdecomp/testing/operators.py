"""check_operator: the identities that a class of unformed sums of Kronecker products must satisfy, method by method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lsrdecomp.arrays import Array, Namespace, norm, to_numpy
from lsrdecomp.errors import LsrError
from lsrdecomp.testing.agreement import require_agreement
from lsrdecomp.testing.cases import Cases
from lsrdecomp.testing.representations import formed_terms
from lsrdecomp.testing.runner import Identity, guarded, try_identities

Build = Callable[[Array, Sequence[Array]], Any]
Method = Callable[..., Any]

METHODS: Mapping[str, tuple[str, ...]] = {
    "matvec": ("__matmul__", "matvec", "matmul", "dot"),
    "matrix": ("to_matrix", "to_dense", "toarray", "todense"),
    "transpose": ("mT", "T"),
    "adjoint": ("rmatvec", "mH", "H"),
    "trace": ("trace",),
    "inner": ("inner",),
    "norm": ("norm",),
    "solve": ("solve",),
    "logdet": ("logdet", "slogdet"),
}
"""Where `check_operator` looks for each method, in this order."""

SQUARE = ("trace", "solve", "logdet")
"""Methods that are tried on square matrices; the last two on one well conditioned term."""


def check_operator(
    build: Build,
    *,
    methods: Sequence[str] | Mapping[str, Method] | None = None,
    order: int | None = None,
    xp: Namespace = np,
    complex_values: bool = True,
    dtype: str = "float64",
    tolerance: float | None = None,
    max_examples: int = 25,
) -> None:
    """Try your class of operators on drawn sums of Kronecker products.

    Parameters
    ----------
    build : callable (weights, factors) -> operator
        Makes your object for Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾ from stacks of factors (s, m_i, n_i). One term alone is given
        to ``solve`` and ``logdet``.
    methods : names, or a mapping from names to callables, optional
        Which of ``matvec matrix transpose adjoint trace inner norm solve logdet`` to try; absent, those that the
        object has under a usual name. A callable takes the operator and its argument:
        ``{"solve": lambda A, b: my_solve(A, b)}``.
    order, xp, complex_values, dtype, tolerance, max_examples
        As in `check_kron`; ``order`` None draws one to four factors.

    Raises
    ------
    IdentityError
        Naming the method that tells most, with the smallest case that breaks it; also where your code raises.
    LsrError
        If a method that is asked for is not there.

    Examples
    --------
    >>> from lsrdecomp import SeparatedMatrix
    >>> check_operator(lambda weights, factors: SeparatedMatrix.from_factors(factors, weights), max_examples=5)
    """
    __tracebackhide__ = True
    makes = guarded(build)
    sample = build(xp.asarray(np.ones(1)), [xp.asarray(np.ones((1, 1, 1)))] * (order or 2))
    chosen = _chosen(sample, methods)

    def terms(d: Cases, name: str) -> tuple[Any, Any, Any]:
        shape = d.shape(order, square=name in SQUARE)
        weights, factors = d.invertible_terms(shape) if name in ("solve", "logdet") else d.terms(shape)
        return makes(weights, factors), formed_terms(weights, factors), (weights, factors)

    def one(name: str) -> Identity:
        method = guarded(chosen[name])
        return name, lambda d: IDENTITIES[name](d, method, lambda: terms(d, name))

    try_identities(
        [one(name) for name in METHODS if name in chosen],
        xp=xp,
        complex_values=complex_values,
        max_examples=max_examples,
        dtype=dtype,
        tolerance=tolerance,
    )


Draw = Callable[[], tuple[Any, Any, Any]]


def _matvec(d: Cases, method: Method, draw: Draw) -> None:
    operator, dense, (weights, factors) = draw()
    x = d.matrix((dense.shape[1], 1))[:, 0]
    _agree("matvec, A x", method(operator, x), dense @ to_numpy(x), dense, x, (*factors, x), weights)


def _matrix(d: Cases, method: Method, draw: Draw) -> None:
    operator, dense, (weights, factors) = draw()
    _agree("matrix, A formed", method(operator), dense, dense, None, factors, weights)


def _transpose(d: Cases, method: Method, draw: Draw) -> None:
    operator, dense, (weights, factors) = draw()
    y = d.matrix((dense.shape[0], 1))[:, 0]
    _agree(
        "transpose, Aᵀ y without conjugation",
        method(operator, y),
        dense.T @ to_numpy(y),
        dense,
        y,
        (*factors, y),
        weights,
    )


def _adjoint(d: Cases, method: Method, draw: Draw) -> None:
    operator, dense, (weights, factors) = draw()
    y = d.matrix((dense.shape[0], 1))[:, 0]
    expected = dense.conj().T @ to_numpy(y)
    _agree("adjoint, ⟨y, A x⟩ = ⟨Aᴴ y, x⟩", method(operator, y), expected, dense, y, (*factors, y), weights)


def _trace(d: Cases, method: Method, draw: Draw) -> None:
    operator, dense, (weights, factors) = draw()
    _agree("trace, the sum of the diagonal", method(operator), np.trace(dense), dense, None, factors, weights)


def _inner(d: Cases, method: Method, draw: Draw) -> None:
    operator, dense, (weights, factors) = draw()
    _agree("inner, ⟨A, A⟩ = ‖A‖²", method(operator, operator), np.vdot(dense, dense), dense, dense, factors, weights)


def _norm(d: Cases, method: Method, draw: Draw) -> None:
    operator, dense, (weights, factors) = draw()
    _agree("norm, Frobenius", method(operator), np.linalg.norm(dense), dense, None, factors, weights)


def _solve(d: Cases, method: Method, draw: Draw) -> None:
    operator, dense, (weights, factors) = draw()
    b = d.matrix((dense.shape[0], 1))[:, 0]
    inverse = np.linalg.inv(dense)
    scale = np.linalg.norm(inverse) * np.linalg.norm(dense) * inverse
    _agree("solve, A⁻¹ b", method(operator, b), inverse @ to_numpy(b), scale, b, (*factors, b), weights)


def _logdet(d: Cases, method: Method, draw: Draw) -> None:
    operator, dense, (_, factors) = draw()
    found = method(operator)
    found = found[1] if isinstance(found, tuple) else found
    require_agreement(
        "logdet, log|det A|",
        to_numpy(np.asarray(to_numpy(found)).real if hasattr(found, "shape") else np.asarray(found).real),
        np.linalg.slogdet(dense)[1],
        bound=float(np.linalg.cond(dense)),
        size=dense.size,
        inputs=tuple(factors),
    )


IDENTITIES: Mapping[str, Callable[[Cases, Method, Draw], None]] = {
    "matvec": _matvec,
    "matrix": _matrix,
    "transpose": _transpose,
    "adjoint": _adjoint,
    "trace": _trace,
    "inner": _inner,
    "norm": _norm,
    "solve": _solve,
    "logdet": _logdet,
}


def _agree(
    identity: str, found: Any, expected: Any, dense: Any, other: Any, inputs: Sequence[Any], weights: Any
) -> None:
    """Equal up to rounding of the terms, which may cancel in their sum."""
    factors = [f for f in inputs if getattr(f, "ndim", 0) == 3]
    size = sum(abs(complex(w)) * _product(norm(f[k, :, :]) for f in factors) for k, w in enumerate(to_numpy(weights)))
    bound = max(float(np.linalg.norm(dense)), size)
    if other is not None:
        bound *= max(float(np.linalg.norm(to_numpy(other))), bound if other is dense else 0.0)
    require_agreement(identity, found, expected, bound=bound, size=4 * max(dense.shape), inputs=tuple(inputs))


def _product(values: Any) -> float:
    total = 1.0
    for value in values:
        total *= value
    return total


def _chosen(sample: Any, methods: Sequence[str] | Mapping[str, Method] | None) -> dict[str, Method]:
    given: dict[str, Method] = dict(methods) if isinstance(methods, Mapping) else {}
    names = list(METHODS) if methods is None else list(methods)
    for name in names:
        if name not in METHODS:
            raise LsrError(f"no method is called {name!r}: {', '.join(METHODS)} are tried")
        if name in given:
            continue
        attribute = next((a for a in METHODS[name] if hasattr(sample, a)), None)
        if attribute is not None:
            given[name] = _caller(attribute)
        elif methods is not None:
            raise LsrError(
                f"{type(sample).__name__} has none of {', '.join(METHODS[name])}; pass methods={{{name!r}: callable}}"
            )
    if not given:
        raise LsrError(f"{type(sample).__name__} has no method under a usual name; pass methods={{'matvec': callable}}")
    return given


def _caller(attribute: str) -> Method:
    """How a method of a usual name is called."""
    if attribute in ("mT", "T", "mH", "H"):
        return lambda operator, y: getattr(operator, attribute) @ y
    if attribute == "__matmul__":
        return lambda operator, x: operator @ x

    def call(operator: Any, *arguments: Any) -> Any:
        found = getattr(operator, attribute)
        return found(*arguments) if callable(found) else found

    return call
