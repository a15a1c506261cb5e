"""Where one way of applying an adapter overtakes another; ceilings of the machine; the direct Kronecker sum."""

from __future__ import annotations

import importlib.util
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.adapters.candidate_kernels.modes import applied
from benchmarks.adapters.candidate_kernels.triton_support import usable
from benchmarks.adapters.measure import seconds
from lsrdecomp.adapters.kernels import apply, linear

STORED = Path(linear.__file__).with_name("crossovers.json")


def interleaved(
    calls: dict[str, Callable[[], object]], device: torch.device, rounds: int, at_least: float = 0.02
) -> dict[str, float]:
    """Median seconds of each call over interleaved rounds."""
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, min(200, round(at_least / max(seconds(call, device), 1e-6))))  # type: ignore[arg-type]
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, device, repeats[name]))  # type: ignore[arg-type]
    return {name: statistics.median(each) for name, each in times.items()}


def ceilings(device: torch.device, dtype: torch.dtype, tiny: bool) -> dict[str, float]:
    """What the machine does at best: operations a second in a square product, bytes a second in a copy."""
    side = 256 if tiny else 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.randn(side * side * 8, device=device)
    target = torch.empty_like(source)
    times = interleaved({"product": lambda: a @ b, "copy": lambda: target.copy_(source)}, device, 5)
    return {"flops": 2 * side**3 / times["product"], "bytes": 2 * source.nbytes / times["copy"]}


def pair(out: int, into: int, rank: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.randn(rank, into, device=device) / into**0.5, torch.randn(out, rank, device=device) / 10


def crossovers(device: torch.device, dtype: torch.dtype, tiny: bool, seed: int, *, store: bool) -> dict[str, Any]:
    """Time the modes over token counts and widths, and derive the limit that `adapted_linear` chooses by."""
    torch.manual_seed(seed)
    widths = (64,) if tiny else (768, 2048) if device.type == "cpu" else (768, 4096)
    counts = (1, 16) if tiny else (1, 16, 64, 256, 1024, 4096) if device.type == "cpu" else (1, 64, 1024, 8192, 32768)
    modes = ["plain", "blas", *(["merged"] if dtype == torch.float32 else [])]
    modes += ["fused"] if device.type == "cuda" and usable(device) else []
    table = []
    for width in widths:
        weight = torch.randn(width, width, device=device).to(dtype) / width**0.5
        right, left = (each.requires_grad_() for each in pair(width, width, 4, device))
        for count in counts:
            x = torch.randn(count, width, device=device).to(dtype).requires_grad_()
            dy = torch.randn(count, width, device=device).to(dtype)

            def run(mode: Any, x: Tensor = x, dy: Tensor = dy, weight: Tensor = weight, *small: Tensor) -> None:
                applied(x, weight, None, *small, 0.5, mode).backward(dy)

            calls = {
                mode: (
                    lambda mode=mode, x=x, dy=dy, weight=weight, right=right, left=left: run(
                        mode, x, dy, weight, right, left
                    )
                )
                for mode in modes
            }
            times = interleaved(calls, device, 3 if tiny else 7)
            balance = width / 2
            table.append({"width": width, "tokens": count, "balance": count / balance, **times})
            print(
                f"    {width:5d} wide, {count:5d} tokens:", "  ".join(f"{m} {1e3 * t:.3f} ms" for m, t in times.items())
            )
    limits = {"blas_from_tokens": _least(table, "tokens", "blas", ("plain",), 1.01)}
    candidates = {  # what these win moves from candidate_kernels into the package
        "merged_from": _least(table, "balance", "merged", ("plain", "blas"), 0.98),
        "fused_from_tokens": _least(table, "tokens", "fused", ("plain", "blas"), 0.98),
    }
    if store:
        where = torch.cuda.get_device_name() if device.type == "cuda" else f"{platform.machine()}, one thread"
        stored = json.loads(STORED.read_text())
        stored[device.type] = {**limits, "source": f"benchmarks/adapters/speed.py, torch {torch.__version__}, {where}"}
        STORED.write_text(json.dumps(stored, indent=2) + "\n")
    return {"table": table, "limits": limits, "candidates": candidates}


def _least(table: list[dict[str, Any]], measure: str, mode: str, others: tuple[str, ...], share: float) -> Any:
    """The least value from which on ``mode`` takes at most ``share`` of the others' time; None if it never does."""
    if any(mode not in row for row in table):
        return None
    least = None
    for row in sorted(table, key=lambda row: row[measure], reverse=True):
        if row[mode] > share * min(row[other] for other in others):
            break
        least = row[measure]
    return least


def kronecker_products(device: torch.device, tiny: bool, seed: int) -> list[dict[str, Any]]:
    """One term and several, applied to many vectors: ours, the formed matrix, and FastKron where it is installed."""
    torch.manual_seed(seed)
    found = []
    for side, tokens in ((8, 32),) if tiny else ((28, 1024), (64, 256)):
        for terms in (1, 4):
            first, second = (torch.randn(terms, side, side, device=device) for _ in range(2))
            x = torch.randn(tokens, side * side, device=device)
            formed = torch.stack([torch.kron(a, b) for a, b in zip(first, second, strict=True)]).sum(0)
            calls: dict[str, Callable[[], object]] = {
                "ours": lambda x=x, first=first, second=second: apply([first, second], x),
                "formed": lambda x=x, formed=formed: x @ formed.mT,
            }
            if terms == 1 and importlib.util.find_spec("pyfastkron"):
                from pyfastkron import fastkrontorch

                transposed = [first[0].mT.contiguous(), second[0].mT.contiguous()]
                calls["FastKron"] = lambda x=x, transposed=transposed: fastkrontorch.gemkm(x, transposed)
            expected = x.double() @ formed.double().mT
            errors = {
                name: float((call().double() - expected).norm() / expected.norm()) for name, call in calls.items()
            }  # type: ignore[attr-defined]
            times = interleaved(calls, device, 3 if tiny else 7)
            found.append({"side": side, "tokens": tokens, "terms": terms, "seconds": times, "errors": errors})
            print(f"    Σ of {terms} {side}² ⊗ {side}²:", "  ".join(f"{n} {1e3 * t:.3f} ms" for n, t in times.items()))
    return found
