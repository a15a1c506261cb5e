"""`check_operator`: what a class of unformed sums must satisfy, method by method."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Unpack

import numpy as np

from lsrdecomp.arrays import Array, norm, to_numpy
from lsrdecomp.errors import LsrError
from lsrdecomp.testing.agreement import require_agreement
from lsrdecomp.testing.cases import CheckSettings, Trial
from lsrdecomp.testing.representations import formed_terms
from lsrdecomp.testing.runner import GuardedFunction, try_identities

if TYPE_CHECKING:
    from lsrdecomp.testing.cases import Cases, Options

Build = Callable[[Array, Sequence[Array]], Any]
Method = Callable[..., Any]


@dataclass(frozen=True)
class MethodIdentity:
    """What a method must give, and where `check_operator` looks for it.

    Attributes
    ----------
    attributes : tuple of str
        Usual names of the method, the first that is there is tried.
    identity : str
        The statement, in words.
    expected : callable (matrix, *argument) -> answer
        Of the formed matrix, and of the argument where the method has one.
    argument : str or None
        ``"columns"`` is a matrix with as many rows as the operator has columns.
    matrix : str
        Which operators it is tried on; an invertible one has a single well conditioned term.
    """

    attributes: tuple[str, ...]
    identity: str
    expected: Callable[..., Any]
    argument: Literal["vector of columns", "columns", "vector of rows", "itself"] | None = None
    matrix: Literal["any", "square", "invertible"] = "any"


METHODS: Mapping[str, MethodIdentity] = {
    "matvec": MethodIdentity(
        ("__matmul__", "matvec", "matmul", "dot"), "A x", lambda A, x: A @ x, "vector of columns"
    ),
    "matmat": MethodIdentity(
        ("matmat",), "A X for a block of columns", lambda A, X: A @ X, "columns"
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
        Which of ``matvec matmat matrix transpose adjoint trace inner norm solve logdet`` to try;
        absent, the ones that the object has under a usual name. A callable takes the operator and
        its argument: ``{"solve": lambda A, b: my_solve(A, b)}``.
    order : int, optional
        Number of factors; absent, one to five.
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
    >>> def build(weights, factors):
    ...     return SeparatedMatrix.from_factors(factors, weights)
    >>> check_operator(build, max_examples=5)
    """
    __tracebackhide__ = True
    settings = CheckSettings.of(options, order)
    if settings.dtype not in ("float32", "float64", "complex64", "complex128"):
        raise LsrError(
            f"dtype: operators are tried in single and double precision, not {settings.dtype}"
        )
    xp = settings.xp
    sample_factors = [xp.asarray(np.ones((1, 1, 1)))] * (order or 2)
    sample = build(xp.asarray(np.ones(1)), sample_factors)
    guarded_build = GuardedFunction(build)
    trials: list[Trial] = []
    for name, method in _methods_to_try(sample, methods).items():
        check = partial(_check_method, name, guarded_build, GuardedFunction(method))
        trials.append(Trial(name, check))
    try_identities(trials, settings)


def _check_method(name: str, build: Build, method: Method, d: Cases) -> None:
    """Draw an operator and the argument of a method, and compare its answer with NumPy's."""
    row = METHODS[name]
    # 1. An operator, and its matrix formed by NumPy.
    if row.matrix == "invertible":
        weights, factors = d.invertible_term()
    else:
        weights, factors = d.terms(square=row.matrix == "square")
    operator = build(weights, factors)
    dense = formed_terms(weights, factors)
    # 2. The argument of the method; rounding is relative to the terms, which may cancel, and to the
    # argument.
    bound = norm(weights) * math.prod(norm(stack) for stack in factors)
    rows, columns = dense.shape
    arrays: tuple[Array, ...] = ()
    if row.argument == "vector of columns":
        arrays = (d.matrix((columns, 1))[:, 0],)
    elif row.argument == "columns":
        arrays = (d.matrix((columns, 3)),)
    elif row.argument == "vector of rows":
        arrays = (d.matrix((rows, 1))[:, 0],)
    bound *= math.prod(norm(array) for array in arrays)
    # 3. In a solution and a determinant rounding grows with the condition.
    if row.matrix == "invertible":
        bound *= float(np.linalg.cond(dense) * np.linalg.norm(np.linalg.inv(dense)) ** 2)
    # 4. The method, and NumPy's answer.
    if row.argument == "itself":
        bound *= bound
        answer = method(operator, operator)
        expected = row.expected(dense, dense)
    else:
        answer = method(operator, *arrays)
        expected = row.expected(dense, *(to_numpy(array) for array in arrays))
    if name == "logdet":
        answer = _log_of_determinant(answer)
    require_agreement(
        f"{name}, {row.identity}",
        answer,
        expected,
        bound=bound,
        size=4 * max(rows, columns),
        inputs=(*factors, *arrays),
    )


def _log_of_determinant(answer: Any) -> np.ndarray:
    """Return log|det A| of an answer.

    It may be the second of a pair, or the real part of a complex logarithm.
    """
    if isinstance(answer, tuple):
        answer = answer[1]
    if hasattr(answer, "shape"):
        answer = to_numpy(answer)
    return np.asarray(answer).real


def _methods_to_try(
    sample: Any, methods: Sequence[str] | Mapping[str, Method] | None
) -> dict[str, Method]:
    """Return the methods to try, those that tell most first.

    Those that the caller passes, and those that the object has under a usual name.
    """
    passed = methods if isinstance(methods, Mapping) else {}
    requested = METHODS if methods is None else methods
    for name in requested:
        if name not in METHODS:
            raise LsrError(f"no method is called {name!r}: {', '.join(METHODS)} are tried")
    kind = type(sample).__name__
    found: dict[str, Method] = {}
    for name, row in METHODS.items():
        if name not in requested:
            continue
        attribute = next((a for a in row.attributes if hasattr(sample, a)), None)
        if name in passed:
            found[name] = passed[name]
        elif attribute is not None:
            found[name] = _caller(attribute)
        elif methods is not None:
            usual = ", ".join(row.attributes)
            raise LsrError(f"{kind} has none of {usual}; pass methods={{{name!r}: callable}}")
    if not found:
        raise LsrError(
            f"{kind} has no method under a usual name; pass methods={{'matvec': callable}}"
        )
    return found


def _caller(attribute: str) -> Method:
    """Return a function that calls a method of a usual name."""
    if attribute in ("mT", "T", "mH", "H"):
        return lambda operator, y: getattr(operator, attribute) @ y
    if attribute == "__matmul__":
        return lambda operator, x: operator @ x

    def call(operator: Any, *arguments: Any) -> Any:
        value = getattr(operator, attribute)
        return value(*arguments) if callable(value) else value

    return call
