"""GGUF adapters: names, order of rows and scale as llama.cpp reads them, or a refusal by name."""

import json
import os

import numpy as np
import pytest
from checkpoint_files import lora_pair, write_lora_directory
from console import run_command

from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.lora.compress.export import export_lora
from lsrdecomp.lora.files import open_checkpoint, write_lsr
from lsrdecomp.lora.files.writers.gguf import read_base, write_gguf

gguf = pytest.importorskip("gguf")

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
}


@pytest.fixture
def base(tmp_path):
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path / "base"


def tensors(path):
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def interleaved(rows: int, heads: int) -> list[int]:
    """Return the old row of each row of GGUF's matrix: halves of rotary pairs take turns."""
    width = rows // heads
    return [
        h * width + j + half * (width // 2)
        for h in range(heads)
        for j in range(width // 2)
        for half in (0, 1)
    ]


def test_each_layer_keeps_its_rank_under_llama_names_with_rows_in_order(base, tmp_path):
    q, v = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
    k = "model.layers.1.self_attn.k_proj"
    made = {**lora_pair(q, 32, 32, 4), **lora_pair(v, 16, 32, 2, 1), **lora_pair(k, 16, 32, 2, 2)}
    given = open_checkpoint(
        write_lora_directory(tmp_path / "a", made, r=2, lora_alpha=6, rank_pattern={"q_proj": 4})
    )
    out = export_lora(given, tmp_path / "a.gguf", to="gguf", storage="f32", base=base)
    reader, found = gguf.GGUFReader(out), tensors(out)
    assert reader.fields["general.type"].contents() == "adapter"
    assert reader.fields["general.architecture"].contents() == "llama"
    assert reader.fields["adapter.type"].contents() == "lora"
    assert reader.fields["adapter.lora.alpha"].contents() == 0.0
    names = {q: ("blk.0.attn_q", 4), k: ("blk.1.attn_k", 2), v: ("blk.1.attn_v", None)}
    assert set(found) == {
        f"{name}.weight.{end}" for name, _ in names.values() for end in ("lora_a", "lora_b")
    }
    for layer in given.layers:
        name, heads = names[layer.name]
        a, b = (found[f"{name}.weight.{end}"].data for end in ("lora_a", "lora_b"))
        assert (a.shape, b.shape) == ((layer.rank, 32), (layer.out_features, layer.rank))
        up, down = layer.load()
        wanted = layer.scale * up.astype(float) @ down
        rows = slice(None) if heads is None else interleaved(layer.out_features, heads)
        assert b.astype(float) @ a == pytest.approx(wanted[rows], rel=1e-5, abs=1e-6)


def test_an_lsr_adapter_with_a_dropped_layer_becomes_gguf_of_its_small_rank(base, tmp_path):
    q, v = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"
    given = open_checkpoint(
        write_lora_directory(tmp_path / "a", {**lora_pair(q, 32, 32), **lora_pair(v, 16, 32)})
    )
    rng = np.random.default_rng(0)
    layer = (
        v,
        [rng.standard_normal((2, 4, 1))] * 2,
        [rng.standard_normal((3, 1, 8)), rng.standard_normal((3, 1, 4))],
    )
    written = open_checkpoint(write_lsr(tmp_path / "o", source=given, layers=[layer], dropped=[q]))
    found = tensors(export_lora(written, tmp_path / "o.gguf", to="gguf", base=base))
    assert {name: list(tensor.shape) for name, tensor in found.items()} == {
        "blk.1.attn_v.weight.lora_a": [32, 1],
        "blk.1.attn_v.weight.lora_b": [1, 16],
    }
    assert {tensor.tensor_type.name for tensor in found.values()} == {"F16"}


def test_eight_bits_where_rows_allow_them(base, tmp_path):
    layers = [
        ("model.layers.0.self_attn.v_proj", np.ones((16, 2)), np.linspace(-1, 1, 64).reshape(2, 32))
    ]
    out = write_gguf(tmp_path / "o.gguf", layers=layers, base=read_base(base), storage="q8_0")
    found = {name[-6:]: tensor for name, tensor in tensors(out).items()}
    assert (found["lora_a"].tensor_type.name, found["lora_b"].tensor_type.name) == ("Q8_0", "F16")
    assert gguf.quants.dequantize(
        found["lora_a"].data, found["lora_a"].tensor_type
    ) == pytest.approx(layers[0][2], abs=0.01)


@pytest.mark.parametrize(
    ("kind", "module", "name"),
    [
        ("gpt2", "transformer.h.1.attn.c_attn", "blk.1.attn_qkv"),
        ("bert", "bert.encoder.layer.1.attention.self.query", "blk.1.attn_q"),
        ("qwen2", "model.layers.1.mlp.down_proj", "blk.1.ffn_down"),
        ("qwen3", "model.layers.1.self_attn.q_proj", "blk.1.attn_q"),
        ("gemma3_text", "model.layers.1.self_attn.q_proj", "blk.1.attn_q"),
    ],
)
def test_other_architectures_keep_their_rows(tmp_path, kind, module, name):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA | {"model_type": kind}))
    up = np.arange(96, dtype=np.float32).reshape(48, 2)
    out = write_gguf(
        tmp_path / "o.gguf",
        layers=[(module, up, np.ones((2, 32)))],
        base=read_base(config),
        storage="f32",
    )
    assert np.array_equal(tensors(out)[f"{name}.weight.lora_b"].data, up)


def test_what_llama_cpp_would_not_apply_is_refused_by_name(base, tmp_path):
    def refused(
        words, error=UnsupportedError, name="model.layers.0.self_attn.q_proj", m=32, n=32, **options
    ):
        options = {"base": read_base(base), **options}
        with pytest.raises(error, match=words):
            write_gguf(
                tmp_path / "o.gguf", layers=[(name, np.ones((m, 2)), np.ones((2, n)))], **options
            )
        assert not (tmp_path / "o.gguf").exists()

    refused(
        "model.layers.0.self_attn.o: has no tensor in a llama model",
        name="model.layers.0.self_attn.o",
    )
    refused(
        "model.layers.2.self_attn.q_proj: has no tensor", name="model.layers.2.self_attn.q_proj"
    )
    refused("32 x 64, but 32 x 32 in the base", CheckpointError, n=64)
    refused("36 rows are not 4 heads of pairs", CheckpointError, m=36)
    refused("storage 'int4' is not one of f32, f16, q8_0", CheckpointError, storage="int4")
    head = {f"base_model.model.{key}": np.ones(2, np.float32) for key in ("score.weight",)}
    tiny = open_checkpoint(
        write_lora_directory(
            tmp_path / "a", {**lora_pair("model.layers.0.self_attn.q_proj", 32, 32), **head}
        )
    )
    refused("1 tensors beside the adapter .the first .*score", source=tiny)
    (tmp_path / "base" / "config.json").write_text(json.dumps(LLAMA | {"model_type": "mamba"}))
    with pytest.raises(UnsupportedError, match="architecture 'mamba'"):
        read_base(base)
    (tmp_path / "model.gguf").write_bytes(b"GGUF nonsense" * 9)
    with pytest.raises(CheckpointError, match="is no GGUF model"):
        read_base(tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match="name it by --base"):
        export_lora(tiny, tmp_path / "o.gguf", to="gguf")


def test_heads_are_left_out_only_where_that_is_asked_for_and_are_named(base, tmp_path):
    head = {"base_model.model.score.weight": np.ones((2, 32), np.float32)}
    made = {**lora_pair("model.layers.0.self_attn.v_proj", 16, 32), **head}
    given = write_lora_directory(
        tmp_path / "a", made, target_modules=["v_proj"], modules_to_save=["score"]
    )
    refused = run_command(
        "export", given, "--to", "gguf", "--base", base, "--out", tmp_path / "o.gguf"
    )
    assert refused.returncode == 2
    assert "leave them out by --without-heads" in refused.stderr
    assert not (tmp_path / "o.gguf").exists()
    done = run_command(
        "export",
        given,
        "--to",
        "gguf",
        "--base",
        base,
        "--out",
        tmp_path / "o.gguf",
        "--without-heads",
    )
    assert "Left out, as asked: base_model.model.score.weight." in done.stdout
    assert set(tensors(tmp_path / "o.gguf")) == {
        f"blk.0.attn_v.weight.{end}" for end in ("lora_a", "lora_b")
    }
    served = run_command("export", given, "--without-heads", "--out", tmp_path / "served")
    assert "Left out, as asked: base_model.model.score.weight." in served.stdout
    whole = run_command("export", given, "--out", tmp_path / "whole")
    assert "Left out" not in whole.stdout
    out = export_lora(open_checkpoint(given), tmp_path / "lora", without_heads=True)
    assert open_checkpoint(out).extras == {}
    assert json.loads((out / "adapter_config.json").read_text())["modules_to_save"] is None
    kept = export_lora(open_checkpoint(given), tmp_path / "kept")
    assert json.loads((kept / "adapter_config.json").read_text())["modules_to_save"] == ["score"]


def test_a_full_disk_leaves_nothing(base, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    layers = [("model.layers.0.self_attn.q_proj", np.ones((32, 2)), np.ones((2, 32)))]
    with pytest.raises(CheckpointError, match="No space left"):
        write_gguf(tmp_path / "o.gguf", layers=layers, base=read_base(base))
    assert [path.name for path in tmp_path.iterdir()] == ["base"]
