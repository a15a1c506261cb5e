"""PEFT learns our adapter types where a program uses both libraries, without a line of its own."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress

IMPORT = "import lsrdecomp.adapters"
"""What a program that imports nothing of ours must run before PEFT opens an LSR directory."""


def register_with_peft() -> None:
    """Import `lsrdecomp.adapters` if PEFT is loaded already; nothing happens otherwise, or where the two do not fit.

    Called when `lsrdecomp` is imported and when it opens an LSR directory. PEFT itself has no entry point for types of
    others: without either, it stops at ``KeyError: 'LSR'``.
    """
    if "peft" in sys.modules and "lsrdecomp.adapters" not in sys.modules:
        with suppress(ImportError, AttributeError):  # a PEFT of another version: `import lsrdecomp.adapters` says more
            importlib.import_module("lsrdecomp.adapters")


__all__ = ["IMPORT", "register_with_peft"]
