"""Matrices and LoRA adapters as short sums of Kronecker products (low separation rank).

A matrix
    `decompose`        the shortest sum of Kronecker products within a tolerance, or of ``rank=`` terms
    `decompose_each`   the same for a stack of matrices
    `best_shape`       which shape: the fewest parameters at a tolerance, low rank and dense among them
    `error_curve`      how the error falls with the number of terms
    `SeparatedMatrix`  the answer as an operator: ``A @ x``, `to_matrix`, norms, never formed unless asked
    `recompress`       fewer terms for a `SeparatedMatrix` that has too many

A LoRA adapter
    `open_checkpoint`  a directory or file of PEFT, kohya, diffusers, LyCORIS, … as layers
    `compress`         the smallest that keeps such a share of what it does; or a `CompressionPlan` for every layer
    `distil`           a compressed adapter trained, without labels, on the answers of its LoRA
    `read_statistics`  what ``lsrdecomp calibrate`` measured, so that errors count what the network does

Sizes and goals
    `KroneckerShape`, `ProductShape`, `ErrorBudget`, `unit_roundoff`

Rooms
    `solvers`      `SVD`, `ALS`, `BlockGolubKahan`, … to pass as ``solver=`` (the usual two are here at the top too)
    `targets`      what else can be decomposed: low-rank pairs, sparse matrices, operators, streams of rows
    `operators`    solve, logdet, eigenvalues, preconditioners: what comes after a decomposition
    `kronecker`    shapes, `rearrange`, Kronecker algebra
    `formats`      number formats of stored factors, mixed precision
    `analysis`, `plots`         error curves, spectra, Pareto fronts, and their pictures
    `checkpoints`, `compression`, `fleet`    adapters on disk, one at a time or by the hundred
    `errors`       `ShapeError`, `BudgetError`, `CheckpointError`, …, each an `LsrError`

To be imported by name, since each needs more packages: `lsrdecomp.adapters` (LSR inside PEFT),
`lsrdecomp.calibration`, `lsrdecomp.training`, `lsrdecomp.fidelity` (torch), `lsrdecomp.testing`
(tests; hypothesis), `lsrdecomp.serving` (what a server makes of an adapter; gguf for llama.cpp's
files).
"""

import sys
from opcode import opmap

import lazy_loader

_lazy, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

_MOVED = {
    **dict.fromkeys(("BlockGolubKahan", "Decomposition", "Gram", "JointALS", "Status"), "solvers"),
    **dict.fromkeys(
        ("BudgetError", "CheckpointError", "ConvergenceError", "MatrixError"), "errors"
    ),
    **dict.fromkeys(("PrecisionError", "ShapeError"), "errors"),
    "ErrorCurve": "analysis",
    "SeparatedProduct": "kronecker",
}
"""Names of 0.2 and their rooms; they go on working here until 0.4."""


def __getattr__(name: str) -> object:
    """A public name when it is first used; of one that is not here, where it is or what it is like."""
    from importlib import import_module

    if name in __all__ or name.startswith("__"):
        return (
            _lazy(name)
            if name != "__version__"
            else import_module("importlib.metadata").version("lsrdecomp")
        )
    if name in _MOVED:
        from warnings import warn

        room = _MOVED[name]
        warn(
            f"lsrdecomp.{name} is lsrdecomp.{room}.{name} from version 0.4 on",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(import_module(f"lsrdecomp.{room}"), name)
    text = f"lsrdecomp has no {name!r}{_hint(name)}"
    caller = sys._getframe(
        1
    )  # of `from lsrdecomp import name` Python would raise an error of its own words
    if caller.f_code.co_code[caller.f_lasti] == opmap["IMPORT_FROM"]:
        raise ImportError(text, name=name)
    raise AttributeError(text, name=name)


def _hint(name: str) -> str:
    """Which room has a name, or which name is like it; nothing where neither is."""
    from difflib import get_close_matches
    from pkgutil import iter_modules

    modules = {module.name for module in iter_modules(__path__)}
    if name in modules:  # asked by the import system too, before it looks for the module
        return f" yet: import lsrdecomp.{name}"
    homes = {each: f"lsrdecomp.{each}" for each in __all__}
    for room in modules.intersection(__all__):
        homes |= {each: f"lsrdecomp.{room}.{each}" for each in getattr(_lazy(room), "__all__", ())}
    if name in homes:
        return f": it is {homes[name]}"
    close = get_close_matches(name, homes, 1)
    return f"; did you mean {homes[close[0]]}?" if close else ""
