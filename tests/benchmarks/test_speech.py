"""Whisper out of CTranslate2's file answers as before; dialled digits are the tones they name."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import WhisperConfig, WhisperForConditionalGeneration  # noqa: E402

from benchmarks.speech import tones  # noqa: E402
from benchmarks.speech.dialled import RATE, TONES, dialled  # noqa: E402
from benchmarks.speech.whisper import open_whisper  # noqa: E402
from lsrdecomp.lora.base.open_bases import open_base  # noqa: E402
from lsrdecomp.lora.base.tokens import LOSS_MASK  # noqa: E402


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


@pytest.mark.parametrize("speed", [1.0, 1.25])
def test_digits_sound_as_on_a_telephone(speed):
    digits, sound = dialled(np.random.default_rng(0), speed)
    power = np.abs(np.fft.rfft(sound))
    near = {
        hertz: power[round(speed * hertz * len(sound) / RATE)]
        for tones in TONES.values()
        for hertz in tones
    }
    heard = {hertz for digit in digits for hertz in TONES[digit]}
    assert min(near[hertz] for hertz in heard) > 3 * max(
        [0.0, *(near[hertz] for hertz in set(near) - heard)]
    )


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """Return a small Whisper that has learnt nothing, as `tones` writes it, and its folder."""
    folder = tmp_path_factory.mktemp("tones")
    torch.manual_seed(0)
    model = tones.new_model()
    model.save_pretrained(folder / "whisper")
    tones.new_extractor().save_pretrained(folder / "whisper")
    lora = LoraConfig(r=2, target_modules=["q_proj"])
    get_peft_model(model, lora).save_pretrained(folder / "lora")
    return open_base(folder / "whisper", folder / "lora"), folder


def test_a_file_is_heard_as_in_training_and_answered_after_the_same_prompt(opened):
    base, folder = opened
    features, tokens = tones.heard(base.tokenizer.extractor, 3, 1.25, seed=5)
    files = tones.write_sounds(folder / "sounds", 3, 1.25, seed=5)
    (batch,) = base.batches(base, list(files), 3)
    torch.testing.assert_close(batch["input_features"], features)
    prompt = len(tones.PROMPT)
    assert torch.equal(batch["decoder_input_ids"][:, :prompt], tokens[:, :prompt])
    digits = ["".join(map(str, row[prompt:-1])) for row in tokens.tolist()]
    assert digits == list(files.values())


def test_a_sound_is_written_down_right_if_all_digits_are_and_no_more(opened):
    base, folder = opened
    answers = ([1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4, 5])

    def batches(_base, _files, _size):
        rows = torch.full((3, len(tones.PROMPT) + 5), tones.END)
        mask = torch.zeros_like(rows)
        for row, predicts, digits in zip(rows, mask, answers, strict=True):
            row[: len(tones.PROMPT) + len(digits)] = torch.tensor([*tones.PROMPT, *digits])
            predicts[len(tones.PROMPT) - 1 : len(tones.PROMPT) + len(digits)] = 1
        yield {"decoder_input_ids": rows, LOSS_MASK: mask}

    files = tones.write_sounds(folder / "sounds", 3, 1.25, seed=5)
    answered = replace(base, batches=batches)
    assert tones.right(answered, dict.fromkeys(files, "1234")) == pytest.approx(1 / 3)
    assert tones.right(answered, dict.fromkeys(files, "123")) == pytest.approx(1 / 3)
    assert tones.right(answered, dict.fromkeys(files, "12")) == 0.0


LAYERS = {"layers": 1, "attention_heads": 1, "ffn_dim": 256}
MARKS = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 1}
