"""Load an adapter by the code of a server, on the CPU and without a model.

A program of its own, because a server's package changes the process that imports it.
``python load_by_server.py REQUEST.json`` reads

``{"server": …, "adapter": a directory, "shapes": {module: shape of its weight}, "config":
the base's config.json, "pairs": a file to be written}``

and writes what was loaded into the file of pairs: of each module ``MODULE.A`` (r, n) and
``MODULE.B`` (m, r) in float32, with all scales in B. Where the loader refuses the adapter, or is
called otherwise than here, its own error ends the program.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

PACKAGES = {"tgi": "text_generation_server", "lorax": "lorax_server"}
SGLANG_STACKS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""What SGLang 0.5.23 stacks in one buffer of its memory pool."""
LAYER_TYPES = {
    "tgi": (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        *("qkv_proj", "c_proj", "c_fc"),
    ),
    "lorax": (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj", "lm_head"),
    ),
}
"""In the order in which they are loaded: TGI db931fcf42da, models/__init__.py; LoRAX a7394ba386ec,
models/flash_llama.py. They stand inside code that builds a model."""
MIN_SGMV_RANK, SGMV_BLOCK = 8, 16
"""Of the kernels that pad ranks on a GPU: LoRAX a7394ba386ec, utils/punica.py."""


def by_vllm(request: dict[str, Any], pairs: dict[str, Any]) -> None:
    """Fill ``pairs`` by vLLM's `LoRAModel`."""
    import torch

    config = importlib.import_module("vllm.config.lora")
    folder = request["adapter"]
    helper = importlib.import_module("vllm.lora.peft_helper").PEFTHelper.from_local_dir(
        folder, None
    )
    module: Any = importlib.import_module("vllm.lora.lora_model")
    # Pinned memory needs a GPU, which the parser does not (0.20.2, 0.33.0)
    if hasattr(module, "PIN_MEMORY"):
        module.PIN_MEMORY = False
    if hasattr(module, "is_pin_memory_available"):
        module.is_pin_memory_available = lambda: False
    # 1. What its own check refuses at the largest --max-lora-rank.
    ranks = get_args(config.MaxLoRARanks)
    helper.validate_legal(SimpleNamespace(max_lora_rank=max(ranks)))
    # 2. The tensors; expected words are those of the base's layers.
    words = {name.rpartition(".")[2] for name in request["shapes"]}
    words |= {name[name.find(".experts") + 1 :] for name in request["shapes"] if ".experts" in name}
    loaded = module.LoRAModel.from_local_checkpoint(
        folder, words, helper, lora_model_id=1, device="cpu", dtype=torch.float32
    )
    for name, layer in loaded.loras.items():
        if layer.lora_a is None or layer.lora_b is None:
            half = "lora_A" if layer.lora_a is None else "lora_B"
            raise ValueError(f"{name} has no {half}")
        pairs[name] = layer.lora_a, layer.scaling * layer.lora_b
    # 3. Buffers have one rank for all (layers/base_linear.py, set_lora, 0.20.2 and 0.33.0).
    largest = max(down.shape[0] for down, _ in pairs.values())
    if largest > max(ranks):
        raise ValueError(f"its largest rank is {largest}, and buffers have at most {max(ranks)}")


def by_sglang(request: dict[str, Any], pairs: dict[str, Any]) -> None:
    """Fill ``pairs`` by SGLang's `LoRAAdapter`, and hold its stacks to what its buffers are."""
    from safetensors.torch import load_file

    adapter = importlib.import_module("sglang.srt.lora.lora").LoRAAdapter
    utils = importlib.import_module("sglang.srt.lora.utils")
    config = importlib.import_module("sglang.srt.lora.lora_config").LoRAConfig(request["adapter"])
    manager = importlib.import_module("sglang.srt.lora.lora_manager").LoRAManager
    # 1. What its manager refuses of a config.
    idle = SimpleNamespace(
        attn_dp_enabled=False,
        enable_lora_overlap_loading=False,
        lora_refs={},
        num_pinned_loras=0,
        max_loras_per_batch=8,
    )
    reference = SimpleNamespace(lora_name="adapter", lora_path=request["adapter"], pinned=False)
    manager.validate_new_adapter(idle, config, reference)
    # 2. The tensors, stacked as its layers are.
    shapes = {_from_layers(name): shape for name, shape in request["shapes"].items()}
    numbers = [int(part) for name in shapes for part in re.findall(r"^layers\.(\d+)\.", name)]
    base = SimpleNamespace(num_hidden_layers=1 + max(numbers, default=-1))
    for field in ("architectures", "model_type", "num_hidden_layers"):
        if field in request["config"]:
            setattr(base, field, request["config"][field])
    loaded = adapter("adapter", config, base, None, None)
    loaded.initialize_weights_from_tensors(
        load_file(Path(request["adapter"], "adapter_model.safetensors"))
    )
    targets = utils.get_normalized_target_modules(config.target_modules)
    if targets == {"all"}:
        words = {name.rpartition(".")[2] for name in shapes}
        targets = utils.get_normalized_target_modules(words)
    # 3. What `LoRAMemoryPool.load_lora_weight_to_buffer` asserts of every stack (0.5.23).
    for layer in loaded.layers:
        for name in [name for name in layer.weights if "lora_A" in name]:
            target = utils.get_target_module_name(name, targets)
            down, up = layer.weights[name], layer.weights[name.replace("lora_A", "lora_B")]
            path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            block, _, last_word = path.rpartition(".")
            parts = [f"{block}.{word}" for word in SGLANG_STACKS.get(target, (last_word,))]
            sizes: list[Any] = [shapes.get(_from_layers(part)) for part in parts]
            if None in sizes:
                raise ValueError(f"the base has no layer for {path}")
            rows = [size[0] for size in sizes]
            stacked = config.r * utils.get_stacked_multiply(target)
            expected = (stacked, sizes[0][1]), (sum(rows), config.r)
            if (tuple(down.shape), tuple(up.shape)) != expected:
                found = f"{tuple(down.shape)} and {tuple(up.shape)}"
                raise ValueError(f"{path}: halves of {found}, and its buffers have {expected}")
            begin = 0
            for k, part in enumerate(parts):
                half = down[k * config.r : (k + 1) * config.r]
                pairs[part] = half, loaded.scaling * up[begin : begin + rows[k]]
                begin += rows[k]
    for name in loaded.embedding_layers:
        if "lora_embedding_A" in name or "lora_A" in name:
            module = re.sub(r"\.lora_(embedding_)?A(\.weight)?$", "", name)
            other = name.replace("lora_embedding_A", "lora_embedding_B").replace("lora_A", "lora_B")
            up = loaded.embedding_layers[other]
            pairs[module.removeprefix("base_model.model.")] = (
                loaded.embedding_layers[name],
                loaded.scaling * up,
            )


def by_stacks(request: dict[str, Any], pairs: dict[str, Any]) -> None:
    """Fill ``pairs`` by `LoraWeights` of TGI or of LoRAX, whose layers of a type are one stack."""
    import torch
    from safetensors.torch import load_file

    server = request["server"]
    module: Any = importlib.import_module(f"{PACKAGES[server]}.adapters.lora")
    _work_on_cpu(module, server)
    config = module.LoraConfig.load(request["adapter"], None)
    # 1. The layers of the base by number and type, and the tensors of those.
    layers = {}
    for name, shape in request["shapes"].items():
        block = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
        if shape is None or not (block or name == "lm_head"):
            continue
        weight = SimpleNamespace(device=torch.device("cpu"), shape=shape)
        linear = SimpleNamespace(base_layer=SimpleNamespace(linear=SimpleNamespace(weight=weight)))
        key = int(block[1]) if block else 0, name.rpartition(".")[2]
        layers[key] = name, linear
    tensors = load_file(Path(request["adapter"], "adapter_model.safetensors"))
    names = tuple(name for name, _ in layers.values())
    module_map, unused = config.map_weights_for_model(tensors, names)
    count = 1 + max((number for number, _ in layers), default=-1)
    # 2. One type after another, with one config, as the server does.
    for layer_type in LAYER_TYPES[server]:
        n_layers = 1 if layer_type == "lm_head" else count
        if any((number, layer_type) not in layers for number in range(n_layers)):
            continue
        if server == "tgi":
            loaded = module.LoraWeights.prepare_weights(
                *(config, module_map, layer_type, unused, n_layers, torch.float32, 1, None, layers)
            )
        else:
            model = SimpleNamespace(
                get_num_layers_for_type=lambda _, n=n_layers: n,
                target_to_layer=layers,
                dtype=torch.float32,
                world_size=1,
                shard_lora_weights=lambda a, b, _: (a, b),
            )
            loaded = module.LoraWeights.load(config, model, module_map, layer_type, unused)
        if loaded is None:
            continue
        for number in range(n_layers):
            name, _ = layers[number, layer_type]
            down, up = loaded._weights_a[number].T, loaded._weights_b[number].T
            pairs[name] = down, up


def by_exllamav3(request: dict[str, Any], pairs: dict[str, Any]) -> None:
    """Fill ``pairs`` by ExLlamaV3's `LoRA`, whose halves are transposed and in float16."""
    import torch

    linear_class: Any = importlib.import_module("exllamav3.modules.linear").Linear
    modules = {}
    for name, (out_features, in_features) in request["shapes"].items():
        modules[name] = linear_class()
        modules[name].__dict__.update(
            in_features=in_features,
            out_features=out_features,
            is_sliced=False,
            device=torch.device("cpu"),
            lora_a_tensors={},
            lora_b_tensors={},
        )
    model = SimpleNamespace(modules_dict=modules)
    lora = importlib.import_module("exllamav3.model.lora").LoRA
    loaded = lora.from_directory(model, request["adapter"])
    for name, linear in loaded.target_modules.items():
        pairs[name] = linear.lora_a_tensors[loaded].T, linear.lora_b_tensors[loaded].T


def by_lmdeploy(request: dict[str, Any], pairs: dict[str, Any]) -> None:
    """Fill ``pairs`` by LMDeploy's `add_adapters`, whose buffers are one for all adapters.

    A layer that the adapter lacks keeps what lay in memory, so all are begun with NaN.
    """
    import torch
    from torch import nn

    patch = importlib.import_module("lmdeploy.pytorch.models.patch")
    builder = SimpleNamespace(build=lambda: None)
    backend = SimpleNamespace(get_layer_impl_builder=lambda _: builder)
    lora: Any = importlib.import_module("lmdeploy.pytorch.nn.linear.lora")
    lora.get_backend = lambda: backend
    lora.OpType = SimpleNamespace(LoRA=None)
    importlib.import_module("lmdeploy.pytorch.nn.linear").LoRA = lora.LoRA
    patch.torch.empty = lambda *sizes, **options: torch.full(*sizes, torch.nan, **options)
    # 1. A model of the base's layers, in its tree of names.
    model = nn.Module()
    model.ctx_mgr = None
    layers = {}
    for name, (out_features, in_features) in request["shapes"].items():
        place = model
        for part in name.split("."):
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.lora_adapters = nn.ModuleDict()
        place.in_features, place.out_features = in_features, out_features
        place.colwise, place.is_tp = True, False
        layers[name] = place
    # 2. Its own loader, and of every layer the rows of the one adapter there is.
    patch.add_adapters(
        model, {"adapter": request["adapter"]}, dtype=torch.float32, device=torch.device("cpu")
    )
    for name, layer in layers.items():
        for adapter in layer.lora_adapters.values():
            scale = adapter.adapter_info.scalings[1]
            pairs[name] = adapter.lora_A.data, scale * adapter.lora_B.data.T


def _work_on_cpu(module: Any, server: str) -> None:
    """Give a module of TGI or LoRAX what its GPU kernels bring, of which only padding counts."""
    import torch

    def pad_rank(tensor: Any, dim: int, world_size: int) -> Any:
        rank, least = tensor.size(dim), MIN_SGMV_RANK * world_size
        padded = least if rank <= least else -(-rank // SGMV_BLOCK) * SGMV_BLOCK
        shape = list(tensor.shape)
        shape[dim] = padded - rank
        return torch.cat([tensor, tensor.new_zeros(shape)], dim)

    kernels = {
        "pad_rank": pad_rank,
        "use_cutlass_shrink": lambda _: True,
        "orient_for_rank": lambda tensor, _: tensor,
    }
    if server == "tgi":
        module.punica_sgmv = SimpleNamespace(**kernels)
        module.SYSTEM = "cuda"
        module.shard_lora_weights = lambda weights_a, weights_b, **_: (weights_a, weights_b)
        return
    for name, kernel in kernels.items():
        setattr(module, name, kernel)
    module.load_module_weight = lambda _, tensor, device, dtype: tensor.to(device, dtype)


def _from_layers(name: str) -> str:
    """Return a name from ``layers.N`` on, as SGLang looks for it; without one the name itself."""
    match = re.search(r"(?:^|\.)(layers\.\d+\..+)", name)
    return match[1] if match else name


LOADERS = {
    "vllm": by_vllm,
    "sglang": by_sglang,
    "tgi": by_stacks,
    "lorax": by_stacks,
    "exllamav3": by_exllamav3,
    "lmdeploy": by_lmdeploy,
}


def main(request_file: str) -> None:
    """Answer one request."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    pairs: dict[str, Any] = {}
    LOADERS[request["server"]](request, pairs)
    _write(pairs, request["pairs"])


def _write(pairs: dict[str, Any], path: str) -> None:
    import torch
    from safetensors.torch import save_file

    tensors = {}
    for name, halves in pairs.items():
        for half, tensor in zip("AB", halves, strict=True):
            tensors[f"{name}.{half}"] = tensor.detach().to(torch.float32).contiguous().clone()
    save_file(tensors, path)


if __name__ == "__main__":
    main(sys.argv[1])
