"""Which adapters of a fleet are alike, and whose search serves the others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.errors import LsrError
from lsrdecomp.fleet.manifest import Outcome


def like_adapters(sources: Mapping[str, str], max_memory: int | None = None) -> list[list[str]]:
    """Names of adapters of one base with the same layers, where there are several.

    Reads the headers of their files, and leaves out what cannot be read: its job will say why.
    """
    groups: dict[Any, list[str]] = {}
    for name, source in sources.items():
        try:
            adapter = open_checkpoint(source, max_memory=max_memory)
        except (LsrError, OSError):
            continue
        layers = tuple(sorted((one.name, one.out_features, one.in_features, one.rank) for one in adapter.layers))
        groups.setdefault((adapter.config.get("base_model_name_or_path"), layers), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def leaders(groups: Sequence[Sequence[str]], outcomes: Mapping[str, Outcome], left: Collection[str]) -> dict[str, str]:
    """For each adapter of the groups, the first of its group that is done or still left to be tried."""
    found = {}
    for names in groups:
        able = (name for name in names if name in left or (name in outcomes and outcomes[name].state == "done"))
        leader = next(able, None)
        if leader is not None:
            found.update(dict.fromkeys(names, leader))
    return found
