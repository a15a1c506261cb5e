"""Mixtures of experts: PEFT's stacks beside PEFT itself, experts by name, both written back."""

from __future__ import annotations

import json

import numpy as np
import pytest
from checkpoint_files import PREFIX, write_lora_directory

import lsrdecomp as lsr
from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.lora.compress import export_lora, truncate
from lsrdecomp.lora.files import open_checkpoint, write_lora, write_pairs
from lsrdecomp.lora.measure import verify
from lsrdecomp.lora.search import CompressionPlan

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

EXPERTS, LAYERS = 4, 2
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def base():
    """A Qwen3-MoE of a few thousand numbers."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 32,
        "hidden_size": 16,
        "intermediate_size": 24,
        "moe_intermediate_size": 12,
        "head_dim": 8,
    }
    sizes |= {
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "mlp_only_layers": [],
    }
    config = transformers.Qwen3MoeConfig(
        **sizes, num_experts=EXPERTS, num_experts_per_tok=2, decoder_sparse_step=1
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def updates(folder):
    """ΔW of every expert as PEFT has it, by the name that its layer has here."""
    model = peft.PeftModel.from_pretrained(base(), folder)
    deltas = {}
    for name, module in model.named_modules():
        if type(module).__name__ == "ParamWrapper":
            path = name.removeprefix("base_model.model.").replace(".base_layer", "")
            for expert, delta in enumerate(
                module.get_delta_weight("default").detach().double().numpy()
            ):
                deltas[f"{path}.{module.parameter_name}.{expert}"] = delta
    return deltas


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    """A LoRA of both parameters of all experts, and of q_proj, as PEFT writes it."""
    torch.manual_seed(1)
    settings = {
        "rank_pattern": {"down_proj": 3},
        "alpha_pattern": {"down_proj": 5},
        "task_type": "CAUSAL_LM",
    }
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj"],
        target_parameters=PARAMETERS,
        init_lora_weights=False,
        **settings,
    )
    folder = tmp_path_factory.mktemp("fused") / "lora"
    peft.get_peft_model(base(), config).save_pretrained(folder)
    return folder


def held(checkpoint):
    """ΔW of the layers of experts as we read them."""
    pairs = {
        layer.name: (layer.scale, *layer.load())
        for layer in checkpoint.layers
        if ".experts." in layer.name
    }
    return {name: scale * up.astype(np.float64) @ down for name, (scale, up, down) in pairs.items()}


def test_a_stack_is_read_as_one_layer_for_each_expert(fused):
    checkpoint = open_checkpoint(fused)
    ours, theirs = held(checkpoint), updates(fused)
    assert len(ours) == 2 * LAYERS * EXPERTS
    assert ours.keys() == theirs.keys()
    for name, delta in theirs.items():
        np.testing.assert_allclose(ours[name], delta, atol=1e-6)
    assert {layer.rank for layer in checkpoint.layers if "down_proj" in layer.name} == {3}


def test_stacks_are_written_back_as_peft_reads_them(fused, tmp_path):
    source = open_checkpoint(fused)
    cut = truncate(source, CompressionPlan(ratio=1.3)).save(tmp_path / "cut")
    config = json.loads((cut / "adapter_config.json").read_text())
    assert sorted(config["target_parameters"]) == sorted(PARAMETERS)
    check = verify(source, open_checkpoint(cut))
    assert check.passed
    assert check.recorded
    ours = held(open_checkpoint(cut))
    for name, delta in updates(cut).items():
        np.testing.assert_allclose(ours[name], delta, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
def test_an_expert_that_is_left_out_is_zero(fused, tmp_path):
    source = open_checkpoint(fused)
    left_out = ("layers.0.mlp.experts.gate_up_proj.1", "layers.1.mlp.experts.down_proj.3")
    kept = [layer for layer in source.layers if not layer.name.endswith(left_out)]
    pairs = [(layer.name, layer.scale * layer.load()[0], layer.load()[1]) for layer in kept]
    theirs, before = (
        updates(write_pairs(tmp_path / "some", source=source, layers=pairs)),
        updates(fused),
    )
    for name, delta in theirs.items():
        np.testing.assert_allclose(
            delta, 0.0 if name.endswith(left_out) else before[name], atol=1e-6
        )


def test_an_lsr_directory_of_experts_is_exported_to_stacks_and_peft_is_told(fused, tmp_path):
    source = open_checkpoint(fused)
    small = open_checkpoint(lsr.compress(source, ratio=1.5).save(tmp_path / "small"))
    exact = held_products(small)
    for to, out in (("lora", "lora"), ("same", "same")):
        written = export_lora(small, tmp_path / out, to=to, like=source, storage="float32")
        assert verify(source, open_checkpoint(written)).passed
        for name, delta in updates(written).items():
            np.testing.assert_allclose(delta, exact.get(name, np.zeros_like(delta)), atol=1e-5)
    import lsrdecomp.lora.peft  # noqa: F401 - PEFT learns LSR

    with pytest.raises(ValueError, match="compressed one by one.*lsrdecomp export"):
        peft.PeftModel.from_pretrained(base(), small.path)
    plain = export_lora(small, tmp_path / "plain", profile="peft", storage="float32")
    for name, delta in updates(plain).items():
        np.testing.assert_allclose(delta, exact.get(name, np.zeros_like(delta)), atol=1e-5)


def held_products(checkpoint):
    from lsrdecomp.lora.search.layers import layer_product

    return {
        layer.name: np.linalg.multi_dot(layer_product(layer).to_lora())
        for layer in checkpoint.layers
    }


def test_what_is_no_stack_is_said(fused, tmp_path):
    def changed(**fields):
        folder = tmp_path / "-".join(fields)
        folder.mkdir()
        (folder / "adapter_model.safetensors").write_bytes(
            (fused / "adapter_model.safetensors").read_bytes()
        )
        config = json.loads((fused / "adapter_config.json").read_text()) | fields
        (folder / "adapter_config.json").write_text(json.dumps(config))
        return folder

    with pytest.raises(
        CheckpointError, match=r"no stack of experts of rank 5; correct r or rank_pattern"
    ):
        open_checkpoint(changed(rank_pattern={"down_proj": 5}))
    with pytest.raises(
        CheckpointError, match="wraps 2 parameters, of which target_parameters names 1"
    ):
        open_checkpoint(changed(target_parameters=PARAMETERS[:1]))
    with pytest.raises(UnsupportedError, match="their order in the model is not known"):
        open_checkpoint(changed(target_parameters=["mlp.experts.w1", "mlp.experts.w2"], r=2))


def test_experts_by_name_are_layers_like_others(tmp_path):
    from checkpoint_files import lora_pair, write_lora_directory

    names = [
        f"model.layers.0.mlp.experts.{i}.{word}"
        for i in range(3)
        for word in ("gate_proj", "up_proj")
    ]
    tensors = {
        key: value
        for i, name in enumerate(names)
        for key, value in lora_pair(name, 12, 16, 2, i).items()
    }
    source = open_checkpoint(
        write_lora_directory(tmp_path / "a", tensors, target_modules=["gate_proj", "up_proj"], r=2)
    )
    assert sorted(layer.name for layer in source.layers) == sorted(names)
    cut = open_checkpoint(truncate(source, CompressionPlan(ratio=1.5)).save(tmp_path / "cut"))
    assert verify(source, cut).passed


@pytest.mark.filterwarnings("ignore:.*copying from a non-meta parameter")
def test_experts_by_name_are_exported_as_transformers_5_stacks_them(tmp_path):
    from checkpoint_files import lora_pair, write_lora_directory

    words = {"gate_proj": (12, 16), "up_proj": (12, 16), "down_proj": (16, 12)}
    names = [
        f"model.layers.{i}.mlp.experts.{e}.{word}"
        for i in range(LAYERS)
        for e in range(EXPERTS)
        for word in words
    ]
    tensors = {}
    for i, name in enumerate(names):
        tensors |= lora_pair(name, *words[name.rpartition(".")[2]], 4, i)
    folder = write_lora_directory(
        tmp_path / "a", tensors, target_modules=sorted(words), r=4, task_type="CAUSAL_LM"
    )
    small = open_checkpoint(lsr.compress(folder, ratio=3).save(tmp_path / "small"))
    exact = held_products(small)
    assert len({layer.rank for layer in small.layers}) > 1
    found = updates(export_lora(small, tmp_path / "lora", storage="float32"))
    assert len(found) == 2 * LAYERS * EXPERTS
    for name, delta in found.items():
        block, word, expert = name.rsplit(".", 2)
        parts = ("gate_proj", "up_proj") if word == "gate_up_proj" else (word,)
        wanted = [exact.get(f"{block}.{expert}.{part}", np.zeros(words[part])) for part in parts]
        np.testing.assert_allclose(delta, np.vstack(wanted), atol=1e-5)


def test_a_header_of_more_than_sixteen_megabytes_is_read_and_written(tmp_path):
    """Experts by name make such headers: safetensors itself allows 100 MB."""
    tensors = {}
    for expert in range(16_000):
        name = f"{'model.' * 70}experts.{expert}.gate_proj"
        for half, shape in (("A", (1, 2)), ("B", (2, 1))):
            tensors[f"{PREFIX}{name}.lora_{half}.weight"] = np.ones(shape, np.float32)
    folder = write_lora_directory(tmp_path / "a", tensors, r=1, target_modules=["gate_proj"])
    with (folder / "adapter_model.safetensors").open("rb") as file:
        assert 16 * 2**20 < int.from_bytes(file.read(8), "little") < 100_000_000
    source = open_checkpoint(folder)
    assert len(source.layers) == 16_000
    tensors = ((layer.name, *layer.load()) for layer in source.layers)
    made = open_checkpoint(write_lora(tmp_path / "b", source=source, layers=tensors))
    assert [layer.name for layer in made.layers] == [layer.name for layer in source.layers]
