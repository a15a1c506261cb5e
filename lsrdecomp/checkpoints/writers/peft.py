"""Writing a plain LoRA directory: exact for what is given, in PEFT's form or for servers with one global scale."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lsrdecomp.checkpoints.config import carried_fields, module_suffixes, most_common, patterns
from lsrdecomp.checkpoints.experts import Stacks
from lsrdecomp.checkpoints.format import CONFIG, PREFIX
from lsrdecomp.checkpoints.provenance import read_provenance
from lsrdecomp.checkpoints.writers.pair_writer import PairWriter
from lsrdecomp.checkpoints.writing import WEIGHTS, new_directory, write_json
from lsrdecomp.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lsrdecomp.checkpoints.records import Checkpoint
    from lsrdecomp.checkpoints.tensors import Array, StoredTensor

SERVER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM allocates; more is refused
PROFILES = ("peft", "server", "lorax")
LINEAR = ("lora_A.weight", "lora_B.weight")
EMBEDDING = ("lora_embedding_A", "lora_embedding_B")


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
    provenance: Mapping[str, Any] | None = None,
) -> Path:
    """Write a PEFT LoRA directory with ``ΔW = B @ A``: lora_alpha = r everywhere, so the scale must be in B already.

    Parameters
    ----------
    out_dir : str or Path
        Must not exist, unless ``force``; see `lsrdecomp.checkpoints.writing.new_directory`.
    layers : iterable of (name, B, A)
        B (m, r) and A (r, n), taken one at a time.
    source : Checkpoint, optional
        Where config fields, other tensors and layer kinds (embedding, convolution) come from; never
        written into.
    config, extras : Mapping, optional
        Instead of the source's.
    storage : str
        Dtype of A and B; arrays already in it keep their bits.
    profile : str
        ``"peft"``. ``"server"``: r = lora_alpha = the largest rank, each layer at its own rank;
        servers that scale by lora_alpha / r of the config alone read that right, and by its
        patterns PEFT does. ``"lorax"``: one rank for all layers, padded with zeros up to one of 1,
        8, 16, 32, 64, 128, 256, 320, 512, no patterns, for servers that stack the layers of a type;
        all layers are gathered first, to see the largest. Servers hold no other tensors, so extras
        are refused by name under both.

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
    UnsupportedError
        For other tensors, or too large a rank, under the profiles server and lorax.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from lsrdecomp.checkpoints import open_checkpoint
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     up, down = np.ones((4, 1), np.float32), np.ones((1, 6), np.float32)
    ...     written = open_checkpoint(write_lora(Path(directory) / "lora", layers=[("model.q_proj", up, down)]))
    >>> [(layer.name, layer.shape) for layer in written.layers]
    [('model.q_proj', (4, 6))]
    """
    out = Path(out_dir)
    if profile not in PROFILES:
        raise CheckpointError(f"profile {profile!r} is not one of {', '.join(PROFILES)}")
    # Write 1: what a profile cannot hold is refused before anything is written.
    config = config if config is not None else (source.config if source else {})
    extras = extras if extras is not None else (source.extras if source else {})
    if profile != "peft" and extras:
        text = f"{len(extras)} tensors beside the adapter ({next(iter(extras))}, …) that servers do not load"
        raise UnsupportedError(
            text + ": use profile 'peft', or pass extras={} to leave them out", path=out
        )
    stacks = Stacks(config, out)
    if profile != "peft" and stacks.targets:
        text = "experts are stored stacked (target_parameters), which servers read otherwise"
        raise UnsupportedError(f"{text}: use profile 'peft'", path=out)
    rank = None
    if profile == "lorax":
        layers = list(layers)
        rank = _server_rank(max((down.shape[0] for _, _, down in layers), default=1), out)
    with (
        new_directory(out, inputs=(source.path,) if source else (), force=force) as part,
        PairWriter(part, source) as writer,
    ):
        # Write 2: the pairs as they come; experts of one stacked parameter, which come together, in
        # one tensor.
        kinds = {name: layer.layer_type for name, layer in writer.layers.items()}
        names: set[str] = set()
        for stack, group in groupby(layers, lambda layer: stacks.parameter_of_layer(layer[0])):
            if stack is not None:
                pairs = {name: (up, down) for name, up, down in group}
                names |= pairs.keys()
                key = PREFIX + stacks.key_of_parameter(stack)
                writer.add_experts(
                    stack,
                    pairs,
                    _experts(stack, source),
                    (f"{key}.{LINEAR[0]}", f"{key}.{LINEAR[1]}"),
                    storage,
                )
                continue
            for name, up, down in group:
                names.add(name)
                ends = EMBEDDING if kinds.get(name) == "embedding" else LINEAR
                keys = f"{PREFIX}{name}.{ends[0]}", f"{PREFIX}{name}.{ends[1]}"
                writer.add_pair(name, up, down, keys, storage, rank=rank)
        ranks = writer.ranks
        if profile == "server":
            _server_rank(max(ranks.values()), out)
        for key, tensor in extras.items():
            writer.add(key, tensor.read())
        # Write 3: the config for what came. Alpha is the rank everywhere: the scale is in B.
        header = writer.record(provenance, profile=profile, storage=storage)
        fields = carried_fields(config, names, set(extras), source, "lora_only")
        if profile != "peft":
            fields["target_modules"] = module_suffixes(ranks)
        elif stacks.targets and isinstance(fields["target_modules"], list):
            fields["target_modules"] = [
                name for name in fields["target_modules"] if stacks.parameter_of_layer(name) is None
            ]
        if not extras:
            fields["modules_to_save"] = None
        common = max(ranks.values()) if profile == "server" else most_common(ranks)
        fields |= {
            "peft_type": "LORA",
            "r": common,
            "lora_alpha": common,
            "rank_pattern": patterns(ranks, common),
            "alpha_pattern": patterns(ranks, common),
            "fan_in_fan_out": any(kinds.get(name) == "conv1d" for name in ranks),
            "use_rslora": False,
            "use_dora": False,
            "lora_dropout": 0.0,
            "init_lora_weights": True,
        }
        writer.write(part / WEIGHTS, header)
        write_json(part / CONFIG, fields)
    return out


def _experts(stack: str, source: Checkpoint | None) -> int:
    """How many experts a stack has: as many as the source has of it, what it dropped included."""
    if source is None:
        raise CheckpointError(
            "the number of experts is that of a source, and there is none", tensor=stack
        )
    names = [*(layer.name for layer in source.layers), *read_provenance(source).get("dropped", ())]
    numbers = [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == stack]
    return 1 + max(int(number) for number in numbers if number.isdecimal())


def _server_rank(rank: int, out: Path) -> int:
    for allowed in SERVER_RANKS:
        if rank <= allowed:
            return allowed
    raise UnsupportedError(
        f"rank {rank} is above {SERVER_RANKS[-1]}, the most a server takes", path=out
    )
