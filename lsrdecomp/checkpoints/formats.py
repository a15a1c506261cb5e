"""The table of formats, and the one way to open an adapter."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from lsrdecomp.checkpoints import (
    cloneofsimo_format,
    diffusers_format,
    kohya_format,
    loralib_format,
    lsr_format,
    lycoris_format,
    peft_format,
    peft_lycoris_format,
)
from lsrdecomp.checkpoints.bundle import open_bundle
from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.errors import CheckpointError

FORMATS: tuple[ModuleType, ...] = (
    lsr_format,
    peft_lycoris_format,
    peft_format,
    lycoris_format,
    kohya_format,
    diffusers_format,
    cloneofsimo_format,
    loralib_format,
)


def open_checkpoint(
    path: str | Path, *, name: str | None = None, alpha: float | None = None, max_memory: int | None = None
) -> Checkpoint:
    """Open an adapter: find its files, tell its format, check every header; numbers are read later, layer by layer.

    Parameters
    ----------
    path : str or Path
        An adapter directory or a weight file.
    name : str, optional
        Weight file or sub-directory to take where a directory has several.
    alpha : float, optional
        LoRA alpha, for formats whose files do not hold it.
    max_memory : int, optional
        Bytes that one layer in float64, or one other tensor, may take; larger ones are refused before they are read.

    Raises
    ------
    CheckpointError
        One line with file, tensor, numbers and the way out, for anything missing, damaged or inconsistent.
    UnsupportedError
        For a sound file whose content is not expressed here: it is refused by name, never dropped.
    """
    bundle = open_bundle(path, name, max_memory)
    for form in FORMATS:
        if form.matches(bundle):
            checkpoint: Checkpoint = form.read(bundle, alpha=alpha)
            if max_memory is not None:
                _check_memory(checkpoint, max_memory)
            return checkpoint
    held = ", ".join(map(repr, list(bundle.tensors)[:3])) or "nothing"
    raise CheckpointError(f"no adapter format known here: it holds {held}", path=bundle.weights)


def _check_memory(checkpoint: Checkpoint, most: int) -> None:
    for name, numbers, size in (
        *((layer.name, layer.parameters, 8 * layer.parameters) for layer in checkpoint.layers),
        *((key, tensor.parameters, tensor.nbytes) for key, tensor in checkpoint.extras.items()),
    ):
        if size > most:
            text = f"its {numbers} numbers take {size} bytes, above the {most} allowed; raise max_memory"
            raise CheckpointError(text, path=checkpoint.weights, tensor=name)
