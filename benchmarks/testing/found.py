"""What the checks of Kronecker code find in other people's libraries.

    pip install quimb qutip pylops linear_operator sparse cola-ml pennylane pyttb
    python -m benchmarks.testing.found
    python -m benchmarks.testing.found --only torch --show

Each library that is installed is checked as its users call it: once with all corner cases, and, if
that finds something, again without those that libraries seldom promise (empty matrices, mixed
types, entries that are not finite). The record holds each finding as it is printed.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp.testing import (
    IdentityError,
    check_apply,
    check_khatri_rao,
    check_kron,
    check_partial_trace,
    check_vec,
)

SELDOM_PROMISED = ("empty", "mixed types", "not finite")
"""Corner cases that are left out of the second check."""


@dataclass(frozen=True)
class Subject:
    """A function of a library, and the check that it is put through."""

    package: str  # as pip calls it
    name: str  # as its users do
    check: Callable[..., None]
    make: Callable[[], Callable[..., Any]]  # imports the library


def torch_array(array: Any) -> Any:
    """Return an array as torch takes it from NumPy: contiguous."""
    import torch

    return torch.as_tensor(np.ascontiguousarray(array))


def torch_kron() -> Callable[..., Any]:
    import torch

    # With the strides that the case has, as torch's own users call it.
    return lambda a, b: torch.kron(strided(a), strided(b)).numpy()


def strided(array: Any) -> Any:
    """Return a torch tensor with the strides of an array where torch has such."""
    import torch

    if any(stride < 0 for stride in array.strides) or 0 in array.shape:
        array = np.ascontiguousarray(array)
    return torch.from_numpy(array)


def jax_kron() -> Callable[..., Any]:
    import jax

    jax.config.update("jax_enable_x64", True)
    return lambda a, b: np.asarray(jax.numpy.kron(a, b))


def scipy_sparse_kron() -> Callable[..., Any]:
    import scipy.sparse

    return lambda a, b: scipy.sparse.kron(a, b).toarray()


def scipy_sparse_array_kron() -> Callable[..., Any]:
    import scipy.sparse as sp

    return lambda a, b: sp.kron(sp.coo_array(a), sp.coo_array(b)).toarray()


def pydata_kron() -> Callable[..., Any]:
    import sparse

    return lambda a, b: sparse.kron(sparse.COO(a), sparse.COO(b)).todense()


def tensorly_kron() -> Callable[..., Any]:
    from tensorly import tenalg

    return lambda a, b: tenalg.kronecker([a, b])


def linear_operator_of(factors: Any) -> Any:
    from linear_operator.operators import DenseLinearOperator, KroneckerProductLinearOperator

    return KroneckerProductLinearOperator(*(DenseLinearOperator(torch_array(f)) for f in factors))


def cola_of(factors: Any) -> Any:
    from cola.ops import Dense, Kronecker

    return Kronecker(*(Dense(torch_array(factor)) for factor in factors))


def pylops_of(a: Any, b: Any) -> Any:
    import pylops

    dtype = np.result_type(a.dtype, b.dtype)
    parts = [pylops.MatrixMult(part, dtype=part.dtype) for part in (a, b)]
    return pylops.Kronecker(*parts, dtype=dtype)


def imported(path: str) -> Callable[..., Any]:
    """Return what a dotted name stands for."""
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=[name]), name)


def quimb_kron() -> Callable[..., Any]:
    kron = imported("quimb.kron")
    return lambda a, b: np.asarray(kron(a, b))


def quimb_partial_trace() -> Callable[..., Any]:
    trace = imported("quimb.partial_trace")
    return lambda x, sizes, axis: np.asarray(trace(x, list(sizes), [1 - axis]))


def qutip_tensor() -> Callable[..., Any]:
    import qutip

    return lambda a, b: qutip.tensor(qutip.Qobj(a), qutip.Qobj(b)).full()


def qutip_ptrace() -> Callable[..., Any]:
    import qutip

    def partial_trace(x: Any, sizes: Any, axis: int) -> Any:
        return qutip.Qobj(x, dims=[list(sizes), list(sizes)]).ptrace(1 - axis).full()

    return partial_trace


def qutip_vec() -> Callable[..., Any]:
    import qutip

    return lambda x: qutip.operator_to_vector(qutip.Qobj(x)).full().ravel()


def pennylane_kron() -> Callable[..., Any]:
    from pennylane import math

    return lambda a, b: np.asarray(math.kron(a, b))


SUBJECTS = (
    Subject("numpy", "numpy.kron", check_kron, lambda: np.kron),
    Subject("torch", "torch.kron", check_kron, torch_kron),
    Subject("jax", "jax.numpy.kron", check_kron, jax_kron),
    Subject("scipy", "scipy.sparse.kron, of arrays", check_kron, scipy_sparse_kron),
    Subject("scipy", "scipy.sparse.kron, of coo_array", check_kron, scipy_sparse_array_kron),
    Subject("sparse", "sparse.kron", check_kron, pydata_kron),
    Subject("tensorly", "tensorly.tenalg.kronecker", check_kron, tensorly_kron),
    Subject(
        "linear_operator",
        "KroneckerProductLinearOperator.to_dense",
        check_kron,
        lambda: lambda a, b: linear_operator_of([a, b]).to_dense().numpy(),
    ),
    Subject(
        "linear_operator",
        "KroneckerProductLinearOperator @ x",
        check_apply,
        lambda: lambda factors, x: (linear_operator_of(factors) @ torch_array(x)).numpy(),
    ),
    Subject(
        "cola-ml",
        "cola.ops.Kronecker.to_dense",
        check_kron,
        lambda: lambda a, b: cola_of([a, b]).to_dense().numpy(),
    ),
    Subject(
        "cola-ml",
        "cola.ops.Kronecker @ x",
        check_apply,
        lambda: lambda factors, x: (cola_of(factors) @ torch_array(x)).numpy(),
    ),
    Subject(
        "pylops",
        "pylops.Kronecker.todense",
        check_kron,
        lambda: lambda a, b: pylops_of(a, b).todense(),
    ),
    Subject("quimb", "quimb.kron", check_kron, quimb_kron),
    Subject("quimb", "quimb.partial_trace", check_partial_trace, quimb_partial_trace),
    Subject("qutip", "qutip.tensor", check_kron, qutip_tensor),
    Subject("qutip", "Qobj.ptrace", check_partial_trace, qutip_ptrace),
    Subject("qutip", "qutip.operator_to_vector", check_vec, qutip_vec),
    Subject("pennylane", "pennylane.math.kron", check_kron, pennylane_kron),
    Subject(
        "scipy",
        "scipy.linalg.khatri_rao",
        check_khatri_rao,
        partial(imported, "scipy.linalg.khatri_rao"),
    ),
    Subject("pyttb", "pyttb.khatrirao", check_khatri_rao, partial(imported, "pyttb.khatrirao")),
    Subject(
        "tensorly",
        "tensorly.tenalg.khatri_rao",
        check_khatri_rao,
        lambda: lambda a, b: imported("tensorly.tenalg.khatri_rao")([a, b]),
    ),
)


def main() -> None:
    """Check every subject whose library is installed, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="subjects whose name or package holds this text")
    parser.add_argument("--show", action="store_true", help="print findings; write nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "found-in-the-wild.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for subject in SUBJECTS:
        if options.only and options.only not in f"{subject.package} {subject.name}":
            continue
        row = checked(subject)
        rows.append(row)
        print(f"{row['package']:24} {row['name']:40} {row['verdict']}", flush=True)
        if options.show:
            print(*row["findings"], sep="\n\n")
    if not options.show:
        records.save(options.out, {"rows": rows}, seed=None)


def checked(subject: Subject) -> dict[str, Any]:
    """Return the row of one subject: its version, a verdict, and the findings as printed."""
    row: dict[str, Any] = {
        "package": subject.package,
        "name": subject.name,
        "check": subject.check.__name__,
        "findings": [],
    }
    try:
        row["version"] = version(subject.package)
        function = subject.make()
    except (PackageNotFoundError, ImportError) as missing:
        return {**row, "verdict": f"not installed: {str(missing).splitlines()[0]}"}
    begun = time.process_time()
    everything = finding(subject.check, function)
    promised = ""
    if everything:
        promised = finding(subject.check, function, leave_out=SELDOM_PROMISED)
    row["seconds"] = round(time.process_time() - begun, 1)
    row["findings"] = [text for text in (everything, promised) if text]
    if not everything:
        return {**row, "verdict": "clean"}
    if not promised:
        return {**row, "verdict": "clean but for corners that it may not promise"}
    return {**row, "verdict": "a finding"}


def finding(check: Callable[..., None], function: Callable[..., Any], **options: Any) -> str:
    """Return what a check prints of a function; an empty text if it finds nothing."""
    try:
        check(function, **options)
    except IdentityError as found:
        return str(found)
    return ""


if __name__ == "__main__":
    main()
