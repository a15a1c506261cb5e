"""Adding ΔW to a layer's weight and taking it out again; what rounding left of it is measured."""

from __future__ import annotations

import math
import warnings

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor

from lsrdecomp.errors import MergeError

NOT_FINITE = "NaNs detected in the merged weights. The adapter {adapter} seems to be broken"
"""In PEFT's words, which programs look for."""


class Mergeable(BaseTunerLayer):
    """Merging for layers that say what ΔW is and, for DoRA, how its rows are scaled.

    With W the weight before any merge, an adapter adds ``(s - 1) W + s ΔW``, where s holds one
    factor per output for DoRA and is 1 without it. What was added is taken out by the same formula,
    so no copy of W is kept.
    """

    min_merge_share = 0.5
    """Smallest share of an update that must survive rounding to the weight's precision, by hand.

    `LsrModel.merge_and_unload` and `merge_adapter` take another as ``min_share``.
    """

    merged_adapters: list[str]
    merge_shares: dict[str, float]
    _merged: dict[str, tuple[float, Tensor | None]]
    """The scaling and, for DoRA, the scale of the rows that adapters were merged with."""
    scaling: dict[str, float]

    def has_adapter(self, adapter: str) -> bool:
        """Return whether this layer has an adapter of that name."""
        return adapter in self.scaling

    def get_delta_weight(self, adapter: str) -> Tensor:
        """Return ΔW of one adapter in the shape of the weight."""
        raise NotImplementedError

    def magnitude(self, adapter: str) -> Tensor | None:
        """Return DoRA's trained row norms of one adapter, or None without DoRA."""
        del adapter  # layers with DoRA ask for it
        return None

    def output_scale(self, adapter: str, weight: Tensor) -> Tensor | None:
        """Return DoRA's factor of every output for the unmerged weight; None without DoRA.

        Its shape is one that multiplies the weight.
        """
        raise NotImplementedError

    @torch.no_grad()
    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add ΔW of the active (or the named) adapters to the layer's weight.

        The sum is taken in at least float32 and rounded once to the weight's own precision. The
        share of the update that survived the rounding, ⟨change, update⟩ / ‖update‖², is kept in
        ``merge_shares``: in bfloat16 an update a thousand times smaller than its weight loses half
        of itself, and in 4 bits nearly all.

        Raises
        ------
        MergeError
            If less than ``min_merge_share`` survives or, with ``safe_merge``, if the sum is not
            finite. The weight is then left as it was.
        """
        for adapter in self._to_merge(adapter_names):
            if not self.merged_elsewhere(adapter):
                self._merge_one(adapter, safe_merge)
            self.merged_adapters.append(adapter)

    def merged_elsewhere(self, adapter: str) -> bool:
        """Return whether another layer that shares this one's weight does the merging."""
        del adapter  # layers that can be tied ask for it
        return False

    @torch.no_grad()
    def merge_would_lose(self, adapter_names: list[str] | None = None) -> dict[str, float]:
        """Return, by adapter, the shares that would fall below ``min_merge_share``.

        Each adapter is merged by itself and taken out again, so that nothing is changed.
        """
        adapters = self._to_merge(adapter_names)
        stored = self.get_base_weight()
        if self.quantization_backend is None and stored.dtype in (torch.float32, torch.float64):
            return {}
        refused = {}
        for adapter in adapters:
            if not self.merged_elsewhere(adapter):
                share, is_refused, _ = self._add(adapter, stored)
                self.set_base_weight(stored)
                if is_refused:
                    refused[adapter] = share
        return refused

    def _merge_one(self, adapter: str, safe_merge: bool) -> None:
        stored = self.get_base_weight()
        share, refused, scale = self._add(adapter, stored, safe_merge)
        if refused:
            self.set_base_weight(stored)
            raise self.share_error(adapter, share)
        self.merge_shares[adapter] = share
        self._merged[adapter] = self.scaling[adapter], scale

    def _add(
        self, adapter: str, stored: Tensor, safe: bool = False
    ) -> tuple[float, bool, Tensor | None]:
        """Set the weight to the merged one.

        Returns
        -------
        share : float
            The share of the update that survived rounding.
        refused : bool
            Whether that is too little.
        scale : Tensor or None
            DoRA's scale of the rows.
        """
        # 1. The sum, rounded once; a quantized weight rounds again as it is set, so that it is read
        # back.
        update, scale = self._update(adapter, stored)
        wide = stored.to(update)
        merged = (wide + update).to(stored.dtype)
        if safe and not torch.isfinite(merged).all():
            raise MergeError(NOT_FINITE.format(adapter=adapter))
        self.set_base_weight(merged)
        # 2. The share of the update that is found in the weight as it is stored now.
        share = surviving_share(wide, self.get_base_weight().to(update), update)
        return share, self._refused(adapter, share, update, stored), scale

    def _to_merge(self, adapter_names: list[str] | None) -> list[str]:
        """Return the adapters to merge into this layer; `MergeError` if its weight takes none."""
        adapters = [
            name for name in check_adapters_to_merge(self, adapter_names) if self.has_adapter(name)
        ]
        backend = self.quantization_backend
        if adapters and backend is not None and not backend.supports_merge:
            raise MergeError(
                f"a weight quantized by {backend.backend_name} cannot be merged here, since "
                "nothing says how to quantize the sum again: load the base through transformers "
                "with its quantization_config, merge into an unquantized copy, or keep the adapter "
                "unmerged"
            )
        return adapters

    def _update(self, adapter: str, stored: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return what to add to the weight, in at least float32, and DoRA's scale of the rows."""
        wide = stored.to(torch.promote_types(stored.dtype, torch.float32))
        delta = self.get_delta_weight(adapter).to(wide.device, wide.dtype)
        weight = self._unmerged(wide)
        scale = self.output_scale(adapter, weight)
        if scale is None:
            return delta, None
        scale = scale.to(wide)
        return (scale - 1) * weight + scale * delta, scale

    @torch.no_grad()
    def unmerge(self) -> None:
        """Take every merged ΔW out of the layer's weight again, up to rounding."""
        if not self.merged:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        stored = self.get_base_weight()
        weight = self._unmerged(stored.to(torch.promote_types(stored.dtype, torch.float32)))
        self.set_base_weight(weight.to(stored.dtype))
        self.merged_adapters.clear()
        self._merged.clear()

    def _unmerged(self, merged: Tensor) -> Tensor:
        """Return the weight without the merged adapters; the argument itself if there are none."""
        # Each adapter added (s − 1) W + s ΔW: the sum is undone by taking out all s ΔW and dividing
        # by 1 + Σ (s − 1).
        weight = merged
        for adapter, (scaling, scale) in self._merged.items():
            if self.has_adapter(adapter):
                delta = self._delta_scaled(adapter, scaling).to(merged)
                weight = weight - (delta if scale is None else scale * delta)
        scales = [scale for _, scale in self._merged.values() if scale is not None]
        if not scales:
            return weight
        return weight / sum((scale - 1 for scale in scales), start=1)

    def _delta_scaled(self, adapter: str, scaling: float) -> Tensor:
        """Return ΔW as it was merged, whatever the adapter has been scaled by since."""
        present_scaling = self.scaling[adapter]
        self.scaling[adapter] = scaling
        try:
            return self.get_delta_weight(adapter)
        finally:
            self.scaling[adapter] = present_scaling

    def _refused(self, adapter: str, share: float, update: Tensor, stored: Tensor) -> bool:
        """Return whether too little of an update survived."""
        if share >= self.min_merge_share:
            return False
        if self.magnitude(adapter) is None or not stored.dtype.is_floating_point:
            return True
        # PEFT starts DoRA's magnitudes in the weight's precision. What lies within their rounding
        # is no update.
        rounding = 2 * torch.finfo(stored.dtype).eps * float(stored.float().norm())
        return float(update.norm()) > rounding

    def share_error(self, adapter: str, share: float, name: str = "") -> MergeError:
        """Return the error that says how little of an adapter's update would survive."""
        layer = f"{name}: " if name else ""
        if not math.isfinite(share):
            return MergeError(f"{layer}{NOT_FINITE.format(adapter=adapter)}")
        precision = self._precision(self.get_base_weight())
        return MergeError(
            f"{layer}only {share:.0%} of the update of adapter {adapter} would survive in "
            f"{precision}, less than the {self.min_merge_share:.0%} asked for. Keep it unmerged, "
            "merge into a float32 copy of the base, or pass min_share=0 to merge nevertheless."
        )

    def _precision(self, weight: Tensor) -> str:
        """Return the name of the precision that a weight is stored in."""
        if self.quantization_backend is not None:
            return self.quantization_backend.backend_name
        return str(weight.dtype).removeprefix("torch.")


def surviving_share(before: Tensor, after: Tensor, update: Tensor) -> float:
    """Return the share of an update that is found in a stored weight; 1 of an update of zeros.

    ``⟨after − before, update⟩ / ‖update‖²``, in at least float32, summed in double precision.
    """
    wide = torch.promote_types(update.dtype, torch.float32)
    update = update.to(wide)
    squared_norm = float(update.square().sum(dtype=torch.float64))
    change = after.to(wide) - before.to(wide)
    product = float((change * update).sum(dtype=torch.float64))
    return product / squared_norm if squared_norm else 1.0
