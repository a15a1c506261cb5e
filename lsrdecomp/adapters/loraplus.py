"""LoRA+: the output side B̂ learns faster than the input side Â, by groups of parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lsrdecomp.adapters.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from torch import nn

OUTPUT_SIDE = ".lsr_B."
"""Part of the name of every factor of the output side."""


def loraplus_groups(
    model: nn.Module, *, lr: float, loraplus_lr_ratio: float, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Return groups of parameters in which LSR's output side has a larger learning rate.

    PEFT's ``create_loraplus_optimizer`` looks for ``lora_B`` in the names of parameters, and would
    train both sides of an LSR adapter at one rate without a word.

    Parameters
    ----------
    model : torch.nn.Module
        A model with LSR adapters.
    lr, weight_decay : float
        As for the optimizer; vectors, such as DoRA's magnitudes and biases, are not decayed.
    loraplus_lr_ratio : float
        Learning rate of the output side over that of everything else, at least 1; Hayou et al. take
        16 for LoRA. An LSR side is a product of factors, of which each moves it: begin with the
        square root of what suits LoRA.

    Returns
    -------
    list of dict
        For ``torch.optim.AdamW(groups, lr=lr)`` and its like; every trained parameter is in one
        group.

    Examples
    --------
    >>> from lsrdecomp.adapters import LsrConfig
    >>> from peft import get_peft_model
    >>> from torch import nn
    >>> config = LsrConfig(inner_shape=[2, 2], separation_rank=2, target_modules=["0"])
    >>> model = get_peft_model(nn.Sequential(nn.Linear(64, 64)), config)
    >>> for group in loraplus_groups(model, lr=1e-3, loraplus_lr_ratio=4.0):
    ...     print(group["lr"], len(group["params"]))
    0.001 2
    0.004 2

    Raises
    ------
    UnsupportedLayerError
        If nothing that is trained is the output side of an LSR adapter.
    ValueError
        For a ratio below 1.

    References
    ----------
    .. [1] S. Hayou, N. Ghosh and B. Yu, LoRA+: Efficient low rank adaptation of large models, 2024.
    """
    if loraplus_lr_ratio < 1:
        raise ValueError(
            "loraplus_lr_ratio, the output side's rate over the input side's, is below 1: "
            f"{loraplus_lr_ratio}"
        )
    trained = {
        name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    if not any(OUTPUT_SIDE in name for name in trained):
        raise UnsupportedLayerError(
            "LoRA+ speeds up the output side B of a pair, and no LSR adapter is trained here; "
            "direct sums have one side"
        )
    # At most four groups, by the side and by whether the parameter is a vector.
    members: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in trained.items():
        is_on_output_side = OUTPUT_SIDE in name
        is_vector = parameter.ndim == 1
        members.setdefault((is_on_output_side, is_vector), []).append(parameter)
    groups = []
    for is_on_output_side, is_vector in sorted(members):
        groups.append(
            {
                "params": members[is_on_output_side, is_vector],
                "lr": lr * loraplus_lr_ratio if is_on_output_side else lr,
                "weight_decay": 0.0 if is_vector else weight_decay,
            }
        )
    return groups
