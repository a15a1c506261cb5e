"""Turn an adapter up or down for a while: ΔW times a factor, within a context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from lsrdecomp.adapters.adapted import AdaptedLayer
from lsrdecomp.adapters.errors import MergeError


@contextmanager
def rescale(model: nn.Module, factor: float, adapters: Sequence[str] | None = None) -> Iterator[None]:
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
    layers = [module for module in model.modules() if isinstance(module, AdaptedLayer)]
    chosen = [
        (layer, [name for name in adapters or layer.active_adapters if layer.has_adapter(name)]) for layer in layers
    ]
    merged = sorted({name for layer, names in chosen for name in names if name in layer.merged_adapters})
    if merged:
        raise MergeError(f"adapters {merged} are merged; call unmerge_adapter() before rescaling them")
    before = [dict(layer.scaling) for layer in layers]
    for layer, names in chosen:
        for name in names:
            layer.scaling[name] *= factor
    try:
        yield
    finally:
        for layer, scaling in zip(layers, before, strict=True):
            layer.scaling.update({name: value for name, value in scaling.items() if layer.has_adapter(name)})
