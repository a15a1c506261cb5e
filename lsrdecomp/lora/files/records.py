"""Records of a checkpoint: layers that read themselves, and tensors that are carried along."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.formats.stored import product_label
from lsrdecomp.lora.files.file_checks import FileReading
from lsrdecomp.lora.files.layer_names import module_role

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from lsrdecomp.kronecker.shape import ProductShape
    from lsrdecomp.lora.files.tensors import Array, StoredTensor

SHOWN_GROUPS = 12
"""Groups of like layers that the text of a checkpoint shows."""
LOKR_STAYS = (
    "is LoKr, one Kronecker product already, which is not made smaller here: keep it, or write it "
    "as plain LoRA, which is larger (export --to lora)"
)
"""What is said of a LoKr layer where layers are to be made smaller."""
NOT_READ = "such an adapter is not read: merge it into its base, or train it again as plain LoRA"


@dataclass(frozen=True, slots=True)
class LoraLayer:
    """A low-rank update of one module: ``ΔW = scale · B @ A``, out × in, whatever the storage.

    Attributes
    ----------
    name : str
        Module path in the base model, such as ``"encoder.layer.0.attention.self.query"``.
    layer_type : str
        ``"linear"``, ``"conv1d"`` (the base stores its weight in × out), ``"embedding"`` (its
        weight is ΔWᵀ) or ``"conv"`` (``in_features`` is channels times kernel).
    out_features, in_features : int
        m and n of ΔW.
    rank : int
        r of B (m, r) and A (r, n).
    scale : float
        What the format multiplies by: alpha / r, alpha / √r, or 1.
    dtype : str
        As stored.
    up, down : StoredTensor
        B and A in the file.
    kernel : tuple of int
        Kernel of a convolution, else empty.
    alpha : StoredTensor, optional
        What the scale comes from where the file has it beside the pair.
    keys : tuple of str
        Names of all its tensors in the file, where they are a pair there; none of LoHa's.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> layer = lora.layers[0]
    >>> layer.name, layer.layer_type, layer.rank, layer.scale
    ('bert.encoder.layer.3.attention.output.dense', 'linear', 8, 2.0)
    >>> [factor.shape for factor in layer.load()]                  # B and A
    [(384, 8), (8, 384)]
    """

    name: str
    layer_type: str
    out_features: int
    in_features: int
    rank: int
    scale: float
    dtype: str
    up: StoredTensor = field(repr=False)
    down: StoredTensor = field(repr=False)
    kernel: tuple[int, ...] = ()
    alpha: StoredTensor | None = field(default=None, repr=False)
    keys: tuple[str, ...] = field(default=(), repr=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n), the shape of ΔW."""
        return self.out_features, self.in_features

    @property
    def parameters(self) -> int:
        """How many numbers B and A hold."""
        return self.rank * (self.out_features + self.in_features)

    def load(self, *, double: bool = False) -> tuple[Array, Array]:
        """Read B, shape (m, r), and A, shape (r, n), in at least float32, or in float64.

        Raises
        ------
        CheckpointError
            If a number is not finite.
        """
        up = self.up.load(double=double).reshape(self.out_features, self.rank)
        down = self.down.load(double=double).reshape(self.rank, self.in_features)
        return up, down


@dataclass(frozen=True, slots=True)
class KroneckerLayer:
    """A product of two separated matrices: ``ΔW = scale · (Σ_k ⊗_i B_i[k]) (Σ_k ⊗_i A_i[k])``.

    Attributes
    ----------
    name, layer_type, scale, dtype, kernel
        As of a `LoraLayer`.
    shape : ProductShape
        How the out side, the inner rank and the in side are split.
    left_rank, right_rank : int
        Terms on the out side (B) and on the in side (A).
    left, right : tuple of StoredTensor
        Factors of B, each (s, m_i, r_i), and of A, each (t, r_i, n_i).
    stored_parameters : int, optional
        Numbers stored for the layer where they are not those of its factors.
    stored_label : str, optional
        Name and sizes of the structure that they are stored in, for tables.

    Examples
    --------
    >>> import tempfile
    >>> from importlib.resources import files
    >>> from lsrdecomp import compress, open_checkpoint
    >>> lora = files("lsrdecomp.cli") / "demo_adapter"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     compressed = compress(lora, separation_rank=2, inner_shape=(2, 2))
    ...     layer = open_checkpoint(compressed.save(f"{folder}/small")).layers[0]
    ...     print(layer.shape, layer.left_rank, layer.right_rank, layer.parameters)
    (24×2 ⊗ 16×2)(2×24 ⊗ 2×16) 2 2 320
    """

    name: str
    layer_type: str
    shape: ProductShape
    left_rank: int
    right_rank: int
    scale: float
    dtype: str
    left: tuple[StoredTensor, ...] = field(repr=False)
    right: tuple[StoredTensor, ...] = field(repr=False)
    kernel: tuple[int, ...] = ()
    stored_parameters: int | None = None
    stored_label: str | None = None

    @property
    def out_features(self) -> int:
        """Rows of ΔW."""
        return self.shape.matrix_shape[0]

    @property
    def in_features(self) -> int:
        """Columns of ΔW."""
        return self.shape.matrix_shape[1]

    @property
    def rank(self) -> int:
        """Inner rank: the largest rank that ΔW can have."""
        return self.shape.inner_rank

    @property
    def parameters(self) -> int:
        """How many numbers are stored for the layer."""
        if self.stored_parameters is not None:
            return self.stored_parameters
        return self.shape.parameters(self.left_rank, self.right_rank)

    @property
    def label(self) -> str:
        """The structure with its sizes, as tables show it."""
        if self.stored_label is not None:
            return self.stored_label
        return product_label(self.shape, (self.left_rank, self.right_rank))

    def load(self) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        """Read the factors of B and of A, in at least float32."""
        left = tuple(tensor.load() for tensor in self.left)
        right = tuple(tensor.load() for tensor in self.right)
        return left, right


Layer = LoraLayer | KroneckerLayer


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """An adapter that was opened: headers are read, numbers are not.

    Attributes
    ----------
    path : Path
        As given: a directory or a file.
    format : str
        ``"peft-lora"``, ``"lsr"``, …
    config : Mapping
        The raw adapter_config.json, or what stands for it.
    layers : tuple of LoraLayer or KroneckerLayer
        In the order of their names, numbers compared as numbers.
    extras : Mapping of str to StoredTensor
        Everything else in the file (heads, saved modules, biases), by the key PEFT would give it.
    weights : Path
        The weight file.
    metadata : Mapping of str to str
        What the header of the weight file says beside the tensors.
    notes : tuple of str
        What a reader of the report should know.
    tensors : Mapping of str to StoredTensor
        All tensors of the file that act on a model, by their keys in it.
    carried : Mapping of str to str
        Keys of tensors that are no pair and no extra, such as DoRA's magnitudes or full-size
        differences, with the reason. Only a cut in the file's own format keeps them.

    Examples
    --------
    >>> from importlib.resources import files
    >>> from lsrdecomp import open_checkpoint
    >>> lora = open_checkpoint(files("lsrdecomp.cli") / "demo_adapter")
    >>> lora
    peft-lora adapter demo_adapter: 12 layers, 73,728 parameters, 770 numbers of 2 other tensors
        3 × attention.output.dense, 384×384, rank 8
        3 × attention.self.key, 384×384, rank 8
        3 × attention.self.query, 384×384, rank 8
        3 × attention.self.value, 384×384, rank 8
    >>> lora.format, lora.adapter_parameters, sorted(lora.extras)
    ('peft-lora', 73728, ['base_model.model.classifier.bias', 'base_model.model.classifier.weight'])
    """

    path: Path
    format: str
    config: Mapping[str, Any]
    layers: tuple[Any, ...]
    extras: Mapping[str, StoredTensor]
    weights: Path
    metadata: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    carried: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        """Show what it holds in a few lines, layers of one role, size and rank counted together."""
        layers = f"{len(self.layers)} layers, {self.adapter_parameters:,} parameters"
        head = f"{self.format} adapter {self.path.name}: {layers}"
        if self.extras:
            head += f", {self.extra_parameters:,} numbers of {len(self.extras)} other tensors"
        groups: Counter[str] = Counter()
        for layer in self.layers:
            size = f"{layer.out_features}×{layer.in_features}"
            groups[f"{module_role(layer.name)}, {size}, rank {layer.rank}"] += 1
        lines = [f"  {count:3} × {group}" for group, count in groups.items()]
        if len(lines) > SHOWN_GROUPS:
            hidden = len(lines) - SHOWN_GROUPS
            lines[SHOWN_GROUPS:] = [f"  … and {hidden} more kinds of layers"]
        return "\n".join([head, *lines])

    @cached_property
    def _reading(self) -> FileReading:
        return FileReading.of(self.weights)

    @cached_property
    def _layers_by_name(self) -> dict[str, Any]:
        return {layer.name: layer for layer in self.layers}

    @property
    def source_sha256(self) -> str:
        """SHA-256 of the weight file, which is read through once, when first asked for."""
        return self._reading.sha256

    def watch_source(self) -> None:
        """Remember what the weight file holds before its numbers are read.

        `check_source` compares.
        """
        _ = self._reading

    def check_source(self) -> None:
        """Refuse a weight file that changed since `watch_source`, or since its SHA-256 was read."""
        self._reading.check_unchanged()

    @property
    def adapter_parameters(self) -> int:
        """How many numbers the layers hold."""
        return sum(layer.parameters for layer in self.layers)

    @cached_property
    def storage(self) -> str:
        """Type of most numbers of the layers; float32 for one that factors are not written in."""
        counts: Counter[str] = Counter()
        for layer in self.layers:
            counts[layer.dtype] += layer.parameters
        common = max(counts, key=lambda dtype: counts[dtype], default="float32")
        return common if common in ("float16", "bfloat16") else "float32"

    @property
    def extra_parameters(self) -> int:
        """How many numbers the other tensors hold."""
        return sum(tensor.parameters for tensor in self.extras.values())

    @property
    def extra_bytes(self) -> int:
        """Bytes of the other tensors."""
        return sum(tensor.nbytes for tensor in self.extras.values())

    def refuse_carried(self) -> None:
        """Raise `UnsupportedError` if there are tensors that are no pairs, with what keeps them.

        Whatever makes another format of a checkpoint asks.
        """
        for key, reason in self.carried.items():
            raise UnsupportedError(
                f"{reason}; only a cut in the file's own format keeps it (compress --to same; from "
                f"Python open_checkpoint(…, carry=True) and truncate). Elsewhere {NOT_READ}",
                path=self.weights,
                tensor=key,
            )

    def layer(self, name: str) -> Any:
        """Return the layer of this module; `CheckpointError` if there is none."""
        if name not in self._layers_by_name:
            raise CheckpointError(f"no layer {name!r} among {len(self.layers)}", path=self.path)
        return self._layers_by_name[name]


def low_rank_layer(
    name: str, up: StoredTensor, down: StoredTensor, scale: float, *, layer_type: str = "linear"
) -> LoraLayer:
    """Make a `LoraLayer` from its two stored halves, checked against each other.

    Parameters
    ----------
    name : str
    up, down : StoredTensor
        (m, r) and (r, n); for convolutions (m, r, 1, …) and ``(r, channels, *kernel)``.
    scale : float
    layer_type : str
        "linear", "conv1d" or "embedding"; halves with a kernel are of a convolution anyway.
    """
    if len(up.shape) < 2 or len(up.shape) != len(down.shape):
        raise up.error(f"shapes {up.shape} and {down.shape} of the two halves are not of one layer")
    for half in (up, down):
        if 0 in half.shape:
            raise half.error(
                f"shape {half.shape} is empty: shards of a distributed run were not gathered "
                "before saving"
            )
    kernel = tuple(down.shape[2:])
    if any(side != 1 for side in up.shape[2:]):
        raise up.error(
            f"shape {up.shape}: the out side of a convolution should have a 1 x 1 kernel"
        )
    out_features, rank = up.shape[:2]
    if rank != down.shape[0]:
        is_grouped = kernel and down.shape[0] % rank == 0
        reason = "; grouped convolutions are not read" if is_grouped else ""
        raise up.error(
            f"rank {rank} in shape {up.shape}, but {down.shape[0]} in {down.shape} of "
            f"{down.name}{reason}"
        )
    for half in (up, down):
        if not half.dtype.startswith(("float", "bfloat")):
            raise half.error(f"dtype {half.dtype}, expected floating-point numbers")
    return LoraLayer(
        name,
        "conv" if kernel else layer_type,
        out_features,
        math.prod(down.shape[1:]),
        rank,
        scale,
        up.dtype,
        up,
        down,
        kernel,
        keys=(up.name, down.name),
    )


def rank_notes(layers: tuple[Layer, ...]) -> tuple[str, ...]:
    """Return a note if some low-rank layers have a rank above what their matrix can have."""
    above = [
        layer for layer in layers if isinstance(layer, LoraLayer) and layer.rank > min(layer.shape)
    ]
    if not above:
        return ()
    first = above[0]
    example = f"{first.name}: rank {first.rank} on {first.out_features} x {first.in_features}"
    note = (
        f"{len(above)} of {len(layers)} layers have a rank above their size ({example}): "
        f"compressing clips it to {min(first.shape)}"
    )
    return (note,)
