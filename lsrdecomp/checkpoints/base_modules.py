"""The modules of a base and the sizes of their weights: from headers of files where there are any, so without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.files import read_json
from lsrdecomp.checkpoints.names import COMPONENTS
from lsrdecomp.checkpoints.tensors import first_line, read_header
from lsrdecomp.checkpoints.writers.gguf import GgufBase, read_base
from lsrdecomp.errors import CheckpointError, LsrError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INDEX = ".safetensors.index.json"
CLASSES = {
    "UNet2DConditionModel": "unet",
    "CLIPTextModel": "text_encoder",
    "CLIPTextModelWithProjection": "text_encoder_2",
}
LOADERS = {
    "CAUSAL_LM": "AutoModelForCausalLM",
    "SEQ_2_SEQ_LM": "AutoModelForSeq2SeqLM",
    "SEQ_CLS": "AutoModelForSequenceClassification",
    "TOKEN_CLS": "AutoModelForTokenClassification",
    "QUESTION_ANS": "AutoModelForQuestionAnswering",
}
"""transformers' classes by PEFT's task type; without one, the config's own class."""
Shape = tuple[int, ...]


@dataclass(frozen=True)
class BaseModules:
    """Modules with a weight of two and more axes, by name.

    Attributes
    ----------
    shapes : Mapping of str to tuple of int, or None
        Of the stored weight: out x in of a linear layer, in x out of transformers' ``Conv1D``. None
        where the stored numbers are packed. A diffusers pipeline's names begin with the component;
        a GGUF file's are its own.
    gguf : GgufBase, optional
        Where llama.cpp is concerned: the names and heads of a GGUF file, or of a config that has
        them.

    Examples
    --------
    >>> base = BaseModules(Path("pipeline"), {"unet.mid_block.attn1.to_q": (64, 64), "vae.decoder.conv_in": None})
    >>> base.from_gguf, "unet" in base.components
    (False, True)
    """

    path: Path
    shapes: Mapping[str, Shape | None]
    gguf: GgufBase | None = field(default=None)

    @property
    def from_gguf(self) -> bool:
        """Whether the names are those of a GGUF file."""
        return self.gguf is not None and bool(self.gguf.shapes)

    @property
    def components(self) -> frozenset[str]:
        """The parts of a diffusers pipeline that were found; empty for any other base."""
        return frozenset(name.partition(".")[0] for name in self.shapes) & frozenset(COMPONENTS)

    @cached_property
    def last_parts(self) -> frozenset[str]:
        """The last words of all names."""
        return frozenset(name.rpartition(".")[2] for name in self.shapes)

    def find(self, name: str) -> str | None:
        """The stored name of a module that transformers calls ``name``, or None."""
        if self.from_gguf:
            assert self.gguf is not None
            name = self.gguf.find(name) or ""
        return name if name in self.shapes else None

    def find_as_opened(self, name: str, task_type: str | None) -> str | None:
        """As `find`, where transformers opens the base for a task: it adds or takes away the first word of its names.

        A file of the bare model has ``encoder.…`` where a model with a head calls it
        ``bert.encoder.…``, and the other way round; language models are asked for by their own
        names.
        """
        same = self.find(name)
        if same is not None or self.from_gguf:
            return same
        rest = name.partition(".")[2]
        if self._bare:
            return rest if rest in self.shapes else None
        if task_type in ("CAUSAL_LM", "SEQ_2_SEQ_LM"):
            return None
        firsts = {stored.partition(".")[0] for stored in self.shapes}
        return next(
            (f"{word}.{name}" for word in sorted(firsts) if f"{word}.{name}" in self.shapes), None
        )

    @cached_property
    def _bare(self) -> bool:
        """Whether no word stands above both numbered layers and embeddings, as one does in a model with a head."""
        numbered = {
            name for name in self.shapes if any(part.isdecimal() for part in name.split("."))
        }
        above = {name.partition(".")[0] for name in numbered}
        return not above & {name.partition(".")[0] for name in self.shapes.keys() - numbered}


def read_modules(path: str | Path, *, task_type: str | None = None) -> BaseModules:
    """The modules of a base.

    Parameters
    ----------
    path : str or Path
        A model's directory, a safetensors file or its index, a GGUF file, a diffusers pipeline or
        one of its components, or a config.json alone. Only for the last are torch and transformers
        needed: the model is built without memory for its weights.
    task_type : str, optional
        As PEFT calls it: which class of model to build from a config alone.

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
    >>> modules = read_modules(files("lsrdecomp.cli") / "demo_adapter" / "adapter_model.safetensors")   # any such file
    >>> isinstance(modules, BaseModules), modules.from_gguf
    (True, False)
    """
    path = Path(path)
    if path.suffix == ".gguf":
        gguf_base = read_base(path)
        return BaseModules(path, dict(gguf_base.shapes), gguf_base)
    if path.is_dir() and (path / "model_index.json").is_file():
        return BaseModules(path, dict(_pipeline(path)))
    shapes = dict(_modules(path, task_type))
    folder = path if path.is_dir() else path.parent
    config = path if path.name == "config.json" else folder / "config.json"
    described = read_json(config) if config.is_file() else {}
    component = CLASSES.get(
        str(described.get("_class_name") or next(iter(described.get("architectures") or []), ""))
    )
    if component is not None:
        return BaseModules(path, {f"{component}.{name}": shape for name, shape in shapes.items()})
    return BaseModules(path, shapes, _gguf(config))


def _modules(path: Path, task_type: str | None) -> Iterator[tuple[str, Shape | None]]:
    files = _weight_files(path)
    if not files:
        config = path / "config.json" if path.is_dir() else path
        if config.name != "config.json" or not config.is_file():
            text = "is no base: expected a model's directory, safetensors, an index, a GGUF file or a config.json"
            raise CheckpointError(text if path.exists() else "no such file or directory", path=path)
        yield from _built(config, task_type)
        return
    tied = None
    for file in files:
        for name, tensor in read_header(file).tensors.items():
            module, _, kind = name.rpartition(".")
            if kind == "qweight":  # GPTQ and AWQ pack their numbers
                yield module, None
            elif kind == "weight" and len(tensor.shape) > 1:
                yield module, None if tensor.dtype in ("uint8", "int8") else tensor.shape
                if module.endswith("embed_tokens"):
                    tied = tensor.shape
    if tied is not None:
        yield (
            "lm_head",
            tied,
        )  # of a model that ties it to the embedding; if it is stored, its size is the same


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files of a base; none where there is only a config."""
    if path.is_dir():
        indices = sorted(path.glob(f"*{INDEX}"))
        whole = [
            path / name for name in ("model.safetensors", "diffusion_pytorch_model.safetensors")
        ]
        whole = [file for file in whole if file.exists() or file.is_symlink()]
        if not whole and not indices:
            return sorted(path.glob("*.safetensors"))
        path = whole[0] if whole else indices[0]
    if path.name.endswith(INDEX):
        parts = read_json(path).get("weight_map")
        if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
            raise CheckpointError("has no weight_map from tensor to file", path=path)
        files = sorted(set(parts.values()))
        odd = [file for file in files if Path(file).name != file]
        if odd:
            raise CheckpointError(
                f"names a file outside its directory, {ascii(odd[0])[:80]}", path=path
            )
        return [path.parent / file for file in files]
    return [path] if path.suffix == ".safetensors" else []


def _pipeline(path: Path) -> Iterator[tuple[str, Shape | None]]:
    components = [part for part in COMPONENTS if (path / part).is_dir()]
    if not components:
        raise CheckpointError(f"is a pipeline without any of {', '.join(COMPONENTS)}", path=path)
    for part in components:
        for name, shape in _modules(path / part, None):
            yield f"{part}.{name}", shape


def _gguf(config: Path) -> GgufBase | None:
    """What llama.cpp's names need, where the config is of an architecture that has them."""
    try:
        return read_base(config)
    except CheckpointError:
        return None


def _built(config: Path, task_type: str | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Each module that has a weight of two and more axes.

    Raises
    ------
    LsrError
        Without torch, or without transformers or diffusers for a config of theirs.
    CheckpointError
        If they cannot build a model from this config.
    """
    raw = read_json(config)
    try:
        import torch

        with torch.device("meta"):
            if "_class_name" in raw:
                import diffusers

                model = getattr(diffusers, str(raw["_class_name"])).from_config(raw)
            else:
                model = _transformers(config, raw, task_type)
    except ImportError as error:
        text = f"{config}: of a config alone names come from the model it describes; without {error.name}"
        raise LsrError(
            f"{text}: pip install 'lsrdecomp[peft]', or name a base with weights"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise CheckpointError(
            f"no model can be built from it: {first_line(error)}", path=config
        ) from error
    for name, module in model.named_modules(remove_duplicate=False):
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.Tensor) and weight.ndim > 1:
            yield name, tuple(weight.shape)


def _transformers(config: Path, raw: dict[str, Any], task_type: str | None) -> Any:
    import transformers

    settings = transformers.AutoConfig.from_pretrained(
        str(config.parent) if config.name == "config.json" else str(config)
    )
    own = next(iter(raw.get("architectures") or ()), None)
    if task_type not in LOADERS and isinstance(own, str) and hasattr(transformers, own):
        return getattr(transformers, own)(settings)
    return getattr(transformers, LOADERS.get(str(task_type), "AutoModel")).from_config(settings)
