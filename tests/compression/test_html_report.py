"""The HTML report: complete, self-contained, escaped, small."""

import math
import re
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from lsrdecomp.analysis import ErrorCurve
from lsrdecomp.calibration import Behaviour
from lsrdecomp.compression.html_report import html_report
from lsrdecomp.compression.result import Compression, LayerReport
from lsrdecomp.compression.settings import CompressionPlan
from lsrdecomp.compression.svg_curves import Line, svg_curves, svg_shares
from lsrdecomp.fidelity import Fidelity, Measurement

LAYER = LayerReport(
    name="model.layers.0.q",
    kind="linear",
    rows=384,
    columns=384,
    source_rank=8,
    structure="LSR",
    shape="(24×4 ⊗ 16×2)(4×24 ⊗ 2×16)",
    separation_ranks=(4, 5),
    parameters_before=6144,
    parameters=1500,
    bytes=3000,
    norm=2.0,
    relative_error=0.25,
    functional_norm=None,
    functional_error=None,
    condition=1.0,
    storage="float16",
)
PLAN = CompressionPlan(separation_rank=4, inner_shape=(4, 2), storage="float16")
BEHAVIOUR = Behaviour(128, 3000, "token", 0.1, 0.9, 1.0, 0.01)
FACTS = {"data": "a.jsonl", "base": "b", "bytes_before": 3_700_000, "bytes_after": 12_000}
CURVE = ErrorCurve(
    "truncated <SVD>", (0, 1, 2, 3), (0, 1000, 2000, 3000), (1.0, 0.5, 0.25, 1e-16), 1.0
)


@dataclass(frozen=True)
class Source:
    path: Path = Path("adapters/my & adapter")
    weights: Path = Path("adapters/my & adapter/adapter_model.safetensors")
    format: str = "peft-lora"
    source_sha256: str = "ab" * 32
    notes: tuple[str, ...] = ("a <note>",)
    extra_parameters: int = 770


def compression(layers, **measured):
    return Compression(Source(), PLAN, tuple(layers), (), **measured)


def record(count=3):
    return compression(
        tuple(
            replace(LAYER, name=f"model.layers.{k}.q", relative_error=0.1 + k / 10_000)
            for k in range(count)
        )
    )


class Page(HTMLParser):
    """Checks that tags nest, and gathers texts and tags."""

    VOID = ("meta", "br", "wbr", "line", "polyline")

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_says_what_the_record_says():
    page = Page(html_report(record(), [CURVE]))
    text = " ".join(page.texts)
    assert "4,500 parameters instead of 18,432, 4.1 times fewer" in text
    assert "Every layer meets the plan." in text
    assert "(24×4 ⊗ 16×2)(4×24 ⊗ 2×16)" in text
    assert "ab" * 32 in text
    assert "4 × 2" in text, "the plan's inner shape"
    assert sum(tag == "tr" for tag, _ in page.tags) == 4


def test_a_missed_layer_is_said_and_marked():
    layers = (LAYER, replace(LAYER, name="model.layers.1.q", relative_error=0.5, met=False))
    page = html_report(compression(layers))
    assert "1 of 2 layers miss the tolerance." in page
    assert page.count('class="bar missed"') == 1


def test_an_error_in_the_norm_of_behaviour_has_its_column():
    layers = tuple(
        replace(LAYER, name=f"h.{k}.q", functional_norm=1.0, functional_error=0.125)
        for k in range(2)
    )
    page = Page(html_report(compression(layers)))
    text = " ".join(page.texts)
    assert "Fisher error" in text
    assert "Output error (Fisher norm) 0.125" in text
    assert page.texts.count("0.125") == 4, "each layer, the worst and the total"
    assert sum(tag == "td" for tag, _ in page.tags) == 22


def test_the_divergence_names_what_the_network_answers_once_for():
    layers = (replace(LAYER, functional_norm=1.0, functional_error=0.125),)
    assert "estimated KL, nats per example" in Page(html_report(compression(layers))).texts
    assert (
        "estimated KL, nats per token" in Page(html_report(compression(layers), unit="token")).texts
    )
    fidelity = Fidelity.of(BEHAVIOUR, **FACTS)
    measured = Page(html_report(compression(layers, fidelity=fidelity), unit="token")).texts
    assert "90.0 %" in measured
    assert not any("estimated" in text for text in measured)


def test_a_measured_result_shows_what_its_forms_kept_and_no_error_curve():
    fidelity = Fidelity.of(BEHAVIOUR, **FACTS)
    tried = (Measurement(24_000, 6000, 0.97), Measurement(12_000, 3000, 0.7, 0.9, 60))
    page = html_report(compression((LAYER,), fidelity=fidelity, tried=tried), [CURVE])
    assert "Share kept against bytes" in page
    assert "Error against parameters" not in page
    for hint in (
        "untrained: 12,000 bytes, share kept 0.7",
        "trained: 12,000 bytes, share kept 0.9",
    ):
        assert f"<title>{hint}</title>" in page
    assert "<polyline" not in page
    heights = [float(y) for y in re.findall(r'class="p0" cx="[^"]*" cy="([^"]*)"', page)]
    assert heights[0] > heights[1], "smaller files stand left, a larger share higher"


def test_nothing_can_be_loaded_and_every_name_is_escaped():
    page = html_report(compression((replace(LAYER, name="<script>alert(1)</script>"),)), [CURVE])
    assert not re.search(r"""(?:src|href)\s*=|url\(|@import|https?:""", page)
    assert "default-src 'none'" in page
    assert page.count("<script>") == 1
    assert "my &amp; adapter" in page
    assert "truncated &lt;SVD&gt;" in page
    assert "a &lt;note&gt;" in page
    Page(page)


def test_the_names_share_their_beginning_once():
    page = html_report(record())
    assert "Names begin with model.layers. here left out." in page
    assert ">0.<wbr>q</td>" in page
    assert 'data-v="model.layers.0.q"' in page, "sorting uses the whole name"


def test_two_hundred_layers_stay_below_two_megabytes():
    assert len(html_report(record(200), [CURVE] * 3).encode()) < 200_000


def test_every_cell_carries_what_it_sorts_by():
    page = Page(html_report(record()))
    cells = [attributes for tag, attributes in page.tags if tag == "td"]
    assert len(cells) == 30
    assert all("data-v" in attributes for attributes in cells)
    heads = [attributes for tag, attributes in page.tags if tag == "th"]
    assert [head["aria-sort"] for head in heads] == ["none"] * 10


def test_what_was_written_is_listed(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"0" * 1234)
    page = html_report(record(), out=tmp_path)
    assert "1,234 bytes" in page
    assert "import lsrdecomp.adapters" in page


def read_back(svg):
    """Return how a picture's places become numbers, by the lines of its own grid and their labels.

    Both axes are logarithmic: two lines of each are enough.
    """
    number = {"k": 1e3, "M": 1e6, "G": 1e9}

    def value(text):
        return float(text.rstrip("kMG")) * number.get(text[-1], 1.0)

    lines = r'<line class="grid" x1="([\d.]+)" x2="([\d.]+)" y1="([\d.]+)" y2="([\d.]+)"/>'
    label = r'<text class="small" x="[\d.]+" y="[\d.]+" text-anchor="\w+">([^<]+)</text>'
    grid = re.findall(lines + label, svg)
    columns = {float(x1): value(text) for x1, x2, _, _, text in grid if x1 == x2}
    rows = {float(y1): value(text) for _, _, y1, y2, text in grid if y1 == y2}

    def scale(places):
        (first, low), *_, (last, high) = sorted(places.items())
        steepness = math.log(high / low) / (last - first)
        return lambda place: low * math.exp(steepness * (place - first))

    return scale(columns), scale(rows)


def view_box(svg):
    return tuple(map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()))


def test_curves_lie_where_their_numbers_are():
    svg = svg_curves([CURVE], here=(1000, 0.5), lora=6144)
    path = re.search(r'<polyline class="c0" points="([^"]+)"', svg).group(1)
    points = [tuple(map(float, pair.split(","))) for pair in path.split()]
    assert len(points) == 2, "zero parameters and rounding are not drawn"
    size_at, error_at = read_back(svg)
    sizes = [size_at(x) for x, _ in points]
    errors = [error_at(y) for _, y in points]
    assert sizes == pytest.approx([1000, 2000], rel=0.01)
    assert errors == pytest.approx([0.5, 0.25], rel=0.01)
    assert points[0][1] < points[1][1], "down the page is a smaller error"
    mark = re.search(r'class="here" cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert (float(mark.group(1)), float(mark.group(2))) == points[0]
    lora = re.search(r'class="lora" x1="([\d.]+)" x2="([\d.]+)"', svg)
    assert lora.group(1) == lora.group(2)
    assert size_at(float(lora.group(1))) == pytest.approx(6144, rel=0.01)


@pytest.mark.parametrize("sizes", [(900, 1100), (1000, 2000, 40_000), (10, 10**4, 10**7)])
@pytest.mark.parametrize("errors", [(0.9, 0.8), (0.9, 0.2), (0.9, 0.001)])
def test_all_that_is_drawn_is_on_the_page(sizes, errors):
    ends = np.geomspace(*errors, len(sizes))
    curve = ErrorCurve("curve", range(len(sizes)), sizes, tuple(ends), 1.0)
    svg = svg_curves([curve], here=(sizes[0], errors[0]), lora=2 * sizes[-1])
    width, height = view_box(svg)
    places = [(float(x), float(y)) for x, y in re.findall(r'c?x="([-\d.]+)" c?y="([-\d.]+)"', svg)]
    points = re.search(r'<polyline class="c0" points="([^"]+)"', svg).group(1).split()
    drawn = [tuple(map(float, pair.split(","))) for pair in points]
    places += drawn
    places += [(float(x), 0.0) for x in re.findall(r'x[12]="([-\d.]+)"', svg)]
    places += [(0.0, float(y)) for y in re.findall(r'y[12]="([-\d.]+)"', svg)]
    assert len(places) > 10
    assert all(0.0 <= x <= width and 0.0 <= y <= height for x, y in places)
    # Of each axis, enough lines to read a number by
    size_at, error_at = read_back(svg)
    assert [size_at(x) for x, _ in drawn] == pytest.approx(sizes, rel=0.03)
    assert [error_at(y) for _, y in drawn] == pytest.approx(ends, rel=0.03)


def test_a_picture_of_shares_has_one_scale_from_the_least_to_one():
    """Shares may be negative; 1 is all of the LoRA's effect, and the top."""
    lines = [Line("untrained", [(1000.0, -0.2), (2000.0, 0.4), (4000.0, 1.0)])]
    svg = svg_shares(lines, (2000, 0.4))
    heights = [float(y) for y in re.findall(r'class="p0" cx="[^"]*" cy="([^"]*)"', svg)]
    least, middle, most = heights
    assert 0 < most < middle < least < view_box(svg)[1]
    assert (least - middle) / (least - most) == pytest.approx(0.6 / 1.2, abs=0.01)
    rows = {
        float(label): float(y)
        for y, label in re.findall(
            r'y1="([\d.]+)" y2="\1"/><text [^>]*text-anchor="end">([-\d.]+)<', svg
        )
    }
    assert list(rows) == pytest.approx([-0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert rows[1.0] == pytest.approx(most, abs=0.1)
    assert rows[0.4] == pytest.approx(middle, abs=0.1)


@pytest.mark.parametrize("curves", [[], [ErrorCurve("flat", (0,), (0,), (1.0,), 1.0)]])
def test_curves_without_points_are_no_picture(curves):
    assert svg_curves(curves) == ""
    assert "<svg" not in html_report(compression((replace(LAYER, parameters=0),)), curves)


def test_the_summary_for_a_notebook_is_escaped():
    text = Compression(record().source, record().plan, record().layers, ())._repr_html_()
    assert "my &amp; adapter" in text
    assert "4.10" in text


def test_labels_stand_in_the_margin_at_their_lines_and_not_over_each_other():
    near = [
        replace(CURVE, label=f"curve {i}", relative_errors=(1.0, 0.5, 0.25 + 0.001 * i, 0.0))
        for i in range(3)
    ]
    svg = svg_curves(near, lora=6144)
    ends = [float(y) for y in re.findall(r'<polyline class="c\d" points="[^"]*,([\d.]+)"', svg)]
    labels = {
        int(i): float(y) - 4.0 for i, y in re.findall(r'class="t(\d)" x="596.0" y="([\d.]+)"', svg)
    }
    heights = sorted(labels.values())
    assert max(ends) - min(ends) < 2.0, "lines that end together"
    assert labels[2] == min(ends), "the highest is at its line"
    assert all(below - above >= 18.9 for above, below in pairwise(heights))
