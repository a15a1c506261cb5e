"""The embedded task: a small transformer that reads digits, to be adapted to digits on their side.

    python -m benchmarks.lab.embedded DIRECTORY

writes DIRECTORY/model, a base for `finetune`, and DIRECTORY/train.tsv and dev.tsv. It needs no
download: the pictures come with scikit-learn, and the base is trained here, in about 15 seconds on
one core, the first time it is asked for. A picture is a sentence of 16 words, its grey levels from
0 to 16.
"""

from __future__ import annotations

import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from lsrdecomp.lora.base.base_files import cache_directory, make_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from transformers import BertForSequenceClassification

EMBEDDED = "embedded"
SIDE = 4  # a picture is SIDE × SIDE
LEVELS = 17
PAD = "[PAD]"
START = "[CLS]"
UNKNOWN = "[UNK]"


@dataclass(frozen=True, slots=True)
class EmbeddedRecipe:
    """How the embedded base and its task are made; all set by hand.

    Attributes
    ----------
    version : int
        Of base and data: a new one makes a new cache.
    seed : int
    pretraining_pictures, dev_pictures : int
        Of 1797 pictures those that the base learns and those it is evaluated on; the rest is what
        the shifted task trains on.
    steps, batch : int
        Of pretraining; a step takes 30 ms.
    learning_rate, weight_decay : float
        Of AdamW, the rate being the largest of its schedule.
    """

    version: int = 2
    seed: int = 20260101
    pretraining_pictures: int = 897
    dev_pictures: int = 300
    steps: int = 400
    batch: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.01


class Embedded(NamedTuple):
    """Places of a base and of its task's files."""

    model: Path
    data: Path


def embedded(
    directory: str | Path | None = None, *, recipe: EmbeddedRecipe = EmbeddedRecipe()
) -> Embedded:
    """Return where the embedded base and its task are; they are made first if they are not there.

    Parameters
    ----------
    directory : path, optional
        A directory of its own, instead of the cache.
    recipe : EmbeddedRecipe
    """
    place = embedded_place(directory, recipe=recipe)
    make_once(
        place.model.parent, lambda part: _make(Embedded(part / "model", part / EMBEDDED), recipe)
    )
    return place


def embedded_place(
    directory: str | Path | None = None, *, recipe: EmbeddedRecipe = EmbeddedRecipe()
) -> Embedded:
    """Return where `embedded` puts the base and its task."""
    if directory is None:
        directory = cache_directory() / f"{EMBEDDED}-{recipe.version}"
    return Embedded(Path(directory, "model"), Path(directory, EMBEDDED))


def _make(paths: Embedded, recipe: EmbeddedRecipe) -> None:
    """Pretrain the base on upright pictures, and write the others, turned, as the task's files."""
    pictures, labels = _digits(recipe.seed)
    learned = slice(recipe.pretraining_pictures)
    _write_tokenizer(paths.model)
    _pretrain(pictures[learned], labels[learned], recipe).save_pretrained(paths.model)
    turned = np.rot90(pictures, axes=(1, 2))
    splits = {
        "train": slice(recipe.pretraining_pictures, -recipe.dev_pictures),
        "dev": slice(-recipe.dev_pictures, None),
    }
    paths.data.mkdir()
    for split, rows in splits.items():
        lines = ["text\tlabel"]
        for picture, label in zip(turned[rows], labels[rows], strict=True):
            pixels = " ".join(map(str, picture.ravel()))
            lines.append(f"{pixels}\t{label}")
        file = paths.data / f"{split}.tsv"
        file.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _digits(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return pictures (1797, 4, 4) of grey levels and their labels, shuffled."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    blocks = pictures.reshape(-1, SIDE, 2, SIDE, 2)
    small = blocks.mean((2, 4)).round().astype(np.int64)
    return small[order], labels[order]


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    # In this order the identifier of a grey level is itself.
    words = [*map(str, range(LEVELS)), PAD, START, UNKNOWN]
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
        model_max_length=SIDE**2 + 1,
    )
    fast.save_pretrained(directory)


def _pretrain(
    pictures: np.ndarray, labels: np.ndarray, recipe: EmbeddedRecipe
) -> BertForSequenceClassification:
    """Train a small transformer to read digits."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    sizes = BertConfig(
        vocab_size=LEVELS + 3,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=SIDE**2 + 1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
        pad_token_id=LEVELS,
    )
    sizes.num_labels = 10
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        model = BertForSequenceClassification(sizes)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, recipe.learning_rate, total_steps=recipe.steps
    )
    for tokens, expected in _batches(pictures, labels, recipe):
        loss = torch.nn.functional.cross_entropy(model(input_ids=tokens).logits, expected)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def _batches(
    pictures: np.ndarray, labels: np.ndarray, recipe: EmbeddedRecipe
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield random batches of tokens, (batch, 17), and labels."""
    import torch

    generator = np.random.default_rng(recipe.seed)
    pixels = torch.from_numpy(pictures.reshape(len(pictures), -1))
    start = torch.full((len(pixels), 1), LEVELS + 1)  # the identifier of START
    tokens = torch.cat((start, pixels), dim=1)
    for _ in range(recipe.steps):
        rows = generator.integers(0, len(tokens), recipe.batch)
        yield tokens[rows], torch.from_numpy(labels[rows])


def main(directory: str) -> None:
    """Write a copy of the base and its task."""
    place = embedded()
    shutil.copytree(place.model, Path(directory, "model"))
    shutil.copytree(place.data, directory, dirs_exist_ok=True)
    print(f"Wrote {directory}.")


if __name__ == "__main__":
    main(sys.argv[1])
