"""A format of adapters: what lies at a path, and what every reader of it refuses and returns.

Config, weight file and headers are a `Bundle`, which an `AdapterFormat` reads.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from lsrdecomp._ordering import natural_key
from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.lora.files.file_checks import read_json, regular_file_size
from lsrdecomp.lora.files.gguf_files import read_gguf
from lsrdecomp.lora.files.npz import read_npz
from lsrdecomp.lora.files.pickles import read_pickle
from lsrdecomp.lora.files.records import NOT_READ, Checkpoint, Layer, rank_notes
from lsrdecomp.lora.files.tensors import StoredTensor, read_header

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from os import PathLike

    from lsrdecomp.lora.files.adapter_config import Config

CONFIG = "adapter_config.json"
PEFT_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # in PEFT's own order
MLX_WEIGHTS = "adapters.safetensors"
OLD_MLX_WEIGHTS = "adapters.npz"
BESIDE_CONFIG = (*PEFT_WEIGHTS, MLX_WEIGHTS, OLD_MLX_WEIGHTS)
SHARD = re.compile(r"-\d+-of-\d+\.")
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".npz")
TEXT_SUFFIXES = (".json", ".md", ".txt", ".toml", ".yaml")


@dataclass(frozen=True, slots=True)
class Bundle:
    """An adapter as found: its files, and what their headers say.

    Attributes
    ----------
    path : Path
        As given: a directory or a file.
    weights : Path
        The weight file.
    tensors : Mapping of str to StoredTensor
    metadata : Mapping of str to str
        What the header says beside the tensors.
    config : Mapping, optional
        The adapter_config.json, where there is one.
    """

    path: Path
    weights: Path
    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]
    config: Mapping[str, Any] | None = None

    @property
    def config_path(self) -> Path:
        """Where the config lies, or would lie."""
        return self.weights.parent / CONFIG

    def config_error(self, message: str) -> CheckpointError:
        """Make an error that names the config."""
        return CheckpointError(message, path=self.config_path)


def open_bundle(
    path: str | PathLike[str], name: str | None = None, max_memory: int | None = None
) -> Bundle:
    """Find config and weights at a path, and read their headers.

    Parameters
    ----------
    path : str or Path
        A directory with adapter_config.json, a directory with one weight file, or a weight file.
    name : str, optional
        Weight file or sub-directory to take where a directory has several.
    max_memory : int, optional
        Bytes that a file may have which can only be read whole.

    Raises
    ------
    CheckpointError
        If there is not exactly one adapter.
    """
    path = Path(path)
    target = path / name if name is not None else path
    if not _is_there(target):
        raise CheckpointError(_not_found(path), path=target)
    if not target.is_dir():
        weights, config = _find_file(target)
    elif _is_there(target / CONFIG):
        weights, config = _find_beside_config(target)
    else:
        weights, config = _find_only_weights(target), None
    return _read_bundle(target, weights, config, max_memory)


def _is_there(path: Path) -> bool:
    """Return whether there is anything at a path, a link that leads nowhere included."""
    return path.exists() or path.is_symlink()


def _not_found(path: Path) -> str:
    """Say that nothing is there, and how it is had if the path looks like a name on the hub."""
    hub_name = re.fullmatch(r"[\w.-]+/([\w.-]+)", path.as_posix())
    if hub_name is None or path.parent.exists():
        return "no such file or directory"
    command = f"hf download {path.as_posix()} --local-dir {hub_name[1]}"
    return f"no such file or directory; from the Hugging Face hub it comes by: {command}"


def _find_file(file: Path) -> tuple[Path, Mapping[str, Any] | None]:
    """Take a file for weights, with the config beside it if PEFT would take the two together."""
    directory = file.parent
    if file.suffix in TEXT_SUFFIXES:
        way_out = f"expected one of {', '.join(WEIGHT_SUFFIXES)}"
        if any(entry.suffix in WEIGHT_SUFFIXES for entry in file.absolute().parent.iterdir()):
            way_out = f"give its directory, {directory}"
        raise CheckpointError(f"holds no weights; {way_out}", path=file)
    if file.name in BESIDE_CONFIG and (directory / CONFIG).exists():
        return file, read_json(directory / CONFIG)
    return file, None


def _find_beside_config(directory: Path) -> tuple[Path, Mapping[str, Any]]:
    """Find the weights beside a config: the first that PEFT would look for."""
    config = read_json(directory / CONFIG)
    for name in BESIDE_CONFIG:
        if _is_there(directory / name):
            return directory / name, config
    others = _weight_files(directory)
    _refuse_shards(directory, others)
    missing = f"has {CONFIG} but no weights: {' or '.join(PEFT_WEIGHTS)} is missing"
    if others:
        missing += f"; to read {others[0].name} without the config, say so by name="
    raise CheckpointError(missing, path=directory)


def _find_only_weights(directory: Path) -> Path:
    """Find the weights in a directory without a config: one file and no other."""
    files = _weight_files(directory)
    if len(files) == 1:
        return files[0]
    inner = sorted(entry.name for entry in directory.iterdir() if (entry / CONFIG).exists())
    if inner and not files:
        names = ", ".join(map(repr, inner[:8]))
        raise CheckpointError(f"its adapters lie in {names}: say which by name=", path=directory)
    _refuse_shards(directory, files)
    found = f"no {CONFIG} and no weight file"
    if files:
        names = ", ".join(repr(file.name) for file in files[:8])
        found = f"{len(files)} weight files ({names}): say which by name="
    expected = f"expected an adapter directory or one of {', '.join(WEIGHT_SUFFIXES)}"
    raise CheckpointError(f"{found}; {expected}", path=directory)


def _weight_files(directory: Path) -> list[Path]:
    return sorted(entry for entry in directory.iterdir() if entry.suffix in WEIGHT_SUFFIXES)


def _refuse_shards(directory: Path, files: Sequence[Path]) -> None:
    """Say of a file in parts that it is one, and which parts there are."""
    parts = sorted(file.name for file in files if SHARD.search(file.name))
    if parts:
        found = f"one file in {len(parts)} shards ({parts[0]}, …), which are not read"
        way_out = (
            f"load all with safetensors and save them as one {PEFT_WEIGHTS[0]}; "
            "a whole model is no adapter"
        )
        raise CheckpointError(f"{found}: {way_out}", path=directory)


def _read_bundle(
    path: Path, weights: Path, config: Mapping[str, Any] | None, max_memory: int | None
) -> Bundle:
    if weights.suffix == ".safetensors":
        header = read_header(weights)
        return Bundle(path, weights, header.tensors, header.metadata, config)
    if regular_file_size(weights) == 0:
        raise CheckpointError("the file is empty", path=weights)
    if weights.suffix == ".gguf":
        tensors, metadata = read_gguf(weights)
        return Bundle(path, weights, tensors, metadata, config)
    if weights.suffix == ".npz":
        return Bundle(path, weights, read_npz(weights), {}, config)
    return Bundle(path, weights, read_pickle(weights, max_memory), {}, config)


# -- what every reader refuses and returns ---------------------------------------------------------

PREFIX = "base_model.model."
"""What PEFT puts before every module's name."""
ADAPTER_PART = re.compile(r"\.(lora|hada|lokr|oft|glora)[._]")
Roles = dict[str, StoredTensor]
"""The tensors of one module by what they are of it, such as ``{"up": …, "down": …}``."""

OWN_PARTS = ("weight", "bias")
"""What a module of the base has itself, and an adapter may have trained beside its update."""

DORA_NEEDS_BASE = (
    "DoRA rescales every row by the norm of the base weights, which are not in this file"
)
REST_IS_READ = "(the rest of the file is read, if such tensors are taken out of it)"

OTHER_METHODS = {
    ".dora_scale": DORA_NEEDS_BASE,
    ".lora_magnitude_vector": DORA_NEEDS_BASE,
    ".lora_magnitude_vector.weight": DORA_NEEDS_BASE,
    ".diff": f"a full-size difference, no LoRA {REST_IS_READ}",
    ".diff_b": f"the difference of a bias, no LoRA {REST_IS_READ}",
    ".set_weight": f"a full-size weight, no LoRA {REST_IS_READ}",
    ".oft_blocks": "OFT rotates the base weights",
    ".oft_diag": "OFT rotates the base weights",
    ".on_input": "IA3 scales activations",
    ".w_norm": "a normalisation layer's difference",
    ".b_norm": "a normalisation layer's difference",
    ".a1.weight": "GLoRA multiplies the base weights",
    ".lora_up.bias": "a bias of the update",
    ".lora_B.bias": "a bias of the update",
}
"""Parts of other methods by the endings of their keys, and what is said of them: to drop one in
silence would change the model."""
BESIDE_A_PAIR = (".diff", ".diff_b", ".set_weight", ".w_norm", ".b_norm")
"""Those of them that act beside a low-rank pair of the same module, and leave its update as it is.
With any other a layer is one whole."""


class AdapterFormat(Protocol):
    """A format of adapters: a module of `lsrdecomp.lora.files.readers`, or any other value."""

    @property
    def name(self) -> str:
        """What `Checkpoint.format` says of a file that this format read."""
        ...

    def matches(self, bundle: Bundle) -> bool:
        """Return whether `read` is to be asked, from the config and the tensors' names alone.

        Reads no numbers and raises nothing: a damaged file of this format matches, so that `read`
        names the fault.
        """
        ...

    def read(self, bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
        """Check every header and return the record; the layers read their numbers later.

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
    """Refuse an alpha that was given to a format whose files decide the scale."""
    if alpha is None:
        return
    if bundle.config is None:
        reason = reason or "alpha is in the file"
        raise CheckpointError(f"{reason}; leave alpha= out", path=bundle.weights)
    raise bundle.config_error(f"{reason or 'alpha is in the config'}; leave alpha= out")


def refuse_fields(config: Config, reasons: Mapping[str, str]) -> None:
    """Refuse, with its reason, a field that changes the update beyond what the records express."""
    for field, reason in reasons.items():
        if config.raw.get(field):
            raise UnsupportedError(f"{field} is set: {reason}; {NOT_READ}", path=config.path)


def without_prefix(tensor: StoredTensor) -> str:
    """Return the name of a tensor as the base model has it.

    Raises
    ------
    CheckpointError
        For a tensor that PEFT would not load.
    """
    if tensor.name.startswith(PREFIX):
        return tensor.name.removeprefix(PREFIX)
    message = f"expected the prefix {PREFIX!r}: PEFT would not load this tensor"
    if tensor.name.endswith((".lora_a.weight", ".lora_b.weight")):
        message += (
            f"; these are torchtune's own keys: move {tensor.path.name} away from its config and "
            "pass its alpha"
        )
    raise tensor.error(message)


def drop_orphan_alphas(
    bundle: Bundle, suffixes: Mapping[str, str]
) -> tuple[Bundle, tuple[str, ...]]:
    """Leave out alphas of modules of which the file holds nothing else, and note how many.

    They act on nothing.
    """
    alphas = {
        key for key in bundle.tensors if suffixes.get(f".{key.rpartition('.')[2]}") == "alpha"
    }
    modules = {key.rpartition(".")[0] for key in alphas}
    for key in bundle.tensors.keys() - alphas:
        modules -= {key.removesuffix(ending) for ending in suffixes}
        while modules and "." in key:
            key = key.rpartition(".")[0]
            modules.discard(key)
    if not modules:
        return bundle, ()
    orphans = {key for key in alphas if key.rpartition(".")[0] in modules}
    kept = {key: tensor for key, tensor in bundle.tensors.items() if key not in orphans}
    note = f"{len(orphans)} alphas without a pair are left out, the first {min(orphans)}"
    return replace(bundle, tensors=kept), (note,)


def set_aside(bundle: Bundle, suffixes: Mapping[str, str]) -> tuple[Bundle, dict[str, str]]:
    """Take out all but pairs: parts of other methods, and the layers that they are a part of.

    Parameters
    ----------
    bundle : Bundle
    suffixes : mapping of str to str
        Roles by the endings of keys, as for `group_by_module`.

    Returns
    -------
    rest : Bundle
        Without these tensors.
    reasons : dict of str to str
        Why each of them is no pair, by its key.
    """
    keys_by_module: dict[str, list[str]] = {}
    others = []
    for key in bundle.tensors:
        ending = next((end for end in suffixes if key.endswith(end) and key != end), None)
        if ending is None:
            others.append(key)
        else:
            keys_by_module.setdefault(key.removesuffix(ending), []).append(key)
    known = ", ".join(sorted(ending.removeprefix(".") for ending in suffixes))
    reasons: dict[str, str] = {}
    for key in others:
        ending = next((end for end in OTHER_METHODS if key.endswith(end)), None)
        module, _, part = key.rpartition(".")
        if ending is not None:
            reasons[key] = OTHER_METHODS[ending]
            module = key.removesuffix(ending)
        elif module in keys_by_module and part not in OWN_PARTS:
            reasons[key] = (
                f"is inside the layer {module}, of which {known} are known: what it does to the "
                "update is not"
            )
        else:
            continue
        keys = keys_by_module.get(module, [])
        has_pair = any(suffixes[each[len(module) :]] != "alpha" for each in keys)
        if ending not in BESIDE_A_PAIR or not has_pair:
            reasons |= dict.fromkeys(keys, reasons[key])
    rest = {key: tensor for key, tensor in bundle.tensors.items() if key not in reasons}
    return replace(bundle, tensors=rest), reasons


def group_by_module(
    bundle: Bundle, suffixes: Mapping[str, str], prefix: str = ""
) -> tuple[dict[str, Roles], dict[str, StoredTensor]]:
    """Sort tensors by module and role, from the endings of their keys.

    Parameters
    ----------
    bundle : Bundle
    suffixes : mapping of str to str
        Roles by the endings of keys.
    prefix : str
        PEFT's, which all keys then must have.

    Returns
    -------
    modules : dict of str to Roles
    extras : dict of str to StoredTensor
        Everything else, under the key PEFT would give it.

    Raises
    ------
    UnsupportedError
        For a part of another method. With PEFT's prefix it is known by its word too, without by its
        ending alone.
    CheckpointError
        If a module has two tensors of one role.
    """
    modules: dict[str, Roles] = {}
    extras: dict[str, StoredTensor] = {}
    for stored_key, tensor in bundle.tensors.items():
        key = without_prefix(tensor) if prefix else stored_key
        is_adapter_part = ADAPTER_PART.search(key) is not None
        for suffix, reason in OTHER_METHODS.items():
            if key.endswith(suffix) and (is_adapter_part or not prefix):
                raise UnsupportedError(
                    f"{reason}; {NOT_READ}", path=tensor.path, tensor=tensor.name
                )
        suffix = next((end for end in suffixes if key.endswith(end) and key != end), "")
        if suffix:
            roles = modules.setdefault(key.removesuffix(suffix), {})
            role = suffixes[suffix]
            if role in roles:
                raise tensor.error(f"the same part as {roles[role].name}")
            roles[role] = tensor
        elif is_adapter_part:
            message = "is part of an adapter, but not one this format is known to have"
            raise UnsupportedError(message, path=tensor.path, tensor=tensor.name)
        else:
            extras[PREFIX + key] = tensor
    _refuse_unknown_parts(modules, extras, suffixes)
    return modules, extras


def _refuse_unknown_parts(
    modules: Mapping[str, Roles], extras: Mapping[str, StoredTensor], suffixes: Mapping[str, str]
) -> None:
    """Refuse a tensor inside a module that is neither a part of its update nor its own weights.

    Carried along it would be lost: it may well scale or reshape the update.
    """
    for key, tensor in extras.items():
        module, _, part = key.removeprefix(PREFIX).rpartition(".")
        if module in modules and part not in OWN_PARTS:
            known = ", ".join(sorted(suffix.removeprefix(".") for suffix in suffixes))
            raise UnsupportedError(
                f"is inside the layer {module}, of which {known} are known: what it does to the "
                "update is not; save the layer without it",
                path=tensor.path,
                tensor=tensor.name,
            )


def require_roles(
    module: str, roles: Roles, required: Iterable[str], optional: Iterable[str] = ()
) -> None:
    """Refuse a module that lacks a required role, or has one that is not optional either."""
    required = tuple(required)
    example = next(iter(roles.values()))
    missing = [role for role in required if role not in roles]
    if missing:
        found = ", ".join(sorted(roles))
        raise example.error(f"has {found} without {', '.join(missing)}; the file is incomplete")
    others = sorted(set(roles) - {*required, *optional})
    if others:
        raise CheckpointError(
            f"has {', '.join(others)} beside {', '.join(required)}",
            path=example.path,
            tensor=module,
        )


def alpha_scale(alpha: StoredTensor, rank: int) -> float:
    """Return alpha / rank as sd-scripts and LyCORIS read it: an alpha of 0 is none, a scale of 1.

    Parameters
    ----------
    alpha : StoredTensor
        One number.
    rank : int
    """
    value = scalar(alpha)
    return value / rank if value else 1.0


def scalar(tensor: StoredTensor) -> float:
    """Read the one number in a tensor, such as alpha."""
    if tensor.parameters != 1:
        raise tensor.error(f"shape {tensor.shape}, expected one number")
    return float(tensor.load().reshape(()))


def make_checkpoint(
    bundle: Bundle,
    format_name: str,
    layers: Sequence[Layer],
    extras: Mapping[str, StoredTensor],
    notes: tuple[str, ...] = (),
    *,
    config: Mapping[str, Any] | None = None,
    layer_word: str = "layer",
    carried: Mapping[str, str] | None = None,
) -> Checkpoint:
    """Make the record of what was read, its layers in natural order.

    Parameters
    ----------
    bundle : Bundle
    format_name : str
        The format's name.
    layers : sequence of LoraLayer or KroneckerLayer
    extras : mapping of str to StoredTensor
        Every tensor that belongs to no layer, by the key PEFT would give it.
    notes : tuple of str
        What a reader of the report should know.
    config : mapping, optional
        What stands for adapter_config.json; by default the bundle's own.
    layer_word : str
        What a file without layers is said to hold none of.
    carried : mapping of str to str, optional
        What `set_aside` took out, if anything.
    """
    if not layers:
        raise CheckpointError(
            f"holds no {layer_word} among {len(bundle.tensors)} tensors", path=bundle.weights
        )
    ordered = tuple(sorted(layers, key=lambda layer: natural_key(layer.name)))
    return Checkpoint(
        bundle.path,
        format_name,
        dict(config if config is not None else bundle.config or {}),
        ordered,
        dict(extras),
        bundle.weights,
        dict(bundle.metadata),
        (*notes, *rank_notes(ordered)),
        dict(bundle.tensors),
        dict(carried or {}),
    )
