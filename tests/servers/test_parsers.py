"""Our rules of vLLM and SGLang beside the parsers of their wheels, with the engines stubbed.

Wheels come without dependencies from the package index that pip knows; where they cannot be had,
these tests skip.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import subprocess
import sys
import types
import zipfile

import numpy as np
import pytest
from checkpoint_files import lora_pair, write_lora_directory
from safetensors.numpy import save_file
from safetensors.torch import load_file

from lsrdecomp.checkpoints import open_checkpoint
from lsrdecomp.compression.export import export_lora
from lsrdecomp.serving import check_served

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.servers

LAYERS, WIDTH = 2, 32
SIZES = {"q_proj": (32, 32), "k_proj": (16, 32), "v_proj": (16, 32), "o_proj": (32, 32)}
SIZES |= {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
PARTS = {
    "vllm": ("lora_model", "lora_weights", "peft_helper", "utils"),
    "sglang": ("lora", "lora_config", "utils"),
}
FOLDERS = {"vllm": "vllm/lora", "sglang": "sglang/srt/lora"}


class Engine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Everything of a package but the files named: modules whose every name is an empty class."""

    def __init__(self, package, files):
        self.package, self.files = package, files

    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] != self.package:
            return None
        if name in self.files:
            return importlib.util.spec_from_file_location(name, self.files[name])
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


class Stub(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, type(name, (), {"__init__": lambda self, *args, **options: None}))
        return getattr(self, name)


def parsers(server, version, folder):
    """The finder that gives a server's own parsers; skips where the wheel cannot be had."""
    wanted = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-d",
        str(folder),
    ]
    done = subprocess.run(
        [*wanted, f"{server}=={version}"], capture_output=True, text=True, check=False
    )
    wheels = list(folder.glob(f"{server}-*.whl"))
    if not wheels:
        pytest.skip(f"no wheel of {server} {version}: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        wheel.extractall(folder, [f"{FOLDERS[server]}/{part}.py" for part in PARTS[server]])
    root = FOLDERS[server].replace("/", ".")
    return Engine(
        server,
        {f"{root}.{part}": folder / FOLDERS[server] / f"{part}.py" for part in PARTS[server]},
    )


@pytest.fixture(scope="module", params=["vllm 0.20.2", "sglang 0.5.23"])
def server(request, tmp_path_factory):
    """Its name, and what loads a directory: the layers' ΔW by name, or the server's own error."""
    name, version = request.param.split()
    finder = parsers(name, version, tmp_path_factory.mktemp(name))
    sys.meta_path.insert(0, finder)
    try:
        yield name, {"vllm": by_vllm, "sglang": by_sglang}[name]()
    finally:
        sys.meta_path.remove(finder)
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]


def by_vllm():
    importlib.import_module("vllm.logger").init_logger = logging.getLogger
    importlib.import_module("vllm.utils.platform_utils").is_pin_memory_available = lambda: False
    model = importlib.import_module("vllm.lora.lora_model").LoRAModel
    helper = importlib.import_module("vllm.lora.peft_helper").PEFTHelper

    def load(folder):
        config = helper.from_local_dir(str(folder), 4096)
        config.validate_legal(types.SimpleNamespace(max_lora_rank=16))
        settings = {"lora_model_id": 1, "device": "cpu", "dtype": torch.float32}
        loaded = model.from_local_checkpoint(str(folder), set(SIZES), config, **settings)
        return {
            name: layer.scaling * (layer.lora_b @ layer.lora_a)
            for name, layer in loaded.loras.items()
        }

    return load


def by_sglang():
    def get_layer_id(name):
        parts = name.split(".")
        return int(parts[parts.index("layers") + 1]) if "layers" in parts else None

    importlib.import_module("sglang.srt.layers.utils").get_layer_id = get_layer_id
    adapter = importlib.import_module("sglang.srt.lora.lora").LoRAAdapter
    config = importlib.import_module("sglang.srt.lora.lora_config").LoRAConfig
    utils = importlib.import_module("sglang.srt.lora.utils")
    base = types.SimpleNamespace(
        num_hidden_layers=LAYERS, architectures=["LlamaForCausalLM"], model_type="llama"
    )
    stacks = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}

    def load(folder):
        """Stack as SGLang does, and check what its memory pool asserts of shapes.

        That is `LoRAMemoryPool.load_lora_weight_to_buffer`.
        """
        settings = config(str(folder))
        loaded = adapter("a", settings, base, None, None)
        loaded.initialize_weights_from_tensors(load_file(folder / "adapter_model.safetensors"))
        targets = utils.get_normalized_target_modules(settings.target_modules)
        updates = {}
        for layer in loaded.layers:
            for name in [name for name in layer.weights if "lora_A" in name]:
                target = utils.get_target_module_name(name, targets)
                down, up = layer.weights[name], layer.weights[name.replace("lora_A", "lora_B")]
                words = stacks.get(target, (target,))
                rows = sum(SIZES[word][0] for word in words)
                assert down.shape == (
                    settings.r * utils.get_stacked_multiply(target),
                    SIZES[words[0]][1],
                )
                assert up.shape == (rows, settings.r)
                path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                begin = 0
                for k, word in enumerate(words):
                    half = down[k * settings.r : (k + 1) * settings.r]
                    updates[path.replace(target, word)] = (
                        loaded.scaling * up[begin : begin + SIZES[word][0]] @ half
                    )
                    begin += SIZES[word][0]
        return updates

    return load


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    config = {
        "model_type": "llama",
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "hidden_size": WIDTH,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file(
        {f"{name}.weight": np.zeros(size, np.float32) for name, size in modules().items()},
        folder / "m.safetensors",
    )
    return folder


def modules():
    attention = [key for key in SIZES if key[0] in "qkvo"]
    return {
        f"model.layers.{i}.{'self_attn' if key in attention else 'mlp'}.{key}": size
        for i in range(LAYERS)
        for key, size in SIZES.items()
    }


CASES = {
    "as trained": {},
    "alpha and rank differ": {"lora_alpha": 12},
    "one layer at another rank": {"ranks": {"model.layers.1.self_attn.q_proj": 3}},
    "without k": {"without": ["k_proj"]},
    "without v": {"without": ["v_proj"]},
    "without q": {"without": ["q_proj"]},
    "without gate": {"without": ["gate_proj"]},
    "without up": {"without": ["up_proj"]},
    "attention alone": {"without": ["gate_proj", "up_proj", "down_proj"]},
    "one v is dropped": {"without": ["layers.1.self_attn.v_proj"]},
    "an unknown word": {"more": "model.layers.0.self_attn.query"},
    "a pattern": {"target_modules": r".*_proj"},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("profile", [None, "server", "lorax"])
def test_the_rule_says_what_the_parser_does(server, base, tmp_path, case, profile):
    change = dict(CASES[case])
    ranks, without, more = (change.pop(key, {}) for key in ("ranks", "without", "more"))
    sizes = {name: size for name, size in modules().items() if not name.endswith(tuple(without))}
    sizes |= {more: (WIDTH, WIDTH)} if more else {}
    tensors = {
        k: v
        for name, size in sizes.items()
        for k, v in lora_pair(name, *size, ranks.get(name, 2)).items()
    }
    words = sorted({name.rpartition(".")[2] for name in sizes})
    config = {
        "r": 2,
        "lora_alpha": 2,
        "target_modules": words,
        "rank_pattern": ranks,
        "alpha_pattern": ranks,
    } | change
    folder = write_lora_directory(tmp_path / "lora", tensors, **config)
    if profile is not None:
        folder = export_lora(open_checkpoint(folder), tmp_path / profile, profile=profile)
    name, load = server
    check = check_served(folder, name, base)
    if check.refusals:
        with pytest.raises((ValueError, KeyError, RuntimeError, AssertionError)):
            load(folder)
        return
    updates = load(folder)
    factors = {module.name: module.factor for module in check.applied}
    for layer in open_checkpoint(folder).layers:
        up, down = layer.load()
        np.testing.assert_allclose(
            updates[layer.name], factors[layer.name] * layer.scale * (up @ down), atol=1e-5
        )
