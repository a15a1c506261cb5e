"""A format of adapters: what lies at a path before anyone says which it is, and what every reader refuses and returns.

Config, weight file and headers are a `Bundle`, which an `AdapterFormat` reads in the words that all of them
share.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lsrdecomp._ordering import natural_key
from lsrdecomp.checkpoints.files import read_json, regular_file_size
from lsrdecomp.checkpoints.pickles import read_pickle
from lsrdecomp.checkpoints.records import Checkpoint, Layer, rank_notes
from lsrdecomp.checkpoints.tensors import StoredTensor, read_header
from lsrdecomp.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from os import PathLike

    from lsrdecomp.checkpoints.config import Config

CONFIG = "adapter_config.json"
PEFT_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # in PEFT's own order
MLX_WEIGHTS = "adapters.safetensors"
BESIDE_CONFIG = (*PEFT_WEIGHTS, MLX_WEIGHTS)
SHARD = re.compile(r"-\d+-of-\d+\.")
SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class Bundle:
    """An adapter as found. ``config`` is None where there is no adapter_config.json."""

    path: Path
    weights: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    config: Mapping[str, Any] | None = None

    @property
    def config_path(self) -> Path:
        return self.weights.parent / CONFIG

    def config_error(self, message: str) -> CheckpointError:
        return CheckpointError(message, path=self.config_path)


def open_bundle(
    path: str | PathLike[str], name: str | None = None, max_memory: int | None = None
) -> Bundle:
    """Find config and weights at a path and read the headers; `CheckpointError` if there is not exactly one adapter.

    Parameters
    ----------
    path : str or Path
        A directory with adapter_config.json, a directory with one weight file, or a weight file.
    name : str, optional
        Weight file or sub-directory to take where a directory has several.
    max_memory : int, optional
        Bytes that a file may have which can only be read whole.
    """
    path = Path(path)
    target = path / name if name is not None else path
    if not target.exists() and not target.is_symlink():
        text, hub = "no such file or directory", re.fullmatch(r"[\w.-]+/([\w.-]+)", path.as_posix())
        if hub is not None and not path.parent.exists():
            text += f"; from the Hugging Face hub it comes by: hf download {path.as_posix()} --local-dir {hub[1]}"
        raise CheckpointError(text, path=target)
    # Find 1: a file, with the config beside it only if PEFT would take that for its own.
    if not target.is_dir():
        if target.suffix in (".json", ".md", ".txt", ".toml", ".yaml"):
            there = any(file.suffix in SUFFIXES for file in target.absolute().parent.iterdir())
            way_out = (
                f"give its directory, {target.parent}"
                if there
                else f"expected one of {', '.join(SUFFIXES)}"
            )
            raise CheckpointError(f"holds no weights; {way_out}", path=target)
        with_config = target.name in BESIDE_CONFIG and (target.parent / CONFIG).exists()
        return _read(
            target, target, read_json(target.parent / CONFIG) if with_config else None, max_memory
        )
    # Find 2: a directory with a config; of its weights the first that PEFT would look for.
    if (target / CONFIG).exists() or (target / CONFIG).is_symlink():
        config = read_json(target / CONFIG)
        weights = [
            target / file
            for file in BESIDE_CONFIG
            if (target / file).exists() or (target / file).is_symlink()
        ]
        if not weights:
            files = sorted(entry for entry in target.iterdir() if entry.suffix in SUFFIXES)
            _refuse_shards(target, files)
            alone = (
                f"; to read {files[0].name} without the config, say so by name=" if files else ""
            )
            text = f"has {CONFIG} but no weights: {' or '.join(PEFT_WEIGHTS)} is missing{alone}"
            raise CheckpointError(text, path=target)
        return _read(target, weights[0], config, max_memory)
    # Find 3: a directory without, if it holds one weight file and no other.
    files = sorted(file for file in target.iterdir() if file.suffix in SUFFIXES)
    inner = sorted(entry.name for entry in target.iterdir() if (entry / CONFIG).exists())
    if inner and not files:
        names = ", ".join(map(repr, inner[:8]))
        raise CheckpointError(f"its adapters lie in {names}: say which by name=", path=target)
    if len(files) != 1:
        _refuse_shards(target, files)
        names = ", ".join(repr(file.name) for file in files[:8])
        text = (
            f"{len(files)} weight files ({names}): say which by name="
            if files
            else f"no {CONFIG} and no weight file"
        )
        raise CheckpointError(
            f"{text}; expected an adapter directory or one of {', '.join(SUFFIXES)}", path=target
        )
    return _read(target, files[0], None, max_memory)


def _refuse_shards(directory: Path, files: Sequence[Path]) -> None:
    """Say of a file in parts that it is one, and which parts there are."""
    parts = sorted(file.name for file in files if SHARD.search(file.name))
    if parts:
        text = f"one file in {len(parts)} shards ({parts[0]}, …), which are not read"
        way_out = f"load all with safetensors and save them as one {PEFT_WEIGHTS[0]}; a whole model is no adapter"
        raise CheckpointError(f"{text}: {way_out}", path=directory)


def _read(
    path: Path, weights: Path, config: Mapping[str, Any] | None, max_memory: int | None
) -> Bundle:
    if weights.suffix == ".safetensors":
        header = read_header(weights)
        return Bundle(path, weights, header.tensors, header.metadata, config)
    if regular_file_size(weights) == 0:
        raise CheckpointError("the file is empty", path=weights)
    return Bundle(path, weights, read_pickle(weights, max_memory), {}, config)


PREFIX = "base_model.model."
"""What PEFT puts before every module's name."""
PART = re.compile(r"\.(lora|hada|lokr|oft|glora)[._]")
Roles = dict[str, StoredTensor]

DORA = "DoRA rescales every row by the norm of the base weights, which are not in this file"
NOT_READ = "such an adapter is not read: merge it into its base, or train it again as plain LoRA"
WITHOUT = "(the rest of the file is read, if such tensors are taken out of it)"

# Parts of other methods that change the forward pass; dropping them silently would change the
# model.
OTHER_METHODS = {
    ".dora_scale": DORA,
    ".lora_magnitude_vector": DORA,
    ".lora_magnitude_vector.weight": DORA,
    ".diff": f"a full-size difference, no LoRA {WITHOUT}",
    ".diff_b": f"the difference of a bias, no LoRA {WITHOUT}",
    ".set_weight": f"a full-size weight, no LoRA {WITHOUT}",
    ".oft_blocks": "OFT rotates the base weights",
    ".oft_diag": "OFT rotates the base weights",
    ".on_input": "IA3 scales activations",
    ".w_norm": "a normalisation layer's difference",
    ".b_norm": "a normalisation layer's difference",
    ".a1.weight": "GLoRA multiplies the base weights",
    ".lora_up.bias": "a bias of the update",
    ".lora_B.bias": "a bias of the update",
}


class AdapterFormat(Protocol):
    """A format of adapters: a module of `lsrdecomp.checkpoints.readers` with these three names, or any other value."""

    @property
    def name(self) -> str:
        """What `Checkpoint.format` says of a file that this format read."""
        ...

    def matches(self, bundle: Bundle) -> bool:
        """Whether `read` is to be asked: told from the config and the tensors' names alone.

        Reads no numbers and raises nothing: a damaged file of this format matches, so that `read`
        says what is wrong.
        """
        ...

    def read(self, bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
        """Check every header and return the record; numbers are read later, by the layers themselves.

        Parameters
        ----------
        bundle : Bundle
            A bundle that `matches`.
        alpha : float, optional
            LoRA alpha as given by the caller; a format whose files decide the scale calls
            `refuse_alpha`.

        Raises
        ------
        CheckpointError
            One line with file, tensor, numbers and the way out, for anything missing, damaged or
            inconsistent.
        UnsupportedError
            For a sound file whose content is not expressed in the records: nothing is dropped that
            acts on the model.
        """
        ...


def refuse_alpha(bundle: Bundle, alpha: float | None, reason: str | None = None) -> None:
    """Raise `CheckpointError` if an alpha was given to a format whose files decide the scale."""
    if alpha is None:
        return
    source = "file" if bundle.config is None else "config"
    path = bundle.weights if bundle.config is None else bundle.config_path
    raise CheckpointError(f"{reason or f'alpha is in the {source}'}; leave alpha= out", path=path)


def refuse_fields(config: Config, reasons: Mapping[str, str]) -> None:
    """Raise `UnsupportedError` if a field is set that changes the update beyond what the records express."""
    for field, reason in reasons.items():
        if config.raw.get(field):
            raise UnsupportedError(f"{field} is set: {reason}; {NOT_READ}", path=config.path)


def without_prefix(tensor: StoredTensor) -> str:
    """The name of a tensor as the base model has it; `CheckpointError` for one that PEFT would not load."""
    if not tensor.name.startswith(PREFIX):
        text = f"expected the prefix {PREFIX!r}: PEFT would not load this tensor"
        if tensor.name.endswith((".lora_a.weight", ".lora_b.weight")):
            text += f"; these are torchtune's own keys: move {tensor.path.name} away from its config and pass its alpha"
        raise tensor.error(text)
    return tensor.name.removeprefix(PREFIX)


def group_by_module(
    bundle: Bundle, suffixes: Mapping[str, str], prefix: str = ""
) -> tuple[dict[str, Roles], dict[str, StoredTensor]]:
    """``{module: {role: tensor}}`` by the suffix of each key, and everything else under the key PEFT would give it.

    With PEFT's prefix, which all keys then must have, a part of another method is told by its word;
    without by its end.
    """
    modules: dict[str, Roles] = {}
    extras: dict[str, StoredTensor] = {}
    for key, tensor in bundle.tensors.items():
        key = without_prefix(tensor) if prefix else key
        for suffix, reason in OTHER_METHODS.items():
            if key.endswith(suffix) and (not prefix or PART.search(key)):
                raise UnsupportedError(
                    f"{reason}; {NOT_READ}", path=tensor.path, tensor=tensor.name
                )
        ends = [end for end in suffixes if key.endswith(end) and key != end]
        if not ends:
            if PART.search(key):
                text = "is part of an adapter, but not one this format is known to have"
                raise UnsupportedError(text, path=tensor.path, tensor=tensor.name)
            extras[PREFIX + key] = tensor
            continue
        roles, role = modules.setdefault(key.removesuffix(ends[0]), {}), suffixes[ends[0]]
        if role in roles:
            raise tensor.error(f"the same part as {roles[role].name}")
        roles[role] = tensor
    return modules, extras


def require_roles(
    name: str, roles: Roles, wanted: Iterable[str], allowed: Iterable[str] = ()
) -> None:
    """Raise `CheckpointError` unless a module has the wanted roles, and no other than those and the allowed."""
    wanted, example = tuple(wanted), next(iter(roles.values()))
    missing = [role for role in wanted if role not in roles]
    if missing:
        parts = ", ".join(sorted(roles))
        text = f"has {parts} without {', '.join(missing)}; the file is incomplete"
        raise example.error(text)
    more = set(roles) - {*wanted, *allowed}
    if more:
        raise CheckpointError(
            f"has {', '.join(sorted(more))} beside {', '.join(wanted)}",
            path=example.path,
            tensor=name,
        )


def scalar(tensor: StoredTensor) -> float:
    """The one number in a tensor, such as alpha."""
    if tensor.parameters != 1:
        raise tensor.error(f"shape {tensor.shape}, expected one number")
    return float(tensor.load().reshape(()))


def make_checkpoint(
    bundle: Bundle,
    form: str,
    layers: Sequence[Layer],
    extras: Mapping[str, StoredTensor],
    notes: tuple[str, ...] = (),
    *,
    config: Mapping[str, Any] | None = None,
    parts: str = "layer",
) -> Checkpoint:
    """The record of what was read, its layers in natural order.

    Parameters
    ----------
    form : str
        The format's name.
    extras : mapping of str to StoredTensor
        Every tensor that belongs to no layer, by the key PEFT would give it.
    config : mapping, optional
        What stands for adapter_config.json; by default the bundle's own.
    parts : str
        What a file without layers is said to hold none of.
    """
    if not layers:
        raise CheckpointError(
            f"holds no {parts} among {len(bundle.tensors)} tensors", path=bundle.weights
        )
    ordered = tuple(sorted(layers, key=lambda layer: natural_key(layer.name)))
    raw = dict(config if config is not None else bundle.config or {})
    notes = (*notes, *rank_notes(ordered))
    return Checkpoint(
        bundle.path, form, raw, ordered, dict(extras), bundle.weights, dict(bundle.metadata), notes
    )
