"""Faults of other formats: kohya's, diffusers', loralib's, LoHa and LoKr."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from checkpoint_files import PREFIX, lora_pair

from damage.adapter import HEAD, Fault, collect, single, tensors


def ones(*shape: int) -> np.ndarray:
    """Return an array of ones in single precision."""
    return np.ones(shape, np.float32)


@collect("formats")
def _kohya() -> Iterator[tuple[str, Fault]]:
    down, up = "lora_unet_q.lora_down.weight", "lora_unet_q.lora_up.weight"
    pair = {down: ones(2, 6), up: ones(4, 2)}
    yield "kohya: down alone", single({down: ones(2, 6)})
    yield "kohya: up alone", single({up: ones(4, 2)})
    yield "kohya: ranks", single({down: ones(2, 6), up: ones(4, 3)})
    yield "kohya: empty", single({down: ones(0, 6), up: ones(4, 0)})
    yield "kohya: two alphas", single({**pair, "lora_unet_q.alpha": ones(2)})
    yield "kohya: alpha nan", single({**pair, "lora_unet_q.alpha": ones(1) * np.nan})
    yield "kohya: mid", single({**pair, "lora_unet_q.lora_mid.weight": ones(2, 2)})
    for part in ("dora_scale", "diff", "diff_b", "oft_blocks", "on_input", "w_norm"):
        yield f"kohya: {part}", single({**pair, f"lora_unet_q.{part}": ones(2)})
    yield "kohya: an unknown part", single({**pair, "lora_unet_q.lora_gate.weight": ones(2)})
    huge = {
        "lora_unet_q.lora_mid.weight": np.ones((30_000, 1, 1, 1), "float16"),
        down: np.ones((1, 30_000, 1, 1), "float16"),
        up: np.ones((1, 30_000, 1, 1), "float16"),
    }
    yield "kohya: product of 10^9", single(huge)


@collect("formats")
def _diffusers() -> Iterator[tuple[str, Fault]]:
    for age, (down, up) in {"new": ("lora_A", "lora_B"), "old": ("lora.down", "lora.up")}.items():
        down_key, up_key = f"unet.q.{down}.weight", f"unet.q.{up}.weight"
        yield f"diffusers {age}: A alone", single({down_key: ones(2, 6)})
        yield f"diffusers {age}: ranks", single({down_key: ones(2, 6), up_key: ones(4, 3)})
    pair = {"unet.q.lora_A.weight": ones(2, 6), "unet.q.lora_B.weight": ones(4, 2)}
    yield "diffusers: both ages", single({**pair, "unet.q.lora.down.weight": ones(2, 6)})
    twice = {
        "unet.processor.to_q_lora.down.weight": ones(2, 6),
        "unet.processor.to_q_lora.up.weight": ones(4, 2),
        "unet.to_q.lora_A.weight": ones(2, 6),
        "unet.to_q.lora_B.weight": ones(4, 2),
    }
    yield "diffusers: one module twice", single(twice)
    yield "diffusers: magnitude", single({**pair, "unet.q.lora_magnitude_vector": ones(2)})
    for text in (
        "",
        "[]",
        "{",
        '{"unet.use_dora": true}',
        '{"unet.lora_alpha": "x"}',
        '{"unet.peft_type": "IA3"}',
    ):
        yield f"diffusers: header {text}", single(pair, {"lora_adapter_metadata": text})


@collect("formats")
def _without_names() -> Iterator[tuple[str, Fault]]:
    yield "layers by position", single({"unet:0:up": ones(4, 2), "unet:0:down": ones(2, 6)})
    yield "tokens only", single({"<s1>": ones(2)})


@collect("formats")
def _without_scale() -> Iterator[tuple[str, Fault]]:
    yield "peft file without config", single(lora_pair("q"))
    yield "loralib: no alpha", single({"q.lora_A": ones(2, 6), "q.lora_B": ones(4, 2)})
    yield "loralib: half", single({"q.lora_A": ones(2, 6)})
    yield "loralib: merged", single({"q.lora_A": ones(4, 2), "q.lora_B": ones(4, 2)})


@collect("formats")
def _peft_lycoris() -> Iterator[tuple[str, Fault]]:
    for peft_type in ("LOHA", "LOKR"):
        yield f"peft {peft_type}: parts of LoRA", tensors(lora_pair("q"), peft_type=peft_type)
        yield f"peft {peft_type}: nothing", tensors({HEAD: ones(2)}, peft_type=peft_type)
    factors = {f"{PREFIX}q.lokr_w1": ones(2, 2), f"{PREFIX}q.lokr_w2": ones(2, 6)}
    for field, value in {
        "r": 0,
        "alpha": "x",
        "rank_pattern": {"(": 2},
        "use_dora": True,
        "target_modules": 1,
    }.items():
        yield f"peft LOKR: {field} {value}", tensors(factors, peft_type="LOKR", **{field: value})


@collect("formats")
def _loha() -> Iterator[tuple[str, Fault]]:
    halves = {f"m.hada_w{i}_{half}": ones(2, 2) for i in "12" for half in "ab"}
    for key in halves:
        part = key.removeprefix("m.hada_")
        others = {name: array for name, array in halves.items() if name != key}
        yield f"loha: without {part}", single(others)
        yield f"loha: {part} flat", single({**halves, key: ones(2)})
        yield f"loha: {part} nan", single({**halves, key: ones(2, 2) * np.nan})
    yield "loha: sizes", single({**halves, "m.hada_w2_b": ones(2, 6)})
    huge = {
        key: np.ones((2, 40_000) if key.endswith("a") else (40_000, 2), "float16") for key in halves
    }
    yield "loha: rank of 10^9", single(huge)


@collect("formats")
def _lokr() -> Iterator[tuple[str, Fault]]:
    factors = {"m.lokr_w1": ones(2, 2), "m.lokr_w2_a": ones(4, 2), "m.lokr_w2_b": ones(2, 6)}
    for key, factor in factors.items():
        part = key.removeprefix("m.lokr_")
        others = {name: array for name, array in factors.items() if name != key}
        yield f"lokr: without {part}", single(others)
        yield f"lokr: {part} flat", single({**factors, key: ones(2)})
        yield f"lokr: {part} nan", single({**factors, key: factor * np.nan})
    yield "lokr: whole and split", single({**factors, "m.lokr_w2": ones(2, 6)})
    yield "lokr: core", single({**factors, "m.lokr_t2": ones(2, 2)})
    yield "lokr: dora", single({**factors, "m.dora_scale": ones(2)})
