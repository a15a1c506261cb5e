"""What a compressed adapter keeps of what its source does, as measured on a base: the record and its sentence."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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


UNITS = ((1, "kB"), (2, "MB"), (3, "GB"))
LITTLE = 0.5
"""A form that keeps less than this share is not what anybody wants without having asked for its size."""


@dataclass(frozen=True, slots=True, repr=False)
class Fidelity:
    """The measured share 1 − KL(LoRA ‖ compressed) / KL(LoRA ‖ no adapter) of an adapter as written.

    Attributes
    ----------
    kept, standard_error : float
        The share, and its standard error over the held-out examples; None for a single one.
    kl, effect : float
        The two divergences, nats per ``unit``; for a regression half the squared differences.
    agreement : float, optional
        Share of answers whose likeliest class or token is the same.
    unit : str
        "token" or "example".
    examples, answers : int
        Held-out examples, and the answers in them.
    data, base : str
        Where the examples are from, and the base that read them.
    bytes_before, bytes_after, head_bytes : int
        Of what opens the LoRA and the form, weight file and adapter_config.json, and of what both carry along beside
        the layers.
    distilled : int
        Steps of distillation.
    measurements : int
        Forms that were measured until this one was chosen.
    asked : float, optional
        The least share that was asked for.
    throughout : float, optional
        Share of examples in which the likeliest token is the same at every token of the answer.

    Examples
    --------
    >>> Fidelity(.9523, .008, .0842, 1.79, .91, "token", 128, 3000, "a.jsonl", "b", 3700000, 12000, 0)
    Promise: keeps 95.2 ± 0.8 % of what the adapter does
       divergence 0.0842 of 1.79 nats per token; likeliest token the same for 91 %
       files 3.7 MB → 12 kB
       measured on 128 held-out examples of a.jsonl
    """

    kept: float
    standard_error: float | None
    kl: float
    effect: float
    agreement: float | None
    unit: str
    examples: int
    answers: int
    data: str
    base: str
    bytes_before: int
    bytes_after: int
    head_bytes: int
    distilled: int = 0
    measurements: int = 1
    asked: float | None = None
    throughout: float | None = None

    @property
    def little(self) -> bool:
        """Whether less than half is kept."""
        return self.kept < LITTLE

    def sentence(self) -> str:
        """The promise in words.

        >>> fidelity = Fidelity(.9523, .008, .0842, 1.79, .91, "token", 128, 3000, "a.jsonl", "b", 3700000, 12000, 0)
        >>> print(fidelity.sentence().replace(" (", "\\n(").replace(" · m", "\\n· m"))
        keeps 95.2 ± 0.8 % of what the adapter does
        (divergence 0.0842 of 1.79 nats per token; likeliest token the same for 91 %) · files 3.7 MB → 12 kB
        · measured on 128 held-out examples of a.jsonl
        """
        kept, answers, *rest = self._clauses()
        return " · ".join([f"{kept} ({answers})", *rest])

    def __repr__(self) -> str:
        """The sentence, a line for each of its clauses."""
        return "Promise: " + "\n   ".join(self._clauses())

    def _clauses(self) -> list[str]:
        error = "" if self.standard_error is None else f" ± {100 * self.standard_error:.1f}"
        what = "token" if self.unit == "token" else "answer"
        same = "" if self.agreement is None else f"; likeliest {what} the same for {100 * self.agreement:.0f} %"
        if self.throughout is not None:
            same += f", all along in {100 * self.throughout:.0f} % of the examples"
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
        return {**asdict(self), "sentence": self.sentence()}


def size_text(size: int) -> str:
    """Bytes in the unit a reader expects: 640 B, 12 kB, 3.7 MB.

    >>> size_text(640), size_text(12_147), size_text(3_700_000), size_text(0)
    ('640 B', '12 kB', '3.7 MB', '0 B')
    """
    if size < 1000:
        return f"{size} B"
    unit, value = next((unit, size / 1000**k) for k, unit in UNITS if size < 1000 ** (k + 1) or unit == "GB")
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"
