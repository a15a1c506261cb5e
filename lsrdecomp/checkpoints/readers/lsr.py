"""LSR directories, ours, read: every size checked against the config, packed layers unpacked."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp._ordering import natural_key
from lsrdecomp.checkpoints.config import Config, Patterns, Scales, check_carried, missing_modules
from lsrdecomp.checkpoints.format import (
    NOT_READ,
    PREFIX,
    Bundle,
    make_checkpoint,
    refuse_alpha,
    refuse_fields,
    without_prefix,
)
from lsrdecomp.checkpoints.packed import NUMBERS, PACKED, IndexEntry, PackedLayer
from lsrdecomp.checkpoints.packed_index import FIELD, Index, read_index, read_kinds, read_packed
from lsrdecomp.checkpoints.records import Checkpoint, KroneckerLayer
from lsrdecomp.checkpoints.tensors import FLOATS, Array, StoredTensor
from lsrdecomp.checkpoints.writing import provenance
from lsrdecomp.errors import CheckpointError, ShapeError, UnsupportedError
from lsrdecomp.kronecker.shape import ProductShape, balanced_split

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

name = "lsr"
KEY = re.compile(r"(?P<name>.+)\.lsr_(?P<side>[AB])\.factor_(?P<position>[1-9][0-9]{0,2})")
DORA = (
    "DoRA rescales every row by the norm of the base weights, which are not in this file "
    "(lsrdecomp.adapters.to_lora carries the magnitudes over to LoRA)"
)
REFUSED = {
    "use_dora": DORA,
    "target_parameters": "it targets bare parameters (experts), whose factors are stored stacked",
}
MOST_FACTORS = 16
LARGEST_SIDE = 2**31  # its divisors are looked for one by one


def matches(bundle: Bundle) -> bool:
    """peft_type LSR."""
    return bundle.config is not None and bundle.config.get("peft_type") == "LSR"


def read(bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
    """Layers of an LSR directory; `CheckpointError` where factors and config disagree, as PEFT would refuse it too."""
    own, index = bundle.config or {}, _index(bundle)
    raw = dict(own) | ({} if index is None else index.config_fields())
    config = Config(raw, bundle.config_path)
    refuse_alpha(bundle, alpha)
    refuse_fields(config, REFUSED if index is None else {"use_dora": DORA})
    check_carried(config)
    expected = _Expected(config)
    kinds = provenance_kinds(bundle) if index is None else index.kinds
    linear = "conv1d" if config.flag("fan_in_fan_out") else "linear"
    tensors, packed = _unpacked(bundle, index)
    sides, extras = _split(tensors)
    layers = []
    for module in sorted(
        sides, key=natural_key
    ):  # the first fault in this order is the one that is told
        layer_type, kernel = kinds.get(module, (linear, ()))
        layer = expected.layer(module, sides[module]["B"], sides[module]["A"], layer_type, kernel)
        if module in packed:
            entry = packed[module]
            layer = replace(
                layer,
                dtype=entry.storage,
                stored_parameters=entry.parameters,
                stored_label=entry.label,
            )
        layers.append(layer)
    notes = missing_modules(own, extras)
    return make_checkpoint(bundle, name, layers, extras, notes, config=raw, parts="lsr_A and lsr_B")


def provenance_kinds(bundle: Bundle) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Kind and kernel of the layers that are not plain Linear, from the header's record."""
    record = Checkpoint(bundle.path, "lsr", {}, (), {}, bundle.weights, bundle.metadata)
    try:
        return read_kinds(provenance(record).get("kinds", {}))
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(
            "the header's record of layer kinds is damaged", path=bundle.weights
        ) from None


class _Expected:
    """Sizes the config promises for each layer."""

    def __init__(self, config: Config) -> None:
        raw, path = config.raw, config.path
        # Defaults are those of `lsrdecomp.adapters.LsrConfig`.
        try:
            self.inner = (
                None if raw.get("inner_shape") is None else sizes("inner_shape", raw["inner_shape"])
            )
            self.terms = separation_ranks("separation_rank", raw.get("separation_rank", 8))
            terms = {
                key: separation_ranks(f"separation_rank_pattern[{key!r}]", value)
                for key, value in config.mapping("separation_rank_pattern").items()
            }
            shapes = {
                key: product_shape(f"shape_pattern[{key!r}]", value)
                for key, value in config.mapping("shape_pattern").items()
            }
        except ShapeError as error:
            raise CheckpointError(str(error), path=path) from None
        self.order = (
            config.integer("order") if raw.get("order") is not None else len(self.inner or (1, 1))
        )
        if self.order > MOST_FACTORS:
            raise config.error("order", f"at most {MOST_FACTORS} factors")
        usual = math.prod(self.inner) if self.inner else 16
        rank = config.integer("r") if raw.get("r") is not None else usual
        # Exact names first, as `lsrdecomp.adapters.config.find`.
        self.scales = Scales(config, rank, config.number("lsr_alpha", 16), exact_first=True)
        self.all_terms = Patterns(terms, "separation_rank_pattern", path, exact_first=True)
        self.shapes = Patterns(shapes, "shape_pattern", path, exact_first=True)

    def layer(
        self,
        name: str,
        left: list[StoredTensor],
        right: list[StoredTensor],
        layer_type: str,
        kernel: tuple[int, ...],
    ) -> KroneckerLayer:
        for tensor in (*left, *right):
            if len(tensor.shape) != 3 or 0 in tensor.shape:
                raise tensor.error(
                    f"shape {tensor.shape}, expected three sizes: terms, rows, columns"
                )
            if tensor.dtype not in FLOATS:
                raise tensor.error(f"dtype {tensor.dtype}, expected floating-point numbers")
        if len(left) != len(right):
            raise left[0].error(f"{len(left)} factors of lsr_B, but {len(right)} of lsr_A")
        for side in (left, right):
            for tensor in side[1:]:
                if tensor.shape[0] != side[0].shape[0]:
                    raise tensor.error(
                        f"{tensor.shape[0]} terms, but {side[0].shape[0]} in {side[0].name}"
                    )
        for first, other in zip(left, right, strict=True):
            if first.shape[2] != other.shape[1]:
                raise first.error(
                    f"inner size {first.shape[2]}, but {other.shape[1]} in {other.name}"
                )
        shape = ProductShape(
            tuple(t.shape[1] for t in left),
            tuple(t.shape[2] for t in left),
            tuple(t.shape[2] for t in right),
        )
        configured: ProductShape | None = self.shapes.get(name, None)
        if max(shape.matrix_shape) > LARGEST_SIDE or len(left) > MOST_FACTORS:
            size = " x ".join(map(str, shape.matrix_shape))
            raise left[0].error(f"{len(left)} factors of a {size} matrix; no layer is that large")
        rank = self.scales.rank(name, None if configured is None else configured.inner_rank)
        promised = configured or self.default(shape.matrix_shape, rank)
        if promised != shape or shape.inner_rank != rank:
            raise left[0].error(
                f"factors of shape {shape}, but the config says {promised} with r = {rank}"
            )
        terms = self.all_terms.get(name, self.terms)
        if (left[0].shape[0], right[0].shape[0]) != terms:
            text = f"separation ranks {left[0].shape[0]} and {right[0].shape[0]}, but the config says {terms}"
            raise left[0].error(text)
        scale, dtype = self.scales.of(name, rank), left[0].dtype
        return KroneckerLayer(
            name, layer_type, shape, *terms, scale, dtype, tuple(left), tuple(right), kernel
        )

    def default(self, matrix_shape: tuple[int, int], rank: int) -> ProductShape:
        inner = self.inner if self.inner is not None and math.prod(self.inner) == rank else None
        return ProductShape.balanced(matrix_shape, inner or balanced_split(rank, self.order))


def positive(name: str, value: Any) -> int:
    """``value`` as a positive integer, or a `ShapeError` naming the setting, in PEFT's words."""
    if type(value) is not int or value < 1:
        raise ShapeError(
            f"{name} should be a positive integer value but the value passed is {ascii(value)[:80]}"
        )
    return value


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """One positive integer for each factor."""
    if not isinstance(value, list | tuple) or not value:
        raise ShapeError(f"{name} should be a list of positive integers, got {ascii(value)[:80]}")
    return tuple(positive(name, size) for size in value)


def separation_ranks(name: str, value: Any) -> tuple[int, int]:
    """Terms of the out side and of the in side, from one number or two."""
    both = value if isinstance(value, list | tuple) else [value, value]
    if len(both) != 2:
        raise ShapeError(
            f"{name} should be one number or [out side, in side], got {ascii(value)[:80]}"
        )
    return positive(name, both[0]), positive(name, both[1])


def product_shape(name: str, value: Any) -> ProductShape:
    """A `ProductShape` from one value of ``shape_pattern``."""
    if not isinstance(value, dict) or set(value) != {"out", "inner", "into"}:
        raise ShapeError(
            f'{name} must be {{"out": [...], "inner": [...], "into": [...]}}, got {ascii(value)[:80]}'
        )
    try:
        return ProductShape(**{side: sizes(side, split) for side, split in value.items()})
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None


def _index(bundle: Bundle) -> Index | None:
    text = (bundle.config or {}).get(FIELD)
    if text is None and NUMBERS in bundle.tensors:
        raise bundle.config_error(
            f"lacks {FIELD}, the index of the numbers in {bundle.weights.name}; copy both again"
        )
    if text is not None and NUMBERS not in bundle.tensors:
        reason = f"is missing, of which {bundle.config_path.name} has the index ({FIELD}); copy both again"
        raise CheckpointError(reason, path=bundle.weights, tensor=NUMBERS)
    try:
        return None if text is None else read_index(text)
    except CheckpointError as error:
        raise bundle.config_error(str(error)) from None


def _unpacked(
    bundle: Bundle, index: Index | None
) -> tuple[dict[str, StoredTensor], dict[str, IndexEntry]]:
    """Return all tensors by name, factors of packed layers among them, and what the index says of packed layers."""
    tensors = dict(bundle.tensors)
    entries = {}
    for key, read in ((PACKED, read_packed), (NUMBERS, None if index is None else index.layers)):
        packed = tensors.pop(key, None)
        if packed is None or read is None:
            continue
        if packed.dtype != "uint8" or len(packed.shape) != 1:
            raise packed.error(f"shape {packed.shape} of {packed.dtype}, expected a row of bytes")
        layers = read(packed.read())

        @lru_cache(maxsize=1)
        def factors(
            name: str, layers: Mapping[str, PackedLayer] = layers
        ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
            return layers[name].factors()

        for name, layer in layers.items():
            entries[name] = layer.entry
            for side, (letter, shapes) in enumerate(zip("BA", layer.factor_shapes, strict=True)):
                for i, shape in enumerate(shapes):
                    key = f"{PREFIX}{name}.lsr_{letter}.factor_{i + 1}"
                    if key in tensors:
                        raise packed.error(f"{key} is stored twice, packed and alone")
                    fetch = partial(_factor, factors, name, side, i)
                    dtype = layer.storage if layer.storage in FLOATS else "float64"
                    tensors[key] = StoredTensor(key, shape, dtype, packed.path, fetch)
    return tensors, entries


def _factor(
    factors: Callable[[str], tuple[tuple[Array, ...], ...]], name: str, side: int, index: int
) -> Array:
    return np.asarray(factors(name)[side][index])


def _split(
    tensors: Mapping[str, StoredTensor],
) -> tuple[dict[str, dict[str, list[StoredTensor]]], dict[str, StoredTensor]]:
    modules: dict[str, dict[str, dict[int, StoredTensor]]] = {}
    extras: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        match = KEY.fullmatch(without_prefix(tensor))
        if match is None:
            if key.endswith(".lsr_magnitude_vector"):
                raise UnsupportedError(f"{DORA}; {NOT_READ}", path=tensor.path, tensor=key)
            if re.search(r"\.lsr_[A-Za-z_]+(\.|$)", key):
                raise tensor.error(
                    "is not lsr_A.factor_N or lsr_B.factor_N; written by a newer version?"
                )
            extras[key] = tensor
            continue
        sides = modules.setdefault(match["name"], {"A": {}, "B": {}})
        sides[match["side"]][int(match["position"])] = tensor
    ordered: dict[str, dict[str, list[StoredTensor]]] = {}
    for name, sides in modules.items():
        for side, factors in sides.items():
            missing = next(
                (i for i in range(1, max(factors, default=1) + 1) if i not in factors), None
            )
            if missing is not None:
                example = next(iter((*sides["A"].values(), *sides["B"].values())))
                raise example.error(
                    f"{PREFIX}{name}.lsr_{side}.factor_{missing} is missing; the file is incomplete"
                )
        ordered[name] = {
            side: [factors[i] for i in sorted(factors)] for side, factors in sides.items()
        }
    return ordered, extras
