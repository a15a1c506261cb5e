"""How far one walks to read a compression: files and functions in the order they are entered.

``python benchmarks/lab/reading/walk.py [--each] [--json FILE]`` compresses the adapter of
``lsrdecomp demo`` 48 times, saves it, and prints a line for each file in the order of the walk;
with ``--each`` the functions too.

A function counts once, where it is first entered; comprehensions, and what runs while modules are
imported, do not. A file is opened again when a function in it is entered for the first time after
those of other files: that is how often a reader who follows the calls turns back to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import as_file, files
from inspect import CO_OPTIMIZED
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any

from lsrdecomp import compress

ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Opened:
    """A file of the walk."""

    file: str
    opened: int = 0  # times that it is opened for something not yet read
    calls: int = 0
    functions: list[str] = field(default_factory=list)


def walk(work: Callable[[], Any], root: Path) -> list[Opened]:
    """The files below a directory that some work enters, in that order; of this thread."""
    first: dict[CodeType, int] = {}
    importing = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal importing
        code = frame.f_code
        if code.co_name == "_find_and_load":
            importing += (event == "call") - (event == "return")
        if (
            event == "call"
            and not importing
            and code.co_filename.startswith(inside)
            and code.co_flags & CO_OPTIMIZED
        ):
            first[code] = first.get(code, 0) + 1

    inside = f"{root}/"
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    walked: dict[str, Opened] = {}
    before = ""
    for code, calls in first.items():
        name = code.co_filename.removeprefix(inside)
        here = walked.setdefault(name, Opened(name))
        here.calls += calls
        # A comprehension or a lambda is read with what it stands in.
        if code.co_name.startswith("<"):
            continue
        here.opened += name != before
        before = name
        here.functions.append(code.co_qualname)
    return list(walked.values())


def compress_demo() -> None:
    """Do the work of the walk: compress as `lsrdecomp demo` does, and write a directory."""
    with (
        as_file(files("lsrdecomp.cli") / "demo_adapter") as adapter,
        TemporaryDirectory() as folder,
    ):
        compress(adapter, ratio=48).save(Path(folder) / "lsr")


def summary(walked: Sequence[Opened]) -> dict[str, int]:
    """Files, functions, and how often the file that is opened most is opened again."""
    return {
        "files": len(walked),
        "functions": sum(len(each.functions) for each in walked),
        "returns": max((each.opened - 1 for each in walked), default=0),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the walk of the demo, or write it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", action="store_true", help="also print the functions of each file")
    parser.add_argument("--json", type=Path, help="file to write")
    options = parser.parse_args(arguments)
    walked = walk(compress_demo, ROOT / "lsrdecomp")
    print(f"{'':3} {'file':44}{'functions':>10}{'calls':>10}{'opened':>8}")
    for number, each in enumerate(walked, 1):
        print(f"{number:3} {each.file:44}{len(each.functions):10}{each.calls:10}{each.opened:8}")
        if options.each:
            print(*(f"      {name}" for name in each.functions), sep="\n")
    numbers = summary(walked)
    print(f"{numbers['files']} files, {numbers['functions']} functions; ", end="")
    print(f"a file is opened again at most {numbers['returns']} times")
    if options.json is not None:
        facts = {**numbers, "walk": [asdict(each) for each in walked]}
        options.json.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
