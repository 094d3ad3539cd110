"""The pictures of the pages: black, grey and shapes only, narrow enough that their text can be read on a phone.

Legend: L layers, U units of a layer.
"""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ddp_vllm.pages.evidence import bin_edges

WIDTH = 4.3  # inches: 9 pt text is then 11 px on a screen of 390 px
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "axes.linewidth": 0.8,
    "text.parse_math": False,  # a $ in a name is a dollar
}
GREYS = LinearSegmentedColormap.from_list("kept", ["0.85", "0.0"]).with_extremes(bad="white")  # white: removed
MOST_CROSSES = 2500  # beyond that white cells must do
LINES = ("-", "--", ":", "-.")
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">")  # of pruned models; the dense one is a circle
Draw = Callable[[Figure], None]
Curves = Sequence[Mapping[str, float]]


def render(draw: Draw, name: str, height: float) -> tuple[str, bytes]:
    """Return the same picture as an SVG element and as PNG, `height` in inches."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        draw(figure)
        vector, raster = io.StringIO(), io.BytesIO()
        figure.savefig(vector, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        figure.savefig(raster, format="png", dpi=200)
    return _inline(vector.getvalue()), raster.getvalue()


def _inline(svg: str) -> str:
    """Return what stands in the page: as wide as there is room, and without identifiers that clash."""
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg[svg.index("<svg") :])  # known to every HTML parser
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r' height="[\d.]+pt"', "", svg, count=1)
    return re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg)


def height_of_map(units: int) -> float:
    """Return a height in inches at which the units of a heatmap can be told apart."""
    return float(np.clip(1.1 + 0.13 * units, 1.6, 4.8))


def heatmaps(values: Mapping[str, NDArray[np.float64]], unit_label: str, *, together: int = 1) -> Draw:
    """Draw [L, U] arrays below each other, label -> values: layers from left to right, units upwards.

    The darker the higher; crossed out where the value is 0, empty where it is not a number. Lines part units that
    belong `together` (query heads of a KV head).
    """

    def draw(figure: Figure) -> None:
        panels = figure.subplots(len(values), squeeze=False)[:, 0]
        for axes, (label, values_LU) in zip(panels, values.items(), strict=True):
            shown = np.ma.masked_invalid(np.ma.masked_equal(values_LU.T, 0.0))
            scale = Normalize(0.0, max(float(np.nanmax(values_LU)), 1e-9))
            image = axes.imshow(shown, cmap=GREYS, norm=scale, aspect="auto", origin="lower", interpolation="none")
            _cross_out(axes, values_LU)
            for edge in range(together, values_LU.shape[1], together) if together > 1 else ():
                axes.axhline(edge - 0.5, color="0.5", linewidth=0.5)
            axes.set(xlabel="layer", ylabel=unit_label)
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
            axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
            figure.colorbar(image, ax=axes, label=label, pad=0.02)

    return draw


def _cross_out(axes: Axes, values_LU: NDArray[np.float64]) -> None:
    layers, units = values_LU.shape
    gone_layer, gone_unit = np.nonzero(values_LU == 0)
    if len(gone_layer) <= MOST_CROSSES:
        cell = min(200 / layers, 72 * height_of_map(units) * 0.6 / units)  # points
        size = min(20.0, (0.6 * cell) ** 2)
        axes.scatter(gone_layer, gone_unit, marker="x", s=size, color="0.25", linewidths=0.7)


def widths(kept_L: Sequence[int], dense: int) -> Draw:
    """Draw what each layer's MLP keeps over the outline of its `dense` width."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        layers = range(len(kept_L))
        axes.bar(layers, kept_L, width=0.8, color="0.45", label="kept")
        axes.bar(layers, dense, width=0.8, facecolor="none", edgecolor="black", linewidth=0.7, label="dense")
        axes.set(xlabel="layer", ylabel="MLP channels")
        axes.margins(x=0.01)
        axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
        _legend(figure, axes)

    return draw


def histograms(kept: Mapping[str, NDArray[np.float64]], searched: Mapping[str, NDArray[np.float64]]) -> Draw:
    """Draw the gates of kept units, one panel a module type; `searched` are the same before rounding and polish."""

    def draw(figure: Figure) -> None:
        for axes, (label, gates) in zip(figure.subplots(len(kept), squeeze=False)[:, 0], kept.items(), strict=True):
            axes.hist(gates, bins=bin_edges(gates), color="0.6", label="final")
            if label in searched:
                axes.hist(
                    searched[label], bins=bin_edges(gates), histtype="step", color="black", label="after the search"
                )
            axes.axvline(1.0, color="black", linestyle=":", linewidth=1)
            axes.set(xlabel=f"scale of kept {label}", ylabel="units")
            axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
        _legend(figure, axes)

    return draw


def panels_of_curves(curves: Curves) -> list[tuple[str, dict[str, str]]]:
    """Return what can be drawn from the metrics of a run: (label of the axis, metric -> its name), a panel each."""
    kinds = [name.removesuffix("_sparsity") for name in curves[0] if name.endswith("_sparsity")]
    panels = [
        ("nats a token", {"loss": "loss", "ce": "cross-entropy"}),
        ("KL, nats a token", {"kl": "KL to dense"}),
        ("sparsity", {f"{kind}_sparsity": kind for kind in kinds}),
        ("μ", {"mu": "μ"}),
    ]
    for number, name in (("1", "lambda1"), ("2", "lambda2"), ("3", "lambda3")):
        panels.append((f"λ{number}", {f"{kind}_{name}": kind for kind in kinds}))
    return [
        (label, found) for label, metrics in panels if (found := {m: n for m, n in metrics.items() if m in curves[0]})
    ]


def height_of_curves(curves: Curves) -> float:
    return 0.4 + 1.15 * len(panels_of_curves(curves))


def training_curves(curves: Curves, *, target: float | None, rounded_after: int | None) -> Draw:
    """Draw losses, sparsity, μ and (where there are some) λ over the steps; noisy ones as they are and smoothed."""

    def draw(figure: Figure) -> None:
        panels = panels_of_curves(curves)
        steps = np.array([row["step"] for row in curves])
        rows = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
        for axes, (label, metrics) in zip(rows, panels, strict=True):
            for (metric, name), line in zip(metrics.items(), LINES, strict=False):
                values = np.array([row.get(metric, np.nan) for row in curves])
                if "token" in label:
                    axes.plot(steps, values, color="0.75", linewidth=0.7)
                    values = smooth(values)
                axes.plot(steps, values, color="black", linestyle=line, linewidth=1.2, label=name)
            if label == "sparsity" and target is not None:
                axes.axhline(target, color="black", linestyle=":", linewidth=1, label="target")
            if rounded_after is not None:
                axes.axvline(rounded_after + 0.5, color="0.4", linestyle="-", linewidth=0.8)
            axes.set_ylabel(label)
            axes.yaxis.set_major_locator(MaxNLocator(4))
            if len(axes.get_legend_handles_labels()[0]) > 1:
                axes.legend(framealpha=0.85, edgecolor="none", fontsize=8, handlelength=2.2)
        axes.set_xlabel("step")
        figure.align_ylabels()

    return draw


@dataclass(frozen=True, kw_only=True)
class Point:
    """A model between speed and quality."""

    name: str
    is_dense: bool
    ratio: float
    """How many times faster than the dense model."""
    low: float
    high: float
    """The 95 % interval of the ratio."""
    accuracy: float
    """In percent."""
    reach: float
    """Half the 95 % interval of the accuracy."""


def quality_against_speed(points: Sequence[Point], speed: str) -> Draw:
    """Draw accuracy against speed with intervals, and the line through what no other model beats in both."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        front = _pareto(points)
        axes.plot([p.ratio for p in front], [p.accuracy for p in front], color="0.6", linestyle="--", zorder=0)
        for number, point in enumerate(points):
            axes.errorbar(
                point.ratio,
                point.accuracy,
                xerr=[[point.ratio - point.low], [point.high - point.ratio]],
                yerr=point.reach,
                fmt="o" if point.is_dense else MARKERS[(number - 1) % len(MARKERS)],
                color="black",
                markerfacecolor="white" if point.is_dense else "black",
                markersize=6,
                capsize=3,
                label=point.name,
            )
        axes.set(xlabel=f"{speed}, times better than dense", ylabel="mean accuracy, %")
        axes.margins(0.15)
        figure.legend(loc="outside lower center", ncols=1 if len(points) < 4 else 2, frameon=False)

    return draw


def _pareto(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in both speed and accuracy, slowest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (-point.ratio, -point.accuracy)):
        if not front or point.accuracy > front[-1].accuracy:
            front.append(point)
    return front[::-1]


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the running mean over a twentieth of the steps; shorter at both ends."""
    window = np.ones(max(1, len(values) // 20) | 1)
    mean: NDArray[np.float64] = np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
    return mean


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
