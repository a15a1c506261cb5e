"""The record of how far the outputs of two adapters on one base differ."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Behaviour:
    """Divergence and agreement of two adapters on one base, as means over predictions.

    A prediction, called an answer in records, is the class of an example or the next token at one
    position. ``source`` is the adapter that was compressed, ``compressed`` what became of it.

    Examples
    --------
    >>> behaviour = Behaviour(128, 128, unit="example", kl=0.05, agreement=0.95, effect=0.25)
    >>> behaviour.kept
    0.8
    """

    examples: int
    answers: int
    """Number of predictions."""
    unit: str
    """What a prediction is made for: "example" or "token"."""
    kl: float
    """KL(source ‖ compressed) per prediction in nats; half the squared difference of the scores
    for outputs that are numbers."""
    agreement: float | None
    """Share of predictions with the same top class; None for numbers."""
    effect: float
    """KL(source ‖ no adapter), in the units of ``kl``: the size of what the source does."""
    standard_error: float | None = None
    """Standard error of ``kept`` over examples; None for fewer than two."""
    exact_match_rate: float | None = None
    """Share of examples with the same top class at every token; None if an example has one
    prediction."""
    right: tuple[int, int, int] | None = None
    """Examples that base, source and compressed answer as the data do, token by token; None where
    the data hold no completions."""

    @property
    def kept(self) -> float | None:
        """Share of the source's effect that is kept, 1 − kl / effect.

        1 if nothing changed, 0 if the source might as well be left out; None if it has no effect.
        """
        if self.effect > 0.0:
            return 1.0 - self.kl / self.effect
        return None

    @property
    def same_answers(self) -> float | None:
        """Share of examples that are answered alike: at every token, or with the same class."""
        return self.agreement if self.unit == "example" else self.exact_match_rate
