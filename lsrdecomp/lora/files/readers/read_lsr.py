"""LSR directories, ours, read: every size checked against the config, packed layers unpacked."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp._ordering import natural_key
from lsrdecomp.errors import CheckpointError, ShapeError, UnsupportedError
from lsrdecomp.gateway import MAX_AXES
from lsrdecomp.kronecker.shape import ProductShape, balanced_split
from lsrdecomp.lora.files.adapter_config import (
    Config,
    Patterns,
    Scales,
    check_carried,
    missing_modules,
)
from lsrdecomp.lora.files.format import (
    PREFIX,
    Bundle,
    make_checkpoint,
    refuse_alpha,
    refuse_fields,
    without_prefix,
)
from lsrdecomp.lora.files.packed import NUMBERS, IndexEntry, PackedLayer
from lsrdecomp.lora.files.packed_index import FIELD, OLDER_INDEX, Index, index_and_numbers
from lsrdecomp.lora.files.records import NOT_READ, Checkpoint, KroneckerLayer
from lsrdecomp.lora.files.tensors import FLOATS, Array, StoredTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

name = "lsr"
FACTOR_KEY = re.compile(r"(?P<name>.+)\.lsr_(?P<side>[AB])\.factor_(?P<position>[1-9][0-9]{0,2})")
OTHER_KEY = re.compile(r"\.lsr_[A-Za-z_]+(\.|$)")
DORA_NEEDS_BASE = (
    "DoRA rescales every row by the norm of the base weights, which are not in this file "
    "(lsrdecomp.lora.peft.to_lora carries the magnitudes over to LoRA)"
)
REFUSED_FIELDS = {
    "use_dora": DORA_NEEDS_BASE,
    "target_parameters": "it targets bare parameters (experts), whose factors are stored stacked",
}
MAX_SIDE = 2**31
"""Rows or columns of a layer of Kronecker factors, whose divisors are looked for one by one."""
Sides = dict[str, list[StoredTensor]]
"""Factors of a module in order: of the out side under "B", of the in side under "A"."""


def matches(bundle: Bundle) -> bool:
    """Return whether the config says peft_type LSR."""
    return bundle.config is not None and bundle.config.get("peft_type") == "LSR"


def read(bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
    """Read the layers of an LSR directory.

    Raises
    ------
    CheckpointError
        Where factors and config disagree, as PEFT would refuse it too.
    """
    # 1. The config: with an index, the sizes of packed layers are in that.
    stored_config = bundle.config or {}
    index, numbers = _read_packed(bundle)
    raw = dict(stored_config)
    if index is not None:
        raw |= index.config_fields()
    config = Config(raw, bundle.config_path)
    refuse_alpha(bundle, alpha)
    refuse_fields(config, REFUSED_FIELDS if index is None else {"use_dora": DORA_NEEDS_BASE})
    check_carried(config)
    expected = _ExpectedSizes(config)
    layer_types = {} if index is None else index.layer_types
    linear = "conv1d" if config.flag("fan_in_fan_out") else "linear"
    # 2. The factors, packed ones among them.
    tensors, packed = _with_unpacked(bundle, index, numbers)
    modules, extras = _group_factors(tensors)
    # 3. The layers; the first fault in natural order is the one that is told.
    layers = []
    for module in sorted(modules, key=natural_key):
        layer_type, kernel = layer_types.get(module, (linear, ()))
        layer = expected.layer(module, modules[module], layer_type, kernel)
        if module in packed:
            entry = packed[module]
            layer = replace(
                layer,
                dtype=entry.storage,
                stored_parameters=entry.parameters,
                stored_label=entry.label,
            )
        layers.append(layer)
    notes = missing_modules(stored_config, extras)
    return make_checkpoint(
        bundle, name, layers, extras, notes, config=raw, layer_word="lsr_A and lsr_B"
    )


class _ExpectedSizes:
    """Sizes that a config declares for each layer, which the factors must have.

    Its defaults are those of `lsrdecomp.lora.peft.LsrConfig`, and so is the order in which names
    are looked up: exact ones first.
    """

    def __init__(self, config: Config) -> None:
        raw = config.raw
        try:
            self.inner_shape = None
            if raw.get("inner_shape") is not None:
                self.inner_shape = sizes("inner_shape", raw["inner_shape"])
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
            raise CheckpointError(str(error), path=config.path) from None
        self.order = len(self.inner_shape or (1, 1))
        if raw.get("order") is not None:
            self.order = config.integer("order")
        if self.order > MAX_AXES:
            raise config.error("order", f"at most {MAX_AXES} factors")
        rank = math.prod(self.inner_shape) if self.inner_shape else 16
        if raw.get("r") is not None:
            rank = config.integer("r")
        alpha = config.number("lsr_alpha", 16)
        self.scales = Scales(config, rank, alpha, exact_first=True)
        self.term_patterns = Patterns(
            terms, "separation_rank_pattern", config.path, exact_first=True
        )
        self.shape_patterns = Patterns(shapes, "shape_pattern", config.path, exact_first=True)

    def layer(
        self, name: str, sides: Sides, layer_type: str, kernel: tuple[int, ...]
    ) -> KroneckerLayer:
        """Make the layer of these factors, if they are of the sizes that the config declares."""
        left, right = sides["B"], sides["A"]
        shape = _shape_of_factors(left, right)
        _check_limits(shape, left[0])
        configured_shape: ProductShape | None = self.shape_patterns.get(name, None)
        configured_rank = None if configured_shape is None else configured_shape.inner_rank
        rank = self.scales.rank(name, configured_rank)
        expected_shape = configured_shape or self._default_shape(shape.matrix_shape, rank)
        if expected_shape != shape or shape.inner_rank != rank:
            raise left[0].error(
                f"factors of shape {shape}, but the config says {expected_shape} with r = {rank}"
            )
        expected_terms = self.term_patterns.get(name, self.terms)
        terms = left[0].shape[0], right[0].shape[0]
        if terms != expected_terms:
            raise left[0].error(
                f"separation ranks {terms[0]} and {terms[1]}, but the config says {expected_terms}"
            )
        return KroneckerLayer(
            name,
            layer_type,
            shape,
            *terms,
            self.scales.scale(name, rank),
            left[0].dtype,
            tuple(left),
            tuple(right),
            kernel,
        )

    def _default_shape(self, matrix_shape: tuple[int, int], rank: int) -> ProductShape:
        """Return the shape of a layer for which the config has no pattern."""
        inner = self.inner_shape
        if inner is None or math.prod(inner) != rank:
            inner = balanced_split(rank, self.order)
        return ProductShape.balanced(matrix_shape, inner)


def _shape_of_factors(left: list[StoredTensor], right: list[StoredTensor]) -> ProductShape:
    """Hold the factors of a layer against each other."""
    for tensor in (*left, *right):
        if len(tensor.shape) != 3 or 0 in tensor.shape:
            raise tensor.error(f"shape {tensor.shape}, expected three sizes: terms, rows, columns")
        if tensor.dtype not in FLOATS:
            raise tensor.error(f"dtype {tensor.dtype}, expected floating-point numbers")
    if len(left) != len(right):
        raise left[0].error(f"{len(left)} factors of lsr_B, but {len(right)} of lsr_A")
    for side in (left, right):
        first, *others = side
        for tensor in others:
            if tensor.shape[0] != first.shape[0]:
                raise tensor.error(f"{tensor.shape[0]} terms, but {first.shape[0]} in {first.name}")
    for out_factor, in_factor in zip(left, right, strict=True):
        if out_factor.shape[2] != in_factor.shape[1]:
            raise out_factor.error(
                f"inner size {out_factor.shape[2]}, but {in_factor.shape[1]} in {in_factor.name}"
            )
    return ProductShape(
        tuple(tensor.shape[1] for tensor in left),
        tuple(tensor.shape[2] for tensor in left),
        tuple(tensor.shape[2] for tensor in right),
    )


def _check_limits(shape: ProductShape, tensor: StoredTensor) -> None:
    rows, columns = shape.matrix_shape
    if max(rows, columns) > MAX_SIDE or shape.order > MAX_AXES:
        raise tensor.error(
            f"{shape.order} factors of a {rows} x {columns} matrix; no layer is that large"
        )


# -- settings, which `lsrdecomp.lora.peft.LsrConfig` reads too -------------------------------------


def positive(name: str, value: Any) -> int:
    """Return a positive integer, or raise a `ShapeError` naming the setting, in PEFT's words."""
    if type(value) is not int or value < 1:
        raise ShapeError(
            f"{name} should be a positive integer value but the value passed is {ascii(value)[:80]}"
        )
    return value


def sizes(name: str, value: Any) -> tuple[int, ...]:
    """Return one positive integer for each factor."""
    if not isinstance(value, list | tuple) or not value:
        raise ShapeError(f"{name} should be a list of positive integers, got {ascii(value)[:80]}")
    return tuple(positive(name, size) for size in value)


def separation_ranks(name: str, value: Any) -> tuple[int, int]:
    """Return the terms of the out side and of the in side, from one number or two."""
    both = value if isinstance(value, list | tuple) else [value, value]
    if len(both) != 2:
        raise ShapeError(
            f"{name} should be one number or [out side, in side], got {ascii(value)[:80]}"
        )
    out_side, in_side = both
    return positive(name, out_side), positive(name, in_side)


def product_shape(name: str, value: Any) -> ProductShape:
    """Return a `ProductShape` from one value of ``shape_pattern``."""
    if not isinstance(value, dict) or set(value) != {"out", "inner", "into"}:
        expected = '{"out": [...], "inner": [...], "into": [...]}'
        raise ShapeError(f"{name} must be {expected}, got {ascii(value)[:80]}")
    try:
        return ProductShape(**{side: sizes(side, split) for side, split in value.items()})
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None


# -- tensors, packed or one each -------------------------------------------------------------------


def _read_packed(bundle: Bundle) -> tuple[Index | None, Array | None]:
    """Read the index of packed layers, and their numbers; None where there are none."""
    if (bundle.config or {}).get(FIELD) is not None:
        raise bundle.config_error(OLDER_INDEX)
    if NUMBERS not in bundle.tensors:
        return None, None
    content = _bytes_of(bundle.tensors[NUMBERS])
    try:
        return index_and_numbers(content)
    except CheckpointError as error:
        raise CheckpointError(str(error), path=bundle.weights) from None


def _with_unpacked(
    bundle: Bundle, index: Index | None, numbers: Array | None
) -> tuple[dict[str, StoredTensor], dict[str, IndexEntry]]:
    """Return all tensors by name, factors of packed layers among them.

    The second value is what the index says of the packed layers.
    """
    tensors = dict(bundle.tensors)
    tensor = tensors.pop(NUMBERS, None)
    if tensor is None or index is None or numbers is None:
        return tensors, {}
    layers = index.layers(numbers)
    _add_factors(tensors, layers, tensor)
    return tensors, {name: layer.entry for name, layer in layers.items()}


def _bytes_of(packed: StoredTensor) -> Array:
    if packed.dtype != "uint8" or len(packed.shape) != 1:
        raise packed.error(f"shape {packed.shape} of {packed.dtype}, expected a row of bytes")
    return packed.read()


def _add_factors(
    tensors: dict[str, StoredTensor], layers: Mapping[str, PackedLayer], packed: StoredTensor
) -> None:
    """Add the factors of packed layers to the tensors."""

    @lru_cache(maxsize=1)
    def factors(name: str) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        return layers[name].factors()

    for name, layer in layers.items():
        dtype = layer.storage if layer.storage in FLOATS else "float64"
        for side, (letter, shapes) in enumerate(zip("BA", layer.factor_shapes, strict=True)):
            for position, shape in enumerate(shapes):
                key = f"{PREFIX}{name}.lsr_{letter}.factor_{position + 1}"
                if key in tensors:
                    raise packed.error(f"{key} is stored twice, packed and alone")
                fetch = partial(_fetch_factor, factors, name, side, position)
                tensors[key] = StoredTensor(key, shape, dtype, packed.path, fetch)


def _fetch_factor(
    factors: Callable[[str], tuple[tuple[Array, ...], ...]], name: str, side: int, position: int
) -> Array:
    return np.asarray(factors(name)[side][position])


def _group_factors(
    tensors: Mapping[str, StoredTensor],
) -> tuple[dict[str, Sides], dict[str, StoredTensor]]:
    """Sort tensors by module, side and position; the second value is everything else."""
    modules: dict[str, dict[str, dict[int, StoredTensor]]] = {}
    extras: dict[str, StoredTensor] = {}
    for key, tensor in tensors.items():
        match = FACTOR_KEY.fullmatch(without_prefix(tensor))
        if match is not None:
            sides = modules.setdefault(match["name"], {"A": {}, "B": {}})
            sides[match["side"]][int(match["position"])] = tensor
        elif key.endswith(".lsr_magnitude_vector"):
            raise UnsupportedError(f"{DORA_NEEDS_BASE}; {NOT_READ}", path=tensor.path, tensor=key)
        elif OTHER_KEY.search(key):
            raise tensor.error(
                "is not lsr_A.factor_N or lsr_B.factor_N; written by another version?"
            )
        else:
            extras[key] = tensor
    return {name: _in_order(name, sides) for name, sides in modules.items()}, extras


def _in_order(name: str, sides: Mapping[str, Mapping[int, StoredTensor]]) -> Sides:
    """Return the factors of a module in order; from the first to the last none may be missing."""
    for side, factors in sides.items():
        for position in range(1, max(factors, default=1) + 1):
            if position not in factors:
                example = next(iter((*sides["A"].values(), *sides["B"].values())))
                missing = f"{PREFIX}{name}.lsr_{side}.factor_{position}"
                raise example.error(f"{missing} is missing; the file is incomplete")
    return {
        side: [factors[position] for position in sorted(factors)] for side, factors in sides.items()
    }
