"""The error of a measurement that the data or the model make impossible."""

from __future__ import annotations

from lsrdecomp.errors import LsrError


class CalibrationError(LsrError, RuntimeError):
    """The data or the model gave nothing to measure; the message says what was missing."""
