"""What a GPU is asked: LoRA in bfloat16 on a real task, compressed, fine-tuned as LSR; against LoRA, in one JSON.

    python -m benchmarks.gpu.script --data glue --task SST-2            # roberta-base; under 8 minutes on a GPU
    python -m benchmarks.gpu.script --small --out small.json            # the embedded task on a CPU, under a minute

1. A LoRA and its head are trained in bfloat16.
2. Fisher statistics are measured and the LoRA is compressed by ``--ratio`` times to LSR.
3. The LSR adapter is trained on for ``--recover`` steps with the head fixed, on the kernels that suit the device; so is
   the LoRA, for a comparison at equal steps, and an LSR adapter of the default shape from scratch beside them.

With ``--llm MODEL`` a causal language model instead: its LoRA compressed to the sizes of PEFT's table of LoRA
conversion, and the points of accuracy lost; `benchmarks/gpu/language.py` says how.

Every arm gets its step time (median, batches included), peak memory and scores on dev. Finished runs in ``--work`` are
not done again.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.gpu import language
from lsrdecomp.calibration.base_model import load_base
from lsrdecomp.calibration.calibrate import calibrate
from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.checkpoints.statistics import read_statistics
from lsrdecomp.checkpoints.writing import WEIGHTS
from lsrdecomp.compression.compress import compress
from lsrdecomp.compression.plan import CompressionPlan
from lsrdecomp.training.dataset import read_dataset
from lsrdecomp.training.finetune import evaluate, finetune
from lsrdecomp.training.record import ADAPTER, RECORD, Record, Scores, commit, read_record, versions
from lsrdecomp.training.settings import FinetuneSettings

SMALL: dict[str, Any] = {
    "model": "embedded",
    "task": "embedded",
    "steps": 60,
    "recover": 20,
    "samples": 64,
    "ratio": 6.0,
    "rate": 1e-2,
    "lsr_rate": 1e-2,
    "precision": "bfloat16",
    "device": "cpu",
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run every arm and write the JSON."""
    options = read_arguments(arguments)
    begin = time.perf_counter()
    work = language.measure if options.llm else measure
    with TemporaryDirectory() as scratch:
        figures = work(options, options.work or Path(scratch))
    figures |= {"seconds": round(time.perf_counter() - begin, 1), "versions": versions(), "commit": commit()}
    options.out.write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n")
    if options.llm:
        print("\n".join(language.table(figures)))
    else:
        show(figures)
    return figures


def read_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Options; ``--small`` changes what they are by default."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="roberta-base")
    parser.add_argument("--task", default="SST-2")
    parser.add_argument("--data", help="directory of the tasks' files; with --llm, JSON lines")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--recover", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=1e-3, help="of the LoRA")
    parser.add_argument("--lsr-rate", type=float, default=5e-3)
    parser.add_argument("--ratio", type=float, default=24.0)
    parser.add_argument("--samples", type=int, default=512, help="examples for the statistics")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--work", type=Path, help="keep the runs here, and go on from those that are")
    parser.add_argument("--out", type=Path, default=Path("gpu_script.json"))
    language.add_options(parser)
    if parser.parse_args(arguments).small:
        parser.set_defaults(**SMALL)
    options = parser.parse_args(arguments)
    missing = language.check(options) if options.llm else None
    if missing is not None:
        parser.error(missing)
    return options


def measure(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """The figures of all arms."""
    common = FinetuneSettings(
        options.model,
        options.task,
        options.data,
        learning_rate=options.rate,
        batch=options.batch,
        steps=options.steps,
        seed=options.seed,
        precision=options.precision,
        device=options.device,
        log_every=0,
    )
    lora = run(common.replace(measure_start=True), work / "lora")
    compression = compressed(common, options, work)
    further = common.replace(steps=options.recover, train_head=False, warmup=0.1)
    lsr = further.replace(method="lsr", init=str(work / "compressed"), learning_rate=options.lsr_rate)
    arms = {
        "LoRA": arm(lora),
        "compressed to LSR": compression | scored(evaluate(lsr)),
        "LSR, trained on": arm(run(lsr, work / "lsr")),
        "LoRA, trained on": arm(run(further.replace(init=str(work / "lora" / ADAPTER)), work / "lora-on")),
        "LSR from scratch": arm(run(common.replace(method="lsr", learning_rate=options.lsr_rate), work / "scratch")),
    }
    cuda = lora.device == "cuda"
    return {
        "model": options.model,
        "task": options.task,
        "precision": options.precision,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "batch": options.batch,
        "steps": options.steps,
        "recovery_steps": options.recover,
        "ratio": options.ratio,
        "majority": dict(lora.baseline),
        "start": None if lora.start is None else scored(lora.start),
        "arms": arms,
    }


def run(settings: FinetuneSettings, out: Path) -> Record:
    """A finished run, or a new one."""
    if (out / RECORD).exists():
        return read_record(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    return finetune(settings, out)


def compressed(common: FinetuneSettings, options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Calibrate on the training set, compress the LoRA, and say what came out."""
    adapter, dataset = work / "lora" / ADAPTER, read_dataset(common)
    device = "cuda" if options.device != "cpu" and torch.cuda.is_available() else "cpu"
    begin = time.perf_counter()
    if not (work / "statistics" / "statistics.json").exists():
        base = load_base(dataset.base, adapter, device=device)
        rounds = dataset.questions(base, size=options.batch, seed=options.seed)
        calibrate(
            base.model,
            rounds,
            modules=base.modules,
            out=work / "statistics",
            seed=options.seed,
            samples=min(options.samples, len(dataset.train)),
            head=base.head,
        )
    middle = time.perf_counter()
    result = compress(
        open_checkpoint(adapter), CompressionPlan(ratio=options.ratio), statistics=read_statistics(work / "statistics")
    )
    if not (work / "compressed").exists():
        result.save(work / "compressed")
    return {
        "parameters": result.totals.parameters,
        "file_bytes": (work / "compressed" / WEIGHTS).stat().st_size,
        "estimated_kl": result.totals.kl,
        "calibration_seconds": round(middle - begin, 2),
        "compression_seconds": round(time.perf_counter() - middle, 2),
    }


def arm(record: Record) -> dict[str, Any]:
    """The figures of a run."""
    return {
        "parameters": record.adapter_parameters,
        "file_bytes": record.file_bytes,
        "steps": record.steps,
        "step_seconds": round(record.step_seconds, 5),
        "peak_bytes": record.peak_bytes,
        **scored(record.dev),
    }


def scored(scores: Scores) -> dict[str, Any]:
    """Scores, flat."""
    return {**scores.metrics, "loss": scores.loss}


def show(figures: dict[str, Any]) -> None:
    """One line per arm."""
    metric = next(iter(figures["majority"]))
    print(f"{figures['model']}, {figures['task']}, {figures['precision']}, {figures['device']}, {figures['seconds']} s")
    for name, values in figures["arms"].items():
        step = f"{1e3 * values['step_seconds']:.1f} ms a step" if "step_seconds" in values else ""
        loss = "lost" if values["loss"] is None else f"{values['loss']:.4f}"
        print(f"{name:20} {values['parameters']:>9,} parameters  {metric} {values[metric]:.4f}  loss {loss}  {step}")


if __name__ == "__main__":
    main()
