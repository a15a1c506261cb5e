"""Bases of transformers that are no text generators or text classifiers.

Each opener has a function that makes batches of what the user gives, and one that runs them:
images for a classifier, sounds for a model such as Whisper, texts for an encoder of sentences.
"""

from __future__ import annotations

from functools import partial
from inspect import signature
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.io import wavfile
from scipy.signal import resample_poly
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoFeatureExtractor,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    AutoModelForSpeechSeq2Seq,
    LogitsProcessor,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    MODEL_MAPPING_NAMES,
)

from lsrdecomp.errors import CheckpointError
from lsrdecomp.gateway import open_pretrained
from lsrdecomp.lora.base.base_files import open_tokenizer, reachable_base
from lsrdecomp.lora.base.base_model import LOADERS, Base, head_options
from lsrdecomp.lora.base.dataset import DataError
from lsrdecomp.lora.base.heads import Batch, Head
from lsrdecomp.lora.base.tokens import LOSS_MASK, model_inputs
from lsrdecomp.lora.files.file_checks import read_json
from lsrdecomp.lora.files.format import CONFIG
from lsrdecomp.lora.files.tensors import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lsrdecomp.lora.base.texts import Item

EMBEDDING_TASK = "FEATURE_EXTRACTION"
"""PEFT's task type of embeddings."""
MAX_NEW_TOKENS = 128
"""Maximum tokens that a model of sounds writes down of one."""
POOLING = Path("1_Pooling") / "config.json"
"""Where sentence-transformers says how token embeddings become one of the sentence."""


def open_other(
    base: str | Path,
    adapter: str | Path,
    *,
    dtype: torch.dtype,
    device: str,
    trust_remote_code: bool = False,
) -> Base | None:
    """Open a base that runs on images or sounds, or whose outputs are embeddings.

    Its config tells which it is. Outputs are embeddings where the adapter's task type says so, or
    it has none and the model no head.

    Returns
    -------
    Base or None
        None for any other base.

    Raises
    ------
    CheckpointError
        If the base cannot be opened.
    """
    config_file = Path(adapter) / CONFIG
    if not config_file.is_file():
        return None
    directory = reachable_base(base)
    open_part = partial(_load, directory=directory, trust_remote_code=trust_remote_code)
    config = open_part(AutoConfig)
    model_type = config.model_type
    options: dict[str, Any] = {"dtype": dtype}
    if model_type in MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES:
        model = open_part(AutoModelForSpeechSeq2Seq, **options)
        # Whisper then returns all tokens, also those that it was given and the end.
        model.generation_config.force_unique_generate_call = True
        reader = _SoundReader(open_part(AutoFeatureExtractor))
        return Base(str(base), model.to(device), reader, Head.seq2seq, batches=_sound_batches)
    if model_type in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES:
        options |= head_options(adapter)
        model = open_part(AutoModelForImageClassification, ignore_mismatched_sizes=True, **options)
        processor = open_part(AutoImageProcessor)
        return Base(
            str(base), model.to(device), processor, Head.classification, batches=_image_batches
        )
    task_type = read_json(config_file).get("task_type")
    is_plain = set(config.architectures or ()) <= set(MODEL_MAPPING_NAMES.values())
    if task_type in LOADERS or (task_type != EMBEDDING_TASK and not is_plain):
        return None
    model = open_part(AutoModel, **options).to(device)
    tokenizer = open_tokenizer(base, trust_remote_code=trust_remote_code)
    model.pools_first_token = _pools_first_token(Path(directory))
    return Base(str(base), model, tokenizer, Head.numbers, outputs=sentence_embedding)


def _load(loader: Any, directory: str, **options: Any) -> Any:
    """Return what a class of transformers reads; `CheckpointError` if it cannot."""
    try:
        return open_pretrained(loader, directory, **options)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        text = f"no base could be opened: {first_line(error)}"
        raise CheckpointError(text, path=directory) from error


def sentence_embedding(model: nn.Module, batch: Batch) -> Tensor:
    """Return the embeddings of texts, of unit length, (examples, width).

    They are the means over tokens, or the embeddings of the first ones where the model's files say
    so.
    """
    hidden: Tensor = model(**model_inputs(batch)).last_hidden_state
    if getattr(model, "pools_first_token", False):
        pooled = hidden[:, 0]
    else:
        mask = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * mask).sum(1) / mask.sum(1).clamp_min(1.0)
    return nn.functional.normalize(pooled.float(), dim=-1)


def _pools_first_token(directory: Path) -> bool:
    config = directory / POOLING
    return config.is_file() and bool(read_json(config).get("pooling_mode_cls_token"))


def _image_batches(base: Base, items: Sequence[Item], size: int) -> Iterator[Batch]:
    """Yield batches of the images in some files."""
    from PIL import Image

    for start in range(0, len(items), size):
        images = []
        for path in _files(items[start : start + size], "images"):
            with Image.open(path) as image:
                images.append(image.convert("RGB"))
        yield dict(base.tokenizer(images=images, return_tensors="pt"))


def _sound_batches(base: Base, items: Sequence[Item], size: int) -> Iterator[Batch]:
    """Yield batches of the sounds in some files, with what the model writes down of them.

    The tokens that it writes are those to be predicted, so that no transcripts are needed.
    """
    model: Any = base.model
    weight = next(model.parameters())
    for start in range(0, len(items), size):
        batch = base.tokenizer(_files(items[start : start + size], "sounds"), weight.dtype)
        inputs = {name: value.to(weight.device) for name, value in batch.items()}
        given = _GivenTokens()
        with torch.no_grad():
            tokens = model.generate(
                **inputs,
                logits_processor=[given],
                max_new_tokens=base.tokenizer.new_tokens(model),
                max_length=None,
                do_sample=False,
            )
        written = _written_down(tokens.cpu(), given.count, model.generation_config.eos_token_id)
        yield batch | written


class _GivenTokens(LogitsProcessor):
    """Counts the tokens that a model is given before it writes: of Whisper language and task."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores as they are; the first call has the tokens that were given alone."""
        self.count = self.count or input_ids.shape[1]
        return scores


def _written_down(tokens: Tensor, n_given: int, end: int | list[int] | None) -> dict[str, Tensor]:
    """Return a decoder's inputs, with a mask of those that predict what was written.

    That is every token after those that were given, up to the first end of each row.
    """
    ends = [] if end is None else end
    is_end = torch.isin(tokens[:, n_given:], torch.as_tensor(ends))
    ended_before = is_end.cumsum(1) - is_end.long() > 0
    predicts = torch.zeros_like(tokens)
    predicts[:, n_given - 1 : -1] = ~ended_before
    return {"decoder_input_ids": tokens[:, :-1], LOSS_MASK: predicts[:, :-1]}


def _files(items: Sequence[Item], what: str) -> list[Path]:
    """Return items that are files; raise `DataError` for others."""
    files = [item for item in items if isinstance(item, Path)]
    if len(files) < len(items):
        raise DataError(f"this base is run on {what}: give data= a folder of them")
    return files


class _SoundReader:
    """Reads WAV files as the inputs of a model of sounds."""

    def __init__(self, extractor: Any) -> None:
        self.extractor = extractor

    def __call__(self, files: Sequence[Path], dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the inputs for some files, numbers in a model's precision."""
        rate = self.extractor.sampling_rate
        sounds = [_read_sound(path, rate) for path in files]
        # Whisper's pads all sounds to one length by itself, and must; others pad none unless asked.
        padding = signature(self.extractor.__call__).parameters["padding"].default or True
        options = {"sampling_rate": rate, "padding": padding, "return_tensors": "pt"}
        return dict(self.extractor(sounds, **options).to(dtype))

    @staticmethod
    def new_tokens(model: Any) -> int:
        """Return how many tokens a model may write."""
        positions = getattr(model.config, "max_target_positions", MAX_NEW_TOKENS)
        return int(min(MAX_NEW_TOKENS, positions // 2))


def _read_sound(path: Path, rate: int) -> np.ndarray[Any, Any]:
    """Read a WAV file as one channel at a sampling rate, in −1 … 1.

    Raises
    ------
    DataError
        If it cannot be read.
    """
    try:
        own_rate, sound = wavfile.read(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {first_line(error)}; sounds are read from WAV files") from error
    values = sound.astype(np.float32)
    if sound.dtype == np.uint8:  # the only one without a sign
        values = values / 128.0 - 1.0
    elif sound.dtype.kind == "i":
        values /= np.iinfo(sound.dtype).max
    if values.ndim > 1:
        values = values.mean(1)
    if own_rate != rate:
        common = gcd(own_rate, rate)
        values = resample_poly(values, rate // common, own_rate // common)
    return np.asarray(values, np.float32)
