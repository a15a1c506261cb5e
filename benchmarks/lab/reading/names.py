"""How often a name says nothing of what it holds: words of no content among 1,000 names.

``python benchmarks/lab/reading/names.py [--each] [PATH …]`` prints a line for each room, and with
``--each`` the lines where they stand.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

EMPTY = frozenset({"found", "place", "told", "held", "given", "kept", "asked", "one", "known"})
"""Names that say how a value was come by, and not what it is."""

ROOT = Path(__file__).resolve().parents[3]


def bindings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and name of every value that a file binds.

    Parameters but self and cls, variables, fields and attributes.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.arg(arg="self" | "cls"):
                pass
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.arg(arg=name)
                | ast.Attribute(attr=name, ctx=ast.Store())
            ):
                yield node.lineno, name


def is_empty(name: str) -> bool:
    """Whether a name is one of `EMPTY`, a leading underscore aside."""
    return name.lstrip("_") in EMPTY


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the count of each room of the package, or of the given files and directories."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, default=[ROOT / "lsrdecomp"])
    parser.add_argument(
        "--each", action="store_true", help="also print every such name with its file and line"
    )
    options = parser.parse_args(arguments)
    rooms: dict[str, list[int]] = {}
    for top in options.paths:
        for path in sorted(top.rglob("*.py")) if top.is_dir() else [top]:
            inside = path.relative_to(top).parts if top.is_dir() else (path.name,)
            count = rooms.setdefault(inside[0], [0, 0])
            for line, name in bindings(path.read_text(encoding="utf-8")):
                count[0] += 1
                count[1] += is_empty(name)
                if options.each and is_empty(name):
                    print(f"{path}:{line}: {name}")
    for room, (names, empty) in [
        *rooms.items(),
        ("together", [sum(c) for c in zip(*rooms.values(), strict=True)]),
    ]:
        print(
            f"{room:24}{names:7} names{empty:6} of no content{1000 * empty / max(names, 1):8.1f} "
            "per 1,000"
        )


if __name__ == "__main__":
    main()
