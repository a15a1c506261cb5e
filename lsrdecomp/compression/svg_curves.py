"""Curves of errors or of shares kept as inline SVG for the HTML report, without a library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lsrdecomp.analysis import ErrorCurve

WIDTH, HEIGHT = 720.0, 400.0
LEFT, RIGHT, TOP, BOTTOM = 62.0, 132.0, 16.0, 44.0
LABEL = 19.0
"""Height of a line's label, in the margin on the right."""
LEAST = 1e-5
"""Smaller errors lie below any half-precision storage and are not drawn."""


@dataclass(frozen=True, slots=True)
class Line:
    """Points that are joined, with a label in the margin at the height of the last."""

    label: str
    points: list[tuple[float, float]]  # size and value, by rising size


def svg_curves(
    curves: Sequence[ErrorCurve], here: tuple[int, float] | None = None, lora: int | None = None
) -> str:
    """Relative error against parameters on logarithmic axes; lines are labelled in the margin.

    Parameters
    ----------
    curves : sequence of ErrorCurve
    here : (parameters, relative error), optional
        Where the compression of this report stands.
    lora : int, optional
        Parameters of the LoRA itself, a vertical line.
    """
    lines = [Line(curve.label, _drawn(curve)) for curve in curves]
    if here is not None and not (here[0] > 0 and here[1] > 0.0):
        here = None
    values = [y for line in lines for _, y in line.points] + ([here[1]] if here else [])
    if not values:
        return ""
    # Up to 1 at least, the error of a layer left out, so that pictures of two adapters can be
    # compared.
    up = _Axis(
        "relative Frobenius error",
        min(values) / 1.3,
        max(1.0, max(values)) * 1.2,
        HEIGHT - BOTTOM,
        TOP,
    )
    return _chart(lines, "parameters", up, here, lora)


def svg_shares(lines: Sequence[Line], here: tuple[int, float]) -> str:
    """Draw the share kept against bytes of the files, points of one colour a way of making.

    Parameters
    ----------
    lines : sequence of Line
        Bytes and shares, as fractions; not joined, since forms of one size are made in several
        norms.
    here : (bytes, share)
        What was written.
    """
    low = min([0.0, here[1], *(y for line in lines for _, y in line.points)])
    up = _Axis("share kept", low, 1.0, HEIGHT - BOTTOM, TOP, logarithmic=False)
    return _chart([line for line in lines if line.points], "bytes", up, here, joined=False)


def _chart(
    lines: Sequence[Line],
    size: str,
    up: _Axis,
    here: tuple[float, float] | None,
    lora: int | None = None,
    *,
    joined: bool = True,
) -> str:
    # Chart 1: the axes, wide enough for all points, the LoRA and this adapter.
    sizes = [x for line in lines for x, _ in line.points] + ([float(lora)] if lora else [])
    sizes += [float(here[0])] if here else []
    across = _Axis(size, min(sizes) / 1.15, max(sizes) * 1.15, LEFT, WIDTH - RIGHT)
    # Chart 2: from the back to the front: grid, the LoRA, this adapter, lines with their points and
    # labels.
    parts = [*_grid(across, up)]
    if lora:
        x = across(lora)
        parts.append(
            f'<line class="lora" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
            f'<text class="small" x="{x - 4:.1f}" y="{TOP + 10}" text-anchor="end">the LoRA</text>'
        )
    if here is not None:
        x, y = across(here[0]), up(here[1])
        hint = f"this adapter: {here[0]:,} {size}, {up.label} {here[1]:.3g}"
        parts.append(
            f'<circle class="here" cx="{x:.1f}" cy="{y:.1f}" r="6"><title>{hint}</title></circle>'
        )
    parts += _lines(lines, across, up, joined)
    title = f"{up.label[0].upper()}{up.label[1:]} against {size}"
    return (
        f'<svg viewBox="0 0 {WIDTH:g} {HEIGHT:g}" role="img" aria-label="{title}">'
        f"<title>{title}</title>" + "".join(parts) + "</svg>"
    )


class _Axis:
    """An axis from numbers to places on the page, logarithmic or of shares from ``low`` to 1."""

    def __init__(
        self,
        label: str,
        low: float,
        high: float,
        start: float,
        end: float,
        logarithmic: bool = True,
    ) -> None:
        self.label, self.scale = label, math.log10 if logarithmic else float
        self.low, self.high = self.scale(low), self.scale(high)
        self.start, self.end, self.logarithmic = start, end, logarithmic

    def __call__(self, value: float) -> float:
        share = (self.scale(value) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            return [step / 5.0 for step in range(math.ceil(5.0 * self.low), 6)]
        # The fewer decades there are, the more numbers in each.
        decades_wide = self.high - self.low
        steps = (
            (1,)
            if decades_wide >= 2.5
            else (1, 2, 5)
            if decades_wide >= 0.7
            else (1, 1.5, 2, 3, 4, 5, 6, 8)
        )
        decades = range(math.floor(self.low), math.ceil(self.high) + 1)
        values = [step * 10.0**decade for decade in decades for step in steps]
        return [value for value in values if self.low <= math.log10(value) <= self.high]


def _drawn(curve: ErrorCurve) -> list[tuple[float, float]]:
    pairs = zip(curve.parameters, curve.relative_errors, strict=True)
    return [(float(size), error) for size, error in pairs if size > 0 and error > LEAST]


def _grid(across: _Axis, up: _Axis) -> list[str]:
    parts = []
    for value in across.ticks():
        x = across(value)
        parts.append(
            f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        )
        parts.append(
            f'<text class="small" x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{_count(value)}</text>"
        )
    for value in up.ticks():
        y = up(value)
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="small" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
        )
    middle = 0.5 * (LEFT + WIDTH - RIGHT)
    parts.append(
        f'<text class="small" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{across.label}</text>"
    )
    parts.append(
        f'<text class="small" transform="translate(14 {0.5 * HEIGHT}) rotate(-90)" '
        f'text-anchor="middle">{up.label}</text>'
    )
    return parts


def _lines(lines: Sequence[Line], across: _Axis, up: _Axis, joined: bool) -> list[str]:
    parts, heights = [], dict[int, float]()
    for i, line in enumerate(lines):
        if not line.points:
            continue
        spots = [(across(x), up(y)) for x, y in line.points]
        if joined:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
            parts.append(f'<polyline class="c{i % 5}" points="{path}"/>')
        for (x, y), (count, value) in zip(spots, line.points, strict=True):
            hint = f"{escape(line.label)}: {count:,.0f} {across.label}, {up.label} {value:.3g}"
            parts.append(
                f'<circle class="p{i % 5}" cx="{x:.1f}" cy="{y:.1f}" r="3">'
                f"<title>{hint}</title></circle>"
            )
        heights[i] = spots[-1][1]
    below = TOP
    for i in sorted(heights, key=heights.__getitem__):  # from the top, none over the one before
        below = max(below, heights[i])
        text = escape(lines[i].label)
        parts.append(
            f'<text class="t{i % 5}" x="{WIDTH - RIGHT + 8}" y="{below + 4:.1f}">{text}</text>'
        )
        below += LABEL
    return parts


def _count(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
