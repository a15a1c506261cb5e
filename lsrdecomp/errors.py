"""What can go wrong, as types: each error is ours and the built-in kind a caller would expect."""

from __future__ import annotations

from contextlib import contextmanager
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = [
    "AdapterNameError",
    "ArgumentError",
    "BudgetError",
    "CalibrationError",
    "CheckpointError",
    "ConvergenceError",
    "ConvergenceWarning",
    "LsrError",
    "MatrixError",
    "MergeError",
    "NeedsBaseError",
    "PrecisionError",
    "ShapeError",
    "UnsupportedError",
    "UnsupportedLayerError",
]


class LsrError(Exception):
    """Base of every error this library raises on purpose."""


class ArgumentError(LsrError, TypeError):
    """A keyword argument of another name than any there is; the message has the nearest one."""


class ShapeError(LsrError, ValueError):
    """Two sizes disagree; the message holds both, and the sizes that would do."""


class PrecisionError(LsrError, ArithmeticError):
    """A number is not finite, or a precision cannot hold what was asked of it."""


class BudgetError(LsrError, ValueError):
    """An error, parameter or byte budget cannot be met; the message says what can be reached."""


class MatrixError(LsrError, ValueError):
    """A matrix lacks a property that is needed: it is singular, not definite or not Hermitian.

    The message says where.
    """


class ConvergenceError(LsrError, RuntimeError):
    """An iteration stopped short of its goal; ``record`` holds how far it came."""

    def __init__(self, message: str, record: Any = None) -> None:
        super().__init__(message)
        self.record = record


class ConvergenceWarning(RuntimeWarning):
    """A result fell short of its goal; its status says why, and what to try.

    ``throw=True`` raises `ConvergenceError` instead; a loop over many matrices can look at the
    status and filter the warning: ``warnings.simplefilter("ignore", ConvergenceWarning)``.
    """


class CheckpointError(LsrError, ValueError):
    """A file cannot be read or written as asked.

    The message names the file and, if known, the tensor.
    """

    def __init__(
        self, message: str, *, path: str | Path | None = None, tensor: str | None = None
    ) -> None:
        where = ": ".join(str(part) for part in (path, tensor) if part is not None)
        super().__init__(f"{where}: {message}" if where else message)
        self.message = message
        self.path = path
        self.tensor = tensor


class StorageRangeError(CheckpointError, PrecisionError):
    """A number lies outside of the range of the type that it is to be stored in."""

    def in_file(self, path: str | Path) -> StorageRangeError:
        """Return the same error of a file."""
        return StorageRangeError(self.message, path=path, tensor=self.tensor)


class UnsupportedError(CheckpointError, NotImplementedError):
    """The file is sound, but holds what this library cannot express and will not drop silently."""


class NeedsBaseError(UnsupportedError):
    """An adapter whose update is known only beside the weights of its base; the message says how.

    `lsrdecomp.lora.base.open_adapter` reads it with one.
    """


class CalibrationError(LsrError, RuntimeError):
    """The data or the model gave nothing to measure; the message says what was missing."""


class UnsupportedLayerError(LsrError, ValueError):
    """A module, or a combination of options, that LSR inside PEFT does not handle."""


class MergeError(PrecisionError, ValueError):
    """Merging would write numbers that are not finite, or lose more of the update than allowed."""


class AdapterNameError(LsrError, ValueError):
    """An adapter name that PEFT's state dict keys cannot tell from a parameter name."""


INSTALL_EXTRA = "pip install -e '.[{extra}]'"
"""What to type in a clone to install one of the extras; the package is on no index yet.

Errors take it from here, and a test holds pages, README and notebooks to it.
"""


def way_to_install(extra: str) -> str:
    """Return the end of a message about a missing package: where to type what.

    Parameters
    ----------
    extra : str

    Examples
    --------
    >>> way_to_install("music")
    "in your clone type pip install -e '.[music]'"
    """
    return f"in your clone type {INSTALL_EXTRA.format(extra=extra)}"


@contextmanager
def needs(purpose: str, extra: str) -> Iterator[None]:
    """Turn a failed import of an optional package into an `LsrError` that says how to install it.

    Parameters
    ----------
    purpose : str
        What the package is needed for, as the message begins.
    extra : str
        The extra of this package that brings it.

    Examples
    --------
    >>> with needs("a tune", "music"):
    ...     import no_library
    Traceback (most recent call last):
    lsrdecomp.errors.LsrError: a tune needs no_library: in your clone type pip install -e '.[music]'
    """
    try:
        yield
    except ImportError as error:
        package = str(error.name).partition(".")[0]
        raise LsrError(f"{purpose} needs {package}: {way_to_install(extra)}") from error


def unknown(name: object, known: Iterable[str]) -> str:
    """Return the end of a sentence about an unknown name: the nearest one, and all that there are.

    Examples
    --------
    >>> unknown("serach", ("balanced", "search"))
    "'serach'; did you mean 'search'? known: balanced, search"
    """
    names = list(known)
    nearest = get_close_matches(str(name), names, 1)
    question = f" did you mean {nearest[0]!r}?" if nearest else ""
    return f"{name!r};{question} known: {', '.join(names)}"
