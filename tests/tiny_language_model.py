"""A language model of a few thousand numbers, its tokenizer, and a LoRA on q, k, v, o."""

from __future__ import annotations

import json

import torch
from peft import LoraConfig, get_peft_model
from tiny_tokenizer import MARKS, WORDS, word_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


def tiny_model(*, layers=2, hidden=32):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(MARKS) + len(WORDS),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def make_base(folder, **sizes):
    """The directory of the base."""
    tiny_model(**sizes).save_pretrained(folder / "base")
    word_tokenizer().save_pretrained(folder / "base")
    return folder / "base"


def make_lora(folder, **sizes):
    """The directory of a LoRA on it that does something."""
    torch.manual_seed(1)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(tiny_model(**sizes), config).save_pretrained(folder / "lora")
    return folder / "lora"


def write_rows(path, count=24):
    """Prompts that say a word and a number of times, completions that do so."""
    rows = []
    for i in range(count):
        word, times = WORDS[i % 6], 1 + i % 4
        rows.append(
            {"prompt": f"user {word} {WORDS[times]}", "completion": " ".join([word] * times)}
        )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
