"""PEFT LoRA directories: numbers as PEFT uses them; variants without a record are refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import CONFIG, PREFIX, lora_pair, write_lora_directory
from hypothesis import given
from hypothesis import strategies as st

import lsrdecomp
from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.gateway import PATTERN_CHOICES
from lsrdecomp.lora.files import open_checkpoint, write_lora
from lsrdecomp.lora.files.adapter_config import Patterns, exact_pattern

REAL = {  # folder: layers, adapter parameters, other parameters, scale, kind
    "anirudh-gpt2": (12, 294_912, 4_608, 1.0, "conv1d"),
    "aowei-gemma3-270m": (72, 368_640, 0, 4.0, "linear"),
    "merkulov-llama32-1b-r8": (32, 851_968, 0, 4.0, "linear"),
    "tashu-distilbert-imdb": (12, 147_456, 592_130, 2.0, "linear"),
    "difad-grid/r16_a16": (24, 589_824, 22_301, 1.0, "linear"),
    "difad-grid/r4_a64": (24, 147_456, 22_301, 16.0, "linear"),
    "difad-grid/r8_a32": (24, 294_912, 22_301, 4.0, "linear"),
}


@pytest.mark.parametrize("folder", REAL)
def test_published_adapters_open_with_the_counts_in_their_description(
    shared: Path, folder: str
) -> None:
    checkpoint = open_checkpoint(shared / "adapters" / folder)
    layers, adapter, extra, scale, kind = REAL[folder]
    assert (len(checkpoint.layers), checkpoint.adapter_parameters, checkpoint.extra_parameters) == (
        layers,
        adapter,
        extra,
    )
    assert {(layer.scale, layer.layer_type) for layer in checkpoint.layers} == {(scale, kind)}
    up, down = checkpoint.layers[-1].load()
    assert (up.shape[0], down.shape[1]) == checkpoint.layers[-1].shape
    assert up.dtype == np.float32
    assert len(checkpoint.source_sha256) == 64


def test_a_rank_above_the_matrix_is_read_and_said(shared: Path) -> None:
    checkpoint = open_checkpoint(shared / "odd" / "tiny-gpt2-rank-gt-dim")
    assert "rank 4 on 6 x 2" in checkpoint.notes[0]
    assert open_checkpoint(shared / "odd" / "barely-trained-roberta-r4").notes == ()


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        (
            "lfs-pointer-weights-gliner",
            ["Git-LFS pointer, not the file itself", "5329152", "git lfs pull"],
        ),
        ("lfs-pointer-bin-esm2", ["adapter_model.bin", "Git-LFS pointer, not the file itself"]),
        ("lfs-pointer-config-and-weights", ["adapter_config.json", "Git-LFS pointer"]),
        ("dora-config-only", ["no weights", "adapter_model.safetensors or adapter_model.bin"]),
        ("truncated-torch-zip", ["truncated", "262144 bytes"]),
        ("cloneofsimo-legacy-pt", ["3 weight files", "name="]),
    ],
)
def test_published_broken_directories_are_refused_in_one_line(
    shared: Path, folder: str, words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(shared / "odd" / folder)
    message = str(caught.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == []


def test_reading_safetensors_does_not_import_torch(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {name: torch.tensor(array).bfloat16() for name, array in lora_pair("q").items()}
    write_lora_directory(tmp_path / "a")
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    code = (
        "import sys, lsrdecomp.lora.files as c; x, = "
        f"c.open_checkpoint({str(tmp_path / 'a')!r}).layers; "
    )
    code += (
        "b, a = x.load(); print(x.dtype, b.dtype, float(abs(b).sum() + abs(a).sum()), 'torch' in "
        "sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    total = sum(tensor.float().abs().sum().item() for tensor in tensors.values())
    assert out[:2] == ["bfloat16", "float32"]
    assert float(out[2]) == pytest.approx(total, rel=1e-6)
    assert out[3] == "False"


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("legacy", [False, True])
def test_pickled_weights_give_the_numbers_of_safetensors(
    tmp_path: Path, dtype: str, legacy: bool
) -> None:
    import torch

    tensors = {
        **lora_pair("layers.0.q", seed=3),
        f"{PREFIX}head.weight": np.ones((2, 2), np.float32),
    }
    typed = {name: torch.tensor(array).to(getattr(torch, dtype)) for name, array in tensors.items()}
    folder = write_lora_directory(tmp_path / "a", tensors)
    (folder / "adapter_model.safetensors").unlink()
    torch.save(typed, folder / "adapter_model.bin", _use_new_zipfile_serialization=not legacy)
    checkpoint = open_checkpoint(folder)
    up, down = checkpoint.layers[0].load()
    assert checkpoint.layers[0].dtype == dtype
    wide = np.float64 if dtype == "float64" else np.float32
    assert up.dtype == down.dtype == wide
    np.testing.assert_array_equal(
        up, typed[f"{PREFIX}layers.0.q.lora_B.weight"].to(torch.float64).numpy()
    )
    assert list(checkpoint.extras) == [f"{PREFIX}head.weight"]
    assert checkpoint.extras[f"{PREFIX}head.weight"].read().dtype.name == dtype


def test_a_pickle_that_holds_code_is_refused(tmp_path: Path) -> None:
    import pickle

    folder = write_lora_directory(tmp_path / "a")
    (folder / "adapter_model.safetensors").unlink()
    (folder / "adapter_model.bin").write_bytes(pickle.dumps({"x": print}))
    with pytest.raises(CheckpointError, match="adapter_model.bin: refused: .*more than tensors"):
        open_checkpoint(folder)


def test_a_pickle_without_torch_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_lora_directory(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(CheckpointError, match=r"pip install -e '\.\[torch\]'"):
        open_checkpoint(folder)


def test_ranks_and_scales_follow_patterns_and_rslora_as_peft_does(tmp_path: Path) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList(
        torch.nn.ModuleDict({"q": torch.nn.Linear(6, 4), "v": torch.nn.Linear(6, 5)})
        for _ in range(12)
    )
    config = LoraConfig(
        r=4,
        lora_alpha=3,
        target_modules=["q", "v"],
        rank_pattern={"layers.1.q": 2, r"layers\.[2-5]\.v": 3, "q": 1},
        alpha_pattern={"^layers.7.q": 9, "v": 5},
        use_rslora=True,
        init_lora_weights=False,
    )
    peft = get_peft_model(model, config)
    peft.save_pretrained(tmp_path / "a")
    checkpoint = open_checkpoint(tmp_path / "a")
    assert [layer.name for layer in checkpoint.layers] == [
        f"layers.{i}.{w}" for i in range(12) for w in "qv"
    ]
    for layer in checkpoint.layers:
        module = model.get_submodule(layer.name)
        up, down = layer.load()
        assert (layer.rank, layer.scale) == (
            module.r["default"],
            pytest.approx(module.scaling["default"], rel=1e-15),
        )
        delta = module.get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(layer.scale * (up @ down), delta, rtol=1e-5, atol=1e-6)


ALTERNATIVES = [
    "|".join(rf"layers.{i}.q" for i in range(60)),
    "|".join(rf"^layers\.{i}\.q$" for i in range(60)),
    rf"layers\.({'|'.join(map(str, range(60)))})\.q",
    rf"^layers\.(?:{'|'.join(map(str, range(60)))})\.q",
]


@pytest.mark.parametrize("pattern", ALTERNATIVES)
def test_many_literal_alternatives_are_one_pattern_as_in_peft(tmp_path: Path, pattern: str) -> None:
    tensors = {
        **lora_pair("layers.59.q", r=3),
        **lora_pair("layers.60.q"),
        **lora_pair("layers.5.v"),
    }
    folder = write_lora_directory(tmp_path / "a", tensors, rank_pattern={pattern: 3})
    assert [layer.rank for layer in open_checkpoint(folder).layers] == [2, 3, 2]


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|aa)" * 17 + "b",
        rf"({'|'.join(map(str, range(60)))})+x",
        "(a|b|ab)" * 12 + "c",
        "(?:x(?:a|aa)y?)" * 9 + "b",
        "|".join("a" * 66_000),
    ],
)
def test_many_alternatives_that_are_not_literal_are_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(CheckpointError, match="too many choices"):
        open_checkpoint(write_lora_directory(tmp_path / "a", rank_pattern={pattern: 3}))


def test_as_many_choices_as_are_allowed_are_taken(tmp_path: Path) -> None:
    pattern = "(a|aa)" * PATTERN_CHOICES
    open_checkpoint(write_lora_directory(tmp_path / "a", rank_pattern={pattern + "b": 3}))
    with pytest.raises(CheckpointError, match="too many choices"):
        open_checkpoint(write_lora_directory(tmp_path / "b", rank_pattern={pattern + "b?": 3}))


@pytest.mark.parametrize(
    "pattern",
    [
        rf"(a?{'|'.join(map(str, range(60)))})x",
        "|".join(f"layers.*{i}" for i in range(60)),
    ],
)
def test_alternatives_are_tried_one_after_another(tmp_path: Path, pattern: str) -> None:
    """Sixty of them cost sixty times one, not two to the sixtieth."""
    path = write_lora_directory(tmp_path / "a", rank_pattern={pattern: 3})
    assert len(open_checkpoint(path).layers) > 0


def test_literal_alternatives_are_bounded_together(tmp_path: Path) -> None:
    ranks = {"|".join(f"{i}{letter}" for i in range(9_000)): 3 for letter in "ab"}
    with pytest.raises(CheckpointError, match=r"2 patterns with wildcards, of 1\d{5} characters"):
        open_checkpoint(write_lora_directory(tmp_path / "a", rank_pattern=ranks))


NAMES = ("a.b", "x.a.b", "b", "axb", "ab")
KEYS = ("^a\\.b", "^a.b", "a.b", "a\\.b", ".*b", "^b", "b", "^x\\.a\\.b", "x|^a", "^a\\.b$")


@given(st.permutations(KEYS), st.sampled_from(NAMES))
def test_the_first_pattern_that_matches_wins_as_in_peft(keys: list[str], name: str) -> None:
    patterns = Patterns(dict(zip(keys, keys, strict=True)), "rank_pattern", Path("x"))
    expected = next((key for key in keys if re.match(rf"(.*\.)?({key})$", name)), "none")
    assert patterns.get(name, "none") == expected


def _tricky_model():  # every kind of module that PEFT adapts, Conv1D among them
    import torch
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    return torch.nn.ModuleDict(
        {
            "emb": torch.nn.Embedding(11, 5),
            "lin": torch.nn.Linear(6, 4),
            "c1d": Conv1D(4, 6),
            "conv": torch.nn.Conv2d(3, 4, (2, 3)),
            "head": torch.nn.Linear(4, 2),
        }
    )


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
def test_every_kind_of_layer_reads_as_out_times_in_and_peft_reads_back_what_is_written(
    tmp_path: Path, fan_in_fan_out: bool
) -> None:
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    names = ["c1d"] if fan_in_fan_out else ["emb", "lin", "conv"]
    config = LoraConfig(
        r=3,
        lora_alpha=7,
        target_modules=names,
        init_lora_weights=False,
        fan_in_fan_out=fan_in_fan_out,
        rank_pattern={} if fan_in_fan_out else {"lin": 2},
        modules_to_save=["head"],
    )
    model = _tricky_model()
    peft = get_peft_model(model, config)
    peft.save_pretrained(tmp_path / "a", save_embedding_layers=False)
    checkpoint = open_checkpoint(tmp_path / "a")
    assert sorted(checkpoint.extras) == [f"{PREFIX}head.bias", f"{PREFIX}head.weight"]
    layers = []
    for layer in checkpoint.layers:
        up, down = layer.load()
        delta = model[layer.name].get_delta_weight("default").detach().numpy()
        ours = layer.scale * (up.astype(np.float64) @ down)
        turned = (
            delta.T if layer.layer_type in ("embedding", "conv1d") else delta.reshape(layer.shape)
        )
        np.testing.assert_allclose(ours, turned, rtol=1e-5, atol=1e-6)
        layers.append((layer.name, layer.scale * up.astype(np.float64), down))
    write_lora(tmp_path / "b", source=checkpoint, layers=iter(layers), storage="float32")
    again = _tricky_model()
    loaded = PeftModel.from_pretrained(again, tmp_path / "b")
    for layer in checkpoint.layers:
        mine, theirs = (m[layer.name].get_delta_weight("default").detach() for m in (again, model))
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    assert torch.equal(loaded.base_model.model["head"].weight, model["head"].weight)


def test_the_common_profile_is_read_right_by_peft_and_by_alpha_over_rank(tmp_path: Path) -> None:
    import torch
    from peft import PeftModel
    from safetensors.numpy import load_file

    sizes = {"small": (6, 5, 2), "large": (7, 9, 5), "tiny": (4, 5, 2)}
    tensors = {
        key: value
        for name, (m, n, r) in sizes.items()
        for key, value in lora_pair(name, m, n, r).items()
    }
    source = open_checkpoint(
        write_lora_directory(
            tmp_path / "a", tensors, rank_pattern={"large": 5}, target_modules=[*sizes]
        )
    )
    layers = [
        (layer.name, layer.scale * layer.load()[0], layer.load()[1]) for layer in source.layers
    ]
    write_lora(tmp_path / "b", source=source, layers=layers, profile="common")
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 8)
    stored = load_file(tmp_path / "b" / "adapter_model.safetensors")
    model = torch.nn.ModuleDict({name: torch.nn.Linear(n, m) for name, (m, n, _) in sizes.items()})
    PeftModel.from_pretrained(model, tmp_path / "b")
    for name, up, down in layers:
        a, b = (stored[f"{PREFIX}{name}.lora_{end}.weight"] for end in "AB")
        # llama.cpp, which Ollama uses, scales by alpha / rank of the tensor
        assert a.shape[0] == config["lora_alpha"]
        np.testing.assert_allclose(b @ a, up @ down, rtol=1e-5, atol=1e-6)
        seen = model[name].get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(seen, up @ down, rtol=1e-5, atol=1e-6)


def test_the_common_profile_has_one_padded_rank_and_no_patterns(tmp_path: Path) -> None:
    tensors = {**lora_pair("layers.1.q", r=2), **lora_pair("layers.11.v", m=7, n=9, r=5, seed=1)}
    source = open_checkpoint(
        write_lora_directory(tmp_path / "a", tensors, rank_pattern={"layers.11.v": 5})
    )
    layers = [
        (layer.name, layer.scale * layer.load()[0], layer.load()[1]) for layer in source.layers
    ]
    write_lora(tmp_path / "b", source=source, layers=layers, profile="common")
    config = json.loads((tmp_path / "b" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"], config["alpha_pattern"]) == (
        8,
        8,
        {},
        {},
    )
    assert config["target_modules"] == ["q", "v"]
    back = open_checkpoint(tmp_path / "b")
    for (_, up, down), layer in zip(layers, back.layers, strict=True):
        assert (layer.rank, layer.scale) == (8, 1.0)
        np.testing.assert_allclose(np.matmul(*layer.load()), up @ down, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rank", "padded"), [(1, 8), (9, 16), (17, 32), (513, 528)])
def test_a_common_rank_is_one_that_no_server_pads(tmp_path: Path, rank: int, padded: int) -> None:
    """TGI and LoRAX pad to 8 and multiples of 16, and then scale by the padded rank."""
    layers = [("q", np.ones((4, rank)), np.ones((rank, 6)))]
    out = write_lora(tmp_path / "b", layers=layers, profile="common", rank=rank)
    (layer,) = open_checkpoint(out).layers
    assert (layer.rank, layer.scale) == (padded, 1.0)
    assert padded == 8 or padded % 16 == 0


def test_layer_1_and_layer_11_keep_their_own_rank_when_written(tmp_path: Path) -> None:
    tensors = {
        **lora_pair("layers.1.q"),
        **lora_pair("layers.11.q", r=3),
        **lora_pair("x.layers.1.q", r=2),
        **lora_pair("layersa1.q"),
    }
    source = open_checkpoint(
        write_lora_directory(tmp_path / "a", tensors, rank_pattern={"layers.11.q": 3})
    )
    layers = [
        (name, np.ones((4, r)), np.ones((r, 6)))
        for name, r in (
            ("layers.1.q", 1),
            ("layers.11.q", 3),
            ("x.layers.1.q", 4),
            ("layersa1.q", 5),
        )
    ]
    write_lora(tmp_path / "b", source=source, layers=layers)
    assert {layer.name: layer.rank for layer in open_checkpoint(tmp_path / "b").layers} == {
        name: up.shape[1] for name, up, _ in layers
    }


@given(
    st.lists(
        st.text("ab1.|*+?()[]^$\\-_", min_size=1, max_size=12), min_size=2, max_size=2, unique=True
    )
)
def test_an_exact_pattern_matches_its_module_alone(names: list[str]) -> None:
    patterns = Patterns({exact_pattern(names[0]): 7}, "rank_pattern", Path("c"))
    assert patterns.get(names[0], 0) == 7
    assert patterns.get(names[1], 0) == 0
    assert patterns.get(f"deep.{names[0]}", 0) == patterns.get(f"{names[0]}x", 0) == 0


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"peft_type": "ADAMSS"}, "'ADAMSS'"),
        ({"peft_type": "IA3"}, "IA3: one factor for each activation, and no ΔW"),
        ({"lora_bias": True}, "lora_bias .* give that by --base "),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"megatron_config": {"a": 1}}, "Megatron"),
        ({"alora_invocation_tokens": [1]}, "activated LoRA"),
        ({"use_qalora": True}, "QA-LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "path_initial_model_for_weight_conversion"),
        ({"use_newest_trick": True}, "use_newest_trick"),
    ],
)
def test_what_changes_more_than_the_low_rank_update_is_refused_by_name(
    tmp_path: Path, config: dict, word: str
) -> None:
    with pytest.raises(UnsupportedError, match=word):
        open_checkpoint(write_lora_directory(tmp_path / "a", **config))


@pytest.mark.parametrize(
    "key", ["lora_magnitude_vector", "lora_B.bias", "lora_E", "lora_A.default.weight"]
)
def test_tensors_of_other_lora_variants_are_refused_by_name(tmp_path: Path, key: str) -> None:
    tensors = {**lora_pair("layers.0.q"), f"{PREFIX}layers.0.q.{key}": np.ones(4, np.float32)}
    with pytest.raises(UnsupportedError, match=key.replace(".", r"\.")):
        open_checkpoint(write_lora_directory(tmp_path / "a", tensors))


def test_an_unknown_training_field_is_noted(tmp_path: Path) -> None:
    notes = open_checkpoint(write_lora_directory(tmp_path / "a", shiny_new_schedule=3)).notes
    assert len(notes) == 1
    assert "shiny_new_schedule" in notes[0]


def test_a_zero_layer_is_a_layer_and_nan_is_named_when_read(tmp_path: Path) -> None:
    tensors = lora_pair("layers.0.q")
    zero = {name: np.zeros_like(array) for name, array in lora_pair("layers.1.v").items()}
    tensors[f"{PREFIX}layers.0.q.lora_A.weight"][1, 2] = np.nan
    checkpoint = open_checkpoint(write_lora_directory(tmp_path / "a", {**tensors, **zero}))
    assert not any(array.any() for array in checkpoint.layer("layers.1.v").load())
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.q\.lora_A\.weight: 1 of 12 numbers are NaN"
    ):
        checkpoint.layer("layers.0.q").load()


def test_default_rank_and_alpha_are_those_of_peft(tmp_path: Path) -> None:
    folder = write_lora_directory(tmp_path / "a", lora_pair("q", r=8))
    config = {key: value for key, value in CONFIG.items() if key not in ("r", "lora_alpha")}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert open_checkpoint(folder).layers[0].scale == 1.0


def test_the_text_of_a_checkpoint_fits_a_screen():
    text = repr(open_checkpoint(Path(lsrdecomp.__file__).parent / "cli" / "demo_adapter"))
    assert text.splitlines()[0] == (
        "peft-lora adapter demo_adapter: 12 layers, 73,728 parameters, 770 numbers of 2 other "
        "tensors"
    )
    assert "    3 × attention.self.query, 384×384, rank 8" in text
    assert len(text.splitlines()) == 5


@pytest.mark.parametrize("count", [2, 8, 9, 12])
def test_a_directory_of_weight_files_names_eight_of_them(tmp_path: Path, count: int) -> None:
    names = [f"epoch{i:02}.safetensors" for i in range(count)]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{count} weight files") as caught:
        open_checkpoint(tmp_path)
    assert re.findall(r"'(epoch\d\d\.safetensors)'", str(caught.value)) == names[:8]


def test_a_directory_of_adapters_names_them(tmp_path: Path) -> None:
    write_lora_directory(tmp_path / "epoch_0")
    with pytest.raises(CheckpointError, match="its adapters lie in 'epoch_0': say which by name="):
        open_checkpoint(tmp_path)
    assert open_checkpoint(tmp_path, name="epoch_0").layers
