"""Records as a pandas table, where pandas is installed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol


class Record(Protocol):
    """Anything of this package with rows."""

    def to_rows(self) -> list[dict[str, Any]]: ...


def to_frame(records: Record | Iterable[Record]) -> Any:
    """One pandas DataFrame of the rows of a record, or of many records of one kind one below the other.

    Parameters
    ----------
    records : object with ``to_rows``, or an iterable of them

    Returns
    -------
    pandas.DataFrame

    Raises
    ------
    ImportError
        Where pandas is not installed; ``to_json`` and ``to_rows`` need nothing.

    Examples
    --------
    >>> from lsrdecomp.analysis import layer_grid
    >>> grid = layer_grid({"h.0.attn.q": 0.1, "h.1.attn.q": 0.2, "h.1.mlp.up": 0.3})
    >>> print(to_frame(grid))
      block  module  relative error
    0   h.0  attn.q             0.1
    1   h.1  attn.q             0.2
    2   h.1  mlp.up             0.3
    """
    import pandas

    many = list(records) if isinstance(records, Iterable) else [records]
    return pandas.DataFrame([row for record in many for row in record.to_rows()])
