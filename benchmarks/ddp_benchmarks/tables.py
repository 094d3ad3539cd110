"""Prints results as tables in the terminal."""

from collections.abc import Sequence
from statistics import median

from rich import box
from rich.table import Table
from rich.text import Text

from ddp_vllm.evaluations import Evaluation, ScoreRow, in_points, mean_difference, score_rows
from ddp_vllm.intervals import with_interval
from ddp_vllm.pages import page
from ddp_vllm.pages.terminal import SafeConsole, print_table
from ddp_vllm.results import Bench, Run

_METRICS = (  # metric, heading, decimals
    ("requests_per_second", "requests/s", 2),
    ("output_tokens_per_second", "tokens/s, output", 0),
    ("output_characters_per_second", "characters/s, output", 0),
    ("p50_ttft_ms", "time to first token, median ms", 1),
    ("p99_ttft_ms", "time to first token, p99 ms", 1),
    ("p50_tpot_ms", "time per output token, median ms", 2),
    ("p99_tpot_ms", "time per output token, p99 ms", 2),
    ("p50_e2el_ms", "end to end, median ms", 0),
    ("p99_e2el_ms", "end to end, p99 ms", 0),
)
_FACTS = (  # fact, heading, decimals
    ("weights_gib", "weights, GiB", 2),
    ("kv_cache_tokens", "tokens the KV cache holds", 0),
    ("weights_load_seconds", "loading the weights, s", 1),
    ("init_engine_seconds", "compiling and warming up, s", 1),
    ("startup_seconds", "start to first answer, s", 1),
)


def print_report(bench: Bench) -> None:
    """Print one table per load, with medians of the rounds and ratios to the dense model, then the
    verdicts."""
    console = SafeConsole()
    for load in bench.loads:
        table = Table(title=f"ShareGPT, {load}: medians of the measured rounds", box=box.SIMPLE_HEAD)
        table.add_column("metric")
        runs = [bench.measured(model.label, load) for model in bench.models]
        verdicts = [verdict for verdict in bench.verdicts if verdict.load == load]
        labels = [model.label for model in bench.models]
        for label in (*labels, *(f"{verdict.label}, times better [95 %]" for verdict in verdicts)):
            table.add_column(label, justify="right")
        for metric, heading, decimals in _METRICS:
            compared = [verdict.metrics.get(metric) for verdict in verdicts]
            ratios = [with_interval(*one.bounds) if one else "–" for one in compared]
            _add_row(table, heading, [_values(of_model, "metrics", metric) for of_model in runs], decimals, ratios)
        for fact, heading, decimals in _FACTS:
            _add_row(table, heading, [_values(of_model, "engine", fact) for of_model in runs], decimals)
        console.print(table)
    for verdict in bench.verdicts:
        console.print(Text.assemble((verdict.label, "bold"), f", {verdict.load}: ", (verdict.sentence, "bold")))
    if not bench.complete:
        console.print(Text.assemble(("Incomplete", "bold"), f": {bench.reason}"), style="red")


def _values(runs: Sequence[Run], part: str, name: str) -> list[float]:
    """Return a number of the metrics or the engine of each run that has it."""
    return [getattr(run, part)[name] for run in runs if name in getattr(run, part)]


def _add_row(table: Table, heading: str, columns: list[list[float]], decimals: int, ratios: Sequence[str] = ()) -> None:
    """Add the median of each column, unless all are empty."""
    if any(columns):
        cells = [f"{median(column):,.{decimals}f}" if column else "–" for column in columns]
        table.add_row(heading, *cells, *ratios)


def print_quality(evaluation: Evaluation, dense: Evaluation | None) -> None:
    """Print each task's metric and the mean accuracy; with `dense`, also that model's and the retained
    fraction, in percent of an accuracy and as a factor of a perplexity."""
    console = SafeConsole()
    models = [dense, evaluation] if dense else [evaluation]
    if limit := evaluation.ddp_vllm.settings.limit:
        console.print(f"first {limit} rows of each task")
    rows = []
    for row in score_rows(models):
        cells = [row.heading, *(cell or "–" for cell in row.cells())]
        if dense:
            cells.append(_retained(row))
        rows.append(cells)
    headings = ["task", *(model.ddp_vllm.model.name for model in models), *["retained"] * bool(dense)]
    print_table(page.Table(headings=headings, rows=rows), console)
    if dense and (difference := mean_difference(evaluation.ddp_vllm.answers, dense.ddp_vllm.answers)):
        same_questions = Text.assemble(("mean accuracy", "bold"), ", same questions: ")
        console.print(same_questions.append(in_points(*difference), "bold"))


def _retained(row: ScoreRow) -> str:
    """Return the second model's score over the first one's."""
    dense, pruned = row.scores
    if not (dense and pruned and dense[0]):
        return "–"
    kept = pruned[0] / dense[0]
    return f"{100 * kept:.1f} %" if row.is_accuracy else f"×{kept:.2f}"
