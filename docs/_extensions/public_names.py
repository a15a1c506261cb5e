"""The directive ``names``: the public names of a room, each with the first sentence of its docstring and a link."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.util.docutils import SphinxDirective


def sentences(room: str) -> list[tuple[str, str, str]]:
    """(name, where it is defined, what it is) of every class and function that a room offers, in the room's order."""
    module = importlib.import_module(room)
    names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    offered = ((name, getattr(module, name)) for name in names)
    objects = ((name, value) for name, value in offered if inspect.isclass(value) or inspect.isroutine(value))
    return [(name, f"{value.__module__}.{value.__name__}", first_sentence(value)) for name, value in objects]


def first_sentence(value: Any) -> str:
    paragraph = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
    sentence = re.split(r"\.\s+(?=[A-Z])", paragraph)[0]
    return re.sub(r"\s*\[\d+\]_", "", sentence).rstrip(".:").replace("``", "`")


class NamesDirective(SphinxDirective):
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        lines = ["| name | what it is |", "|---|---|"]
        for room in self.arguments[0].split():
            for name, where, what in sentences(room):
                lines.append(f"| {{py:obj}}`{name} <{where}>` | {what.replace('|', chr(92) + '|')} |")
        block = nodes.Element()
        self.state.nested_parse(StringList(lines), self.content_offset, block)
        for table in block.findall(nodes.table):
            table["classes"].append("names")
        return block.children


def setup(app: Any) -> dict[str, Any]:
    app.add_directive("names", NamesDirective)
    return {"version": "1", "parallel_read_safe": True}
