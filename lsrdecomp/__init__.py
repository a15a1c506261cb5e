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
    `compress`         all its layers under one `CompressionPlan`: so many times smaller, so many bytes, such an error;
                       with a base and texts, the smallest form that keeps such a share of what it does
    `distil`           a compressed adapter trained, without labels, on the answers of its LoRA
    `read_statistics`  what ``lsrdecomp calibrate`` measured, so that errors count what the network does

Sizes and goals
    `KroneckerShape`, `ProductShape`, `ErrorBudget`, `unit_roundoff`

Errors, each an `LsrError`
    `BudgetError`, `CheckpointError`, `ConvergenceError`, `MatrixError`, `PrecisionError`, `ShapeError`

Rooms
    `solvers`      `SVD`, `BlockGolubKahan`, `ALS`, … to pass as ``solver=`` (the usual ones are here at the top too)
    `targets`      what else can be decomposed: low-rank pairs, sparse matrices, operators, streams of rows
    `operators`    solve, logdet, eigenvalues, preconditioners: what comes after a decomposition
    `kronecker`    shapes, `rearrange`, Kronecker algebra
    `formats`      number formats of stored factors, mixed precision
    `analysis`, `plots`         error curves, spectra, Pareto fronts, and their pictures
    `checkpoints`, `compression`, `fleet`    adapters on disk, one at a time or by the hundred

To be imported by name, since each needs more packages: `lsrdecomp.adapters` (LSR inside PEFT), `lsrdecomp.calibration`,
`lsrdecomp.training`, `lsrdecomp.promise` (torch), `lsrdecomp.testing` (tests; hypothesis),
`lsrdecomp.serving` (what a server makes of an adapter; gguf for llama.cpp's files).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

from lsrdecomp.checkpoints.registration import register_once_peft_loads as _register_once_peft_loads  # noqa: E402

_register_once_peft_loads()
