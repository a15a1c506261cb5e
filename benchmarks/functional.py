"""What survives compression: held-out gain, accuracy and KL of compressed LoRAs, for three ways to compress.

    python benchmarks/functional_adapters.py --data GLUE --work DIR
    python benchmarks/functional.py --data GLUE --work DIR [--tasks SST-2 …] [--seeds 0 1 2]

Results of one adapter are kept beside it and not measured again.

For each adapter: calibrate on examples it was trained on, compress all layers under one budget by truncated SVD in the
Frobenius norm, truncated SVD in the K-FAC norm and LSR in the K-FAC norm, put each result in place of the adapter, and
measure on held-out examples. No retraining. Writes ``results/functional.json``.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from functional_model import HELD_OUT, Inputs, Subject, Upper, held_out_logits, prepare
from safetensors.numpy import load_file

from lsrdecomp.compression.statistics import read_statistics
from lsrdecomp.shape import ProductShape
from lsrdecomp.solvers.pair import JointALS
from lsrdecomp.targets import LowRank
from lsrdecomp.training.calibrate import calibrate
from lsrdecomp.weighted import weighted_svd
from lsrdecomp.weights import NormWeights

BUDGETS = (64, 128, 320, 640, 1408)  # parameters per matrix of 384 × 384; the LoRA has 6,144
SAMPLES = 1024
DAMPING = 0.03
JUDGED = 1200  # held-out examples, the published dev split first
OUTSIDE = {"SST-2": "MRPC", "MRPC": "SST-2", "CoLA": "SST-2"}  # whose text tells of behaviour out of distribution
SPLITS = ((24, 16), (12, 32), (48, 8))
INNER = ((1, 1), (2, 1), (2, 2))
TERMS = (1, 2, 3, 4, 6, 8)
Factors = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, slots=True)
class Layer:
    """One matrix of an adapter: ΔW = B A with the scale folded in, and its K-FAC norm."""

    name: str
    target: LowRank
    weights: NormWeights


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to store one layer: its cost, its squared error in the norm at hand, the LoRA factors it stands for."""

    parameters: int
    energy: float
    factors: Factors


@dataclass(frozen=True, slots=True)
class Outcome:
    """Held-out figures of one set of weights."""

    loss: float
    accuracy: float
    kl: float  # of the LoRA's answers from these, in nats per held-out example
    kl_outside: float  # the same on another task's text


@contextmanager
def changed(model: Upper, factors: Mapping[str, Factors]) -> Iterator[Upper]:
    """The model with B A added to each named weight, inside the block only."""
    weights = {name: model.get_submodule(name).weight for name in factors}
    before = {name: weight.detach().clone() for name, weight in weights.items()}
    try:
        for name, (left, right) in factors.items():
            weights[name].data += torch.from_numpy(np.asarray(left @ right)).float()
        yield model
    finally:
        for name, weight in weights.items():
            weight.data.copy_(before[name])


def read_adapter(directory: Path) -> dict[str, Factors]:
    """(B, A) by module, with PEFT's scale folded into B."""
    config = json.loads((directory / "adapter_config.json").read_text())
    tensors = load_file(directory / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    names = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    return {
        name.removeprefix("base_model.model."): (
            scale * tensors[f"{name}.lora_B.weight"].astype(np.float64),
            tensors[f"{name}.lora_A.weight"].astype(np.float64),
        )
        for name in sorted(names)
    }


def statistics_of(subject: Subject, adapter: Mapping[str, Factors], directory: Path, seed: int) -> Path:
    """Calibrate with the adapter in place, unless an earlier run did."""
    if not (directory / "statistics.json").exists():
        rows = subject.train.shuffled(32, SAMPLES // 32, 1000 + seed)
        with changed(subject.model, adapter) as model:
            batches = (subject.train.batch(chosen) for chosen in rows)
            calibrate(model, batches, modules=list(adapter), out=directory, seed=seed, samples=SAMPLES)
    return directory


def svd_candidates(layers: Sequence[Layer], *, frobenius: bool) -> list[list[Candidate]]:
    """Every rank of every layer by truncated SVD in one of the two norms."""
    found = []
    for layer in layers:
        m, n = layer.target.shape
        norm = NormWeights.frobenius((m, n)) if frobenius else layer.weights
        columns, sigma, rows = weighted_svd(layer.target, norm)
        found.append(
            [
                Candidate(k * (m + n), float((sigma[k:] ** 2).sum()), (columns[:, :k] * sigma[:k], rows[:k]))
                for k in range(len(sigma) + 1)
            ]
        )
    return found


def lsr_candidates(layers: Sequence[Layer], most: int) -> list[list[Candidate]]:
    """Shapes and separation ranks of LSR, and every rank of the K-FAC SVD: low rank is one of the shapes."""
    found = svd_candidates(layers, frobenius=False)
    targets, norms = [layer.target for layer in layers], [layer.weights for layer in layers]
    for split in SPLITS:
        for inner in INNER:
            shape = ProductShape(split, inner, split)
            for terms in TERMS:
                if sum(a * b for a, b in zip(split, inner, strict=True)) * 2 * terms > most:
                    continue
                for candidates, solution in zip(
                    found, JointALS(sweeps=20).solve_batch(targets, shape, terms, weights=norms), strict=True
                ):
                    product = solution.product
                    candidates.append(Candidate(product.parameters, solution.error**2, product.to_lora()))
    return found


def allocate(candidates: Sequence[Sequence[Candidate]], budget: int) -> list[Candidate]:
    """One candidate a layer, at most ``budget`` parameters in all: greedy on gain per parameter along the hulls."""
    hulls = [hull(layer) for layer in candidates]
    chosen, left = [0] * len(hulls), budget
    while True:
        steps = [
            ((points[at].energy - points[at + 1].energy) / (points[at + 1].parameters - points[at].parameters), i)
            for i, (points, at) in enumerate(zip(hulls, chosen, strict=True))
            if at + 1 < len(points) and points[at + 1].parameters - points[at].parameters <= left
        ]
        if not steps:
            return [points[at] for points, at in zip(hulls, chosen, strict=True)]
        _, i = max(steps)
        left -= hulls[i][chosen[i] + 1].parameters - hulls[i][chosen[i]].parameters
        chosen[i] += 1


def hull(layer: Sequence[Candidate]) -> list[Candidate]:
    """The lower convex hull of energy over parameters, from the empty layer on."""
    points: list[Candidate] = []
    for candidate in sorted(layer, key=lambda c: (c.parameters, c.energy)):
        if points and candidate.energy >= points[-1].energy:
            continue
        while len(points) > 1 and slope(points[-2], candidate) <= slope(points[-2], points[-1]):
            points.pop()
        points.append(candidate)
    return points


def slope(first: Candidate, second: Candidate) -> float:
    return (second.energy - first.energy) / (second.parameters - first.parameters)


class Judge:
    """Measures weights put in place of the adapter's against the adapter itself."""

    def __init__(self, subject: Subject, adapter: Mapping[str, Factors], outside: Inputs) -> None:
        self.subject, self.outside = subject, outside
        with changed(subject.model, adapter) as model:
            self.expected = [held_out_logits(model, inputs).double().log_softmax(-1) for inputs in self._inputs]

    @property
    def _inputs(self) -> tuple[Inputs, Inputs]:
        return self.subject.held_out, self.outside

    def __call__(self, factors: Mapping[str, Factors]) -> Outcome:
        labels = self.subject.held_out.labels
        with changed(self.subject.model, factors) as model:
            given = [held_out_logits(model, inputs).double().log_softmax(-1) for inputs in self._inputs]
        divergences = [
            float((old.exp() * (old - new)).sum(-1).mean()) for old, new in zip(self.expected, given, strict=True)
        ]
        loss = float(torch.nn.functional.nll_loss(given[0], labels))
        return Outcome(loss, float((given[0].argmax(-1) == labels).double().mean()), *divergences)


def first(inputs: Inputs, count: int) -> Inputs:
    return Inputs(inputs.states[:count], inputs.labels[:count])


def run(data: Path, work: Path, task: str, seed: int) -> list[dict[str, object]]:
    """All methods and budgets for one adapter; one record each."""
    subject = prepare(data, work, task)
    other = prepare(data, work, OUTSIDE[task]).held_out
    adapter = read_adapter(work / task / f"seed-{seed}")
    subject = replace(subject, held_out=first(subject.held_out, JUDGED))
    judge = Judge(subject, adapter, first(other, JUDGED // 6))
    whole, none = judge(adapter), judge({})
    about = {"task": task, "seed": seed}
    records: list[dict[str, object]] = [
        about | {"method": name, "parameters_per_matrix": count, "share": share, **asdict(outcome)}
        for name, count, share, outcome in (("none", 0, 0.0, none), ("lora", 6144, 1.0, whole))
    ]
    stats = read_statistics(statistics_of(subject, adapter, work / task / f"seed-{seed}" / "statistics", seed))
    layers = [Layer(name, LowRank(*factors), stats[name].weights(damping=DAMPING)) for name, factors in adapter.items()]
    methods = {
        "svd-frobenius": svd_candidates(layers, frobenius=True),
        "svd-kfac": svd_candidates(layers, frobenius=False),
        "lsr-kfac": lsr_candidates(layers, most=2 * BUDGETS[-1]),
    }
    for method, candidates in methods.items():
        for budget in BUDGETS:
            started = time.process_time()
            chosen = allocate(candidates, budget * len(layers))
            outcome = judge({layer.name: pick.factors for layer, pick in zip(layers, chosen, strict=True)})
            records.append(
                about
                | {
                    "method": method,
                    "budget": budget,
                    "parameters_per_matrix": sum(pick.parameters for pick in chosen) / len(layers),
                    "share": (none.loss - outcome.loss) / (none.loss - whole.loss),
                    "predicted_kl": None if method == "svd-frobenius" else sum(pick.energy for pick in chosen) / 2,
                    "seconds": round(time.process_time() - started, 2),
                    **asdict(outcome),
                }
            )
    return records


def table(records: Sequence[Mapping[str, object]]) -> str:
    """Mean share over seeds, by task, method and budget."""
    lines = [f"{'task':8}{'method':16}" + "".join(f"{budget:>8}" for budget in BUDGETS)]
    for task in dict.fromkeys(record["task"] for record in records):
        for method in ("svd-frobenius", "svd-kfac", "lsr-kfac"):
            cells = []
            for budget in BUDGETS:
                found = [
                    float(r["share"])  # type: ignore[arg-type]
                    for r in records
                    if (r["task"], r["method"], r.get("budget")) == (task, method, budget)
                ]
                cells.append(f"{np.mean(found):8.2f}")
            lines.append(f"{task:8}{method:16}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="GLUE directory")
    parser.add_argument("--work", type=Path, required=True, help="where functional_adapters.py put the adapters")
    parser.add_argument("--tasks", nargs="+", choices=HELD_OUT, default=list(HELD_OUT))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "functional.json")
    arguments = parser.parse_args()
    records = []
    for task in arguments.tasks:
        for seed in arguments.seeds:
            kept = arguments.work / task / f"seed-{seed}" / "functional.json"
            if not kept.exists():
                kept.write_text(json.dumps(run(arguments.data, arguments.work, task, seed)))
                print(f"{task} seed {seed}: measured", flush=True)
            records += json.loads(kept.read_text())
    libraries = {name: version(name) for name in ("lsrdecomp", "numpy", "torch", "transformers", "peft")}
    settings = {"budgets": BUDGETS, "samples": SAMPLES, "damping": DAMPING, "machine": platform.machine()}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"versions": libraries, **settings, "records": records}, indent=1) + "\n")
    print(table(records))


if __name__ == "__main__":
    main()
