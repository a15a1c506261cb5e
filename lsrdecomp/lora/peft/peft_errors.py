"""Errors of an adapted model, as types that PEFT users already catch."""

from __future__ import annotations

from lsrdecomp.errors import LsrError, PrecisionError


class UnsupportedLayerError(LsrError, ValueError):
    """A targeted module, or a combination of options, that these adapters do not handle."""


class MergeError(PrecisionError, ValueError):
    """Merging would write numbers that are not finite, or lose more of the update than allowed."""


class AdapterNameError(LsrError, ValueError):
    """An adapter name that PEFT's state dict keys cannot tell from a parameter name."""
