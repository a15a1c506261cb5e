"""What `export` writes in the form `common`, read by servers' own loaders beside PEFT.

The adapters are made from one by changing its config or its tensors. An export is read right if
the loader finds every layer, and ΔW as PEFT has it of the adapter that was exported.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
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

from lsrdecomp.lora.compress.export import export_lora
from lsrdecomp.lora.files import open_checkpoint, read_modules

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytestmark = pytest.mark.servers

LOADER = "loader, on the CPU; ΔW compared"
SCRIPT = Path(__file__).with_name("load_by_server.py")
IN_HALF_PRECISION = "exllamav3"
"""The server that keeps what it loads in float16."""
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


def repeated(times: int) -> Change:
    def change(config, tensors):
        made = {}
        for key, value in tensors.items():
            made[key] = np.concatenate([value] * times, axis=0 if "lora_A" in key else 1)
        return {**config, "r": 8 * times, "lora_alpha": 16 * times}, made

    return change


VARIANTS: dict[str, Change] = {
    "as trained": fields(),
    "alpha_pattern": fields(alpha_pattern={"q_proj": 4}),
    "rslora": fields(use_rslora=True),
    "rank_pattern": cut("q_proj", 2, rank_pattern={"q_proj": 2}),
    "one pattern for one layer": cut(
        "layers.1.self_attn.q_proj", 2, rank_pattern={"layers.1.self_attn.q_proj": 2}
    ),
    "rank and alpha patterns": cut(
        "mlp.up_proj", 4, rank_pattern={"up_proj": 4}, alpha_pattern={"up_proj": 12}
    ),
    "rank 4": cut("", 4, r=4, lora_alpha=4),
    "rank 24": repeated(3),
    "rank 32": repeated(4),
    "one v is missing": without("layers.2.self_attn.v_proj"),
    "no k": without("k_proj", target_modules=["q_proj", "v_proj", "o_proj", *MLP]),
    "no v": without("v_proj", target_modules=["q_proj", "k_proj", "o_proj", *MLP]),
    "no gate": without("gate_proj", target_modules=[*ATTENTION, "up_proj", "down_proj"]),
    "targets as a pattern": fields(target_modules=r".*_proj"),
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
    """Name and version of a server, and the folder where an interpreter finds its loader."""
    return request.param, install(request.param, tmp_path_factory.mktemp("server"))


def make(trained: Path, folder: Path, change: Change) -> Path:
    config = json.loads((trained / "adapter_config.json").read_text())
    config, tensors = change(config, load_file(trained / "adapter_model.safetensors"))
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def load_by_server(server: str, site: Path, folder: Path, base: Path) -> dict[str, np.ndarray]:
    """Return ΔW of every layer that the server's loader finds, by its name from ``layers`` on."""
    shapes = read_modules(base).shapes
    request = {
        "server": server.partition(" ")[0],
        "adapter": str(folder),
        "shapes": {name: shape for name, shape in shapes.items() if shape is not None},
        "config": json.loads((base / "config.json").read_text()),
        "pairs": str(site / "pairs.safetensors"),
    }
    (site / "request.json").write_text(json.dumps(request))
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(site / "request.json")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tensors = load_file(request["pairs"])
    updates = {}
    for key, down in tensors.items():
        if key.endswith(".A"):
            name = key.removesuffix(".A")
            up = tensors[f"{name}.B"]
            updates[from_layers(name)] = up.astype(np.float64) @ down.astype(np.float64)
    return updates


def from_layers(name: str) -> str:
    """Return a layer's name without what stands before ``layers``, which SGLang leaves out."""
    return re.sub(r"^.*?(?=layers\.)", "", name)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_export_writes_is_read_alike_by_every_server(
    server, base, trained, tmp_path, variant, record
):
    """All layers, ΔW of PEFT, nothing rescaled and nothing lost."""
    name, site = server
    source = make(trained, tmp_path / "a", VARIANTS[variant])
    folder = export_lora(open_checkpoint(source), tmp_path / "served", base=base)
    served = load_by_server(name, site, folder, base)
    expected = by_peft(base, source)
    written = {layer.name: layer for layer in open_checkpoint(folder).layers}
    assert expected.keys() <= written.keys()
    worst = 0.0
    for layer_name, layer in written.items():
        up, down = (half.astype(np.float64) for half in layer.load())
        update = layer.scale * (up @ down)
        own = expected.get(layer_name, np.zeros(update.shape))
        np.testing.assert_allclose(update, own, atol=1e-4)
        difference = served[from_layers(layer_name)] - update
        worst = max(worst, np.linalg.norm(difference) / max(np.linalg.norm(update), 1.0))
    assert worst < (1e-3 if name == IN_HALF_PRECISION else 1e-6)
    record(name, LOADER, "exports", worst)
    print(f"\n{name:14} {variant:26} {len(written)} layers, ΔW within {worst:.1e}", end="")
