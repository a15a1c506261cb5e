"""Tables that fit the terminal: columns leave by priority, names are cut, digits never."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

from lsrdecomp.gateway import printable

T = TypeVar("T")


# Widths in characters, by hand for terminals of 80 columns.
GAP = 2
"""Blanks between two columns."""
MIN_NAME = 14
"""A name is shortened to no fewer characters than this."""
COMFORTABLE_NAME = 30
"""Columns that can be spared leave before a name is shortened below this."""


@dataclass(frozen=True, slots=True)
class SheetColumn:
    """One column of a table."""

    head: str
    rank: int = 0
    """0 always stays; the largest rank leaves first."""
    justify: Literal["left", "right"] = "right"
    name: bool = False
    """Whether it holds names, which may be shortened; nothing else may."""
    prose: bool = False
    """Whether it holds sentences, which may run over several lines."""


@dataclass(frozen=True)
class Sheet:
    """Rows of text under columns; laid out when it is printed, for the width it is printed at."""

    columns: Sequence[SheetColumn]
    rows: Sequence[Sequence[str]]
    total: Sequence[str] | None = None

    @classmethod
    def of(
        cls,
        cells: Mapping[SheetColumn, Callable[[T], str]],
        items: Iterable[T],
        total: Sequence[str] | None = None,
    ) -> Sheet:
        """Return a table with a row for each item, by the function of each column."""

        def row(item: T) -> list[str]:
            return [printable(cell(item)) for cell in cells.values()]

        return cls(tuple(cells), [row(item) for item in items], total)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table at the width of the console."""
        yield self.laid_out(options.max_width)

    def laid_out(self, width: int) -> Table:
        """Return the table at a width: the columns that fit, every number whole."""
        shown = self._columns_that_fit(width)
        name_width = self._name_width(shown, width)
        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, GAP, 0, 0))
        for index in shown:
            self._add_column(table, index, name_width if self.columns[index].name else width)
        for row in self.rows:
            table.add_row(*(self._cell(row, index, name_width) for index in shown))
        if self.total is not None:
            table.add_section()
            cells = [self._cell(self.total, index, name_width) for index in shown]
            table.add_row(*cells, style="bold")
        return table

    def _name_width(self, shown: Sequence[int], width: int) -> int:
        """Return the characters that each name may take beside the other columns."""
        n_names = max(1, sum(self.columns[index].name for index in shown))
        others = [index for index in shown if not self.columns[index].name]
        room = width + GAP - sum(self._width(index) + GAP for index in others)
        return max(MIN_NAME, (room - GAP * n_names) // n_names)

    def _add_column(self, table: Table, index: int, limit: int) -> None:
        """Add a column, no wider than a limit; sentences are folded, nothing else."""
        column = self.columns[index]
        min_width = None
        if not column.prose:
            min_width = min(self._width(index, shortened=column.name), limit)
        table.add_column(
            column.head,
            justify=column.justify,
            no_wrap=not column.prose,
            overflow="fold" if column.prose else "crop",
            min_width=min_width,
        )

    def _columns_that_fit(self, width: int) -> list[int]:
        """Return the columns that fit.

        The least needed leaves until they do, or until only those that must stay are left.
        """
        indices = [index for index in range(len(self.columns)) if self._has_content(index)]
        while sum(self._width(index, shortened=True) + GAP for index in indices) - GAP > width:
            droppable = [index for index in indices if self.columns[index].rank]
            if not droppable:
                break
            indices.remove(max(droppable, key=lambda index: (self.columns[index].rank, index)))
        return indices

    def _has_content(self, index: int) -> bool:
        return not self.rows or any(row[index] for row in self._all_rows())

    def _width(self, index: int, *, shortened: bool = False) -> int:
        """Return the characters of a column's widest cell, names and sentences shortened or not."""
        column = self.columns[index]
        widest = max((cell_len(row[index]) for row in self._all_rows()), default=0)
        if shortened and (column.name or column.prose):
            widest = min(widest, COMFORTABLE_NAME)
        return max(cell_len(column.head), widest)

    def _all_rows(self) -> Iterable[Sequence[str]]:
        return self.rows if self.total is None else [*self.rows, self.total]

    def _cell(self, row: Sequence[str], index: int, name_width: int) -> str:
        text = row[index]
        return shorten_name(text, name_width) if self.columns[index].name else text


def shorten_name(name: str, limit: int) -> str:
    """Return a name without its middle where it is longer than a limit: its end tells layers apart.

    >>> shorten_name("model.layers.11.self_attn.q_proj", 20)
    'model.…f_attn.q_proj'
    """
    if cell_len(name) <= limit:
        return name
    tail = (2 * limit) // 3
    return f"{name[: limit - tail - 1]}…{name[-tail:]}"
