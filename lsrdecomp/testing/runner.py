"""Run identities on drawn cases: the smallest case that breaks one, the telling identity first, no frames of ours."""

from __future__ import annotations

from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lsrdecomp.arrays import Namespace, to_numpy
from lsrdecomp.testing.agreement import IdentityError, arrays_in, shown
from lsrdecomp.testing.cases import Cases, Corner, Trial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

EXAMPLES = 25
"""Cases drawn for each identity."""


class _Raised(Exception):  # noqa: N818 - never leaves this file
    """The code under test raised; kept apart from exceptions of ours."""

    def __init__(self, cause: Exception, inputs: tuple[Any, ...]) -> None:
        self.cause = cause
        self.inputs = inputs


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The code under test; what it raises becomes an `IdentityError` that names identity and case.

    Sparse results are formed. A ``numpy.matrix`` is refused: its ``*`` and its slices are not those
    of an array; so are lists of numbers and nothing. Arguments must stay as they are, or the case
    that is shown is not what was computed.
    """

    def called(*inputs: Any) -> Any:
        before = [np.array(to_numpy(array)) for array in arrays_in(inputs)]
        try:
            result = function(*inputs)
            result = result.toarray() if hasattr(result, "toarray") else result
            if isinstance(result, np.matrix | NoneType) or (
                isinstance(result, list) and not any(array.ndim for array in arrays_in(result))
            ):
                raise TypeError(f"the result is a {type(result).__name__}, not an array")
            if not all(
                map(
                    partial(np.array_equal, equal_nan=True),
                    before,
                    map(to_numpy, arrays_in(inputs)),
                )
            ):
                raise IdentityError(
                    "arguments stay as they are", f"your code changed them{shown(before)}"
                )
            return result
        except IdentityError:
            raise
        except Exception as error:
            raise _Raised(error, inputs) from error

    return called


def try_identities(
    trials: Sequence[Trial],
    *,
    order: int | None = 2,
    xp: Namespace = np,
    complex_values: bool = True,
    dtype: str = "float64",
    tolerance: float | None = None,
    max_examples: int = EXAMPLES,
) -> None:
    """Try each; raise `IdentityError` for the first that fails with its smallest case, and say which others do.

    The list begins with what tells most: an identity further down fails as well where one above
    does. ``order`` is the number of factors of the shapes that are drawn; None for one to four.
    """
    __tracebackhide__ = True

    def on_case(check: Callable[[Cases], None], draw: Callable[[Any], Any]) -> None:
        try:
            check(Cases(draw, xp, complex_values, dtype, order))
        except IdentityError as error:
            if tolerance is None or error.gap is None or not error.gap <= tolerance:
                raise

    failures: list[IdentityError] = []
    for name, check in trials:
        # Only the first failure is shown with its case, so only that case is made small.
        failure = _first_failure(
            name,
            partial(on_case, check),
            max_examples,
            isinstance(check, Corner),
            shrink=not failures,
        )
        if failure is not None:
            failures.append(failure)
    if failures:
        first = failures[0]
        _, *others = dict.fromkeys(error.identity.split(",")[0] for error in failures)
        more = f"\n  also broken: {'; '.join(others)}" if others else ""
        raise IdentityError(
            first.identity, first.message + more, gap=first.gap, cause=first.cause
        ) from first.cause


def _first_failure(
    name: str,
    on_case: Callable[[Callable[[Any], Any]], None],
    max_examples: int,
    is_corner: bool,
    shrink: bool,
) -> IdentityError | None:
    # Hypothesis reads and tokenizes the source of what it runs, decorators included, twice for each
    # identity.
    def every_case(data: st.DataObject) -> None:
        on_case(data.draw)

    # Cases must not depend on an earlier run or the machine's speed: no database, no deadline.
    chosen = settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.nested_given,
        ],
        print_blob=False,
        report_multiple_bugs=False,
        phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
    )
    try:
        if is_corner:
            for is_complex in (False, True):
                on_case(partial(lambda answer, _: answer, is_complex))  # whatever would be drawn
        else:
            chosen(given(data=st.data())(every_case))()
    except IdentityError as error:
        return IdentityError(error.identity, error.message, gap=error.gap, cause=error.cause)
    except _Raised as error:
        what = f"{type(error.cause).__name__}: {str(error.cause).strip() or 'no message'}"
        way_out = "; xp= names another library than NumPy" if "ndarray" in what else ""
        return IdentityError(
            name, f"your code raised {what}{way_out}{shown(error.inputs)}", cause=error.cause
        )
    except (
        ValueError,
        TypeError,
        IndexError,
        ArithmeticError,
    ) as error:  # an answer of a shape that nothing fits
        return IdentityError(name, f"the answer cannot be compared: {error}", cause=error)
    return None
