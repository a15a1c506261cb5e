"""JSON lines of prompts, conversations and texts: what is read, and what a bad line says."""

from __future__ import annotations

import csv
import json
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tiny_tokenizer import word_tokenizer  # noqa: E402

from lsrdecomp.lora.base.dataset import DataError, PromptExample, hold_out, read_examples  # noqa: E402
from lsrdecomp.lora.base.heads import Head, loss_mask  # noqa: E402
from lsrdecomp.lora.base.texts import read_data  # noqa: E402
from lsrdecomp.lora.base.tokens import (  # noqa: E402
    completion_text,
    model_inputs,
    prompt_text,
    token_batches,
    tokenize,
    with_completion,
)

TEMPLATE = (
    "{% for m in messages %}<turn> {{ m['role'] }} {{ m['content'] }} <end> {% endfor %}"
    "{% if add_generation_prompt %}<turn> assistant {% endif %}"
)
SPOKEN = [
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "three"},
    {"role": "user", "content": "four"},
    {"role": "assistant", "content": "five six"},
]


@pytest.fixture
def tokenizer():
    return word_tokenizer()


def file(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows),
        encoding="utf-8",
    )
    return path


def words(tokenizer, row, answers=True):
    chosen = [i for i, counted in zip(row.ids, row.loss_mask, strict=True) if counted == answers]
    return tokenizer.convert_ids_to_tokens(chosen)


def test_only_the_completion_counts_and_it_ends(tmp_path, tokenizer):
    examples = read_examples(
        file(tmp_path, {"prompt": "one\ntwo", "completion": " three"}, "", {"text": "four five"})
    )
    first, second = tokenize(examples, tokenizer)
    assert words(tokenizer, first, answers=False) == ["<s>", "one", "two"]
    assert words(tokenizer, first) == ["three", "</s>"]
    assert words(tokenizer, second, answers=False) == ["<s>"]
    assert words(tokenizer, second) == ["four", "five", "</s>"]
    assert all(tokenize(examples, tokenizer, answers="all")[0].loss_mask)


def test_a_completion_that_ends_by_itself_is_not_ended_twice(tmp_path, tokenizer):
    (row,) = tokenize(
        read_examples(file(tmp_path, {"prompt": "one", "completion": "two </s>"})), tokenizer
    )
    assert words(tokenizer, row) == ["two", "</s>"]


def test_what_the_assistant_says_counts_in_every_turn(tmp_path, tokenizer):
    tokenizer.chat_template = TEMPLATE
    (example,) = read_examples(file(tmp_path, {"messages": SPOKEN}))
    (row,) = tokenize([example], tokenizer)
    assert words(tokenizer, row) == ["three", "<end>", "five", "six", "<end>"]
    given = (
        "<turn> user one two <end> <turn> assistant three <end> <turn> user four <end> <turn> "
        "assistant"
    )
    assert prompt_text(example, tokenizer).split() == given.split()
    assert completion_text(example) == "five six"
    assert completion_text(with_completion(example, "seven")) == "seven"
    # What is said after the last answer is no completion
    asked_on = replace(example, messages=(*SPOKEN, {"role": "user", "content": "eight"}))
    assert completion_text(asked_on) == "five six"
    assert with_completion(asked_on, "five six") == example
    # As TRL's conversational datasets have it.
    split_conversation = {"prompt": SPOKEN[:-1], "completion": SPOKEN[-1:]}
    assert read_examples(file(tmp_path, split_conversation)) == [example]


def test_a_list_and_a_table_hold_the_same_examples(tmp_path):
    rows = [
        {"prompt": "one, two", "completion": "three"},
        {"prompt": "four", "completion": 'five "six"\nseven'},
    ]
    texts = [(row["prompt"], row["completion"]) for row in rows]
    (tmp_path / "list.json").write_text(f"\n {json.dumps(rows, indent=1)}")
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, rows)))
    with (tmp_path / "table.csv").open("w", newline="") as out:
        table = csv.DictWriter(out, ["prompt", "completion", "source"])
        table.writeheader()
        table.writerows(rows)
    for name in ("list.json", "lines.json", "table.csv"):
        assert [(each.prompt, each.completion) for each in read_examples(tmp_path / name)] == texts
        assert read_data(tmp_path / name) == read_examples(tmp_path / name)
    assert read_examples(tmp_path / "list.json")[1].where.endswith("list.json, entry 2")
    assert read_examples(tmp_path / "table.csv")[1].where.endswith("table.csv, line 4")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.json",
            '[{"text": "one"}, 3]',
            "a.json, entry 2: a int; each example must be a JSON object",
        ),
        ("a.json", '[{"text": "one"}', "a.json: not JSON"),
        (
            "a.csv",
            "question,answer\none,two\n",
            'line 2: "text" is missing; it has question, answer; give "prompt"',
        ),
        ("a.csv", "prompt,completion\none\n", 'line 2: "completion" is not text'),
        ("a.csv", "prompt,completion\none,two,three\n", None),
        ("a.csv", "prompt,completion\n", "no line has an example"),
        (
            "a.parquet",
            "PAR1",
            r"is Parquet; write it as JSON lines .*: python -c .*read_parquet\('.*a.parquet'\)",
        ),
    ],
)
def test_a_list_or_table_that_does_not_fit_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    if message is None:
        assert read_examples(tmp_path / name)[0].completion == "two"
        return
    with pytest.raises(DataError, match=message):
        read_examples(tmp_path / name)


def test_a_tokenizer_without_chat_template_is_named(tmp_path, tokenizer):
    examples = read_examples(
        file(tmp_path, {"prompt": "one", "completion": "two"}, {"messages": SPOKEN})
    )
    with pytest.raises(
        DataError,
        match=r'line 2: "messages" need a chat template, and the tokenizer of .* has none',
    ):
        tokenize(examples, tokenizer)


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ('{"prompt": ', "line 2: not JSON .*each example must be a JSON object"),
        ("[1, 2]", "line 2: a list; each example must be a JSON object"),
        ({"prompt": "one"}, 'line 2: "completion" is missing; it has prompt; give'),
        (
            {"question": "one", "answer": "two"},
            'line 2: "text" is missing; it has question, answer; give',
        ),
        ({"prompt": "one", "completion": 3}, 'line 2: "completion" is not text; give'),
        (
            {"prompt": "one", "completion": " \n"},
            'line 2: "completion" is empty, .* fill it or remove the line',
        ),
        ({"text": ""}, 'line 2: "text" is empty'),
        ({"prompt": SPOKEN, "completion": "x"}, 'line 2: "prompt" is not text'),
        ({"messages": []}, "line 2: no message is from the assistant"),
        (
            {"messages": [{"role": "assistant", "content": ""}]},
            "line 2: a message from the assistant is empty",
        ),
        ({"messages": ["hello"]}, 'line 2: "messages" must be a list of objects'),
    ],
)
def test_a_bad_line_says_where_and_the_way_out(tmp_path, row, says):
    path = file(tmp_path, {"text": "one"}, row)
    with pytest.raises(DataError, match=says) as caught:
        read_examples(path)
    assert str(caught.value).startswith(str(path))


def test_a_file_of_no_text_or_none_at_all_is_refused(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match="no line has an example"):
        read_examples(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes('{"text": "é"}'.encode("latin-1"))
    with pytest.raises(DataError, match="not UTF-8"):
        read_examples(tmp_path / "latin.jsonl")


def test_a_long_line_says_how_long_and_how_many(tmp_path, tokenizer):
    rows = [{"prompt": "one", "completion": "two " * n} for n in (1, 9, 4)]
    examples = read_examples(file(tmp_path, *rows))
    with pytest.raises(
        DataError, match=r"line 2: 12 tokens, more than the length of 6 \(2 of 3 .*--max-length 12"
    ):
        tokenize(examples, tokenizer, max_length=6)
    assert max(map(len, tokenize(examples, tokenizer, max_length=12))) == 12


def test_a_long_line_is_cut_at_its_beginning_where_that_is_wanted(tmp_path, tokenizer):
    (example,) = read_examples(
        file(tmp_path, {"prompt": "one two three four", "completion": "two three"})
    )
    (whole,) = tokenize([example], tokenizer)
    for length in (len(whole) - 2, len(whole), len(whole) + 2):
        (cut,) = tokenize([example], tokenizer, max_length=length, truncate=True)
        assert (cut.ids, cut.loss_mask) == (whole.ids[-length:], whole.loss_mask[-length:])
        assert sum(cut.loss_mask) == sum(whole.loss_mask)


def test_batches_hold_every_row_once_in_an_order_of_the_seed(tmp_path, tokenizer):
    rows = tokenize(
        read_examples(
            file(tmp_path, *({"prompt": "one", "completion": "two " * n} for n in range(1, 24)))
        ),
        tokenizer,
    )

    def order(seed):
        return [
            batch["input_ids"].tolist()
            for batch in token_batches(rows, size=4, seed=seed, pad_token_id=0)
        ]

    assert order(1) == order(1) != order(2)
    for seed in (None, 1):
        seen = []
        for batch in token_batches(rows, size=4, seed=seed, pad_token_id=0):
            real = batch["attention_mask"].sum(1)
            assert int(real.max()) == batch["input_ids"].shape[1]
            assert bool((batch["loss_mask"] <= batch["attention_mask"]).all())
            assert int(real.max() - real.min()) <= 4 or seed is None
            seen += real.tolist()
        assert sorted(seen) == sorted(map(len, rows))
        assert seed is not None or seen == [len(row) for row in rows]


def test_the_mask_is_for_the_loss_and_not_for_the_model(tmp_path, tokenizer):
    rows = tokenize(
        read_examples(file(tmp_path, {"prompt": "one", "completion": "two"})), tokenizer
    )
    (batch,) = token_batches(rows, size=4, seed=0, pad_token_id=0)
    assert set(model_inputs(batch)) == {"input_ids", "attention_mask"}
    assert loss_mask(batch, Head.causal_lm).tolist() == [[0, 0, 1, 1]]


def test_what_is_held_out_depends_on_the_seed_alone():
    train, held = hold_out(range(10), 3, seed=5)
    assert sorted(train + held) == list(range(10))
    assert len(held) == 3
    assert (train, held) == hold_out(range(10), 3, seed=5)
    assert held != hold_out(range(10), 3, seed=6)[1]
    with pytest.raises(DataError, match="10 of 10 examples cannot be held out"):
        hold_out(range(10), 10, seed=0)


def test_a_sequence_of_texts_may_hold_strings_pairs_and_examples():
    example = PromptExample("one, two", "three", "line 1")
    items = read_data(["a text", ("first", "second"), ["alone", None], example])
    assert items == [("a text", None), ("first", "second"), ("alone", None), example]


@pytest.mark.parametrize("element", [3, ("one", 2), ("a", "b", "c"), b"bytes", None])
def test_an_element_that_is_no_text_is_named_by_its_index(element):
    with pytest.raises(DataError, match=r"data\[1\] is .*; give strings, pairs"):
        read_data(["a text", element])
