"""The site: every page is reached, every block of code runs, every example draws its picture."""

import ast
import importlib
import importlib.util
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
EXAMPLES = sorted((ROOT / "examples").glob("plot_*.py"))
FENCE = re.compile(r"^( *)```(\S*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINKED = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md"))]
FIGURE = re.compile(
    r"\d[\d,.]*\s?%"  # percentages
    r"|(?<![\w/.])\d+/\d+(?![\w/])"  # ratios
    r"|(?<![\w.])\d+\.\d+(?![\w.])|\d+·10|\d+e-\d+"  # decimals
    r"|\b(?:\d[\d.,]*|two|three|four|five|six|seven|eight|nine|ten) times\b"
    r"|\d\s?(?:kB|MB|GB|nats|seconds|minutes)\b"
)
"""What counts as a figure in the prose of a page: a number that somebody measured."""
MOST_FIGURES = 5
README_LIMITS = 10
"""Figures that README may hold beyond these: its section on limits is evidence."""
NOT_OURS = {"upstream-peft.md"}
"""Pages that show code for another project."""


def names(pages):
    return [str(page.relative_to(ROOT)) for page in pages]


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_python_on_a_page_is_doctested(page):
    """`pytest` runs what has a prompt, by `doctest-glob`; a block without one would not run."""
    for _, language, block in FENCE.findall(page.read_text(encoding="utf-8")):
        if language in ("python", "py", "pycon") and page.name not in NOT_OURS:
            assert block.lstrip().startswith(">>>"), f"not run by the tests:\n{block}"


def prose(page):
    """A page without code, formulas, targets of links and references."""
    text = re.split(r"^## References$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[0]
    text = FENCE.sub("", text)
    text = re.sub(r"`[^`]*`|\$\$.*?\$\$|\$[^$\n]*\$", "", text, flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)|<!--.*?-->|^:.*$", "", text, flags=re.MULTILINE | re.DOTALL)


NO_EVIDENCE = [page for page in PAGES if page.parent.name != "evidence"] + [ROOT / "README.md"]


@pytest.mark.parametrize("page", NO_EVIDENCE, ids=names(NO_EVIDENCE))
def test_a_page_that_is_no_evidence_holds_few_figures(page):
    """Guides say what to type, references what it means; tables of results are elsewhere."""
    limit = MOST_FIGURES + (page.name == "README.md") * README_LIMITS
    found = FIGURE.findall(prose(page))
    assert len(found) <= limit, found
    assert "```{results}" not in page.read_text(encoding="utf-8")


def test_a_figure_would_be_seen(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "It keeps 95 % in 2.5 kB, 1/96 of it, 0.92 and three times.\n\n```text\n97 %\n```\n"
        "`--keep 0.9`\n",
        encoding="utf-8",
    )
    assert len(FIGURE.findall(prose(page))) == 5


COMMAND = re.compile(r"^(?:\$ )?(lsrdecomp [a-z].*(?:\\\n.*)*)", re.MULTILINE)


def typed_commands():
    """Each command of ours that stands on a page: in a block, or by itself in a line of text."""
    for page in [*PAGES, ROOT / "README.md"]:
        text = page.read_text(encoding="utf-8")
        blocks = [block for _, _, block in FENCE.findall(text)]
        spans = re.findall(r"`(lsrdecomp [a-z][^`]*)`", text)
        for command in (*(each for block in blocks for each in COMMAND.findall(block)), *spans):
            yield page.name, " ".join(command.replace("\\\n", " ").split())


def test_every_typed_command_has_options_that_exist():
    import typer

    from lsrdecomp.cli.app import app

    verbs = typer.main.get_command(app).commands
    seen = 0
    for page, command in typed_commands():
        _, verb, *words = command.partition("#")[0].split()
        if verb == "VERB":
            continue
        assert verb in verbs, f"{page}: {command}"
        known = {
            name
            for parameter in verbs[verb].params
            for name in (*parameter.opts, *parameter.secondary_opts)
        } | {"-h", "--help", "--help-all"}
        used = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert used <= known, f"{page}: {command}"
        seen += 1
    assert seen > 60


def test_extras_are_installed_by_one_line_everywhere():
    """The package is on no index: what is typed works in a clone, and is the line of the errors."""
    from lsrdecomp.errors import INSTALL_EXTRA

    tracked = [
        *LINKED,
        *(ROOT / "lsrdecomp").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
    ]
    found = []
    for path in tracked:
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"pip install[^\n`]*lsrdecomp\[", text), path
        for command, extra in re.findall(r"(pip install [^\n\[`]*\.\[([\w,]+)\]['\"]?)", text):
            if "{extra}" not in command:
                assert command == INSTALL_EXTRA.format(extra=extra), path
                found.append(path)
    assert len(found) >= 5


def anchors(page):
    """Headings of a page as the site makes anchors of them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", LINKED, ids=names(LINKED))
def test_links_between_pages_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", text):
        if "://" in target:
            continue
        place = (page.parent / target).resolve() if target else page
        if "auto_examples" in target:
            stem = re.sub(r"^sphx_glr_(\w+)_\d+$", r"\1", Path(target).stem)  # a program's picture
            assert stem == "index" or (ROOT / "examples" / f"{stem}.py").exists(), target
        else:
            assert place.exists(), target
            assert not anchor or anchor in anchors(place), f"{target}#{anchor}"


def test_every_page_is_in_a_table_of_contents():
    listed = set()
    for page in PAGES:
        for block in re.findall(
            r"```\{toctree\}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL
        ):
            lines = (line for line in block.splitlines() if line and not line.startswith(":"))
            listed |= {(page.parent / line).resolve() for line in lines}
    missing = {page.name for page in PAGES if page.with_suffix("") not in listed} - {"index.md"}
    assert missing == set(), "add these to a toctree"


def extension(name):
    spec = importlib.util.spec_from_file_location(
        f"page_{name}", DOCS / "_extensions" / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_of_results_are_made_from_files_that_are_here():
    tables = extension("result_tables")
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    used = re.findall(r"```\{results\} (\S+)", text)
    assert set(used) == set(tables.TABLES)
    for name in used:
        head, rows = tables.table(name)
        assert rows
        assert all(len(row) == len(head) for row in rows)


def test_the_reference_has_every_room():
    listed = set(
        re.findall(
            r"^   (lsrdecomp\S*)$",
            (DOCS / "api" / "index.md").read_text(encoding="utf-8"),
            re.MULTILINE,
        )
    )
    rooms = {
        ".".join(stub.parent.relative_to(ROOT).parts)
        for stub in (ROOT / "lsrdecomp").rglob("__init__.pyi")
    }
    assert rooms <= listed


def test_every_public_name_says_what_it_is_in_a_sentence():
    for room in re.findall(
        r"^   (lsrdecomp\S*)$",
        (DOCS / "api" / "index.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    ):
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", ()):
            assert len((getattr(module, name).__doc__ or "").split("\n")[0]) >= 8, f"{room}.{name}"


def test_the_commands_on_the_pages_run():
    shell = extension("commands")
    seen = 0
    for page in PAGES:
        session = None
        for commands in shell.blocks(page.read_text(encoding="utf-8")):
            session = session or shell.Shell()
            for command in commands:
                # The site trains to the end
                short = re.sub(
                    r"--epochs \d+",
                    "--steps 4 --set train_examples=60 --set dev_examples=20",
                    command,
                )
                assert session.run(short).strip(), command
                seen += 1
    assert seen >= 5


def test_there_are_at_least_ten_examples():
    assert len(EXAMPLES) >= 10


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
def test_an_example_draws_its_picture(example, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.close("all")
    monkeypatch.setattr(plt, "show", lambda: None)
    runpy.run_path(str(example))
    figures = [plt.figure(number) for number in plt.get_fignums()]
    assert figures
    for figure in figures:
        figure.canvas.draw()
        assert any(ax.has_data() for ax in figure.axes)
        for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
            label = axis.get_label_text()
            assert axis.get_scale() != "log" or not label or "log scale" in label, label
    plt.close("all")


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.stem for example in EXAMPLES])
def test_an_example_begins_with_its_title(example):
    title, line, _ = ast.get_docstring(ast.parse(example.read_text(encoding="utf-8"))).split(
        "\n", 2
    )
    assert set(line) == {"="}
    assert len(line) >= len(title)


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    for package in ("sphinx", "myst_parser", "pydata_sphinx_theme", "sphinx_gallery", "numpydoc"):
        pytest.importorskip(package)
    options = ["-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, str(DOCS), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / "index.html").exists()
    assert len(list((tmp_path / "auto_examples").glob("plot_*.html"))) == len(EXAMPLES)


def test_each_row_of_the_paper_has_a_state_and_its_test_exists():
    text = (DOCS / "evidence" / "paper-checked.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("| ").split(" | ")]
        for line in text.splitlines()
        if line.startswith("| ") and not line.startswith("| Place")
    ]
    states = {"holds", "wrong", "not reproduced", "not run"}
    unclear = [row[:2] for row in rows if row[2] not in states]
    assert (len(rows) > 35, unclear) == (True, [])
    for path, test in re.findall(r"`(tests/\S+\.py)::(\w+)`", text):
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{test}"


STUMBLED_ON = (
    "forms were measured",
    "of what the adapter does",
    "each with a head of",
    "include a head of",
    "how close the answers are",
    "closeness of numbers",
    "closeness of answers",
    "as it came",
    "as few bits as serve",
    "SVD in bits",
    "Examples of the promise",
    "if the loss was lost",
    "Most tokens of an example",
    "Training steps at most",
    "have no arithmetic",
    "give one of rtol (None)",
    "is, holds or lies inside",
    "the two sides differ by",
    "got no answer right",
    "stored by columns",
    "all sides above five",
    "had hoped",
    "likeliest answer",
    "likeliest token",
    "is hard to beat there.",
)
"""What outsiders stumbled on, in the words of before."""
READ_BY_USERS = [
    *PAGES,
    ROOT / "README.md",
    *sorted((ROOT / "lsrdecomp").rglob("*.py")),
    *sorted((ROOT / "docs" / "_extensions").glob("*.py")),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "examples" / "notebooks").glob("*.ipynb")),
]


@pytest.mark.parametrize("words", STUMBLED_ON)
def test_sentences_that_outsiders_stumbled_on_are_gone(words):
    """Comments and docstrings count too: the words of the code are those of the pages."""
    pattern = re.compile(r"(?<!\w)" + re.escape(words).replace(r"\ ", r'[\s"#]+f?"?'))
    found = [str(path.relative_to(ROOT)) for path in READ_BY_USERS if pattern.search(text_of(path))]
    assert found == []


def text_of(path):
    return path.read_text(encoding="utf-8")


def test_readme_is_read_in_two_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 450


def test_readme_says_the_two_commands_for_a_fresh_machine():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").split("\n")
    typed = [line.partition("#")[0].strip() for line in lines]
    targets = (ROOT / "Makefile").read_text()
    for command in ("make demo", "make test"):
        assert command in typed
        assert f"\n{command.partition(' ')[2]}:" in targets
    assert "make test" in (ROOT / ".ci" / "run").read_text().split("\n")
