"""LSR on quantized bases (QLSR, after QLoRA): train, save, reload, merge with the loss stated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lsrdecomp.errors import MergeError
from lsrdecomp.lora.peft import LsrConfig, LsrLayer, to_lora

ROWS = torch.randint(1, 90, (4, 9), generator=torch.Generator().manual_seed(0))


def bnb_8bit():
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(load_in_8bit=True)


def bnb_4bit():
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )


def torchao_int8():
    quantization = pytest.importorskip("torchao.quantization")
    from transformers import TorchAoConfig

    return TorchAoConfig(quantization.Int8WeightOnlyConfig())


BACKENDS = [bnb_8bit, bnb_4bit, torchao_int8]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=96, pad_token_id=0, initializer_range=0.1, **sizes)
    )
    path = tmp_path_factory.mktemp("llama")
    model.save_pretrained(path)
    return path


def opened(folder: Path, backend) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=backend(), device_map={"": "cpu"}
    )


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(ROWS).logits.float()


def config(**settings) -> LsrConfig:
    return LsrConfig(target_modules=["q_proj", "v_proj"], r=4, separation_rank=4, **settings)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_trains_saves_and_reloads(folder, tmp_path, backend, use_dora):
    base = prepare_model_for_kbit_training(
        opened(folder, backend), use_gradient_checkpointing=False
    )
    model = get_peft_model(base, config(use_dora=use_dora, init_weights=False))
    layers = [module for module in model.modules() if isinstance(module, LsrLayer)]
    assert all(layer.quantization_backend is not None for layer in layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()(ROWS, labels=ROWS).loss.backward()
    assert all(parameter.grad.isfinite().all() and parameter.grad.any() for parameter in trained)
    torch.optim.SGD(trained, lr=1e-2).step()
    expected = logits(model)
    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(opened(folder, backend), tmp_path)
    torch.testing.assert_close(logits(again), expected, rtol=1e-4, atol=1e-4)
    lora, tensors = to_lora(again)
    assert (lora.r, lora.use_dora) == (4, use_dora)
    assert all(tensor.isfinite().all() for tensor in tensors.values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_merge_states_its_loss_and_refuses_a_large_one(folder, backend):
    torch.manual_seed(0)
    model = get_peft_model(opened(folder, backend), config(init_weights=False))
    layers = [module for module in model.modules() if isinstance(module, LsrLayer)]
    with torch.no_grad():
        for layer in layers:
            layer.lsr_B["default"].factor_1 *= 1e-4
    plain = [layer.get_base_weight().clone() for layer in layers]
    with pytest.raises(
        MergeError, match="q_proj: only .* of the update of adapter default would survive in"
    ):
        model.merge_and_unload()
    for layer, weight in zip(layers, plain, strict=True):
        torch.testing.assert_close(layer.get_base_weight(), weight, rtol=1e-2, atol=1e-4)
    with torch.no_grad():
        for layer in layers:
            layer.lsr_B["default"].factor_1 *= 2e4
    expected = logits(model)
    model.merge_adapter()
    shares = [share["default"] for share in model.base_model.merge_shares.values()]
    assert len(shares) == len(layers)
    assert all(0.5 < share < 1.5 for share in shares)
    correlation = torch.corrcoef(torch.stack([logits(model).flatten(), expected.flatten()]))[0, 1]
    assert correlation > 0.8


def test_rows_of_a_mixed_batch_are_single_runs_where_outliers_do_not_couple_rows(folder):
    """bitsandbytes computes columns with an entry above 6, in any row of a batch, in 16 bits.

    So one row's answer depends on the others, with LoRA too; without that threshold none does.
    """
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    quantized = BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    base = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantized)
    config = LsrConfig(r=4, target_modules=["q_proj", "v_proj"], init_weights=False)
    model = get_peft_model(base, config, adapter_name="a")
    model.add_adapter("b", config)
    model.eval()
    names = ["a", "b", "a", "__base__"]
    with torch.no_grad():
        mixed = model(ROWS, adapter_names=names).logits
        for row, name in enumerate(names[:3]):
            model.set_adapter(name)
            single = model(ROWS[row : row + 1]).logits
            assert torch.equal(mixed[row], single[0])
        with model.disable_adapter():
            assert torch.equal(mixed[3], model(ROWS[3:]).logits[0])
