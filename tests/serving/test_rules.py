"""What servers of language models would apply, by their rules, beside PEFT and vLLM's loader."""

import json
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_files import PREFIX, lora_pair, write_lora_directory
from safetensors.numpy import save_file

from lsrdecomp import compress
from lsrdecomp.checkpoints import open_checkpoint, read_modules, write_lsr
from lsrdecomp.compression.export import export_lora
from lsrdecomp.errors import CheckpointError, LsrError, UnsupportedError
from lsrdecomp.serving import check_served
from lsrdecomp.serving.check import SERVERS

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
def base(tmp_path_factory):
    """A tiny Llama by its headers alone: no torch reads it."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    weights = {"model.embed_tokens.weight": (96, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        weights |= {
            f"model.layers.{layer}.self_attn.{key}.weight": size for key, size in SIZES.items()
        }
        mlp = {"gate_proj": (48, WIDTH), "up_proj": (48, WIDTH), "down_proj": (WIDTH, 48)}
        weights |= {f"model.layers.{layer}.mlp.{key}.weight": size for key, size in mlp.items()}
        weights |= {
            f"model.layers.{layer}.{key}_layernorm.weight": (WIDTH,)
            for key in ("input", "post_attention")
        }
    rng = np.random.default_rng(0)
    filled = {
        key: (0.1 * rng.standard_normal(size)).astype(np.float32) for key, size in weights.items()
    }
    save_file(filled, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def adapter(path, names=None, *, rank=2, tensors=None, **config):
    names = names or [f"model.layers.{i}.self_attn.{key}" for i in range(LAYERS) for key in SIZES]
    held = {
        k: v
        for name in names
        for k, v in lora_pair(name, *SIZES[name.rpartition(".")[2]], rank).items()
    }
    settings = {"r": rank, "target_modules": list(SIZES), "task_type": "CAUSAL_LM", **config}
    return write_lora_directory(path, {**held, **(tensors or {})}, **settings)


def by_peft(base, folder):
    """Names of the layers that PEFT gave numbers to; B is zero in those it made without any."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
    parts = model.base_model.model.named_modules()
    return {
        name
        for name, part in parts
        if "default" in getattr(part, "lora_B", {}) and part.lora_B.default.weight.any()
    }


def applied(found):
    return {module.name for module in found.applied}


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": r".*\.1\.self_attn\.[qv]_proj"},
        {"exclude_modules": ["k_proj"]},
        {"layers_to_transform": [1]},
        {"names": [f"{up}.layers.0.self_attn.q_proj" for up in ("model", "language_model.model")]},
    ],
    ids=str,
)
def test_layers_that_peft_gives_numbers_to_are_those_that_would_apply(base, tmp_path, change):
    folder = adapter(tmp_path / "a", **change)
    found = check_served(folder, "peft", base)
    wanted = by_peft(base, folder)
    assert applied(found) == wanted
    assert {module.name for module in found.ignored} == {
        x.name for x in open_checkpoint(folder).layers
    } - wanted


def test_a_file_of_the_bare_model_serves_where_transformers_adds_the_first_word(base, tmp_path):
    """transformers opens it for the task, so PEFT finds the names; a bare model has its own."""
    whole = read_modules(base)
    bare = {
        key.removeprefix("model."): np.zeros(size, np.float32) for key, size in whole.shapes.items()
    }
    del bare["lm_head"]
    save_file(
        {f"{key}.weight": value for key, value in bare.items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    given = adapter(tmp_path / "a")
    assert applied(check_served(given, "peft", tmp_path)) == by_peft(tmp_path, given)
    own = adapter(tmp_path / "b", ["layers.0.self_attn.q_proj"], task_type="FEATURE_EXTRACTION")
    assert (
        len(check_served(own, "peft", tmp_path).applied)
        == len(check_served(own, "peft", base).applied)
        == 1
    )
    assert not check_served(
        adapter(tmp_path / "c", ["layers.0.self_attn.q_proj"]), "peft", base
    ).applied


def test_a_base_of_other_sizes_is_refused_by_peft_and_by_its_rule(base, tmp_path):
    name = "model.layers.0.self_attn.q_proj"
    folder = write_lora_directory(
        tmp_path / "a", lora_pair(name, WIDTH, 48), target_modules=["q_proj"], task_type="CAUSAL_LM"
    )
    found = check_served(folder, "peft", base)
    assert not found.applied
    assert found.ignored[0].fault == "32 x 48, but its weight is (32, 32) in the base"
    with pytest.raises(RuntimeError, match="size mismatch"):
        by_peft(base, folder)


def test_names_of_a_config_alone_are_those_of_the_headers(base, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    built = read_modules(tmp_path / "config.json", task_type="CAUSAL_LM")
    assert dict(built.shapes) == dict(read_modules(base).shapes)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_type": "nonsense"}))
    with pytest.raises(CheckpointError, match=r"config\.json: no model can be built from it"):
        read_modules(tmp_path / "config.json")


def test_shards_are_found_by_their_index(base, tmp_path):
    whole = read_modules(base)
    keys = sorted(whole.shapes.keys() - {"lm_head"})
    places = {
        f"{key}.weight": f"part-{position % 2}.safetensors" for position, key in enumerate(keys)
    }
    for part in sorted(set(places.values())):
        held = {
            key: np.zeros(whole.shapes[key[:-7]], np.float32)
            for key, place in places.items()
            if place == part
        }
        save_file(held, tmp_path / part)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert (
        read_modules(tmp_path).shapes
        == whole.shapes
        == read_modules(next(tmp_path.glob("*.json"))).shapes
    )
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "../part-0.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="outside its directory"):
        read_modules(tmp_path)


def test_vllm_passes_over_wrong_names_and_stops_at_unknown_last_words(base, tmp_path):
    wrong = adapter(
        tmp_path / "wrong", [f"model.model.layers.{i}.self_attn.q_proj" for i in range(LAYERS)]
    )
    found = check_served(wrong, "vllm", base)
    assert (found.refusals, len(found.applied), len(found.ignored)) == ([], 0, 2)
    assert found.ignored[0].fault.endswith("passes over it in silence")
    odd = {**lora_pair("model.layers.0.self_attn.query", WIDTH, WIDTH)}
    found = check_served(adapter(tmp_path / "odd", tensors=odd), "vllm", base)
    assert not found.applied
    assert found.refusals == ["vLLM stops at names whose last word no layer of the base has"]


def test_vllm_has_one_scale_for_all_layers_and_the_server_profile_bakes_it_in(base, tmp_path):
    one = "model.layers.1.self_attn.q_proj"
    folder = adapter(tmp_path / "a", lora_alpha=4, alpha_pattern={one: 12})
    found = check_served(folder, "vllm", base)
    assert len(found.applied) == 8
    assert [(module.name, module.factor) for module in found.rescaled] == [
        (one, pytest.approx(1 / 3))
    ]
    out = export_lora(open_checkpoint(folder), tmp_path / "served", profile="server")
    assert check_served(out, "vllm", base).rescaled == []
    rooted = check_served(
        adapter(tmp_path / "r", rank=4, lora_alpha=8, use_rslora=True), "vllm", base
    )
    assert rooted.rescaled == []


def test_what_vllm_refuses_as_a_whole(base, tmp_path):
    def reasons(name, **config):
        found = check_served(adapter(tmp_path / name, **config), "vllm", base)
        assert not found.applied
        return " ".join(found.refusals)

    head = {f"{PREFIX}lm_head.weight": np.zeros((96, WIDTH), np.float32)}
    assert "modules_to_save" in reasons("head", tensors=head, modules_to_save=["lm_head"])
    biases = {f"{PREFIX}model.layers.0.self_attn.q_proj.bias": np.zeros(WIDTH, np.float32)}
    assert "no biases" in reasons("bias", tensors=biases, bias="lora_only")
    assert "above 512" in reasons("rank", rank=600)
    wide = check_served(
        adapter(tmp_path / "wide", rank=3, r=2, rank_pattern=dict.fromkeys(SIZES, 3)), "vllm", base
    )
    assert not wide.refusals  # as vLLM 0.20.2 loads it
    assert wide.applied
    found = check_served(adapter(tmp_path / "slot", rank=24), "vllm", base)
    assert "--max-lora-rank 32" in found.notes[0]
    given = open_checkpoint(adapter(tmp_path / "lora"))
    rng, name = np.random.default_rng(0), "model.layers.0.self_attn.q_proj"
    factors = [rng.standard_normal((2, 8, 1)), rng.standard_normal((2, 4, 2))]
    other = [rng.standard_normal((2, 1, 8)), rng.standard_normal((2, 2, 4))]
    dropped = [layer.name for layer in given.layers if layer.name != name]
    lsr = write_lsr(
        tmp_path / "lsr", source=given, layers=[(name, factors, other)], dropped=dropped
    )
    found = check_served(lsr, "vllm", base)
    (refusal,) = found.refusals
    assert not found.applied
    assert refusal.startswith(
        f"vLLM reads PEFT LoRA directories, and this is lsr: `lsrdecomp export {lsr} --profile"
    )
    assert applied(check_served(lsr, "peft", base)) == {name}


def test_vllm_stacks_all_experts_of_a_layer_at_one_rank(tmp_path):
    """As `PackedLoRALayerWeights.pack_moe` of vLLM 0.20.2 asserts of experts by name."""
    words = {"gate_proj": (12, WIDTH), "up_proj": (12, WIDTH), "down_proj": (WIDTH, 12)}
    names = {
        f"model.layers.0.mlp.experts.{i}.{word}": size
        for i in range(3)
        for word, size in words.items()
    }
    weights = {f"{name}.weight": np.zeros(size, np.float32) for name, size in names.items()}
    save_file(weights, tmp_path / "base.safetensors")

    def refusals(name, ranks, without=None):
        sizes = {name: size for name, size in names.items() if name != without}
        tensors = {
            k: v
            for name, size in sizes.items()
            for k, v in lora_pair(name, *size, ranks.get(name, 2)).items()
        }
        folder = write_lora_directory(
            tmp_path / name, tensors, r=2, target_modules=list(words), rank_pattern=ranks
        )
        return check_served(folder, "vllm", tmp_path / "base.safetensors").refusals

    one = "model.layers.0.mlp.experts.1.up_proj"
    assert refusals("whole", {}) == []
    assert refusals("words", {f"model.layers.0.mlp.experts.{i}.up_proj": 1 for i in range(3)}) == []
    (differ,) = refusals("differ", {one: 1})
    assert "their ranks differ" in differ
    (missing,) = refusals("missing", {}, without=one)
    assert "some have no pair" in missing
    assert "--profile lorax" in missing


def test_of_stacked_experts_the_rules_say_nothing_and_who_can_be_asked(base, tmp_path):
    """What vLLM makes of them depends on the model's class; it may serve the base silently."""
    stack = lora_pair("model.layers.0.mlp.experts", WIDTH, 12, 4)
    config = {"r": 2, "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    folder = write_lora_directory(tmp_path / "stacks", stack, **config)
    small = compress(folder, separation_rank=1).save(tmp_path / "small")
    for served in (folder, small):
        for server in SERVERS:
            words = rf"stored stacked.*what {server} makes of those is not known.*ask by --server"
            with pytest.raises(UnsupportedError, match=words):
                check_served(served, server, base)


def test_sglang_has_one_rank_and_stacks_q_k_and_v(base, tmp_path):
    def check(name, *args, **config):
        return check_served(adapter(tmp_path / name, *args, **config), "sglang", base)

    assert len(check("whole").applied) == 8
    attention = "model.layers.0.self_attn."
    without_k = check("without-k", [attention + key for key in ("q_proj", "v_proj")])
    assert (without_k.refusals, len(without_k.applied)) == ([], 2)
    for name, keys in {
        "without-v": ("q_proj", "k_proj"),
        "without-q": ("k_proj", "v_proj"),
    }.items():
        (reason,) = check(name, [attention + key for key in keys]).refusals
        assert "stacks q, k and v" in reason
        assert "--profile lorax" in reason
    prefixed = check("prefixed", [f"model.{attention}o_proj"])
    assert len(prefixed.applied) == 1
    (reason,) = check(
        "unknown", tensors=lora_pair("model.layers.0.self_attn.query", WIDTH, WIDTH)
    ).refusals
    assert "no layer of the base" in reason
    (reason,) = check("pattern", target_modules=r".*[qkvo]_proj").refusals
    assert reason.startswith("target_modules is a pattern")
    rooted = check("rooted", rank=4, lora_alpha=8, use_rslora=True)
    assert {module.factor for module in rooted.rescaled} == {0.5}
    head = {f"{PREFIX}score.weight": np.zeros((3, WIDTH), np.float32)}
    assert "1 other tensors" in check("head", tensors=head).notes[0]


def test_sglang_loads_the_profile_lorax_and_not_the_profile_server(base, tmp_path):
    two = {"model.layers.1.self_attn.q_proj": 1}
    names = {
        f"model.layers.{i}.self_attn.{key}": SIZES[key] for i in range(LAYERS) for key in SIZES
    }
    tensors = {
        k: v
        for name, size in names.items()
        for k, v in lora_pair(name, *size, two.get(name, 2)).items()
    }
    folder = write_lora_directory(
        tmp_path / "a", tensors, r=2, target_modules=list(SIZES), rank_pattern=two
    )
    for profile, applied_layers in {"server": 0, "lorax": 8}.items():
        out = export_lora(open_checkpoint(folder), tmp_path / profile, profile=profile)
        check = check_served(out, "sglang", base)
        assert len(check.applied) == applied_layers
        assert not check.rescaled


def test_llama_cpp_takes_all_or_nothing(base, tmp_path):
    gguf = pytest.importorskip("gguf")
    folder = adapter(tmp_path / "a")
    (refusal,) = check_served(folder, "llama.cpp", base).refusals
    assert refusal.startswith(
        f"llama.cpp loads GGUF files: `lsrdecomp export {folder} --to gguf --base {base} --out"
    )
    out = export_lora(open_checkpoint(folder), tmp_path / "a.gguf", to="gguf", base=base)
    found = check_served(out, "llama.cpp", base)
    assert len(found.applied) == 8
    assert {module.rank for module in found.applied} == {2}
    small = tmp_path / "small"
    small.mkdir()
    (small / "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": 1}))
    found = check_served(out, "llama.cpp", small)
    assert not found.applied
    assert len(found.ignored) == 4
    assert found.refusals == ["llama.cpp stops at a tensor that the base lacks"]
    (small / "config.json").write_text(
        json.dumps(CONFIG | {"model_type": "qwen2", "architectures": None})
    )
    assert "general.architecture" in check_served(out, "llama.cpp", small).refusals[0]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert (
        "general.type is None"
        in check_served(tmp_path / "model.gguf", "llama.cpp", base).refusals[0]
    )


def test_headers_are_compared_without_torch(base, tmp_path):
    folder = adapter(tmp_path / "a")
    code = (
        "import sys; from pathlib import Path; from lsrdecomp.cli.served import by_rules\nfor "
        f"server in ('peft', 'vllm'): by_rules(Path({str(folder)!r}), server, {str(base)!r}, "
        "None)\nprint([name for name in ('torch', 'transformers', 'peft') if name in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("8 of 8 layers would apply") == 2
    assert done.stdout.splitlines()[-1] == "[]"


def test_what_cannot_be_asked(base, tmp_path):
    folder = adapter(tmp_path / "a")
    with pytest.raises(LsrError, match="'vlm'; did you mean 'vllm'"):
        check_served(folder, "vlm", base)
    with pytest.raises(CheckpointError, match="no such file or directory"):
        check_served(folder, "peft", tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="is no base"):
        check_served(folder, "peft", tmp_path)


def test_a_file_that_is_no_gguf_cannot_be_asked(base, tmp_path):
    pytest.importorskip("gguf")
    (tmp_path / "x.gguf").write_bytes(b"GGUF nonsense" * 9)
    with pytest.raises(CheckpointError, match="is no GGUF"):
        check_served(tmp_path / "x.gguf", "llama.cpp", base)


def test_the_command_line_says_it_in_sentences_and_in_json(base, tmp_path):
    from console import run_command

    folder = adapter(tmp_path / "a", rank=24, lora_alpha=24)
    done = run_command("verify", folder, "--for", "vllm", "--base", base)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"vllm on {base}: 8 of 8 layers would apply, the largest rank 24." in done.stdout
    assert "--max-lora-rank 32" in done.stdout
    done = run_command("verify", folder, "--for", "llama.cpp", "--base", base, "--json", "-")
    facts = json.loads(done.stdout)
    assert done.returncode == 1
    assert (facts["layers"], facts["applied"]) == (8, 0)
    assert "llama.cpp loads GGUF files" in facts["refusals"][0]
    for arguments, words in [
        ([folder, "--for", "vllm"], "name it by --base"),
        ([folder, folder, "--for", "vllm", "--base", base], "look at one adapter"),
        ([folder], "name what was written from it too"),
    ]:
        done = run_command("verify", *arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
