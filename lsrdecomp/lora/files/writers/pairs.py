"""Pairs written as another file holds them, or under the names of a row of the table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError, unknown
from lsrdecomp.lora.files.writers.rows import write_export
from lsrdecomp.lora.files.writers.same import write_same
from lsrdecomp.lora.files.writers.table import WRITERS, Export, Writer

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from lsrdecomp.lora.files.records import Checkpoint
    from lsrdecomp.lora.files.tensors import StoredTensor
    from lsrdecomp.lora.files.writers.table import Pairs


def write_pairs(
    out: str | Path,
    *,
    layers: Pairs,
    source: Checkpoint | None = None,
    names: str = "same",
    storage: str | None = None,
    extras: Mapping[str, StoredTensor] | None = None,
    force: bool = False,
    provenance: Mapping[str, Any] | None = None,
    carried: Collection[str] = (),
) -> Path:
    """Write pairs with ``ΔW = B @ A``, the scale in B, in a source's format or for image programs.

    "same": keys, types, alphas and metadata are the source's; tensors that are no pair are copied.
    Layers that do not come are left out, unless they are carried. An alpha keeps its value, and
    the factor by which alpha / rank differs goes into B. Of PEFT's and mlx-lm's directories the
    config follows the ranks, as does diffusers' config in the header; where a program has one rank
    for all layers (loralib, torchtune), all are padded to the largest.

    "kohya": alpha is the rank everywhere. Names that start with ``lora_`` are kept; diffusers'
    (``unet.…``, ``text_encoder.…``) are flattened, those of text encoders with the level
    ``text_model`` that such files have. "diffusers": there is no scale.

    Parameters
    ----------
    out : str or Path
        A directory for PEFT and for mlx-lm's directories, else a file that ends in .safetensors.
        Must not exist, unless ``force``.
    layers : iterable of (name, B, A)
        B (m, r) and A (r, n), taken one at a time.
    source : Checkpoint, optional
        Gives sizes, kernels and other tensors; never written into. Of "same" also the format.
    names : str
        Whose names of layers: "same", or the name of a `Writer`, such as "kohya" or "diffusers".
    storage : str, optional
        Type of A and B; absent, that of each layer in the source, or float32.
    extras : Mapping, optional
        Instead of the source's other tensors.
    force : bool
        Whether existing files may be replaced.
    provenance : Mapping, optional
        JSON values for the record in the header.
    carried : collection of str
        Of "same": layers of the source that do not come and are copied with all their tensors.

    Returns
    -------
    Path
        ``out``.

    Raises
    ------
    UnsupportedError
        For a layer that has no name in such files, a source that is no file of pairs; for diffusers
        also for other tensors, with which it loads no file.
    CheckpointError
        If ``out`` exists (unless ``force``), or a name is not one of the source.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from lsrdecomp.lora.files import open_checkpoint
    >>> up, down = np.ones((4, 1), np.float32), np.ones((1, 6), np.float32)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     layers = [("unet.mid_block.attn1.to_q", up, down)]
    ...     file = write_pairs(f"{folder}/style.safetensors", layers=layers, names="kohya")
    ...     style = open_checkpoint(file)
    ...     layers = [(style.layers[0].name, up / 2, down)]
    ...     half = open_checkpoint(
    ...         write_pairs(f"{folder}/half.safetensors", source=style, layers=layers)
    ...     )
    ...     print(half.layers[0].name, half.layers[0].load()[0].max())
    lora_unet_mid_block_attn1_to_q 0.5
    """
    export = Export(
        out=Path(out),
        layers=layers,
        source=source,
        storage=storage if names == "same" else storage or "float32",
        extras=extras,
        force=force,
        provenance=provenance,
    )
    if names != "same":
        writers = {writer.name: writer for writer in WRITERS if isinstance(writer, Writer)}
        if names not in writers:
            raise CheckpointError(f"no names {unknown(names, ('same', *writers))}")
        return write_export(writers[names], export)
    if source is None:
        raise CheckpointError("names 'same' are those of a source, and none was given")
    return write_same(
        export.out,
        layers=layers,
        like=source,
        storage=storage,
        extras=export.other_tensors,
        force=force,
        provenance=provenance,
        carried=carried,
    )
