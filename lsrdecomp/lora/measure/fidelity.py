"""The record of what a compressed adapter keeps of its source's effect, and its sentence."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from lsrdecomp.lora.base.behaviour import Behaviour
from lsrdecomp.lora.base.texts import CONTINUED, WRITTEN
from lsrdecomp.markup import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

WRITTEN_BIAS: dict[str, tuple[float, float, int]] = {
    WRITTEN: (-0.056, 0.071, 4),
    CONTINUED: (-0.06, 0.075, 4),
}
"""Mean and spread, and the number of tasks they were measured on, of the share estimated on texts
that a model wrote less the share on real texts: ``bias`` in
``benchmarks/results/written_texts.json``."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A variant that was measured in a search: its size, and shares kept untrained and trained.

    Examples
    --------
    >>> print(Measurement(bytes=12_100, parameters=2_900, kept=0.87, distilled=0.943, steps=60))
    12 kB 87.0 → 94.3 %
    """

    bytes: int  # of weight file and config
    parameters: int
    kept: float | None  # share kept untrained
    distilled: float | None = None  # share kept after training
    steps: int = 0  # of training

    def __str__(self) -> str:
        """Return size and shares."""
        shares = [self.kept]
        if self.steps:
            shares.append(self.distilled)
        text = " → ".join("–" if share is None else f"{100 * share:.1f}" for share in shares)
        return f"{size_text(self.bytes)} {text} %"


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Answers of a LoRA and of a compressed variant to one text: classes, or greedy completions."""

    question: str
    lora: str
    variant: str

    @property
    def matches(self) -> bool:
        """Whether the two answers are the same."""
        return self.lora == self.variant


@dataclass(frozen=True, slots=True)
class AnswerMatches:
    """How much of a LoRA's own greedy answers to prompts another adapter has."""

    answered: int = 0
    n_matching: int = 0
    prompt_kept: float | None = None
    prompt_error: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Fidelity(Behaviour):
    """The behaviour of a written variant on held-out texts, and how it was measured.

    The share kept is 1 − KL(LoRA ‖ compressed) / KL(LoRA ‖ no adapter). The page of the guide on
    what is measured defines every figure.

    Attributes
    ----------
    data, base : str
        Names of the texts and of the base.
    bytes_before, bytes_after : int
        Bytes of the LoRA and of the variant: weight file and adapter_config.json.
    head_bytes : int
        Bytes in both of them that are not of layers.
    distilled : int
        Steps of distillation.
    measurements : int
        Variants that were measured before this one was selected.
    held_out_measurements : int
        Variants that were measured on the held-out texts: more than one if the first kept less
        there than was asked. Then these texts have helped to select this one.
    requested : float, optional
        The share of the effect that was asked for.
    requested_answers : float, optional
        The share of whole answers that was asked for.
    answered : int
        Held-out texts whose whole answers, classes or greedy completions, were compared.
    n_matching : int
        Texts among them to which variant and LoRA have the same answer.
    prompt_kept : float, optional
        Share that is kept of what depends on the prompt: 1 − KL(LoRA ‖ compressed) /
        KL(LoRA ‖ blind) on the LoRA's own answers.
    prompt_error : float, optional
        Its standard error over answers.
    kind : str
        What the held-out data are called: texts, images, sounds, or examples of a model of one's
        own.
    written : str, optional
        What the held-out texts are where they are none of ``data``, such as texts that the model
        wrote itself.

    Examples
    --------
    >>> behaviour = Behaviour(128, 3000, "token", 0.0842, 0.91, 1.79, 0.008)
    >>> files = {"bytes_before": 3_700_000, "bytes_after": 12_000}
    >>> answers = {"answered": 64, "n_matching": 41, "prompt_kept": 0.812, "prompt_error": 0.02}
    >>> fidelity = Fidelity.of(behaviour, data="a.jsonl", base="b", **files, **answers)
    >>> fidelity
    Measured: gives the LoRA's whole answer to 41 of 64 held-out prompts (52 to 75 %)
       keeps 81.2 ± 2.0 % of what depends on the prompt
       keeps 95.3 ± 0.8 % of the LoRA's effect on 128 held-out texts of a.jsonl
       KL to the LoRA 0.0842 nats per token, 1.79 without an adapter; top prediction agrees on 91 %
       files 3.7 MB → 12 kB
    >>> fidelity.sentence()[:57]
    "gives the LoRA's whole answer to 41 of 64 held-out prompt"
    """

    poor_below: ClassVar[float] = 0.5
    """A warning is due for a variant that keeps less than this share; by hand."""
    far_above: ClassVar[float] = 0.1
    """A warning is due above so many nats a token, whatever the share: most whole answers differ
    there. By hand."""
    json_keys: ClassVar[dict[str, str]] = {
        "requested": "asked",
        "requested_answers": "asked_answers",
        "n_matching": "alike",
    }
    """Keys of fields in JSON that differ from their names: earlier releases wrote them so."""

    data: str
    base: str
    bytes_before: int
    bytes_after: int
    head_bytes: int = 0
    distilled: int = 0
    measurements: int = 1
    held_out_measurements: int = 1
    requested: float | None = None
    requested_answers: float | None = None
    answered: int = 0
    n_matching: int = 0
    prompt_kept: float | None = None
    prompt_error: float | None = None
    kind: str = "texts"
    written: str | None = None

    @classmethod
    def of(cls, behaviour: Behaviour, **annotations: Any) -> Fidelity:
        """Return a behaviour with how it was measured: the other fields.

        The whole answer of a classifier is its class.
        """
        if behaviour.unit == "example" and behaviour.agreement is not None:
            n_matching = round(behaviour.agreement * behaviour.examples)
            annotations |= {"answered": behaviour.examples, "n_matching": n_matching}
        return cls(**asdict(behaviour), **annotations)

    @property
    def kept(self) -> float:
        """The share kept; never None, since an `Evaluator` refuses a LoRA without an effect."""
        return 1.0 - self.kl / self.effect

    @property
    def is_poor(self) -> bool:
        """Whether so little is kept that a warning is due."""
        return self.kept < self.poor_below

    @property
    def is_far(self) -> bool:
        """Whether the answers are so far from the LoRA's that a warning is due."""
        return self.unit == "token" and self.kl > self.far_above

    @property
    def shortfall(self) -> float:
        """How much less was kept than was asked for; 0 or less where that much was kept."""
        if self.requested_answers is not None and self.answered:
            return self.requested_answers - self.n_matching / self.answered
        return 0.0 if self.requested is None else self.requested - self.kept

    @property
    def is_short(self) -> bool:
        """Whether less was kept than was asked for, if only by chance."""
        return self.shortfall > 0.0

    @property
    def is_missed(self) -> bool:
        """Whether less was kept than was asked for, by more than the standard error."""
        error = self.standard_error or 0.0
        if self.requested_answers is not None and self.answered:
            answers = self.n_matching / self.answered
            error = math.sqrt(answers * (1.0 - answers) / self.answered)
        return self.shortfall > error

    @property
    def texts(self) -> str:
        """The number of held-out texts, and what they are."""
        if self.written is not None:
            return f"{self.examples} {self.written}"
        return f"{self.examples} held-out {self.kind} of {self.data}"

    def sentence(self) -> str:
        """Return what is kept as one sentence, without its subject."""
        return " · ".join([*self._answer_clauses(), *self._other_clauses()])

    def __repr__(self) -> str:
        """Return the sentence, a line for each of its clauses."""
        return "Measured: " + "\n   ".join([*self._answer_clauses(), *self._other_clauses()])

    def _answer_clauses(self) -> Iterator[str]:
        """Yield what is kept of whole answers, and of what depends on the prompt."""
        if self.answered:
            low, high = wilson_interval(self.n_matching, self.answered)
            interval = f"{100 * low:.0f} to {100 * high:.0f} %"
            answer, texts = "whole answer", "prompts"
            if self.unit == "example":
                answer, texts = "class", "texts"
            asked = self._asked_text(self.requested_answers)
            yield (
                f"gives the LoRA's {answer} to {self.n_matching} of {self.answered} held-out "
                f"{texts} ({interval}){asked}"
            )
        if self.right is not None and any(self.right):
            base, lora, variant = self.right
            yield f"right answers: base {base}, LoRA {lora}, this {variant} of {self.examples}"
        if self.prompt_kept is not None:
            share = _share_text(self.prompt_kept, self.prompt_error)
            yield f"keeps {share} of what depends on the prompt"

    def _other_clauses(self) -> Iterator[str]:
        """Yield the share of the effect, divergence and agreement, files and training."""
        share = _share_text(self.kept, self.standard_error)
        asked = self._asked_text(self.requested)
        yield f"keeps {share} of the LoRA's effect{asked} on {self.texts}"
        divergence = f"KL to the LoRA {self.kl:.3g} nats per {self.unit}"
        if self.agreement is None and self.unit == "example":  # outputs that are numbers
            divergence = f"half the squared distance to the LoRA's outputs {self.kl:.3g}"
        divergence += f", {self.effect:.3g} without an adapter"
        if self.agreement is not None and self.unit == "token":
            divergence += f"; top prediction agrees on {100 * self.agreement:.0f} %"
        yield divergence
        if self.bytes_after:  # a server has none
            files = f"files {size_text(self.bytes_before)} → {size_text(self.bytes_after)}"
            if self.head_bytes:
                head = "classifier head" if self.unit == "example" else "of other modules"
                files += f" (both include the {size_text(self.head_bytes)} {head})"
            yield files
        if self.written is not None:
            yield bias_text(self.written)
        if self.held_out_measurements > 1:
            yield f"{self.held_out_measurements} versions were measured on these {self.kind}"
        if self.distilled:
            yield f"distilled for {self.distilled} steps"

    def _asked_text(self, requested: float | None) -> str:
        """Return what was asked for, in brackets, and whether it was missed."""
        if requested is None:
            return ""
        missed = ": missed" if self.is_missed else ""
        return f" ({100 * requested:g} % asked{missed})"

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON file, the sentence among them."""
        values = {self.json_keys.get(name, name): value for name, value in asdict(self).items()}
        values["alike_interval"] = None
        if self.answered:
            values["alike_interval"] = list(wilson_interval(self.n_matching, self.answered))
        return {"kept": self.kept, **values, "sentence": self.sentence()}


def _share_text(share: float, standard_error: float | None) -> str:
    """Return a share in percent with its standard error, to the first digit of that.

    >>> _share_text(0.953, 0.008), _share_text(0.9999126, 3.5e-6), _share_text(0.95, None)
    ('95.3 ± 0.8 %', '99.9913 ± 0.0003 %', '95.0 %')
    """
    if standard_error is None:
        return f"{100 * share:.1f} %"
    digits = 1
    if 0.0 < standard_error < 0.0005:
        digits = min(4, math.ceil(-math.log10(100 * standard_error)))
    return f"{100 * share:.{digits}f} ± {100 * standard_error:.{digits}f} %"


def bias_text(written: str) -> str:
    """Return how far estimates on written texts lay from the shares on real ones."""
    if written not in WRITTEN_BIAS:
        return "how far this is from the share on texts of its task is not known"
    bias, spread, n_tasks = WRITTEN_BIAS[written]
    if n_tasks == 1:  # one draw has no spread
        points = f"{100 * bias:+.1f} points"
        return f"on one task such an estimate less the share on real texts was {points}"
    return (
        f"on {n_tasks} tasks such estimates less the share on real texts were {100 * bias:+.1f} ± "
        f"{100 * spread:.1f} points"
    )


def wilson_interval(count: int, total: int) -> tuple[float, float]:
    """Return the interval of 95 % for a share of which ``count`` of ``total`` were seen.

    >>> [round(end, 3) for end in wilson_interval(30, 32)]
    [0.799, 0.983]
    """
    from scipy.stats import binomtest  # takes a while to load

    interval = binomtest(count, total).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def share_kept(behaviour: Behaviour) -> float:
    """Return the share kept as a number that can be compared: −∞ where there is none."""
    kept = behaviour.kept
    if kept is None or not math.isfinite(kept):
        return -math.inf
    return kept
