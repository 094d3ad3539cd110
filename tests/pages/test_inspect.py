"""What `inspect` prints of a checkpoint written by hand."""

import re
import shutil
from pathlib import Path

from commands import invoke, passed
from written_folders import write_masks

from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.pages.summary import units


def _inspect(folder: Path) -> str:
    result = passed(invoke("inspect", folder))
    return result.stdout


def test_inspect_shows_widths_totals_and_quality(trained: Path) -> None:
    text = _inspect(trained)
    widths = [("4", "8", "93"), ("4", r"6 \(1 2 2 1\)", "57"), ("–", "–", "23")]
    for index, (kv_heads, query_heads, channels) in enumerate(widths):
        assert re.search(rf"{index} │ +{kv_heads} │ +{query_heads} │ +{channels} │", text), text
    for label, dense, left in units(read_checkpoint(trained)):
        assert re.search(rf"{label} +{left:,} of +{dense:,} +{100 * (1 - left / dense):.1f}% removed", text)
    assert re.search(r"held-out perplexity +dense \d+\.\d\d → pruned \d+\.\d\d \(256 tokens of a.jsonl\)", text)
    assert "sparsity was 25.0% before; 115 more units dropped, 2 revived" in text


def test_what_a_file_says_is_neither_markup_nor_obeyed_by_the_terminal(trained: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(trained, tmp_path / "out[v2]"))
    change = {"raw_sparsity": 0.1, "dropped": 1, "revived": 2}
    write_masks(folder, {}, {"rounding": {"[/nope]": change, "\x1b[31mred": change}})
    text = _inspect(folder)
    assert (
        "out[v2]: kept units" in text
        and "rounding of [/nope]" in text
        and "rounding of \\x1b[31mred" in text
        and "\x1b" not in text
    )
