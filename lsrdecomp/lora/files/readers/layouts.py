"""Layouts of keys: each says which part of which module a tensor is; one reader reads them all.

A layout is a value of `Layout`. Names of modules are taken as they are, so that new models need
nothing here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from lsrdecomp.errors import CheckpointError, UnsupportedError
from lsrdecomp.lora.files.adapter_config import Config, Scales, check_carried, missing_modules
from lsrdecomp.lora.files.file_checks import parse_json
from lsrdecomp.lora.files.format import (
    DORA_NEEDS_BASE,
    PREFIX,
    Bundle,
    Roles,
    alpha_scale,
    drop_orphan_alphas,
    group_by_module,
    make_checkpoint,
    refuse_alpha,
    refuse_fields,
    require_roles,
    scalar,
    set_aside,
)
from lsrdecomp.lora.files.gguf_files import ALPHA as GGUF_ALPHA
from lsrdecomp.lora.files.gguf_files import ARCHITECTURE
from lsrdecomp.lora.files.readers.lycoris import (
    HADA_PARTS,
    LOKR_PARTS,
    hadamard_layer,
    kronecker_layer,
)
from lsrdecomp.lora.files.readers.peft_methods import needs_base, refuse_method
from lsrdecomp.lora.files.records import NOT_READ, Checkpoint, Layer, LoraLayer, low_rank_layer
from lsrdecomp.lora.files.stacked_experts import Stacks, expert_layers
from lsrdecomp.lora.files.tensors import Array, StoredTensor, derived_tensor

METADATA = "lora_adapter_metadata"
"""Where newer diffusers keeps the configs of a pipeline's components: ``{"unet.r": 8, …}``."""
ALPHA = {".alpha": "alpha", ".lora_mid.weight": "mid"}
MAGNITUDE = {".m": "magnitude of DoRA"}
EMBEDDING_DOWN = ".lora_embedding_A"
ADALORA_VALUES = ".lora_E"
# Attention processors of old diffusers files named these four by themselves: in the UNet and in
# text encoders.
PROCESSOR = "_lora."
KOHYA_DOWN = ".lora_down.weight"
UNET_NAMES = {"to_out": "to_out.0"}
TEXT_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
GGUF = "gguf"
MLX_VLM = "mlx-vlm"
MLX_TYPES = {
    "full": "holds whole weights and no update",
    "dora": "rescales every row by the norm of the base weights",
}
"""What other fine_tune_types of mlx-lm are."""
MLX_EMBEDDINGS = ("embed_tokens", "wte")
"""Embeddings of mlx-lm's models."""
ScaleOf = Callable[[str, int], float]
"""The scale of a module of this name and rank."""


def pair_parts(*endings: tuple[str, str]) -> dict[str, str]:
    """Return the parts of a low-rank pair by the endings of the keys of A and B.

    Parameters
    ----------
    *endings : (ending of A, ending of B)
        One pair for each age of a layout.
    """
    parts = {}
    for down, up in endings:
        parts[down] = "down"
        parts[up] = "up"
    return parts


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
        """Return whether a bundle is of this layout: by PEFT's type, or by the ending of a key.

        LoRA takes every PEFT config that no other layout takes, and refuses it with a reason.
        """
        is_gguf = ARCHITECTURE in bundle.metadata
        if is_gguf or self.name == GGUF:
            return is_gguf and self.name == GGUF
        has_config = bundle.config is not None
        peft_type = bundle.config.get("peft_type") if bundle.config is not None else None
        if self.peft_type == "LORA":
            return has_config and peft_type != "LSR"
        if self.peft_type:
            return peft_type == self.peft_type
        if has_config:
            is_mlx = peft_type is None and self.transposed
            if not is_mlx:
                return False
        elif self.name == MLX_VLM:
            return False  # so short are other programs' keys too
        return any(key.endswith(tuple(self.parts)) for key in bundle.tensors)

    def read(self, bundle: Bundle, *, alpha: float | None = None) -> Checkpoint:
        """Read layers with the rank and scale that the programs of this layout give them."""
        if self.peft_type:
            return self._read_peft(bundle, alpha)
        if any(key.startswith(PREFIX) for key in bundle.tensors):
            raise CheckpointError(
                f"a PEFT file without its {bundle.config_path.name}; put that beside it",
                path=bundle.weights,
            )
        # 1. Where scales come from.
        mlx_scale = _mlx_scale(bundle)
        needs_alpha = self.scaled_outside and mlx_scale is None
        if not needs_alpha:
            from_file = "the file decides its scale, 1 without an alpha"
            refuse_alpha(bundle, alpha, from_file if mlx_scale is None else None)
        scale_of = self._scale_rule(bundle, mlx_scale, alpha)
        # 2. The layers, each under one name, without those that are no pairs.
        parts = {**self.parts, **self.others}
        bundle, notes = drop_orphan_alphas(bundle, parts)
        pairs, carried = set_aside(bundle, parts)
        modules, extras = group_by_module(pairs, parts)
        if carried and not modules:
            key, reason = next(iter(carried.items()))
            raise UnsupportedError(f"{reason}; {NOT_READ}", path=bundle.weights, tensor=key)
        for key, reason in carried.items():
            # A cut writes the config in the header anew, and their scale with it.
            if METADATA in bundle.metadata and key.endswith(tuple(self.parts)):
                raise UnsupportedError(f"{reason}; {NOT_READ}", path=bundle.weights, tensor=key)
        layers = [
            self._layer(_module_name(stored, roles), roles, scale_of)
            for stored, roles in modules.items()
        ]
        _check_unique(layers, bundle)
        # 3. What stands for a config.
        config: dict[str, Any] = {}
        if bundle.config is not None:
            config["base_model_name_or_path"] = bundle.config.get("model")
        if needs_alpha:
            if alpha is None:
                raise self._alpha_is_missing(layers, bundle)
            heads = sorted({key.removeprefix(PREFIX).partition(".")[0] for key in extras})
            config["lora_alpha"] = alpha
            config["modules_to_save"] = heads or None
        return make_checkpoint(
            bundle, self.name, layers, extras, notes, config=config, carried=carried
        )

    def _scale_rule(self, bundle: Bundle, mlx_scale: float | None, alpha: float | None) -> ScaleOf:
        """Return what gives the scale of a layer whose pair has no alpha beside it."""
        if mlx_scale is not None:
            return lambda _, __: mlx_scale
        if self.scaled_outside:
            # Without alpha the file is refused, once the ranks to name are known.
            return lambda _, rank: 1.0 if alpha is None else alpha / rank
        if self.name == GGUF:
            gguf_alpha = float(bundle.metadata.get(GGUF_ALPHA, 0.0))
            return lambda _, rank: gguf_alpha / rank if gguf_alpha else 1.0
        by_component = _header_scales(bundle)

        def scale_of(name: str, rank: int) -> float:
            component, _, module = name.partition(".")
            if component not in by_component:
                return 1.0
            return by_component[component].scale(module, rank)

        return scale_of

    def _alpha_is_missing(self, layers: list[Layer], bundle: Bundle) -> CheckpointError:
        ranks = ", ".join(map(str, sorted({layer.rank for layer in layers})))
        return CheckpointError(
            f"a {self.name} file of rank {ranks}: its alpha is not in it; pass alpha= as it was "
            "trained (its script's lora_alpha; of mlx-lm rank times scale)",
            path=bundle.weights,
        )

    def _read_peft(self, bundle: Bundle, alpha: float | None) -> Checkpoint:
        """Read a PEFT directory as PEFT 0.21 loads it; what is not one of our layers is refused."""
        config = Config(bundle.config or {}, bundle.config_path)
        if config.raw.get("peft_type") is None:
            _mlx_scale(bundle)  # says what is not read, and whose config it is not
            raise bundle.config_error(
                "is mlx-lm's or mlx-vlm's, and no tensor is called .lora_a or .A as theirs are: "
                "give the weights that were saved with it"
            )
        refuse_alpha(bundle, alpha)
        _refuse_expert_tensors(bundle)
        for name, reason in MERGED_FIELDS.items():
            if config.raw.get(name) and config.raw.get("peft_type") == "LORA":
                raise needs_base(f"{name} is set: {reason}", config)
        notes = check_supported(config)
        check_carried(config)
        linear = "conv1d" if config.flag("fan_in_fan_out") else "linear"
        modules, extras = group_by_module(bundle, self.parts, PREFIX)
        if self.peft_type == "ADALORA":
            layers = _adalora_layers(modules, linear, config)
            pruned = len(modules) - len(layers)
            if pruned:
                notes += (f"{pruned} layers of rank 0, which AdaLoRA pruned, are left out",)
        else:
            alpha = config.number(ALPHA_FIELDS[self.peft_type], 8)
            scales = Scales(config, config.integer("r", 8), alpha)
            if self.peft_type == "LORA":
                layers = _lora_layers(modules, scales, linear, config)
            else:
                layers = [
                    self._layer(name, roles, lambda name, _: scales.scale(name, scales.rank(name)))
                    for name, roles in modules.items()
                ]
        notes += missing_modules(config.raw, extras)
        return make_checkpoint(
            bundle, self.name, layers, extras, notes, layer_word=f"{self.peft_type} layer"
        )

    def _layer(self, name: str, roles: Roles, scale_of: ScaleOf) -> Layer:
        """Make one layer of whatever parts there are."""
        peft_scale = scale_of(name, 0) if self.peft_type else None
        if any(part in roles for part in HADA_PARTS.values()):
            return hadamard_layer(name, roles, peft_scale)
        if any(part in roles for part in LOKR_PARTS.values()):
            return kronecker_layer(name, roles, peft_scale)
        return pair_layer(name, roles, scale_of, transposed=self.transposed)


KOHYA = Layout("kohya", pair_parts((KOHYA_DOWN, ".lora_up.weight")), ALPHA)
DIFFUSERS = Layout(
    "diffusers",
    pair_parts(
        (".lora_A.weight", ".lora_B.weight"),
        (".lora.down.weight", ".lora.up.weight"),
        (".lora_linear_layer.down.weight", ".lora_linear_layer.up.weight"),
        ("_lora.down.weight", "_lora.up.weight"),
    ),
    ALPHA,
)
LAYOUTS = (
    # Told by its header.
    Layout(GGUF, pair_parts((".weight.lora_a", ".weight.lora_b"))),
    # With a config, told by its peft_type, which mlx-lm's has not. LoRA takes every type that is
    # left, and refuses by name what is not LoRA.
    Layout("peft-loha", HADA_PARTS, peft_type="LOHA"),
    Layout("peft-lokr", LOKR_PARTS, peft_type="LOKR"),
    Layout(
        "peft-adalora",
        {**pair_parts((".lora_A", ".lora_B")), ADALORA_VALUES: "singular values"},
        peft_type="ADALORA",
    ),
    Layout(
        "mlx", pair_parts((".lora_a", ".lora_b")), MAGNITUDE, scaled_outside=True, transposed=True
    ),
    Layout(MLX_VLM, pair_parts((".A", ".B")), scaled_outside=True, transposed=True),
    Layout(
        "peft-lora",
        pair_parts((".lora_A.weight", ".lora_B.weight"), (EMBEDDING_DOWN, ".lora_embedding_B")),
        peft_type="LORA",
    ),
    # Without a config, told by the endings of the keys. LyCORIS files may hold plain LoRA modules
    # under kohya's keys.
    Layout("lycoris", {**HADA_PARTS, **LOKR_PARTS}, {**KOHYA.parts, **ALPHA}),
    KOHYA,
    # Before diffusers: of no other layout either, and there are no alphas.
    Layout("diffsynth", pair_parts((".lora_A.default.weight", ".lora_B.default.weight")), ALPHA),
    # No file of these is one of another layout: among themselves they could stand in any order.
    DIFFUSERS,
    Layout("loralib", pair_parts((".lora_A", ".lora_B")), MAGNITUDE, scaled_outside=True),
    Layout(
        "torchtune",
        pair_parts((".lora_a.weight", ".lora_b.weight")),
        MAGNITUDE,
        scaled_outside=True,
    ),
)
"""The first that matches reads, so whoever knows a file best stands before whoever would take it
too."""


# -- layers of a layout ----------------------------------------------------------------------------


def pair_layer(
    name: str,
    roles: Roles,
    scale_of: ScaleOf,
    layer_type: str = "linear",
    *,
    transposed: bool = False,
) -> LoraLayer:
    """Make one layer from its up, down, optional mid and optional alpha."""
    require_roles(name, roles, ("up", "down"), ("mid", "alpha"))
    up, down = roles["up"], roles["down"]
    if transposed:
        up, down = _transposed(up), _transposed(down)
    if "mid" in roles:
        down = _with_middle(roles["mid"], down)
    elif up.shape[1:] != down.shape[:1] and up.name.endswith((".lora_B", ".lora_B.weight")):
        _refuse_merged(name, up, down)
    if down.name.endswith(EMBEDDING_DOWN) or (transposed and name.endswith(MLX_EMBEDDINGS)):
        layer_type = "embedding"
    if name == "token_embd" and down.name.endswith(".weight.lora_a"):
        raise UnsupportedError(
            "an embedding, whose halves llama.cpp stores the other way round; not read: convert "
            "the adapter that the file was made from",
            path=down.path,
            tensor=down.name,
        )
    layer = low_rank_layer(name, up, down, 1.0, layer_type=layer_type)
    layer = replace(layer, keys=tuple(tensor.name for tensor in roles.values()))
    if "alpha" not in roles:
        return replace(layer, scale=scale_of(name, layer.rank))
    alpha = roles["alpha"]
    scale = scalar(alpha) / layer.rank
    if down.name.endswith(KOHYA_DOWN):
        scale = alpha_scale(alpha, layer.rank)
    return replace(layer, scale=scale, alpha=alpha)


def _lora_layers(
    modules: Mapping[str, Roles], scales: Scales, linear: str, config: Config
) -> list[Layer]:
    """Make the layers of PEFT's LoRA; of experts that are stored stacked, one each."""

    def scale_of(name: str, _: int) -> float:
        return scales.scale(name, scales.rank(name))

    stacks = Stacks(config.raw, config.path)
    read = lru_cache(maxsize=2)(StoredTensor.read)  # the two halves of a stack, for its experts
    layers: list[Layer] = []
    for key, roles in modules.items():
        parameter = stacks.parameter_of_key(key)
        name = parameter or key
        rank = scales.rank(name)
        layer = pair_layer(name, roles, scale_of, linear)
        if parameter is not None:
            layers += expert_layers(layer, rank, config.path, read)
        elif layer.rank == rank:
            layers.append(layer)
        else:
            down = roles["down"]
            raise down.error(
                f"rank {layer.rank} in shape {down.shape}, but the config says r = {rank}; correct "
                f"r or rank_pattern in {config.path.name}"
            )
    stacks.check_complete(layer.name for layer in layers)
    return layers


def _adalora_layers(modules: Mapping[str, Roles], linear: str, config: Config) -> list[Layer]:
    """Make the layers of PEFT's AdaLoRA, ``ΔW = B diag(E) A · alpha / (init_r + 1e-5)``.

    The divisor stays that of the first rank when ranks are pruned (PEFT 0.21,
    ``resize_modules_by_rank_pattern``); layers of rank 0 are none.
    """
    first_rank = config.integer("init_r", 12)
    alpha = config.number("lora_alpha", 8)
    kept = {}
    for name, mask in config.mapping("rank_pattern").items():
        if not isinstance(mask, list) or not all(isinstance(bit, bool) for bit in mask):
            raise config.error("rank_pattern", "lists of true and false")
        kept[name.partition(ADALORA_VALUES)[0]] = sum(mask)
    layers: list[Layer] = []
    for name, roles in modules.items():
        require_roles(name, roles, ("up", "down", "singular values"))
        down = roles["down"]
        values = roles["singular values"]
        rank = kept.get(name, first_rank)
        if down.shape[:1] != (rank,) or values.shape != (rank, 1):
            raise down.error(
                f"shape {down.shape} with singular values {values.shape}, but the config says "
                f"rank {rank}; correct init_r or rank_pattern in {config.path.name}"
            )
        if rank == 0:
            continue
        product = derived_tensor(down, down.shape, partial(_scaled_rows, values, down))
        layer = low_rank_layer(name, roles["up"], product, 1.0, layer_type=linear)
        scale = (alpha if alpha > 0.0 else rank) / (first_rank + 1e-5)
        keys = tuple(tensor.name for tensor in roles.values())
        layers.append(replace(layer, scale=scale, keys=keys))
    return layers


def _scaled_rows(values: StoredTensor, rows: StoredTensor) -> Array:
    """Return diag(E) A in double precision."""
    return values.load(double=True) * rows.load(double=True)


def _module_name(stored: str, roles: Roles) -> str:
    """Return the module path of an old attention-processor key; other names are their own."""
    key = next(iter(roles.values())).name
    name = stored.replace(".processor.", ".")
    if not key.removeprefix(stored).startswith(PROCESSOR):
        return name
    parent, _, word = name.rpartition(".")
    words = TEXT_NAMES if stored.startswith("text_encoder") else UNET_NAMES
    word = words.get(word, word)
    return f"{parent}.{word}" if parent else word


def _transposed(tensor: StoredTensor) -> StoredTensor:
    """Describe the matrix as the records want it, still unread."""
    if len(tensor.shape) != 2:
        raise tensor.error(
            f"shape {tensor.shape}, expected a matrix; experts stored stacked are not read"
        )
    return replace(tensor, shape=tensor.shape[::-1], fetch=lambda: tensor.read().T)


def _with_middle(mid: StoredTensor, down: StoredTensor) -> StoredTensor:
    """Describe A of a LoCon with a middle part: ``A[i, c, …] = Σ_j mid[i, j, …] down[j, c]``."""
    fits = len(mid.shape) >= 3 and mid.shape[1] == down.shape[0] and math.prod(down.shape[2:]) == 1
    if not fits:
        raise mid.error(f"shape {mid.shape} does not fit {down.shape}")

    def product() -> Array:
        inner = down.load().reshape(down.shape[:2]).astype(np.float64)
        return np.moveaxis(np.tensordot(mid.load(), inner, axes=(1, 0)), -1, 1)

    return derived_tensor(down, (mid.shape[0], down.shape[1], *mid.shape[2:]), product)


def _refuse_expert_tensors(bundle: Bundle) -> None:
    """Refuse Tinker's experts, whose halves have an axis for the experts."""
    for key, tensor in bundle.tensors.items():
        if ".experts." in key and ".lora_" in key and len(tensor.shape) == 3:
            raise UnsupportedError(
                f"shape {tensor.shape}: experts with an axis of their own, as Tinker saves them "
                "and PEFT does not load them; make a PEFT adapter of it by tinker_cookbook.weights"
                f".build_lora_adapter(base_model=…, adapter_path={str(bundle.weights.parent)!r}, "
                "output_path=…), and give that",
                path=tensor.path,
                tensor=key,
            )


def _refuse_merged(name: str, up: StoredTensor, down: StoredTensor) -> None:
    """Refuse loralib's MergedLinear, which lays A of several parts over each other.

    Its B has the parts beside each other, so that the ranks of A are a multiple of those of B. In a
    PEFT directory the halves have PEFT's names.
    """
    if not len(up.shape) == len(down.shape) == 2:
        return
    rank, all_ranks = up.shape[1], down.shape[0]
    if not 0 < rank < all_ranks or all_ranks % rank:
        return
    parts = all_ranks // rank
    alpha = f"{parts} times the alpha"
    if up.name.endswith(".weight"):
        alpha = f"in its config r = {all_ranks} and {parts} times the lora_alpha"
    raise UnsupportedError(
        f"rank {rank} in lora_B, {all_ranks} in lora_A: loralib's MergedLinear of {parts} enabled "
        "parts (enable_lora); which of its parts they are is not in the file, so it is not read. "
        f"Unfold it: a block-diagonal lora_B with all rows of the layer and {all_ranks} columns, "
        f"zero rows for the other parts, and {alpha}",
        path=up.path,
        tensor=name,
    )


def _check_unique(layers: list[Layer], bundle: Bundle) -> None:
    seen: set[str] = set()
    for layer in layers:
        if layer.name in seen:
            raise CheckpointError("is held under two names", path=bundle.weights, tensor=layer.name)
        seen.add(layer.name)


# -- where scales come from ------------------------------------------------------------------------


def _header_scales(bundle: Bundle) -> dict[str, Scales]:
    """Read scales by component, from the configs that newer diffusers keeps in the header."""
    text = bundle.metadata.get(METADATA)
    if text is None:
        return {}
    fields: dict[str, dict[str, Any]] = {}
    for key, value in parse_json(text.encode(), bundle.weights, what=METADATA).items():
        component, _, name = key.partition(".")
        fields.setdefault(component, {})[name] = value
    scales = {}
    for component, raw in fields.items():
        config = Config({"peft_type": "LORA", **raw}, bundle.weights)
        check_supported(config)
        scales[component] = Scales(config, config.integer("r", 8), config.number("lora_alpha", 8))
    return scales


def _mlx_scale(bundle: Bundle) -> float | None:
    """Read the scale in the adapter_config.json of mlx-lm or mlx-vlm."""
    if bundle.config is None:
        return None
    fine_tune_type = bundle.config.get("fine_tune_type", "lora")
    if fine_tune_type != "lora":
        what = MLX_TYPES.get(fine_tune_type, "is not read")
        raise UnsupportedError(
            f"fine_tune_type is {ascii(fine_tune_type)[:40]}: mlx-lm's, which {what}; only lora is "
            "read: train with --fine-tune-type lora",
            path=bundle.config_path,
        )
    settings = bundle.config.get("lora_parameters")
    if isinstance(settings, Mapping):
        return Config(settings, bundle.config_path).number("scale")
    if {"rank", "alpha"} <= bundle.config.keys():  # mlx-vlm's, which multiplies by alpha itself
        return Config(bundle.config, bundle.config_path).number("alpha")
    raise bundle.config_error(
        "has neither peft_type (PEFT), lora_parameters (mlx-lm), nor rank and alpha (mlx-vlm): "
        "whose config is it?"
    )


# -- what a PEFT config may say --------------------------------------------------------------------

ALPHA_FIELDS = {"LORA": "lora_alpha", "ADALORA": "lora_alpha", "LOHA": "alpha", "LOKR": "alpha"}
"""What the types of PEFT that are read here call alpha."""
MERGED_FIELDS = {
    "use_dora": DORA_NEEDS_BASE,
    "use_bdlora": "BD-LoRA has block-diagonal halves",
    "lora_bias": "the low-rank pair has a bias of its own",
}
"""What else changes the update, so that it would not be scale·B·A; PEFT merges it into a base."""
REFUSED_FIELDS = {
    "use_qalora": "QA-LoRA pools its inputs in groups",
    "alora_invocation_tokens": "activated LoRA acts on some tokens only",
    "arrow_config": "Arrow routes tokens between adapters",
    "kasa_config": "KaSA truncates the base weights",
    "monteclora_config": "MonteCLoRA samples its weights",
    "layer_replication": "it copies layers of the base model",
    "megatron_config": "its layers are sharded by Megatron",
    "ensure_weight_tying": "it ties adapters of different modules",
}
"""What else changes the forward pass or the base weights, so that scale·B·A would not be ΔW."""
BASE_CHANGING = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Initializations that take their start out of the base weights."""
LORA_FIELDS = {
    *MERGED_FIELDS,
    *REFUSED_FIELDS,
    "alpha_pattern",
    "auto_mapping",
    "base_model_name_or_path",
    "bias",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_alpha",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "rank_pattern",
    "revision",
    "runtime_config",
    "target_modules",
    "target_parameters",
    "task_type",
    "trainable_token_indices",
    "use_rslora",
    "velora_config",
}
"""Fields of a LoRA config that are known here."""
LYCORIS_FIELDS = {
    "alpha",
    "decompose_both",
    "decompose_factor",
    "init_weights",
    "module_dropout",
    "rank_dropout",
    "rank_dropout_scale",
    "use_effective_conv2d",
}
"""Further fields of LoHa and LoKr; what use_effective_conv2d does shows in the shapes."""
ADALORA_FIELDS = {
    "beta1",
    "beta2",
    "deltaT",
    "init_r",
    "orth_reg_weight",
    "target_r",
    "tfinal",
    "tinit",
    "total_step",
}
"""Further fields of AdaLoRA, which but for init_r are of its training."""


def check_supported(config: Config) -> tuple[str, ...]:
    """Refuse a PEFT config that changes the update beyond ``scale·B·A``, and note unknown fields.

    Returns
    -------
    tuple of str
        Notes.

    Raises
    ------
    UnsupportedError
        With the reason.
    """
    peft_type = config.text("peft_type")
    if peft_type not in ALPHA_FIELDS:
        refuse_method(config)
    refuse_fields(config, {**MERGED_FIELDS, **REFUSED_FIELDS})
    initialization = str(config.raw.get("init_lora_weights")).lower()
    if initialization.startswith(BASE_CHANGING):
        raise UnsupportedError(
            f"init_lora_weights is {initialization[:40]!r}: training changed the base weights, so "
            "B·A is not the update; save again with path_initial_model_for_weight_conversion",
            path=config.path,
        )
    others = {"LORA": set[str](), "ADALORA": ADALORA_FIELDS}.get(peft_type, LYCORIS_FIELDS)
    known = LORA_FIELDS | others
    unknown = sorted(name for name, value in config.raw.items() if value and name not in known)
    for name in unknown:
        if name.startswith("use_"):
            message = f"{name[:60]!r} is set, which this version does not know; {NOT_READ}"
            raise UnsupportedError(message, path=config.path)
    if not unknown:
        return ()
    return (f"config fields not known here, ignored: {', '.join(map(ascii, unknown))[:200]}",)
