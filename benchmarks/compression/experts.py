"""A LoRA on experts of a mixture: each expert alone, or factors that all of a layer share?

A Qwen3-MoE of two layers and eight experts is trained on the prose of our own pages, byte by byte,
and then a LoRA of rank 8 on all its experts (PEFT's ``target_parameters``) on the sentences of the
E2E challenge. The LoRA is made smaller in five ways, at equal numbers of parameters over all
experts:

- each expert by truncated SVD, one threshold over all (`lsrdecomp.lora.compress.truncate`);
- each expert by LSR or truncated SVD, whichever is nearer (`lsrdecomp.compress`);
- the same in the norm of statistics of each expert, of 256 rows of what the LoRA was trained on;
- shared terms: the stack of a layer's experts as Σ_k c_k(e) · A1_k ⊗ A2_k, at the best of some
  splits;
- shared bases: Uᵀ ΔW_e V with U and V of all experts, a core for each (HOSVD, then ten sweeps).

    python -m benchmarks.compression.experts --data devset.csv [--out FILE]

The model is small and its LoRA is trained for minutes; no published LoRA on experts was to be had.
Writes ``results/experts.json``.
"""

from __future__ import annotations

import argparse
import copy
import csv
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import lsrdecomp as lsr
from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.lora.base.base_model import Base, adapted_modules
from lsrdecomp.lora.base.calibrate import calibrate
from lsrdecomp.lora.base.expert_layers import attach_adapter
from lsrdecomp.lora.base.heads import Head
from lsrdecomp.lora.compress import truncate
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.statistics import read_statistics
from lsrdecomp.lora.files.tensors import Array
from lsrdecomp.lora.search.layers import layer_product

ROOT = Path(__file__).parents[2]
SEED, EXPERTS, RANK, LENGTH, BATCH = 0, 8, 8, 96, 16
RATIOS = (2, 4, 8)
STEPS = {"base": 400, "lora": 300}
RATES = {"base": 3e-3, "lora": 3e-3}
TERMS = (2, 4, 7, 11, 16, 24, 36)
BASES = (1, 2, 3, 4, 6, 8, 11, 15, 20, 27, 36)
GIVEN_TERMS_SOLVER = lsr.ALS(initializations=1, max_sweeps=200, seed=SEED)
Deltas = dict[str, Array]
"""ΔW of every expert of a parameter, (experts, m, n), by the parameter's name."""


def lines(data: Path) -> tuple[list[str], list[str]]:
    """Prose of the pages, and sentences of E2E."""
    pages = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").rglob("*.md"))]
    with data.open(encoding="utf-8", newline="") as file:
        return pages, [row["ref"] for row in csv.DictReader(file)]


def batches(texts: list[str], seed: int) -> Iterator[torch.Tensor]:
    """Rows of bytes from anywhere in the texts."""
    stream = torch.tensor(list("\n".join(texts).encode()), dtype=torch.long)
    draw = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(stream) - LENGTH, (BATCH,), generator=draw)
        yield torch.stack([stream[start : start + LENGTH] for start in starts.tolist()])


def train(model: Any, texts: list[str], stage: str) -> None:
    """AdamW with a rate that falls to zero."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATES[stage])
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS[stage])
    for rows, _ in zip(batches(texts, SEED), range(STEPS[stage]), strict=False):
        model(input_ids=rows, labels=rows).loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        falling.step()


def stacks(adapter: Any, made: Callable[[str], Array | None]) -> Deltas:
    """ΔW of all experts by what each layer became; zero for one that was left out."""
    deltas: Deltas = {}
    for layer in adapter.layers:
        name, _, expert = layer.name.rpartition(".")
        stack = deltas.setdefault(name, np.zeros((EXPERTS, *layer.shape)))
        delta = made(layer.name)
        if delta is not None:
            stack[int(expert)] = delta
    return deltas


def written(adapter: Any, path: Path, parameters: int) -> tuple[Deltas, int, dict[str, int]]:
    """Return ΔW of a written adapter, its parameters, those stored, and the bytes that open it."""
    small = lsr.open_checkpoint(path)
    formed = {
        layer.name: np.linalg.multi_dot(layer_product(layer).to_lora()) for layer in small.layers
    }
    files = {"stored": small.adapter_parameters, "bytes": bytes_to_open(small.weights)}
    return stacks(adapter, formed.get), parameters, files


Curve = list[tuple[int, float, Array]]
"""Parameters, squared error and what is left, of one stack."""


def shared_terms(stack: Array) -> Curve:
    """Σ_k c_k(e) · A1_k ⊗ A2_k: three factors, of which the first is a number for each expert."""
    count, m, n = stack.shape
    curve: Curve = [(0, float(np.sum(stack**2)), np.zeros_like(stack))]
    for m1, n1 in ((m // 8, n // 8), (m // 8, 8), (8, n // 8)):
        shape = lsr.KroneckerShape(((count, 1), (m1, n1), (m // m1, n // n1)))
        for terms in TERMS:
            sizes = terms * (count + m1 * n1 + (m // m1) * (n // n1))
            solved = lsr.decompose(
                stack.reshape(-1, n), shape, rank=terms, solver=GIVEN_TERMS_SOLVER, throw=False
            )
            near = np.asarray(solved.to_matrix()).reshape(stack.shape)
            curve.append((sizes, float(np.sum((stack - near) ** 2)), near))
    return curve


def shared_bases(stack: Array) -> Curve:
    """U G_e Vᵀ, U and V orthonormal and of all experts."""
    count, m, n = stack.shape
    curve: Curve = [(0, float(np.sum(stack**2)), np.zeros_like(stack))]
    for p in (size for size in BASES if size <= m):
        for q in (size for size in BASES if size <= n and p / 2 <= size <= 2 * p):
            right = np.linalg.svd(stack.reshape(-1, n), full_matrices=False)[2][:q].T
            for _ in range(10):
                left = np.linalg.svd(np.hstack(list(stack @ right)), full_matrices=False)[0][:, :p]
                right = np.linalg.svd(np.vstack(list(left.T @ stack)), full_matrices=False)[2][:q].T
            near = left @ (left.T @ stack @ right) @ right.T
            curve.append((m * p + n * q + count * p * q, float(np.sum((stack - near) ** 2)), near))
    return curve


def allocated(curves: Mapping[str, Curve], most: float) -> tuple[Deltas, int, dict[str, int]]:
    """One price of a parameter over all stacks: the lowest at which all they take fits."""
    taken: dict[str, tuple[int, float, Array]] = {}
    for price in np.geomspace(1e3, 1e-9, 400):
        chosen = {
            name: min(curve, key=lambda point: point[1] + price * point[0])
            for name, curve in curves.items()
        }
        if sum(point[0] for point in chosen.values()) <= most:
            taken = chosen
    return (
        {name: point[2] for name, point in taken.items()},
        sum(point[0] for point in taken.values()),
        {},
    )


def answers(base: Any, deltas: Deltas, rows: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the next byte with ΔW added to the experts."""
    parameters = dict(base.named_parameters())
    for sign in (1.0, -1.0):
        for name, stack in deltas.items():
            parameters[name].data += sign * torch.from_numpy(stack).float()
        if sign > 0:
            with torch.no_grad():
                said = base(input_ids=rows).logits.log_softmax(-1)
    return said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="devset.csv of the E2E challenge")
    parser.add_argument(
        "--out", type=Path, default=RESULTS / "experts.json", help="where to write the record"
    )
    options = parser.parse_args()
    pages, sentences = lines(options.data)
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 48,
        "head_dim": 16,
    }
    sizes |= {
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "mlp_only_layers": [],
    }
    config = Qwen3MoeConfig(
        **sizes, num_experts=EXPERTS, num_experts_per_tok=2, decoder_sparse_step=1
    )
    base = Qwen3MoeForCausalLM(config)
    train(base, pages, "base")
    held = sentences[-256:]
    rows = torch.cat([batch for batch, _ in zip(batches(held, SEED + 1), range(8), strict=False)])
    with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
        base.save_pretrained(f"{folder}/base")
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = get_peft_model(
            base,
            LoraConfig(
                r=RANK, lora_alpha=2 * RANK, target_modules=[], target_parameters=parameters
            ),
        )
        train(model, sentences[:-256], "lora")
        model.save_pretrained(f"{folder}/lora")
        base = Qwen3MoeForCausalLM.from_pretrained(f"{folder}/base").eval()
        measure(base, Path(folder), sentences[:-256])
        record = compared(base, Path(folder), rows)
    records.save(options.out, record, "torch", "transformers", "peft", seed=SEED)


def measure(base: Any, folder: Path, texts: list[str]) -> None:
    """Statistics of the experts with the LoRA on them."""
    model = attach_adapter(copy.deepcopy(base), folder / "lora").eval()
    adapted = Base("", model, None, Head.causal_lm, adapted_modules(model))
    rows = ({"input_ids": rows} for rows in batches(texts, SEED + 2))
    calibrate(adapted, rows, out=folder / "statistics", seed=SEED, samples=256)


def compared(base: Any, folder: Path, rows: torch.Tensor) -> dict[str, Any]:
    """Errors and shares of every way at every ratio."""
    adapter = lsr.open_checkpoint(folder / "lora")
    pairs = {layer.name: (layer.scale, *layer.load()) for layer in adapter.layers}
    whole = stacks(
        adapter, lambda name: pairs[name][0] * pairs[name][1].astype(np.float64) @ pairs[name][2]
    )
    size = np.sqrt(sum(np.sum(stack**2) for stack in whole.values()))
    with_lora, without = answers(base, whole, rows), answers(base, {}, rows)
    targets = rows[:, 1:, None]
    record: dict[str, Any] = {
        "experts": EXPERTS,
        "parameters": adapter.adapter_parameters,
        "bytes": bytes_to_open(adapter.weights),
        "nats_per_byte_base": -float(without[:, :-1].gather(2, targets).mean()),
        "nats_per_byte_lora": -float(with_lora[:, :-1].gather(2, targets).mean()),
        "overlap_of_experts": overlap(whole),
        "rows": [],
    }
    effect = divergence(with_lora, without)
    curves = {
        "shared terms": {name: shared_terms(stack) for name, stack in whole.items()},
        "shared bases": {name: shared_bases(stack) for name, stack in whole.items()},
    }
    for ratio in RATIOS:
        most = adapter.adapter_parameters / ratio
        cut, small = truncate(adapter, ratio=ratio), lsr.compress(adapter, ratio=ratio)
        near = lsr.compress(adapter, ratio=ratio, statistics=read_statistics(folder / "statistics"))
        made: dict[str, tuple[Deltas, int, dict[str, int]]] = {
            "each, truncated SVD": written(
                adapter, cut.save(folder / f"svd{ratio}"), cut.parameters
            ),
            "each, LSR": written(
                adapter, small.save(folder / f"lsr{ratio}"), small.totals.parameters
            ),
            "each, calibrated": written(
                adapter, near.save(folder / f"near{ratio}"), near.totals.parameters
            ),
        }
        made |= {way: allocated(curve, most) for way, curve in curves.items()}
        for way, (deltas, used, files) in made.items():
            lost = np.sqrt(sum(np.sum((whole[name] - deltas[name]) ** 2) for name in whole))
            kept = 1.0 - divergence(with_lora, answers(base, deltas, rows)) / effect
            figures = {"relative_error": round(float(lost / size), 4), "kept": round(kept, 4)}
            record["rows"].append(
                {"ratio": ratio, "way": way, "parameters": used, **figures, **files}
            )
            print(record["rows"][-1], flush=True)
    return record


def divergence(first: torch.Tensor, second: torch.Tensor) -> float:
    """KL(first ‖ second), nats a byte."""
    return float((first.exp() * (first - second)).sum(-1).mean())


def overlap(whole: Deltas) -> float:
    """Mean |cosine| of ΔW of two experts of a stack: what there is to share."""
    cosines = []
    for stack in whole.values():
        flat = stack.reshape(EXPERTS, -1)
        flat = flat / np.linalg.norm(flat, axis=1, keepdims=True)
        cosines.append(np.abs((flat @ flat.T)[np.triu_indices(EXPERTS, 1)]).mean())
    return round(float(np.mean(cosines)), 4)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
