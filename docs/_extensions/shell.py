"""The directive ``shell``: runs the commands of a page while the page is built, and shows what they really print.

All blocks of a page share one fresh directory, in which ``adapter/`` is the adapter that ships with the package.
"""

from __future__ import annotations

from typing import Any

from commands import Shell
from docutils import nodes
from sphinx.util.docutils import SphinxDirective


class ShellDirective(SphinxDirective):
    has_content = True

    def run(self) -> list[nodes.Node]:
        shell: Shell = self.env.temp_data.get("shell") or Shell()  # cleared after each page
        self.env.temp_data["shell"] = shell
        shown = []
        for command in (line for line in self.content if line.strip()):
            shown += [f"$ {command}", *shell.run(command).rstrip().splitlines()]
        block = nodes.literal_block("\n".join(shown), "\n".join(shown), classes=["terminal"])
        block["language"] = "text"
        return [block]


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("shell", ShellDirective)
    return {"version": "1", "parallel_read_safe": True}
