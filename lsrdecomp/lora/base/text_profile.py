"""Profile of a set of texts: how long they are and which words they use, to tell two sets apart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any, Self

from lsrdecomp.lora.base.dataset import PromptExample, TextPair

WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class TextProfile:
    """Lengths and frequent words of some texts.

    Attributes
    ----------
    texts : int
    mean_words : float
        Mean number of words of a text.
    frequent : tuple of str
        Digests of the most frequent words, not secret: who has a dictionary finds the words.
    coverage : float
        The share of all words of every second text that are frequent in the others: what frequent
        words cover of texts that they were not counted in.

    Examples
    --------
    >>> profile = TextProfile.of(["a good film", "a bad film"])
    >>> profile.mean_words, round(profile.coverage, 2), len(profile.frequent)
    (3.0, 0.67, 4)
    """

    texts: int
    mean_words: float
    frequent: tuple[str, ...]
    coverage: float

    @classmethod
    def of(cls, texts: Sequence[str | TextPair | PromptExample]) -> Self:
        """Return the profile of some texts."""
        n_words = 200
        # 1. Length and frequent words, of all texts.
        counts = _word_counts(texts)
        mean_words = counts.total() / max(1, len(texts))
        frequent = tuple(word for word, _ in counts.most_common(n_words))
        # 2. What the frequent words of one half cover of the other.
        half = [word for word, _ in _word_counts(texts[::2]).most_common(n_words)]
        return cls(len(texts), mean_words, frequent, _covered(_word_counts(texts[1::2]), half))

    @classmethod
    def from_json(cls, values: Any) -> Self | None:
        """Return the profile that `to_json` wrote; None for anything else."""
        if not isinstance(values, Mapping):
            return None
        try:
            return cls(
                int(values["texts"]),
                float(values["mean_words"]),
                tuple(map(str, values["frequent"])),
                float(values["coverage"]),
            )
        except (KeyError, TypeError, ValueError):
            return None

    def to_json(self) -> dict[str, Any]:
        """Return the profile as JSON values."""
        return asdict(self)

    def differences(self, texts: Sequence[str | TextPair | PromptExample], name: str) -> list[str]:
        """Return in what other texts are unlike these, each as a sentence with the numbers.

        Parameters
        ----------
        texts : sequence of texts
            The others.
        name : str
            What they are called in the sentences.

        Notes
        -----
        Lengths are unlike above a factor of three. Words are where the frequent ones cover less
        than 0.85 of what they cover of their own texts: those of 700 sentences of SST-2 cover 0.93
        to 1.04 of it in 40 other sentences, 0.82 in RTE and 0.76 in MRPC, whose texts are longer
        too.
        """
        counts = _word_counts(texts)
        mean_words = counts.total() / max(1, len(texts))
        sentences = []
        shorter, longer = sorted((max(mean_words, 1e-9), max(self.mean_words, 1e-9)))
        if longer > 3.0 * shorter:
            sentences.append(
                f"the texts of {name} have {mean_words:.0f} words in the mean, those of the "
                f"statistics {self.mean_words:.0f}"
            )
        covered = _covered(counts, self.frequent)
        if covered < 0.85 * self.coverage:
            sentences.append(
                f"the {len(self.frequent)} most frequent words of the statistics' texts make up "
                f"{100 * covered:.0f} % of {name}, and {100 * self.coverage:.0f} % of texts like "
                "their own"
            )
        return sentences


def _word_counts(texts: Sequence[str | TextPair | PromptExample]) -> Counter[str]:
    """Return how often each word stands in some texts, by its digest."""
    words: Counter[str] = Counter()
    for text in texts:
        words.update(WORD.findall(_plain(text).lower()))
    return Counter({_digest(word): count for word, count in words.items()})


def _covered(counts: Counter[str], words: Sequence[str]) -> float:
    """Return the share of all that was counted that some words are."""
    return sum(counts[word] for word in words) / max(1, counts.total())


def _plain(item: str | TextPair | PromptExample) -> str:
    """Return all that a text says."""
    if isinstance(item, str):
        return item
    if isinstance(item, PromptExample):
        messages = [message["content"] for message in item.messages]
        return "\n".join([item.prompt, item.completion, *messages])
    return "\n".join(part for part in item if part)


def _digest(word: str) -> str:
    return blake2b(word.encode(), digest_size=5).hexdigest()
