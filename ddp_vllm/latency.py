"""The latency of a vLLM step as a function of its layers' widths. `profile` measures it, a latency
budget limits it.

`profile` times whole models as they are served, with random weights. Each timed model differs from
the dense one in one width, the same in every layer (`shapes_of`), and takes turns with the dense
model. The difference of their times, divided by the number of layers, is the cost of an attention
block, an MLP or the routed experts of one layer at that width. The rest of a step belongs to
embeddings, output head, sampling and scheduling.

Between measured widths the cost is linear, in steps of the multiple to which the plugin pads MLPs.
A removed block costs nothing, so the first kept unit of a block also pays the block's fixed cost.

A model whose layers differ may cost more than the sum of its layers: vLLM keeps a group of its KV
cache, with metadata in every step, per number of KV heads. So one model with mixed widths is timed
too, and what it takes longer than predicted is charged to each further number of KV heads.
"""

import hashlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ddp_vllm.cache import cache_folder
from ddp_vllm.dimensions import EXPERT_COUNT_KEYS, Dimensions, dimensions_of, widths_of
from ddp_vllm.errors import SettingError, reading
from ddp_vllm.machine import Hardware, Workload, hardware, versions
from ddp_vllm.output import make_folder
from ddp_vllm.remote_code.files import read_json
from ddp_vllm.remote_code.tensors import Config, dense_type
from ddp_vllm.remote_code.widths import LayerWidths
from ddp_vllm.schema import SchemaError, checked
from ddp_vllm.tensor_parallel import CPU_CHANNEL_BLOCK, EXPERT_BLOCK, round_up

FORMAT = "ddp-vllm profile 2"
NOTICEABLE = 1e-3  # of a step; what layers that differ cost below it is noise
FRACTIONS = (0.25, 0.5, 0.75)  # timed widths of MLPs and experts, as fractions of the dense width
DIMENSIONS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
              "intermediate_size", "moe_intermediate_size", "vocab_size", "num_experts_per_tok",
              *EXPERT_COUNT_KEYS)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Curve:
    """The measured seconds that a block of one kind adds to a step, by its width."""

    points: tuple[tuple[int, float], ...]
    """(width, seconds) by rising width; width 0, which takes no time, is left out. A narrower block
    may take longer than the widest one, because the dense model may run another kernel."""
    multiple: int
    """A width takes the time of the next multiple of this."""

    @property
    def slowest(self) -> float:
        """Seconds at the slowest width."""
        return max(seconds for _, seconds in self.points)

    @property
    def unit(self) -> float:
        """Seconds per unit between the lowest and the highest width; at least 0, at most the
        average over all units."""
        (low, first), (high, _) = self.points[0], self.points[-1]
        average = self.slowest / high
        return min((self.slowest - first) / (high - low), average) if high > low else average

    @property
    def fixed(self) -> float:
        """Seconds that are saved only by removing the whole block: the part that does not depend on
        its units."""
        return max(0.0, self.slowest - self.unit * self.points[-1][0])

    def seconds(self, width: float) -> float:
        """Return the seconds that a block of this width adds, extrapolated below the lowest
        measured width."""
        if width <= 0:
            return 0.0
        (narrowest, first), (widest, _) = self.points[0], self.points[-1]
        width = min(-(-width // self.multiple) * self.multiple, widest)
        if len(self.points) == 1:
            return first * width / narrowest
        seconds = max(0.0, _between(self.points, width))
        # narrower blocks are never predicted to be slower
        return min(seconds, first) if width < narrowest else seconds


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The parts of a step, in seconds."""

    dense: float
    """The whole step of the dense model."""
    curves: Mapping[str, Curve]
    """`attention` by the number of KV heads, each with all its query heads, and `mlp` by the number
    of channels; of a mixture of experts only `experts`, by the mean width of the routed experts of a
    layer, as the plugin's kernel runs them."""
    prunable: Mapping[str, float]
    """The part of the dense step spent in the blocks of each kind."""
    sizes: Dimensions
    mixture: float = 0.0
    """Of each further number of KV heads that layers have, or of routed experts of several widths."""

    def removable(self, kinds: Iterable[str]) -> float:
        """Return the seconds that pruning these kinds of blocks saves at most: the fixed cost of a
        routed layer remains however many of its channels are removed."""
        remaining = len(self.sizes.routed_layers)
        return sum(self.prunable[kind] - remaining * self.curves[kind].fixed for kind in kinds)

    def max_speedup(self, kinds: Iterable[str]) -> float:
        """Return the speedup that pruning these kinds of blocks approaches as it removes everything."""
        return self.dense / max(self.dense - self.removable(kinds), 1e-9)

    def of_layer(self, widths: LayerWidths) -> float:
        """Return the seconds that the prunable blocks of a layer add."""
        packed = [round_up(width, EXPERT_BLOCK) for width in widths.expert_intermediate_sizes or (0,)]
        numbers = {
            "attention": widths.num_query_heads / self.sizes.queries_per_kv,
            "mlp": widths.intermediate_size,
            "experts": sum(packed) / len(packed),
        }
        return sum(curve.seconds(numbers[kind]) for kind, curve in self.curves.items())

    def speedup(self, layers: Sequence[LayerWidths]) -> float:
        """Return how many times faster a step of a model of these widths is than one of the dense
        model."""
        return self.dense / (self.of_layers(layers) + self.mixture * further_widths(layers))

    def of_layers(self, layers: Sequence[LayerWidths]) -> float:
        """Return the seconds of a step as the sum of its layers."""
        return self.dense - sum(self.prunable.values()) + sum(map(self.of_layer, layers))


def further_widths(layers: Sequence[LayerWidths]) -> int:
    """Return how many numbers of KV heads the layers with attention have besides the first; of a
    mixture of experts, 1 if its experts differ."""
    experts = {width for layer in layers for width in layer.expert_intermediate_sizes or ()}
    heads = {len(layer.query_heads_per_kv_head) for layer in layers} - {0}
    return min(1, len(experts) - 1) if experts else max(0, len(heads) - 1)


def shapes_of(config: Config, multiple: int | None = None) -> dict[str, list[LayerWidths]]:
    """Return the widths of every model to time alongside the dense one, by name.

    multiple: of all timed MLP widths; by default CPU_CHANNEL_BLOCK, or 1 for a model of few channels.

    Experts are also timed at their full width, because the dense model runs vLLM's kernel there,
    and every layer of a pruned model runs the plugin's.
    """
    sizes, dense = dimensions_of(config), widths_of(config).dense_layers
    multiple = multiple or (CPU_CHANNEL_BLOCK if config.get("intermediate_size", 0) >= 4 * CPU_CHANNEL_BLOCK else 1)
    shapes = {}
    if sizes.num_experts:
        full = sizes.expert_intermediate_size
        for width in (0, *(_part(full, part, EXPERT_BLOCK) for part in FRACTIONS), full):
            experts = (width,) * sizes.num_experts
            shapes[f"experts {width}"] = [
                replace(layer, expert_intermediate_sizes=layer.expert_intermediate_sizes and experts) for layer in dense
            ]
    else:
        for part in (0.0, *FRACTIONS):
            width = _part(sizes.intermediate_size, part, multiple)
            shapes[f"mlp {width}"] = [replace(layer, intermediate_size=width) for layer in dense]
        half = -(-sizes.num_kv_heads // 2)
        for heads in (half, 0) if sizes.num_kv_heads > 1 else (0,):
            groups = (sizes.queries_per_kv,) * heads
            layers = [replace(layer, query_heads_per_kv_head=groups) for layer in dense]
            # vLLM requires one layer with a KV cache
            shapes[f"attention {heads}"] = layers if heads else [dense[0], *layers[1:]]
    mixed = _mixed(config, shapes)  # its layers cannot differ in a model of one layer or one KV head
    return shapes | {"mixed": mixed} if further_widths(mixed) else shapes


def _mixed(config: Config, names: Iterable[str]) -> list[LayerWidths]:
    """Return layers, or experts, that take turns with the widths that are timed alone, as a search
    leaves them. names: of the shapes that are."""
    sizes, dense = dimensions_of(config), widths_of(config).dense_layers
    timed = [name.split() for name in names if " " in name]
    of_kind = {kind: sorted({int(width) for other, width in timed if other == kind} - {0}) for kind, _ in timed}
    if sizes.num_experts:
        turns = of_kind["experts"] * (sizes.num_layers + sizes.num_experts)  # long enough to begin at any layer
        return [
            replace(
                layer,
                expert_intermediate_sizes=layer.expert_intermediate_sizes and tuple(turns[at : at + sizes.num_experts]),
            )
            for at, layer in enumerate(dense)
        ]
    heads, channels = sorted({1, *of_kind["attention"], sizes.num_kv_heads}), of_kind["mlp"]
    return [
        replace(
            layer,
            query_heads_per_kv_head=(sizes.queries_per_kv,) * heads[at % len(heads)],
            intermediate_size=channels[at // len(heads) % len(channels)],
        )
        for at, layer in enumerate(dense)
    ]


def _part(width: int, part: float, multiple: int) -> int:
    return round(part * width / multiple) * multiple


Size = Annotated[int, Meta(ge=1, le=10**9)]
Seconds = Annotated[float, Meta(ge=1e-12, le=1e9)]


class Cell(msgspec.Struct):
    """The seconds of a step at one batch and context."""

    batch: Size
    context: Size
    decode: Seconds
    prefill: Seconds


class ShapeRun(msgspec.Struct):
    """A shape and the dense model, timed in turns in one round."""

    round: Annotated[int, Meta(ge=0)]
    shape: str
    cells: list[Cell]
    dense: list[Cell]


class _Settings(msgspec.Struct):
    engine_arguments: list[str]


class Profile(msgspec.Struct, kw_only=True, rename={"runs": "times"}):
    """A file that `ddp-vllm profile` wrote."""

    multiple: Size
    config: dict[str, Any]
    """Of the dense model."""
    shapes: list[str]
    runs: list[ShapeRun]
    hardware: dict[str, Any]
    versions: dict[str, str]
    settings: _Settings
    path: Path = Path()

    def __post_init__(self) -> None:
        rounds = Counter(run.shape for run in self.runs)
        if rounds.keys() != {*self.shapes} or len({*rounds.values()}) > 1:
            raise SchemaError(f"it has {dict(rounds)} rounds, not as many of each of {', '.join(self.shapes)}")

    def check_fits(self, config: Config, hardware: Mapping[str, Any]) -> None:
        """Refuse a profile of a model with other dimensions, or of other hardware. Raises:
        SettingError."""
        stated = {**dimensions_in(self.config), **self.hardware}
        for name, value in {**dimensions_in(config), **hardware}.items():
            if stated.get(name) != value:
                served = ", or pass --other-machine if the model will be served there" if name in hardware else ""
                raise SettingError(
                    f"{self.path} was measured where {name} is {stated.get(name)}, here it is {value}; measure this "
                    f"model here with ddp-vllm profile{served}"
                )

    def times(self, workload: Workload, turn: int | None = None) -> StepTimes:
        """Return the parts of a step in one round, or by medians over all.

        Raises: SettingError if this workload was not measured.
        """
        runs = [run for run in self.runs if turn in (None, run.round)]
        dense = median(seconds_of(run.dense, workload) for run in runs)
        by_width: dict[str, dict[int, float]] = {}
        for name, shares in _shares(runs, workload).items():
            kind, _, width = name.partition(" ")
            by_width.setdefault(kind, {})[int(width or 0)] = dense * median(shares)
        sizes = dimensions_of(self.config)
        (mixed,) = by_width.pop("mixed", {0: 0.0}).values()
        kinds = {"attention": (sizes.num_kv_heads, 1), "mlp": (sizes.intermediate_size, self.multiple)}
        if sizes.num_experts:
            kinds = {"experts": (sizes.expert_intermediate_size, 1)}
        layers = len(sizes.routed_layers) or sizes.num_layers
        curves, prunable = dict[str, Curve](), dict[str, float]()
        for kind, (full, multiple) in kinds.items():
            # a model without attention keeps it in one layer
            removed = max(1, layers - (kind == "attention"))
            block = max(0.0, (dense - by_width[kind].pop(0)) / removed)
            points, highest = dict[int, float](), 0.0
            # rises to the widest pruned block: noise may make a wider block measure faster
            for number, value in sorted(by_width[kind].items()):
                points[number] = highest = max(highest, block - (dense - value) / layers)
            points.setdefault(full, block)
            curves[kind] = Curve(points=tuple(points.items()), multiple=multiple)
            prunable[kind] = layers * block
        times = StepTimes(dense=dense, curves=curves, prunable=prunable, sizes=sizes)
        if not mixed:
            return times
        widths = _mixed(self.config, {run.shape for run in runs})
        longer = (mixed - times.of_layers(widths)) / further_widths(widths)
        return replace(times, mixture=longer if longer > NOTICEABLE * dense else 0.0)

    def spread(self, workload: Workload) -> float:
        """Return the largest difference between rounds of any shape, as a share of the dense
        step."""
        return max(max(shares) - min(shares) for shares in _shares(self.runs, workload).values())

    def speedup(self, layers: Sequence[LayerWidths], workload: Workload) -> tuple[float, float, float]:
        """Return the predicted speedup of a model of these widths over the dense model, and its
        range over rounds."""
        rounds = dict.fromkeys(run.round for run in self.runs)
        middle, *others = (self.times(workload, turn).speedup(layers) for turn in (None, *rounds))
        return middle, min(middle, *others), max(middle, *others)


def _shares(runs: Sequence[ShapeRun], workload: Workload) -> dict[str, list[float]]:
    """Return the time of each shape as a share of the dense model's in the same turn, round by
    round."""
    shares: dict[str, list[float]] = {}
    for run in runs:
        share = seconds_of(run.cells, workload) / seconds_of(run.dense, workload)
        shares.setdefault(run.shape, []).append(share)
    return shares


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises: SettingError if the file is not a finished profile."""
    again = "write one with ddp-vllm profile MODEL"
    with reading(path, SettingError, again):
        content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise SettingError(f"{path} is not a profile of this version; {again}")
    if not content.get("complete"):
        raise SettingError(f"{path} is not finished; the command that started it resumes it")
    with reading(path, SettingError, f"{again} --overwrite"):
        profile = checked(content, Profile, "it")
        profile.path = path
        return profile


def dimensions_in(config: Config) -> dict[str, Any]:
    """Return the entries of a config that decide the latency of its model, as plain data."""
    return {"model_type": dense_type(config)} | {name: config[name] for name in DIMENSIONS if config.get(name)}


def seconds_of(cells: Sequence[Cell], workload: Workload) -> float:
    """Return the seconds of a workload. Raises: SettingError if it was not measured."""
    for cell in cells:
        if (cell.batch, cell.context) == (workload.batch, workload.context):
            return cell.decode if workload.phase == "decode" else cell.prefill
    measured = " and ".join(sorted({f"{cell.batch} × {cell.context:,}" for cell in cells}))
    raise SettingError(
        f"the profile was measured for sequences × tokens of {measured}, not {workload.batch} × {workload.context:,}; "
        f"measure that: ddp-vllm profile MODEL --concurrency {workload.batch} --context-length {workload.context}"
    )


def _between(points: Sequence[tuple[float, float]], x: float) -> float:
    """Return the value at `x` of the line through the two points around it, or nearest to it."""
    right = min(max(bisect_left([position for position, _ in points], x), 1), len(points) - 1)
    (low, first), (high, last) = points[right - 1 : right + 1]
    return first + (last - first) * (x - low) / (high - low)


Measure = Callable[..., Profile]
"""`ddp_vllm.profile`, or a function with its arguments; this module does not import the benchmarks.
"""


def find_profile(
    path: str, model: Path, config: Config, workload: Workload, measure: Measure, *, other_machine: bool
) -> Profile:
    """Return the latency profile of a model on this machine, checked.

    path: the file to read; if empty, the profile is looked up in the cache, and measured if it is
        not there.
    model, config: the folder of the dense model and its config.
    other_machine: accept a profile that was measured on another machine.

    Raises: SettingError for a profile of another model or machine; ServingError if measuring fails.
    """
    here = hardware()
    # of the config, not of the folder, because engines for profiling are built from the config alone
    key = [FORMAT, config, workload.batch, workload.context, here["cpu"], here["cores"], here["gpus"], versions()]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    file = Path(path) if path else cache_folder() / "profiles" / f"{name}.json"
    try:
        profile = read_profile(file)
    except SettingError:
        if path:
            raise
        make_folder(file.parent)  # not measured yet, or not to its end
        grid = {"concurrency": (workload.batch,), "context_length": (workload.context,)}
        profile = measure(model, output=file, overwrite=True, **grid)
    profile.check_fits(config, {} if other_machine else {name: here[name] for name in Hardware.__struct_fields__})
    return profile


def predicted_latency(profile: Profile, layers: Sequence[LayerWidths], workload: Workload) -> dict[str, Any]:
    """Return the predicted speedup of a pruned model as the provenance records it, with its range
    and conditions."""
    speedup, low, high = profile.speedup(layers, workload)
    prediction = {"speedup": speedup, "low": low, "high": high, "workload": asdict(workload)}
    conditions = {"hardware": profile.hardware, "versions": profile.versions}
    return prediction | conditions | {"engine_arguments": profile.settings.engine_arguments}
