"""LoRA+: the out side learns faster than the in side, by parameter groups for any optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lsrdecomp.adapters.errors import UnsupportedLayerError

if TYPE_CHECKING:
    from torch import nn


def loraplus_groups(
    model: nn.Module, *, lr: float, loraplus_lr_ratio: float, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Parameter groups that give LSR's out side ``loraplus_lr_ratio`` times the learning rate of everything else.

    PEFT's ``create_loraplus_optimizer`` looks for ``lora_B`` in the names of parameters, and would
    train both sides of an LSR adapter at one rate without a word.

    Parameters
    ----------
    model : torch.nn.Module
        A model with LSR adapters.
    lr, weight_decay : float
        As for the optimizer; vectors, such as DoRA's magnitudes and biases, are not decayed.
    loraplus_lr_ratio : float
        At least 1; Hayou et al. take 16 for LoRA. An LSR side is a product of factors, of which
        each moves it: begin with the square root of what suits LoRA.

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
    >>> [(group["lr"], len(group["params"])) for group in loraplus_groups(model, lr=1e-3, loraplus_lr_ratio=4.0)]
    [(0.001, 2), (0.004, 2)]

    Raises
    ------
    UnsupportedLayerError
        If nothing that is trained is the out side of an LSR adapter.
    ValueError
        For a ratio below 1.

    References
    ----------
    .. [1] S. Hayou, N. Ghosh and B. Yu, LoRA+: Efficient low rank adaptation of large models, 2024.
    """
    if loraplus_lr_ratio < 1:
        raise ValueError(
            f"loraplus_lr_ratio, the out side's rate over the in side's, is below 1: {loraplus_lr_ratio}"
        )
    trained = [
        (name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad
    ]
    if not any(".lsr_B." in name for name, _ in trained):
        raise UnsupportedLayerError(
            "LoRA+ speeds up the out side B of a pair, and no LSR adapter is trained here; direct sums have one side"
        )
    groups = []
    for fast in (False, True):
        for flat in (False, True):
            members = [
                p for name, p in trained if (".lsr_B." in name) == fast and (p.ndim == 1) == flat
            ]
            rate = lr * loraplus_lr_ratio if fast else lr
            groups.append(
                {"params": members, "lr": rate, "weight_decay": 0.0 if flat else weight_decay}
            )
    return [group for group in groups if group["params"]]
