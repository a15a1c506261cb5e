"""Values that a shell offers for options, where they are costly to import."""

from __future__ import annotations

from collections.abc import Collection


def servers() -> Collection[str]:
    """Return the servers that ``verify --for`` knows."""
    from lsrdecomp.serving.check import SERVERS

    return SERVERS
