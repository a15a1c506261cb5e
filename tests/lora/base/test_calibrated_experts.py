"""Experts that a base holds stacked are measured one by one."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_tokenizer import word_tokenizer
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from lsrdecomp import compress
from lsrdecomp.errors import CalibrationError, CheckpointError
from lsrdecomp.lora.base.calibrate import calibrate
from lsrdecomp.lora.base.expert_layers import attach_adapter, least_used_expert
from lsrdecomp.lora.base.heads import Head
from lsrdecomp.lora.base.open_bases import load_base, open_base
from lsrdecomp.lora.base.sampled_gradients import sampled_log_likelihood
from lsrdecomp.lora.compress import export_lora
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.statistics import read_statistics

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 8,
    "num_hidden_layers": 1,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
BATCHES = [
    {"input_ids": torch.tensor([[4, 9, 11, 5, 17, 8, 6]])},
    {"input_ids": torch.tensor([[7, 4, 12, 19, 3, 3, 10]])},
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A base of four experts and a LoRA on them, as directories."""
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(vocab_size=32, num_experts=4, num_experts_per_tok=2, **SIZES, **HEADS)
    base = Qwen3MoeForCausalLM(config)
    base.save_pretrained(folder / "base")
    word_tokenizer().save_pretrained(folder / "base")
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=stacks, task_type="CAUSAL_LM"
    )
    lora.init_lora_weights = False
    get_peft_model(base, lora).save_pretrained(folder / "lora")
    return folder


@pytest.fixture(scope="module", params=["qwen3", "mixtral"])
def named(request, tmp_path_factory):
    """The same with a LoRA that calls experts by name, as transformers 4 had them."""
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    if request.param == "qwen3":
        config = Qwen3MoeConfig(
            vocab_size=32, num_experts=4, num_experts_per_tok=2, **SIZES, **HEADS
        )
        block, words = "mlp", {"gate_proj": (8, 16), "up_proj": (8, 16), "down_proj": (16, 8)}
    else:
        config = MixtralConfig(
            vocab_size=32, num_local_experts=4, **SIZES | {"intermediate_size": 8}, **HEADS
        )
        block, words = "block_sparse_moe", {"w1": (8, 16), "w3": (8, 16), "w2": (16, 8)}
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    word_tokenizer().save_pretrained(folder / "base")
    sizes = {
        f"{block}.experts.{expert}.{word}": size
        for expert in range(4)
        for word, size in words.items()
    }
    tensors = {}
    for name, (out, into) in (sizes | {"self_attn.q_proj": (16, 16)}).items():
        key = f"base_model.model.model.layers.0.{name}"
        tensors |= {
            f"{key}.lora_A.weight": torch.randn(2, into),
            f"{key}.lora_B.weight": torch.randn(out, 2),
        }
    (folder / "lora").mkdir()
    save_file(tensors, folder / "lora" / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 2}
    settings["target_modules"] = ["q_proj", *words]
    (folder / "lora" / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def stacked(mixture) -> PeftModel:
    """The same as PEFT opens it."""
    base = AutoModelForCausalLM.from_pretrained(mixture / "base")
    return PeftModel.from_pretrained(base, mixture / "lora").eval()


def measured(mixture, out, batches=BATCHES, word=""):
    base = load_base(mixture / "base", mixture / "lora")
    base = replace(base, modules=tuple(name for name in base.modules if word in name))
    calibrate(base, batches, out=out, seed=0, samples=len(batches))
    return read_statistics(out)


@torch.no_grad()
def test_with_and_without_the_lora_the_base_says_what_it_says_in_peft(mixture):
    ours, theirs, rows = (
        load_base(mixture / "base", mixture / "lora").model,
        stacked(mixture),
        BATCHES[0],
    )
    torch.testing.assert_close(ours(**rows).logits, theirs(**rows).logits)
    with ours.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(ours(**rows).logits, theirs(**rows).logits)


@torch.no_grad()
def test_experts_by_name_say_what_they_say_where_peft_stacks_them(named, tmp_path):
    ours, theirs, rows = load_base(named / "base", named / "lora"), stacked(named), BATCHES[0]
    assert sorted(ours.modules) == sorted(
        layer.name for layer in open_checkpoint(named / "lora").layers
    )
    torch.testing.assert_close(ours.model(**rows).logits, theirs(**rows).logits)
    with ours.model.disable_adapter(), theirs.disable_adapter():
        torch.testing.assert_close(ours.model(**rows).logits, theirs(**rows).logits)
    small = compress(named / "lora", separation_rank=2, inner_shape=(1, 2)).save(tmp_path / "small")
    export_lora(open_checkpoint(small), tmp_path / "back", without_heads=True)
    theirs = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(named / "base"), tmp_path / "back"
    ).eval()
    written = open_base(named / "base", named / "lora").with_adapter(small).model
    torch.testing.assert_close(written(**rows).logits, theirs(**rows).logits)


def test_experts_by_name_are_compressed_by_their_statistics(named, tmp_path):
    statistics = measured(named, tmp_path / "statistics")
    source = open_checkpoint(named / "lora")
    assert set(statistics) == {layer.name for layer in source.layers}
    gate, up = (
        statistics.measured(name)
        for name in sorted(statistics)
        if name.endswith(("2.gate_proj", "2.up_proj", "2.w1", "2.w3"))
    )
    assert gate.input.trace == pytest.approx(up.input.trace, rel=5e-3)  # they read the same tokens
    small = open_checkpoint(
        compress(source, ratio=2, statistics=statistics).save(tmp_path / "small")
    )
    assert {layer.name for layer in small.layers} <= set(statistics)
    assert 0 < 2 * small.adapter_parameters <= source.adapter_parameters


def test_an_expert_that_the_base_lacks_is_named(named, tmp_path):
    tensors = load_file(named / "lora" / "adapter_model.safetensors")
    odd = {key.replace("experts.3", "experts.4"): tensor for key, tensor in tensors.items()}
    shutil.copytree(named / "lora", tmp_path / "lora")
    save_file(odd, tmp_path / "lora" / "adapter_model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"does not fit .*the base has no layer model.layers.0.*.experts.4"
    ):
        load_base(named / "base", tmp_path / "lora")


@torch.no_grad()
def test_an_lsr_of_experts_says_what_it_says_as_a_lora_in_peft(mixture, tmp_path):
    source = open_checkpoint(mixture / "lora")
    small = compress(source, separation_rank=2, inner_shape=(1, 2)).save(tmp_path / "small")
    export_lora(open_checkpoint(small), tmp_path / "back", to="same", like=source)
    ours = open_base(mixture / "base", mixture / "lora").with_adapter(small).model
    base = Qwen3MoeForCausalLM.from_pretrained(mixture / "base")
    theirs = PeftModel.from_pretrained(base, tmp_path / "back").eval()
    torch.testing.assert_close(ours(**BATCHES[0]).logits, theirs(**BATCHES[0]).logits)


def test_statistics_of_an_expert_are_those_of_its_gradient(mixture, tmp_path):
    statistics, model = measured(mixture, tmp_path / "statistics"), stacked(mixture)
    names = [layer.name for layer in open_checkpoint(mixture / "lora").layers]
    assert set(statistics) == set(names)
    experts = model.get_base_model().model.layers[0].mlp.experts
    while hasattr(experts, "base_layer"):
        experts = experts.base_layer
    parameters = {
        name: getattr(experts, name).requires_grad_() for name in ("gate_up_proj", "down_proj")
    }
    squares = {name: torch.zeros(4) for name in parameters}
    answers = 0
    for number, batch in enumerate(BATCHES, start=1):
        logits = model(**batch).logits[0, :-1]
        answers += len(logits)
        score = sampled_log_likelihood(
            logits, Head.causal_lm, torch.Generator().manual_seed(number)
        )
        gradients = torch.autograd.grad(score, list(parameters.values()))
        for name, gradient in zip(parameters, gradients, strict=True):
            squares[name] += gradient.square().sum((1, 2))
    for name in names[:8]:
        _, _, kind, number = name.rsplit(".", 3)
        layer = statistics.measured(name)
        fisher = layer.input.trace * layer.output.trace
        # Stored in half precision.
        assert fisher == pytest.approx(float(squares[kind][int(number)]) / answers, rel=5e-3)


def test_an_expert_that_no_token_reached_counts_as_the_one_that_fewest_did(mixture, tmp_path):
    tokens = {"experts.up.0": 9, "experts.up.2": 4, "experts.down.1": 1, "q_proj": 1}
    assert least_used_expert("experts.up.1", tokens) == "experts.up.2"
    assert (
        least_used_expert(
            "experts.1.up", {"experts.0.up": 9, "experts.2.up": 4, "experts.3.down": 1}
        )
        == "experts.2.up"
    )
    assert least_used_expert("v_proj", tokens) is None
    # One answer: at least two experts are not asked.
    short = [{"input_ids": BATCHES[0]["input_ids"][:, :2]}]
    statistics = measured(mixture, tmp_path / "statistics", short, "down_proj")
    traces = [
        statistics.measured(f"model.layers.0.mlp.experts.down_proj.{expert}").output.trace
        for expert in range(4)
    ]
    assert min(traces) > 0
    assert len(set(traces)) == 2


def test_experts_of_another_kind_are_refused(mixture):
    model = Qwen3MoeForCausalLM.from_pretrained(mixture / "base")
    model.model.layers[0].mlp.experts.act_fn = torch.nn.Identity()
    plain = type(model.model.layers[0].mlp.experts).forward
    odd = type(
        "OddExperts",
        (type(model.model.layers[0].mlp.experts),),
        {"forward": lambda *given: 2 * plain(*given)},
    )
    model.model.layers[0].mlp.experts.__class__ = odd
    with pytest.raises(
        CalibrationError, match="mlp.experts is a OddExperts, whose experts are not computed as"
    ):
        attach_adapter(model, mixture / "lora")
