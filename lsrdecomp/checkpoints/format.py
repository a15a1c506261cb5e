"""What a format of adapters is, and what every reader refuses and returns in the same words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.config import Config
from lsrdecomp.checkpoints.records import Checkpoint, Layer, natural, rank_notes
from lsrdecomp.checkpoints.tensors import StoredTensor
from lsrdecomp.errors import CheckpointError, UnsupportedError

PREFIX = "base_model.model."
"""What PEFT puts before every module's name."""


class Format(Protocol):
    """A format of adapters: a module of `lsrdecomp.checkpoints.readers` with these three names, or any other value."""

    @property
    def name(self) -> str:
        """What `Checkpoint.format` says of a file that this format read."""
        ...

    def matches(self, bundle: Bundle) -> bool:
        """Whether `read` is to be asked: told from the config and the tensors' names alone.

        Reads no numbers and raises nothing: a damaged file of this format matches, so that `read` says what is wrong.
        """
        ...

    def read(self, bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
        """Check every header and return the record; numbers are read later, by the layers themselves.

        Parameters
        ----------
        bundle : Bundle
            A bundle that `matches`.
        alpha : float, optional
            LoRA alpha as given by the caller; a format whose files decide the scale calls `refuse_alpha`.

        Raises
        ------
        CheckpointError
            One line with file, tensor, numbers and the way out, for anything missing, damaged or inconsistent.
        UnsupportedError
            For a sound file whose content is not expressed in the records: nothing is dropped that acts on the model.
        """
        ...


def needed_config(bundle: Bundle) -> Config:
    """The adapter_config.json of a format that has one."""
    if bundle.config is None:
        raise CheckpointError("has no adapter_config.json", path=bundle.path)
    return Config(bundle.config, bundle.config_path)


def refuse_alpha(bundle: Bundle, alpha: float | None, reason: str | None = None) -> None:
    """Raise `CheckpointError` if an alpha was given to a format whose files decide the scale."""
    if alpha is None:
        return
    place = "file" if bundle.config is None else "config"
    path = bundle.weights if bundle.config is None else bundle.config_path
    raise CheckpointError(f"{reason or f'alpha is in the {place}'}; leave alpha= out", path=path)


def refuse_fields(config: Config, reasons: Mapping[str, str]) -> None:
    """Raise `UnsupportedError` if a field is set that changes the update beyond what the records express."""
    for field, reason in reasons.items():
        if config.raw.get(field):
            raise UnsupportedError(f"{field} is set: {reason}; such an adapter is not read", path=config.path)


def without_prefix(tensor: StoredTensor) -> str:
    """The name of a tensor as the base model has it; `CheckpointError` for one that PEFT would not load."""
    if not tensor.name.startswith(PREFIX):
        raise tensor.error(f"expected the prefix {PREFIX!r}: PEFT would not load this tensor")
    return tensor.name.removeprefix(PREFIX)


def finish(
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
        raise CheckpointError(f"holds no {parts} among {len(bundle.tensors)} tensors", path=bundle.weights)
    ordered = tuple(sorted(layers, key=lambda layer: natural(layer.name)))
    raw = dict(config if config is not None else bundle.config or {})
    notes = (*notes, *rank_notes(ordered))
    return Checkpoint(bundle.path, form, raw, ordered, dict(extras), bundle.weights, dict(bundle.metadata), notes)
