"""Rows of batches: batches of any model, split into their examples and put together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from lsrdecomp.errors import CalibrationError
from lsrdecomp.lora.base.tokens import ROW_COUNTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lsrdecomp.lora.base.heads import Batch


def as_batch(inputs: Any) -> dict[str, Any]:
    """Return what a model is called with as a batch: by name, positional arguments by number.

    Parameters
    ----------
    inputs : Tensor, tuple, list or Mapping
        One argument, several in their order, or arguments by name.

    Raises
    ------
    CalibrationError
        If it is none of these, or holds no tensor with rows.
    """
    if isinstance(inputs, Mapping):
        batch = {str(name): value for name, value in inputs.items()}
    elif isinstance(inputs, tuple | list):
        batch = {str(number): value for number, value in enumerate(inputs)}
    else:
        batch = {"0": inputs}
    if n_rows(batch) == 0:
        raise CalibrationError(
            f"a batch is a {type(inputs).__name__} without a tensor of rows: give a tensor, a "
            "tuple of a model's arguments, or a dictionary of them"
        )
    return batch


def call_with(model: Callable[..., Any], batch: Batch) -> Any:
    """Call a model with the arguments of a batch, those under a number in their order."""
    numbers = sorted((name for name in batch if name.isdigit()), key=int)
    named = {name: value for name, value in batch.items() if not name.isdigit()}
    return model(*(batch[number] for number in numbers), **named)


def tensors_in(value: Any) -> list[Tensor]:
    """Return all tensors in a value, in the order of its entries."""
    found: list[Tensor] = []
    recursively_apply(found.append, value)
    return found


def n_rows(batch: Batch) -> int:
    """Return the rows of a batch: those of its first tensor that has any."""
    for name, value in batch.items():
        rows = [len(tensor) for tensor in tensors_in(value) if tensor.ndim > 0]
        if rows and name != ROW_COUNTS:
            return rows[0]
    return 0


def examples_in(batch: Batch) -> int:
    """Return the examples of a batch: its rows, unless it says how they belong together."""
    return len(batch[ROW_COUNTS]) if ROW_COUNTS in batch else n_rows(batch)


def split_rows(batch: Batch) -> list[dict[str, Any]]:
    """Return a batch of one row for each row of a batch.

    Tensors without that number of rows, and other values, are the same in all of them.
    """
    size = n_rows(batch)

    def row_of(tensor: Tensor, row: int) -> Tensor:
        has_rows = tensor.ndim > 0 and len(tensor) == size
        return tensor[row : row + 1] if has_rows else tensor

    return [
        recursively_apply(lambda tensor, row=row: row_of(tensor, row), batch) for row in range(size)
    ]


def join_rows(rows: Sequence[Batch], size: int) -> Iterator[dict[str, Any]]:
    """Yield batches of at most ``size`` consecutive rows that fit together."""
    start = 0
    while start < len(rows):
        stop = start + 1
        while stop < min(start + size, len(rows)) and _fit(rows[start], rows[stop]):
            stop += 1
        yield _joined(rows[start:stop])
        start = stop


def _fit(first: Any, other: Any) -> bool:
    """Return whether two rows have tensors of the same shapes, and are the same otherwise."""
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        if first.shape != other.shape or first.dtype != other.dtype:
            return False
        is_row = first.ndim > 0 and len(first) == 1
        return is_row or first is other or bool(torch.equal(first, other))
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        return first.keys() == other.keys() and all(_fit(first[key], other[key]) for key in first)
    if isinstance(first, tuple | list) and isinstance(other, tuple | list):
        same_length = len(first) == len(other)
        return same_length and all(_fit(*pair) for pair in zip(first, other, strict=True))
    return bool(first == other)


def _joined(rows: Sequence[Any]) -> Any:
    """Return rows that fit as one value."""
    first = rows[0]
    if isinstance(first, Tensor):
        return torch.cat(list(rows)) if first.ndim > 0 and len(first) == 1 else first
    if isinstance(first, Mapping):
        return {key: _joined([row[key] for row in rows]) for key in first}
    if isinstance(first, tuple | list):
        return type(first)([_joined(parts) for parts in zip(*rows, strict=True)])
    return first
