"""What an adapter costs beside its peers: time, memory and launches, in one run, on a CPU or a GPU.

    python -m benchmarks.adapters.speed                    # all cases of this machine; under 8 minutes on a GPU
    python -m benchmarks.adapters.speed --tiny             # a dry run of everything, under a minute
    python -m benchmarks.adapters.speed --crossovers       # also measure and store what `adapted_linear` chooses by

Peers that are not installed are named and left out. Every arm of ours is first compared with float64. Times are medians
over interleaved rounds: of this process's CPU time with one thread, or of GPU time. Writes ``results/adapters-*.json``
and, with matplotlib, the picture of docs/kernels.md.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS
from benchmarks.adapters.arms import (
    FROZEN,
    LOKR,
    LORA,
    LORA_NARROW,
    LSR,
    OURS,
    OURS_EQUAL,
    Build,
    Prepared,
    arms,
    targets,
)
from benchmarks.adapters.check import BOUNDS, check
from benchmarks.adapters.crossovers import ceilings, crossovers, kronecker_products
from benchmarks.adapters.extras import expansions, mixed_batches
from benchmarks.adapters.measure import Figures, Subject, kernels, measure, quartiles
from benchmarks.adapters.models import ATTENTION, Case, cases, make, sample
from benchmarks.adapters.picture import draw

COUNTED = (FROZEN, LORA, LORA_NARROW, LOKR, OURS, LSR, "LSR arena", "LSR arena, Triton", "LSR in PEFT")
PICTURES = Path(__file__).parents[2] / "docs" / "images"
PACKAGES = ("torch", "triton", "peft", "transformers", "lycoris-lora", "pyfastkron", "numpy")


def subjects(case: Case, found: dict[str, Build], device: torch.device, dtype: torch.dtype, seed: int) -> list[Subject]:
    """Every arm on its own copy of the same model, with the same inputs."""
    made = []
    for name, build in found.items():
        model = make(case, device, dtype, seed)
        names = case.names or tuple(f"linear_{i}" for i in range(len(case.shapes)))
        try:
            prepared: Prepared = build(model, names, case.sizes)
            inputs, gradients = sample(case, device, dtype, seed + 1)
            optimizer = torch.optim.AdamW(prepared.parameters, lr=1e-5) if prepared.parameters else None
            subject = Subject(name, prepared, inputs, gradients, optimizer)
            subject.step()
        except Exception as error:  # a peer that fails on this case must not end the others
            if name in (FROZEN, LORA) or name.startswith(("LSR", "our")):
                raise
            print(f"    {name} left out: {type(error).__name__}: {str(error)[:120]}")
            continue
        made.append(subject)
    return made


def show(case: Case, figures: list[Figures]) -> None:
    base = next(each for each in figures if each.arm == FROZEN)
    print(f"\n{case.name}")
    print(f"    {'':24s} {'fwd':>9s} {'fwd+bwd':>9s} {'step':>9s}  {'/LoRA (quartiles)':>22s} {'/base':>6s}", end="")
    print(f" {'extra kernels':>13s} {'kept MB':>8s} {'parameters':>10s}")
    for each in figures:
        times = "".join(f" {1e3 * value:9.2f}" for value in (each.forward, each.forward_backward, each.step))
        spread = f"{each.ratio:.3f} ({each.ratio_low:.3f} to {each.ratio_high:.3f})"
        print(f"    {each.arm:24s}{times}  {spread:>22s} {each.forward_backward / base.forward_backward:6.3f}", end="")
        peak = each.kept_mb if each.peak_mb is None else each.peak_mb
        print(f" {each.extra_kernels:13d} {peak:8.1f} {each.parameters:10d}", end="")
        print("" if each.device_time is None else f"  {1e3 * each.device_time:9.2f} in kernels")


def run_case(case: Case, found: dict[str, Build], arguments: Any, deadline: float) -> dict[str, Any]:
    device, dtype = arguments.device, arguments.dtype
    made = subjects(case, found, device, dtype, arguments.seed)
    layers = len(case.shapes) or len(targets(make(case, torch.device("meta"), dtype, 0), case.names))
    figures = measure(made, device, rounds=arguments.rounds, yardstick=LORA, frozen=FROZEN, deadline=deadline)
    for subject in made:
        subject.prepared.open.close()
    show(case, figures)
    del made
    gc.collect()
    return {
        "name": case.name,
        "kind": case.kind,
        "tokens": case.count,
        "layers": layers,
        "shapes": case.shapes,
        "width": case.width,
        "rank": case.sizes.rank,
        "terms": case.sizes.terms,
        "lora_rank": case.sizes.lora_rank,
        "arms": [each.record() for each in figures],
    }


def ratios(case: dict[str, Any]) -> dict[str, dict[str, tuple[float, ...]]]:
    """What the goals are written in: quartiles of LSR's time to its peers', in its default and its best mode."""
    by_name = {each["arm"]: each for each in case["arms"]}
    modes = [name for name in by_name if name.startswith("LSR")]
    best = min(modes, key=lambda name: by_name[name]["forward_backward"])
    peers = [name for name in (LORA, LORA_NARROW, LOKR, OURS_EQUAL, OURS, FROZEN) if name in by_name]
    return {
        mode: {peer: quartiles(by_name[mode]["rounds"], by_name[peer]["rounds"]) for peer in peers}
        for mode in dict.fromkeys((LSR, best))
    }


def launches(device: torch.device, seed: int, tiny: bool) -> dict[str, dict[str, int]]:
    """Extra kernels of forward and backward of RoBERTa-base with q and v adapted; widths do not matter to them."""
    case = Case("launches", "roberta", (2, 8), names=ATTENTION, width=128, depth=2 if tiny else 12)
    counted: dict[str, dict[str, int]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        found = {name: build for name, build in arms(device, dtype)[0].items() if name in COUNTED}
        made = subjects(case, found, device, dtype, seed)
        counts = {subject.name: kernels(subject.forward_backward, device)[0] for subject in made}
        for subject in made:
            subject.prepared.open.close()
        label = str(dtype).removeprefix("torch.")
        counted[label] = {name: count - counts[FROZEN] for name, count in counts.items() if name != FROZEN}
        print(f"    extra kernels, {label}:", "  ".join(f"{name} {count}" for name, count in counted[label].items()))
    return counted


def environment(device: torch.device) -> dict[str, Any]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    where = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    return {"python": platform.python_version(), "device": where, "packages": found}


def parse(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="by default float32 on a CPU, else bfloat16")
    parser.add_argument("--tiny", action="store_true", help="small sizes: a dry run")
    parser.add_argument("--budget", type=float, help="seconds after which no further case begins: 440, on a CPU 2400")
    parser.add_argument("--rounds", type=int, default=0, help="interleaved rounds a case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="cases whose names contain one of these words")
    parser.add_argument("--arms", nargs="*", help="arms to run beside the frozen base and PEFT's LoRA; by default all")
    parser.add_argument("--crossovers", action="store_true", help="measure and store what `adapted_linear` chooses by")
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args(given)
    cpu = arguments.device.type == "cpu"
    arguments.dtype = getattr(torch, arguments.dtype or ("float32" if cpu else "bfloat16"))
    arguments.rounds = arguments.rounds or (3 if arguments.tiny else 15 if cpu else 5)
    kind = "tiny" if arguments.tiny else arguments.device.type
    arguments.budget = arguments.budget or (2400 if cpu else 440)
    arguments.out = arguments.out or RESULTS / f"adapters-{kind}.json"
    return arguments


def main(given: list[str] | None = None) -> None:
    arguments = parse(given)
    device, begun = arguments.device, time.monotonic()
    if device.type == "cpu":
        torch.set_num_threads(1)
    found, missing = arms(device, arguments.dtype)
    if arguments.arms is not None:
        found = {name: build for name, build in found.items() if name in (FROZEN, LORA, LSR, *arguments.arms)}
    for reason in missing:
        print(f"left out: {reason}")
    errors = check(found, device, arguments.dtype, arguments.seed)
    for name, error in errors.items():
        print(f"    {name:24s} error against float64 {error:.1e}")
        if error > BOUNDS[arguments.dtype]:
            print(f"    {name} left out: above {BOUNDS[arguments.dtype]:.0e}")
            del found[name]
    record: dict[str, Any] = {"environment": environment(device), "seed": arguments.seed, "left out": missing}
    record |= {
        "dtype": str(arguments.dtype),
        "errors": errors,
        "ceilings": ceilings(device, arguments.dtype, arguments.tiny),
    }
    record["launches"] = launches(device, arguments.seed, arguments.tiny)
    record["kronecker"] = kronecker_products(device, arguments.tiny, arguments.seed)
    record["expansions"] = expansions(device, arguments.dtype, arguments.tiny, arguments.seed)
    record["mixed"] = mixed_batches(device, arguments.dtype, arguments.tiny, arguments.seed)
    record["cases"], record["ratios"] = [], {}
    for case in cases(device.type == "cpu", arguments.tiny):
        if arguments.only and not any(word in case.name for word in arguments.only):
            continue
        left = arguments.budget - (time.monotonic() - begun)
        if left < 20:
            print(f"\n{case.name}: left out, {left:.0f} s left of {arguments.budget:.0f}")
            continue
        record["cases"].append(run_case(case, found, arguments, time.monotonic() + left / 2))
        record["ratios"][case.name] = ratios(record["cases"][-1])
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    if arguments.crossovers or arguments.tiny:
        record["crossovers"] = crossovers(
            device, arguments.dtype, arguments.tiny, arguments.seed, store=not arguments.tiny
        )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    if find_spec("matplotlib") and record["cases"] and not arguments.tiny and not arguments.only:
        draw(record, PICTURES / f"kernels-{device.type}.png")
    print("\nforward and backward, against")
    for name, modes in record["ratios"].items():
        for mode, values in modes.items():
            ratio = "  ".join(f"{label} {value[1]:.3f}" for label, value in values.items())
            print(f"    {name:40s} {mode:12s}", ratio)
    print(f"\n{time.monotonic() - begun:.0f} s; written to {arguments.out}")


if __name__ == "__main__":
    main()
