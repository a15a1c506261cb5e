"""Names of modules that many adapters have: the dictionary by which an index is deflated.

It is part of the format: other bytes would not open what was written with these. More names need a
dictionary of their own and a mark which of the two it was.
"""

from __future__ import annotations

_ATTENTION = ("k_proj", "o_proj", "q_proj", "v_proj")
_BLOCKS: tuple[tuple[str, tuple[str, ...]], ...] = (
    # The block's number is a zero character; the most common families are last.
    (
        "encoder.block.\0.layer.",
        ("0.SelfAttention.k", "0.SelfAttention.o", "0.SelfAttention.q", "0.SelfAttention.v"),
    ),
    ("decoder.block.\0.layer.", ("1.EncDecAttention.q", "1.EncDecAttention.v")),
    ("gpt_neox.layers.\0.", ("attention.dense", "attention.query_key_value")),
    ("transformer.h.\0.", ("self_attention.dense", "self_attention.query_key_value")),
    ("model.encoder.layers.\0.", ("fc1", "fc2", "self_attn.out_proj")),
    ("model.decoder.layers.\0.", ("encoder_attn.q_proj", "encoder_attn.v_proj")),
    ("text_model.encoder.layers.\0.self_attn.", ("k_proj", "out_proj", "q_proj", "v_proj")),
    ("distilbert.transformer.layer.\0.attention.", ("k_lin", "out_lin", "q_lin", "v_lin")),
    ("vit.encoder.layer.\0.attention.attention.", ("key", "query", "value")),
    ("transformer.h.\0.", ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
    ("roberta.encoder.layer.\0.attention.self.", ("key", "query", "value")),
    ("bert.encoder.layer.\0.", ("intermediate.dense", "output.dense")),
    (
        "bert.encoder.layer.\0.attention.",
        ("output.dense", "self.key", "self.query", "self.value"),
    ),
    ("model.layers.\0.", ("self_attn.dense", "self_attn.qkv_proj", "mlp.gate_up_proj")),
    ("model.language_model.layers.\0.self_attn.", _ATTENTION),
    ("model.layers.\0.mlp.", ("down_proj", "gate_proj", "up_proj")),
    ("model.layers.\0.self_attn.", _ATTENTION),
)


def _common_names() -> bytes:
    names = [f"{block}{module}" for block, modules in _BLOCKS for module in modules]
    return "\n".join(names).encode()


COMMON_NAMES = _common_names()
"""The dictionary: names in UTF-8, a line each."""
