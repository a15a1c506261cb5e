"""Texts that are given, and which of them are held out; steps as they are counted aloud."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lsrdecomp.errors import LsrError
from lsrdecomp.lora.base import texts as texts_module
from lsrdecomp.lora.base.behaviour import Behaviour
from lsrdecomp.lora.base.dataset import DataError, PromptExample
from lsrdecomp.lora.base.texts import Item, data_name, few_texts, read_data, split_texts
from lsrdecomp.lora.compress.compress_lora import _step_times
from lsrdecomp.lora.files.progress import PlannedSteps, ProgressUpdate
from lsrdecomp.lora.measure.fidelity import Fidelity
from lsrdecomp.lora.search.measured_settings import MeasuredSettings


@pytest.mark.parametrize(
    "odd", [3, None, ("a", "b", "c"), ("a",), ("a", 3), (3, "a"), {"text": "a"}, ["a", b"b"]]
)
def test_what_is_no_text_is_refused_with_its_place(odd: object) -> None:
    texts = ["first", ("a question", "an answer"), ["a pair", None], odd]
    with pytest.raises(DataError, match=r"data\[3\] is .*; give strings, pairs"):
        read_data(texts)  # type: ignore[arg-type]
    assert read_data(texts[:3]) == [  # type: ignore[arg-type]
        ("first", None),
        ("a question", "an answer"),
        ("a pair", None),
    ]


def test_the_ending_of_a_file_says_what_it_holds(tmp_path: Path) -> None:
    lines = tmp_path / "texts.txt"
    lines.write_text("one\ntwo\tand more\n")
    assert read_data(lines) == [("one", None), ("two", "and more")]
    examples = tmp_path / "texts.jsonl"
    examples.write_text('{"prompt": "2 + 2 =", "completion": " 4"}\n')
    (example,) = read_data(str(examples))
    assert isinstance(example, PromptExample)
    assert (example.prompt, example.completion) == ("2 + 2 =", " 4")
    assert (data_name(lines), data_name(str(examples))) == ("texts.txt", "texts.jsonl")
    assert data_name(["text"] * 1200) == "1,200 texts"
    assert data_name(None) == "images drawn without a prompt"


def chat(first: str, last: str) -> PromptExample:
    messages = ({"role": "user", "content": first}, {"role": "assistant", "content": last})
    return PromptExample("", "", "here", messages=messages)


@pytest.mark.parametrize(
    ("begin", "make"),
    [
        (lambda text: text.prompt, lambda i, j: PromptExample(f"ask {i}", f"say {j}", "here")),
        (lambda text: text.completion, lambda i, j: PromptExample("", f"text {i}", f"line {j}")),
        (lambda text: text.messages[0]["content"], lambda i, j: chat(f"ask {i}", f"say {j}")),
    ],
    ids=["prompts", "plain texts", "conversations"],
)
def test_texts_with_one_beginning_are_never_on_both_sides(begin, make) -> None:
    texts = [make(i, j) for j in range(3) for i in range(40)]
    held_out, remaining = split_texts(texts, 30, seed=0)
    assert len(held_out) == 30
    assert len(remaining) == 90
    assert not set(map(begin, held_out)) & set(map(begin, remaining))
    # An answer that many give is no beginning
    assert len(split_texts([make(i, 0) for i in range(40)], 10, seed=0)[0]) == 10


def test_conversations_that_share_a_system_prompt_are_different_texts() -> None:
    system = {"role": "system", "content": "Answer in one word."}
    texts: list[Item] = [
        replace(each, messages=(system, *each.messages))
        for each in (chat(f"ask {i}", "yes") for i in range(40))
    ]
    assert not few_texts(texts)
    held_out, remaining = split_texts(texts, 30, seed=0)
    assert (len(held_out), len(remaining)) == (10, 30)
    # Without the question they are one
    assert few_texts([replace(chat("ask", "yes"), messages=(system,))] * 40)


def test_several_completions_of_a_prompt_count_as_one_if_asked() -> None:
    texts: list[Item] = [
        PromptExample(f"ask {i}", f"say {j}", "here") for i in range(40) for j in range(1 + i % 5)
    ]
    held_out, remaining = split_texts(texts, 30, seed=0, by_prompt=True)
    asked = {text.prompt for text in held_out if isinstance(text, PromptExample)}
    assert len(asked) == 10
    assert len(held_out) > 10
    assert len(held_out) + len(remaining) == len(texts)


def test_a_prompt_of_most_texts_is_not_held_out() -> None:
    """It counts as one prompt, and would leave too little to learn from."""
    often: list[Item] = [PromptExample("ask", f"say {j}", "here") for j in range(100)]
    texts = [*often, *(PromptExample(f"ask {i}", "say", "here") for i in range(40))]
    for seed in range(20):
        held_out, _ = split_texts(texts, 30, seed, by_prompt=True)
        assert len(held_out) == 10


@pytest.mark.parametrize(
    ("n_texts", "max_held_out", "n_held_out"),
    [
        (32, 128, 8),
        (100, 128, 25),
        (103, 128, 25),
        (1000, 128, 128),
        (100, 24, 24),
        (100, 3, 8),  # fewer measure nothing
    ],
)
def test_at_most_a_quarter_is_held_out(n_texts: int, max_held_out: int, n_held_out: int) -> None:
    texts: list[Item] = [(f"text {i}", None) for i in range(n_texts)]
    held_out, remaining = split_texts(texts, max_held_out, seed=3)
    assert len(held_out) == n_held_out
    assert sorted(held_out + remaining) == sorted(texts)
    assert held_out != split_texts(texts, max_held_out, seed=4)[0]


def test_texts_are_counted_by_what_differs_between_them(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[Item] = [(f"text {i % 31}", f"answer {i}") for i in range(186)]
    with pytest.raises(LsrError, match="31 different texts are too few: 32 are needed"):
        split_texts(texts, 8, seed=0)
    monkeypatch.setattr(texts_module, "MIN_TEXTS", 31)
    assert len(split_texts(texts, 8, seed=0)[0]) == 6


@pytest.mark.parametrize(
    ("settings", "total"),
    [({}, 4), ({"passes": 2}, 6), ({"distill": 40}, 5), ({"passes": 2, "distill": 40}, 7)],
)
def test_steps_are_numbered_of_so_many(settings: dict[str, int], total: int) -> None:
    told: list[ProgressUpdate] = []
    steps = PlannedSteps(told.append, _step_times(MeasuredSettings(keep=0.9, **settings)))
    steps.begin("opening the base")
    steps(ProgressUpdate("reading", 2, 7, "layers"))
    for _ in range(total):
        steps.begin("more")
    assert [step.stage for step in told[:3]] == [
        f"step 1 of {total} · opening the base",
        f"step 1 of {total} · reading",
        f"step 2 of {total} · more",
    ]
    assert (told[1].done, told[1].total, told[1].unit) == (2, 7, "layers")
    assert (told[0].done, told[0].total) == (0, 0)
    # One more than was planned: the last is never "4 of 3"
    assert [step.stage for step in told[-2:]] == [
        f"step {total} of {total} · more",
        f"step {total + 1} of {total + 1} · more",
    ]
    PlannedSteps(None, [1.0]).begin("nobody listens")


def test_a_fidelity_says_in_words_and_numbers_what_was_measured() -> None:
    behaviour = Behaviour(128, 3000, "token", 0.0842, None, 1.684, None)
    files = {"bytes_before": 3_700_000, "bytes_after": 12_000}
    plain = Fidelity.of(behaviour, data="a.jsonl", base="b", **files)
    assert plain.sentence() == (
        "keeps 95.0 % of the LoRA's effect on 128 held-out texts of a.jsonl · KL to the LoRA "
        "0.0842 nats per token, 1.68 without an adapter · files 3.7 MB → 12 kB"
    )
    written = plain.to_json()
    assert (written["kept"], written["measurements"], written["distilled"]) == (plain.kept, 1, 0)
    assert (written["asked"], written["answered"], written["alike"]) == (None, 0, 0)
    compared = Fidelity.of(
        behaviour, data="a.jsonl", base="b", **files, answered=32, n_matching=30, head_bytes=3100
    )
    answers = "gives the LoRA's whole answer to 30 of 32 held-out prompts (80 to 98 %) · keeps 95.0"
    assert compared.sentence().startswith(answers)
    assert compared.sentence().endswith("(both include the 3.1 kB of other modules)")
    trained = Fidelity.of(behaviour, data="a.jsonl", base="b", **files, distilled=40)
    assert trained.sentence() == f"{plain.sentence()} · distilled for 40 steps"


@pytest.mark.parametrize(("kl", "is_poor"), [(0.49, False), (0.51, True)])
def test_a_version_that_keeps_less_than_half_is_poor(kl: float, is_poor: bool) -> None:
    behaviour = Behaviour(128, 128, "example", kl, 0.9, 1.0, 0.01)
    told = Fidelity.of(behaviour, data="d", base="b", bytes_before=2, bytes_after=1)
    assert told.is_poor == is_poor
