"""Every method of PEFT: ΔW is what PEFT's own merge adds, or it is refused as what it is."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from peft.mapping import (  # noqa: E402
    PEFT_TYPE_TO_CONFIG_MAPPING,
    PEFT_TYPE_TO_TUNER_MAPPING,
)
from safetensors.torch import load_file, save_file  # noqa: E402
from tiny_bases import TEXTS, make_model, save_base  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

from lsrdecomp import compress  # noqa: E402
from lsrdecomp.cli.app import app  # noqa: E402
from lsrdecomp.errors import CheckpointError, NeedsBaseError, UnsupportedError  # noqa: E402
from lsrdecomp.lora.base import open_adapter, takes_base  # noqa: E402
from lsrdecomp.lora.base.merged_layers import layer_updates, low_rank_pair  # noqa: E402
from lsrdecomp.lora.compress import export_lora  # noqa: E402
from lsrdecomp.lora.files import open_checkpoint  # noqa: E402
from lsrdecomp.lora.files.readers.peft_methods import (  # noqa: E402
    METHODS_WITHOUT_UPDATE,
    SIZE_METHODS,
)
from lsrdecomp.lora.search import MeasuredSettings  # noqa: E402
from lsrdecomp.lora.search.layers import layer_pair  # noqa: E402

READ_ALONE = {"ADALORA", "C3A", "DELORA", "GRALORA", "LOHA", "LOKR", "LORA", "VBLORA"}
READ_ON_A_BASE = {
    *("ADAMSS", "BOFT", "DEFT", "FOURIERFT", "FROD", "GLORA", "HIRA", "HRA", "MISS", "OFT", "OSF"),
    *("PEANUT", "PSOFT", "PVERA", "RANDLORA", "ROAD", "SHIRA", "SUPERTUNING", "TINYLORA"),
    *("UNILORA", "VERA", "WAVEFT"),
}
SETTINGS = {
    "ADALORA": {"total_step": 10},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 16},
    "FOURIERFT": {"n_frequency": 50},
    "OFT": {"oft_block_size": 16, "r": 0},
    "RANDLORA": {"r": 4},
    "ROAD": {"group_size": 16},
    "SHIRA": {"r": 4},
    "UNILORA": {"theta_d_length": 32},
    "VBLORA": {"num_vectors": 16, "vector_length": 16, "topk": 2},
    "WAVEFT": {"n_frequency": 50},
}
"""What a config needs on matrices this small."""


def methods_of_peft():
    """Return the types in PEFT's registry, without those that this package adds."""
    return sorted(
        getattr(peft_type, "value", peft_type)
        for peft_type, tuner in PEFT_TYPE_TO_TUNER_MAPPING.items()
        if not tuner.__module__.startswith("lsrdecomp")
    )


def make_base():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, **sizes, **heads)
    return transformers.LlamaForCausalLM(config)


def write_adapter(model, out, peft_type, **settings):
    """Save an adapter of random numbers on some layers of a model."""
    config = PEFT_TYPE_TO_CONFIG_MAPPING[peft_type](**SETTINGS.get(peft_type, {}), **settings)
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    adapted.save_pretrained(str(out))
    return out


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("any") / "base"
    save_base(make_base(), folder)
    return folder


@pytest.fixture(scope="module")
def adapter_of(base):
    """Return the directory of an adapter of a method on q and v of the base."""
    written = {}

    def adapter(peft_type):
        if peft_type not in written:
            out = base.parent / peft_type
            settings = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
            written[peft_type] = write_adapter(make_base(), out, peft_type, **settings)
        return written[peft_type]

    return adapter


def merged_by_peft(model, adapter):
    """Return what PEFT's own merge adds to each weight, and the weights before, by name."""
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    merged = peft.PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    after = dict(merged.named_parameters())
    delta = {name: (after[name].double() - weight.double()) for name, weight in before.items()}
    return {name: (part.detach().numpy(), before[name].numpy()) for name, part in delta.items()}


def assert_equals_peft(checkpoint, merged):
    """Check every layer against PEFT's merge in float32, whose rounding is that of its weights."""
    names = set()
    for layer in checkpoint.layers:
        names.add(f"{layer.name}.weight")
        delta, weight = merged[f"{layer.name}.weight"]
        pair = layer_pair(checkpoint, layer)
        found = pair.left @ pair.right
        if layer.layer_type in ("conv1d", "embedding"):
            found = found.T
        rounding = 2.0**-21 * (np.linalg.norm(weight) + np.linalg.norm(delta))
        assert np.linalg.norm(delta) > 100 * rounding
        assert np.linalg.norm(found.reshape(delta.shape) - delta) <= rounding
    assert names == {name for name, (delta, _) in merged.items() if delta.any()}


def test_every_method_in_the_registry_of_peft_is_read_or_refused():
    known = READ_ALONE | READ_ON_A_BASE | METHODS_WITHOUT_UPDATE.keys()
    assert set(methods_of_peft()) == known, "a method of another PEFT: does it merge?"


@pytest.mark.parametrize("peft_type", sorted(READ_ALONE | READ_ON_A_BASE))
def test_the_update_of_every_method_that_merges_is_that_of_its_merge(base, adapter_of, peft_type):
    adapter = adapter_of(peft_type)
    assert_equals_peft(open_adapter(adapter, base), merged_by_peft(make_base(), adapter))


@pytest.mark.parametrize("peft_type", sorted(READ_ALONE))
def test_methods_whose_file_holds_the_update_need_no_base(adapter_of, peft_type):
    adapter = adapter_of(peft_type)
    assert_equals_peft(open_adapter(adapter), merged_by_peft(make_base(), adapter))


@pytest.mark.parametrize("peft_type", sorted(READ_ON_A_BASE))
def test_methods_that_need_a_base_say_how_to_give_it(adapter_of, peft_type):
    adapter = adapter_of(peft_type)
    assert takes_base(adapter)
    with pytest.raises(NeedsBaseError, match=rf"'{peft_type}': .* give that by --base BASE"):
        open_adapter(adapter)


@pytest.mark.parametrize("peft_type", sorted(SIZE_METHODS))
def test_of_methods_that_lack_only_sizes_the_base_is_its_config(tmp_path, base, peft_type):
    (tmp_path / "config.json").write_bytes((base / "config.json").read_bytes())
    settings = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    if peft_type in ("PVERA", "VERA"):
        settings["save_projection"] = False  # it is drawn again from the seed
    has_layers = hasattr(PEFT_TYPE_TO_CONFIG_MAPPING[peft_type](), "layers_to_transform")
    if has_layers:
        settings["layers_to_transform"] = [1]
    adapter = write_adapter(make_base(), tmp_path / "adapter", peft_type, **settings)
    checkpoint = open_adapter(adapter, tmp_path)
    assert_equals_peft(checkpoint, merged_by_peft(make_base(), adapter))
    assert len(checkpoint.layers) == (2 if has_layers else 4)


@pytest.mark.parametrize("peft_type", sorted(METHODS_WITHOUT_UPDATE))
def test_methods_without_an_update_are_refused_as_what_they_are(tmp_path, base, peft_type):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": peft_type}))
    save_file({"base_model.model.x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    for given in (None, base):
        with pytest.raises(UnsupportedError, match="no ΔW|no one ΔW") as refusal:
            open_adapter(tmp_path, given)
        assert not isinstance(refusal.value, NeedsBaseError)
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("peft_type", ["OSF", "PEANUT", "ROAD", "VERA"])
def test_merging_layer_by_layer_leaves_the_model_as_it_is(adapter_of, peft_type):
    model = peft.PeftModel.from_pretrained(make_base(), str(adapter_of(peft_type)))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert len(list(layer_updates(model))) == 4
    after = model.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype
        assert torch.equal(tensor, after[name])


@pytest.mark.parametrize(
    "variant",
    [
        {"use_dora": True, "rank_pattern": {"q_proj": 3}, "use_rslora": True},
        {"use_bdlora": {"target_modules_bd_a": ["q_proj"], "target_modules_bd_b": ["v_proj"]}},
    ],
    ids=["DoRA", "BD-LoRA"],
)
def test_variants_of_lora_that_peft_merges_are_read_on_a_base(tmp_path, base, variant):
    settings = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    if "use_bdlora" in variant:
        variant = {"use_bdlora": peft.BdLoraConfig(nblocks=2, **variant["use_bdlora"])}
    settings |= {"init_lora_weights": False, **variant}
    adapter = write_adapter(make_base(), tmp_path / "lora", "LORA", **settings)
    with pytest.raises(NeedsBaseError, match=next(iter(variant))):
        open_adapter(adapter)
    assert_equals_peft(open_adapter(adapter, base), merged_by_peft(make_base(), adapter))


def make_biased(kind):
    """Return a tiny model whose biases are not zero, and names of layers to adapt."""
    model, targets = make_model(kind)
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.3)
    return model, targets


def outputs(model, n_tokens=12):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(1, n_tokens)[None]).logits


@pytest.mark.parametrize(
    ("kind", "peft_type", "settings"),
    [
        ("SEQ_CLS", "LORA", {"use_dora": True, "init_lora_weights": False}),
        ("SEQ_CLS", "LORA", {"lora_bias": True, "init_lora_weights": False}),
        ("SEQ_CLS", "ROAD", {}),
        ("CAUSAL_LM", "HIRA", {"target_modules": ["c_attn", "wpe"]}),
    ],
    ids=["DoRA", "LoRA with a bias", "RoAd, which turns biases too", "HiRA on other layers"],
)
def test_the_lora_of_any_method_computes_what_the_method_does(tmp_path, kind, peft_type, settings):
    model, targets = make_biased(kind)
    save_base(model, tmp_path / "base")
    settings = {"target_modules": targets, "task_type": kind} | settings
    adapter = write_adapter(make_biased(kind)[0], tmp_path / "adapter", peft_type, **settings)
    checkpoint = open_adapter(adapter, tmp_path / "base")
    exported = export_lora(checkpoint, tmp_path / "lora")
    expected, found = (
        outputs(peft.PeftModel.from_pretrained(make_biased(kind)[0], str(directory)))
        for directory in (adapter, exported)
    )
    plain = outputs(make_biased(kind)[0])
    assert (expected - plain).norm() > 1e-2 * plain.norm()
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_a_bias_that_the_base_has_not_is_refused(tmp_path, base):
    settings = {"target_modules": ["q_proj"], "task_type": "CAUSAL_LM", "lora_bias": True}
    model = make_base()
    model.model.layers[0].self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(64))
    model.model.layers[1].self_attn.q_proj.bias = torch.nn.Parameter(torch.zeros(64))
    adapter = write_adapter(model, tmp_path / "lora", "LORA", **settings)
    with pytest.raises(UnsupportedError, match=r"q_proj: PEFT does not merge it"):
        open_adapter(adapter, base)


def test_pairs_have_the_rank_of_the_update_and_none_stands_for_full_rank():
    generator = torch.Generator().manual_seed(0)
    for rank in (5, 250):
        left = torch.randn(600, rank, generator=generator, dtype=torch.float64)
        right = torch.randn(rank, 700, generator=generator, dtype=torch.float64)
        up, down = low_rank_pair(left @ right)
        assert up.shape[1] == down.shape[0] == rank
        assert (up @ down - left @ right).norm() <= 1e-12 * (left @ right).norm()
    up, down = low_rank_pair(left[:40, :5] @ right[:5])
    assert up.shape[1] == down.shape[0] == 5
    zero_up, zero_down = low_rank_pair(torch.zeros(6, 4, dtype=torch.float64))
    assert zero_up.shape == (6, 1)
    assert not (zero_up @ zero_down).any()
    for shape in ((30, 40), (600, 700)):
        noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
        assert low_rank_pair(noise) is None


def run(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


def test_the_command_line_reads_cuts_exports_and_verifies_any_method(base, adapter_of, tmp_path):
    adapter = adapter_of("VERA")
    on_base = ("--base", base)
    lora = tmp_path / "lora"
    cut = tmp_path / "cut"
    asked = ("--to", "same", "--max-rank", 4, "--out", cut)
    for arguments in (
        ("inspect", adapter),
        ("export", adapter, "--to", "lora", "--out", lora),
        ("verify", adapter, lora),
        ("compress", adapter, *asked),
        ("verify", adapter, cut),
    ):
        done = run(*arguments, *on_base)
        assert done.exit_code == 0, done.output
    assert open_checkpoint(lora).format == open_checkpoint(cut).format == "peft-lora"
    assert {layer.rank for layer in open_checkpoint(cut).layers} == {4}
    assert isinstance(run("compress", adapter, *asked, "--force").exception, NeedsBaseError)
    # A base alone has no use for a source that is a LoRA.
    refusal = run("verify", lora, cut, *on_base).exception
    assert "outputs are compared by lsrdecomp measure" in str(refusal)


def test_what_is_kept_of_any_method_is_measured_on_its_base(base, adapter_of, tmp_path):
    settings = MeasuredSettings(held_out=8)
    data = [f"{text} w{number}" for number, (text, _) in enumerate(4 * TEXTS)]
    result = compress(adapter_of("GLORA"), bytes=9000, base=base, data=data, settings=settings)
    assert result.fidelity is not None
    assert result.fidelity.kept > 0.5
    assert {layer.name for layer in open_checkpoint(result.save(tmp_path / "small")).layers}


@pytest.mark.parametrize("peft_type", ["C3A", "OFT"])
def test_numbers_that_are_not_finite_are_told_by_layer(base, adapter_of, tmp_path, peft_type):
    adapter = adapter_of(peft_type)
    tensors = load_file(adapter / "adapter_model.safetensors")
    next(iter(tensors.values())).view(-1)[0] = float("nan")
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    checkpoint = open_adapter(tmp_path, base)
    with pytest.raises(CheckpointError, match=r"layers.0.self_attn.q_proj: .* NaN or infinite"):
        compress(checkpoint, ratio=2)


def test_a_file_that_peft_does_not_open_is_refused_in_one_line(tmp_path):
    config = {"peft_type": "C3A", "block_size": 8, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    key = "base_model.model.q_proj.c3a_kernel"
    save_file({key: torch.zeros(1, 2, 4)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="PEFT does not open it") as refusal:
        open_adapter(tmp_path)
    assert "\n" not in str(refusal.value)


def test_a_small_file_that_implies_a_huge_update_is_refused_before_it_is_formed(tmp_path):
    config = {"peft_type": "C3A", "block_size": 2**20, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    key = "base_model.model.q_proj.c3a_kernel"
    save_file({key: torch.zeros(1, 1, 2**20)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"q_proj: its ΔW of 1048576 x 1048576 takes"):
        open_adapter(tmp_path)
