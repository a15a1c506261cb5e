"""LSR layers inside a whole model: the numbers of its formed ΔW, however the model is used."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from adapters_support import tiny_bert, token_batch
from peft import PeftModel, get_peft_model
from tiny_language_model import tiny_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.lora.peft import LsrConfig, LsrLayer, factors
from lsrdecomp.lora.peft.geometry import LinearGeometry
from lsrdecomp.lora.peft.kernels import expand

LINEAR = ["query", "value", "dense"]
SETTINGS = {
    "linear layers": {"target_modules": LINEAR},
    "dropout": {"target_modules": LINEAR, "lsr_dropout": 0.3},
    "three factors": {"target_modules": LINEAR, "order": 3, "r": 8},
    "DoRA": {"target_modules": LINEAR, "use_dora": True},
    "embedding too": {"target_modules": ["word_embeddings", "query"]},
    "ranks that differ": {
        "target_modules": LINEAR,
        "rank_pattern": {"query": 6},
        "separation_rank": [3, 1],
    },
}


def adapted(dtype: torch.dtype = torch.float64, **settings) -> PeftModel:
    """A small BERT with an adapter whose factors are all random, in training mode."""
    torch.manual_seed(0)
    settings = {
        "r": 4,
        "separation_rank": 2,
        "init_weights": False,
        "target_modules": LINEAR,
        **settings,
    }
    return get_peft_model(tiny_bert(), LsrConfig(**settings)).to(dtype).train()


def results(model: PeftModel, **given) -> dict[str, Tensor]:
    """Logits and gradients of one pass."""
    torch.manual_seed(1)
    model.zero_grad()
    logits = model(**token_batch(rows=8), **given).logits
    logits.square().sum().backward()
    return {
        "logits": logits,
        **{name: p.grad for name, p in model.named_parameters() if p.grad is not None},
    }


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float = 1e-12) -> None:
    assert ours.keys() == theirs.keys()
    assert len(ours) > 4
    for name, exact in theirs.items():
        assert exact.any(), name
        assert (ours[name] - exact).norm() <= bound * exact.norm(), name


def dense(model: PeftModel) -> PeftModel:
    """The same model with every linear layer multiplying by its formed ΔW."""
    twin = copy.deepcopy(model)

    def product(layer: LsrLayer, adapter: str, x: Tensor) -> Tensor:
        return layer.geometry.matrix_output(
            layer.lsr_dropout[adapter](x), layer.delta_matrix(adapter)
        )

    for layer in twin.modules():
        # An embedding's gradient at the padding token is that of its second half alone.
        if isinstance(layer, LsrLayer) and isinstance(layer.geometry, LinearGeometry):
            layer.delta_output = partial(product, layer)
    return twin


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_outputs_and_gradients_are_those_of_the_formed_matrix(settings):
    model = adapted(**settings)
    assert_equal(results(model), results(dense(model)))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_and_adapters_switched_off_between_forward_and_backward(use_reentrant):
    model = adapted()
    expected = results(dense(model))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    torch.manual_seed(1)
    model.zero_grad()
    logits = model(**token_batch(rows=8)).logits
    if not use_reentrant:  # a reentrant checkpoint would run again without the adapters
        with torch.no_grad(), model.disable_adapter():  # the reference pass of preference training
            reference = model(**token_batch(rows=8)).logits
        assert (reference - logits).norm() > 0.01 * logits.norm()
    logits.square().sum().backward()
    assert_equal(
        {
            "logits": logits,
            **{n: p.grad for n, p in model.named_parameters() if p.grad is not None},
        },
        expected,
    )


def test_an_answer_is_generated_from_pairs_formed_once(monkeypatch):
    config = LsrConfig(target_modules=["q_proj"], r=4, init_weights=False)
    model = get_peft_model(tiny_model(), config).eval()
    options = {
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    layers = sum(isinstance(module, LsrLayer) for module in model.modules())
    calls = []
    monkeypatch.setattr(factors, "expand", lambda sums: calls.append(sums) or expand(sums))
    first = model.generate(input_ids=torch.tensor([[3, 7, 9]]), **options)
    assert len(calls) == 2 * layers
    factor = model.base_model.model.model.layers[0].self_attn.q_proj.lsr_A["default"].factors[0]
    factor.data.mul_(2)  # seen by the next answer, though PyTorch does not count it
    second = model.generate(input_ids=torch.tensor([[3, 7, 9]]), **options)
    assert (second.logits[0] - first.logits[0]).abs().max() > 1e-6


def count_formed(monkeypatch) -> list[object]:
    """A list that grows by one whenever a sum of Kronecker products is formed."""
    calls = []
    monkeypatch.setattr(factors, "expand", lambda sums: calls.append(sums) or expand(sums))
    return calls


@torch.no_grad()
def test_on_a_cpu_passes_of_a_peft_model_form_pairs_again_only_when_numbers_changed(monkeypatch):
    model = adapted().eval()
    calls = count_formed(monkeypatch)
    first = model(**token_batch()).logits
    formed = len(calls)
    assert torch.equal(model(**token_batch()).logits, first)
    assert (formed > 0, len(calls)) == (True, formed)
    # A change of `.data`, which PyTorch does not count.
    next(p for n, p in model.named_parameters() if "lsr_B" in n).data.add_(1.0)
    assert not torch.equal(model(**token_batch()).logits, first)
    assert len(calls) == formed + 1


@torch.no_grad()
def test_a_decoding_loop_within_formed_once_forms_each_pair_once(monkeypatch):
    """On a GPU no pass may wait for a comparison, so that nothing but `formed_once` remembers."""
    monkeypatch.setattr(factors.FormedSum, "is_of", lambda *_: False)
    model = adapted().eval()
    calls = count_formed(monkeypatch)
    with factors.formed_once():
        model(**token_batch())
        formed = len(calls)
        model(**token_batch())
    assert (formed > 0, len(calls)) == (True, formed)
    model(**token_batch())
    assert len(calls) == 2 * formed


@torch.no_grad()
def test_a_copied_or_pickled_layer_holds_no_formed_matrix():
    sums = next(
        module for module in adapted().modules() if isinstance(module, factors.KroneckerFactors)
    )
    size = len(pickle.dumps(sums))
    matrix = sums()
    assert len(pickle.dumps(sums)) == size
    for copied in (copy.deepcopy(sums), pickle.loads(pickle.dumps(sums))):
        assert copied._last_formed is None
        assert torch.equal(copied(), matrix)
    assert sums() is matrix


def test_what_is_formed_without_a_graph_is_not_used_where_gradients_are_wanted():
    sums = next(
        module for module in adapted().modules() if isinstance(module, factors.KroneckerFactors)
    )
    with factors.formed_once():
        with torch.no_grad():
            assert sums() is sums()
        assert sums().requires_grad


@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_layers_have_gradients_in_float32(autocast):
    model = adapted(torch.float32)
    if not autocast:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                module.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results(model)
    gradients = [parameter.grad for name, parameter in model.named_parameters() if "lsr_" in name]
    assert all(each.dtype == torch.float32 and each.any() for each in gradients)


CHANGES = {
    "counted by PyTorch": lambda sums: sums.factor_1.mul_(2),
    "not counted by PyTorch": lambda sums: sums.factor_1.data.mul_(2),
    "other storage": lambda sums: setattr(sums.factor_1, "data", sums.factor_1.data * 2),
    "loaded": lambda sums: sums.load_state_dict(
        {name: 2 * value for name, value in sums.state_dict().items()}
    ),
    "another precision": lambda sums: sums.float(),
    "NaN": lambda sums: sums.factor_1.data.fill_(torch.nan),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@torch.no_grad()
def test_a_matrix_formed_earlier_is_used_while_the_factors_hold_the_same_numbers(change):
    sums = next(
        module for module in adapted().modules() if isinstance(module, factors.KroneckerFactors)
    )
    twin = copy.deepcopy(sums)
    before = sums()
    assert sums() is before
    change(sums)
    after = sums()
    torch.testing.assert_close(after, expand(sums.factors), rtol=0, atol=0, equal_nan=True)
    assert after.dtype == sums.factor_1.dtype
    torch.testing.assert_close(twin(), before, rtol=0, atol=0)


@torch.no_grad()
def test_factors_without_numbers_are_not_compared():
    with FakeTensorMode():
        sums = factors.KroneckerFactors(KroneckerShape(((2, 3), (2, 3))), 2)
        assert [sums().shape for _ in range(2)] == [(4, 9)] * 2


def test_a_functional_call_uses_the_parameters_it_was_given():
    model = adapted().eval()
    base = model.base_model.model
    doubled = {
        n: 2 * p.detach() for n, p in base.named_parameters() if "lsr_B.default.factor_1" in n
    }
    with torch.no_grad():
        model(**token_batch())
        ours = torch.func.functional_call(base, doubled, kwargs=token_batch()).logits
    for name, parameter in base.named_parameters():
        if name in doubled:
            parameter.data.mul_(2)
    theirs = model(**token_batch()).logits
    assert (ours - theirs).norm() <= 1e-12 * theirs.norm()


def test_transforms_of_torch_func_pass_through():
    model = adapted().eval()
    base, inputs = model.base_model.model, token_batch(rows=8)
    name, factor = next((n, p) for n, p in base.named_parameters() if "lsr_A.default.factor_2" in n)

    def loss(value):
        return torch.func.functional_call(base, {name: value}, kwargs=inputs).logits.square().sum()

    ours = torch.func.grad(loss)(factor.detach())
    model(**inputs).logits.square().sum().backward()
    assert (ours - factor.grad).norm() <= 1e-12 * factor.grad.norm()


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_gradients_reach_distributed_data_parallel():
    model = adapted()
    expected = results(dense(model))
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # the reducer rebuilds its buckets after the first pass
        ours = results(parallel)
    assert_equal({name.removeprefix("module."): value for name, value in ours.items()}, expected)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("nested", [False, True])
def test_sharded_models_give_the_same(nested):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = adapted(), init_device_mesh("cpu", (1,))
    expected = results(dense(model))
    for layer in model.base_model.model.bert.encoder.layer if nested else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ours = results(model)
    assert_equal(
        {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in ours.items()}, expected
    )


def several() -> PeftModel:
    """Three adapters of different ranks, the third on fewer layers."""
    model = adapted()
    model.add_adapter(
        "b", LsrConfig(r=2, separation_rank=3, init_weights=False, target_modules=LINEAR)
    )
    model.add_adapter(
        "c", LsrConfig(r=4, separation_rank=2, init_weights=False, target_modules=["query"])
    )
    return model.double().eval()


NAMES = ["b", "default", "__base__", "c", "b"]


def test_rows_of_a_batch_name_their_adapters():
    model = several()
    batch = token_batch()
    with torch.no_grad():
        mixed = model(**batch, adapter_names=NAMES).logits
        for row, name in enumerate(NAMES):
            inputs = {key: value[row : row + 1] for key, value in batch.items()}
            if name == "__base__":
                with model.disable_adapter():
                    expected = model(**inputs).logits
            else:
                model.set_adapter(name)
                expected = model(**inputs).logits
            assert (mixed[row] - expected).norm() <= 1e-12 * expected.norm(), name


def test_rows_with_dora_still_name_their_adapters():
    model = adapted(use_dora=True)
    model.add_adapter("b", LsrConfig(r=2, init_weights=False, target_modules=LINEAR))
    model = model.double().eval()
    batch = token_batch(rows=2)
    with torch.no_grad():
        mixed = model(**batch, adapter_names=["default", "b"]).logits
        for row, name in enumerate(["default", "b"]):
            model.set_adapter(name)
            expected = model(**batch).logits[row]
            assert (mixed[row] - expected).norm() <= 1e-12 * expected.norm()
