"""DoRA, tied weights, replicated layers, targeted parameters, low precision, compilation."""

from __future__ import annotations

import pytest
import torch
from adapters_support import tiny_bert, token_batch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.pytorch_utils import Conv1D

from lsrdecomp import compress
from lsrdecomp.errors import MergeError, UnsupportedLayerError
from lsrdecomp.lora.peft import LsrConfig
from lsrdecomp.lora.peft.merging import surviving_share

LAYERS = {
    "linear": lambda: (nn.Linear(12, 8), torch.randn(3, 12)),
    "transformers Conv1D": lambda: (Conv1D(8, 12), torch.randn(3, 12)),
    "embedding": lambda: (nn.Embedding(15, 8), torch.randint(0, 15, (3, 5))),
    "conv2d": lambda: (nn.Conv2d(4, 6, 3, groups=2), torch.randn(2, 4, 5, 5)),
}


class Experts(nn.Module):
    """Stacked expert matrices held as bare parameters, in either orientation."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.is_transposed = transposed
        self.up = nn.Parameter(torch.randn(3, 6, 8))
        self.down = nn.Parameter(torch.randn(3, 8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_transposed:
            return torch.bmm(torch.bmm(x, self.up), self.down)
        return torch.bmm(torch.bmm(x, self.down.mT), self.up.mT)


def tiny_llama(**settings) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=30, pad_token_id=0, initializer_range=0.3, **sizes, **settings)
    ).eval()


def relative(left: torch.Tensor, right: torch.Tensor) -> float:
    return float((left - right).norm() / right.norm())


@pytest.fixture(params=LAYERS)
def dora(request):
    """A layer with DoRA in double precision, and an input."""
    torch.manual_seed(0)
    layer, x = LAYERS[request.param]()
    config = LsrConfig(target_modules=["layer"], r=4, init_weights=False, use_dora=True)
    model = get_peft_model(nn.ModuleDict({"layer": layer}), config).double()
    return model.base_model.model["layer"], x.double() if x.is_floating_point() else x


def scale_magnitudes(layer) -> None:
    """Give the rows other norms than those they start with."""
    with torch.no_grad():
        layer.lsr_magnitude_vector["default"].mul_(torch.linspace(0.5, 2, layer.out_features))


@torch.no_grad()
def test_dora_starts_at_the_norms_of_the_sum(dora):
    layer, x = dora
    plain = layer.get_base_layer()(x) + layer.delta_output("default", x)
    assert relative(layer(x), plain) < 1e-6  # the norms were kept in float32 until .double()


@torch.no_grad()
def test_dora_scales_the_rows_of_the_sum(dora):
    layer, x = dora
    scale_magnitudes(layer)
    base = layer.get_base_layer()
    result = layer(x)
    total = layer.geometry.to_matrix(base.weight) + layer.delta_matrix("default")
    rows = layer.lsr_magnitude_vector["default"] / total.norm(dim=1)
    base.weight.copy_(layer.geometry.to_weight(rows[:, None] * total))
    assert relative(result, base(x)) < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("safe", [False, True])
def test_dora_is_merged_and_taken_out_again(dora, safe):
    layer, x = dora
    scale_magnitudes(layer)
    weight = layer.get_base_layer().weight.clone()
    result = layer(x)
    layer.merge(safe_merge=safe)
    assert relative(layer(x), result) < 1e-12
    layer.unmerge()
    assert relative(layer.get_base_layer().weight, weight) < 1e-12


def test_a_dora_and_a_plain_adapter_merge_together_and_apart():
    torch.manual_seed(0)
    model = get_peft_model(
        nn.Sequential(nn.Linear(12, 8)),
        LsrConfig(target_modules=["0"], r=4, init_weights=False, use_dora=True),
    )
    model.add_adapter("plain", LsrConfig(target_modules=["0"], r=2, init_weights=False))
    model = model.double()
    x, layer = torch.randn(3, 12, dtype=torch.float64), model.base_model.model[0]
    with torch.no_grad():
        layer.lsr_magnitude_vector["default"].mul_(1.7)
        model.base_model.set_adapter(["default", "plain"])
        both, weight = layer(x), layer.get_base_layer().weight.clone()
        layer.merge(adapter_names=["plain"])
        layer.merge(adapter_names=["default"])
        assert relative(layer(x), both) < 1e-12
        layer.unmerge()
        assert relative(layer.get_base_layer().weight, weight) < 1e-12


def test_dora_saves_its_magnitudes(tmp_path):
    targets = ["query", "intermediate.dense"]  # a square matrix and one that is not
    model = get_peft_model(
        tiny_bert(), LsrConfig(target_modules=targets, r=4, init_weights=False, use_dora=True)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.5)
        expected = model.eval()(**token_batch()).logits
        model.save_pretrained(tmp_path)
        for low in (False, True):
            again = PeftModel.from_pretrained(tiny_bert(), tmp_path, low_cpu_mem_usage=low).eval()
            torch.testing.assert_close(again(**token_batch()).logits, expected)


def test_tied_layers_share_one_adapter(tmp_path):
    config = LsrConfig(
        target_modules=["embed_tokens", "lm_head"],
        r=4,
        init_weights=False,
        ensure_weight_tying=True,
    )
    rows = torch.randint(0, 30, (2, 5), generator=torch.Generator().manual_seed(0))
    model = get_peft_model(tiny_llama(tie_word_embeddings=True), config).eval()
    embedding, head = model.base_model.model.model.embed_tokens, model.base_model.model.lm_head
    assert torch.equal(head.delta_matrix("default"), embedding.delta_matrix("default").T)
    assert not list(head.lsr_A.parameters())
    with torch.no_grad():
        expected = model(rows).logits
        assert relative(expected, tiny_llama(tie_word_embeddings=True)(rows).logits) > 0.01
        model.save_pretrained(tmp_path)
        again = PeftModel.from_pretrained(tiny_llama(tie_word_embeddings=True), tmp_path).eval()
        torch.testing.assert_close(again(rows).logits, expected)
        model.merge_adapter()
        assert relative(model(rows).logits, expected) < 1e-5
        model.unmerge_adapter()
        merged = model.merge_and_unload()
        assert relative(merged(rows).logits, expected) < 1e-5
        assert merged.lm_head.weight is merged.model.embed_tokens.weight


def test_replicated_layers_have_adapters_of_their_own():
    config = LsrConfig(
        target_modules=["q_proj"], r=2, layer_replication=[[0, 2], [0, 2]], init_weights=False
    )
    model = get_peft_model(tiny_llama(), config)
    layers = model.base_model.model.model.layers
    assert len(layers) == 4
    assert layers[0].self_attn.q_proj.weight is layers[2].self_attn.q_proj.weight
    first, copy = (layers[index].self_attn.q_proj.delta_matrix("default") for index in (0, 2))
    assert not torch.equal(first, copy)


@pytest.fixture(params=[False, True], ids=["as stored", "transposed"])
def experts(request) -> tuple[PeftModel, dict[str, torch.Tensor], torch.Tensor]:
    """A model with both stacks of experts adapted, the stacks before, and an input."""
    torch.manual_seed(0)
    base = nn.ModuleDict({"experts": Experts(request.param)})
    stacks = {name: value.clone() for name, value in base["experts"].state_dict().items()}
    names = ["experts.up", "experts.down"]
    config = LsrConfig(
        target_parameters=names, target_modules=[], r=2, separation_rank=3, init_weights=False
    )
    return get_peft_model(base, config), stacks, torch.randn(3, 4, 6)


def test_each_expert_of_a_stack_gets_a_delta_of_its_own(experts):
    model, stacks, x = experts
    outer = model.base_model.model["experts"]
    wrappers = {wrapper.parameter_name: wrapper for wrapper in (outer, outer.base_layer)}
    assert wrappers.keys() == stacks.keys()
    summed = Experts(outer.get_base_layer().is_transposed)
    with torch.no_grad():
        for name, wrapper in wrappers.items():
            delta = wrapper.get_delta_weight("default")
            assert torch.linalg.matrix_rank(delta).tolist() == [2, 2, 2]
            getattr(summed, name).copy_(stacks[name] + delta)
        assert relative(outer(x), summed(x)) < 1e-5
        assert torch.equal(outer.get_base_layer().up, stacks["up"])


def test_every_factor_of_adapted_experts_gets_a_gradient(experts):
    model, _, x = experts
    outer = model.base_model.model["experts"]
    outer(x).sum().backward()
    sides = (outer.lsr_A["default"], outer.lsr_B["default"])
    assert all(factor.grad.any() for side in sides for factor in side.factors)


def test_adapted_experts_save_load_and_merge(experts, tmp_path):
    model, stacks, x = experts
    expected = model.base_model.model["experts"](x)
    model.save_pretrained(tmp_path)
    transposed = model.base_model.model["experts"].get_base_layer().is_transposed
    fresh = Experts(transposed)
    fresh.load_state_dict(stacks)
    again = PeftModel.from_pretrained(nn.ModuleDict({"experts": fresh}), tmp_path)
    torch.testing.assert_close(again.base_model.model["experts"](x), expected)
    merged = model.merge_and_unload(safe_merge=True)["experts"]
    assert isinstance(merged, Experts)
    assert relative(merged(x), expected) < 1e-5


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_the_factors_of_stacked_experts(transposed):
    torch.manual_seed(0)
    config = LsrConfig(
        target_parameters=["experts.up"],
        target_modules=[],
        r=2,
        separation_rank=2,
        init_weights=False,
    )
    model = get_peft_model(nn.ModuleDict({"experts": Experts(transposed)}), config).double()
    layer, x = model.base_model.model["experts"], torch.randn(3, 4, 6, dtype=torch.float64)
    given = {name: value.detach() for name, value in layer.named_parameters() if "lsr_" in name}

    def output(*values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(given, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(
        output, [value.requires_grad_() for value in given.values()], fast_mode=True
    )


@pytest.mark.parametrize("option", [{"lsr_dropout": 0.1}, {"use_dora": True}])
def test_options_that_need_an_input_are_refused_for_parameters(option):
    config = LsrConfig(target_parameters=["experts.up"], target_modules=[], r=2, **option)
    with pytest.raises(UnsupportedLayerError, match=next(iter(option))):
        get_peft_model(nn.ModuleDict({"experts": Experts(False)}), config)


def test_mixed_batches_are_refused_for_parameters():
    config = LsrConfig(target_parameters=["experts.up"], target_modules=[], r=2)
    model = get_peft_model(nn.ModuleDict({"experts": Experts(False)}), config)
    with pytest.raises(ValueError, match="does not support mixed adapter batches"):
        model.base_model.model["experts"](torch.randn(3, 4, 6), adapter_names=["default"] * 3)


def test_adapters_of_other_parameters_are_refused_beside_those_that_are_there():
    config = LsrConfig(target_parameters=["experts.up"], target_modules=[], r=2)
    model = get_peft_model(nn.ModuleDict({"experts": Experts(False)}), config)
    model.add_adapter("alike", config)
    other = LsrConfig(target_parameters=["experts.down"], target_modules=[], r=2)
    with pytest.raises(ValueError, match=r"got \['experts.down'\] .* \['experts.up'\] for adapter"):
        model.add_adapter("other", other)


def half_precision(ratio: float, dtype: torch.dtype = torch.bfloat16) -> PeftModel:
    """A model of 16-bit weights and an adapter whose ΔW is ``ratio`` times as large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.Linear(48, 32)).to(dtype)
    peft = get_peft_model(model, LsrConfig(target_modules=["0", "1"], r=4, init_weights=False))
    with torch.no_grad():
        for layer in peft.base_model.model:
            size = layer.delta_matrix("default").norm() / layer.weight.float().norm()
            layer.lsr_B["default"].factor_1.mul_(ratio / size)
    return peft


def base_weights(model: PeftModel) -> list[torch.Tensor]:
    return [layer.get_base_layer().weight.clone() for layer in model.base_model.model]


@pytest.mark.parametrize(
    ("ratio", "least", "most"), [(1e-1, 0.99, 1.01), (2e-3, 0.6, 0.95), (1e-4, 0.0, 0.2)]
)
def test_a_merge_into_bfloat16_says_what_survived(ratio, least, most):
    model = half_precision(ratio)
    before = base_weights(model)
    model.merge_adapter(min_share=0.0)
    shares = model.base_model.merge_shares
    assert shares.keys() == {"0", "1"}
    for layer, weight, share in zip(model.base_model.model, before, shares.values(), strict=True):
        assert least <= share["default"] <= most
        update = layer.delta_matrix("default")
        change = layer.get_base_layer().weight.float() - weight.float()
        survived = float((change * update).sum() / update.square().sum())
        assert share["default"] == pytest.approx(survived, rel=1e-4)


def test_a_merge_into_bfloat16_that_loses_most_is_refused_and_changes_nothing():
    model = half_precision(1e-4)
    before = base_weights(model)
    lost = r"^0: only \d+% of the update of adapter default would survive in bfloat16"
    with pytest.raises(MergeError, match=lost):
        model.merge_adapter()
    with pytest.raises(MergeError, match="less than the 50% asked for"):
        model.merge_and_unload()
    assert all(map(torch.equal, base_weights(model), before))


@pytest.mark.parametrize("min_share", [None, 0.0])
def test_an_adapter_that_is_not_finite_is_called_so_and_not_lost_to_rounding(min_share):
    model = half_precision(1e-1)
    before = base_weights(model)
    model.base_model.model[0].lsr_A["default"].factor_1.data[0, 0, 0] = float("nan")
    with pytest.raises(MergeError, match=r"^0: NaNs detected .* adapter default seems to be"):
        model.merge_adapter(min_share=min_share)
    assert all(map(torch.equal, base_weights(model), before))


def test_a_merge_into_float32_loses_nothing():
    model = half_precision(1e-4, torch.float32)
    model.merge_adapter()
    assert all(share["default"] > 0.99 for share in model.base_model.merge_shares.values())


def test_compilation_gives_one_graph_and_no_recompiles():
    torch.manual_seed(0)
    torch._dynamo.reset()
    config = LsrConfig(target_modules=["0", "2"], r=4, separation_rank=2, init_weights=False)
    model = get_peft_model(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 6)), config)
    x = torch.randn(5, 12)
    expected = model(x)
    graphs = CompileCounter()
    compiled = torch.compile(model, backend=graphs, fullgraph=True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    torch.testing.assert_close(compiled(x), expected)
    for _ in range(3):
        optimizer.zero_grad()
        compiled(x).square().sum().backward()
        optimizer.step()
        torch.testing.assert_close(compiled(x), model(x))
    assert graphs.frame_count == 1


def test_mixed_batches_compile_once_around_the_hooks_that_name_adapters():
    """The names reach the layers through hooks set within the call, as for PEFT's LoRA.

    So the pass is not compiled into one graph.
    """
    torch.manual_seed(0)
    torch._dynamo.reset()
    config = LsrConfig(target_modules=["0", "2"], r=4, separation_rank=2, init_weights=False)
    model = get_peft_model(
        nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 6)), config, adapter_name="x"
    )
    model.add_adapter("y", config)
    model.eval()
    graphs = CompileCounter()
    compiled = torch.compile(model, backend=graphs)
    x, names = torch.randn(5, 12), ["x", "y", "__base__", "y", "x"]
    seen = []
    for order in (names, names, names[::-1]):
        torch.testing.assert_close(compiled(x, adapter_names=order), model(x, adapter_names=order))
        seen.append(graphs.frame_count)
    assert seen[0] == seen[1] == seen[2] > 0


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(use_reentrant):
    rows = torch.randint(0, 30, (2, 5), generator=torch.Generator().manual_seed(0))
    gradients = []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        model = get_peft_model(
            tiny_llama(), LsrConfig(target_modules=["q_proj", "down_proj"], r=4, init_weights=False)
        )
        model.train()
        if checkpointing:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        model(rows, labels=rows).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        assert gradient.any(), name
        torch.testing.assert_close(gradients[1][name], gradient)


def test_trainable_tokens_beside_an_adapter(tmp_path):
    config = LsrConfig(
        target_modules=["q_proj"], r=4, init_weights=False, trainable_token_indices=[3, 7]
    )
    rows = torch.tensor([[3, 7, 9]])
    model = get_peft_model(tiny_llama(), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(1.0)
        expected = model(rows).logits
        model.save_pretrained(tmp_path)
        torch.testing.assert_close(
            PeftModel.from_pretrained(tiny_llama(), tmp_path).eval()(rows).logits, expected
        )
        assert relative(model.merge_and_unload()(rows).logits, expected) < 1e-5


@pytest.mark.parametrize(
    ("tied", "named"), [(False, ["embed_tokens", "lm_head"]), (True, ["embed_tokens"])]
)
def test_trained_token_rows_of_a_lora_come_along(tied, named, tmp_path):
    indices = {name: [3, 7] for name in named}
    config = LoraConfig(
        target_modules=["q_proj"], r=4, init_lora_weights=False, trainable_token_indices=indices
    )
    rows = torch.tensor([[3, 7, 9]])
    model = get_peft_model(tiny_llama(tie_word_embeddings=tied), config).eval()
    with torch.no_grad():
        bare = model(rows).logits
        for name, parameter in model.named_parameters():
            if "trainable_tokens_delta" in name:
                parameter.add_(1.0)
        expected = model(rows).logits
    assert relative(bare, expected) > 0.1
    model.save_pretrained(tmp_path / "lora")
    compress(tmp_path / "lora", rtol=1e-6).save(tmp_path / "lsr")
    opened = PeftModel.from_pretrained(
        tiny_llama(tie_word_embeddings=tied), tmp_path / "lsr"
    ).eval()
    assert relative(opened(rows).logits, expected) < 1e-5


def test_beam_search_gives_the_encoder_the_names_unrepeated():
    torch.manual_seed(0)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    base = T5ForConditionalGeneration(T5Config(vocab_size=30, decoder_start_token_id=0, **sizes))
    model = get_peft_model(
        base, LsrConfig(target_modules=["q", "v"], r=4, init_weights=False), adapter_name="a"
    )
    model.add_adapter(
        "b", LsrConfig(target_modules=["q", "v"], r=4, init_weights=False, lsr_alpha=64)
    )
    model.eval()
    rows = torch.randint(2, 30, (2, 6), generator=torch.Generator().manual_seed(0))
    options = {"num_beams": 3, "max_new_tokens": 4, "min_new_tokens": 4}
    mixed = model.generate(input_ids=rows, adapter_names=["a", "b"], **options)
    for index, name in enumerate("ab"):
        model.set_adapter(name)
        assert torch.equal(
            mixed[index], model.generate(input_ids=rows[index : index + 1], **options)[0]
        )


def test_the_share_of_an_update_that_rounding_left():
    update, before = (
        torch.randn(64, 48, dtype=torch.float64),
        torch.randn(64, 48, dtype=torch.float64),
    )
    assert surviving_share(before, before + update, update) == pytest.approx(1)
    assert surviving_share(before, before + 0.25 * update, update) == pytest.approx(0.25)
    assert surviving_share(before, before, update) == 0
    assert surviving_share(before, before, 0 * update) == 1
