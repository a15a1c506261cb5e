"""Texts that a model writes itself: the same again, none twice, no echoes, and after a kill."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("transformers")

from tiny_bases import write_directories  # noqa: E402
from tiny_language_model import make_base, make_lora  # noqa: E402

from lsrdecomp.errors import LsrError  # noqa: E402
from lsrdecomp.lora.base import written_texts  # noqa: E402
from lsrdecomp.lora.base.dataset import PromptExample  # noqa: E402
from lsrdecomp.lora.base.generation import generate  # noqa: E402
from lsrdecomp.lora.base.open_bases import load_base  # noqa: E402
from lsrdecomp.lora.base.written_texts import write_texts  # noqa: E402
from lsrdecomp.lora.files import Journal  # noqa: E402

GIVEN = [
    PromptExample(f"user {words} assistant", " one", "here")
    for words in ("one two three four", "three two assistant six", "six five one", "four user two")
]


@pytest.fixture(autouse=True)
def short_answers(monkeypatch):
    monkeypatch.setattr(written_texts, "NEW_TOKENS", 5)
    monkeypatch.setattr(written_texts, "MIN_FOUND", 0.01)  # this base has few words


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    return load_base(make_base(folder), make_lora(folder))


def said(texts):
    return [(text.prompt, text.completion, text.messages) for text in texts]


@pytest.mark.parametrize("given", [[], GIVEN], ids=["nothing", "prompts"])
def test_the_same_seed_writes_the_same_texts_and_none_twice(source, given):
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    first = write_texts(source, given, seed=0, count=48)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert said(write_texts(source, given, seed=0, count=48)) == said(first)
    assert said(write_texts(source, given, seed=1, count=48)) != said(first)
    assert 32 <= len(first) <= 48  # this base has few words
    assert len({text.prompt for text in first}) == len(first)
    assert all(text.completion.strip() for text in first)


def test_no_completion_begins_with_what_ends_it(source):
    prompts = ["one two three"] * 64
    sampled = {"new_tokens": 1, "seed": 0}
    words = generate(source.model, source.tokenizer, prompts, **sampled)
    frequent = max(filter(None, words), key=words.count)
    ends = source.tokenizer(frequent, add_special_tokens=False)["input_ids"]
    assert len(ends) == 1
    others = generate(source.model, source.tokenizer, prompts, **sampled, end_tokens=ends)
    assert frequent in words
    assert frequent not in others


def test_without_texts_prompts_have_all_forms(source):
    prompts = [text.prompt for text in write_texts(source, seed=0, count=96)]
    for beginning in ("Question:", "Input:", "Text:"):
        assert any(prompt.startswith(beginning) for prompt in prompts)
    ends = [prompt.endswith("\n") for prompt in prompts]
    assert any(ends)
    assert not all(ends)


def test_a_chat_template_is_a_form_where_there_is_one(source, monkeypatch):
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    monkeypatch.setattr(source.tokenizer, "chat_template", template)
    texts = write_texts(source, seed=0, count=48)
    chats = [text for text in texts if text.messages]
    assert chats
    assert [message["role"] for message in chats[0].messages] == ["user", "assistant"]
    assert len(chats) < len(texts)


def test_prompts_like_the_given_ones_keep_their_form_and_are_new(source):
    texts = write_texts(source, GIVEN, seed=0, count=40)
    given = {example.prompt for example in GIVEN}
    assert all(text.prompt.startswith("user ") for text in texts)
    assert all(text.prompt.endswith(" assistant") for text in texts)
    assert given.isdisjoint(text.prompt for text in texts)


def test_where_the_base_does_not_go_on_with_a_list_it_writes_as_without_one(source, monkeypatch):
    generate = written_texts.generate

    def silent_base(*arguments, **options):
        if options["top_p"] < 1.0:  # as the base is asked
            return [""] * len(arguments[2])
        return generate(*arguments, **options)

    monkeypatch.setattr(written_texts, "generate", silent_base)
    texts = write_texts(source, GIVEN, seed=0, count=40)
    assert any(text.prompt.startswith("Question:") for text in texts)


def test_echoes_and_empty_answers_leave(source, monkeypatch):
    """Of four answers one repeats the prompt, and one is empty."""

    def answer(_model, _tokenizer, prompts, **_options):
        answers = []
        for number, prompt in enumerate(prompts):
            if number % 4 == 0:
                answers.append(" ")
            elif number % 4 == 1:
                answers.append(f" {prompt} again")
            else:
                answers.append(f" reply {number}")
        return answers

    monkeypatch.setattr(written_texts, "generate", answer)
    monkeypatch.setattr(written_texts, "N_WORDS", 0)
    texts = write_texts(source, seed=0, count=80)
    completions = [text.completion for text in texts]
    assert any(completion.startswith(" reply") for completion in completions)
    assert not any(text.completion.endswith("again") for text in texts)
    assert all(completion.strip() for completion in completions)


def test_a_model_that_says_nothing_is_refused_with_what_to_give(source, monkeypatch):
    monkeypatch.setattr(
        written_texts,
        "generate",
        lambda _model, _tokenizer, prompts, **_options: [""] * len(prompts),
    )
    with pytest.raises(LsrError, match="wrote only 0 different texts.*--data"):
        write_texts(source, seed=0, count=40)


def test_a_killed_run_goes_on_with_what_was_written(source, tmp_path, monkeypatch):
    whole = write_texts(source, seed=0, count=40)
    generate = written_texts.generate
    calls = []

    def killed(*arguments, **options):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(options["seed"])
        return generate(*arguments, **options)

    journal = Journal(tmp_path / "journal")
    monkeypatch.setattr(written_texts, "generate", killed)
    with pytest.raises(KeyboardInterrupt), journal:
        write_texts(source, seed=0, count=40, journal=journal)
    assert journal.path.exists()
    assert len(calls) == 2
    monkeypatch.setattr(written_texts, "generate", generate)
    with journal:
        assert said(write_texts(source, seed=0, count=40, journal=journal)) == said(whole)


def test_progress_counts_texts_up_to_all_of_them(source):
    updates = []
    write_texts(source, seed=0, count=40, on_step=updates.append)
    assert {update.total for update in updates} == {40}
    assert [update.done for update in updates] == sorted(update.done for update in updates)
    assert updates[-1].done <= 40
    assert "writes" in updates[-1].stage


def test_a_classifier_reads_sentences_of_the_package(tmp_path):
    folder = write_directories(tmp_path, "SEQ_CLS", layers=1)
    classifier = load_base(folder / "base", folder / "lora")
    texts = write_texts(classifier, seed=0, count=50)
    assert len({first for first, _ in texts}) == 50
    assert all(second is None for _, second in texts)
    given = texts[:3]
    assert set(given).isdisjoint(write_texts(classifier, given, seed=0, count=500))
    assert write_texts(classifier, seed=1, count=50) != texts


def test_the_sentences_are_different_short_and_about_many_things():
    sentences = written_texts._sentences()
    assert len(set(sentences)) == len(sentences) >= 200
    assert all(10 < len(sentence) < 100 for sentence in sentences)
    random.Random(0).shuffle(sentences)
    firsts = {sentence.split()[0] for sentence in sentences}
    assert len(firsts) > 60


def test_sentences_have_the_words_after_which_the_lora_acts_most(source, monkeypatch):
    def by_word(_writer, prompts):
        return torch.tensor([2.0 if p.endswith(("Rating:", "SQL:")) else 0.1 for p in prompts])

    monkeypatch.setattr(written_texts, "N_WORDS", 2)
    monkeypatch.setattr(written_texts._TextWriter, "_first_token_divergences", by_word)
    prompts = [text.prompt for text in write_texts(source, seed=0, count=60)]
    ended = [prompt for prompt in prompts if prompt.endswith(("Rating:", "SQL:"))]
    assert len(ended) > 20
    assert not any(prompt.endswith("Label:") for prompt in prompts)


def test_of_answers_that_do_not_end_the_first_line_is_kept(source, monkeypatch):
    monkeypatch.setattr(written_texts, "BEGINNINGS_SHARE", 0.0)  # of whole texts
    monkeypatch.setattr(written_texts, "NEW_TOKENS", 6)
    answers = [" one two", " one two three four five six", " six\nfive four three two one"]
    monkeypatch.setattr(
        written_texts,
        "generate",
        lambda _model, _tokenizer, prompts, **_options: [
            answers[number % 3] for number in range(len(prompts))
        ],
    )
    completions = {text.completion for text in write_texts(source, seed=0, count=60)}
    assert completions == {" one two", " one two three four five six", " six"}


def test_answers_like_given_ones_are_no_longer_than_they_unless_they_end(source):
    texts = write_texts(source, GIVEN, seed=0, count=40)
    lengths = [len(text.completion.split()) for text in texts]
    assert set(lengths) <= {1, 2}  # a given answer has one word, and two end
