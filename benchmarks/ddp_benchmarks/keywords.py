"""The settings of bench, bench_steps, profile and evaluate as keywords of functions, for editors
and type checkers."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from ddp_benchmarks.sharegpt import Load


class ProfileKeywords(TypedDict, total=False):
    """The fields of `ProfileSettings` without its model."""

    concurrency: int | Sequence[int]
    context_length: int | Sequence[int]
    steps: int
    rounds: int
    engine_arguments: Sequence[str]


class BenchKeywords(TypedDict, total=False):
    """The fields of `sharegpt.Settings` without its models."""

    mode: str
    num_prompts: int
    pairs: int
    warmups: int
    warmup_round: bool
    dataset: str | Path | None
    seed: int
    max_model_len: int
    loads: "Sequence[Load]"
    goodput: Sequence[str]
    port: int | None
    startup_seconds: float
    engine_arguments: Sequence[str]


class StepKeywords(TypedDict, total=False):
    """The fields of `StepSettings` without its models and workload."""

    rounds: int
    steps: int
    engine_arguments: Sequence[str]


class EvalKeywords(TypedDict, total=False):
    """The fields of `EvalSettings` without model, tasks and output."""

    backend: str
    rows: str | Path | Sequence[str | Path]
    limit: int | None
    batch_size: int | None
    dtype: str
    max_length: int
    model_args: Sequence[tuple[str, str]]
