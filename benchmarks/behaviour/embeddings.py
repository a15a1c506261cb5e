"""An encoder of sentences: what is kept of a LoRA that changed its embeddings, on unseen texts.

    python -m benchmarks.behaviour.embeddings train.tsv --out WORK [--seed 0] [--keep 0.9 0.95]

``train.tsv`` are SST-2's reviews. A LoRA (r = 8 on query, key, value) teaches all-MiniLM-L6-v2 to
place reviews of one sentiment near each other. Then one call of `lsrdecomp.compress` per share on
400 unlabelled reviews, and the embeddings are judged on 400 others. Writes
`results/embeddings.json`.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp import compress
from lsrdecomp.lora.base.base_files import MINILM, find_base
from lsrdecomp.lora.base.base_model import Base
from lsrdecomp.lora.base.batches import text_batches
from lsrdecomp.lora.base.divergence import Reference
from lsrdecomp.lora.base.open_bases import open_base
from lsrdecomp.lora.base.other_bases import sentence_embedding

Reviews = Sequence[tuple[str, int]]


def read_reviews(path: Path, n: int, seed: int) -> list[tuple[str, int]]:
    """Return so many different reviews of eight words and more, with their labels."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    long = {row["sentence"]: int(row["label"]) for row in rows if row["sentence"].count(" ") >= 8}
    chosen = np.random.default_rng(seed).permutation(len(long))[:n]
    reviews = list(long.items())
    return [reviews[i] for i in chosen]


def embeddings(base: Base, texts: Sequence[str]) -> Tensor:
    tokens = base.tokenizer(
        list(texts), padding=True, truncation=True, max_length=64, return_tensors="pt"
    )
    return sentence_embedding(base.model, dict(tokens))


def train(base: Base, reviews: Reviews, steps: int, seed: int) -> None:
    """Draw the embeddings of reviews of one sentiment together (supervised contrastive loss)."""
    parameters = [parameter for parameter in base.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, 1e-3, weight_decay=0.0)
    draws = np.random.default_rng(seed)
    for step in range(steps):
        chosen = [reviews[i] for i in draws.choice(len(reviews), 32, replace=False)]
        found = embeddings(base, [text for text, _ in chosen])
        labels = torch.tensor([label for _, label in chosen])
        logits = found @ found.T / 0.1 - 1e9 * torch.eye(len(found))
        same = (labels[:, None] == labels) & ~torch.eye(len(found), dtype=torch.bool)
        loss = -(logits.log_softmax(-1) * same).sum() / same.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: {float(loss.detach()):.3f}", flush=True)


def nearest_agrees(base: Base, reviews: Reviews) -> float:
    """Return how often the nearest other review has the same sentiment."""
    with torch.no_grad():
        found = torch.cat(
            [
                embeddings(base, [text for text, _ in reviews[i : i + 50]])
                for i in range(0, len(reviews), 50)
            ]
        )
    similarity = found @ found.T - 2 * torch.eye(len(found))
    labels = torch.tensor([label for _, label in reviews])
    return float((labels[similarity.argmax(-1)] == labels).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("reviews", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.9, 0.95])
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    reviews = read_reviews(arguments.reviews, 2000, arguments.seed)
    trained, calibrated, judged = reviews[:1200], reviews[1200:1600], reviews[1600:]
    # 1. The LoRA.
    lora = arguments.out / "lora"
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["query", "key", "value"],
        task_type="FEATURE_EXTRACTION",
    )
    adapted = get_peft_model(_plain_model(), config)
    adapted.save_pretrained(lora)
    base = open_base(MINILM, lora)
    source = Base("", adapted, base.tokenizer, base.head, outputs=sentence_embedding)
    train(source, trained, arguments.steps, arguments.seed)
    adapted.eval().save_pretrained(lora)
    result: dict[str, Any] = {
        "nearest_agrees": nearest_agrees(base, judged),
        "nearest_agrees_with_lora": nearest_agrees(base.with_adapter(lora), judged),
    }
    print(result, flush=True)
    # 2. One command for each share, and texts that nothing has seen.
    texts = [(text, None) for text, _ in judged]
    source = base.with_adapter(lora)
    judge = Reference(source, text_batches(source, texts, size=50, seed=0))
    rows = []
    for share in arguments.keep:
        small = compress(lora, base=MINILM, data=[text for text, _ in calibrated], keep=share)
        written = base.with_adapter(small.save(arguments.out / f"small-{share}", force=True))
        found = judge.compare(written)
        rows.append(
            records.said_and_found(share, small, found)
            | {
                "nearest_agrees": nearest_agrees(written, judged),
            }
        )
        print(rows[-1], flush=True)
    records.save(
        RESULTS / "embeddings.json",
        {**result, "rows": rows},
        *("torch", "transformers", "peft"),
        seed=arguments.seed,
    )


def _plain_model() -> Any:
    from transformers import AutoModel

    return AutoModel.from_pretrained(find_base(MINILM))


if __name__ == "__main__":
    main()
