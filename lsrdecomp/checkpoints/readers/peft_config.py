"""What an adapter_config.json of PEFT says of layers: their ranks and scales, and what no record here expresses."""

from __future__ import annotations

import math

from lsrdecomp.checkpoints.config import Config, Patterns
from lsrdecomp.checkpoints.format import refuse_fields
from lsrdecomp.errors import UnsupportedError

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
    # of LoHa and LoKr; what use_effective_conv2d does shows in the shapes
    *("alpha", "decompose_both", "decompose_factor", "init_weights", "module_dropout", "rank_dropout"),
    *("rank_dropout_scale", "use_effective_conv2d"),
    *("target_modules", "target_parameters", "task_type", "trainable_token_indices", "use_rslora", "velora_config"),
}


class Scales:
    """Rank and scale, alpha / r or alpha / √r, of every module: by the patterns of a config or its common values."""

    def __init__(self, config: Config) -> None:
        self.common = config.integer("r", 8)
        self.ranks = Patterns(config.integers("rank_pattern"), "rank_pattern", config.path)
        self.alpha = config.number("lora_alpha" if config.raw.get("peft_type") == "LORA" else "alpha", 8)
        self.alphas = Patterns(config.numbers("alpha_pattern"), "alpha_pattern", config.path)
        self.root = math.sqrt if config.flag("use_rslora") else float

    def rank(self, module: str) -> int:
        return self.ranks.get(module, self.common)

    def of(self, module: str, rank: int) -> float:
        return self.alphas.get(module, self.alpha) / self.root(rank)


def check_supported(config: Config) -> tuple[str, ...]:
    """Notes about a config; `UnsupportedError` for what changes the update beyond ``scale·B·A``."""
    peft_type = config.text("peft_type")
    if peft_type not in ("LORA", "LOHA", "LOKR"):
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
