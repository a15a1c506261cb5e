"""The verbs: read arguments, call the library, show what it returned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext, redirect_stdout
from importlib.resources import as_file, files
from importlib.util import find_spec
from io import StringIO
from itertools import chain
from json import loads
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lsrdecomp import lora, plots
from lsrdecomp.cli import tables
from lsrdecomp.cli.calibrate_command import calibrate
from lsrdecomp.cli.compress_command import compress
from lsrdecomp.cli.distill_command import distill
from lsrdecomp.cli.finetune_command import finetune
from lsrdecomp.cli.fleet_command import fleet
from lsrdecomp.cli.layer_tables import checkpoint_table
from lsrdecomp.cli.measure_command import measure
from lsrdecomp.cli.options import (
    Adapter,
    Alpha,
    Force,
    ForceFile,
    JsonFile,
    MaxMemory,
    Name,
    Quiet,
    TrustRemoteCode,
)
from lsrdecomp.cli.outputs import NEW_FILE, PLACE, UNKNOWN, Input
from lsrdecomp.cli.progress_bars import follow
from lsrdecomp.cli.requests import Display, Opening, Outputs
from lsrdecomp.cli.setting_options import option_groups
from lsrdecomp.cli.verify_command import verify
from lsrdecomp.errors import CheckpointError, LsrError, needs, way_to_install
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.progress import Counter
from lsrdecomp.lora.files.writers.table import WRITERS, writer_names
from lsrdecomp.markup import size_text
from lsrdecomp.threads import one_blas_thread

if TYPE_CHECKING:
    from lsrdecomp.lora.files import Checkpoint

PLACES_HELP = "; ".join(
    f"a {place} for {', '.join(writer.name for writer in WRITERS if writer.place == place)}"
    for place in ("directory", "file")
)
"""What the option --out of `export` is, by format."""
DEMO_OUTPUT = Path("demo-output")
"""Where the demo writes by default."""
HEADLINE = """
The answers that you name, with the base model to measure on:
  lsrdecomp compress my-lora/ --base BASE --data texts.jsonl --keep-answers 0.9 --distill 60 \\
    --out small/
A LoRA of 3.7 MB became 78 kB and keeps 54 of 64 answers, word for word."""
"""The last words of the demo; tests hold its figure to the record that README tells."""


@option_groups
def inspect(
    adapter: Adapter,
    *,
    base: Annotated[
        str | None,
        Input,
        typer.Option(help="Base model, for a method of PEFT whose ΔW is not in its file."),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    opening: Opening,
    display: Display,
    json: JsonFile = None,
    force: ForceFile = False,
) -> None:
    """List the layers of an adapter, their ranks and sizes.

    The last column is the rank that a truncated SVD needs for a relative error of 1 %.
    """
    del force  # `outputs.checked` reads it
    checkpoint = opening.open(adapter, carry=True, base=base, trust_remote_code=trust_remote_code)
    with follow(quiet=display.quiet) as step, one_blas_thread:
        ranks = []
        read = Counter(step, "reading", len(checkpoint.layers), "layers")
        for layer in checkpoint.layers:
            ranks.append(_norm_and_rank(checkpoint, layer))
            read.add()
    tables.show(
        json,
        checkpoint_table(checkpoint, ranks, each=display.each),
        f"\n{checkpoint.path}: {checkpoint.format}, {len(checkpoint.layers)} layers, "
        f"{checkpoint.adapter_parameters:,} parameters; {checkpoint.extra_parameters:,} numbers in "
        f"{len(checkpoint.extras)} other tensors.",
        *(f"Note: {note}." for note in checkpoint.notes),
        *_carried_sentence(checkpoint),
        wide=display.wide,
    )
    if json is not None:  # with the digest of a file that may be large
        tables.write_json(_inspection(checkpoint, ranks), json)


def _carried_sentence(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield that there are tensors which are no pairs, if there are."""
    if checkpoint.carried:
        names = tables.few(list(checkpoint.carried))
        yield (
            f"{len(checkpoint.carried)} tensors that are no pair are kept only by a cut in the "
            f"file's own format: {names}."
        )


def curve(
    adapter: Adapter,
    out: Annotated[
        Path | None, NEW_FILE, typer.Option(help="Picture to write: .png or .svg.")
    ] = None,
    name: Name = None,
    alpha: Alpha = None,
    quiet: Quiet = False,
    json: JsonFile = None,
    force: Force = False,
) -> None:
    """Show the error of an adapter against its size.

    For truncated SVD and for Kronecker products of several shapes.
    """
    del force  # `outputs.checked` reads it
    if out is not None:
        if out.suffix not in (".png", ".svg"):
            raise typer.BadParameter(
                f"a picture ends in .png or .svg, got {out.name}", param_hint="--out"
            )
        with needs("a picture", "plots"):  # before any work
            import matplotlib  # noqa: F401
    checkpoint = lora.files.open_checkpoint(adapter, name=name, alpha=alpha)
    with follow(quiet=quiet) as step:
        curves = lora.search.adapter_curves(checkpoint, on_step=step)
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
    figures = {
        "adapter": str(adapter),
        "parameters": checkpoint.adapter_parameters,
        "curves": [curve.to_json() for curve in curves],
    }
    tables.write_json(figures, json)


def export(
    adapter: Adapter,
    out: Annotated[
        Path,
        UNKNOWN,
        typer.Option(
            "--out",
            help=f"What to write: {PLACES_HELP}.",
        ),
    ],
    to: Annotated[
        str,
        typer.Option(
            help=f"Format: {', '.join(writer_names())}; same is that of --like.",
            autocompletion=writer_names,
        ),
    ] = "lora",
    profile: Annotated[
        str,
        typer.Option(
            help="With lora: common, one rank that every server reads; peft, each layer's own.",
            autocompletion=lambda: ("common", "peft"),
        ),
    ] = "common",
    storage: Annotated[
        str | None,
        typer.Option(
            help="float32, float16 or bfloat16; with gguf f16, f32 or q8_0 [default: as "
            "the source].",
            autocompletion=lambda: dict.fromkeys(chain(*(writer.storages for writer in WRITERS))),
        ),
    ] = None,
    base: Annotated[
        str | None,
        Input,
        typer.Option(
            help="Base model; needed with gguf (GGUF file, directory, config.json or "
            "smollm2), and of methods of PEFT whose ΔW is not in their file; with "
            "lora it adds missing layers as zeros."
        ),
    ] = None,
    trust_remote_code: TrustRemoteCode = False,
    like: Annotated[
        Path | None,
        typer.Option(
            help="With same: the LoRA it was made from; its keys, dtypes and alphas are used."
        ),
    ] = None,
    without_heads: Annotated[
        bool,
        typer.Option(
            "--without-heads", help="Leave out and name other tensors, such as a classifier head."
        ),
    ] = False,
    alpha: Alpha = None,
    force: Force = False,
    max_memory: MaxMemory = None,
) -> None:
    """Write an adapter as a plain LoRA, for tools that load LoRA.

    It has the same ΔW, up to rounding to --storage.
    """
    if like is not None and to != "same":
        raise typer.BadParameter("goes with --to same", param_hint="--like")
    # --alpha is that of the file which does not hold one: the LoRA, if there are two.
    model = None
    if like is not None:
        model = lora.files.open_checkpoint(like, alpha=alpha, max_memory=max_memory)
        alpha = None
    opening = Opening(alpha=alpha, max_memory=max_memory)
    checkpoint = opening.open(
        adapter,
        carry=to == "same" and model is None,
        base=base,
        trust_remote_code=trust_remote_code,
    )
    base_path = None
    if base is not None and (to == "gguf" or not lora.base.takes_base(adapter)):
        base_path = _base_path(base)
    lora.compress.export_lora(
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
    if checkpoint.extras and without_heads:
        typer.echo(f"Left out, as asked: {', '.join(checkpoint.extras)}.")
    if to == "lora" and profile != "peft":
        for sentence in _what_servers_miss(checkpoint, out, without_heads=without_heads):
            typer.echo(sentence)
    like_or_source = checkpoint if model is None else model
    written_format = like_or_source.format if to == "same" else to
    if storage is None:
        storage = "f16" if to == "gguf" else like_or_source.storage
    typer.echo(f"Wrote {out} ({written_format}): the same ΔW, up to rounding to {storage}.")


def _base_path(base: str) -> Path:
    """Return where names of a base are read: its path, or the file packaged for a short name."""
    from lsrdecomp.lora.base import base_files

    path = Path(base)
    if base == base_files.SMOLLM2 and not path.exists():
        return base_files.packaged_file()
    if base_files.is_minilm(base) and not path.exists():
        return base_files.packaged_minilm() or path
    return path


def _what_servers_miss(
    source: lora.files.Checkpoint, out: Path, *, without_heads: bool
) -> Iterator[str]:
    """Yield what of the common form could not be had."""
    from lsrdecomp.lora.files.provenance import read_provenance

    if source.extras and not without_heads:
        names = ", ".join(source.extras)
        yield (
            f"Also written: {names}. Servers of language models ignore them, or refuse the file; "
            "--without-heads leaves them out."
        )
    written = {layer.name for layer in lora.files.open_checkpoint(out).layers}
    missing = [name for name in read_provenance(source).get("dropped", ()) if name not in written]
    if missing:
        yield (
            f"{len(missing)} dropped layers are not in the file, since no other layer has their "
            f"size ({missing[0]}); --base BASE adds them as zeros, which SGLang, TGI and LoRAX may "
            "need."
        )


def demo(
    out: Annotated[
        Path, PLACE, typer.Option(help="Directory for what the demo writes.")
    ] = DEMO_OUTPUT,
    report: Annotated[
        bool,
        typer.Option("--report", help="Also write report.html there: one page with charts."),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option("--verbose", help="Also print what the verbs that it runs print."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Compress a small LoRA that comes with the package.

    48 times fewer parameters; then export the result, verify both, and draw the shares that sizes
    keep.
    """
    room = files("lsrdecomp.cli")
    page = out / "report.html" if report else None
    with as_file(room / "demo_adapter") as source, as_file(room / "demo_statistics") as statistics:
        # 1. What it is, before anything is loaded.
        checkpoint = lora.files.open_checkpoint(source)
        full_size = checkpoint.adapter_parameters
        tables.show(
            None,
            f"A LoRA that tells good film reviews from bad ones: {full_size:,} parameters in "
            f"{len(checkpoint.layers)} layers of MiniLM, "
            f"{size_text(bytes_to_open(checkpoint.weights))}.",
        )
        # 2. Compressed, exported, and both measured again from their files.
        with nullcontext() if verbose else redirect_stdout(StringIO()):
            compress(
                source,
                ratio=[48.0],
                statistics=statistics,
                storage="float16",
                opening=Opening(),
                outputs=Outputs(out=out / "lsr", report=page, force=True),
                display=Display(quiet=quiet),
            )
            export(out / "lsr", out / "lora", force=True)
    written = _verify_demo(checkpoint, out)
    tables.show(
        None,
        f"It became {written.adapter_parameters:,} parameters, 48 times fewer: "
        f"{size_text(bytes_to_open(written.weights))} (both include the "
        f"{size_text(checkpoint.extra_bytes)} classifier head).",
    )
    # 3. What is kept at this size and at others, as measured by us on reviews.
    kept = loads((room / "demo_kept.json").read_text(encoding="utf-8"))
    shares = {
        "LSR": _shares_by_size(kept, "lsr-kfac", full_size),
        "truncated SVD": _shares_by_size(kept, "svd-kfac", full_size),
    }
    ours, svd = (f"{100 * share[full_size / 48]:.0f} %" for share in shares.values())
    tables.show(
        None,
        f"On {kept['examples']} reviews of {kept['task']} it kept {ours} of what the LoRA gains in "
        f"loss; truncated SVD of that size kept {svd}.",
        f"Wrote {out / 'lsr'} for PEFT, and {out / 'lora'} for tools that load LoRA; both verified "
        "from their files.",
    )
    if page is not None:
        tables.show(None, f"Wrote {page}.")
    _draw_shares(shares, full_size, out / "kept.png")
    tables.show(None, HEADLINE)


def _verify_demo(source: Checkpoint, out: Path) -> Checkpoint:
    """Measure both adapters of the demo again, from their files, and return the first."""
    opened = [lora.files.open_checkpoint(out / name) for name in ("lsr", "lora")]
    for written in opened:
        if not lora.measure.verify(source, written).passed:
            raise LsrError(f"{written.path} is not what was recorded when it was written")
    return opened[0]


def _draw_shares(shares: Mapping[str, dict[float, float]], full_size: int, out: Path) -> None:
    """Draw what methods keep at each size, where matplotlib is installed; else say how to."""
    if find_spec("matplotlib") is None:
        typer.echo(f"For a picture of other sizes: {way_to_install('plots')}, and run this again.")
        return
    points = {label: share.items() for label, share in shares.items()}
    _save(plots.plot_shares(points, whole=full_size), out)
    typer.echo(f"Wrote {out}: what is kept at other sizes.")


ALL = (
    inspect,
    calibrate,
    compress,
    measure,
    distill,
    curve,
    verify,
    export,
    finetune,
    fleet,
    demo,
)


def _shares_by_size(kept: dict[str, Any], method: str, full_size: int) -> dict[float, float]:
    """Return the shares that a method keeps, by the parameters that are left."""
    rows = [row for row in kept["rows"] if row["method"] == method]
    return {full_size / row["ratio"]: row["share"] for row in rows}


def _norm_and_rank(checkpoint: Checkpoint, layer: Any) -> tuple[float, int]:
    """Return ‖ΔW‖_F, and the rank a truncated SVD needs for 1 % of it."""
    from lsrdecomp.arrays import tail_norms
    from lsrdecomp.lora.search.layers import layer_pair

    pair = layer_pair(checkpoint, layer)
    tails = tail_norms(pair.svd[1])
    rank = next(rank for rank, tail in enumerate(tails) if tail <= 0.01 * tails[0])
    return pair.norm, rank


def _inspection(checkpoint: Checkpoint, ranks: list[tuple[float, int]]) -> dict[str, Any]:
    """Return what an adapter holds for a JSON file."""
    layers = [
        {
            "name": layer.name,
            "kind": layer.layer_type,
            "rows": layer.out_features,
            "columns": layer.in_features,
            "rank": layer.rank,
            "parameters": layer.parameters,
            "dtype": layer.dtype,
            "norm": norm,
            "rank_for_1_percent": rank,
        }
        for layer, (norm, rank) in zip(checkpoint.layers, ranks, strict=True)
    ]
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "sha256": checkpoint.source_sha256,
        "parameters": checkpoint.adapter_parameters,
        "extra_parameters": checkpoint.extra_parameters,
        "notes": list(checkpoint.notes),
        "layers": layers,
    }


def _save(axes: Any, out: Path) -> None:
    """Write a picture, whole or not at all."""
    with lora.files.new_file(out, force=True) as part:
        plots.save_figure(axes, part, out.suffix[1:])
