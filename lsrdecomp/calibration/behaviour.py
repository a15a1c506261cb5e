"""How far the outputs of two adapters on one base differ, as figures."""

from __future__ import annotations

from dataclasses import dataclass

from lsrdecomp._renamed import keep_old_attributes


@keep_old_attributes
@dataclass(frozen=True, slots=True)
class Behaviour:
    """Divergence and agreement of two adapters on one base, as means over predictions.

    A prediction, here called an answer, is the class of an example or the next token at one
    position. ``kl`` is KL(source ‖ compressed) in nats; for a regression head, half the squared
    difference of the scores. ``effect`` is the same divergence with no ΔW in place of the
    compressed one, and so the size of what the source does.

    Examples
    --------
    >>> behaviour = Behaviour(128, 128, unit="example", kl=0.05, agreement=0.95, effect=0.25)
    >>> behaviour.kept
    0.8
    """

    examples: int
    answers: int  # predictions
    unit: str  # what a prediction belongs to: "example" or "token"
    kl: float
    agreement: float | None  # share of predictions with the same top class; None for a regression
    effect: float
    standard_error: float | None = None  # of `kept`, over examples; None for fewer than two
    exact_match_rate: float | None = (
        None  # share of examples with the same top class at every token
    )

    @property
    def kept(self) -> float | None:
        """Share of the source's effect that is kept, 1 − kl / effect.

        1 if nothing changed, 0 if the source might as well be left out; None if it has no effect.
        """
        return 1.0 - self.kl / self.effect if self.effect > 0.0 else None
