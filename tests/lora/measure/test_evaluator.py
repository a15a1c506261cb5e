"""Which texts an evaluator gives to what: held out, calibration, training, validation."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from tiny_bases import write_directories  # noqa: E402

from lsrdecomp.lora.files import Journal  # noqa: E402
from lsrdecomp.lora.files.progress import ProgressUpdate  # noqa: E402
from lsrdecomp.lora.measure import evaluator as evaluate  # noqa: E402
from lsrdecomp.lora.measure.evaluator import Evaluator  # noqa: E402
from lsrdecomp.lora.search.measured_settings import EvaluatorSettings  # noqa: E402

WORDS = random.Random(0)
TEXTS = [(" ".join(f"w{WORDS.randrange(30)}" for _ in range(3 + i % 6)), None) for i in range(96)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_directories(tmp_path_factory.mktemp("classifier"), "SEQ_CLS", layers=1)


def evaluator(folder):
    settings = EvaluatorSettings(batch=8, max_length=16)
    return Evaluator(folder / "base", folder / "lora", TEXTS, settings)


def rows(batches):
    """The texts of batches, as tuples of their tokens without padding."""
    return [
        tuple(tokens[mask.bool()].tolist())
        for batch in batches
        for tokens, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]


@pytest.mark.parametrize("micro", [None, 3])
def test_every_text_that_is_left_is_trained_on_once_in_a_round(folder, monkeypatch, micro):
    """And none by which training is validated, or by which the result is measured."""
    monkeypatch.setattr(evaluate, "VALIDATION_BATCHES", 1)
    measured = evaluator(folder)
    data = measured.distillation_data(1000, micro)
    trained = rows(batch for step in data.batches for batch in step)
    assert sorted(trained) == sorted(rows(measured.batches(measured.calibration_texts[8:])))
    assert len(trained) == len(measured.calibration_texts) - 8
    assert all(len(batch["input_ids"]) <= (micro or 8) for step in data.batches for batch in step)


def test_few_steps_are_taught_by_few_texts(folder, monkeypatch):
    """The LoRA answers each once, so no more than a share of the steps, and a least number."""
    monkeypatch.setattr(evaluate, "VALIDATION_BATCHES", 1)
    monkeypatch.setattr(evaluate, "MIN_BATCHES", 2)
    monkeypatch.setattr(evaluate, "TEACHER_SHARE", 0.5)
    measured = evaluator(folder)
    assert [len(measured.distillation_data(steps, None).batches) for steps in (1, 4, 6, 8)] == [
        2,
        2,
        3,
        4,
    ]
    assert sum(len(step) for step in measured.distillation_data(6, None).batches) == 3


def test_where_too_few_are_left_for_a_batch_every_fourth_text_validates(folder, monkeypatch):
    monkeypatch.setattr(evaluate, "VALIDATION_BATCHES", 100)
    monkeypatch.setattr(evaluate, "MIN_BATCHES", 100)
    measured = evaluator(folder)
    texts = measured.calibration_texts
    data = measured.distillation_data(1000)
    trained = rows(batch for step in data.batches for batch in step)
    expected = [text for i, text in enumerate(texts) if i not in range(0, len(texts), 4)]
    assert sorted(trained) == sorted(rows(measured.batches(expected)))
    assert data.validation.counts.sum() == len(range(0, len(texts), 4))


def test_a_stage_is_told_without_a_count_until_there_is_one(folder):
    measured = evaluator(folder)
    measured.announce("nobody listens")
    steps = []
    measured.on_step = steps.append
    measured.announce("reading")
    measured.announce("training", 2, 5, "steps")
    assert steps == [ProgressUpdate("reading", 0, 0), ProgressUpdate("training", 2, 5, "steps")]


def test_classes_of_all_held_out_texts_are_compared(folder):
    measured = evaluator(folder)
    questions = [pair.question for pair in measured.compare_answers(folder / "lora", limit=5)]
    assert sorted(questions) == sorted(text for text, _ in measured.held_out)


@pytest.mark.parametrize(("limit", "used"), [(5, 5), (9, 9), (1000, None)])
def test_the_norm_is_measured_on_no_more_texts_than_it_may_be(
    folder, tmp_path, monkeypatch, limit, used
):
    monkeypatch.setattr(evaluate, "MAX_TEXTS", limit)
    measured = evaluator(folder)
    with Journal(tmp_path / "journal") as journal:
        statistics = measured.statistics(journal)
        assert statistics.metadata["examples"] == (used or len(measured.calibration_texts))
        assert measured.statistics(journal).path == statistics.path
        # What takes another pass through the base is not measured: no search reads it
        assert statistics.metadata["settings"]["effect"] is None
