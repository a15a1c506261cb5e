"""A trained adapter on disk: as PEFT saves it, or packed if it is one of LSR."""

from __future__ import annotations

import shutil
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from lsrdecomp.errors import LsrError
from lsrdecomp.formats.stored import FloatProduct
from lsrdecomp.lora.files import Checkpoint, open_checkpoint
from lsrdecomp.lora.files.packed_index import stored_layers
from lsrdecomp.lora.files.writers.write_lsr import pack_lsr
from lsrdecomp.lora.search.layers import layer_product
from lsrdecomp.lora.search.quantize import INTEGER_BITS, coded_product, stored_like
from lsrdecomp.lora.train.finetune_record import ADAPTER

if TYPE_CHECKING:
    from pathlib import Path

    from peft import PeftModel
    from torch import Tensor

    from lsrdecomp.formats.stored import Stored


def save_adapter(
    model: PeftModel,
    run: Path,
    tensors: dict[str, Tensor] | None = None,
    *,
    storage: str | None = None,
    like: str | None = None,
) -> None:
    """Save the adapter as PEFT does; of LSR all numbers and sizes packed, in far fewer bytes.

    Parameters
    ----------
    model : PeftModel
    run : Path
        Its directory ``adapter`` is written.
    tensors : dict, optional
        Of a sharded model, gathered.
    storage : str, optional
        Of LSR's factors, such as ``"int4"``; absent, that of each layer in ``like``, else float32.
    like : str, optional
        Adapter directory that was trained on.
    """
    with TemporaryDirectory(dir=run) as folder:
        model.save_pretrained(folder, state_dict=tensors)
        if is_lsr(model):
            try:
                trained = open_checkpoint(folder)
                stored, float_storage = _not_in_floats(trained, storage, like)
                pack_lsr(trained, run / ADAPTER, storage=float_storage, stored=stored, force=True)
                return
            except LsrError:
                # DoRA's magnitudes, which packed directories do not carry, or a number beyond the
                # type: then PEFT's own files are the adapter.
                pass
        shutil.copytree(folder, run / ADAPTER, dirs_exist_ok=True)


def is_lsr(model: PeftModel) -> bool:
    """Return whether the active adapter is one of LSR."""
    return bool(model.peft_config[model.active_adapter].peft_type == "LSR")


def load_written_numbers(model: PeftModel, run: Path) -> None:
    """Let a model compute with the numbers that were written, where those were rounded."""
    if not is_lsr(model):
        return
    written = open_checkpoint(run / ADAPTER)
    if any(layer.dtype != "float32" for layer in written.layers):
        model.load_adapter(run / ADAPTER, "written")
        model.set_adapter("written")


def _not_in_floats(
    trained: Checkpoint, storage: str | None, like: str | None
) -> tuple[dict[str, Stored], str]:
    """Return the layers that are not stored in floats, and the floating type of the others."""
    if storage in INTEGER_BITS:
        bits = INTEGER_BITS[storage]
        coded = {layer.name: coded_product(layer_product(layer), bits) for layer in trained.layers}
        return dict(coded), "float32"
    if storage is not None:
        return {}, storage
    if like is None:
        return {}, "float32"
    old = open_checkpoint(like)
    others: dict[str, Stored] = {}
    if old.format == "lsr":  # not the LoRA that a run with a ratio starts from
        for name, stored in stored_layers(old).items():
            if not isinstance(stored, FloatProduct):
                others[name] = stored_like(stored, layer_product(trained.layer(name)))
    float_types = [layer.dtype for layer in old.layers if layer.name not in others]
    return others, float_types[0] if float_types else "float32"
