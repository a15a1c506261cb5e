"""The table of formats that are written.

A format whose files are pairs under keys of its own is a value of `Writer`; one that asks for more
(a profile, a base, a file to be like) is an `OwnWriter`. The command's help reads this table, so
nothing here needs NumPy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import UnsupportedError, unknown
from lsrdecomp.lora.files.layer_names import diffusers_name, kohya_name, mlx_name

if TYPE_CHECKING:
    from pathlib import Path

    from lsrdecomp.lora.files.records import Checkpoint
    from lsrdecomp.lora.files.tensors import Array, StoredTensor

    Pairs = Iterable[tuple[str, Array, Array]]

NameOf = Callable[[str, bool], str]
"""From a layer's name, and whether there are two text encoders, to what the format calls it."""
MakeConfig = Callable[["Export", Mapping[str, int]], dict[str, Any]]
"""From what is written and the ranks by layer to the values of adapter_config.json."""
FLOAT_STORAGES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, kw_only=True)
class Export:
    """The order to write: every writer gets the same, and reads what concerns it.

    Attributes
    ----------
    out : Path
        The file or directory to make.
    layers : iterable of (name, B, A)
        B (m, r) and A (r, n) with ``ΔW = B @ A``, taken one at a time.
    source : Checkpoint, optional
        Gives sizes, kernels and other tensors; never written into.
    storage : str, optional
        Type of the numbers, as the user named it.
    extras : Mapping, optional
        Instead of the source's other tensors.
    force : bool
        Whether existing files may be replaced.
    provenance : Mapping, optional
        JSON values for the record in the header.
    profile : str
        Of a PEFT directory, see `lsrdecomp.lora.files.write_lora`.
    base : path, optional
        The base model, where the format asks for its names or its layers.
    like : Checkpoint, optional
        The file whose format to write; absent, the source.
    """

    out: Path
    layers: Pairs
    source: Checkpoint | None = None
    storage: str | None = None
    extras: Mapping[str, StoredTensor] | None = None
    force: bool = False
    provenance: Mapping[str, Any] | None = None
    profile: str = "common"
    base: str | Path | None = None
    like: Checkpoint | None = None

    @property
    def float_storage(self) -> str:
        """The type of the numbers: as named, else as in the source, else float32."""
        if self.storage is not None or self.source is None:
            return self.storage or "float32"
        return self.source.storage

    @property
    def other_tensors(self) -> Mapping[str, StoredTensor]:
        """The tensors beside the layers."""
        if self.extras is not None:
            return self.extras
        return self.source.extras if self.source else {}


@dataclass(frozen=True)
class OwnWriter:
    """A format that has a function of its own in `lsrdecomp.lora.files.writers.rows`.

    Attributes
    ----------
    name : str
        As it is typed after ``--to``.
    place : str
        ``"directory"`` or ``"file"``; empty where another file decides.
    storages : tuple of str
        Types of numbers that are offered for ``--storage``.
    """

    name: str
    place: str
    storages: tuple[str, ...] = FLOAT_STORAGES


@dataclass(frozen=True)
class Writer:
    """A format whose files hold one pair a layer, under keys of its own.

    Parameters
    ----------
    name : str
        As it is typed after ``--to``.
    endings : (str, str)
        Of the keys of A and of B.
    name_of : callable
        From a layer's name, and whether there are two text encoders, to what the format calls it;
        raises `UnsupportedError` for one that it has no name for.
    transposed : bool
        Whether A is stored as (n, r) and B as (r, m).
    has_one_rank : bool
        Whether the format's programs ask for one rank of all layers: others are padded with zeros.
    has_alphas : bool
        Whether each layer has an ``.alpha`` beside the pair, its rank. The scale is in B either
        way.
    takes_extras : bool
        Whether the format's programs load a file that holds other tensors, such as heads.
    config : callable, optional
        Makes adapter_config.json: the format is then a directory. Absent, it is one file that ends
        in .safetensors.
    weights : str
        Name of the weight file in a directory.
    storages : tuple of str
        Types of numbers that are offered for ``--storage``.
    """

    name: str
    endings: tuple[str, str]
    name_of: NameOf = lambda name, _: name
    transposed: bool = False
    has_one_rank: bool = False
    has_alphas: bool = False
    takes_extras: bool = True
    config: MakeConfig | None = None
    weights: str = "adapter_model.safetensors"
    storages: tuple[str, ...] = FLOAT_STORAGES

    @property
    def place(self) -> str:
        """Whether a directory or a file is written."""
        return "file" if self.config is None else "directory"


def mlx_config(export: Export, ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the config of mlx-lm for pairs whose scale is in B.

    Keys name modules within a block, as mlx-lm's own, and -1 asks for all blocks: those without a
    pair in the file get zeros.
    """
    base = export.source.config.get("base_model_name_or_path") if export.source else None
    keys = {re.sub(r"^.*?\blayers\.\d+\.", "", name) for name in ranks}
    parameters = {"rank": max(ranks.values()), "scale": 1.0, "dropout": 0.0, "keys": sorted(keys)}
    return {
        "fine_tune_type": "lora",
        "model": base,
        "num_layers": -1,
        "lora_parameters": parameters,
    }


KOHYA = Writer("kohya", (".lora_down.weight", ".lora_up.weight"), kohya_name, has_alphas=True)
DIFFUSERS = Writer(
    "diffusers", (".lora_A.weight", ".lora_B.weight"), diffusers_name, takes_extras=False
)
MLX = Writer(
    "mlx",
    (".lora_a", ".lora_b"),
    mlx_name,
    transposed=True,
    has_one_rank=True,
    takes_extras=False,
    config=mlx_config,
    weights="adapters.safetensors",
)
"""Checked with mlx-lm 0.32.2 (d78bf58e217c), whose `load_adapters` refuses other tensors and
ranks."""
WRITERS: tuple[Writer | OwnWriter, ...] = (
    OwnWriter("lora", "directory"),
    OwnWriter("gguf", "file", ("f32", "f16", "q8_0")),
    KOHYA,
    DIFFUSERS,
    MLX,
    OwnWriter("same", ""),
)
"""What ``export --to`` writes."""
CUT_FORMATS = ("same", MLX.name)
"""What ``compress --to`` writes. Kohya's and diffusers' files may have q, k and v in one, or apart,
which changes the size that was asked for: `export` writes them."""


def writer_names() -> tuple[str, ...]:
    """Return what may be typed after ``--to``."""
    return tuple(writer.name for writer in WRITERS)


def find_writer(name: str) -> Writer | OwnWriter:
    """Return the row of `WRITERS` with a name; `UnsupportedError` if there is none."""
    for writer in WRITERS:
        if writer.name == name:
            return writer
    raise UnsupportedError(f"cannot write {unknown(name, writer_names())}")
