"""Pictures of what `analysis` computed: each function draws on axes and returns them; it computes and saves nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lsrdecomp.analysis import ErrorCurve

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's colours, told apart with any colour vision."""


def plot_error_curves(
    curves: Iterable[ErrorCurve],
    *,
    against: str = "parameters",
    storages: Sequence[str] = (),
    ax: Axes | None = None,
) -> Axes:
    """Relative error against separation rank or parameters, one labelled line a curve.

    Parameters
    ----------
    curves : iterable of ErrorCurve
    against : "parameters" or "ranks"
    storages : sequence of str
        Element types whose rounding floor γ·μ is drawn as a dotted line.
    ax : matplotlib Axes, optional

    Returns
    -------
    Axes
    """
    ax = ax if ax is not None else _new_axes()
    drawn = list(curves)
    for i, curve in enumerate(drawn):
        x, y = _positive(getattr(curve, against), curve.relative_errors)
        colour = COLOURS[i % len(COLOURS)]
        ax.plot(x, y, marker="o", markersize=3.5, linewidth=1.5, color=colour, label=curve.label)
    for storage in storages:
        floor = max(curve.floor(storage) for curve in drawn)
        ax.axhline(floor, linestyle=":", linewidth=1.0, color="0.45")
        ax.annotate(
            f"{storage} rounding", (0.01, floor), xycoords=("axes fraction", "data"), va="bottom", fontsize=8
        )
    ax.set_yscale("log")
    if storages:  # below the finest floor there is nothing left to store
        ax.set_ylim(bottom=0.5 * min(curve.floor(storage) for curve in drawn for storage in storages))
    if against == "parameters":
        ax.set_xscale("log")
    ax.set_xlabel("parameters" if against == "parameters" else "separation rank s")
    ax.set_ylabel("relative Frobenius error")
    ax.grid(True, which="major", linewidth=0.4, alpha=0.5)
    ax.spines[["top", "right"]].set_visible(False)
    if len(drawn) > 0:
        ax.legend(frameon=False, fontsize=9)
    return ax


def save_figure(ax: Axes, path: Any) -> None:
    """Write the figure of ``ax`` as PNG or SVG, by the ending of ``path``, without a date inside."""
    figure = ax.get_figure(root=True)
    metadata = {"Date": None} if str(path).endswith("svg") else None
    figure.savefig(path, dpi=150, bbox_inches="tight", metadata=metadata)  # type: ignore[union-attr]


def _positive(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    """Points a log–log plot can show: errors above double rounding, counts above zero."""
    kept = [(a, b) for a, b in zip(x, y, strict=True) if a > 0 and b > 1e-16]
    return [a for a, _ in kept], [b for _, b in kept]


def _new_axes() -> Axes:
    from matplotlib.figure import Figure

    return Figure(figsize=(6.4, 4.2), layout="constrained").subplots()


def available() -> None:
    """Raise `ImportError` now rather than after a long computation, where matplotlib is not installed."""
    import matplotlib  # noqa: F401
