"""Names and sizes of a base's modules, whatever the base is read from."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.files import read_modules
from lsrdecomp.lora.files.families import missing_layers

LAYERS, WIDTH, KEYS = 2, 32, 16
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "vocab_size": 96,
    "tie_word_embeddings": True,
}
SIZES = {
    "q_proj": (WIDTH, WIDTH),
    "k_proj": (KEYS, WIDTH),
    "v_proj": (KEYS, WIDTH),
    "o_proj": (WIDTH, WIDTH),
}


@pytest.fixture(scope="module")
def weights():
    """A tiny Llama, all zeros."""
    sizes = {"model.embed_tokens.weight": (96, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        for word, size in SIZES.items():
            sizes[f"{stem}.self_attn.{word}.weight"] = size
        for word in ("gate_proj", "up_proj"):
            sizes[f"{stem}.mlp.{word}.weight"] = (48, WIDTH)
        sizes[f"{stem}.mlp.down_proj.weight"] = (WIDTH, 48)
        for word in ("input", "post_attention"):
            sizes[f"{stem}.{word}_layernorm.weight"] = (WIDTH,)
    return {name: np.zeros(size, np.float32) for name, size in sizes.items()}


@pytest.fixture(scope="module")
def base(tmp_path_factory, weights):
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, folder / "model.safetensors")
    return folder


def test_names_of_a_config_alone_are_those_of_the_headers(base, tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    built = read_modules(tmp_path / "config.json")
    assert dict(built.shapes) == dict(read_modules(base).shapes)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "nonsense"}))
    with pytest.raises(CheckpointError, match=r"config\.json: no model can be built from it"):
        read_modules(tmp_path / "config.json")


def test_shards_are_found_by_their_index(base, weights, tmp_path):
    whole = read_modules(base)
    index = tmp_path / "model.safetensors.index.json"
    places = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(weights)}
    for part in set(places.values()):
        save_file({k: v for k, v in weights.items() if places[k] == part}, tmp_path / part)
    index.write_text(json.dumps({"weight_map": places}))
    assert read_modules(tmp_path).shapes == whole.shapes
    assert read_modules(index).shapes == whole.shapes
    index.write_text(json.dumps({"weight_map": {"a": "../part-0.safetensors"}}))
    with pytest.raises(CheckpointError, match="outside its directory"):
        read_modules(tmp_path)


def test_what_is_no_base_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such file or directory"):
        read_modules(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is no base"):
        read_modules(tmp_path)


def test_names_are_the_architecture_s_where_the_base_is_a_gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(WIDTH)
    for block in range(LAYERS):
        for word, stored in zip(SIZES, ("q", "k", "v", "output"), strict=True):
            weight = np.zeros(SIZES[word], np.float32)
            writer.add_tensor(f"blk.{block}.attn_{stored}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    modules = read_modules(path)
    names = [f"model.layers.0.self_attn.{word}" for word in SIZES]
    assert all(modules.find(name) is not None for name in names)
    assert missing_layers(names, modules) == [
        f"model.layers.1.self_attn.{word}" for word in sorted(SIZES)
    ]


def test_a_pipeline_has_the_same_names_by_its_configs_alone(tmp_path):
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=24,
        attention_head_dim=4,
    )
    (tmp_path / "model_index.json").write_text("{}")
    unet.save_pretrained(tmp_path / "unet")
    stored = dict(read_modules(tmp_path).shapes)
    assert {name.partition(".")[0] for name in read_modules(tmp_path / "unet").shapes} == {"unet"}
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    assert dict(read_modules(tmp_path).shapes) == stored
