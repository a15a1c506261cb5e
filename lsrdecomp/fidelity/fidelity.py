"""What a compressed adapter keeps of what its source does, as measured on a base: the record and its sentence."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from lsrdecomp.calibration.behaviour import Behaviour


@dataclass(frozen=True, slots=True)
class Measurement:
    """A form that was measured while one was looked for: shares kept, untrained and after so many steps of training.

    Examples
    --------
    >>> print(Measurement(bytes=12_100, parameters=2_900, kept=0.87, distilled=0.943, steps=60))
    12 kB 87.0 → 94.3 %
    """

    bytes: int  # that open it: weight file and config
    parameters: int
    kept: float | None
    distilled: float | None = None
    steps: int = 0

    def __str__(self) -> str:
        """Size and shares."""
        shares = [self.kept, *([self.distilled] if self.steps else [])]
        return f"{size_text(self.bytes)} {' → '.join('–' if s is None else f'{100 * s:.1f}' for s in shares)} %"


@dataclass(frozen=True, slots=True)
class Answered:
    """What the LoRA and a form of it answer to one text: a class, or a completion decoded greedily."""

    question: str
    lora: str
    form: str


UNITS = ((1, "kB"), (2, "MB"), (3, "GB"))
LITTLE = 0.5
"""A form that keeps less than this share is not what anybody wants without having asked for its
size."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Fidelity(Behaviour):
    """What a form keeps as written, the share 1 − KL(LoRA ‖ compressed) / KL(LoRA ‖ no adapter), and what was measured.

    Attributes
    ----------
    data, base : str
        Where the examples are from, and the base that read them.
    bytes_before, bytes_after, head_bytes : int
        Of what opens the LoRA and the form, weight file and adapter_config.json, and of what both
        carry along beside the layers.
    distilled : int
        Steps of distillation.
    measurements : int
        Forms that were measured until this one was chosen.
    asked : float, optional
        The least share that was asked for.
    answered, alike : int
        Held-out examples that were answered in words, and those where the form says what the LoRA
        does.

    Examples
    --------
    >>> behaviour = Behaviour(128, 3000, "token", 0.0842, 0.91, 1.79, 0.008)
    >>> fidelity = Fidelity.of(behaviour, data="a.jsonl", base="b", bytes_before=3_700_000, bytes_after=12_000)
    >>> fidelity
    Promise: keeps 95.3 ± 0.8 % of what the adapter does
       divergence 0.0842 of 1.79 nats per token; likeliest token the same for 91 %
       files 3.7 MB → 12 kB
       measured on 128 held-out examples of a.jsonl
    >>> fidelity.sentence()[:43]
    'keeps 95.3 ± 0.8 % of what the adapter does'
    """

    data: str
    base: str
    bytes_before: int
    bytes_after: int
    head_bytes: int = 0
    distilled: int = 0
    measurements: int = 1
    asked: float | None = None
    answered: int = 0
    alike: int = 0

    @classmethod
    def of(cls, behaviour: Behaviour, **facts: Any) -> Fidelity:
        """A behaviour with what it was measured on."""
        return cls(**asdict(behaviour), **facts)

    @property
    def kept(self) -> float:
        return 1.0 - self.kl / self.effect  # of a LoRA that has an effect

    @property
    def little(self) -> bool:
        """Whether less than half is kept."""
        return self.kept < LITTLE

    def sentence(self) -> str:
        """The promise in words."""
        kept, answers, *rest = self._clauses()
        return " · ".join([f"{kept} ({answers})", *rest])

    def __repr__(self) -> str:
        """The sentence, a line for each of its clauses."""
        return "Promise: " + "\n   ".join(self._clauses())

    def _clauses(self) -> list[str]:
        error = "" if self.standard_error is None else f" ± {100 * self.standard_error:.1f}"
        what = "token" if self.unit == "token" else "answer"
        same = (
            ""
            if self.agreement is None
            else f"; likeliest {what} the same for {100 * self.agreement:.0f} %"
        )
        if self.exact_match_rate is not None:
            same += f", all along in {100 * self.exact_match_rate:.0f} % of the examples"
        if self.answered:
            same += f"; the same answer to {self.alike} of {self.answered} examples"
        head = f" (each with a head of {size_text(self.head_bytes)})" if self.head_bytes else ""
        trained = [f"distilled for {self.distilled} steps"] if self.distilled else []
        return [
            f"keeps {100 * self.kept:.1f}{error} % of what the adapter does",
            f"divergence {self.kl:.3g} of {self.effect:.3g} nats per {self.unit}{same}",
            f"files {size_text(self.bytes_before)} → {size_text(self.bytes_after)}{head}",
            *trained,
            f"measured on {self.examples} held-out examples of {self.data}",
        ]

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON file, the sentence among them."""
        return {"kept": self.kept, **asdict(self), "sentence": self.sentence()}


def size_text(size: int) -> str:
    """Bytes in the unit a reader expects: 640 B, 12 kB, 3.7 MB.

    >>> size_text(640), size_text(12_147), size_text(3_700_000), size_text(0)
    ('640 B', '12 kB', '3.7 MB', '0 B')
    """
    if size < 1000:
        return f"{size} B"
    unit, value = next(
        (unit, size / 1000**k) for k, unit in UNITS if size < 1000 ** (k + 1) or unit == "GB"
    )
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
