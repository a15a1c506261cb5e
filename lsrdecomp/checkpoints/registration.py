"""PEFT learns our adapter types where a program uses both libraries, without a line of its own."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType

IMPORT = "import lsrdecomp.adapters"
"""What a program that imports nothing of ours must run before PEFT opens an LSR directory."""


def register_with_peft() -> None:
    """Import `lsrdecomp.adapters` if PEFT is loaded already; nothing happens otherwise, or where the two do not fit.

    PEFT itself has no entry point for types of others: without this it stops at ``KeyError: 'LSR'``.
    """
    if "peft" in sys.modules and "lsrdecomp.adapters" not in sys.modules:
        with suppress(ImportError, AttributeError):  # a PEFT of another version: `import lsrdecomp.adapters` says more
            importlib.import_module("lsrdecomp.adapters")


def register_once_peft_loads() -> None:
    """`register_with_peft`, now if PEFT is loaded, else right after its import; called when `lsrdecomp` is imported.

    So the order of the two imports does not matter. Until then a finder stands first in `sys.meta_path`, which answers
    for the name ``peft`` alone and then leaves.
    """
    if "peft" in sys.modules:
        register_with_peft()
    elif not any(isinstance(finder, _AfterPeft) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterPeft())


class _AfterPeft:
    """Finds PEFT as the other finders do, and registers when the module has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "peft":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                with suppress(ValueError):  # already gone: PEFT is executed again by a reload
                    sys.meta_path.remove(self)
                register_with_peft()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


__all__ = ["IMPORT", "register_once_peft_loads", "register_with_peft"]
