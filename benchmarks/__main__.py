"""Make the records anew: ``python -m benchmarks [JOB …] [--only cheap] [--input NAME=PATH …]``.

Jobs run one after another, cheapest first, each as the command that its file documents. A job whose
records are all of this minor release is done and is left out, so the same command goes on after a
kill; ``--again`` runs it all the same. ``--plan`` shows the jobs, their minutes and what they lack.
"""

from __future__ import annotations

import argparse
import os
import shlex
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from benchmarks import record

INPUTS = {
    "adapters": "a directory of published LoRA adapters, a directory or file each",
    "e2e": "devset.csv of the E2E challenge",
    "encoder": "directory of all-MiniLM-L6-v2",
    "loras": "directory with a LoRA of SmolLM2 for each of them",
    "published": "a directory with glue/ and e2e/, each as its authors published it",
    "reviews": "SST-2's train.tsv",
    "shapes": "what benchmarks.images.shapes wrote",
    "tasks": "what benchmarks.language.tasks wrote",
    "work": "a directory where runs are kept",
}
"""What jobs take that is not in the repository, by name."""


@dataclass(frozen=True)
class Job:
    """A command that writes records.

    Parameters
    ----------
    name : str
    records : tuple of str
        Names of the files in ``results/``, without ``.json``.
    command : str
        Arguments of ``python -m``; ``{name}`` stands for an input.
    minutes : float
        CPU minutes on one core, measured by the record that is there, or by hand.
    packages : tuple of str
        Packages that the command needs beside those of the tests.
    threads : int, optional
        BLAS threads; None leaves the environment as it is.
    """

    name: str
    records: tuple[str, ...]
    command: str
    minutes: float
    packages: tuple[str, ...] = ()
    threads: int | None = 1

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs that the command takes."""
        return [name for _, name, _, _ in string.Formatter().parse(self.command) if name]

    def missing(self, given: dict[str, Path]) -> list[str]:
        """Return what has to be given or installed before the job can run."""
        inputs = [f"--input {name}=PATH ({INPUTS[name]})" for name in self.inputs]
        known = [f"--input {name}=" for name in given]
        lacking = [text for text in inputs if not text.startswith(tuple(known))]
        return lacking + [f"package {name}" for name in self.packages if find_spec(name) is None]

    def is_done(self) -> bool:
        """Return whether all its records are of this minor release."""
        now = record.version_of_clone()
        for name in self.records:
            held = record.load(record.RESULTS / f"{name}.json")
            if record.problems(held) or record.is_outdated(record.measured_with(held)[0], now):
                return False
        return True

    def argv(self, given: dict[str, Path]) -> list[str]:
        """Return the command with its inputs in place."""
        words = shlex.split(self.command)
        return [sys.executable, "-m", *(word.format(**given) for word in words)]


def two_factors(size: int, minutes: float, threads: int = 1, part: str = "") -> Job:
    """Return the job of dense matrices of one size."""
    prefix = "" if size == 4096 else f"{size}-"
    arguments = f"--size {size} --threads {threads}{part and f' --only {part}'}"
    return Job(
        f"solvers {size}, {threads} thread{'s' * (threads > 1)}",
        (f"solvers-{prefix}threads{threads}",),
        f"benchmarks.solvers.two_factors {arguments}",
        minutes,
        packages=("sklearn",),
        threads=None,
    )


JOBS = (
    Job("exact sums", ("exact_sums",), "benchmarks.solvers.exact_sums", 1),
    Job("best peer", ("best_peer",), "benchmarks.solvers.best_peer", 12, ("sklearn", "torch")),
    Job("crossings", ("crossings",), "benchmarks.solvers.crossings", 3),
    Job("error curve", ("error_curve",), "benchmarks.solvers.error_curve", 1),
    Job("known answers", ("known_answers",), "benchmarks.solvers.known_answers", 2),
    Job("stated gap", ("stated_gap",), "benchmarks.solvers.stated_gap", 2),
    Job(
        "found",
        ("found-in-the-wild",),
        "benchmarks.testing.found",
        2,
        (
            *("cola", "jax", "linear_operator", "pennylane", "pylops", "pyttb"),
            *("quimb", "qutip", "sparse", "tensorly"),
        ),
    ),
    Job("resize", ("resize",), "benchmarks.cost.resize", 2),
    Job("operators", ("operators-galerkin",), "benchmarks.operators.solve galerkin --again", 1),
    Job("peers", ("operators-peers",), "benchmarks.operators.peers", 4, ("pyamg",)),
    Job(
        "three factors",
        ("three_factor_ends",),
        "benchmarks.solvers.three_factor_ends",
        1,
        ("pyttb",),
    ),
    Job("single entries", ("single_entries",), "benchmarks.solvers.single_entries", 2),
    Job("cp", ("cp",), "benchmarks.solvers.cp --limit 30", 10, ("pyttb",)),
    Job("route", ("route_cost",), "benchmarks.cost.route", 4),
    Job("memory", ("memory",), "benchmarks.cost.memory", 5),
    Job(
        "layers",
        ("layers-cpu",),
        "benchmarks.adapters.layers --seconds 1 --rounds 9",
        15,
        ("peft",),
    ),
    Job("fleet", ("fleet",), "benchmarks.cost.fleet", 5, threads=None),
    Job(
        "threads",
        ("threads",),
        "benchmarks.cost.threads --repeats 3",
        8,
        ("threadpoolctl",),
        threads=None,
    ),
    two_factors(1024, 1, part="dense"),
    two_factors(2048, 1, part="dense"),
    two_factors(4096, 9),
    Job("million", ("operators-million",), "benchmarks.operators.solve million --again", 1),
    Job(
        "default rates",
        ("default_rates",),
        "benchmarks.adapters.default_rates {published} --work {work} "
        "--tasks embedded STS-B extraction --arms lsr",
        15,
        ("peft", "gguf"),
    ),
    Job("experts", ("experts",), "benchmarks.compression.experts --data {e2e}", 10, ("peft",)),
    Job("integer factors", ("integer_factors",), "benchmarks.compression.integer_factors", 1),
    Job(
        "budgets",
        ("compression",),
        "benchmarks.compression.budgets {adapters}/anirudh-gpt2 "
        "{adapters}/ms-roberta-base-mnli/roberta_base_lora_mnli.bin {adapters}/difad-grid/r16_a16 "
        "{adapters}/merkulov-llama32-1b-r8 {adapters}/difad-grid/r8_a32 "
        "{adapters}/tashu-distilbert-imdb --layers 5 --again",
        3,
        ("peft", "lycoris", "bitsandbytes"),
    ),
    Job(
        "Frobenius",
        ("compression_frobenius",),
        "benchmarks.compression.frobenius {adapters}/anirudh-gpt2 {adapters}/aowei-gemma3-270m "
        "{adapters}/difad-grid/r16_a16 {adapters}/difad-grid/r4_a64 {adapters}/difad-grid/r8_a32 "
        "{adapters}/merkulov-llama32-1b-r8 "
        "{adapters}/ms-roberta-base-mnli/roberta_base_lora_mnli.bin "
        "{adapters}/sd-mvclab-ntust-course {adapters}/tashu-distilbert-imdb "
        "--parts rank --layers 1000 --long 200 "
        "--out benchmarks/results/compression_frobenius.json",
        1,
    ),
    Job(
        "byte budgets",
        ("byte_budgets",),
        "benchmarks.compression.byte_budgets {adapters}/anirudh-gpt2 {adapters}/aowei-gemma3-270m "
        "{adapters}/merkulov-llama32-1b-r8 "
        "{adapters}/ms-roberta-base-mnli/roberta_base_lora_mnli.bin "
        "{adapters}/sd-mvclab-ntust-course/pytorch_lora_weights.safetensors "
        "{adapters}/smollm2-e2e-r8 {adapters}/smollm2-sst2-r8 {adapters}/tashu-distilbert-imdb "
        "{adapters}/difad-grid/r4_a64 {adapters}/difad-grid/r8_a32 {adapters}/difad-grid/r16_a16",
        4,
    ),
    Job(
        "compare embedded",
        ("compare-embedded",),
        "benchmarks.lab compare benchmarks/experiments/embedded.toml --quiet "
        "--out {work}/comparison --json benchmarks/results/compare-embedded.json --force",
        2,
    ),
    Job(
        "recover embedded",
        ("recover-embedded",),
        "benchmarks.lab recover benchmarks/experiments/embedded.toml --quiet "
        "--out {work}/recovery --json benchmarks/results/recover-embedded.json --force",
        5,
    ),
    Job(
        "compare SST-2",
        ("compare-sst2",),
        "benchmarks.lab compare benchmarks/experiments/sst2-minilm.toml --quiet "
        "--data {published}/glue --base {encoder} --out {work}/sst2 "
        "--json benchmarks/results/compare-sst2.json --force",
        12,
    ),
    Job(
        "recover SST-2",
        ("recover-minilm",),
        "benchmarks.lab recover benchmarks/experiments/recover-minilm.toml --quiet "
        "--data {published}/glue --base {encoder} --out {work}/recover-minilm "
        "--json benchmarks/results/recover-minilm.json --force",
        10,
    ),
    Job(
        "embeddings",
        ("embeddings",),
        "benchmarks.behaviour.embeddings {reviews} --out {work}/embeddings",
        6,
        ("peft",),
    ),
    Job("digits", ("digits",), "benchmarks.images.digits --out {work}/digits", 1.5, ("peft",)),
    Job("tones", ("tones",), "benchmarks.speech.tones --out {work}/tones", 2, ("peft",)),
    Job(
        "images",
        ("images",),
        "benchmarks.images.by_function {shapes}",
        12,
        ("diffusers", "peft"),
    ),
    Job("kept", ("promise",), "benchmarks.behaviour.kept --data {published}/glue", 2, ("peft",)),
    Job(
        "written texts",
        ("written_texts",),
        "benchmarks.behaviour.written {tasks} --loras {loras} --work {work}/written",
        60,
        ("peft", "gguf"),
    ),
    Job(
        "answer curve",
        ("answer_curve",),
        "benchmarks.language.answer_curve --lora {loras}/e2e --data {tasks}/e2e/train.jsonl "
        "--held {tasks}/e2e/held.jsonl --work {work}/answer-curve",
        40,
        ("peft",),
    ),
    Job("calibration", ("calibration",), "benchmarks.cost.calibration", 7, ("peft",)),
    Job(
        "one command",
        ("one_command",),
        "benchmarks.cost.one_command {tasks} --loras {loras} --reviews {reviews} --draws 0 1 2",
        90,
        ("peft",),
    ),
)
"""Commands that make records. Those of the laboratory and of long suites stand in README.md."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the jobs that are asked for; return the exit status."""
    options = read_arguments(arguments)
    given = dict(options.input)
    jobs = sorted(chosen(options), key=lambda job: job.minutes)
    runnable = [job for job in jobs if not job.missing(given)]
    for line in plan(jobs, given, again=options.again):
        print(line, file=sys.stderr)
    if options.plan:
        return 0
    left = [job for job in runnable if options.again or not job.is_done()]
    failed: list[str] = []
    for place, job in enumerate(left):
        minutes = sum(each.minutes for each in left[place:])
        about = f"{place + 1} of {len(left)}: {job.name}; about {minutes:.0f} CPU minutes left"
        print(about, file=sys.stderr, flush=True)
        began = time.monotonic()
        # The environment is read when libraries are imported, so each job is a process.
        threads = {} if job.threads is None else thread_variables(job.threads)
        done = subprocess.run(job.argv(given), env=os.environ | threads, check=False)
        took = (time.monotonic() - began) / 60.0
        if done.returncode:
            failed.append(job.name)
        state = f"exit status {done.returncode}" if done.returncode else "done"
        print(f"   {job.name}: {state} in {took:.1f} minutes", file=sys.stderr, flush=True)
    if failed:
        print(f"{len(failed)} of {len(left)} failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def thread_variables(threads: int) -> dict[str, str]:
    """Return the variables that give every BLAS library so many threads."""
    return dict.fromkeys(record.THREAD_VARIABLES, str(threads))


def chosen(options: argparse.Namespace) -> list[Job]:
    """Return the jobs that are named, or all; with ``--only cheap`` those of a few minutes."""
    names = {job.name: job for job in JOBS}
    unknown = [name for name in options.jobs if name not in names]
    if unknown:
        raise SystemExit(f"no job {unknown[0]!r}; there are {', '.join(names)}")
    jobs = [names[name] for name in options.jobs] or list(JOBS)
    limit = options.cheap_minutes if options.only == "cheap" else float("inf")
    return [job for job in jobs if job.minutes <= limit]


def plan(jobs: Sequence[Job], given: dict[str, Path], *, again: bool) -> list[str]:
    """Return a line for each job: its minutes, and whether it is done, runs, or lacks something."""
    lines = []
    for job in jobs:
        missing = job.missing(given)
        state = "runs"
        if missing:
            state = f"lacks {'; '.join(missing)}"
        elif job.is_done() and not again:
            state = "done"
        lines.append(f"{job.name:22} {job.minutes:5.0f} min  {state}")
    return lines


def read_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="by name; all if none is named")
    parser.add_argument("--only", choices=["cheap"], help="those of at most --cheap-minutes")
    parser.add_argument("--cheap-minutes", type=float, default=5.0)
    parser.add_argument(
        "--input", type=named_path, action="append", default=[], metavar="NAME=PATH"
    )
    parser.add_argument("--again", action="store_true", help="also what is of this release")
    parser.add_argument("--plan", action="store_true", help="show the jobs and run nothing")
    return parser.parse_args(arguments)


def named_path(text: str) -> tuple[str, Path]:
    """Read ``NAME=PATH``, a known name and a path that exists."""
    name, _, place = text.partition("=")
    if name not in INPUTS:
        raise argparse.ArgumentTypeError(f"no input {name!r}; there are {', '.join(INPUTS)}")
    if not Path(place).exists():
        raise argparse.ArgumentTypeError(f"{place!r} does not exist")
    return name, Path(place)


if __name__ == "__main__":
    sys.exit(main())
