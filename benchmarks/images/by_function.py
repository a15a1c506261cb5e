"""What is kept of an image LoRA that is cut in its own format, by function and by energy.

    python -m benchmarks.images.by_function RUNS [--ratios 8 24 64] [--seeds 0 1]

``RUNS`` is what `benchmarks.images.shapes` wrote. At each size the LoRA is cut twice to as many
numbers, by its effect on the base (`lsrdecomp.lora.compress.truncate` with ``base=``) and by its
singular values alone. Both are judged on images that neither has seen: prompts with seeds from
10,000 up. Writes `results/images.json`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.lora.base.divergence import Reference
from lsrdecomp.lora.base.open_bases import open_base
from lsrdecomp.lora.base.texts import Example
from lsrdecomp.lora.compress import truncate
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.search.measured_settings import MeasuredSettings

FIRST_JUDGED = 10_000
JUDGED = 32


def measure(runs: Path, goals: list[dict[str, float]], seed: int) -> list[dict[str, Any]]:
    """Cut the LoRA to each goal, and judge the files on fresh images."""
    lora = open_checkpoint(runs / "night.safetensors", carry=True)
    prompts = (runs / "prompts.txt").read_text(encoding="utf-8").splitlines()
    base = open_base(runs / "shapes", lora.path)
    source = base.with_adapter(lora.path)
    numbers = range(FIRST_JUDGED + JUDGED * seed, FIRST_JUDGED + JUDGED * (seed + 1))
    items = [Example(number, prompts[number % len(prompts)]) for number in numbers]
    judge = Reference(source, source.batches(source, items, 64))
    rows = []
    for goal in goals:
        settings = MeasuredSettings(seed=seed, batch=64)
        cut = truncate(lora, base=runs / "shapes", data=prompts, settings=settings, **goal)
        plain = truncate(lora, parameters=float(cut.parameters))
        with TemporaryDirectory() as name:
            small = cut.save(Path(name) / "function.safetensors")
            energy = plain.save(Path(name) / "energy.safetensors")
            found = judge.compare(base.with_adapter(small))
            by_energy = judge.compare(base.with_adapter(energy))
            rows.append(
                {
                    "seed": seed,
                    **goal,
                    "parameters": cut.parameters,
                    "bytes": small.stat().st_size,
                    "bytes_by_energy": energy.stat().st_size,
                    "promised": cut.fidelity.kept,
                    "promised_error": cut.fidelity.standard_error,
                    "kept": found.kept,
                    "standard_error": found.standard_error,
                    "kept_by_energy": by_energy.kept,
                    "weight_error": cut.written_error(small),
                    "weight_error_by_energy": plain.written_error(energy),
                    "tried": len(cut.tried),
                }
            )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--ratios", type=float, nargs="+", default=[8.0, 24.0, 64.0])
    parser.add_argument("--keep", type=float, nargs="*", default=[0.97])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=RESULTS / "images.json")
    arguments = parser.parse_args()
    goals = [{"ratio": ratio} for ratio in arguments.ratios]
    goals += [{"keep": share} for share in arguments.keep]
    lora = open_checkpoint(arguments.runs / "night.safetensors", carry=True)
    rows = []
    for seed in arguments.seeds:
        rows += measure(arguments.runs, goals, seed)
        result = {
            "lora": {
                "bytes": lora.weights.stat().st_size,
                "parameters": lora.adapter_parameters,
                "layers": len(lora.layers),
            },
            "rows": rows,
        }
        records.save(arguments.out, result, "torch", "diffusers", "peft", seed=arguments.seeds)


if __name__ == "__main__":
    main()
