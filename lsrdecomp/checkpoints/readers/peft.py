"""PEFT LoRA directories: adapter_config.json and adapter_model.safetensors or .bin, read as PEFT 0.21 loads them."""

from __future__ import annotations

import math
import re

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.config import Config, Patterns, check_carried, missing_modules
from lsrdecomp.checkpoints.format import finish, needed_config, refuse_alpha, refuse_fields, without_prefix
from lsrdecomp.checkpoints.records import Checkpoint, low_rank_layer
from lsrdecomp.checkpoints.tensors import StoredTensor
from lsrdecomp.errors import UnsupportedError

name = "peft-lora"

# What else changes the forward pass or the base weights, so that scale·B·A would not be the update.
REFUSED = {
    "use_dora": "DoRA rescales every row by the norm of the base weights, which are not in this file",
    "use_qalora": "QA-LoRA pools its inputs in groups",
    "use_bdlora": "BD-LoRA has block-diagonal halves",
    "alora_invocation_tokens": "activated LoRA acts on some tokens only",
    "arrow_config": "Arrow routes tokens between adapters",
    "kasa_config": "KaSA truncates the base weights",
    "monteclora_config": "MonteCLoRA samples its weights",
    "lora_bias": "the low-rank pair has a bias of its own",
    "layer_replication": "it copies layers of the base model",
    "megatron_config": "its layers are sharded by Megatron",
    "target_parameters": "it targets bare parameters (experts), whose halves are stored stacked",
    "ensure_weight_tying": "it ties adapters of different modules",
}
BASE_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")
KNOWN = {
    *REFUSED,
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config"),
    *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights"),
    *("layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout"),
    *("lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version"),
    *("qalora_group_size", "r", "rank_pattern", "revision", "runtime_config"),
    *("target_modules", "task_type", "trainable_token_indices", "use_rslora", "velora_config"),
}
LORA_KEY = re.compile(r"(?P<name>.+)\.lora_(?P<embedding>embedding_)?(?P<half>[AB])(?P<weight>\.weight)?")


def matches(bundle: Bundle) -> bool:
    """Any adapter_config.json that no other format claims; what is not LoRA is then refused by its name."""
    return bundle.config is not None and bundle.config.get("peft_type") != "LSR"


def read(bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
    """Layers with the rank and scale PEFT gives them; what is not ``scale·B·A`` is refused by name."""
    config = needed_config(bundle)
    refuse_alpha(bundle, alpha)
    notes = check_supported(config)
    check_carried(config)
    default_rank, default_alpha = config.integer("r", 8), config.number("lora_alpha", 8)
    ranks = Patterns(config.integers("rank_pattern"), "rank_pattern", config.path)
    alphas = Patterns(config.numbers("alpha_pattern"), "alpha_pattern", config.path)
    root = math.sqrt if config.flag("use_rslora") else float
    linear = "conv1d" if config.flag("fan_in_fan_out") else "linear"

    pairs, extras = split_pairs(bundle)
    layers = []
    for module, (up, down, embedding) in pairs.items():
        rank, scale_alpha = ranks.get(module, default_rank), alphas.get(module, default_alpha)
        layer = low_rank_layer(module, up, down, scale_alpha / root(rank), kind="embedding" if embedding else linear)
        if layer.rank != rank:
            text = f"rank {layer.rank} in shape {down.shape}, but the config says r = {rank}"
            raise down.error(f"{text}; correct r or rank_pattern in {bundle.config_path.name}")
        layers.append(layer)
    notes += missing_modules(config.raw, extras)
    return finish(bundle, name, layers, extras, notes, parts="lora_A and lora_B")


def check_supported(config: Config) -> tuple[str, ...]:
    """Notes about a LoRA config; `UnsupportedError` for what changes the update beyond ``scale·B·A``."""
    peft_type = config.text("peft_type")
    if peft_type != "LORA":
        text = f"peft_type {peft_type[:40]!r} is not read; LORA, LOHA, LOKR and LSR are"
        raise UnsupportedError(f"{text} (merge it, or convert it to LoRA with PEFT first)", path=config.path)
    refuse_fields(config, REFUSED)
    init = str(config.raw.get("init_lora_weights")).lower()
    if init.startswith(BASE_CHANGING):
        raise UnsupportedError(
            f"init_lora_weights is {init[:40]!r}: training changed the base weights, so B·A is not the update; "
            "save again with path_initial_model_for_weight_conversion",
            path=config.path,
        )
    unknown = sorted(field for field, value in config.raw.items() if value and field not in KNOWN)
    switches = [field for field in unknown if field.startswith("use_")]
    if switches:
        text = f"{switches[0][:60]!r} is set, which this version does not know; such an adapter is not read"
        raise UnsupportedError(text, path=config.path)
    notes = [f"config fields not known here, ignored: {', '.join(map(ascii, unknown))[:200]}"] if unknown else []
    return tuple(notes)


def split_pairs(
    bundle: Bundle,
) -> tuple[dict[str, tuple[StoredTensor, StoredTensor, bool]], dict[str, StoredTensor]]:
    """``{module: (up, down, is embedding)}`` and everything else; `CheckpointError` for a half alone."""
    halves: dict[str, dict[str, StoredTensor]] = {}
    embeddings: set[str] = set()
    extras: dict[str, StoredTensor] = {}
    for key, tensor in bundle.tensors.items():
        found = LORA_KEY.fullmatch(without_prefix(tensor))
        if found is None or bool(found["embedding"]) == bool(found["weight"]):
            if re.search(r"\.lora_[A-Za-z_]+(\.|$)", key):
                known = "only lora_A and lora_B weights (and lora_embedding_A and _B) are read"
                raise UnsupportedError(f"is not plain LoRA; {known}", path=tensor.path, tensor=key)
            extras[key] = tensor
            continue
        module = found["name"]
        if found["half"] in halves.setdefault(module, {}):
            raise tensor.error("the module has both lora_ and lora_embedding_ weights")
        halves[module][found["half"]] = tensor
        if found["embedding"]:
            embeddings.add(module)
    pairs = {}
    for module, both in halves.items():
        if len(both) == 1:
            (half, tensor), other = next(iter(both.items())), "B" if "A" in both else "A"
            raise tensor.error(f"lora_{half} without its lora_{other}; the file is incomplete")
        pairs[module] = (both["B"], both["A"], module in embeddings)
    return pairs, extras
