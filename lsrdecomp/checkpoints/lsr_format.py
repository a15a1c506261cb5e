"""LSR directories, ours: read with every size checked against the config, written so that PEFT finds its modules."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.bundle import CONFIG, Bundle
from lsrdecomp.checkpoints.config import Config, Patterns, exact_pattern
from lsrdecomp.checkpoints.layers_config import carried_fields, check_carried, most_common, patterns
from lsrdecomp.checkpoints.peft_format import PREFIX
from lsrdecomp.checkpoints.provenance import metadata, provenance
from lsrdecomp.checkpoints.records import Checkpoint, LsrLayer, natural
from lsrdecomp.checkpoints.tensors import FLOATS, Array, StoredTensor
from lsrdecomp.checkpoints.writing import WEIGHTS, TensorWriter, cast, new_directory, write_json
from lsrdecomp.errors import CheckpointError, ShapeError, UnsupportedError
from lsrdecomp.shape import ProductShape, balanced_split

KEY = re.compile(r"(?P<name>.+)\.lsr_(?P<side>[AB])\.factor_(?P<position>[1-9][0-9]{0,2})")
REFUSED = {"use_dora": "DoRA magnitudes", "target_parameters": "updates of bare parameters (experts)"}
MOST_FACTORS = 16
LARGEST_SIDE = 2**31  # its divisors are looked for one by one

Factors = Sequence[Array]


def matches(bundle: Bundle) -> bool:
    """peft_type LSR."""
    return bundle.config is not None and bundle.config.get("peft_type") == "LSR"


def read(bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
    """Layers of an LSR directory; `CheckpointError` where factors and config disagree, as PEFT would refuse it too."""
    if bundle.config is None:
        raise CheckpointError("has no adapter_config.json", path=bundle.path)
    config = Config(bundle.config, bundle.config_path)
    if alpha is not None:
        raise bundle.config_error("alpha is in the config; leave alpha= out")
    for field, what in REFUSED.items():
        if config.raw.get(field):
            raise UnsupportedError(f"{field} is set: {what} are not read", path=config.path)
    check_carried(config)
    expected = _Expected(config)
    kinds = provenance_kinds(bundle)
    linear = "conv1d" if config.flag("fan_in_fan_out") else "linear"
    sides, extras = _split(bundle)
    layers = []
    for name in sorted(sides, key=natural):
        kind, kernel = kinds.get(name, (linear, ()))
        layers.append(expected.layer(name, sides[name]["B"], sides[name]["A"], kind, kernel))
    if not layers:
        raise CheckpointError(f"holds no lsr_A and lsr_B among {len(bundle.tensors)} tensors", path=bundle.weights)
    return Checkpoint(
        bundle.path, "lsr", dict(bundle.config), tuple(layers), extras, bundle.weights, dict(bundle.metadata)
    )


def write_lsr(
    out_dir: str | Path,
    *,
    source: Checkpoint,
    layers: Iterable[tuple[str, Factors, Factors, float]],
    storage: str = "float32",
    force: bool = False,
    provenance: Mapping[str, Any] | None = None,
    config_extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write an LSR directory that PEFT opens once ``lsrdecomp.adapters`` is imported.

    Layers are taken one at a time, so an iterator keeps memory to one layer and 64 MiB. A ``scale`` other than 1 is
    multiplied into the first factor of B before rounding; with 1, factors already in ``storage`` keep their bits.

    Parameters
    ----------
    out_dir : str or Path
        Must not exist, unless ``force``; see `lsrdecomp.checkpoints.writing.new_directory`.
    source : Checkpoint
        Gives the config fields about the base model, the other tensors (copied bit for bit) and the provenance.
    layers : iterable of (name, left, right, scale)
        ``left``: factors of B, each (s, m_i, r_i); ``right``: factors of A, each (t, r_i, n_i); weights folded in.
    storage : str
        Dtype of the factors: ``"float32"``, ``"float16"``, ``"bfloat16"``, ….
    provenance, config_extra : Mapping, optional
        JSON values for the header's record, and config fields that override ours.

    Returns
    -------
    Path
        ``out_dir``.
    """
    out = Path(out_dir)
    if source.config.get("trainable_token_indices"):
        text = "trainable_token_indices is set: single token embeddings are not carried by an LSR adapter yet"
        raise UnsupportedError(text, path=source.path)
    given = {layer.name: layer for layer in source.layers}
    shapes: dict[str, tuple[ProductShape, int, int]] = {}
    with new_directory(out, inputs=(source.path,), force=force) as part, TensorWriter(part) as writer:
        for name, left, right, scale in layers:
            shape, ranks = _factor_shape(name, left, right)
            known = given.get(name)
            if known is not None and (known.out_features, known.in_features) != shape.matrix_shape:
                size = f"{known.out_features} x {known.in_features}"
                raise CheckpointError(f"{name}: factors of {shape.matrix_shape} for a layer of {size}", path=out)
            shapes[name] = (shape, *ranks)
            for side, factors, factor in (("B", left, scale), ("A", right, 1.0)):
                for position, array in enumerate(factors, 1):
                    key = f"{PREFIX}{name}.lsr_{side}.factor_{position}"
                    scaled = array if position > 1 or factor == 1.0 else np.asarray(array, np.float64) * factor
                    writer.add(key, cast(scaled, storage, key))
        if not shapes:
            raise CheckpointError("no layers to write", path=out)
        for key, tensor in source.extras.items():
            writer.add(key, tensor.read())
        kinds = {
            name: [given[name].kind, list(given[name].kernel)]
            for name in shapes
            if name in given and given[name].kind != "linear"
        }
        writer.write(part / WEIGHTS, metadata(source, provenance, kinds=kinds, storage=storage))
        config = {**_config(source, shapes), **(config_extra or {})}
        write_json(part / CONFIG, config)
        (part / "README.md").write_text(_card(config), encoding="utf-8")
    return out


def provenance_kinds(bundle: Bundle) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Kind and kernel of the layers that are not plain Linear, from the header's record."""
    record = Checkpoint(bundle.path, "lsr", {}, (), {}, bundle.weights, bundle.metadata)
    kinds = provenance(record).get("kinds", {})
    try:
        return {str(name): (str(kind), tuple(int(side) for side in kernel)) for name, (kind, kernel) in kinds.items()}
    except (AttributeError, TypeError, ValueError):
        raise bundle.metadata_error("the header's record of layer kinds is damaged") from None


class _Expected:
    """Sizes the config promises for each layer."""

    def __init__(self, config: Config) -> None:
        self.config = config
        raw, path = config.raw, config.path
        # Defaults are those of `lsrdecomp.adapters.LsrConfig`.
        self.inner = None if raw.get("inner_shape") is None else self.sizes(raw["inner_shape"], "inner_shape")
        self.order = config.integer("order") if raw.get("order") is not None else len(self.inner or (1, 1))
        if self.order > MOST_FACTORS:
            raise config.error("order", f"at most {MOST_FACTORS} factors")
        usual = math.prod(self.inner) if self.inner else 16
        self.rank = config.integer("r") if raw.get("r") is not None else usual
        self.alpha = config.number("lsr_alpha", 16)
        self.root = math.sqrt if config.flag("use_rslora") else float
        self.terms = self.separation(raw.get("separation_rank", 8), "separation_rank")
        self.ranks = Patterns(config.integers("rank_pattern"), "rank_pattern", path)
        self.alphas = Patterns(config.numbers("alpha_pattern"), "alpha_pattern", path)
        terms = {
            key: self.separation(value, f"separation_rank_pattern[{key!r}]")
            for key, value in config.mapping("separation_rank_pattern").items()
        }
        self.all_terms = Patterns(terms, "separation_rank_pattern", path)
        shapes = {key: self.shape(value, key) for key, value in config.mapping("shape_pattern").items()}
        self.shapes = Patterns(shapes, "shape_pattern", path)

    def layer(
        self, name: str, left: list[StoredTensor], right: list[StoredTensor], kind: str, kernel: tuple[int, ...]
    ) -> LsrLayer:
        for tensor in (*left, *right):
            if len(tensor.shape) != 3 or 0 in tensor.shape:
                raise tensor.error(f"shape {tensor.shape}, expected three sizes: terms, rows, columns")
            if tensor.dtype not in FLOATS:
                raise tensor.error(f"dtype {tensor.dtype}, expected floating-point numbers")
        if len(left) != len(right):
            raise left[0].error(f"{len(left)} factors of lsr_B, but {len(right)} of lsr_A")
        for side in (left, right):
            for tensor in side[1:]:
                if tensor.shape[0] != side[0].shape[0]:
                    raise tensor.error(f"{tensor.shape[0]} terms, but {side[0].shape[0]} in {side[0].name}")
        for one, other in zip(left, right, strict=True):
            if one.shape[2] != other.shape[1]:
                raise one.error(f"inner size {one.shape[2]}, but {other.shape[1]} in {other.name}")
        shape = ProductShape(
            tuple(t.shape[1] for t in left), tuple(t.shape[2] for t in left), tuple(t.shape[2] for t in right)
        )
        given = self.shapes.get(name, None)
        if max(shape.matrix_shape) > LARGEST_SIDE or len(left) > MOST_FACTORS:
            size = " x ".join(map(str, shape.matrix_shape))
            raise left[0].error(f"{len(left)} factors of a {size} matrix; no layer is that large")
        rank = self.ranks.get(name, self.rank if given is None else given.inner_rank)
        promised = given or self.default(shape.matrix_shape, rank)
        if promised != shape or shape.inner_rank != rank:
            raise left[0].error(f"factors of shape {shape}, but the config says {promised} with r = {rank}")
        terms = self.all_terms.get(name, self.terms)
        if (left[0].shape[0], right[0].shape[0]) != terms:
            text = f"separation ranks {left[0].shape[0]} and {right[0].shape[0]}, but the config says {terms}"
            raise left[0].error(text)
        scale = self.alphas.get(name, self.alpha) / self.root(rank)
        dtype = left[0].dtype
        return LsrLayer(name, kind, shape, *terms, scale, dtype, tuple(left), tuple(right), kernel)

    def default(self, matrix_shape: tuple[int, int], rank: int) -> ProductShape:
        inner = self.inner if self.inner is not None and math.prod(self.inner) == rank else None
        return ProductShape.balanced(matrix_shape, inner or balanced_split(rank, self.order))

    def sizes(self, value: Any, field: str) -> tuple[int, ...]:
        if not isinstance(value, list) or not value or not all(type(size) is int and size > 0 for size in value):
            text = f"{field} is {ascii(value)[:80]}, expected a list of positive integers"
            raise CheckpointError(text, path=self.config.path)
        return tuple(value)

    def separation(self, value: Any, field: str) -> tuple[int, int]:
        pair = value if isinstance(value, list) else [value, value]
        if len(pair) != 2 or not all(type(rank) is int and rank > 0 for rank in pair):
            text = f"{field} is {ascii(value)[:80]}, expected a positive integer or two"
            raise CheckpointError(text, path=self.config.path)
        return pair[0], pair[1]

    def shape(self, value: Any, key: str) -> ProductShape:
        field = f"shape_pattern[{key!r}]"
        if not isinstance(value, dict) or set(value) != {"out", "inner", "into"}:
            raise CheckpointError(f"{field}: expected out, inner and into", path=self.config.path)
        try:
            return ProductShape(**{side: self.sizes(sizes, f"{field}.{side}") for side, sizes in value.items()})
        except ShapeError as error:
            raise CheckpointError(f"{field}: {error}", path=self.config.path) from None


def _split(bundle: Bundle) -> tuple[dict[str, dict[str, list[StoredTensor]]], dict[str, StoredTensor]]:
    found: dict[str, dict[str, dict[int, StoredTensor]]] = {}
    extras: dict[str, StoredTensor] = {}
    for key, tensor in bundle.tensors.items():
        if not key.startswith(PREFIX):
            raise tensor.error(f"expected the prefix {PREFIX!r}: PEFT would not load this tensor")
        match = KEY.fullmatch(key, len(PREFIX))
        if match is None:
            if re.search(r"\.lsr_[A-Za-z_]+(\.|$)", key):
                raise tensor.error("is not lsr_A.factor_N or lsr_B.factor_N; written by a newer version?")
            extras[key] = tensor
            continue
        sides = found.setdefault(match["name"], {"A": {}, "B": {}})
        sides[match["side"]][int(match["position"])] = tensor
    ordered: dict[str, dict[str, list[StoredTensor]]] = {}
    for name, sides in found.items():
        for side, factors in sides.items():
            missing = next((i for i in range(1, max(factors, default=1) + 1) if i not in factors), None)
            if missing is not None:
                held = next(iter((*sides["A"].values(), *sides["B"].values())))
                raise held.error(f"{PREFIX}{name}.lsr_{side}.factor_{missing} is missing; the file is incomplete")
        ordered[name] = {side: [factors[i] for i in sorted(factors)] for side, factors in sides.items()}
    return ordered, extras


def _factor_shape(name: str, left: Factors, right: Factors) -> tuple[ProductShape, tuple[int, int]]:
    shapes = [[array.shape for array in factors] for factors in (left, right)]
    text = f"factors {shapes[0]} and {shapes[1]}"
    if not left or len(left) != len(right) or any(len(shape) != 3 for side in shapes for shape in side):
        raise ShapeError(f"{name}: {text} are not equally many arrays of three sizes")
    if any(len({shape[0] for shape in side}) != 1 for side in shapes):
        raise ShapeError(f"{name}: {text} have different numbers of terms on one side")
    inner = tuple(shape[2] for shape in shapes[0])
    if inner != tuple(shape[1] for shape in shapes[1]):
        raise ShapeError(f"{name}: {text} do not share their inner sizes")
    shape = ProductShape(tuple(s[1] for s in shapes[0]), inner, tuple(s[2] for s in shapes[1]))
    return shape, (shapes[0][0][0], shapes[1][0][0])


def _config(source: Checkpoint, shapes: Mapping[str, tuple[ProductShape, int, int]]) -> dict[str, Any]:
    ranks = {name: shape.inner_rank for name, (shape, _, _) in shapes.items()}
    rank = most_common(ranks)
    inners = {name: shape.inner for name, (shape, _, _) in shapes.items() if shape.inner_rank == rank}
    inner = most_common(inners)
    terms = {name: (left, right) for name, (_, left, right) in shapes.items()}
    common = most_common(terms)
    unusual = {
        name: {"out": list(shape.out), "inner": list(shape.inner), "into": list(shape.into)}
        for name, (shape, _, _) in shapes.items()
        if shape.inner != inner or shape != ProductShape.balanced(shape.matrix_shape, inner)
    }
    one_or_two = {name: left if left == right else [left, right] for name, (left, right) in terms.items()}
    different, all_terms = patterns(terms, common), patterns(one_or_two, 0)
    return {
        **carried_fields(source.config, set(shapes), set(source.extras), source, "lsr_only"),
        "peft_type": "LSR",
        "r": rank,
        "inner_shape": list(inner),
        "order": len(inner),
        "separation_rank": common[0] if common[0] == common[1] else list(common),
        "lsr_alpha": rank,
        "use_rslora": False,
        "lsr_dropout": 0.0,
        "init_weights": True,
        "rank_pattern": patterns(ranks, rank),
        "alpha_pattern": patterns(ranks, rank),
        "separation_rank_pattern": {key: value for key, value in all_terms.items() if key in different},
        "shape_pattern": {exact_pattern(name): sizes for name, sizes in unusual.items()},
    }


def _card(config: Mapping[str, Any]) -> str:
    base = config.get("base_model_name_or_path")
    named = f"base_model: {json.dumps(base)}\n" if isinstance(base, str) else ""
    return (
        f"---\n{named}library_name: peft\ntags:\n- lsr\n---\n\n"
        "An adapter of low separation rank: short sums of Kronecker products.\n\n"
        "```python\n"
        "import lsrdecomp.adapters  # teaches PEFT this adapter type\n"
        "from peft import PeftModel\n\n"
        "model = PeftModel.from_pretrained(base_model, path_of_this_directory)\n"
        "```\n"
    )
