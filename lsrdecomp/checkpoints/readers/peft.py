"""PEFT LoRA directories: adapter_config.json and adapter_model.safetensors or .bin, read as PEFT 0.21 loads them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import lru_cache

from lsrdecomp.checkpoints.bundle import Bundle
from lsrdecomp.checkpoints.config import Config, Patterns, check_carried, missing_modules
from lsrdecomp.checkpoints.experts import Stacks, expert_layers
from lsrdecomp.checkpoints.format import Roles, finish, need, needed_config, refuse_alpha, refuse_fields, without_prefix
from lsrdecomp.checkpoints.records import Checkpoint, LoraLayer, low_rank_layer
from lsrdecomp.checkpoints.tensors import StoredTensor
from lsrdecomp.errors import CheckpointError, UnsupportedError

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
    "ensure_weight_tying": "it ties adapters of different modules",
}
BASE_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")
FIELDS = {
    *REFUSED,
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config"),
    *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights"),
    *("layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout"),
    *("lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version"),
    *("qalora_group_size", "r", "rank_pattern", "revision", "runtime_config"),
    *("target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_rslora", "velora_config"),
}
LORA_KEY = re.compile(r"(?P<name>.+)\.lora_(?P<half>[AB]\.weight|embedding_[AB])")
HALVES = ("A.weight", "B.weight")
EMBEDDING = ("embedding_A", "embedding_B")


class PeftLora:
    """LoRA, and by name whatever else has a config that no other format claims."""

    name = "peft-lora"

    def matches(self, bundle: Bundle) -> bool:
        """Any adapter_config.json but an LSR adapter's; what is not LoRA is then refused by its name."""
        return bundle.config is not None and bundle.config.get("peft_type") != "LSR"

    def read(self, bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
        """Layers with the rank and scale PEFT gives them; what is not ``scale·B·A`` is refused by name."""
        config = needed_config(bundle)
        refuse_alpha(bundle, alpha)
        notes = check_supported(config)
        check_carried(config)
        rank_of, scales = ranks_of(config), Scales(config)
        linear = "conv1d" if config.flag("fan_in_fan_out") else "linear"
        modules, extras = _halves(bundle)
        stacks, read = Stacks(config.raw, config.path), lru_cache(maxsize=2)(StoredTensor.read)
        layers: list[LoraLayer] = []
        for key, roles in modules.items():
            parameter = stacks.of_key(key)
            module = parameter or key
            embedding = not roles.keys().isdisjoint(EMBEDDING)
            down, up = EMBEDDING if embedding else HALVES
            need(module, roles, (down, up))
            rank = rank_of(module)
            kind = "embedding" if embedding else linear
            layer = low_rank_layer(module, roles[up], roles[down], scales.of(module, rank), kind=kind)
            if parameter is not None:
                layers += expert_layers(layer, rank, config.path, read)
                continue
            if layer.rank != rank:
                text = f"rank {layer.rank} in shape {roles[down].shape}, but the config says r = {rank}"
                raise roles[down].error(f"{text}; correct r or rank_pattern in {bundle.config_path.name}")
            layers.append(layer)
        named = [f".{layer.name.rpartition('.')[0]}" for layer in layers]
        missing = [target for target in stacks.targets if not any(name.endswith(f".{target}") for name in named)]
        if missing:
            text = f"target_parameters names {ascii(missing[0])[:80]}, of which the file holds no tensor"
            raise CheckpointError(text, path=config.path)
        notes += missing_modules(config.raw, extras)
        return finish(bundle, self.name, layers, extras, notes, parts="lora_A and lora_B")


lora = PeftLora()


class Scales:
    """alpha / r or alpha / √r of every module, by the patterns of a config or its common value."""

    def __init__(self, config: Config, alpha: str = "lora_alpha") -> None:
        self.alpha = config.number(alpha, 8)
        self.alphas = Patterns(config.numbers("alpha_pattern"), "alpha_pattern", config.path)
        self.root = math.sqrt if config.flag("use_rslora") else float

    def of(self, module: str, rank: int) -> float:
        return self.alphas.get(module, self.alpha) / self.root(rank)


def ranks_of(config: Config) -> Callable[[str], int]:
    """The rank of every module, likewise."""
    common = config.integer("r", 8)
    ranks = Patterns(config.integers("rank_pattern"), "rank_pattern", config.path)
    return lambda module: ranks.get(module, common)


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
    unknown = sorted(field for field, value in config.raw.items() if value and field not in FIELDS)
    switches = [field for field in unknown if field.startswith("use_")]
    if switches:
        text = f"{switches[0][:60]!r} is set, which this version does not know; such an adapter is not read"
        raise UnsupportedError(text, path=config.path)
    notes = [f"config fields not known here, ignored: {', '.join(map(ascii, unknown))[:200]}"] if unknown else []
    return tuple(notes)


def _halves(bundle: Bundle) -> tuple[dict[str, Roles], dict[str, StoredTensor]]:
    """The halves of each module, and everything else under its own key."""
    modules: dict[str, Roles] = {}
    extras: dict[str, StoredTensor] = {}
    for key, tensor in bundle.tensors.items():
        match = LORA_KEY.fullmatch(without_prefix(tensor))
        if match is not None:
            modules.setdefault(match["name"], {})[match["half"]] = tensor
        elif re.search(r"\.lora_[A-Za-z_]+(\.|$)", key):
            readable = "only lora_A and lora_B weights (and lora_embedding_A and _B) are read"
            raise UnsupportedError(f"is not plain LoRA; {readable}", path=tensor.path, tensor=key)
        else:
            extras[key] = tensor
    return modules, extras
