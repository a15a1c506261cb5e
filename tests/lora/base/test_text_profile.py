"""Profiles of texts: two sets that are unlike are told apart, with numbers; alike ones are not."""

import json

import numpy as np

from lsrdecomp.lora.base.dataset import PromptExample
from lsrdecomp.lora.base.text_profile import TextProfile


def texts(words, count=60, length=10, seed=0):
    """Draw texts whose words are distributed as in a language: rank to the power of -1."""
    generator = np.random.default_rng(seed)
    shares = 1.0 / np.arange(1, len(words) + 1)
    drawn = generator.choice(words, (count, length), p=shares / shares.sum())
    return [" ".join(row) for row in drawn]


FILMS = [f"film{i}" for i in range(400)]
SUMS = [f"sum{i}" for i in range(400)]


def test_other_texts_of_one_kind_are_alike():
    profile = TextProfile.of(texts(FILMS))
    assert profile.differences(texts(FILMS, seed=1), "reviews.txt") == []


def test_few_texts_are_no_reason_to_warn_of_others_of_their_kind():
    """Of few texts the frequent words are nearly all, and so tell little of other texts."""
    profile = TextProfile.of(texts(FILMS, count=48, length=8))
    assert profile.differences(texts(FILMS, count=700, length=8, seed=1), "reviews.txt") == []
    assert profile.differences(texts(SUMS, count=700, length=8, seed=1), "sums.txt") != []


def test_other_words_and_other_lengths_are_said_with_their_numbers():
    profile = TextProfile.of(texts(FILMS, count=400))
    (words,) = profile.differences(texts(SUMS), "sums.txt")
    assert "make up 0 % of sums.txt, and " in words
    assert words.endswith(" % of texts like their own")
    assert "the 200 most frequent words of the statistics' texts" in words
    (length,) = profile.differences(texts(FILMS, length=40, seed=1), "long.txt")
    assert length == ("the texts of long.txt have 40 words in the mean, those of the statistics 10")


def test_a_profile_is_read_back_and_tells_no_word():
    profile = TextProfile.of(texts(FILMS))
    written = json.dumps(profile.to_json())
    assert TextProfile.from_json(json.loads(written)) == profile
    assert "film" not in written
    for other in (None, 3, {}, {"texts": "many"}, [1]):
        assert TextProfile.from_json(other) is None


def test_prompts_conversations_and_pairs_count_all_that_they_say():
    prompt = PromptExample("two words", "three more words", "a.jsonl:1")
    conversation = PromptExample("", "", "a.jsonl:2", ({"role": "user", "content": "one two"},))
    profile = TextProfile.of([prompt, conversation, ("a pair", "of texts"), "plain"])
    assert profile.mean_words == (5 + 2 + 4 + 1) / 4
    assert TextProfile.of([]).differences([], "nothing.txt") == []
