"""Blind mutation of seeds: for the short run, and for the long one without atheris."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

NUMBERS = (
    b"0",
    b"-1",
    b"1e999",
    b"9" * 20,
    b"NaN",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b"2147483648",
)


def mutated(seeds: Sequence[bytes], seed: int, longest: int) -> Iterator[bytes]:
    """Yield the seeds, then endless changes of them.

    Bits, bytes, pieces cut, doubled, swapped between seeds, odd numbers.
    """
    yield from seeds
    chance = random.Random(seed)
    while True:
        content = bytearray(chance.choice(seeds))
        for _ in range(chance.choice((1, 1, 1, 2, 4, 8))):
            _change(content, seeds, chance)
        yield bytes(content[:longest])


def _change(content: bytearray, seeds: Sequence[bytes], chance: random.Random) -> None:
    start = chance.randrange(len(content) + 1)
    end = min(len(content), start + chance.choice((1, 1, 2, 4, 8, 64)))
    kind = chance.randrange(7)
    if kind == 0 and end > start:
        content[start] ^= 1 << chance.randrange(8)
    elif kind == 1 and end > start:
        content[start] = chance.randrange(256)
    elif kind == 2:
        del content[start:end]
    elif kind == 3:
        content[start:start] = content[start:end]
    elif kind == 4:
        other = chance.choice(seeds)
        place = chance.randrange(len(other) + 1)
        content[start:end] = other[place : place + end - start + chance.randrange(4)]
    elif kind == 5:
        content[start:end] = chance.choice(NUMBERS)
    else:
        content[start:end] = bytes(chance.randrange(256) for _ in range(end - start))
