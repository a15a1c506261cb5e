"""`lsr.compress` as it is typed: a path, one goal by name, and a result that reads well."""

import inspect
from dataclasses import replace
from html import unescape
from pathlib import Path

import numpy as np
import pytest

import lsrdecomp as lsr
from lsrdecomp.errors import LsrError
from lsrdecomp.lora.base import Behaviour
from lsrdecomp.lora.base.dataset import PromptExample
from lsrdecomp.lora.base.texts import n_characters, read_data
from lsrdecomp.lora.compress import MeasuredCompression
from lsrdecomp.lora.compress import compress_lora as library_module
from lsrdecomp.lora.measure import Fidelity
from lsrdecomp.lora.search import Search
from lsrdecomp.lora.search.measured_settings import MeasuredSettings
from lsrdecomp.lora.search.plan import GOALS
from lsrdecomp.lora.search.request import Request

DEMO = Path(lsr.__file__).parent / "cli" / "demo_adapter"
QUICK = Search(orders=(2,), rounds=0)


def test_a_path_and_a_ratio_are_a_checkpoint_and_a_plan(tmp_path):
    plain = lsr.compress(str(DEMO), ratio=40, storage="float16", search=QUICK)
    named = lsr.compress(
        lsr.open_checkpoint(DEMO), lsr.CompressionPlan(ratio=40, storage="float16"), search=QUICK
    )
    assert plain.layers == named.layers
    assert plain.plan == named.plan
    opened = lsr.open_checkpoint(plain.save(tmp_path / "small"))
    assert opened.adapter_parameters == plain.totals.parameters


def test_statistics_are_opened_by_path():
    statistics = DEMO.parent / "demo_statistics"
    result = lsr.compress(DEMO, separation_rank=1, statistics=statistics)
    assert result.totals.functional_error is not None
    assert np.isfinite(result.totals.functional_error)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "one goal is needed, got none"),
        ({"ratio": 10, "rtol": 0.1}, "rtol and ratio"),
        ({"ratio": 10, "keep": 0.9}, "keep and ratio"),
        ({"plan": lsr.CompressionPlan(ratio=4), "ratio": 4}, "one of the two"),
        ({"keep": 0.9}, "a share to keep is measured"),
    ],
)
def test_goals_that_disagree_are_refused_in_words(settings, words):
    with pytest.raises(lsr.errors.BudgetError, match=words):
        lsr.compress(DEMO, **settings)


def test_what_is_no_checkpoint_is_told_by_name(tmp_path):
    with pytest.raises(lsr.errors.CheckpointError, match=r"absent: no such file"):
        lsr.compress(tmp_path / "absent", ratio=10)


@pytest.mark.parametrize("statistics", [None, DEMO.parent / "demo_statistics"])
def test_a_compression_prints_on_a_few_lines(statistics):
    result = lsr.compress(DEMO, separation_rank=1, statistics=statistics)
    lines = repr(result).splitlines()
    assert len(lines) <= 6
    assert max(map(len, lines)) <= 120
    assert lines[0] == "Compression of demo_adapter, separation_rank = 1"
    assert f"{result.totals.parameters:,} of 73,728 parameters" in lines[1]
    assert ("Fisher" if statistics else "Frobenius") in lines[2]


def test_what_is_kept_is_read_at_a_prompt(tmp_path):
    behaviour = Behaviour(128, 128, "example", 0.0463, 0.95, 0.248, 0.025)
    facts = {
        "data": "reviews.txt",
        "base": "b",
        "bytes_before": 302_000,
        "bytes_after": 18_000,
        "head_bytes": 3_100,
    }
    told = Fidelity.of(behaviour, **facts)
    made = lsr.compress(DEMO, separation_rank=1)
    of_result = {"fidelity": told, "written": tmp_path, "annotations": {}, "_folder": None}
    result = MeasuredCompression(made.source, made.plan, made.layers, made.chosen, **of_result)
    assert told.sentence() in unescape(result._repr_html_())
    lines = repr(result).splitlines()
    assert len(lines) <= 10
    assert max(map(len, lines)) <= 110
    assert lines[0] == "Compression of demo_adapter, separation_rank = 1"
    kl = "KL to the LoRA 0.0463 nats per example, 0.248 without an adapter"
    assert [line.strip() for line in lines[-5:]] == [
        "Measured: gives the LoRA's class to 122 of 128 held-out texts (90 to 98 %)",
        "keeps 81.3 ± 2.5 % of the LoRA's effect on 128 held-out texts of reviews.txt",
        kl,
        "files 302 kB → 18 kB (both include the 3.1 kB classifier head)",
        "not on disk before save(directory)",
    ]


def test_whole_answers_stand_first_and_no_spread_is_given_of_none():
    behaviour = Behaviour(8, 355, "token", 0.103, 0.97, 1.27, 0.01)
    files = {"bytes_before": 3_700_000, "bytes_after": 192_000}
    told = Fidelity.of(behaviour, data="sums.jsonl", base="b", **files, answered=8)
    # Wilson's interval for none of 8, at 1.96 standard errors: up to z² / (n + z²).
    assert 0.32 < 1.96**2 / (8 + 1.96**2) < 0.33
    assert told.sentence().startswith(
        "gives the LoRA's whole answer to 0 of 8 held-out prompts (0 to 32 %) · keeps 91.9 ± 1.0 % "
    )
    assert "0 ± 0" not in told.sentence()
    assert told.is_far
    assert not replace(told, kl=0.099).is_far


@pytest.mark.parametrize(
    ("asked", "is_missed"), [({"requested": 0.95}, False), ({"requested": 0.96}, True)]
)
def test_a_miss_is_told_in_the_line_of_what_was_asked(asked, is_missed):
    behaviour = Behaviour(96, 3556, "token", 0.052, 0.97, 1.0, 0.005)
    files = {"bytes_before": 3_700_000, "bytes_after": 192_000}
    told = Fidelity.of(behaviour, data="d", base="b", **files, **asked)
    assert told.is_missed == is_missed
    missed = ": missed" if is_missed else ""
    text = f"94.8 ± 0.5 % of the LoRA's effect ({100 * asked['requested']:g} % asked{missed})"
    assert text in told.sentence()


@pytest.mark.parametrize(("n_matching", "is_missed"), [(56, False), (55, False), (52, True)])
def test_answers_are_missed_by_more_than_their_standard_error(n_matching, is_missed):
    behaviour = Behaviour(64, 3556, "token", 0.001, 0.97, 1.0, 0.005)
    files = {"bytes_before": 3_700_000, "bytes_after": 192_000}
    options = {**files, "answered": 64, "n_matching": n_matching, "requested_answers": 0.9}
    told = Fidelity.of(behaviour, data="d", base="b", **options)
    assert told.is_missed == is_missed
    assert ("(90 % asked: missed)" in told.sentence()) == is_missed


@pytest.mark.parametrize(
    ("word", "right"), [("params", "parameters"), ("ration", "ratio"), ("storge", "storage")]
)
def test_a_misspelt_goal_is_told_the_right_word(word, right):
    with pytest.raises(LsrError, match=f"compress takes no '{word}'; did you mean '{right}'"):
        lsr.compress(DEMO, **{word: 4})


def test_a_field_of_the_settings_is_told_where_it_goes():
    words = "compress takes no 'held_out' by itself: give settings="
    with pytest.raises(LsrError, match=words) as told:
        lsr.compress(DEMO, ratio=4, held_out=64)
    typed = str(told.value).partition("settings=")[2]
    assert typed == "lsrdecomp.lora.search.MeasuredSettings(held_out=64)"
    assert eval(typed, {"lsrdecomp": lsr}).held_out == 64
    words = r"give settings=lsrdecomp.lora.compress.DistillSettings\(micro=2\)"
    with pytest.raises(LsrError, match=words):
        lsr.distill("small", base="b", data=["a"], teacher="lora", micro=2)


def test_the_signature_shows_every_goal():
    assert {"keep", *GOALS} <= set(inspect.signature(lsr.compress).parameters)


def test_an_argument_wins_over_its_setting():
    request = Request.parse({"base": "b", "data": "t", "keep": 0.9, "seed": 2, "batch": 4})
    settings = MeasuredSettings(seed=1, batch=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library_module, "compress_request", lambda _, asked, __: asked)
        asked = lsr.compress(DEMO, base="b", data="t", keep=0.9, seed=2, settings=settings)
    assert asked == request


def test_an_impossible_argument_is_refused_as_its_setting():
    with pytest.raises(LsrError, match="steps must be a whole number, 1 or more, got 0"):
        lsr.distill("small", base="b", data="texts.txt", teacher="lora", steps=0)
    with pytest.raises(LsrError, match="keep must be above 0 and below 1"):
        lsr.compress(DEMO, base="b", data="texts.txt", keep=1.5)


def test_texts_of_one_batch_are_of_similar_length():
    """A pair is read as one text, a conversation as all that is said in it."""
    said = PromptExample("", "", "l", messages=({"content": "a question"}, {"content": "yes"}))
    texts = ["six666", ("four", None), ("ab", "three"), PromptExample("prompt", "done", "l"), said]
    lengths = [n_characters(item) for item in read_data(texts)]
    assert lengths == [6, 4, 7, 10, 13]
