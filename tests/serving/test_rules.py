"""What PEFT and llama.cpp would apply, by their rules, beside PEFT itself."""

import json
import subprocess
import sys

import numpy as np
import pytest
from checkpoint_files import lora_pair, write_lora_directory
from safetensors.numpy import save_file
from tiny_llama import CONFIG, WIDTH, adapter, write_base

from lsrdecomp import compress
from lsrdecomp.checkpoints import open_checkpoint, read_modules
from lsrdecomp.compression.export import export_lora
from lsrdecomp.errors import CheckpointError, LsrError, UnsupportedError
from lsrdecomp.serving import check_served
from lsrdecomp.serving.check import SERVERS


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


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
        "import sys; from pathlib import Path; from lsrdecomp.cli.served import by_loader\nfor "
        f"server in ('peft',): by_loader(Path({str(folder)!r}), server, {str(base)!r}, "
        "None)\nprint([name for name in ('torch', 'transformers', 'peft') if name in "
        "sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("8 of 8 layers would apply") == 1
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

    folder = adapter(tmp_path / "a", rank=32, lora_alpha=32)
    done = run_command("verify", folder, "--for", "vllm", "--base", base)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"vllm on {base}: 8 of 8 layers would apply, the largest rank 32." in done.stdout
    assert "--max-lora-rank 32" in done.stdout
    assert "vllm is not installed here, so nothing was loaded" in done.stdout
    done = run_command("verify", folder, "--for", "llama.cpp", "--base", base, "--json", "-")
    facts = json.loads(done.stdout)
    assert done.returncode == 1
    assert (facts["layers"], facts["applied"]) == (8, 0)
    assert "llama.cpp loads GGUF files" in facts["refusals"][0]
    for arguments, words in [
        ([folder, "--for", "vllm"], "name it by --base"),
        ([folder, "--for", "peft", "--base", base, "--python", "x"], "peft goes by rules"),
        ([folder, "--for", "vllm", "--base", base, "--python", "/no/such"], "cannot be run"),
        ([folder, folder, "--python", "x"], "named by --for"),
        ([folder, folder, "--for", "vllm", "--base", base], "look at one adapter"),
        ([folder], "name what was written from it too"),
    ]:
        done = run_command("verify", *arguments)
        assert done.returncode == 2
        assert words in done.stderr
        assert done.stderr.count("\n") == 1
