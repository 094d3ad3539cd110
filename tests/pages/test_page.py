"""The page: what it says, that it loads nothing, and that it never mixes what can't be compared."""

import re
from pathlib import Path

import pytest
from written_folders import PageReader, write_evaluation, write_model

from ddp_vllm.pages.compare import page_of
from ddp_vllm.pages.measurements import Comparison, collect, difference
from ddp_vllm.pages.page import Table, markdown_table, to_html, to_markdown


def write_html(comparison: Comparison) -> str:
    return to_html(page_of(comparison))


def write_markdown(comparison: Comparison) -> str:
    return to_markdown(page_of(comparison))


def test_page_says_whether_the_difference_is_real(dense: Path, pruned: Path) -> None:
    write_evaluation(dense, 0.8)
    for accuracy, sentence in (
        (0.6, "−20.0 ± 5.8 points"),
        (0.79, "cannot tell: between 3.3 points worse and 1.3 better; use more rows"),
    ):
        write_evaluation(pruned, accuracy)
        comparison = collect([pruned])
        for text in (write_html(comparison), write_markdown(comparison)):
            assert f"accuracy: {sentence}" in text and "same questions, 95 %" in text


def test_page_says_what_the_results_say(dense: Path, pruned: Path) -> None:
    comparison = collect([pruned])
    assert comparison.notes == {}
    assert [model.facts.kv_bytes_per_token for model in comparison.models] == [2 * 2 * 4 * 4, 2 * 2 * 4 * 2]
    assert difference(comparison.pruned[0], comparison.dense) == pytest.approx((-0.2, 0.0577), abs=1e-4)
    for text in (write_html(comparison), write_markdown(comparison)):
        assert "1.50× [1.45, 1.55] faster, offline" in text
        assert "accuracy: −20.0 ± 5.8 points" in text
        assert "50.0 % less KV cache per token" in text
        assert "30.00" in text  # the perplexity
    reader = PageReader(page := write_html(comparison))
    assert reader.loaded == reader.links == [] and not re.search(r"url\((?!#)", page) and "<svg" in page


def test_different_rows_are_not_compared(dense: Path, pruned: Path) -> None:
    (pruned / "eval" / "results.json").unlink()
    write_evaluation(pruned, 0.9, limit=10)
    comparison = collect([pruned])
    assert difference(comparison.pruned[0], comparison.dense) is None
    assert "not evaluated on the same rows" in next(iter(comparison.notes))
    write_evaluation(dense, 0.9, limit=10, name="again")
    comparison = collect([pruned])
    assert "points) (first 10 rows of each task)" in write_markdown(comparison)


def test_unmeasured_models_are_named(tmp_path: Path, dense: Path) -> None:
    folder = write_model(tmp_path / "new", widths=[(1, 5), (1, 9)], origin=str(dense))
    other = write_model(tmp_path / "<b>a&b", widths=[(1, 5), (1, 9)], origin=str(dense))
    comparison = collect([folder, other])
    assert comparison.notes["new was not evaluated"] == f"ddp-vllm eval {folder}"
    bench = f"ddp-vllm bench sharegpt --dense {dense} --pruned {folder}"
    assert comparison.notes["new was not measured"] == bench
    page = write_html(comparison)
    assert str(tmp_path) not in page  # the commands are for whoever compares, not for readers
    assert "<svg" not in page  # one point is no picture
    assert "new was not measured" in page
    assert "&lt;b&gt;a&amp;b" in page and "<b>" not in page


def test_what_a_cell_holds_stays_in_the_cell() -> None:
    table = Table(headings=["a"], rows=[["<img src=x>\n| b"], ["\x1b]0;evil\x07"]])
    assert markdown_table(table).splitlines()[2:] == ["| &lt;img src=x> \\| b |", r"| \\x1b]0;evil\\x07 |"]
    table = Table(headings=["", "a|b"], rows=[["x", "1|2"]])
    assert markdown_table(table) == "|  | a\\|b |\n|---|--:|\n| x | 1\\|2 |"
    assert markdown_table(Table(headings=["a", "b"], rows=[], is_text=True)) == "| a | b |\n|---|---|"
