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


def project_in(folder):
    (folder / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "0.5.0.dev0"\n')
    (folder / "CITATION.cff").write_text("version: 0.4.0\ndate-released: 2026-01-01\n")
    (folder / "CHANGELOG.md").write_text(LOG.replace("(2026-12-01)", "(unreleased)"))
    return folder


def said(folder):
    project = release.tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    texts = ((folder / name).read_text() for name in ("CHANGELOG.md", "CITATION.cff"))
    changelog, citation = texts
    return list(release.version_faults(project, changelog, f"\n{citation}"))


def test_a_version_that_is_set_is_one_that_can_be_released_and_the_next_one_is_not(tmp_path):
    folder = project_in(tmp_path)
    assert said(folder)
    release.set_version("0.5.0", folder)
    assert said(folder) == []
    assert "0.5.0 (20" in (folder / "CHANGELOG.md").read_text()
    assert "2026-01-01" not in (folder / "CITATION.cff").read_text()
    following = release.next_version("0.5.0")
    assert following == "0.5.1.dev0"
    release.set_version(following, folder)
    assert "\n## 0.5.1 (unreleased)\n\n## 0.5.0 (20" in (folder / "CHANGELOG.md").read_text()
    assert said(folder)
    release.set_version("0.5.1", folder)
    assert said(folder) == []


@pytest.mark.parametrize("version", ["0.5", "v0.5.0", "0.6.0"])
def test_a_version_that_is_none_or_is_not_in_the_changelog_sets_nothing(version, tmp_path):
    folder = project_in(tmp_path)
    before = {path.name: path.read_text() for path in folder.iterdir()}
    with pytest.raises(SystemExit):
        release.set_version(version, folder)
    assert before == {path.name: path.read_text() for path in folder.iterdir()}


def test_what_an_audit_does_not_know_is_no_pass():
    known = {"name": "torch", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": []}]}
    sound = {"name": "rich", "version": "15.0", "vulns": []}
    skipped = {"name": "scipy", "skip_reason": "Dependency not found on PyPI"}
    assert list(release.audit_faults({"dependencies": [sound]})) == []
    (found,) = release.audit_faults({"dependencies": [sound, known]})
    assert found == "torch 2.0: PYSEC-1, mended in no version"
    (found,) = release.audit_faults({"dependencies": [sound, skipped]})
    assert found.startswith("not checked: known vulnerabilities of 1 packages")


def test_a_list_of_what_is_brought_is_whole_and_has_licences():
    def component(name, licence):
        licences = [{"license": {"name": licence}}] if licence else None
        return {"name": name, "licenses": licences}

    report = {"components": [component("typing_extensions", "PSF-2.0"), component("rich", "MIT")]}
    assert list(release.sbom_faults(report, ["rich>=14", "Typing.Extensions>=4"])) == []
    (found,) = release.sbom_faults(report, ["rich>=14", "numpy>=1.26"])
    assert found == "sbom.json lacks numpy>=1.26, which the package requires"
    report["components"] += [component("a", ""), component("b", "GPL-3.0"), component("c", "LGPL")]
    first, second = release.sbom_faults(report, [])
    assert first == "not checked: the licence of a, which tells none"
    assert second.startswith("b is under")


def test_tools_that_are_not_installed_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(release, "find_spec", lambda name: None)
    found = list(release.supply_faults(tmp_path, []))
    assert [fault.split(":")[0] for fault in found] == ["not checked", "not checked"]
    assert "install pip-audit" in found[0]
    assert "install cyclonedx-bom" in found[1]


def test_a_tool_that_fails_is_told(tmp_path, monkeypatch):
    failed = release.subprocess.CompletedProcess([], 1, "", "first\nno such index\n")
    monkeypatch.setattr(release, "find_spec", lambda name: True)
    monkeypatch.setattr(release, "_run", lambda *words: failed)
    found = list(release.supply_faults(tmp_path, []))
    assert len(found) == 2
    assert all(fault.startswith("not checked") and "no such index" in fault for fault in found)


@pytest.mark.parametrize("wheels", [[], ["lsrdecomp-0.0.1-py3-none-any.whl"]])
def test_a_directory_without_the_wheel_of_this_version_is_no_pass(wheels, tmp_path, monkeypatch):
    monkeypatch.setattr(release, "find_spec", lambda name: None)
    for name in wheels:
        with release.zipfile.ZipFile(tmp_path / name, "w") as archive:
            archive.writestr("lsrdecomp/py.typed", "")
    assert any("should hold lsrdecomp-" in fault for fault in release.faults(tmp_path))
    assert any("name the directory" in fault for fault in release.faults(None))


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
