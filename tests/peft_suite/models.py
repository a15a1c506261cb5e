"""Tiny random models under the names that PEFT's tests download; no network is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

VOCABULARY = 1100  # above every token index the tests use
WIDTH = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 36,
}
PAD: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
GQA = {**WIDTH, **PAD, "num_key_value_heads": 2}
MIXTURE = {**GQA, "num_local_experts": 4, "head_dim": 8}
ENCODER = {**WIDTH, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "type_vocab_size": 2}
GPT = {**PAD, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
SEQ2SEQ = {
    **PAD,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 36,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "decoder_start_token_id": 0,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 36,
    "num_layers": 2,
    "num_heads": 4,
}
OPT = {**PAD, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 36}

# name on the hub: (architecture, model type, sizes)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "peft-internal-testing/tiny-random-OPTForCausalLM": (
        "OPTForCausalLM",
        "opt",
        {**OPT, "word_embed_proj_dim": 32},
    ),
    "peft-internal-testing/opt-125m": (
        "OPTForCausalLM",
        "opt",
        # Tests count its layers, and name the sixth.
        {
            **OPT,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 12,
        },
    ),
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": ("GPT2LMHeadModel", "gpt2", GPT),
    "hf-internal-testing/tiny-random-gpt2": ("GPT2LMHeadModel", "gpt2", GPT),
    "peft-internal-testing/tiny-random-GPTJForCausalLM": (
        "GPTJForCausalLM",
        "gptj",
        {**GPT, "rotary_dim": 4},
    ),
    "trl-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", "llama", GQA),
    "peft-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", "llama", GQA),
    "hf-internal-testing/tiny-random-LlamaForCausalLM": ("LlamaForCausalLM", "llama", GQA),
    "hf-internal-testing/tiny-random-MistralForCausalLM": ("MistralForCausalLM", "mistral", GQA),
    "peft-internal-testing/tiny-dummy-qwen2": (
        "Qwen2ForCausalLM",
        "qwen2",
        {**GQA, "tie_word_embeddings": True},
    ),
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        {**GQA, "head_dim": 8},
    ),
    "trl-internal-testing/tiny-Llama4ForCausalLM": (
        "Llama4ForCausalLM",
        "llama4_text",
        {**MIXTURE, "intermediate_size_mlp": 36, "interleave_moe_layer_step": 1},
    ),
    "trl-internal-testing/tiny-GptOssForCausalLM": (
        "GptOssForCausalLM",
        "gpt_oss",
        {**MIXTURE, "layer_types": None},
    ),
    "peft-internal-testing/tiny-random-T5ForConditionalGeneration-calibrated": (
        "T5ForConditionalGeneration",
        "t5",
        T5,
    ),
    "peft-internal-testing/tiny-random-BartForConditionalGeneration": (
        "BartForConditionalGeneration",
        "bart",
        SEQ2SEQ,
    ),
    "peft-internal-testing/tiny-random-BertModel": ("BertModel", "bert", ENCODER),
    "peft-internal-testing/tiny-random-RobertaModel": ("RobertaModel", "roberta", ENCODER),
    "peft-internal-testing/tiny-random-DebertaModel": (
        "DebertaModel",
        "deberta",
        {**ENCODER, "type_vocab_size": 0},
    ),
    "peft-internal-testing/tiny-random-DebertaV2Model": (
        "DebertaV2Model",
        "deberta-v2",
        {**ENCODER, "type_vocab_size": 0},
    ),
    "peft-internal-testing/tiny-random-BertForSequenceClassification": (
        "BertForSequenceClassification",
        "bert",
        ENCODER,
    ),
    "peft-internal-testing/tiny-random-RobertaForSequenceClassification": (
        "RobertaForSequenceClassification",
        "roberta",
        ENCODER,
    ),
    "trl-internal-testing/tiny-LlamaForSequenceClassification-3.2": (
        "LlamaForSequenceClassification",
        "llama",
        GQA,
    ),
}


def make_models(folder: Path) -> None:
    """Write every model that is not there yet, and a tokenizer beside it."""
    import transformers

    for name, (architecture, model_type, sizes) in MODELS.items():
        target = folder / name
        if (target / "config.json").exists():
            continue
        torch.manual_seed(0)
        config = AutoConfig.for_model(
            model_type, **{key: value for key, value in sizes.items() if value is not None}
        )
        model: PreTrainedModel = getattr(transformers, architecture)(config)
        for parameter in model.parameters():
            # Some architectures leave theirs unfilled, and 0.02 makes every layer negligible.
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.1)
        model.save_pretrained(target)
        tokenizer().save_pretrained(target)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, over words that are numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {
        "<s>": 0,
        "<pad>": 1,
        "</s>": 2,
        "<unk>": 3,
        **{str(index): index for index in range(4, VOCABULARY)},
    }
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
    )
