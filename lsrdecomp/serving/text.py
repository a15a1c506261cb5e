"""How PEFT, vLLM, SGLang and llama.cpp load an adapter; `check.SERVERS` names the sources."""

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
VLLM_DEFAULT_RANK = 16
"""What vLLM admits without --max-lora-rank."""
EXPERT = re.compile(r"(.+\.experts)\.\d+\.")
NUMBERED = re.compile(r"layers\.\d+\.")


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


def vllm(check: ServingCheck, adapter: Checkpoint, base: BaseModules) -> None:
    """Fill a check by the rules of vLLM.

    There is one scale for all; a last word that no linear layer has stops the load, a wrong full
    name is passed over.
    """
    # 1. The file as a whole, and the rank that the server is started with.
    _vllm_file(check, adapter)
    rank, alone_scale = _rank_and_scale(adapter, rooted=bool(adapter.config.get("use_rslora")))
    _vllm_rank(check, max([rank, *(layer.rank for layer in adapter.layers)]))
    # 2. The fate of every layer.
    for layer in adapter.layers:
        fault = _vllm_fault(check, layer, base)
        factor = alone_scale / layer.scale if alone_scale and layer.scale else 1.0
        check.modules.append(ModuleFate(layer.name, layer.rank, fault, factor))
    # 3. Experts, which it stacks.
    _vllm_experts(check, adapter, base)
    if base.from_gguf:
        check.notes.append("names were compared with a GGUF file's, by way of llama.cpp's names")


def _vllm_file(check: ServingCheck, adapter: Checkpoint) -> None:
    """Refuse what vLLM refuses of a file before it looks at layers."""
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


def _vllm_rank(check: ServingCheck, largest: int) -> None:
    """Refuse a largest rank above vLLM's, or note its option: buffers follow it, not r."""
    if largest > SERVER_RANKS[-1]:
        check.refuse(
            f"its largest rank is {largest}, above {SERVER_RANKS[-1]}, the most that vLLM takes"
        )
    elif largest > VLLM_DEFAULT_RANK:
        slot = next(size for size in SERVER_RANKS if size >= largest)
        check.notes.append(
            f"vLLM needs --max-lora-rank {slot}: its largest rank is {largest}, "
            f"and {VLLM_DEFAULT_RANK} is what it admits"
        )


def _vllm_fault(check: ServingCheck, layer: Layer, base: BaseModules) -> str | None:
    """Return why a layer would not apply, and refuse the file where vLLM would stop at it."""
    stored = base.find(layer.name)
    if _unexpected(layer, base):
        check.refuse("vLLM stops at names whose last word no layer of the base has")
        return "no layer of the base has this last word"
    if stored is None:
        return f"{MISSING}, and vLLM passes over it in silence"
    if layer.layer_type not in ("linear", "conv1d", "embedding"):
        fault = f"vLLM has no LoRA for a layer of kind {layer.layer_type}"
        check.refuse(fault)
        return fault
    misfitting = misfit(layer, stored, base.shapes)
    if misfitting is not None:
        check.refuse("vLLM raises where a size differs")
    return misfitting


def _vllm_experts(check: ServingCheck, adapter: Checkpoint, base: BaseModules) -> None:
    """Refuse experts that do not stack: some without a pair, or of several ranks."""
    to_stack = export_command(adapter, "--profile lorax", "-lorax", str)
    experts = [EXPERT.match(layer.name) for layer in adapter.layers]
    blocks = dict.fromkeys(expert[1] for expert in experts if expert is not None)
    for block in blocks:
        prefix = f"{block}."
        ranks = {
            layer.name: layer.rank for layer in adapter.layers if layer.name.startswith(prefix)
        }
        in_base = [name for name in base.shapes if name.startswith(prefix) and EXPERT.match(name)]
        ranks_of_word: dict[str, set[int]] = {}
        for name, rank in ranks.items():
            ranks_of_word.setdefault(name.rpartition(".")[2], set()).add(rank)
        if any(name not in ranks for name in in_base):
            check.refuse(f"vLLM stacks the experts of a layer, and some have no pair: {to_stack}")
        elif any(len(several) > 1 for several in ranks_of_word.values()):
            check.refuse(f"vLLM stacks the experts of a layer, and their ranks differ: {to_stack}")


def sglang(check: ServingCheck, adapter: Checkpoint, base: BaseModules) -> None:
    """Fill a check by the rules of SGLang.

    There are one rank and one scale for all; q, k and v of a layer are stacked, and gate and up. A
    tensor goes to the layer whose number is in its name, whatever stands before, and there by its
    last word.
    """
    for_server = export_command(adapter, "--profile lorax", "-lorax", str)
    # 1. The file as a whole.
    if adapter.format != "peft-lora":
        check.refuse(
            f"SGLang reads PEFT LoRA directories, and this is {adapter.format}: {for_server}"
        )
    targets = adapter.config.get("target_modules")
    if isinstance(targets, str) and targets not in ("all", "all-linear"):
        check.refuse(f"target_modules is a pattern, and SGLang takes lists of names: {for_server}")
    of_layers = [name for name in adapter.extras if NUMBERED.search(name)]
    if of_layers:
        check.refuse(
            f"{len(of_layers)} tensors of layers are no LoRA weights ({of_layers[0]}), "
            "at which SGLang stops"
        )
    elif adapter.extras:
        first = next(iter(adapter.extras))
        check.notes.append(
            f"SGLang passes over {len(adapter.extras)} other tensors ({first}) in silence"
        )
    # 2. The fate of every layer.
    rank, alone_scale = _rank_and_scale(adapter)
    stored = {_from_layers(name): shape for name, shape in base.shapes.items()}
    words_of_block: dict[str, set[str]] = {}
    for layer in adapter.layers:
        fault = None
        name = _from_layers(layer.name)
        block, _, word = name.rpartition(".")
        words_of_block.setdefault(block, set()).add(word)
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
        factor = alone_scale / layer.scale if alone_scale and layer.scale else 1.0
        check.modules.append(ModuleFate(layer.name, layer.rank, fault, factor))
    # 3. Layers that it stacks.
    for words in words_of_block.values():
        if words & {"q_proj", "k_proj", "v_proj"} and not {"q_proj", "v_proj"} <= words:
            check.refuse(
                f"SGLang stacks q, k and v of a layer, and one lacks q_proj or v_proj: {for_server}"
            )
        if "up_proj" in words and "gate_proj" not in words:
            check.refuse(
                f"SGLang stacks gate and up of a layer, and one lacks gate_proj: {for_server}"
            )


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


def _rank_and_scale(adapter: Checkpoint, *, rooted: bool = False) -> tuple[int, float]:
    """Return the rank and scale that a server without patterns takes for all layers.

    Each is 0 where the config has none.
    """
    rank = adapter.config.get("r")
    alpha = adapter.config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        return 0, 0.0
    if not isinstance(alpha, int | float):
        return rank, 0.0
    return rank, alpha / (math.sqrt(rank) if rooted else rank)


def _from_layers(name: str) -> str:
    """Return a name from the number of its layer on; without one the name itself."""
    match = NUMBERED.search(name)
    return name if match is None else name[match.start() :]


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


def _unexpected(layer: Layer, base: BaseModules) -> bool:
    """Return whether no layer of the base has the last word of this layer's name."""
    # A GGUF file has other names: there a layer is looked for by its own
    if base.from_gguf:
        return base.find(layer.name) is None
    return layer.name.rpartition(".")[2] not in base.last_parts


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
