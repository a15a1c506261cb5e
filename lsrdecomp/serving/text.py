"""How PEFT and llama.cpp load an adapter; `check.SERVERS` names the sources."""

from __future__ import annotations

import re
from shlex import quote
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.config import check_pattern
from lsrdecomp.checkpoints.writers.gguf import import_gguf
from lsrdecomp.errors import LsrError
from lsrdecomp.serving.adapter import GGUF, export_command, misfit, task_type
from lsrdecomp.serving.report import ModuleFate, ServingCheck

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lsrdecomp.checkpoints import BaseModules, Checkpoint

PEFT_FORMATS = ("peft-lora", "peft-loha", "peft-lokr", "lsr")


def peft(check: ServingCheck, adapter: Checkpoint, base: BaseModules) -> None:
    """Fill a check by the rules of PEFT.

    Layers are made for what target_modules names; numbers of other layers are left out, wrong sizes
    raise.
    """
    if adapter.format not in PEFT_FORMATS:
        check.refuse(
            f"PEFT opens directories with adapter_config.json, and this is a {adapter.format} file"
        )
    if adapter.format == "lsr":
        check.notes.append("PEFT knows LSR after `import lsrdecomp.adapters`")
    for layer in adapter.layers:
        stored = base.find_as_opened(layer.name, task_type(adapter))
        fault = misfit(layer, stored, base.shapes)
        if stored is not None and fault is not None:
            check.refuse("PEFT raises where a size differs")
        elif fault is None and adapter.format != "lsr" and not _targeted(layer.name, adapter):
            fault = "target_modules of adapter_config.json does not name it"
        check.modules.append(ModuleFate(layer.name, layer.rank, fault))


def llama_cpp(check: ServingCheck, adapter: Checkpoint, base: BaseModules) -> None:
    """Fill a check by the rules of llama.cpp.

    One tensor that the base lacks, or of another size, and the file is not loaded.
    """
    if adapter.format != GGUF:
        check.refuse(f"llama.cpp loads GGUF files: {_as_gguf(adapter, base)}")
        check.modules += [ModuleFate(layer.name, layer.rank) for layer in adapter.layers]
        return
    fields = adapter.config
    for field, expected in (("general.type", "adapter"), ("adapter.type", "lora")):
        if fields.get(field) != expected:
            check.refuse(f"{field} is {fields.get(field)!r}, expected {expected!r}")
    if base.gguf is None:
        check.refuse(
            "the base is of no architecture whose GGUF names are known here; name its GGUF file"
        )
    elif fields.get("general.architecture") != base.gguf.architecture:
        ours = fields.get("general.architecture")
        check.refuse(
            f"general.architecture is {ours!r}, and the base is {base.gguf.architecture!r}"
        )
    unpaired = [name for name in adapter.extras if not name.endswith("_norm.weight")]
    if unpaired:
        check.refuse(f"{len(unpaired)} tensors are in no pair of lora_a and lora_b ({unpaired[0]})")
    shapes = _gguf_shapes(base)
    for layer in adapter.layers:
        fault = None
        if layer.name not in shapes:
            fault = "the base has no tensor of that name"
            check.refuse("llama.cpp stops at a tensor that the base lacks")
        elif (fault := misfit(layer, layer.name, shapes)) is not None:
            check.refuse("llama.cpp stops where a size differs")
        check.modules.append(ModuleFate(layer.name, layer.rank, fault))


def _as_gguf(adapter: Checkpoint, base: BaseModules) -> str:
    """Return the command that makes a GGUF file, or why there is none."""
    if base.gguf is None:
        return f"{base.path} is of no architecture whose GGUF names are known here"
    try:
        import_gguf()
    except LsrError as error:  # the package gguf is missing
        return str(error)
    return export_command(
        adapter, f"--to gguf --base {quote(str(base.path))}", ".gguf", base.gguf.name_of
    )


def _gguf_shapes(base: BaseModules) -> Mapping[str, tuple[int, ...] | None]:
    """Return shapes by GGUF name: of the file, or of the modules that have such a name."""
    if base.gguf is None or base.from_gguf:
        return base.shapes
    shapes = {}
    for module, shape in base.shapes.items():
        name = base.gguf.find(module)
        if name is not None:
            shapes[name] = shape
    return shapes


def _targeted(name: str, adapter: Checkpoint) -> bool:
    """Return what PEFT's `check_target_module_exists` returns for a name.

    "all-linear" names every layer but the output, which is not looked for.
    """
    config = adapter.config
    if _named(name, config.get("exclude_modules"), adapter):
        return False
    saved = config.get("modules_to_save") or []
    if any(f".{part}." in f".{name}." for part in saved):
        return False
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return True
    if not _named(name, targets, adapter):
        return False
    if isinstance(targets, str) or name in (targets or ()):
        return True
    return _transformed(name, config)


def _named(name: str, targets: Any, adapter: Checkpoint) -> bool:
    if isinstance(targets, str):
        check_pattern(targets, "target_modules", adapter.path)
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets or ())


def _transformed(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether layers_to_transform, if it is set, holds the number of this layer."""
    transformed = config.get("layers_to_transform")
    if transformed is None or transformed == []:
        return True
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    numbers = [transformed] if isinstance(transformed, int) else transformed
    for pattern in patterns:
        match = re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name)
        if match is not None:
            return int(match[1]) in numbers
    return None in numbers
