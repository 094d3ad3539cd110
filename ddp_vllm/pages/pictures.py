"""The pictures of the pages: black, gray and shapes only, narrow enough that their text can be read
on a phone.

Each `draw_` function draws into a figure of matplotlib and sets its height in inches; `render` makes
a picture of the figure.
Legend: L layers, U units of a layer.
"""

import io
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from ddp_vllm.intervals import Interval
from ddp_vllm.pages.page import Picture

WIDTH, HEIGHT = 4.3, 2.5  # inches: 9 pt text is then 11 px on a screen of 390 px
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "font.family": "sans-serif",
    "svg.fonttype": "none",
    "axes.linewidth": 0.8,
    "text.parse_math": False,  # a $ in a name is a dollar
}
# white: removed; nothing: not there
GREYS = LinearSegmentedColormap.from_list("kept", ["0.85", "0.0"]).with_extremes(under="white", bad="none")
# tone, dashes, width
LINES = (("0.6", "-", 2.2), ("black", "--", 1.2), ("black", ":", 1.4), ("black", "-.", 1.2))
MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">")  # of pruned models; the dense one is a circle


def render(draw: Callable[..., None], *, name: str, title: str, caption: str, **drawn: Any) -> Picture:
    """Return what `draw(figure, **drawn)` draws as SVG for the page."""
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
        draw(figure, **drawn)
        vector = io.StringIO()
        no_metadata: Any = {"Date": None, "Creator": None, "Format": None, "Type": None}
        # the page is light or dark
        figure.savefig(vector, format="svg", transparent=True, metadata=no_metadata)
    svg = vector.getvalue()
    return Picture(name=name, title=title, caption=caption, svg=svg[svg.index("<svg") :])


def draw_heatmap(figure: Figure, *, values_LU: NDArray[np.float64], label: str, unit_label: str) -> None:
    """Draw layers from left to right and units upwards.

    Darker cells have higher values; 0 is white, NaN is empty.
    """
    num_units = values_LU.shape[1]
    figure.set_figheight(float(np.clip(1.1 + 0.13 * num_units, 1.6, 4.8)))  # units can be told apart
    axes = figure.subplots()
    scale = Normalize(1e-9, max(float(np.nanmax(values_LU)), 1e-6))
    image = axes.imshow(values_LU.T, cmap=GREYS, norm=scale, aspect="auto", origin="lower", interpolation="none")
    axes.set(xlabel="layer", ylabel=unit_label)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    figure.colorbar(image, ax=axes, label=label, pad=0.02)


def draw_widths(figure: Figure, *, kept: Mapping[int, int], dense: int) -> None:
    """Draw the kept width of each layer's MLP, by the number of the layer, over the outline of its
    `dense` width."""
    axes = figure.subplots()
    layers = [*kept]
    axes.bar(layers, [*kept.values()], width=0.8, color="0.45", label="kept")
    axes.bar(layers, dense, width=0.8, facecolor="none", edgecolor="black", linewidth=0.7, label="dense")
    axes.set(xlabel="layer", ylabel="MLP channels")
    axes.margins(x=0.01)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    figure.legend(loc="outside upper center", ncols=2, frameon=False)


def draw_curves(
    figure: Figure,
    *,
    steps: Sequence[Mapping[str, float]],
    targets: Mapping[str, float],
    rounded_after: int | None,
) -> None:
    """Draw losses and sparsity over the steps; losses also smoothed.

    steps: the metrics of each. targets: the sparsity that the budget of each module type, or of all
        together, requires in the end.
    """
    logged = steps[0].keys()
    names = {  # label of an axis -> metric -> its name
        "nats per token": {"loss": "loss", "ce": "cross-entropy"},
        "KL, nats": {"kl": "KL to dense"},
        "sparsity": {name: name.removesuffix("_sparsity") for name in logged if name.endswith("_sparsity")},
    }
    panels = {label: metrics for label, metrics in names.items() if logged & metrics.keys()}
    figure.set_figheight(0.4 + 1.15 * len(panels))
    numbers = [step["step"] for step in steps]
    all_axes = figure.subplots(len(panels), squeeze=False, sharex=True)[:, 0]
    for axes, (label, metrics) in zip(all_axes, panels.items(), strict=True):
        styles = LINES if len(metrics) > 1 else (("black", "-", 1.2),)
        for (metric, name), (tone, dashes, width) in zip(metrics.items(), styles, strict=False):
            values = np.array([step.get(metric, np.nan) for step in steps])
            if "nats" in label:
                axes.plot(numbers, values, color="0.85", linewidth=0.7)
                values = smooth(values)
            axes.plot(numbers, values, color=tone, linestyle=dashes, linewidth=width, label=name)
        for number, target in enumerate(sorted(set(targets.values())) if label == "sparsity" else ()):
            axes.axhline(target, color="black", linestyle=":", linewidth=1, label="target" if number == 0 else None)
        if rounded_after is not None:
            axes.axvline(rounded_after + 0.5, color="0.4", linestyle="-", linewidth=0.8)
        axes.set_ylabel(label)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8, handlelength=2.2)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    figure.align_ylabels()


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the running mean over a twentieth of the steps; shorter at both ends."""
    window = np.ones(max(1, len(values) // 20) | 1)
    mean: NDArray[np.float64] = np.convolve(values, window, "same") / np.convolve(np.ones(len(values)), window, "same")
    return mean


class Point(NamedTuple):
    """A model between speed and quality."""

    name: str
    is_dense: bool
    ratio: Interval
    """How many times faster than the dense model, and the ends of the 95 % interval."""
    quality: Interval
    """In the picture's unit, and the ends of the 95 % interval."""


def draw_points(figure: Figure, *, points: Sequence[Point], quality: str, less_is_better: bool) -> None:
    """Draw quality against speed with intervals, and the line through the models that no other
    beats in both."""
    figure.set_figheight(3.6)
    axes = figure.subplots()
    middles = sorted((point.ratio[0], point.quality[0]) for point in points)
    beats = operator.lt if less_is_better else operator.gt
    front = [(speed, value) for speed, value in middles if not any(s > speed and beats(v, value) for s, v in middles)]
    axes.plot(*zip(*front, strict=True), color="0.6", ls="--", zorder=0)
    for number, point in enumerate(points):
        ratio, low, high = point.ratio
        marker = "o" if point.is_dense else MARKERS[(number - 1) % len(MARKERS)]
        fill = "white" if point.is_dense else "black"
        value, least, most = point.quality
        axes.errorbar(
            ratio, value, xerr=[[ratio - low], [high - ratio]], yerr=[[value - least], [most - value]],
            fmt="none", color="0.4", capsize=3,
        )  # fmt: skip
        axes.plot(ratio, value, marker, color="black", markerfacecolor=fill, markersize=6, label=point.name)
    axes.set(xlabel="speed, times better than dense", ylabel=quality)
    if less_is_better:
        axes.invert_yaxis()
    axes.margins(0.15)
    figure.legend(loc="outside lower center", ncols=1 if len(points) < 4 else 2, frameon=False)
