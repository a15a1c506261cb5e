"""Run identities on drawn cases and find the smallest case that breaks the most telling one.

An exception of the code under test becomes an `IdentityError`, without frames of ours.

Each identity is a run of hypothesis of its own, in the order in which the identities tell: one run
over all of them would show the failure that is smallest to write, and only that.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky

from lsrdecomp.arrays import to_numpy
from lsrdecomp.testing.agreement import IdentityError, arrays_in, describe_arguments
from lsrdecomp.testing.cases import Cases, CheckSettings, Corner, Trial, trials

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lsrdecomp.testing.agreement import Identities
    from lsrdecomp.testing.cases import Corners, Options


MAX_NAMES = 16
"""Other identities and corners that a finding names, at most; by hand."""

INCOMPARABLE = (ValueError, TypeError, IndexError, ArithmeticError)
"""What comparing raises for an answer of a shape that nothing fits."""


class _Raised(Exception):  # noqa: N818 - never leaves this file
    """The code under test raised; kept apart from exceptions of ours."""

    def __init__(self, cause: Exception, inputs: tuple[Any, ...]) -> None:
        self.cause = cause
        self.inputs = inputs


class GuardedFunction:
    """The code under test; what it raises becomes an `IdentityError` that names identity and case.

    Sparse results are formed. A ``numpy.matrix`` is refused: its ``*`` and its slices are not those
    of an array; so are lists of numbers and nothing. Arguments must stay as they are, or the case
    that is shown is not what was computed.

    Attributes
    ----------
    answers_sparse : bool
        Whether an answer was a sparse array so far.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.answers_sparse = False

    def __call__(self, *inputs: Any) -> Any:
        """Call the function; raise for what it raises, changes or answers that is no array."""
        before = [np.array(to_numpy(array)) for array in arrays_in(inputs)]
        writeable = [_is_writeable(array) for array in arrays_in(inputs)]
        try:
            answer = self._formed(self._function(*inputs))
        except Exception as error:
            raise _Raised(error, inputs) from error
        for array, values, was_writeable in zip(arrays_in(inputs), before, writeable, strict=True):
            if not np.array_equal(values, to_numpy(array), equal_nan=True):
                message = f"your code changed them{describe_arguments(before)}"
                raise IdentityError("arguments stay as they are", message)
            if _is_writeable(array) != was_writeable:
                message = f"your code made them read-only{describe_arguments(before)}"
                raise IdentityError("arguments stay as they are", message)
        return answer

    def _formed(self, answer: Any) -> Any:
        """Return an answer as an array, or as arrays; raise `TypeError` for what is none."""
        # A sparse matrix, and not an operator that can be formed.
        if hasattr(answer, "toarray") and hasattr(answer, "nnz"):
            self.answers_sparse = True
            answer = answer.toarray()
        is_list_of_numbers = isinstance(answer, list) and not any(
            array.ndim for array in arrays_in(answer)
        )
        if answer is None or isinstance(answer, np.matrix) or is_list_of_numbers:
            raise TypeError(f"the result is a {type(answer).__name__}, not an array")
        return answer


def _is_writeable(array: Any) -> bool:
    """Return whether an array may be written to, where its library knows that."""
    return not isinstance(array, np.ndarray) or array.flags.writeable


def check_identities(
    identities: Identities,
    function: Callable[..., Any],
    options: Options,
    corners: Corners | None = None,
    on_corners: Callable[..., None] | None = None,
    *,
    order: int | None = None,
) -> None:
    """Try the identities of one function on drawn cases, and the first of them on corner cases.

    Parameters
    ----------
    identities : Identities
    function : callable
        The code under test.
    options : Options
        What the caller gave beside the function.
    corners : Corners, optional
    on_corners : callable (function, *arrays) -> None, optional
        The check of a corner case, where its arrays are not the arguments of the first identity.
    order : int or None
        Number of factors of the shapes that are drawn; None for one to five.
    """
    __tracebackhide__ = True
    settings = CheckSettings.of(options, order)
    guarded = GuardedFunction(function)
    try_identities(trials(identities, guarded, settings, corners, on_corners), settings)


def try_identities(trials: Sequence[Trial], settings: CheckSettings) -> None:
    """Try each; raise `IdentityError` for the first that fails, with its smallest case.

    The list begins with what tells most: an identity further down fails as well where one above
    does. The error says which others fail.
    """
    __tracebackhide__ = True
    failures: list[IdentityError] = []
    identities: dict[str, None] = {}
    corners: dict[str, None] = {}
    for trial in trials:
        # Only the first failure is shown with its case, so only that case is made small.
        failure = _first_failure(trial, settings, shrink=not failures)
        if failure is not None:
            failures.append(failure)
            names = corners if isinstance(trial.check, Corner) else identities
            names[failure.identity.split(",")[0]] = None
    if not failures:
        return
    first = failures[0]
    names = identities | corners
    names.pop(first.identity.split(",")[0], None)
    message = first.message
    if names:
        message += f"\n  also broken: {'; '.join([*names][:MAX_NAMES])}"
        if len(names) > MAX_NAMES:
            message += f" and {len(names) - MAX_NAMES} more"
    raise IdentityError(first.identity, message, gap=first.gap, cause=first.cause) from first.cause


def _first_failure(
    trial: Trial, check_settings: CheckSettings, shrink: bool
) -> IdentityError | None:
    """Return what breaks an identity, with the smallest case that hypothesis finds; else None."""
    name, check, max_examples = trial
    last_failure: list[IdentityError] = []

    def on_case(draw: Callable[[Any], Any]) -> None:
        try:
            _check_unless_tolerated(check, Cases(draw, check_settings))
        except IdentityError as error:
            last_failure[:] = [error]
            raise

    # Hypothesis reads and tokenizes the source of what it runs, decorators included, twice for each
    # identity.
    def every_case(data: st.DataObject) -> None:
        on_case(data.draw)

    try:
        if isinstance(check, Corner):
            _raise_smallest_failure(check, check_settings, shrink)
        else:
            max_examples = max_examples or check_settings.max_examples
            _hypothesis_settings(max_examples, shrink)(given(data=st.data())(every_case))()
    except IdentityError as error:
        return IdentityError(error.identity, error.message, gap=error.gap, cause=error.cause)
    except _Raised as error:
        return _failure_of_raised(name, error)
    except Flaky:
        return _failure_of_flaky(name, last_failure)
    except INCOMPARABLE as error:
        # An answer of a shape that nothing fits.
        return IdentityError(name, f"the answer cannot be compared: {error}", cause=error)
    return None


def _check_unless_tolerated(check: Callable[[Cases], None], cases: Cases) -> None:
    """Check a case; let a difference pass that is within the tolerance of the settings."""
    tolerance = cases.settings.tolerance
    try:
        check(cases)
    except IdentityError as error:
        if tolerance is None or error.gap is None or error.gap > tolerance:
            raise


def _answer(value: Any, _strategy: Any) -> Any:
    """Return a value for whatever is drawn."""
    return value


def _raise_smallest_failure(corner: Corner, check_settings: CheckSettings, shrink: bool) -> None:
    """Try a corner case in real and in complex numbers; raise the failure of the smallest sides."""
    # Whether it is complex is the only draw of a corner.
    has_both = check_settings.draws_complex and not check_settings.dtype.startswith("complex")
    draws = (False, True) if has_both else (False,)

    def failure_of(candidate: Corner) -> Exception | None:
        for is_complex in draws:
            try:
                cases = Cases(partial(_answer, is_complex), check_settings)
                _check_unless_tolerated(candidate, cases)
            except (IdentityError, _Raised, *INCOMPARABLE) as error:
                if not (isinstance(error, _Raised) and corner.may_be_refused):
                    return error
        return None

    failure = failure_of(corner)
    if failure is None:
        return
    for side in corner.sides if shrink else ():
        for length in range(1, side):
            candidate = corner.with_sides(side, length)
            smaller_failure = failure_of(candidate)
            if smaller_failure is not None:
                corner, failure = candidate, smaller_failure
                break
    raise failure


def _hypothesis_settings(max_examples: int, shrink: bool) -> settings:
    """Return settings by which cases depend on no earlier run and on no machine's speed.

    So a profile of hypothesis that the caller has loaded changes nothing here.
    """
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
    ignored = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.nested_given]
    return settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=ignored,
        print_blob=False,
        report_multiple_bugs=False,
        phases=phases,
    )


def _failure_of_raised(name: str, raised: _Raised) -> IdentityError:
    """Return the error for code that raised."""
    text = str(raised.cause).strip() or "no message"
    message = f"your code raised {type(raised.cause).__name__}: {text}"
    if "ndarray" in text:
        message += "; xp= names another library than NumPy"
    return IdentityError(name, f"{message}{describe_arguments(raised.inputs)}", cause=raised.cause)


def _failure_of_flaky(name: str, failures: Sequence[IdentityError]) -> IdentityError:
    """Return the error for code that answers the same arguments in different ways."""
    reason = "your code answers the same arguments differently: from a stale cache, or at random"
    if not failures:
        return IdentityError(name, reason)
    failure = failures[0]
    return IdentityError(failure.identity, f"{reason}; once {failure.message}", gap=failure.gap)
