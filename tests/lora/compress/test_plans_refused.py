"""Plans that would make nothing smaller are refused or kept from doing harm, with the way out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import PREFIX, lora_pair, write_lora_directory
from console import run_command

import lsrdecomp
from lsrdecomp import compress
from lsrdecomp.errors import BudgetError
from lsrdecomp.formats.quantized import SpectralCode
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.writing import WEIGHTS
from lsrdecomp.lora.search import CompressionPlan, search_adapter
from lsrdecomp.lora.search.searched import HEADER_BYTES

DEMO = Path(lsrdecomp.__file__).parent / "cli" / "demo_adapter"


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_a_ratio_of_one_or_less_is_refused(ratio: float) -> None:
    with pytest.raises(BudgetError, match="makes nothing smaller; ask for one above 1"):
        CompressionPlan(ratio=ratio)


def test_so_many_terms_that_a_layer_would_grow_leave_it_as_it_is() -> None:
    demo = open_checkpoint(DEMO)
    result = compress(demo, CompressionPlan(separation_rank=1_000_000))
    assert result.totals.parameters <= demo.adapter_parameters
    assert result.totals.relative_error < 1e-6


def test_int4_writes_no_wider_integers(tmp_path: Path) -> None:
    layers = {**lora_pair("l.0.q", 48, 32, r=4), **lora_pair("l.1.q", 48, 32, r=4, seed=1)}
    result = compress(
        open_checkpoint(write_lora_directory(tmp_path / "in", layers, r=4)),
        CompressionPlan(ratio=1.5, storage="int4"),
    )
    codes = [one.stored() for one in result.chosen if one.stored is not None]
    widths = [
        max(code.bits if isinstance(code, SpectralCode) else (code.left.bits, code.right.bits))
        for code in codes
    ]
    assert widths
    assert max(widths) <= 4


def test_bytes_that_the_heads_alone_take_are_refused_before_any_search() -> None:
    demo = open_checkpoint(DEMO)
    heads = sum(tensor.nbytes for tensor in demo.extras.values())
    with pytest.raises(
        BudgetError, match=f"heads, header and config alone take {heads + HEADER_BYTES:,} bytes"
    ):
        compress(demo, CompressionPlan(bytes=heads, storage="float16"))


def test_several_ratios_are_written_from_one_search_and_a_wreck_is_told(
    tmp_path: Path,
) -> None:
    order = ["compress", str(DEMO), "--out", str(tmp_path / "small"), "--ratio"]
    done = run_command(*order, "96,48")
    assert done.returncode == 0, done.stderr
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["small-48", "small-96"]
    sizes = [
        sum(layer.parameters for layer in open_checkpoint(tmp_path / name).layers)
        for name in ("small-96", "small-48")
    ]
    assert sizes[0] <= 73_728 / 96 < sizes[1] <= 73_728 / 48
    told = done.stderr
    assert "WARNING: little of this adapter is left" in told
    assert f"compress {DEMO} --base sentence-transformers/all-MiniLM-L6-v2 --data" in told
    assert run_command(*order, "96,24").returncode == 2  # small-96 exists, so nothing is begun
    assert not (tmp_path / "small-24").exists()


def test_a_name_on_the_hub_is_told_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for verb in (
        ("compress", "someone/adapter", "--ratio", "8", "--out", "out"),
        ("inspect", "someone/adapter"),
    ):
        done = run_command(*verb)
        assert done.returncode == 2
        assert "hf download someone/adapter --local-dir adapter" in done.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "adapters").mkdir()
    # A directory, and a word misspelt.
    assert "hf download" not in run_command("inspect", "adapters/style").stderr


def test_a_rank_bound_holds_in_what_is_written(tmp_path: Path) -> None:
    demo = open_checkpoint(DEMO)
    result = compress(demo, CompressionPlan(ratio=3.0, max_rank=2))
    assert (
        max(
            np.prod(one.product.product_shape.inner)
            for one in result.chosen
            if one.product is not None
        )
        <= 2
    )
    assert max(one.candidate.rank for one in compress(demo, CompressionPlan(ratio=3.0)).chosen) > 2


def test_bytes_are_met_where_a_head_takes_most_of_the_file(tmp_path: Path) -> None:
    layers = {
        name: value
        for i in range(4)
        for name, value in lora_pair(f"l.{i}.q", 96, 96, r=8, seed=i).items()
    }
    head = {f"{PREFIX}classifier.weight": np.ones((100, 300), dtype=np.float32)}
    source = open_checkpoint(
        write_lora_directory(tmp_path / "in", layers | head, r=8, modules_to_save=["classifier"])
    )
    heads = sum(tensor.nbytes for tensor in source.extras.values())
    assert heads == 120_000
    budget = heads + 6_000  # the layers take 24,576
    out = compress(source, CompressionPlan(bytes=budget)).save(tmp_path / "out")
    size = (out / WEIGHTS).stat().st_size
    assert heads < size <= budget
    assert size >= 0.97 * budget
    assert sum(layer.parameters for layer in open_checkpoint(out).layers) > 500


@pytest.mark.parametrize("storages", [(), ("float16", "int4")])
def test_a_search_is_for_plans_of_one_storage(storages: tuple[str, ...]) -> None:
    plans = [CompressionPlan(ratio=8, storage=storage) for storage in storages]
    with pytest.raises(
        BudgetError, match=rf"{len(plans)} plans have {len(storages)}: search once for each"
    ):
        search_adapter(open_checkpoint(DEMO), plans)
