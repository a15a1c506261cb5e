"""Bases of diffusers: the UNet or transformer of an image model, on what its pipeline gives it.

A pipeline draws an image for each prompt and seed, with the LoRA active. What its UNet or
transformer is called with on the way, at every noise level, are the rows of the batches, so that
nothing here needs to know what a pipeline passes on. The UNet or transformer alone runs on random
latents.

A LoRA file may name its layers as the programs do that trained it. Diffusers' own loader tells
which module each of them is: it gets a file of the same keys whose tensors hold the numbers of
their layers.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor, nn

from lsrdecomp.errors import CheckpointError, needs
from lsrdecomp.gateway import library_class, open_pretrained
from lsrdecomp.lora.base.base_model import Base
from lsrdecomp.lora.base.batch_rows import join_rows, n_rows, split_rows
from lsrdecomp.lora.base.dataset import DataError
from lsrdecomp.lora.base.heads import Batch, Head
from lsrdecomp.lora.base.texts import Example
from lsrdecomp.lora.base.tokens import ROW_COUNTS, model_inputs
from lsrdecomp.lora.files import Checkpoint, open_checkpoint
from lsrdecomp.lora.files.file_checks import PIPELINE_INDEX, read_json
from lsrdecomp.lora.files.tensors import first_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from lsrdecomp.lora.base.texts import Item

    Row = dict[str, Any]

NOISE_LEVELS = 8
"""Steps of an image while it is measured: few, since neighbouring noise levels are much alike; by
hand."""
PICTURE_STEPS = 25
"""Steps of an image for a report; by hand."""
DENOISERS = ("unet", "transformer")
"""Names of the part of a pipeline that runs at every step."""
CONTEXT_TOKENS = 16
"""Tokens of a random prompt, for a UNet or transformer alone."""


class _DiffusionParts(nn.ModuleDict):
    """The parts of a pipeline that a LoRA may adapt, the UNet or transformer among them."""


def open_diffusion(
    base: str | Path, *, dtype: torch.dtype, device: str, trust_remote_code: bool = False
) -> Base:
    """Open a pipeline of diffusers, or its UNet or transformer alone.

    Parameters
    ----------
    base : str or path
        A directory with a ``model_index.json``, or with the config of one model.
    dtype, device
        Precision and device.
    trust_remote_code : bool
        Whether program code that a pipeline brings may run.

    Raises
    ------
    CheckpointError
        If diffusers cannot open it, or it has neither UNet nor transformer.
    LsrError
        If diffusers is not installed.
    """
    with needs("a base of diffusers", "diffusers"):
        import diffusers
    directory = Path(base)
    options = {} if dtype is torch.float32 else {"torch_dtype": dtype}
    try:
        if not (directory / PIPELINE_INDEX).is_file():
            class_name = read_json(directory / "config.json")["_class_name"]
            loader = library_class(diffusers, class_name, diffusers.ModelMixin)
            denoiser = loader.from_pretrained(directory, **options).to(device).eval()
            name = DENOISERS[0] if class_name.startswith("UNet") else DENOISERS[1]
            parts = _DiffusionParts({name: denoiser})
            _check_random_rows(denoiser)
            batches = partial(_random_batches, name)
            return _base_of(base, parts, name, batches, partial(_module_names, None, parts, name))
        pipeline = open_pretrained(
            diffusers.DiffusionPipeline,
            directory,
            trust_remote_code=trust_remote_code,
            **options,
        )
    except CheckpointError:
        raise
    except (OSError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"diffusers opens no model: {first_line(error)}", path=base
        ) from error
    pipeline.to(device)
    pipeline.set_progress_bar_config(disable=True)
    names = [name for name in DENOISERS if isinstance(getattr(pipeline, name, None), nn.Module)]
    if not names:
        raise CheckpointError("the pipeline has neither unet nor transformer", path=base)
    name = names[0]
    loadable = getattr(pipeline, "_lora_loadable_modules", ())
    parts = _DiffusionParts(
        {
            part: getattr(pipeline, part).eval()
            for part in dict.fromkeys([name, *loadable])
            if isinstance(getattr(pipeline, part, None), nn.Module)
        }
    )
    batches = partial(_drawn_batches, pipeline, name)
    opened = _base_of(base, parts, name, batches, partial(_module_names, pipeline, parts, name))
    return replace(opened, pictures=partial(_draw_pictures, pipeline))


def _base_of(base: str | Path, parts: _DiffusionParts, name: str, batches: Any, names: Any) -> Base:
    return Base(
        str(base),
        parts,
        None,
        Head.numbers,
        outputs=partial(_denoised, name),
        batches=batches,
        module_names=names,
        measured_part=f"{name}.",
    )


def _parts_of(model: nn.Module) -> Any:
    """Return the parts of a base's model, without PEFT's wrapping."""
    return getattr(model, "get_base_model", lambda: model)()


def _denoised(name: str, model: nn.Module, batch: Batch) -> Tensor:
    """Return what the UNet or transformer predicts for a batch of its arguments."""
    output: Tensor = _parts_of(model)[name](**model_inputs(batch), return_dict=False)[0]
    return output


# -- batches ---------------------------------------------------------------------------------------


def _drawn_batches(
    pipeline: Any, name: str, base: Base, items: Sequence[Item], size: int
) -> Iterator[Batch]:
    """Yield what the UNet or transformer is called with while the pipeline draws some images.

    An example is an image, whose rows are the noise levels, with and without its prompt where the
    pipeline is guided so. Where a batch is to be smaller than that, each of its rows is one.
    """
    images_at_a_time = max(1, size // (2 * NOISE_LEVELS))
    examples = _drawn_items(items)
    for start in range(0, len(examples), images_at_a_time):
        chunk = examples[start : start + images_at_a_time]
        rows_by_image = _draw(pipeline, name, base, chunk)
        joined = list(join_rows([row for rows in rows_by_image for row in rows], size))
        if len(joined) == 1:
            counts = torch.tensor([len(rows) for rows in rows_by_image])
            yield {**joined[0], ROW_COUNTS: counts}
        else:
            yield from joined


def _drawn_items(items: Sequence[Item]) -> list[Example]:
    """Return items as images to draw, texts as their prompts; raise `DataError` for others."""
    examples = []
    for number, item in enumerate(items):
        if isinstance(item, Example):
            examples.append(item)
        elif isinstance(item, tuple):
            examples.append(Example(number, item[0]))
        else:
            raise DataError("a diffusion model is run on prompts, one a line, or without data")
    return examples


def _draw(pipeline: Any, name: str, base: Base, examples: Sequence[Example]) -> list[list[Row]]:
    """Draw images with the parts of a base, and return the calls of one part, by image."""
    calls: list[Row] = []
    parts = _parts_of(base.model)
    denoiser = parts[name]
    parameters = inspect.signature(type(denoiser).forward)

    def record(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = parameters.bind(_module, *args, **kwargs).arguments
        _, *names = arguments  # without self
        call = {key: arguments[key] for key in names if key != "return_dict"}
        calls.append(recursively_apply(lambda tensor: tensor.detach().to("cpu", copy=True), call))

    handle = denoiser.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with _with_parts(pipeline, parts):
            arguments = _call_arguments(pipeline, examples, output_type="latent")
            pipeline(**arguments, num_inference_steps=NOISE_LEVELS)
    except (TypeError, ValueError) as error:
        kind = type(pipeline).__name__
        raise CheckpointError(f"{kind} draws no image: {first_line(error)}") from error
    finally:
        handle.remove()
    rows_by_image: list[list[Row]] = [[] for _ in examples]
    for call in calls:
        size = n_rows(call)
        # A noise level for all rows becomes one for each.
        expanded = {
            key: value.expand(size) if isinstance(value, Tensor) and value.ndim == 0 else value
            for key, value in call.items()
        }
        for position, row in enumerate(split_rows(expanded)):
            rows_by_image[position % len(examples)].append(row)
    return rows_by_image


@contextmanager
def _with_parts(pipeline: Any, parts: Any) -> Iterator[None]:
    """Let a pipeline run with the parts of a base inside a ``with`` block, without gradients."""
    own_parts = {part: getattr(pipeline, part) for part in parts}
    try:
        for part, module in parts.items():
            setattr(pipeline, part, module)
        with torch.no_grad():
            yield
    finally:
        for part, module in own_parts.items():
            setattr(pipeline, part, module)


def _draw_pictures(pipeline: Any, base: Base, examples: Sequence[Example]) -> list[bytes]:
    """Draw the images of some prompts and seeds with the parts of a base, as PNG files."""
    pictures = []
    for example in examples:
        arguments = _call_arguments(pipeline, [example], output_type="pil")
        with _with_parts(pipeline, _parts_of(base.model)):
            (image,) = pipeline(**arguments, num_inference_steps=PICTURE_STEPS).images
        file = BytesIO()
        image.save(file, "PNG")
        pictures.append(file.getvalue())
    return pictures


def _call_arguments(
    pipeline: Any, examples: Sequence[Example], *, output_type: str
) -> dict[str, Any]:
    """Return the arguments with which a pipeline draws some images."""
    known = inspect.signature(type(pipeline).__call__).parameters
    generators = [torch.Generator().manual_seed(example.number) for example in examples]
    arguments: dict[str, Any] = {"generator": generators, "output_type": output_type}
    if "prompt" in known:
        arguments["prompt"] = [example.inputs or "" for example in examples]
    elif "class_labels" in known:
        n_classes = int(pipeline.transformer.config.num_embeds_ada_norm)
        arguments["class_labels"] = [example.number % n_classes for example in examples]
    elif "batch_size" in known:
        arguments["batch_size"] = len(examples)
    return {key: value for key, value in arguments.items() if key in known}


def _random_batches(name: str, base: Base, items: Sequence[Item], size: int) -> Iterator[Batch]:
    """Yield batches of random latents for a UNet or transformer alone, at every noise level."""
    denoiser = _parts_of(base.model)[name]
    images_at_a_time = max(1, size // NOISE_LEVELS)
    examples = _drawn_items(items)
    for start in range(0, len(examples), images_at_a_time):
        chunk = examples[start : start + images_at_a_time]
        rows = [row for example in chunk for row in _random_rows(denoiser, example)]
        (joined,) = join_rows(rows, len(rows))
        yield {**joined, ROW_COUNTS: torch.full((len(chunk),), NOISE_LEVELS)}


def _check_random_rows(denoiser: Any) -> None:
    """Run a UNet or transformer alone once, on random arguments.

    Raises
    ------
    CheckpointError
        If it needs more than is known here, as that of SDXL and of Flux does.
    """
    row = _random_rows(denoiser, Example(0))[0]
    row = recursively_apply(lambda tensor: tensor.to(denoiser.device), row)
    try:
        with torch.no_grad():
            denoiser(**row)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        why = f"runs on no random arguments ({first_line(error)})"
        raise _needs_its_pipeline(denoiser, why) from error


def _needs_its_pipeline(denoiser: Any, why: str) -> CheckpointError:
    return CheckpointError(
        f"{type(denoiser).__name__} alone {why} here: give the directory of its pipeline, with a "
        "model_index.json"
    )


def _random_rows(denoiser: Any, example: Example) -> list[Row]:
    """Return random arguments of a UNet or transformer at each noise level.

    Raises
    ------
    CheckpointError
        If it needs an argument that is not known here.
    """
    if example.inputs is not None:
        raise DataError(
            "the UNet or transformer alone reads no prompts: give the directory of the whole "
            "pipeline, with its model_index.json, or leave out the data"
        )
    config = denoiser.config
    generator = torch.Generator().manual_seed(example.number)
    dtype = next(denoiser.parameters()).dtype
    sides = config.get("sample_size")
    if sides is None:
        raise _needs_its_pipeline(denoiser, "has no size of its images")
    if isinstance(sides, int):
        sides = (sides, sides)
    context = config.get("cross_attention_dim")
    n_classes = config.get("num_embeds_ada_norm") or config.get("num_class_embeds")
    latents = torch.randn(1, config.in_channels, *sides, generator=generator).to(dtype)
    values: dict[str, Any] = {"sample": latents, "hidden_states": latents}
    if isinstance(context, int):
        states = torch.randn(1, CONTEXT_TOKENS, context, generator=generator)
        values["encoder_hidden_states"] = states.to(dtype)
    if n_classes:
        values["class_labels"] = torch.tensor([example.number % n_classes])
    known = inspect.signature(type(denoiser).forward).parameters
    needed = [
        key
        for key, parameter in known.items()
        if parameter.default is inspect.Parameter.empty
        and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        and key not in ("self", "timestep", *values)
    ]
    if needed:
        raise _needs_its_pipeline(denoiser, f"has no random {' and '.join(needed)}")
    call = {key: value for key, value in values.items() if key in known}
    levels = torch.linspace(1, 999, NOISE_LEVELS).round().long()
    return [{**call, "timestep": level.reshape(1)} for level in levels]


# -- names of layers -------------------------------------------------------------------------------


def _module_names(
    pipeline: Any, parts: _DiffusionParts, name: str, checkpoint: Checkpoint
) -> Mapping[str, str]:
    """Return the module of each layer of a LoRA file, as diffusers' own loader finds it.

    Raises
    ------
    CheckpointError
        For a layer that is no module of the pipeline, and if diffusers does not read the file.
    """
    modules = dict(parts.named_modules())
    names = {}
    for layer in checkpoint.layers:
        for candidate in (layer.name, f"{name}.{layer.name}"):
            if candidate in modules:
                names[layer.name] = candidate
    missing = [layer for layer in checkpoint.layers if layer.name not in names]
    if missing and hasattr(pipeline, "lora_state_dict"):
        names = _names_by_loader(pipeline, checkpoint)
        missing = [layer for layer in checkpoint.layers if names.get(layer.name) not in modules]
    if missing:
        raise CheckpointError(
            f"{missing[0].name} is no layer of this base ({len(missing)} of "
            f"{len(checkpoint.layers)} are not)",
            path=checkpoint.path,
        )
    return names


def _names_by_loader(pipeline: Any, checkpoint: Checkpoint) -> dict[str, str]:
    """Return the modules of layers by what diffusers makes of a file with numbered tensors."""
    # 1. Every A holds the number of its layer, in its own shape; alphas are ranks, so that no
    #    scale changes it.
    tensors = {}
    for number, layer in enumerate(checkpoint.layers, start=1):
        tensors[layer.down.name] = torch.full(layer.down.shape, float(number))
        tensors[layer.up.name] = torch.zeros(layer.up.shape)
        if layer.alpha is not None:
            tensors[layer.alpha.name] = torch.tensor(float(layer.rank))
    # 2. Read the numbers at their new names.
    try:
        converted = type(pipeline).lora_state_dict(tensors)
        if isinstance(converted, tuple):
            converted = converted[0]
        layers = open_checkpoint(converted).layers
    except (ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"diffusers does not read it for this base: {first_line(error)}", path=checkpoint.path
        ) from error
    names = {}
    for layer in layers:
        number = round(float(layer.down.read().flat[0]))
        original = checkpoint.layers[number - 1].name
        names[original] = layer.name
    return names
