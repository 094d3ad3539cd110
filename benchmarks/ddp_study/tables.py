"""The tables of `ddp-vllm study`: the rows of each, and what the paper (arXiv:2603.08065) found there.

A row is the name of a method or a file of masks, and after plus signs what is changed of it: a setting of the recipe,
as `paper+scope=layer`; `steps=25%` are a share of the study's. `+scales` lets the scales of what it keeps learn when
its masks are done, `+recovered` all weights too; settings after that are of this second run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHARES = ("12.5%", "25%", "50%")


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """What a table compares."""

    title: str
    finding: str
    """What the paper says."""
    rows: Sequence[str] = ()
    """Row by row as shown; none: the methods of tables 1 to 3, best first."""
    falls: Sequence[tuple[str, Sequence[str]]] = ()
    """A column, and the rows in whose order it falls, if the paper is right."""
    columns: Sequence[str] = ("tokens", "seconds")
    """What is shown of the rows beside their perplexity."""
    drawn: Sequence[str] = ("perplexity",)
    """Columns in the picture."""


COLUMNS: Mapping[str, tuple[str, float]] = {  # of a cell -> its heading, and what a unit of that is
    "seconds": ("seconds", 1.0), "tokens": ("tokens read", 1.0), "learns": ("numbers that learn", 1.0),
    "step_seconds": ("seconds a step", 1.0), "peak_bytes": ("peak GB", 1e9), "perplexity": ("perplexity", 1.0),
}  # fmt: skip


def _of_steps(name: str) -> list[str]:
    return [*(f"{name}+steps={share}" for share in SHARES), name]


def _by_scope(name: str) -> list[str]:
    return [f"{name}+scope=expert", f"{name}+scope=layer", name]


_RELAXATIONS = (
    "hard-concrete+distillation=0", "hard-concrete-deterministic+distillation=0", "paper+distillation=0", "paper",
)  # fmt: skip
_FULL = "ours+train=weights"

TABLES = {
    "methods": StudyTable(
        title="Pruning methods",
        finding="learned masks have the lowest perplexity in 11 of 12 columns of tables 1 and 2, its dense rivals "
        "after fine-tuning",
        columns=("seconds",),
    ),
    "relaxations": StudyTable(
        title="Relaxations of the mask",
        finding="each step lowers perplexity (table 4): without noise, gates above 1, distillation",
        rows=_RELAXATIONS,
        falls=[("perplexity", _RELAXATIONS)],
    ),
    "groups": StudyTable(
        title="Where the budget holds",
        finding="the same budget in every layer costs perplexity, and in every expert more (table 5)",
        rows=[*_by_scope("paper"), *_by_scope("ours")],
        falls=[("perplexity", _by_scope("paper")), ("perplexity", _by_scope("ours"))],
    ),
    "recovery": StudyTable(
        title="One-shot masks and recovery",
        finding="weights that learn after one-shot masks (by LoRA; here all of them) lower perplexity, and the paper's "
        "masks on frozen weights have less still",
        rows=[*(f"{name}{end}" for name in ("lorap", "heapr", "paper", "ours") for end in ("", "+recovered")), _FULL],
        falls=[("perplexity", (name, f"{name}+recovered", "paper")) for name in ("lorap", "heapr")],
    ),
    "data": StudyTable(
        title="Text that masks learn on",
        finding="FineWeb-Edu serves better than C4, and than instructions of LaMini in most columns",
        rows=("paper", "ours"),
    ),
    "cost": StudyTable(
        title="Cost of learning",
        finding="a step takes longer with distillation, and longest where all weights learn, in 4.4 times the memory",
        rows=("wanda-sp", "fisher", "paper+distillation=0", "paper", "ours", _FULL),
        falls=[("step_seconds", (_FULL, "paper", "paper+distillation=0")), ("peak_bytes", (_FULL, "paper"))],
        columns=("tokens", "learns", "step_seconds", "peak_bytes", "seconds"),
        drawn=("step_seconds", "peak_bytes"),
    ),
    "tokens": StudyTable(
        title="Tokens to learn on",
        finding="more tokens lower perplexity, up to 60 million",
        rows=[*_of_steps("paper"), *_of_steps("ours")],
        falls=[("perplexity", _of_steps("paper")), ("perplexity", _of_steps("ours"))],
    ),
    "shapes": StudyTable(
        title="What was removed where",
        finding="later layers lose more, attention more unevenly than MLPs, experts the more the less they are chosen; "
        "scales lie about 1",
        rows=("paper", "ours"),
    ),
}  # fmt: skip


def chains(table: StudyTable, rows: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the columns and rows, of those there are, that show whether the paper's finding holds.

    Of rows that learn on other text the finding is that they are worse than on the study's.
    """
    other = [("perplexity", [name, name.partition("+data=")[0]]) for name in rows if "+data=" in name]
    found = [(column, [name for name in order if name in rows]) for column, order in table.falls] + other
    return [(column, order) for column, order in found if len(order) > 1]
