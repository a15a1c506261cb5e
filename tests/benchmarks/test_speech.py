"""Whisper out of CTranslate2's file answers as before; dialled digits are the tones they name."""

from __future__ import annotations

import struct

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from transformers import WhisperConfig, WhisperForConditionalGeneration  # noqa: E402

from benchmarks.speech.dialled import RATE, TONES, dialled  # noqa: E402
from benchmarks.speech.whisper import open_whisper  # noqa: E402


def as_ctranslate2(model):
    """The bytes of a ``model.bin``: as that library names and joins the tensors."""
    state = {name: tensor.half().numpy() for name, tensor in model.state_dict().items()}
    tensors = {}
    for side in ("encoder", "decoder"):
        old = f"model.{side}"
        for convolution in ("conv1", "conv2") if side == "encoder" else ():
            for kind in ("weight", "bias"):
                tensors[f"{side}/{convolution}/{kind}"] = state[f"{old}.{convolution}.{kind}"]
        tensors[f"{side}/position_encodings/encodings"] = state[f"{old}.embed_positions.weight"]
        norms = {f"{side}/layer_norm": f"{old}.layer_norm"}
        layer = f"{side}/layer_0"
        old += ".layers.0"
        for block, attention in (("self_attention", "self_attn"), ("attention", "encoder_attn")):
            if f"{old}.{attention}.q_proj.weight" not in state:
                continue
            norms[f"{layer}/{block}/layer_norm"] = f"{old}.{attention}_layer_norm"
            groups = ("qkv", "o") if block == "self_attention" else ("q", "kv", "o")
            for number, letters in enumerate(groups):
                names = [
                    f"{old}.{attention}.{'out' if letter == 'o' else letter}_proj"
                    for letter in letters
                ]
                # k has no bias.
                biases = [state.get(f"{name}.bias", np.zeros(64, np.float16)) for name in names]
                tensors[f"{layer}/{block}/linear_{number}/weight"] = np.concatenate(
                    [state[f"{name}.weight"] for name in names]
                )
                tensors[f"{layer}/{block}/linear_{number}/bias"] = np.concatenate(biases)
        norms[f"{layer}/ffn/layer_norm"] = f"{old}.final_layer_norm"
        for number in range(2):
            for kind in ("weight", "bias"):
                tensors[f"{layer}/ffn/linear_{number}/{kind}"] = state[
                    f"{old}.fc{number + 1}.{kind}"
                ]
        for new, name in norms.items():
            tensors |= {
                f"{new}/gamma": state[f"{name}.weight"],
                f"{new}/beta": state[f"{name}.bias"],
            }
    tensors["decoder/embeddings/weight"] = state["model.decoder.embed_tokens.weight"]

    def text(words):
        return struct.pack("<H", len(words) + 1) + words.encode() + b"\0"

    # A setting of one byte, which is no tensor.
    settings = text("decoder/activation") + struct.pack("<BBI", 0, 1, 1) + b"\2"
    content = (
        struct.pack("<I", 6)
        + text("WhisperSpec")
        + struct.pack("<II", 3, len(tensors) + 1)
        + settings
    )
    for name, tensor in tensors.items():
        sizes = struct.pack(f"<B{tensor.ndim}I", tensor.ndim, *tensor.shape)
        content += text(name) + sizes + struct.pack("<BI", 4, tensor.nbytes) + tensor.tobytes()
    return content + struct.pack("<I", 0)


def test_whisper_out_of_its_parts_answers_as_before(tmp_path):
    torch.manual_seed(0)
    sizes = {"d_model": 64, "vocab_size": 70, "num_mel_bins": 80, "max_source_positions": 150}
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in LAYERS.items()}
    model = WhisperForConditionalGeneration(
        WhisperConfig(**sizes, **layers, max_target_positions=20, **MARKS)
    ).half()
    model = model.float().eval()
    content = as_ctranslate2(model)
    files = [tmp_path / "model.bin.part1", tmp_path / "model.bin.part2"]
    files[0].write_bytes(content[:1000])
    files[1].write_bytes(content[1000:])
    asked = {
        "input_features": torch.randn(1, 80, 300),
        "decoder_input_ids": torch.tensor([[3, 5, 7]]),
    }
    opened = open_whisper(files, seconds=3.0)
    torch.testing.assert_close(opened(**asked).logits, model(**asked).logits)
    asked["input_features"] = asked["input_features"][:, :, :100]
    assert open_whisper(files, seconds=1.0)(**asked).logits.shape == (1, 3, 70)


def test_digits_sound_as_on_a_telephone():
    digits, sound = dialled(np.random.default_rng(0))
    power = np.abs(np.fft.rfft(sound))
    near = {
        hertz: power[round(hertz * len(sound) / RATE)]
        for tones in TONES.values()
        for hertz in tones
    }
    heard = {hertz for digit in digits for hertz in TONES[digit]}
    assert min(near[hertz] for hertz in heard) > 3 * max(
        [0.0, *(near[hertz] for hertz in set(near) - heard)]
    )


LAYERS = {"layers": 1, "attention_heads": 1, "ffn_dim": 256}
MARKS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 1}
