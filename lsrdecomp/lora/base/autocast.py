"""Mixed precision: forward and backward passes in bfloat16, where the processor computes in it.

Products with the weights are then formed in bfloat16 and summed in float32, while the residual
stream, norms, attention and losses stay in float32. It is for passes that learn, whose result is
measured afterwards in the precision of the base.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from collections.abc import Iterator

BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16")
"""Units of x86 processors that multiply bfloat16; on others torch emulates it, which is slower."""


def has_bfloat16_units() -> bool:
    """Return whether this processor multiplies bfloat16 itself; False where torch cannot tell."""
    get_capabilities: Any = getattr(torch.cpu, "get_capabilities", None)
    if get_capabilities is None:
        return False
    capabilities = get_capabilities()
    return any(capabilities.get(unit, False) for unit in BFLOAT16_UNITS)


class Float32Attention(TorchFunctionMode):
    """Computes attention in float32 inside a ``with`` block, also under autocast.

    On processors torch's backward pass of attention in bfloat16 takes five times as long as the one
    in float32 (torch 2.13).
    """

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``; if it is attention, in float32."""
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        args = tuple(_as_float32(value) for value in args)
        kwargs = {name: _as_float32(value) for name, value in kwargs.items()}
        with torch.autocast("cpu", enabled=False):
            return func(*args, **kwargs)


def _as_float32(value: Any) -> Any:
    is_low = isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
    return value.float() if is_low else value


@contextmanager
def mixed_precision(model: nn.Module, *, min_parameters: int | None = 2**24) -> Iterator[bool]:
    """Run a model in mixed precision inside a ``with`` block, where that is faster.

    It is where the model is on a processor with units for bfloat16, in float32, and large enough.
    Elsewhere nothing changes. Yields whether it is.

    Parameters
    ----------
    model : nn.Module
        Its frozen matrices have a copy in bfloat16 meanwhile, also in other models that share them;
        an output layer that shares the embedding's has a copy of its own.
    min_parameters : int, optional
        Smallest number of parameters at which casts cost less than they save, by hand; None: run in
        the precision of the model.

    Notes
    -----
    Takes two bytes for each frozen number of the linear layers.
    """
    if not _is_worthwhile(model, min_parameters):
        yield False
        return
    # Without copies autocast would cast a frozen matrix anew in every pass.
    originals: list[tuple[torch.Tensor, torch.Tensor]] = []
    tied = _frozen_linear_layers(model, tied=True)
    tied_weights = [layer.weight for layer in tied]
    try:
        # An embedding's weight stays: in bfloat16 it would bring the residual stream to it as well.
        for layer in tied:
            layer.weight = nn.Parameter(layer.weight.data.bfloat16(), requires_grad=False)
        weights = {id(layer.weight): layer.weight for layer in _frozen_linear_layers(model)}
        for weight in weights.values():
            originals.append((weight, weight.data))
            weight.data = weight.data.bfloat16()
        with torch.autocast("cpu", torch.bfloat16), Float32Attention():
            yield True
    finally:
        for weight, original in originals:
            weight.data = original
        for layer, tied_weight in zip(tied, tied_weights, strict=True):
            layer.weight = tied_weight


def _is_worthwhile(model: nn.Module, min_parameters: int | None) -> bool:
    if min_parameters is None or not has_bfloat16_units():
        return False
    parameters = list(model.parameters())
    first = parameters[0]
    on_processor = first.device.type == "cpu" and first.dtype == torch.float32
    return on_processor and sum(value.numel() for value in parameters) >= min_parameters


def _frozen_linear_layers(model: nn.Module, *, tied: bool = False) -> list[nn.Linear]:
    """Return the linear layers with a frozen float32 weight that an embedding shares, or none."""
    embeddings = {
        id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
    }
    layers = []
    for module in model.modules():
        if not isinstance(module, nn.Linear):
            continue
        weight = module.weight
        is_frozen = not weight.requires_grad and weight.dtype == torch.float32
        if is_frozen and (id(weight) in embeddings) == tied:
            layers.append(module)
    return layers
