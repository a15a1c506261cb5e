"""LSR directories written: all numbers packed, and the config that PEFT reads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import CheckpointError, ShapeError
from lsrdecomp.formats.stored import FloatProduct
from lsrdecomp.lora.files.adapter_config import OF_SOME_MODULES, carried_fields
from lsrdecomp.lora.files.digests import field_digests
from lsrdecomp.lora.files.encodings import bytes_of, entry_of
from lsrdecomp.lora.files.format import CONFIG
from lsrdecomp.lora.files.packed import NUMBERS
from lsrdecomp.lora.files.packed_index import (
    LayerType,
    encode_index,
    index_at_the_end,
    scaled_factors,
)
from lsrdecomp.lora.files.provenance import CARD, card_section
from lsrdecomp.lora.files.tensors import Array, TensorWriter
from lsrdecomp.lora.files.writing import WEIGHTS, new_directory

if TYPE_CHECKING:
    from lsrdecomp.formats.stored import Stored
    from lsrdecomp.lora.files.records import Checkpoint

Factors = Sequence[Array]
PEFT_DEFAULTS = {
    "bias": "none",
    "modules_to_save": None,
    "task_type": None,
    "base_model_name_or_path": None,
}
"""What PEFT takes for a field that is absent; so may inference_mode be, which it sets itself."""


def write_lsr(
    out_dir: str | Path,
    *,
    source: Checkpoint,
    layers: Iterable[tuple[str, Stored] | tuple[str, Factors, Factors]],
    storage: str = "float32",
    force: bool = False,
    files: Mapping[str, str] | None = None,
    provenance: Mapping[str, Any] | None = None,
    dropped: Sequence[str] = (),
    bare: bool = False,
) -> Path:
    """Write an LSR directory that PEFT opens once ``lsrdecomp.lora.peft`` is imported.

    All numbers and the index of their sizes go into one tensor, see `lsrdecomp.lora.files.packed`.
    Layers are taken one at a time, so an iterator keeps memory to one layer and 8 MiB. Factors
    already in ``storage`` keep their bits.

    Parameters
    ----------
    out_dir : str or Path
        Must not exist, unless ``force``; see `lsrdecomp.lora.files.writing.new_directory`.
    source : Checkpoint
        Gives the config fields about the base model, the other tensors (copied bit for bit) and the
        provenance.
    layers : iterable of (name, Stored) or (name, left, right)
        A layer as it is stored (`lsrdecomp.formats.Stored`), or its factors, to be stored in
        ``storage``: ``left`` of B, each (s, m_i, r_i), and ``right`` of A, each (t, r_i, n_i),
        weights folded in.
    storage : str
        Dtype of layers that are given as factors: ``"float32"``, ``"float16"``, ``"bfloat16"``, ….
        The card names it.
    files : Mapping of str to str, optional
        Texts of further files of the directory.
    provenance : Mapping, optional
        JSON values for the record on the card.
    dropped : sequence of str
        Layers that were left out on purpose, for the record.
    bare : bool
        Write the weight file and its config only, which is all that PEFT opens: no README.md, no
        SHA256SUMS and none of ``files``.

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
    source.refuse_carried()
    source_layers = {layer.name: layer for layer in source.layers}
    entries: dict[str, list[Any]] = {}

    def numbers() -> Iterator[Array]:
        for name, *parts in layers:
            stored = _as_stored(name, parts, storage)
            _check_size(name, stored, source_layers.get(name), out)
            entries[name] = entry_of(stored)
            yield from bytes_of(stored, name)
        index = encode_index(entries, _layer_types(source, entries))
        yield np.frombuffer(index_at_the_end(index), np.uint8)

    with (
        new_directory(out, inputs=(source.path,), force=force, sums=not bare) as part,
        TensorWriter(part) as writer,
    ):
        writer.add_pieces(NUMBERS, "uint8", numbers())
        if not entries:
            raise CheckpointError("no layers to write", path=out)
        for key, tensor in source.extras.items():
            writer.add(key, tensor.read())
        config = _config(source)
        writer.seal(NUMBERS, config)
        writer.write(part / WEIGHTS, {})
        # Without spaces and lines: the config counts among the bytes of an adapter.
        text = json.dumps(config, sort_keys=True, separators=(",", ":"), allow_nan=False)
        (part / CONFIG).write_text(text, encoding="utf-8")
        if not bare:
            record = {
                "storage": storage,
                "dropped": list(dropped),
                "sha256": writer.sha256(),
                "config_digests": field_digests(config),
                **(provenance or {}),
            }
            card = _card(config) + card_section(source, record)
            for file, content in {CARD: card, **(files or {})}.items():
                (part / file).write_text(content, encoding="utf-8")
    return out


def pack_lsr(
    source: Checkpoint,
    out_dir: str | Path,
    *,
    storage: str | None = None,
    stored: Mapping[str, Stored] | None = None,
    force: bool = False,
) -> Path:
    """Write an LSR directory that PEFT saved in fewer bytes, as `write_lsr` writes it.

    PEFT saves each factor as a tensor, with four patterns a layer. The scale is folded into the
    first factors, so that ΔW is the same but for their rounding.

    Parameters
    ----------
    source : Checkpoint
        Of the format "lsr".
    out_dir : str or Path
        A directory to make; must not exist, unless ``force``.
    storage : str, optional
        Type of the factors, a floating one; absent, the source's.
    stored : Mapping of layer name to Stored, optional
        Written for these layers instead of their factors.

    Returns
    -------
    Path
        ``out_dir``.

    Raises
    ------
    CheckpointError
        As `write_lsr`.
    """
    stored = stored or {}
    storage = storage or source.storage

    def layers() -> Iterator[tuple[str, Stored]]:
        for layer in source.layers:
            if layer.name not in stored:
                yield layer.name, scaled_factors(layer, storage)
        yield from stored.items()

    return write_lsr(out_dir, source=source, layers=layers(), storage=storage, force=force)


def _as_stored(name: str, parts: Sequence[Any], storage: str) -> Stored:
    """Return a layer as it is stored, whether it was given so or as its factors."""
    if len(parts) == 1:
        return parts[0]  # type: ignore[no-any-return]
    left, right = parts
    try:
        return FloatProduct(tuple(left), tuple(right), storage)
    except ShapeError as error:
        raise ShapeError(f"{name}: {error}") from None


def _check_size(name: str, stored: Stored, source_layer: Any, out: Path) -> None:
    """Refuse a layer that is not of the size of the source's."""
    if source_layer is None:
        return
    rows, columns = source_layer.out_features, source_layer.in_features
    if (rows, columns) != stored.shape.matrix_shape:
        text = f"{name}: factors of {stored.shape.matrix_shape} for a layer of {rows} x {columns}"
        raise CheckpointError(text, path=out)


def _layer_types(source: Checkpoint, names: Iterable[str]) -> dict[str, LayerType]:
    """Return type and kernel of those of these layers that are not linear."""
    written = set(names)
    return {
        layer.name: (layer.layer_type, layer.kernel)
        for layer in source.layers
        if layer.name in written and layer.layer_type != "linear"
    }


def _config(source: Checkpoint) -> dict[str, Any]:
    """Make adapter_config.json, as short as PEFT reads it.

    Which modules are meant is not in it: the index names them.
    """
    names = {layer.name for layer in source.layers}
    fields = carried_fields(source.config, names, set(source.extras), source, "lsr_only")
    for name in ("inference_mode", "target_modules", *OF_SOME_MODULES):
        fields.pop(name, None)
    for name, default in PEFT_DEFAULTS.items():
        if fields[name] == default:
            del fields[name]
    return {**fields, "peft_type": "LSR"}


def _card(config: Mapping[str, Any]) -> str:
    """Write README.md as the Hugging Face hub reads it."""
    base = config.get("base_model_name_or_path")
    named = f"base_model: {json.dumps(base)}\n" if isinstance(base, str) else ""
    return (
        f"---\n{named}library_name: peft\ntags:\n- lsr\n---\n\n"
        "An adapter of low separation rank: short sums of Kronecker products.\n\n"
        "```python\n"
        "import lsrdecomp.lora.peft  # teaches PEFT this adapter type\n"
        "from peft import PeftModel\n\n"
        "model = PeftModel.from_pretrained(base_model, path_of_this_directory)\n"
        "```\n"
    )
