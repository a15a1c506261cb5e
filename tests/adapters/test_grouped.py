"""A whole model's sums formed at once: the numbers of layer-by-layer expansion, however the model is used."""

from __future__ import annotations

import copy
import io
from collections import Counter

import pytest
import torch
from adapters_support import tiny_bert, token_batch
from peft import PeftModel, get_peft_model
from tiny_language_model import tiny_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lsrdecomp.adapters import LsrConfig, LsrLayer
from lsrdecomp.adapters.kernels import grouped, grouping
from lsrdecomp.adapters.model import ATTRIBUTE

LINEAR = ["query", "value", "dense"]
SETTINGS = {
    "linear layers": {"target_modules": LINEAR},
    "dropout": {"target_modules": LINEAR, "lsr_dropout": 0.3},
    "three factors": {"target_modules": LINEAR, "order": 3, "r": 8},
    "DoRA": {"target_modules": LINEAR, "use_dora": True},
    "embedding too": {"target_modules": ["word_embeddings", "query"]},
    "ranks that differ": {"target_modules": LINEAR, "rank_pattern": {"query": 6}, "separation_rank": [3, 1]},
}


def adapted(dtype: torch.dtype = torch.float64, **settings) -> PeftModel:
    """A small BERT with an adapter whose factors are all random, in training mode."""
    torch.manual_seed(0)
    settings = {"r": 4, "separation_rank": 2, "init_weights": False, "target_modules": LINEAR, **settings}
    return get_peft_model(tiny_bert(), LsrConfig(**settings)).to(dtype).train()


def results(model: PeftModel, **given) -> dict[str, Tensor]:
    """Logits and gradients of one pass over enough tokens for the fused node to be chosen."""
    torch.manual_seed(1)
    model.zero_grad()
    logits = model(**token_batch(rows=8), **given).logits
    logits.square().sum().backward()
    return {"logits": logits, **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float = 1e-12) -> None:
    assert ours.keys() == theirs.keys()
    assert len(ours) > 4
    for name, exact in theirs.items():
        assert exact.any(), name
        assert (ours[name] - exact).norm() <= bound * exact.norm(), name


def apart(model: PeftModel) -> PeftModel:
    """The same model with every layer forming its own."""
    twin = copy.deepcopy(model)
    vars(twin.base_model.model)[ATTRIBUTE].__exit__()
    return twin


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_outputs_and_gradients_are_those_of_separate_layers(settings):
    model = adapted(**settings)
    assert_equal(results(model), results(apart(model)))


def test_float32_agrees_as_far_as_it_can():
    model = adapted(torch.float32)
    assert_equal(results(model), results(apart(model)), 1e-6)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_layers_read_what_their_pass_formed(use_reentrant, monkeypatch):
    model = adapted()
    expected = results(apart(model))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    assert_equal(results(model), expected)
    loss = model(**token_batch(rows=8)).logits.square().sum()
    monkeypatch.setattr(grouping, "expand_all", None)
    loss.backward()


def test_adapters_switched_off_between_forward_and_backward(monkeypatch):
    model = adapted()
    expected = results(apart(model))
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(1)
    model.zero_grad()
    logits = model(**token_batch(rows=8)).logits
    with torch.no_grad(), model.disable_adapter():  # the reference pass of preference training
        reference = model(**token_batch(rows=8)).logits
    assert (reference - logits).norm() > 0.01 * logits.norm()
    monkeypatch.setattr(grouping, "expand_all", None)
    logits.square().sum().backward()
    assert_equal({"logits": logits, **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}, expected)


def test_two_active_adapters():
    model = adapted()
    model.add_adapter("second", LsrConfig(r=2, separation_rank=3, init_weights=False, target_modules=LINEAR))
    model = model.double()
    model.base_model.set_adapter(["default", "second"])
    ours = results(model)
    assert any(".second." in name for name in ours)
    assert_equal(ours, results(apart(model)))


class Launches(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_launches_do_not_grow_with_the_layers():
    counts = []
    for targets in (["query"], ["query", "key", "value"]):
        model = adapted(target_modules=targets)
        with Launches() as launches:
            results(model)
        counts.append({name: launches.counts[name] for name in ("stack", "bmm")})
    base = tiny_bert().double()
    with Launches() as launches:
        base(**token_batch(rows=8)).logits.square().sum().backward()
    assert counts[0]["stack"] == counts[1]["stack"] == 3
    assert counts[0]["bmm"] == counts[1]["bmm"] == launches.counts["bmm"] + 3  # once forward, twice backward


def test_a_change_that_pytorch_does_not_count_is_seen():
    model = adapted().eval()
    with torch.no_grad():
        for change in (1.0, 2.0):
            for name, parameter in model.named_parameters():
                if "lsr_B.default.factor_1" in name:
                    parameter.data.mul_(change)
            ours, theirs = (each(**token_batch()).logits for each in (model, apart(model)))
            assert (ours - theirs).norm() <= 1e-12 * theirs.norm()


def test_nothing_is_formed_for_adapters_that_are_off_or_merged(monkeypatch):
    model = adapted().eval()
    monkeypatch.setattr(grouping, "expand_all", None)
    with model.disable_adapter():
        model(**token_batch())
    monkeypatch.undo()
    model.merge_adapter()
    monkeypatch.setattr(grouping, "expand_all", None)
    model(**token_batch())


def test_the_state_dict_and_the_modules_are_those_of_before():
    model = adapted()
    keys = list(model.state_dict())
    results(model)
    assert list(model.state_dict()) == keys
    assert not any("grouping" in name or "expansion" in name for name in keys)


@pytest.mark.parametrize("after_a_pass", [False, True])
def test_copies_and_pickles_group_for_themselves(after_a_pass):
    model = adapted()
    expected = results(model) if after_a_pass else results(apart(model))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        base = twin.base_model.model
        own = vars(base)[ATTRIBUTE]
        assert own is not vars(model.base_model.model)[ATTRIBUTE]
        assert own.layers == [module for module in base.modules() if isinstance(module, LsrLayer)]
        assert_equal(results(twin), expected)
        assert len(base._forward_pre_hooks) == len(base._forward_hooks) == 1
        vars(base).pop(ATTRIBUTE).__exit__()
        assert not base._forward_pre_hooks
        assert not base._forward_hooks


def test_an_answer_is_generated_from_pairs_formed_once(monkeypatch):
    config = LsrConfig(target_modules=["q_proj"], r=4, init_weights=False)
    model = get_peft_model(tiny_model(), config).eval()
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "return_dict_in_generate": True, "output_logits": True}
    calls = []
    form = grouping.Grouping.form
    monkeypatch.setattr(grouping.Grouping, "form", lambda self: calls.append(self) or form(self))
    first = model.generate(input_ids=torch.tensor([[3, 7, 9]]), **options)
    assert len(calls) == 1
    assert not vars(model.base_model.model)[ATTRIBUTE].formed
    factor = model.base_model.model.model.layers[0].self_attn.q_proj.lsr_A["default"].factors[0]
    factor.data.mul_(2)  # seen by the next answer, though PyTorch does not count it
    second = model.generate(input_ids=torch.tensor([[3, 7, 9]]), **options)
    assert (second.logits[0] - first.logits[0]).abs().max() > 1e-6


def test_a_merged_model_is_bare():
    merged = adapted().merge_and_unload()
    assert not merged._forward_pre_hooks
    assert not merged._forward_hooks
    assert ATTRIBUTE not in vars(merged)


def test_a_second_adapter_adds_no_second_hook(tmp_path):
    adapted().save_pretrained(tmp_path)
    model = tiny_bert()
    model.load_adapter(str(tmp_path), adapter_name="a")
    model.load_adapter(str(tmp_path), adapter_name="b")
    assert len(model._forward_pre_hooks) == 1


def test_a_functional_call_uses_the_parameters_it_was_given():
    model = adapted().eval()
    base = model.base_model.model
    doubled = {n: 2 * p.detach() for n, p in base.named_parameters() if "lsr_B.default.factor_1" in n}
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


@pytest.mark.parametrize("autocast", [False, True])
def test_lone_adapters_are_formed_in_the_precision_of_their_layer(autocast):
    model = adapted(torch.float32)
    if not autocast:
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
                module.bfloat16()
    seen = []
    layer = next(module for module in model.modules() if isinstance(module, LsrLayer))
    layer.register_forward_hook(lambda module, *_: seen.append(module.lsr_A["default"].matrix().dtype))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours, theirs = results(model), results(apart(model))
    assert seen[0] == (torch.float32 if autocast else torch.bfloat16)
    assert all(p.grad.dtype == torch.float32 for name, p in model.named_parameters() if "lsr_" in name)
    assert_equal(ours, theirs, 3e-2)


@pytest.fixture
def one_process(tmp_path):
    """A process group of this process alone."""
    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        pytest.skip("this build of torch has no gloo")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_gradients_reach_distributed_data_parallel():
    model = adapted()
    expected = results(apart(model))
    parallel = nn.parallel.DistributedDataParallel(model)
    for _ in range(2):  # the reducer rebuilds its buckets after the first pass
        ours = results(parallel)
    assert_equal({name.removeprefix("module."): value for name, value in ours.items()}, expected)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("nested", [False, True])
def test_sharded_models_group_what_is_gathered_and_leave_the_rest(nested):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = adapted(), init_device_mesh("cpu", (1,))
    expected = results(apart(model))
    for layer in model.base_model.model.bert.encoder.layer if nested else ():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ours = results(model)
    assert_equal({n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in ours.items()}, expected)


def several() -> PeftModel:
    """Three adapters of different ranks, the third on fewer layers."""
    model = adapted()
    model.add_adapter("b", LsrConfig(r=2, separation_rank=3, init_weights=False, target_modules=LINEAR))
    model.add_adapter("c", LsrConfig(r=4, separation_rank=2, init_weights=False, target_modules=["query"]))
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


def test_groups_of_a_large_model_are_cut(monkeypatch):
    model = adapted()
    expected = results(model)
    monkeypatch.setattr(grouped, "LARGEST_GROUP", 200)
    calls = []
    apply = grouped._ExpandGroup.apply
    monkeypatch.setattr(grouped._ExpandGroup, "apply", lambda *given: calls.append(len(given)) or apply(*given))
    assert_equal(results(model), expected)
    assert len(calls) > 5
