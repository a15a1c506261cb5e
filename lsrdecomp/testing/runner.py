"""Run identities on drawn cases: the smallest case that breaks one, the telling identity first, no frames of ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lsrdecomp.arrays import Namespace
from lsrdecomp.testing.agreement import IdentityError, shown
from lsrdecomp.testing.cases import Cases

Identity = tuple[str, Callable[[Cases], None]]
"""A name, and what draws a case and checks it."""


class _Raised(Exception):  # noqa: N818 - never leaves this file
    """The code under test raised; kept apart from exceptions of ours."""

    def __init__(self, cause: Exception, inputs: tuple[Any, ...]) -> None:
        self.cause = cause
        self.inputs = inputs


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The code under test; what it raises becomes an `IdentityError` that names identity and case.

    Sparse results are formed.
    """

    def called(*inputs: Any) -> Any:
        try:
            result = function(*inputs)
            return result.toarray() if hasattr(result, "toarray") else result
        except IdentityError:
            raise
        except Exception as error:
            arrays: list[Any] = []
            for value in inputs:
                arrays += value if isinstance(value, list | tuple) else [value]
            raise _Raised(error, tuple(a for a in arrays if hasattr(a, "shape"))) from error

    return called


def try_identities(
    identities: Sequence[Identity],
    *,
    xp: Namespace,
    complex_values: bool,
    max_examples: int,
    dtype: str = "float64",
    tolerance: float | None = None,
) -> None:
    """Try each; raise for the first that fails, and say which others do.

    The list begins with what tells most: an identity further down fails as well where one above does.
    """
    __tracebackhide__ = True
    failures = []
    for name, case in identities:
        found = _first_failure(name, case, xp, complex_values, max_examples, dtype, tolerance)
        if found is not None:
            failures.append(found)
    if failures:
        first = failures[0]
        others = [error.identity.split(",")[0] for error in failures[1:]]
        more = f"\n  also broken: {'; '.join(dict.fromkeys(others))}" if others else ""
        raise IdentityError(first.identity, first.message + more, gap=first.gap, cause=first.cause) from first.cause


def _first_failure(
    name: str,
    case: Callable[[Cases], None],
    xp: Namespace,
    complex_values: bool,
    max_examples: int,
    dtype: str,
    tolerance: float | None,
) -> IdentityError | None:
    # Cases must not depend on an earlier run or the machine's speed: no database, no deadline.
    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.nested_given],
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink],
    )
    @given(data=st.data())
    def every_case(data: st.DataObject) -> None:
        try:
            case(Cases(data.draw, xp, complex_values, dtype))
        except IdentityError as error:
            if tolerance is None or error.gap is None or not error.gap <= tolerance:
                raise

    try:
        every_case()
    except IdentityError as error:
        return IdentityError(error.identity, error.message, gap=error.gap, cause=error.cause)
    except _Raised as error:
        what = f"{type(error.cause).__name__}: {str(error.cause).strip() or 'no message'}"
        return IdentityError(name, f"your code raised {what}{shown(error.inputs)}", cause=error.cause)
    except (ValueError, TypeError, IndexError, ArithmeticError) as error:  # an answer of a shape that nothing fits
        return IdentityError(name, f"the answer cannot be compared: {error}", cause=error)
    return None
