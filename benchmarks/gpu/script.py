"""What one GPU is asked: a plan that fits its minutes, in stages that resume, into one JSON.

    python -m benchmarks.gpu.script --plan                    # stages, minutes, what each lacks
    python -m benchmarks.gpu.script --minutes 45 --work runs  # the same again goes on where it was
    python -m benchmarks.gpu.script --minutes 45 --work runs --task e2e \\
        --llm meta-llama/Llama-3.2-3B --data metamath.jsonl --test gsm8k.jsonl

The most telling comes first: what a kernel takes; an LSR layer beside LoRA and LoKr; SmolLM2 from a
LoRA to LSR that is distilled or trained on; and PEFT's table of LoRA conversion on a model of one
to eight billion weights, where its weights are there (`benchmarks/gpu/language.py`). The first five
stages need nothing but a GPU and ``make llm``: ``--task`` holds train.jsonl and held.jsonl, as
`benchmarks.language.tasks` writes them, and without it sums of prices are made by a seed.

Before any minute is spent the plan looks up packages, models, files and disk of each stage, and
says what is missing and how to get it. A stage that fails is recorded with its error, what builds
on it is left out, and the next begins; the JSON is written after each. A stage is planned for eight
minutes at most; what it finished in ``--work`` is not done again, whenever it was stopped.
``--small`` walks the same code on a CPU.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.gpu.needs import is_installed

PACKAGES = ("torch", "safetensors", "tokenizers", "transformers", "peft", "accelerate")
"""Packages without which no stage runs."""


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Check that the packages are here, then show the plan and run it."""
    missing = [name for name in PACKAGES if not is_installed(name)]
    if missing:
        sys.exit(f"no stage runs without {', '.join(missing)}; `make llm` installs what is needed")
    # Imported here because those packages come with it.
    from benchmarks.gpu import stages

    return stages.main(given)


if __name__ == "__main__":
    main()
