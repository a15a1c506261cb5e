"""Any model is a base: of one's own, of images, of sounds, or an encoder of sentences."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.io import wavfile

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
pytest.importorskip("PIL", reason="images are read by Pillow")

from console import run_command  # noqa: E402
from own_models import (  # noqa: E402
    Network,
    image_classifier,
    own_model,
    save_lora,
    sentence_encoder,
    speech_model,
)
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402
from peft.tuners.lora import LoraLayer  # noqa: E402
from tiny_bases import TEXTS  # noqa: E402
from torch import nn  # noqa: E402

import lsrdecomp as lsr  # noqa: E402
from lsrdecomp.errors import CheckpointError, LsrError  # noqa: E402
from lsrdecomp.lora.base.base_model import Base, own_base  # noqa: E402
from lsrdecomp.lora.base.batch_rows import as_batch, examples_in, join_rows, split_rows  # noqa: E402
from lsrdecomp.lora.base.calibrate import calibrate  # noqa: E402
from lsrdecomp.lora.base.dataset import DataError  # noqa: E402
from lsrdecomp.lora.base.divergence import Reference  # noqa: E402
from lsrdecomp.lora.base.forward import forward  # noqa: E402
from lsrdecomp.lora.base.heads import Head  # noqa: E402
from lsrdecomp.lora.base.open_bases import open_base  # noqa: E402
from lsrdecomp.lora.base.other_bases import _read_sound  # noqa: E402
from lsrdecomp.lora.base.texts import read_data  # noqa: E402
from lsrdecomp.lora.base.tokens import LOSS_MASK, model_inputs  # noqa: E402
from lsrdecomp.lora.search.measured_settings import MeasuredSettings  # noqa: E402

CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"


def test_a_module_of_ones_own_is_a_base(tmp_path):
    """The share is 1 − Σ‖y_c − y_l‖² / Σ‖y_l − y_0‖² over batches that nothing else has seen."""
    model, data, lora = own_model(tmp_path)
    result = lsr.compress(lora, base=model, data=iter(data), keep=0.8)
    assert result.fidelity.kept >= 0.8
    assert result.fidelity.agreement is None
    assert "held-out examples" in repr(result)
    # The same share, computed here on fresh inputs.
    fresh = torch.randn(4000, 12) * torch.linspace(0.05, 2.0, 12)
    with torch.no_grad():
        plain = model(fresh)
        ours = own_base(model).with_adapter(result.save(tmp_path / "small")).model(fresh)
        theirs = PeftModel.from_pretrained(model, str(lora))(fresh)
    share = 1 - float((ours - theirs).square().sum() / (theirs - plain).square().sum())
    assert share == pytest.approx(result.fidelity.kept, abs=0.05)


def test_a_base_says_what_other_outputs_mean(tmp_path):
    """Here classes: then agreement is measured too."""
    model, data, lora = own_model(tmp_path)
    numbers = own_base(model)
    base = Base(
        "mine", model, None, Head.classification, outputs=numbers.outputs, batches=numbers.batches
    )
    fidelity = lsr.compress(lora, base=base, data=data, ratio=2).fidelity
    assert fidelity.base == "mine"
    assert fidelity.agreement is not None


def dense(weight):
    return weight.apply(np.eye(weight.size))


def test_statistics_of_numbers_are_those_of_gauss_and_newton(tmp_path):
    """For a linear model y = Wx they are C = E[x xᵀ] and G = 1, whatever σ and the outputs are."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 4))
    adapted = get_peft_model(network, LoraConfig(r=2, target_modules=["0"]))
    base = Base("linear", adapted, None, Head.numbers, ("0",), outputs=own_base(network).outputs)
    inputs = torch.randn(4000, 6) * torch.tensor([3.0, 2.0, 1.0, 0.5, 0.2, 0.1])
    batches = [{"0": part} for part in inputs.split(500)]
    weights = calibrate(base, batches, out=tmp_path / "s", seed=0, samples=4000, effect=False)["0"]
    second_moments = (inputs.T @ inputs / len(inputs)).numpy()
    np.testing.assert_allclose(dense(weights.input), second_moments, atol=0.5)
    np.testing.assert_allclose(dense(weights.output), np.eye(4), atol=0.15)


def test_statistics_of_a_convolution_are_those_of_its_patches(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1, stride=2))
    adapted = get_peft_model(network, LoraConfig(r=2, target_modules=["0"]))
    base = own_base(adapted)
    inputs = torch.randn(600, 2, 6, 6) * torch.tensor([2.0, 0.2]).reshape(1, 2, 1, 1)
    base = Base("c", adapted, None, Head.numbers, ("0",), outputs=base.outputs)
    batches = [{"0": part} for part in inputs.split(200)]
    weights = calibrate(base, batches, out=tmp_path / "s", seed=0, samples=600, effect=False)["0"]
    # A change D of the weight changes the outputs by D * x, so that ‖G^½ D C^½‖² = Σ‖D * x‖².
    change = torch.randn(3, 2, 3, 3)
    moved = nn.functional.conv2d(inputs, change, padding=1, stride=2).square().sum() / len(inputs)
    matrix = change.reshape(3, 18).numpy()
    estimate = np.trace(dense(weights.output) @ matrix @ dense(weights.input) @ matrix.T)
    assert estimate == pytest.approx(float(moved), rel=0.15)


@pytest.mark.parametrize(
    ("make", "data", "unit"),
    [(image_classifier, "images", "example"), (speech_model, "sounds", "token")],
)
def test_a_folder_is_enough_for_images_and_sounds(tmp_path, make, data, unit):
    make(tmp_path)
    result = lsr.compress(tmp_path / "lora", base=tmp_path / "base", data=tmp_path / data, keep=0.5)
    assert result.fidelity.kept > 0.5
    assert result.fidelity.unit == unit
    assert result.fidelity.data == f"{data}/"
    assert f"held-out {data} of {data}/" in repr(result)


def test_a_command_calls_sounds_by_their_name(tmp_path):
    speech_model(tmp_path)
    base, page = tmp_path / "base", tmp_path / "page.html"
    data = ("--data", tmp_path / "sounds")
    goal = ("--keep", 0.9, "--out", tmp_path / "small", "--report", page)
    done = run_command("compress", tmp_path / "lora", "--base", base, *data, *goal)
    assert done.returncode == 0
    printed = " ".join((done.stdout + page.read_text()).split())
    assert "% on the same sounds." in printed
    assert "on the sounds that select" in printed
    assert "texts" not in done.stdout
    done = run_command(
        "calibrate", base, "--adapter", tmp_path / "lora", *data, "--out", tmp_path / "statistics"
    )
    assert "own effect on these sounds: KL" in done.stdout


def opened_speech_model(folder):
    """Return a Whisper with its LoRA on it, and the files of its sounds."""
    speech_model(folder)
    base = open_base(folder / "base", folder / "lora").with_adapter(folder / "lora")
    return base, sorted((folder / "sounds").iterdir())


def test_a_model_of_sounds_is_measured_on_what_it_wrote_itself(tmp_path):
    """After language and task, which Whisper is given; up to and with the end."""
    base, files = opened_speech_model(tmp_path)
    end = base.model.generation_config.eos_token_id
    (batch,) = base.batches(base, files[:4], 4)
    given = batch["decoder_input_ids"][:, :4].tolist()
    assert given == [[1, 3, 4, 39]] * 4
    # A sound of which little was written: its second word becomes the end.
    second = int(batch["decoder_input_ids"][0, 5])
    base.model.generation_config.eos_token_id = second
    (batch,) = base.batches(base, files[:4], 4)
    counts = batch[LOSS_MASK].sum(1)
    assert second != end
    assert counts[0] == 2
    assert batch[LOSS_MASK][:, :3].sum() == 0
    top = base.model(**model_inputs(batch)).logits.argmax(-1)
    following = batch["decoder_input_ids"][:, 1:]
    predicts = batch[LOSS_MASK][:, :-1].bool()
    assert torch.equal(top[:, :-1][predicts], following[predicts])
    assert following[0, 4] == second


def test_sounds_are_written_down_alike_while_statistics_are_measured(tmp_path):
    """Blocks that compute anew still have the cache that a model writes with."""
    base, files = opened_speech_model(tmp_path)
    before = list(base.batches(base, files, 8))
    during = []

    def batches():
        for batch in base.batches(base, files, 8):
            during.append(batch)
            yield batch

    calibrate(base, batches(), out=tmp_path / "s", seed=0, samples=36, effect=False)
    assert len(during) == len(before)
    for one, other in zip(before, during, strict=True):
        assert torch.equal(one["decoder_input_ids"], other["decoder_input_ids"])


def test_the_lora_writes_sounds_down_at_full_strength(tmp_path):
    """Also those that the statistics are measured on, with part of it."""
    speech_model(tmp_path)
    plain = open_base(tmp_path / "base", tmp_path / "lora")
    scales = set()

    def batches(source, files, size):
        for batch in plain.batches(source, files, size):
            layers = [each for each in source.model.modules() if isinstance(each, LoraLayer)]
            scales.update(layer.scaling["default"] for layer in layers)
            yield batch

    watched = replace(plain, batches=batches)
    lsr.compress(tmp_path / "lora", base=watched, data=tmp_path / "sounds", ratio=2)
    assert scales == {2.0}


def test_sounds_are_run_in_the_precision_of_the_base(tmp_path):
    speech_model(tmp_path)
    result = lsr.compress(
        tmp_path / "lora",
        base=tmp_path / "base",
        data=tmp_path / "sounds",
        ratio=2,
        settings=MeasuredSettings(dtype="bfloat16"),
    )
    assert result.fidelity.kept > 0.5


def test_sounds_of_other_models_are_padded_to_the_longest(tmp_path):
    """Whisper's all have one length; those of others differ, and the mask says so."""
    torch.manual_seed(0)
    config = transformers.MoonshineConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1,
        encoder_num_attention_heads=2,
        decoder_num_attention_heads=2,
        max_position_embeddings=40,
        initializer_range=0.3,
    )
    save_lora(transformers.MoonshineForConditionalGeneration(config), tmp_path, ["q_proj"])
    extractor = transformers.Wav2Vec2FeatureExtractor(return_attention_mask=True)
    extractor.save_pretrained(tmp_path / "base")
    files = [tmp_path / f"{length}.wav" for length in (4000, 6000)]
    for file, length in zip(files, (4000, 6000), strict=True):
        wavfile.write(file, 16_000, np.sin(np.arange(length) / 10.0).astype(np.float32))
    base = open_base(tmp_path / "base", tmp_path / "lora").with_adapter(tmp_path / "lora")
    (batch,) = base.batches(base, files, 2)
    assert batch["attention_mask"].sum(1).tolist() == [4000, 6000]
    # What is written begins after Moonshine's only given token.
    predicts = batch[LOSS_MASK].bool()
    assert predicts[:, 0].all()
    top = base.model(**model_inputs(batch)).logits.argmax(-1)
    following = batch["decoder_input_ids"][:, 1:]
    assert torch.equal(top[:, :-1][predicts[:, :-1]], following[predicts[:, :-1]])


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "float32"])
def test_a_sound_is_as_loud_in_every_kind_of_wav(tmp_path, dtype):
    """Eight bits are unsigned, around 128."""
    sound = 0.5 * np.sin(np.arange(1600) / 10.0)
    values = sound.astype(np.float32)
    if dtype != "float32":
        whole = np.iinfo(dtype)
        middle = 128 if dtype == "uint8" else 0
        values = (middle + sound * (whole.max - middle)).astype(dtype)
    wavfile.write(tmp_path / "a.wav", 16_000, values)
    np.testing.assert_allclose(_read_sound(tmp_path / "a.wav", 16_000), sound, atol=0.02)


def test_an_encoder_of_sentences_is_measured_by_its_embeddings(tmp_path):
    sentence_encoder(tmp_path)
    base = open_base(tmp_path / "base", tmp_path / "lora")
    assert base.head is Head.numbers
    tokens = base.tokenizer([text for text, _ in TEXTS[:4]], padding=True, return_tensors="pt")
    embeddings = base.outputs(base.model, dict(tokens))
    assert embeddings.shape == (4, 16)
    np.testing.assert_allclose(embeddings.norm(dim=-1).detach(), 1.0, rtol=1e-5)
    # Padding counts for nothing.
    alone = base.tokenizer([TEXTS[0][0]], return_tensors="pt")
    torch.testing.assert_close(
        base.outputs(base.model, dict(alone))[0], embeddings[0], rtol=1e-4, atol=1e-5
    )
    texts = [f"w{i % 30} w{(i * 7) % 29} w{(i * i) % 13}" for i in range(80)]
    result = lsr.compress(tmp_path / "lora", base=tmp_path / "base", data=texts, keep=0.7)
    assert result.fidelity.kept >= 0.7
    assert result.fidelity.agreement is None


def test_a_model_of_ones_own_is_run_as_contributing_says(tmp_path, monkeypatch):
    section = CONTRIBUTING.read_text().split("## Running another model")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)

    class Potential(Network):
        def forward(self, positions, charge):
            return {"energy": None, "forces": super().forward(positions) * charge}

    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["first", "second"], init_lora_weights=False)
    adapted = get_peft_model(Potential(), lora)
    adapted.save_pretrained(tmp_path / "my-lora")
    monkeypatch.chdir(tmp_path)
    names = {
        "__name__": "contributed",
        "model": adapted.unload(),
        "batches": [
            {"positions": torch.randn(16, 12), "charge": torch.ones(16, 1)} for _ in range(4)
        ],
    }
    exec(compile(code, str(CONTRIBUTING), "exec"), names)
    assert names["small"].fidelity.kept >= 0.95
    assert names["small"].fidelity.base == "potential"


def test_batches_come_apart_and_together_again():
    batch = {"x": torch.arange(6.0).reshape(3, 2), "t": torch.tensor(5), "more": [torch.ones(3, 1)]}
    rows = split_rows(batch)
    assert [row["x"].tolist() for row in rows] == [[[0.0, 1.0]], [[2.0, 3.0]], [[4.0, 5.0]]]
    (joined,) = join_rows(rows, 8)
    assert torch.equal(joined["x"], batch["x"])
    assert torch.equal(joined["more"][0], batch["more"][0])
    assert [examples_in(part) for part in join_rows(rows, 2)] == [2, 1]
    # Rows that differ in what all rows of a batch share are not put together.
    other = {**rows[0], "t": torch.tensor(6)}
    assert len(list(join_rows([rows[0], other], 8))) == 2
    assert as_batch((1, torch.ones(2))).keys() == {"0", "1"}


def test_what_is_no_batch_is_refused(tmp_path):
    model, _, lora = own_model(tmp_path)
    with pytest.raises(LsrError, match="without a tensor of rows"):
        as_batch("a text")
    with pytest.raises(DataError, match="iterable of tensors"):
        lsr.compress(lora, base=model, data=[f"text {i}" for i in range(40)], ratio=2)
    with pytest.raises(DataError, match=r"data\[0\] is 3"):
        read_data([3])
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no image and no sound"):
        read_data(tmp_path / "empty")


def test_several_rows_of_an_example_count_as_one_example():
    """So that the standard error is over examples, whose rows are not independent."""
    torch.manual_seed(0)
    network = Network()
    adapted = get_peft_model(network, LoraConfig(r=2, target_modules=["first"]))
    base = Base("n", adapted, None, Head.numbers, outputs=own_base(network).outputs)
    batch = {"0": torch.randn(6, 12), "row_counts": torch.tensor([3, 2, 1])}
    output = forward(base, batch)
    assert output.logits.shape == (6, 8)
    assert output.counts.tolist() == [3, 2, 1]
    nn.init.normal_(adapted.base_model.model.first.lora_B["default"].weight)
    reference = Reference(base, [batch])
    assert reference.examples == 3
    assert int(reference.counts.sum()) == 6
