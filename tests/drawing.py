"""How many examples Hypothesis draws where a case costs more or less than most."""

from hypothesis import settings


def drawing(share):
    """Draw ``share`` of the examples of the profile: 20 by default, 1,000 in `make test-random`."""
    return settings(max_examples=max(1, round(share * settings().max_examples)))
