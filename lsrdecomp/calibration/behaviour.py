"""What an adapter's answers have become, as figures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How two adapters on one base answer; means over all answers.

    ``kl`` is KL(source ‖ written) in nats; for a regression head, half the squared difference of
    the scores. ``effect`` is the same divergence with no ΔW in place of the written one: how much
    the source does at all.

    Examples
    --------
    >>> Behaviour(examples=128, answers=128, unit="example", kl=0.05, agreement=0.95, effect=0.25).kept
    0.8
    """

    examples: int
    answers: int
    unit: str  # what an answer belongs to: "example" or "token"
    kl: float
    agreement: (
        float | None
    )  # share of answers whose likeliest class is the same; None for a regression
    effect: float
    standard_error: float | None = None  # of `kept`, over examples; None for fewer than two
    throughout: float | None = (
        None  # share of examples in which every token's likeliest is the same; of tokens only
    )

    @property
    def kept(self) -> float | None:
        """1 − kl / effect: 1 if nothing changed, 0 if the source might as well be left out; None if it does nothing."""
        return 1.0 - self.kl / self.effect if self.effect > 0.0 else None
