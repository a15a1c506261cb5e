"""Gradients of sampled log-likelihoods: the input x of each layer and the gradient g at its output.

Hooks record both for a set of modules. Each module's are delivered as soon as they are complete,
while the backward pass is still running, so that no more than one module's are held twice.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lsrdecomp.errors import ShapeError
from lsrdecomp.lora.base.heads import Head
from lsrdecomp.lora.peft.kernels import without_autocast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


@dataclass(slots=True)
class ModuleCall:
    """One call of a module: its input, and the gradient of the log-likelihood at its output."""

    inputs: Tensor
    gradient: Tensor | None = None  # None until the backward pass gets there


@dataclass(frozen=True, slots=True)
class LayerGradients:
    """Inputs and output gradients of one module, the tokens of all its calls side by side."""

    inputs: Tensor  # x, (examples, tokens, n)
    gradients: Tensor  # g = ∂ log p / ∂y, (examples, tokens, m)

    def used_tokens(self) -> Tensor:
        """Return a mask of the tokens that a prediction depends on, (examples, tokens).

        At all others, such as padding, the gradient is exactly 0.
        """
        return self.gradients.ne(0).any(-1)


@dataclass(slots=True)
class GradientRecorder:
    """Records inputs and output gradients of watched modules, and delivers them module by module.

    For each batch:

    1. `clear` forgets calls of other forward passes.
    2. In the forward pass hooks count the calls of each module, and record calls that have
       gradients. In a block whose activations are recomputed, calls are counted now and recorded
       when the block runs again in the backward pass.
    3. `backward` runs the backward pass, in which hooks call `add_gradient`. When all calls of a
       module have a gradient, ``on_layer`` gets them.
    """

    on_layer: Callable[[str, LayerGradients], None]
    n_examples: int = field(default=0, init=False)  # of the batch in the backward pass
    calls: dict[str, list[ModuleCall]] = field(default_factory=dict)  # recorded, by module
    n_calls: dict[str, int] = field(default_factory=dict)  # counted in the forward pass, by module
    in_backward: bool = False

    def clear(self) -> None:
        """Forget all calls so far."""
        for name, calls in self.calls.items():
            calls.clear()
            self.n_calls[name] = 0

    def backward(self, output: Tensor, n_examples: int, gradient: Tensor | None = None) -> None:
        """Run the backward pass from ``output``, and deliver the gradients of each module.

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
            If the input rows of a module are not a whole number for each example.
        """
        self.n_examples = n_examples
        self.in_backward = True
        try:
            # Hooks add to sums in float32, whatever precision the model ran in.
            with without_autocast(output.device.type):
                output.backward(gradient)  # type: ignore[no-untyped-call]
        finally:
            self.in_backward = False
        # Modules are left of which some calls got no gradient: no prediction depends on them.
        for name in self.calls:
            self._deliver(name)

    def add_gradient(self, name: str, call: ModuleCall, gradient: Tensor) -> None:
        """Record the gradient of one call; deliver those of its module if it was the last one."""
        call.gradient = gradient.detach()
        calls = self.calls[name]
        all_recorded = len(calls) == self.n_calls[name]
        if all_recorded and all(other.gradient is not None for other in calls):
            self._deliver(name)

    def _deliver(self, name: str) -> None:
        """Call ``on_layer`` with the calls of a module that have a gradient, and forget them."""
        inputs: list[Tensor] = []
        gradients: list[Tensor] = []
        for call in self.calls[name]:
            if call.gradient is not None:
                inputs.append(self._by_example(name, call.inputs))
                gradients.append(self._by_example(name, call.gradient))
        self.calls[name].clear()
        self.n_calls[name] = 0
        # The gradient of the weight is a sum over tokens: those of several calls add up like those
        # of one.
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
    """Record inputs and output gradients of ``modules`` inside a ``with`` block.

    Parameters may be frozen. ``on_layer`` is called with the name of a module and its gradients
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
    """Return a forward hook that records the calls of a module."""

    def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not recorder.in_backward:
            recorder.n_calls[name] += 1
        if not torch.is_grad_enabled():
            return None
        plain: nn.Module = getattr(module, "get_base_layer", lambda: module)()
        convolution = plain if isinstance(plain, nn.Conv2d) else None
        call = ModuleCall(_patches(arguments[0].detach(), convolution))
        recorder.calls[name].append(call)

        def add_gradient(gradient: Tensor) -> None:
            positions = gradient if convolution is None else gradient.flatten(2).mT
            recorder.add_gradient(name, call, positions)

        if output.requires_grad:
            output.register_hook(add_gradient)  # type: ignore[no-untyped-call]
            return None
        # With all parameters frozen the graph begins here, at a leaf. Its clone is returned, since
        # later code may write into the output, which a leaf does not allow.
        leaf = output.detach().requires_grad_()
        leaf.register_hook(add_gradient)  # type: ignore[no-untyped-call]
        return leaf.clone()

    return hook


def _patches(inputs: Tensor, convolution: nn.Conv2d | None) -> Tensor:
    """Return the inputs of a layer's matrix: of a convolution its patches, (examples, patches, n).

    The entries of a patch are in the order of those of the layer's weight.
    """
    if convolution is None:
        return inputs
    patches = nn.functional.unfold(
        inputs,
        convolution.kernel_size,
        convolution.dilation,
        convolution.padding,  # type: ignore[arg-type]
        convolution.stride,
    )
    return patches.mT


def sampled_log_likelihood(logits: Tensor, head: Head, generator: torch.Generator) -> Tensor:
    """Return Σ log p(y) over predictions, for classes y drawn from the model itself.

    Parameters
    ----------
    logits : Tensor, shape (predictions, classes)
        As `lora.base.heads.prediction_logits` returns them.
    head : Head
        Meaning of the logits. Numbers are drawn from a normal distribution of unit variance: the
        gradient is one random direction for each example, as in Gauss–Newton's method.
    generator : torch.Generator
        On the CPU: draws are the same on every device, up to rounding of the probabilities. Only
        one number for each prediction, or for each number, is copied from there.
    """
    if head is Head.numbers:
        noise = torch.randn(logits.shape, generator=generator).to(logits.device)
        sampled_scores = noise + logits.detach()
        return -(sampled_scores - logits).square().sum() / 2
    log_probabilities = logits.log_softmax(-1)
    classes = _drawn_classes(log_probabilities.detach().exp(), generator)
    return log_probabilities.gather(-1, classes).sum()


def _drawn_classes(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a class from each row of probabilities (predictions, classes); return (predictions, 1).

    A class is drawn where the cumulative probability passes a uniform number. It passes none at a
    class without probability, so that such a class is never drawn.
    """
    cumulative = probabilities.cumsum(-1)
    uniform = torch.rand(len(probabilities), 1, generator=generator).to(probabilities.device)
    # The last sum is 1 up to rounding, which the uniform number must stay below.
    uniform = uniform * cumulative[:, -1:]
    below = torch.nextafter(cumulative[:, -1:], torch.zeros_like(uniform))
    classes = torch.searchsorted(cumulative, torch.minimum(uniform, below), right=True)
    # Numbers that are not finite are for the caller to find: on a GPU an index beyond the classes
    # would end the process.
    return classes.clamp_max(probabilities.shape[-1] - 1)
