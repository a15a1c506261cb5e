"""HTML of records for notebooks, with every text escaped, and sizes as readers expect them."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose first column is text on the left and whose others are numbers."""
    head = _row("th", columns)
    body = "".join(_row("td", row) for row in rows)
    return f"<table>{_title(caption)}<thead>{head}</thead><tbody>{body}</tbody></table>"


def facts(caption: str, pairs: Iterable[tuple[str, str]], note: str = "") -> str:
    """Return a record as a table of names and values, with a sentence below."""
    rows = [f"<tr>{_cell('th', name, 0)}{_cell('td', value, 0)}</tr>" for name, value in pairs]
    sentence = f"<p>{escape(note)}</p>" if note else ""
    return f"<table>{_title(caption)}<tbody>{''.join(rows)}</tbody></table>{sentence}"


def shortened(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Return up to twelve rows: of more, the first and the last six with dots between."""
    half = 6
    if len(rows) <= 2 * half:
        return list(rows)
    dots = ["…"] * len(rows[0])
    return [*rows[:half], dots, *rows[-half:]]


def _row(tag: str, texts: Sequence[str]) -> str:
    cells = "".join(_cell(tag, text, column) for column, text in enumerate(texts))
    return f"<tr>{cells}</tr>"


def _title(caption: str) -> str:
    return f'<caption style="text-align:left;caption-side:top"><b>{escape(caption)}</b></caption>'


def _cell(tag: str, text: str, column: int) -> str:
    side = "left" if column == 0 else "right"
    return f'<{tag} style="text-align:{side}">{escape(text)}</{tag}>'


def size_text(size: int) -> str:
    """Return bytes in the unit a reader expects: 640 B, 12 kB, 3.7 MB.

    >>> size_text(640), size_text(12_147), size_text(3_700_000), size_text(0)
    ('640 B', '12 kB', '3.7 MB', '0 B')
    """
    units = ("B", "kB", "MB", "GB")
    power = 0
    while size >= 1000 ** (power + 1) and power + 1 < len(units):
        power += 1
    value = size / 1000**power
    digits = 1 if power > 0 and value < 9.95 else 0
    return f"{value:.{digits}f} {units[power]}"
