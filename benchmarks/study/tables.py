"""The tables of the study: the rows of each, and the finding of the paper
(arXiv:2603.08065).

A row is the name of a method or a file of masks, followed by changes after plus signs: a setting of
the recipe, as in `paper+scope=layer`, where `steps=25%` is a share of the study's steps. `+scales`
adds a second run that trains the scales of the kept units, `+recovered` one that trains all
weights. Settings after these words belong to the second run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SHARES = ("12.5%", "25%", "50%")


@dataclass(frozen=True, kw_only=True)
class StudyTable:
    """The rows and columns of a table, and the paper's finding."""

    title: str
    finding: str
    """The paper's finding."""
    rows: Sequence[str] = ()
    """Rows in the order shown; empty: the methods of tables 1 to 3, best first."""
    falls: Sequence[tuple[str, Sequence[str]]] = ()
    """A column, and the rows over which it falls if the paper's finding holds."""
    columns: Sequence[str] = ("tokens", "seconds")
    """Columns shown in addition to perplexity."""


COLUMNS: Mapping[str, tuple[str, float]] = {  # number of a cell -> its heading and its unit
    "seconds": ("seconds", 1.0), "tokens": ("tokens read", 1.0), "learns": ("trained numbers", 1.0),
    "step_seconds": ("seconds per step", 1.0), "peak_bytes": ("peak GB", 1e9), "perplexity": ("perplexity", 1.0),
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
        title="Scope of the budget",
        finding="equal budgets for all layers raise perplexity, and equal budgets for all experts more (table 5)",
        rows=[*_by_scope("paper"), *_by_scope("ours")],
        falls=[("perplexity", _by_scope("paper")), ("perplexity", _by_scope("ours"))],
    ),
    "recovery": StudyTable(
        title="One-shot masks and recovery",
        finding="training weights after one-shot masks (by LoRA; here all weights) lowers perplexity, and the paper's "
        "masks on frozen weights have the lowest",
        rows=[*(f"{name}{end}" for name in ("lorap", "heapr", "paper", "ours") for end in ("", "+recovered")), _FULL],
        falls=[("perplexity", (name, f"{name}+recovered", "paper")) for name in ("lorap", "heapr")],
    ),
    "data": StudyTable(
        title="Training text of the masks",
        finding="FineWeb-Edu is better than C4, and in most columns better than instructions of LaMini",
        rows=("paper", "ours"),
    ),
    "cost": StudyTable(
        title="Cost of training",
        finding="a step takes longer with distillation, and longest with all weights trained, in 4.4 times the memory",
        rows=("wanda-sp", "fisher", "paper+distillation=0", "paper", "ours", _FULL),
        falls=[("step_seconds", (_FULL, "paper", "paper+distillation=0")), ("peak_bytes", (_FULL, "paper"))],
        columns=("tokens", "learns", "step_seconds", "peak_bytes", "seconds"),
    ),
    "tokens": StudyTable(
        title="Training tokens",
        finding="more tokens lower perplexity, up to 60 million",
        rows=[*_of_steps("paper"), *_of_steps("ours")],
        falls=[("perplexity", _of_steps("paper")), ("perplexity", _of_steps("ours"))],
    ),
}  # fmt: skip


def chains(table: StudyTable, rows: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each column and those of `rows` over which it must fall for the paper's finding to
    hold.

    For rows with another training text the finding is that they are worse than with the study's
    text.
    """
    other = [("perplexity", [name, name.partition("+data=")[0]]) for name in rows if "+data=" in name]
    orders = [(column, [name for name in order if name in rows]) for column, order in table.falls] + other
    return [(column, order) for column, order in orders if len(order) > 1]
