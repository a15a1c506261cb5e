"""The backend that reads a quantized layer's weight, for bases quantized through transformers or by torchao itself."""

from __future__ import annotations

from typing import Any

from peft.utils import resolve_quantization_backend
from torch import nn


def quantization_backend(layer: nn.Module, **known: Any) -> Any:
    """PEFT's backend for a layer of the base model; None for one that is not quantized.

    PEFT asks transformers' quantizer how to quantize a merged weight again. A base that ``torchao.quantize_`` made has
    none: it can be adapted and trained on, and says so when it is asked to merge.
    """
    if known.get("get_apply_tensor_subclass") is not None:
        return resolve_quantization_backend(layer, **known)
    backend: Any = resolve_quantization_backend(layer, **{**known, "get_apply_tensor_subclass": unknown_subclass})
    if getattr(backend, "get_apply_tensor_subclass", None) is unknown_subclass:
        backend.supports_merge = False
    return backend


def unknown_subclass() -> Any:
    """Stands for a quantization that nothing recorded; `Mergeable` refuses before it would be called."""
    raise NotImplementedError("how the base was quantized is not known")


__all__ = ["quantization_backend"]
