"""Matrices and LoRA adapters as short sums of Kronecker products (low separation rank).

A matrix
    `decompose`        the shortest sum of Kronecker products within a tolerance, or of `rank` terms
    `decompose_each`   the same for a stack of matrices
    `best_shape`       the shape with the fewest parameters; low rank and dense are among them
    `error_curve`      how the error falls with the number of terms
    `SeparatedMatrix`  the answer as an operator: ``A @ x``, norms; formed by `to_matrix` alone
    `recompress`       fewer terms for a `SeparatedMatrix` that has too many
    `load`             reads what ``save`` of an answer wrote

A LoRA adapter
    `open_checkpoint`  a directory or file of PEFT, kohya, diffusers, LyCORIS, … as layers
    `compress`         makes one smaller: to a size, an error, or a share of its effect to keep
    `measure`          how much of one is left in an adapter, a merged model or a server
    `distill`           trains a compressed adapter on the outputs of its LoRA, without labels
    `read_statistics`  reads what ``lsrdecomp calibrate`` wrote: errors then count the outputs

Sizes and goals
    `KroneckerShape`, `ProductShape`, `CompressionPlan`, `ErrorBudget`, `unit_roundoff`

Rooms of matrices
    `kronecker`    shapes, `rearrange`, Kronecker algebra
    `targets`      what else can be decomposed: low-rank pairs, sparse matrices, operators, …
    `formats`      number formats of stored factors, mixed precision
    `solvers`      `SVD`, `ALS`, `Krylov`, …, to pass as ``solver=``
    `operators`    solve, logdet, eigenvalues, preconditioners: what comes after a decomposition
    `analysis`, `plots`         error curves, spectra, Pareto fronts, and their pictures
    `errors`       `ShapeError`, `BudgetError`, `CheckpointError`, …, each an `LsrError`
    ``testing``    checks for Kronecker code of your own: ``import lsrdecomp.testing`` (hypothesis)

Rooms of LoRA adapters
    `lora`         files, search, measure, compress, fleet; and, with torch, base and train.
                   ``import lsrdecomp.lora.peft`` teaches PEFT to open and train LSR
"""

import lazy_loader

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    """Load a public name when it is first used; of any other say where it is or what it is like."""
    if name == "__version__":
        from importlib.metadata import version

        return version("lsrdecomp")
    if name in __all__:
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
    rooms = {f"lsrdecomp.{room}": _load(room) for room in modules.intersection(__all__)}
    lora = rooms["lsrdecomp.lora"]
    rooms |= {f"lsrdecomp.lora.{room}": getattr(lora, room) for room in lora.__all__}
    for path, room in rooms.items():
        for public in getattr(room, "__all__", ()):
            homes.setdefault(public, f"{path}.{public}")
    if name in homes:
        return f": it is {homes[name]}"
    similar = get_close_matches(name, homes, n=1, cutoff=0.7)
    return f"; did you mean {homes[similar[0]]}?" if similar else ""
