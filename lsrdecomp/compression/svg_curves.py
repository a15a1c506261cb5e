"""Error curves as an inline SVG for the HTML report, in the colours of the page; needs no drawing library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from lsrdecomp.analysis import ErrorCurve

WIDTH, HEIGHT = 720.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 132.0, 16.0, 44.0
LETTER = 7.2
"""Width of a letter of a label, on average a little less."""
LEAST = 1e-5
"""Smaller errors lie below any half-precision storage and are not drawn."""


def svg_curves(curves: Sequence[ErrorCurve], here: tuple[int, float] | None = None, lora: int | None = None) -> str:
    """Relative error against parameters on logarithmic axes; lines are labelled at their ends.

    Parameters
    ----------
    curves : sequence of ErrorCurve
    here : (parameters, relative error), optional
        Where the compression of this report stands.
    lora : int, optional
        Parameters of the LoRA itself, a vertical line.
    """
    points = [_drawn(curve) for curve in curves]
    every = [point for line in points for point in line]
    if here is not None and here[0] > 0 and here[1] > 0.0:
        every.append((float(here[0]), here[1]))
    if not every:
        return ""
    sizes = [x for x, _ in every] + ([float(lora)] if lora else [])
    across = _Axis(min(sizes) / 1.15, max(sizes) * 1.15, LEFT, WIDTH - RIGHT)
    up = _Axis(min(y for _, y in every) / 1.3, max(1.0, max(y for _, y in every)) * 1.2, HEIGHT - BOTTOM, TOP)
    parts = [*_grid(across, up)]
    upright = [[(across(lora), TOP), (across(lora), HEIGHT - BOTTOM)]] if lora else []
    labels = _Labels([*([(across(x), up(y)) for x, y in line] for line in points), *upright])
    if lora:
        x = across(lora)
        parts.append(
            f'<line class="lora" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="small" x="{x - 4:.1f}" y="{TOP + 10}" text-anchor="end">the LoRA</text>'
        )
    if here is not None and here[0] > 0 and here[1] > 0.0:
        x, y = across(here[0]), up(here[1])
        hint = f"this adapter: {here[0]:,} parameters, relative error {here[1]:.3g}"
        parts.append(f'<circle class="here" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{hint}</title></circle>')
        labels.beside(x, y, "this adapter", "mark")
    parts += [*_lines(curves, points, across, up, labels), *labels.texts]
    title = "Relative Frobenius error against parameters"
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{title}"><title>{title}</title>'
        + "".join(parts)
        + "</svg>"
    )


class _Axis:
    """A logarithmic axis from numbers to places on the page."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high = math.log10(low), math.log10(high)
        self.start, self.end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        steps = (1, 2, 5) if self.high - self.low < 2.5 else (1,)
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        values = [step * 10.0**decade for decade in decades for step in steps]
        return [value for value in values if self.low <= math.log10(value) <= self.high]


class _Labels:
    """Texts beside points, each where it covers no curve and no earlier text, or the least of them."""

    def __init__(self, lines: Sequence[Sequence[tuple[float, float]]] = ()) -> None:
        self._taken: list[tuple[float, float, float]] = []  # left, right, middle
        self._ink = [point for line in lines for point in _along(line)]
        self.texts: list[str] = []

    def beside(self, x: float, y: float, text: str, kind: str) -> None:
        wide = LETTER * len(text)
        ways = [
            (self._covered(left, left + wide, y + down), abs(down) + 2.0 * (left < x), left, y + down)
            for left in (x + 9.0, x - 9.0 - wide)
            for down in (4.0 * step for step in range(-8, 17))
            if left >= LEFT and left + wide <= WIDTH and TOP <= y + down <= HEIGHT - BOTTOM
        ]
        _, _, left, middle = min(ways, default=(0, 0.0, x + 9.0, y))
        self._taken.append((left, left + wide, middle))
        self.texts.append(f'<text class="{kind}" x="{left:.1f}" y="{middle + 4:.1f}">{escape(text)}</text>')

    def _covered(self, left: float, right: float, middle: float) -> int:
        """How much of the curves lies under a text there; another text counts for more than any curve."""
        texts = sum(left < b and a < right and abs(middle - other) < 19.0 for a, b, other in self._taken)
        return 1000 * texts + sum(left - 4.0 < x < right + 4.0 and abs(y - middle) < 10.0 for x, y in self._ink)


def _along(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Places on a curve, some four apart."""
    places = list(line[-1:])
    for (x, y), (u, v) in pairwise(line):
        steps = max(1, round(math.hypot(u - x, v - y) / 4.0))
        places += [(x + (u - x) * k / steps, y + (v - y) * k / steps) for k in range(steps)]
    return places


def _drawn(curve: ErrorCurve) -> list[tuple[float, float]]:
    pairs = zip(curve.parameters, curve.relative_errors, strict=True)
    return [(float(size), error) for size, error in pairs if size > 0 and error > LEAST]


def _grid(across: _Axis, up: _Axis) -> list[str]:
    parts = []
    for value in across.ticks():
        x = across(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>')
        parts.append(
            f'<text class="small" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{_count(value)}</text>'
        )
    for value in up.ticks():
        y = up(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    middle = 0.5 * (LEFT + WIDTH - RIGHT)
    parts.append(f'<text class="small" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">parameters</text>')
    parts.append(
        f'<text class="small" transform="translate(14 {0.5 * HEIGHT}) rotate(-90)" text-anchor="middle">'
        "relative Frobenius error</text>"
    )
    return parts


def _lines(
    curves: Sequence[ErrorCurve],
    points: Sequence[list[tuple[float, float]]],
    across: _Axis,
    up: _Axis,
    labels: _Labels,
) -> list[str]:
    parts = []
    for i, (curve, line) in enumerate(zip(curves, points, strict=True)):
        if not line:
            continue
        places = [(across(x), up(y)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline class="c{i % 5}" points="{path}"/>')
        for (x, y), (size, error) in zip(places, line, strict=True):
            hint = f"{escape(curve.label)}: {size:,.0f} parameters, error {error:.3g}"
            parts.append(f'<circle class="p{i % 5}" cx="{x:.1f}" cy="{y:.1f}" r="3"><title>{hint}</title></circle>')
        labels.beside(*places[-1], curve.label, f"t{i % 5}")
    return parts


def _count(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
