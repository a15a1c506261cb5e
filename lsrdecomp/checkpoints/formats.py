"""The table of formats, and the one way to open an adapter."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

from lsrdecomp.checkpoints import lsr_format, peft_format
from lsrdecomp.checkpoints.bundle import open_bundle
from lsrdecomp.checkpoints.records import Checkpoint
from lsrdecomp.errors import CheckpointError, UnsupportedError

FORMATS: tuple[ModuleType, ...] = (lsr_format, peft_format)
FOREIGN = {
    "kohya": r"\.lora_(up|down)\.weight$",
    "diffusers": r"[._]lora\.(up|down)\.weight$|\.lora_linear_layer\.|\.lora_[AB]\.weight$",
    "cloneofsimo": r"^[a-z_]+:\d+:(up|down)$|^\d+$",
    "loralib": r"\.lora_[AB]$",
    "LyCORIS": r"\.(hada_w|lokr_w|oft_blocks|on_input)",
}


def open_checkpoint(path: str | Path, *, name: str | None = None, alpha: float | None = None) -> Checkpoint:
    """Open an adapter: find its files, tell its format, check every header; numbers are read later, layer by layer.

    Parameters
    ----------
    path : str or Path
        An adapter directory or a weight file.
    name : str, optional
        Weight file or sub-directory to take where a directory has several.
    alpha : float, optional
        LoRA alpha, for formats whose files do not hold it.

    Raises
    ------
    CheckpointError
        One line with file, tensor, numbers and the way out, for anything missing, damaged or inconsistent.
    UnsupportedError
        For a sound file whose content is not expressed here: it is refused by name, never dropped.
    """
    bundle = open_bundle(path, name)
    for form in FORMATS:
        if form.matches(bundle):
            checkpoint: Checkpoint = form.read(bundle, alpha=alpha)
            return checkpoint
    for form_name, pattern in FOREIGN.items():
        if any(re.search(pattern, key) for key in bundle.tensors):
            raise UnsupportedError(f"a {form_name} file; this format is not read yet", path=bundle.weights)
    held = ", ".join(map(repr, list(bundle.tensors)[:3])) or "nothing"
    raise CheckpointError(f"no adapter format known here: it holds {held}", path=bundle.weights)
