"""benchmarks/README.md and benchmarks/lab/README.md name every command, and no other."""

import re
from pathlib import Path

import benchmarks

FOLDER = Path(benchmarks.__file__).parent


def commands(folder: Path) -> set[str]:
    """Names of the files that run as a command."""
    main = 'if __name__ == "__main__"'
    files = [file for file in folder.glob("*.py") if file.name != "__main__.py"]
    return {file.stem for file in files if main in file.read_text(encoding="utf-8")}


def table(readme: Path) -> dict[str, str]:
    """The third column of a table of folders, by folder."""
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|", readme.read_text("utf-8"), re.MULTILINE
    )
    return dict(rows)


def test_every_command_is_in_the_table():
    listed = table(FOLDER / "README.md")
    for folder, names in listed.items():
        assert set(re.findall(r"`(\w+)`", names)) == commands(FOLDER / folder)
    assert {file.parent.name for file in FOLDER.glob("*/*.py")} <= set(listed)


def test_every_command_of_the_laboratory_is_in_its_table():
    listed = table(FOLDER / "lab" / "README.md")
    for folder, names in listed.items():
        in_folder = rf"(?:lab\.{folder}\.|lab/reading/)(\w+)"
        assert set(re.findall(in_folder, names)) == commands(FOLDER / "lab" / folder)
    folders = {file.parent.name for file in (FOLDER / "lab").glob("*/__init__.py")}
    assert folders - {"tests"} == set(listed)
