"""State dicts and models are opened as if they had been saved."""

import gc

import numpy as np
import pytest
from checkpoint_files import PREFIX, lora_pair, write_lora_directory
from format_files import OUTSIDE, write_format
from safetensors.numpy import load_file

import lsrdecomp as lsr
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.lora.files import open_checkpoint


def assert_same_layers(first, second):
    assert first.format == second.format
    for layer, other in zip(first.layers, second.layers, strict=True):
        assert (layer.name, layer.layer_type, layer.scale, layer.dtype) == (
            other.name,
            other.layer_type,
            other.scale,
            other.dtype,
        )
        for half, same in zip(layer.load(), other.load(), strict=True):
            np.testing.assert_array_equal(half, same)


def test_a_state_dict_of_peft_is_its_directory(tmp_path):
    tensors = {
        **lora_pair("layers.0.q", r=3),
        **lora_pair("layers.1.v"),
        f"{PREFIX}head.weight": np.ones((2, 4), np.float32),
    }
    folder = write_lora_directory(
        tmp_path / "lora", tensors, r=3, rank_pattern={"layers.1.v": 2}, modules_to_save=["head"]
    )
    given, held = open_checkpoint(folder), open_checkpoint(tensors, alpha=4)
    assert_same_layers(given, held)
    assert given.extras.keys() == held.extras.keys()


@pytest.mark.parametrize("form", ["kohya", "diffusers", "comfy wan", "loralib"])
def test_a_state_dict_of_another_format_is_its_file(form, tmp_path):
    file, alpha = tmp_path / write_format(tmp_path, form), 4.0 if form in OUTSIDE else None
    assert_same_layers(
        open_checkpoint(file, alpha=alpha), open_checkpoint(load_file(file), alpha=alpha)
    )


def test_a_model_is_what_it_would_save(tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    model = torch.nn.Sequential(torch.nn.Linear(12, 8), torch.nn.Linear(8, 6))
    config = peft.LoraConfig(r=2, lora_alpha=6, target_modules=["0", "1"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(tmp_path / "lora")
    held = open_checkpoint(adapted)
    assert_same_layers(open_checkpoint(tmp_path / "lora"), held)
    state = peft.get_peft_model_state_dict(adapted)
    assert_same_layers(held, open_checkpoint(state, alpha=6))
    halves = {key: tensor.to(torch.bfloat16) for key, tensor in state.items()}
    layer = open_checkpoint(halves, alpha=6).layers[0]
    assert layer.dtype == "bfloat16"
    np.testing.assert_array_equal(layer.load()[1], halves[layer.down.name].float().numpy())
    small = lsr.compress(adapted, separation_rank=1, inner_shape=(1, 2)).save(tmp_path / "small")
    assert len(open_checkpoint(small).layers) == 2


def test_what_was_saved_lives_as_long_as_a_layer_of_it():
    checkpoint = open_checkpoint(lora_pair("q"), alpha=2)
    folder, layers = checkpoint.weights.parent, checkpoint.layers
    del checkpoint
    gc.collect()
    assert layers[0].load()[0].shape == (4, 2)
    del layers
    gc.collect()
    assert not folder.parent.exists()


def test_what_is_missing_is_said():
    with pytest.raises(
        CheckpointError, match="of rank 2: its alpha is not in it; give open_checkpoint alpha="
    ):
        lsr.compress(lora_pair("q"), ratio=2)
    with pytest.raises(CheckpointError, match="got an object of type ndarray"):
        open_checkpoint(np.ones((2, 2)))
    for wrong in ({f"{PREFIX}q.lora_A.weight": "text"}, {f"{PREFIX}q.lora_A.weight": None}, {}):
        with pytest.raises(LsrError):
            open_checkpoint(wrong, alpha=1)
    for alpha in (None, 1):
        with pytest.raises(
            LsrError, match=rf"^{PREFIX}q\.lora_A.*saved by state_dict.*give the PeftModel itself"
        ):
            open_checkpoint({f"{PREFIX}q.lora_A.default.weight": np.ones((2, 2))}, alpha=alpha)
