"""Direct LSR: ΔW = α Σ_k W1_k ⊗ W2_k ⊗ …, without a low-rank pair; with one term it is KronA."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lsrdecomp.errors import ShapeError
from lsrdecomp.kronecker.shape import KroneckerShape
from lsrdecomp.lora.files.readers.read_lsr import positive
from lsrdecomp.lora.peft.adapted import AdaptedLayer, dropout
from lsrdecomp.lora.peft.factors import KroneckerFactors, zero_factor
from lsrdecomp.lora.peft.geometry import LinearGeometry
from lsrdecomp.lora.peft.kernels import kronecker_pays
from lsrdecomp.lora.peft.lsr_config import TargetConfig, check_scale, find_by_pattern
from lsrdecomp.lora.peft.register import register
from lsrdecomp.lora.peft.tuner import KroneckerTuner


@dataclass
class DirectConfig(TargetConfig):
    """Settings of a direct LSR adapter: ΔW = alpha · Σ_k W1_k ⊗ W2_k ⊗ ….

    Parameters
    ----------
    separation_rank : int
        Number of terms.
    order : int
        Number of Kronecker factors.
    alpha : float
        Scale of ΔW.
    dropout : float
        Dropout on the input of the adapter while training.
    init_weights : bool
        True: ΔW = 0, the largest factor zero and the others random. False: every factor random.
    separation_rank_pattern, alpha_pattern : dict
        Module name or regular expression to ``separation_rank``, ``alpha`` of those layers.
    shape_pattern : dict
        Module name or regular expression to ``[[m1, n1], [m2, n2], ...]``; the most even split of
        both sides if absent. ``[[m, 1], [1, n]]`` is plain low rank.

    References
    ----------
    .. [1] X. Li and A. Sarwate, LSR-Adapt: Ultra-efficient parameter tuning with matrix low
       separation rank kernel adaptation, 2025.

    Examples
    --------
    >>> from peft import get_peft_model
    >>> from torch import nn
    >>> config = DirectConfig(separation_rank=2, target_modules=["0"])
    >>> model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
    >>> sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    256
    """

    separation_rank: int = 4
    order: int = 2
    alpha: float = 1.0
    dropout: float = 0.0
    init_weights: bool = True
    separation_rank_pattern: dict[str, int] = field(default_factory=dict)
    alpha_pattern: dict[str, float] = field(default_factory=dict)
    shape_pattern: dict[str, Any] = field(default_factory=dict)
    peft_type_name = "DLSR"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive("separation_rank", self.separation_rank)
        positive("order", self.order)
        check_scale("alpha", self.alpha)
        for name, alpha in self.alpha_pattern.items():
            check_scale(f"alpha_pattern[{name!r}]", alpha)
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")
        for name, sizes in self.shape_pattern.items():
            kronecker_shape(f"shape_pattern[{name!r}]", sizes)


class DirectLayer(AdaptedLayer):
    """Direct sums of Kronecker products beside one layer of the base model."""

    adapter_layer_names: tuple[str, ...] = ("dlsr_W",)
    other_param_names: tuple[str, ...] = (*AdaptedLayer.SCALE, "dropout")
    container = "dlsr_W"

    def __init__(self, base_layer: nn.Module, **quantization: Any) -> None:
        super().__init__(base_layer, **quantization)
        setattr(self, self.container, nn.ModuleDict())
        self.dropout = nn.ModuleDict()

    def factors(self, adapter: str) -> KroneckerFactors:
        """Return the factors of one adapter."""
        return getattr(self, self.container)[adapter]  # type: ignore[no-any-return]

    def update_layer(self, adapter: str, config: DirectConfig, name: str) -> None:
        """Add an adapter to this layer, called ``name`` in the base model."""
        sizes = find_by_pattern(config.shape_pattern, name)
        if sizes is None:
            shape = KroneckerShape.balanced(self.geometry.matrix_shape, config.order)
        else:
            shape = kronecker_shape(f"{name}: shape_pattern", sizes)
            shape.check(self.geometry.matrix_shape, name)
        terms = find_by_pattern(config.separation_rank_pattern, name) or config.separation_rank
        alpha = find_by_pattern(config.alpha_pattern, name)
        self.set_initial_scale(adapter, config.alpha if alpha is None else alpha)
        self.dropout[adapter] = dropout(config.dropout)
        terms = positive(f"{name}: separation_rank", terms)
        getattr(self, self.container)[adapter] = KroneckerFactors(shape, terms)
        self.initialize(adapter, config.init_weights)

    def initialize(self, adapter: str, init_weights: bool = True) -> None:
        """Set an adapter's factors to their starting values; see `DirectConfig`."""
        factors = self.factors(adapter)
        zero = zero_factor(factors.shape) if init_weights else None
        # One output of the random factors sums over their columns.
        columns = [size for index, size in enumerate(factors.shape.columns) if index != zero]
        fan_in = min(math.prod(columns), self.geometry.fan_in)
        factors.initialize(1 / math.sqrt(fan_in), zero)

    def delta_matrix(self, adapter: str) -> Tensor:
        """Return ΔW of one adapter as a matrix (out, in), scaling included."""
        formed: Tensor = self.factors(adapter)()
        return self.scaling[adapter] * formed

    def delta_output(self, adapter: str, x: Tensor) -> Tensor:
        """Return what ΔW of one adapter adds to the layer's output, by the cheaper of two ways."""
        factors = self.factors(adapter)
        is_floating = x.is_floating_point()  # an embedding reads token numbers
        if is_floating:
            x = self.dropout[adapter](self._cast_input_dtype(x, factors.factors[0].dtype))
        is_cheaper = kronecker_pays(
            factors.separation_rank, factors.shape.rows, factors.shape.columns
        )
        if is_cheaper and isinstance(self.geometry, LinearGeometry):
            applied: Tensor = factors(x)
            return self.scaling[adapter] * applied
        matrix = self.delta_matrix(adapter)
        if is_floating:
            matrix = matrix.to(x.dtype)
        return self.geometry.matrix_output(x, matrix)


class DirectLinear(DirectLayer):
    """Direct sums beside a linear layer."""


class DirectModel(KroneckerTuner):
    """A base model with direct LSR adapters."""

    prefix = "dlsr_"
    tuner_layer_cls: type[AdaptedLayer] = DirectLayer
    linear_layer_cls: type[AdaptedLayer] = DirectLinear


@dataclass
class KronAConfig(DirectConfig):
    """Settings of a KronA adapter: ΔW = alpha · A ⊗ B, direct LSR with one term and two factors.

    Parameters are those of `DirectConfig`; ``separation_rank`` is 1 and ``order`` 2.

    References
    ----------
    .. [1] A. Edalati, M. Tahaei, I. Kobyzev, V. Partovi Nia, J. J. Clark and M. Rezagholizadeh,
       KronA: Parameter efficient tuning with Kronecker adapter, 2022.

    Examples
    --------
    >>> from peft import get_peft_model
    >>> from torch import nn
    >>> config = KronAConfig(target_modules=["0"])
    >>> model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
    >>> sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    128
    """

    separation_rank: int = 1
    peft_type_name = "KRONA"

    def __post_init__(self) -> None:
        super().__post_init__()
        terms = {self.separation_rank, *self.separation_rank_pattern.values()}
        if terms != {1} or self.order != 2:
            raise ShapeError(
                f"KronA has one term and two factors, got {max(terms)} and {self.order}; "
                "DirectConfig has more"
            )


class KronALayer(DirectLayer):
    """KronA adapters beside one layer of the base model."""

    adapter_layer_names = ("krona_W",)
    container = "krona_W"


class KronALinear(KronALayer):
    """KronA adapters beside a linear layer."""


class KronAModel(KroneckerTuner):
    """A base model with KronA adapters."""

    prefix = "krona_"
    tuner_layer_cls = KronALayer
    linear_layer_cls = KronALinear


def kronecker_shape(name: str, sizes: Any) -> KroneckerShape:
    """Return one value of ``shape_pattern`` as a `KroneckerShape`."""
    try:
        return KroneckerShape(tuple((rows, columns) for rows, columns in sizes))
    except (TypeError, ValueError) as error:
        raise ShapeError(
            f"{name} must be [[m1, n1], [m2, n2], ...], got {sizes!r}: {error}"
        ) from error


register("dlsr", DirectConfig, DirectModel)
register("krona", KronAConfig, KronAModel)
