"""What `calibrate` costs on SmolLM2: peak memory, CPU time against a plain pass, bytes written.

python -m benchmarks.cost.calibration [--examples 256] [--tokens 64] [--batch 16] [--out FILE]

Examples are drawn tokens, seeded; a LoRA of r = 8 on q, k, v and o, random, is active; the base is
in bfloat16. The peer is what a step of training costs without its optimizer: for each batch one
forward pass, the loss of every token, and one backward pass to the numbers of the LoRA, with
activations kept. Each measurement is a process of its own; its peak is what the kernel counts from
the moment the model and all examples are there (Linux), without the base.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.lora.base.base_files import find_base
from lsrdecomp.lora.base.base_model import Base, adapted_modules
from lsrdecomp.lora.base.calibrate import calibrate
from lsrdecomp.lora.base.heads import Head

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]
JOBS = {
    "plain pass": None,  # the peer
    "calibrate": {},
    "calibrate, activations kept": {"checkpointing": False},
    "calibrate, sums in 100 MB": {"max_memory": 100_000_000},
}
PEER = "plain pass"
GOALS = {"peak_bytes": 1.5e9, "cpu_ratio": 3.0, "statistics_bytes": 62e6}


def adapted(seed: int) -> Any:
    """SmolLM2 in bfloat16 with a random LoRA."""
    torch.manual_seed(seed)
    base = AutoModelForCausalLM.from_pretrained(find_base("smollm2"), dtype=torch.bfloat16)
    config = LoraConfig(
        r=8, lora_alpha=16, target_modules=TARGETS, init_lora_weights=False, task_type="CAUSAL_LM"
    )
    return get_peft_model(base, config).eval()


def drawn(options: argparse.Namespace, vocabulary: int) -> list[dict[str, Tensor]]:
    """Batches of random tokens."""
    generator = torch.Generator().manual_seed(options.seed)
    tokens = torch.randint(3, vocabulary, (options.examples, options.tokens), generator=generator)
    return [
        {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
        for rows in tokens.split(options.batch)
    ]


def status(field: str) -> int:
    """Bytes of a field of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def plain_pass(model: nn.Module, batches: list[dict[str, Tensor]]) -> None:
    """Forward and backward to the LoRA's numbers; gradients are thrown away."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    for batch in batches:
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
        model.zero_grad()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One job in this process."""
    model = adapted(options.seed)
    batches = drawn(options, model.config.vocab_size)
    model(**{name: value[:1] for name, value in batches[0].items()})  # libraries set themselves up
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    held, begun, clock = status("VmRSS"), time.process_time(), time.perf_counter()
    wanted = JOBS[options.job]
    found: dict[str, Any] = {}
    if wanted is None:
        plain_pass(model, batches)
    else:
        with tempfile.TemporaryDirectory() as folder:
            calibrate(
                Base("", model, None, Head.causal_lm, adapted_modules(model)),
                batches,
                out=folder,
                seed=options.seed,
                samples=options.examples,
                **wanted,
            )
            found["statistics_bytes"] = sum(file.stat().st_size for file in Path(folder).iterdir())
    seconds = {
        "cpu_seconds": time.process_time() - begun,
        "wall_seconds": time.perf_counter() - clock,
    }
    found["threads"] = torch.get_num_threads()
    return {"base_bytes": held, "peak_bytes": status("VmHWM") - held, **found, **seconds}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "calibration.json")
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), default=[PEER, "calibrate"])
    parser.add_argument("--job", choices=list(JOBS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job is not None:
        print(json.dumps(measure(options)))
        return
    record: dict[str, Any] = {
        name: getattr(options, name) for name in ("examples", "tokens", "batch")
    }
    record |= {
        "model": "smollm2",
        "dtype": "bfloat16",
        "layers": "q, k, v, o",
        "goals": GOALS,
        "jobs": {},
    }
    for job in options.jobs:
        command = [sys.executable, "-m", "benchmarks.cost.calibration", *sys.argv[1:], "--job", job]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        found = record["jobs"][job] = json.loads(output.splitlines()[-1])
        if PEER in record["jobs"]:
            found["cpu_ratio"] = found["cpu_seconds"] / record["jobs"][PEER]["cpu_seconds"]
        print(job, json.dumps(found), flush=True)
        records.save(options.out, record, "torch", "transformers", "peft", seed=options.seed)


if __name__ == "__main__":
    main()
