"""Public names of 0.3 that changed work until 0.5, warn, and are in the changelog's table."""

import importlib
from pathlib import Path

import pytest

from lsrdecomp import _renamed


@pytest.mark.parametrize(("old", "new"), _renamed.NAMES.items())
def test_an_old_name_warns_and_is_the_new_one(old, new):
    old_room, _, old_name = old.rpartition(".")
    new_room, _, new_name = new.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        found = getattr(importlib.import_module(old_room), old_name)
    assert found is getattr(importlib.import_module(new_room), new_name)


def test_an_old_attribute_warns_and_reads_the_new_one(monkeypatch):
    monkeypatch.setitem(_renamed.ATTRIBUTES, "Result", {"promise": "held_out"})

    @_renamed.keep_old_attributes
    class Result:
        held_out = 0.9

    with pytest.warns(DeprecationWarning, match=r"Result\.promise is now Result\.held_out"):
        assert Result().promise == 0.9


def test_the_changelog_maps_every_old_name_to_its_new_one():
    changelog = Path(__file__).parents[1].joinpath("CHANGELOG.md").read_text()
    for old, new in _renamed.NAMES.items():
        row = f"| `{old.removeprefix('lsrdecomp.')}` | `{new.removeprefix('lsrdecomp.')}` |"
        assert row in changelog
    for owner, attributes in _renamed.ATTRIBUTES.items():
        for old, new in attributes.items():
            assert f"| `{owner}.{old}` | `{owner}.{new}` |" in changelog
