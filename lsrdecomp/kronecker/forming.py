"""The warning of a matrix that NumPy's or SciPy's linear algebra forms where it need not be."""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

WITHOUT_FORMING = {
    "cholesky": "lsrdecomp.operators.cholesky(A)",
    "det": "lsrdecomp.operators.det(A)",
    "eig": "lsrdecomp.operators.eigenvalues(A)",
    "eigh": "lsrdecomp.operators.eigh(A)",
    "eigvals": "lsrdecomp.operators.eigenvalues(A)",
    "eigvalsh": "lsrdecomp.operators.eigenvalues(A)",
    "expm": "lsrdecomp.operators.expm_multiply(A, x)",
    "inv": "lsrdecomp.operators.inv(A)",
    "lstsq": "lsrdecomp.operators.pinv(A) @ b",
    "norm": "A.norm",
    "pinv": "lsrdecomp.operators.pinv(A)",
    "slogdet": "lsrdecomp.operators.slogdet(A)",
    "solve": "lsrdecomp.operators.solve(A, b)",
    "spsolve": "lsrdecomp.operators.solve(A, b)",
    "sqrtm": "lsrdecomp.operators.sqrtm(A)",
    "svd": "lsrdecomp.operators.svd(A)",
    "svdvals": "lsrdecomp.operators.svd(A)",
    "trace": "A.trace()",
}
"""Functions of NumPy's and SciPy's linear algebra, and what does the same without forming A."""


def warn_of_forming(function: str, shape: tuple[int, int], *, stacklevel: int) -> None:
    """Warn that a function forms the matrix; ``stacklevel`` counts from who calls this."""
    rows, columns = shape
    advice = ""
    name = function.rpartition(".")[2]
    if name in WITHOUT_FORMING:
        advice = f"; {WITHOUT_FORMING[name]} does not, where that is possible"
    warnings.warn(
        f"{function} forms the matrix, {rows:,} × {columns:,} entries{advice}",
        UserWarning,
        stacklevel=stacklevel + 1,
    )


def warn_of_scipy(shape: tuple[int, int]) -> None:
    """Warn where ``scipy.linalg`` or ``scipy.sparse.linalg`` asked for an array of the matrix.

    Called from ``__array__``. SciPy has no protocol that tells which function asks, so the frames
    are looked at: those of NumPy and SciPy between the caller's own code and ``__array__``.
    """
    function = ""
    stacklevel = 3
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module, name = _function_of(frame)
        if module.partition(".")[0] not in ("numpy", "scipy", "lsrdecomp"):
            break
        for package in ("scipy.linalg", "scipy.sparse.linalg"):
            if module.startswith(f"{package}.") and not name.startswith("_"):
                function = f"{package}.{name}"
        frame = frame.f_back
        stacklevel += 1
    if function:
        warn_of_forming(function, shape, stacklevel=stacklevel)


def _function_of(frame: FrameType) -> tuple[str, str]:
    """Return the module and the name of the function of a frame; of a wrapper, what it wraps."""
    name = frame.f_code.co_name
    wrapped = frame.f_locals.get("f") if name == "wrapper" else None
    if wrapped is not None:
        return str(wrapped.__module__), str(wrapped.__name__)
    return str(frame.f_globals.get("__name__", "")), name
