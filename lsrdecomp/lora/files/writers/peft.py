"""Plain LoRA directories written: in the form that all servers read alike, or for PEFT alone."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.files.adapter_config import (
    carried_fields,
    module_suffixes,
    most_common,
    patterns,
)
from lsrdecomp.lora.files.format import CONFIG, PREFIX
from lsrdecomp.lora.files.provenance import read_provenance
from lsrdecomp.lora.files.stacked_experts import Stacks
from lsrdecomp.lora.files.writers.pair_writer import PairWriter
from lsrdecomp.lora.files.writing import WEIGHTS, new_directory, write_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from lsrdecomp.lora.files.records import Checkpoint
    from lsrdecomp.lora.files.tensors import Array, StoredTensor

COMMON_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM allocates (0.33.0) and that TGI and LoRAX do not pad: they scale what they load
after a padded layer by the padded rank (db931fcf42da, a7394ba386ec)."""
PROFILES = ("common", "peft")
LINEAR_KEYS = ("lora_A.weight", "lora_B.weight")
EMBEDDING_KEYS = ("lora_embedding_A", "lora_embedding_B")


def write_lora(
    out_dir: str | Path,
    *,
    layers: Iterable[tuple[str, Array, Array]],
    source: Checkpoint | None = None,
    config: Mapping[str, Any] | None = None,
    extras: Mapping[str, StoredTensor] | None = None,
    storage: str = "float32",
    force: bool = False,
    profile: str = "peft",
    rank: int | None = None,
    provenance: Mapping[str, Any] | None = None,
    carried: Collection[str] = (),
) -> Path:
    """Write a PEFT LoRA directory with ``ΔW = B @ A``.

    lora_alpha = r everywhere, so the scale must be in B already.

    Parameters
    ----------
    out_dir : str or Path
        Must not exist, unless ``force``; see `lsrdecomp.lora.files.writing.new_directory`.
    layers : iterable of (name, B, A)
        B (m, r) and A (r, n), taken one at a time.
    source : Checkpoint, optional
        Where config fields, other tensors and types of layers (embedding, convolution) come from;
        never written into.
    config, extras : Mapping, optional
        Instead of the source's.
    storage : str
        Dtype of A and B; arrays already in it keep their bits.
    profile : str
        ``"peft"``: each layer at its own rank, by patterns. ``"common"``: one rank for all layers,
        padded with zeros up to one of `COMMON_RANKS`, r = lora_alpha and no patterns, which PEFT,
        vLLM, SGLang, TGI, LoRAX, Ollama and MLX read alike.
    rank : int, optional
        Of the profile common: the largest rank that will come. Absent, all layers are gathered
        first, to see it.
    force : bool
        Whether an adapter directory that is there may be replaced.
    provenance : Mapping, optional
        JSON values for the record in the header.
    carried : collection of str
        Layers of a PEFT source that do not come: their tensors are copied, whole stacks of them.

    Returns
    -------
    Path
        ``out_dir``.

    Raises
    ------
    CheckpointError
        If ``out_dir`` exists (unless ``force``), a number overflows ``storage``, or a word is not
        one of those above.
    ShapeError
        If B and A do not multiply, or are not of the size of the source's layer.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from lsrdecomp.lora.files import open_checkpoint
    >>> layers = [("model.q_proj", np.ones((4, 1)), np.ones((1, 6)))]
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     written = open_checkpoint(write_lora(f"{directory}/lora", layers=layers))
    >>> [(layer.name, layer.shape) for layer in written.layers]
    [('model.q_proj', (4, 6))]
    """
    out = Path(out_dir)
    # 1. What a profile cannot hold is refused before anything is written.
    if profile not in PROFILES:
        raise CheckpointError(f"profile {profile!r} is not one of {', '.join(PROFILES)}")
    if config is None:
        config = source.config if source else {}
    if extras is None:
        extras = source.extras if source else {}
    if source is not None:
        source.refuse_carried()
    stacks = Stacks(config, out)
    padded_rank = None
    if profile == "common":
        if rank is None:
            layers = list(layers)
            rank = max((down.shape[0] for _, _, down in layers), default=1)
        padded_rank = common_rank(rank)
    with (
        new_directory(out, inputs=(source.path,) if source else (), force=force) as part,
        PairWriter(part, source) as writer,
    ):
        # 2. The pairs as they come, then the other tensors.
        names = _add_layers(writer, layers, stacks, storage, padded_rank)
        if source is not None:
            _carry_layers(writer, source, carried, stacks)
        names |= set(carried)
        for key, tensor in extras.items():
            writer.add(key, tensor.read())
        # 3. The config for what came.
        header = writer.record(provenance, profile=profile, storage=storage)
        fields = carried_fields(config, names, set(extras), source, "lora_only")
        if stacks.targets and isinstance(fields["target_modules"], list):
            fields["target_modules"] = [
                name for name in fields["target_modules"] if stacks.parameter_of_layer(name) is None
            ]
        elif profile == "common" and not stacks.targets:
            fields["target_modules"] = module_suffixes(writer.ranks)
        if not extras:
            fields["modules_to_save"] = None
        fields |= _lora_fields(writer)
        writer.write(part / WEIGHTS, writer.with_digests(header, fields))
        write_json(part / CONFIG, fields)
    return out


def common_rank(rank: int) -> int:
    """Return the smallest rank that all servers take and none pads, or the next multiple of 16.

    Examples
    --------
    >>> common_rank(2), common_rank(20), common_rank(600)
    (8, 32, 608)
    """
    for allowed in COMMON_RANKS:
        if rank <= allowed:
            return allowed
    return -(-rank // 16) * 16


def _add_layers(
    writer: PairWriter,
    layers: Iterable[tuple[str, Array, Array]],
    stacks: Stacks,
    storage: str,
    rank: int | None,
) -> set[str]:
    """Add the pairs of all layers under PEFT's keys; return the names of the layers.

    Experts of one stacked parameter, which come together, go into one tensor.
    """
    names: set[str] = set()
    for stack, group in groupby(layers, lambda layer: stacks.parameter_of_layer(layer[0])):
        if stack is not None:
            pairs = {name: (up, down) for name, up, down in group}
            names |= pairs.keys()
            key = PREFIX + stacks.key_of_parameter(stack)
            experts = _count_experts(stack, writer.source)
            keys = _keys(key, LINEAR_KEYS)
            writer.add_experts(stack, pairs, experts, keys, storage, rank=rank)
            continue
        for name, up, down in group:
            names.add(name)
            layer = writer.layers.get(name)
            is_embedding = layer is not None and layer.layer_type == "embedding"
            keys = _keys(PREFIX + name, EMBEDDING_KEYS if is_embedding else LINEAR_KEYS)
            writer.add_pair(name, up, down, keys, storage, rank=rank)
    return names


def _carry_layers(
    writer: PairWriter, source: Checkpoint, names: Collection[str], stacks: Stacks
) -> None:
    """Copy the tensors of layers, each tensor of a stack once."""
    keys: dict[str, None] = {}
    for name in names:
        layer = source.layer(name)
        writer.carry(stacks.parameter_of_layer(name) or name, layer)
        keys |= dict.fromkeys(layer.keys)
    for key in keys:
        writer.add(key, source.tensors[key].read())


def _keys(module: str, endings: tuple[str, str]) -> tuple[str, str]:
    down, up = endings
    return f"{module}.{down}", f"{module}.{up}"


def _count_experts(stack: str, source: Checkpoint | None) -> int:
    """Return how many experts a stack has: as many as the source has, and had."""
    if source is None:
        raise CheckpointError(
            "the number of experts is that of a source, and there is none", tensor=stack
        )
    dropped = read_provenance(source).get("dropped", ())
    numbers = []
    for name in (*(layer.name for layer in source.layers), *dropped):
        parameter, _, number = name.rpartition(".")
        if parameter == stack and number.isdecimal():
            numbers.append(int(number))
    return 1 + max(numbers)


def _lora_fields(writer: PairWriter) -> dict[str, Any]:
    """Return the fields of LoRA in a config, with the alphas that the writer says."""
    ranks = writer.ranks
    alphas = writer.alphas
    common = most_common(ranks)
    common_alpha = most_common(alphas)
    layer_types = {layer.layer_type for name, layer in writer.layers.items() if name in ranks}
    return {
        "peft_type": "LORA",
        "r": common,
        "lora_alpha": common_alpha,
        "rank_pattern": patterns(ranks, common),
        "alpha_pattern": patterns(alphas, common_alpha),
        "fan_in_fan_out": "conv1d" in layer_types,
        "use_rslora": False,
        "use_dora": False,
        "lora_dropout": 0.0,
        "init_lora_weights": True,
    }
