"""Names in docstrings lead to the page of the public name, in whichever room they are written."""

from __future__ import annotations

from typing import Any

from sphinx.util.nodes import make_refnode


def documented(domain: Any, name: str) -> list[str]:
    """Return full names of documented objects that end in these parts.

    Of several the one nearest to the top, if it is one.
    """
    full = [known for known in domain.objects if known == name or known.endswith(f".{name}")]
    least = min((known.count(".") for known in full), default=0)
    return [known for known in full if known.count(".") == least]


def resolve(app: Any, env: Any, node: Any, content: Any) -> Any:
    """A reference to its page; a name that has none is code, not a link that leads nowhere."""
    if node.get("refdomain") != "py" or node.get("reftype") != "obj":
        return None
    domain, name = env.get_domain("py"), node["reftarget"].removeprefix("~").removesuffix("()")
    matches = documented(domain, name) or documented(domain, name.rpartition(".")[2])
    if len(matches) != 1:
        return None
    entry = domain.objects[matches[0]]
    return make_refnode(
        app.builder, node["refdoc"], entry.docname, entry.node_id, content, matches[0]
    )


def setup(app: Any) -> dict[str, Any]:
    app.connect("missing-reference", resolve)
    return {"version": "1", "parallel_read_safe": True}
