"""Layer statistics: the two weights of the Fisher norm, read from the files that calibration wrote, without torch.

A directory of statistics holds ``statistics.json`` (`METADATA`), with the SHA-256 of the other file
unless an older version wrote it, and ``statistics.safetensors`` (`TENSORS`). For each module and
each side, ``input`` (C, n × n) and ``output`` (G, m × m), three tensors

    <module>.input.eigenvectors   (n, q)   orthonormal columns V
    <module>.input.eigenvalues    (q,)     λ, descending, ≥ 0
    <module>.input.rest           ()       ρ ≥ 0

mean C ≈ V diag(λ) Vᵀ + ρ (I − V Vᵀ). In the full form q = n and ρ is without effect. Scale: with
both weights as stored, ½ ‖G^½ (ΔW − ΔŴ) C^½‖_F² estimates, to second order, the KL divergence in
nats that putting ΔŴ in place of ΔW in this one layer causes, per example (per predicted token for
language models). How C and G are measured is told in `lsrdecomp.calibration.calibrate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.checkpoints.files import read_json, regular_file_size, sha256
from lsrdecomp.checkpoints.tensors import StoredTensor, read_header
from lsrdecomp.errors import CheckpointError, PrecisionError
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights

if TYPE_CHECKING:
    from numpy.typing import NDArray

METADATA = "statistics.json"
TENSORS = "statistics.safetensors"
FORMAT = "lsrdecomp-statistics"
VERSION = 1
SIDES = ("output", "input")
DAMPING = 0.03
"""Share of the mean eigenvalue added to all: directions that calibration never saw still cost a
little."""
ORTHONORMAL = 5e-3
"""Most that VᵀV of stored eigenvectors may differ from I: rounded to half precision, they stay far
below."""
PARTS = ("eigenvectors", "eigenvalues", "rest")


class Statistics(Mapping[str, NormWeights]):
    """The Fisher norms of a base's layers by module name, damped for the solvers; each is read when it is asked for."""

    def __init__(
        self, metadata: Mapping[str, Any], tensors: Mapping[str, StoredTensor], path: Path
    ) -> None:
        self.metadata = metadata
        self.path = path
        self._tensors = tensors
        self._sound: set[str] = (
            set()
        )  # weights found orthonormal: a search reads them again and again

    def __getitem__(self, module: str) -> NormWeights:
        return NormWeights(*(damped(self._weight(module, side), DAMPING) for side in SIDES))

    def measured(self, module: str) -> NormWeights:
        """The weights of a layer as calibration measured them."""
        return NormWeights(*(self._weight(module, side) for side in SIDES))

    def __contains__(self, module: object) -> bool:
        return module in self._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)

    @cached_property
    def _modules(self) -> dict[str, None]:
        suffix = f".input.{PARTS[0]}"
        return dict.fromkeys(
            name.removesuffix(suffix) for name in self._tensors if name.endswith(suffix)
        )

    def check_base(self, declared: str | None) -> None:
        """Refuse an adapter for another base than the one these statistics are of, as far as both name theirs.

        Parameters
        ----------
        declared : str, optional
            ``base_model_name_or_path`` of the adapter; only its last part counts, since places
            differ between machines.

        Raises
        ------
        CheckpointError
            Naming both.
        """
        base = self.metadata.get("settings", {}).get("adapter_base")
        if base and declared and _last_part(base) != _last_part(declared):
            text = f"of base {base}, and the adapter is for {declared}; calibrate on that base"
            raise CheckpointError(text, path=self.path.parent)

    def effect(self, adapter: str) -> float | None:
        """KL(LoRA ‖ no adapter) in nats an answer, as calibration measured it on its examples.

        Parameters
        ----------
        adapter : str
            SHA-256 of the weight file of the LoRA; None is returned for another than the one that
            was active.
        """
        settings = self.metadata.get("settings", {})
        effect = settings.get("effect")
        return float(effect) if effect and settings.get("adapter") == adapter else None

    def _weight(self, module: str, side: str) -> LowRankPlusIdentity:
        if module not in self._modules:
            raise KeyError(module)
        name, parts = f"{module}.{side}", []
        for part in PARTS:
            stored = self._tensors.get(f"{name}.{part}")
            if stored is None:
                raise CheckpointError(
                    "missing; calibrate again", path=self.path, tensor=f"{name}.{part}"
                )
            parts.append(stored.load().astype(np.float64))
        vectors, values, rest = parts
        if (
            rest.shape != ()
            or vectors.ndim != 2
            or values.shape != vectors.shape[1:]
            or values.size > len(vectors)
        ):
            shapes = ", ".join(
                f"{part} {array.shape}" for part, array in zip(PARTS, parts, strict=True)
            )
            text = f"{shapes}; expected (n, q), (q,) and () with q ≤ n; calibrate again"
            raise CheckpointError(text, path=self.path, tensor=name)
        half = self._tensors[f"{name}.{PARTS[0]}"].dtype == "float16"
        if half or name not in self._sound:
            vectors = self._orthonormal(name, vectors, half)
            self._sound.add(name)
        try:
            return LowRankPlusIdentity(vectors, values, rest)
        except PrecisionError as error:
            raise CheckpointError(str(error), path=self.path, tensor=name) from None

    def _orthonormal(
        self, name: str, vectors: NDArray[np.float64], half: bool
    ) -> NDArray[np.float64]:
        """Eigenvectors as they are if they are orthonormal; from half precision orthonormal again."""
        stored = (
            vectors if half else vectors.astype(np.float32)
        )  # whose digits are more than enough for the check
        gram = stored.T @ stored
        off = float(np.abs(gram - np.eye(len(gram))).max(initial=0.0))
        if not off < ORTHONORMAL:
            text = f"eigenvectors are not orthonormal: VᵀV differs from I by {off:.2g}; damaged, calibrate again"
            raise CheckpointError(text, path=self.path, tensor=f"{name}.{PARTS[0]}")
        if not half:
            return vectors
        from scipy.linalg import solve_triangular

        # To the digits of a double, and no further away than rounding had moved them.
        solution: NDArray[np.float64] = solve_triangular(
            np.linalg.cholesky(gram), vectors.T, lower=True, check_finite=False
        ).T
        return solution


def damped(weight: LowRankPlusIdentity, fraction: float) -> LowRankPlusIdentity:
    """With ``fraction`` of the mean eigenvalue added to every eigenvalue.

    >>> damped(LowRankPlusIdentity(np.array([[1.0], [0.0]]), np.array([4.0]), 1.0), 0.4).apply(np.eye(2))
    array([[5., 0.],
           [0., 2.]])
    """
    added = fraction * weight.trace / weight.size
    return LowRankPlusIdentity(weight.basis, weight.values + added, weight.rest + added)


def _last_part(base: str) -> str:
    return base.rstrip("/\\").replace("\\", "/").rpartition("/")[2].lower()


def read_statistics(directory: str | Path) -> Statistics:
    """Open a directory that `lsrdecomp calibrate` wrote; tensors are read layer by layer on demand.

    The file of tensors is read through once and held to its recorded digest.

    Parameters
    ----------
    directory : str or Path

    Returns
    -------
    Statistics
        A mapping of module names to the norm of each layer.

    Raises
    ------
    CheckpointError
        If a file is missing, damaged, changed since it was written or not of this format; names
        file and tensor.

    Examples
    --------
    >>> from importlib.resources import files
    >>> len(read_statistics(files("lsrdecomp.cli") / "demo_statistics"))
    12
    """
    directory = Path(directory)
    metadata = read_json(directory / METADATA)
    if metadata.get("format") != FORMAT:
        raise CheckpointError(
            f"format {metadata.get('format')!r}, expected {FORMAT!r}", path=directory / METADATA
        )
    if metadata.get("version") != VERSION:
        raise CheckpointError(
            f"version {metadata.get('version')!r}, this release reads {VERSION}",
            path=directory / METADATA,
        )
    path = directory / TENSORS
    if "sha256" in metadata and regular_file_size(path) and metadata["sha256"] != sha256(path):
        text = f"changed since it was written: its SHA-256 is not the one in {METADATA}; copy it again, or calibrate again"
        raise CheckpointError(text, path=path)
    return Statistics(metadata, read_header(path).tensors, path)
