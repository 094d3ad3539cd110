"""Writes the page of a run: how each step ended, and its rows as tables. Standard library only."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HIDDEN = ("trace", "tail", "answers", "operators_ms", "metrics", "rounding", "widths", "huge_page_bytes")
MOST_ROWS, LONGEST = 60, 90  # rows of a table, characters of a cell


def write_page(state: Mapping[str, Any], path: Path) -> None:
    """Write Markdown."""
    where = "on a CPU, in tiny sizes: a dry run, whose times mean nothing" if state["dry"] else "on a GPU"
    lines = [f"# Results of `{state['call']}`, {where}", ""]
    lines += ["Written by `benchmarks/borrowed_gpu/run.py` after every step.", ""]
    lines += table(
        [
            {
                "step": name, "ended": "well" if step["code"] == 0 else f"badly: {step['code']}",
                "seconds": step["seconds"], "commit": step["commit"],
            }
            for name, step in state["steps"].items()
        ]
    )  # fmt: skip
    for name, step in state["steps"].items():
        result = step.get("result")
        if isinstance(result, dict):
            facts = {key: value for key, value in flat(result).items() if not isinstance(value, list)}
            rows = result.get("rows") or result.get("verdicts") or []
            lines += [f"## {name}", "", *table([{"value of": key, "": value} for key, value in facts.items()])]
            lines += table([flat(row) for row in rows[:MOST_ROWS]])
        elif step["code"] != 0:
            lines += [f"## {name}", "", "```", step["tail"][-600:].strip(), "```", ""]
    path.write_text("\n".join(lines))


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the plain values, also those in mappings, by names such as `decode_ms.32`."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        if name not in HIDDEN and isinstance(value, Mapping):
            plain |= flat(value, f"{prefix}{name}.")
        elif name not in HIDDEN and (not isinstance(value, list) or len(value) <= 8):
            plain[prefix + name] = value
    return {name: value for name, value in plain.items() if not isinstance(value, list) or is_short(value)}


def is_short(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float) for value in values)


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table with a column for every name that a row has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    if not rows:
        return []
    lines = [names, ["---"] * len(names), *([cell(row.get(name, "")) for name in names] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(cell, value))
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")[:LONGEST]
