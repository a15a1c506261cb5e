"""What survives compression: held-out gain, accuracy and KL of LoRAs compressed in three ways.

    python -m benchmarks.behaviour.norms_adapters --data GLUE --work DIR
    python -m benchmarks.behaviour.norms --data GLUE --work DIR [--tasks SST-2 …] [--seeds 0 1 2]

Results of one adapter are kept beside it and not measured again.

For each adapter: calibrate on examples it was trained on, compress all layers under one budget by
truncated SVD in the Frobenius norm, truncated SVD and LSR in the Fisher norm, put each result in
place of the adapter, and measure on held-out examples. No retraining. Writes
``results/functional.json``.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from benchmarks import record as provenance
from benchmarks.behaviour.norms_model import (
    HELD_OUT,
    Inputs,
    Subject,
    Upper,
    held_out_logits,
    prepare,
)
from benchmarks.lab.structures.fit import lsr_candidates
from lsrdecomp.calibration.base_model import Base
from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.calibration.heads import Head
from lsrdecomp.checkpoints.statistics import Statistics, read_statistics
from lsrdecomp.compression.caches import SpillCache
from lsrdecomp.compression.candidates import Candidate, drop, low_rank_candidates, materialize
from lsrdecomp.compression.layers import Layer
from lsrdecomp.compression.shapes import shape_grid
from lsrdecomp.formats.allocation import PartOptions, within_cost
from lsrdecomp.solvers.pair.joint_als import JointALS
from lsrdecomp.targets.base import LowRank

BUDGETS = (64, 128, 320, 640, 1408)  # parameters per matrix of 384 × 384; the LoRA has 6,144
SAMPLES = 1024
JUDGED = 1200  # held-out examples, the published dev split first
# The task whose texts tell of behaviour out of distribution.
OUTSIDE = {
    "SST-2": "MRPC",
    "MRPC": "SST-2",
    "CoLA": "SST-2",
}
SOLVER = JointALS(sweeps=8, trials=1)
Factors = tuple[np.ndarray, np.ndarray]


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
    names = [
        name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")
    ]
    return {
        name.removeprefix("base_model.model."): (
            scale * tensors[f"{name}.lora_B.weight"].astype(np.float64),
            tensors[f"{name}.lora_A.weight"].astype(np.float64),
        )
        for name in sorted(names)
    }


def statistics_of(
    subject: Subject, adapter: Mapping[str, Factors], directory: Path, seed: int
) -> Path:
    """Calibrate with the adapter in place, unless an earlier run did."""
    if not (directory / "statistics.json").exists():
        rows = subject.train.shuffled(32, SAMPLES // 32, 1000 + seed)
        with changed(subject.model, adapter) as model:
            batches = (subject.train.batch(chosen) for chosen in rows)
            base = Base("", model, None, Head.classification, tuple(adapter))
            calibrate(base, batches, out=directory, seed=seed, samples=SAMPLES)
    return directory


def methods(layers: Sequence[Layer]) -> Iterator[tuple[str, list[list[Candidate]]]]:
    """Return the candidates that each way to compress offers for every layer.

    LSR has low rank among its shapes.
    """
    plain = [Layer.of(layer.name, layer.pair) for layer in layers]
    yield "svd-frobenius", [[drop(layer), *low_rank_candidates(layer)] for layer in plain]
    low_rank = [[drop(layer), *low_rank_candidates(layer)] for layer in layers]
    yield "svd-kfac", low_rank
    shape, rank = layers[0].shape, max(layer.rank for layer in layers)
    chains = shape_grid(shape, rank, (2, 3), rank, 2 * BUDGETS[-1])
    configurations = [(chain.shape, terms) for chain in chains for terms in chain.terms]
    products = lsr_candidates(layers, configurations, SOLVER)
    yield "lsr-kfac", [both + more for both, more in zip(low_rank, products, strict=True)]


def under_budget(candidates: Sequence[Sequence[Candidate]], budget: int) -> list[Candidate]:
    """One candidate a layer, with at most ``budget`` parameters in all."""
    options = [
        PartOptions.of([c.parameters for c in layer], [c.squared_error for c in layer])
        for layer in candidates
    ]
    return [layer[i] for layer, i in zip(candidates, within_cost(options, budget), strict=True)]


def factors_of(layer: Layer, candidate: Candidate) -> Factors | None:
    """The LoRA pair (B, A) that a candidate stands for; None for a layer left out."""
    form = materialize(layer, candidate, SpillCache()).product
    return None if form is None else form.to_lora()


class Judge:
    """Measures weights put in place of the adapter's against the adapter itself."""

    def __init__(self, subject: Subject, adapter: Mapping[str, Factors], outside: Inputs) -> None:
        self.subject, self.outside = subject, outside
        with changed(subject.model, adapter) as model:
            self.expected = [
                held_out_logits(model, inputs).double().log_softmax(-1) for inputs in self._inputs
            ]

    @property
    def _inputs(self) -> tuple[Inputs, Inputs]:
        return self.subject.held_out, self.outside

    def __call__(self, factors: Mapping[str, Factors]) -> Outcome:
        labels = self.subject.held_out.labels
        with changed(self.subject.model, factors) as model:
            given = [
                held_out_logits(model, inputs).double().log_softmax(-1) for inputs in self._inputs
            ]
        divergences = [
            float((old.exp() * (old - new)).sum(-1).mean())
            for old, new in zip(self.expected, given, strict=True)
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
    stats = read_statistics(
        statistics_of(subject, adapter, work / task / f"seed-{seed}" / "statistics", seed)
    )
    layers = [Layer.of(name, LowRank(*factors), stats[name]) for name, factors in adapter.items()]
    for method, candidates in methods(layers):
        for budget in BUDGETS:
            chosen = under_budget(candidates, budget * len(layers))
            pairs = {
                layer.name: factors_of(layer, pick)
                for layer, pick in zip(layers, chosen, strict=True)
            }
            outcome = judge({name: pair for name, pair in pairs.items() if pair is not None})
            figures = {
                "budget": budget,
                "parameters_per_matrix": sum(pick.parameters for pick in chosen) / len(layers),
                "share": (none.loss - outcome.loss) / (none.loss - whole.loss),
                "predicted_kl": None
                if method == "svd-frobenius"
                else sum(pick.squared_error for pick in chosen) / 2,
                "structures": dict(Counter(pick.structure for pick in chosen)),
            }
            records.append(about | {"method": method} | figures | asdict(outcome))
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
    parser.add_argument(
        "--work", type=Path, required=True, help="where functional_adapters.py put the adapters"
    )
    parser.add_argument("--tasks", nargs="+", choices=HELD_OUT, default=list(HELD_OUT))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=provenance.RESULTS / "functional.json")
    arguments = parser.parse_args()
    records = []
    for task in arguments.tasks:
        for seed in arguments.seeds:
            kept = arguments.work / task / f"seed-{seed}" / "functional.json"
            if not kept.exists():
                kept.write_text(json.dumps(run(arguments.data, arguments.work, task, seed)))
                print(f"{task} seed {seed}: measured", flush=True)
            records += json.loads(kept.read_text())
    results = {
        "budgets": BUDGETS,
        "samples": SAMPLES,
        "damping": Statistics({}, {}, Path()).damping,
        "judged": JUDGED,
        "records": records,
    }
    packages = ("torch", "transformers", "peft")
    provenance.save(arguments.out, results, *packages, seed=arguments.seeds)
    print(table(records))


if __name__ == "__main__":
    main()
