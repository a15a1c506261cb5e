"""Layouts of keys: each says by a key's ending which part of which module a tensor is, and one reader reads them all.

A layout is a value of `Layout`. Names of modules are taken as they are, so that new models need
nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from lsrdecomp.checkpoints.config import Config, Scales, check_carried, missing_modules
from lsrdecomp.checkpoints.experts import INNER, Stacks, expert_layers
from lsrdecomp.checkpoints.files import parse_json
from lsrdecomp.checkpoints.format import (
    DORA,
    NOT_READ,
    PREFIX,
    Bundle,
    Roles,
    group_by_module,
    make_checkpoint,
    refuse_alpha,
    refuse_fields,
    require_roles,
    scalar,
)
from lsrdecomp.checkpoints.readers.lycoris import HADA, LOKR, hadamard_layer, kronecker_layer
from lsrdecomp.checkpoints.records import Checkpoint, Layer, LoraLayer, low_rank_layer
from lsrdecomp.checkpoints.tensors import Array, StoredTensor, derived
from lsrdecomp.errors import CheckpointError, UnsupportedError

METADATA = "lora_adapter_metadata"
"""Where newer diffusers keeps the configs of a pipeline's components: ``{"unet.r": 8, …}``."""
ALPHA = {".alpha": "alpha", ".lora_mid.weight": "mid"}
MAGNITUDE = {".m": "magnitude of DoRA"}
EMBEDDING = ".lora_embedding_A"
# Attention processors of old diffusers files named these four by themselves: in the UNet and in
# text encoders.
PROCESSOR = "_lora."
UNET_NAMES = {"to_out": "to_out.0"}
TEXT_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
TABLES = ("embed_tokens", "wte")
"""Embeddings of mlx-lm's models."""
ScaleOf = Callable[[str, int], float]
"""The scale of a module of this name and rank."""


def pairs(*endings: tuple[str, str]) -> dict[str, str]:
    """Parts of a low-rank pair by the endings of the keys of A and B, of all ages of a layout."""
    return {
        ending: part for both in endings for ending, part in zip(both, ("down", "up"), strict=True)
    }


@dataclass(frozen=True)
class Layout:
    """One layout of keys.

    Parameters
    ----------
    name : str
        What `Checkpoint.format` says.
    parts : mapping of str to str
        Parts of a layer by the endings of their keys; a file with one of them is of this layout.
    others : mapping of str to str
        Further parts, which other layouts have too.
    peft_type : str
        What a PEFT directory of this layout says; its scales and ranks are then those of its
        config, and all names have PEFT's prefix. Empty where there is no such config: the scale is
        then that of an ``.alpha`` beside the pair, or of the config that diffusers keeps in the
        header, or 1.
    scaled_outside : bool
        Whether the scale is not in the tensors: then from mlx-lm's config, or alpha is asked for.
    transposed : bool
        Whether A is stored as (n, r) and B as (r, m).
    """

    name: str
    parts: Mapping[str, str]
    others: Mapping[str, str] = field(default_factory=dict)
    peft_type: str = ""
    scaled_outside: bool = False
    transposed: bool = False

    def matches(self, bundle: Bundle) -> bool:
        """By the type in the config, of which LoRA takes all that are left; without PEFT's config by a key's ending."""
        kind = None if bundle.config is None else bundle.config.get("peft_type")
        if self.peft_type:
            return kind == self.peft_type or (
                self.peft_type == "LORA" and bundle.config is not None and kind != "LSR"
            )
        if bundle.config is not None and (kind is not None or not self.transposed):
            return False
        return any(key.endswith(tuple(self.parts)) for key in bundle.tensors)

    def read(self, bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
        """Layers with the rank and scale that the programs of this layout give them."""
        if self.peft_type:
            return self._read_peft(bundle, alpha)
        if any(key.startswith(PREFIX) for key in bundle.tensors):
            text = f"a PEFT file without its {bundle.config_path.name}; put that beside it"
            raise CheckpointError(text, path=bundle.weights)
        # Read 1: where scales come from.
        common, headers = _mlx_scale(bundle), _header_scales(bundle)
        outside = self.scaled_outside and common is None
        if not outside:
            refuse_alpha(
                bundle,
                alpha,
                None if common is not None else "the file decides its scale, 1 without an alpha",
            )

        def scale_of(name: str, rank: int) -> float:
            if common is not None:
                return common
            if outside:
                return 1.0 if alpha is None else alpha / rank
            component, _, module = name.partition(".")
            return headers[component].of(module, rank) if component in headers else 1.0

        # Read 2: the layers, each under one name.
        modules, extras = group_by_module(bundle, {**self.parts, **self.others})
        layers = [
            self._layer(_module(stored, roles), roles, scale_of)
            for stored, roles in modules.items()
        ]
        names = [layer.name for layer in layers]
        if len(set(names)) != len(names):
            twice = next(module for module in names if names.count(module) > 1)
            raise CheckpointError("is held under two names", path=bundle.weights, tensor=twice)
        for layer in layers:
            rank = bundle.metadata.get(f"{layer.name}:rank", str(layer.rank))  # cloneofsimo's
            if rank != str(layer.rank) and isinstance(layer, LoraLayer):
                text = f"rank {layer.rank} in shape {layer.down.shape}, but {rank[:20]!r} in the header"
                raise layer.down.error(text)
        # Read 3: what stands for a config.
        config: dict[str, Any] = {}
        if bundle.config is not None:
            config = {"base_model_name_or_path": bundle.config.get("model")}
        if outside and alpha is None:
            ranks = ", ".join(map(str, sorted({layer.rank for layer in layers})))
            text = f"a {self.name} file of rank {ranks}: its alpha is not in it"
            way_out = "pass alpha= as it was trained (its script's lora_alpha; of mlx-lm rank times scale)"
            raise CheckpointError(f"{text}; {way_out}", path=bundle.weights)
        if outside:
            heads = sorted({key.removeprefix(PREFIX).partition(".")[0] for key in extras})
            config |= {"lora_alpha": alpha, "modules_to_save": heads or None}
        return make_checkpoint(bundle, self.name, layers, extras, config=config)

    def _read_peft(self, bundle: Bundle, alpha: float | None) -> Checkpoint:
        """A PEFT directory, as PEFT 0.21 loads it; what is not one of our layers is refused by name."""
        config = Config(bundle.config or {}, bundle.config_path)
        refuse_alpha(bundle, alpha)
        notes = check_supported(config)
        check_carried(config)
        scales = Scales(config, config.integer("r", 8), config.number(ALPHAS[self.peft_type], 8))
        linear = "conv1d" if config.flag("fan_in_fan_out") else "linear"
        modules, extras = group_by_module(bundle, self.parts, PREFIX)
        raw, stacks = config.raw if self.peft_type == "LORA" else {}, None
        if raw.get("target_parameters") or any(key.endswith(INNER) for key in modules):
            stacks = Stacks(raw, config.path)
        read = lru_cache(maxsize=2)(StoredTensor.read)
        layers: list[Layer] = []
        for key, roles in modules.items():
            parameter = stacks.of_key(key) if stacks else None
            name = parameter or key
            rank = scales.rank(name)
            layer = self._layer(
                name, roles, lambda name, _: scales.of(name, scales.rank(name)), linear
            )
            if parameter is not None:
                layers += expert_layers(layer, rank, config.path, read)
            elif self.peft_type == "LORA" and layer.rank != rank:
                text = f"rank {layer.rank} in shape {roles['down'].shape}, but the config says r = {rank}"
                raise roles["down"].error(
                    f"{text}; correct r or rank_pattern in {config.path.name}"
                )
            else:
                layers.append(layer)
        if stacks:
            stacks.check_all_there(layer.name for layer in layers)
        notes += missing_modules(config.raw, extras)
        return make_checkpoint(
            bundle, self.name, layers, extras, notes, parts=f"{self.peft_type} layer"
        )

    def _layer(self, name: str, roles: Roles, scale_of: ScaleOf, linear: str = "linear") -> Any:
        """One layer of whatever parts there are."""
        of_config = scale_of(name, 0) if self.peft_type else None
        if any(part in roles for part in HADA.values()):
            return hadamard_layer(name, roles, of_config)
        if any(part in roles for part in LOKR.values()):
            return kronecker_layer(name, roles, of_config)
        return pair_layer(name, roles, scale_of, linear, transposed=self.transposed)


kohya = Layout("kohya", pairs((".lora_down.weight", ".lora_up.weight")), ALPHA)
diffusers = Layout(
    "diffusers",
    pairs(
        (".lora_A.weight", ".lora_B.weight"),
        (".lora.down.weight", ".lora.up.weight"),
        (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
        ("_lora.down.weight", "_lora.up.weight"),
    ),
    ALPHA,
)
LAYOUTS = (
    # with a config, told by its peft_type, which mlx-lm's has not; LoRA takes every type that is
    # left, and refuses by name what is not LoRA
    Layout("peft-loha", HADA, peft_type="LOHA"),
    Layout("peft-lokr", LOKR, peft_type="LOKR"),
    Layout("mlx", pairs((".lora_a", ".lora_b")), MAGNITUDE, scaled_outside=True, transposed=True),
    Layout(
        "peft-lora",
        pairs((".lora_A.weight", ".lora_B.weight"), (EMBEDDING, ".lora_embedding_B")),
        peft_type="LORA",
    ),
    # without, told by the endings of the keys; LyCORIS files may hold plain LoRA modules under
    # kohya's keys
    Layout("lycoris", {**HADA, **LOKR}, {**kohya.parts, **ALPHA}),
    kohya,
    # no file of these is one of another layout: among themselves they could stand in any order
    diffusers,
    Layout("cloneofsimo", pairs((":down", ":up"))),  # a pickled list gets such keys too
    Layout("loralib", pairs((".lora_A", ".lora_B")), MAGNITUDE, scaled_outside=True),
    Layout(
        "torchtune", pairs((".lora_a.weight", ".lora_b.weight")), MAGNITUDE, scaled_outside=True
    ),
)
"""The first that matches reads, so whoever knows a file best stands before whoever would take it
too."""


def pair_layer(
    name: str, roles: Roles, scale_of: ScaleOf, linear: str, *, transposed: bool
) -> LoraLayer:
    """One layer from its up, down, optional mid and optional alpha."""
    require_roles(name, roles, ("up", "down"), ("mid", "alpha"))
    up, down = roles["up"], roles["down"]
    if transposed:
        up, down = _transposed(up), _transposed(down)
    if "mid" in roles:
        down = _through(roles["mid"], down)
    elif (
        len(up.shape) == len(down.shape) == 2
        and up.shape[1] < down.shape[0]
        and up.name.endswith(".lora_B")
    ):
        _refuse_merged(name, up, down)
    table = down.name.endswith(EMBEDDING) or (transposed and name.endswith(TABLES))
    layer = low_rank_layer(name, up, down, 1.0, layer_type="embedding" if table else linear)
    if "alpha" not in roles:
        return replace(layer, scale=scale_of(name, layer.rank))
    return replace(layer, scale=scalar(roles["alpha"]) / layer.rank, alpha=roles["alpha"])


def _header_scales(bundle: Bundle) -> dict[str, Scales]:
    """By component, from the configs that newer diffusers keeps in the header: ``{"unet.r": 8, …}``."""
    text = bundle.metadata.get(METADATA)
    if text is None:
        return {}
    fields: dict[str, dict[str, Any]] = {}
    for key, value in parse_json(text.encode(), bundle.weights, what=METADATA).items():
        component, _, field = key.partition(".")
        fields.setdefault(component, {})[field] = value
    scales = {}
    for component, raw in fields.items():
        config = Config({"peft_type": "LORA", **raw}, bundle.weights)
        check_supported(config)
        scales[component] = Scales(config, config.integer("r", 8), config.number("lora_alpha", 8))
    return scales


def _mlx_scale(bundle: Bundle) -> float | None:
    """The scale in mlx-lm's adapter_config.json."""
    if bundle.config is None:
        return None
    kind, settings = (
        bundle.config.get("fine_tune_type", "lora"),
        bundle.config.get("lora_parameters"),
    )
    if kind != "lora":
        text = f"fine_tune_type is {ascii(kind)[:40]}: only lora is read; train with --fine-tune-type lora"
        raise UnsupportedError(text, path=bundle.config_path)
    if not isinstance(settings, Mapping):
        raise bundle.config_error(
            "has neither peft_type (PEFT) nor lora_parameters (mlx-lm): whose config is it?"
        )
    return Config(settings, bundle.config_path).number("scale")


def _module(stored: str, roles: Roles) -> str:
    """Module path of an old attention-processor key; other names are their own."""
    key = next(iter(roles.values())).name
    name = stored.replace(".processor.", ".")
    if not key.removeprefix(stored).startswith(PROCESSOR):
        return name
    head, _, last = name.rpartition(".")
    words = TEXT_NAMES if stored.startswith("text_encoder") else UNET_NAMES
    return f"{head}.{words.get(last, last)}" if head else words.get(last, last)


def _transposed(tensor: StoredTensor) -> StoredTensor:
    """The matrix as the records want it, still unread."""
    if len(tensor.shape) != 2:
        raise tensor.error(
            f"shape {tensor.shape}, expected a matrix; experts stored stacked are not read"
        )
    return replace(tensor, shape=tensor.shape[::-1], fetch=lambda: tensor.read().T)


def _through(mid: StoredTensor, down: StoredTensor) -> StoredTensor:
    """The in side of a LoCon with a middle part: ``A[i, c, …] = Σ_j mid[i, j, …] down[j, c]``."""
    if len(mid.shape) < 3 or mid.shape[1] != down.shape[0] or math.prod(down.shape[2:]) != 1:
        raise CheckpointError(
            f"shape {mid.shape} does not fit {down.shape}", path=mid.path, tensor=mid.name
        )

    def product() -> Array:
        inner = down.load().reshape(down.shape[:2]).astype(np.float64)
        return np.moveaxis(np.tensordot(mid.load(), inner, axes=(1, 0)), -1, 1)

    return derived(down, (mid.shape[0], down.shape[1], *mid.shape[2:]), product)


def _refuse_merged(name: str, up: StoredTensor, down: StoredTensor) -> None:
    """loralib's MergedLinear: A of several parts over each other, B of each beside the other."""
    parts, rest = divmod(down.shape[0], max(up.shape[1], 1))
    if rest or not up.shape[1]:
        return
    text = (
        f"ranks {up.shape[1]} and {down.shape[0]}: a MergedLinear of {parts} enabled parts (enable_lora); "
        "which of its parts they are is not in the file, so it is not read. Unfold it: a block-diagonal "
        f"lora_B with all rows of the layer and {down.shape[0]} columns, zero rows for the other parts, "
        f"and {parts} times the alpha"
    )
    raise UnsupportedError(text, path=up.path, tensor=name)


# What else changes the forward pass or the base weights, so that scale·B·A would not be the update.
REFUSED = {
    "use_dora": DORA,
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
ALPHAS = {"LORA": "lora_alpha", "LOHA": "alpha", "LOKR": "alpha"}
"""What the types of PEFT call alpha."""
BASE_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")
FIELDS = {
    *REFUSED,
    *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config"),
    *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights"),
    *("layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout"),
    *("lora_ga_config", "megatron_core", "modules_to_save", "peft_type", "peft_version"),
    *("qalora_group_size", "r", "rank_pattern", "revision", "runtime_config"),
    *(
        "target_modules",
        "target_parameters",
        "task_type",
        "trainable_token_indices",
        "use_rslora",
        "velora_config",
    ),
}
OF_LYCORIS = {
    *(
        "alpha",
        "decompose_both",
        "decompose_factor",
        "init_weights",
        "module_dropout",
        "rank_dropout",
    ),
    *("rank_dropout_scale", "use_effective_conv2d"),
}
"""Further fields of LoHa and LoKr; what use_effective_conv2d does shows in the shapes."""


def check_supported(config: Config) -> tuple[str, ...]:
    """Notes about a config; `UnsupportedError` for what changes the update beyond ``scale·B·A``."""
    peft_type = config.text("peft_type")
    if peft_type not in ("LORA", "LOHA", "LOKR"):
        text = f"peft_type {peft_type[:40]!r} is not read; LORA, LOHA, LOKR and LSR are"
        raise UnsupportedError(
            f"{text} (merge it, or convert it to LoRA with PEFT first)", path=config.path
        )
    refuse_fields(config, REFUSED)
    init = str(config.raw.get("init_lora_weights")).lower()
    if init.startswith(BASE_CHANGING):
        raise UnsupportedError(
            f"init_lora_weights is {init[:40]!r}: training changed the base weights, so B·A is not the update; "
            "save again with path_initial_model_for_weight_conversion",
            path=config.path,
        )
    fields = FIELDS if peft_type == "LORA" else FIELDS | OF_LYCORIS
    unknown = sorted(field for field, value in config.raw.items() if value and field not in fields)
    switches = [field for field in unknown if field.startswith("use_")]
    if switches:
        text = f"{switches[0][:60]!r} is set, which this version does not know; {NOT_READ}"
        raise UnsupportedError(text, path=config.path)
    notes = (
        [f"config fields not known here, ignored: {', '.join(map(ascii, unknown))[:200]}"]
        if unknown
        else []
    )
    return tuple(notes)
