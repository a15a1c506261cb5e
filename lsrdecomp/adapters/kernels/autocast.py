"""Arithmetic in the precision of its arguments, whatever autocast says."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

NOTHING = nullcontext()


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """A context without autocast on a kind of device; nothing where it is off, since entering takes microseconds."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else NOTHING


__all__ = ["without_autocast"]
