"""An adapter in a server of stacked or pooled LoRA layers: vLLM, SGLang, TGI, LoRAX.

Where the server's package is installed its own loader decides, and ΔW is compared. Elsewhere only
names and sizes are, and whether the file is of the one form that all of them read alike. What
stands here of a server is what no loader says without a model, with the version it was seen in.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import TYPE_CHECKING

from lsrdecomp.checkpoints.families import missing_layers
from lsrdecomp.checkpoints.writers.peft import COMMON_RANKS
from lsrdecomp.serving.adapter import MISSING, export_command, misfit
from lsrdecomp.serving.installed import LoaderRun, compare, load_by_server
from lsrdecomp.serving.report import ModuleFate, ServingCheck

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from lsrdecomp.checkpoints import BaseModules, Checkpoint
    from lsrdecomp.checkpoints.records import Layer
    from lsrdecomp.serving.installed import Loaded

TITLES = {"vllm": "vLLM", "sglang": "SGLang", "tgi": "TGI", "lorax": "LoRAX"}
EXPERT = re.compile(r"(.+\.experts)\.\d+\.")
FROM_LAYERS = re.compile(r"(?:^|\.)(layers\.\d+\..+)")


def check_loaded(
    check: ServingCheck, adapter: Checkpoint, base: BaseModules, python: str | Path | None
) -> None:
    """Fill a check by the server's own loader, or by the form of the file where there is none."""
    title = TITLES[check.server]
    to_export = export_command(adapter, "--to lora", "-served", str)
    if adapter.format != "peft-lora":
        check.rules = f"what {title} reads"
        check.refuse(
            f"{title} reads PEFT LoRA directories, and this is {adapter.format}: {to_export}"
        )
        check.modules += [ModuleFate(layer.name, layer.rank) for layer in adapter.layers]
        return
    # 1. Names and sizes, which loaders without a model do not compare.
    found = {layer.name: _find(layer, base, check.server) for layer in adapter.layers}
    faults = {layer.name: misfit(layer, found[layer.name], base.shapes) for layer in adapter.layers}
    # 2. The loader, or what is known without it.
    loaded = load_by_server(check.server, adapter, base, python)
    if loaded.was_run:
        _by_loader(check, adapter, loaded, faults, to_export)
    else:
        _by_form(check, adapter, base, faults, f"{loaded.failure}", to_export)
    # 3. What a server does with a model at hand.
    for layer in adapter.layers:
        if found[layer.name] is not None and faults[layer.name] is not None:
            check.refuse(f"{title} raises where a size differs")
    if check.server == "vllm":
        _check_experts(check, adapter, base, to_export)


def _find(layer: Layer, base: BaseModules, server: str) -> str | None:
    """Return the stored name of a layer's module; None where the base has none.

    SGLang (0.5.23, lora.py) goes by what follows ``layers.N``, whatever stands before.
    """
    stored = base.find(layer.name)
    match = FROM_LAYERS.search(layer.name)
    if stored is not None or server != "sglang" or match is None:
        return stored
    for name in base.shapes:
        if name == match[1] or name.endswith(f".{match[1]}"):
            return name
    return None


def _by_loader(
    check: ServingCheck,
    adapter: Checkpoint,
    loaded: Loaded,
    faults: Mapping[str, str | None],
    to_export: str,
    settings: LoaderRun | None = None,
) -> None:
    """Fill a check by what a loader made of an adapter: its refusal, or every layer's ΔW."""
    settings = settings or LoaderRun()
    title = TITLES[check.server]
    check.rules = f"the loader of {title} {loaded.version}, run on the CPU without a model"
    check.loader_version = loaded.version
    check.options += loaded.options
    for option in loaded.options:
        check.notes.append(f"{title} refuses it unless it is started with {option}")
    if loaded.refusal is not None:
        check.refuse(f"{title} {loaded.version} says {loaded.refusal[:300]}: {to_export}")
    pairs = loaded.pairs
    if check.server == "sglang":
        pairs = {_from_layers(name): pair for name, pair in pairs.items()}
    for layer in adapter.layers:
        fault = faults[layer.name]
        name = _from_layers(layer.name) if check.server == "sglang" else layer.name
        factor, error = 1.0, None
        if fault == MISSING:
            fault = f"{MISSING}, and {title} passes over it in silence"
        elif name not in pairs:
            if loaded.refusal is None:
                fault = fault or f"{title} {loaded.version} leaves it out in silence"
        else:
            factor, error = compare(layer, *pairs[name])
            if error > settings.tolerance:
                fault = fault or f"its ΔW there differs by {error:.2g} of its norm"
        check.modules.append(ModuleFate(layer.name, layer.rank, fault, factor, error))


def _by_form(
    check: ServingCheck,
    adapter: Checkpoint,
    base: BaseModules,
    faults: Mapping[str, str | None],
    failure: str,
    to_export: str,
) -> None:
    """Fill a check without a loader: names, sizes, and whether the form is the common one."""
    title = TITLES[check.server]
    check.rules = f"names and sizes alone: {failure}, so nothing was loaded"
    differences = list(differences_from_common_form(adapter, base))
    check.is_certain = not differences
    if differences:
        check.notes.append(
            f"whether {title} reads it right is not known here ({'; '.join(differences)}); "
            f"{to_export} writes the one form that all servers read alike, or name the "
            "interpreter that has the server by --python"
        )
    else:
        check.notes.append("it has the one form that vLLM, SGLang, TGI and LoRAX read alike")
    largest = max((layer.rank for layer in adapter.layers), default=1)
    if largest > 16 and check.server in ("vllm", "sglang"):
        check.notes.append(f"start {title} with --max-lora-rank {largest} at least")
    for layer in adapter.layers:
        fault = faults[layer.name]
        if fault == MISSING:
            fault = f"{MISSING}; servers pass over it, or stop at it"
        check.modules.append(ModuleFate(layer.name, layer.rank, fault))


def differences_from_common_form(adapter: Checkpoint, base: BaseModules) -> Iterator[str]:
    """Yield in what a PEFT directory is not of the form that `write_lora` calls "common".

    One rank for all, which no server pads; one scale, without patterns and square roots; every
    layer of a kind that is adapted at all; nothing beside the pairs.
    """
    config = adapter.config
    ranks = {layer.rank for layer in adapter.layers}
    rank = config.get("r")
    if ranks != {rank}:
        yield f"its ranks are {', '.join(map(str, sorted(ranks)))}, and r is {rank}"
    elif rank not in COMMON_RANKS:
        yield f"rank {rank} is padded by TGI and LoRAX, which then scale by the padded rank"
    unread = ("rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias")
    for field in (*unread, "modules_to_save"):
        if config.get(field):
            yield f"{field} is set"
    if config.get("bias", "none") != "none":
        yield "bias is set"
    if not isinstance(config.get("target_modules"), list):
        yield "target_modules is no list of names"
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start != "gaussian":
        yield f"init_lora_weights is {start!r}, which may stand for a changed base"
    if adapter.extras:
        yield f"{len(adapter.extras)} tensors beside the pairs ({next(iter(adapter.extras))})"
    kinds = {layer.layer_type for layer in adapter.layers} - {"linear", "conv1d"}
    if kinds:
        yield f"layers of kind {', '.join(sorted(kinds))}"
    missing = missing_layers([layer.name for layer in adapter.layers], base)
    if missing:
        yield f"{len(missing)} layers like those adapted are missing ({missing[0]})"


def _check_experts(
    check: ServingCheck, adapter: Checkpoint, base: BaseModules, to_export: str
) -> None:
    """Refuse experts that do not stack: some without a pair, or of several ranks.

    vLLM asserts it in `PackedLoRALayerWeights.pack_moe` (0.20.2; 0.33.0 says so).
    """
    ranks: dict[str, dict[str, int]] = defaultdict(dict)
    for layer in adapter.layers:
        expert = EXPERT.match(layer.name)
        if expert is not None:
            ranks[expert[1]][layer.name] = layer.rank
    for block, ranks_of_block in ranks.items():
        prefix = f"{block}."
        in_base = [name for name in base.shapes if name.startswith(prefix) and EXPERT.match(name)]
        ranks_of_word: dict[str, set[int]] = defaultdict(set)
        for name, rank in ranks_of_block.items():
            ranks_of_word[name.rpartition(".")[2]].add(rank)
        if any(name not in ranks_of_block for name in in_base):
            check.refuse(f"vLLM stacks the experts of a layer, and some have no pair: {to_export}")
        elif any(len(several) > 1 for several in ranks_of_word.values()):
            check.refuse(f"vLLM stacks the experts of a layer, and their ranks differ: {to_export}")


def _from_layers(name: str) -> str:
    match = FROM_LAYERS.search(name)
    return match[1] if match else name
