"""A fleet of small adapters: throughput with one and two workers, and three kills without loss.

python -m benchmarks.cost.fleet [--adapters 1000] [--work DIR]
python -m benchmarks.cost.fleet --adapters 0 --timed 0 --shared ADAPTERS --statistics STATISTICS
[--ratio 48]

Each worker has one linear-algebra thread. Throughput is counted from the first outcome to the last,
workers being warm, as the best of several rounds that take turns; the same jobs in this process are
the reference. Then the command is killed three times on its way, with its workers, and what it left
is compared byte by byte with the undisturbed run. With ``--shared`` the adapters below a directory,
all of one base, are searched each on its own and then with the shapes of the first: CPU seconds in
one process, and errors in the Fisher norm of the statistics, which lie at the same places.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.lora.files import write_lora
from lsrdecomp.lora.fleet.fleet_run import Job, run_fleet, run_job, summary
from lsrdecomp.lora.fleet.manifest import MANIFEST, Outcome
from lsrdecomp.lora.fleet.runners import joblib_runner
from lsrdecomp.lora.search.plan import CompressionPlan

PLAN = CompressionPlan(separation_rank=4, storage="float16")
LAYERS, SIZE, RANK = 4, 128, 8


def make_fleet(folder: Path, count: int) -> None:
    """Gaussian adapters of four layers 128 × 128, r = 8."""
    rng = np.random.default_rng(0)
    for i in range(count):
        layers = [
            (
                f"layers.{k}.q_proj",
                rng.standard_normal((SIZE, RANK), dtype=np.float32),
                rng.standard_normal((RANK, SIZE), dtype=np.float32),
            )
            for k in range(LAYERS)
        ]
        write_lora(
            folder / f"{i % 10}" / f"adapter{i}",
            layers=layers,
            config={"base_model_name_or_path": "base"},
        )


def throughput(folder: Path, out: Path, runner: Any) -> float:
    """Adapters a second, from the first outcome to the last."""
    seen: list[float] = []
    run_fleet(
        folder,
        out,
        PLAN,
        runner=runner,
        on_step=lambda step: step.done and seen.append(time.perf_counter()),
    )
    return (len(seen) - 1) / (seen[-1] - seen[0])


def digests(out: Path) -> dict[str, str]:
    """SHA-256 of every file but the manifest."""
    files = [path for path in out.rglob("*") if path.is_file() and path.name != MANIFEST]
    return {
        str(path.relative_to(out)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def lines(out: Path) -> list[dict[str, Any]]:
    """Outcomes in the manifest that are whole."""
    path = out / MANIFEST
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[1:-1]]


def killed(folder: Path, out: Path, count: int) -> dict[str, Any]:
    """Three kills at a quarter, a half and three quarters, then to the end."""
    plan = out.parent / "plan.toml"
    plan.write_text('[compress]\nseparation_rank = 4\nstorage = "float16"\n')
    command = [
        sys.executable,
        "-m",
        "lsrdecomp.cli.main",
        "fleet",
        str(folder),
        str(out),
        "--plan",
        str(plan),
    ]
    recorded = []
    for share in (0.25, 0.5, 0.75):
        process = subprocess.Popen(
            [*command, "--workers", "2"], start_new_session=True, stdout=subprocess.DEVNULL
        )
        while len(lines(out)) < share * count and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        recorded.append(len(lines(out)))
    subprocess.run([*command, "--workers", "2"], check=True, stdout=subprocess.DEVNULL)
    names = [line["name"] for line in lines(out)]
    return {"recorded_at_kills": recorded, "outcomes": len(names), "names": len(set(names))}


def throughputs(work: Path, adapters: int, rounds: int) -> dict[str, Any]:
    """Rates of each runner, the best of some rounds."""
    make_fleet(work / "timed", adapters)
    make_fleet(work / "few", 8)
    runners: dict[str, Callable[[], Any]] = {
        "in this process": lambda: lambda jobs, plan: (run_job(job, plan) for job in jobs),
        "1 worker": lambda: joblib_runner(1),
        "2 workers": lambda: joblib_runner(2),
    }
    found: dict[str, list[float]] = {label: [] for label in runners}
    for turn in range(rounds):
        for label, runner in runners.items():
            shutil.rmtree(work / f"out {label}", ignore_errors=True)
            throughput(work / "few", work / f"warm {turn} {label}", runner())
            found[label].append(throughput(work / "timed", work / f"out {label}", runner()))
        print({label: round(values[-1], 2) for label, values in found.items()}, flush=True)
    rates = {label: max(values) for label, values in found.items()}
    same = [digests(work / f"out {label}") for label in runners]
    return {
        "timed": adapters,
        "adapters_per_second": rates,
        "rounds": found,
        "two_workers_over_one": rates["2 workers"] / rates["1 worker"],
        "same_bytes_with_every_runner": same[0] == same[1] == same[2],
    }


def resumed(work: Path, adapters: int) -> dict[str, Any]:
    """Three kills against an undisturbed run."""
    make_fleet(work / "in", adapters)
    calm = run_fleet(work / "in", work / "calm", PLAN, runner=joblib_runner(2))
    kills = killed(work / "in", work / "killed", adapters)
    wanted, found = digests(work / "calm"), digests(work / "killed")
    return {
        "adapters": adapters,
        "done_undisturbed": summary(calm)["done"],
        "kills": kills,
        "files": len(wanted),
        "killed_run_has_the_bytes_of_the_calm_one": wanted == found,
    }


def shared(folder: Path, statistics: Path, ratio: float, work: Path) -> dict[str, Any]:
    """Time and error of every adapter, searched alone and with the shapes of the first."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for how in ("alone", "shared"):

        def timed(jobs: Sequence[Job], plan: CompressionPlan, into: str = how) -> Iterator[Outcome]:
            for job in jobs:
                begin = time.process_time()
                outcome = run_job(job, plan)
                found.setdefault(job.name, {})[into] = (
                    time.process_time() - begin,
                    outcome.relative_error,
                )
                print(job.name, into, found[job.name][into], flush=True)
                yield outcome

        plan = CompressionPlan(ratio=ratio)
        run_fleet(
            folder, work / how, plan, runner=timed, statistics=statistics, share=how == "shared"
        )
    first = min(found)
    rows = [
        {
            "adapter": name,
            "cpu_seconds": {how: round(one[how][0], 2) for how in one},
            "error": {h: one[h][1] for h in one},
        }
        for name, one in sorted(found.items())
    ]
    others = [one for name, one in found.items() if name != first]
    return {
        "ratio": ratio,
        "searched_for_all": first,
        "rows": rows,
        "time_alone_over_shared": median(one["alone"][0] / one["shared"][0] for one in others),
        "error_shared_over_alone": median(one["shared"][1] / one["alone"][1] for one in others),
        "worst_error_shared_over_alone": max(one["shared"][1] / one["alone"][1] for one in others),
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--adapters", type=int, default=1000, help="adapters of the run that is killed; 0: none"
    )
    parser.add_argument(
        "--timed", type=int, default=80, help="adapters of a round of throughput; 0: none"
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument(
        "--shared", type=Path, help="directory of adapters of one base; needs --statistics"
    )
    parser.add_argument("--statistics", type=Path, help="their statistics at the same places")
    parser.add_argument("--ratio", type=float, default=48.0)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, default=RESULTS / "fleet.json")
    options = parser.parse_args()
    record = records.load(options.out) | {
        "cores": os.cpu_count(),
        "layers_of_each": [LAYERS, SIZE, SIZE, RANK],
        "plan": PLAN.to_json(),
    }
    with tempfile.TemporaryDirectory(dir=options.work) as name:
        if options.timed:
            record["throughput"] = throughputs(Path(name), options.timed, options.rounds)
        if options.adapters:
            record["resumed"] = resumed(Path(name), options.adapters)
        if options.shared:
            record["shared"] = shared(options.shared, options.statistics, options.ratio, Path(name))
    records.save(options.out, record, seed=None)
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
