"""Small models and hand-written LSR directories, independent of `lsrdecomp.lora.files`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import BertConfig, BertForSequenceClassification


def tiny_bert(seed: int = 0) -> BertForSequenceClassification:
    """A randomly filled BERT with two layers of width 24, in evaluation mode."""
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=40,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=36,
        max_position_embeddings=16,
        num_labels=2,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.3,  # wide enough for every layer to matter to the logits
    )
    return BertForSequenceClassification(config).eval()


def token_batch(rows: int = 5, length: int = 7, seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"input_ids": torch.randint(0, 40, (rows, length), generator=generator)}


def kron_sum(factors: Sequence[np.ndarray]) -> np.ndarray:
    """``Σ_k F1[k] ⊗ F2[k] ⊗ …``, term by term through `numpy.kron`."""
    total: Any = 0
    for term in zip(*factors, strict=True):
        product = term[0]
        for factor in term[1:]:
            product = np.kron(product, factor)
        total = total + product
    return np.asarray(total)


def write_lsr_directory(
    folder: Path,
    modules: Mapping[str, tuple[Sequence[int], Sequence[int], Sequence[int]]],
    *,
    terms: tuple[int, int] = (3, 2),
    seed: int = 0,
    extra: Mapping[str, np.ndarray] | None = None,
    **settings: Any,
) -> dict[str, np.ndarray]:
    """Write an LSR adapter by hand; return ΔW of each module before scaling.

    It is formed with `numpy.kron` in float64.
    """
    rng = np.random.default_rng(seed)
    tensors: dict[str, np.ndarray] = dict(extra or {})
    deltas = {}
    for name, (out, inner, into) in modules.items():
        right = [
            rng.standard_normal((terms[1], r, n)).astype("float32")
            for r, n in zip(inner, into, strict=True)
        ]
        left = [
            rng.standard_normal((terms[0], m, r)).astype("float32")
            for m, r in zip(out, inner, strict=True)
        ]
        for side, factors in (("lsr_A", right), ("lsr_B", left)):
            for index, factor in enumerate(factors, start=1):
                tensors[f"base_model.model.{name}.{side}.factor_{index}"] = factor
        wide = [[factor.astype("float64") for factor in side] for side in (left, right)]
        deltas[name] = kron_sum(wide[0]) @ kron_sum(wide[1])
    inner = next(iter(modules.values()))[1]
    config = {
        "peft_type": "LSR",
        "r": int(np.prod(inner)),
        "inner_shape": list(inner),
        "order": len(inner),
        "separation_rank": list(terms),
        "lsr_alpha": 0.5,
        "target_modules": list(modules),
        "shape_pattern": {
            name: {"out": list(out), "inner": list(inner), "into": list(into)}
            for name, (out, inner, into) in modules.items()
        },
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return deltas
