"""Exact exchange: LSR to LoRA, rescaling; no approximation anywhere."""

from __future__ import annotations

import pytest
import torch
from adapters_support import tiny_bert, token_batch
from peft import (
    PeftModel,
    convert_to_lora,
    get_peft_model,
    set_peft_model_state_dict,
)
from torch import nn

from lsrdecomp.errors import MergeError, UnsupportedLayerError
from lsrdecomp.lora.peft import LsrConfig, LsrLayer, rescale, save_pretrained, to_lora
from lsrdecomp.lora.peft.lsr_config import write_card
from lsrdecomp.precision import unit_roundoff

TARGETS = ["query", "word_embeddings", "dense"]


class Mixed(nn.Module):
    """A grouped convolution and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 9, 3, stride=2, padding=1, groups=3)
        self.lin = nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(self.conv(x).flatten(2).mean(2))


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("lora_", "lokr_", "lsr_")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def outputs(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**token_batch()).logits


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    assert (left - right).abs().max() <= 2**12 * unit_roundoff("float32") * right.abs().max()


def reopened(model: nn.Module, config, tensors) -> nn.Module:
    again = get_peft_model(model, config)
    result = set_peft_model_state_dict(again, tensors)
    assert not result.unexpected_keys
    assert not [key for key in result.missing_keys if "lora_" in key or "lsr_" in key]
    return again.eval()


@pytest.mark.parametrize("use_dora", [False, True])
def test_lsr_as_lora_computes_the_same(use_dora):
    config = LsrConfig(
        target_modules=TARGETS,
        r=4,
        init_weights=False,
        use_dora=use_dora,
        rank_pattern={"query": 6},
        use_rslora=True,
        alpha_pattern={"dense": 3},
        modules_to_save=["classifier"],
        bias="lsr_only",
    )
    model = randomised(get_peft_model(tiny_bert(), config))
    with torch.no_grad():
        model.base_model.model.classifier.modules_to_save["default"].weight.mul_(2)
        model.base_model.model.bert.encoder.layer[0].attention.self.query.bias.add_(1)
    lora, tensors = to_lora(model)
    assert (lora.r, lora.lora_alpha, lora.rank_pattern, lora.use_rslora) == (6, 6, {}, False)
    assert_same(outputs(reopened(tiny_bert(), lora, tensors)), outputs(model))


def test_grouped_convolutions_become_lora():
    torch.manual_seed(0)
    model = get_peft_model(
        Mixed(), LsrConfig(target_modules=["conv", "lin"], r=4, init_weights=False)
    ).eval()
    x = torch.randn(2, 6, 7, 7)
    lora, tensors = to_lora(model)
    assert lora.r == 12
    torch.manual_seed(0)
    again = reopened(Mixed(), lora, tensors)
    assert_same(again(x), model(x))
    assert not torch.equal(model(x), model.unload()(x))


def test_a_dilated_convolution_is_refused_as_peft_drops_the_dilation():
    model = get_peft_model(
        nn.ModuleDict({"c": nn.Conv1d(4, 4, 3, dilation=2)}), LsrConfig(target_modules=["c"], r=2)
    )
    with pytest.raises(UnsupportedLayerError, match="dilation"):
        to_lora(model)


def test_peft_refuses_to_convert_dora_rather_than_drop_it():
    model = get_peft_model(tiny_bert(), LsrConfig(target_modules=["query"], r=2, use_dora=True))
    assert not model.supports_lora_conversion()
    with pytest.raises(TypeError, match="do not support LoRA conversion"):
        convert_to_lora(model, rank=2)


def test_rescale_is_linear_and_undone_even_by_an_error():
    model = randomised(get_peft_model(tiny_bert(), LsrConfig(target_modules=["query"], r=2)))
    expected = outputs(model)
    with rescale(model, 0.0):
        assert torch.equal(outputs(model), outputs(tiny_bert()))
    with pytest.raises(ZeroDivisionError), rescale(model, 3.0):
        1 / (0 if not torch.equal(outputs(model), expected) else 1)
    assert torch.equal(outputs(model), expected)
    model.merge_adapter()
    with pytest.raises(MergeError, match="default"), rescale(model, 0.5):
        pass


def test_saving_writes_a_card_and_the_lora_beside(tmp_path):
    config = LsrConfig(target_modules=["query"], r=4, separation_rank=2, init_weights=False)
    model = randomised(get_peft_model(tiny_bert(), config))
    expected = outputs(model)
    for _ in range(2):
        save_pretrained(model, tmp_path, also_lora=True)
    card = (tmp_path / "README.md").read_text()
    assert card.count("import lsrdecomp.lora.peft") == 1
    assert "library_name: peft" in card
    again = PeftModel.from_pretrained(tiny_bert(), tmp_path / "lora").eval()
    assert again.peft_config["default"].peft_type == "LORA"
    assert_same(outputs(again), expected)


def test_a_card_keeps_what_others_wrote(tmp_path):
    get_peft_model(tiny_bert(), LsrConfig(target_modules=["query"], r=4)).save_pretrained(tmp_path)
    path = tmp_path / "README.md"
    path.write_text(
        "# Mine\n\nWords.\n\n" + path.read_text().split("---")[-1] + "\n## After\n\nMore words.\n"
    )
    write_card(tmp_path, "LSR")
    card = path.read_text()
    assert "# Mine\n\nWords." in card
    assert "## After\n\nMore words." in card
    assert card.count("## Loading this adapter") == 1


def test_servers_with_one_global_scale_read_the_export():
    """vLLM and llama.cpp take A and B of each module, one rank, and one scale.

    The scale is ``lora_alpha / r``.
    """
    patterns = {"alpha_pattern": {"query": 3}, "rank_pattern": {"query": 6}}
    config = LsrConfig(target_modules=["query", "dense"], r=4, init_weights=False, **patterns)
    model = randomised(get_peft_model(tiny_bert(), config))
    lora, tensors = to_lora(model)
    assert (lora.bias, lora.use_dora, lora.use_rslora) == ("none", False, False)
    assert lora.rank_pattern == lora.alpha_pattern == {}
    layers = [item for item in model.named_modules() if isinstance(item[1], LsrLayer)]
    assert len(tensors) == 2 * len(layers)
    for name, layer in layers:
        assert name.startswith("base_model.model.")
        a, b = tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]
        assert a.shape[0] == b.shape[1] == lora.r == 6
        torch.testing.assert_close(lora.lora_alpha / lora.r * b @ a, layer.delta_matrix("default"))
