"""Draws of texts say whether a share that some texts measure holds on the others."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

from benchmarks.behaviour.kept import DrawSettings, drawn  # noqa: E402

SETTINGS = DrawSettings(draws=8, texts=200, choosing=20, measuring=40, asked=(0.6, 0.8))
EFFECTS = torch.ones(200)


def losses_near(share):
    """Return what a version loses of each text, in the mean about ``share`` of the effect."""
    noise = np.random.default_rng(1).uniform(-0.02, 0.02, 200)
    return torch.from_numpy(share + noise).float()


def test_the_smallest_version_that_keeps_enough_is_measured():
    losses = {ratio: losses_near(share) for ratio, share in ((8.0, 0.1), (24.0, 0.3), (48.0, 0.5))}
    rows = [row["apart"] for row in drawn(losses, EFFECTS, SETTINGS)]
    assert [row["ratio"] for row in rows] == [24.0, 8.0] * 4
    assert [row["kept"] for row in rows] == pytest.approx([0.7, 0.9] * 4, abs=0.01)
    assert sum(row["holds"] for row in rows) >= 6


def test_a_version_that_keeps_too_little_where_it_is_measured_is_replaced_by_a_larger_one():
    # The texts that choose are easier: with a fifth less lost, the second of three versions passes.
    losses = {ratio: losses_near(share) for ratio, share in ((8.0, 0.1), (24.0, 0.3), (48.0, 0.5))}
    order = np.random.default_rng(0).permutation(200)
    easy = torch.from_numpy(order[SETTINGS.measuring : SETTINGS.measuring + SETTINGS.choosing])
    for each in losses.values():
        each[easy] -= 0.2
    first, *_ = drawn(losses, EFFECTS, SETTINGS)
    assert [first[way]["ratio"] for way in ("apart", "replaced", "same")] == [48.0, 24.0, 24.0]
    assert first["apart"]["kept"] < first["keep"] <= first["replaced"]["kept"]


def test_a_share_does_not_hold_if_the_texts_that_measure_are_unlike_the_others():
    losses = losses_near(0.4)
    of_the_first_draw = np.random.default_rng(0).permutation(200)[: SETTINGS.measuring]
    losses[torch.from_numpy(of_the_first_draw)] -= 0.3
    first, *_ = drawn({8.0: losses}, EFFECTS, SETTINGS)
    assert not first["apart"]["holds"]
    assert first["apart"]["kept"] == pytest.approx(0.9, abs=0.01)
    assert first["apart"]["fresh"] == pytest.approx(0.6, abs=0.01)
