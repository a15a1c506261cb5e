"""Any adapter, opened: from its files alone or, where those do not hold ΔW, by PEFT on its base.

Torch is loaded only for the latter.
"""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError, NeedsBaseError, needs
from lsrdecomp.lora.base.base_files import check_reachable
from lsrdecomp.lora.files import open_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.files.format_table import AdapterSource


def takes_base(adapter: AdapterSource, **options: Any) -> bool:
    """Return whether ΔW of an adapter is not in its file, so that `open_adapter` takes a base.

    Parameters are those of `open_adapter`.

    Examples
    --------
    >>> from importlib.resources import files
    >>> takes_base(files("lsrdecomp.cli") / "demo_adapter")  # a LoRA's is
    False
    """
    try:
        open_checkpoint(adapter, **options)
    except NeedsBaseError:
        return True
    except CheckpointError:
        return False  # it is refused with its reason where it is opened
    return False


def open_adapter(
    adapter: AdapterSource,
    base: str | Path | None = None,
    *,
    trust_remote_code: bool = False,
    **options: Any,
) -> Checkpoint:
    """Open an adapter of any method of PEFT that has a ΔW, or in any other format that is read.

    Parameters
    ----------
    adapter : str, Path, mapping or model
        As `open_checkpoint` takes it.
    base : str or path, optional
        The base model, by name or directory. It is opened only for a method whose ΔW is not in its
        file, such as VeRA, OFT or DoRA.
    trust_remote_code : bool
        Whether program code that the base brings may run.
    **options
        Arguments of `open_checkpoint`.

    Returns
    -------
    Checkpoint
        Where ΔW came from a base, its layers are the low-rank pairs of the same ΔW, in float32,
        and at full rank ΔW itself and an identity. They lie in a temporary directory that lives as
        long as the record.

    Raises
    ------
    NeedsBaseError
        If ΔW is not in the file, and no base is given.
    CheckpointError, UnsupportedError
        As `open_checkpoint`; and if base and adapter do not fit.

    Examples
    --------
    >>> from importlib.resources import files
    >>> len(open_adapter(files("lsrdecomp.cli") / "demo_adapter").layers)
    12
    """
    try:
        return open_checkpoint(adapter, **options)
    except NeedsBaseError as error:
        if not isinstance(adapter, str | PathLike):
            raise
        refusal = error
    if base is not None:
        check_reachable(base)  # before torch is loaded
    with needs("an adapter of this method", "peft"):
        from lsrdecomp.lora.base.merged_layers import merged_checkpoint
    name, max_memory = options.get("name"), options.get("max_memory")
    checkpoint = merged_checkpoint(
        adapter, base, name=name, max_memory=max_memory, trust_remote_code=trust_remote_code
    )
    if checkpoint is None:
        raise refusal
    return checkpoint
