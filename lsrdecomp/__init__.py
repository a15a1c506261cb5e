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

from lsrdecomp._renamed import NAMES, attach

_load, __dir__, __all__ = attach(__name__, __file__)


def __getattr__(name: str) -> object:
    """Load a public name when it is first used; tell of any other where it is or what it is like."""
    if name == "__version__":
        from importlib.metadata import version

        return version("lsrdecomp")
    if name in __all__ or f"lsrdecomp.{name}" in NAMES:
        return _load(name)
    hint = "" if name.startswith("__") else _hint(name)
    raise AttributeError(f"lsrdecomp has no {name!r}{hint}", name=name)


def _hint(name: str) -> str:
    """Return which room has a name, or which name is like it; an empty text where neither is."""
    from difflib import get_close_matches
    from pkgutil import iter_modules

    modules = {module.name for module in iter_modules(__path__)}
    if name in modules:  # asked by the import system too, before it looks for the module
        return f" yet: import lsrdecomp.{name}"

    homes = {public: f"lsrdecomp.{public}" for public in __all__}
    for room in modules.intersection(__all__):
        for public in getattr(_load(room), "__all__", ()):
            homes[public] = f"lsrdecomp.{room}.{public}"
    if name in homes:
        return f": it is {homes[name]}"
    similar = get_close_matches(name, homes, n=1)
    return f"; did you mean {homes[similar[0]]}?" if similar else ""
