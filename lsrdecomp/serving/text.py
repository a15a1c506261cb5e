"""How servers of language models load an adapter: PEFT, vLLM, SGLang, llama.cpp; `check.SERVERS` names the sources."""

from __future__ import annotations

import math
import re
from shlex import quote
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.config import check_pattern
from lsrdecomp.checkpoints.writers.gguf import import_gguf
from lsrdecomp.checkpoints.writers.peft import SERVER_RANKS
from lsrdecomp.errors import LsrError
from lsrdecomp.serving.adapter import GGUF, MISSING, export_command, misfit, task_type
from lsrdecomp.serving.report import ModuleFate, ServingCheck

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lsrdecomp.checkpoints import BaseModules, Checkpoint
    from lsrdecomp.checkpoints.records import Layer

PEFT_FORMATS = ("peft-lora", "peft-loha", "peft-lokr", "lsr")
DEFAULT_RANK = 16
"""What vLLM admits without --max-lora-rank."""
EXPERT = re.compile(r"(.+\.experts)\.\d+\.")
NUMBERED = re.compile(r"layers\.\d+\.")


def peft(check: ServingCheck, adapter: Checkpoint, base: BaseModules) -> None:
    """Layers are made for what target_modules names; numbers of other layers are left out, wrong sizes raise."""
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


def vllm(check: ServingCheck, adapter: Checkpoint, base: BaseModules) -> None:
    """One scale for all; a last word that no linear layer has stops the load, a wrong full name is passed over."""
    config = adapter.config
    for_server = export_command(adapter, "--profile server", "-server", str)
    if adapter.format != "peft-lora":
        check.refuse(
            f"vLLM reads PEFT LoRA directories, and this is {adapter.format}: {for_server}"
        )
    if config.get("modules_to_save"):
        check.refuse(
            f"modules_to_save is set, which vLLM refuses: heads are left out by {for_server}"
        )
    if config.get("bias", "none") != "none":
        check.refuse("bias is set, and vLLM loads no biases")
    others = [name for name in adapter.extras if "base_layer" not in name]
    if others:
        check.refuse(
            f"{len(others)} tensors are no LoRA weights ({others[0]}), at which vLLM stops"
        )
    rank, used = _rank_and_scale(adapter, rooted=bool(config.get("use_rslora")))
    largest = max(
        [rank, *(layer.rank for layer in adapter.layers)]
    )  # buffers follow --max-lora-rank, not r
    if largest > SERVER_RANKS[-1]:
        check.refuse(
            f"its largest rank is {largest}, above {SERVER_RANKS[-1]}, the most that vLLM takes"
        )
    elif largest > DEFAULT_RANK:
        slot = next(size for size in SERVER_RANKS if size >= largest)
        text = f"its largest rank is {largest}, and {DEFAULT_RANK} is what it admits"
        check.notes.append(f"vLLM needs --max-lora-rank {slot}: {text}")
    for layer in adapter.layers:
        stored, fault = base.find(layer.name), None
        if _unexpected(layer, base):
            fault = "no layer of the base has this last word"
            check.refuse("vLLM stops at names whose last word no layer of the base has")
        elif stored is None:
            fault = f"{MISSING}, and vLLM passes over it in silence"
        elif layer.layer_type not in ("linear", "conv1d", "embedding"):
            fault = f"vLLM has no LoRA for a layer of kind {layer.layer_type}"
            check.refuse(fault)
        elif (fault := misfit(layer, stored, base.shapes)) is not None:
            check.refuse("vLLM raises where a size differs")
        factor = used / layer.scale if used and layer.scale else 1.0
        check.modules.append(ModuleFate(layer.name, layer.rank, fault, factor))
    stacks = export_command(adapter, "--profile lorax", "-lorax", str)
    for block in {match[1] for layer in adapter.layers if (match := EXPERT.match(layer.name))}:
        ranks = {
            layer.name: layer.rank for layer in adapter.layers if layer.name.startswith(f"{block}.")
        }
        kinds = {
            (name.rpartition(".")[2], rank) for name, rank in ranks.items()
        }  # words with their ranks
        if any(
            name not in ranks
            for name in base.shapes
            if name.startswith(f"{block}.") and EXPERT.match(name)
        ):
            check.refuse(f"vLLM stacks the experts of a layer, and some have no pair: {stacks}")
        elif len(kinds) > len(dict(kinds)):
            check.refuse(f"vLLM stacks the experts of a layer, and their ranks differ: {stacks}")
    if base.from_gguf:
        check.notes.append("names were compared with a GGUF file's, by way of llama.cpp's names")


def sglang(check: ServingCheck, adapter: Checkpoint, base: BaseModules) -> None:
    """One rank and one scale for all; q, k and v of a layer are stacked, and gate and up.

    A tensor goes to the layer whose number is in its name, whatever stands before, and there by its
    last word.
    """
    for_server = export_command(adapter, "--profile lorax", "-lorax", str)
    if adapter.format != "peft-lora":
        check.refuse(
            f"SGLang reads PEFT LoRA directories, and this is {adapter.format}: {for_server}"
        )
    targets = adapter.config.get("target_modules")
    if isinstance(targets, str) and targets not in ("all", "all-linear"):
        check.refuse(f"target_modules is a pattern, and SGLang takes lists of names: {for_server}")
    inside = [name for name in adapter.extras if NUMBERED.search(name)]
    if inside:
        check.refuse(
            f"{len(inside)} tensors of layers are no LoRA weights ({inside[0]}), at which SGLang stops"
        )
    elif adapter.extras:
        first = next(iter(adapter.extras))
        check.notes.append(
            f"SGLang passes over {len(adapter.extras)} other tensors ({first}) in silence"
        )
    rank, used = _rank_and_scale(adapter)
    stored = {_from_layers(name): shape for name, shape in base.shapes.items()}
    parts: dict[str, set[str]] = {}
    for layer in adapter.layers:
        name, fault = _from_layers(layer.name), None
        block, _, word = name.rpartition(".")
        parts.setdefault(block, set()).add(word)
        if name == layer.name and word not in ("embed_tokens", "lm_head"):
            fault = "SGLang passes over names without layers.N in silence"
        elif name not in stored:
            fault = MISSING
            check.refuse("SGLang stops at a name of no layer of the base")
        elif (fault := misfit(layer, name, stored)) is not None:
            check.refuse("SGLang raises where a size differs")
        elif layer.rank != rank:
            fault = f"rank {layer.rank}, and r is {rank}"
            check.refuse(
                f"SGLang reads no rank_pattern, and one rank alone fits its stacks: {for_server}"
            )
        factor = used / layer.scale if used and layer.scale else 1.0
        check.modules.append(ModuleFate(layer.name, layer.rank, fault, factor))
    for words in parts.values():
        if words & {"q_proj", "k_proj", "v_proj"} and not {"q_proj", "v_proj"} <= words:
            check.refuse(
                f"SGLang stacks q, k and v of a layer, and one lacks q_proj or v_proj: {for_server}"
            )
        if "up_proj" in words and "gate_proj" not in words:
            check.refuse(
                f"SGLang stacks gate and up of a layer, and one lacks gate_proj: {for_server}"
            )


def llama_cpp(check: ServingCheck, adapter: Checkpoint, base: BaseModules) -> None:
    """All or nothing: one tensor that the base lacks, or of another size, and the file is not loaded."""
    if adapter.format != GGUF:
        check.refuse(f"llama.cpp loads GGUF files: {_as_gguf(adapter, base)}")
        check.modules += [ModuleFate(layer.name, layer.rank) for layer in adapter.layers]
        return
    fields = adapter.config
    for field, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if fields.get(field) != wanted:
            check.refuse(f"{field} is {fields.get(field)!r}, expected {wanted!r}")
    if base.gguf is None:
        check.refuse(
            "the base is of no architecture whose GGUF names are known here; name its GGUF file"
        )
    elif fields.get("general.architecture") != base.gguf.architecture:
        ours = fields.get("general.architecture")
        check.refuse(
            f"general.architecture is {ours!r}, and the base is {base.gguf.architecture!r}"
        )
    odd = [name for name in adapter.extras if not name.endswith("_norm.weight")]
    if odd:
        check.refuse(f"{len(odd)} tensors are in no pair of lora_a and lora_b ({odd[0]})")
    shapes = _gguf_shapes(base)
    for layer in adapter.layers:
        fault = None
        if layer.name not in shapes:
            fault = "the base has no tensor of that name"
            check.refuse("llama.cpp stops at a tensor that the base lacks")
        elif (fault := misfit(layer, layer.name, shapes)) is not None:
            check.refuse("llama.cpp stops where a size differs")
        check.modules.append(ModuleFate(layer.name, layer.rank, fault))


def _rank_and_scale(adapter: Checkpoint, *, rooted: bool = False) -> tuple[int, float]:
    """The rank and scale that a server without patterns takes for all layers; 0 where the config has none."""
    rank, alpha = adapter.config.get("r"), adapter.config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        return 0, 0.0
    return rank, alpha / (math.sqrt(rank) if rooted else rank) if isinstance(
        alpha, int | float
    ) else 0.0


def _from_layers(name: str) -> str:
    """A name from the number of its layer on; without one the name itself."""
    match = NUMBERED.search(name)
    return name if match is None else name[match.start() :]


def _as_gguf(adapter: Checkpoint, base: BaseModules) -> str:
    """The command that makes a GGUF file, or why there is none."""
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
    """By GGUF name: of the file, or of the modules that have such a name."""
    if base.gguf is None or base.from_gguf:
        return base.shapes
    names = ((base.gguf.find(name), shape) for name, shape in base.shapes.items())
    return {name: shape for name, shape in names if name is not None}


def _unexpected(layer: Layer, base: BaseModules) -> bool:
    last = layer.name.rpartition(".")[2]
    if (
        base.from_gguf
    ):  # its names are others; a word of which any layer of the base is made is found by its name
        return base.find(layer.name) is None
    return last not in base.last_parts


def _targeted(name: str, adapter: Checkpoint) -> bool:
    """PEFT's `check_target_module_exists`; "all-linear" names every layer but the output, which is not looked for."""
    config = adapter.config
    if _named(name, config.get("exclude_modules"), adapter):
        return False
    saved = config.get("modules_to_save") or []
    if any(
        name == part or name.endswith(f".{part}") or f".{part}." in f".{name}." for part in saved
    ):
        return False
    targets = config.get("target_modules")
    if isinstance(targets, str) and targets.lower() == "all-linear":
        return True
    return _named(name, targets, adapter) and (
        isinstance(targets, str) or name in (targets or ()) or _transformed(name, config)
    )


def _named(name: str, targets: Any, adapter: Checkpoint) -> bool:
    if isinstance(targets, str):
        check_pattern(targets, "target_modules", adapter.path)
        return re.fullmatch(targets, name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets or ())


def _transformed(name: str, config: Mapping[str, Any]) -> bool:
    """Whether layers_to_transform, if it is set, holds the number of this layer."""
    wanted = config.get("layers_to_transform")
    if wanted is None or wanted == []:
        return True
    patterns = config.get("layers_pattern") or [r"[^.]*"]
    patterns = [patterns] if isinstance(patterns, str) else patterns
    matches = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name) for pattern in patterns)
    number = next((int(match[1]) for match in matches if match), None)
    return number in ([wanted] if isinstance(wanted, int) else wanted)
