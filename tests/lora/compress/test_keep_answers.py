"""--keep-answers: the smallest version that gives the LoRA's whole answers, or a clear miss."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from tiny_bases import write_directories  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import lsrdecomp as lsr  # noqa: E402
from lsrdecomp.cli.app import app  # noqa: E402
from lsrdecomp.lora.base.dataset import PromptExample  # noqa: E402
from lsrdecomp.lora.compress import goals  # noqa: E402
from lsrdecomp.lora.measure.evaluator import Evaluator  # noqa: E402
from lsrdecomp.lora.measure.fidelity import Fidelity  # noqa: E402
from lsrdecomp.lora.search.measured_settings import MeasuredSettings  # noqa: E402

WORDS = random.Random(0)
ROWS = [
    {
        "prompt": f"w{i % 30} w{(7 * i) % 30} w{i // 3}",
        "completion": f" w{WORDS.randrange(30)} w{WORDS.randrange(30)} w1",
    }
    for i in range(60)
]
TEXTS = [PromptExample(row["prompt"], row["completion"], row["prompt"]) for row in ROWS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_directories(tmp_path_factory.mktemp("causal"), "CAUSAL_LM", layers=1)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return file


def command(folder, prompts, *words):
    fixed = ["--base", folder / "base", "--data", prompts, "--batch", 12]
    return CliRunner().invoke(app, ["compress", *map(str, [folder / "lora", *fixed, *words])])


def test_answers_are_kept_by_version_and_told_with_what_was_asked(folder, prompts, tmp_path):
    out = tmp_path / "out"
    done = command(folder, prompts, "--keep-answers", 0.8, "--out", out)
    promise = json.loads((out / "compression.json").read_text())["promise"]
    share = promise["alike"] / promise["answered"]
    assert promise["answered"] == 15  # a quarter of 60
    assert (promise["asked"], promise["asked_answers"]) == (None, 0.8)
    error = (share * (1.0 - share) / 15) ** 0.5
    is_missed = share + error < 0.8
    assert done.exit_code == int(is_missed), done.output
    told = f"gives the LoRA's whole answer to {promise['alike']} of 15 held-out prompts"
    assert told in " ".join(done.stdout.split())
    assert f"(80 % asked{': missed' if is_missed else ''})" in done.stdout
    assert told in (out / "README.md").read_text()
    # An independent run says the same of what was written.
    evaluator = Evaluator(folder / "base", folder / "lora", TEXTS, MeasuredSettings(batch=12))
    again = evaluator.meter.whole_answers(evaluator.base.with_adapter(out))
    assert (again.answered, again.n_matching) == (15, promise["alike"])


def test_those_that_calibrate_choose_and_measure_are_three_disjoint_sets(folder):
    evaluator = Evaluator(
        folder / "base", folder / "lora", TEXTS, MeasuredSettings(batch=12), by_answers=True
    )
    sets = [evaluator.held_out, evaluator.selection_texts, evaluator.calibration_texts]
    assert [len(each) for each in sets] == [15, 15, 30]
    assert len({text.prompt for each in sets for text in each}) == 60
    reference = evaluator.selection_reference
    assert reference.examples == 15
    # It compares on the LoRA's own answers, which the LoRA itself gives.
    assert reference.compare(evaluator.source).same_answers == 1.0


def test_what_calibrates_and_trains_are_the_loras_own_answers(folder):
    evaluator = Evaluator(
        folder / "base",
        folder / "lora",
        TEXTS,
        MeasuredSettings(batch=12),
        trains=True,
        by_answers=True,
    )
    # What the LoRA predicts along them is what they have
    assert evaluator.calibration_reference.n_right[1] == 30
    ((batch,), *_) = evaluator.distillation_data(12).batches
    with torch.no_grad():
        predicted = evaluator.source.model(input_ids=batch["input_ids"]).logits.argmax(-1)
    is_own = predicted[:, :-1] == batch["input_ids"][:, 1:]
    # All but the end that an answer is given where it is cut
    assert float(is_own[batch["loss_mask"][:, 1:].bool()].float().mean()) > 0.8


def test_a_prompt_with_several_completions_is_answered_once(folder):
    """Counted as often as it has completions, it would make the interval too narrow."""
    texts = [replace(text, completion=f" w{j} w1") for text in TEXTS for j in range(3)]
    evaluator = Evaluator(
        folder / "base", folder / "lora", texts, MeasuredSettings(batch=12), by_answers=True
    )
    sets = [evaluator.held_out, evaluator.selection_texts, evaluator.calibration_texts]
    prompts = [{text.prompt for text in each} for each in sets]
    assert len(set.union(*prompts)) == 60
    assert not prompts[0] & (prompts[1] | prompts[2])
    assert len(prompts[0]) == len(prompts[1]) == 15
    assert evaluator.selection_reference.examples == 15
    assert evaluator.meter.whole_answers(evaluator.source).answered == 15
    pairs = evaluator.compare_answers(folder / "lora")
    assert len({pair.question for pair in pairs}) == len(pairs) == 15


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"keep_answers": 0.9, "keep": 0.9}, "one goal is needed, got keep and keep_answers"),
        ({"keep_answers": 1.5}, "keep_answers must be above 0 and below 1"),
    ],
)
def test_one_goal_and_a_share_are_asked_for(folder, settings, reason):
    with pytest.raises(lsr.errors.LsrError, match=reason):
        lsr.compress(folder / "lora", base=folder / "base", data=TEXTS, **settings)


def test_texts_without_prompts_have_no_answers_to_keep(folder):
    texts = [(f"w{i % 30} w{i // 3} w{i % 7}", None) for i in range(48)]
    with pytest.raises(lsr.errors.LsrError, match="no whole answers to keep"):
        lsr.compress(folder / "lora", base=folder / "base", data=texts, keep_answers=0.9)


@pytest.mark.parametrize("goal", ["--keep", "--keep-answers"])
def test_a_miss_is_written_told_and_exit_code_one(folder, prompts, tmp_path, goal, monkeypatch):
    of = Fidelity.of.__func__

    def kept_too_little(cls, behaviour, **facts):
        kl = 0.5 * behaviour.effect
        behaviour = replace(behaviour, kl=kl, standard_error=0.01)
        return of(cls, behaviour, **{**facts, "n_matching": 0})

    monkeypatch.setattr(Fidelity, "of", classmethod(kept_too_little))
    monkeypatch.setattr(goals.ShareGoal, "replacement", lambda *_: None)
    monkeypatch.setattr(goals.AnswerGoal, "replacement", lambda *_: None)
    out = tmp_path / "out"
    done = command(folder, prompts, goal, 0.6, "--out", out)
    assert done.exit_code == 1
    assert "(60 % asked: missed)" in " ".join(done.stdout.split())
    assert "WARNING: no version that was measured keeps what was asked for" in done.output
    assert lsr.open_checkpoint(out).layers
