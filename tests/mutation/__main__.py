"""``python tests/mutation``: plant faults drawn by a seed, and print which the tests notice."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from mutation import child  # noqa: E402
from mutation.faults import PACKAGE, Fault, draw, package_faults  # noqa: E402
from mutation.reach import Reach, copy_project, digest, files_of_tests  # noqa: E402
from mutation.table import Row, equivalent, fault_line, rows_by_room, table  # noqa: E402
from mutation.trial import Effort, Outcome, Trial  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    folder = options.out / digest(sorted((ROOT / PACKAGE).rglob("*.py")))
    drawn = draw(package_faults(ROOT, options.rooms), options.count, options.seed)
    if not drawn:
        print(f"no room is called {' or '.join(options.rooms)}", file=sys.stderr)
        return 2
    results = _Results(folder / "faults.jsonl", digest(sorted((ROOT / "tests").rglob("*.py"))))
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "project"
        copy_project(ROOT, copy)
        _try(drawn, copy, results, options)
    _say("")
    tried = [fault for fault in drawn if results.is_decided(fault)]
    if len(tried) < len(drawn):
        print(f"{len(tried)} of {len(drawn)} faults were tried in {options.max_hours:g} hours\n")
    if not tried:
        return 2
    unseen = equivalent(tried, ROOT)
    print(table(tried, results.outcomes, unseen))
    print(f"\nSeed {options.seed}; each outcome is a line of {results.path}")
    *rooms, total = rows_by_room(tried, results.outcomes, unseen)
    if options.record is not None:
        lines = [fault_line(f, results.outcomes) for f in tried if _is_left(f, results, unseen)]
        _write_record(options, [*rooms, total], lines)
    poor = [row.room for row in rooms if row.percent < options.room_at_least]
    if poor:
        print(f"below {options.room_at_least:g} %: {', '.join(poor)}")
    return 1 if poor or total.percent < options.at_least else 0


def _is_left(fault: Fault, results: _Results, unseen: Collection[str]) -> bool:
    return results.outcomes[fault.name].status != "killed" and fault.name not in unseen


def _write_record(options: argparse.Namespace, rows: Sequence[Row], left: Sequence[str]) -> None:
    """Write the table as a record of benchmarks."""
    sys.path.insert(0, str(ROOT))
    from benchmarks import record

    table_rows = [asdict(row) | {"percent": round(row.percent, 1)} for row in rows]
    result = {"count": options.count, "rows": table_rows, "not noticed": list(left)}
    record.save(options.record, result, "pytest", "hypothesis", seed=options.seed)


def _try(drawn: list[Fault], copy: Path, results: _Results, options: argparse.Namespace) -> None:
    """Try the faults that have no outcome yet: each with the tests of its room, then with all.

    None is begun after the hours that the options give.
    """
    end = time.monotonic() + 3600.0 * options.max_hours
    context, limits = child.server(), child.Limits()
    files = files_of_tests(ROOT, options.tests)
    reach = Reach(
        options.out / "reach",
        copy,
        files,
        context,
        limits,
        tell=lambda file: _say(f"which lines do its tests come by: {file}"),
    )
    trial = Trial(context, copy, reach, limits, Effort(options.max_seconds))
    for number, fault in enumerate(drawn, 1):
        if fault.name not in results and time.monotonic() < end:
            _say(f"{number} of {len(drawn)}: {fault}")
            results.add(fault, trial.of_room(fault), is_last=False)
    missed = [f for f in drawn if f.name in results and not results.is_decided(f)]
    for number, fault in enumerate(missed, 1):
        if time.monotonic() >= end:
            break
        _say(f"{number} of {len(missed)} that tests of other rooms are asked about: {fault}")
        results.add(fault, trial.of_all(fault, results.outcomes[fault.name]))


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
        "--max-hours",
        type=float,
        default=math.inf,
        help="begin no further fault after so many hours; those tried are in the table",
    )
    parser.add_argument(
        "--at-least", type=float, default=0.0, help="exit with 1 below this percentage (0)"
    )
    parser.add_argument(
        "--room-at-least", type=float, default=0.0, help="or below this percentage of a room (0)"
    )
    parser.add_argument("--record", type=Path, help="write the table there too, as JSON")
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
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.tests = path, tests
        self.outcomes: dict[str, Outcome] = {}
        self._open: set[str] = set()
        for line in path.read_text().splitlines() if path.exists() else ():
            entry: dict[str, Any] = json.loads(line)
            outcome = Outcome(**entry["outcome"])
            if outcome.status == "killed" or entry["tests"] == tests:
                self._take(entry["name"], outcome, entry["is_last"])

    def __contains__(self, name: str) -> bool:
        return name in self.outcomes

    def is_decided(self, fault: Fault) -> bool:
        """Return whether a test noticed the fault, or all were asked."""
        return fault.name in self.outcomes and fault.name not in self._open

    def add(self, fault: Fault, outcome: Outcome, is_last: bool = True) -> None:
        """Note an outcome; ``is_last`` when no other tests will be asked."""
        is_last = is_last or outcome.status == "killed"
        self._take(fault.name, outcome, is_last)
        entry = {
            "name": fault.name,
            "fault": str(fault),
            "tests": self.tests,
            "is_last": is_last,
            "outcome": asdict(outcome),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")

    def _take(self, name: str, outcome: Outcome, is_last: bool) -> None:
        self.outcomes[name] = outcome
        self._open -= {name}
        if not is_last:
            self._open.add(name)


def _say(line: str) -> None:
    print(f"\r\033[K{line[:100]}" if sys.stderr.isatty() else line, end="", file=sys.stderr)
    if not sys.stderr.isatty():
        print(file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
