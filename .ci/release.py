"""Look over a release before a person publishes it: ``python .ci/release.py [WHEEL]``.

Each check yields sentences on what is wrong; without any the exit code is 0, and what a person must
do is printed. Nothing is set, tagged or uploaded here.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping  # noqa: TC003
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lsrdecomp"
STABILITY = ROOT / "docs" / "reference" / "stability.md"
DATA = {
    "lsrdecomp/cli/demo_adapter/README.md",
    "lsrdecomp/cli/demo_adapter/adapter_config.json",
    "lsrdecomp/cli/demo_adapter/adapter_model.safetensors",
    "lsrdecomp/cli/demo_kept.json",
    "lsrdecomp/cli/demo_statistics/statistics.json",
    "lsrdecomp/cli/demo_statistics/statistics.safetensors",
    "lsrdecomp/lora/base/sentences.txt",
    "lsrdecomp/lora/compress/cut.html.jinja",
    "lsrdecomp/lora/compress/report.css",
    "lsrdecomp/lora/compress/report.html.jinja",
    "lsrdecomp/lora/compress/report.js",
    "lsrdecomp/py.typed",
}
"""Files of the wheel that are no source: a change to them is a change here."""
WHEEL_BYTES = 2_500_000
"""The wheel is no larger; half of it are the demo's weights and statistics."""
TO_DO = """
Everything above is sound. What is left for a person:
1. make check test-pages test-cpus test-lowest test-newest, and make servers, on a quiet machine.
2. Sign the commit of the changelog, tag it vVERSION with a signed tag, and push both.
3. Upload the wheel and the source archive that were looked over here, and no others.
4. Set the next version, VERSION + .1.dev0, in pyproject.toml and CITATION.cff.
"""


def version_faults(project: Mapping[str, object], changelog: str, citation: str) -> Iterator[str]:
    """Yield where version, changelog and citation disagree."""
    version = str(project["version"])
    headings = re.findall(r"^## (\S+)(.*)$", changelog, re.MULTILINE)
    (newest, note), *earlier = headings
    if newest != version:
        yield f"pyproject.toml has version {version}, the changelog begins with {newest}"
    if "unreleased" in note:
        yield f"the changelog calls {newest} unreleased: give it its date"
    if earlier and _numbers(version) <= _numbers(earlier[0][0]):
        yield f"version {version} is not newer than {earlier[0][0]}, the one before"
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        yield f"{version} is no version of a release, such as 0.5.0"
    if f"\nversion: {version}\n" not in citation:
        yield f"CITATION.cff is of another version than {version}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def link_faults(project: Mapping[str, object]) -> Iterator[str]:
    """Yield which links a page of the package on an index would lack."""
    urls = project.get("urls")
    for name in ("Source", "Documentation", "Changelog", "Issues"):
        if not isinstance(urls, dict) or name not in urls:
            yield f"[project.urls] of pyproject.toml has no {name}"


def action_faults(workflows: Mapping[str, str]) -> Iterator[str]:
    """Yield actions that are named by a tag, which can be moved, and not by a commit."""
    for name, text in workflows.items():
        for action in re.findall(r"^\s*-?\s*uses:\s*(\S+)", text, re.MULTILINE):
            if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action):
                yield f"{name}: {action} is not pinned by the hash of a commit"


def wheel_faults(names: Mapping[str, int], size: int) -> Iterator[str]:
    """Yield what a wheel holds too much or too little; ``names`` with their sizes."""
    others = set()
    for name in names:
        is_source = name.startswith("lsrdecomp/") and name.endswith((".py", ".pyi"))
        if not is_source and ".dist-info/" not in name:
            others.add(name)
    for name in sorted(others - DATA):
        yield f"the wheel holds {name}, which is not on the list"
    for name in sorted(DATA - others):
        yield f"the wheel lacks {name}"
    for name, name_size in names.items():
        if name_size == 0 and not name.endswith(("py.typed", "/REQUESTED")):
            yield f"{name} is empty"
    if not any(name.endswith(".dist-info/licenses/LICENSE") for name in names):
        yield "the wheel has no LICENSE"
    if size > WHEEL_BYTES:
        yield f"the wheel has {size:,} bytes, more than {WHEEL_BYTES:,}"


def public_names() -> dict[str, set[str]]:
    """Return the names that each public room lists, by the room: of its stub, or ``__all__``."""
    rooms = {}
    for stub in sorted(PACKAGE.rglob("__init__.pyi")):
        room = ".".join(stub.parent.relative_to(ROOT).parts)
        names = set()
        for node in ast.parse(stub.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
        rooms[room] = names
    for file in (
        PACKAGE / "errors.py",
        PACKAGE / "lora" / "peft" / "__init__.py",
    ):
        parts = file.relative_to(ROOT).with_suffix("").parts
        room = ".".join(part for part in parts if part != "__init__")
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            is_list = isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
            if is_list and isinstance(node.value, ast.List):
                rooms[room] = set(ast.literal_eval(node.value))
    return rooms


def promised_names(page: str) -> dict[str, set[str]]:
    """Return the names in the tables of the page on stability, by their room."""
    rooms: dict[str, set[str]] = {}
    for room, names in re.findall(r"^\| `(lsrdecomp[\w.]*)` \| (.*) \|$", page, re.MULTILINE):
        rooms.setdefault(room, set()).update(re.findall(r"`(\w+)`", names))
    return rooms


def name_faults(public: Mapping[str, set[str]], promised: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield names that came or went without the page on stability."""
    for room in sorted(public.keys() | promised.keys()):
        there = public.get(room, set())
        listed = promised.get(room, set())
        for name in sorted(there - listed):
            yield f"{room}.{name} is public and not in stability.md: say whether it is stable"
        for name in sorted(listed - there):
            yield f"{room}.{name} is in stability.md and no longer public"


def faults(wheel: Path | None) -> Iterator[str]:
    """Yield everything that is wrong with the release in this directory."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    yield from version_faults(project, changelog, citation)
    yield from link_faults(project)
    yield from action_faults(
        {
            path.name: path.read_text(encoding="utf-8")
            for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
        }
    )
    yield from name_faults(public_names(), promised_names(STABILITY.read_text(encoding="utf-8")))
    if wheel is not None:
        with zipfile.ZipFile(wheel) as archive:
            names = {entry.filename: entry.file_size for entry in archive.infolist()}
        yield from wheel_faults(names, wheel.stat().st_size)


def main(arguments: list[str]) -> int:
    """Print every fault, or what is left to do."""
    found = list(faults(Path(arguments[0]) if arguments else None))
    for fault in found:
        sys.stdout.write(f"release: {fault}\n")
    if not found:
        sys.stdout.write(TO_DO)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
