"""Faults of layers: tensors that are not of one layer, as PEFT stores LoRA and as we store LSR."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from checkpoint_files import PREFIX, lora_pair

from damage.adapter import (
    DOWN,
    LSR_KEY,
    LSR_SIZES,
    UP,
    Fault,
    Files,
    collect,
    lsr,
    tensors,
)


def _halves(a: tuple[int, ...], b: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {DOWN: np.ones(a, np.float32), UP: np.ones(b, np.float32)}


@collect("layers")
def _layers() -> Iterator[tuple[str, Fault]]:
    good = lora_pair("q")
    yield "no tensors", tensors({})
    yield "only a head", tensors({f"{PREFIX}head.weight": np.ones((2, 2))})
    yield "A alone", tensors({DOWN: good[DOWN]})
    yield "B alone", tensors({UP: good[UP]})
    yield "one half of a second layer", tensors({**good, f"{PREFIX}v.lora_A.weight": good[DOWN]})
    shapes_of_halves = [
        ((3, 6), (4, 2)),
        ((2, 6), (4, 3)),
        ((6, 2), (4, 2)),
        ((2,), (4, 2)),
        ((2, 6), (8,)),
        ((), ()),
        ((12,), (8,)),
        ((0, 6), (4, 0)),
        ((2, 0), (4, 2)),
        ((2, 6), (0, 2)),
        ((2, 6, 3), (4, 2)),
        ((2, 6, 3, 3), (4, 2, 1)),
        ((2, 6, 3, 3), (4, 2, 3, 3)),
        ((2, 6, 3, 3), (4, 1, 1, 1)),
        ((1, 6), (4, 1)),
        ((3, 6), (4, 3)),
    ]
    for down, up in shapes_of_halves:
        yield f"A {down} with B {up}", tensors(_halves(down, up))
    for dtype in ("int8", "uint8", "int32", "bool"):
        yield (
            f"{dtype} numbers",
            tensors({name: array.astype(dtype) for name, array in good.items()}),
        )
    for bad in (np.nan, np.inf, -np.inf):
        for name in (DOWN, UP):
            broken = good[name].copy()
            broken[1, 1] = bad
            yield f"{bad} in {name[-8]}", tensors({**good, name: broken})
    for dtype in ("float16", "bfloat16", "float64"):
        yield (
            f"nan in {dtype}",
            tensors({name: (array * np.nan).astype(dtype) for name, array in good.items()}),
        )
    for key in (
        "q.lora_A.weight",
        "model.q.lora_A.weight",
        "base_model.q.lora_A.weight",
        "head.weight",
    ):
        yield f"without prefix: {key}", tensors({**good, key: good[DOWN]})
    for part in (
        "lora_magnitude_vector",
        "lora_magnitude_vector.weight",
        "lora_B.bias",
        "lora_E",
        "lora_C.weight",
        "lora_diag",
    ):
        yield part, tensors({**good, f"{PREFIX}q.{part}": np.ones(2, np.float32)})
    for part in ("lora_A.default.weight", "lora_A", "lora_embedding_A.weight", "lora_a.weight"):
        yield (
            part,
            tensors(
                {
                    **good,
                    f"{PREFIX}v.{part}": good[DOWN],
                    f"{PREFIX}v.{part.replace('A', 'B')}": good[UP],
                }
            ),
        )
    both = {f"{PREFIX}q.lora_embedding_A": good[DOWN], f"{PREFIX}q.lora_embedding_B": good[UP]}
    yield "linear and embedding at once", tensors({**good, **both})


LSR_FIELDS: dict[str, tuple[Any, ...]] = {
    "r": (0, 3, "2", -1, 2.5),
    "inner_shape": ([1, 2], [2], [], "2x1", [2, 0], [2.0, 1]),
    "separation_rank": (0, 3, [3], [2, 3], [3, 2, 1], "3", [3, True]),
    "lsr_alpha": ("2", True, [2]),
    "shape_pattern": (
        [1],
        {"q": 3},
        {"q": {}},
        {"q": {"out": [4], "inner": [2], "into": [6]}},
        *(
            {"q": {"out": [2, 2], "inner": [2, 1], "into": into}}
            for into in ([2, 3], [3], "32", [3, -2])
        ),
    ),
    "rank_pattern": ({"q": 4}, {"q": "2"}, {"(": 2}, [2]),
    "separation_rank_pattern": ({"q": 9},),
    "alpha_pattern": ({"q": None},),
    "order": (0,),
    "use_dora": (True,),
}
"""Values that no LSR config may have."""

Factors = dict[str, np.ndarray]


def _with_tensor(key: str, array: np.ndarray) -> Files:
    return lsr(lambda factors, _: factors.update({key: array}))


def _with_factor(side: str, change: Callable[[np.ndarray], np.ndarray]) -> Files:
    key = LSR_KEY + side
    return lsr(lambda factors, _: factors.update({key: change(factors[key])}))


def _with_field(field: str, value: Any, _: Factors, config: dict[str, Any]) -> None:
    config[field] = value


def _without(key: str, factors: Factors, _: dict[str, Any]) -> None:
    del factors[key]


def _renamed(key: str, factors: Factors, _: dict[str, Any]) -> None:
    factors[key[:-1] + "9"] = factors.pop(key)


def _long_side(factors: Factors, config: dict[str, Any]) -> None:
    factors.clear()
    for i in range(1, 5):
        factors[f"{LSR_KEY}A.factor_{i}"] = np.ones((1, 1, 99_991), "float16")
        factors[f"{LSR_KEY}B.factor_{i}"] = np.ones((1, 1, 1), "float16")
    config.update(r=1, inner_shape=None, order=4, separation_rank=1)


def _many_factors(factors: Factors, config: dict[str, Any]) -> None:
    factors.clear()
    for side in "AB":
        for i in range(1, 401):
            factors[f"{LSR_KEY}{side}.factor_{i}"] = np.ones((1, 1, 1), np.float32)
    config.update(r=1, inner_shape=None, order=400, separation_rank=1)


@collect("lsr")
def _lsr() -> Iterator[tuple[str, Fault]]:
    for side in LSR_SIZES:
        yield f"without {side}", lsr(partial(_without, LSR_KEY + side))
        yield f"{side} flat", _with_factor(side, lambda factor: factor[0])
        yield f"{side} empty", _with_factor(side, lambda factor: factor[:0])
        yield f"{side} fewer terms", _with_factor(side, lambda factor: factor[:1])
        yield f"{side} of int8", _with_factor(side, lambda factor: factor.astype("int8"))
        yield f"{side} nan", _with_factor(side, lambda factor: factor * np.nan)
        yield f"{side} renamed", lsr(partial(_renamed, LSR_KEY + side))
    for key in (
        "q.lsr_A.factor_0",
        "q.lsr_C.factor_1",
        "q.lsr_A",
        "q.lsr_A.default.factor_1",
        "q.lsr_magnitude_vector",
    ):
        yield f"{key} beside", _with_tensor(PREFIX + key, np.ones((2, 2, 3), np.float32))
    yield "no prefix", _with_tensor("head", np.ones(2))
    yield (
        "inner sizes that differ",
        _with_tensor(f"{LSR_KEY}A.factor_1", np.ones((2, 3, 3), np.float32)),
    )
    yield "in side of 10^20", lsr(_long_side)
    yield "400 factors", lsr(_many_factors)
    yield "order of 2^30", lsr(lambda _, config: config.update(order=2**30, inner_shape=None))
    for field, values in LSR_FIELDS.items():
        for value in values:
            yield f"{field} {value!r}", lsr(partial(_with_field, field, value))
