"""The modules of a base and the sizes of their weights, from headers of files where there are any.

Then neither torch nor transformers is needed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError, LsrError, way_to_install
from lsrdecomp.gateway import library_class, open_pretrained
from lsrdecomp.lora.files.file_checks import read_json
from lsrdecomp.lora.files.layer_names import COMPONENTS
from lsrdecomp.lora.files.tensors import first_line, read_header
from lsrdecomp.lora.files.writers.gguf import GgufBase, read_base

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INDEX_SUFFIX = ".safetensors.index.json"
SINGLE_FILES = ("model.safetensors", "diffusion_pytorch_model.safetensors")
COMPONENT_CLASSES = {
    "UNet2DConditionModel": "unet",
    "CLIPTextModel": "text_encoder",
    "CLIPTextModelWithProjection": "text_encoder_2",
}
"""Components of image pipelines by the class in their config."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class BaseModules:
    """Modules with a weight of two and more axes, by name.

    Attributes
    ----------
    path : Path
        Where they were read.
    shapes : Mapping of str to tuple of int, or None
        Of the stored weight: out x in of a linear layer, in x out of transformers' ``Conv1D``. None
        where the stored numbers are packed. A diffusers pipeline's names begin with the component;
        a GGUF file's are its own.
    gguf : GgufBase, optional
        Where llama.cpp is concerned: the names and heads of a GGUF file, or of a config that has
        them.

    Examples
    --------
    >>> shapes = {"unet.mid_block.attn1.to_q": (64, 64), "vae.decoder.conv_in": None}
    >>> base = BaseModules(Path("pipeline"), shapes)
    >>> base.from_gguf, base.find("unet.mid_block.attn1.to_q")
    (False, 'unet.mid_block.attn1.to_q')
    """

    path: Path
    shapes: Mapping[str, Shape | None]
    gguf: GgufBase | None = field(default=None)

    @property
    def from_gguf(self) -> bool:
        """Whether the names are those of a GGUF file."""
        return self.gguf is not None and bool(self.gguf.shapes)

    def find(self, name: str) -> str | None:
        """Return the stored name of a module that transformers calls ``name``, or None."""
        if self.from_gguf:
            assert self.gguf is not None
            name = self.gguf.find(name) or ""
        return name if name in self.shapes else None


def read_modules(path: str | Path) -> BaseModules:
    """Read the modules of a base.

    Parameters
    ----------
    path : str or Path
        A model's directory, a safetensors file or its index, a GGUF file, a diffusers pipeline or
        one of its components, or a config.json alone. Only for the last are torch and transformers
        needed: the model is built without memory for its weights.

    Returns
    -------
    BaseModules
        Sizes of weights by the names of modules.

    Raises
    ------
    CheckpointError
        If there is no such base, or a file of it is damaged.
    LsrError
        If the model must be built and torch or transformers is missing.

    Examples
    --------
    >>> from importlib.resources import files
    >>> demo = files("lsrdecomp.cli") / "demo_adapter"
    >>> modules = read_modules(demo / "adapter_model.safetensors")           # any such file
    >>> isinstance(modules, BaseModules), modules.from_gguf
    (True, False)
    """
    path = Path(path)
    if path.suffix == ".gguf":
        gguf_base = read_base(path)
        return BaseModules(path, dict(gguf_base.shapes), gguf_base)
    if path.is_dir() and (path / "model_index.json").is_file():
        return BaseModules(path, dict(_pipeline_modules(path)))
    shapes = dict(_modules(path))
    directory = path if path.is_dir() else path.parent
    config = path if path.name == "config.json" else directory / "config.json"
    component = _component(config)
    if component is not None:
        return BaseModules(path, {f"{component}.{name}": shape for name, shape in shapes.items()})
    return BaseModules(path, shapes, _gguf_names(config))


def _component(config: Path) -> str | None:
    """Return which component of an image pipeline a config is of, or None."""
    if not config.is_file():
        return None
    fields = read_json(config)
    class_name = fields.get("_class_name")
    if not class_name:
        class_name = next(iter(fields.get("architectures") or []), "")
    return COMPONENT_CLASSES.get(str(class_name))


def _modules(path: Path) -> Iterator[tuple[str, Shape | None]]:
    """Yield the modules of one model, from its weight files or else from its config."""
    files = weight_files(path)
    if files:
        yield from _stored_modules(files)
        return
    config = path / "config.json" if path.is_dir() else path
    if config.name != "config.json" or not config.is_file():
        reason = "no such file or directory"
        if path.exists():
            reason = (
                "is no base: expected a model's directory, safetensors, an index, a GGUF file or a "
                "config.json"
            )
        raise CheckpointError(reason, path=path)
    yield from _built_modules(config)


def _stored_modules(files: list[Path]) -> Iterator[tuple[str, Shape | None]]:
    """Yield the modules in the headers of safetensors files."""
    tied = None
    for file in files:
        for name, tensor in read_header(file).tensors.items():
            module, _, parameter = name.rpartition(".")
            if parameter == "qweight":  # GPTQ and AWQ pack their numbers
                yield module, None
            elif parameter == "weight" and len(tensor.shape) > 1:
                is_packed = tensor.dtype in ("uint8", "int8")
                yield module, None if is_packed else tensor.shape
                if module.endswith("embed_tokens"):
                    tied = tensor.shape
    if tied is not None:
        # Of a model that ties it to the embedding; where it is stored, its size is the same.
        yield "lm_head", tied


def weight_files(path: Path) -> list[Path]:
    """Return the safetensors files of a base; none where there is only a config."""
    if path.is_dir():
        singles = [path / name for name in SINGLE_FILES]
        singles = [file for file in singles if file.exists() or file.is_symlink()]
        indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
        if not singles and not indices:
            return sorted(path.glob("*.safetensors"))
        path = (singles + indices)[0]
    if path.name.endswith(INDEX_SUFFIX):
        return _indexed_files(path)
    return [path] if path.suffix == ".safetensors" else []


def _indexed_files(index: Path) -> list[Path]:
    """Return the files that an index of safetensors names, which lie beside it."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise CheckpointError("has no weight_map from tensor to file", path=index)
    files = sorted(set(weight_map.values()))
    for file in files:
        if Path(file).name != file:
            raise CheckpointError(
                f"names a file outside its directory, {ascii(file)[:80]}", path=index
            )
    return [index.parent / file for file in files]


def _pipeline_modules(path: Path) -> Iterator[tuple[str, Shape | None]]:
    """Yield the modules of all components of a diffusers pipeline."""
    components = [name for name in COMPONENTS if (path / name).is_dir()]
    if not components:
        raise CheckpointError(f"is a pipeline without any of {', '.join(COMPONENTS)}", path=path)
    for component in components:
        for name, shape in _modules(path / component):
            yield f"{component}.{name}", shape


def _gguf_names(config: Path) -> GgufBase | None:
    """Return what llama.cpp's names need, where the config is of an architecture that has them."""
    try:
        return read_base(config)
    except CheckpointError:
        return None


def _built_modules(config: Path) -> Iterator[tuple[str, Shape]]:
    """Build the model that a config describes, without memory, and yield its modules.

    Raises
    ------
    LsrError
        Without torch, or without transformers or diffusers for a config of theirs.
    CheckpointError
        If they cannot build a model from this config.
    """
    fields = read_json(config)
    try:
        import torch

        with torch.device("meta"):
            if "_class_name" in fields:
                import diffusers

                model_class = library_class(diffusers, fields["_class_name"], diffusers.ModelMixin)
                model = model_class.from_config(fields)
            else:
                model = _transformers_model(config, fields)
    except ImportError as error:
        raise LsrError(
            f"{config}: of a config alone names come from the model it describes; without "
            f"{error.name}: {way_to_install('peft')}, or name a base with weights"
        ) from error
    except CheckpointError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(
            f"no model can be built from it: {first_line(error)}", path=config
        ) from error
    for name, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim > 1:
            yield name, tuple(weight.shape)


def _transformers_model(config: Path, fields: dict[str, Any]) -> Any:
    """Return a model of the config's own class, or of transformers' bare one."""
    import transformers

    place = config.parent if config.name == "config.json" else config
    settings = open_pretrained(transformers.AutoConfig, str(place))
    architecture = next(iter(fields.get("architectures") or ()), None)
    if isinstance(architecture, str) and hasattr(transformers, architecture):
        model_class = library_class(transformers, architecture, transformers.PreTrainedModel)
        return model_class(settings)
    bare: Any = transformers.AutoModel
    return bare.from_config(settings, trust_remote_code=False)
