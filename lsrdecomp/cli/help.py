"""The help of verbs: panels of options of the larger ones, examples below each."""

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
        "compress my-lora/ --ratio 48 --statistics statistics/ --out small/",
        "compress my-lora/ --rtol 0.1 --dry-run",
    ),
    "distill": (
        "distill small/ --teacher my-lora/ --base smollm2 --data prompts.jsonl --steps 100",
    ),
    "curve": ("curve my-lora/ --out curve.png",),
    "measure": (
        "measure my-lora/ small/ --base BASE --data texts.jsonl --fail-below 0.95",
        "measure my-lora/ merged/ --base BASE",
        "measure my-lora/ http://127.0.0.1:8080 --base BASE",
    ),
    "verify": ("verify my-lora/ small/",),
    "export": ("export small/ --out small-lora/", "export small/ --out small.gguf --to gguf"),
    "finetune": (
        "finetune --base smollm2 --data train.jsonl --out my-lora/",
        "finetune --base smollm2 --data train.jsonl --init my-lora/ --ratio 20 --out small/",
    ),
    "fleet": ("fleet adapters/ small-adapters/ --ratio 48 --workers 8",),
    "demo": ("demo --out demo-output",),
}
"""One or two commands a reader can change to their own."""


PANELS = {
    "compress": {
        "Goal": "keep ratio bytes rtol max-rank",
        "Measure": "base data statistics distill",
        "Store": "storage",
        "Output": "out report json dry-run force",
    },
    "distill": {
        "Train": "teacher base data steps learning-rate batch",
        "Measure": "held-out max-length truncate dtype device",
        "Output": "out json quiet force",
    },
    "calibrate": {
        "Measure": "adapter data text samples max-length truncate",
        "Memory and time": "batch max-memory dtype device",
        "Output": "out quiet",
    },
    "measure": {
        "Outputs": "base data fail-below",
        "Servers": "served-as",
        "Output": "json sarif wide all force",
    },
    "fleet": {
        "Goal": "ratio parameters bytes rtol plan",
        "Measure": "statistics",
        "Store": "storage",
        "Run": "workers ray device share",
        "Output": "json quiet force",
    },
    "finetune": {
        "Task": "base data task",
        "Adapter": "method option init ratio",
        "Train": "learning-rate batch epochs steps set",
        "Output": "out json force",
    },
}
"""Options of the verbs with many that are shown by ``-h``, by panel; the others come with
``--help-all``."""


class Command(TyperCommand):
    """A verb whose help shows its panels; ``--help-all`` shows the rest."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the text up to its form feed, or all of it."""
        text = self.help
        if ctx.meta.get(SHOW_ALL):
            self.help = (text or "").replace("\f", "")
        super().format_help_text(ctx, formatter)
        self.help = text

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each panel; without panels one for all options."""
        for title, entries in self._sections(ctx).items():
            if entries:
                with formatter.section(title):
                    formatter.write_dl([entry.get_help_record(ctx) for entry in entries])

    def _sections(self, ctx: Any) -> dict[str, list[Any]]:
        """Return the options of each section that is shown."""
        params = [param for param in self.get_params(ctx) if param.get_help_record(ctx) is not None]
        options = [param for param in params if param.param_type_name == "option"]
        by_flag = {flag: param for param in options for flag in param.opts}
        sections = {"Arguments": [param for param in params if param not in options]}
        panels = PANELS.get(self.name or "", {})
        for panel, names in panels.items():
            sections[panel] = [by_flag[f"--{name}"] for name in names.split()]
        shown = [param for entries in sections.values() for param in entries]
        others = [param for param in options if param not in shown]
        if not panels:
            sections["Options"] = others
        elif ctx.meta.get(SHOW_ALL):
            sections["Advanced"] = others
        else:
            sections["Help"] = [param for param in others if param.name in ("help", "help_all")]
        return sections


SHOW_ALL = f"{__name__}.all"
"""Key under which a context of click knows that ``--help-all`` was typed."""


def _show_all(ctx: typer.Context, is_typed: bool) -> None:
    """Show the whole help and end."""
    if is_typed:
        ctx.meta[SHOW_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool, typer.Option("--help-all", callback=_show_all, is_eager=True, help="Show all options.")
]


def epilog(verb: str) -> str | None:
    """Return the examples of a verb, each on a line of its own."""
    if verb not in EXAMPLES:
        return None
    lines = [f"  lsrdecomp {example}" for example in EXAMPLES[verb]]
    return "\b\n" + "\n".join(["Examples:", *lines])


def flags(text: str) -> str:
    """Return an error of the library in the words of the command line: ``--alpha`` for ``alpha=``.

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
        in_plan = r"\b(?:inner_shape|separation_rank|max_rank|min_rank)\b"
        text = re.sub(in_plan, lambda match: flag(match[0]), text)
    return re.sub(
        r"\b(name|alpha|force|rtol|storage|ratio|statistics)=(?:True\b)?(?![\w'\"\[(.])",
        lambda match: flag(match[1]),
        text,
    )
