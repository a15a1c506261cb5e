"""A layer of the base model with adapters beside it: forward passes, mixed batches, DoRA, scales.

What ΔW is made of is the subclass's duty; how it acts in the layer is the geometry's.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from peft.utils import quantization_extra_repr, resolve_quantization_backend
from torch import Tensor, nn

from lsrdecomp.errors import MergeError, UnsupportedLayerError
from lsrdecomp.lora.peft.geometry import EmbeddingGeometry, Geometry, LinearGeometry, geometry_of
from lsrdecomp.lora.peft.merging import Mergeable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


class AdaptedLayer(nn.Module, Mergeable):
    """Base of the adapter layers of every structure.

    A subclass names its parameter containers in ``adapter_layer_names`` and its other attributes of
    one entry per adapter in ``other_param_names``, `SCALE` among them, calls `set_initial_scale` in
    `update_layer`, and says what ΔW is through `delta_matrix` and `delta_output`. The class of its
    linear layers has "Linear" in its name: by that PEFT finds them when a further adapter targets
    "all-linear".
    """

    SCALE: tuple[str, ...] = ("scaling", "initial_scaling")
    """Attributes that hold the scale of each adapter."""

    def __init__(self, base_layer: nn.Module, **quantization: Any) -> None:
        super().__init__()
        self.base_layer = base_layer
        inner = self.get_base_layer()
        self.quantization_backend = quantization_backend(inner, **quantization)
        self.geometry = self._geometry_of(inner)
        self.out_features, self.in_features = self.geometry.matrix_shape
        self._disable_adapters = False
        self.cast_input_dtype_enabled = True  # of PEFT's `disable_input_dtype_casting`
        self.merged_adapters = []
        self.merge_shares = {}
        self._merged = {}
        self.scaling: dict[str, float] = {}
        self.initial_scaling: dict[str, float] = {}

    def update_layer(self, adapter: str, config: Any, name: str) -> None:
        """Add an adapter to this layer; the tuner moves and activates it.

        Parameters
        ----------
        adapter : str
            Name of the adapter.
        config : TargetConfig
            Its settings.
        name : str
            Full name of this module in the base model.
        """
        raise NotImplementedError

    def delta_matrix(self, adapter: str) -> Tensor:
        """Return ΔW of one adapter as a matrix (out, in), scaling included."""
        raise NotImplementedError

    def delta_output(self, adapter: str, x: Tensor) -> Tensor:
        """Return what ΔW of one adapter adds to the layer's output for an input."""
        raise NotImplementedError

    def set_initial_scale(self, adapter: str, scale: float) -> None:
        """Set the scale that an adapter's settings give it."""
        self.initial_scaling[adapter] = scale
        self.scaling[adapter] = scale

    def set_scale(self, adapter: str, scale: float) -> None:
        """Scale ΔW by ``scale`` times what its settings say, if this layer has the adapter."""
        if self.has_adapter(adapter):
            self.scaling[adapter] = scale * self.initial_scaling[adapter]

    def scale_layer(self, scale: float) -> None:
        """Multiply the present scale of every active adapter.

        diffusers calls this for a weight that is given with a call.
        """
        for adapter in filter(self.has_adapter, self.active_adapters):
            self.scaling[adapter] *= scale

    def unscale_layer(self, scale: float | None = None) -> None:
        """Divide the present scale of every active adapter, or set it to what its settings say."""
        for adapter in filter(self.has_adapter, self.active_adapters):
            if scale is None:
                self.scaling[adapter] = self.initial_scaling[adapter]
            else:
                self.scaling[adapter] /= scale

    def adapter_keys(self, adapter: str) -> list[str]:
        """Return the state dict keys of one adapter's parameters within this layer."""
        prefixes = tuple(f"{container}.{adapter}." for container in self.adapter_layer_names)
        names = [name for name, _ in self.named_parameters()]
        # The dot at the end, so that an adapter "a" has no keys of an adapter "ab".
        return [name for name in names if f"{name}.".startswith(prefixes)]

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return ΔW of one adapter in the shape of the layer's weight."""
        return self.geometry.to_weight(self.delta_matrix(adapter))

    def _geometry_of(self, layer: nn.Module) -> Geometry:
        return geometry_of(layer, quantized=self.quantization_backend is not None)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the layer's output with that of its active adapters.

        With ``adapter_names``, each row of the batch goes through the adapter of that name.
        """
        adapter_names = kwargs.pop("adapter_names", None)
        if adapter_names is not None:
            self._check_mixed_batch(x, adapter_names)
        # 1. Run the base layer, which is all where adapters are off or in its weight already.
        if self.disable_adapters and self.merged:
            self.unmerge()
        result: Tensor = self.base_layer(x, *args, **kwargs)
        if self.disable_adapters or self.merged:
            return result
        if not isinstance(result, Tensor):
            raise UnsupportedLayerError(
                f"a {type(self.get_base_layer()).__name__} returns a {type(result).__name__}, to "
                "which no adapter can add; leave it out by exclude_modules, as of a router"
            )
        if self.quantization_backend is not None:
            result = self.quantization_backend.maybe_clone_base_result(result)
        # 2. Add the output of each adapter: to the rows that name it, or that of all active ones
        #    to every row.
        if adapter_names is not None:
            return self._mixed_batch(x, result, adapter_names)
        base = result
        for adapter in self.active_adapters:
            if self.has_adapter(adapter):
                result = self._with_adapter(adapter, x, result, base)
        return result.to(base.dtype)

    def _with_adapter(self, adapter: str, x: Tensor, result: Tensor, base: Tensor) -> Tensor:
        """Return ``result`` and what one adapter adds to it.

        ``base`` is the output for ``x`` without adapters.
        """
        delta = self.delta_output(adapter, x)
        if isinstance(self.geometry, EmbeddingGeometry):
            # Some embeddings multiply the rows that they looked up.
            embed_scale = self._get_embed_scale()  # type: ignore[no-untyped-call]
            if embed_scale is not None:
                delta = delta * embed_scale.to(delta.dtype)
        magnitude = self.magnitude(adapter)
        if magnitude is None:
            return result + delta
        # DoRA: every row of W + ΔW gets its trained norm.
        bias = getattr(self.get_base_layer(), "bias", None)
        without_bias = base if bias is None else base - self.geometry.along_output(bias)
        weight = self.geometry.to_matrix(self.get_base_weight())
        if weight.is_meta and not x.is_meta:
            raise UnsupportedLayerError(
                "DoRA reads the weights of the base, which are offloaded: merge the adapter first, "
                "or keep the layers that it adapts on the device"
            )
        norms = row_norms(weight, self.delta_matrix(adapter))
        scale = self.geometry.along_output(magnitude / norms)
        return result + (scale - 1) * without_bias + scale * delta

    def output_scale(self, adapter: str, weight: Tensor) -> Tensor | None:
        """Return DoRA's factor of every output for the unmerged weight; None without DoRA."""
        magnitude = self.magnitude(adapter)
        if magnitude is None:
            return None
        scale = magnitude / row_norms(self.geometry.to_matrix(weight), self.delta_matrix(adapter))
        return self.geometry.to_weight(scale.unsqueeze(1).expand(self.geometry.matrix_shape))

    def _check_mixed_batch(self, x: Tensor, adapter_names: Sequence[str]) -> None:
        if len(x) != len(adapter_names):
            raise ValueError(
                "Length of `adapter_names` should be the same as the number of inputs, but got "
                f"{len(adapter_names)} and {len(x)} respectively."
            )
        if self.merged:
            raise ValueError(
                "Cannot pass `adapter_names` when there are merged adapters, please call "
                "`unmerge_adapter` first."
            )

    def _mixed_batch(self, x: Tensor, result: Tensor, adapter_names: Sequence[str]) -> Tensor:
        """Add each adapter's output to the rows that name it."""
        result = result.clone()
        for adapter in dict.fromkeys(adapter_names):
            if self.has_adapter(adapter):
                rows = [index for index, name in enumerate(adapter_names) if name == adapter]
                base = result[rows]
                result[rows] = self._with_adapter(adapter, x[rows], base, base).to(result.dtype)
        return result

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Return whether PEFT can convert one adapter of this layer to LoRA."""
        # PEFT's conversion writes every ΔW as a linear layer's, and drops magnitudes.
        return isinstance(self.geometry, LinearGeometry) and self.magnitude(adapter_name) is None

    def extra_repr(self) -> str:
        """Return how the base layer is quantized."""
        return str(quantization_extra_repr(self))


def quantization_backend(layer: nn.Module, **quantization: Any) -> Any:
    """Return PEFT's backend for a layer of the base model; None for one that is not quantized.

    PEFT asks transformers' quantizer how to quantize a merged weight again. A base that
    ``torchao.quantize_`` made has none: it can be adapted and trained on, and says so when it is
    asked to merge.
    """
    if quantization.get("get_apply_tensor_subclass") is not None:
        return resolve_quantization_backend(layer, **quantization)
    quantization["get_apply_tensor_subclass"] = unknown_subclass
    backend: Any = resolve_quantization_backend(layer, **quantization)
    if getattr(backend, "get_apply_tensor_subclass", None) is unknown_subclass:
        backend.supports_merge = False
    return backend


def unknown_subclass() -> Any:
    """Stand for a quantization that nothing recorded; `Mergeable` refuses before this is called."""
    raise NotImplementedError("how the base was quantized is not known")


def dropout(share: float) -> nn.Module:
    """Return dropout of a share of the entries; the identity for none, which costs nothing."""
    return nn.Dropout(share) if share > 0 else nn.Identity()


@torch.no_grad()
def row_norms(weight: Tensor, delta: Tensor) -> Tensor:
    """Return the norms of the rows of ``W + ΔW``, both (out, in), constant for the gradient.

    DoRA (Liu et al., 2024, section 4.3) treats the norm as a constant: only the magnitude and the
    direction's numerator are trained.
    """
    # Norms in 16 bits would not even restore W for ΔW = 0.
    dtype = torch.promote_types(delta.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(weight.to(dtype) + delta.to(dtype), dim=1)
    return norms


@contextmanager
def rescale(
    model: nn.Module, factor: float, adapters: Sequence[str] | None = None
) -> Iterator[None]:
    """Multiply ΔW of the active (or the named) adapters by ``factor`` within the context.

    Parameters
    ----------
    model : torch.nn.Module
        A model with adapters of any kind of this package.
    factor : float
        0 switches the adapters off, 1 changes nothing.
    adapters : sequence of str, optional
        The active adapters of each layer if absent.

    Raises
    ------
    MergeError
        If one of these adapters is merged, for then its scale is in the weights already.

    Examples
    --------
    >>> with rescale(model, 0.5):                                   # doctest: +SKIP
    ...     half = model(**inputs).logits
    """
    # 1. The adapters of each layer, none of them merged.
    layers = [module for module in model.modules() if isinstance(module, AdaptedLayer)]
    rescaled: list[tuple[AdaptedLayer, list[str]]] = []
    merged: set[str] = set()
    for layer in layers:
        names = [name for name in adapters or layer.active_adapters if layer.has_adapter(name)]
        rescaled.append((layer, names))
        merged.update(name for name in names if name in layer.merged_adapters)
    if merged:
        raise MergeError(
            f"adapters {sorted(merged)} are merged; call unmerge_adapter() before rescaling them"
        )
    # 2. Their scales, and back.
    scaling_before = [dict(layer.scaling) for layer in layers]
    for layer, names in rescaled:
        for name in names:
            layer.scaling[name] *= factor
    try:
        yield
    finally:
        for layer, scaling in zip(layers, scaling_before, strict=True):
            for name, value in scaling.items():
                if layer.has_adapter(name):  # it may have been deleted meanwhile
                    layer.scaling[name] = value
