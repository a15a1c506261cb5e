"""Bases of a few thousand numbers with a tokenizer, a LoRA and what is made of it."""

from __future__ import annotations

import torch
import transformers
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers

from lsrdecomp import compress
from lsrdecomp.lora.compress.export import export_lora
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.search.plan import CompressionPlan

WORDS = ("[PAD]", "[UNK]", *(f"w{i}" for i in range(30)))
TEXTS = [(" ".join(f"w{(7 * i + j * j) % 30}" for j in range(3 + i % 5)), None) for i in range(20)]


def make_model(kind, labels=3, layers=2):
    torch.manual_seed(0)
    if kind == "SEQ_CLS":
        sizes = {
            "hidden_size": 16,
            "num_hidden_layers": layers,
            "num_attention_heads": 2,
            "intermediate_size": 32,
        }
        config = transformers.BertConfig(
            **sizes, vocab_size=32, num_labels=labels, initializer_range=0.3
        )
        return transformers.BertForSequenceClassification(config), ["query", "value"]
    config = transformers.GPT2Config(
        n_embd=16, n_layer=layers, n_head=2, vocab_size=32, n_positions=32
    )
    config.initializer_range = 0.3
    return transformers.GPT2LMHeadModel(config), ["c_attn"]


def save_base(model, folder):
    """Write a model of up to 32 tokens and a tokenizer for it."""
    model.save_pretrained(folder)
    words = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    )
    tokenizer.save_pretrained(folder)


def write_directories(folder, kind, labels=3, layers=2):
    """Write a base with its tokenizer, a LoRA on it, the LSR made of that, and its export."""
    model, targets = make_model(kind, labels, layers)
    save_base(model, folder / "base")
    config = LoraConfig(
        r=4, lora_alpha=2, target_modules=targets, init_lora_weights=False, task_type=kind
    )
    get_peft_model(model, config).save_pretrained(folder / "lora")
    compress(open_checkpoint(folder / "lora"), CompressionPlan(separation_rank=2)).save(
        folder / "lsr"
    )
    export_lora(open_checkpoint(folder / "lora"), folder / "same")
    return folder


def open_pair(base, source, written):
    """Open a base with each of two adapters; its large weights are held once."""
    from lsrdecomp.lora.base.open_bases import open_base

    plain = open_base(base, source)
    return plain.with_adapter(source), plain.with_adapter(written)
