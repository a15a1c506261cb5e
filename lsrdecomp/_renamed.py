"""Public names that changed: the old ones go on working until version 0.5, and warn.

`NAMES` holds functions and classes, `ATTRIBUTES` what instances carry. The `__init__.py` of a
subpackage calls `attach`, and a class whose attributes changed is decorated by
`keep_old_attributes`; nothing else knows of old names.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import lazy_loader

if TYPE_CHECKING:
    from collections.abc import Callable

NAMES: dict[str, str] = {
    "lsrdecomp.checkpoints.Format": "lsrdecomp.checkpoints.AdapterFormat",
    "lsrdecomp.checkpoints.LsrLayer": "lsrdecomp.checkpoints.KroneckerLayer",
    "lsrdecomp.checkpoints.check_file": "lsrdecomp.checkpoints.check_output_file",
    "lsrdecomp.checkpoints.check_output": "lsrdecomp.checkpoints.check_output_directory",
    "lsrdecomp.checkpoints.check_place": "lsrdecomp.checkpoints.check_output_path",
    "lsrdecomp.checkpoints.same_form": "lsrdecomp.checkpoints.file_or_directory",
    "lsrdecomp.compression.Step": "lsrdecomp.compression.ProgressUpdate",
    "lsrdecomp.serving.Asked": "lsrdecomp.serving.ServerMeasurement",
    "lsrdecomp.training.Record": "lsrdecomp.training.FinetuneRecord",
}
"""Old to new, both with their room: ``"lsrdecomp.room.Old": "lsrdecomp.room.New"``."""

ATTRIBUTES: dict[str, dict[str, str]] = {
    "JournalEntry": {"facts": "values"},
    "Behaviour": {"throughout": "exact_match_rate"},
    "Compression": {"differing": "mismatches", "promise": "fidelity"},
    "Distilled": {"form": "variant", "promise": "fidelity"},
    "Evaluator": {
        "answered": "compare_answers",
        "calibration": "calibration_texts",
        "chooser": "selection_reference",
        "choosing": "selection_texts",
        "lessons": "distillation_data",
        "say": "announce",
        "size": "batch_size",
    },
    "Fidelity": {"alike": "n_matching", "asked": "requested", "little": "is_poor"},
    "KroneckerLayer": {"kind": "layer_type"},
    "LoraLayer": {"kind": "layer_type"},
    "Reference": {"losses": "compare_examples"},
    "ServerMeasurement": {"wanted_scale": "requested_scale"},
}
"""By the name of a class: old attribute, or method, to the new one."""

C = TypeVar("C", bound=type)


def attach(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a subpackage that loads lazily.

    Parameters
    ----------
    package : str
        ``__name__`` of the subpackage.
    file : str
        ``__file__`` of the subpackage; the stub beside it lists the names.
    """
    load, list_names, names = lazy_loader.attach_stub(package, file)

    def load_or_warn(name: str) -> Any:
        new = NAMES.get(f"{package}.{name}")
        if new is None:
            return load(name)
        warn_of_old_name(f"{package}.{name}", new)
        room, _, current = new.rpartition(".")
        return getattr(importlib.import_module(room), current)

    return load_or_warn, list_names, names


def keep_old_attributes(cls: C) -> C:
    """Add the old names of attributes, from `ATTRIBUTES`, to a class; to be used as a decorator."""
    for old, new in ATTRIBUTES.get(cls.__name__, {}).items():
        setattr(cls, old, _old_attribute(cls.__name__, old, new))
    return cls


def _old_attribute(owner: str, old: str, new: str) -> property:
    def read(self: Any) -> Any:
        warn_of_old_name(f"{owner}.{old}", f"{owner}.{new}")
        return getattr(self, new)

    return property(read, doc=f"Old name of `{new}`, until version 0.5.")


def warn_of_old_name(old: str, new: str) -> None:
    """Warn that a name changed; the line shown is that of the caller's caller."""
    warnings.warn(f"{old} is now {new}; the old name goes in 0.5", DeprecationWarning, stacklevel=3)
