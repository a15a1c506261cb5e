"""The embedded task: a small transformer that reads digits, to be adapted to digits lying on their side.

It needs no download: the pictures come with scikit-learn, and the base is trained here, in about 15
seconds on one core, the first time it is asked for. A picture is a sentence of 16 words, its grey
levels from 0 to 16.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from lsrdecomp.calibration.base_files import cache_directory, make_once
from lsrdecomp.training.settings import EMBEDDED
from lsrdecomp.training.tasks import TASKS

if TYPE_CHECKING:
    from collections.abc import Iterator

VERSION = 1  # of the base and the data; a new one makes a new cache
SIZE = 4  # a picture is SIZE × SIZE
LEVELS = 17
PAD, START, UNKNOWN = "[PAD]", "[CLS]", "[UNK]"
PRETRAINED_ON, DEV = 897, 300  # of 1797 pictures; the rest is what the shifted task trains on
STEPS, BATCH, RATE = 400, 64, 2e-3
SEED = 20260101


class Embedded(NamedTuple):
    """Where a base and its task's files are."""

    model: Path
    data: Path


def embedded(directory: str | Path | None = None, *, steps: int = STEPS) -> Embedded:
    """Where the embedded base and its task are; they are made first if they are not there.

    Parameters
    ----------
    directory : path, optional
        A directory of its own, instead of the cache.
    steps : int
        Of pretraining; 30 ms each.
    """
    directory = (
        Path(directory) if directory is not None else cache_directory() / f"{EMBEDDED}-{VERSION}"
    )
    make_once(directory, lambda part: _make(Embedded(part / "model", part / EMBEDDED), steps))
    return Embedded(directory / "model", directory / EMBEDDED)


def _make(paths: Embedded, steps: int) -> None:
    pictures, labels = _digits()
    _write_tokenizer(paths.model)
    _pretrain(pictures[:PRETRAINED_ON], labels[:PRETRAINED_ON], steps).save_pretrained(paths.model)
    turned = np.rot90(pictures, axes=(1, 2))
    paths.data.mkdir()
    task = TASKS[EMBEDDED]
    for split, rows in (("train", slice(PRETRAINED_ON, -DEV)), ("dev", slice(-DEV, None))):
        lines = [
            f"{' '.join(map(str, p.ravel()))}\t{label}"
            for p, label in zip(turned[rows], labels[rows], strict=True)
        ]
        task.file(paths.data, split).write_text(
            "\n".join(["pixels\tlabel", *lines, ""]), encoding="utf-8"
        )


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Pictures (1797, 4, 4) of grey levels and their labels, shuffled."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    small = pictures.reshape(-1, SIZE, 2, SIZE, 2).mean((2, 4)).round().astype(np.int64)
    return small[order], labels[order]


def _write_tokenizer(directory: Path) -> None:
    words = [
        *map(str, range(LEVELS)),
        PAD,
        START,
        UNKNOWN,
    ]  # so that the identifier of a grey level is itself
    tokenizer = Tokenizer(
        WordLevel({word: index for index, word in enumerate(words)}, unk_token=UNKNOWN)
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A $B:1", special_tokens=[(START, words.index(START))]
    )
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        cls_token=START,
        unk_token=UNKNOWN,
        model_max_length=SIZE**2 + 1,
    )
    fast.save_pretrained(directory)


def _pretrain(
    pictures: np.ndarray, labels: np.ndarray, steps: int
) -> BertForSequenceClassification:
    sizes = BertConfig(
        vocab_size=LEVELS + 3,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=SIZE**2 + 1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
        pad_token_id=LEVELS,
    )
    sizes.num_labels = 10
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        model = BertForSequenceClassification(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    for tokens, expected in _batches(pictures, labels, steps):
        loss = nn.functional.cross_entropy(model(input_ids=tokens).logits, expected)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def _batches(
    pictures: np.ndarray, labels: np.ndarray, steps: int
) -> Iterator[tuple[Tensor, Tensor]]:
    generator = np.random.default_rng(SEED)
    tokens = torch.from_numpy(pictures.reshape(len(pictures), -1))
    tokens = torch.cat((torch.full((len(tokens), 1), LEVELS + 1), tokens), dim=1)  # (N, 17)
    for _ in range(steps):
        rows = generator.integers(0, len(tokens), BATCH)
        yield tokens[rows], torch.from_numpy(labels[rows])
