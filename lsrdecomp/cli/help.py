"""What help says: the panels of options of the larger verbs, examples below each."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from lsrdecomp.cli.requests import GOALS, flag

EXAMPLES = {
    "inspect": ("inspect my-lora/", "inspect lora.safetensors --alpha 16 --json layers.json"),
    "calibrate": ("calibrate BASE --adapter my-lora/ --text lines.txt --out statistics/",),
    "compress": (
        "compress my-lora/ --base BASE --data texts.jsonl --keep 0.9 --out small/",
        "compress my-lora/ --ratio 48 --calibrated statistics/ --out small/",
        "compress my-lora/ --rtol 0.1 --dry-run",
    ),
    "distil": ("distil small/ --teacher my-lora/ --base smollm2 --data prompts.jsonl --steps 100",),
    "curve": ("curve my-lora/ --out curve.png",),
    "verify": ("verify my-lora/ small/", "verify my-lora/ small/ --base BASE --text lines.txt"),
    "export": ("export small/ --out small-lora/", "export small/ --out small.gguf --to gguf"),
    "finetune": (
        "finetune --model smollm2 --data train.jsonl --out my-lora/",
        "finetune --model smollm2 --data train.jsonl --init my-lora/ --ratio 20 --out small/",
    ),
    "fleet": ("fleet adapters/ small-adapters/ --ratio 48 --workers 8",),
    "demo": ("demo --out demo-output",),
}
"""One or two commands a reader can change to their own."""


PANELS = {
    "compress": {
        "Goal": "keep ratio params bytes rtol",
        "Measure": "base data calibrated distil",
        "Store": "storage",
        "Output": "out report json dry-run force",
    },
    "distil": {
        "Train": "teacher base data steps rate batch",
        "Measure": "held-out max-length truncate dtype device",
        "Output": "out json quiet force",
    },
    "calibrate": {
        "Measure": "adapter data text samples max-length truncate",
        "Memory and time": "batch max-memory dtype device",
        "Output": "out quiet",
    },
    "verify": {
        "Answers": "base data text max-length truncate batch dtype",
        "Servers": "for server served-as",
        "Output": "json wide all force",
    },
    "fleet": {
        "Goal": "ratio params bytes rtol plan",
        "Measure": "calibrated",
        "Store": "storage",
        "Run": "workers ray device share",
        "Output": "json quiet force",
    },
    "finetune": {
        "Task": "model data task",
        "Adapter": "method option init ratio",
        "Train": "learning-rate batch epochs steps set",
        "Output": "out json force",
    },
}
"""Options of the verbs with many that are shown by ``-h``, by panel; the others come with
``--help-all``."""


class Command(TyperCommand):
    """A verb whose help shows its panels, and with ``--help-all`` the rest and what stands behind a form feed."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """The text up to its form feed, or all of it."""
        text = self.help
        if ctx.meta.get(ALL):
            self.help = (text or "").replace("\f", "")
        super().format_help_text(ctx, formatter)
        self.help = text

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """A section for each panel; without panels one for all options."""
        params = [each for each in self.get_params(ctx) if each.get_help_record(ctx) is not None]
        options = [each for each in params if each.param_type_name == "option"]
        panels = PANELS.get(self.name or "", {})
        sections = {"Arguments": [each for each in params if each.param_type_name == "argument"]}
        for panel, names in panels.items():
            sections[panel] = [
                each for name in names.split() for each in options if f"--{name}" in each.opts
            ]
        rest = [
            each for each in options if not any(each in section for section in sections.values())
        ]
        if not panels:
            sections["Options"] = rest
        elif ctx.meta.get(ALL):
            sections["Advanced"] = rest
        else:
            sections["Help"] = [each for each in rest if each.name in ("help", "help_all")]
        for title, entries in sections.items():
            if entries:
                with formatter.section(title):
                    formatter.write_dl([each.get_help_record(ctx) for each in entries])


ALL = f"{__name__}.all"


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show all options.")
]


def epilog(verb: str) -> str | None:
    """The examples of a verb, each on a line of its own."""
    lines = [f"  lsrdecomp {example}" for example in EXAMPLES.get(verb, ())]
    return "\b\n" + "\n".join(["Examples:", *lines]) if lines else None


def flags(text: str) -> str:
    """Return an error of the library in the words of the command line: ``alpha=`` is ``--alpha`` there.

    >>> flags("holds 2 adapters (a, b): say which by name=")
    'holds 2 adapters (a, b): say which by --name'
    >>> flags("max_rank must be a whole number, got 0")
    '--max-rank must be a whole number, got 0'
    >>> flags("inner_shape goes with separation_rank; other goals choose their shapes")
    '--inner-shape goes with --separation-rank; other goals choose their shapes'
    """
    if text.startswith("one goal is needed"):
        return f"{text.partition(':')[0]}: {GOALS}"
    text = re.sub(r"^([a-z]\w+) must be ", lambda match: f"{flag(match[1])} must be ", text)
    if re.match(r"[a-z_]+ goes with ", text):
        in_plan = r"\b(inner_shape|separation_rank|max_rank)\b"
        text = re.sub(in_plan, lambda match: flag(match[1]), text)
    return re.sub(
        r"\b(name|alpha|force|rtol|storage|ratio|statistics)=(?:True\b)?(?![\w'\"\[(.])",
        lambda match: flag(match[1]),
        text,
    )
