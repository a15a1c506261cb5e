"""Grouping the tensors of a single file by module and role, for formats that say what a tensor is by its suffix."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.format import PREFIX
from lsrdecomp.checkpoints.tensors import StoredTensor
from lsrdecomp.errors import CheckpointError, UnsupportedError

PART = re.compile(r"\.(lora|hada|lokr|oft|glora)[._]")
Roles = dict[str, StoredTensor]

WITHOUT = "merge the file into its base, or save the pairs without such tensors and compress those"

# Parts of other methods that change the forward pass; dropping them silently would change the model.
REFUSED = {
    ".dora_scale": "DoRA rescales by the norm of the base weights, which are not in this file",
    ".lora_magnitude_vector": "DoRA rescales by the norm of the base weights, which are not in this file",
    ".lora_magnitude_vector.weight": "DoRA rescales by the norm of the base weights, which are not in this file",
    ".diff": f"a full-size difference, no LoRA: {WITHOUT}",
    ".diff_b": f"the difference of a bias, no LoRA: {WITHOUT}",
    ".set_weight": f"a full-size weight, no LoRA: {WITHOUT}",
    ".oft_blocks": "OFT rotates the base weights",
    ".oft_diag": "OFT rotates the base weights",
    ".on_input": "IA3 scales activations",
    ".w_norm": "a normalisation layer's difference",
    ".b_norm": "a normalisation layer's difference",
    ".a1.weight": "GLoRA multiplies the base weights",
    ".lora_up.bias": "a bias of the update",
    ".lora_B.bias": "a bias of the update",
}


def grouped(bundle: Bundle, suffixes: Mapping[str, str]) -> tuple[dict[str, Roles], dict[str, StoredTensor]]:
    """``{module: {role: tensor}}`` by the suffix of each key, and everything else under the key PEFT would give it."""
    modules: dict[str, Roles] = {}
    extras: dict[str, StoredTensor] = {}
    for key, tensor in bundle.tensors.items():
        for suffix, reason in REFUSED.items():
            if key.endswith(suffix):
                raise UnsupportedError(f"{reason}; such an adapter is not read", path=tensor.path, tensor=key)
        ends = [end for end in suffixes if key.endswith(end) and key != end]
        if not ends:
            if PART.search(key):
                text = "is part of an adapter, but not one this format is known to have"
                raise UnsupportedError(text, path=tensor.path, tensor=key)
            extras[PREFIX + key] = tensor
            continue
        roles, role = modules.setdefault(key.removesuffix(ends[0]), {}), suffixes[ends[0]]
        if role in roles:
            raise tensor.error(f"the same part as {roles[role].name}")
        roles[role] = tensor
    return modules, extras


def need(name: str, roles: Roles, wanted: Iterable[str], allowed: Iterable[str] = ()) -> None:
    """Raise `CheckpointError` unless a module has the wanted roles, and no other than those and the allowed."""
    wanted, held = tuple(wanted), next(iter(roles.values()))
    missing = [role for role in wanted if role not in roles]
    if missing:
        parts = ", ".join(sorted(roles))
        text = f"has {parts} without {', '.join(missing)}; the file is incomplete"
        raise CheckpointError(text, path=held.path, tensor=name)
    more = set(roles) - {*wanted, *allowed}
    if more:
        raise CheckpointError(f"has {', '.join(sorted(more))} beside {', '.join(wanted)}", path=held.path, tensor=name)


def scalar(tensor: StoredTensor) -> float:
    """The one number in a tensor, such as alpha."""
    if tensor.parameters != 1:
        raise tensor.error(f"shape {tensor.shape}, expected one number")
    return float(tensor.load().reshape(()))
