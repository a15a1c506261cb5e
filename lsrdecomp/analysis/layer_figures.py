"""A figure for every layer of a checkpoint, laid out by depth and kind of module."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lsrdecomp._ordering import natural_key

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBER = re.compile(r"(?<=[._])(\d+)(?=[._])")


@dataclass(frozen=True, slots=True, repr=False)
class LayerGrid:
    """Values by block (rows) and module within a block (columns).

    They are ``nan`` where a block has no such module.

    Examples
    --------
    >>> grid = layer_grid({"h.0.attn.q": 0.1, "h.1.attn.q": 0.2, "h.1.mlp.up": 0.3})
    >>> grid
    LayerGrid(relative error: 2 blocks × 2 modules, 0.1 to 0.3)
    >>> grid.values
    ((0.1, nan), (0.2, 0.3))
    """

    quantity: str
    blocks: tuple[str, ...]
    modules: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]

    def __repr__(self) -> str:
        finite = [value for row in self.values for value in row if not math.isnan(value)]
        span = f", {min(finite):.3g} to {max(finite):.3g}" if finite else ""
        size = f"{len(self.blocks)} blocks × {len(self.modules)} modules"
        return f"LayerGrid({self.quantity}: {size}{span})"

    def to_json(self) -> dict[str, Any]:
        """Return plain lists; ``None`` where there is no module."""
        return {
            "quantity": self.quantity,
            "blocks": list(self.blocks),
            "modules": list(self.modules),
            "values": [list(map(_none_for_nan, row)) for row in self.values],
        }

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one plain record a layer."""
        records = []
        for block, row in zip(self.blocks, self.values, strict=True):
            for module, value in zip(self.modules, row, strict=True):
                if not math.isnan(value):
                    records.append({"block": block, "module": module, self.quantity: value})
        return records


def _none_for_nan(value: float) -> float | None:
    return None if math.isnan(value) else value


def layer_grid(values: Mapping[str, float], quantity: str = "relative error") -> LayerGrid:
    """Lay out values by the names of their layers.

    The first number in a name is the block, what follows it the module. Names without a number
    form a block of their own, in front.

    Parameters
    ----------
    values : mapping from names of layers to numbers
    quantity : str
        A label that says what the numbers are.

    Returns
    -------
    LayerGrid
        Blocks by number, modules in the order of the mapping.

    Examples
    --------
    >>> grid = layer_grid({"h.0.attn.q": 0.1, "h.1.attn.q": 0.2, "h.1.mlp.up": 0.3, "head": 0.4})
    >>> grid.blocks, grid.modules
    (('', 'h.0', 'h.1'), ('head', 'attn.q', 'mlp.up'))
    """
    cells: dict[tuple[str, str], float] = {}
    for name, value in values.items():
        cells[_split_name(name)] = value
    blocks = sorted({block for block, _ in cells}, key=natural_key)
    # Modules of names without a number stand first
    ordered = sorted(cells, key=lambda cell: cell[0] != "")
    modules = tuple(dict.fromkeys(module for _, module in ordered))

    def row(block: str) -> tuple[float, ...]:
        return tuple(cells.get((block, module), math.nan) for module in modules)

    return LayerGrid(quantity, tuple(blocks), modules, tuple(map(row, blocks)))


def _split_name(name: str) -> tuple[str, str]:
    """Return block and module of the name of a layer."""
    number = _NUMBER.search(name)
    if number is None:
        return "", name
    return name[: number.end()], name[number.end() + 1 :]
