"""transformers' own ways to open an adapter, without `PeftModel`, open packed LSR directories."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.integrations.peft import PeftAdapterMixin

import lsrdecomp as lsr
import lsrdecomp.lora.peft
from lsrdecomp.lora.peft import transformers_loading
from lsrdecomp.lora.peft.transformers_loading import plain_transformers, teach_transformers

SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
TOKENS = torch.arange(6)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, a LoRA of it of which a compression drops a layer, and that compression."""
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(
        LlamaConfig(**SIZES, num_attention_heads=2, num_key_value_heads=2)
    )
    base.save_pretrained(folder / "base")
    settings = {
        "target_modules": ["q_proj", "v_proj"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
    }
    model = get_peft_model(base, LoraConfig(r=4, **settings))
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_B.default.weight.data *= 1e-3
    model.peft_config["default"].base_model_name_or_path = str(folder / "base")
    model.save_pretrained(folder / "lora")
    lsr.compress(folder / "lora", ratio=4).save(folder / "small")
    return folder


@torch.no_grad()
def logits(model):
    return model.eval()(TOKENS).logits


def fresh(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "base")


@pytest.mark.parametrize("kind", ["small", "lora"])
def test_every_way_opens_the_same(folder, kind):
    expected = logits(PeftModel.from_pretrained(fresh(folder), folder / kind))
    assert (expected - logits(fresh(folder))).abs().max() > 0.01
    model = fresh(folder)
    model.load_adapter(str(folder / kind))
    assert torch.equal(logits(model), expected)
    named = fresh(folder)
    report = named.load_adapter(str(folder / kind), "style")
    assert torch.equal(logits(named), expected)
    assert not report.missing_keys
    assert not report.unexpected_keys
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder / kind)), expected)


def test_a_packed_directory_in_a_subfolder_and_to_be_trained(folder):
    model = fresh(folder)
    model.load_adapter(str(folder), adapter_kwargs={"subfolder": "small"}, is_trainable=True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert (
        sum(parameter.numel() for parameter in trained)
        == lsr.open_checkpoint(folder / "small").adapter_parameters
    )
    assert torch.equal(
        logits(model), logits(PeftModel.from_pretrained(fresh(folder), folder / "small"))
    )


def test_what_is_no_adapter_is_refused_as_before(folder, tmp_path):
    with pytest.raises(ValueError, match="adapter model file not found"):
        fresh(folder).load_adapter(str(tmp_path))


def test_teaching_twice_changes_nothing():
    before = PeftAdapterMixin.load_adapter
    teach_transformers()
    assert PeftAdapterMixin.load_adapter is before


def test_a_context_and_a_variable_leave_transformers_alone(folder, monkeypatch):
    asked = []
    read = transformers_loading._lsr_arguments
    monkeypatch.setattr(
        transformers_loading, "_lsr_arguments", lambda call: asked.append(call) or read(call)
    )
    with plain_transformers():
        fresh(folder).load_adapter(str(folder / "lora"))
    assert asked == []
    fresh(folder).load_adapter(str(folder / "small"))
    assert len(asked) == 1
    own = PeftAdapterMixin.load_adapter
    while hasattr(own, "__wrapped__"):
        own = own.__wrapped__
    monkeypatch.setattr(PeftAdapterMixin, "load_adapter", own)
    monkeypatch.setenv("LSRDECOMP_TRANSFORMERS", "0")
    assert teach_transformers() is False
    assert PeftAdapterMixin.load_adapter is own


def test_it_is_done_once_also_below_another_library_s_wrapper(monkeypatch):
    import functools

    ours = PeftAdapterMixin.load_adapter

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    monkeypatch.setattr(PeftAdapterMixin, "load_adapter", theirs)
    assert teach_transformers() is True
    assert PeftAdapterMixin.load_adapter is theirs


def test_what_a_call_says_of_downloads_goes_before_what_it_has_in_its_configuration():
    arguments = {"adapter_kwargs": {"revision": "main", "subfolder": "a"}}
    options = transformers_loading._download_options(arguments)
    assert "local_files_only" not in options
    alone = transformers_loading._download_options({**arguments, "local_files_only": True})
    assert alone == {**options, "local_files_only": True}
