"""A table that fits the terminal: columns leave by priority, names are shortened in their middle, digits never cut."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

T = TypeVar("T")

GAP = 2
"""Blanks between two columns."""
LEAST_NAME = 14
"""A name is shortened to no fewer characters than this."""
FAIR_NAME = 30
"""Columns that can be spared leave before a name is shortened below this."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: ``rank`` 0 always stays, the largest rank leaves first; a ``name`` may be shortened, nothing else."""

    head: str
    rank: int = 0
    justify: Literal["left", "right"] = "right"
    name: bool = False
    prose: bool = False  # a sentence: may run over several lines


@dataclass(frozen=True)
class Sheet:
    """Rows of text under columns; laid out when it is printed, for the width it is printed at."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    total: Sequence[str] | None = None

    @classmethod
    def of(
        cls,
        cells: Mapping[Column, Callable[[T], str]],
        items: Iterable[T],
        total: Sequence[str] | None = None,
    ) -> Sheet:
        """A row for each item, under every column what its function says of it."""
        return cls(tuple(cells), [[cell(item) for cell in cells.values()] for item in items], total)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.laid_out(options.max_width)

    def laid_out(self, width: int) -> Table:
        """The table at a width: the columns that fit, every number whole."""
        shown = self._kept(width)
        room = (
            width
            + GAP
            - sum(self._width(index) + GAP for index in shown if not self.columns[index].name)
        )
        names = max(1, sum(self.columns[index].name for index in shown))
        most = max(LEAST_NAME, (room - GAP * names) // names)
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
        for index in shown:
            column = self.columns[index]
            table.add_column(
                column.head,
                justify=column.justify,
                no_wrap=not column.prose,
                overflow="fold" if column.prose else "crop",
                min_width=None
                if column.prose
                else min(self._width(index, column.name), most if column.name else width),
            )
        for row in self.rows:
            table.add_row(*(self._cell(row, index, most) for index in shown))
        if self.total is not None:
            table.add_section()
            table.add_row(*(self._cell(self.total, index, most) for index in shown), style="bold")
        return table

    def _kept(self, width: int) -> list[int]:
        """Columns that fit: the least needed leaves until they do, or until only those that must stay are left."""
        indices = [index for index, column in enumerate(self.columns) if self._filled(index)]
        while sum(self._width(index, least=True) + GAP for index in indices) - GAP > width:
            droppable = [index for index in indices if self.columns[index].rank]
            if not droppable:
                break
            indices.remove(max(droppable, key=lambda index: (self.columns[index].rank, index)))
        return indices

    def _filled(self, index: int) -> bool:
        return not self.rows or any(row[index] for row in self._all_rows())

    def _width(self, index: int, least: bool = False) -> int:
        column = self.columns[index]
        widest = max((cell_len(row[index]) for row in self._all_rows()), default=0)
        if least and (column.name or column.prose):
            widest = min(widest, FAIR_NAME)
        return max(cell_len(column.head), widest)

    def _all_rows(self) -> Iterable[Sequence[str]]:
        return self.rows if self.total is None else [*self.rows, self.total]

    def _cell(self, row: Sequence[str], index: int, most: int) -> str:
        return shortened(row[index], most) if self.columns[index].name else row[index]


def shortened(name: str, most: int) -> str:
    """A name with its middle left out where it is longer than ``most``: its end tells layers apart.

    >>> shortened("model.layers.11.self_attn.q_proj", 20)
    'model.…f_attn.q_proj'
    """
    if cell_len(name) <= most:
        return name
    tail = (2 * most) // 3
    return f"{name[: most - tail - 1]}…{name[-tail:]}"
