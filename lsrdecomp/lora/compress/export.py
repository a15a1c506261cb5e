"""Export of any adapter as a plain LoRA of the same ΔW, for tools that load LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError, UnsupportedError, unknown
from lsrdecomp.lora.files.integrity import check_integrity
from lsrdecomp.lora.files.provenance import read_provenance
from lsrdecomp.lora.files.writers.peft import PROFILES
from lsrdecomp.lora.files.writers.rows import write_export
from lsrdecomp.lora.files.writers.table import Export, find_writer
from lsrdecomp.lora.search.layers import layer_product
from lsrdecomp.lora.search.result import recorded_errors
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from lsrdecomp.lora.files import Checkpoint


@one_blas_thread
def export_lora(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    to: str = "lora",
    storage: str | None = None,
    profile: str = "common",
    force: bool = False,
    base: str | Path | None = None,
    like: Checkpoint | None = None,
    without_heads: bool = False,
) -> Path:
    """Write a plain LoRA of the same ΔW, with the inner ranks of the LSR layers.

    LSR factors expand to LoRA factors, so nothing is lost beyond rounding to ``storage``.

    Parameters
    ----------
    checkpoint : Checkpoint
    out : path
        A directory for "lora" and "mlx", a file for "kohya", "diffusers" and "gguf"; for "same",
        the same as ``like``.
    to : str
        The format: "lora" (PEFT), "kohya", "diffusers", "mlx" (mlx-lm), "gguf" (llama.cpp), or
        "same" for that of ``like``, see `write_pairs`.
    storage : str, optional
        Type of the numbers; absent, the checkpoint's own (float32 for codes), that of ``like`` for
        "same", or f16 for "gguf", which can also have f32 and q8_0.
    profile : str
        For "lora": "common", one rank for all layers, no patterns, and zeros for layers that were
        left out, which every server reads alike; or "peft", each layer at its own rank, for PEFT
        alone. See `lsrdecomp.lora.files.write_lora`.
    base : path, optional
        For "gguf", which needs it: the base as GGUF file, model directory or config.json; absent,
        the directory that the adapter's config names. For
        "common": its layers that lack a pair, where others of their kind have one, become zeros.
    like : Checkpoint, optional
        For "same": the file whose format to write; absent, the checkpoint itself, which must be a
        LoRA then.
    without_heads : bool
        Leave out all tensors beside the layers: saved heads, biases, token embeddings. A format
        that cannot hold them refuses them otherwise.

    Returns
    -------
    Path
        The directory or file.

    Raises
    ------
    UnsupportedError
        For an unknown format.
    CheckpointError
        If ``out`` exists (unless ``force``), or a file of the checkpoint changed since it was
        written, by its SHA256SUMS or the digests in its header.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress, open_checkpoint
    >>> demo = files("lsrdecomp.cli") / "demo_adapter"
    >>> result = compress(demo, separation_rank=2, inner_shape=(2, 2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     small = open_checkpoint(result.save(f"{folder}/small"))
    ...     lora = open_checkpoint(export_lora(small, f"{folder}/lora"))
    >>> small.format, lora.format, lora.layers[0].rank
    ('lsr', 'peft-lora', 8)
    """
    writer = find_writer(to)
    checkpoint.watch_source()
    integrity = check_integrity(checkpoint)
    if integrity.changed:
        raise CheckpointError(
            f"{', '.join(integrity.changed)} changed since it was written; copy or compress it "
            f"again, or take it as it is: lsrdecomp verify SOURCE {checkpoint.path} --accept",
            path=checkpoint.weights.parent,
        )
    if profile not in PROFILES:
        raise UnsupportedError(f"there is no profile {unknown(profile, PROFILES)}")
    layers = ((layer.name, *layer_product(layer).to_lora()) for layer in checkpoint.layers)
    export = Export(
        out=Path(out),
        layers=layers,
        source=checkpoint,
        storage=storage,
        extras={} if without_heads else None,
        force=force,
        provenance=_record(checkpoint, without_heads=without_heads),
        profile=profile,
        base=base,
        like=like,
    )
    return write_export(writer, export)


def _record(checkpoint: Checkpoint, *, without_heads: bool) -> dict[str, Any]:
    """Repeat the record of a checkpoint, with which `verify` will compare the file."""
    record: dict[str, Any] = {
        "derived_from": read_provenance(checkpoint),
        "recorded": recorded_errors(checkpoint),
    }
    if without_heads:
        record["left_out"] = sorted(checkpoint.extras)
    return record
