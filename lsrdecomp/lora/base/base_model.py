"""A base model and what its outputs are, opened plain or with an adapter on it.

Models of texts are opened here, by the task type in an adapter's config; `open_bases` opens any.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeGuard

import torch
from peft import PeftConfig, PeftModel
from peft.tuners.trainable_tokens.layer import TrainableTokensLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

import lsrdecomp.lora.peft  # noqa: F401 (teaches PEFT to open LSR directories)
from lsrdecomp.errors import CalibrationError, CheckpointError
from lsrdecomp.gateway import open_pretrained
from lsrdecomp.lora.base.base_files import open_tokenizer, reachable_base
from lsrdecomp.lora.base.batch_rows import call_with, join_rows
from lsrdecomp.lora.base.dataset import DataError
from lsrdecomp.lora.base.expert_layers import attach_adapter
from lsrdecomp.lora.base.heads import Batch, Head
from lsrdecomp.lora.base.texts import Example, Item
from lsrdecomp.lora.base.tokens import model_inputs
from lsrdecomp.lora.files import Checkpoint, open_checkpoint, write_lora
from lsrdecomp.lora.files.file_checks import sha256
from lsrdecomp.lora.files.format import CONFIG
from lsrdecomp.lora.files.records import LoraLayer
from lsrdecomp.lora.files.tensors import first_line, read_header
from lsrdecomp.lora.files.writing import WEIGHTS, weight_file
from lsrdecomp.lora.peft.geometry import is_measured

LOADERS = {
    "SEQ_CLS": (AutoModelForSequenceClassification, Head.classification),
    "TOKEN_CLS": (AutoModelForTokenClassification, Head.tokens),
    "CAUSAL_LM": (AutoModelForCausalLM, Head.causal_lm),
    "SEQ_2_SEQ_LM": (AutoModelForSeq2SeqLM, Head.seq2seq),
}
"""Class of transformers and head of a base, by the task type in an adapter's config."""
HEAD_WEIGHTS = (
    "classifier.weight",
    "score.weight",
    "classifier.out_proj.weight",
    "classification_head.out_proj.weight",
)
"""Endings of the names of a classifier's last weight, which adapters for classification bring."""


def model_logits(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of a model of transformers."""
    logits: Tensor = model(**model_inputs(batch)).logits
    return logits


@dataclass(frozen=True, slots=True)
class Base:
    """A base model for the task of an adapter, plain or with an adapter active.

    It is how to run a batch (``outputs``), and what its output is (``head``). For a model of one's
    own, whose outputs are numbers, a module is enough where a base is asked for (`own_base`).

    Attributes of an adapter are empty for a plain base.
    """

    name: str
    model: nn.Module
    tokenizer: Any  # or what else prepares inputs, such as an image processor
    head: Head
    modules: tuple[str, ...] = ()  # the adapted layers, by their names in the plain base
    adapter_base: str = ""  # what the adapter's config calls its base
    adapter_sha256: str = ""  # of the adapter's weight file
    outputs: Callable[[nn.Module, Batch], Tensor] = model_logits
    batches: Callable[[Base, Sequence[Item], int], Iterator[Batch]] | None = None
    """Makes batches of about so many items; absent, of texts and prompts."""
    module_names: Callable[[Checkpoint], Mapping[str, str]] | None = None
    """Returns the modules of a checkpoint's layers by their names in it; absent, they are alike."""
    pictures: Callable[[Base, Sequence[Example]], list[bytes]] | None = None
    """Draws the images of some examples as PNG files, where the model makes images."""
    measured_part: str = ""  # the part of the model that runs: beginning of its modules' names

    def with_adapter(self, adapter: str | Path) -> Base:
        """Return the base with an adapter on it: a directory that PEFT opens, or a LoRA file.

        The two share their large weights; this one stays plain.

        Raises
        ------
        CheckpointError
            If the adapter does not fit.
        """
        # 1. Copy the model. An adapter may overwrite heads and biases; all other parameters are
        #    shared: deepcopy takes what its memo holds, by id, in place of a copy.
        memo = {}
        for name, parameter in self.model.named_parameters():
            if parameter.ndim > 1 and not name.endswith(HEAD_WEIGHTS):
                memo[id(parameter)] = parameter
        # 2. Put the adapter on the copy.
        try:
            copied = copy.deepcopy(self.model, memo)
            if (Path(adapter) / CONFIG).is_file() and self.module_names is None:
                model = attach_adapter(copied, adapter)
            else:
                model = self._attach_file(copied, adapter)
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"does not fit {self.name}: {first_line(error)}", path=adapter
            ) from error
        model = model.to(next(self.model.parameters()).device).eval()
        # 3. Record which adapter it is, and the layers that it adapts.
        weights = weight_file(Path(adapter))
        modules = adapted_modules(model)
        return replace(
            self,
            model=model,
            modules=tuple(name for name in modules if name.startswith(self.measured_part)),
            adapter_base=str(model.peft_config["default"].base_model_name_or_path or ""),
            adapter_sha256=sha256(weights) if weights.is_file() else "",
        )

    def names_in(self, checkpoint: Checkpoint) -> Mapping[str, str]:
        """Return the module that each layer of a checkpoint adapts, by the layer's name."""
        if self.module_names is not None:
            return self.module_names(checkpoint)
        return {layer.name: layer.name for layer in checkpoint.layers}

    def _attach_file(self, model: nn.Module, adapter: str | Path) -> PeftModel:
        """Put a LoRA file on a model: PEFT opens a copy with the names of the model's modules."""
        source = open_checkpoint(adapter, carry=True)
        if any(not isinstance(layer, LoraLayer) for layer in source.layers):
            return attach_adapter(model, adapter)  # LSR, under the names of the base's modules
        names = self.names_in(source)
        layers = [replace(layer, name=names[layer.name]) for layer in source.layers]
        config = {"peft_type": "LORA", "target_modules": sorted(names.values())}
        renamed = replace(source, layers=tuple(layers), config=config, extras={}, carried={})

        def pairs() -> Iterator[tuple[str, Any, Any]]:
            for layer in layers:
                up, down = layer.load()
                yield layer.name, up * layer.scale, down

        with TemporaryDirectory() as folder:
            written = write_lora(Path(folder) / "lora", layers=pairs(), source=renamed)
            return PeftModel.from_pretrained(model, str(written))


def open_text_base(
    base: str | Path,
    adapter: str | Path,
    *,
    dtype: torch.dtype,
    device: str,
    trust_remote_code: bool = False,
) -> Base:
    """Open a model of texts, with the kind of head that ``adapter`` was trained for.

    Raises
    ------
    CheckpointError
        If the adapter's task type is none of `LOADERS`.
    """
    # 1. The task type in the adapter's config says which class of transformers opens the base.
    task_type = adapter_task(Path(adapter))
    loader, head = LOADERS[task_type]
    # 2. A classifier gets as many classes as the adapter brings, if it brings a head.
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if head not in (Head.causal_lm, Head.seq2seq):
        options |= head_options(adapter)
    model, tokenizer = load_model(loader, base, dtype=dtype, **options)
    if head is Head.classification and model.config.num_labels == 1:
        head = Head.numbers  # one class is a score
    return Base(str(base), model.to(device), tokenizer, head)


def own_base(model: nn.Module) -> Base:
    """Return the base of a module whose outputs are numbers, run on batches of its arguments.

    Outputs are a tensor with a row for each example, or the first tensor of a tuple or of an output
    of transformers or diffusers.
    """
    return Base(
        type(model).__name__,
        model.eval(),
        None,
        Head.numbers,
        outputs=_first_output,
        batches=given_batches,
    )


def _first_output(model: nn.Module, batch: Batch) -> Tensor:
    output = call_with(model, model_inputs(batch))
    if isinstance(output, Mapping):
        output = output.get("logits", next(iter(output.values())))
    while isinstance(output, tuple | list):
        output = output[0]
    if not isinstance(output, Tensor):
        raise CalibrationError(
            f"the model returns a {type(output).__name__}, no tensor; give base=Base(…, "
            "outputs=…), a function that returns one"
        )
    return output


def given_batches(_base: Base, items: Sequence[Item], size: int) -> Iterator[Batch]:
    """Yield batches of the rows that were given."""
    rows = [item.inputs for item in items if isinstance(item, Example)]
    if len(rows) < len(items):
        raise DataError(
            "a model of one's own is run on batches: give data= an iterable of tensors, tuples or "
            "dictionaries of its arguments"
        )
    yield from join_rows(rows, size)


def head_options(adapter: str | Path) -> dict[str, Any]:
    """Return the number of classes as a loader's argument, if an adapter brings a head."""
    n_classes = _n_saved_classes(adapter)
    return {} if n_classes is None else {"num_labels": n_classes}


def adapter_task(adapter: Path) -> str:
    """Return the task type in an adapter's config.

    Raises
    ------
    CheckpointError
        If there is no config, or the task type is none of `LOADERS`.
    """
    if not (adapter / "adapter_config.json").is_file():
        raise CheckpointError(
            "has no adapter_config.json, so it is no adapter of PEFT, as models of transformers "
            "need; for a LoRA of an image model name its pipeline, a directory with a "
            "model_index.json, or compress the file without a base: "
            f"lsrdecomp compress {shlex.quote(str(adapter))} --ratio 4 --out small.safetensors",
            path=adapter,
        )
    try:
        config = PeftConfig.from_pretrained(str(adapter))
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(
            f"is not an adapter that PEFT opens: {first_line(error)}", path=adapter
        ) from error
    task_type = str(getattr(config.task_type, "value", config.task_type))
    if task_type not in LOADERS:
        raise CheckpointError(
            f"task type {task_type!r} is not one of {', '.join(LOADERS)}, and the base is none of "
            "images, sounds or embeddings; if it writes or classifies text, write "
            '"task_type": "CAUSAL_LM" or another into adapter_config.json',
            path=adapter,
        )
    return task_type


def _n_saved_classes(adapter: str | Path) -> int | None:
    """Return the number of classes of the head in an adapter's file; None if it has no head."""
    weights = Path(adapter) / WEIGHTS
    if not weights.exists():
        return None
    for name, tensor in read_header(weights).tensors.items():
        if name.endswith(HEAD_WEIGHTS):
            return tensor.shape[0]
    return None


def load_model(
    loader: Any, base: str | Path, *, trust_remote_code: bool = False, **options: Any
) -> tuple[Any, Any]:
    """Open a base and its tokenizer; both know the padding token that batches need.

    Parameters
    ----------
    loader : class
        The class of transformers that reads the base.
    base : str or path
        As `load_base` takes it.
    trust_remote_code : bool
        Whether program code that the base brings may run.
    **options
        Arguments of the loader.

    Raises
    ------
    CheckpointError
        If one of the two cannot be opened.
    """
    directory = reachable_base(base)
    try:
        model = open_pretrained(loader, directory, trust_remote_code=trust_remote_code, **options)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"no base could be opened: {first_line(error)}", path=base) from error
    tokenizer = open_tokenizer(base, trust_remote_code=trust_remote_code)
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def adapted_modules(model: PeftModel) -> tuple[str, ...]:
    """Return the names, in the plain base, of the layers of a PEFT model with statistics."""
    names = []
    for name, module in model.get_base_model().named_modules(remove_duplicate=False):
        if has_delta(module) and is_measured(module.get_base_layer()):
            names.append(name)
    return tuple(names)


def has_delta(module: nn.Module) -> TypeGuard[BaseTunerLayer]:
    """Return whether an adapter adds a ΔW to a module.

    Embeddings of single tokens, which PEFT can train beside a LoRA, do not count as one.
    """
    return isinstance(module, BaseTunerLayer) and not isinstance(module, TrainableTokensLayer)
