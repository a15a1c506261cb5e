"""A base with an adapter ready to train, as settings say, and the counts of its parameters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import transformers
from peft import PeftConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

from lsrdecomp.errors import CheckpointError, needs
from lsrdecomp.lora.base.base_files import PUBLISHED_NAMES
from lsrdecomp.lora.base.base_model import load_model
from lsrdecomp.lora.files.adapter_config import check_directory_patterns
from lsrdecomp.lora.files.tensors import read_header
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.train.finetune_settings import FinetuneSettings, SettingsError
from lsrdecomp.lora.train.methods import adapter_config, find_method

if TYPE_CHECKING:
    from collections.abc import Iterator

SAVED_MODULE = ".modules_to_save."
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
HEADS = ["classifier", "score"]  # what transformers calls the heads of its classifiers


def open_model(
    settings: FinetuneSettings, base: str | Path, outputs: int | None
) -> tuple[PeftModel, Any]:
    """Open the base with a head for the task, put the adapter on it, and open what reads its texts.

    Parameters
    ----------
    settings : FinetuneSettings
    base : str or path
        As transformers takes it.
    outputs : int, optional
        Numbers that the head gives a row of tokens; None for a language model, which has no head of
        its own.

    Raises
    ------
    SettingsError
        If an option or a target does not fit the model, or the adapter directory is of another
        method.
    CheckpointError
        If the base cannot be opened, or an adapter's head has another size.
    LsrError
        If a 4-bit base is asked for without bitsandbytes.
    """
    # 1. The base, in the precision of the run, with a head of the task's size; the seed decides how
    #    a new head starts.
    transformers.set_seed(settings.seed)
    four_bit = settings.four_bit or find_method(settings.method).four_bit
    options = _loading_options(settings, four_bit)
    if outputs is None:
        model, tokenizer = load_model(AutoModelForCausalLM, base, **options)
    else:
        head: dict[str, Any] = {"num_labels": outputs, "ignore_mismatched_sizes": True}
        model, tokenizer = load_model(AutoModelForSequenceClassification, base, **head, **options)
    model.config.use_cache = False
    # What an adapter's config records: a name that means something elsewhere, too.
    published_name = PUBLISHED_NAMES.get(settings.base, settings.base)
    model.name_or_path = published_name
    model.config._name_or_path = published_name
    if four_bit:
        model = prepare_model_for_kbit_training(  # type: ignore[no-untyped-call]
            model, use_gradient_checkpointing=bool(settings.gradient_checkpointing)
        )
    # 2. The adapter, new or from a directory, and the head it starts with.
    if settings.init is None:
        adapted = _new_adapter(settings, model)
    else:
        adapted = _adapter_to_go_on_from(settings, model)
    if settings.head is not None:
        _load_head(adapted, Path(settings.head))
    # 3. What is trained is in float32.
    for name, parameter in adapted.named_parameters():
        if SAVED_MODULE in name:
            is_original = "original_module" in name
            parameter.requires_grad_(settings.train_head and not is_original)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted, tokenizer


def trainable_parameters(model: PeftModel) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Yield parameters that are trained, with their names and whether they are the adapter's."""
    prefix = str(model.base_model.prefix)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_adapter = prefix in name and SAVED_MODULE not in name
            yield name, parameter, is_adapter


def count_trainable(model: PeftModel) -> tuple[int, int]:
    """Return how many trained numbers the adapter has, and how many there are elsewhere."""
    adapter = 0
    elsewhere = 0
    for _, parameter, is_adapter in trainable_parameters(model):
        if is_adapter:
            adapter += parameter.numel()
        else:
            elsewhere += parameter.numel()
    return adapter, elsewhere


def written_bytes(directory: Path) -> tuple[int, int]:
    """Return the bytes of a directory's tensors that are no head's, and of its weight file."""
    file = directory / WEIGHTS
    tensors = read_header(file).tensors
    heads = tuple(f"base_model.model.{name}." for name in HEADS)
    adapter = sum(tensor.nbytes for name, tensor in tensors.items() if not name.startswith(heads))
    return adapter, file.stat().st_size


def needs_checkpointing(model: nn.Module, tokens: int) -> bool:
    """Return whether the activations of tokens would fill more than half of the free memory.

    References
    ----------
    .. [1] V. Korthikanti et al., Reducing activation recomputation in large transformer models,
           2022. arXiv:2205.05198
    """
    config: Any = model.config
    config = config.get_text_config()
    parameter = next(model.parameters())
    layers = getattr(config, "num_hidden_layers", 0)
    width = getattr(config, "hidden_size", 0)
    # Without attention scores, a layer keeps 34 bytes per token and unit of width in 16 bits [1]_.
    activations = 17 * tokens * layers * width * parameter.element_size()
    free = psutil.virtual_memory().available
    if parameter.is_cuda or torch.cuda.is_available():
        free, _ = torch.cuda.mem_get_info()
    return bool(activations > free / 2)


def _loading_options(settings: FinetuneSettings, four_bit: bool) -> dict[str, Any]:
    """Return precision and place of the base, for ``from_pretrained``."""
    options: dict[str, Any] = {"trust_remote_code": settings.trust_remote_code}
    if settings.device_map is not None:
        options["device_map"] = settings.device_map
    if not four_bit:
        in_bfloat16 = settings.precision == "bfloat16"
        options["dtype"] = torch.bfloat16 if in_bfloat16 else torch.float32
        return options
    with needs("a base in 4 bits", "quantized"):
        import bitsandbytes  # noqa: F401
    in_float32 = settings.precision == "float32"
    options["quantization_config"] = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.float32 if in_float32 else torch.bfloat16,
        llm_int8_skip_modules=HEADS,
    )
    return options


def _new_adapter(settings: FinetuneSettings, model: nn.Module) -> PeftModel:
    """Put a new adapter on a base, of the method and options that settings give."""
    children = {name for name, _ in model.named_children()}
    heads = [name for name in HEADS if name in children]
    targets = settings.target_modules
    if targets is None and settings.is_language:
        targets = _attention_modules(model)
    config = adapter_config(
        settings.method,
        settings.options,
        target_modules=targets,
        layers=settings.layers,
        task_type="CAUSAL_LM" if settings.is_language else "SEQ_CLS",
        modules_to_save=None if settings.is_language else heads,
    )
    try:
        return get_peft_model(model, config)
    except (ValueError, TypeError, RuntimeError) as error:
        named = ", ".join(settings.target_modules or ("its usual layers",))
        raise SettingsError(
            f"{settings.method} on {named} does not fit {settings.base}: {error}"
        ) from error


def _attention_modules(model: nn.Module) -> tuple[str, ...] | None:
    """Return the four matrices of attention, or None where they have other names than usual."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return ATTENTION if names.issuperset(ATTENTION) else None


def _adapter_to_go_on_from(settings: FinetuneSettings, model: nn.Module) -> PeftModel:
    """Put the adapter of a directory on a base, to be trained on."""
    directory = str(settings.init)
    check_directory_patterns(directory)
    config = PeftConfig.from_pretrained(directory)
    if not find_method(settings.method).fits(config.to_dict()):
        peft_type = getattr(config.peft_type, "value", config.peft_type)
        raise SettingsError(
            f"{directory} is {peft_type}, not of method {settings.method}; give its own method, or "
            "turn a LoRA into LSR by `lsrdecomp compress` first"
        )
    try:
        return PeftModel.from_pretrained(model, directory, is_trainable=True)
    except RuntimeError as error:
        raise CheckpointError(f"does not fit {settings.base}: {error}", path=directory) from error


@torch.no_grad()
def _load_head(model: PeftModel, directory: Path) -> None:
    """Start the head from the one that is saved in an adapter directory."""
    head = {
        name.replace(f"{SAVED_MODULE}default.", "."): parameter
        for name, parameter in model.named_parameters()
        if f"{SAVED_MODULE}default." in name
    }
    file = directory / WEIGHTS
    stored = read_header(file).tensors
    missing = [name for name in head if name not in stored]
    if missing or not head:
        raise CheckpointError(
            "holds no head to start from", path=file, tensor=next(iter(missing), None)
        )
    for name, parameter in head.items():
        tensor = stored[name]
        if tensor.shape != tuple(parameter.shape):
            raise tensor.error(
                f"is of shape {tensor.shape}, the task needs {tuple(parameter.shape)}"
            )
        parameter.copy_(torch.from_numpy(tensor.load()))
