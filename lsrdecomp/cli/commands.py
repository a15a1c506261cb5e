"""The verbs: read arguments, call the library, show what it returned."""

from __future__ import annotations

from importlib.resources import as_file, files
from importlib.util import find_spec
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import checkpoints, compression, plots
from lsrdecomp.checkpoints.progress import Counter
from lsrdecomp.cli import served, tables
from lsrdecomp.cli.calibrate import calibrate
from lsrdecomp.cli.compress import compress
from lsrdecomp.cli.distil import distil
from lsrdecomp.cli.finetune import finetune
from lsrdecomp.cli.fleet import fleet
from lsrdecomp.cli.layer_tables import checkpoint_table
from lsrdecomp.cli.options import (
    Adapter,
    Alpha,
    Each,
    Force,
    ForceFile,
    JsonFile,
    MaxMemory,
    Name,
    Quiet,
    Wide,
)
from lsrdecomp.cli.outputs import NEW_FILE, PLACE, UNKNOWN, Input
from lsrdecomp.cli.progress import follow
from lsrdecomp.cli.recommendations import quoted
from lsrdecomp.cli.requests import Display, Opening, Outputs
from lsrdecomp.cli.verify import verify
from lsrdecomp.errors import CheckpointError, LsrError, needs
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from lsrdecomp.checkpoints import Checkpoint


def inspect(
    adapter: Adapter,
    name: Name = None,
    alpha: Alpha = None,
    wide: Wide = False,
    each: Each = False,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: ForceFile = False,
    max_memory: MaxMemory = None,
) -> None:
    """Show what an adapter holds.

    Its layers, their ranks and sizes, and how fast their spectra fall.
    """
    checkpoint = checkpoints.open_checkpoint(adapter, name=name, alpha=alpha, max_memory=max_memory)
    with follow(quiet=quiet) as step, one_blas_thread:
        ranks, read = [], Counter(step, "reading", len(checkpoint.layers), "layers")
        for layer in checkpoint.layers:
            ranks.append(_norm_and_rank(checkpoint, layer))
            read.add()
    tables.show(
        json,
        checkpoint_table(checkpoint, ranks, each=each),
        f"\n{checkpoint.path}: {checkpoint.format}, {len(checkpoint.layers)} layers, "
        f"{checkpoint.adapter_parameters:,} parameters; {checkpoint.extra_parameters:,} numbers in "
        f"{len(checkpoint.extras)} other tensors.",
        *(f"Note: {note}." for note in checkpoint.notes),
        wide=wide,
    )
    if json is not None:  # with the digest of a file that may be large
        tables.write_json(_inspection(checkpoint, ranks), json)


def curve(
    adapter: Adapter,
    out: Annotated[
        Path | None, NEW_FILE, typer.Option(help="Picture to write, .png or .svg.")
    ] = None,
    name: Name = None,
    alpha: Alpha = None,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: Force = False,
) -> None:
    """Show how the error falls with size.

    The error of a whole adapter against its parameters, for each structure.
    """
    if out is not None:
        if out.suffix not in (".png", ".svg"):
            raise typer.BadParameter(
                f"a picture ends in .png or .svg, got {out.name}", param_hint="--out"
            )
        with needs("a picture", "plots"):  # before any work
            import matplotlib  # noqa: F401
    checkpoint = checkpoints.open_checkpoint(adapter, name=name, alpha=alpha)
    with follow(quiet=quiet) as step:
        curves = compression.adapter_curves(checkpoint, on_step=step)
    if not any(curve.norm > 0.0 for curve in curves):
        raise CheckpointError(
            "ΔW is zero in every layer: there is nothing to approximate", path=checkpoint.path
        )
    tables.show(json, tables.curve_table(curves, checkpoint.adapter_parameters))
    if out is not None:
        axes = plots.plot_error_curves(curves, storages=("bfloat16", "float16"))
        axes.axvline(checkpoint.adapter_parameters, color="0.45", linewidth=1.0)
        axes.set_title(
            f"{checkpoint.path.name}: {checkpoint.adapter_parameters:,} LoRA parameters",
            fontsize=10,
        )
        _save(axes, out)
        tables.show(json, f"Wrote {out}.")
    facts = {"adapter": str(adapter), "parameters": checkpoint.adapter_parameters}
    tables.write_json({**facts, "curves": [curve.to_json() for curve in curves]}, json)


def export(
    adapter: Adapter,
    out: Annotated[
        Path,
        UNKNOWN,
        typer.Option(
            "--out",
            help="Directory (lora) or file (gguf, kohya, diffusers; same: as it was); must not exist.",
        ),
    ],
    to: Annotated[
        str, typer.Option(help="Format to write: lora, gguf, kohya, diffusers, or same as --like.")
    ] = "lora",
    profile: Annotated[
        str,
        typer.Option(
            help="Of lora: peft; server: one global scale, no head; lorax: also one padded rank."
        ),
    ] = "peft",
    storage: Annotated[
        str | None,
        typer.Option(
            help="float32, float16, bfloat16; of gguf f16, f32 or q8_0. Absent: the source's."
        ),
    ] = None,
    base: Annotated[
        str | None,
        Input,
        typer.Option(
            help="Of gguf: its GGUF file, directory, config.json or smollm2. For unet:7 …: its pipeline."
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            help="Of same: the LoRA it was made from, whose keys, types and alphas are kept."
        ),
    ] = None,
    without_heads: Annotated[
        bool,
        typer.Option(
            "--without-heads", help="Leave out what is no part of a layer, such as heads; names it."
        ),
    ] = False,
    alpha: Alpha = None,
    force: Force = False,
    max_memory: MaxMemory = None,
) -> None:
    """Write an adapter for tools that load plain LoRA.

    The file is a LoRA of the same ΔW.
    """
    checkpoint = checkpoints.open_checkpoint(
        adapter, alpha=None if like else alpha, max_memory=max_memory
    )
    base_path = None if base is None else served.base_files(base)
    if like is not None and to != "same":
        raise typer.BadParameter("goes with --to same", param_hint="--like")
    model = (
        None
        if like is None
        else checkpoints.open_checkpoint(like, alpha=alpha, max_memory=max_memory)
    )
    compression.export_lora(
        checkpoint,
        out,
        to=to,
        storage=storage,
        profile=profile,
        force=force,
        base=base_path,
        like=model,
        without_heads=without_heads,
    )
    if checkpoint.extras and (without_heads or (to == "lora" and profile != "peft")):
        why = "as asked" if without_heads else f"as profile {profile} does"
        typer.echo(f"Left out, {why}: {', '.join(checkpoint.extras)}.")
    kind = checkpoint.format if model is None else model.format
    stored = storage or (
        "f16" if to == "gguf" else (checkpoint if model is None else model).storage
    )
    typer.echo(
        f"Wrote {out}: a {kind if to == 'same' else to} adapter, exact up to rounding to {stored}."
    )


def demo(
    out: Annotated[Path, PLACE, typer.Option(help="Directory for what the demo writes.")] = Path(
        "demo-output"
    ),
    quiet: Quiet = False,
) -> None:
    """Compress the adapter that comes with the package.

    48 times; then export it, measure both again, draw what is kept.
    """
    room = files("lsrdecomp.cli")
    scores = loads((room / "demo_kept.json").read_text(encoding="utf-8"))
    with as_file(room / "demo_adapter") as source, as_file(room / "demo_statistics") as statistics:
        tables.show(
            None,
            "The adapter: a LoRA (r = 8) for sentiment on a MiniLM encoder, trained by us, with statistics of what its "
            "layers do. Forty-eight times fewer parameters, kept where they matter:\n",
        )
        compress(
            source,
            ratio=[48.0],
            calibrated=statistics,
            storage="float16",
            opening=Opening(),
            outputs=Outputs(out=out / "lsr", force=True),
            display=Display(quiet=quiet),
        )
        typer.echo("\nAs a plain LoRA, for every tool that loads LoRA:")
        export(out / "lsr", out / "lora", force=True)
        checkpoint = checkpoints.open_checkpoint(source)
        for name in ("lsr", "lora"):
            if not compression.verify(checkpoint, checkpoints.open_checkpoint(out / name)).passed:
                raise LsrError(f"{out / name} is not what was recorded when it was written")
        typer.echo("Measured again from the files, both are what was recorded.\n")
        whole = checkpoint.adapter_parameters
        shares = {
            label: {
                whole / row["ratio"]: row["share"]
                for row in scores["rows"]
                if row["method"] == method
            }
            for label, method in (("LSR", "lsr-kfac"), ("truncated SVD", "svd-kfac"))
        }
        ours, svd = (f"{100 * points[whole / 48]:.0f} %" for points in shares.values())
        tables.show(
            None,
            f"It keeps {ours} of what the adapter gains, truncated SVD of that size in the same norm {svd}: "
            f"measured on the {scores['examples']} reviews of {scores['task']}.\n"
            "Measured on texts of your own, without labels:\n"
            f"  lsrdecomp compress {quoted(source)} --calibrated {quoted(statistics)} --ratio 48 \\\n"
            f"    --base sentence-transformers/all-MiniLM-L6-v2 --data TEXTS.txt --out {quoted(out / 'measured')}",
        )
        if find_spec("matplotlib") is None:
            typer.echo("\nFor a picture of it: pip install 'lsrdecomp[plots]', and again.")
            return
        axes = plots.plot_shares(
            {label: points.items() for label, points in shares.items()}, whole=whole
        )
        _save(axes, out / "kept.png")
        typer.echo(f"\nWrote {out / 'kept.png'}: what is kept at other sizes.")


ALL = (inspect, calibrate, compress, distil, curve, verify, export, finetune, fleet, demo)


def _norm_and_rank(checkpoint: Checkpoint, layer: Any) -> tuple[float, int]:
    """‖ΔW‖_F, and the rank a truncated SVD needs for 1 % of it."""
    from lsrdecomp.arrays import tail_norms
    from lsrdecomp.checkpoints import LoraLayer
    from lsrdecomp.compression.layers import layer_pair, layer_product
    from lsrdecomp.targets import LowRank

    pair = (
        layer_pair(checkpoint, layer)
        if isinstance(layer, LoraLayer)
        else LowRank(*layer_product(layer).to_lora())
    )
    tails = tail_norms(pair.svd[1])
    return pair.norm, next(k for k, tail in enumerate(tails) if tail <= 0.01 * tails[0])


def _inspection(checkpoint: Checkpoint, ranks: list[tuple[float, int]]) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "sha256": checkpoint.source_sha256,
        "parameters": checkpoint.adapter_parameters,
        "extra_parameters": checkpoint.extra_parameters,
        "notes": list(checkpoint.notes),
        "layers": [
            {
                "name": layer.name,
                "kind": layer.layer_type,
                "rows": layer.out_features,
                "columns": layer.in_features,
                "rank": layer.rank,
                "parameters": layer.parameters,
                "dtype": layer.dtype,
                "norm": norm,
                "rank_for_1_percent": enough,
            }
            for layer, (norm, enough) in zip(checkpoint.layers, ranks, strict=True)
        ],
    }


def _save(axes: Any, out: Path) -> None:
    with checkpoints.new_file(out, force=True) as part:
        plots.save_figure(axes, part, out.suffix[1:])
