"""A bank of adapters: each as it is alone, whichever slots it passes through, and in few bytes."""

from __future__ import annotations

import pytest
import torch
from adapters_support import write_lsr_directory
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lsrdecomp import compress
from lsrdecomp.adapters import LsrConfig
from lsrdecomp.adapters.bank import AdapterBank
from lsrdecomp.adapters.errors import UnsupportedLayerError
from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.compression.settings import CompressionPlan
from lsrdecomp.errors import CheckpointError, LsrError

TOKENS = torch.randint(1, 90, (3, 7), generator=torch.Generator().manual_seed(0))
Q = "model.layers.{}.self_attn.q_proj"
UP = "model.layers.{}.mlp.up_proj"


def base() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=96, pad_token_id=0, **sizes)).eval()


def logits(model: nn.Module, **more) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, **more).logits


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write five adapters: two shapes, other layers, and two compressed LoRAs.

    Of the two, one holds integers and one 16-bit numbers.
    """
    root, wide = tmp_path_factory.mktemp("adapters"), ((6, 4), (2, 2), (6, 4))
    square = {Q.format(0): wide, Q.format(1): wide}
    write_lsr_directory(root / "a", square)
    write_lsr_directory(root / "b", square, seed=1)
    write_lsr_directory(
        root / "c", {Q.format(1): wide, UP.format(0): ((9, 4), (1, 3), (4, 6))}, seed=2
    )
    torch.manual_seed(3)
    lora = get_peft_model(
        base(), LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    )
    lora.save_pretrained(root / "lora")
    source = open_checkpoint(root / "lora")
    compress(source, CompressionPlan(ratio=2.0, storage="int8")).save(root / "d")
    compress(source, CompressionPlan(separation_rank=3, storage="bfloat16")).save(root / "e")
    return root


@pytest.fixture
def bank(folders) -> AdapterBank:
    made = AdapterBank(base(), slots=2)
    for name in "abcde":
        made.add(name, folders / name)
    return made


@pytest.fixture(scope="module")
def alone(folders) -> dict[str, torch.Tensor]:
    found = {
        name: logits(PeftModel.from_pretrained(base(), folders / name).eval()) for name in "abcde"
    }
    return {**found, "__base__": logits(base())}


def test_every_adapter_is_as_it_is_alone_through_two_slots(bank, alone):
    for name in "abcdeedcbaacebd":
        bank.activate(name)
        torch.testing.assert_close(logits(bank.model), alone[name])
        assert name in bank.ready
        assert len(bank.ready) <= 2
    for name in "abcde":
        assert (alone[name] - alone["__base__"]).abs().max() > 1e-3, "the adapters do something"


def test_the_least_recently_used_one_leaves(bank):
    bank.load(["a", "b"])
    bank.load(["a"])
    bank.load(["c"])
    assert bank.ready == ("a", "c")


def test_rows_of_a_batch_name_their_adapters(bank, alone):
    names = ["c", "__base__", "d"]
    mixed = logits(bank.model, adapter_names=bank.load(names))
    for row, name in enumerate(names):
        torch.testing.assert_close(mixed[row], alone[name][row])


def test_only_what_is_missing_is_formed(bank, monkeypatch):
    from lsrdecomp.adapters import bank as module

    bank.activate("a")
    calls, real = [], module.expand
    monkeypatch.setattr(module, "expand", lambda factors: calls.append(factors) or real(factors))
    bank.load(["b", "c"])
    bank.load(["c", "b"])
    assert len(calls) == 8, "two sides of two layers of two adapters; nothing for what is ready"


def test_adapters_that_come_later_go_and_are_replaced(folders, alone):
    bank = AdapterBank(base(), slots=2)
    bank.add("x", folders / "a")
    bank.activate("x")
    bank.add("y", folders / "c")  # targets a layer that no slot has
    bank.activate("y")
    torch.testing.assert_close(logits(bank.model), alone["c"])
    bank.activate("x")
    torch.testing.assert_close(logits(bank.model), alone["a"])
    bank.add("x", folders / "b")
    bank.activate("x")
    torch.testing.assert_close(logits(bank.model), alone["b"])
    bank.remove("x")
    assert list(bank) == ["y"]
    assert len(bank) == 1
    torch.testing.assert_close(logits(bank.model), alone["__base__"]), "its slot is empty"


def test_only_numbers_are_held_and_equal_layouts_once(folders):
    bank = AdapterBank(base())
    bank.add("0", folders / "a")
    first = bank.nbytes
    numbers = sum(
        tensor.nbytes
        for layer in open_checkpoint(folders / "a").layers
        for tensor in (*layer.left, *layer.right)
    )
    for name in range(1, 10):
        bank.add(str(name), folders / "ab"[name % 2 : name % 2 + 1])
    assert bank.nbytes - first == 9 * numbers
    assert first - numbers < 600, "the layout, compressed"
    for name in range(10):
        bank.remove(str(name))
    assert bank.nbytes == 0


def test_transposed_weights(tmp_path):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_embd=24, n_layer=2, n_head=4, vocab_size=96, n_positions=16)
    ).eval()
    write_lsr_directory(
        tmp_path, {"transformer.h.0.attn.c_attn": ((9, 8), (2, 2), (6, 4))}, fan_in_fan_out=True
    )
    bank = AdapterBank(model, slots=1)
    bank.add("a", tmp_path)
    plain = logits(model)
    bank.activate("a")
    adapted = logits(bank.model)
    bank.remove("a")
    torch.testing.assert_close(logits(bank.model), plain)
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(bank.model.unload(), tmp_path).eval()), adapted
    )


def test_names_and_slots_that_are_not_there_are_refused(bank):
    with pytest.raises(LsrError, match=r"no adapter 'z' among the 5"):
        bank.activate("z")
    with pytest.raises(LsrError, match=r"no adapter 'w', 'x', 'y' among the 5"):
        bank.load(["w", "x", "y", "z"])  # three say enough
    with pytest.raises(LsrError, match=r"3 adapters at once, but the bank has 2 slots"):
        bank.load(["a", "b", "c"])
    with pytest.raises(LsrError, match="holds no adapter yet"):
        _ = AdapterBank(base()).model
    with pytest.raises(ValueError, match="at least one slot, got 0"):
        AdapterBank(base(), slots=0)


def test_a_lora_is_refused(folders, bank):
    with pytest.raises(CheckpointError, match="is no LSR adapter"):
        bank.add("f", folders / "lora")
    assert list(bank) == list("abcde")


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Q.format(0), r"layers.0.self_attn.q_proj is 36 x 24, but 24 x 24 in the base model"),
        ("model.layers.7.mlp.up_proj", "has no linear layer model.layers.7.mlp.up_proj"),
    ],
)
def test_layers_that_the_base_has_not_are_refused_and_nothing_changes(
    layer, message, tmp_path, bank
):
    write_lsr_directory(tmp_path / "other", {layer: ((6, 6), (2, 2), (6, 4))})
    with pytest.raises(CheckpointError, match=message):
        bank.add("f", tmp_path / "other")
    assert list(bank) == list("abcde")


def test_a_head_beside_the_factors_is_refused_and_nothing_changes(tmp_path, bank):
    settings = LsrConfig(
        r=4, separation_rank=2, target_modules=["q_proj"], modules_to_save=["lm_head"]
    )
    get_peft_model(base(), settings).save_pretrained(tmp_path / "head")
    beside = "Kronecker factors alone, but there is also .*lm_head"
    with pytest.raises(UnsupportedLayerError, match=beside):
        bank.add("f", tmp_path / "head")
    assert list(bank) == list("abcde")
