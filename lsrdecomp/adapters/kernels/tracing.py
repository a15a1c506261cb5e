"""Where nodes of our own stand in the way."""

from __future__ import annotations

import torch


def is_traced() -> bool:
    """Whether the compiler records operations or torch.func transforms them: both want plain ones that they know."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


__all__ = ["is_traced"]
