"""The table of formats, and the one way to open an adapter: by path, state dict or PeftModel."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any, Protocol

from array_api_compat import is_torch_array

from lsrdecomp.arrays import to_numpy
from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.lora.files.adapter_config import module_suffixes, patterns
from lsrdecomp.lora.files.format import CONFIG, PREFIX, AdapterFormat, Bundle, open_bundle
from lsrdecomp.lora.files.packed import NUMBERS
from lsrdecomp.lora.files.pickles import BY_POSITION
from lsrdecomp.lora.files.readers import read_lsr as lsr
from lsrdecomp.lora.files.readers.layouts import LAYOUTS
from lsrdecomp.lora.files.tensors import DTYPES, Array, TensorWriter
from lsrdecomp.lora.files.writing import WEIGHTS

if TYPE_CHECKING:
    from lsrdecomp.lora.files.records import Checkpoint

ADAPTER_NAME = re.compile(r".+\.lora_(?:A|B)\.([^.]+)\.weight")
POSITION = re.compile(r"[A-Za-z_0-9]+:[0-9]+:(?:up|down)")
RAISE_LIMIT = "raise max_memory (--max-memory)"

FORMATS: tuple[AdapterFormat, ...] = (*LAYOUTS, lsr)
"""What `open_checkpoint` asks, in this order."""


class SavesAdapter(Protocol):
    """A model that saves itself as an adapter directory, as a ``PeftModel`` does."""

    def save_pretrained(self, save_directory: str) -> Any:
        """Write adapter_config.json and weights into a directory."""
        ...


AdapterSource = str | Path | Mapping[str, Any] | SavesAdapter
"""What `open_checkpoint` reads."""


def open_checkpoint(
    path: AdapterSource,
    *,
    name: str | None = None,
    alpha: float | None = None,
    max_memory: int | None = None,
    carry: bool = False,
) -> Checkpoint:
    """Open an adapter: find its files, tell its format and check every header.

    Numbers are read later, layer by layer.

    Parameters
    ----------
    path : str, Path, mapping or model
        An adapter directory or a weight file; a state dict with the keys of any format, or a
        ``PeftModel``, which are saved to a temporary directory that lives as long as what was read
        from it.
    name : str, optional
        Weight file or sub-directory to take where a directory has several.
    alpha : float, optional
        LoRA alpha, for formats whose files do not hold it, and for state dicts of PEFT.
    max_memory : int, optional
        Bytes that one layer as a LoRA in float64, or one other tensor, may take; larger ones are
        refused before they are read.
    carry : bool
        Open also a file with tensors that are no pairs (`Checkpoint.carried`), which only a cut in
        its own format keeps; absent, they are refused by name.

    Returns
    -------
    Checkpoint
        Layers, and everything else the files hold, none of it read yet.

    Raises
    ------
    CheckpointError
        One line with file, tensor, numbers and the way out, for anything missing, damaged or
        inconsistent.
    UnsupportedError
        For a sound file whose content is not expressed here: it is refused by name, never dropped.

    Examples
    --------
    >>> from importlib.resources import files
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> len(lora.layers), lora.adapter_parameters
    (12, 73728)

    What a program holds in memory:

    >>> import numpy as np
    >>> pair = {"lora_A.weight": np.ones((2, 6)), "lora_B.weight": np.ones((4, 2))}
    >>> arrays = {f"base_model.model.q_proj.{half}": array for half, array in pair.items()}
    >>> layer, = open_checkpoint(arrays, alpha=4).layers
    >>> layer.name, layer.out_features, layer.in_features, layer.rank, layer.scale
    ('q_proj', 4, 6, 2, 2.0)
    """
    if isinstance(path, str | PathLike):
        bundle = open_bundle(path, name, max_memory)
    else:
        bundle = bundle_in_memory(path, name, alpha)
        alpha = None if bundle.config is not None else alpha
    if max_memory is not None:
        _check_packed_size(bundle, max_memory)
    _refuse_adapter_names(bundle.tensors, "save it by save_pretrained", bundle.weights)
    _refuse_positions(bundle)
    for adapter_format in FORMATS:
        if adapter_format.matches(bundle):
            checkpoint = adapter_format.read(bundle, alpha=alpha)
            if max_memory is not None:
                _check_memory(checkpoint, max_memory)
            if checkpoint.carried and not carry:
                checkpoint.refuse_carried()
            return checkpoint
    raise _unknown_format(bundle)


def _unknown_format(bundle: Bundle) -> CheckpointError:
    """Say what a bundle holds that no format matches."""
    keys = list(bundle.tensors)
    if keys and all(re.fullmatch(r"<.+>", key) for key in keys):
        return CheckpointError(
            f"holds {len(keys)} token embeddings and no LoRA layer", path=bundle.weights
        )
    examples = ", ".join(map(repr, keys[:3])) or "nothing"
    readable = ", ".join(adapter_format.name for adapter_format in FORMATS)
    return CheckpointError(
        f"no adapter format known here: it holds {examples}; read are {readable}",
        path=bundle.weights,
    )


def _refuse_adapter_names(keys: Iterable[str], way_out: str, path: Path | None = None) -> None:
    """Refuse keys as a running PeftModel has them, ``lora_A.default.weight``.

    No program reads such files, PEFT included; but without PEFT's prefix they are DiffSynth's.
    """
    for key in keys:
        match = ADAPTER_NAME.fullmatch(key)
        if match is not None and (match[1] != "default" or key.startswith(PREFIX)):
            adapter = match[1]
            raise UnsupportedError(
                f"names the adapter {adapter!r} in its keys: saved by state_dict(), which PEFT "
                f"does not read; {way_out}, or take '.{adapter}' out of the keys",
                path=path,
                tensor=key,
            )


def _refuse_positions(bundle: Bundle) -> None:
    """Refuse keys that call layers by their position, ``unet:0:up``."""
    for key in bundle.tensors:
        if POSITION.fullmatch(key):
            raise UnsupportedError(BY_POSITION, path=bundle.weights, tensor=key)


def _check_packed_size(bundle: Bundle, max_memory: int) -> None:
    packed = bundle.tensors.get(NUMBERS)
    if packed is not None and packed.nbytes > max_memory:
        raise packed.error(
            f"its {packed.nbytes} bytes are read whole, above the {max_memory} allowed; "
            f"{RAISE_LIMIT}"
        )


def _check_memory(checkpoint: Checkpoint, max_memory: int) -> None:
    """Refuse a layer or tensor that would take more than ``max_memory`` bytes when it is read."""
    sizes: list[tuple[str, int, int]] = []  # name, how many numbers, bytes of each
    for layer in checkpoint.layers:
        # A small file can imply a huge layer: what counts are the factors or the LoRA that they
        # expand to, whichever are more.
        lora_numbers = layer.rank * (layer.out_features + layer.in_features)
        sizes.append((layer.name, max(layer.parameters, lora_numbers), 8))
    for key, tensor in checkpoint.extras.items():
        sizes.append((key, tensor.parameters, DTYPES[tensor.dtype].itemsize))
    for name, numbers, width in sizes:
        if numbers * width > max_memory:
            raise CheckpointError(
                f"its {numbers} numbers take {numbers * width} bytes, above the {max_memory} "
                f"allowed; {RAISE_LIMIT}",
                path=checkpoint.weights,
                tensor=name,
            )


# -- adapters in the memory of a program: saved to a temporary directory and read there ------------

DOWN_ENDINGS = (".lora_A.weight", ".lora_embedding_A")


class _TemporaryFolder:
    """A temporary directory that goes when nothing can read from it any more."""

    def __init__(self) -> None:
        self.path = Path(mkdtemp(prefix="lsrdecomp-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class _FetchFromFolder:
    """Reads a tensor's numbers; the folder lives as long as a tensor that lies in it."""

    folder: _TemporaryFolder
    fetch: Callable[[], Array]

    def __call__(self) -> Array:
        return self.fetch()


def bundle_in_memory(
    adapter: Mapping[str, Any] | SavesAdapter, name: str | None, alpha: float | None
) -> Bundle:
    """Save a state dict or a model to a temporary directory, and open that.

    Of PEFT's keys ``alpha`` goes into the config that they lack.
    """
    folder = _TemporaryFolder()
    directory = folder.path / "adapter"
    if isinstance(adapter, Mapping):
        _save_state_dict(adapter, directory, alpha)
    elif hasattr(adapter, "save_pretrained"):
        adapter.save_pretrained(str(directory))
    else:
        found = type(adapter).__name__
        raise CheckpointError(
            f"expected a path, a state dict or a PeftModel, got an object of type {found}"
        )
    bundle = open_bundle(directory, name)
    tied = {
        key: replace(tensor, fetch=_FetchFromFolder(folder, tensor.fetch))
        for key, tensor in bundle.tensors.items()
    }
    return replace(bundle, tensors=tied)


def _save_state_dict(state: Mapping[str, Any], directory: Path, alpha: float | None) -> None:
    """Write a state dict as an adapter directory; with a config, if its keys are PEFT's."""
    way_out = "give the PeftModel itself, or get_peft_model_state_dict of it"
    _refuse_adapter_names(map(str, state), way_out)
    directory.mkdir()
    arrays = {str(key): _to_array(str(key), value) for key, value in state.items()}
    if any(key.startswith(PREFIX) for key in arrays):
        config = _lost_config(arrays, alpha)
        (directory / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    with TensorWriter(directory) as writer:
        for key, array in arrays.items():
            writer.add(key, array)
        writer.write(directory / WEIGHTS, {"format": "pt"})


def _lost_config(arrays: Mapping[str, Array], alpha: float | None) -> dict[str, Any]:
    """Make the adapter_config.json that a state dict of PEFT has lost, but for its alpha."""
    ranks: dict[str, int] = {}
    for key, array in arrays.items():
        for ending in DOWN_ENDINGS:
            if array.ndim and key.endswith(ending):
                ranks[key.removeprefix(PREFIX).removesuffix(ending)] = len(array)
    if alpha is None:
        listed = ", ".join(map(str, sorted(set(ranks.values()))))
        raise CheckpointError(
            f"a state dict with PEFT's keys, of rank {listed}: its alpha is not in it; give "
            "open_checkpoint alpha=, as lora_alpha was, or the PeftModel itself"
        )
    common_rank = next(iter(ranks.values()), 1)
    return {
        "peft_type": "LORA",
        "r": common_rank,
        "lora_alpha": alpha,
        "rank_pattern": patterns(ranks, common_rank),
        "target_modules": module_suffixes(ranks),
    }


def _to_array(key: str, value: Any) -> Array:
    """Return the bits of a tensor; NumPy has no bfloat16 of torch's."""
    try:
        if is_torch_array(value) and str(value.dtype) == "torch.bfloat16":
            import torch

            bits = value.detach().cpu().contiguous().view(torch.int16)
            return bits.numpy().view(DTYPES["bfloat16"])
        return to_numpy(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"is no tensor that can be stored: {str(error)[:120]}", tensor=key
        ) from None
