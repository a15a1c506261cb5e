"""Boxes of code end with their last line; the blank one before a fence is for the doctests."""

from __future__ import annotations

from typing import Any

from docutils import nodes


def trimmed(app: Any, tree: nodes.document) -> None:
    for block in tree.findall(nodes.literal_block):
        if block.rawsource == block.astext():  # plain text, to be highlighted later
            text = block.rawsource.rstrip()
            block.rawsource, block[:] = text, [nodes.Text(text)]


def setup(app: Any) -> dict[str, Any]:
    app.connect("doctree-read", trimmed)
    return {"version": "1", "parallel_read_safe": True}
