"""Hooks of others that bring parameters for the time of a call alone; LoRA is the control."""

import warnings

import processes
import pytest
import torch
from accelerate import cpu_offload, disk_offload
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.nn.utils import parametrize
from transformers import LlamaConfig, LlamaForCausalLM

from lsrdecomp.errors import CheckpointError, UnsupportedLayerError
from lsrdecomp.lora.peft import DirectConfig, KronAConfig, LsrConfig

LAYERS = ["q_proj", "v_proj", "up_proj"]
METHODS = {
    "LoRA": LoraConfig(r=4, target_modules=LAYERS),
    "LSR": LsrConfig(target_modules=LAYERS),
    "LSR of three factors": LsrConfig(inner_shape=[2, 2, 1], target_modules=LAYERS),
    "LSR in an embedding": LsrConfig(target_modules=[*LAYERS, "embed_tokens"]),
    "direct of three factors": DirectConfig(order=3, target_modules=LAYERS),
    "KronA": KronAConfig(target_modules=LAYERS),
}
IDS = torch.arange(24).reshape(2, 12) % 97
PREFIXES = ("lora_", "lsr_", "dlsr_", "krona_")


def base():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    return LlamaForCausalLM(config).eval()


def adapted(config):
    """A model whose adapter acts."""
    model = get_peft_model(base(), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(prefix in name for prefix in PREFIXES):
                parameter.normal_(std=0.3)
    return model.eval()


@torch.no_grad()
def logits(model):
    return model(IDS).logits


def assert_same(found, expected):
    """Equal but for rounding: kernels of a processor may depend on where in memory numbers lie."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.fixture(params=METHODS.values(), ids=METHODS)
def config(request):
    return request.param


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_an_offloaded_model_answers_alike(config, offload, tmp_path):
    model = adapted(config)
    expected = logits(model)
    if offload == "cpu":
        model = cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        model = disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    assert any(parameter.is_meta for parameter in model.parameters())
    assert_same(logits(model), expected)
    assert_same(logits(model), expected)


def test_an_adapter_is_loaded_onto_a_base_with_a_layer_on_disk(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # PEFT copies what lies on disk below the working directory
    model = adapted(config)
    expected = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    base().save_pretrained(tmp_path / "base")
    places = dict.fromkeys(
        ("model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head"), "cpu"
    )
    places["model.layers.1"] = "disk"
    split = LlamaForCausalLM.from_pretrained(
        tmp_path / "base", device_map=places, offload_folder=str(tmp_path / "of_base")
    )
    with warnings.catch_warnings(action="ignore"):  # of numbers that are on disk and not copied
        again = PeftModel.from_pretrained(
            split,
            tmp_path / "adapter",
            device_map={f"base_model.model.{name}": place for name, place in places.items()},
            offload_folder=str(tmp_path / "of_adapter"),
        )
    assert_same(logits(again.eval()), expected)


def free_outside_of_calls(model):
    """Take numbers away as ZeRO-3 does, which gives them back around the call of their module."""
    held = {}

    def give(module, _):
        for parameter in module.parameters(recurse=False):
            parameter.data = held[parameter]

    def take(module, *_):
        for parameter in module.parameters(recurse=False):
            parameter.data = torch.empty(0, dtype=parameter.dtype)

    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            held.setdefault(parameter, parameter.data)
        module.register_forward_pre_hook(give)
        module.register_forward_hook(take)
        take(module)


def test_parameters_that_are_gathered_for_a_call_alone(config):
    model = adapted(config)
    expected = logits(model)
    free_outside_of_calls(model)
    assert_same(logits(model), expected)


class Doubled(nn.Module):
    def forward(self, original):
        return 2.0 * original


def test_a_parametrized_factor_is_what_the_parametrization_says(config):
    model = adapted(config)
    twin = adapted(config)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            if any(prefix in name for prefix in PREFIXES):
                parameter.mul_(2.0)
    for name, module in list(model.named_modules()):
        if any(prefix in name for prefix in PREFIXES):
            for own, _ in list(module.named_parameters(recurse=False)):
                parametrize.register_parametrization(module, own, Doubled())
    assert_same(logits(model), logits(twin))


@pytest.fixture
def one_process(tmp_path):
    """A group of one process, which shards and gathers nevertheless."""
    store = tmp_path / "store"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_fully_sharded_models_answer_and_learn_alike(config):
    from torch.distributed.fsdp import fully_shard

    def gradients(model):
        model(IDS, labels=IDS).loss.backward()
        trained = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        return {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in trained.items()}

    model, twin = adapted(config), adapted(config)
    expected, expected_gradients = logits(twin), gradients(twin)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    assert_same(logits(model), expected)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, expected_gradients[name], rtol=1e-5, atol=1e-7)


def learn_in_flat_shards(rank, size, place):
    """Write what a rank's models answer before and after a step, sharded as FSDP's first version.

    The parameters of a layer are one flat tensor there, which is gathered for its call alone.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{place / 'store'}", rank=rank, world_size=size
    )
    answers = {}
    for name, config in METHODS.items():
        model = adapted(config)
        layers = model.base_model.model.model.layers
        for index, layer in enumerate(layers):
            layers[index] = FullyShardedDataParallel(
                layer, use_orig_params=True, device_id=torch.device("cpu")
            )
        answers[name] = logits(model), after_a_step(model)
    torch.save(answers, place / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def after_a_step(model):
    """Return the logits after one step of the layers' adapters."""
    trained = [p for n, p in model.named_parameters() if p.requires_grad and "embed" not in n]
    optimizer = torch.optim.SGD(trained, lr=1e-2)
    model(IDS, labels=IDS).loss.backward()
    optimizer.step()
    return logits(model)


@pytest.fixture(scope="module")
def in_flat_shards(tmp_path_factory):
    """What each of two processes answered, by method."""
    place = tmp_path_factory.mktemp("flat")
    others = [processes.start_process(learn_in_flat_shards, rank, 2, place) for rank in (0, 1)]
    for other in others:
        other.join()
        assert other.exitcode == 0
    return [torch.load(place / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.parametrize("name", METHODS)
def test_models_in_flat_shards_answer_and_learn_alike(in_flat_shards, name):
    twin = adapted(METHODS[name])
    expected = logits(twin), after_a_step(twin)
    for answers in in_flat_shards:
        before, after = answers[name]
        assert_same(before, expected[0])
        torch.testing.assert_close(after, expected[1], rtol=1e-5, atol=1e-5)


def test_dora_on_offloaded_weights_is_refused_in_words():
    model = adapted(LsrConfig(target_modules=LAYERS, use_dora=True))
    model = cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(UnsupportedLayerError, match="which are offloaded: merge the adapter"):
        logits(model)


class Router(nn.Linear):
    """A linear layer that returns two tensors, as Llama 4's router does."""

    def forward(self, x):
        scores = super().forward(x)
        return scores.softmax(-1), scores


def test_a_layer_that_returns_a_tuple_is_named():
    model = get_peft_model(
        nn.Sequential(Router(64, 64)), LsrConfig(target_modules=["0"], inner_shape=[2, 2])
    )
    with pytest.raises(UnsupportedLayerError, match="Router returns a tuple.*exclude_modules"):
        model(torch.ones(1, 64))


def test_an_adapter_of_another_model_is_not_loaded_as_zeros(tmp_path):
    torch.manual_seed(0)
    one, other = (
        nn.Sequential(nn.ModuleDict({name: nn.Linear(64, 64)})) for name in ("first", "second")
    )
    config = LsrConfig(target_modules=["first", "second"])
    get_peft_model(one, config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="none of the 4 tensors .* made for another base"):
        PeftModel.from_pretrained(other, tmp_path)


def test_the_config_of_another_method_is_read_as_what_it_is(tmp_path):
    adapted(METHODS["LoRA"]).save_pretrained(tmp_path)
    assert LsrConfig.from_pretrained(str(tmp_path)).peft_type == "LORA"
