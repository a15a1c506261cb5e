"""compress with a base: the estimate is what written files keep, on screen, record and card."""

from __future__ import annotations

import json
import random
import re
import shutil
from dataclasses import replace
from functools import partial
from html import unescape

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from tiny_bases import write_directories  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import lsrdecomp as lsr  # noqa: E402
from lsrdecomp.cli import compress_command as command_module  # noqa: E402
from lsrdecomp.cli.app import app  # noqa: E402
from lsrdecomp.cli.progress_bars import follow  # noqa: E402
from lsrdecomp.lora.compress import compress_lora as compress_module  # noqa: E402
from lsrdecomp.lora.compress import goals, variants  # noqa: E402
from lsrdecomp.lora.compress.size_search import MAX_MEASURED  # noqa: E402
from lsrdecomp.lora.compress.variants import DistilledVariant  # noqa: E402
from lsrdecomp.lora.files import Journal  # noqa: E402
from lsrdecomp.lora.files.statistics import Statistics  # noqa: E402
from lsrdecomp.lora.measure import evaluator as evaluate  # noqa: E402
from lsrdecomp.lora.measure import verify  # noqa: E402
from lsrdecomp.lora.measure.evaluator import Evaluator  # noqa: E402
from lsrdecomp.lora.measure.fidelity import Fidelity  # noqa: E402
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings, MeasuredSettings  # noqa: E402
from lsrdecomp.lora.train.distill_state import TrainingState  # noqa: E402
from lsrdecomp.lora.train.distillation import Distillation  # noqa: E402
from lsrdecomp.markup import size_text  # noqa: E402

WORDS = random.Random(0)
TEXTS = [(" ".join(f"w{WORDS.randrange(30)}" for _ in range(3 + i % 6)), None) for i in range(48)]
SETTINGS = {"settings": MeasuredSettings(batch=12, max_length=16)}
TWICE = MeasuredSettings(batch=12, max_length=16, passes=2)
EVALUATED = EvaluatorSettings(batch=12, max_length=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_directories(tmp_path_factory.mktemp("classifier"), "SEQ_CLS", layers=1)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "lines.txt"
    file.write_text("\n".join(text for text, _ in TEXTS))
    return file


def command(folder, lines, *words):
    fixed = ["--base", folder / "base", "--data", lines, "--max-length", 16]
    return CliRunner().invoke(app, ["compress", *map(str, [folder / "lora", *fixed, *words])])


@pytest.fixture(scope="module")
def untrained(folder):
    """The smallest form that keeps nine tenths, without training."""
    return lsr.compress(
        folder / "lora", base=folder / "base", data=TEXTS, keep=0.9, storage="float32", **SETTINGS
    )


@pytest.fixture(scope="module")
def quarter(folder):
    """A form of a quarter of the numbers, without training."""
    return lsr.compress(folder / "lora", ratio=4, base=folder / "base", data=TEXTS, **SETTINGS)


def test_the_variant_found_keeps_what_was_asked_as_written(folder, untrained, tmp_path):
    lora, result = lsr.open_checkpoint(folder / "lora"), untrained
    assert result.fidelity.kept >= 0.9
    assert result.fidelity.requested == 0.9
    assert result.fidelity.measurements <= MAX_MEASURED
    assert result.totals.parameters <= lora.adapter_parameters
    result.save(tmp_path / "out")
    again = Evaluator(folder / "base", folder / "lora", TEXTS, EVALUATED).measure(tmp_path / "out")
    assert again.kept == pytest.approx(result.fidelity.kept, abs=1e-6)
    assert again.standard_error == pytest.approx(result.fidelity.standard_error, rel=1e-4)
    record = json.loads((tmp_path / "out" / "compression.json").read_text())
    assert record["promise"] == result.fidelity.to_json()
    assert verify(lora, lsr.open_checkpoint(tmp_path / "out")).passed


def test_distillation_is_part_of_the_record(folder, quarter, tmp_path):
    """Whether a few steps help here is luck; the better form is kept, and recorded as measured."""
    lora = lsr.open_checkpoint(folder / "lora")
    plan = lsr.CompressionPlan(ratio=4)
    done = lsr.compress(lora, plan, base=folder / "base", data=TEXTS, distill=12, **SETTINGS)
    done.save(tmp_path / "out")
    recorded = json.loads((tmp_path / "out" / "compression.json").read_text())
    before, after = (recorded["distillation"][name]["kept"] for name in ("before", "after"))
    assert before == pytest.approx(quarter.fidelity.kept, abs=1e-6)
    assert done.fidelity.kept == max(before, after)
    assert (done.fidelity.distilled > 0) == (after > before)
    assert verify(lora, lsr.open_checkpoint(tmp_path / "out")).passed
    assert recorded["totals"]["relative_error"] == pytest.approx(done.totals.relative_error)


@pytest.mark.parametrize("left", [0.5, 2.0])
def test_the_better_of_untrained_and_trained_is_reported(
    folder, quarter, left, tmp_path, monkeypatch
):
    pretend_to_distill(monkeypatch, left)
    settings = {"base": folder / "base", "data": TEXTS, **SETTINGS}
    done = lsr.compress(folder / "lora", ratio=4, distill=40, **settings)
    lost = 1.0 - quarter.fidelity.kept
    assert done.fidelity.kept == pytest.approx(1.0 - min(left, 1.0) * lost)
    assert done.fidelity.distilled == (40 if left < 1.0 else 0)
    for record in (False, True):
        facts = json.loads(
            (done.save(tmp_path / str(record), record=record) / "compression.json").read_text()
        )
        assert ("layers" in facts) == record
    errors = [line for line in done.sentences() if "error" in line]
    assert bool(errors) == (not done.fidelity.distilled)


def test_where_texts_are_many_a_variant_is_measured_on_others_than_those_that_select(folder):
    many = [(f"{text} w{i % 30} w{i // 30}", None) for i, (text, _) in enumerate(TEXTS * 6)]
    evaluator = Evaluator(folder / "base", folder / "lora", many, EVALUATED, chooses=True)
    parts = [evaluator.held_out, evaluator.selection_texts, evaluator.calibration_texts]
    assert [len(part) for part in parts] == [72, 36, 180]
    assert len({text for part in parts for text, _ in part}) == len(many)
    assert evaluator.measure(folder / "lora").examples == 36
    assert evaluator.measure_held_out(folder / "lora").examples == 72
    few = Evaluator(folder / "base", folder / "lora", TEXTS, EVALUATED, chooses=True)
    assert (few.selection_texts, few.selection_reference) == ([], few.reference)


def test_where_variants_are_trained_the_selection_texts_say_when_a_training_ends(folder):
    many = [(f"{text} w{i % 30} w{i // 30}", None) for i, (text, _) in enumerate(TEXTS * 6)]
    choices = {"chooses": True, "trains": True}
    evaluator = Evaluator(folder / "base", folder / "lora", many, EVALUATED, **choices)
    parts = [evaluator.held_out, evaluator.selection_texts, evaluator.calibration_texts]
    assert [len(part) for part in parts] == [72, 54, 162]
    data = evaluator.distillation_data(1000)
    assert data.validation is evaluator.selection_reference
    # All others are trained on.
    n_trained = sum(len(batch["input_ids"]) for step in data.batches for batch in step)
    assert n_trained == 162
    few = Evaluator(folder / "base", folder / "lora", TEXTS, EVALUATED, **choices)
    assert few.distillation_data(1000).validation is not few.selection_reference


@pytest.mark.parametrize(("harder", "passing"), [(0.0, [True]), (0.1, [False, True])])
def test_what_keeps_too_little_on_held_out_texts_is_replaced(folder, monkeypatch, harder, passing):
    measured = []

    def on_held_out_texts(evaluator, written):
        behaviour = evaluator.measure(written)
        lost = 1.0 - behaviour.kept + harder
        measured.append(replace(behaviour, kl=lost * behaviour.effect))
        return measured[-1]

    monkeypatch.setattr(Evaluator, "measure_held_out", on_held_out_texts)
    many = [(f"{text} w{i % 30} w{i // 30}", None) for i, (text, _) in enumerate(TEXTS * 6)]
    options = {"base": folder / "base", "data": many, "storage": "float32", **SETTINGS}
    result = lsr.compress(folder / "lora", keep=0.7, **options)
    assert [behaviour.kept >= 0.7 for behaviour in measured] == passing
    assert result.fidelity.kept == measured[-1].kept
    assert result.fidelity.held_out_measurements == len(measured)


def test_a_measured_divergence_is_a_goal(folder):
    lora = lsr.open_checkpoint(folder / "lora")
    effect = Evaluator(folder / "base", folder / "lora", TEXTS, EVALUATED).reference.effect
    plan = lsr.CompressionPlan(kl=0.3 * effect)
    result = lsr.compress(lora, plan, base=folder / "base", data=TEXTS, **SETTINGS)
    assert result.fidelity.kl <= 0.3 * effect * (1 + 1e-9)
    with pytest.raises(lsr.errors.BudgetError, match="no less than that without the adapter"):
        lsr.compress(
            lora, lsr.CompressionPlan(kl=2 * effect), base=folder / "base", data=TEXTS, **SETTINGS
        )


def pretend_to_distill(monkeypatch, left):
    """Replace training: every form loses so much of its loss; the list tells what was trained."""
    done = []

    def distilled(evaluator, made, source, out, train, *, steps, before, **_):
        shutil.copytree(made, out)
        done.append(made)
        after = replace(before, kl=left * before.kl)
        return DistilledVariant(made, out, before, after, Distillation(steps, 0.03, 0.0, 0.0, 0.0))

    monkeypatch.setattr("lsrdecomp.lora.compress.variants.distill_variant", distilled)
    return done


def test_few_sizes_are_trained_and_the_smallest_that_keeps_enough_is_taken(
    folder, untrained, tmp_path, monkeypatch
):
    settings = {
        "base": folder / "base",
        "data": TEXTS,
        "keep": 0.9,
        "storage": "float32",
        **SETTINGS,
    }
    done = pretend_to_distill(monkeypatch, 0.2)
    # Of so few texts a standard error is larger than what may be lost.
    monkeypatch.setattr(goals, "STD_ERRORS", 0.0)
    result = lsr.compress(folder / "lora", **settings, distill=40)
    assert 1 <= len(done) <= 3
    assert len(set(done)) == len(done)
    assert result.fidelity.kept >= 0.9
    # 52 where what it keeps above the share was spent, and it was trained a little more.
    assert result.fidelity.distilled in (40, 52)
    assert result.totals.parameters < untrained.totals.parameters
    trained = [one for one in result.tried if one.steps]
    assert len(trained) == len(done)
    assert result.totals.parameters == min(
        one.parameters for one in trained if one.distilled >= 0.9
    )
    record = json.loads((result.save(tmp_path / "out") / "compression.json").read_text())
    assert [one["distilled"] for one in record["tried"]] == [one.distilled for one in result.tried]


def test_where_no_training_brings_enough_the_variant_is_an_untrained_one(folder, monkeypatch):
    settings = {
        "base": folder / "base",
        "data": TEXTS,
        "keep": 0.9,
        "storage": "float32",
        **SETTINGS,
    }
    done = pretend_to_distill(monkeypatch, 1.1)  # does harm
    result = lsr.compress(folder / "lora", **settings, distill=40)
    assert 1 <= len(done) <= goals.MAX_TRAINED
    assert result.fidelity.distilled == 0
    assert result.fidelity.kept >= 0.9


class Killed(BaseException):
    pass


def kill(*given, **named):
    raise Killed


def test_a_killed_search_goes_on_and_repeats_no_training(folder, tmp_path, monkeypatch):
    out, trainings, saved = tmp_path / "out", [], []
    plain, end = variants.distill_variant, Evaluator.fidelity
    monkeypatch.setattr(goals, "EARLY_STOP_MARGIN", 100.0)  # no training ends early
    settings = {
        "base": folder / "base",
        "data": TEXTS,
        "keep": 0.9,
        "distill": 24,
        "storage": "float32",
        **SETTINGS,
    }
    monkeypatch.setattr(
        variants,
        "distill_variant",
        lambda *given, **named: (trainings.append(1), plain(*given, **named))[1],
    )
    save = TrainingState.save
    monkeypatch.setattr(
        TrainingState, "save", lambda state, *given: (save(state, *given), saved.append(state.step))
    )
    told = []
    whole = lsr.compress(folder / "lora", **settings, on_step=told.append)
    # Calibration, search, training.
    assert {step.unit for step in told} >= {
        "examples",
        "layers × shapes",
        "steps",
    }
    calibrated = [step.done for step in told if step.stage.endswith("· calibrating") and step.total]
    assert calibrated[-1] == len(TEXTS) * 3 // 4
    numbers = [
        tuple(map(int, re.match(r"step (\d) of (\d) · ", step.stage).groups())) for step in told
    ]
    assert told[0].stage == "step 1 of 5 · opening the base"
    assert any("· measuring version 1, " in step.stage for step in told)
    shares = [step.share for step in told]
    assert shares == sorted(shares)
    assert shares[-1] > 0.8
    assert numbers == sorted(numbers)
    assert numbers[-1][0] == numbers[-1][1]
    count = len(trainings)
    assert count >= 1

    saved.clear()
    with pytest.raises(Killed), Journal.beside(out) as journal:  # in the first training
        lsr.compress(
            folder / "lora",
            **settings,
            journal=journal,
            on_step=lambda _: kill() if saved else None,
        )
    steps, first_saved = [], saved[0]
    monkeypatch.setattr(Evaluator, "fidelity", kill)
    with pytest.raises(Killed), Journal.beside(out) as journal:  # when all of them are done
        lsr.compress(folder / "lora", **settings, journal=journal, on_step=steps.append)
    # Not from its beginning.
    assert next(step.done for step in steps if step.unit == "steps") == first_saved + 1
    trainings.clear()
    monkeypatch.setattr(Evaluator, "measure", kill)  # nothing is measured again either
    monkeypatch.setattr(Evaluator, "fidelity", end)
    with Journal.beside(out) as journal:
        result = lsr.compress(folder / "lora", **settings, journal=journal)
    assert not trainings
    assert len([one for one in result.tried if one.steps]) == count
    assert [one.parameters for one in result.tried] == [one.parameters for one in whole.tried]
    assert result.fidelity.kept == pytest.approx(whole.fidelity.kept, abs=1e-6)
    assert not list(tmp_path.iterdir())


def test_the_command_says_which_versions_were_trained(folder, lines, tmp_path, monkeypatch):
    # A line of the log for each step, not for each minute.
    monkeypatch.setattr(command_module, "follow", partial(follow, log_seconds=0.0))
    done = command(
        folder,
        lines,
        "--keep",
        0.9,
        "--distill",
        12,
        "--batch",
        16,
        "--storage",
        "float32",
        "--out",
        tmp_path / "out",
    )
    assert done.exit_code == 0, done.output
    assert "at most 12 steps of 16 examples" in " ".join(done.output.split())
    tried = json.loads((tmp_path / "out" / "compression.json").read_text())["tried"]
    trained = [one for one in tried if one["steps"]]
    said = " ".join(done.stdout.split())
    assert f"Tried {len(tried)} compressed versions, {len(trained)} of them also trained" in said
    for one in trained:
        assert f"{100 * one['kept']:.1f} → {100 * one['distilled']:.1f} %" in said
    assert not list(tmp_path.glob(".*"))


def test_keep_on_the_command_line(folder, lines, tmp_path):
    """Absent any word of it, storage is automatic."""
    out, page, facts = tmp_path / "out", tmp_path / "page.html", tmp_path / "facts.json"
    done = command(folder, lines, "--keep", 0.4, "--out", out, "--report", page, "--json", facts)
    assert done.exit_code == 0, done.output
    promise = json.loads(facts.read_text())["promise"]
    written = lsr.open_checkpoint(out)
    assert all(
        layer.dtype in ("float16", *(f"int{bits}" for bits in range(2, 9)))
        for layer in written.layers
    )
    assert verify(lsr.open_checkpoint(folder / "lora"), written).passed
    assert promise["kept"] >= 0.4
    shown = " ".join(done.stdout.split())
    assert promise["sentence"] in shown
    assert "held-out texts of lines.txt" in promise["sentence"]
    for text in (unescape(page.read_text()), (out / "README.md").read_text()):
        assert promise["sentence"] in text
    assert not list(tmp_path.glob(".*"))  # statistics and states are gone


def test_a_refusal_says_where_what_was_measured_waits(folder, lines, tmp_path):
    done = command(folder, lines, "--keep", 0.99999, "--storage", "int4", "--out", tmp_path / "out")
    assert isinstance(done.exception, lsr.errors.BudgetError)
    assert "no compressed version that was measured keeps 0.99999" in str(done.exception)
    assert "What was done waits in" in done.exception.__notes__[0]
    assert list((tmp_path / ".out.journal").glob("statistics-*/statistics.json"))
    assert list((tmp_path / ".out.journal").glob("*/adapter_model.safetensors"))
    done = command(folder, lines, "--keep", 0.7, "--storage", "float16", "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_a_size_is_measured_after_writing_and_little_is_said_aloud(
    folder, lines, tmp_path, monkeypatch
):
    monkeypatch.setattr(Fidelity, "poor_below", 1.1)  # whatever so few parameters keep here
    done = command(folder, lines, "--parameters", 40, "--out", tmp_path / "out")
    assert done.exit_code == 1
    assert "keeps only" in done.stderr
    assert (tmp_path / "out").exists()
    done = command(folder, lines, "--ratio", 8, "--out", tmp_path / "asked")
    assert done.exit_code == 0, done.output  # it was asked for by ratio


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--keep", 0.9, "--ratio", 10), "one goal"),
        (("--keep", 95), "above 0 and below 1"),
        ((), "one goal"),
    ],
)
def test_goals_that_make_no_sense_are_one_line(folder, lines, tmp_path, words, message):
    done = command(folder, lines, *words, "--out", tmp_path / "out")
    assert isinstance(done.exception, lsr.LsrError)
    assert message in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_share_needs_a_base(folder, tmp_path):
    given = ["compress", str(folder / "lora"), "--out", str(tmp_path / "out"), "--keep", "0.9"]
    done = CliRunner().invoke(app, given)
    assert isinstance(done.exception, lsr.LsrError)
    assert "give --base, and --data if you have texts, with --keep" in str(done.exception)


def test_a_killed_calibration_goes_on(folder, tmp_path, monkeypatch):
    lora = lsr.open_checkpoint(folder / "lora")
    plain = compress_module.search_adapter

    def killed(*given, **named):
        raise KeyboardInterrupt

    settings = {"base": folder / "base", "data": TEXTS, **SETTINGS}
    with monkeypatch.context() as patch:
        patch.setattr(compress_module, "search_adapter", killed)
        with pytest.raises(KeyboardInterrupt), Journal.beside(tmp_path / "out") as journal:
            lsr.compress(lora, lsr.CompressionPlan(ratio=4), **settings, journal=journal)
    assert len(list(journal.path.glob("statistics-*/statistics.json"))) == 1
    monkeypatch.setattr(evaluate, "calibrate", killed)  # it is not done again, but for other texts
    monkeypatch.setattr(compress_module, "search_adapter", plain)
    others = {**settings, "data": [(f"{text} w1", pair) for text, pair in TEXTS]}
    with pytest.raises(KeyboardInterrupt), Journal.beside(tmp_path / "out") as journal:
        lsr.compress(lora, lsr.CompressionPlan(ratio=4), **others, journal=journal)
    with Journal.beside(tmp_path / "out") as journal:
        assert (
            lsr.compress(
                lora, lsr.CompressionPlan(ratio=4), **settings, journal=journal
            ).fidelity.kept
            > 0
        )
    assert not list(tmp_path.iterdir())


def test_a_second_pass_in_the_norm_around_the_first_is_taken_where_it_is_better(
    folder, quarter, monkeypatch
):
    active, plain = [], evaluate.calibrate

    def watched(base, *given, **named):
        active.append((base.adapter_sha256, base.modules))
        return plain(base, *given, **named)

    monkeypatch.setattr(evaluate, "calibrate", watched)
    lora = lsr.open_checkpoint(folder / "lora")
    settings = {"base": folder / "base", "data": TEXTS, "settings": TWICE}
    of_ratio, of_share = (
        lsr.compress(lora, ratio=4, **settings),
        lsr.compress(lora, keep=0.7, **settings),
    )
    # All layers of the LoRA, left out or not.
    assert [modules for _, modules in active] == [active[0][1]] * 4
    assert active[0][0] == active[2][0] == lora.source_sha256 not in (active[1][0], active[3][0])
    assert len(of_ratio.tried) > 1 < len(of_share.tried)
    assert of_ratio.fidelity.kept >= quarter.fidelity.kept - 1e-6
    assert of_ratio.fidelity.kept == max(one.kept for one in of_ratio.tried)
    assert of_share.fidelity.kept >= 0.7
    assert of_share.totals.parameters == min(
        one.parameters for one in of_share.tried if one.kept >= 0.7
    )


def test_the_norm_is_measured_with_the_lora_at_less_than_its_strength(
    folder, tmp_path, monkeypatch
):
    seen, plain = [], evaluate.calibrate

    def scales(model):
        return [dict(module.scaling) for module in model.modules() if hasattr(module, "lora_A")]

    def watched(base, *given, **named):
        seen.append(scales(base.model))
        return plain(base, *given, **named)

    monkeypatch.setattr(evaluate, "calibrate", watched)
    evaluator = Evaluator(folder / "base", folder / "lora", TEXTS, EVALUATED)
    whole = scales(evaluator.source.model)
    evaluator.statistics(Journal(tmp_path / "journal"))
    (less,) = seen
    assert whole == scales(evaluator.source.model) != []
    for strong, weak in zip(whole, less, strict=True):
        assert weak == {
            name: pytest.approx(evaluate.LORA_SCALE * value) for name, value in strong.items()
        }


def test_a_kill_in_the_second_pass_repeats_no_calibration_and_leaves_nothing(
    folder, tmp_path, monkeypatch
):
    calls, plain, measure = [], evaluate.calibrate, Evaluator.measure

    def counted(*given, **named):
        calls.append(named["out"])
        return plain(*given, **named)

    def killed(evaluator, path):
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(evaluator, path)

    monkeypatch.setattr(evaluate, "calibrate", counted)
    settings = {"base": folder / "base", "data": TEXTS, "settings": TWICE}
    lora, plan = lsr.open_checkpoint(folder / "lora"), lsr.CompressionPlan(ratio=12)
    with monkeypatch.context() as patch:
        patch.setattr(Evaluator, "measure", killed)
        with pytest.raises(KeyboardInterrupt), Journal.beside(tmp_path / "out") as journal:
            lsr.compress(lora, plan, **settings, journal=journal)
    assert len(set(calls)) == 2
    with Journal.beside(tmp_path / "out") as journal:
        assert len(lsr.compress(lora, plan, **settings, journal=journal).tried) == 2
    assert len(calls) == 2
    assert not list(tmp_path.iterdir())


def test_examples_that_are_answered_differently_are_shown_and_counted_with_svd_beside_them(
    folder, lines, tmp_path
):
    out, page = tmp_path / "out", tmp_path / "page.html"
    done = command(folder, lines, "--bytes", 2000, "--out", out, "--report", page, "--examples", 3)
    record = json.loads((out / "compression.json").read_text())
    promise, rival = record["promise"], record["truncated_svd"]
    assert rival["bytes"] <= promise["bytes_after"]
    rival_kept = f"{size_text(rival['bytes'])} keeps {100 * rival['kept']:.1f} % on the same texts."
    assert f"Quantized truncated SVD of {rival_kept}" in " ".join(done.stdout.split())
    assert ">truncated SVD</text>" in page.read_text()
    assert promise["answered"] == 12  # all that are held out
    assert promise["alike"] == round(12 * promise["agreement"])
    told = f"gives the LoRA's class to {promise['alike']} of 12 held-out texts"
    assert told in " ".join(done.stdout.split())
    differing = min(3, 12 - promise["alike"])
    assert done.stdout.count("LoRA: LABEL_") == done.stdout.count("compressed: LABEL_") == differing
    assert page.read_text().count('<tr class="differs">') == differing
    for text, _ in TEXTS:  # what people wrote stays with them
        assert text not in (out / "compression.json").read_text()


def test_texts_unlike_those_of_the_statistics_are_said_with_numbers(folder, lines, tmp_path):
    statistics = tmp_path / "statistics"
    words = ["calibrate", folder / "base", "--adapter", folder / "lora", "--text", lines]
    options = ["--samples", 48, "--max-length", 16, "--quiet", "--out", statistics]
    done = CliRunner().invoke(app, [*map(str, [*words, *options])])
    assert done.exit_code == 0, done.output
    longer = tmp_path / "longer.txt"
    longer.write_text("\n".join(" ".join([text] * 4) for text, _ in TEXTS))
    for data, is_said in ((longer, True), (lines, False)):
        out = tmp_path / data.stem
        told = ["--ratio", 4, "--statistics", statistics, "--data", data, "--out", out]
        done = command(folder, lines, *told, "--report", f"{out}.html")
        assert done.exit_code in (0, 1), done.output
        record = json.loads((out / "compression.json").read_text())
        assert any("longer.txt" in note for note in record["notes"]) == is_said
        said = "the texts of longer.txt have"
        assert (f"WARNING: {said}" in done.output) == is_said
        page = (tmp_path / f"{out.name}.html").read_text()
        assert ("The texts of longer.txt have" in page) == is_said


def test_statistics_of_few_examples_are_said_with_how_many_serve(folder, lines, tmp_path):
    few, serving = tmp_path / "few", tmp_path / "serving"
    more = tmp_path / "more.txt"
    more.write_text("\n".join([text for text, _ in TEXTS] * 6))
    said = "WARNING: the statistics are of 24 examples: give 256 at least, better 500"
    for statistics, texts, samples in ((few, lines, 24), (serving, more, 256)):
        words = ["calibrate", folder / "base", "--adapter", folder / "lora", "--text", texts]
        words += ["--samples", samples, "--batch", 8, "--max-length", 16, "--out", statistics]
        done = CliRunner().invoke(app, [*map(str, words), "--quiet"])
        assert done.exit_code == 0, done.output
        assert (said in done.output) == (statistics == few)
        out = tmp_path / f"of_{statistics.name}"
        words = ["compress", folder / "lora", "--ratio", 2, "--out", out, "--quiet"]
        done = CliRunner().invoke(app, [*map(str, words), "--statistics", str(statistics)])
        assert done.exit_code == 0, done.output
        assert (said in done.output) == (statistics == few)
        record = json.loads((out / "compression.json").read_text())
        assert ("notes" in record) == (statistics == few)
    done = lsr.compress(folder / "lora", statistics=few, ratio=2)
    assert done.notes == (said.removeprefix("WARNING: "),)
    metadata = {"examples": 24, "answers": 240}  # ten tokens each
    assert Statistics(metadata, {}, few).doubts == (
        "the statistics are of 24 examples: give 64 at least, better 500",
    )
    assert Statistics({"examples": 64, "answers": 640}, {}, few).doubts == ()
