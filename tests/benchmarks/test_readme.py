"""benchmarks/README.md names every command, and no other."""

import re
from pathlib import Path

import benchmarks

FOLDER = Path(benchmarks.__file__).parent


def test_every_command_is_in_the_table():
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|",
        (FOLDER / "README.md").read_text(encoding="utf-8"),
        re.M,
    )
    listed = {folder: set(re.findall(r"`(\w+)`", names)) for folder, names in rows}
    commands = {folder: set() for folder in listed}
    for file in FOLDER.glob("*/*.py"):
        if file.name != "__main__.py" and 'if __name__ == "__main__"' in file.read_text(
            encoding="utf-8"
        ):
            commands[file.parent.name].add(file.stem)
    assert listed == commands
