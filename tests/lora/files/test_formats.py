"""Formats without a config: kohya, diffusers, loralib, LyCORIS.

Real files where there are some; the others follow the published key layouts and are synthetic,
their expected updates computed from each method's definition.
"""

from __future__ import annotations

import inspect
import json
import re
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from checkpoint_files import (
    PREFIX,
    lora_pair,
    raw_safetensors,
    scaled_factors,
    write_lora_directory,
)
from safetensors.numpy import load_file, save_file

import lsrdecomp as lsr
from lsrdecomp._ordering import natural_key
from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.kronecker.shape import ProductShape
from lsrdecomp.lora.compress.export import export_lora
from lsrdecomp.lora.compress.truncate import truncate
from lsrdecomp.lora.files import (
    FORMATS,
    AdapterFormat,
    Checkpoint,
    KroneckerLayer,
    format_table,
    open_checkpoint,
    write_lora,
    write_lsr,
    write_pairs,
)
from lsrdecomp.lora.files.format import open_bundle
from lsrdecomp.lora.files.writers import table
from lsrdecomp.lora.measure import verify

RNG = np.random.default_rng(11)


def normal(*shape: int, dtype: str = "float32") -> np.ndarray:
    """Random numbers of a dtype."""
    return np.asarray(RNG.standard_normal(shape)).astype(dtype)


def updates(checkpoint: Checkpoint, first: int | None = None) -> dict[str, np.ndarray]:
    """ΔW of every layer, or of the first few, formed by numpy.kron and matrix products."""
    found = {}
    for layer in checkpoint.layers[:first]:
        left, right = layer.load()
        if isinstance(layer, KroneckerLayer):
            left, right = (
                sum(_kron([f[k] for f in side]) for k in range(len(side[0])))
                for side in (left, right)
            )
        found[layer.name] = layer.scale * (np.asarray(left, np.float64) @ right)
    return found


def _kron(matrices) -> np.ndarray:
    product = np.ones((1, 1))
    for matrix in matrices:
        product = np.kron(product, matrix.astype(np.float64))
    return product


REAL = {
    ("sd-mvclab-ntust-course", None): ("diffusers", 128, 797_184, 0),
}


@pytest.mark.parametrize(("folder", "name"), REAL)
def test_published_files_open_with_the_counts_in_their_description(
    shared: Path, folder: str, name: str | None
) -> None:
    checkpoint = open_checkpoint(shared / "adapters" / folder, name=name)
    counts = (
        checkpoint.format,
        len(checkpoint.layers),
        checkpoint.adapter_parameters,
        checkpoint.extra_parameters,
    )
    assert counts == REAL[folder, name]
    assert {layer.scale for layer in checkpoint.layers} == {1.0}
    for layer in checkpoint.layers:
        layer.load()


def test_the_official_mnli_file_opens_with_its_alpha(shared: Path) -> None:
    folder = shared / "adapters" / "ms-roberta-base-mnli"
    with pytest.raises(CheckpointError, match="rank 8: its alpha is not in it; pass alpha="):
        open_checkpoint(folder)
    checkpoint = open_checkpoint(folder, alpha=16)
    assert (len(checkpoint.layers), checkpoint.adapter_parameters, checkpoint.extra_parameters) == (
        24,
        294_912,
        592_899,
    )
    assert {layer.scale for layer in checkpoint.layers} == {2.0}
    assert checkpoint.layers[0].name == "roberta.encoder.layer.0.attention.self.query"
    assert checkpoint.config["modules_to_save"] == ["classifier"]


def test_files_that_call_layers_by_position_are_refused_with_a_way_out(
    shared: Path, tmp_path: Path
) -> None:
    lists = shared / "odd" / "cloneofsimo-legacy-pt"
    named = shared / "adapters" / "sd-cloneofsimo"
    for path in (
        *(lists / name for name in ("lora_illust.pt", "lora_kiriko2.text_encoder.pt")),
        *(named / f"{name}.safetensors" for name in ("analog_svd_rank4", "lora_disney")),
    ):
        with pytest.raises(UnsupportedError, match="by their position .* lora_add BASE") as error:
            open_checkpoint(path)
        assert str(path) in str(error.value)
        assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="1 token embeddings and no LoRA layer"):
        open_checkpoint(lists, name="lora_kiriko2.ti.pt")
    tensors = {"unet:0:down": normal(2, 6), "unet:0:up": normal(4, 2)}
    with pytest.raises(UnsupportedError, match="by their position"):
        open_checkpoint(tensors)


def test_an_lsr_directory_is_written_from_a_format_without_a_config(
    shared: Path, tmp_path: Path
) -> None:
    source = open_checkpoint(shared / "adapters" / "ms-roberta-base-mnli", alpha=16)
    layers = (
        (layer.name, (layer.scale * up[None], np.ones((1, 1, 1))), (down[None], np.ones((1, 1, 1))))
        for layer in source.layers
        for up, down in [layer.load()]
    )
    write_lsr(tmp_path / "out", source=source, layers=layers)
    back = open_checkpoint(tmp_path / "out")
    assert sorted(back.extras) == sorted(source.extras)
    assert back.config.get("modules_to_save") == ["classifier"]
    first, again = source.layers[0], back.layers[0]
    assert again.shape == ProductShape(
        (first.out_features, 1), (first.rank, 1), (first.in_features, 1)
    )
    np.testing.assert_allclose(
        updates(back, 1)[first.name], updates(source, 1)[first.name], rtol=1e-6, atol=1e-9
    )


@pytest.fixture
def kohya(tmp_path: Path) -> Path:
    """Write a synthetic kohya file.

    It has two ranks, a convolution, a 1x1 convolution, a LoCon core, and a layer without alpha.
    """
    tensors = {
        "lora_unet_down_0_attn_to_q.lora_down.weight": normal(4, 6, dtype="float16"),
        "lora_unet_down_0_attn_to_q.lora_up.weight": normal(8, 4, dtype="float16"),
        "lora_unet_down_0_attn_to_q.alpha": np.array(1.0, np.float16),
        "lora_te_text_layers_11_fc1.lora_down.weight": normal(2, 5),
        "lora_te_text_layers_11_fc1.lora_up.weight": normal(7, 2),
        "lora_unet_conv.lora_down.weight": normal(3, 4, 3, 2),
        "lora_unet_conv.lora_up.weight": normal(5, 3, 1, 1),
        "lora_unet_conv.alpha": np.array([6.0], np.float32),
        "lora_unet_proj_in.lora_down.weight": normal(3, 4, 1, 1),
        "lora_unet_proj_in.lora_up.weight": normal(5, 3, 1, 1),
        "lora_unet_proj_in.alpha": np.array(3.0, np.float32),
        "lora_unet_cp.lora_down.weight": normal(3, 4, 1, 1),
        "lora_unet_cp.lora_mid.weight": normal(2, 3, 3, 3),
        "lora_unet_cp.lora_up.weight": normal(5, 2, 1, 1),
        "lora_unet_cp.alpha": np.array(1.0, np.float32),
        "emb_params": normal(3, 8),
    }
    save_file(
        tensors, tmp_path / "style.safetensors", metadata={"ss_network_module": "networks.lora"}
    )
    return tmp_path / "style.safetensors"


def test_kohya_layers_are_read_with_alpha_convolutions_and_cores(kohya: Path) -> None:
    checkpoint, t = open_checkpoint(kohya), load_file(kohya)
    found = {
        layer.name: (layer.layer_type, layer.shape, layer.rank, layer.scale)
        for layer in checkpoint.layers
    }
    assert found == {
        "lora_unet_down_0_attn_to_q": ("linear", (8, 6), 4, 0.25),
        "lora_te_text_layers_11_fc1": ("linear", (7, 5), 2, 1.0),
        "lora_unet_conv": ("conv", (5, 24), 3, 2.0),
        "lora_unet_proj_in": ("conv", (5, 4), 3, 1.0),
        "lora_unet_cp": ("conv", (5, 36), 2, 0.5),
    }
    assert list(checkpoint.extras) == [f"{PREFIX}emb_params"]
    names = [f"lora_unet_cp.lora_{part}.weight" for part in ("up", "mid", "down")]
    core = np.einsum("oiab,ijkl,jcab->ockl", *(t[name].astype(np.float64) for name in names))
    np.testing.assert_allclose(
        updates(checkpoint)["lora_unet_cp"], 0.5 * core.reshape(5, 36), rtol=1e-12
    )


def test_a_kohya_file_round_trips(kohya: Path, tmp_path: Path) -> None:
    source = open_checkpoint(kohya)
    layers = (
        (layer.name, layer.scale * up, down)
        for layer in source.layers
        for up, down in [layer.load()]
    )
    out = write_pairs(
        tmp_path / "new" / "out.safetensors", names="kohya", source=source, layers=layers
    )
    tensors = load_file(out)
    assert tensors["lora_unet_conv.lora_down.weight"].shape == (3, 4, 3, 2)
    assert tensors["lora_unet_conv.lora_up.weight"].shape == (5, 3, 1, 1)
    assert tensors["lora_unet_conv.alpha"] == 3.0
    assert tensors["emb_params"].tobytes() == load_file(kohya)["emb_params"].tobytes()
    back = open_checkpoint(out)
    assert {(layer.layer_type, layer.kernel, layer.scale) for layer in back.layers} == {
        ("linear", (), 1.0),
        ("conv", (3, 2), 1.0),
        ("conv", (1, 1), 1.0),
        ("conv", (3, 3), 1.0),
    }
    before = updates(source)
    assert before.keys() == updates(back).keys()
    for name, update in updates(back).items():
        np.testing.assert_allclose(update, before[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"lora_unet_conv.lora_up.weight": None}, "without up"),
        ({"lora_unet_conv.dora_scale": normal(5)}, "DoRA"),
        ({"x.diff": normal(5, 5)}, "full-size difference"),
        ({"lora_unet_conv.alpha": normal(2)}, "expected one number"),
        ({"lora_unet_conv.lora_up.weight": normal(5, 3, 3, 2)}, "1 x 1 kernel"),
        ({"lora_unet_cp.lora_mid.weight": normal(2, 4, 3, 3)}, "does not fit"),
        ({"lora_te_text_layers_11_fc1.lora_mid.weight": normal(2, 2)}, "does not fit"),
    ],
)
def test_kohya_files_with_parts_amiss_are_refused(kohya: Path, change: dict, word: str) -> None:
    tensors = {
        name: array for name, array in (load_file(kohya) | change).items() if array is not None
    }
    save_file(tensors, kohya)
    with pytest.raises(CheckpointError, match=word):
        open_checkpoint(kohya)


STYLES = {
    "new": (".lora_A.weight", ".lora_B.weight"),
    "old": (".lora.down.weight", ".lora.up.weight"),
    "text": (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
}


@pytest.mark.parametrize("style", STYLES)
def test_diffusers_keys_of_each_age_read_the_same(tmp_path: Path, style: str) -> None:
    name, (down, up) = "text_encoder.layers.3.q_proj", STYLES[style]
    tensors = {name + down: normal(2, 6), name + up: normal(8, 2)}
    save_file(tensors, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.format == "diffusers"
    expected = tensors[name + up] @ tensors[name + down]  # in single precision
    np.testing.assert_allclose(updates(checkpoint)[name], expected, rtol=1e-5, atol=1e-6)


def test_attention_processor_keys_become_module_names(tmp_path: Path) -> None:
    stored = {
        "unet.down.0.attn1.processor.to_q_lora": "unet.down.0.attn1.to_q",
        "unet.down.0.attn1.processor.to_out_lora": "unet.down.0.attn1.to_out.0",
        "mid.attn2.processor.to_v_lora": "mid.attn2.to_v",
        "text_encoder.layers.0.self_attn.to_out_lora": "text_encoder.layers.0.self_attn.out_proj",
    }
    ends = {"down": (2, 6), "up": (8, 2)}
    tensors = {f"{k}.{e}.weight": normal(*s) for k in stored for e, s in ends.items()}
    tensors["mid.attn2.processor.to_v.alpha"] = np.array(5.0, np.float32)  # an alpha of its pair
    save_file(tensors, tmp_path / "x.safetensors")
    scales = {layer.name: layer.scale for layer in open_checkpoint(tmp_path).layers}
    assert scales == dict.fromkeys(stored.values(), 1.0) | {"mid.attn2.to_v": 2.5}


def test_diffusers_scales_come_from_alphas_and_from_the_header(tmp_path: Path) -> None:
    config = {
        "unet.r": 2,
        "unet.lora_alpha": 8,
        "unet.alpha_pattern": {"b.to_q": 3},
        "unet.use_rslora": False,
    }
    names = ("unet.a.to_q", "unet.b.to_q", "unet.c.to_q", "text_encoder.q")
    tensors = {
        n + e: normal(*s)
        for n in names
        for e, s in ((".lora_A.weight", (2, 6)), (".lora_B.weight", (8, 2)))
    }
    tensors["unet.c.to_q.alpha"] = np.array(5.0, np.float32)
    save_file(
        tensors, tmp_path / "x.safetensors", metadata={"lora_adapter_metadata": json.dumps(config)}
    )
    scales = {layer.name: layer.scale for layer in open_checkpoint(tmp_path).layers}
    assert scales == {
        "unet.a.to_q": 4.0,
        "unet.b.to_q": 1.5,
        "unet.c.to_q": 2.5,
        "text_encoder.q": 1.0,
    }
    config["unet.use_dora"] = True
    save_file(
        tensors, tmp_path / "x.safetensors", metadata={"lora_adapter_metadata": json.dumps(config)}
    )
    with pytest.raises(UnsupportedError, match="use_dora"):
        open_checkpoint(tmp_path)


def test_a_published_diffusers_file_round_trips(shared: Path, tmp_path: Path) -> None:
    source = open_checkpoint(shared / "adapters" / "sd-mvclab-ntust-course")
    layers = [(layer.name, *layer.load()) for layer in source.layers]
    before = load_file(source.weights)
    for names in ("same", "diffusers"):
        out = write_pairs(
            tmp_path / f"{names}.safetensors", layers=layers, source=source, names=names
        )
        after = load_file(out)
        assert [layer.name for layer in open_checkpoint(out).layers] == [
            name for name, *_ in layers
        ]
        if names == "same":  # the keys of the old processors too
            assert after.keys() == before.keys()
            assert all(after[name].tobytes() == array.tobytes() for name, array in before.items())
        else:
            assert next(iter(after)).endswith(".lora_A.weight")


def test_diffusers_names_are_flattened_for_kohya_and_others_refused(tmp_path: Path) -> None:
    layers = [
        ("unet.a_b.0.to_q", normal(8, 2), normal(2, 6)),
        ("text_encoder.l.1.q", normal(8, 2), normal(2, 6)),
    ]
    layers.append(("text_encoder.encoder.layers.1.self_attn.q_proj", normal(8, 2), normal(2, 6)))
    layers.append(
        ("text_encoder.text_model.encoder.layers.0.self_attn.q_proj", normal(8, 2), normal(2, 6))
    )
    out = write_pairs(tmp_path / "o.safetensors", names="kohya", layers=layers, storage="bfloat16")
    assert set(load_file(out)) == {
        f"{name}.{end}"
        for name in (
            "lora_unet_a_b_0_to_q",
            "lora_te_l_1_q",
            "lora_te_text_model_encoder_layers_1_self_attn_q_proj",
            "lora_te_text_model_encoder_layers_0_self_attn_q_proj",
        )
        for end in ("lora_down.weight", "lora_up.weight", "alpha")
    }
    odd = [("unet.x", normal(8, 257), normal(257, 6))]
    wide = load_file(write_pairs(out, names="kohya", layers=odd, storage="bfloat16", force=True))
    assert wide["lora_unet_x.alpha"] == 257  # which bfloat16 would round
    for name in (
        "model.layers.0.q_proj",
        "transformer.h.0.mlp",
        "transformer.blocks.0.attn.to_q",
    ):
        with pytest.raises(UnsupportedError, match=name) as refusal:
            write_pairs(
                tmp_path / "p.safetensors",
                names="kohya",
                layers=[(name, normal(8, 2), normal(2, 6))],
            )
        assert ("diffusers" in str(refusal.value)) == name.startswith("transformer.b")
    assert [entry.name for entry in tmp_path.iterdir()] == ["o.safetensors"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.0.q_proj", "diffusers files hold layers of unet"),
        ("transformer.h.0.attn.c_attn", "a layer of a language model, .* write lora instead"),
        ("lora_unet_a_b", "a flattened name cannot be undone; write kohya"),
    ],
)
def test_what_no_pipeline_would_load_is_not_written_for_diffusers(
    tmp_path: Path, name: str, words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words) as refusal:
        write_pairs(
            tmp_path / "o.safetensors",
            names="diffusers",
            layers=[(name, normal(8, 2), normal(2, 6))],
        )
    assert name in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_tensors_beside_the_adapter_are_refused_for_diffusers(tmp_path: Path) -> None:
    halves = {
        "unet.a.lora_A.weight": normal(2, 6),
        "unet.a.lora_B.weight": normal(8, 2),
        "<s1>": normal(1, 4),
    }
    save_file(halves, tmp_path / "x.safetensors")
    source = open_checkpoint(tmp_path / "x.safetensors")
    layers = [(layer.name, *layer.load()) for layer in source.layers]
    with pytest.raises(UnsupportedError, match="1 tensors beside the adapter .the first .*<s1>"):
        write_pairs(tmp_path / "o.safetensors", names="diffusers", layers=layers, source=source)
    write_pairs(
        tmp_path / "o.safetensors", names="diffusers", layers=layers, source=source, extras={}
    )
    assert not open_checkpoint(tmp_path / "o.safetensors").extras


def test_single_files_are_not_overwritten_unless_forced_nor_written_onto_their_source(
    kohya: Path,
) -> None:
    source, before = open_checkpoint(kohya), kohya.read_bytes()
    layers = [("lora_unet_x", normal(8, 2), normal(2, 6))]
    with pytest.raises(CheckpointError, match="input"):
        write_pairs(kohya, names="kohya", source=source, layers=layers, force=True)
    with pytest.raises(CheckpointError, match="already exists"):
        write_pairs(kohya, names="kohya", layers=layers)
    with pytest.raises(CheckpointError, match=r"end in \.safetensors"):
        write_pairs(kohya.with_suffix(".pt"), names="kohya", layers=layers)
    assert kohya.read_bytes() == before
    write_pairs(kohya, names="kohya", layers=layers, force=True)
    assert len(open_checkpoint(kohya).layers) == 1
    assert len(list(kohya.parent.iterdir())) == 1


def test_a_peft_file_without_its_config_is_told_so(tmp_path: Path) -> None:
    (write_lora_directory(tmp_path / "a", lora_pair("q")) / "adapter_config.json").unlink()
    with pytest.raises(CheckpointError, match="a PEFT file without its adapter_config.json"):
        open_checkpoint(tmp_path / "a")


@pytest.mark.parametrize("kernel", [(), (3, 2)])
def test_loha_is_read_as_the_low_rank_pair_it_equals(
    tmp_path: Path, kernel: tuple[int, ...]
) -> None:
    k = int(np.prod(kernel))
    t = {
        "w1_a": normal(5, 2),
        "w1_b": normal(2, 4 * k),
        "w2_a": normal(5, 2),
        "w2_b": normal(2, 4 * k),
    }
    save_file(
        {f"m.hada_{n}": a for n, a in t.items()} | {"m.alpha": normal(1) * 0 + 1},
        tmp_path / "x.safetensors",
    )
    (layer,) = open_checkpoint(tmp_path).layers
    assert (layer.rank, layer.scale, layer.layer_type) == (4, 0.5, "linear")
    t = {name: array.astype(np.float64) for name, array in t.items()}
    expected = 0.5 * (t["w1_a"] @ t["w1_b"]) * (t["w2_a"] @ t["w2_b"])
    np.testing.assert_allclose(updates(open_checkpoint(tmp_path))["m"], expected, rtol=1e-12)


def test_loha_with_tucker_cores(tmp_path: Path) -> None:
    t = {f"w{i}_{s}": normal(r, n) for i, r in ((1, 2), (2, 3)) for s, n in (("a", 5), ("b", 4))}
    t |= {"t1": normal(2, 2, 3, 2), "t2": normal(3, 3, 3, 2)}
    save_file({f"m.hada_{n}": a for n, a in t.items()}, tmp_path / "x.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    t = {name: array.astype(np.float64) for name, array in t.items()}
    one, two = (
        np.einsum("ijkl,io,jc->ockl", t[f"t{i}"], t[f"w{i}_a"], t[f"w{i}_b"]) for i in (1, 2)
    )
    np.testing.assert_allclose(updates(checkpoint)["m"], (one * two).reshape(5, 24), rtol=1e-12)
    assert (
        checkpoint.layers[0].layer_type,
        checkpoint.layers[0].kernel,
        checkpoint.layers[0].rank,
    ) == (
        "conv",
        (3, 2),
        6,
    )


LOKR = {  # tensors, expected ΔW, scale, inner shape
    "both whole": (
        lambda: {"w1": normal(2, 3), "w2": normal(4, 5)},
        lambda t: np.kron(t["w1"], t["w2"]),
        1.0,
    ),
    "second split": (
        lambda: {"w1": normal(2, 3), "w2_a": normal(4, 2), "w2_b": normal(2, 5)},
        lambda t: np.kron(t["w1"], t["w2_a"] @ t["w2_b"]),
        1.5,
    ),
    "both split": (
        lambda: {
            "w1_a": normal(3, 2),
            "w1_b": normal(2, 2),
            "w2_a": normal(4, 2),
            "w2_b": normal(2, 5),
        },
        lambda t: np.kron(t["w1_a"] @ t["w1_b"], t["w2_a"] @ t["w2_b"]),
        1.5,
    ),
    "convolution": (
        lambda: {"w1": normal(3, 2), "w2": normal(4, 5, 3, 3)},
        lambda t: np.kron(t["w1"][:, :, None, None], t["w2"]).reshape(12, -1),
        1.0,
    ),
    "tucker": (
        lambda: {
            "w1": normal(3, 2),
            "w2_a": normal(2, 4),
            "w2_b": normal(2, 5),
            "t2": normal(2, 2, 3, 3),
        },
        lambda t: np.kron(
            t["w1"][:, :, None, None], np.einsum("ijkl,ip,jr->prkl", t["t2"], t["w2_a"], t["w2_b"])
        ).reshape(12, -1),
        1.5,
    ),
}


@pytest.mark.parametrize("case", LOKR)
def test_lokr_is_read_as_one_term_of_kronecker_products(tmp_path: Path, case: str) -> None:
    make, expected, scale = LOKR[case]
    t = make()
    save_file(
        {f"m.lokr_{n}": a for n, a in t.items()} | {"m.alpha": np.array([3.0], np.float32)},
        tmp_path / "x.safetensors",
    )
    checkpoint = open_checkpoint(tmp_path)
    (layer,) = checkpoint.layers
    assert (checkpoint.format, layer.scale, layer.left_rank, layer.right_rank) == (
        "lycoris",
        scale,
        1,
        1,
    )
    exact = {name: array.astype(np.float64) for name, array in t.items()}
    np.testing.assert_allclose(
        updates(checkpoint)["m"], scale * expected(exact), rtol=1e-12, atol=1e-13
    )
    assert layer.kernel == ((3, 3) if case in ("convolution", "tucker") else ())


@pytest.mark.parametrize(
    ("tensors", "word"),
    [
        ({"m.lokr_w1": normal(2, 3)}, "without"),
        (
            {"m.lokr_w1": normal(2, 3), "m.lokr_w2": normal(2, 3), "m.lokr_w2_a": normal(2, 2)},
            "beside",
        ),
        (
            {"m.lokr_w1": normal(2, 3), "m.lokr_w2_a": normal(4, 2), "m.lokr_w2_b": normal(3, 5)},
            "do not multiply",
        ),
        ({"m.lokr_w1": normal(2), "m.lokr_w2": normal(2, 3)}, "not a matrix"),
        ({f"m.hada_{n}": normal(2, 2) for n in ("w1_a", "w1_b", "w2_a")}, "without w2_b"),
        (
            {f"m.hada_{n}": normal(2, 2) for n in ("w1_a", "w1_b", "w2_a")}
            | {"m.hada_w2_b": normal(2, 3)},
            "same size",
        ),
    ],
)
def test_lycoris_parts_that_do_not_fit_are_refused(
    tmp_path: Path, tensors: dict, word: str
) -> None:
    save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=word):
        open_checkpoint(tmp_path)


def _small_model():
    import torch

    torch.manual_seed(1)
    return torch.nn.ModuleDict(
        {
            "lin": torch.nn.Linear(12, 8),
            "big": torch.nn.Linear(36, 40),
            "conv": torch.nn.Conv2d(6, 8, (3, 3)),
        }
    )


LYCORIS_CONFIGS = [
    ("LoHaConfig", {"r": 2, "alpha": 3, "alpha_pattern": {"big": 5}}),
    ("LoHaConfig", {"r": 2, "alpha": 3, "rank_pattern": {"big": 4}, "use_effective_conv2d": True}),
    ("LoKrConfig", {"r": 2, "alpha": 3, "decompose_both": True}),
    ("LoKrConfig", {"r": 2, "alpha": 3, "rank_pattern": {"lin": 9}, "use_effective_conv2d": True}),
]


@pytest.mark.parametrize(("kind", "settings"), LYCORIS_CONFIGS)
def test_lycoris_directories_of_peft_give_its_own_updates(
    tmp_path: Path, kind: str, settings: dict
) -> None:
    peft = pytest.importorskip("peft")
    model = _small_model()
    config = getattr(peft, kind)(
        target_modules=["lin", "big", "conv"], init_weights=False, **settings
    )
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "a")
    checkpoint = open_checkpoint(tmp_path / "a")
    assert checkpoint.format == f"peft-{kind[:4].lower()}"
    found = updates(checkpoint)
    assert found.keys() == {"lin", "big", "conv"}
    for name, update in found.items():
        delta = model[name].get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(update, delta.reshape(delta.shape[0], -1), rtol=1e-4, atol=1e-5)


def _three_layers():
    import torch

    sizes = {"lin": (12, 8), "big": (36, 40), "no": (5, 5)}
    return torch.nn.ModuleDict({name: torch.nn.Linear(*size) for name, size in sizes.items()})


def write_adalora(folder: Path, **settings: object) -> None:
    """Write an AdaLoRA as PEFT saves it, of which one layer was pruned and one left out."""
    peft = pytest.importorskip("peft")
    import torch

    torch.manual_seed(1)
    model = _three_layers()
    settings = {"init_r": 6, "lora_alpha": 20, "total_step": 9, **settings}
    config = peft.AdaLoraConfig(target_modules=list(model), **settings)
    adapted = peft.get_peft_model(model, config)
    for name in model:
        torch.nn.init.normal_(model[name].lora_E["default"])
    adapted.peft_config["default"].rank_pattern = {
        "lin.lora_E.default": [True] * 4 + [False] * 2,
        "no.lora_E.default": [False] * 6,
    }
    adapted.save_pretrained(folder)


@pytest.mark.parametrize("settings", [{}, {"lora_alpha": 0}])
def test_adalora_of_peft_is_read_as_the_pair_that_it_is(tmp_path: Path, settings: dict) -> None:
    write_adalora(tmp_path / "a", **settings)
    checkpoint = open_checkpoint(tmp_path / "a")
    assert checkpoint.format == "peft-adalora"
    assert {layer.name: layer.rank for layer in checkpoint.layers} == {"lin": 4, "big": 6}
    assert "1 layers of rank 0, which AdaLoRA pruned, are left out" in checkpoint.notes
    import peft

    model = _three_layers()
    peft.PeftModel.from_pretrained(model, tmp_path / "a")
    for name, update in updates(checkpoint).items():
        delta = model[name].get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(update, delta, rtol=1e-5, atol=1e-6)


def test_adalora_becomes_a_plain_lora_and_an_lsr_directory(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    write_adalora(tmp_path / "a")
    source = open_checkpoint(tmp_path / "a")
    folder = truncate(source, rtol=0.3).save(tmp_path / "cut")
    made = open_checkpoint(folder)
    assert made.format == "peft-lora"
    assert verify(source, made).passed
    model = _three_layers()
    peft.PeftModel.from_pretrained(model, folder)
    for name, update in updates(made).items():
        delta = model[name].get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(update, delta, rtol=1e-4, atol=1e-6)
    small = open_checkpoint(lsr.compress(source, ratio=2).save(tmp_path / "small"))
    assert verify(source, small).passed
    size = (tmp_path / "a" / "adapter_model.safetensors").stat().st_size
    file = truncate(source, bytes=size).save(tmp_path / "bytes") / "adapter_model.safetensors"
    assert file.stat().st_size <= size
    with pytest.raises(UnsupportedError, match=r"only= copies tensors.*export --to lora"):
        truncate(source, ratio=2, only=["lin"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"init_r": 5}, "rank 5; correct init_r"),
        ({"rank_pattern": {"lin.lora_E": [True]}}, "rank 1; correct init_r"),
        ({"rank_pattern": {"lin.lora_E": [2, "x"]}}, "lists of true and false"),
        ({"rank_pattern": {"lin.lora_E": 4}}, "lists of true and false"),
    ],
)
def test_ranks_of_adalora_that_do_not_fit_are_refused(
    tmp_path: Path, change: dict, words: str
) -> None:
    write_adalora(tmp_path / "a")
    file = tmp_path / "a" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / "a")


def test_diffsynth_keys_are_read_and_kept(tmp_path: Path) -> None:
    tensors = {}
    for name in ("blocks.0.cross_attn.k", "blocks.0.ffn.0"):
        tensors[f"{name}.lora_A.default.weight"] = normal(4, 20, dtype="float16")
        tensors[f"{name}.lora_B.default.weight"] = normal(24, 4, dtype="float16")
    save_file(tensors, tmp_path / "wan.safetensors")
    source = open_checkpoint(tmp_path / "wan.safetensors")
    assert source.format == "diffsynth"
    assert [layer.scale for layer in source.layers] == [1.0, 1.0]
    cut = truncate(source, ratio=2).save(tmp_path / "cut.safetensors")
    small = open_checkpoint(lsr.compress(source, ratio=2).save(tmp_path / "small"))
    back = export_lora(small, tmp_path / "back.safetensors", to="same", like=source)
    for file in (cut, back):
        assert load_file(file).keys() <= tensors.keys()
        assert verify(source, open_checkpoint(file)).passed
    state = open_checkpoint(tensors)
    assert state.format == "diffsynth"


def test_a_header_that_speaks_of_ranks_of_other_formats_is_no_crash(tmp_path: Path) -> None:
    tensors = {"m.lokr_w1": normal(2, 3), "m.lokr_w2": normal(4, 5)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"m:rank": "9"})
    assert open_checkpoint(tmp_path).format == "lycoris"


def test_a_lokr_directory_becomes_an_lsr_directory_exactly(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoKrConfig(
        r=2, alpha=3, target_modules=["lin", "big"], init_weights=False, decompose_both=True
    )
    peft.get_peft_model(_small_model(), config).save_pretrained(tmp_path / "a")
    source = open_checkpoint(tmp_path / "a")
    layers = ((layer.name, *scaled_factors(layer)) for layer in source.layers)
    write_lsr(tmp_path / "b", source=source, layers=layers, storage="float64")
    before, after = updates(source), updates(open_checkpoint(tmp_path / "b"))
    assert all(
        np.allclose(after[name], update, rtol=1e-14, atol=1e-15) for name, update in before.items()
    )


def test_loralib_faults(tmp_path: Path) -> None:
    faults = {
        "enable_lora.*Unfold it": {
            "q.lora_A": normal(4, 6),
            "q.lora_B": normal(8, 2),
        },
        "without up": {"q.lora_A": normal(4, 6)},
    }
    for word, tensors in faults.items():
        save_file(tensors, tmp_path / "x.safetensors")
        with pytest.raises(CheckpointError, match=word):
            open_checkpoint(tmp_path)


def test_a_merged_linear_in_a_peft_directory_is_read_once_it_is_unfolded(tmp_path: Path) -> None:
    """loralib's MergedLinear with q and v of q, k, v enabled: a grouped convolution over ranks."""
    r, columns, rows = 2, 6, 4
    down, up = normal(2 * r, columns), normal(2 * rows, r)
    halves = {f"{PREFIX}c_attn.lora_A.weight": down, f"{PREFIX}c_attn.lora_B.weight": up}
    folder = write_lora_directory(tmp_path / "merged", halves, r=r, lora_alpha=3)
    with pytest.raises(UnsupportedError) as refusal:
        open_checkpoint(folder)
    message = str(refusal.value)
    assert "c_attn: rank 2 in lora_B, 4 in lora_A: loralib's MergedLinear of 2 enabled" in message
    assert "all rows of the layer and 4 columns" in message
    assert message.endswith("in its config r = 4 and 2 times the lora_alpha")
    # What the message says gives what loralib computes.
    unfolded = np.zeros((3 * rows, 2 * r), np.float32)
    unfolded[:rows, :r] = up[:rows]
    unfolded[2 * rows :, r:] = up[rows:]
    halves[f"{PREFIX}c_attn.lora_B.weight"] = unfolded
    folder = write_lora_directory(tmp_path / "unfolded", halves, r=2 * r, lora_alpha=6)
    update = updates(open_checkpoint(folder))["c_attn"]
    expected = np.zeros((3 * rows, columns))
    for block, part in ((slice(rows), slice(r)), (slice(2 * rows, None), slice(r, None))):
        half = up[:rows] if block.start is None else up[rows:]
        expected[block] = 3 / r * half.astype(np.float64) @ down[part]
    np.testing.assert_allclose(update, expected, rtol=1e-6)


def test_alpha_is_asked_for_only_where_the_file_has_none(tmp_path: Path, kohya: Path) -> None:
    for path in (write_lora_directory(tmp_path / "a"), kohya):
        with pytest.raises(CheckpointError, match="leave alpha= out"):
            open_checkpoint(path, alpha=8)


def test_convolutions_go_from_kohya_to_peft_with_their_kernel(kohya: Path, tmp_path: Path) -> None:
    source = open_checkpoint(kohya)
    layers = [
        (layer.name, layer.scale * up, down)
        for layer in source.layers
        for up, down in [layer.load()]
    ]
    write_lora(tmp_path / "out", source=source, layers=layers)
    back = open_checkpoint(tmp_path / "out")
    assert back.layer("lora_unet_conv").kernel == (3, 2)
    for name, update in updates(source).items():
        np.testing.assert_allclose(updates(back)[name], update, rtol=1e-5, atol=1e-6)


LOHA = {
    f"hada_w{i}_{side}": shape for i in (1, 2) for side, shape in (("a", (5, 2)), ("b", (2, 4)))
}
FILES: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, object] | None]] = {
    "peft-lora": (
        {f"{PREFIX}q.lora_A.weight": (2, 6), f"{PREFIX}q.lora_B.weight": (4, 2)},
        {"peft_type": "LORA", "r": 2},
    ),
    "peft-loha": (
        {f"{PREFIX}q.{part}": shape for part, shape in LOHA.items()},
        {"peft_type": "LOHA", "r": 2},
    ),
    "peft-lokr": (
        {f"{PREFIX}q.lokr_w1": (2, 2), f"{PREFIX}q.lokr_w2": (2, 3)},
        {"peft_type": "LOKR", "r": 2},
    ),
    "peft-adalora": (
        {
            f"{PREFIX}q.lora_A": (2, 6),
            f"{PREFIX}q.lora_B": (4, 2),
            f"{PREFIX}q.lora_E": (2, 1),
        },
        {"peft_type": "ADALORA", "init_r": 2},
    ),
    "lycoris": ({f"m.{part}": shape for part, shape in LOHA.items()}, None),
    "diffsynth": (
        {"q.lora_A.default.weight": (2, 6), "q.lora_B.default.weight": (4, 2)},
        None,
    ),
    "kohya": ({"lora_te_q.lora_down.weight": (2, 6), "lora_te_q.lora_up.weight": (4, 2)}, None),
    "diffusers": ({"unet.q.lora_A.weight": (2, 6), "unet.q.lora_B.weight": (4, 2)}, None),
    "loralib": ({"q.lora_A": (2, 6), "q.lora_B": (4, 2)}, None),
    "torchtune": ({"q.lora_a.weight": (2, 6), "q.lora_b.weight": (4, 2)}, None),
    "mlx": ({"q.lora_a": (6, 2), "q.lora_b": (2, 4)}, None),
    "mlx-vlm": ({"q.A": (6, 2), "q.B": (2, 4)}, {"rank": 2, "alpha": 0.5, "dropout": 0.0}),
}
PEFT_TYPES = ("peft-loha", "peft-lokr", "peft-adalora")
OUTSIDE = ("loralib", "torchtune", "mlx")  # whose files do not hold their scale
"""Of each format the smallest file, as shapes, and its config; LSR directories have a test file of
their own."""


def put(folder: Path, form: str, more: dict[str, tuple[int, ...]] | None = None) -> Path:
    """A file of this format, with further tensors."""
    shapes, config = FILES[form]
    folder.mkdir()
    tensors = {key: normal(*shape) for key, shape in (shapes | (more or {})).items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    if config is not None:
        (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_every_format_of_the_table_has_a_file_and_the_signature_of_the_protocol() -> None:
    assert sorted(form.name for form in FORMATS) == sorted(["lsr", "gguf", *FILES])
    for form in FORMATS:
        for method in ("matches", "read"):
            own = inspect.signature(getattr(form, method)).parameters.values()
            promised = [*inspect.signature(getattr(AdapterFormat, method)).parameters.values()][1:]
            assert [*own] == promised, f"{form.name}.{method}"


@pytest.mark.parametrize("form", FILES)
def test_a_file_is_taken_by_its_own_format_and_none_before_it(tmp_path: Path, form: str) -> None:
    bundle = open_bundle(put(tmp_path / "a", form))
    taking = [other.name for other in FORMATS if other.matches(bundle)]
    also = ["peft-lora"] if form == "mlx-vlm" or form in PEFT_TYPES else []
    assert taking == [form, *also]
    assert open_checkpoint(tmp_path / "a", alpha=2 if form in OUTSIDE else None).format == form


def test_the_order_decides_where_two_formats_match(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loha = put(tmp_path / "loha", "peft-loha")
    mixed = put(tmp_path / "mixed", "lycoris", FILES["kohya"][0])
    assert [open_checkpoint(path).format for path in (loha, mixed)] == ["peft-loha", "lycoris"]
    assert len(open_checkpoint(mixed).layers) == 2
    monkeypatch.setattr(format_table, "FORMATS", FORMATS[::-1])
    for path in (loha, mixed):
        with pytest.raises(UnsupportedError):
            open_checkpoint(path)


@pytest.mark.parametrize("form", [name for name in FILES if name not in OUTSIDE])
def test_an_alpha_is_refused_by_every_format_whose_files_decide_the_scale(
    tmp_path: Path, form: str
) -> None:
    with pytest.raises(CheckpointError, match="leave alpha= out") as refused:
        open_checkpoint(put(tmp_path / "a", form), alpha=8)
    file = "adapter_model.safetensors" if FILES[form][1] is None else "adapter_config.json"
    assert refused.value.path == tmp_path / "a" / file


def test_a_file_of_no_format_is_told_which_are_read(tmp_path: Path) -> None:
    save_file({"weight": normal(2, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(
        CheckpointError,
        match="it holds 'weight'; read are gguf, peft-loha, peft-lokr, peft-adalora, mlx, mlx-vlm",
    ):
        open_checkpoint(tmp_path)


CONTRIBUTING = Path(__file__).parents[3] / "CONTRIBUTING.md"


@pytest.fixture
def contributed(monkeypatch: pytest.MonkeyPatch) -> AdapterFormat:
    """The format in the text of CONTRIBUTING.md, at the end of the table."""
    section = CONTRIBUTING.read_text().split("## Adding a format")[1].split("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    module = ModuleType("contributed")
    exec(compile(code, str(CONTRIBUTING), "exec"), module.__dict__)
    monkeypatch.setattr(format_table, "FORMATS", (*FORMATS, module))
    return module  # type: ignore[return-value]


def test_a_format_written_from_contributing_alone_reads_its_files(
    tmp_path: Path, contributed: AdapterFormat
) -> None:
    tensors = {
        "model.layers.10.q_proj.lora_kernel_a": normal(6, 2, dtype="float16"),
        "model.layers.10.q_proj.lora_kernel_b": normal(2, 4, dtype="float16"),
        "model.layers.9.q_proj.lora_kernel_a": normal(5, 3),
        "model.layers.9.q_proj.lora_kernel_b": normal(3, 7),
        "model.embed_tokens.lora_kernel_a": normal(9, 2),
        "model.embed_tokens.lora_kernel_b": normal(2, 5),
        "head.bias": normal(4),
    }
    path = tmp_path / "adapters.safetensors"
    save_file(tensors, path)
    assert [form.name for form in format_table.FORMATS if form.matches(open_bundle(path))] == [
        contributed.name
    ]
    checkpoint = open_checkpoint(path, alpha=6)
    assert checkpoint.format == "keras"
    assert [layer.name[6:] for layer in checkpoint.layers] == [
        "embed_tokens",
        "layers.9.q_proj",
        "layers.10.q_proj",
    ]
    assert [layer.layer_type for layer in checkpoint.layers] == ["embedding", "linear", "linear"]
    assert [(layer.rank, layer.scale, layer.dtype) for layer in checkpoint.layers[1:]] == [
        (3, 2.0, "float32"),
        (2, 3.0, "float16"),
    ]
    assert list(checkpoint.extras) == [f"{PREFIX}head.bias"]
    for name, update in updates(checkpoint).items():
        left, right = (tensors[f"{name}.lora_kernel_{half}"].astype(np.float64) for half in "ab")
        np.testing.assert_allclose(
            update, 6 / left.shape[1] * (left @ right).T, rtol=1e-5, atol=1e-6
        )
    with_peft = write_lora(
        tmp_path / "out",
        source=checkpoint,
        layers=[(x.name, x.scale * x.load()[0], x.load()[1]) for x in checkpoint.layers],
    )
    for name, update in updates(open_checkpoint(with_peft)).items():
        np.testing.assert_allclose(update, updates(checkpoint)[name], rtol=1e-5, atol=1e-6)


def test_a_format_to_write_from_contributing_alone_is_read_again(
    tmp_path: Path, contributed: AdapterFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = CONTRIBUTING.read_text(encoding="utf-8").split("## Adding a format to write")[1]
    (code,) = re.findall(r"```python\n(.*?)```", section.split("\n## ")[0], re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, str(CONTRIBUTING), "exec"), names)
    monkeypatch.setattr(table, "WRITERS", (*table.WRITERS, names["KERAS"]))
    assert "keras" in table.writer_names()
    source = open_checkpoint(
        write_lora_directory(
            tmp_path / "lora",
            {**lora_pair("layers.0.q"), **lora_pair("layers.1.v", 7, 9, 3, 1)},
            base_model_name_or_path="a-base",
            rank_pattern={"layers.1.v": 3},
        )
    )
    out = export_lora(source, tmp_path / "out", to="keras")
    config = json.loads((out / "adapter_config.json").read_text())
    assert config == {"model": "a-base", "rank": 3}
    shutil.move(out / "adapter_model.safetensors", tmp_path / "keras.safetensors")
    weights = tmp_path / "keras.safetensors"
    assert load_file(weights)["layers.1.v.lora_kernel_a"].shape == (9, 3)
    (first, second) = open_checkpoint(weights, alpha=1).layers
    assert contributed.name == "keras"
    for layer, rank in ((first, 2), (second, 3)):
        found = updates(open_checkpoint(weights, alpha=rank))[layer.name]
        np.testing.assert_allclose(found, updates(source)[layer.name], rtol=1e-5, atol=1e-6)
    with pytest.raises(UnsupportedError, match="cannot write 'kerras'; did you mean 'keras'"):
        export_lora(source, tmp_path / "other", to="kerras")


@pytest.mark.parametrize(
    ("word", "shapes"),
    {
        "has down without up; the file is incomplete": {"q.lora_kernel_a": (6, 2)},
        "magnitude of DoRA beside up, down": {
            "q.lora_kernel_a": (6, 2),
            "q.lora_kernel_b": (2, 4),
            "q.m": (4,),
        },
        "rank 2 in shape": {"q.lora_kernel_a": (6, 3), "q.lora_kernel_b": (2, 4)},
        "expected a matrix": {"q.lora_kernel_a": (8, 2, 6), "q.lora_kernel_b": (8, 4, 2)},
        "is part of an adapter": {
            "q.lora_kernel_a": (6, 2),
            "q.lora_kernel_b": (2, 4),
            "q.lora_kernel_a_scales": (6, 1),
        },
        "of rank 2: its scale is not in it; pass alpha=": {
            "q.lora_kernel_a": (6, 2),
            "q.lora_kernel_b": (2, 4),
        },
    }.items(),
)
def test_it_refuses_in_one_line_as_every_format_does(
    tmp_path: Path, contributed: AdapterFormat, word: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    save_file(
        {key: normal(*shape) for key, shape in shapes.items()}, tmp_path / "adapters.safetensors"
    )
    with pytest.raises(CheckpointError, match=word) as refused:
        open_checkpoint(tmp_path)
    assert "adapters.safetensors" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.fixture
def mlx(tmp_path: Path) -> Path:
    """A directory as mlx-lm saves it."""
    halves = {"lora_a": normal(6, 2, dtype="bfloat16"), "lora_b": normal(2, 4, dtype="bfloat16")}
    folder = tmp_path / "mlx"
    folder.mkdir()
    save_file(
        {f"model.layers.0.self_attn.q_proj.{key}": half for key, half in halves.items()},
        folder / MLX,
    )
    settings = {"rank": 2, "scale": 20.0, "dropout": 0.0}
    config = {"fine_tune_type": "lora", "model": "some/base", "lora_parameters": settings}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


MLX = "adapters.safetensors"


def test_an_mlx_directory_is_read_transposed_with_the_scale_of_its_config(mlx: Path) -> None:
    checkpoint, stored = open_checkpoint(mlx), load_file(mlx / MLX)
    assert (checkpoint.format, checkpoint.config["base_model_name_or_path"]) == ("mlx", "some/base")
    (layer,) = checkpoint.layers
    left, right = (stored[f"{layer.name}.lora_{half}"].astype(np.float64) for half in "ab")
    np.testing.assert_allclose(updates(checkpoint)[layer.name], 20 * (left @ right).T, rtol=1e-12)
    assert open_checkpoint(mlx / MLX).layers == checkpoint.layers


def test_other_directories_of_mlx_are_refused_with_the_cause(mlx: Path) -> None:
    config = json.loads((mlx / "adapter_config.json").read_text())
    (mlx / "adapter_config.json").write_text(json.dumps(config | {"fine_tune_type": "dora"}))
    with pytest.raises(
        UnsupportedError, match="fine_tune_type is 'dora': mlx-lm's, which rescales"
    ):
        open_checkpoint(mlx)
    (mlx / MLX).write_text("version https://git-lfs.github.com/spec/v1\nsize 9\n")
    with pytest.raises(CheckpointError, match="adapters.safetensors: this is a Git-LFS pointer"):
        open_checkpoint(mlx)
    (mlx / MLX).unlink()
    with pytest.raises(
        CheckpointError, match="but no weights: adapter_model.safetensors or .* is missing$"
    ):
        open_checkpoint(mlx)


def test_a_directory_whose_weights_have_another_name_is_told_how_to_read_them_alone(
    mlx: Path,
) -> None:
    weights = (mlx / MLX).rename(mlx / "adapter_0.safetensors")
    with pytest.raises(
        CheckpointError,
        match=rf"is missing; to read {weights.name} without the config, say so by name=",
    ):
        open_checkpoint(mlx)
    assert open_checkpoint(mlx, name=weights.name, alpha=2).layers


# -- mlx-lm, written -------------------------------------------------------------------------------


def language_lora(folder: Path) -> Checkpoint:
    """Two ranks, on two of the blocks of a language model, and an embedding."""
    tensors = {
        **lora_pair("model.layers.1.self_attn.q_proj", 12, 12, 4),
        **lora_pair("model.layers.3.mlp.down_proj", 12, 20, 2, 1),
        f"{PREFIX}model.embed_tokens.lora_embedding_A": normal(4, 30),
        f"{PREFIX}model.embed_tokens.lora_embedding_B": normal(12, 4),
    }
    ranks = {"model.layers.3.mlp.down_proj": 2}
    config = {"rank_pattern": ranks, "base_model_name_or_path": "some/base"}
    return open_checkpoint(write_lora_directory(folder, tensors, r=4, lora_alpha=6, **config))


def test_a_directory_for_mlx_has_one_rank_and_names_what_it_adapts(tmp_path: Path) -> None:
    source = language_lora(tmp_path / "lora")
    out = export_lora(source, tmp_path / "mlx", to="mlx")
    assert json.loads((out / "adapter_config.json").read_text()) == {
        "fine_tune_type": "lora",
        "model": "some/base",
        "num_layers": -1,
        "lora_parameters": {
            "rank": 4,
            "scale": 1.0,
            "dropout": 0.0,
            "keys": ["mlp.down_proj", "model.embed_tokens", "self_attn.q_proj"],
        },
    }
    assert {key: array.shape for key, array in load_file(out / MLX).items()} == {
        "model.layers.1.self_attn.q_proj.lora_a": (12, 4),
        "model.layers.1.self_attn.q_proj.lora_b": (4, 12),
        "model.layers.3.mlp.down_proj.lora_a": (20, 4),
        "model.layers.3.mlp.down_proj.lora_b": (4, 12),
        "model.embed_tokens.lora_a": (30, 4),
        "model.embed_tokens.lora_b": (4, 12),
    }
    written = open_checkpoint(out)
    assert written.format == "mlx"
    assert written.config["base_model_name_or_path"] == "some/base"
    assert written.layer("model.embed_tokens").layer_type == "embedding"
    for name, update in updates(source).items():
        np.testing.assert_allclose(updates(written)[name], update, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        (lora_pair("unet.attn1.to_q"), "mlx files are of language models; write lora"),
        (lora_pair("transformer.transformer_blocks.0.attn.to_q"), "mlx files are of language"),
        (lora_pair("diffusion_model.blocks.0.q"), "mlx files are of language models"),
        (lora_pair("transformer_blocks.0.attn.to_q"), "mlx files are of language models"),
        (lora_pair("model.layers.0.mlp.experts.3.up_proj"), "one module for all experts"),
        (
            {
                f"{PREFIX}model.layers.0.conv.lora_A.weight": normal(2, 4, 3),
                f"{PREFIX}model.layers.0.conv.lora_B.weight": normal(6, 2, 1),
            },
            "a convolution, which mlx files do not hold; write lora",
        ),
        (
            {**lora_pair("q"), f"{PREFIX}score.weight": normal(2, 8)},
            "mlx loads no file that holds such; leave them out by --without-heads",
        ),
    ],
)
def test_what_mlx_files_do_not_hold_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, np.ndarray], words: str
) -> None:
    source = open_checkpoint(write_lora_directory(tmp_path / "lora", tensors, r=2))
    with pytest.raises(UnsupportedError, match=words):
        export_lora(source, tmp_path / "mlx", to="mlx")
    assert not (tmp_path / "mlx").exists()


def test_language_models_whose_first_word_is_transformer_have_names_for_mlx(tmp_path: Path) -> None:
    source = open_checkpoint(
        write_lora_directory(tmp_path / "lora", lora_pair("transformer.h.0.attn.c_attn"), r=2)
    )
    out = export_lora(source, tmp_path / "mlx", to="mlx")
    assert [layer.name for layer in open_checkpoint(out).layers] == ["transformer.h.0.attn.c_attn"]


def test_a_cut_directory_of_mlx_has_one_rank_as_its_config_says(tmp_path: Path) -> None:
    """mlx-lm compares every tensor with a module of the config's rank, and loads no other."""
    out = export_lora(language_lora(tmp_path / "lora"), tmp_path / "mlx", to="mlx")
    source = open_checkpoint(out)
    cut = truncate(source, ratio=1.7)
    written = open_checkpoint(cut.save(tmp_path / "cut"))
    config = json.loads((tmp_path / "cut" / "adapter_config.json").read_text())
    assert {layer.rank for layer in written.layers} == {config["lora_parameters"]["rank"]}
    assert written.adapter_parameters <= source.adapter_parameters / 1.7
    check = verify(source, written)
    assert check.passed
    assert check.relative_error == pytest.approx(cut.relative_error, rel=1e-5)


def test_mlx_lm_gives_its_layers_the_weights(tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed (pip install mlx[cpu] mlx-lm)")
    from mlx.utils import tree_flatten
    from mlx_lm.models import llama
    from mlx_lm.tuner.utils import load_adapters

    source = language_lora(tmp_path / "lora")
    out = export_lora(source, tmp_path / "mlx", to="mlx")
    sizes = {"hidden_size": 12, "intermediate_size": 20, "vocab_size": 30, "head_dim": 6}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    arguments = llama.ModelArgs(
        model_type="llama", num_hidden_layers=4, rms_norm_eps=1e-5, **sizes, **heads
    )
    for directory in (out, truncate(open_checkpoint(out), ratio=1.7).save(tmp_path / "cut")):
        model = llama.Model(arguments)
        before = {name: np.array(value) for name, value in tree_flatten(model.parameters())}
        model = load_adapters(model, str(directory))
        expected = updates(open_checkpoint(directory))
        found = {}
        for name, module in model.named_modules():
            if type(module).__name__ in ("LoRALinear", "LoRAEmbedding"):
                found[name] = np.array(module.fuse().weight) - before[f"{name}.weight"]
        assert set(expected) <= set(found)
        for name, update in found.items():
            wanted = expected.get(name, np.zeros_like(update))
            wanted = wanted.T if name.endswith("embed_tokens") else wanted
            np.testing.assert_allclose(update, wanted, rtol=1e-4, atol=1e-6)


def test_metadata_of_null_is_none_as_the_library_reads_it(tmp_path: Path) -> None:
    folder = write_lora_directory(tmp_path / "a")
    raw = (folder / "adapter_model.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size]) | {"__metadata__": None}
    (folder / "adapter_model.safetensors").write_bytes(raw_safetensors(header, raw[8 + size :]))
    assert open_checkpoint(folder).metadata == {}


def test_keys_that_name_the_adapter_are_said_to_come_from_a_state_dict(tmp_path: Path) -> None:
    tensors = {
        key.replace(".weight", ".default.weight"): array for key, array in lora_pair("q").items()
    }
    for place in (
        write_lora_directory(tmp_path / "a", tensors),
        tmp_path / "a" / "adapter_model.safetensors",
    ):
        with pytest.raises(
            CheckpointError,
            match=r"names the adapter 'default' in its keys: saved by state_dict\(\)",
        ):
            open_checkpoint(place)


@pytest.mark.parametrize("config", [True, False])
def test_shards_are_said_to_be_parts_of_one_file(tmp_path: Path, config: bool) -> None:
    folder = write_lora_directory(tmp_path / "a")
    for part in (1, 2):
        save_file(
            {f"w{part}": normal(2)}, folder / f"adapter_model-0000{part}-of-00002.safetensors"
        )
    (folder / "adapter_model.safetensors").unlink()
    if not config:
        (folder / "adapter_config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"one file in 2 shards \(adapter_model-00001-of-00002"
    ):
        open_checkpoint(folder)


def test_names_are_sorted_by_the_numbers_in_them():
    names = [
        "unet.2",
        "unet.10",
        "x.layer.2.q",
        "x.layer.010.q",
        "x.layer.11.q",
        f"y.{9}",
        f"y.{'9' * 5000}",
    ]
    assert sorted({*names}, key=natural_key) == names
    assert natural_key("a.1") != natural_key("a.01")  # names that differ have keys that do


def test_torchtunes_own_keys_beside_a_config_of_peft_are_called_so(tmp_path: Path) -> None:
    keys = {
        "layers.0.attn.q_proj.lora_a.weight": normal(2, 6),
        "layers.0.attn.q_proj.lora_b.weight": normal(4, 2),
    }
    folder = write_lora_directory(tmp_path / "a", keys, r=2)
    with pytest.raises(
        CheckpointError, match=r"torchtune's own keys: move adapter_model\.safetensors away"
    ):
        open_checkpoint(folder)
    alone = (folder / "adapter_model.safetensors").rename(tmp_path / "tune.safetensors")
    assert open_checkpoint(alone, alpha=4).format == "torchtune"
