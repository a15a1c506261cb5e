"""Whisper as CTranslate2 writes it, opened by transformers.

The file ``model.bin`` holds a version, the name of what it describes and its revision, then the
tensors one after the other: name, sizes, type, bytes. Projections that read the same input stand in
one tensor there: q, k and v of self-attention, k and v of the attention to the encoder.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import WhisperConfig, WhisperForConditionalGeneration

SIDES = ("encoder", "decoder")
FLOAT16 = 4
"""CTranslate2's number of the type."""
NORMS = {"gamma": "weight", "beta": "bias"}
ATTENTION = {"self_attention": "self_attn", "attention": "encoder_attn"}
PROJECTIONS = {
    ("self_attention", "0"): "qkv",
    ("self_attention", "1"): "o",
    ("attention", "0"): "q",
    ("attention", "1"): "kv",
    ("attention", "2"): "o",
}
IN_FULL = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
PLAIN = {
    "embeddings/weight": "embed_tokens.weight",
    "position_encodings/encodings": "embed_positions.weight",
    "layer_norm/gamma": "layer_norm.weight",
    "layer_norm/beta": "layer_norm.bias",
}


def read_tensors(content: bytes) -> dict[str, NDArray[np.float16]]:
    """Return the tensors of a ``model.bin`` in half precision by CTranslate2's names.

    Other types are settings, left out.
    """
    position = 0

    def number(kind: str) -> int:
        nonlocal position
        (value,) = struct.unpack_from(f"<{kind}", content, position)
        position += struct.calcsize(kind)
        return int(value)

    def text() -> str:
        nonlocal position
        size = number("H")
        position += size
        return content[position - size : position].rstrip(b"\0").decode()

    number("I"), text(), number("I")
    tensors = {}
    for _ in range(number("I")):
        name, sizes = text(), [number("I") for _ in range(number("B"))]
        kind, size = number("B"), number("I")
        if kind == FLOAT16 and sizes:
            tensors[name] = np.frombuffer(content, np.float16, size // 2, position).reshape(sizes)
        position += size
    return tensors


def renamed(name: str, tensor: NDArray[np.float16]) -> Iterator[tuple[str, NDArray[np.float16]]]:
    """A tensor under the names of transformers, in as many pieces as it has there."""
    side, _, rest = name.partition("/")
    parts = rest.split("/")
    if rest in PLAIN or parts[0].startswith("conv"):
        yield f"model.{side}.{PLAIN.get(rest, rest.replace('/', '.'))}", tensor
        return
    layer = f"model.{side}.layers.{parts[0].removeprefix('layer_')}"
    block, part, kind = parts[1], parts[2], parts[-1]
    if part == "layer_norm":
        norm = "final_layer_norm" if block == "ffn" else f"{ATTENTION[block]}_layer_norm"
        yield f"{layer}.{norm}.{NORMS[kind]}", tensor
    elif block == "ffn":
        yield f"{layer}.fc{int(part[-1]) + 1}.{kind}", tensor
    else:
        together = PROJECTIONS[block, part[-1]]
        for letter, piece in zip(together, np.split(tensor, len(together)), strict=True):
            if (letter, kind) != ("k", "bias"):  # always zero; transformers has none
                yield f"{layer}.{ATTENTION[block]}.{IN_FULL[letter]}.{kind}", piece


def open_whisper(files: list[Path], *, seconds: float) -> WhisperForConditionalGeneration:
    """Build the model in float32 from the parts of its ``model.bin``, for so many seconds of sound.

    Whisper pads all sounds to 30 seconds; its first positions alone hear shorter ones at a fraction
    of the cost.
    """
    tensors = read_tensors(b"".join(file.read_bytes() for file in files))
    state = {new: piece for name, tensor in tensors.items() for new, piece in renamed(name, tensor)}
    positions, heard = "model.encoder.embed_positions.weight", round(50 * seconds)
    state[positions] = state[positions][:heard]
    vocabulary, width = state["model.decoder.embed_tokens.weight"].shape
    blocks = {
        side: 1 + max(int(i) for name in state for i in re.findall(rf"{side}\.layers\.(\d+)", name))
        for side in SIDES
    }
    config = WhisperConfig(
        vocab_size=vocabulary,
        d_model=width,
        encoder_layers=blocks["encoder"],
        decoder_layers=blocks["decoder"],
        encoder_attention_heads=width // 64,
        decoder_attention_heads=width // 64,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_mel_bins=state["model.encoder.conv1.weight"].shape[1],
        pad_token_id=None,
        max_source_positions=heard,
        max_target_positions=len(state["model.decoder.embed_positions.weight"]),
    )
    model = WhisperForConditionalGeneration(config)
    state["proj_out.weight"] = state["model.decoder.embed_tokens.weight"]
    model.load_state_dict(
        {name: torch.from_numpy(array.astype(np.float32)) for name, array in state.items()}
    )
    return model.eval()
