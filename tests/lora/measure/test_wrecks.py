"""Twenty wrecks that people get of a LoRA, none of which is whole, and sound outputs, which are."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402
from tiny_language_model import write_rows  # noqa: E402
from tiny_tokenizer import MARKS, WORDS, word_tokenizer  # noqa: E402

import lsrdecomp as lsr  # noqa: E402
from lsrdecomp import compress  # noqa: E402
from lsrdecomp.errors import CheckpointError  # noqa: E402
from lsrdecomp.kronecker.product import SeparatedProduct  # noqa: E402
from lsrdecomp.kronecker.separated import SeparatedMatrix  # noqa: E402
from lsrdecomp.lora.compress import export_lora  # noqa: E402
from lsrdecomp.lora.compress.rewrite import rewrite  # noqa: E402
from lsrdecomp.lora.files import open_checkpoint, write_lora  # noqa: E402
from lsrdecomp.lora.measure.output_meter import open_weights  # noqa: E402
from lsrdecomp.lora.search import CompressionPlan  # noqa: E402
from lsrdecomp.lora.search.layers import layer_pair, layer_product  # noqa: E402

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
WEIGHTS = "adapter_model.safetensors"


def model_of(seed=0):
    """Four layers whose q, k, v and o are square."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(MARKS) + len(WORDS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def save_model(model, folder, **changes):
    model.save_pretrained(folder)
    tokenizer = word_tokenizer()
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    tokenizer.save_pretrained(folder)
    return folder


def save_adapter(folder, config, seed=1):
    model = model_of()
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.mul_(1.0 + 0.3 * torch.rand_like(parameter))
    adapted.save_pretrained(folder)
    return folder


def lora_config(**changes):
    values = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS, "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**(values | changes), init_lora_weights=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The base, the LoRA and the texts."""
    folder = tmp_path_factory.mktemp("wrecks")
    save_model(model_of(), folder / "base")
    save_adapter(folder / "lora", lora_config())
    write_rows(folder / "rows.jsonl", 24)
    return folder


@pytest.fixture
def measured(place):
    """What is found of an output, by its weights and its outputs."""

    def run(other, lora="lora"):
        return lsr.measure(place / lora, other, base=str(place / "base"), data=place / "rows.jsonl")

    return run


def changed(place, out, *, source="lora", change=None, **fields):
    """Copy an adapter, with other tensors or other fields of its config."""
    shutil.copytree(place / source, out)
    if change is not None:
        save_file(change(load_file(out / WEIGHTS)), out / WEIGHTS)
    config = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps(config | fields))
    return out


def merged(place, out, *, times=1.0, lora="lora", base=None, change=None, **tokenizer):
    """Add a LoRA to the weights of a model, and save it."""
    model = model_of() if base is None else base
    weights = dict(model.named_parameters())
    checkpoint = open_checkpoint(place / lora)
    with torch.no_grad():
        for layer in checkpoint.layers:
            delta = torch.from_numpy(layer_pair(checkpoint, layer).to_matrix())
            weights[f"{layer.name}.weight"].add_((times * delta).float())
        for parameter in weights.values() if change else ():
            if parameter.ndim == 2:
                parameter.copy_(change(parameter))
    return save_model(model, out, **tokenizer)


def quantized(step_count, block=32):
    """Round each block to so many steps on either side of zero."""

    def change(weight):
        blocks = weight.reshape(-1, block)
        scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-9) / step_count
        return (torch.round(blocks / scale) * scale).reshape(weight.shape)

    return change


def test_the_lora_itself_is_whole(measured, place):
    found = measured(place / "lora")
    assert (found.verdict, found.reasons, found.coverage) == (
        "whole",
        (),
        "16 of 16 layers compared; 0 not",
    )
    assert found.fidelity.kept == 1.0
    # Of 24 texts, two to a prompt.
    assert found.fidelity.n_matching == found.fidelity.answered == 12


# -- wrecks that are adapters ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"lora_alpha": 4}, "3 times too small in all 16 matrices: alpha was not read"),
        ({"lora_alpha": 3}, "4 times too small in all 16 matrices: the rank divides it twice"),
        ({"lora_alpha": 48}, "4 times as large in all 16 matrices: alpha was taken for the scale"),
        ({"lora_alpha": -12}, "-1 times as large in all 16 matrices: it was subtracted"),
        (
            {"use_rslora": True},
            "2 times as large in all 16 matrices: alpha was divided by",
        ),
    ],
)
def test_a_wrong_scale_is_named_with_its_cause(measured, place, tmp_path, fields, cause):
    found = measured(changed(place, tmp_path / "wreck", **fields))
    assert found.verdict in ("damaged", "gone")
    assert [reason.code for reason in found.reasons] == ["scale"]
    assert cause in found.reasons[0].sentence


def test_rslora_ignored(measured, place, tmp_path):
    save_adapter(place / "rslora", lora_config(use_rslora=True))
    found = measured(changed(place, tmp_path / "w", source="rslora", use_rslora=False), "rslora")
    assert found.verdict == "damaged"
    assert "2 times too small in all 16 matrices: rsLoRA was ignored" in str(found.reasons[0])


def exchange(tensors):
    return {
        key.replace("q_proj", "?").replace("k_proj", "q_proj").replace("?", "k_proj"): value
        for key, value in tensors.items()
    }


def transpose(tensors):
    turned = {}
    for key, value in tensors.items():
        side = key.replace("lora_A", "?").replace("lora_B", "lora_A").replace("?", "lora_B")
        turned[side] = np.ascontiguousarray(value.T)
    return turned


def permute(tensors):
    """Leave the rows of q and k as llama.cpp has them."""
    return {
        key: value.reshape(4, 2, 8, -1).swapaxes(1, 2).reshape(value.shape)
        if "q_proj.lora_B" in key or "k_proj.lora_B" in key
        else value
        for key, value in tensors.items()
    }


def without_half(tensors):
    return {key: value for key, value in tensors.items() if ".2." not in key and ".3." not in key}


def with_nan(tensors):
    key = next(key for key in tensors if "1.self_attn.v_proj.lora_A" in key)
    tensors[key][0, 0] = np.nan
    return tensors


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (exchange, "exchanged: all 8 of self_attn.k_proj and self_attn.q_proj hold the ΔW of"),
        (transpose, "transposed: all 16 matrices hold ΔW transposed: fan_in_fan_out"),
        (permute, "permuted: all 8 of self_attn.k_proj and self_attn.q_proj hold ΔW with rows"),
        (without_half, "missing: layers 2 to 3 (8 of 16 matrices) are the base's"),
        (with_nan, "not-finite: model.layers.1.self_attn.v_proj cannot be compared"),
    ],
)
def test_moved_and_missing_numbers_are_named(measured, place, tmp_path, change, reason):
    found = measured(changed(place, tmp_path / "wreck", change=change))
    assert found.verdict in ("damaged", "gone")
    assert reason in [str(each)[: len(reason)] for each in found.reasons]
    assert len(found.reasons) == 1


def test_the_other_adapter_of_two(measured, tmp_path):
    found = measured(save_adapter(tmp_path / "wreck", lora_config(), seed=5))
    assert found.verdict in ("damaged", "gone")
    assert [reason.code for reason in found.reasons] == ["unrelated"]


def test_a_trained_layer_that_is_far_from_its_delta_is_told_by_its_record(place, tmp_path):
    """Of one that was trained to few numbers only what it does may be the LoRA's."""
    lora = open_checkpoint(place / "lora")
    made = compress(lora, CompressionPlan(separation_rank=1, storage="float32"))
    made.save(tmp_path / "made")
    numbers = np.random.default_rng(0)
    products = {
        layer.name: SeparatedProduct(
            *(
                SeparatedMatrix.from_factors(
                    [numbers.standard_normal(factor.shape) for factor in side.factors]
                )
                for side in (layer_product(layer).left, layer_product(layer).right)
            )
        )
        for layer in open_checkpoint(tmp_path / "made").layers
    }
    rewrite(tmp_path / "trained", tmp_path / "made", lora, products)
    found = lsr.measure(place / "lora", tmp_path / "trained")
    assert [reason.code for reason in found.reasons] == ["approximated"]
    # Numbers that the record does not know are another adapter's all the same.
    report = tmp_path / "trained" / "compression.json"
    record = json.loads(report.read_text())
    record["totals"]["relative_error"] *= 1.0001
    report.write_text(json.dumps(record))
    found = lsr.measure(place / "lora", tmp_path / "trained")
    assert [reason.code for reason in found.reasons] == ["unrelated"]


def test_experts_that_a_conversion_lost(tmp_path):
    numbers = np.random.default_rng(0)
    names = [f"model.layers.{i}.mlp.experts.{j}.w1" for i in range(2) for j in range(3)]
    pairs = [
        (name, numbers.standard_normal((6, 2)), numbers.standard_normal((2, 8)))
        for name in [*names, "model.layers.0.self_attn.q_proj"]
    ]
    write_lora(tmp_path / "lora", layers=pairs)
    write_lora(tmp_path / "wreck", layers=pairs[-1:])
    found = lsr.measure(tmp_path / "lora", tmp_path / "wreck")
    assert found.verdict == "damaged"
    assert [reason.code for reason in found.reasons] == ["experts"]
    assert "these experts were not converted or not loaded" in found.reasons[0].sentence


def test_magnitudes_of_dora_dropped(measured, place, tmp_path):
    save_adapter(place / "dora", lora_config(use_dora=True))

    def plain(tensors):
        return {key: value for key, value in tensors.items() if "magnitude" not in key}

    wreck = changed(place, tmp_path / "w", source="dora", change=plain, use_dora=False)
    found = measured(wreck, "dora")
    assert found.verdict in ("damaged", "gone")
    assert [reason.code for reason in found.reasons] == ["magnitudes"]


def test_a_small_resize_by_energy_and_a_converted_lokr_are_reduced(measured, place, tmp_path):
    lsr.compress(place / "lora", energy=0.75, storage="float32").save(tmp_path / "energy")
    found = measured(tmp_path / "energy")
    assert found.verdict in ("reduced", "gone")
    assert {reason.code for reason in found.reasons} <= {"approximated", "dropped"}
    config = peft.LoKrConfig(r=4, alpha=8, target_modules=TARGETS, task_type="CAUSAL_LM")
    save_adapter(place / "lokr", config)
    tensors = load_file(place / "lokr" / WEIGHTS)
    numbers = np.random.default_rng(0)
    for key, value in tensors.items():
        tensors[key] = numbers.standard_normal(value.shape).astype(np.float32) * 0.3
    save_file(tensors, place / "lokr" / WEIGHTS)
    source = open_checkpoint(place / "lokr")

    def truncated():
        for layer in source.layers:
            small = layer_pair(source, layer).balanced(2)
            yield layer.name, small.left, small.right

    config = json.loads((place / "lora" / "adapter_config.json").read_text())
    write_lora(tmp_path / "converted", layers=truncated(), config=config)
    found = measured(tmp_path / "converted", "lokr")
    assert found.verdict in ("reduced", "gone")
    assert [reason.code for reason in found.reasons] == ["approximated"]


# -- wrecks that are models ------------------------------------------------------------------------


def test_merged_twice(measured, place, tmp_path):
    found = measured(merged(place, tmp_path / "wreck", times=2.0))
    assert found.verdict in ("damaged", "gone")
    assert str(found.reasons[0]).startswith(
        "merged-twice: ΔW is 2 times as large in all 16 matrices: it was merged twice"
    )


def test_merged_without_half_of_the_layers(measured, place, tmp_path):
    changed(place, place / "half", change=without_half)
    found = measured(merged(place, tmp_path / "wreck", lora="half"))
    assert found.verdict == "damaged"
    assert "layers 2 to 3 (8 of 16 matrices) are the base's" in found.reasons[0].sentence


def test_merged_into_another_base(measured, place, tmp_path):
    found = measured(merged(place, tmp_path / "wreck", base=model_of(seed=7)))
    assert found.verdict in ("damaged", "gone")
    assert [reason.code for reason in found.reasons] == ["base"]
    assert "merged into another base" in found.reasons[0].sentence


def test_another_tokenizer(measured, place, tmp_path):
    found = measured(merged(place, tmp_path / "wreck", eos_token="<end>"))
    assert found.verdict == "damaged"
    assert [reason.code for reason in found.reasons] == ["tokenizer"]
    assert "its eos_token is '<end>', the base's '</s>'" in found.reasons[0].sentence


def test_another_chat_template(place, tmp_path):
    base = save_model(model_of(), tmp_path / "base", chat_template="{{ messages }}")
    for template, codes in (("{{ messages }}", []), ("{{ messages }}!", ["tokenizer"])):
        out = merged(place, tmp_path / f"merged{len(codes)}", chat_template=template)
        found = lsr.measure(place / "lora", out, base=str(base), data=place / "rows.jsonl")
        assert [reason.code for reason in found.reasons] == codes
    assert found.reasons[0].sentence == "its tokenizer differs: its chat template is another"


@pytest.mark.parametrize(
    ("change", "storage"),
    [
        (lambda weight: weight.bfloat16().float(), "bfloat16"),
        (quantized(127), "eight bits"),
        (quantized(7), "four bits"),
    ],
)
def test_a_weak_lora_is_rounded_away(measured, place, tmp_path, change, storage):
    """ΔW is below the rounding of the weights that it was added to."""
    if not (place / "weak").exists():
        changed(place, place / "weak", lora_alpha=0.02)
    found = measured(merged(place, tmp_path / "wreck", lora="weak", change=change), "weak")
    assert found.verdict != "whole"
    assert [reason.code for reason in found.reasons] == ["rounded"]
    assert f"are rounded to {storage}" in found.reasons[0].sentence


def test_four_bits_reduce_a_strong_one(measured, place, tmp_path):
    found = measured(merged(place, tmp_path / "wreck", change=quantized(7)))
    assert found.verdict == "reduced"
    assert [reason.code for reason in found.reasons] == ["rounded"]


def test_weights_are_read_of_a_model_as_it_opens(tmp_path):
    model = model_of()
    save_model(model, tmp_path / "model")
    weights = open_weights(tmp_path / "model")
    for name, parameter in model.named_parameters():
        np.testing.assert_array_equal(weights[name](), parameter.detach().numpy())


def test_a_base_of_four_bits_draws_what_is_added_back(place, tmp_path):
    """Merged weights that are rounded to the grid of the base lose most of a small ΔW."""
    base = model_of()
    with torch.no_grad():
        for parameter in base.parameters():
            if parameter.ndim == 2:
                parameter.copy_(quantized(7)(parameter))
    save_model(base, tmp_path / "base")
    changed(place, place / "small", lora_alpha=0.6)
    other = merged(place, tmp_path / "wreck", lora="small", base=base, change=quantized(7))
    found = lsr.measure(
        place / "small", other, base=str(tmp_path / "base"), data=place / "rows.jsonl"
    )
    assert found.verdict != "whole"
    assert [reason.code for reason in found.reasons] == ["rounded"], repr(found)
    assert "of ΔW is left" in found.reasons[0].sentence


def test_a_weak_lora_in_a_model_that_bitsandbytes_saved_in_int8(measured, place, tmp_path):
    pytest.importorskip("bitsandbytes", reason="saves models in int8")
    if not (place / "weak").exists():
        changed(place, place / "weak", lora_alpha=0.02)
    whole = merged(place, tmp_path / "whole", lora="weak")
    eight_bits = transformers.BitsAndBytesConfig(load_in_8bit=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(whole, quantization_config=eight_bits)
    save_model(model, tmp_path / "wreck")
    found = measured(tmp_path / "wreck", "weak")
    assert found.verdict != "whole"
    assert [reason.code for reason in found.reasons] == ["rounded"]
    assert "are rounded to int8" in found.reasons[0].sentence


# -- sound outputs ---------------------------------------------------------------------------------


def test_sound_outputs_are_whole(measured, place, tmp_path):
    source = open_checkpoint(place / "lora")
    # 1. Ours: the same in another form, in float16.
    export_lora(source, tmp_path / "ours", storage="float16", profile="common")
    # 2. PEFT's own conversion of a LoRA, at the rank it has.
    # 3. A resize by kohya's formula that leaves the rank: pairs of an SVD, alpha as the rank.
    resized = ((layer.name, layer_pair(source, layer).balanced()) for layer in source.layers)
    pairs = ((name, pair.left, pair.right) for name, pair in resized)
    write_lora(tmp_path / "resized", layers=pairs, source=source)
    # 4. A merge in bfloat16, of a LoRA that is large enough.
    merged(place, tmp_path / "bf16", change=lambda weight: weight.bfloat16().float())
    for name in ("ours", "resized", "bf16"):
        found = measured(tmp_path / name)
        assert found.verdict == "whole", repr(found)
        assert not found.faults
        assert found.passed(0.99)


def test_what_peft_converts_is_whole(measured, place, tmp_path):
    convert = getattr(peft, "save_as_lora", None)
    if convert is None:
        pytest.skip("this PEFT converts nothing to LoRA")
    model = peft.PeftModel.from_pretrained(model_of(), place / "lora")
    convert(tmp_path / "converted", model, rank=4)
    assert measured(tmp_path / "converted").verdict == "whole"


def test_the_file_of_llama_cpp_is_whole(place, tmp_path, measured):
    pytest.importorskip("gguf", reason="reads and writes the files of llama.cpp")
    export_lora(
        open_checkpoint(place / "lora"), tmp_path / "l.gguf", to="gguf", base=place / "base"
    )
    found = measured(tmp_path / "l.gguf")
    assert found.verdict == "whole", repr(found)
    assert found.coverage == "16 of 16 layers compared; 0 not"
    with pytest.raises(CheckpointError, match="has the names of llama.cpp.*--base"):
        lsr.measure(place / "lora", tmp_path / "l.gguf")
