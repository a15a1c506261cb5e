"""Adapters in servers whose own loader is run, beside a small loader that stands for one.

The real ones are run by ``make servers``.
"""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from checkpoint_files import PREFIX, lora_pair, write_lora_directory
from safetensors.numpy import save_file
from tiny_llama import CONFIG, LAYERS, SIZES, WIDTH, adapter, write_base

from lsrdecomp.checkpoints import open_checkpoint, read_modules, write_lsr
from lsrdecomp.checkpoints.families import missing_layers
from lsrdecomp.compression.export import export_lora
from lsrdecomp.serving import check_served
from lsrdecomp.serving.installed import compare, load_by_server
from lsrdecomp.serving.loaded import TITLES

pytestmark = pytest.mark.skipif(
    any(find_spec(name) for name in ("vllm", "sglang")), reason="a server is installed"
)

FILES = {
    "__init__.py": "",
    "config/__init__.py": "",
    "config/lora.py": """
from typing import Literal
MaxLoRARanks = Literal[8, 16, 32]
class LoRAConfig:
    max_lora_rank = 16
""",
    "lora/__init__.py": "",
    "lora/peft_helper.py": """
import json
from pathlib import Path
class PEFTHelper:
    @classmethod
    def from_local_dir(cls, folder, length):
        print("talk of a server")
        helper = cls()
        helper.config = json.loads(Path(folder, "adapter_config.json").read_text())
        return helper
    def validate_legal(self, config):
        if self.config["r"] > config.max_lora_rank:
            raise ValueError(f"rank {self.config['r']} above {config.max_lora_rank}")
""",
    "lora/lora_model.py": """
from types import SimpleNamespace
from safetensors.torch import load_file
class LoRAModel:
    @classmethod
    def from_local_checkpoint(cls, folder, words, helper, lora_model_id, device, dtype):
        # One scale for all; what is called k_proj is lost, what is called odd is refused
        halves, config = load_file(f"{folder}/adapter_model.safetensors"), helper.config
        loras = {}
        for key, down in halves.items():
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            word = name.rpartition(".")[2]
            if "lora_B" in key or word == "k_proj":
                continue
            if word not in words:
                raise ValueError(f"unexpected module {name}")
            up = halves[key.replace("lora_A", "lora_B")]
            scale = config["lora_alpha"] / config["r"]
            loras[name] = SimpleNamespace(lora_a=down, lora_b=up, scaling=scale)
            if word == "o_proj" and config.get("swapped"):
                loras[name].lora_b = up.flip(0)
        return SimpleNamespace(loras=loras)
""",
}


LORAX_FILES = {
    "__init__.py": "",
    "adapters/__init__.py": "",
    "adapters/lora.py": """
import json
from pathlib import Path
from types import SimpleNamespace
class LoraConfig:
    @classmethod
    def load(cls, folder, token):
        config = cls()
        config.values = json.loads(Path(folder, "adapter_config.json").read_text())
        return config
    def map_weights_for_model(self, tensors, names):
        keys = {name: f"base_model.model.{name}.lora_%s.weight" for name in names}
        found = {name: key for name, key in keys.items() if key % "A" in tensors}
        return {name: [tensors[key % half] for half in "AB"] for name, key in found.items()}, set()
class LoraWeights:
    @classmethod
    def load(cls, config, model, module_map, layer_type, unused):
        numbers = range(model.get_num_layers_for_type(layer_type))
        names = [model.target_to_layer[number, layer_type][0] for number in numbers]
        if any(name not in module_map for name in names):
            return None
        scale = config.values["lora_alpha"] / config.values["r"]
        # As its kernels take them: inputs by rank, and rank by outputs
        downs = [module_map[name][0].T for name in names]
        ups = [scale * module_map[name][1].T for name in names]
        return SimpleNamespace(_weights_a=downs, _weights_b=ups)
""",
}
SGLANG_FILES = {
    **dict.fromkeys(["__init__.py", "srt/__init__.py", "srt/lora/__init__.py"], ""),
    "srt/lora/lora_config.py": """
import json
from pathlib import Path
class LoRAConfig:
    def __init__(self, folder):
        self.values = json.loads(Path(folder, "adapter_config.json").read_text())
        self.r, self.target_modules = self.values["r"], self.values["target_modules"]
""",
    "srt/lora/lora_manager.py": """
class LoRAManager:
    def validate_new_adapter(self, config, reference):
        if config.values.get("odd"):
            raise ValueError(f"odd adapter {reference.lora_name}")
""",
    "srt/lora/utils.py": """
def get_normalized_target_modules(names):
    return set(names)
def get_target_module_name(name, targets):
    return next(target for target in targets if target in name)
def get_stacked_multiply(target):
    return 1
""",
    "srt/lora/lora.py": """
import re
from types import SimpleNamespace
class LoRAAdapter:
    def __init__(self, name, config, base, *unused):
        self.layers = [SimpleNamespace(weights={}) for _ in range(base.num_hidden_layers)]
        self.embedding_layers = {}
        self.scaling = config.values["lora_alpha"] / config.r
    def initialize_weights_from_tensors(self, tensors):
        for key, tensor in tensors.items():
            self.layers[int(re.search(r"layers\\.(\\d+)", key)[1])].weights[key] = tensor
""",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that gives an interpreter a package, and returns its path."""
    root = tmp_path / "site"

    def install(package, files, distribution=None):
        for name, text in files.items():
            path = root / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        info = root / f"{package}-9.9.dist-info"
        info.mkdir()
        name = distribution or package
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
        return sys.executable

    monkeypatch.setenv("PYTHONPATH", str(root), prepend=":")
    return install


@pytest.fixture
def installed(install):
    return install("vllm", FILES)


def test_a_server_that_stacks_the_layers_of_a_type_loads_whole_stacks(base, install, tmp_path):
    pytest.importorskip("torch")
    python = install("lorax_server", LORAX_FILES, "lorax-server")
    names = [f"model.layers.{i}.self_attn.{key}" for i in range(LAYERS) for key in SIZES]
    folder = adapter(tmp_path / "a", names[:-1], lora_alpha=6)  # the last o_proj is missing
    check = check_served(folder, "lorax", base, python=python)
    assert check.rules == "the loader of LoRAX 9.9, run on the CPU without a model"
    applied = {module.name for module in check.applied}
    assert applied == {name for name in names if not name.endswith("o_proj")}
    assert max(module.error for module in check.applied) < 1e-6
    assert all(module.factor == pytest.approx(1.0) for module in check.applied)
    assert [module.name for module in check.ignored] == ["model.layers.0.self_attn.o_proj"]


def test_sglang_finds_layers_by_their_number_and_says_what_its_manager_refuses(
    base, install, tmp_path
):
    pytest.importorskip("torch")
    python = install("sglang", SGLANG_FILES)
    names = [f"layers.{i}.self_attn.q_proj" for i in range(LAYERS)]  # without the model's prefix
    folder = adapter(tmp_path / "a", names, lora_alpha=6)
    check = check_served(folder, "sglang", base, python=python)
    assert check.rules == "the loader of SGLang 9.9, run on the CPU without a model"
    assert not check.refusals
    assert max(module.error for module in check.modules) < 1e-6
    check = check_served(adapter(tmp_path / "o", odd=True), "sglang", base, python=python)
    assert check.refusals[0].startswith("SGLang 9.9 says ValueError: odd adapter adapter")


def test_the_loader_of_an_installed_server_decides_layer_by_layer(base, installed, tmp_path):
    pytest.importorskip("torch")
    one = "model.layers.1.self_attn.q_proj"
    folder = adapter(tmp_path / "a", lora_alpha=4, alpha_pattern={one: 12}, swapped=True)
    check = check_served(folder, "vllm", base, python=installed)
    assert check.rules == "the loader of vLLM 9.9, run on the CPU without a model"
    faults = {module.name.rpartition(".")[2]: module.fault for module in check.ignored}
    assert faults.keys() == {"k_proj", "o_proj"}
    assert faults["k_proj"] == "vLLM 9.9 leaves it out in silence"
    assert faults["o_proj"].startswith("its ΔW there differs by ")
    assert [(module.name, module.factor) for module in check.rescaled] == [
        (one, pytest.approx(1 / 3))
    ]
    assert max(module.error for module in check.applied) < 1e-6


def test_what_a_loader_raises_is_its_refusal_and_the_smallest_option_is_found(
    base, installed, tmp_path
):
    pytest.importorskip("torch")
    check = check_served(adapter(tmp_path / "r", rank=24), "vllm", base, python=installed)
    assert (check.refusals, check.options) == ([], ["--max-lora-rank 32"])
    check = check_served(adapter(tmp_path / "h", rank=40), "vllm", base, python=installed)
    assert check.refusals[0].startswith("vLLM 9.9 says ValueError: rank 40 above 32: `lsrdecomp")
    assert not check.applied
    odd = lora_pair("model.layers.0.self_attn.query", WIDTH, WIDTH)
    check = check_served(adapter(tmp_path / "o", tensors=odd), "vllm", base, python=installed)
    assert "unexpected module model.layers.0.self_attn.query" in check.refusals[0]


def test_a_loader_that_is_called_otherwise_is_no_verdict(base, installed, tmp_path):
    pytest.importorskip("torch")
    path = tmp_path / "site" / "vllm" / "lora" / "lora_model.py"
    path.write_text("class LoRAModel:\n    pass\n")
    check = check_served(adapter(tmp_path / "a"), "vllm", base, python=installed)
    assert (check.refusals, check.is_certain) == ([], False)
    assert "cannot load its loader" in check.rules
    assert "9.9: AttributeError" in check.rules


@pytest.mark.parametrize("server", TITLES)
def test_without_the_server_the_form_of_the_file_is_what_is_known(base, tmp_path, server):
    folder = adapter(tmp_path / "a", lora_alpha=4, alpha_pattern={"q_proj": 12})
    check = check_served(folder, server, base)
    assert (check.is_certain, check.refusals, len(check.applied)) == (False, [], 8)
    assert "is not installed here, so nothing was loaded" in check.rules
    for word in ("rank 2 is padded by TGI", "alpha_pattern is set", "lsrdecomp export", "--python"):
        assert word in check.notes[0]
    out = export_lora(open_checkpoint(folder), tmp_path / "served")
    check = check_served(out, server, base)
    assert (check.is_certain, check.refusals, len(check.applied)) == (True, [], 8)


CHANGES = {
    "use_rslora is set": {"use_rslora": True},
    "target_modules is no list": {"target_modules": r".*_proj"},
    "bias is set": {"bias": "lora_only"},
    "its ranks are 8, and r is 12": {"r": 12, "rank_pattern": dict.fromkeys(SIZES, 8)},
    "rank_pattern is set": {"rank_pattern": {"q_proj": 8}},
    "modules_to_save is set": {"modules_to_save": ["score"]},
    "1 tensors beside the pairs": {
        "tensors": {f"{PREFIX}score.weight": np.zeros((3, WIDTH), np.float32)}
    },
    "4 layers like those adapted are missing (model.layers.0.self_attn.k_proj)": {
        "names": [f"model.layers.{i}.self_attn.q_proj" for i in range(LAYERS)]
    },
    "3 layers like those adapted are missing": {"names": ["model.layers.0.self_attn.o_proj"] * 2},
}


@pytest.mark.parametrize("difference", CHANGES)
def test_each_difference_from_the_common_form_is_named(base, tmp_path, difference):
    change = CHANGES[difference]
    if difference.startswith("3 layers"):  # of three blocks more
        wider = tmp_path / "wider"
        wider.mkdir()
        weights = {
            f"model.layers.{i}.self_attn.o_proj.weight": np.zeros((WIDTH, WIDTH), np.float32)
            for i in range(4)
        }
        save_file(weights, wider / "model.safetensors")
        (wider / "config.json").write_text(json.dumps(CONFIG))
        base = wider
    check = check_served(adapter(tmp_path / "a", **{"rank": 8, **change}), "sglang", base)
    assert difference in check.notes[0]
    assert not check.is_certain


def test_names_and_sizes_are_compared_with_and_without_a_loader(base, tmp_path):
    wrong = adapter(
        tmp_path / "wrong", [f"model.model.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    )
    assert not check_served(wrong, "vllm", base).applied
    assert len(check_served(wrong, "sglang", base).applied) == 2  # by what follows layers.N
    name = "model.layers.0.self_attn.q_proj"
    wide = write_lora_directory(
        tmp_path / "wide", lora_pair(name, WIDTH, 48), target_modules=["q_proj"]
    )
    check = check_served(wide, "vllm", base)
    assert check.ignored[0].fault == "32 x 48, but its weight is (32, 32) in the base"
    assert check.refusals == ["vLLM raises where a size differs"]


def test_an_lsr_directory_is_exported_first(base, tmp_path):
    given = open_checkpoint(adapter(tmp_path / "lora"))
    rng, name = np.random.default_rng(0), "model.layers.0.self_attn.q_proj"
    factors = [rng.standard_normal((2, 8, 1)), rng.standard_normal((2, 4, 2))]
    other = [rng.standard_normal((2, 1, 8)), rng.standard_normal((2, 2, 4))]
    dropped = [layer.name for layer in given.layers if layer.name != name]
    lsr = write_lsr(
        tmp_path / "lsr", source=given, layers=[(name, factors, other)], dropped=dropped
    )
    for server, title in TITLES.items():
        check = check_served(lsr, server, base)
        (refusal,) = check.refusals
        assert not check.applied
        assert refusal.startswith(
            f"{title} reads PEFT LoRA directories, and this is lsr: `lsrdecomp export {lsr} --to "
        )


def test_names_are_the_architecture_s_where_the_base_is_a_gguf_file(base, tmp_path):
    """Of a GGUF base "the base has no module of that name" was said of every layer."""
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(SIZES["q_proj"][1])
    for block in range(LAYERS):
        for word, stored in zip(SIZES, ("q", "k", "v", "output"), strict=True):
            weight = np.zeros(SIZES[word], np.float32)
            writer.add_tensor(f"blk.{block}.attn_{stored}.weight", weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    folder = adapter(tmp_path / "a")
    for server in TITLES:
        assert len(check_served(folder, server, path).applied) == 8
    half = adapter(tmp_path / "h", [f"model.layers.0.self_attn.{word}" for word in SIZES])
    assert missing_layers([x.name for x in open_checkpoint(half).layers], read_modules(path)) == [
        f"model.layers.1.self_attn.{word}" for word in sorted(SIZES)
    ]


def test_vllm_stacks_all_experts_of_a_layer_at_one_rank(tmp_path):
    """As `PackedLoRALayerWeights.pack_moe` of vLLM asserts of experts by name."""
    words = {"gate_proj": (12, WIDTH), "up_proj": (12, WIDTH), "down_proj": (WIDTH, 12)}
    names = {
        f"model.layers.0.mlp.experts.{i}.{word}": size
        for i in range(3)
        for word, size in words.items()
    }
    weights = {f"{name}.weight": np.zeros(size, np.float32) for name, size in names.items()}
    save_file(weights, tmp_path / "base.safetensors")

    def refusals(name, ranks, without=None):
        sizes = {name: size for name, size in names.items() if name != without}
        tensors = {
            k: v
            for name, size in sizes.items()
            for k, v in lora_pair(name, *size, ranks.get(name, 2)).items()
        }
        folder = write_lora_directory(
            tmp_path / name, tensors, r=2, target_modules=list(words), rank_pattern=ranks
        )
        return check_served(folder, "vllm", tmp_path / "base.safetensors").refusals

    one = "model.layers.0.mlp.experts.1.up_proj"
    assert refusals("whole", {}) == []
    assert refusals("words", {f"model.layers.0.mlp.experts.{i}.up_proj": 1 for i in range(3)}) == []
    (differ,) = refusals("differ", {one: 1})
    assert "their ranks differ" in differ
    (missing,) = refusals("missing", {}, without=one)
    assert "some have no pair" in missing
    assert "lsrdecomp export" in missing


def test_a_comparison_finds_factor_and_distance_where_sums_would_cancel():
    rng = np.random.default_rng(0)
    up, down = rng.standard_normal((12, 3)), rng.standard_normal((3, 9))

    class Layer:
        scale = 0.5

        def load(self):
            return up, down

    factor, error = compare(Layer(), 2.0 * up, down)
    assert (factor, error) == (pytest.approx(4.0), pytest.approx(0.0, abs=1e-12))
    other = np.concatenate([up, 1e-7 * rng.standard_normal((12, 1))], axis=1)
    _, error = compare(Layer(), other, np.concatenate([down, rng.standard_normal((1, 9))]))
    assert 1e-9 < error < 1e-5
    assert compare(Layer(), 0.0 * up, down) == (0.0, 0.0)


def test_a_missing_package_is_said_without_a_second_process(base, tmp_path, monkeypatch):
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("nothing to run"))
    loaded = load_by_server("tgi", open_checkpoint(adapter(tmp_path / "a")), read_modules(base))
    assert (loaded.was_run, loaded.failure) == (
        False,
        "text-generation-server is not installed here",
    )
