"""Pages of the built site in headless Chromium, wide and narrow: no error on the console.

Needs Chromium and a built site (`make docs`); CI has both.
"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SITE = Path(os.environ.get("LSRDECOMP_SITE", ROOT / "docs" / "_build" / "html"))
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
PAGES = (
    "index",
    "guides/compress-a-lora",
    "evidence/index",
    "auto_examples/index",
    "api/index",
    "reference/notation",
)
WIDTHS = (1280, 390)


def console(url, width, place):
    """What the page wrote to the console, and its text after scripts ran."""
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--virtual-time-budget=8000",
        "--dump-dom",
    ]
    options += [
        "--enable-logging=stderr",
        "--v=0",
        f"--user-data-dir={place}",
        f"--window-size={width},1000",
    ]
    done = subprocess.run(
        [CHROMIUM, *options, url], capture_output=True, text=True, timeout=120, check=False
    )
    return [line for line in done.stderr.splitlines() if ":CONSOLE" in line], done.stdout


NOTEBOOK = """<style>* { font-size: 40px !important; } td { display: none !important; }</style>
<div id="cell"></div><script>document.getElementById("cell").innerHTML = INSERTED;</script>"""
LOOK = """<script>
const root = document.querySelector(".lsrdecomp-report").shadowRoot;
const width = document.documentElement.clientWidth;
const scrolls = (node) => node.closest(".scroll") !== null;
const beyond = [...root.querySelectorAll("main *")]
  .filter((node) => !scrolls(node) && node.getBoundingClientRect().right > width + 1)
  .map((node) => node.tagName);
parent.postMessage({ rows: root.querySelectorAll("tr").length, beyond,
  size: getComputedStyle(root.querySelector("main")).fontSize }, "*");
</script>"""
"""Counts rows of a report, what lies beyond the right edge, and the size of its words."""


WRITTEN = sorted(
    str(page.relative_to(ROOT / "docs").with_suffix(""))
    for page in (ROOT / "docs").rglob("*.md")
    if "_build" not in page.parts
)
TALLEST = 6000
"""Pixels of the longest page, at the width of a laptop."""
MEASURE = """<script>addEventListener("load", () => {
const width = document.documentElement.clientWidth;
const scrolls = (node) => {
  for (let at = node; at && at !== document.body; at = at.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(at).overflowX)) return true;
  return false;
};
const cut = [...document.querySelectorAll(".bd-article *")]
  .filter((node) => node.getBoundingClientRect().right > width + 1 && !scrolls(node))
  .map((node) => `${node.tagName}: ${node.textContent.slice(0, 60)}`);
parent.postMessage({ cut, height: document.documentElement.scrollHeight }, "*");
});</script></body>"""
"""Lists what lies beyond the right edge and cannot be scrolled to, and the height of a page."""


def framed(url, width, folder):
    """What a page wrote to the console, and what it posts, in a frame of that width.

    A window of Chromium is never narrower than 500 pixels.
    """
    (folder / "frame.html").write_text(
        f'''<body><iframe src="{url}" style="width:{width}px;height:1000px;border:0"></iframe>
        <script>addEventListener("message", (told) => {{
        const seen = document.createElement("pre");
        seen.id = "seen";
        seen.textContent = JSON.stringify(told.data);
        document.body.append(seen); }});</script></body>''',
        encoding="utf-8",
    )
    lines, text = console((folder / "frame.html").as_uri(), width + 20, folder / "profile")
    return lines, json.loads(html.unescape(re.search(r'<pre id="seen">(.*?)</pre>', text)[1]))


def unwelcome(lines):
    return [line for line in lines if "ncaught" in line or "rror" in line or "ailed" in line]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_an_error_on_the_console_would_be_seen(tmp_path):
    (tmp_path / "bad.html").write_text(
        "<p>x</p><script>throw new Error('planted')</script>", encoding="utf-8"
    )
    lines, _ = console((tmp_path / "bad.html").as_uri(), 1280, tmp_path / "profile")
    assert any("planted" in line for line in unwelcome(lines))


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.skipif(not (SITE / "index.html").exists(), reason="needs the built site: make docs")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_a_page_opens_without_an_error(page, width, tmp_path):
    lines, text = console((SITE / f"{page}.html").as_uri(), width, tmp_path / "profile")
    assert "lsrdecomp" in text
    assert unwelcome(lines) == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.skipif(not (SITE / "index.html").exists(), reason="needs the built site: make docs")
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", WRITTEN)
def test_nothing_of_a_page_is_cut_and_none_is_endless(page, width, tmp_path):
    built = SITE / f"{page}.html"
    measured = built.with_name(f"{built.stem}-measured-{width}.html")
    text = built.read_text(encoding="utf-8").replace("</body>", MEASURE)
    measured.write_text(text, encoding="utf-8")
    try:
        _, seen = framed(measured.as_uri(), width, tmp_path)
    finally:
        measured.unlink()
    assert seen["cut"] == []
    assert width < 1000 or seen["height"] <= TALLEST


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", WIDTHS)
def test_the_report_of_a_compression_runs_without_an_error(width, tmp_path):
    import lsrdecomp as lsr

    demo = Path(lsr.__file__).parent / "cli" / "demo_adapter"
    result = lsr.compress(demo, separation_rank=2, inner_shape=(2, 4))
    page = lsr.lora.compress.html_report(result, lsr.lora.search.adapter_curves(result.source))
    # A page with styles of its own around it, as a notebook is, that knows of no shadow root
    inserted = page[page.index('<div class="lsrdecomp-report">') : page.index("<script>")]
    script = page[page.index("<script>") : page.index("</script>") + len("</script>")]
    for name, text in (("report", page), ("notebook", f"<body>{NOTEBOOK}")):
        text = text.replace("INSERTED", json.dumps(inserted).replace("</", "<\\/"))
        text = text.replace("</body>", "") + (script if name == "notebook" else "") + LOOK
        (tmp_path / f"{name}.html").write_text(text, encoding="utf-8")
        lines, seen = framed((tmp_path / f"{name}.html").as_uri(), width, tmp_path)
        assert unwelcome(lines) == []
        assert seen["rows"] == 2 * 13, "twelve layers and a heading in each of two tables"
        assert seen["beyond"] == []
        assert seen["size"] == "15px", "styles of a notebook do not reach in"
