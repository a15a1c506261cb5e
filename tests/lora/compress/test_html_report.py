"""The HTML report: complete, self-contained, escaped, small."""

import re
import sys
from dataclasses import dataclass, replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from lsrdecomp.analysis import ErrorCurve
from lsrdecomp.lora.base import Behaviour
from lsrdecomp.lora.compress import truncate
from lsrdecomp.lora.compress.cut_report import cut_report
from lsrdecomp.lora.compress.html_report import html_report
from lsrdecomp.lora.compress.report_charts import (
    SIZES,
    Series,
    _place_labels,
    error_charts,
    share_charts,
)
from lsrdecomp.lora.files import open_checkpoint
from lsrdecomp.lora.measure import Fidelity, Measurement
from lsrdecomp.lora.measure.fidelity import AnswerPair
from lsrdecomp.lora.search.plan import CompressionPlan
from lsrdecomp.lora.search.result import Compression, LayerReport

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

    VOID = ("meta", "br", "wbr")

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
    assert "(24×4 ⊗ 16×2)(4×24 ⊗ 2×16)" in text
    assert "ab" * 32 in text
    assert "4 × 2" in text, "the plan's inner shape"
    assert sum(tag == "tr" for tag, _ in page.tags) == 2 * 4, "two tables"


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
    assert "output error (est.)" in text
    assert "Output error (Fisher norm) 0.125" in text
    assert page.texts.count("0.125") == 4, "each layer, the worst and the total"
    assert sum(tag == "td" for tag, _ in page.tags) == 2 * (5 + 8)


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


def test_a_measured_result_shows_what_its_versions_keep_and_no_error_curve():
    fidelity = Fidelity.of(BEHAVIOUR, **FACTS)
    tried = (Measurement(24_000, 6000, 0.97), Measurement(12_000, 3000, 0.7, 0.9, 60))
    page = html_report(compression((LAYER,), fidelity=fidelity, tried=tried), [CURVE])
    assert "What is kept at which size" in page
    assert "Weight error at each size" not in page
    points, _ = drawn(charts(page)["wide-chart"], "c0")
    assert len(points) == 2, "one point a version"
    (kept_x, kept_y), (trained_x, trained_y) = points
    assert trained_x < kept_x, "smaller files stand left"
    assert trained_y > kept_y, "a larger share stands higher"
    assert "<td>12,000</td><td>3,000</td><td>70.0 %</td><td>90.0 %</td>" in page


def test_answers_stand_side_by_side_and_those_that_differ_are_marked():
    fidelity = Fidelity.of(BEHAVIOUR, **FACTS, answered=32, n_matching=31)
    answers = (AnswerPair("<why?>", "good", "bad"), AnswerPair("how?", "good", "good"))
    page = html_report(compression((LAYER,), fidelity=fidelity, answers=answers))
    assert '<tr class="differs"><td>&lt;why?&gt;</td><td>good</td><td>bad</td></tr>' in page
    assert "<tr><td>how?</td><td>good</td><td>good</td></tr>" in page
    assert "The same answer to 31 of 32 texts" in page


def test_nothing_can_be_loaded_and_every_name_is_escaped():
    page = html_report(compression((replace(LAYER, name="<script>alert(1)</script>"),)), [CURVE])
    assert not re.search(r"""src\s*=|href\s*=\s*"[^#]|url\([^#]|@import|https?:""", page)
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
    assert len(cells) == 3 * (4 + 8)
    assert all("data-v" in attributes for attributes in cells)
    heads = [attributes for tag, attributes in page.tags if tag == "th"]
    assert [head["aria-sort"] for head in heads] == ["none"] * (4 + 8)


def test_what_was_written_is_listed(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"0" * 1234)
    page = html_report(record(), out=tmp_path)
    assert "1,234 bytes" in page
    assert "import lsrdecomp.lora.peft" in page


def charts(page):
    """Return the charts of a page by class, as text."""
    found = re.findall(r'<svg class="([\w-]+)".*?</svg>', page, flags=re.DOTALL)
    return dict(zip(found, re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL), strict=True))


def drawn(svg, colour):
    """Return the places of the markers of one colour of the page, and of its lines."""
    of_colour = r"[^>]*(?:fill|stroke): var\(--" + colour
    markers = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"' + of_colour, svg)
    paths = re.findall(r'<path d="([^"]+)"[^>]*stroke: var\(--' + colour + r"\)", svg)
    return [(float(x), float(y)) for x, y in markers], paths


def view_box(svg):
    return tuple(map(float, re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()))


def test_curves_lie_where_their_numbers_are():
    """Both axes are logarithmic: equal factors are equal distances."""
    curve = ErrorCurve("SVD", (0, 1, 2, 3), (0, 1000, 2000, 4000), (1.0, 0.5, 0.25, 0.125), 1.0)
    for svg in charts(error_charts([curve], (1000.0, 0.5), 6144)).values():
        points, _ = drawn(svg, "c0")
        assert len(points) == 3, "zero parameters are not drawn"
        (x0, y0), (x1, y1), (x2, y2) = points
        assert x1 - x0 == pytest.approx(x2 - x1, abs=0.01)
        assert y1 - y0 == pytest.approx(y2 - y1, abs=0.01)
        assert y1 > y0, "down the page is a smaller error"
        assert x1 > x0, "right is larger"
        assert drawn(svg, "fg")[0] == [points[0]], "what was written has a ring"


def test_a_picture_of_shares_is_linear_and_shows_what_was_asked_for():
    series = [Series("LSR, as compressed", [(1000.0, 0.2), (2000.0, 0.4), (4000.0, 0.8)])]
    for svg in charts(share_charts(series, (2000.0, 0.4, 0.05), 0.6)).values():
        points, paths = drawn(svg, "c0")
        (_, least), (_, middle), (_, most) = points
        assert (least - middle) / (least - most) == pytest.approx(0.2 / 0.6, abs=0.001)
        assert not [path for path in paths if path.count("L") > 2 and "C" not in path], "not joined"
        assert "asked for 60 %" in svg
        assert {"1 kB", "2 kB", "3 kB", "4 kB"} & set(re.findall(r">([^<]+)</text>", svg))
        assert "LSR, as compressed" in svg


@pytest.mark.parametrize(
    ("sizes", "errors"),
    [
        ((900, 1100), (0.9, 0.8)),
        ((900, 1100), (0.9, 0.001)),
        ((1000, 2000, 40_000), (0.9, 0.2)),
        ((10, 10**4, 10**7), (0.9, 0.8)),
        ((10, 10**4, 10**7), (0.9, 0.001)),
    ],
)
def test_all_that_is_drawn_is_on_the_page_and_no_label_is_cut(sizes, errors):
    ends = np.geomspace(*errors, len(sizes))
    near = tuple(0.97 * error for error in ends)
    curves = [
        ErrorCurve("a curve with a name", range(len(sizes)), sizes, tuple(ends), 1.0),
        ErrorCurve("another with a name", range(len(sizes)), sizes, near, 1.0),
    ]
    page = error_charts(curves, (float(sizes[0]), errors[0]), 2 * sizes[-1])
    assert list(charts(page)) == ["wide-chart", "narrow-chart"]
    for svg in charts(page).values():
        width, height = view_box(svg)
        points = drawn(svg, "c0")[0] + drawn(svg, "c1")[0]
        assert len(points) == 2 * len(sizes)
        assert all(0.0 < x < width and 0.0 < y < height for x, y in points)
        texts = re.findall(
            r'<text style="([^"]*)"[^>]* x="([\d.]+)" y="([\d.]+)"[^>]*>([^<]+)', svg
        )
        named = [row for row in texts if "name" in row[3] or row[3] in ("written", "the LoRA")]
        assert len(named) == 4
        heights = []
        for style, x, y, text in named:
            size = float(re.search(r"([\d.]+)px", style)[1])
            assert float(x) >= 0.0
            assert float(x) + 0.56 * size * len(text) <= width + 1.0, text
            heights.append(float(y))
        curves_at = sorted(y for y, row in zip(heights, named, strict=True) if "name" in row[3])
        assert curves_at[1] - curves_at[0] > 8.0, "labels of lines that end together are apart"


def test_without_matplotlib_the_page_says_so_in_place_of_the_chart(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = html_report(record(), [CURVE])
    assert "<svg" not in page
    assert "No chart: a picture needs matplotlib" in page
    assert "4,500 of 18,432 parameters" in page


def test_charts_take_their_colours_from_the_page_and_leave_matplotlib_as_it_was():
    import matplotlib

    before = dict(matplotlib.rcParams)
    svg = error_charts([CURVE], (1000.0, 0.5), 6144)
    assert dict(matplotlib.rcParams) == before
    assert not re.search(r"(fill|stroke): #(?!ffffff|000000)", svg), "light and dark"
    assert svg == error_charts([CURVE], (1000.0, 0.5), 6144), "the same bytes in each run"
    identifiers = re.findall(r'\bid="([^"]+)"', svg)
    assert len(identifiers) == len(set(identifiers))
    assert {name.lstrip("#") for name in re.findall(r'href="([^"]+)"', svg)} <= set(identifiers)


def test_the_layers_that_cost_most_stand_first_and_the_bar_is_in_the_norm_of_the_plan():
    layers = (
        replace(LAYER, name="a", functional_norm=1.0, functional_error=0.1, relative_error=3.5),
        replace(LAYER, name="b", functional_norm=9.0, functional_error=0.2, relative_error=0.1),
    )
    page = html_report(compression(layers))
    rows = re.findall(r'<tr><td data-v="(\w)" class="name">', page)
    assert rows == ["b", "a", "b", "a"], "of both tables"
    assert re.findall(r'<td data-v="([\d.]+)" class="bar"', page) == ["0.2", "0.1"]
    assert "largest output error (est.) of a layer: b" in page


def test_the_run_is_named_with_its_settings_and_can_be_repeated():
    settings = {"keep": 0.8, "base": "a base", "data": "texts.txt", "truncate": True}
    fidelity = Fidelity.of(BEHAVIOUR, **FACTS, requested=0.8)
    result = compression((LAYER,), fidelity=fidelity, settings=settings, created="2026-01-31")
    text = " ".join(Page(html_report(result)).texts)
    assert "Asked for 80 % of the LoRA's effect: it keeps 90.0 ± 1.0 % on 128 held-out" in text
    for words in ("2026-01-31", "texts.txt", "a base", "12 kB of 3.7 MB"):
        assert words in text
    assert "--keep 0.8 --base 'a base' --data texts.txt --truncate --out OUT" in text


@pytest.mark.parametrize("curves", [[], [ErrorCurve("flat", (0,), (0,), (1.0,), 1.0)]])
def test_curves_without_points_are_no_picture(curves):
    assert error_charts(curves, None, 6144) == ""
    assert "<svg" not in html_report(compression((replace(LAYER, parameters=0),)), curves)


def test_the_summary_for_a_notebook_is_escaped():
    text = Compression(record().source, record().plan, record().layers, ())._repr_html_()
    assert "my &amp; adapter" in text
    assert "4.10" in text


@pytest.mark.parametrize(
    ("labels", "is_moved"),
    [
        ({"m" * 40: 0.0, "second": 0.2}, True),
        ({"m" * 40: 0.0, "second": 0.7}, False),
        ({"second": 0.2, "m" * 40: 0.0}, True),
        ({"second": 0.7, "m" * 40: 0.0}, False),
    ],
)
def test_a_label_moves_down_only_where_another_would_be_written_over(labels, is_moved):
    pyplot = pytest.importorskip("matplotlib.figure", reason="charts are drawn by matplotlib")
    figure = pyplot.Figure(figsize=(8.0, 4.0))
    ax = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    ax.set_xlim(0.0, 1.0)
    ax.set_ylim(0.0, 1.0)
    size = SIZES[0]
    _place_labels(ax, [(text, x, 0.5, "black") for text, x in labels.items()], size)
    heights = [text.get_position()[1] * 4.0 * 72.0 for text in ax.texts]
    assert heights[0] - heights[1] == pytest.approx(1.35 * size.font_size * is_moved, abs=1e-6)


def test_the_page_of_a_cut_has_what_was_measured_and_the_ranks():
    cut = truncate(open_checkpoint(files("lsrdecomp.cli") / "demo_adapter"), ratio=4)
    behaviour = Behaviour(128, 3000, "token", 0.1, 0.99, 1.0, 0.008)
    sizes = {"bytes_before": 2000, "bytes_after": 1000}
    fidelity = Fidelity.of(behaviour, data="d", base="b", **sizes)
    page = cut_report(replace(cut, fidelity=fidelity))
    assert "90.0 ± 0.8 %" in Page(page).texts
    for layer, rank in zip(cut.layers, cut.ranks, strict=True):
        assert f"<td>{layer.rank}</td><td>{rank}</td>" in page
