"""`compress` to a number of bytes, beside the best plain SVD of as many; and its time beside a QR.

    python -m benchmarks.compression.byte_budgets [ADAPTER ...]

Each adapter, and twelve that are made here, is compressed to seven numbers of bytes, and read back
from the files that were written. The rival is written out here, apart from the package: truncated
SVD with one threshold on σ² per byte over all layers, rounded to the nearest in float16, int8 or
int4, with a float16 scale for each 32, 64 or 128 numbers that brings the largest of them to the end
of the range. It may take the bytes of the budget but for what our file has beside its factors.

The second part takes CPU seconds of `compress`, and of what every resizer does at least: read, two
thin QRs and a small SVD of each layer in single precision, one threshold, write (by torch).
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record as records
from benchmarks.record import RESULTS
from lsrdecomp import compress, open_checkpoint
from lsrdecomp.errors import CheckpointError, LsrError
from lsrdecomp.lora.compress import truncate
from lsrdecomp.lora.files.file_checks import bytes_to_open
from lsrdecomp.lora.files.tensors import TensorWriter
from lsrdecomp.lora.search.layers import layer_product

TIMES = (2, 4, 8, 16, 32, 64, 128)
"""Budgets: the bytes of the pairs in float16, divided by these, beside `ROOM`."""
ROOM = 4000
"""Bytes for config and index."""
FORMS = (("float16", 16, 0), *((f"int{b}", b, g) for b in (8, 4) for g in (32, 64, 128)))
SEED = 0
REPEATS = 3
RESULT = RESULTS / "byte_budgets.json"
PACKAGES = ("lsrdecomp", "numpy", "torch")

Pair = tuple[np.ndarray, np.ndarray]


# -- the rival -------------------------------------------------------------------------------------


def svd_of(pair: Pair) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """U, σ and Vᵀ of B A."""
    up, down = pair
    q_up, r_up = np.linalg.qr(up)
    q_down, r_down = np.linalg.qr(down.T)
    u, sigma, vh = np.linalg.svd(r_up @ r_down.T)
    return q_up @ u, sigma, vh @ q_down.T


def rounded(rows: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Rows in integers, each group at the scale of its largest number."""
    top = 2 ** (bits - 1) - 1
    out = np.empty_like(rows)
    for start in range(0, rows.shape[1], group):
        part = rows[:, start : start + group]
        scale = np.abs(part).max(axis=1, keepdims=True) / top
        unit = 2.0 ** np.floor(np.log2(max(float(np.abs(rows).max()), 1e-300)))
        scale = np.float64(np.float16(scale / unit)) * unit
        safe = np.where(scale > 0.0, scale, 1.0)
        out[:, start : start + group] = np.clip(np.rint(part / safe), -top, top) * scale
    return out


def component_bytes(shape: tuple[int, int], bits: int, group: int) -> int:
    """Bytes of a column and a row."""
    scales = sum(2 * math.ceil(size / group) for size in shape) if group else 0
    return math.ceil(sum(shape) * bits / 8) + scales


def best_svd(svds: list[tuple[np.ndarray, ...]], most: float) -> dict[str, Any]:
    """The least error of truncated SVD within so many bytes, and its form."""
    squared_norm = math.fsum(float((sigma**2).sum()) for _, sigma, _ in svds)
    best: dict[str, Any] = {"error": 1.0, "form": "nothing"}
    for name, bits, group in FORMS:
        steps = []
        for i, (u, sigma, vh) in enumerate(svds):
            size = component_bytes((len(u), vh.shape[1]), bits, group)
            steps += [(-(float(value) ** 2) / size, i, size) for value in sigma]
        ranks = [0] * len(svds)
        used = 0
        for slope, i, size in sorted(steps):
            if slope < 0.0 and used + size <= most:
                ranks[i] += 1
                used += size
        lost = 0.0
        for (u, sigma, vh), rank in zip(svds, ranks, strict=True):
            root = np.sqrt(sigma[:rank])
            left, right = (u[:, :rank] * root).T, root[:, None] * vh[:rank]
            if group and rank:
                left, right = (rounded(side, bits, group) for side in (left, right))
            elif rank:
                left, right = (side.astype(np.float16).astype(np.float64) for side in (left, right))
            lost += distance((u * sigma, vh), (left.T, right)) ** 2 if rank else (sigma**2).sum()
        error = math.sqrt(lost / squared_norm)
        if error < best["error"]:
            best = {"error": error, "form": f"{name}, {group}" if group else name}
    return best


def distance(first: Pair, second: Pair) -> float:
    """‖B A − B̂ Â‖."""
    left = np.linalg.qr(np.hstack([first[0], second[0]]), mode="r")
    right = np.linalg.qr(np.hstack([first[1].T, -second[1].T]), mode="r")
    return float(np.linalg.norm(left @ right.T))


# -- ours ------------------------------------------------------------------------------------------


def budgets_of(path: Path, alpha: float) -> dict[str, Any]:
    """Errors of ours and of the rival at all budgets."""
    try:
        source = open_checkpoint(path)
    except CheckpointError:  # relative errors do not depend on the scale
        source = open_checkpoint(path, alpha=alpha)
    pairs = {}
    for layer in source.layers:
        up, down = layer.load(double=True)
        pairs[layer.name] = up * layer.scale, down
    svds = [svd_of(pair) for pair in pairs.values()]
    norm = math.sqrt(math.fsum(float((sigma**2).sum()) for _, sigma, _ in svds))
    rows = []
    for times in TIMES:
        most = int(source.extra_bytes + ROOM + 2 * source.adapter_parameters / times)
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = compress(source, bytes=most)
            except LsrError as error:
                rows.append({"times": times, "bytes": most, "refused": str(error)})
                continue
            weights = result.save(Path(folder) / "small") / "adapter_model.safetensors"
            file_bytes = bytes_to_open(weights)
            small = open_checkpoint(Path(folder) / "small")
            written = {layer.name: layer_product(layer).to_lora() for layer in small.layers}
        lost = [
            distance(pair, written[name])
            if name in written
            else float(np.linalg.norm(svd_of(pair)[1]))
            for name, pair in pairs.items()
        ]
        beside = file_bytes - result.totals.bytes
        rival = best_svd(svds, most - beside)
        ours = math.hypot(*lost) / norm
        rows.append(
            {
                "times": times,
                "bytes": most,
                "file_bytes": file_bytes,
                "error": ours,
                "printed_error": result.error,
                "printed_rival": result.low_rank_error,
                "rival": rival["error"],
                "form": rival["form"],
                "ratio": ours / rival["error"] if rival["error"] > 0.0 else None,
            }
        )
    errors = [row["error"] for row in rows if "error" in row]
    return {
        "layers": len(pairs),
        "parameters": source.adapter_parameters,
        "rows": rows,
        "error_falls_with_bytes": errors == sorted(errors),
    }


# -- adapters that are made ------------------------------------------------------------------------


class Maker:
    """Writes adapters of layers with given spectra."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rng = np.random.default_rng(SEED)

    def pair(self, m: int, n: int, rank: int, fall: float = 0.9, tail: str = "normal") -> Pair:
        """A pair as training leaves it: one side near its uniform start."""
        draw = {
            "normal": lambda: self.rng.standard_normal((m, rank)),
            "heavy": lambda: self.rng.standard_t(3.0, (m, rank)),
        }[tail]
        up = draw() * fall ** np.arange(rank) * 0.02
        return up, self.rng.uniform(-1.0, 1.0, (rank, n)) / math.sqrt(n)

    def file(
        self,
        name: str,
        layers: dict[str, Pair],
        keys: tuple[str, str],
        *,
        alpha: float | None = None,
        dtype: Any = np.float16,
        kernel: int = 0,
    ) -> Path:
        """One file; with a kernel the layers are convolutions of that size."""
        with TensorWriter(self.folder) as writer:
            for layer, (up, down) in layers.items():
                if kernel:
                    up = up[:, :, None, None]
                    down = down.reshape(len(down), -1, kernel, kernel)
                writer.add(f"{layer}.{keys[0]}", up.astype(dtype))
                writer.add(f"{layer}.{keys[1]}", down.astype(dtype))
                if alpha is not None:
                    writer.add(f"{layer}.alpha", np.array(alpha, dtype))
            path = self.folder / f"{name}.safetensors"
            writer.write(path, {})
        return path

    def peft(self, name: str, layers: dict[str, Pair], *, dtype: Any, **config: Any) -> Path:
        """A PEFT directory."""
        out = self.folder / name
        out.mkdir()
        named = {f"base_model.model.{layer}": pair for layer, pair in layers.items()}
        keys = "lora_B.weight", "lora_A.weight"
        self.file("adapter_model", named, keys, dtype=dtype).rename(
            out / "adapter_model.safetensors"
        )
        kinds = sorted({layer.rsplit(".", 1)[-1] for layer in layers})
        rank = max(len(down) for _, down in layers.values())
        whole = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": kinds}
        (out / "adapter_config.json").write_text(json.dumps(whole | config))
        return out


def made(folder: Path) -> Iterator[Path]:
    """Twelve adapters of the usual formats, sizes and spectra."""
    import ml_dtypes

    bfloat16 = ml_dtypes.bfloat16
    maker = Maker(folder)
    kohya = "lora_up.weight", "lora_down.weight"
    block = "lora_unet_down_blocks_{}_attentions_0_transformer_blocks_0_attn1_to_{}"
    layers = {block.format(i, k): maker.pair(640, 640, 32) for i in range(4) for k in "qkv"}
    yield maker.file("kohya", layers, kohya, alpha=16.0)
    name = "lora_unet_down_blocks_{}_resnets_0_conv1"
    layers = {name.format(i): maker.pair(320, 320 * 9, 16) for i in range(4)}
    yield maker.file("kohya-conv", layers, kohya, alpha=8.0, kernel=3)
    name = "unet.down_blocks.{}.attentions.0.transformer_blocks.0.attn2.to_{}"
    layers = {name.format(i, k): maker.pair(1280, 640, 8) for i in range(4) for k in "qkv"}
    yield maker.file("diffusers", layers, ("lora_B.weight", "lora_A.weight"))
    name = "diffusion_model.blocks.{}.self_attn.{}"
    layers = {name.format(i, k): maker.pair(1536, 1536, 32) for i in range(2) for k in "qkvo"}
    yield maker.file("wan", layers, kohya, alpha=32.0, dtype=bfloat16)
    layers = {}
    for i in range(3):
        layers[f"lora_unet_double_blocks_{i}_img_attn_qkv"] = maker.pair(3 * 768, 768, 16)
        layers[f"lora_unet_double_blocks_{i}_img_mlp_0"] = maker.pair(4 * 768, 768, 16)
        layers[f"lora_unet_single_blocks_{i}_linear1"] = maker.pair(7 * 768, 768, 16)
    yield maker.file("flux", layers, kohya, alpha=16.0, dtype=bfloat16)
    sizes = {"q_proj": (2048, 2048), "k_proj": (512, 2048), "down_proj": (2048, 5632)}
    name = "model.layers.{}.mlp.{}"
    layers = {name.format(i, k): maker.pair(*v, 64) for i in range(2) for k, v in sizes.items()}
    yield maker.peft("llama-r64", layers, dtype=bfloat16)
    layers = {name.format(i, k): maker.pair(*v, 8) for i in range(4) for k, v in sizes.items()}
    yield maker.peft("rank-stabilized-float32", layers, dtype=np.float32, use_rslora=True)
    layers = {name.format(i, "q_proj"): maker.pair(1024, 1024, 16, 1.0) for i in range(6)}
    yield maker.peft("flat-spectrum", layers, dtype=np.float16)
    layers = {name.format(i, "q_proj"): maker.pair(1024, 1024, 16, 0.5) for i in range(6)}
    yield maker.peft("steep-spectrum", layers, dtype=np.float16)
    layers = {name.format(i, "q_proj"): maker.pair(1024, 1024, 16, 0.9, "heavy") for i in range(6)}
    yield maker.peft("heavy-tails", layers, dtype=np.float16)
    name = "model.layers.0.mlp.experts.{}.{}"
    layers = {name.format(i, k): maker.pair(384, 256, 8) for i in range(64) for k in ("up_proj",)}
    yield maker.peft("experts", layers, dtype=bfloat16)
    name = "model.layers.{}.self_attn.q_proj"
    layers = {}
    for i in range(8):
        up, down = maker.pair(768, 768, 8)
        layers[name.format(i)] = up * (30.0 if i == 3 else 1.0), down
    yield maker.peft("one-large-layer", layers, dtype=np.float16)


# -- times -----------------------------------------------------------------------------------------


def large(folder: Path) -> Iterator[tuple[str, Path]]:
    """Two blocks of an 8B, as a directory, and all layers of a LoRA of Flux, as a file."""
    import ml_dtypes

    maker = Maker(folder)
    hidden, wide, narrow = 4096, 14336, 1024
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    layers = {
        f"model.layers.{i}.{name}": maker.pair(*size, 64)
        for i in range(2)
        for name, size in sizes.items()
    }
    yield "8B, rank 64, 2 blocks", maker.peft("large", layers, dtype=ml_dtypes.bfloat16)
    width = 3072
    layers = {}
    for i in range(19):
        for side in ("img", "txt"):
            place = f"lora_unet_double_blocks_{i}_{side}_"
            layers[f"{place}attn_qkv"] = maker.pair(3 * width, width, 16)
            layers[f"{place}attn_proj"] = maker.pair(width, width, 16)
            layers[f"{place}mlp_0"] = maker.pair(4 * width, width, 16)
            layers[f"{place}mlp_2"] = maker.pair(width, 4 * width, 16)
            layers[f"{place}mod_lin"] = maker.pair(6 * width, width, 16)
    for i in range(38):
        place = f"lora_unet_single_blocks_{i}_"
        layers[f"{place}linear1"] = maker.pair(7 * width, width, 16)
        layers[f"{place}linear2"] = maker.pair(width, 5 * width, 16)
        layers[f"{place}modulation_lin"] = maker.pair(3 * width, width, 16)
    keys = "lora_up.weight", "lora_down.weight"
    path = maker.file("flux-large", layers, keys, alpha=16.0, dtype=ml_dtypes.bfloat16)
    yield "Flux, rank 16, 304 layers", path


def qr_core(path: Path, out: Path, *, ratio: float = 1.0, rtol: float | None = None) -> None:
    """What every resizer does at least, to a ratio or to an error of each layer."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    weights = path / "adapter_model.safetensors" if path.is_dir() else path
    ends = ("lora_A.weight", "lora_B.weight"), ("lora_down.weight", "lora_up.weight")
    layers = []
    total = 0
    with safe_open(weights, "pt") as file:
        for key in file.keys():  # noqa: SIM118 (it is no mapping)
            for down_end, up_end in ends:
                if not key.endswith(down_end):
                    continue
                name = key.removesuffix(down_end)
                down = file.get_tensor(key)
                up = file.get_tensor(name + up_end)
                q_up, r_up = torch.linalg.qr(up.float())
                q_down, r_down = torch.linalg.qr(down.float().T)
                u, sigma, vh = torch.linalg.svd(r_up @ r_down.T)
                ends_of_it = name + up_end, name + down_end
                layers.append((ends_of_it, down.dtype, q_up @ u, sigma, vh @ q_down.T))
                total += down.numel() + up.numel()
    steps = []
    for i, (_, _, u, sigma, vh) in enumerate(layers):
        size = len(u) + vh.shape[1]
        steps += [(float(value) ** 2 / size, i, size) for value in sigma]
    ranks = [0] * len(layers)
    left = total / ratio
    for _, i, size in sorted(steps, reverse=True):
        if rtol is None and size <= left:
            left -= size
            ranks[i] += 1
    if rtol is not None:
        for i, (_, _, _, sigma, _) in enumerate(layers):
            tails = (sigma**2).flip(0).cumsum(0).flip(0)
            ranks[i] = int((tails > rtol**2 * tails[0]).sum())
    tensors = {}
    for ((up_key, down_key), dtype, u, sigma, vh), rank in zip(layers, ranks, strict=True):
        if rank:
            root = sigma[:rank].sqrt()
            tensors[up_key] = (u[:, :rank] * root).to(dtype).contiguous()
            tensors[down_key] = (root[:, None] * vh[:rank]).to(dtype).contiguous()
    save_file(tensors, out)


def seconds_of(action: Callable[[], object]) -> float:
    """The least CPU seconds of some runs."""
    times = []
    for _ in range(REPEATS):
        begun = time.process_time()
        action()
        times.append(time.process_time() - begun)
    return min(times)


def times_of(path: Path, folder: Path) -> list[dict[str, Any]]:
    """CPU seconds of the goals, and of the QR core before them."""
    import torch

    torch.set_num_threads(1)
    pairs = 2 * open_checkpoint(path).adapter_parameters
    goals: dict[str, dict[str, Any]] = {
        "ratio 8": {"ratio": 8},
        "rtol 0.2": {"rtol": 0.2},
        "energy 0.95": {"energy": 0.95},
        "max_rank 8": {"max_rank": 8},
        "ratio 8, int8": {"ratio": 8, "storage": "int8"},
        "ratio 8, int4": {"ratio": 8, "storage": "int4"},
        "rtol 0.2, int8": {"rtol": 0.2, "storage": "int8"},
        "a twentieth of the bytes": {"bytes": pairs // 20},
    }
    out = folder / "out"
    core_out = folder / "core.safetensors"
    core = seconds_of(lambda: qr_core(path, core_out, ratio=8))
    wide_core = seconds_of(lambda: qr_core(path, core_out, rtol=0.2))
    own = folder / ("own" if path.is_dir() else "own.safetensors")
    cut = seconds_of(lambda: truncate(open_checkpoint(path), ratio=8).save(own, force=True))
    rows = [
        {"goal": "QR core, ratio 8", "cpu_seconds": round(core, 3), "times_core": 1.0},
        {
            "goal": "QR core, rtol 0.2",
            "cpu_seconds": round(wide_core, 3),
            "times_core": wide_core / core,
        },
        {"goal": "ratio 8, own format", "cpu_seconds": round(cut, 3), "times_core": cut / core},
    ]
    for name, goal in goals.items():
        taken = seconds_of(lambda goal=goal: compress(path, **goal).save(out, force=True))
        rows.append({"goal": name, "cpu_seconds": round(taken, 3), "times_core": taken / core})
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adapters", nargs="*", type=Path, help="adapter directories or files")
    parser.add_argument("--alpha", type=float, default=16.0, help="for formats that do not hold it")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    record: dict[str, Any] = {"adapters": {}, "times": {}}
    with tempfile.TemporaryDirectory() as folder:
        for path in [*options.adapters, *made(Path(folder))]:
            found = budgets_of(path, options.alpha)
            record["adapters"][path.stem] = found
            ratios = [row["ratio"] for row in found["rows"] if row.get("ratio") is not None]
            print(path.stem, [round(ratio, 3) for ratio in ratios], flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for name, path in large(Path(folder)):
            compress(path, ratio=8)  # imports
            record["times"][name] = times_of(path, Path(folder))
            for row in record["times"][name]:
                print(name, row, flush=True)
    found = [row for each in record["adapters"].values() for row in each["rows"]]
    ratios = [row["ratio"] for row in found if row.get("ratio") is not None]
    record["worst_ratio"] = max(ratios)
    record["refused"] = sum("refused" in row for row in found)
    records.save(options.out, record, *PACKAGES, seed=SEED)
    print("worst", max(ratios), "refused", record["refused"])


if __name__ == "__main__":
    main()
