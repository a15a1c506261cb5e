"""What `compress` recommends after writing: the next command, and warnings of useless results."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from lsrdecomp import lora
from lsrdecomp.cli import tables
from lsrdecomp.cli.program import program
from lsrdecomp.cli.requests import flag
from lsrdecomp.lora.search.plan import goals_of

if TYPE_CHECKING:
    from lsrdecomp.lora.files import Checkpoint
    from lsrdecomp.lora.search import Compression

TASKS = ("SEQ_CLS", "TOKEN_CLS", "CAUSAL_LM", "SEQ_2_SEQ_LM")
"""Task types of the adapters whose bases `calibrate` runs."""
UNUSABLE_ERROR = 0.7
"""Relative Frobenius error above which little is left of an adapter; by hand."""


def next_command(checkpoint: Checkpoint, output: Path, alpha: float | None) -> str:
    """Return what opens the output: PEFT, or a command that writes the file that others read."""
    # Imported here because NumPy comes with it.
    from lsrdecomp.lora.files.writers.same import is_pair

    is_peft = checkpoint.format.startswith("peft-")
    if is_peft and not checkpoint.config.get("target_parameters"):
        has_experts = any(".experts." in layer.name for layer in checkpoint.layers)
        if checkpoint.format != "peft-lora" or not has_experts:
            return "Open it with PEFT after `import lsrdecomp.lora.peft`."
        out = quoted(f"{output}-lora")
        command = f"{program()} export {quoted(output)} --out {out}"
        return f"For PEFT, which stacks experts:\n  {command}"
    if checkpoint.format == "lsr" or not all(map(is_pair, checkpoint.layers)):
        to = "kohya" if checkpoint.format == "lycoris" else "lora"
        out = quoted(f"{output}.safetensors" if to == "kohya" else f"{output}-lora")
        return f"As a plain LoRA:\n  {program()} export {quoted(output)} --to {to} --out {out}"
    is_directory = lora.files.file_or_directory(checkpoint) == "directory"
    out = quoted(f"{output}-{checkpoint.format}" if is_directory else f"{output}.safetensors")
    if checkpoint.format == "gguf":
        out = quoted(f"{output}.gguf")
    command = f"{program()} export {quoted(output)} --to same --like {quoted(checkpoint.weights)}"
    if alpha is not None:
        command += f" --alpha {alpha:g}"
    return f"As a {checkpoint.format} LoRA again:\n  {command} --out {out}"


def warn_if_unusable(result: Compression, output: Path | None) -> None:
    """Say where little is left of an adapter, and what would help.

    Without statistics a small adapter is close in nothing that matters. ``output`` is where it was
    written, if it was.
    """
    total = result.totals
    if total.functional_error is not None:
        return
    dropped = sum(layer.norm > 0.0 and not layer.parameters for layer in result.layers)
    if total.relative_error <= UNUSABLE_ERROR and 2 * dropped < total.layers:
        return
    tables.say(
        f"WARNING: little of this adapter is left: weight error {total.relative_error:.3g}, "
        f"{dropped} of "
        f"{total.layers} layers left out."
    )
    source = result.source
    if source.format.startswith("peft-") and source.config.get("task_type") in TASKS:
        tables.say(
            "With its base and texts of its task the output error is minimized instead:\n"
            f"  {_measured_command(result, output)}"
        )
    else:
        tables.say(
            "Allow a larger size: without a base model only the weights can be matched. Bases can "
            f"be run for PEFT adapters whose config has a task_type ({', '.join(TASKS)})."
        )


def _measured_command(result: Compression, output: Path | None) -> str:
    """Return the command that compresses the same adapter to the same goal against its base."""
    source = result.source
    plan = result.plan
    base = source.config.get("base_model_name_or_path") or "BASE"
    (goal,) = goals_of(plan.to_json())
    adapter = source.weights.parent
    if output is None:
        out = adapter.with_name("small")
    else:
        out = output.with_name(f"{output.name}-measured")
    words = [f"{program()} compress", quoted(adapter), "--base", quoted(base), "--data TEXTS.txt"]
    words += [flag(goal), f"{getattr(plan, goal):.12g}"]
    if plan.storage != source.storage:
        words += ["--storage", str(plan.storage)]
    return " ".join([*words, "--out", quoted(out)])


def warn_of_growth(checkpoint: Checkpoint, written: Path) -> None:
    """Say where a file became larger than its source, which is what nobody asked for."""
    before = checkpoint.weights.stat().st_size
    after = written.stat().st_size
    if after <= before:
        return
    storage = checkpoint.storage if checkpoint.storage in ("float16", "bfloat16") else "float16"
    tables.say(
        f"WARNING: the weight file has {after:,} bytes, its source {before:,}: ask for a smaller "
        f"size, or for smaller numbers (--storage {storage})"
    )


def quoted(path: object) -> str:
    """Return a path as it is typed in a shell."""
    return shlex.quote(str(path))
