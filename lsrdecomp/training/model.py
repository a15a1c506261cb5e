"""From settings to a base with an adapter ready to train, its head where it should start, and the counts of both."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
import transformers
from peft import PeftConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from safetensors import safe_open
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BitsAndBytesConfig,
)

from lsrdecomp.calibration.base_files import PUBLISHED_NAMES
from lsrdecomp.calibration.base_model import load_model
from lsrdecomp.checkpoints.tensors import read_header
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.errors import CheckpointError, needs
from lsrdecomp.training.methods import adapter_config, find_method
from lsrdecomp.training.settings import FinetuneSettings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Iterator

SAVED = ".modules_to_save."
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
    # a new head starts.
    transformers.set_seed(settings.seed)
    method = find_method(settings.method)
    four_bit = method.four_bit or settings.four_bit
    options = _loading_options(settings, four_bit)
    if outputs is None:
        model, tokenizer = load_model(AutoModelForCausalLM, base, **options)
    else:
        head = {"num_labels": outputs, "ignore_mismatched_sizes": True}
        model, tokenizer = load_model(AutoModelForSequenceClassification, base, **head, **options)
    model.config.use_cache = False
    # What an adapter's config records: a name that means something elsewhere, too.
    model.config._name_or_path = model.name_or_path = PUBLISHED_NAMES.get(
        settings.model, settings.model
    )
    if four_bit:
        model = prepare_model_for_kbit_training(  # type: ignore[no-untyped-call]
            model, use_gradient_checkpointing=bool(settings.gradient_checkpointing)
        )
    # 2. The adapter, new or from a directory, and the head it starts with; what is trained is in
    # float32.
    adapted = _start(settings, model) if settings.init is None else _continue(settings, model)
    if settings.head is not None:
        _take_head(adapted, Path(settings.head))
    for name, parameter in adapted.named_parameters():
        if SAVED in name:
            parameter.requires_grad_(settings.train_head and "original_module" not in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return adapted, tokenizer


def trained(model: PeftModel) -> Iterator[tuple[str, nn.Parameter, bool]]:
    """Parameters that are trained, with their names, and whether they are the adapter's."""
    prefix = str(model.base_model.prefix)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            yield name, parameter, prefix in name and SAVED not in name


def counts(model: PeftModel) -> tuple[int, int]:
    """Trained numbers of the adapter, and of everything else."""
    sizes = [(parameter.numel(), adapters) for _, parameter, adapters in trained(model)]
    return sum(size for size, adapters in sizes if adapters), sum(
        size for size, adapters in sizes if not adapters
    )


def written_bytes(directory: Path) -> tuple[int, int]:
    """Bytes of the tensors in a written directory that are no head's, and of the whole weight file."""
    file = directory / WEIGHTS
    tensors = read_header(file).tensors
    heads = tuple(f"base_model.model.{name}." for name in HEADS)
    adapter = sum(tensor.nbytes for name, tensor in tensors.items() if not name.startswith(heads))
    return adapter, file.stat().st_size


def needs_checkpointing(model: nn.Module, tokens: int) -> bool:
    """Whether activations of so many tokens would fill more than half of the memory that is free now.

    Counted are 34 numbers of the model's width a token and layer, attention scores left out [1]_.

    References
    ----------
    .. [1] V. Korthikanti et al., Reducing activation recomputation in large transformer models,
           2022. arXiv:2205.05198
    """
    config: Any = model.config
    config = config.get_text_config()
    parameter = next(model.parameters())
    layers = getattr(config, "num_hidden_layers", 0)
    activations = (
        17 * tokens * layers * getattr(config, "hidden_size", 0) * parameter.element_size()
    )
    if parameter.is_cuda or torch.cuda.is_available():
        return bool(activations > torch.cuda.mem_get_info()[0] / 2)
    return bool(activations > psutil.virtual_memory().available / 2)


def _loading_options(settings: FinetuneSettings, four_bit: bool) -> dict[str, Any]:
    """Precision and place of the base, for ``from_pretrained``."""
    device_map = {} if settings.device_map is None else {"device_map": settings.device_map}
    if not four_bit:
        return {
            "dtype": torch.bfloat16 if settings.precision == "bfloat16" else torch.float32
        } | device_map
    with needs("a base in 4 bits", "quantized"):
        import bitsandbytes  # noqa: F401
    return device_map | {
        "quantization_config": BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.float32
            if settings.precision == "float32"
            else torch.bfloat16,
            llm_int8_skip_modules=HEADS,
        )
    }


def _start(settings: FinetuneSettings, model: nn.Module) -> PeftModel:
    heads = [name for name in HEADS if any(part == name for part, _ in model.named_children())]
    language = settings.is_language
    config = adapter_config(
        settings.method,
        settings.options,
        target_modules=settings.target_modules or (_attention(model) if language else None),
        layers=settings.layers,
        task_type="CAUSAL_LM" if language else "SEQ_CLS",
        modules_to_save=None if language else heads,
    )
    try:
        return get_peft_model(model, config)
    except (ValueError, TypeError, RuntimeError) as error:
        targets = ", ".join(settings.target_modules or ("its usual layers",))
        raise SettingsError(
            f"{settings.method} on {targets} does not fit {settings.model}: {error}"
        ) from error


def _attention(model: nn.Module) -> tuple[str, ...] | None:
    """The four matrices of attention where they bear their usual names; None where PEFT is to choose."""
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    return ATTENTION if names.issuperset(ATTENTION) else None


def _continue(settings: FinetuneSettings, model: nn.Module) -> PeftModel:
    directory = str(settings.init)
    config = PeftConfig.from_pretrained(directory)
    if not find_method(settings.method).fits(config.to_dict()):
        kind = getattr(config.peft_type, "value", config.peft_type)
        raise SettingsError(
            f"{directory} is {kind}, not of method {settings.method}; give its own method, or turn a LoRA into LSR by "
            "`lsrdecomp compress` first"
        )
    try:
        return PeftModel.from_pretrained(model, directory, is_trainable=True)
    except RuntimeError as error:
        raise CheckpointError(f"does not fit {settings.model}: {error}", path=directory) from error


@torch.no_grad()
def _take_head(model: PeftModel, directory: Path) -> None:
    """Start the head from the one that is saved in an adapter directory."""
    own = {
        name.replace(f"{SAVED}default.", "."): parameter
        for name, parameter in model.named_parameters()
        if f"{SAVED}default." in name
    }
    file = directory / WEIGHTS
    if not file.exists():
        raise CheckpointError("no such file", path=file)
    with safe_open(str(file), framework="pt") as saved:
        missing = [name for name in own if name not in saved.keys()]  # noqa: SIM118 not a mapping
        if missing or not own:
            raise CheckpointError(
                "holds no head to start from", path=file, tensor=next(iter(missing), None)
            )
        for name, parameter in own.items():
            tensor = saved.get_tensor(name)
            if tensor.shape != parameter.shape:
                raise CheckpointError(
                    f"is of shape {tuple(tensor.shape)}, the task needs {tuple(parameter.shape)}",
                    path=file,
                    tensor=name,
                )
            parameter.copy_(tensor)
