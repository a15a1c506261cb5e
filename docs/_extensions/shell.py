"""The directive ``shell``: runs the commands of a page while it is built, and shows the output.

All blocks of a page share one fresh directory, in which ``adapter/`` is the adapter that ships with
the package, and ``statistics/`` what calibration said of it.
"""

from __future__ import annotations

import textwrap
from typing import Any

from commands import COLUMNS, Shell
from docutils import nodes
from sphinx.util.docutils import SphinxDirective


def folded(line: str) -> str:
    """A sentence as a terminal folds it; tables fit already."""
    return textwrap.fill(line, COLUMNS) if len(line) > COLUMNS else line


class ShellDirective(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        shell: Shell = self.env.temp_data.get("shell") or Shell()  # cleared after each page
        self.env.temp_data["shell"] = shell
        shown = []
        for command in (line for line in self.content if line.strip()):
            printed = shell.run(command).rstrip().splitlines()
            shown += [f"$ {command}", *(folded(line) for line in printed)]
        block = nodes.literal_block("\n".join(shown), "\n".join(shown), classes=["terminal"])
        block["language"] = "text"
        return [block]


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("shell", ShellDirective)
    return {"version": "1", "parallel_read_safe": True}
