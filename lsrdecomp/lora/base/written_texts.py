"""Texts that a model writes itself, where none or only a few of its LoRA's task are given.

A LoRA's effect is measured on texts that it meets. Who has none lets the model write them:

- **from a few prompts** the base continues lists of four of them, and the LoRA answers what the
  base wrote (Trans-LoRA [1]_ without its discriminator);
- **from nothing** the LoRA answers sentences about everything and nothing, which come with the
  package, in forms such as ``Text: … Label:``. They have those words after the sentence after which
  the LoRA acts most. An answer often tells what it is an answer to, so the base also writes prompts
  backwards from answers, and the LoRA answers those. To the rest the LoRA itself writes the prompt,
  after the token that begins a text.

Answers are sampled from the LoRA at temperature 1, since the divergence of two adapters is a mean
over what the LoRA says. Duplicates, empty answers and echoes of the prompt are left out, and where
a LoRA goes on and on in a prompt unlike its own, its first line is kept. A model that answers with
classes or numbers reads the sentences as they are.

.. [1] R. Wang et al., Trans-LoRA: towards data-free transferable parameter efficient finetuning,
       2024.
"""

from __future__ import annotations

import random
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import torch

from lsrdecomp.errors import LsrError
from lsrdecomp.lora.base.autocast import mixed_precision
from lsrdecomp.lora.base.dataset import PromptExample
from lsrdecomp.lora.base.divergence import divergences, without_delta
from lsrdecomp.lora.base.generation import evaluation_mode, generate
from lsrdecomp.lora.base.heads import Head
from lsrdecomp.lora.base.texts import (
    CONTINUED,
    MIN_TEXTS,
    SENTENCES,
    WRITTEN,
    Item,
    few_texts,
)
from lsrdecomp.lora.base.tokens import DEFAULT_PROMPT_LENGTH, prompt_text
from lsrdecomp.lora.files.journal import Journal, content_key
from lsrdecomp.lora.files.progress import Counter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from lsrdecomp.lora.base.base_model import Base
    from lsrdecomp.lora.files.progress import OnStep

N_WRITTEN = 168
"""Texts that are written: 64 to measure on, half as many to select by, and 64 to calibrate on, and
some that may be missing in the end."""
N_WRITTEN_TO_TRAIN = 264
"""The same where variants are trained, by batches of eight."""
TRIAL_BATCH = 16
"""Prompts of a forward pass by which forms are tried."""
NEW_TOKENS = 48
"""Maximum tokens of an answer, and of a prompt that is written without an example of one."""
MAX_PROMPT_TOKENS = 256
"""Maximum tokens of a prompt that is written like others."""
BATCH = 64
"""Prompts that are continued together; each such batch has a seed of its own."""
LISTED = 4
"""Prompts in a list that the base continues."""
LABEL = "Text: "
"""What each of them begins with there: without it a base often goes on with a line of its own."""
MAX_ROUNDS = 4
"""Maximum rounds of writing. Each makes up for what was left out of the rounds before."""
MIN_FOUND = 0.125
"""Share of what is missing that a round must bring for another one to follow."""
MAX_MISSING = 0.05
"""Share of texts that may be missing: a round takes nearly as long for one text as for sixty."""
BASE_TOP_P = 0.8
"""Share of the probability that the base writes prompts from: its rarer tokens are noise."""

WRITING_HEADS = (Head.causal_lm, Head.seq2seq)
"""Heads of models that write texts."""
PLAIN = "{}\n"
"""The form of a sentence without words about it."""
CHAT = ""
"""Stands among forms for the tokenizer's chat template."""
BEFORE = ("Text", "Input", "Question")
"""Words before the sentence of a form, in turn."""
AFTER = (
    *("Answer", "Output", "Label", "Response", "Result", "Sentiment", "Category", "Class", "Topic"),
    *("Summary", "Title", "Translation", "Intent", "Text", "Description", "Reply", "Assistant"),
    *("Explanation", "Code", "SQL", "Entities", "Keywords", "Score", "Rating", "Emotion"),
    *("Paraphrase", "Correction", "Hypothesis", "Conclusion", "Solution", "JSON", "Data"),
)
"""Words after the sentence of a form, before the answer."""
N_WORDS = 6
"""Words after the sentence that are used, of those that are tried."""
N_TRIAL_SENTENCES = 4
"""Sentences on which words are tried."""
BACKWARDS = "Output: {}\nInput:"
"""What the base continues, to write a prompt backwards from an answer."""
BACKWARDS_SHARE = 0.25
"""Share of the texts whose prompts are written backwards."""
BEGINNINGS_SHARE = 0.125
"""Share of the texts whose prompts the LoRA writes itself."""


def write_texts(
    source: Base,
    given: Sequence[Item] = (),
    *,
    seed: int,
    count: int = N_WRITTEN,
    max_length: int | None = None,
    journal: Journal | None = None,
    on_step: OnStep | None = None,
) -> list[Item]:
    """Let a model write texts of its LoRA's task.

    Parameters
    ----------
    source : Base
        A base with the LoRA on it.
    given : sequence of texts
        A few texts of the task; without any the model begins with sentences about anything.
    seed : int
        The same seed writes the same texts.
    count : int
        Maximum texts.
    max_length : int, optional
        Maximum tokens of a text with its answer; absent, the most that the model can read.
    journal : Journal, optional
        Keeps what was written, so that a killed run goes on.
    on_step : callable, optional
        Called with a `ProgressUpdate` after every batch of texts.

    Returns
    -------
    list
        Prompts with completions, none of them given. For a model that does not write, sentences.

    Raises
    ------
    LsrError
        If too few different texts came of it.
    """
    if source.head not in WRITING_HEADS:
        written: list[Item] = [(each, None) for each in _shuffled(_sentences(), f"{seed}")]
        return [text for text in written if text not in set(given)][:count]
    writer = _TextWriter(source, seed, max_length or _max_positions(source), journal, on_step)
    texts: list[PromptExample] = []
    # An encoder-decoder does not go on with what it reads.
    if given and source.head is Head.causal_lm:
        texts = writer.from_prompts([_as_prompt(item) for item in given], count)
    if few_texts(texts):  # none were given, or the base did not go on with their list
        texts = _different([*texts, *writer.from_nothing(count - len(texts))])
    if few_texts(texts):
        raise LsrError(
            f"the model wrote only {len(texts)} different texts of its own, and {MIN_TEXTS} are "
            "needed: give texts of the LoRA's task by --data (data= in Python)"
        )
    return list(texts)


def kind_of_written(source: Base, given: Sequence[Item]) -> str:
    """Return what the texts are called that `write_texts` returns."""
    if source.head not in WRITING_HEADS:
        return SENTENCES
    return CONTINUED if given and source.head is Head.causal_lm else WRITTEN


def _sentences() -> list[str]:
    """Return the sentences that come with the package."""
    text = (files("lsrdecomp.lora.base") / "sentences.txt").read_text(encoding="utf-8")
    return text.splitlines()


def _shuffled(values: Sequence[str], seed: str) -> list[str]:
    """Return values in an order that depends on a seed alone."""
    return random.Random(seed).sample(values, len(values))


def _as_prompt(item: Item) -> PromptExample:
    """Return a given text as an example; a text without a prompt is all completion."""
    if isinstance(item, PromptExample):
        return item
    assert isinstance(item, tuple)  # files and batches are of models that write no texts
    first, second = item
    if second is None:
        return PromptExample("", first, "a given text")
    return PromptExample(first, second, "a given text")


@dataclass(frozen=True, slots=True)
class _TextWriter:
    """Writes texts with a base and its LoRA; each batch is written once."""

    source: Base
    seed: int
    max_length: int
    journal: Journal | None
    on_step: OnStep | None

    def from_nothing(self, count: int) -> list[PromptExample]:
        """Write texts without any that are given."""
        n_backwards = round(BACKWARDS_SHARE * count)
        n_beginnings = round(BEGINNINGS_SHARE * count)
        if self.source.head is not Head.causal_lm:
            n_backwards = n_beginnings = 0
        forms = self._find_forms()
        progress = Counter(self.on_step, "the model writes its texts", count, "texts")
        n_sentences = count - n_backwards - n_beginnings

        def answer_sentences(number: int, missing: int) -> list[PromptExample]:
            return self._answer_sentences(forms, number, missing)

        answered = self._collect(n_sentences, answer_sentences, progress)

        def answer_backwards(number: int, missing: int) -> list[PromptExample]:
            return self._answer_backwards(answered, forms, number, missing)

        backwards = self._collect(n_backwards, answer_backwards, progress)
        beginnings = self._collect(n_beginnings, self._go_on, progress)
        texts = _different([*answered, *backwards, *beginnings])
        # Further sentences make up for what the last two did not bring.
        further = self._collect(
            count - len(texts), answer_sentences, progress, first_round=MAX_ROUNDS
        )
        return _different([*texts, *further])

    def from_prompts(self, given: Sequence[PromptExample], count: int) -> list[PromptExample]:
        """Write texts like a few that are given."""
        progress = Counter(self.on_step, "the model writes texts like yours", count, "texts")

        def answer_more(number: int, missing: int) -> list[PromptExample]:
            return self._answer_more(given, number, missing)

        return self._collect(count, answer_more, progress)

    def _collect(
        self,
        count: int,
        write_round: Callable[[int, int], list[PromptExample]],
        progress: Counter,
        first_round: int = 0,
    ) -> list[PromptExample]:
        """Write rounds of texts until few are missing, or one brings little that is new."""
        collected: dict[str, PromptExample] = {}
        for number in range(first_round, first_round + MAX_ROUNDS):
            missing = count - len(collected)
            if missing <= MAX_MISSING * count:
                break
            before = len(collected)
            for text in write_round(number, missing)[:missing]:
                collected.setdefault(self._prompt(text), text)
            found = len(collected) - before
            progress.add(found)
            if found < MIN_FOUND * missing:
                break
        return list(collected.values())

    # Three ways to a prompt from nothing, and one from given prompts.

    def _answer_sentences(
        self, forms: Sequence[str], number: int, missing: int
    ) -> list[PromptExample]:
        """Answer sentences of the package, each in one of the forms."""
        order = _shuffled(_sentences(), f"{self.seed} {number}")
        return self._answer(_in_forms(order[:missing], forms, shift=number))

    def _answer_backwards(
        self, answered: Sequence[PromptExample], forms: Sequence[str], number: int, missing: int
    ) -> list[PromptExample]:
        """Let the base write prompts backwards from answers, and answer those."""
        answers = _shuffled([text.completion.strip() for text in answered], f"{self.seed} {number}")
        answers = [answer for answer in answers if answer][:missing]
        written = self._continue(
            [BACKWARDS.format(answer) for answer in answers],
            by_lora=False,
            number=number,
            end="\n",
        )
        first_lines = [text.strip().split("\n")[0].strip() for text in written]
        prompts = [
            line for line, answer in zip(first_lines, answers, strict=True) if line != answer
        ]
        return self._answer(_in_forms([line for line in prompts if line], forms, shift=number))

    def _go_on(self, number: int, missing: int) -> list[PromptExample]:
        """Let the LoRA write whole texts after nothing; a third of each is the prompt."""
        tokenizer = self.source.tokenizer
        start = ""
        if not tokenizer("")["input_ids"]:
            start = tokenizer.bos_token or tokenizer.eos_token or "\n"
        texts = []
        for written in self._continue([start] * missing, by_lora=True, number=number):
            words = written.split(" ")
            n_prompt = max(1, len(words) // 3)
            prompt = " ".join(words[:n_prompt])
            completion = " ".join(["", *words[n_prompt:]])
            texts.append(PromptExample(prompt, completion, "written"))
        return [text for text in texts if _is_answer(text.prompt, text.completion)]

    def _answer_more(
        self, given: Sequence[PromptExample], number: int, missing: int
    ) -> list[PromptExample]:
        """Let the base continue lists of given prompts, and answer what it wrote."""
        generator = random.Random(f"{self.seed} {number}")
        bodies = [_body(example) for example in given]
        beginning = _common_beginning(bodies)
        ending = _common_beginning([body[::-1] for body in bodies])[::-1]
        if len(set(bodies)) < 2:  # what one prompt has in common with others is not known
            beginning = ending = ""
        cores = [body.removesuffix(ending) for body in bodies]
        # 1. Lists of prompts without their common ending. Where prompts have one line each, what
        #    the base writes ends with its line, else with its paragraph.
        separator = "\n\n"
        end = separator if any("\n" in core for core in cores) else "\n"
        n_tokens = max(len(ids) for ids in self.source.tokenizer(cores)["input_ids"])
        new_tokens = min(MAX_PROMPT_TOKENS, n_tokens + n_tokens // 4)
        n_listed = min(LISTED, len(cores), max(1, (self.max_length - new_tokens) // (n_tokens + 2)))
        lists = []
        for _ in range(missing):
            chosen = generator.sample(cores, n_listed)
            labelled = [f"{LABEL}{each}" for each in [*chosen, beginning]]
            # A token of a word begins with the space before it.
            lists.append(separator.join(labelled).removesuffix(" "))
        written = self._continue(
            lists, by_lora=False, number=number, new_tokens=new_tokens, end=end
        )
        # 2. Keep what is about as long as the given prompts, and none of them.
        lengths = [len(core) - len(beginning) for core in cores]
        shortest, longest = min(lengths) // 2, 2 * max(lengths)
        prompts: list[PromptExample] = []
        for text in written:
            core = text.split(end)[0].rstrip()
            if not beginning:
                core = core.lstrip()
            body = f"{beginning}{core}{ending}"
            if core.strip() and shortest <= len(core) <= longest and body not in bodies:
                prompts.append(_with_body(given[len(prompts) % len(given)], body))
        # 3. Answer them, in no more words than the given answers have; texts without prompts are
        #    written on from their first third.
        max_words = max(len(_answer_of(example).split()) for example in given)
        return self._answer(prompts, max_words)

    # The forms in which the LoRA acts most.

    def _find_forms(self) -> list[str]:
        """Return the forms in which sentences are put to the LoRA.

        One that was trained on prompts of one form may do little in others. So there are those
        words after the sentence after which the LoRA acts most.
        """
        trial = _shuffled(_sentences(), f"{self.seed} forms")[:N_TRIAL_SENTENCES]
        words = AFTER[:N_WORDS]
        if self.source.head is Head.causal_lm:
            effects = self._effects([f"{BEFORE[0]}: {{}} {word}:" for word in AFTER], trial)
            by_word = dict(zip(AFTER, effects.values(), strict=True))
            words = tuple(sorted(AFTER, key=lambda word: -by_word[word])[:N_WORDS])
        forms = [f"{BEFORE[i % len(BEFORE)]}: {{}} {word}:" for i, word in enumerate(words)]
        forms.append(PLAIN)
        has_chat = bool(getattr(self.source.tokenizer, "chat_template", None))
        if has_chat and self.source.head is Head.causal_lm:
            forms.append(CHAT)
        return forms

    def _effects(self, forms: Sequence[str], sentences: Sequence[str]) -> dict[str, float]:
        """Return how far the LoRA moves the first token of answers in each form, KL in nats."""
        prompts = [
            self._prompt(example) for form in forms for example in _in_forms(sentences, [form])
        ]
        key = content_key("effects", self.source.name, self.source.adapter_sha256, prompts)
        entry = None if self.journal is None else self.journal.get(key)
        if entry is not None:
            return dict(entry.values)
        divergence = self._first_token_divergences(prompts)
        size = len(sentences)
        effects = {
            form: float(divergence[index * size : (index + 1) * size].mean())
            for index, form in enumerate(forms)
        }
        if self.journal is not None:
            self.journal.put(key, values=effects)
        return effects

    def _first_token_divergences(self, prompts: Sequence[str]) -> Tensor:
        """Return KL(LoRA ‖ base) of the token that follows each prompt."""
        model = self.source.model
        parts = []
        options = {"padding": True, "padding_side": "right", "return_tensors": "pt"}
        with mixed_precision(model), evaluation_mode(model, autocast=False) as device:
            for start in range(0, len(prompts), TRIAL_BATCH):
                batch = list(prompts[start : start + TRIAL_BATCH])
                encoded = self.source.tokenizer(batch, **options).to(device)
                mask = encoded["attention_mask"]
                inputs = {"input_ids": encoded["input_ids"], "attention_mask": mask}
                last = torch.arange(len(batch), device=device), mask.sum(1) - 1
                with torch.no_grad():
                    adapted = model(**inputs).logits[last]
                    with without_delta(model):
                        plain = model(**inputs).logits[last]
                parts.append(divergences(adapted.float(), plain.float(), self.source.head))
        return torch.cat(parts).cpu()

    def _answer(
        self, prompts: Sequence[PromptExample], max_words: int | None = None
    ) -> list[PromptExample]:
        """Return prompts with the LoRA's answers, without empty ones and echoes.

        Answers that the LoRA has not ended have at most ``max_words``.
        """
        completions = self._continue([self._prompt(each) for each in prompts], by_lora=True)
        answered = []
        for example, text in zip(prompts, completions, strict=True):
            completion = text
            if not self._has_ended(text):
                completion = _first_words(text, max_words)
            if not _is_answer(_body(example), completion):
                continue
            if example.messages:
                reply = {"role": "assistant", "content": completion.strip()}
                answered.append(replace(example, messages=(*example.messages, reply)))
            else:
                answered.append(replace(example, completion=completion))
        return answered

    def _has_ended(self, answer: str) -> bool:
        """Return whether an answer is so short that the LoRA has ended it."""
        return len(self.source.tokenizer(answer)["input_ids"]) < NEW_TOKENS - 2

    def _prompt(self, example: PromptExample) -> str:
        """Return what a model reads of an example before it answers."""
        if not example.messages:
            return example.prompt
        messages = [*example.messages]
        if messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": "-"})
        return prompt_text(replace(example, messages=tuple(messages)), self.source.tokenizer)

    def _continue(
        self,
        prompts: Sequence[str],
        *,
        by_lora: bool,
        number: int = 0,
        new_tokens: int | None = None,
        end: str = "",
    ) -> list[str]:
        """Return how the LoRA, or the base alone, goes on with each prompt.

        That of a prompt that leaves no room is empty. ``end`` ends a text beside the model's own.
        """
        new_tokens = NEW_TOKENS if new_tokens is None else new_tokens
        completions = [""] * len(prompts)
        lengths = [len(self.source.tokenizer(prompt)["input_ids"]) for prompt in prompts]
        fitting = [i for i, n in enumerate(lengths) if n + new_tokens < self.max_length]
        for start in range(0, len(fitting), BATCH):
            chosen = fitting[start : start + BATCH]
            seed = int(content_key(self.seed, by_lora, number, start)[:8], 16)
            written = self._continue_batch(
                [prompts[i] for i in chosen], seed, by_lora, new_tokens, end
            )
            for i, text in zip(chosen, written, strict=True):
                completions[i] = text
        return completions

    def _continue_batch(
        self, prompts: list[str], seed: int, by_lora: bool, new_tokens: int, end: str
    ) -> list[str]:
        """Continue one batch, unless the journal has it."""
        adapter = self.source.adapter_sha256 if by_lora else ""
        key = content_key("written", self.source.name, adapter, seed, new_tokens, end, prompts)
        entry = None if self.journal is None else self.journal.get(key)
        if entry is not None:
            return list(entry.values)
        model = self.source.model
        with self._active(by_lora), mixed_precision(model):
            completions = generate(
                model,
                self.source.tokenizer,
                prompts,
                new_tokens=new_tokens,
                batch_size=BATCH,
                seed=seed,
                top_p=1.0 if by_lora else BASE_TOP_P,
                end_tokens=_tokens_with(self.source.tokenizer, end) if end else (),
            )
        if self.journal is not None:
            self.journal.put(key, values=completions)
        return completions

    @contextmanager
    def _active(self, by_lora: bool) -> Iterator[None]:
        """Run with the LoRA inside a ``with`` block, or with the base alone."""
        with nullcontext() if by_lora else without_delta(self.source.model):
            yield


def _in_forms(bodies: Sequence[str], forms: Sequence[str], shift: int = 0) -> list[PromptExample]:
    """Return prompts in all forms in turn."""
    prompts: list[PromptExample] = []
    for index, body in enumerate(bodies):
        form = forms[(index + shift) % len(forms)]
        if form == CHAT:
            message = {"role": "user", "content": body}
            prompts.append(PromptExample("", "", "written", messages=(message,)))
        else:
            prompts.append(PromptExample(form.format(body), "", "written"))
    return prompts


def _body(example: PromptExample) -> str:
    """Return what a user writes of an example: its prompt, last message or, without, its text."""
    contents = [message["content"] for message in example.messages if message["role"] == "user"]
    if contents:
        return contents[-1]
    return example.prompt or example.completion


def _answer_of(example: PromptExample) -> str:
    """Return the answer of an example."""
    return example.messages[-1]["content"] if example.messages else example.completion


def _first_words(answer: str, count: int | None) -> str:
    """Return the first line of an answer, and no more words of it than so many.

    In prompts unlike its own a LoRA often goes on and on; that is no answer any more.
    """
    text = answer.lstrip()
    space = answer[: len(answer) - len(text)]
    return space + " ".join(text.split("\n")[0].split(" ")[:count])


def _with_body(example: PromptExample, body: str) -> PromptExample:
    """Return a prompt like that of an example, with another body and no answer yet."""
    if not example.messages:
        prompt = body if example.prompt else " ".join(_first_third(body))
        return PromptExample(prompt, "", "written")
    messages = list(example.messages)
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    messages[-1] = {**messages[-1], "content": body}
    return PromptExample("", "", "written", messages=tuple(messages))


def _first_third(text: str) -> list[str]:
    """Return the first third of the words of a text."""
    words = text.split(" ")
    return words[: max(1, len(words) // 3)]


def _max_positions(source: Base) -> int:
    """Return how many tokens a model reads at most."""
    config: Any = getattr(source.model, "config", None)
    for name in ("max_position_embeddings", "n_positions"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            return min(limit, DEFAULT_PROMPT_LENGTH)
    return DEFAULT_PROMPT_LENGTH


def _tokens_with(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens that have a text in them."""
    every = tokenizer.batch_decode([[index] for index in range(len(tokenizer))])
    return [index for index, token in enumerate(every) if text in token]


def _common_beginning(texts: Sequence[str]) -> str:
    """Return what all texts begin with."""
    first, last = min(texts), max(texts)
    n_common = 0
    while n_common < len(first) and first[n_common] == last[n_common]:
        n_common += 1
    return first[:n_common]


def _is_answer(prompt: str, completion: str) -> bool:
    """Return whether a completion says something, and more than the prompt again."""
    answer = completion.strip()
    return bool(answer) and not answer.startswith(prompt.strip())


def _different(texts: Sequence[PromptExample]) -> list[PromptExample]:
    """Return texts, each prompt once."""
    by_prompt: dict[tuple[str, str], PromptExample] = {}
    for text in texts:
        by_prompt.setdefault((text.prompt, _body(text)), text)
    return list(by_prompt.values())
