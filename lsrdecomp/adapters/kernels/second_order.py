"""Second derivatives for nodes with a backward pass of their own: where they are asked for, compose and differentiate.

A node's own backward pass records nothing, so autograd could not go through it again. When a caller asks for a graph of
the gradients (``create_graph=True``: gradient penalties, Hessian products, meta learning), the node's result is
composed anew from torch operations and those are differentiated. First derivatives never pay for this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def recomposed(
    compose: Callable[..., Tensor | Sequence[Tensor]],
    inputs: Sequence[Tensor],
    wanted: Sequence[bool],
    gradients: Tensor | Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Gradients of ``compose(*inputs)`` that autograd can differentiate again.

    Parameters
    ----------
    compose : callable
        The node's result, or results, from operations that autograd knows.
    inputs : sequence of Tensor
        What the node was given, as saved: still part of the graph they came from.
    wanted : sequence of bool
        For each input, whether to return its gradient.
    gradients : Tensor or sequence
        One for each result; None for a result that nothing was asked of.

    Returns
    -------
    list
        A gradient, or None, for each input.
    """
    with torch.enable_grad():
        # Aliases: one tensor given twice is two inputs, each with a gradient of its own.
        aliases = [tensor.view_as(tensor) for tensor in inputs]
        results = compose(*aliases)
        pairs = [(results, gradients)] if isinstance(results, Tensor) else zip(results, gradients, strict=True)
        used = [(result, gradient) for result, gradient in pairs if gradient is not None]
        leaves = [alias for alias, needed in zip(aliases, wanted, strict=True) if needed]
        derivatives = iter(
            torch.autograd.grad(
                [result for result, _ in used],
                leaves,
                [gradient for _, gradient in used],  # type: ignore[misc]
                create_graph=True,
                allow_unused=True,
            )
            if used and leaves
            else [None] * len(leaves)
        )
    return [next(derivatives) if needed else None for needed in wanted]
