"""Files that earlier versions wrote open with their numbers."""

import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import lsrdecomp as lsr

WRITTEN = Path(__file__).with_name("written")
FOLDERS = sorted(path.parent for path in WRITTEN.glob("*/numbers.safetensors"))
PLACES = [
    pytest.param(folder, place.name, id=f"{folder.name}-{place.name}")
    for folder in FOLDERS
    for place in sorted(folder.iterdir())
    if place.name != "numbers.safetensors"
]
sys.path.insert(0, str(WRITTEN))
from write import delta_weights, write_all  # noqa: E402


def opened(place):
    """Return the matrices of a decomposition or an adapter by their name in numbers.safetensors."""
    if place.is_file():
        matrix = np.asarray(lsr.load(place).to_matrix())
        return {place.name: matrix.view("float64")}
    return {f"{place.name}/{name}": matrix for name, matrix in delta_weights(place).items()}


@pytest.mark.parametrize(("folder", "name"), PLACES)
def test_what_was_written_opens_with_its_numbers(folder, name):
    numbers = load_file(folder / "numbers.safetensors")
    expected = {key: value for key, value in numbers.items() if key.partition("/")[0] == name}
    found = opened(folder / name)
    assert found.keys() == expected.keys() != set()
    for key, value in expected.items():
        scale = np.abs(value).max()
        np.testing.assert_allclose(found[key], value, rtol=0.0, atol=1e-6 * scale)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_what_was_written_is_still_what_its_records_say(folder):
    source = lsr.open_checkpoint(folder / "lora")
    recorded = [path.parent for path in folder.glob("*/compression.json")]
    assert recorded
    for place in recorded:
        assert lsr.lora.measure.verify(source, lsr.open_checkpoint(place)).passed, place


def test_each_folder_is_told_of():
    page = (WRITTEN / "README.md").read_text(encoding="utf-8")
    assert FOLDERS
    for folder in FOLDERS:
        assert f"- `{folder.name}`: " in page


def test_a_folder_can_be_written_today(tmp_path):
    write_all(tmp_path / "now")
    today = {path.name for path in (tmp_path / "now").iterdir()}
    assert {path.name for path in FOLDERS[-1].iterdir()} <= today
