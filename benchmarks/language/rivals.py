"""Other ways to say an adapter in a few kilobytes, at equal bytes and equal training without labels.

    python -m benchmarks.language.rivals --lora LORA --data train.jsonl --held held.jsonl --other TEXTS.jsonl ...
    ... --bytes 3000 1000 --seeds 0 --methods LSR SVD XS --work rivals-work [--out benchmarks/results/rivals.json]

Every rival learns the LoRA's answers to the same lessons for the same number of steps, at the best of three or four
learning rates. A short trial chooses, whose steps are not counted; LSR and SVD are distilled twice, as `distil` chooses
among its three rates and at the next one, and the texts it holds out choose. Then
its numbers are rounded to four bits and it is judged on held-out texts that nothing else saw: 1 − KL / effect.

- LSR, SVD: what `lsrdecomp compress --bytes --storage auto` and `distil` write; SVD is the search without Kronecker
  shapes, rank-one terms of the layers that gain most. Bytes are all that opens the directory.
- XS: cores k × l between the base's leading singular vectors (LoRA-XS, arXiv:2405.17604), begun at the projection of
  the LoRA in the Fisher norm, sizes shared out over the layers by one budget.
- Fisher core: the same between eigenvectors of the base's own Fisher factors, measured once on texts of ``--other``.
- VeRA, Uni-LoRA, TinyLoRA, VB-LoRA, FourierFT: PEFT's, from PEFT's own start, at the largest size that fits.

Bytes of all but LSR and SVD: `CONFIG`, half a byte a number and two bytes a scale, a scale a tensor; an index of which
layers are used is not charged, nor are the shared eigenvectors. Rows are added as they come; a stopped run goes on.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import FourierFTConfig, PeftConfig, TinyLoraConfig, UniLoraConfig, VBLoRAConfig, VeraConfig, get_peft_model
from torch import Tensor, nn

from benchmarks import RESULTS
from lsrdecomp.calibration.answers import ask, keep_answers
from lsrdecomp.calibration.base_model import Base, load_base, prompt_batches
from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.calibration.dataset import PromptExample, read_jsonl
from lsrdecomp.calibration.distil import soft_divergence
from lsrdecomp.calibration.divergence import Reference, without_delta
from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.statistics import METADATA, read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression import CompressionPlan
from lsrdecomp.compression.compress import compress
from lsrdecomp.compression.layers import layer_pair
from lsrdecomp.compression.settings import Search
from lsrdecomp.fidelity.distil import distil
from lsrdecomp.formats.allocation import Options, within_cost
from lsrdecomp.formats.number_formats import nearest_codes
from lsrdecomp.training.record import commit

CONFIG = 300
"""Bytes of an adapter_config.json that a rival cannot do without, as small as LSR's."""
BATCH = 4
TRIAL = 6
"""Steps of the trial of a rate."""
ABSOLUTE = (0.01, 0.03, 0.1, 0.3)
"""Learning rates of PEFT's methods, in plain numbers."""
SIDES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
"""Sides of a core."""
COMPRESSED = {"LSR": Search(), "SVD": Search(orders=())}
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Rival:
    """A model that answers with a rival's ΔW, the numbers that are trained, and their bytes in four bits."""

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    rates: tuple[float, ...]
    relative: bool = True  # a step is in units of the root mean square of a tensor's numbers, as `distil` has it

    @property
    def numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def bytes(self) -> int:
        return CONFIG + sum(math.ceil(p.numel() / 2) + 2 for p in self.parameters)

    def round(self) -> None:
        """Four bits a number, one scale a tensor, chosen for the least squared error."""
        with torch.no_grad():
            for parameter in self.parameters:
                codes, step = nearest_codes(parameter.detach().double().numpy().reshape(1, -1), 4)
                parameter.copy_(torch.from_numpy(codes * step[:, None]).reshape(parameter.shape))


@dataclass(frozen=True)
class Subject:
    """The LoRA, its answers to the lessons and to the held-out texts, and the statistics of its layers."""

    base: str
    lora: Path
    work: Path
    source: Base
    plain: nn.Module
    lessons: list[tuple[Mapping[str, Tensor], Callable[[], Tensor], int]]
    texts: list[PromptExample]
    reference: Reference
    statistics: Path
    other: Path  # statistics of the base alone

    @property
    def modules(self) -> tuple[str, ...]:
        return self.source.modules


def subject(arguments: argparse.Namespace) -> Subject:
    torch.set_num_threads(1)
    source = load_base(arguments.base, arguments.lora)
    texts = read_jsonl(arguments.data)[: arguments.texts]
    held = read_jsonl(arguments.held)[: arguments.examples]
    others = [example for file in arguments.other for example in read_jsonl(file)[: arguments.samples]]
    about = {"base": arguments.base, "adapter_base": source.adapter_base, "adapter": source.adapter_sha256}
    places = arguments.work / "statistics", arguments.work / "statistics-other"
    for place, some, off in ((places[0], texts, False), (places[1], others, True)):
        if (place / METADATA).exists():
            continue
        questions = list(
            prompt_batches(source, some[: arguments.samples], size=8, seed=0, answers="all" if off else "completion")
        )
        settings: dict[str, Any] = {"modules": source.modules, "out": place, "seed": 0, "head": source.head, **about}
        with without_delta(source.model) if off else nullcontext():
            calibrate(source.model, questions, samples=min(len(some), arguments.samples), **settings)
    reference = Reference(source, prompt_batches(source, held, size=8, seed=0))
    lessons = []
    for batch in prompt_batches(source, texts, size=BATCH, seed=0):
        answers, recall = keep_answers(source, batch)
        lessons.append((batch, recall, int(answers.counts.sum())))
    plain = copy.copy(source.model).unload()
    plain.requires_grad_(False)
    return Subject(arguments.base, arguments.lora, arguments.work, source, plain, lessons, texts, reference, *places)


# What is compared.


def compressed(subject: Subject, method: str, budget: int, seed: int, steps: int) -> dict[str, Any]:
    """LSR or SVD as a user makes it: compress, then distil on the lessons."""
    made, out = (subject.work / f"{method}-{budget}{suffix}" for suffix in ("", f"-{seed}"))
    if not made.exists():
        plan = CompressionPlan(bytes=budget, storage="auto")
        statistics = read_statistics(subject.statistics)
        compress(open_checkpoint(subject.lora), plan, statistics=statistics, search=COMPRESSED[method]).save(made)
    tried = {}
    for rate in (None, ABSOLUTE[-1]):  # the best of `distil`'s own three, and the next; its own check texts choose
        shutil.rmtree(out.with_name(f"{out.name}-{rate}"), ignore_errors=True)
        done = distil(
            made,
            base=subject.base,
            data=subject.texts,
            teacher=subject.lora,
            out=out.with_name(f"{out.name}-{rate}"),
            steps=steps,
            batch=BATCH,
            seed=seed,
            rate=rate,
            calibrated=subject.statistics,
            force=True,
        )
        tried[done.form.after.kept or 0.0] = done
    done = tried[max(tried)]
    before, after = (subject.reference.compare(load_base(subject.base, place)) for place in (made, done.directory))
    training = done.form.training
    return {
        "bytes": bytes_to_open(done.directory / WEIGHTS),
        "before": before.kept,
        "kept": after.kept,
        "error": after.standard_error,
        "agreement": after.agreement,
        "rate": None if training is None else training.rate,
    }


def cores(subject: Subject, directions: Mapping[str, tuple[Doubles, Doubles]], budget: int) -> Rival:
    """ΔW = U θ Vᵀ in each layer, θ the projection of the LoRA's in the Fisher norm, sizes by one budget."""
    checkpoint = open_checkpoint(subject.lora)
    statistics, options, projections = read_statistics(subject.statistics), [], []
    names = {layer.name: layer for layer in checkpoint.layers}
    for name in subject.modules:
        pair, (u, v) = layer_pair(checkpoint, names[name]), directions[name]
        weights = statistics[name].weights()
        left, right = (np.asarray(side.root(np.eye(side.size))) for side in (weights.output, weights.input))
        wanted = left @ (np.asarray(pair.left, float) @ np.asarray(pair.right, float)) @ right.T
        (q, r), (p, s) = np.linalg.qr(left @ u), np.linalg.qr(right @ v)
        inside = q.T @ wanted @ p
        projections.append((inside, r, s))
        total = float((wanted**2).sum())
        shapes = [(k, n) for k in SIDES for n in SIDES]
        losses = [max(0.0, total - float((inside[:k, :n] ** 2).sum())) for k, n in shapes]
        options.append(Options.of([0.0, *(k * n / 2 + 2 for k, n in shapes)], [total, *losses]))
    model, parameters = copy.deepcopy(subject.plain), []
    for name, choice, (inside, r, s) in zip(
        subject.modules, within_cost(options, budget - CONFIG), projections, strict=True
    ):
        if choice == 0:
            continue
        k, n = shapes[choice - 1]
        core = np.linalg.solve(r[:k, :k], np.linalg.solve(s[:n, :n], inside[:k, :n].T).T)
        u, v = (
            torch.tensor(side[:, :size].copy(), dtype=torch.float32)
            for side, size in zip(directions[name], (k, n), strict=True)
        )
        parameters.append(nn.Parameter(torch.tensor(core, dtype=torch.float32)))
        model.get_submodule(name).register_forward_hook(_add(parameters[-1], u, v))
    return Rival(model, parameters, (0.01, 0.03, 0.1, 0.3))


def _add(core: nn.Parameter, u: Tensor, v: Tensor) -> Callable[..., Tensor]:
    return lambda module, inputs, output: output + inputs[0] @ v @ core.T @ u.T


def singular_vectors(subject: Subject) -> dict[str, tuple[Doubles, Doubles]]:
    """U diag(σ) and V of each weight of the base, the leading columns."""
    vectors = {}
    for name in subject.modules:
        weight: Any = subject.plain.get_submodule(name).weight
        u, values, vh = np.linalg.svd(weight.detach().double().numpy(), full_matrices=False)
        most = max(SIDES)
        vectors[name] = (u[:, :most] * (values[:most] / values[0]), vh[:most].T)
    return vectors


def eigenvectors(subject: Subject) -> dict[str, tuple[Doubles, Doubles]]:
    """G^-½ and C^-½ in the leading eigenvectors of the base's own Fisher factors."""

    def whitened(side: Any) -> Doubles:
        most = max(SIDES)
        basis, values = np.asarray(side.basis)[:, :most], np.asarray(side.values)[:most]
        return np.asarray(basis * np.sqrt(values[0] / values), dtype=float)

    statistics = read_statistics(subject.other)
    damped = {name: statistics[name].weights() for name in subject.modules}
    return {name: (whitened(weights.output), whitened(weights.input)) for name, weights in damped.items()}


def from_peft(
    subject: Subject,
    config: Callable[[int, list[str]], PeftConfig],
    budget: int,
    seed: int,
    rates: tuple[float, ...],
) -> Rival:
    """PEFT's own method at the largest size that fits, on those layers that matter most if all are too many."""
    names = by_energy(subject)
    layers = len(names)
    while layers:

        def rival(size: int, used: int = layers) -> Rival:
            torch.manual_seed(seed)
            model = get_peft_model(copy.deepcopy(subject.plain), config(size, names[:used]))
            return Rival(model.eval(), [p for p in model.parameters() if p.requires_grad], rates, relative=False)

        first, second = rival(1), rival(2)  # numbers are linear in what is set
        size = 1 + int(2 * (budget - first.bytes) / (second.numbers - first.numbers))
        while size > 0:
            chosen = rival(size)
            if chosen.bytes <= budget:
                return chosen
            size -= 1
        layers //= 2
    raise SystemExit(f"nothing fits in {budget} bytes")


def by_energy(subject: Subject) -> list[str]:
    """The layers, those first in which the LoRA does most in the Fisher norm."""
    checkpoint, statistics = open_checkpoint(subject.lora), read_statistics(subject.statistics)
    energy = {}
    for layer in checkpoint.layers:
        pair, weights = layer_pair(checkpoint, layer), statistics[layer.name].weights()
        left, right = (
            weights.output.root(np.asarray(pair.left, float)),
            weights.input.root(np.asarray(pair.right, float).T),
        )
        energy[layer.name] = float(np.linalg.norm(left @ right.T))
    return sorted(energy, key=lambda name: -energy[name])


PEFT: dict[str, tuple[Callable[[int, list[str]], PeftConfig], tuple[float, ...]]] = {
    "VeRA": (lambda size, names: VeraConfig(r=size, target_modules=names, save_projection=False), ABSOLUTE),
    "Uni-LoRA": (
        lambda size, names: UniLoraConfig(r=4, theta_d_length=size, target_modules=names),
        ABSOLUTE,
    ),
    "TinyLoRA": (lambda size, names: TinyLoraConfig(r=8, u=size, target_modules=names), ABSOLUTE),
    "VB-LoRA": (
        lambda size, names: VBLoRAConfig(r=1, num_vectors=max(2, size), vector_length=32, topk=1, target_modules=names),
        ABSOLUTE,
    ),
    "FourierFT": (lambda size, names: FourierFTConfig(n_frequency=size, target_modules=names), (0.03, 0.1, 0.3, 1.0)),
}


# Training and judging.


def learn(subject: Subject, rival: Rival, seed: int, steps: int) -> dict[str, Any]:
    """Train on the LoRA's answers at the best of the rates, round, and judge."""
    student = replace(subject.source, model=rival.model)
    order = random.Random(seed).sample(range(len(subject.lessons)), len(subject.lessons))
    start = [parameter.detach().clone() for parameter in rival.parameters]
    scales = [float(value.square().mean().sqrt()) if rival.relative else 1.0 for value in start]
    before = subject.reference.compare(student).kept

    def run(rate: float, count: int, total: int, warm: int) -> float:
        with torch.no_grad():
            for parameter, value in zip(rival.parameters, start, strict=True):
                parameter.copy_(value)
        groups = [
            {"params": [p], "lr": rate * scale, "scale": scale}
            for p, scale in zip(rival.parameters, scales, strict=True)
        ]
        optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
        losses = []
        for step in range(count):
            for group in optimizer.param_groups:
                group["lr"] = rate * group["scale"] * min(1.0, (step + 1) / warm) * (1.0 - step / total)
            batch, recall, answers = subject.lessons[order[step % len(order)]]
            loss = soft_divergence(recall(), ask(student, batch).logits, student.head) / answers
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
        return sum(losses[count // 2 :])

    trials = {rate: run(rate, TRIAL, 10**9, 3) for rate in rival.rates}
    best = min(trials, key=lambda rate: trials[rate] if math.isfinite(trials[rate]) else math.inf)
    run(best, steps, steps, 3)
    trained = subject.reference.compare(student).kept
    rival.round()
    after = subject.reference.compare(student)
    facts = {"bytes": rival.bytes, "numbers": rival.numbers, "before": before, "trained": trained, "rate": best}
    return {**facts, "kept": after.kept, "error": after.standard_error, "agreement": after.agreement}


def row(subject: Subject, method: str, budget: int, seed: int, steps: int) -> dict[str, Any]:
    if method in COMPRESSED:
        return compressed(subject, method, budget, seed, steps)
    if method == "XS":
        rival = cores(subject, singular_vectors(subject), budget)
    elif method == "Fisher core":
        rival = cores(subject, eigenvectors(subject), budget)
    else:
        config, rates = PEFT[method]
        rival = from_peft(subject, config, budget, seed, rates)
    return learn(subject, rival, seed, steps)


METHODS = (*COMPRESSED, "XS", "Fisher core", *PEFT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--task", default="E2E")
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="texts of the task to learn from")
    parser.add_argument("--held", type=Path, required=True, help="texts of the task to judge on")
    parser.add_argument(
        "--other", type=Path, nargs="+", required=True, help="texts of no task, for the base's own norm"
    )
    parser.add_argument("--bytes", type=int, nargs="+", default=[3000, 1000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--texts", type=int, default=240)
    parser.add_argument("--samples", type=int, default=64, help="texts of each kind to measure a norm on")
    parser.add_argument("--examples", type=int, default=64, help="held-out texts")
    parser.add_argument("--work", type=Path, default=Path("rivals-work"))
    parser.add_argument("--out", type=Path, default=RESULTS / "rivals.json")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {"rows": []}
    names = ("lsrdecomp", "numpy", "torch", "transformers", "peft")
    record |= {"machine": platform.machine(), "versions": {name: version(name) for name in names}}
    opened = subject(arguments)
    for seed in arguments.seeds:
        for budget in arguments.bytes:
            for method in arguments.methods:
                key = {"task": arguments.task, "base": arguments.base, "method": method, "budget": budget, "seed": seed}
                key |= {"steps": arguments.steps}
                if any(all(each.get(name) == value for name, value in key.items()) for each in record["rows"]):
                    continue
                begin = time.process_time()
                facts = row(opened, method, budget, seed, arguments.steps)
                facts |= {"effect": opened.reference.effect, "examples": opened.reference.examples}
                spent = round(time.process_time() - begin, 1)
                record["rows"].append({**key, **facts, "cpu_seconds": spent, "commit": commit()})
                print(record["rows"][-1], flush=True)
                arguments.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
