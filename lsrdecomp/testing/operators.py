"""check_operator: what a class of unformed sums of Kronecker products must satisfy, method by method."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from lsrdecomp.arrays import Array, norm, to_numpy
from lsrdecomp.errors import LsrError
from lsrdecomp.testing.agreement import require_agreement
from lsrdecomp.testing.representations import formed_terms
from lsrdecomp.testing.runner import guarded, try_identities

if TYPE_CHECKING:
    from lsrdecomp.testing.cases import Cases, Options, Trial

Build = Callable[[Array, Sequence[Array]], Any]
Method = Callable[..., Any]


@dataclass(frozen=True)
class MethodIdentity:
    """What a method must give, and where `check_operator` looks for it."""

    attributes: tuple[str, ...]  # in this order
    identity: str
    expected: Callable[
        ..., Any
    ]  # of the formed matrix, and of the argument where the method has one
    argument: Literal["vector of columns", "vector of rows", "itself"] | None = None
    matrix: Literal["any", "square", "invertible"] = "any"  # invertible: one well conditioned term


METHODS: Mapping[str, MethodIdentity] = {
    "matvec": MethodIdentity(
        ("__matmul__", "matvec", "matmul", "dot"), "A x", lambda A, x: A @ x, "vector of columns"
    ),
    "matrix": MethodIdentity(
        ("to_matrix", "to_dense", "toarray", "todense"), "A formed", lambda A: A
    ),
    "transpose": MethodIdentity(
        ("mT", "T"), "Aᵀ y without conjugation", lambda A, y: A.T @ y, "vector of rows"
    ),
    "adjoint": MethodIdentity(
        ("rmatvec", "mH", "H"),
        "⟨y, A x⟩ = ⟨Aᴴ y, x⟩",
        lambda A, y: A.conj().T @ y,
        "vector of rows",
    ),
    "trace": MethodIdentity(("trace",), "the sum of the diagonal", np.trace, matrix="square"),
    "inner": MethodIdentity(("inner",), "⟨A, A⟩ = ‖A‖²", np.vdot, "itself"),
    "norm": MethodIdentity(("norm",), "Frobenius", np.linalg.norm),
    "solve": MethodIdentity(("solve",), "A⁻¹ b", np.linalg.solve, "vector of rows", "invertible"),
    "logdet": MethodIdentity(
        ("logdet", "slogdet"), "log|det A|", lambda A: np.linalg.slogdet(A)[1], matrix="invertible"
    ),
}
"""The methods that are tried, those that tell most first."""


def check_operator(
    build: Build,
    *,
    methods: Sequence[str] | Mapping[str, Method] | None = None,
    order: int | None = None,
    **options: Unpack[Options],
) -> None:
    """Try your class of operators on drawn sums of Kronecker products.

    Parameters
    ----------
    build : callable (weights, factors) -> operator
        Makes your object for Σ_k λ_k M_k⁽¹⁾ ⊗ … ⊗ M_k⁽ᵈ⁾ from stacks of factors (s, m_i, n_i).
        ``solve`` and ``logdet`` are tried on one term alone.
    methods : names, or a mapping from names to callables, optional
        Which of ``matvec matrix transpose adjoint trace inner norm solve logdet`` to try; absent,
        those that the object has under a usual name. A callable takes the operator and its
        argument: ``{"solve": lambda A, b: my_solve(A, b)}``.
    order : int, optional
        Number of factors; absent, one to four.
    **options
        `Options`: array library, element type, tolerance, number of cases.

    Raises
    ------
    IdentityError
        Naming the method that tells most, with the smallest case that breaks it; also where your
        code raises.
    LsrError
        If a method that is asked for is not there.

    Examples
    --------
    >>> from lsrdecomp import SeparatedMatrix
    >>> check_operator(lambda weights, factors: SeparatedMatrix.from_factors(factors, weights), max_examples=5)
    """
    __tracebackhide__ = True
    guarded_build = guarded(build)
    xp = options.get("xp", np)
    sample = build(xp.asarray(np.ones(1)), [xp.asarray(np.ones((1, 1, 1)))] * (order or 2))
    callables = _callables(sample, methods)

    def identity(name: str) -> Trial:
        method = guarded(callables[name])
        return name, lambda d: _method_agrees(d, name, guarded_build, method)

    try_identities(
        [identity(name) for name in METHODS if name in callables], order=order, **options
    )


def _method_agrees(d: Cases, name: str, build: Build, method: Method) -> None:
    row = METHODS[name]
    # 1. An operator, and its matrix formed by NumPy.
    weights, factors = (
        d.invertible_term()
        if row.matrix == "invertible"
        else d.terms(square=row.matrix == "square")
    )
    operator, dense = build(weights, factors), formed_terms(weights, factors)
    # 2. The argument of the method; rounding is relative to the terms, which may cancel, and to the
    # argument.
    bound = norm(weights) * math.prod(map(norm, factors))
    arguments: tuple[Any, ...] = ()
    dense_arguments: tuple[Any, ...] = ()
    if row.argument == "itself":
        arguments, dense_arguments, bound = (operator,), (dense,), bound * bound
    elif row.argument is not None:
        vector = d.matrix((dense.shape[row.argument == "vector of columns"], 1))[:, 0]
        arguments, dense_arguments, bound = (vector,), (to_numpy(vector),), bound * norm(vector)
    # 3. In a solution and a determinant rounding grows with the condition.
    if row.matrix == "invertible":
        bound *= float(np.linalg.cond(dense) * np.linalg.norm(np.linalg.inv(dense)) ** 2)
    # 4. The method: log|det A| may be the second of a pair, or the real part of a complex
    # logarithm.
    answer = method(operator, *arguments)
    if name == "logdet":
        answer = answer[1] if isinstance(answer, tuple) else answer
        answer = np.asarray(to_numpy(answer) if hasattr(answer, "shape") else answer).real
    require_agreement(
        f"{name}, {row.identity}",
        answer,
        row.expected(dense, *dense_arguments),
        bound=bound,
        size=4 * max(dense.shape),
        inputs=(*factors, *(a for a in arguments if a is not operator)),
    )


def _callables(
    sample: Any, methods: Sequence[str] | Mapping[str, Method] | None
) -> dict[str, Method]:
    """The methods to try: those that the caller passes, and those that the object has under a usual name."""
    callables: dict[str, Method] = dict(methods) if isinstance(methods, Mapping) else {}
    for name in METHODS if methods is None else methods:
        if name not in METHODS:
            raise LsrError(f"no method is called {name!r}: {', '.join(METHODS)} are tried")
        if name in callables:
            continue
        usual = METHODS[name].attributes
        attribute = next((a for a in usual if hasattr(sample, a)), None)
        if attribute is not None:
            callables[name] = _caller(attribute)
        elif methods is not None:
            raise LsrError(
                f"{type(sample).__name__} has none of {', '.join(usual)}; pass methods={{{name!r}: callable}}"
            )
    if not callables:
        raise LsrError(
            f"{type(sample).__name__} has no method under a usual name; pass methods={{'matvec': callable}}"
        )
    return callables


def _caller(attribute: str) -> Method:
    """How a method of a usual name is called."""
    if attribute in ("mT", "T", "mH", "H"):
        return lambda operator, y: getattr(operator, attribute) @ y
    if attribute == "__matmul__":
        return lambda operator, x: operator @ x

    def call(operator: Any, *arguments: Any) -> Any:
        value = getattr(operator, attribute)
        return value(*arguments) if callable(value) else value

    return call
