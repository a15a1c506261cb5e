"""What `lsrdecomp --help` says of each verb in a line, and the examples below each verb's own help."""

from __future__ import annotations

import re

SHORT = {
    "inspect": "Show what an adapter holds.",
    "calibrate": "Measure what a base's layers do, once, for compress.",
    "compress": "Make a LoRA adapter smaller; PEFT opens the result.",
    "distil": "Train a compressed adapter towards its LoRA, no labels.",
    "curve": "Show how the error falls with size.",
    "verify": "Measure a written adapter against its source.",
    "export": "Write an adapter for tools that load plain LoRA.",
    "finetune": "Train an adapter on a base: LoRA, LSR and others.",
    "fleet": "Compress every adapter below a directory.",
    "demo": "Compress the adapter that comes with the package.",
}
"""At most so long that a terminal of 80 columns shows all of it."""

EXAMPLES = {
    "inspect": ("inspect my-lora/", "inspect lora.safetensors --alpha 16 --json layers.json"),
    "calibrate": ("calibrate BASE --adapter my-lora/ --text lines.txt --out statistics/",),
    "compress": (
        "compress my-lora/ --ratio 48 --calibrated statistics/ --out small/",
        "compress my-lora/ --rtol 0.1 --dry-run",
    ),
    "distil": ("distil small/ --teacher my-lora/ --base smollm2 --data prompts.jsonl --steps 100",),
    "curve": ("curve my-lora/ --out curve.png",),
    "verify": ("verify my-lora/ small/", "verify my-lora/ small/ --base BASE --text lines.txt"),
    "export": ("export small/ --out small-lora/", "export small/ --out small.gguf --to gguf"),
    "finetune": ("finetune --model smollm2 --data train.jsonl --out my-lora/",),
    "fleet": ("fleet adapters/ small-adapters/ --plan plan.toml --workers 8",),
    "demo": ("demo --out demo-output",),
}
"""One or two commands a reader can change to their own."""


def epilog(verb: str) -> str | None:
    """The examples of a verb, each on a line of its own."""
    lines = [f"  lsrdecomp {example}" for example in EXAMPLES.get(verb, ())]
    return "\b\n" + "\n".join(["Examples:", *lines]) if lines else None


def flags(text: str) -> str:
    """An error of the library in the words of the command line: ``alpha=`` is ``--alpha`` there.

    >>> flags("holds 2 adapters (a, b): say which by name=")
    'holds 2 adapters (a, b): say which by --name'
    """
    return re.sub(
        r"\b(name|alpha|force|rtol|storage|ratio|statistics)=(?:True\b)?(?![\w'\"\[(.])",
        lambda match: {"statistics": "--calibrated"}.get(match[1], f"--{match[1]}"),
        text,
    )
