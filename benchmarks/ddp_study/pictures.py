"""The pictures of the study's pages: the values of each row, and curves over the number of
tokens."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator
from numpy.typing import NDArray

from ddp_vllm.pages.pictures import LINES, MARKERS, panels_of


def draw_rows(figure: Figure, *, panels: Mapping[str, Mapping[str, Sequence[float]]], reference: float | None) -> None:
    """Draw the values of each row as points, lowest on top, a panel below the other; `reference` is
    a dotted line.

    What is above ten times the lowest value is a triangle at the edge. panels: label of the axis ->
    name of a row, from the lowest one up -> its values.
    """
    for axes, (label, rows) in zip(panels_of(figure, len(panels)), panels.items(), strict=True):
        edge = 10 * min(value for values in rows.values() for value in values)
        for place, values in enumerate(rows.values()):
            for value in values:
                marker = "o" if value < edge else ">"
                axes.scatter(min(value, edge), place, marker=marker, color="black", s=14, zorder=2, clip_on=False)
        if reference is not None:
            axes.axvline(reference, color="black", linestyle=":", linewidth=1)
        axes.set_yticks(range(len(rows)), [name if len(name) < 25 else f"…{name[-23:]}" for name in rows])
        axes.set(xscale="log", xlabel=label)
        axes.grid(axis="y", color="0.85", linewidth=0.5)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")


def draw_lines(
    figure: Figure, *, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], xlabel: str, reference: float
) -> None:
    """Draw curves on logarithmic axes, a panel below the other: label of the axis -> name of a
    curve -> points."""
    for axes, (label, curves) in zip(panels_of(figure, len(panels)), panels.items(), strict=True):
        for number, (name, points) in enumerate(curves.items()):
            (tone, dashes, _), marker = LINES[number % len(LINES)], MARKERS[number % len(MARKERS)]
            axes.plot(*zip(*sorted(points), strict=True), marker=marker, color=tone, linestyle=dashes, label=name)
        axes.axhline(reference, color="black", linestyle=":", linewidth=1)
        axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=label)
        axes.set_xticks(sorted({x for points in curves.values() for x, _ in points}))
        axes.xaxis.set_major_formatter(EngFormatter(places=1, sep=""))
        axes.xaxis.set_minor_formatter("")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.legend(frameon=False, fontsize=8)


def draw_scales(figure: Figure, *, scales: Mapping[str, NDArray[np.float64]]) -> None:
    """Draw the histogram of the scales of kept units, one panel per module type."""
    for axes, (label, values) in zip(panels_of(figure, len(scales)), scales.items(), strict=True):
        # steps of 0.05 from 0 to past the highest scale, but at most 80 of them
        top = max(1.5, float(values.max(initial=0.0)))
        bins = np.linspace(0.0, top, min(81, int(np.ceil(top / 0.05)) + 1)).tolist()
        axes.hist(values, bins=bins, color="0.6")
        axes.axvline(1.0, color="black", linestyle=":", linewidth=1)
        axes.set(xlabel=f"scale of kept {label}", ylabel="units")
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
