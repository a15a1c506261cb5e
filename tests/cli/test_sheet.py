"""Tables fit the terminal: no line is longer, no digit is lost, and what matters stays."""

import io
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from console import run_command
from rich.console import Console

from lsrdecomp.cli import layer_tables
from lsrdecomp.cli.layer_tables import checkpoint_table, group_name, layers_table
from lsrdecomp.cli.sheet import Sheet, SheetColumn
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.files.layer_names import module_role
from lsrdecomp.lora.search.result import LayerReport, totals

WIDTHS = (80, 100, 130)
DEMO = Path(layer_tables.__file__).parent / "demo_adapter"


def printed(renderable, width):
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(renderable)
    return out.getvalue()


def report(name, **changes):
    facts = {
        "name": name,
        "kind": "linear",
        "rows": 11008,
        "columns": 4096,
        "source_rank": 16,
        "structure": "LSR",
        "shape": "(32×2 ⊗ 16×2 ⊗ 8×4)(2×16 ⊗ 2×16 ⊗ 4×16)",
        "separation_ranks": (12, 7),
        "parameters_before": 241664,
        "parameters": 12345,
        "bytes": 49380,
        "norm": 2.0,
        "relative_error": 0.0123,
        "functional_norm": 3.0,
        "functional_error": 0.00456,
        "condition": 1.25,
        "storage": "float32",
        "met": True,
    }
    return LayerReport(**{**facts, **changes})


def model(layers, **changes):
    kinds = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
    return [
        report(f"base.model.layers.{i}.{kind}", **changes) for i in range(layers) for kind in kinds
    ]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 8, 40])
def test_a_table_of_layers_fits_and_loses_no_digit(width, count):
    layers = model(count)
    text = printed(layers_table(layers, totals(layers)), width)
    assert max(map(len, text.splitlines())) <= width
    if 3 * count > 24:
        assert f"{count} layers mlp.down_proj" in text
        assert f"{count * 12345:,}" in text
    else:
        assert text.count("12,345") >= 3 * count
    assert f"{3 * count * 12345:,}" in text.splitlines()[-1]
    for cell in ("structure", "parameters", "output error (est.)", "0.00456", "LSR"):
        assert cell in text


def test_wide_shows_all_that_is_known():
    layers = model(1)
    text = printed(layers_table(layers, totals(layers)), 1000)
    for cell in (
        "11008×4096",
        "(32×2 ⊗ 16×2 ⊗ 8×4)(2×16 ⊗ 2×16 ⊗ 4×16)",
        "12+7",
        "1.25",
        "241,664",
    ):
        assert cell in text


def test_a_table_of_an_adapter_says_what_its_layers_are():
    adapter = open_checkpoint(DEMO)
    ranks = [(3.0, 4)] * 11 + [(4.0, 7)]
    rows = printed(checkpoint_table(adapter, ranks), 1000).splitlines()[1:]
    what = ["linear", "384×384", "8", "LoRA", "6,144", "float32"]
    assert [row.split()[1:] for row in rows] == [[*what, "3", "4"]] * 11 + [[*what, "4", "7"]]
    # Of many layers those of one role share a row
    larger = replace(adapter, layers=adapter.layers * 3)
    folded = printed(checkpoint_table(larger, ranks * 3), 1000).splitlines()[1:]
    assert len(folded) == 4
    *name, kind, matrix, rank, structure, parameters, dtype, norm, ranks_of = folded[-1].split()
    assert " ".join(name) == "9 layers attention.self.value"
    assert [kind, matrix, rank, structure, parameters] == [
        "linear",
        "384×384",
        "8",
        "LoRA",
        "55,296",
    ]
    assert (dtype, norm, ranks_of) == ("float32", f"{math.sqrt(102.0):.4g}", "4–7")


def test_a_long_name_loses_its_middle_and_nothing_else():
    row = ("transformer." + "block." * 20 + "q_proj", "123,456,789", "0.0625")
    sheet = Sheet(
        (
            SheetColumn("layer", justify="left", name=True),
            SheetColumn("parameters"),
            SheetColumn("error", 1),
        ),
        [row],
    )
    text = printed(sheet, 60)
    assert max(map(len, text.splitlines())) <= 60
    assert "123,456,789" in text
    assert "0.0625" in text
    assert re.search(r"transformer.*….*q_proj", text)


def test_where_little_room_is_left_the_name_is_shortened_and_no_digit_lost():
    columns = (
        SheetColumn("layer", justify="left", name=True),
        SheetColumn("rank"),
        SheetColumn("parameters"),
        SheetColumn("error", 1),
    )
    text = printed(Sheet(columns, [("10.attention.self.query", "16", "1,536", "0.0625")]), 40)
    assert max(map(len, text.splitlines())) <= 40
    assert "1,536" in text
    assert "parameters" in text


def test_layers_of_a_group_count_as_one():
    """Relative errors combine through the norms; a layer that misses its tolerance shows."""
    layers = [
        *model(20, relative_error=0.3, norm=1.0),
        report("base.model.layers.20.mlp.down_proj", relative_error=0.4, norm=2.0, met=False),
    ]
    line = next(
        x
        for x in printed(layers_table(layers, totals(layers)), 130).splitlines()
        if "down_proj" in x
    )
    assert line.startswith("21 layers mlp.down_proj")
    assert f"{((20 * 0.09 + 4 * 0.16) / (20 + 4)) ** 0.5:.3g} !" in line
    alone = printed(layers_table(layers, totals(layers), each=True), 130)
    assert len(alone.splitlines()) > 61


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.11.self_attn.q_proj", "self_attn.q_proj"),
        ("unet_down_blocks_0_attn_to_q", "attn_to_q"),
        ("classifier", "classifier"),
    ],
)
def test_what_a_layer_is_without_where_it_is(name, kind):
    assert module_role(name) == kind
    assert group_name([name], 0) == name


def test_columns_is_honoured_when_piped(monkeypatch):
    demo = layer_tables.__file__.replace("layer_tables.py", "demo_adapter")
    wide = run_command("inspect", demo)
    monkeypatch.setenv("COLUMNS", "60")
    narrow = run_command("inspect", demo)
    assert (wide.returncode, narrow.returncode) == (0, 0)
    table = narrow.stdout.split("\n\n")[0]
    assert (
        max(map(len, table.splitlines()))
        <= 60
        < max(map(len, wide.stdout.split("\n\n")[0].splitlines()))
    )
