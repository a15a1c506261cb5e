"""``python tests/mutation``: plant faults drawn by a seed, and print which the tests notice."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutation import child  # noqa: E402
from mutation.faults import PACKAGE, Fault, draw, package_faults  # noqa: E402
from mutation.reach import Reach, copy_project, digest, files_of_tests  # noqa: E402
from mutation.table import table  # noqa: E402
from mutation.trial import Effort, Outcome, control, try_fault  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    folder = options.out / digest(sorted((ROOT / PACKAGE).rglob("*.py")))
    drawn = draw(package_faults(ROOT, options.rooms), options.count, options.seed)
    if not drawn:
        print(f"no room is called {' or '.join(options.rooms)}", file=sys.stderr)
        return 2
    context, limits, effort = child.server(), child.Limits(), Effort(options.max_seconds)
    reach = Reach(folder / "reach")
    results = _Results(folder / "faults.jsonl", digest(sorted((ROOT / "tests").rglob("*.py"))))
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "project"
        copy_project(ROOT, copy)
        files = files_of_tests(ROOT, options.tests)
        for number, file in enumerate(reach.measure(context, copy, files, limits), 1):
            _say(f"which lines do the tests come by: {number}: {file}")
        if reach.seconds:
            control(
                context, copy, sorted(reach.seconds, key=reach.seconds.__getitem__)[:20], limits
            )
        for number, fault in enumerate(drawn, 1):
            _say(f"{number} of {len(drawn)}: {fault}")
            if fault.name not in results:
                results.add(fault, try_fault(context, copy, fault, reach, limits, effort))
    _say("")
    print(table(drawn, results.outcomes))
    print(f"\nSeed {options.seed}; each outcome is a line of {results.path}")
    n_noticed = sum(results.outcomes[fault.name].status == "killed" for fault in drawn)
    return 0 if 100 * n_noticed >= options.at_least * len(drawn) else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python tests/mutation", description=__doc__)
    parser.add_argument("-n", "--count", type=int, default=50, help="faults (50)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draw (0)")
    parser.add_argument("--rooms", nargs="*", default=[], help="only these packages")
    parser.add_argument("--tests", nargs="*", default=[], help="only tests below these paths")
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=Effort().max_seconds,
        help="CPU seconds of tests that one fault is worth (120)",
    )
    parser.add_argument(
        "--at-least", type=float, default=0.0, help="exit with 1 below this percentage (0)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=ROOT / "build" / "mutants",
        help="folder of what was measured; a run that was stopped goes on there (build/mutants)",
    )
    return parser.parse_args(arguments)


class _Results:
    """Outcomes by the name of their fault, one line of JSON each, written as they come.

    What was not noticed is forgotten once the tests have changed.
    """

    def __init__(self, path: Path, tests: str) -> None:
        self.path, self.tests = path, tests
        self.outcomes: dict[str, Outcome] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            entry: dict[str, Any] = json.loads(line)
            outcome = Outcome(**entry["outcome"])
            if outcome.status == "killed" or entry["tests"] == tests:
                self.outcomes[entry["name"]] = outcome

    def __contains__(self, name: str) -> bool:
        return name in self.outcomes

    def add(self, fault: Fault, outcome: Outcome) -> None:
        self.outcomes[fault.name] = outcome
        entry = {
            "name": fault.name,
            "fault": str(fault),
            "tests": self.tests,
            "outcome": asdict(outcome),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


def _say(line: str) -> None:
    print(f"\r\033[K{line[:100]}" if sys.stderr.isatty() else line, end="", file=sys.stderr)
    if not sys.stderr.isatty():
        print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
