"""Print the lower bounds of pyproject.toml as exact versions: ``numpy==1.26 scipy==1.12 …``.

Arguments are the extras whose bounds are printed beside those of the package itself.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
bounds = list(project["dependencies"])
for extra in sys.argv[1:]:
    bounds += project["optional-dependencies"][extra]
for bound in bounds:
    name, separator, rest = bound.partition(">=")
    if separator and "[" not in name:
        lowest = rest.split(",")[0].split(";")[0].strip()
        sys.stdout.write(f"{name.strip()}=={lowest}\n")
