"""Blind mutation of contents: for the short run of the tests, and the long one without atheris."""

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


def mutated(contents: Sequence[bytes], seed: int, max_bytes: int) -> Iterator[bytes]:
    """Yield the contents, then endless changes of them."""
    yield from contents
    random_state = random.Random(seed)
    while True:
        content = bytearray(random_state.choice(contents))
        for _ in range(random_state.choice((1, 1, 1, 2, 4, 8))):
            _change(content, contents, random_state)
        yield bytes(content[:max_bytes])


def _change(content: bytearray, contents: Sequence[bytes], random_state: random.Random) -> None:
    """Change a piece of a content in one of seven ways."""
    start = random_state.randrange(len(content) + 1)
    end = min(len(content), start + random_state.choice((1, 1, 2, 4, 8, 64)))
    way = random_state.randrange(7)
    if way == 0 and end > start:  # flip a bit
        content[start] ^= 1 << random_state.randrange(8)
    elif way == 1 and end > start:  # another byte
        content[start] = random_state.randrange(256)
    elif way == 2:  # cut
        del content[start:end]
    elif way == 3:  # double
        content[start:start] = content[start:end]
    elif way == 4:  # a piece of another content
        other = random_state.choice(contents)
        place = random_state.randrange(len(other) + 1)
        content[start:end] = other[place : place + end - start + random_state.randrange(4)]
    elif way == 5:  # an odd number
        content[start:end] = random_state.choice(NUMBERS)
    else:  # noise
        content[start:end] = bytes(random_state.randrange(256) for _ in range(end - start))
