"""The `blas` node against composed operations, inside PEFT: two linear layers there and back, forward and backward.

python -m benchmarks.adapters.node [--rounds 13] [--out benchmarks/results/adapters-node.json]

Ratios are of CPU seconds within a round, medians over rounds in which the two take turns; one thread. Rows are tokens
of a batch: 16 x 32 of short sentences, 16 x 128 and 32 x 128 of GLUE or a small language model. A few minutes.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn

import lsrdecomp.adapters.layer
from benchmarks import RESULTS
from lsrdecomp.adapters import LsrConfig
from lsrdecomp.adapters.kernels import adapted_linear

SHAPES = ((768, 768), (3072, 768), (1024, 1024), (2048, 1024), (2048, 2048))
TOKENS = (128, 512, 2048, 4096)
MODES = ("plain", "blas")
MOST_PRODUCTS = 1 << 33
"""Multiplications of a layer on all tokens; larger cases take minutes and the pair vanishes beside the layer."""


def main(given: list[str] | None = None) -> None:
    """Measure every case and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--out", type=Path, default=RESULTS / "adapters-node.json")
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for out, into in SHAPES:
            for tokens in TOKENS:
                if out * into * tokens <= MOST_PRODUCTS:
                    rows.append(measured(out, into, tokens, dtype, options.rounds))
                    print(rows[-1], flush=True)
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    record = {
        "versions": versions,
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "seed": 0,
        "threads": 1,
        "rows": rows,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measured(out: int, into: int, tokens: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """One case: the ratio of the node's time to that of composed operations, with its quartiles."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(into, out), nn.Linear(out, into)).to(dtype)
    config = LsrConfig(target_modules=["0", "1"], inner_shape=[2, 2], separation_rank=4)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    x = torch.randn(tokens, into, dtype=dtype, requires_grad=True)
    for mode in MODES:
        seconds(model, x, mode)  # warm
    times: list[dict[str, float]] = []
    for index in range(rounds):
        order = MODES if index % 2 else MODES[::-1]
        times.append({mode: seconds(model, x, mode) for mode in order})
    low, middle, high = statistics.quantiles((each["blas"] / each["plain"] for each in times), n=4)
    return {
        "rows": out,
        "columns": into,
        "tokens": tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "ratio": round(middle, 3),
        "quartiles": [round(low, 3), round(high, 3)],
        "plain_seconds": round(statistics.median(each["plain"] for each in times), 5),
    }


def seconds(model: nn.Module, x: Tensor, mode: str) -> float:
    """CPU seconds of one pass forward and back with the pair applied by ``mode``."""
    chosen: Callable[..., Tensor] = lambda *given, **more: adapted_linear(*given, **more, mode=mode)  # noqa: E731
    lsrdecomp.adapters.layer.adapted_linear = chosen
    try:
        begin = time.process_time()
        y = model(x)
        y.backward(torch.ones_like(y))
        return time.process_time() - begin
    finally:
        lsrdecomp.adapters.layer.adapted_linear = adapted_linear


if __name__ == "__main__":
    main()
