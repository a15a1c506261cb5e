"""ΔW of a model that a LoRA was merged into: its weights minus the base's, one layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.base.base_files import open_tokenizer, reachable_base
from lsrdecomp.lora.files.base_modules import weight_files
from lsrdecomp.lora.files.file_checks import read_json
from lsrdecomp.lora.files.gguf_files import gguf_type, is_gguf_adapter
from lsrdecomp.lora.files.tensors import DTYPES, read_header
from lsrdecomp.lora.measure.layer_differences import SAME, StoredUpdate
from lsrdecomp.lora.measure.symptoms import Reason
from lsrdecomp.precision import PRECISIONS, unit_roundoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.files.records import Layer
    from lsrdecomp.lora.files.tensors import Array

ROUNDING_MARGIN = 1.1
"""Factor on what rounding a sum moves at most: ΔW was perhaps rounded before."""
BLOCK = 32
"""Numbers that share a scale in the formats of GGUF, and their values in four bits are sixteen."""
SAMPLE = "The city by the river is 12 years old. def add(a, b):\n    return a + b"
"""A text that two tokenizers are compared on."""
Weights = Mapping[str, "Callable[[], Array]"]


def is_model(path: Path) -> bool:
    """Return whether a path is that of a whole model, and not of an adapter."""
    if path.suffix == ".gguf":
        return path.is_file() and not is_gguf_adapter(path)
    has_config = (path / "config.json").is_file() or any(path.glob("*.gguf"))
    return has_config and not (path / "adapter_config.json").is_file()


@dataclass(frozen=True, slots=True)
class MergedModel:
    """A model that a LoRA was merged into, beside the base.

    Attributes
    ----------
    path, base : str or Path
    weights, base_weights : Mapping
        Functions that read a tensor, by its name.
    storage : str
        What the weights are stored in: a float type, or what they were quantized by.
    """

    path: str | Path
    base: str | Path
    weights: Weights
    base_weights: Weights
    storage: str

    @classmethod
    def open(cls, path: str | Path, base: str | Path, source: Checkpoint) -> MergedModel:
        """Open a merged model and its base, whose tensors are read when asked for.

        The storage is that of the weights that the LoRA ``source`` adapts.
        """
        packed = _packing(Path(path))
        weights = _weights(path)
        base_weights = _weights(base)
        adapted = [f"{layer.name}.weight" for layer in source.layers]
        stored = [name for name in adapted if name in weights][:4]
        samples = [weights[name]() for name in stored]
        return cls(path, base, weights, base_weights, packed or _storage(samples))

    @property
    def is_quantized(self) -> bool:
        """Whether the weights have fewer bits than a float has."""
        return self.storage not in PRECISIONS

    def updates(self, source: Checkpoint) -> dict[str, StoredUpdate]:
        """Return ΔW of the LoRA's layers that have a weight of their own in the model."""
        updates = {}
        for layer in source.layers:
            key = f"{layer.name}.weight"
            if key in self.weights and key in self.base_weights:
                updates[layer.name] = StoredUpdate(
                    partial(self._delta, layer, key),
                    partial(self._rounding, key),
                    is_quantized=self.is_quantized,
                )
        return updates

    def _delta(self, layer: Layer, key: str) -> Array:
        merged = self.weights[key]()
        if not np.isfinite(merged).all():
            bad = int(merged.size - np.count_nonzero(np.isfinite(merged)))
            raise CheckpointError(f"{bad} of {merged.size} numbers are NaN or infinite")
        before = self.base_weights[key]()
        if merged.shape != before.shape:
            return merged.reshape(len(merged), -1)
        delta = merged.astype(np.float64) - before
        delta = delta.reshape(len(delta), -1)
        return delta.T if layer.layer_type in ("conv1d", "embedding") else delta

    def _rounding(self, key: str) -> float:
        """Return the largest ‖·‖_F that rounding to the storage moves a weight."""
        size = float(np.linalg.norm(self.weights[key]().astype(np.float64)))
        return ROUNDING_MARGIN * unit_roundoff(self.storage) * size

    def faults_beside(self, source: Checkpoint, *, trust_remote_code: bool = False) -> list[Reason]:
        """Return what else of the model is not the base's: other weights, the tokenizer.

        Only a tokenizer of the base may run program code, and only if that is trusted.
        """
        reasons = []
        adapted = {f"{layer.name}.weight" for layer in source.layers}
        saved = [key.removeprefix("base_model.model.") for key in source.extras]
        changed = {}
        for key in sorted(self.weights.keys() & self.base_weights.keys() - adapted):
            if any(key.endswith(name) or name.endswith(key) for name in saved):
                continue
            difference = self._difference(key)
            if difference > 0.0:
                changed[key] = difference
        if changed:
            largest = max(changed.values())
            reasons.append(
                Reason(
                    "base",
                    f"{len(changed)} weights that the LoRA does not adapt differ from the base's, "
                    f"by up to {largest:.2g} of their size: it was merged into another base",
                    tuple(key.removesuffix(".weight") for key in changed),
                )
            )
        words = _tokenizer_differences(self.path, self.base, trust=trust_remote_code)
        if words:
            reasons.append(Reason("tokenizer", f"its tokenizer differs: {'; '.join(words)}"))
        return reasons

    def _difference(self, key: str) -> float:
        """Return how much more a weight differs from the base's than rounding explains, or 0."""
        before = self.base_weights[key]().astype(np.float64)
        after = self.weights[key]().astype(np.float64)
        if before.shape != after.shape:
            return 1.0
        size = float(np.linalg.norm(before)) or 1.0
        difference = float(np.linalg.norm(after - before)) / size
        # Four bits move a weight by a tenth of its size, eight by a hundredth.
        allowed = 0.2 if self.is_quantized else 4.0 * unit_roundoff(self.storage)
        return difference if difference > allowed else 0.0


def _packing(path: Path) -> str:
    """Return what a model's files say that they were quantized by; empty if nothing."""
    files = [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))
    if files and not (path / "config.json").is_file():
        return gguf_type(files[0])
    config = path / "config.json"
    packing = read_json(config).get("quantization_config") if config.is_file() else None
    if not isinstance(packing, dict):
        return ""
    if packing.get("load_in_4bit"):
        return str(packing.get("bnb_4bit_quant_type", "fp4")).upper()
    return "int8" if packing.get("load_in_8bit") else str(packing.get("quant_method", "integers"))


def _weights(model: str | Path) -> Weights:
    """Return functions that read the tensors of a model: from safetensors, or as it opens."""
    directory = Path(reachable_base(model))
    if not directory.exists():
        from huggingface_hub import snapshot_download

        directory = Path(snapshot_download(str(directory)))
    if not _packing(directory):
        tensors: dict[str, Callable[[], Array]] = {}
        for file in weight_files(directory):
            for name, tensor in read_header(file).tensors.items():
                tensors[name] = partial(_read, tensor)
        if tensors:
            return tensors
    from lsrdecomp.lora.measure.output_meter import open_weights  # with torch

    return open_weights(directory)


def _read(tensor: Any) -> Array:
    """Read a tensor in float32, NaN included."""
    array: Array = tensor.read().astype(np.float32)
    return array


def _storage(samples: Sequence[Array]) -> str:
    """Return the narrowest float type that holds some matrices, or that they have few values."""
    if not samples:
        return "float32"
    if all(map(_has_few_values, samples)):
        return "four bits"
    if all(map(_has_steps_of_eight_bits, samples)):
        return "eight bits"
    for storage in ("bfloat16", "float16"):
        with np.errstate(over="ignore", invalid="ignore"):
            rounded = [sample.astype(DTYPES[storage]).astype(np.float32) for sample in samples]
        pairs = zip(samples, rounded, strict=True)
        if all(np.array_equal(*pair, equal_nan=True) for pair in pairs):
            return storage
    return "float32"


def _has_few_values(weight: Array) -> bool:
    """Return whether each block of a matrix has at most sixteen different values."""
    if weight.ndim != 2 or weight.shape[1] % BLOCK:
        return False
    blocks = np.sort(weight.reshape(-1, BLOCK), axis=1)
    return bool(((np.diff(blocks, axis=1) != 0).sum(1) < BLOCK // 2).all())


def _has_steps_of_eight_bits(weight: Array) -> bool:
    """Return whether each row, or each block, is its largest entry times whole numbers / 127."""
    if weight.ndim != 2 or weight.shape[1] % BLOCK:
        return False
    for groups in (weight, weight.reshape(-1, BLOCK)):
        largest = np.abs(groups).max(axis=1, keepdims=True)
        steps = 127.0 * groups.astype(np.float64) / np.where(largest > 0.0, largest, 1.0)
        if float(np.abs(steps - np.round(steps)).max()) < SAME:
            return True
    return False


def _tokenizer_differences(path: str | Path, base: str | Path, *, trust: bool) -> list[str]:
    """Return in what two tokenizers differ; nothing where the model brings none."""
    try:
        other = open_tokenizer(path)
    except CheckpointError:
        return []
    own = open_tokenizer(base, trust_remote_code=trust)
    words = []
    for name in ("bos_token", "eos_token"):
        first, second = getattr(own, name), getattr(other, name)
        if first != second:
            words.append(f"its {name} is {second!r}, the base's {first!r}")
    if other(SAMPLE)["input_ids"] != own(SAMPLE)["input_ids"]:
        words.append("it splits texts into other tokens")
    templates = [getattr(each, "chat_template", None) for each in (own, other)]
    if templates[0] != templates[1] and all(templates):
        words.append("its chat template is another")
    return words
