"""What a share that is no number is worth, and which directories a new one may replace."""

import json
import math
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from tiny_bases import write_directories  # noqa: E402

from lsrdecomp import compress  # noqa: E402
from lsrdecomp.errors import BudgetError, CheckpointError  # noqa: E402
from lsrdecomp.lora.base.behaviour import Behaviour  # noqa: E402
from lsrdecomp.lora.compress.distill_lora import distill  # noqa: E402
from lsrdecomp.lora.compress.goals import PlanGoal  # noqa: E402
from lsrdecomp.lora.compress.rewrite import publish  # noqa: E402
from lsrdecomp.lora.compress.size_search import MeasuredSizes, loss_of  # noqa: E402
from lsrdecomp.lora.compress.variants import CompressedVariant, DistilledVariant  # noqa: E402
from lsrdecomp.lora.files import open_checkpoint  # noqa: E402
from lsrdecomp.lora.measure import Fidelity, verify  # noqa: E402
from lsrdecomp.lora.measure.fidelity import share_kept  # noqa: E402
from lsrdecomp.lora.search import CompressionPlan  # noqa: E402

BEHAVIOUR = Behaviour(128, 3000, "token", 0.1, 0.9, 1.0, 0.01)
BROKEN = [math.nan, math.inf, -math.inf]


def broken(kl):
    """The behaviour of an adapter whose numbers overflow somewhere."""
    return replace(BEHAVIOUR, kl=kl)


@pytest.mark.parametrize("kl", BROKEN)
def test_a_share_that_is_no_number_ranks_below_every_other(kl):
    assert share_kept(broken(kl)) == -math.inf
    assert share_kept(replace(BEHAVIOUR, kl=50.0)) == pytest.approx(-49.0)
    assert share_kept(broken(kl)) < share_kept(replace(BEHAVIOUR, kl=50.0))


def test_where_the_lora_has_no_effect_no_share_is_kept():
    assert share_kept(replace(BEHAVIOUR, effect=0.0)) == -math.inf


@pytest.mark.parametrize("kl", BROKEN)
def test_training_that_ends_in_no_number_is_not_used_and_one_that_mends_it_is(tmp_path, kl):
    paths = tmp_path / "untrained", tmp_path / "trained"
    worse = DistilledVariant(*paths, BEHAVIOUR, broken(kl), SimpleNamespace(steps=9))
    assert (worse.path, worse.behaviour, worse.steps) == (paths[0], BEHAVIOUR, 0)
    better = DistilledVariant(*paths, broken(kl), BEHAVIOUR, SimpleNamespace(steps=9))
    assert (better.path, better.behaviour, better.steps) == (paths[1], BEHAVIOUR, 9)


@pytest.mark.parametrize("kl", BROKEN)
def test_a_size_whose_share_is_no_number_is_never_the_smallest_that_keeps_enough(kl):
    """Small ones are broken: neither a search by size nor one for a loss returns them."""
    least = 1e4

    def measure(size):
        behaviour = broken(kl) if size < least else replace(BEHAVIOUR, kl=0.02)
        return CompressedVariant(None, None, behaviour)

    sizes = MeasuredSizes(1e6, lambda size: min(1.0, (2e2 / size) ** 0.5), measure)
    for find in (lambda: sizes.smallest(0.9), lambda: sizes.variant_near_loss(0.05)):
        found = find()
        assert math.isfinite(loss_of(found))
        assert any(found is variant for size, variant in sizes.measured.items() if size >= least)
    assert any(size < least for size in sizes.measured), "a broken one was measured"


@pytest.mark.parametrize("kl", BROKEN)
def test_of_two_passes_the_one_whose_outputs_are_numbers_is_used(kl):
    variants = SimpleNamespace(statistics=None)
    goal = PlanGoal(variants, lambda plans, statistics: None, CompressionPlan(ratio=2))
    sound, better, bad = (
        CompressedVariant(None, None, behaviour)
        for behaviour in (BEHAVIOUR, replace(BEHAVIOUR, kl=0.05), broken(kl))
    )
    assert goal.is_better(sound, bad)
    assert not goal.is_better(bad, sound)
    assert goal.is_better(better, sound)
    assert not goal.is_better(sound, better)
    assert not goal.is_better(sound, sound)


@pytest.mark.parametrize("kl", BROKEN)
def test_where_every_size_is_broken_nothing_is_said_to_keep_enough(kl):
    def measure(size):
        return CompressedVariant(None, None, broken(kl))

    with pytest.raises(BudgetError, match="no compressed version that was measured keeps 0.1 "):
        MeasuredSizes(1e6, lambda size: 1e3 / size, measure).smallest(0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_directories(tmp_path_factory.mktemp("classifier"), "SEQ_CLS", layers=1)


@pytest.fixture
def written(folder, tmp_path):
    out = tmp_path / "written"
    compress(open_checkpoint(folder / "lora"), CompressionPlan(separation_rank=2)).save(out)
    return out


FIDELITY = Fidelity.of(BEHAVIOUR, data="texts.txt", base="base", bytes_before=3, bytes_after=1)


def contents(directory):
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_what_is_published_is_what_was_written_with_its_fidelity_and_digests_of_its_own(
    folder, written, tmp_path
):
    before = contents(written)
    report = json.loads((written / "compression.json").read_text())
    out = publish(written, tmp_path / "out", report | {"more": 1}, FIDELITY)
    assert out == tmp_path / "out"
    assert contents(written) == before
    after = contents(out)
    changed = {name for name in before if after.get(name) != before[name]}
    assert changed == {"README.md", "compression.json", "SHA256SUMS"}
    assert after.keys() == before.keys()
    record = json.loads(after["compression.json"])
    assert record["promise"]["kept"] == FIDELITY.kept
    assert (record["more"], record["totals"]) == (1, report["totals"])
    assert after["README.md"].decode().endswith(f"\n\nThis adapter {FIDELITY.sentence()}.\n")
    assert after["README.md"].startswith(before["README.md"].rstrip())
    assert verify(open_checkpoint(folder / "lora"), open_checkpoint(out)).passed


def test_only_force_replaces_an_adapter_and_nothing_replaces_anything_else(
    folder, written, tmp_path
):
    old, pictures, file = tmp_path / "old", tmp_path / "pictures", tmp_path / "file"
    compress(open_checkpoint(folder / "lora"), CompressionPlan(separation_rank=1)).save(old)
    (pictures / "of-us").mkdir(parents=True)
    (pictures / "adapter_config.json").write_text("{}")
    file.write_text("mine")
    before = contents(old)
    with pytest.raises(CheckpointError, match="already exists; choose another output, or replace"):
        publish(written, old, {}, FIDELITY)
    assert contents(old) == before
    for force in (False, True):
        for out in (pictures, file):
            with pytest.raises(CheckpointError, match="already exists|not replaced even by force"):
                publish(written, out, {}, FIDELITY, force=force)
        # What is read is never replaced: not itself, not what holds it, not from inside
        for out in (old, old.parent, old / "inside"):
            with pytest.raises(CheckpointError, match="the output must not|not replaced"):
                publish(written, out, {}, FIDELITY, inputs=(old,), force=force)
    assert (contents(old), file.read_text()) == (before, "mine")
    assert [path.name for path in pictures.iterdir()] != []
    publish(written, old, {}, FIDELITY, force=True)
    assert json.loads((old / "compression.json").read_text())["promise"]["kept"] == FIDELITY.kept
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "file",
        "old",
        "pictures",
        "written",
    ]


WORDS = random.Random(0)
TEXTS = [(" ".join(f"w{WORDS.randrange(30)}" for _ in range(3 + i % 6)), None) for i in range(48)]


@pytest.mark.parametrize("read", ["the LoRA", "the base", "the texts"])
def test_distilling_replaces_nothing_that_it_reads_though_it_is_forced(
    folder, written, tmp_path, read
):
    """Each lies in a directory that looks like an adapter to be replaced."""
    old = tmp_path / "old"
    compress(open_checkpoint(folder / "lora"), CompressionPlan(separation_rank=1)).save(old)
    given = {"base": folder / "base", "data": TEXTS, "teacher": folder / "lora"}
    out = old
    if read == "the LoRA":
        out = folder / "lora"
    elif read == "the base":
        out = folder / "base"
    else:
        given["data"] = old / "texts.txt"
        given["data"].write_text("\n".join(text for text, _ in TEXTS))
    before = contents(out)
    with pytest.raises(CheckpointError, match=r"the output must not|not replaced even by force"):
        distill(written, **given, out=out, force=True, steps=1)
    assert contents(out) == before
