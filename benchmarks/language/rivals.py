"""Other ways to write an adapter in a few kilobytes, at equal bytes and equal training.

    python -m benchmarks.language.rivals --lora LORA --data train.jsonl --held held.jsonl \\
        --other TEXTS.jsonl ... --bytes 3000 --seeds 0 --rates 0.1 0.3 --methods LSR SVD XS \\
        --work rivals-work [--out rivals.json]

Every rival learns the LoRA's answers to texts of the task for the same number of steps, once at
each learning rate. Then its numbers are rounded to four bits and it is judged on held-out texts
that nothing else saw: 1 − KL / effect. A row of the record is one training at one rate.

- LSR, SVD: what `lsrdecomp compress --bytes --storage auto` and `distil` write; SVD is the search
  without Kronecker shapes, rank-one terms of the layers that gain most. Bytes are all that opens
  the directory.
- XS: cores k × l between the base's leading singular vectors (LoRA-XS, arXiv:2405.17604), begun at
  the projection of the LoRA in the Fisher norm, sizes shared out over the layers by one budget.
- Fisher core: the same between eigenvectors of the base's own Fisher factors, measured once on
  texts of ``--other``.
- LoRAQuant (arXiv:2510.26690): the LoRA's own singular directions, the first of a layer in two or
  three bits, the next in one, trained through the rounding. What the budget does not reach is left
  out; the split is chosen in the Fisher norm.
- Rank one: a LoRA of rank one in four bits on as few layers, trained through the rounding as well:
  the first singular direction of those that do most in the Fisher norm.
- VeRA, Uni-LoRA, TinyLoRA, VB-LoRA, FourierFT: PEFT's, from PEFT's own start, at the largest size
  that fits.

Bytes of all but LSR and SVD: `CONFIG`, half a byte a number and two bytes a scale, a scale a
tensor; an index of which layers are used is not charged, nor are the shared eigenvectors.
LoRAQuant's numbers take their own bits. VB-LoRA pays for its bank, and for each piece of a matrix
two indices into it and half a byte. Rates are relative to the size of a tensor's numbers, as
`distil` has them; PEFT's other methods begin at nothing or at noise, so theirs are in plain
numbers. Rows are added as they come; a stopped run goes on.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft import (
    FourierFTConfig,
    PeftConfig,
    TinyLoraConfig,
    UniLoraConfig,
    VBLoRAConfig,
    VeraConfig,
    get_peft_model,
)
from torch import Tensor, nn

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp import compress
from lsrdecomp.calibration.base_model import Base, load_base
from lsrdecomp.calibration.batches import prompt_batches
from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.calibration.dataset import PromptExample, read_examples
from lsrdecomp.calibration.distil_trainer import kl_loss
from lsrdecomp.calibration.divergence import Reference, ratio_standard_error, without_delta
from lsrdecomp.calibration.forward import forward, forward_repeatable
from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.checkpoints.files import bytes_to_open
from lsrdecomp.checkpoints.statistics import METADATA, read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression import CompressionPlan
from lsrdecomp.compression.layers import layer_pair
from lsrdecomp.compression.settings import Search
from lsrdecomp.fidelity.distil import distil
from lsrdecomp.formats.allocation import PartOptions, within_cost
from lsrdecomp.formats.number_formats import nearest_codes
from lsrdecomp.training.record import commit

CONFIG = 300
"""Bytes of an adapter_config.json that a rival cannot do without, as small as LSR's."""
BATCH = 4
WARM = 3
"""Steps over which the rate rises."""
SIDES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20)
"""Sides of a core."""
PIECE = 96
"""Numbers of one vector of VB-LoRA's bank: a divisor of the sides of the layers."""
SPLITS = [(high, low) for high in range(3) for low in range(5 - high)]
"""Directions of a layer that LoRAQuant writes in more bits and in one."""
RANK_ONE = [(0, 0), (1, 0)]
COMPRESSED = {"LSR": Search(), "SVD": Search(orders=())}
Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Rival:
    """A model that answers with a rival's ΔW, the numbers that are trained, and their bytes."""

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    bits: Sequence[int] = ()  # of each parameter's numbers; four if none are named
    relative: bool = (
        True  # a step is in units of the root mean square of a tensor's numbers, as `distil` has it
    )

    @property
    def numbers(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    @property
    def bytes(self) -> int:
        return CONFIG + sum(tensor_bytes(p.numel(), bits) for p, bits in self._with_bits())

    def round(self) -> None:
        """So many bits a number, one scale a tensor, chosen for the least squared error."""
        with torch.no_grad():
            for parameter, bits in self._with_bits():
                parameter.copy_(rounded(parameter, bits))

    def _with_bits(self) -> Iterator[tuple[nn.Parameter, int]]:
        return zip(self.parameters, self.bits or [4] * len(self.parameters), strict=True)


@dataclass(frozen=True)
class VectorBank(Rival):
    """VB-LoRA as its authors store it: the bank, and of each piece's logits the two largest."""

    @property
    def bank(self) -> nn.Parameter:
        (bank,) = (p for p in self.parameters if p.ndim == 2)
        return bank

    @property
    def logits(self) -> list[nn.Parameter]:
        return [p for p in self.parameters if p.ndim == 3]  # (r, pieces, vectors of the bank)

    @property
    def pieces(self) -> int:
        return sum(logits[..., 0].numel() for logits in self.logits)

    @property
    def numbers(self) -> int:
        return self.bank.numel() + self.pieces

    @property
    def bytes(self) -> int:
        index = (len(self.bank) - 1).bit_length()
        return (
            CONFIG
            + tensor_bytes(self.bank.numel(), 4)
            + math.ceil(self.pieces * (2 * index + 4) / 8)
        )

    def round(self) -> None:
        """The bank in four bits; of each two weights the larger, one of sixteen between ½ and 1."""
        with torch.no_grad():
            self.bank.copy_(rounded(self.bank, 4))
            for logits in self.logits:
                largest, where = logits.topk(2, dim=-1)
                weight = largest.softmax(-1)[..., :1]
                weight = 0.5 + ((weight - 0.5) * 32).floor().clamp(0, 15) / 32 + 1 / 64
                logits.fill_(-1e4).scatter_(
                    -1, where, torch.cat([weight, 1 - weight], dim=-1).log()
                )


def tensor_bytes(numbers: int, bits: int) -> int:
    return math.ceil(numbers * bits / 8) + 2


def rounded(values: Tensor, bits: int) -> Tensor:
    """Of the same shape, one scale for all; a bit is a sign."""
    if bits == 1:
        return values.sign() * values.abs().mean()
    codes, step = nearest_codes(values.detach().double().numpy().reshape(1, -1), bits)
    return torch.from_numpy(codes * step[:, None]).reshape(values.shape).to(values)


@dataclass(frozen=True)
class Subject:
    """The LoRA, its logits on teacher batches and held-out texts, and its layers' statistics."""

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
    texts = read_examples(arguments.data)[: arguments.texts]
    held = read_examples(arguments.held)[: arguments.examples]
    others = [
        example for file in arguments.other for example in read_examples(file)[: arguments.samples]
    ]
    statistics, other = arguments.work / "statistics", arguments.work / "statistics-other"
    for out, examples, of_base in (
        (statistics, texts[: arguments.samples], False),
        (other, others, True),
    ):
        if not examples or (out / METADATA).exists():
            continue
        answers = "all" if of_base else "completion"
        batches = list(prompt_batches(source, examples, size=8, seed=0, answers=answers))
        with without_delta(source.model) if of_base else nullcontext():
            calibrate(source, batches, out=out, seed=0, samples=len(examples))
    reference = Reference(source, prompt_batches(source, held, size=8, seed=0))
    lessons = []
    for batch in prompt_batches(source, texts, size=BATCH, seed=0):
        answers, recall = forward_repeatable(source, batch)
        lessons.append((batch, recall, int(answers.counts.sum())))
    plain = copy.copy(source.model).unload()
    plain.requires_grad_(False)
    return Subject(
        arguments.base,
        arguments.lora,
        arguments.work,
        source,
        plain,
        lessons,
        texts,
        reference,
        statistics,
        other,
    )


# What is compared.


def compressed(
    subject: Subject, method: str, budget: int, seed: int, steps: int, rate: float
) -> dict[str, Any]:
    """LSR or SVD as a user makes it: compress, then distil on the lessons."""
    made = calibrated_only(subject, method, budget)
    out = subject.work / f"{method}-{budget}-{seed}-{rate}"
    done = distil(
        made,
        base=subject.base,
        data=subject.texts,
        teacher=subject.lora,
        out=out,
        steps=steps,
        batch=BATCH,
        seed=seed,
        rate=rate,
        calibrated=subject.statistics,
        force=True,
    )
    before = subject.reference.compare(load_base(subject.base, made)).kept
    facts = {"bytes": bytes_to_open(done.directory / WEIGHTS), "before": before}
    return {**facts, **judged(subject.reference, load_base(subject.base, done.directory))}


def calibrated_only(subject: Subject, method: str, budget: int) -> Path:
    """Return the directory of LSR or SVD as `compress` writes it, made at the first call."""
    made = subject.work / f"{method}-{budget}"
    if not made.exists():
        plan = CompressionPlan(bytes=budget, storage="auto")
        statistics = read_statistics(subject.statistics)
        compress(
            open_checkpoint(subject.lora), plan, statistics=statistics, search=COMPRESSED[method]
        ).save(made)
    return made


def cores(
    subject: Subject, directions: Mapping[str, tuple[Doubles, Doubles]], budget: int
) -> Rival:
    """Build ΔW = U θ Vᵀ in each layer, θ projected in the Fisher norm, under one budget."""
    checkpoint = open_checkpoint(subject.lora)
    statistics, options, projections = read_statistics(subject.statistics), [], []
    names = {layer.name: layer for layer in checkpoint.layers}
    for name in subject.modules:
        pair, (u, v) = layer_pair(checkpoint, names[name]), directions[name]
        weights = statistics[name]
        left, right = (
            np.asarray(side.root(np.eye(side.size))) for side in (weights.output, weights.input)
        )
        wanted = left @ (np.asarray(pair.left, float) @ np.asarray(pair.right, float)) @ right.T
        (q, r), (p, s) = np.linalg.qr(left @ u), np.linalg.qr(right @ v)
        inside = q.T @ wanted @ p
        projections.append((inside, r, s))
        total = float((wanted**2).sum())
        shapes = [(k, n) for k in SIDES for n in SIDES]
        losses = [max(0.0, total - float((inside[:k, :n] ** 2).sum())) for k, n in shapes]
        options.append(PartOptions.of([0.0, *(k * n / 2 + 2 for k, n in shapes)], [total, *losses]))
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
    return Rival(model, parameters)


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
    norms = {name: statistics[name] for name in subject.modules}
    return {name: (whitened(norm.output), whitened(norm.input)) for name, norm in norms.items()}


def own_directions(
    subject: Subject, budget: int, splits: Sequence[tuple[int, int]], bits_of_first: Sequence[int]
) -> Rival:
    """Quantize U √Σ and √Σ Vᵀ: first directions in the bits that lose least, the next in one."""
    tried = (_split(subject, budget - CONFIG, splits, high) for high in bits_of_first)
    _, layers = min(tried, key=lambda split: split[0])
    model, parameters, bits = copy.deepcopy(subject.plain), [], []
    for name, widths, *sides in layers:
        columns, rows = (
            [
                nn.Parameter(torch.tensor(vector, dtype=torch.float32))
                for vector in side[: len(widths)]
            ]
            for side in sides
        )
        parameters += columns + rows
        bits += widths * 2
        model.get_submodule(name).register_forward_hook(add_rounded(columns, rows, widths))
    return Rival(model, parameters, bits)


def _split(
    subject: Subject, budget: int, splits: Sequence[tuple[int, int]], high: int
) -> tuple[float, list[tuple[str, list[int], Doubles, Doubles]]]:
    """Return the loss in the Fisher norm, and the bits, columns and rows of the layers in use."""
    checkpoint, statistics = open_checkpoint(subject.lora), read_statistics(subject.statistics)
    options, layers = [], []
    for layer in checkpoint.layers:
        pair, weights = layer_pair(checkpoint, layer), statistics[layer.name]
        (q, r), (p, s) = (
            np.linalg.qr(np.asarray(pair.left, float)),
            np.linalg.qr(np.asarray(pair.right, float).T),
        )
        u, values, vh = np.linalg.svd(r @ s.T)
        sides = [(vectors * np.sqrt(values)).T for vectors in (q @ u, p @ vh.T)]
        coded = {
            bits: [
                np.array([rounded(torch.tensor(v), bits).numpy() for v in side]) for side in sides
            ]
            for bits in (1, high)
        }
        roots = (weights.output.root, weights.input.root)

        def product(parts: Sequence[Doubles], roots: Any = roots) -> Doubles:
            left, right = (root(part.T) for root, part in zip(roots, parts, strict=True))
            return np.asarray(left @ right.T)

        wanted = product(sides)
        costs, losses = [], []
        for first, then in splits:
            end = first + then
            parts = [
                np.concatenate([dear[:first], cheap[first:end]])
                for dear, cheap in zip(coded[high], coded[1], strict=True)
            ]
            losses.append(float(np.square(wanted - product(parts)).sum()))
            costs.append(
                sum(
                    first * tensor_bytes(side.shape[1], high)
                    + then * tensor_bytes(side.shape[1], 1)
                    for side in sides
                )
            )
        options.append(PartOptions.of(costs, losses))
        layers.append((layer.name, sides))
    choices = within_cost(options, budget)
    used = []
    for (name, sides), choice in zip(layers, choices, strict=True):
        first, then = splits[choice]
        if first + then:
            used.append((name, [high] * first + [1] * then, *sides))
    return sum(
        float(each.losses[choice]) for each, choice in zip(options, choices, strict=True)
    ), used


def add_rounded(
    columns: Sequence[Tensor], rows: Sequence[Tensor], widths: Sequence[int]
) -> Callable[..., Tensor]:
    # The gradient passes the rounding as if it were not there.
    def coded(
        vectors: Sequence[Tensor],
    ) -> Tensor:
        return torch.stack(
            [v + (rounded(v, bits) - v).detach() for v, bits in zip(vectors, widths, strict=True)]
        )

    return lambda module, inputs, output: output + inputs[0] @ coded(rows).T @ coded(columns)


def from_peft(subject: Subject, method: str, budget: int, seed: int) -> Rival:
    """Run PEFT's own method at the largest size that fits, on the layers that matter most."""
    names = by_energy(subject)
    layers = len(names)
    config, make = PEFT[method]
    while layers:

        def rival(size: int, used: int = layers) -> Rival:
            torch.manual_seed(seed)
            model = get_peft_model(copy.deepcopy(subject.plain), config(size, names[:used]))
            return make(model.eval(), [p for p in model.parameters() if p.requires_grad])

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
        pair, weights = layer_pair(checkpoint, layer), statistics[layer.name]
        left, right = (
            weights.output.root(np.asarray(pair.left, float)),
            weights.input.root(np.asarray(pair.right, float).T),
        )
        energy[layer.name] = float(np.linalg.norm(left @ right.T))
    return sorted(energy, key=lambda name: -energy[name])


FROM_NOTHING = partial(Rival, relative=False)
PEFT: dict[str, tuple[Callable[[int, list[str]], PeftConfig], Callable[..., Rival]]] = {
    "VeRA": (
        lambda size, names: VeraConfig(r=size, target_modules=names, save_projection=False),
        FROM_NOTHING,
    ),
    "Uni-LoRA": (
        lambda size, names: UniLoraConfig(r=4, theta_d_length=size, target_modules=names),
        FROM_NOTHING,
    ),
    "TinyLoRA": (
        lambda size, names: TinyLoraConfig(r=8, u=size, target_modules=names),
        FROM_NOTHING,
    ),
    "FourierFT": (
        lambda size, names: FourierFTConfig(n_frequency=size, target_modules=names),
        FROM_NOTHING,
    ),
    "VB-LoRA": (
        lambda size, names: VBLoRAConfig(
            r=1, num_vectors=size + 1, vector_length=PIECE, topk=2, target_modules=names
        ),
        VectorBank,
    ),
}


# Training and judging.


def learn(subject: Subject, rival: Rival, seed: int, steps: int, rate: float) -> dict[str, Any]:
    """Train on the LoRA's answers, round, and judge."""
    student = replace(subject.source, model=rival.model)
    order = random.Random(seed).sample(range(len(subject.lessons)), len(subject.lessons))
    scales = [
        float(p.detach().square().mean().sqrt()) if rival.relative else 1.0
        for p in rival.parameters
    ]
    before = subject.reference.compare(student).kept
    optimizer = torch.optim.AdamW(
        [
            {"params": [p], "scale": scale}
            for p, scale in zip(rival.parameters, scales, strict=True)
        ],
        weight_decay=0.0,
    )
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * group["scale"] * min(1.0, (step + 1) / WARM) * (1.0 - step / steps)
        batch, recall, answers = subject.lessons[order[step % len(order)]]
        loss = kl_loss(recall(), forward(student, batch).logits, student.head) / answers
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    trained = subject.reference.compare(student).kept
    rival.round()
    facts = {"bytes": rival.bytes, "numbers": rival.numbers, "before": before, "trained": trained}
    return {**facts, **judged(subject.reference, student)}


def judged(reference: Reference, written: Base) -> dict[str, Any]:
    """Return the share kept, and the nats lost on each held-out example, by which forms compare."""
    lost, agreeing = reference.compare_examples(written)
    return {
        "kept": 1.0 - float(lost.sum() / reference.effects.sum()),
        "error": ratio_standard_error(lost, reference.effects),
        "agreement": float(agreeing.sum() / reference.counts.sum()),
        "lost": [round(each, 3) for each in lost.tolist()],
    }


def row(
    subject: Subject, method: str, budget: int, seed: int, steps: int, rate: float
) -> dict[str, Any]:
    if method in COMPRESSED:
        return compressed(subject, method, budget, seed, steps, rate)
    if method == "XS":
        rival = cores(subject, singular_vectors(subject), budget)
    elif method == "Fisher core":
        rival = cores(subject, eigenvectors(subject), budget)
    elif method == "LoRAQuant":
        rival = own_directions(subject, budget, SPLITS, (2, 3))
    elif method == "Rank one":
        rival = own_directions(subject, budget, RANK_ONE, (4,))
    else:
        rival = from_peft(subject, method, budget, seed)
    return learn(subject, rival, seed, steps, rate)


METHODS = (*COMPRESSED, "XS", "Fisher core", "LoRAQuant", "Rank one", *PEFT)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", default="smollm2")
    parser.add_argument("--task", default="E2E")
    parser.add_argument("--lora", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="texts of the task to learn from")
    parser.add_argument("--held", type=Path, required=True, help="texts of the task to judge on")
    parser.add_argument(
        "--other",
        type=Path,
        nargs="+",
        required=True,
        help="texts of no task, for the base's own norm",
    )
    parser.add_argument("--bytes", type=int, nargs="+", default=[3000, 1000])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.03, 0.1, 0.3, 1.0])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--texts", type=int, default=240)
    parser.add_argument(
        "--samples", type=int, default=64, help="texts of each kind to measure a norm on"
    )
    parser.add_argument("--examples", type=int, default=64, help="held-out texts")
    parser.add_argument("--work", type=Path, default=Path("rivals-work"))
    parser.add_argument("--out", type=Path, default=RESULTS / "rivals.json")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {"rows": []} | records.load(arguments.out)
    opened = subject(arguments)
    record.setdefault("effects", {})[arguments.task] = [
        round(each, 3) for each in opened.reference.effects.tolist()
    ]
    runs = itertools.product(arguments.seeds, arguments.bytes, arguments.methods, arguments.rates)
    for seed, budget, method, rate in runs:
        key = {
            "task": arguments.task,
            "base": arguments.base,
            "method": method,
            "budget": budget,
            "seed": seed,
        }
        key |= {"steps": arguments.steps, "rate": rate}
        if any(key.items() <= each.items() for each in record["rows"]):
            continue
        begin = time.process_time()
        facts = row(opened, method, budget, seed, arguments.steps, rate)
        facts |= {"effect": opened.reference.effect, "examples": opened.reference.examples}
        spent = round(time.process_time() - begin, 1)
        record["rows"].append({**key, **facts, "cpu_seconds": spent, "commit": commit()})
        print(record["rows"][-1], flush=True)
        packages = ("torch", "transformers", "peft")
        records.save(arguments.out, record, *packages, seed=arguments.seeds)


if __name__ == "__main__":
    main()
