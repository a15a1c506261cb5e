"""An adapter of any kind as the plain low-rank pairs of the same ΔW, for tools that load LoRA."""

from __future__ import annotations

from pathlib import Path

from lsrdecomp.checkpoints import Checkpoint, StoredTensor, write_diffusers, write_kohya, write_lora
from lsrdecomp.checkpoints.provenance import provenance
from lsrdecomp.checkpoints.sums import SUMS, changed_files
from lsrdecomp.compression.layer import layer_product
from lsrdecomp.errors import CheckpointError, UnsupportedError


def export_lora(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    to: str = "lora",
    storage: str = "float32",
    profile: str = "peft",
    force: bool = False,
) -> Path:
    """Write the plain LoRA of the same ΔW: its inner rank is that of the LSR layers.

    LSR factors expand to LoRA factors, so nothing is lost beyond rounding to ``storage``.

    Parameters
    ----------
    checkpoint : Checkpoint
    out : path
        A directory for "lora", a file for "kohya" and "diffusers".
    to : str
        "lora" (PEFT), "kohya" or "diffusers".
    profile : str
        Of "lora": "peft", or "server", padded to one uniform rank with the scale in B and without the head, for servers
        that keep one global scale and load nothing else.

    Raises
    ------
    UnsupportedError
        For another format, by name.
    CheckpointError
        If ``out`` exists (unless ``force``), or a file of the checkpoint is not what was written, by its SHA256SUMS.
    """
    changed = changed_files(checkpoint.weights.parent)
    if changed:
        text = f"{', '.join(changed)} changed since it was written: its SHA-256 is not the one in {SUMS}"
        raise CheckpointError(f"{text}; copy or compress it again", path=checkpoint.weights.parent)
    layers = ((layer.name, *layer_product(layer).to_lora()) for layer in checkpoint.layers)
    record = {"derived_from": provenance(checkpoint)}
    if to == "lora":
        extras: dict[str, StoredTensor] | None = {} if profile == "server" else None
        return write_lora(
            out,
            source=checkpoint,
            layers=layers,
            extras=extras,
            storage=storage,
            profile=profile,
            force=force,
            provenance=record,
        )
    writers = {"kohya": write_kohya, "diffusers": write_diffusers}
    if to not in writers:
        raise UnsupportedError(f"cannot write {to!r}; formats written: lora, {', '.join(writers)}")
    return writers[to](out, source=checkpoint, layers=layers, storage=storage, force=force, provenance=record)
