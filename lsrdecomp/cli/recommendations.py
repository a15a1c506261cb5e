"""What `compress` recommends after writing: the command that comes next, and warnings of what is little use."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp import checkpoints
from lsrdecomp.cli import tables
from lsrdecomp.compression.settings import GOALS, CompressionPlan
from lsrdecomp.errors import UnsupportedError

if TYPE_CHECKING:
    from lsrdecomp.checkpoints import Checkpoint

TASKS = ("SEQ_CLS", "TOKEN_CLS", "CAUSAL_LM", "SEQ_2_SEQ_LM")
"""Task types of the adapters whose bases `calibrate` runs."""
WRECK = 0.7
"""Relative Frobenius error above which an adapter without statistics is told to be little of itself
any more."""


def next_command(checkpoint: Checkpoint, output: Path, alpha: float | None) -> str:
    """What opens it: PEFT, or for files of other programs the file that they read."""
    if checkpoint.format.startswith("peft-") and not checkpoint.config.get("target_parameters"):
        if checkpoint.format != "peft-lora" or not any(
            ".experts." in layer.name for layer in checkpoint.layers
        ):
            return "Open it with PEFT after `import lsrdecomp.adapters`."
        out = quoted(f"{output}-lora")
        return f"For PEFT, which stacks experts:\n  lsrdecomp export {quoted(output)} --profile lorax --out {out}"
    try:
        directory = checkpoints.file_or_directory(checkpoint) == "directory"
    except UnsupportedError:
        to = "kohya" if checkpoint.format == "lycoris" else "lora"
        out = quoted(f"{output}.safetensors" if to == "kohya" else f"{output}-lora")
        return f"As a plain LoRA:\n  lsrdecomp export {quoted(output)} --to {to} --out {out}"
    out = quoted(f"{output}-{checkpoint.format}" if directory else f"{output}.safetensors")
    scale = "" if alpha is None else f" --alpha {alpha:g}"
    again = f"lsrdecomp export {quoted(output)} --to same --like {quoted(checkpoint.weights)}{scale} --out {out}"
    return f"As a {checkpoint.format} LoRA again:\n  {again}"


def warn_of_wreck(result: Any, output: Path | None) -> None:
    """Without statistics a small adapter is close in nothing that matters: say so, and what would help."""
    total, dropped = (
        result.totals,
        sum(row.norm > 0.0 and not row.parameters for row in result.layers),
    )
    if total.functional_error is not None or (
        total.relative_error <= WRECK and 2 * dropped < total.layers
    ):
        return
    tables.say(
        f"WARNING: little of this adapter is left: error {total.relative_error:.3g}, {dropped} of {total.layers} "
        "layers left out."
    )
    source, plan = result.source, result.plan
    tasks = source.format.startswith("peft-") and source.config.get("task_type") in TASKS
    if not tasks:
        tables.say(
            "Allow a larger size: without a base and prompts it is closeness of numbers that is kept. Bases are run "
            f"for PEFT adapters whose config has a task_type ({', '.join(TASKS)})."
        )
        return
    base = source.config.get("base_model_name_or_path") or "BASE"
    goal = next(name for name in GOALS if getattr(plan, name) is not None)
    flag = (
        f"--{CompressionPlan.fields[goal].names[-1].replace('_', '-')} {getattr(plan, goal):.12g}"
    )
    storage = "" if plan.storage == source.storage else f" --storage {plan.storage}"
    adapter = source.weights.parent
    again = quoted(
        adapter.with_name("small")
        if output is None
        else output.with_name(f"{output.name}-measured")
    )
    tables.say(
        "Name its base and texts of its task, and it is made small by what its layers do:\n"
        f"  lsrdecomp compress {quoted(adapter)} --base {quoted(base)} --data TEXTS.txt {flag}{storage} --out {again}"
    )


def warn_of_growth(checkpoint: Checkpoint, written: Path) -> None:
    """A file that became larger than its source is what nobody asked for."""
    before, after = (path.stat().st_size for path in (checkpoint.weights, written))
    if after > before:
        text = f"WARNING: the weight file has {after:,} bytes, its source {before:,}"
        small = checkpoint.storage if checkpoint.storage in ("float16", "bfloat16") else "float16"
        tables.say(f"{text}: ask for a smaller size, or for smaller numbers (--storage {small})")


def quoted(path: object) -> str:
    """As it is typed in a shell."""
    return shlex.quote(str(path))
