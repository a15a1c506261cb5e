"""Memory of a compression grows with the largest layer, not with the number of layers."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import lora_pair, write_lora_directory

from lsrdecomp.errors import CheckpointError
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.tensors import TensorWriter
from lsrdecomp.lora.search import search_adapter
from lsrdecomp.lora.search.caches import LRUCache, SpillCache
from lsrdecomp.lora.search.effort import ResourceLimits
from lsrdecomp.lora.search.layers import Layer, PairAsRead, batches, pair_entries
from lsrdecomp.lora.search.plan import CompressionPlan, Resources, Search
from lsrdecomp.targets.target import LowRank

M, N, R = 1021, 1531, 8  # primes: few shapes are tried, and tables of them are short beside a layer
COUNTS = 4, 8  # layers
LAYER = 8 * R * (M + N)  # bytes in float64
SEARCH = Search(orders=(2,), rounds=0, inner_rank=2, sweeps=1)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    made = {}
    for count in COUNTS:
        tensors = {
            k: v
            for i in range(count)
            for k, v in lora_pair(f"layers.{i}.q", M, N, R, seed=i).items()
        }
        made[count] = write_lora_directory(folder / str(count), tensors, r=R)
    return made


def peak(
    adapter: Path,
    out: Path,
    plan: CompressionPlan,
    *,
    limits: ResourceLimits | None = None,
) -> int:
    """Return the most bytes held while compressing and writing, without garbage in cycles."""
    gc.collect()
    gc.freeze()  # what other tests left is not gone through each time
    thresholds = gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    tracemalloc.start()
    try:
        search = SEARCH if plan.separation_rank is None else None
        resources = Resources(limits=limits or ResourceLimits())
        lora = open_checkpoint(adapter)
        searched = search_adapter(lora, [plan], search=search, resources=resources)
        searched.compress(plan).save(out)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        (CompressionPlan(separation_rank=2, storage="float16"), 0.45),
        (CompressionPlan(separation_rank=1, storage="int4"), 0.2),
        # Every layer is kept: its factors are as large as the layer.
        (
            CompressionPlan(rtol=0.1),
            0.2,
        ),
        (CompressionPlan(ratio=4, storage="float16"), 0.4),  # a table of prices for every layer
    ],
    ids=["terms", "terms-int4", "rtol", "ratio"],
)
def test_the_peak_does_not_grow_with_the_number_of_layers(
    adapters, tmp_path, monkeypatch, plan, share
):
    monkeypatch.setitem(TensorWriter.__init__.__kwdefaults__, "memory_bytes", LAYER)
    limits = ResourceLimits(pair_entries=2 * LAYER // 8, spill_bytes=LAYER)
    few, many = (
        peak(adapters[count], tmp_path / str(count), plan, limits=limits) for count in COUNTS
    )
    assert many - few < 4 * share * LAYER
    assert few < 40 * LAYER


@pytest.mark.parametrize(
    ("plan", "layers"),
    [
        (CompressionPlan(separation_rank=2, storage="float16"), 3.0),
        (CompressionPlan(ratio=4, storage="float16"), 5.0),
    ],
    ids=["terms", "ratio"],
)
def test_the_peak_is_a_small_multiple_of_the_largest_layer(tmp_path, plan, layers):
    """Sizes in proportion to a 70B model's layer."""
    m, n, r = 4096, 2048, 16
    adapter = write_lora_directory(tmp_path / "adapter", lora_pair("layers.0.q", m, n, r), r=r)
    held = peak(adapter, tmp_path / "out", plan)
    assert held < layers * 8 * r * (m + n) + 2**18


def test_a_spilled_compression_writes_the_bytes_of_one_in_memory(adapters, tmp_path):
    plan = CompressionPlan(rtol=0.9, storage="int8")
    lora = open_checkpoint(adapters[4])
    for name, limits in (("held", ResourceLimits()), ("spilled", ResourceLimits(spill_bytes=1))):
        resources = Resources(limits=limits)
        searched = search_adapter(lora, [plan], search=SEARCH, resources=resources)
        searched.compress(plan).save(tmp_path / name)
    for name in ("adapter_model.safetensors", "adapter_config.json", "compression.json"):
        assert (tmp_path / "held" / name).read_bytes() == (tmp_path / "spilled" / name).read_bytes()


def layer(name: str, size: int) -> Layer:
    return Layer.of(name, LowRank(np.ones((size, 1)), np.ones((1, size))))


def test_batches_hold_what_fits_and_at_least_one_layer():
    assert batches([]) == []
    sizes = [20, 30, 60, 10, 10, 10, 10, 10, 10]  # half their numbers
    layers = [layer("x", size) for size in sizes]
    spans = batches(layers, ResourceLimits(pair_entries=100))
    assert [span.stop for span in spans] == [2, 3, 8, 9]


def test_pairs_stay_read_while_they_fit():
    pairs, cache, read = LRUCache(40, pair_entries), SpillCache(), []

    def stored(name: str) -> Layer:
        def open_it() -> PairAsRead:
            read.append(name)
            return layer(name, 10).pair_as_read

        return Layer(name, (10, 10), 1, lambda: pairs.get(name, open_it), None, cache)

    a, b, c = (stored(name) for name in "abc")
    for each in (a, b, a, c, a, b):
        assert each.pair.shape == each.shape
        assert each.squared_norm == pytest.approx(100.0)
    assert read == ["a", "b", "c", "b"]  # b was the one not used for longest when c came


def test_a_full_disk_under_the_shelf_is_one_line(monkeypatch):
    held = SpillCache()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(held._file, "seek", full)
    with pytest.raises(
        CheckpointError, match="No space left on device; point TMPDIR to a larger disk"
    ):
        held.put(np.ones(3))
