"""Corner cases that random draws seldom meet: mixed types, equal shapes, long sides, tiny entries, NaN, empty matrices.

Nothing is drawn: each case is tried once in each run.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lsrdecomp.arrays import Array, norm, to_numpy
from lsrdecomp.testing.agreement import IdentityError, require_agreement, shown
from lsrdecomp.testing.cases import Cases
from lsrdecomp.testing.identities import Kron
from lsrdecomp.testing.runner import Identity


def corner_cases(kron: Kron, mixed_types: bool, tiny: bool) -> list[Identity]:
    """What `check_kron` tries beside the identities.

    With ``mixed_types`` also factors of two element types; with ``tiny`` also entries that a coarser type loses.
    """
    pairs: dict[str, tuple[Any, Any]] = {
        "factors of equal shape": (_counted(2, 3), _counted(2, 3) ** 2),
        "all sides above five": (_counted(6, 7), _counted(7, 6)),
        "empty first factor": (np.ones((0, 2)), np.ones((2, 3))),
        "empty second factor": (np.ones((2, 3)), np.ones((2, 0))),
    }
    if tiny:
        pairs["tiny entries"] = (1e-7 * _counted(2, 2), 1e-7 * _counted(2, 3))
    tried: list[Identity] = [
        (name, lambda d, name=name, pair=pair: _product(kron, name, *map(d.moved, pair)))  # type: ignore[misc]
        for name, pair in pairs.items()
    ]
    tried.append(("not a number", lambda d: _not_a_number(kron, d.moved([[np.nan, 1.0]]), d.moved([[2.0, 3.0]]))))
    if mixed_types:
        real, fine = _counted(2, 2), 1.0 / _counted(2, 3)
        types = {
            "real ⊗ complex": ((real, "float64"), (fine + 1j, "complex128")),
            "complex ⊗ real": ((real + 1j, "complex128"), (fine, "float64")),
            "float32 ⊗ float64": ((real, "float32"), (fine, "float64")),
            "float64 ⊗ float32": ((fine, "float64"), (real, "float32")),
        }
        tried += [
            (name, lambda d, name=name, a=a, b=b: _product(kron, name, d.moved(*a), d.moved(*b)))  # type: ignore[misc]
            for name, (a, b) in types.items()
        ]
    return tried


def small_terms(d: Cases, order: int | None) -> tuple[Array, tuple[Array, ...]]:
    """Two terms, the second with 1e-4 of the weight of the first."""
    stacks = tuple(d.moved(np.stack([_counted(2, 3), _counted(2, 3)[::-1]])) for _ in range(order or 2))
    return d.moved([1.0, 1e-4], to_numpy(stacks[0]).real.dtype.name), stacks


def _product(kron: Kron, name: str, a: Array, b: Array) -> None:
    # The factor in single precision holds integers, so the finer type sets what rounding explains.
    finer = max((a, b), key=lambda factor: np.finfo(to_numpy(factor).dtype).precision)
    require_agreement(
        f"{name}, (A ⊗ B)[i·p + k, j·q + l] = A[i, j]·B[k, l]",
        kron(a, b),
        np.kron(to_numpy(a), to_numpy(b)),
        bound=norm(a) * norm(b) if a.shape[0] * b.shape[1] else 0.0,
        inputs=(finer,),
    )


def _not_a_number(kron: Kron, a: Array, b: Array) -> None:
    actual, expected = np.asarray(to_numpy(kron(a, b))), np.kron(to_numpy(a), to_numpy(b))
    if not np.array_equal(np.isnan(actual), np.isnan(expected)):
        raise IdentityError("not a number, NaN·x = NaN", f"got {actual}, expected {expected}{shown((a, b))}")


def _counted(rows: int, columns: int) -> Any:
    return np.arange(1.0, rows * columns + 1).reshape(rows, columns)
