"""Every factor of a model in one parameter: all expansions in one go, all contractions in one more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from benchmarks.adapters.candidate_kernels.arena_layout import ArenaLayer, Job, Layout
from benchmarks.adapters.candidate_kernels.triton_support import usable
from lsrdecomp.adapters.kernels.linear import wide_product
from lsrdecomp.adapters.kernels.stacked import contract_stack, expand_stack, without_autocast
from lsrdecomp.errors import ShapeError

Backend = Literal["torch", "triton"]
Gradient = Tensor | tuple[Tensor, Tensor]


class FactorArena(nn.Module):
    """The LSR factors of many layers, any mix of shapes, as one float32 parameter ``flat``.

    Call `expand` at the start of a forward pass and `linear` in each layer, with the token that `expand` returned::

        token = arena.expand()
        y = arena.linear(token, 0, x, weight, bias)

    The formed Â and B̂ lie rank-major in one buffer of the compute dtype, with the scale folded into B̂ and, in 16-bit
    precision, the rank padded to a multiple of 8. In backward each layer writes the gradients of its Â and B̂ into a
    second buffer, which is contracted when autograd reaches the token.

    Parameters
    ----------
    layers : sequence of ArenaLayer
        Sizes, separation ranks and scale of every layer.
    compute_dtype : torch.dtype
        Of the formed matrices, and so of the inputs of `linear`.
    device : torch.device or str
        Where to hold them.
    backend : {"torch", "triton"}, optional
        Triton launches once for all shapes and needs two factors a side; torch launches a few times per shape class.
        By default Triton on a GPU that has it.
    layerwise : bool
        Contract each layer's gradients at once and keep no buffer of them: for models whose formed matrices are large.
    dtype : torch.dtype
        Of ``flat``; Triton takes float32.
    """

    def __init__(
        self,
        layers: Sequence[ArenaLayer],
        *,
        compute_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        backend: Backend | None = None,
        layerwise: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        device = torch.device(device)
        self.layout = Layout(layers, padding=8 if compute_dtype.itemsize == 2 else 1)
        suits = dtype == torch.float32 and all(layer.shape.order == 2 for layer in layers)
        if backend is None:
            backend = "triton" if device.type == "cuda" and usable(device) and suits else "torch"
        if backend == "triton" and not suits:
            raise ShapeError("Triton expands sums of two factors in float32; use backend='torch' for others")
        self.backend, self.layerwise = backend, layerwise
        self.flat = nn.Parameter(torch.zeros(self.layout.parameters, dtype=dtype, device=device))
        entries = self.layout.entries
        self.matrices = torch.zeros(entries, dtype=compute_dtype, device=device)
        self.gradients = torch.zeros(len(self.flat) if layerwise else entries, dtype=dtype, device=device)
        self._written: set[int] = set()
        self._formed_at = -1
        self._launcher: Any = None

    def factors(self, layer: int) -> tuple[list[Tensor], list[Tensor]]:
        """Views of one layer's factors: those of Â, shapes (t, r_i, n_i), and those of B̂, shapes (s, m_i, r_i)."""
        flat = self.flat.detach()
        right, left = self.layout.right[layer], self.layout.left[layer]
        return right.views(flat), left.views(flat)

    def pair(self, layer: int) -> tuple[Tensor, Tensor]:
        """``(Â, scaling · B̂)`` as formed last: shapes (r, n) and (m, r), r padded; views of the buffer."""
        right, left = self.layout.right[layer], self.layout.left[layer]
        return right.matrix(self.matrices), left.matrix(self.matrices).mT

    def expand(self) -> Tensor:
        """Form every Â and B̂; an empty tensor through which gradients reach ``flat``."""
        self._written.clear()
        if self.layerwise:
            self.gradients.zero_()
        token: Tensor = _Token.apply(self.flat, self)  # type: ignore[no-untyped-call]
        return token

    def linear(
        self, token: Tensor, layer: int, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, fused: bool = False
    ) -> Tensor:
        """``x Wᵀ + b`` with the layer's adapter, W and b frozen, in one autograd node.

        Parameters
        ----------
        token : Tensor
            From `expand`.
        layer : int
            Which layer.
        x, weight, bias : Tensor
            Shapes (..., n), (m, n) and (m,), in the compute dtype.
        fused : bool
            Run the two Triton passes instead of matrix products.
        """
        entry = self.layout.layers[layer].shape.matrix_shape
        if weight.shape != entry or x.shape[-1] != entry[1]:
            raise ShapeError(
                f"layer {layer} of the arena is {entry[0]} x {entry[1]}, got a weight of {tuple(weight.shape)} and "
                f"inputs of {x.shape[-1]}"
            )
        return _ArenaLinear.apply(token, x, weight, bias, self, layer, fused)  # type: ignore[no-any-return, no-untyped-call]

    @torch.no_grad()
    def _form(self) -> None:
        self._formed_at = self.flat._version
        if self.backend == "triton":
            self._triton().expand(self.flat, self.matrices)
            return
        for group in self.layout.classes:
            formed = expand_stack(group.oriented(self.flat)).mul_(group.scales(self.flat))
            group.stack(self.matrices)[:, : group.rank].copy_(formed)

    def _contracted(self) -> Tensor:
        """The gradient of ``flat`` from all that layers have written since the last time."""
        flat = self.flat.detach()
        if self.layerwise:
            result = self.gradients.clone()
            self.gradients.zero_()
            return result
        for job in self.layout.jobs_without(self._written):
            job.matrix(self.gradients).zero_()
        self._written.clear()
        result = torch.empty_like(flat)
        if self.backend == "triton":
            self._triton().contract(flat, self.gradients, result)
            return result
        for group in self.layout.classes:
            gradient = group.stack(self.gradients)[:, : group.rank] * group.scales(flat)
            group.write(result, contract_stack(gradient, group.oriented(flat)))
        return result

    def _receive(self, layer: int, right: Gradient, left: Gradient) -> None:
        """Take a layer's gradients of Â (r, n) and of α B̂, transposed (r, m), each perhaps as a product to form."""
        for job, given in ((self.layout.right[layer], right), (self.layout.left[layer], left)):
            if self.layerwise:
                self._contract_alone(job, given)
                continue
            slab, again = job.matrix(self.gradients), layer in self._written
            if isinstance(given, tuple) and given[0].dtype == slab.dtype:
                torch.addmm(slab, *given, beta=int(again), out=slab)
                continue
            gradient = wide_product(*given, slab.dtype) if isinstance(given, tuple) else given
            (slab.add_ if again else slab.copy_)(gradient)
        self._written.add(layer)

    def _contract_alone(self, job: Job, given: Gradient) -> None:
        gradient = wide_product(*given, self.flat.dtype) if isinstance(given, tuple) else given
        scaled = (gradient[: job.rank] * job.scaling).unsqueeze(0)
        factors = job.oriented(self.flat.detach())
        contracted = contract_stack(scaled, [factor.unsqueeze(0) for factor in factors])
        for view, part in zip(job.views(self.gradients), contracted, strict=True):
            view.add_(part.squeeze(0).mT if job.transposed else part.squeeze(0))

    def _check_unchanged(self) -> None:
        if self.flat._version != self._formed_at:
            raise RuntimeError(
                f"the arena's factors changed between forward and backward: version {self.flat._version}, formed from "
                f"version {self._formed_at}; run backward before the optimizer's step"
            )

    def _triton(self) -> Any:
        if self._launcher is None:
            from benchmarks.adapters.candidate_kernels.triton_expansion import Launcher

            self._launcher = Launcher(self.layout.triton_jobs(), self.flat.device)
        return self._launcher


class _Token(torch.autograd.Function):
    """Reached once all layers of a backward pass, or of one checkpointed part of it, have written their gradients."""

    @staticmethod
    def forward(ctx: Any, flat: Tensor, arena: FactorArena) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.arena = arena
        arena._form()
        return flat.new_empty(0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, _: Tensor | None) -> tuple[Tensor | None, ...]:
        return ctx.arena._contracted(), None


class _ArenaLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        token: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        arena: FactorArena,
        layer: int,
        fused: bool,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        right, left = arena.pair(layer)
        with without_autocast(x.device.type):
            if fused:
                from benchmarks.adapters.candidate_kernels.triton_passes import add_low_rank

                y = torch.nn.functional.linear(rows, weight, bias)
                inner = add_low_rank(y, rows, right, left).mT
            else:
                y, inner = torch.nn.functional.linear(rows, weight, bias), right @ rows.mT
                y.addmm_(inner.mT, left.mT)
        ctx.save_for_backward(rows, weight, inner)
        ctx.arena, ctx.layer, ctx.fused, ctx.shape = arena, layer, fused, x.shape
        return y.view(*x.shape[:-1], y.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inner = ctx.saved_tensors
        arena = ctx.arena
        arena._check_unchanged()
        right, left = arena.pair(ctx.layer)
        dy = gradient.reshape(-1, gradient.shape[-1])
        with without_autocast(gradient.device.type):
            if ctx.fused:
                from benchmarks.adapters.candidate_kernels.triton_passes import backward_pass

                full = dy @ weight
                of_right, of_left = backward_pass(full, dy, x, inner.mT, right, left)
                dx: Tensor | None = full
                d_right: Gradient = of_right
                d_left: Gradient = of_left.mT
            else:
                t = left.mT @ dy.mT
                d_right, d_left = (t, x), (inner, dy)
                dx = (dy @ weight).addmm_(t.mT, right) if ctx.needs_input_grad[1] else None
        arena._receive(ctx.layer, d_right, d_left)
        return None, None if dx is None else dx.view(ctx.shape), None, None, None, None, None


__all__ = ["ArenaLayer", "FactorArena"]
