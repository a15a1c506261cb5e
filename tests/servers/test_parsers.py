"""What `verify --for` says of an adapter beside what PEFT makes of it, with servers' own loaders.

Thirty-two adapters, made from one by changing its config or its tensors, and what `export` writes
of some. A verdict agrees if the file is refused where the loader raises, and every layer is said to
act as in PEFT exactly where the loader's ΔW is PEFT's.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import write_lora_directory
from safetensors.numpy import load_file, save_file
from server_packages import PACKAGES, install

from lsrdecomp.checkpoints import open_checkpoint, read_modules
from lsrdecomp.compression.export import export_lora
from lsrdecomp.errors import LsrError
from lsrdecomp.serving import check_served
from lsrdecomp.serving.installed import Loaded, load_by_server

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytestmark = pytest.mark.servers

LOADER = "loader, on the CPU; ΔW compared"
LAYERS = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SETTINGS = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
Tensors = dict[str, np.ndarray]
Change = Callable[[dict[str, Any], Tensors], tuple[dict[str, Any], Tensors]]


def fields(**changed: Any) -> Change:
    return lambda config, tensors: ({**config, **changed}, tensors)


def cut(pattern: str, rank: int, **changed: Any) -> Change:
    """Cut the layers of a name to a rank."""

    def change(config, tensors):
        made = {}
        for key, value in tensors.items():
            is_cut = pattern in key
            kept = value[:rank] if "lora_A" in key else value[:, :rank]
            made[key] = kept.copy() if is_cut else value
        return {**config, **changed}, made

    return change


def without(*patterns: str, **changed: Any) -> Change:
    def change(config, tensors):
        kept = {k: v for k, v in tensors.items() if not any(part in k for part in patterns)}
        return {**config, **changed}, kept

    return change


def renamed(old: str, new: str, **changed: Any) -> Change:
    return lambda config, tensors: (
        {**config, **changed},
        {key.replace(old, new): value for key, value in tensors.items()},
    )


def repeated(times: int) -> Change:
    def change(config, tensors):
        made = {}
        for key, value in tensors.items():
            made[key] = np.concatenate([value] * times, axis=0 if "lora_A" in key else 1)
        return {**config, "r": 8 * times, "lora_alpha": 16 * times}, made

    return change


def with_tensor(key: str, shape: tuple[int, ...], **changed: Any) -> Change:
    def change(config, tensors):
        return {**config, **changed}, {**tensors, key: np.ones(shape, np.float32)}

    return change


def narrowed(config, tensors):
    """Return a pair that is too narrow for its layer."""
    made = {}
    for key, value in tensors.items():
        is_cut = "o_proj" in key and "lora_A" in key
        made[key] = value[:, :40].copy() if is_cut else value
    return config, made


HEAD = "base_model.model.lm_head.weight"
VARIANTS: dict[str, Change] = {
    "as trained": fields(),
    "pissa": fields(init_lora_weights="pissa"),
    "olora": fields(init_lora_weights="olora"),
    "alpha_pattern": fields(alpha_pattern={"q_proj": 4}),
    "rslora": fields(use_rslora=True),
    "dora": fields(use_dora=True),
    "bias": fields(bias="all"),
    "lora_bias": fields(lora_bias=True),
    "modules_to_save": fields(modules_to_save=["lm_head"]),
    "modules_to_save score": fields(modules_to_save=["score"]),
    "rank_pattern": cut("q_proj", 2, rank_pattern={"q_proj": 2}),
    "short": cut("q_proj", 2),
    "rank 32": repeated(4),
    "rank 32 in a pattern": fields(rank_pattern={"none_such": 32}),
    "wrong number": renamed("model.layers.0.", "model.layers.9."),
    "wrong last word": renamed("q_proj", "qq_proj"),
    "wrong size": narrowed,
    "bdlora": fields(use_bdlora={"nblocks": 2}),
    "alora": fields(alora_invocation_tokens=[1, 2]),
    "layer_replication": fields(layer_replication=[[0, 2], [1, 3]]),
    "rank 0": fields(r=0),
    "one pattern for one layer": cut(
        "layers.1.self_attn.q_proj", 2, rank_pattern={"layers.1.self_attn.q_proj": 2}
    ),
    # Ten more
    "one v is missing": without("layers.2.self_attn.v_proj"),
    "no k": without("k_proj", target_modules=["q_proj", "v_proj", "o_proj", *MLP]),
    "no v": without("v_proj", target_modules=["q_proj", "k_proj", "o_proj", *MLP]),
    "no gate": without("gate_proj", target_modules=[*ATTENTION, "up_proj", "down_proj"]),
    "rank 4": cut("", 4, r=4, lora_alpha=4),
    "rank 24": lambda config, tensors: repeated(3)(config, tensors),
    "targets as a pattern": fields(target_modules=r".*_proj"),
    "a saved head": with_tensor(HEAD, (96, 64), modules_to_save=["lm_head"]),
    "another first word": renamed("model.model.", "model.model.model."),
    "rank and alpha patterns": cut(
        "mlp.up_proj", 4, rank_pattern={"up_proj": 4}, alpha_pattern={"up_proj": 12}
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    LlamaForCausalLM(LlamaConfig(**SETTINGS)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base) -> Path:
    """Rank 8, alpha 16, on all linear layers of the blocks."""
    rng = np.random.default_rng(0)
    tensors = {}
    for name, shape in read_modules(base).shapes.items():
        if ".layers." not in name:
            continue
        m, n = shape
        stem = f"base_model.model.{name}"
        tensors[f"{stem}.lora_A.weight"] = rng.standard_normal((8, n)).astype(np.float32)
        tensors[f"{stem}.lora_B.weight"] = rng.standard_normal((m, 8)).astype(np.float32)
    config = {"r": 8, "lora_alpha": 16, "target_modules": [*ATTENTION, *MLP]}
    return write_lora_directory(
        tmp_path_factory.mktemp("trained") / "lora", tensors, task_type="CAUSAL_LM", **config
    )


def by_peft(base: Path, folder: Path) -> dict[str, np.ndarray]:
    """Return ΔW of every layer that PEFT adapts."""
    from peft import PeftModel
    from transformers import LlamaForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(base), folder)
    updates = {}
    for name, module in model.named_modules():
        if hasattr(module, "get_delta_weight") and "default" in module.scaling:
            matrix = module.get_delta_weight("default").detach().numpy()
            updates[name.removeprefix("base_model.model.")] = matrix
    return updates


@pytest.fixture(scope="module", params=list(PACKAGES))
def server(request, tmp_path_factory):
    """Name and version of a server whose loader the interpreter finds."""
    site = install(request.param, tmp_path_factory.mktemp("server"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site), prepend=":")
        yield request.param


def make(trained: Path, folder: Path, change: Change) -> Path:
    config = json.loads((trained / "adapter_config.json").read_text())
    config, tensors = change(config, load_file(trained / "adapter_model.safetensors"))
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.fixture
def runs(monkeypatch) -> list[Loaded]:
    """What the loader made, of every run of it: kept on its way to the verdict."""
    kept = []

    def recorded(*args: Any) -> Loaded:
        kept.append(load_by_server(*args))
        return kept[-1]

    monkeypatch.setattr("lsrdecomp.serving.loaded.load_by_server", recorded)
    return kept


@pytest.fixture(scope="module")
def updates_by_peft(base, trained) -> Callable[[str, Path], dict[str, np.ndarray]]:
    """ΔW of a variant by PEFT, asked once for all servers."""
    known: dict[str, dict[str, np.ndarray]] = {}

    def updates(variant: str, folder: Path) -> dict[str, np.ndarray]:
        if variant == "modules_to_save":  # PEFT stops at the head that the file lacks
            variant, folder = "as trained", trained
        if variant not in known:
            known[variant] = by_peft(base, folder)
        return known[variant]

    return updates


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_verdict_is_what_the_loader_does(
    server, base, trained, tmp_path, variant, runs, updates_by_peft, record
):
    folder = make(trained, tmp_path / "a", VARIANTS[variant])
    try:
        check = check_served(folder, server.partition(" ")[0], base, python=sys.executable)
    except LsrError as error:
        show(server, variant, f"no LoRA that is read here: {error}")
        return
    (loaded,) = runs
    assert loaded.was_run, loaded.failure
    record(server, LOADER, "verdicts")
    if check.refusals:
        # By the loader, or because a size differs, which a loader without a model cannot see
        assert loaded.refusal or variant == "wrong size"
        show(server, variant, f"refused: {check.refusals[0]}")
        return
    assert not loaded.refusal
    expected = updates_by_peft(variant, folder)
    if server.startswith("sglang") and variant == "another first word":
        # SGLang goes by what follows layers.N; PEFT finds nothing of these names
        made = updates_by_peft("as trained", trained)
        expected = {f"model.{name}": update for name, update in made.items()}
    for module in check.modules:
        if module.name not in loaded.pairs:
            assert module.fault or server.startswith("sglang"), module
            continue
        up, down = loaded.pairs[module.name]
        served = up @ down
        own = expected.get(module.name)
        is_right = own is not None and np.linalg.norm(served - own) <= 1e-4 * np.linalg.norm(own)
        is_said_right = module.fault is None and abs(module.factor - 1.0) <= 1e-4
        assert is_right == is_said_right, module
    text = f"{len(check.applied)} of {len(check.modules)} apply"
    if check.rescaled:
        text += f", {len(check.rescaled)} of them at another scale"
    show(server, variant, f"{text} {' '.join(check.options)}")


def show(server: str, variant: str, text: str) -> None:
    print(f"\n{server:14} {variant:26} {text[:150]}", end="")


@pytest.mark.parametrize(
    "variant",
    ["as trained", "rank_pattern", "one v is missing", "no v", "rank 24", "rslora", "rank 4"],
)
def test_what_export_writes_is_read_alike_by_every_server(
    server, base, trained, tmp_path, variant, record
):
    """All layers, ΔW of PEFT, nothing rescaled and nothing lost."""
    source = open_checkpoint(make(trained, tmp_path / "a", VARIANTS[variant]))
    folder = export_lora(source, tmp_path / "served", base=base)
    check = check_served(folder, server.partition(" ")[0], base, python=sys.executable)
    assert check.refusals == []
    assert [module for module in check.modules if module.fault] == []
    assert check.rescaled == []
    expected = by_peft(base, tmp_path / "a")
    written = {layer.name: layer for layer in open_checkpoint(folder).layers}
    assert expected.keys() <= written.keys()
    for name, layer in written.items():
        up, down = layer.load()
        own = expected.get(name, np.zeros((layer.out_features, layer.in_features)))
        np.testing.assert_allclose(layer.scale * (up @ down), own, atol=1e-4)
    error = max(module.error for module in check.modules)
    record(server, LOADER, "exports", error)
    show(server, variant, f"exported: {len(written)} layers, ΔW within {error:.1e}")
