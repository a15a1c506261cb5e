"""KronA: ΔW is one Kronecker product of two matrices."""

from __future__ import annotations

from dataclasses import dataclass

from peft.utils.peft_types import PeftType

from lsrdecomp.adapters.direct import DirectConfig, DirectLayer
from lsrdecomp.adapters.register import add_member, register
from lsrdecomp.adapters.tuner import KroneckerTuner
from lsrdecomp.errors import ShapeError


@dataclass
class KronAConfig(DirectConfig):
    """Settings of a KronA adapter: ΔW = alpha · A ⊗ B, that is direct LSR with one term and two factors.

    Parameters are those of `DirectConfig`; ``separation_rank`` is 1 and ``order`` 2.

    References
    ----------
    .. [1] A. Edalati, M. Tahaei, I. Kobyzev, V. Partovi Nia, J. J. Clark and M. Rezagholizadeh, KronA: Parameter
       efficient tuning with Kronecker adapter, 2022.

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

    def _check(self, bias: str) -> None:
        self.peft_type = add_member(PeftType, "KRONA")
        super()._check("krona_only")
        terms = {self.separation_rank, *self.separation_rank_pattern.values()}
        if terms != {1} or self.order != 2:
            raise ShapeError(
                f"KronA has one term and two factors, got {max(terms)} and {self.order}; DirectConfig has more"
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


register("krona", KronAConfig, KronAModel)
