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
    """Values by block (rows) and module within a block (columns); ``nan`` where a block has no such module.

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
        return f"LayerGrid({self.quantity}: {len(self.blocks)} blocks × {len(self.modules)} modules{span})"

    def to_json(self) -> dict[str, Any]:
        """Plain lists; ``None`` where there is no module."""
        values = [[None if math.isnan(v) else v for v in row] for row in self.values]
        return {
            "quantity": self.quantity, "blocks": list(self.blocks), "modules": list(self.modules), "values": values
        }  # fmt: skip

    def to_rows(self) -> list[dict[str, Any]]:
        """One plain record a layer."""
        return [
            {"block": block, "module": module, self.quantity: value}
            for block, row in zip(self.blocks, self.values, strict=True)
            for module, value in zip(self.modules, row, strict=True)
            if not math.isnan(value)
        ]


def layer_grid(values: Mapping[str, float], quantity: str = "relative error") -> LayerGrid:
    """Lay out values by layer name: the first number in a name is the block, what follows it the module.

    Names without a number form a block of their own, in front.

    Parameters
    ----------
    values : mapping from names of layers to numbers
    quantity : str
        What the numbers are: a label.

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
        number = _NUMBER.search(name)
        block, module = (name[: number.end()], name[number.end() + 1 :]) if number else ("", name)
        cells[block, module] = value
    blocks = sorted({block for block, _ in cells}, key=natural_key)
    modules = dict.fromkeys(module for _, module in sorted(cells, key=lambda cell: cell[0] != ""))
    rows = tuple(
        tuple(cells.get((block, module), math.nan) for module in modules) for block in blocks
    )
    return LayerGrid(quantity, tuple(blocks), tuple(modules), rows)
