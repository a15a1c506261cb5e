"""Gradients of sampled log-likelihoods: what each layer reads, and the gradient at what it writes.

Hooks record both for a set of modules and hand them on while the backward pass is still running,
so that the activations of one module at a time are held twice.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lsrdecomp.calibration.heads import Head
from lsrdecomp.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(slots=True)
class ModuleCall:
    """One use of a module: its input, and the gradient of the log-likelihood at its output."""

    inputs: Tensor
    gradient: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """All uses of one module in a pass, the tokens of all uses side by side."""

    inputs: Tensor  # x, (examples, tokens, n)
    gradients: Tensor  # g = ∂ log p / ∂y, (examples, tokens, m)

    def used_tokens(self) -> Tensor:
        """Return the tokens that a prediction depends on, (examples, tokens).

        The gradient at padding is exactly 0.
        """
        return self.gradients.ne(0).any(-1)


@dataclass(slots=True)
class GradientRecorder:
    """Calls of each watched module during one forward pass; the backward pass completes them.

    Blocks that are computed again on the way back run first without gradients. Their calls are
    counted in the forward pass, and recorded when gradients reach the block.
    """

    on_layer: Callable[[str, LayerGradients], None]
    n_examples: int = 0
    calls: dict[str, list[ModuleCall]] = field(default_factory=dict)
    n_calls: dict[str, int] = field(default_factory=dict)  # in the forward pass
    in_backward: bool = False

    def clear(self) -> None:
        """Forget the calls of a pass."""
        for name, calls in self.calls.items():
            calls.clear()
            self.n_calls[name] = 0

    def backward(self, output: Tensor, n_examples: int, gradient: Tensor | None = None) -> None:
        """Go back from ``output``, and hand on the gradients of each module once all are there.

        Parameters
        ----------
        output : Tensor
            Where the backward pass starts.
        n_examples : int
            Examples of the batch.
        gradient : Tensor, optional
            Gradient of the log-likelihood at ``output``. Absent, ``output`` is the log-likelihood.

        Raises
        ------
        ShapeError
            If the input rows of a module cannot be shared out among the examples.
        """
        self.n_examples = n_examples
        self.in_backward = True
        try:
            output.backward(gradient)  # type: ignore[no-untyped-call]
        finally:
            self.in_backward = False
        # What is left are modules of which some calls got no gradient.
        for name in self.calls:
            self._hand_on(name)

    def add_gradient(self, name: str, call: ModuleCall, gradient: Tensor) -> None:
        """Take the gradient of one call; with the last one of its module, hand all of them on."""
        call.gradient = gradient.detach()
        calls = self.calls[name]
        n_complete = sum(other.gradient is not None for other in calls)
        if n_complete == len(calls) == self.n_calls[name]:
            self._hand_on(name)

    def _hand_on(self, name: str) -> None:
        # 1. Take the calls that have a gradient out of memory.
        inputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for call in self.calls[name]:
            if call.gradient is not None:
                inputs.append(self._by_example(name, call.inputs))
                gradients.append(self._by_example(name, call.gradient))
        self.calls[name].clear()
        self.n_calls[name] = 0
        # 2. Lay the tokens of all uses side by side: the gradient of the weight is their sum.
        if inputs:
            self.on_layer(name, LayerGradients(torch.cat(inputs, 1), torch.cat(gradients, 1)))

    def _by_example(self, name: str, rows: Tensor) -> Tensor:
        """Return rows (…, n) as (examples, tokens, n) in float32."""
        n_rows = rows[..., 0].numel()
        if n_rows % self.n_examples:
            raise ShapeError(
                f"{name}: {n_rows} input rows (shape {tuple(rows.shape)}) "
                f"for {self.n_examples} examples"
            )
        n_tokens = n_rows // self.n_examples
        return rows.reshape(self.n_examples, n_tokens, rows.shape[-1]).float()


@contextmanager
def watched(
    modules: Mapping[str, nn.Module], on_layer: Callable[[str, LayerGradients], None]
) -> Iterator[GradientRecorder]:
    """Record inputs and output gradients of ``modules`` until the block ends.

    Parameters need no gradient. ``on_layer`` is called with the name of a module and its gradients
    during each `GradientRecorder.backward`.
    """
    calls: dict[str, list[ModuleCall]] = {name: [] for name in modules}
    recorder = GradientRecorder(on_layer, calls=calls, n_calls=dict.fromkeys(modules, 0))
    handles = [
        module.register_forward_hook(_recording_hook(recorder, name))
        for name, module in modules.items()
    ]
    try:
        yield recorder
    finally:
        for handle in handles:
            handle.remove()


def _recording_hook(recorder: GradientRecorder, name: str) -> Callable[..., Tensor | None]:
    def hook(_module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not recorder.in_backward:
            recorder.n_calls[name] += 1
        if not torch.is_grad_enabled():
            return None
        call = ModuleCall(arguments[0].detach())
        recorder.calls[name].append(call)
        add_gradient = partial(recorder.add_gradient, name, call)
        if output.requires_grad:
            output.register_hook(add_gradient)  # type: ignore[no-untyped-call]
            return None
        # All parameters are frozen, so the graph begins here. The clone lets later code write into
        # the module's result.
        leaf = output.detach().requires_grad_()
        leaf.register_hook(add_gradient)  # type: ignore[no-untyped-call]
        return leaf.clone()

    return hook


def sampled_log_likelihood(logits: Tensor, head: Head, generator: torch.Generator) -> Tensor:
    """Return Σ log p(y) over predictions, for classes y drawn from the model itself.

    Parameters
    ----------
    logits : Tensor, shape (predictions, classes)
        As `calibration.heads.prediction_logits` returns them.
    head : Head
        Their meaning; a regression draws from a normal distribution of unit variance.
    generator : torch.Generator
        On the CPU: draws are the same on every device, up to rounding of the probabilities.
    """
    if head is Head.regression:
        noise = torch.randn(logits.shape, generator=generator).to(logits.device)
        sampled_scores = noise + logits.detach()
        return -(sampled_scores - logits).square().sum() / 2
    log_probabilities = logits.log_softmax(-1)
    probabilities = log_probabilities.detach().exp().cpu()
    classes = torch.multinomial(probabilities, 1, generator=generator).to(logits.device)
    return log_probabilities.gather(-1, classes).sum()
