"""Checks of other libraries: the verdicts of the command, and the page that shows its record."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks.record import RESULTS
from benchmarks.testing.found import Subject, checked
from lsrdecomp.testing import check_kron

PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "found-in-the-wild.md"


def kron_that_loses_nan(a, b):
    """Return A ⊗ B as sparse formats do: what is zero takes part in no product."""
    product = np.kron(a, b)
    product[np.kron(a == 0, np.ones(b.shape)) > 0] = 0
    return product


@pytest.mark.parametrize(
    ("function", "verdict", "n_findings"),
    [
        (np.kron, "clean", 0),
        (kron_that_loses_nan, "clean but for corners that it may not promise", 1),
        (lambda a, b: np.kron(b, a), "a finding", 2),
    ],
)
def test_the_verdict_says_what_is_left_without_seldom_promised_corners(
    function, verdict, n_findings
):
    row = checked(Subject("numpy", "a function", check_kron, lambda: function))
    assert row["verdict"] == verdict
    assert len(row["findings"]) == n_findings


def test_a_library_that_is_not_there_is_named():
    row = checked(Subject("no-such-library", "kron", check_kron, lambda: np.kron))
    assert row["verdict"].startswith("not installed")


def test_the_page_shows_every_row_of_the_record():
    record = json.loads((RESULTS / "found-in-the-wild.json").read_text(encoding="utf-8"))
    shown = set()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        row = re.match(r"\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|", line)
        if row:
            shown.add(tuple(part.strip() for part in row.groups()))
    verdicts = {
        "clean": "clean",
        "clean but for corners that it may not promise": "corners",
        "a finding": "**finding**",
    }
    expected = set()
    for row in record["rows"]:
        package = f"{row['package']} {row['version'].split('+')[0]}"
        expected.add((row["name"], package, verdicts[row["verdict"]]))
    assert shown == expected
