"""Settings of an LSR adapter, as in adapter_config.json, and the sizes they give to one layer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError
from peft.config import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from peft.utils.other import get_pattern_key
from peft.utils.peft_types import PeftType

from lsrdecomp.errors import INSTALL_EXTRA, ShapeError
from lsrdecomp.kronecker.shape import ProductShape, balanced_split
from lsrdecomp.lora.files.adapter_config import spellings
from lsrdecomp.lora.files.packed import NUMBERS
from lsrdecomp.lora.files.packed_index import read_index, split_tensor, text_of_index
from lsrdecomp.lora.files.readers.read_lsr import positive, product_shape, separation_ranks, sizes
from lsrdecomp.lora.files.tensors import read_header
from lsrdecomp.lora.peft.register import add_member

if TYPE_CHECKING:
    from collections.abc import Mapping

INITIALIZATIONS = (True, False, "paper")
CARD_HEADING = "## Loading this adapter"
CARD_SECTION = """\
{heading}

PEFT knows `peft_type: {peft_type_name}` once this line has run (`{install}` in a clone of \
lsrdecomp):

```python
import lsrdecomp.lora.peft
```

Then `PeftModel.from_pretrained(base_model, "<this folder>")` works as usual; pass \
`is_trainable=True` to train on.
"""
T = TypeVar("T")


@dataclass
class TargetConfig(PeftConfig):
    """Which modules an adapter goes to, with PEFT's names and meanings.

    Parameters
    ----------
    target_modules : list of str or str, optional
        Module names (an ending suffices) or one regular expression; ``"all-linear"`` for every
        linear layer but the output layer; the architecture's usual layers if absent.
    exclude_modules : list of str or str, optional
        Modules to leave out although ``target_modules`` matches them.
    layers_to_transform : int or list of int, optional
        Only these layer indices.
    layers_pattern : str or list of str, optional
        Name of the list of layers, if it is not a common one.
    modules_to_save : list of str, optional
        Modules that are trained in full and saved with the adapter.
    bias : {"none", "all", "<type>_only"}
        Which biases of the base model are trained and saved.
    trainable_token_indices : list of int or dict, optional
        Single rows of the embedding that are trained in full.
    layer_replication : list of [int, int], optional
        Ranges of layers that make up a deeper model; the copies share weights and get adapters of
        their own.
    ensure_weight_tying : bool
        Where the embedding and the output layer share one weight, let them share one adapter too.
    load_with : str
        What a program must import to open the adapter; written for people, read by nothing.
    """

    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = None
    bias: str = "none"
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    layer_replication: list[Any] | None = None
    ensure_weight_tying: bool = False
    load_with: str = "import lsrdecomp.lora.peft"
    peft_type_name: ClassVar[str]
    """What PEFT calls the type of adapter, such as ``"LSR"``."""

    def __post_init__(self) -> None:
        """Bring the fields into PEFT's form, and refuse those that contradict one another."""
        if self.ensure_weight_tying:
            self.modules_to_tie: list[str] | None = None
            self.target_modules_to_tie: list[str] | None = None
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.peft_type = add_member(PeftType, self.peft_type_name)
        adapted_only = f"{self.peft_type_name.lower()}_only"
        if self.bias not in ("none", "all", adapted_only):
            raise ValueError(f"bias must be 'none', 'all' or {adapted_only!r}, got {self.bias!r}")
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)  # type: ignore[assignment]
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)  # type: ignore[assignment]
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            for name in ("layers_to_transform", "layers_pattern"):
                if getattr(self, name) is not None:
                    raise ValueError(f"`{name}` cannot be used when `target_modules` is a str.")
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(
                "When `layers_pattern` is specified, `layers_to_transform` must also be specified."
            )

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write adapter_config.json and, beside weights, our part of the model card."""
        super().save_pretrained(save_directory, **kwargs)
        if (Path(save_directory) / "adapter_model.safetensors").exists():
            write_card(save_directory, self.peft_type_name)


@dataclass
class LsrConfig(TargetConfig):
    """Settings of an LSR adapter: ΔW = scaling · (Σ_k B1_k ⊗ B2_k ⊗ …)(Σ_k A1_k ⊗ A2_k ⊗ …).

    Parameters
    ----------
    r : int, optional
        Inner rank, the rank of ΔW. Taken from ``inner_shape`` if absent, else 16.
    inner_shape : list of int, optional
        Kronecker split of the inner rank, one size per factor. The most even split of ``r`` if
        absent.
    order : int, optional
        Number of Kronecker factors. Taken from ``inner_shape`` if absent, else 2.
    separation_rank : int or [int, int]
        Number of terms, of both sides or as ``[output side, input side]``.
    lsr_alpha : float
        ΔW is scaled by ``lsr_alpha / r``.
    use_rslora : bool
        Scale by ``lsr_alpha / sqrt(r)`` instead (Kalajdzievski, 2023).
    lsr_dropout : float
        Dropout on the input of the adapter while training.
    use_dora : bool
        Train a magnitude for every output beside ΔW (Liu et al., 2024, DoRA).
    target_parameters : list of str, optional
        Names of single parameters to adapt where no module holds them alone, such as the stacked
        experts of a mixture: each expert gets a ΔW of inner rank ``r``, and all share the Kronecker
        factors.
    init_weights : {True, False, "paper"}
        True: ΔW = 0, one factor zero and the others random. False: every factor random. "paper": as
        the authors of LSR-Adapt start, 0.01 times a standard normal everywhere.
    rank_pattern, alpha_pattern, separation_rank_pattern : dict
        Module name or regular expression to ``r``, ``lsr_alpha``, ``separation_rank`` of those
        layers.
    shape_pattern : dict
        Module name or regular expression to ``{"out": [m1, ...], "inner": [r1, ...], "into": [n1,
        ...]}``.
    layers : str, optional
        The patterns above for every layer of an adapter that `lsrdecomp` wrote, and what its weight
        file holds, in one text; see `lsrdecomp.lora.files.packed_index`. `from_pretrained` reads
        it in the weight file. It is not saved again: PEFT saves factors and patterns one by one.

    Raises
    ------
    ShapeError
        If sizes contradict one another.

    References
    ----------
    .. [1] X. Li and A. Sarwate, LSR-Adapt: Ultra-efficient parameter tuning with matrix low
       separation rank kernel adaptation, 2025.

    Examples
    --------
    >>> from peft import get_peft_model
    >>> from torch import nn
    >>> config = LsrConfig(inner_shape=[2, 2], separation_rank=2, target_modules=["0"])
    >>> model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
    >>> sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    128
    """

    r: int | None = field(default=None)
    inner_shape: list[int] | None = None
    order: int | None = None
    separation_rank: int | list[int] = 8
    lsr_alpha: float = 16
    use_rslora: bool = False
    lsr_dropout: float = 0.0
    use_dora: bool = False
    target_parameters: list[str] | None = None
    init_weights: bool | str = True
    rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    separation_rank_pattern: dict[str, Any] = field(default_factory=dict)
    shape_pattern: dict[str, Any] = field(default_factory=dict)
    layers: str | None = None
    peft_type_name = "LSR"

    def __post_init__(self) -> None:
        """Bring the fields into PEFT's form, and refuse those that contradict one another."""
        if self.layers is not None:
            for name, value in read_index(self.layers).config_fields().items():
                setattr(self, name, value)
            if self.target_parameters:
                raise ValueError(
                    "its experts were compressed one by one, and PEFT opens them stacked: "
                    "export them by `lsrdecomp export DIRECTORY --out LORA` and open that"
                )
        super().__post_init__()
        if self.init_weights not in INITIALIZATIONS:
            raise ValueError(
                f"init_weights must be True, False or 'paper', got {self.init_weights!r}"
            )
        if not 0.0 <= self.lsr_dropout < 1.0:
            raise ValueError(f"lsr_dropout must be at least 0 and below 1, got {self.lsr_dropout}")
        check_scale("lsr_alpha", self.lsr_alpha)
        for name, alpha in self.alpha_pattern.items():
            check_scale(f"alpha_pattern[{name!r}]", alpha)
        if isinstance(self.target_parameters, str):
            raise TypeError("`target_parameters` must be a list of strings or None.")
        self._resolve_inner_shape()
        separation_ranks("separation_rank", self.separation_rank)
        for name, rank in self.rank_pattern.items():
            positive(f"rank_pattern[{name!r}]", rank)
        for name, pair in self.separation_rank_pattern.items():
            separation_ranks(f"separation_rank_pattern[{name!r}]", pair)
        for name, split in self.shape_pattern.items():
            product_shape(f"shape_pattern[{name!r}]", split)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> Self:
        """Read the settings of an adapter: adapter_config.json, and sizes in its weight file.

        Parameters
        ----------
        pretrained_model_name_or_path, subfolder, **kwargs
            As for PEFT's own configs.
        """
        config: Self = super().from_pretrained(
            pretrained_model_name_or_path, subfolder=subfolder, **kwargs
        )
        # PEFT returns the config of whatever method the directory is of.
        is_lsr = isinstance(config, LsrConfig)
        if is_lsr and config.layers is None and config.target_modules is None:
            options, _, _ = cls._split_kwargs(kwargs)  # type: ignore[no-untyped-call]
            config.layers = _index_in_weights(pretrained_model_name_or_path, subfolder, options)
            config.__post_init__()
        return config

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write adapter_config.json without ``layers``, for PEFT saves factors one by one."""
        layers = self.layers
        self.layers = None
        try:
            super().save_pretrained(save_directory, **kwargs)
        finally:
            self.layers = layers

    def _resolve_inner_shape(self) -> None:
        """Set those of r, order and inner_shape that the others leave open."""
        if self.order is None:
            self.order = len(self.inner_shape) if self.inner_shape is not None else 2
        positive("order", self.order)
        if self.inner_shape is None:
            self.r = 16 if self.r is None else positive("r", self.r)
            return
        self.inner_shape = list(sizes("inner_shape", self.inner_shape))
        if len(self.inner_shape) != self.order:
            raise ShapeError(
                f"inner_shape {self.inner_shape} has {len(self.inner_shape)} sizes, "
                f"but order is {self.order}"
            )
        product = math.prod(self.inner_shape)
        if self.r is None:
            self.r = product
        if product != positive("r", self.r):
            split = " x ".join(map(str, self.inner_shape))
            raise ShapeError(
                f"inner_shape {split} = {product}, but r is {self.r}; leave one of the two out"
            )

    def inner_split(self, r: int) -> tuple[int, ...]:
        """Return the Kronecker split of an inner rank.

        It is ``inner_shape`` where that has this product, else the most even one.
        """
        if self.inner_shape is not None and math.prod(self.inner_shape) == r:
            return tuple(self.inner_shape)
        return balanced_split(r, self.order or 2)


def check_scale(name: str, value: object) -> None:
    """Raise `ValueError` for a scale that is no finite number."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return
    raise ValueError(f"{name} must be a finite number, got {value!r}")


def _index_in_weights(
    source: str, subfolder: str | None, download_options: Mapping[str, Any]
) -> str | None:
    """Return the index at the end of an adapter's weight file as a text; None if it has none.

    Parameters
    ----------
    source, subfolder
        A directory, or a repository of the hub.
    download_options
        For the hub.
    """
    path = Path(source, subfolder or "", SAFETENSORS_WEIGHTS_NAME)
    if not path.parent.is_dir():
        try:
            options = {"subfolder": subfolder, **download_options}
            path = Path(hf_hub_download(source, SAFETENSORS_WEIGHTS_NAME, **options))
        except EntryNotFoundError:
            return None
    if not path.is_file():
        return None
    tensor = read_header(path).tensors.get(NUMBERS)
    if tensor is None:
        return None
    _, index = split_tensor(tensor.read())
    return text_of_index(index)


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """Sizes and scale of the adapter of one layer."""

    shape: ProductShape
    separation_ranks: tuple[int, int]  # output side, input side
    scaling: float
    r: int


def layer_layout(
    config: LsrConfig, name: str, matrix_shape: tuple[int, int], copies: int = 1
) -> LayerLayout:
    """Return the sizes and the scale that settings give to one module.

    Parameters
    ----------
    config : LsrConfig
        The settings.
    name : str
        Full name of the module.
    matrix_shape : (int, int)
        Shape of its ΔW as a matrix (out, in).
    copies : int
        Matrices of this shape that lie side by side; the inner rank is ``r`` times as many.

    Raises
    ------
    ShapeError
        Naming the layer and the numbers, if a pattern's sizes do not tile the layer or contradict
        ``rank_pattern``.
    """
    split = find_by_pattern(config.shape_pattern, name)
    rank = find_by_pattern(config.rank_pattern, name)
    if split is None:
        r = positive(f"{name}: r", config.r if rank is None else rank)
        shape = ProductShape.balanced(matrix_shape, config.inner_split(r * copies))
    else:
        shape = product_shape(f"{name}: shape_pattern", split)
        r = shape.inner_rank // copies
        _check_inner_rank(name, shape, rank, copies)
        rows, columns = matrix_shape
        shape.left.check((rows, shape.inner_rank), f"{name}, output side")
        shape.right.check((shape.inner_rank, columns), f"{name}, input side")
    alpha = find_by_pattern(config.alpha_pattern, name)
    if alpha is None:
        alpha = config.lsr_alpha
    terms = find_by_pattern(config.separation_rank_pattern, name)
    if terms is None:
        terms = config.separation_rank
    return LayerLayout(
        shape=shape,
        separation_ranks=separation_ranks(f"{name}: separation_rank", terms),
        scaling=alpha / (math.sqrt(r) if config.use_rslora else r),
        r=r,
    )


def _check_inner_rank(name: str, shape: ProductShape, rank: int | None, copies: int) -> None:
    """Raise `ShapeError` if a shape's inner rank is not that of ``rank_pattern`` for each copy."""
    r, remainder = divmod(shape.inner_rank, copies)
    if remainder == 0 and rank in (None, r):
        return
    inner = " x ".join(map(str, shape.inner))
    matrices = f" for {copies} matrices" if copies > 1 else ""
    problem = "that is no whole rank each" if rank is None else f"rank_pattern says {rank}"
    raise ShapeError(
        f"{name}: inner {inner} = {shape.inner_rank}{matrices} in shape_pattern, but {problem}"
    )


def find_by_pattern(pattern: Mapping[str, T], name: str) -> T | None:
    """Return the value of a pattern for a module, matched as PEFT matches.

    It is that of the module's exact name, else of the first pattern that matches. An exact name,
    ``^`` and ``$`` around it and its dots escaped or not, is looked up and beats every pattern, so
    that a map of all layers of a model costs each of them no search. `lsrdecomp.lora.files` reads
    by the same rule.
    """
    for key in spellings(name):
        if key in pattern:
            return pattern[key]
    return pattern.get(get_pattern_key(list(pattern), name))


def write_card(folder: str | Path, peft_type_name: str) -> None:
    """Put our section into the README.md of a saved adapter, in place of an earlier one."""
    section = CARD_SECTION.format(
        heading=CARD_HEADING,
        peft_type_name=peft_type_name,
        install=INSTALL_EXTRA.format(extra="peft"),
    )
    path = Path(folder) / "README.md"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    # The earlier section ends where the next heading of its level begins.
    earlier_section = rf"{re.escape(CARD_HEADING)}\n.*?(?=^#{{1,2}} |\Z)"
    text = re.sub(earlier_section, "", text, flags=re.DOTALL | re.MULTILINE)
    path.write_text(f"{text.rstrip()}\n\n{section}" if text.strip() else section, encoding="utf-8")
