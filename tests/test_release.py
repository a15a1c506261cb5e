"""What `make release` looks at: each check finds what it is for."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
release = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(release)

CITED = "\nversion: 0.5.0\n"
LOG = "# Changelog\n\n## 0.5.0 (2026-12-01)\n\n## 0.4.1\n"


@pytest.mark.parametrize(
    ("version", "changelog", "citation", "expected"),
    [
        ("0.5.0", LOG, CITED, []),
        ("0.4.0", LOG, "\nversion: 0.4.0\n", ["begins with 0.5.0", "not newer than 0.4.1"]),
        ("0.5.0", LOG.replace("(2026-12-01)", "(unreleased)"), CITED, ["unreleased"]),
        ("0.5.0", LOG, "\nversion: 0.4.0\n", ["CITATION.cff"]),
        ("0.5.0.dev0", LOG, CITED, ["begins with", "no version of a release", "CITATION.cff"]),
    ],
)
def test_version_and_changelog_agree(version, changelog, citation, expected):
    found = list(release.version_faults({"version": version}, changelog, citation))
    assert len(found) == len(expected)
    for fault, words in zip(found, expected, strict=True):
        assert words in fault


def test_links_are_asked_for():
    assert len(list(release.link_faults({}))) == 4
    urls = dict.fromkeys(("Source", "Documentation", "Changelog", "Issues"), "https://example.org")
    assert not list(release.link_faults({"urls": urls}))


def test_every_action_is_pinned_by_the_hash_of_a_commit():
    assert list(release.action_faults({"a.yml": "  - uses: actions/checkout@v5\n"}))
    workflows = {
        path.name: path.read_text(encoding="utf-8")
        for path in (ROOT / ".github" / "workflows").glob("*.yml")
    }
    assert workflows
    assert not list(release.action_faults(workflows))


def test_no_name_comes_or_goes_unseen():
    page = release.STABILITY.read_text(encoding="utf-8")
    public = release.public_names()
    assert not list(release.name_faults(public, release.promised_names(page)))
    public["lsrdecomp"] = (public["lsrdecomp"] - {"decompose"}) | {"new"}
    found = list(release.name_faults(public, release.promised_names(page)))
    assert [fault.split()[0] for fault in found] == ["lsrdecomp.new", "lsrdecomp.decompose"]


def test_the_wheel_holds_what_is_listed():
    """The list is that of the package here; a wheel is looked at by `make release`."""
    files = {
        path.relative_to(ROOT).as_posix(): max(1, path.stat().st_size)
        for path in (ROOT / "lsrdecomp").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    files["lsrdecomp-0.5.0.dist-info/licenses/LICENSE"] = 1
    assert not list(release.wheel_faults(files, 1_000_000))
    files["lsrdecomp/cli/demo_adapter/secret.bin"] = 1
    del files["lsrdecomp/py.typed"], files["lsrdecomp-0.5.0.dist-info/licenses/LICENSE"]
    found = " ".join(release.wheel_faults(files, 9_000_000))
    for words in ("secret.bin", "lacks lsrdecomp/py.typed", "no LICENSE", "9,000,000"):
        assert words in found
