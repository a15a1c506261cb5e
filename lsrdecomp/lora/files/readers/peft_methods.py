"""Methods of PEFT: which have no ΔW at all, and which have one only beside the base's weights.

LoRA, AdaLoRA, LoHa and LoKr are read from their files alone (`layouts`). Of every other method that
changes weights ΔW is what merging adds to them: `lsrdecomp.lora.base.merged_layers` opens it by
PEFT.
"""

from __future__ import annotations

import math
import re
import shlex
from typing import TYPE_CHECKING

from lsrdecomp.errors import NeedsBaseError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lsrdecomp.lora.files.adapter_config import Config
    from lsrdecomp.lora.files.tensors import StoredTensor

TRAIN_LORA = "train a LoRA on the same examples (lsrdecomp finetune), and compress that"
KEEP = "it is small already: keep it as it is"
PROMPT = f"virtual tokens before the input, and no ΔW; {KEEP}"
METHODS_WITHOUT_UPDATE = {
    "ADAPTION_PROMPT": f"virtual tokens inside the attention, and no ΔW; {KEEP}",
    "BEFT": f"differences of biases, and no ΔW; {KEEP}",
    "CARTRIDGE": f"keys and values of a text before the input, and no ΔW; {TRAIN_LORA}",
    "CPT": PROMPT,
    "IA3": f"one factor for each activation, and no ΔW of its own; {KEEP}",
    "LILY": "a router mixes its matrices anew for every input, so there is no one ΔW, and PEFT "
    f"cannot merge it; {TRAIN_LORA}",
    "LN_TUNING": f"weights of normalisation layers, and no ΔW of a matrix; {KEEP}",
    "MULTITASK_PROMPT_TUNING": PROMPT,
    "POLY": f"each task mixes its LoRAs anew, so there is no one ΔW; {TRAIN_LORA}",
    "PREFIX_TUNING": f"keys and values before those of the input, and no ΔW; {KEEP}",
    "PROMPT_TUNING": PROMPT,
    "P_TUNING": PROMPT,
    "SHADOW": "a small network beside the model whose state depends on the input, and no ΔW; "
    f"{TRAIN_LORA}",
    "TRAINABLE_TOKENS": f"rows of an embedding for single tokens, and no ΔW of a matrix; {KEEP}",
    "XLORA": "a router mixes several LoRAs anew for every input, so there is no one ΔW; compress "
    "the LoRAs that it mixes, each by itself",
}
"""What these methods have in place of a ΔW, and the way out."""
SHAPE_TENSORS = {
    "C3A": r"\.c3a_kernel$",
    "DELORA": r"\.delora_[AB]$",
    "GRALORA": r"\.gralora_[AB]$",
    "VBLORA": r"\.vblora_(?:logits_[AB]|vector_bank)$",
}
"""Methods whose file holds all of ΔW and tells the sizes of its layers, with the tensors that do;
PEFT forms them on layers of zeros."""

SIZE_METHODS = frozenset(
    ("FOURIERFT", "MISS", "PVERA", "RANDLORA", "SHIRA", "UNILORA", "VERA", "WAVEFT")
)
"""Methods whose file, with the seeds in its config, lacks only the sizes of the layers."""


def refuse_method(config: Config) -> None:
    """Refuse a type that is not read from its file alone, with the way out.

    Raises
    ------
    NeedsBaseError
        If ΔW is what PEFT adds to the weights of a base.
    UnsupportedError
        If there is no ΔW.
    """
    peft_type = config.text("peft_type")
    reason = METHODS_WITHOUT_UPDATE.get(peft_type)
    if reason is not None:
        raise UnsupportedError(f"peft_type {peft_type}: {reason}", path=config.path)
    raise needs_base(f"peft_type {peft_type[:40]!r}", config)


def needs_base(what: str, config: Config) -> NeedsBaseError:
    """Return the error for an adapter whose ΔW takes the base's weights, or their sizes."""
    base = config.raw.get("base_model_name_or_path")
    typed = "BASE"
    if isinstance(base, str) and base and base.isprintable():
        typed = shlex.quote(base)
    return NeedsBaseError(
        f"{what}: its ΔW is what PEFT adds to the weights of its base; give that by --base {typed} "
        "(inspect, compress, distill, export and verify take it; in Python base=)",
        path=config.path,
    )


def layer_shapes(
    peft_type: str, tensors: Mapping[str, StoredTensor]
) -> dict[str, tuple[int, int]] | None:
    """Return the sizes (m, n) of the layers of a file, by name with PEFT's prefix.

    None for a method whose file does not tell them, and for tensors of other shapes than PEFT's.
    """
    pattern = SHAPE_TENSORS.get(peft_type)
    if pattern is None:
        return None
    parts: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, tensor in tensors.items():
        match = re.search(pattern, key)
        if match is not None:
            parts.setdefault(key[: match.start()], {})[match[0][-1]] = tensor.shape
    vector_length = 0
    for name in [name for name, of_layer in parts.items() if "k" in of_layer]:
        _, vector_length = parts.pop(name)["k"]  # the bank of vectors, common to all layers
    try:
        shapes = {
            name: _layer_shape(peft_type, of_layer, vector_length)
            for name, of_layer in parts.items()
        }
    except (KeyError, ValueError):
        return None
    return shapes if all(math.prod(shape) for shape in shapes.values()) else None


def _layer_shape(
    peft_type: str, parts: Mapping[str, tuple[int, ...]], vector_length: int
) -> tuple[int, int]:
    """Return (m, n) of a layer, from the shapes of its tensors by their last letters."""
    if peft_type == "C3A":
        row_blocks, column_blocks, block = parts["l"]
        return row_blocks * block, column_blocks * block
    if peft_type == "DELORA":
        _, columns = parts["A"]
        rows, _ = parts["B"]
        return rows, columns
    if peft_type == "GRALORA":
        blocks, columns, _ = parts["A"]
        _, _, rows = parts["B"]
        return blocks * rows, blocks * columns
    _, columns, _ = parts["A"]
    rows, _, _ = parts["B"]
    return rows * vector_length, columns * vector_length
