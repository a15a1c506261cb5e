"""HTML of records for notebooks: a table with a caption, every text escaped."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SHOWN_ROWS = 12
"""Longer tables show their first and last rows."""


def table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; the first column is text on the left, the others are numbers on the right."""
    head = "".join(_cell("th", name, i) for i, name in enumerate(columns))
    body = "".join(
        f"<tr>{''.join(_cell('td', text, i) for i, text in enumerate(row))}</tr>" for row in rows
    )
    return f"<table>{_title(caption)}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def facts(caption: str, pairs: Iterable[tuple[str, str]], note: str = "") -> str:
    """A record as a table of names and values, with a sentence below."""
    rows = "".join(
        f"<tr>{_cell('th', name, 0)}{_cell('td', value, 0)}</tr>" for name, value in pairs
    )
    tail = f"<p>{escape(note)}</p>" if note else ""
    return f"<table>{_title(caption)}<tbody>{rows}</tbody></table>{tail}"


def shortened(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The rows, or the first and last of many with dots between."""
    if len(rows) <= SHOWN_ROWS:
        return list(rows)
    half = SHOWN_ROWS // 2
    return [*rows[:half], ["…"] * len(rows[0]), *rows[-half:]]


def _title(caption: str) -> str:
    return f'<caption style="text-align:left;caption-side:top"><b>{escape(caption)}</b></caption>'


def _cell(tag: str, text: str, column: int) -> str:
    side = "left" if column == 0 else "right"
    return f'<{tag} style="text-align:{side}">{escape(text)}</{tag}>'
