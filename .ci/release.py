"""Look over a release before a person publishes it.

``python .ci/release.py build/release`` looks at a directory with the wheel, and with ``env``, an
environment that it was installed into; a list of what a plain install brings is written there
(``sbom.json``). Each check yields sentences on what is wrong, or what could not be checked; without
any the exit code is 0, and what a person must do is printed. ``--set VERSION`` writes a version
into pyproject.toml, CITATION.cff and the changelog first. Nothing is tagged or uploaded here.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Mapping  # noqa: TC003
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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
WHEEL_BYTES = 1_800_000
"""The wheel is no larger; two fifths of it are the demo's weights and statistics."""
NOT_CHECKED = "not checked: "
"""How a sentence begins on what nobody looked at; it is no pass."""
COPYLEFT = re.compile(r"\bA?GPL|GNU (Affero )?General Public")
"""Licences under which this package could not be given on as it is."""
TO_DO = """
Everything above is sound. What is left for a person:
1. make check test-cpus test-random test-lowest test-newest servers, on a quiet machine.
2. Commit the version, sign the commit, tag it v{version} with a signed tag, and push both.
3. Upload {wheel}, which was looked over here, and no other; {sbom} goes with it.
4. python .ci/release.py --set {next}, and commit that.
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


def set_version(version: str, root: Path = ROOT) -> None:
    """Write a version where one stands, and the day into the changelog if it is a release.

    A version that ends in ``.dev0`` opens a section of the changelog.
    """
    release = version.removesuffix(".dev0")
    if not re.fullmatch(r"\d+\.\d+\.\d+", release):
        raise SystemExit(f"{version} is no version, such as 0.5.0 or 0.5.1.dev0")
    day = datetime.now(UTC).date().isoformat()
    is_release = release == version
    changes = [
        ("pyproject.toml", r'^version = ".*"$', f'version = "{version}"'),
        ("CITATION.cff", r"^version: .*$", f"version: {version}"),
    ]
    if is_release:
        changes.append(("CITATION.cff", r"^date-released: .*$", f"date-released: {day}"))
        heading = rf"^## {re.escape(version)} \(.*\)$"
        changes.append(("CHANGELOG.md", heading, f"## {version} ({day})"))
    else:
        changes.append(("CHANGELOG.md", r"^## ", f"## {release} (unreleased)\n\n## "))
    written: dict[Path, str] = {}
    for name, pattern, new in changes:
        path = root / name
        text = written.get(path, path.read_text(encoding="utf-8"))
        text, count = re.subn(pattern, lambda _, new=new: new, text, count=1, flags=re.MULTILINE)
        if not count:
            raise SystemExit(f"{name} has no line {pattern}: nothing was set")
        written[path] = text
    for path, text in written.items():
        path.write_text(text, encoding="utf-8")


def next_version(version: str) -> str:
    """Return what the version is after a release: 0.5.1.dev0 after 0.5.0."""
    major, minor, patch = _numbers(version)[:3]
    return f"{major}.{minor}.{patch + 1}.dev0"


def audit_faults(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield known vulnerabilities of a report of pip-audit, and what it had nothing to say of."""
    unknown = []
    for package in report["dependencies"]:
        if "skip_reason" in package:
            unknown.append(package["name"])
        for found in package.get("vulns", ()):
            mended = ", ".join(found.get("fix_versions", ())) or "no version"
            yield f"{package['name']} {package['version']}: {found['id']}, mended in {mended}"
    if unknown:
        yield (
            f"{NOT_CHECKED}known vulnerabilities of {len(unknown)} packages, of which the index "
            f"that was asked tells nothing ({', '.join(unknown[:3])}, …)"
        )


def sbom_faults(report: Mapping[str, Any], dependencies: list[str]) -> Iterator[str]:
    """Yield what the list of a plain install lacks, and licences that do not go with ours."""
    licences = {}
    for component in report.get("components", ()):
        licences[_name(component["name"])] = json.dumps(component.get("licenses") or "")
    for dependency in dependencies:
        if _name(re.split(r"[^\w.-]", dependency)[0]) not in licences:
            yield f"sbom.json lacks {dependency}, which the package requires"
    for name, licence in licences.items():
        if licence == '""':
            yield f"{NOT_CHECKED}the licence of {name}, which tells none"
        if COPYLEFT.search(licence) and "Lesser" not in licence and "LGPL" not in licence:
            yield f"{name} is under {licence}"


def _name(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def supply_faults(folder: Path, dependencies: list[str]) -> Iterator[str]:
    """Yield what pip-audit and cyclonedx-bom find, or that they are not installed."""
    for module, package, what in (
        ("pip_audit", "pip-audit", "known vulnerabilities"),
        ("cyclonedx_py", "cyclonedx-bom", "what a plain install brings"),
    ):
        if find_spec(module) is None:
            yield f"{NOT_CHECKED}{what}: install {package} (pip install -e '.[release]')"
    if find_spec("pip_audit") is not None:
        constraints = str(ROOT / "constraints.txt")
        words = ("-r", constraints, "--no-deps", "--disable-pip", "--format", "json")
        done = _run("pip_audit", *words)
        if done.stdout.startswith("{"):
            yield from audit_faults(json.loads(done.stdout))
        else:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            yield f"{NOT_CHECKED}known vulnerabilities: pip-audit ended with {last[:200]}"
    if find_spec("cyclonedx_py") is not None:
        sbom = folder / "sbom.json"
        python = str(folder / "env" / "bin" / "python")
        done = _run("cyclonedx_py", "environment", python, "--output-reproducible", "-o", str(sbom))
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no word"])[-1]
            yield f"{NOT_CHECKED}what a plain install brings: cyclonedx-py ended with {last[:200]}"
        else:
            yield from sbom_faults(json.loads(sbom.read_text(encoding="utf-8")), dependencies)


def _run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)


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


def faults(folder: Path | None) -> Iterator[str]:
    """Yield everything that is wrong with the release in this directory."""
    project = _project()
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
    if folder is None:
        yield f"{NOT_CHECKED}the wheel and what it brings: name the directory it was built in"
        return
    found = [wheel.name for wheel in folder.glob("*.whl")]
    name = f"lsrdecomp-{project['version']}-py3-none-any.whl"
    if found != [name]:
        yield f"{folder} holds {', '.join(found) or 'no wheel'}, and should hold {name} alone"
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            names = {entry.filename: entry.file_size for entry in archive.infolist()}
        yield from wheel_faults(names, wheel.stat().st_size)
    yield from supply_faults(folder, list(project["dependencies"]))


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def main(arguments: list[str]) -> int:
    """Print every fault, or what is left to do."""
    parser = argparse.ArgumentParser(prog="python .ci/release.py", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, help="with the wheel, and env")
    parser.add_argument("--set", metavar="VERSION", help="write this version, and end")
    options = parser.parse_args(arguments)
    if options.set is not None:
        set_version(options.set)
        return 0
    found = list(faults(options.folder))
    for fault in found:
        sys.stdout.write(f"release: {fault}\n")
    if not found:
        version = str(_project()["version"])
        wheel = next(options.folder.glob("*.whl"))
        sbom = options.folder / "sbom.json"
        sys.stdout.write(
            TO_DO.format(version=version, wheel=wheel, sbom=sbom, next=next_version(version))
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
