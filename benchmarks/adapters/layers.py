"""What an LSR layer costs beside PEFT's LoRA and LoKr: forward and backward, 1 to 4,096 tokens.

    python -m benchmarks.adapters.layers [--widths 768 2048] [--tokens 1 128] \\
        [--rounds 15] [--out FILE]

A chain of four square linear layers, all adapted: LoRA and LoKr with r = 8, LSR as `LsrConfig` is
by default in `finetune` (r = 2·2, 4 terms) and with LoRA's own rank. Arms take turns within a
round; what is kept is the least time of a round: of this process's CPU with one thread, or of a
GPU. Three ways: training (forward and backward), a pass without a graph, and a token of an answer,
within one `generate`, where the pairs are formed once for all tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from peft import LoKrConfig, LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.lora.peft import LsrConfig

CONFIGS: dict[str, Callable[[], Any]] = {
    "LoRA": lambda: LoraConfig(r=8, target_modules="all-linear"),
    "LSR": lambda: LsrConfig(inner_shape=[2, 2], separation_rank=4, target_modules="all-linear"),
    "LSR, r = 8": lambda: LsrConfig(r=8, separation_rank=4, target_modules="all-linear"),
    "LoKr": lambda: LoKrConfig(r=8, alpha=8, target_modules="all-linear"),
}
WIDTHS, TOKENS = (384, 768, 1024, 2048, 4096), (1, 16, 128, 1024, 4096)
LAYERS = 4
MOST_PRODUCTS = {"cpu": 1 << 32, "cuda": 1 << 60}
"""Multiplications of a layer on all tokens; larger cases take minutes on a CPU, and the pair
vanishes in the layer."""


def main(given: list[str] | None = None) -> dict[str, Any]:
    """Measure every case and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--seconds",
        type=float,
        default=6.0,
        help="after which a case has no more than three rounds",
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(given)
    device = torch.device(options.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    out = options.out or RESULTS / f"layers-{device.type}.json"
    where = torch.cuda.get_device_name() if device.type == "cuda" else "one thread of a CPU"
    record: dict[str, Any] = {
        "device": where,
        "dtype": options.dtype,
        "layers": LAYERS,
        "rows": [],
    }
    for width in options.widths:
        for tokens in options.tokens:
            if width * width * tokens <= MOST_PRODUCTS[device.type]:
                dtype = getattr(torch, options.dtype)
                record["rows"].append(
                    case(width, tokens, device, dtype, options.rounds, options.seconds)
                )
                print(line(record["rows"][-1]), flush=True)
                records.save(out, record, "torch", "peft", seed=0)
    return record


def case(
    width: int, tokens: int, device: torch.device, dtype: torch.dtype, rounds: int, most: float
) -> dict[str, Any]:
    """Least seconds of every arm in every way, and its ratio to LoRA's."""
    models = {name: adapted(config(), width, device, dtype) for name, config in CONFIGS.items()}
    x = torch.randn(tokens, width, device=device, dtype=dtype, requires_grad=True)
    ways = {"training": trained, "a pass": passed, "a token": passed}
    row: dict[str, Any] = {"width": width, "tokens": tokens}
    for way, call in ways.items():
        kept = way == "a token"
        times: dict[str, list[float]] = {name: [] for name in models}
        repeats, begin = 1, time.process_time()
        for number in range(rounds + 1):
            if number > 3 and time.process_time() - begin > most:
                break
            for name, model in models.items():
                with model._enable_peft_forward_hooks() if kept else nullcontext():
                    if kept:
                        call(model, x)
                    times[name].append(
                        seconds(lambda model=model, call=call: call(model, x), device, repeats)
                    )
            # The first round warms up, and says how often to repeat short calls: for 5 ms at least.
            if number == 0:
                repeats = max(1, min(200, round(0.005 / max(times["LoRA"][0], 1e-9))))
        least = {name: min(each[1:]) for name, each in times.items()}
        row[way] = {
            "seconds": least,
            "ratio": {name: round(least[name] / least["LoRA"], 3) for name in models},
        }
    return row


def seconds(call: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Seconds of one call among ``repeats``: of this process's CPU, or of a GPU."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / repeats
    begin = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - begin) / repeats


def adapted(config: Any, width: int, device: torch.device, dtype: torch.dtype) -> PeftModel:
    """Four layers with an adapter each, in training mode."""
    torch.manual_seed(0)
    base: Any = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(LAYERS)))
    return get_peft_model(base.to(device, dtype), config).train()


def trained(model: PeftModel, x: Tensor) -> None:
    """Forward and backward."""
    model.zero_grad()
    y = model.base_model.model(x)
    y.backward(torch.ones_like(y))


@torch.no_grad()
def passed(model: PeftModel, x: Tensor) -> None:
    """Forward alone."""
    model.base_model.model(x)


def line(row: dict[str, Any]) -> str:
    """A row of the table in Markdown: ratios to LoRA."""
    cells = []
    for way in ("training", "a pass", "a token"):
        ratios = row[way]["ratio"]
        cells.append(" / ".join(f"{ratios[name]:.2f}" for name in ("LSR", "LSR, r = 8", "LoKr")))
    return f"| {row['width']} | {row['tokens']} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
