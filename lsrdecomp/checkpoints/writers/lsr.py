"""LSR directories written: factors in a floating type or in integers, all packed, and the config that PEFT reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.checkpoints.config import carried_fields, most_common
from lsrdecomp.checkpoints.format import CONFIG, PREFIX
from lsrdecomp.checkpoints.packed import NUMBERS, code_bytes, code_entry, float_entry, parse
from lsrdecomp.checkpoints.packed_index import FIELD, index_text
from lsrdecomp.checkpoints.tensors import Array, TensorWriter, cast
from lsrdecomp.checkpoints.writing import CARD, WEIGHTS, card_section, new_directory
from lsrdecomp.errors import CheckpointError, ShapeError
from lsrdecomp.kronecker.shape import ProductShape

if TYPE_CHECKING:
    from lsrdecomp.checkpoints.records import Checkpoint
    from lsrdecomp.formats.quantized import CodedProduct

Factors = Sequence[Array]
DEFAULTS = {
    "bias": "none",
    "modules_to_save": None,
    "task_type": None,
    "base_model_name_or_path": None,
}
"""What PEFT takes for a field that is absent; so it does of inference_mode, which it sets as it
loads."""


def write_lsr(
    out_dir: str | Path,
    *,
    source: Checkpoint,
    layers: Iterable[tuple[str, Factors, Factors]],
    storage: str = "float32",
    force: bool = False,
    coded: Iterable[tuple[str, CodedProduct]] = (),
    files: Mapping[str, str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    dropped: Sequence[str] = (),
) -> Path:
    """Write an LSR directory that PEFT opens once ``lsrdecomp.adapters`` is imported.

    All numbers go into one tensor and all sizes into one text, see `lsrdecomp.checkpoints.packed`.
    Layers are taken one at a time, so an iterator keeps memory to one layer and 8 MiB. Factors
    already in ``storage`` keep their bits.

    Parameters
    ----------
    out_dir : str or Path
        Must not exist, unless ``force``; see `lsrdecomp.checkpoints.writing.new_directory`.
    source : Checkpoint
        Gives the config fields about the base model, the other tensors (copied bit for bit) and the
        provenance.
    layers : iterable of (name, left, right)
        ``left``: factors of B, each (s, m_i, r_i); ``right``: factors of A, each (t, r_i, n_i);
        weights folded in.
    storage : str
        Dtype of the factors: ``"float32"``, ``"float16"``, ``"bfloat16"``, ….
    coded : iterable of (name, CodedProduct)
        Further layers, stored in integers.
    files : Mapping of str to str, optional
        Texts of further files of the directory.
    provenance : Mapping, optional
        JSON values for the record on the card.
    dropped : sequence of str
        Layers that were left out on purpose, for the record.

    Returns
    -------
    Path
        ``out_dir``.

    Raises
    ------
    CheckpointError
        If ``out_dir`` exists (unless ``force``), factors are not of the size of the source's layer,
        or a number overflows ``storage``.
    ShapeError
        If the factors of a layer do not go together.
    """
    out = Path(out_dir)
    source_layers = {layer.name: layer for layer in source.layers}
    entries: dict[str, list[Any]] = {}

    def numbers() -> Iterator[Array]:
        for name, left, right in layers:
            shape, ranks = _factor_shape(name, left, right)
            source_layer = source_layers.get(name)
            if (
                source_layer is not None
                and (source_layer.out_features, source_layer.in_features) != shape.matrix_shape
            ):
                size = f"{source_layer.out_features} x {source_layer.in_features}"
                raise CheckpointError(
                    f"{name}: factors of {shape.matrix_shape} for a layer of {size}", path=out
                )
            entries[name] = float_entry(shape, ranks, storage)
            for side, factors in (("B", left), ("A", right)):
                for position, array in enumerate(factors, 1):
                    stored = cast(array, storage, f"{PREFIX}{name}.lsr_{side}.factor_{position}")
                    yield (
                        np.ascontiguousarray(stored, stored.dtype.newbyteorder("<"))
                        .reshape(-1)
                        .view(np.uint8)
                    )
        for name, code in coded:
            entries[name] = code_entry(code)
            yield from code_bytes(code)

    with (
        new_directory(out, inputs=(source.path,), force=force) as part,
        TensorWriter(part) as writer,
    ):
        writer.add_pieces(NUMBERS, "uint8", numbers())
        if not entries:
            raise CheckpointError("no layers to write", path=out)
        for key, tensor in source.extras.items():
            writer.add(key, tensor.read())
        writer.write(part / WEIGHTS, {})
        config = _config(source, entries)
        text = json.dumps(
            config, sort_keys=True, separators=(",", ":"), allow_nan=False
        )  # its bytes count
        (part / CONFIG).write_text(f"{text}\n", encoding="utf-8")
        about = {"storage": storage, "dropped": list(dropped), **(provenance or {})}
        (part / CARD).write_text(_card(config) + card_section(source, about), encoding="utf-8")
        for file, text in (files or {}).items():
            (part / file).write_text(text, encoding="utf-8")
    return out


def pack_lsr(
    source: Checkpoint,
    out_dir: str | Path,
    *,
    storage: str | None = None,
    coded: Mapping[str, CodedProduct] | None = None,
    force: bool = False,
) -> Path:
    """Write an LSR directory that PEFT saved, tensor by tensor and with four patterns a layer, as `write_lsr` does.

    Its scale is folded into the first factors, so that ΔW is the same but for their rounding.

    Parameters
    ----------
    source : Checkpoint
        Of the format "lsr".
    out_dir : str or Path
        A directory to make; must not exist, unless ``force``.
    storage : str, optional
        Type of the factors, a floating one; absent, the source's.
    coded : Mapping of layer name to CodedProduct, optional
        What is written of these layers instead: integer codes, of the scale too.

    Returns
    -------
    Path
        ``out_dir``.

    Raises
    ------
    CheckpointError
        As `write_lsr`.
    """
    coded = coded or {}
    loaded = ((layer, *layer.load()) for layer in source.layers if layer.name not in coded)
    layers = (
        (layer.name, (layer.scale * left[0], *left[1:]), right) for layer, left, right in loaded
    )
    storage = storage or source.storage
    return write_lsr(
        out_dir, source=source, layers=layers, storage=storage, force=force, coded=coded.items()
    )


def _config(source: Checkpoint, entries: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    source_layers = {layer.name: layer for layer in source.layers}
    others = [
        layer
        for name, layer in source_layers.items()
        if name in entries and layer.layer_type != "linear"
    ]
    kinds = {layer.name: (layer.layer_type, layer.kernel) for layer in others}
    names, targets = set(source_layers), source.config.get("target_modules")
    rank = most_common({name: parse(*entry).shape.inner_rank for name, entry in entries.items()})
    # Which modules are meant the source's words say, or the index where they name others, none, or
    # each in full.
    exact = (
        targets is None
        or names != set(entries)
        or (isinstance(targets, list) and names == set(targets))
    )
    fields = carried_fields(source.config, names, set(source.extras), source, "lsr_only") | {
        "target_modules": targets
    }
    left_out = {
        "inference_mode",
        *(name for name, value in DEFAULTS.items() if fields[name] == value),
    }
    left_out |= {"target_modules"} if exact else set()
    return {
        **{name: value for name, value in fields.items() if name not in left_out},
        "peft_type": "LSR",
        "r": rank,
        "lsr_alpha": rank,
        FIELD: index_text(entries, kinds, exact=exact),
    }


def _factor_shape(name: str, left: Factors, right: Factors) -> tuple[ProductShape, tuple[int, int]]:
    shapes = [[array.shape for array in factors] for factors in (left, right)]
    text = f"factors {shapes[0]} and {shapes[1]}"
    if (
        not left
        or len(left) != len(right)
        or any(len(shape) != 3 for side in shapes for shape in side)
    ):
        raise ShapeError(f"{name}: {text} are not equally many arrays of three sizes")
    if any(len({shape[0] for shape in side}) != 1 for side in shapes):
        raise ShapeError(f"{name}: {text} have different numbers of terms on one side")
    inner = tuple(shape[2] for shape in shapes[0])
    if inner != tuple(shape[1] for shape in shapes[1]):
        raise ShapeError(f"{name}: {text} do not share their inner sizes")
    shape = ProductShape(tuple(s[1] for s in shapes[0]), inner, tuple(s[2] for s in shapes[1]))
    return shape, (shapes[0][0][0], shapes[1][0][0])


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
