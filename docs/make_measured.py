"""Fills the tables of measured.md and paper.md, and draws the charts of README.md and measured.md, from
benchmarks/results alone.

`python docs/make_pages.py` calls this. A table stands between `<!-- results TABLE MODEL -->` and
`<!-- end -->`; the text around it is written by hand.
"""

import json
import math
import re
import statistics
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_prune.recipe import Recipe
from ddp_vllm.evaluations import Answers, mean_difference, perplexity_ratio, points, ratio_of_losses
from ddp_vllm.intervals import t_quantile, with_interval
from ddp_vllm.pages.pictures import STYLE

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TABLES = tomllib.loads((ROOT / "benchmarks" / "protocol.toml").read_text(encoding="utf-8"))["tables"]
BLOCK = re.compile(r"(<!-- results (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
BASE = "masks"  # the row that others are compared with
CONTROL = "dense trained"  # the row of the dense model trained on the same text
TEXTS = {"wikitext2.txt": "WikiText-2", "c4.jsonl": "C4", "python.txt": "Python", "chats-heldout.jsonl": "chats"}
LABELS = {
    "masks": "ddp-vllm, masks only",
    "joint": "ddp-vllm",
    "joint W8A8": "ddp-vllm,\nthen W8A8",
    "joint equal shares": "ddp-vllm, equal shares",
    "dense W8A8": "W8A8 alone",
    "fisher trained": "Fisher scores",
    "depth trained": "whole layers",
    "wanda-sp trained": "Wanda-SP",
    "paper": "the paper's search",
}
"""Names of rows in the chart."""
OFFSETS = {
    "joint": (0, -14), "joint W8A8": (0, -26), "paper": (0, -14), "joint equal shares": (-92, -3), "masks": (10, 8),
    "depth trained": (0, -15), "dense W8A8": (0, -15),
}  # fmt: skip
"""Offsets of names from their points, where (0, 7) would cover another name."""
LIMIT = 1.1  # of quality.md
FEWEST_RUNS = 3  # that a power law is fitted to
FULL_RUN = Recipe.steps * Recipe.batch_size * Recipe.seq_len  # tokens, by default
SIZE = re.compile(r"([\d.]+)( longer)?")  # a row of the table `sizes` that trains weights: its speedup
TOP = 2.4  # of the chart's perplexity; what lies above is named, not drawn
COLORS = {  # of the page on which the chart stands: background, text, ddp-vllm, other methods, longer runs
    "": ("white", "#1f2328", "#0b57d0", "#6e7781", "#1a7f37"),
    "-dark": ("#0d1117", "#e6edf3", "#6cb6ff", "#9aa4af", "#57ab5a"),
}
MODEL_NAMES = {"smollm2-135m": "SmolLM2-135M"}
Result = Mapping[str, Any]


def fill_tables(page: str) -> str:
    """Return the page with every table made again."""

    def filled(block: re.Match[str]) -> str:
        parts = TABLES[block[2]]
        make = study_pages if "study" in parts else curve if "with" in parts else table
        lines = "\n".join(make(block[2], block[3])).rstrip()
        return f"{block[1]}\n{lines}\n\n{block[4]}"

    return BLOCK.sub(filled, page)


def write_charts(folder: Path, model: str) -> None:
    """Write the charts of README and measured.md into a folder, for light and dark pages."""
    charts = {
        "quality-over-speed": ("sizes", draw_sizes),
        "quality-over-tokens": ("tokens", draw_tokens),
        "methods": ("speed", draw_methods),
    }
    for name, (table, draw) in charts.items():
        if not read(table, model) or (draw is draw_tokens and len(by_tokens(table, model)) < FEWEST_RUNS):
            continue
        for suffix, (background, text, *_) in COLORS.items():
            colored = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
            page = {"figure.facecolor": background, "axes.facecolor": background}
            with matplotlib.rc_context(STYLE | dict.fromkeys(colored, text) | page | {"font.size": 10}):
                figure = Figure(figsize=(7.2, 4.0), layout="constrained")
                draw(figure.add_subplot(), model=model, suffix=suffix)
                figure.savefig(folder / f"{name}{suffix}.png", dpi=160, metadata={"Software": None})


def interval(verdict: Result) -> str:
    return with_interval(*map(verdict.__getitem__, ("ratio", "low", "high")))


def table(name: str, model: str) -> Iterator[str]:
    """Yield the lines of a table, a line per row over its seeds."""
    rows = read(name, model)
    texts = TABLES[name]["texts"]
    # rows that are compared with another row than the dense model
    bases = {row["name"]: rows[row["after"]][0] for row in TABLES[name]["rows"] if row.get("after") in rows}
    first = next((results for row, results in rows.items() if "texts" in results[0] and row not in bases), None)
    speeds = read_speeds(name, model)
    shares = {} if speeds else recovered(rows)  # with other units, `masks` is no measure
    columns: dict[str, Callable[[str, Sequence[Result]], str]] = {}
    columns["row"] = with_seeds
    if speeds:
        columns["decode step"] = lambda row, _: interval(speeds[row]) if row in speeds else ""
        if any("characters" in verdict for verdict in speeds.values()):
            by_text = {row: verdict | verdict.get("characters", {}) for row, verdict in speeds.items()}
            columns["characters"] = lambda row, _: interval(by_text[row]) if row in by_text else ""
        columns["prefill"] = lambda row, _: interval(speeds[row]["prefill"]) if row in speeds else ""
    columns |= {TEXTS[text]: partial(perplexity, text, BASE not in rows, bases) for text in texts}
    if answers := read_answers(name, model):
        columns["accuracy"] = lambda row, _: gained(answers[row], answers["dense"]) if row in answers else ""
    if BASE in rows:
        columns[f"÷ {BASE}"] = partial(over_base, rows[BASE])
    columns["top-1"] = top_1
    if shares:
        columns["recovered"] = lambda row, _: shares.get(row, "")
    columns["minutes"] = lambda _, cells: positive(statistics.fmean(cell["seconds"] for cell in cells) / 60, ".0f")
    if not speeds:
        columns["peak, GB"] = lambda _, cells: positive(max(cell["peak_gb"] for cell in cells), ".1f")
    columns["weights, MB"] = lambda _, cells: positive(cells[0].get("weights_mb", 0), ".0f")
    if speeds:
        columns["KV cache, kB/token"] = lambda _, cells: f"{cells[0]['kv_bytes_per_token'] / 1e3:.1f}"
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    dense = ["1"] * (list(columns).index(TEXTS[texts[0]]) - 1)
    dense += [f"{first[0]['texts'][text]['dense']:.2f}" if first else "" for text in texts]
    if "dense" in answers:
        dense.append(f"{statistics.fmean(map(statistics.fmean, answers['dense'].values())):.1%}")
    yield f"| dense | {' | '.join(dense)} |{' |' * (len(columns) - 1 - len(dense))}"
    for row, results in rows.items():
        yield f"| {' | '.join(cell(row, results) for cell in columns.values())} |"


def with_seeds(row: str, results: Sequence[Result]) -> str:
    return row + (f", {len(results)} seeds" if len(results) > 1 else "")


def perplexity(text: str, with_ratio: bool, bases: Mapping[str, Result], row: str, results: Sequence[Result]) -> str:
    """Return perplexity on a text, with its ratio to the dense model's where no other column has one; the ratio alone
    where the tokens are not the dense model's: of bits, or over a model with the same tokens, times that model's."""
    if "bits" in results[0]:
        return f"{ratio_of_bits(results[0], text):.2f}×"
    of_text = [each["texts"][text] for each in results]
    ratio = statistics.fmean(quality["pruned"] / quality["dense"] for quality in of_text)
    if row in bases:
        return f"{ratio * ratio_of_bits(bases[row], text):.2f}×"
    return spread([quality["pruned"] for quality in of_text], ".2f") + (f" ({ratio:.2f}×)" if with_ratio else "")


def ratio_of_bits(result: Result, text: str) -> float:
    by_bits = perplexity_ratio(result["bits"][text])
    assert by_bits, "their excerpts are always stored"
    return by_bits[0]


def gained(answers: Answers, dense: Answers) -> str:
    """Return the difference of the mean accuracy from the dense model's in points, with its 95 % interval."""
    difference = mean_difference(answers, dense)
    assert difference, "both models answer the same questions"
    return points(*difference)


def positive(value: float, style: str) -> str:
    """Return a number; "" for 0, as of a model that was not trained."""
    return f"{value:{style}}" if value else ""


def over_base(base: Sequence[Result], row: str, results: Sequence[Result]) -> str:
    """Return perplexity over that of the row `BASE` on all texts together, with the interval over
    their windows.

    A window's losses are averaged over the seeds that both rows have: it is one sample, however
    many seeds read it.
    """
    if row == BASE:
        return "1"
    base_of = {each["seed"]: each for each in base}
    pairs = [(base_of[each["seed"]], each) for each in results if each["seed"] in base_of]
    if not pairs:
        return ""
    losses: dict[str, list[float]] = {"dense": [], "pruned": []}
    tokens: list[int] = []
    for text in pairs[0][0]["texts"]:
        tokens += pairs[0][0]["texts"][text]["block_tokens"]
        for side, name in enumerate(losses):
            of_seeds = [pair[side]["texts"][text]["block_losses"]["pruned"] for pair in pairs]
            losses[name] += map(statistics.fmean, zip(*of_seeds, strict=True))
    return "{:.2f} [{:.2f}, {:.2f}]".format(*ratio_of_losses(losses["dense"], losses["pruned"], tokens))


def top_1(_: str, results: Sequence[Result]) -> str:
    """Return the agreement with the model of comparison on the likeliest next token, the mean over all texts."""
    if "bits" in results[0]:
        return ""  # not defined
    of_texts = [[text["agreement"]["pruned"]["top1"] for text in each["texts"].values()] for each in results]
    return spread(list(map(statistics.fmean, of_texts)), ".1%")


def study_pages(name: str, model: str) -> Iterator[str]:
    """Yield the table of each page that the study wrote, without rows that do not apply."""
    for row, results in read(name, model).items():
        _, _, rows, *_ = results[0]["page"].split("\n\n")
        lines = [line for line in rows.split("\n") if "this model has none" not in line]
        yield f"### {row.capitalize()}\n\n" + "\n".join(lines) + "\n"


def curve(name: str, model: str) -> Iterator[str]:
    """Yield the table of runs that differ in the tokens they read, and the power law through them."""
    texts, runs = TABLES[name]["texts"], by_tokens(name, model)
    yield f"| tokens | {' | '.join(TEXTS[text] for text in texts)} | mean | top-1 | hours on one core |"
    yield "|---" * (len(texts) + 4) + "|"
    for tokens, results in runs.items():
        cells = [perplexity(text, True, {}, "", results) for text in texts]
        cells += [f"{perplexity_over_dense(results):.2f}×", top_1("", results)]
        hours = option(results[0], "--steps") * statistics.fmean(result["step_seconds"] for result in results) / 3600
        yield f"| {with_seeds(f'{tokens:,}', results)} | {' | '.join(cells)} | {hours:.1f} |"
    if len(runs) >= FEWEST_RUNS:
        left, ratio = power_law(runs)
        yield "\nTwice the tokens leave {:.0%} [{:.0%}, {:.0%}] of the log-perplexity lost.".format(*left)
        yield f"If it held to the default of {FULL_RUN / 1e6:.0f} million tokens, {FULL_RUN / max(runs):.0f} times"
        yield "the longest run, perplexity would be {:.2f} [{:.2f}, {:.2f}] times the dense model's.".format(*ratio)


def by_tokens(name: str, model: str) -> dict[int, list[Result]]:
    """Return the results of a table by the tokens that were read, with the rows of another one that belong to them."""
    other = TABLES[name]["with"]
    others = read(other["table"], model)
    rows = [*read(name, model).values(), *(others.get(row, []) for row in other["rows"])]
    return dict(sorted((tokens_read(results[0]), results) for results in rows if results))


def tokens_read(result: Result) -> int:
    return math.prod(option(result, name) for name in ("--steps", "--batch-size", "--seq-len"))


def power_law(runs: Mapping[int, Sequence[Result]]) -> tuple[list[float], list[float]]:
    """Fit the lost log-perplexity as a power of the tokens, by least squares on logarithms.

    runs: at least three. Returns the share that is still lost after twice the tokens, and perplexity over the dense
    model's after FULL_RUN tokens, each with its 95 % interval.
    """
    across = list(map(math.log2, runs))
    lost = [math.log2(math.log(perplexity_over_dense(results))) for results in runs.values()]
    slope, height = statistics.linear_regression(across, lost)
    rest = sum((y - slope * x - height) ** 2 for x, y in zip(across, lost, strict=True))
    error = t_quantile(len(runs) - 2) * math.sqrt(rest / (len(runs) - 2))
    squares, ahead = statistics.pvariance(across) * len(runs), math.log2(FULL_RUN) - statistics.fmean(across)
    of_slope, of_end = error / math.sqrt(squares), error * math.sqrt(1 / len(runs) + ahead**2 / squares)
    end = slope * math.log2(FULL_RUN) + height
    left = [2 ** (slope + sign * of_slope) for sign in (0, -1, 1)]
    return left, [math.exp(2 ** (end + sign * of_end)) for sign in (0, -1, 1)]


def option(result: Result, name: str) -> int:
    """Return the value of an option of the last command of a result, where it stands last."""
    words = result["commands"][-1].split()
    return int(words[len(words) - words[::-1].index(name)])


def draw_sizes(axes: Axes, *, model: str, suffix: str) -> None:
    """Draw each size of the table `sizes`: perplexity over the dense model's on each text, over the
    speed, in a color by the tokens that were read."""
    rows, speeds, (_, text, ours, others, green) = read("sizes", model), read_speeds("sizes", model), COLORS[suffix]
    sizes = {row: found for row in rows if row in speeds and (found := SIZE.fullmatch(row))}
    for color, longer in ((ours, None), (green, " longer")):
        chosen = [row for row, found in sizes.items() if found[2] == longer]
        if not chosen:
            continue
        texts = [rows[row][0]["texts"] for row in chosen]
        ratios = {name: [1.0, *(text[name]["pruned"] / text[name]["dense"] for text in texts)] for name in texts[0]}
        across = [1.0, *(speeds[row]["ratio"] for row in chosen)]
        for (name, heights), style in zip(ratios.items(), ("-", "--", ":"), strict=True):
            label = "" if longer else TEXTS[name]
            axes.plot(across, heights, style, marker="o", color=color, markersize=5, label=label)
        offset, side = ((6, -14), "left") if longer else ((-6, 7), "right")
        tops = [*map(max, *ratios.values())][1:]
        for row, x, top in zip(chosen, across[1:], tops, strict=True):
            name = f"--speedup {sizes[row][1]}"
            axes.annotate(name, (x, top), xytext=offset, textcoords="offset points", color=color, ha=side)
        axes.plot([], [], "o", color=color, label=f"{tokens_read(rows[chosen[0]][0]):,} tokens")
    axes.axhline(LIMIT, color=others, linestyle="-.", linewidth=1)
    axes.text(0.99, LIMIT + 0.01, f"our limit of {LIMIT}", transform=axes.get_yaxis_transform(), ha="right", fontsize=9)
    axes.legend(loc="upper left", frameon=False, labelcolor=text)
    axes.margins(x=0.12, y=0.15)
    axes.set_title(f"{MODEL_NAMES.get(model, model)} in vLLM on two CPU cores", loc="left", fontsize=11)
    axes.set_xlabel("decode speed, × the dense model's")
    axes.set_ylabel("perplexity, × the dense model's")


def draw_tokens(axes: Axes, *, model: str, suffix: str) -> None:
    """Draw each run of the table `tokens`: perplexity over the dense model's on each text, over the tokens read."""
    runs, (_, text, ours, others, _) = by_tokens("tokens", model), COLORS[suffix]
    for name, style in zip(TABLES["tokens"]["texts"], ("-", "--", ":"), strict=True):
        ratios = [
            statistics.fmean(one["pruned"] / one["dense"] for one in (result["texts"][name] for result in results))
            for results in runs.values()
        ]
        axes.plot([*runs], ratios, style, marker="o", color=ours, markersize=5, label=TEXTS[name])
    axes.axhline(LIMIT, color=others, linestyle="-.", linewidth=1)
    axes.text(0.99, LIMIT + 0.02, f"our limit of {LIMIT}", transform=axes.get_yaxis_transform(), ha="right", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks([*runs], [f"{tokens:,}" for tokens in runs])
    axes.set_ylim(bottom=1.0)
    axes.legend(loc="upper right", frameon=False, labelcolor=text)
    axes.set_title(f"{MODEL_NAMES.get(model, model)}, --speedup 1.25", loc="left", fontsize=11)
    axes.set_xlabel("tokens to train on")
    axes.set_ylabel("perplexity, × the dense model's")


def draw_methods(axes: Axes, *, model: str, suffix: str) -> None:
    """Draw each row of the table `speed` as a point: perplexity over the dense model's, over the
    speed."""
    rows, (_, text, ours, others, _) = read("speed", model), COLORS[suffix]
    label = partial(axes.annotate, textcoords="offset points", ha="center", fontsize=10)
    axes.plot(1.0, 1.0, "s", color=others, markersize=6)
    label("dense", (1.0, 1.0), xytext=(0, -15))
    speeds = read_speeds("speed", model)
    points = {row: (verdict["ratio"], perplexity_over_dense(rows[row])) for row, verdict in speeds.items()}
    for row, verdict in speeds.items():
        x, ratio = points[row]
        if ratio > TOP:
            continue
        own = row.startswith(("joint", "masks"))
        style: Any = {"fmt": "o", "color": ours} if own else {"fmt": "s", "color": others}
        reach = [[x - verdict["low"]], [verdict["high"] - x]]
        axes.errorbar(x, ratio, xerr=reach, markersize=6, elinewidth=1.2, **style)
        bold = "bold" if row == "joint" else "normal"
        color = ours if own else text
        label(LABELS.get(row, row), (x, ratio), xytext=OFFSETS.get(row, (0, 7)), color=color, weight=bold)
    axes.margins(x=0.12)
    axes.set_ylim(0.75, TOP)
    above = [f"{LABELS.get(row, row)} {ratio:.1f}×" for row, (_, ratio) in points.items() if ratio > TOP]
    if above:
        axes.text(0.02, 0.96, f"above: {', '.join(above)}", transform=axes.transAxes, va="top", fontsize=9)
    arrow: Any = {"arrowstyle": "-|>", "color": text, "linewidth": 1.5}
    axes.annotate("", (0.97, 0.5), (0.84, 0.7), xycoords="axes fraction", arrowprops=arrow)
    axes.text(0.84, 0.72, "better", transform=axes.transAxes, ha="center")
    axes.axhline(LIMIT, color=others, linestyle=":", linewidth=1)
    axes.text(0.99, LIMIT + 0.02, f"our limit of {LIMIT}", transform=axes.get_yaxis_transform(), ha="right", fontsize=9)
    axes.set_title(f"{MODEL_NAMES.get(model, model)} in vLLM on two CPU cores", loc="left", fontsize=11)
    axes.set_xlabel("decode speed, × the dense model's")
    axes.set_ylabel("perplexity, × the dense model's")


def perplexity_over_dense(results: Sequence[Result]) -> float:
    """Return perplexity over the dense model's, the geometric mean over texts and seeds."""
    texts = [text for each in results for text in each["texts"].values()]
    return math.exp(statistics.fmean(math.log(text["pruned"] / text["dense"]) for text in texts))


def read(name: str, model: str) -> dict[str, list[Result]]:
    """Return the results of each row of a table, in the order of the protocol, seed by seed."""
    found: dict[str, list[Result]] = {}
    for row in TABLES[name]["rows"]:
        paths = sorted((RESULTS / name).glob(f"{model}-{row['name'].replace(' ', '-')}-[0-9].json"))
        if paths:
            found[row["name"]] = [_read(path) | {"seed": path.stem[-1]} for path in paths]
    return found


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def read_speeds(name: str, model: str) -> dict[str, Any]:
    """Return the verdict on each row's speed over the dense model's; {} if it was not measured."""
    path = RESULTS / name / f"{model}-steps.json"
    return dict(_read(path)["speedups"]) if path.exists() else {}


def read_answers(name: str, model: str) -> dict[str, dict[str, list[float]]]:
    """Return each row's answers to the questions of each task, 1 for a right one; {} if none were asked."""
    path = RESULTS / name / f"{model}-answers.json"
    rows: dict[str, dict[str, str]] = _read(path)["answers"] if path.exists() else {}
    return {row: {task: list(map(float, rights)) for task, rights in tasks.items()} for row, tasks in rows.items()}


def recovered(rows: Mapping[str, Sequence[Result]]) -> dict[str, str]:
    """Return which share of the log-perplexity lost by `masks` each row with trained weights wins
    back, over all texts.

    What the dense model gains from the same training is subtracted, because that is adaptation to
    the text.
    """
    if not {"masks", CONTROL} <= rows.keys():
        return {}
    control, masks_of = rows[CONTROL][0]["texts"], {each["seed"]: each for each in rows["masks"]}
    shares = {}
    for row in rows.keys() - {"masks", "masks longer", CONTROL}:
        found = []
        for result in rows[row]:
            for text, quality in result["texts"].items() if result["seed"] in masks_of else ():
                masks = masks_of[result["seed"]]["texts"][text]["pruned"]
                lost = math.log(masks / quality["dense"])
                adapted = math.log(control[text]["dense"] / control[text]["pruned"])
                found.append((math.log(masks / quality["pruned"]) - adapted) / lost)
        if found:
            shares[row] = f"{statistics.fmean(found):.0%} ({min(found):.0%} to {max(found):.0%})"
    return shares


def spread(values: Sequence[float], style: str) -> str:
    """Return a mean, with the lowest and highest value if there are several."""
    mean = format(statistics.fmean(values), style)
    return f"{mean} ({min(values):{style}} to {max(values):{style}})" if len(values) > 1 else mean
