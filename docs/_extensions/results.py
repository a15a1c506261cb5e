"""The directive ``results``: a table made from a file in benchmarks/results for a page."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from result_tables import RESULTS, TABLES, table
from sphinx.util.docutils import SphinxDirective

from benchmarks import record

ROWS_IN_VIEW = 3
"""Rows of the longest table that a page shows unasked; a longer one unfolds."""


def unbroken(cell: str) -> str:
    """A figure and its spread stay on one line."""
    return cell.replace(" ± ", "\u00a0±\u00a0").replace("→ ", "→\u00a0")


class ResultsDirective(SphinxDirective):
    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        name = self.arguments[0]
        self.env.note_dependency(str(RESULTS / TABLES[name][0]))
        head, rows = table(name)
        made = f"*{measured(TABLES[name][0])}*"
        lines = [
            "| " + " | ".join(map(unbroken, row)) + " |"
            for row in (head, ("---",) * len(head), *rows)
        ]
        if len(rows) > ROWS_IN_VIEW:
            lines = [
                f":::{{dropdown}} {len(rows)} rows: {', '.join(filter(None, head))}",
                *lines,
                ":::",
            ]
        lines += ["", made]
        block = nodes.Element()
        self.state.nested_parse(StringList(lines), self.content_offset, block)
        return block.children


def measured(name: str) -> str:
    """Say which version made a record and when, and whether it is older than this version."""
    version, day = record.measured_with(record.load(RESULTS / name))
    sentence = f"Measured with lsrdecomp {version} on {day.day} {day:%B %Y}"
    if record.is_outdated(version, record.version_of_clone()):
        return f"{sentence}; not measured again since."
    return f"{sentence}."


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("results", ResultsDirective)
    return {"version": "1", "parallel_read_safe": True}
