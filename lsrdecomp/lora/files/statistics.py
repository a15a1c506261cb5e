"""Layer statistics: the two weights of the Fisher norm, as calibration wrote them; without torch.

A directory of statistics holds ``statistics.json`` (`METADATA`), with the SHA-256 of the other file
unless an older version wrote it, and ``statistics.safetensors`` (`TENSORS`), with a digest of the
first in its header (since 0.4). For each module and each side, ``input`` (C, n × n) and ``output``
(G, m × m), three tensors

    <module>.input.eigenvectors   (n, q)   orthonormal columns V
    <module>.input.eigenvalues    (q,)     λ, descending, ≥ 0
    <module>.input.rest           ()       ρ ≥ 0

mean C ≈ V diag(λ) Vᵀ + ρ (I − V Vᵀ). In the full form q = n and ρ is without effect. Scale: with
both weights as stored, ½ ‖G^½ (ΔW − ΔŴ) C^½‖_F² estimates, to second order, the KL divergence in
nats that putting ΔŴ in place of ΔW in this one layer causes, per example (per predicted token for
language models). How C and G are measured: `lsrdecomp.lora.base.calibrate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lsrdecomp.errors import CheckpointError, PrecisionError
from lsrdecomp.lora.files.digests import ContentDigests, config_digest
from lsrdecomp.lora.files.file_checks import read_json, regular_file_size, sha256
from lsrdecomp.lora.files.tensors import StoredTensor, read_header
from lsrdecomp.targets.weights import LowRankPlusIdentity, NormWeights

if TYPE_CHECKING:
    from numpy.typing import NDArray

METADATA = "statistics.json"
TENSORS = "statistics.safetensors"
FORMAT = "lsrdecomp-statistics"
VERSION = 1
PARTS = ("eigenvectors", "eigenvalues", "rest")
DAMPING = 0.03
"""Share of the mean eigenvalue that is added to all: directions that calibration never saw still
cost a little. Of 0.003, 0.03 and 0.3 none is better everywhere (docs/evidence/language-models.md).
"""
MIN_EXAMPLES = 256
"""Examples below which what comes of the statistics is doubtful, where each has one prediction. At
1/48 the demo's LoRA keeps 0.33, 0.44, 0.47, 0.47, 0.55 and 0.60 of its effect (± 0.05) with
statistics of 16, 32, 64, 128, 256 and 512 reviews."""
MIN_PROMPTS = 64
"""The same where an example has several predictions, as a prompt's completion; by hand."""
ENOUGH_EXAMPLES = 500
"""Examples that serve, as a doubt recommends them; by hand."""
ORTHONORMAL_TOLERANCE = 5e-3
"""Largest entry of VᵀV − I that stored eigenvectors may have. By hand: what is rounded to half
precision stays far below."""


class Statistics(Mapping[str, NormWeights]):
    """Fisher norms of a base's layers by module name, damped for the solvers.

    Each is read when it is asked for.

    Parameters
    ----------
    metadata : mapping
        What ``statistics.json`` says.
    tensors : mapping of str to StoredTensor
    path : Path
        The file that they lie in.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, StoredTensor],
        path: Path,
    ) -> None:
        self.metadata = metadata
        self.path = path
        self._tensors = tensors
        # Weights that were found orthonormal: a search reads them again and again.
        self._orthonormal: set[str] = set()

    def __getitem__(self, module: str) -> NormWeights:
        return NormWeights(
            damped_weight(self._weight(module, "output"), DAMPING),
            damped_weight(self._weight(module, "input"), DAMPING),
        )

    def measured(self, module: str) -> NormWeights:
        """Return the weights of a layer as calibration measured them."""
        return NormWeights(self._weight(module, "output"), self._weight(module, "input"))

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
        """Refuse an adapter for another base than that of these statistics, if both name theirs.

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
            raise CheckpointError(
                f"of base {base}, and the adapter is for {declared}; calibrate on that base",
                path=self.path.parent,
            )

    def effect(self, adapter: str) -> float | None:
        """Return KL(LoRA ‖ no adapter) in nats an answer, as calibration measured it.

        Parameters
        ----------
        adapter : str
            SHA-256 of the weight file of the LoRA.

        Returns
        -------
        float, or None
            None for another adapter than the one that was active.
        """
        settings = self.metadata.get("settings", {})
        effect = settings.get("effect")
        if not effect or settings.get("adapter") != adapter:
            return None
        return float(effect)

    @property
    def doubts(self) -> tuple[str, ...]:
        """What makes a result of these statistics doubtful, each as a sentence with its numbers."""
        examples = self.metadata.get("examples")
        answers = self.metadata.get("answers")
        if not isinstance(examples, int) or not isinstance(answers, int):
            return ()
        needed = MIN_PROMPTS if answers > examples else MIN_EXAMPLES
        if examples >= needed:
            return ()
        need = f"give {needed} at least, better {ENOUGH_EXAMPLES}"
        return (f"the statistics are of {examples} examples: {need}",)

    def _weight(self, module: str, side: str) -> LowRankPlusIdentity:
        if module not in self._modules:
            raise KeyError(module)
        name = f"{module}.{side}"
        vectors, values, rest = (self._load(f"{name}.{part}") for part in PARTS)
        fits = (
            rest.shape == ()
            and vectors.ndim == 2
            and values.shape == vectors.shape[1:]
            and values.size <= len(vectors)
        )
        if not fits:
            shapes = f"eigenvectors {vectors.shape}, eigenvalues {values.shape}, rest {rest.shape}"
            raise CheckpointError(
                f"{shapes}; expected (n, q), (q,) and () with q ≤ n; calibrate again",
                path=self.path,
                tensor=name,
            )
        is_half = self._tensors[f"{name}.eigenvectors"].dtype == "float16"
        if is_half or name not in self._orthonormal:
            vectors = self._orthonormalized(name, vectors, is_half)
            self._orthonormal.add(name)
        try:
            return LowRankPlusIdentity(vectors, values, rest)
        except PrecisionError as error:
            raise CheckpointError(str(error), path=self.path, tensor=name) from None

    def _load(self, key: str) -> NDArray[np.float64]:
        stored = self._tensors.get(key)
        if stored is None:
            raise CheckpointError("missing; calibrate again", path=self.path, tensor=key)
        return stored.load().astype(np.float64)

    def _orthonormalized(
        self, name: str, vectors: NDArray[np.float64], is_half: bool
    ) -> NDArray[np.float64]:
        """Check eigenvectors, and make those in half precision orthonormal again."""
        # Single precision has more digits than the check needs.
        checked = vectors if is_half else vectors.astype(np.float32)
        gram = checked.T @ checked
        deviation = float(np.abs(gram - np.eye(len(gram))).max(initial=0.0))
        if not deviation < ORTHONORMAL_TOLERANCE:
            raise CheckpointError(
                f"eigenvectors are not orthonormal: VᵀV differs from I by {deviation:.2g}; "
                "damaged, calibrate again",
                path=self.path,
                tensor=f"{name}.eigenvectors",
            )
        if not is_half:
            return vectors
        from scipy.linalg import solve_triangular

        # To the digits of a double, and no further away than rounding had moved them.
        triangle = np.linalg.cholesky(gram)
        solution: NDArray[np.float64] = solve_triangular(
            triangle, vectors.T, lower=True, check_finite=False
        ).T
        return solution


def damped_weight(weight: LowRankPlusIdentity, fraction: float) -> LowRankPlusIdentity:
    """Add ``fraction`` of the mean eigenvalue to every eigenvalue.

    >>> weight = LowRankPlusIdentity(np.array([[1.0], [0.0]]), np.array([4.0]), 1.0)
    >>> damped_weight(weight, 0.4).apply(np.eye(2))
    array([[5., 0.],
           [0., 2.]])
    """
    added = fraction * weight.trace / weight.size
    return LowRankPlusIdentity(weight.basis, weight.values + added, weight.rest + added)


def _last_part(base: str) -> str:
    """Return the last part of a name or path, in lower case."""
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
    metadata_path = directory / METADATA
    metadata = read_json(metadata_path)
    if metadata.get("format") != FORMAT:
        found = f"format {metadata.get('format')!r}, expected {FORMAT!r}"
        raise CheckpointError(found, path=metadata_path)
    if metadata.get("version") != VERSION:
        found = f"version {metadata.get('version')!r}, this release reads {VERSION}"
        raise CheckpointError(found, path=metadata_path)
    path = directory / TENSORS
    if "sha256" in metadata and regular_file_size(path) and metadata["sha256"] != sha256(path):
        raise CheckpointError(
            f"changed since it was written: its SHA-256 is not the one in {METADATA}; copy it "
            "again, or calibrate again",
            path=path,
        )
    header = read_header(path)
    recorded = ContentDigests.read(header.metadata)
    described = {name: value for name, value in metadata.items() if name != "sha256"}
    if recorded is not None and recorded.config != config_digest(described):
        raise CheckpointError(
            f"changed since it was written: its digest is not the one in {TENSORS}; copy it "
            "again, or calibrate again",
            path=metadata_path,
        )
    return Statistics(metadata, header.tensors, path)
