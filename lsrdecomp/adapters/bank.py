"""Many LSR adapters in one process: all of them packed in memory, the asked ones expanded into PEFT's LoRA slots.

A thousand adapters are kept as the numbers of their files and nothing else. The few that are in use
at a time live in ``slots`` LoRA adapters of one PEFT model, each layer at its adapter's own rank; a
name that is asked for and not in a slot takes the one least recently used.
"""

from __future__ import annotations

import copy
import json
import zlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from lsrdecomp.adapters.errors import UnsupportedLayerError
from lsrdecomp.adapters.geometry import LINEAR, geometry_of
from lsrdecomp.adapters.kernels import expand
from lsrdecomp.checkpoints.format import Bundle, open_bundle
from lsrdecomp.checkpoints.readers import lsr
from lsrdecomp.checkpoints.tensors import DTYPES, StoredTensor
from lsrdecomp.errors import CheckpointError, LsrError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from lsrdecomp.checkpoints.records import Checkpoint, KroneckerLayer


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """One adapter: its tensors as stored, and its config and their names, compressed; equal layouts are held once."""

    layout: bytes
    numbers: NDArray[np.uint8]

    def open(self, name: str) -> Checkpoint:
        """What `pack` took up, its tensors in memory; errors call it ``name``."""
        config, tensors = json.loads(zlib.decompress(self.layout))
        path, start, stored = Path(name), 0, {}
        for key, dtype, shape in tensors:
            size = prod(shape) * DTYPES[dtype].itemsize
            array = self.numbers[start : start + size].copy().view(DTYPES[dtype]).reshape(shape)
            stored[key] = StoredTensor(key, tuple(shape), dtype, path, partial(np.asarray, array))
            start += size
        return lsr.read(Bundle(path, path, stored, {}, config))


class AdapterBank:
    """Thousands of LSR adapters of one base model, a few of them ready to use.

    Parameters
    ----------
    model : torch.nn.Module
        The base model. It is wrapped by PEFT when the first adapter is asked for; call `model`, not
        it, from then on.
    slots : int
        How many adapters are ready at a time: each takes the memory of a LoRA of its own ranks.

    Examples
    --------
    >>> bank = AdapterBank(base, slots=8)                            # doctest: +SKIP
    >>> for folder in folders:                                       # doctest: +SKIP
    ...     bank.add(folder.name, folder)
    >>> bank.activate("customer-7")                                  # doctest: +SKIP
    >>> bank.model.generate(**inputs)                                # doctest: +SKIP
    >>> bank.model(**inputs, adapter_names=bank.load(["customer-7", "customer-9"]))  # doctest: +SKIP
    """

    def __init__(self, model: nn.Module, slots: int = 4) -> None:
        if slots < 1:
            raise ValueError(f"a bank needs at least one slot, got {slots}")
        self.base, self.slots = model, slots
        linear = (
            (name, module) for name, module in model.named_modules() if isinstance(module, LINEAR)
        )
        self.shapes = {name: geometry_of(module).matrix_shape for name, module in linear}
        self._packed_by_name: dict[str, PackedAdapter] = {}
        self._layouts: dict[bytes, bytes] = {}
        self._targets: set[str] = set()
        self._ready: OrderedDict[str, str] = (
            OrderedDict()
        )  # name to slot, the least recently used first
        self._model: PeftModel | None = None

    def __len__(self) -> int:
        return len(self._packed_by_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed_by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._packed_by_name

    @property
    def nbytes(self) -> int:
        """Bytes of all packed adapters, layouts among them, without the slots."""
        return sum(each.numbers.nbytes for each in self._packed_by_name.values()) + sum(
            map(len, self._layouts)
        )

    @property
    def ready(self) -> tuple[str, ...]:
        """Names of the adapters in slots, the least recently used first."""
        return tuple(self._ready)

    @property
    def model(self) -> PeftModel:
        """The PEFT model with the slots."""
        if self._model is None:
            if not self._targets:
                raise LsrError("the bank holds no adapter yet; add one first")
            config = LoraConfig(
                r=1, lora_alpha=1, target_modules=sorted(self._targets), inference_mode=True
            )
            base: Any = self.base
            self._model = made = get_peft_model(base, config, adapter_name=_slot(0))
            for slot in range(1, self.slots):
                made.add_adapter(_slot(slot), copy.copy(config))
            made.eval()
        return self._model

    def add(self, name: str, folder: str | Path) -> None:
        """Take up the adapter of an LSR directory; an adapter of that name is replaced.

        Raises
        ------
        CheckpointError
            For a directory that is damaged, no LSR adapter, or made for layers of other names or
            sizes.
        UnsupportedLayerError
            For layers that are not linear, and for anything beside factors: modules saved whole,
            biases, token rows.
        """
        packed, names = self._packed(Path(folder))
        if not names <= self._targets:
            self._targets |= names
            self._unload()
        self.remove(name)
        layout_bytes = self._layouts.setdefault(packed.layout, packed.layout)
        self._packed_by_name[name] = replace(packed, layout=layout_bytes)

    def remove(self, name: str) -> None:
        """Forget an adapter; nothing happens if there is none of that name."""
        self._packed_by_name.pop(name, None)
        slot = self._ready.pop(name, None)
        if slot is not None and self._model is not None:
            self._fill({slot: ()})
        used = {each.layout for each in self._packed_by_name.values()}
        self._layouts = {layout: layout for layout in self._layouts if layout in used}

    def load(self, names: Sequence[str]) -> list[str]:
        """Have adapters ready, and say in which slots: for PEFT's ``adapter_names=`` of a batch.

        Parameters
        ----------
        names : sequence of str
            Names of adapters, repeated at will; ``"__base__"`` stays as it is.

        Raises
        ------
        LsrError
            For unknown names, or more different ones than there are slots.
        """
        wanted = dict.fromkeys(name for name in names if name != "__base__")
        unknown = [name for name in wanted if name not in self._packed_by_name]
        if unknown:
            raise LsrError(
                f"no adapter {', '.join(map(repr, unknown[:3]))} among the {len(self)} of this bank"
            )
        if len(wanted) > self.slots:
            raise LsrError(
                f"{len(wanted)} adapters at once, but the bank has {self.slots} slots; make it with more"
            )
        if not wanted:
            return list(names)
        if self._model is None:
            self._fill({_slot(slot): () for slot in range(self.slots)})
        for name in wanted:
            if name in self._ready:
                self._ready.move_to_end(name)
        missing = [name for name in wanted if name not in self._ready]
        free = [slot for slot in map(_slot, range(self.slots)) if slot not in self._ready.values()]
        while len(free) < len(missing):
            free.append(self._ready.popitem(last=False)[1])
        placed = dict(zip(missing, free, strict=False))
        if placed:
            packed = {slot: self._packed_by_name[name].open(name) for name, slot in placed.items()}
            self._fill({slot: adapter.layers for slot, adapter in packed.items()})
            self._ready.update(placed)
        return [self._ready.get(name, name) for name in names]

    def activate(self, name: str) -> str:
        """Make one adapter the active one of `model`, and say in which slot it is."""
        (slot,) = self.load([name])
        if self.model.active_adapter != slot:
            self.model.set_adapter(slot, inference_mode=True)
        return slot

    def _unload(self) -> None:
        """Back to the bare base: the next `load` makes slots for all layers that are targeted by then."""
        if self._model is not None:
            self.base, self._model = self._model.unload(), None
            self._ready.clear()

    def _packed(self, folder: Path) -> tuple[PackedAdapter, set[str]]:
        """An adapter in few bytes, and the names of its layers."""
        bundle = open_bundle(folder)
        if not lsr.matches(bundle):
            raise CheckpointError(
                "is no LSR adapter; `lsrdecomp compress` makes one of a LoRA", path=folder
            )
        checkpoint = lsr.read(bundle)
        if checkpoint.extras:
            first = next(iter(checkpoint.extras))
            raise UnsupportedLayerError(
                f"{folder}: a bank holds Kronecker factors alone, but there is also {first}"
            )
        layers: tuple[KroneckerLayer, ...] = checkpoint.layers
        for layer in layers:
            self._check(layer, folder)
        return pack(bundle), {layer.name for layer in layers}

    def _check(self, layer: KroneckerLayer, folder: Path) -> None:
        shape = self.shapes.get(layer.name)
        if shape is None:
            raise CheckpointError(f"the base model has no linear layer {layer.name}", path=folder)
        if layer.layer_type not in ("linear", "conv1d"):
            raise UnsupportedLayerError(
                f"{folder}: {layer.name} is of kind {layer.layer_type}; a bank holds linear layers"
            )
        if shape != layer.shape.matrix_shape:
            ours, theirs = (
                " x ".join(map(str, each)) for each in (layer.shape.matrix_shape, shape)
            )
            raise CheckpointError(
                f"{layer.name} is {ours}, but {theirs} in the base model", path=folder
            )

    @torch.no_grad()
    def _fill(self, slots: dict[str, Sequence[KroneckerLayer]]) -> None:
        """Form what goes into these slots and put it there; a layer that is left out gets rank 0."""
        tuner: Any = self.model.base_model.model
        first = next(
            parameter for parameter in self.base.parameters() if parameter.is_floating_point()
        )
        wide = torch.promote_types(first.dtype, torch.float32)
        for slot, layers in slots.items():
            by_name = {layer.name: layer for layer in layers}
            for name in self._targets:
                out, into = self.shapes[name]
                left, right = torch.empty(out, 0), torch.empty(0, into)
                if name in by_name:
                    sides = by_name[name].load()
                    left, right = (
                        expand([torch.from_numpy(f).to(first.device, wide) for f in side])
                        for side in sides
                    )
                    left = by_name[name].scale * left
                _put(tuner.get_submodule(name), slot, left.to(first.dtype), right.to(first.dtype))


def _put(layer: Any, slot: str, left: Tensor, right: Tensor) -> None:
    """Hand a pair to a LoRA layer, at its own rank; the scale is in the pair."""
    device = layer.get_base_layer().weight.device
    layer.lora_B[slot].weight.data, layer.lora_A[slot].weight.data = (
        left.to(device),
        right.to(device),
    )
    layer.r[slot] = layer.lora_alpha[slot] = right.shape[0]
    layer.scaling[slot] = 1.0


def _slot(number: int) -> str:
    return f"slot-{number}"


def pack(bundle: Bundle) -> PackedAdapter:
    """An LSR directory in few bytes."""
    tensors = list(bundle.tensors.values())
    layout = [bundle.config, [[tensor.name, tensor.dtype, tensor.shape] for tensor in tensors]]
    return PackedAdapter(
        zlib.compress(json.dumps(layout).encode(), 9),
        np.concatenate(
            [np.ascontiguousarray(tensor.read()).view(np.uint8).ravel() for tensor in tensors]
        ),
    )
