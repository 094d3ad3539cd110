"""What is compared, how it is measured, and the page that says it; whose results these are.

Results belong to the folder in which they lie, or whose resolved path they store; a name counts only elsewhere.
"""

import json
import math
import random
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import assert_refused, edit_json, invoke, passed
from matplotlib.figure import Figure
from written_folders import MACHINE, PageReader, write_bench, write_evaluation, write_masks, write_model

from ddp_vllm.errors import ModelError, SettingError
from ddp_vllm.evaluations import FIDELITY_FORMAT, in_points, perplexity_ratio
from ddp_vllm.intervals import judge, t_quantile
from ddp_vllm.masks import Provenance, Quality
from ddp_vllm.model_facts import describe_model
from ddp_vllm.model_files import tokenizer_and_config_files
from ddp_vllm.pages.compare import choice, page_of
from ddp_vllm.pages.measurements import Comparison, collect, difference
from ddp_vllm.pages.page import Table, markdown_table, to_html, to_markdown
from ddp_vllm.pages.pictures import Point, draw_points
from ddp_vllm.results import verdicts
from ddp_vllm.schema import SchemaError

HALF = [(1, 5), (1, 9)]
SPEEDS = [(1, 1.5), (2, 3.1), (1, 1.45), (1, 1.52), (3, 4.4)]  # requests/s of the dense and the pruned model


def write_dense(folder: Path, accuracy: float = 0.8) -> Path:
    write_evaluation(write_model(folder, widths=[(2, 16), (2, 16)], origin=None), accuracy)
    return folder


def write_pruned(folder: Path, dense: Path | str) -> Path:
    return write_model(folder, widths=HALF, origin=str(dense))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return write_dense(tmp_path / "base")


@pytest.fixture
def pruned(tmp_path: Path, dense: Path) -> Path:
    """Evaluated and measured against the dense model."""
    folder = write_pruned(tmp_path / "half", dense)
    write_evaluation(folder, 0.6)
    write_bench(folder / "sharegpt.json", dense, folder, SPEEDS)
    return folder


def write_text(file: Path, model: Path, dense: Path, max_length: int = 16, **content: Any) -> Path:
    """Write what `eval --text` does."""
    facts = {"model": describe_model(str(model)).to_json(), "against": describe_model(str(dense)).to_json()}
    shown = {"format": FIDELITY_FORMAT, "started": "2026", "settings": {"max_length": max_length}, **MACHINE}
    file.parent.mkdir(exist_ok=True)
    return edit_json(file, **facts, **shown, **content)


def text_quality(loss: float, **more: Any) -> dict[str, Any]:
    """Return the result on a text, of two blocks."""
    losses = {"dense": [3.0, 3.1], "pruned": [3.0 + loss, 3.1 + loss]}
    return {"dense": 20.0, "pruned": 21.0, "tokens": 48, "block_losses": losses, **more}


def pages(comparison: Comparison) -> tuple[str, str]:
    """Return the page in HTML and in Markdown."""
    return to_html(page_of(comparison)), to_markdown(page_of(comparison))


@pytest.mark.parametrize(("degrees", "value"), [(1, 12.7062), (4, 2.7764), (31, 2.0395), (200, 1.9719)])
def test_quantiles_are_students(degrees: int, value: float) -> None:
    """As scipy's `stats.t.ppf` says; the interval of the next test is that of its `stats.t.interval`."""
    assert t_quantile(degrees) == pytest.approx(value, abs=1e-4)


def test_interval_of_five_known_pairs() -> None:
    verdict = judge([10, 10, 10, 10, 10], [12, 12.5, 13, 12.2, 12.8])
    assert verdict.ratio == pytest.approx(1.2494558, abs=1e-6)
    assert (verdict.low, verdict.high) == pytest.approx((1.1992921, 1.3017177), abs=1e-5)
    assert verdict.sentence == "1.25× [1.20, 1.30] faster"


@pytest.mark.parametrize(("pruned", "sentence"), [
    ([0.99, 1.01, 1.0, 1.02, 0.98], "no measurable difference (1.00× [0.98, 1.02])"),
    ([1.3, 1.31], "1.30× [1.24, 1.37] faster (only 2 pairs)"),
    ([1.20, 1.5, 1.40], "1.36× [1.02, 1.81] faster (only 3 pairs)"),  # wider above than below; ± 0.39 would reach 1
    ([1.02, 1.03, 1.04, 1.05, 1.0], "1.028× [1.004, 1.052] faster"),  # two decimals would show 1.00
    ([1.0, 1.1, 0.95, 1.05, 1.15], "cannot tell: 1.05× [0.95, 1.15]; measure more pairs"),
    ([1.3], "1.30× in one pair, which does not show the spread; measure 5 pairs"),
])  # fmt: skip
def test_sentences(pruned: list[float], sentence: str) -> None:
    assert judge([1.0] * len(pruned), pruned).sentence == sentence
    # as the option of `bench steps` calls them
    assert judge([1.0] * len(pruned), pruned, unit="round").sentence == sentence.replace("pair", "round")


def test_the_interval_of_a_perplexity_ratio_holds_for_blocks_of_different_weight() -> None:
    """Of 400 drawn texts, whose blocks hold 1 to 500 counted tokens, about 95 % of intervals hold the true ratio."""
    chance, inside = random.Random(0), 0
    quality = partial(Quality, dense=20.0, pruned=24.0, tokens=4)
    for _ in range(400):
        tokens = [chance.choice((1, 20, 100, 500)) for _ in range(48)]
        dense = [chance.gauss(3.0, 0.5) for _ in tokens]
        pruned = [loss + chance.gauss(0.2, 1.0 / n**0.5) for loss, n in zip(dense, tokens, strict=True)]
        losses = {"dense": dense, "pruned": pruned}
        ratio = perplexity_ratio(quality(block_losses=losses, block_tokens=tokens))
        assert ratio
        inside += ratio[1] <= math.exp(0.2) <= ratio[2]
    assert 0.91 < inside / 400 < 0.98
    assert perplexity_ratio(quality()) is None
    assert perplexity_ratio(quality(block_losses={"dense": [1.0], "pruned": [1.5]})) == (math.exp(0.5), 0.0, math.inf)


def edit(path: Path, **facts: Any) -> Path:
    """Change what results store about their last model."""
    return edit_json(path, lambda c: (c["models"][-1] if "models" in c else c["ddp_vllm"]["model"]).update(facts))


def test_options_that_change_a_result_are_named(pruned: Path, dense: Path) -> None:
    """And models that were built with other arguments did not answer the same questions."""
    assert difference(collect([pruned]).pruned[0], collect([pruned]).dense)
    edit_json(pruned / "sharegpt.json", lambda c: c["settings"].update(engine_arguments=["--quantization", "fp8"]))
    (evaluation,) = pruned.glob("eval/*.json")
    edit_json(evaluation, lambda c: c["ddp_vllm"]["settings"].update(model_args=["quantization=fp8"]))
    comparison = collect([pruned])
    assert difference(comparison.pruned[0], comparison.dense) is None
    assert any("not evaluated on the same rows" in note for note in comparison.notes)
    assert "vLLM with --quantization fp8" in pages(comparison)[1]
    assert "backend with quantization=fp8" in pages(comparison)[1]


def test_results_of_another_machine_are_known_by_id(dense: Path, tmp_path: Path) -> None:
    """There the folder had another name and place; without an id, as of a model that was never here, a name counts."""
    pruned = write_pruned(tmp_path / "half", dense)
    evaluation = write_evaluation(pruned, 0.6).rename(tmp_path / "eval.json")
    bench = write_bench(tmp_path / "bench.json", dense, pruned, SPEEDS)
    for path in (evaluation, bench):
        edit(path, model="/gpu/other", name="other")
    assert collect([pruned], results=[evaluation, bench]).notes == []
    edit(evaluation, id="0" * 64, name="half", model=str(pruned))
    assert collect([pruned], results=[evaluation, bench]).notes[0].startswith("results of half are left out")
    edit(evaluation, id=None, model="/gpu/half")
    assert collect([pruned], results=[evaluation, bench]).notes == []


def test_a_model_that_was_trimmed_before_it_was_pruned(tmp_path: Path) -> None:
    """Its dense model is the one that was trimmed, with which all folders compare."""
    dense, trimmed = write_dense(tmp_path / "dense"), write_dense(tmp_path / "trimmed")
    entry = {"name": "dense", "tokens": (16, 8), "read": (2, 1), "texts": {}, "words": {}}
    write_masks(trimmed, {}, {"trimmed": entry, "applied_to": str(dense)})
    pruned, other = write_pruned(tmp_path / "a", trimmed), write_pruned(tmp_path / "b", dense)
    for folders in ([trimmed, pruned], [pruned, other]):
        assert getattr(collect(folders).dense, "name", "") == "dense (dense)"
    assert getattr(collect([pruned]).dense, "name", "") == "trimmed (dense)"


def test_models_with_different_parents_are_refused(tmp_path: Path) -> None:
    one, other = write_dense(tmp_path / "one"), write_dense(tmp_path / "other", 0.4)
    first, second = write_pruned(tmp_path / "a", one), write_pruned(tmp_path / "b", other)
    write_bench(second / "sharegpt.json", other, second, SPEEDS)
    with pytest.raises(SettingError, match=f"different models \\({one}, {other}\\).*--dense"):
        collect([first, second])
    notes = collect([first, second], dense=str(one)).notes
    assert f"b was measured against {other}, not {one}" in notes
    with pytest.raises(SettingError, match="is pruned itself"):
        collect([first], dense=str(second))
    with pytest.raises(ModelError, match=r"typo is not the folder of a model: it has no config\.json"):
        collect([first], dense=str(tmp_path / "typo"))
    (one / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="one has no weights"):
        collect([first], dense=str(one))


def test_results_in_a_folder_that_eval_wrote_elsewhere(tmp_path: Path) -> None:
    """`eval half --against base -o numbers`, then `compare half --results numbers`."""
    dense, numbers = write_dense(tmp_path / "base", 0.8), tmp_path / "numbers"
    pruned = write_pruned(tmp_path / "half", dense)
    write_evaluation(pruned, 0.6).parent.rename(numbers)
    (dense / "eval").rename(numbers / "against-base")
    page = tmp_path / "pages" / "page.html"
    passed(invoke("compare", pruned, "--results", numbers, "-o", page))
    assert "**half**: accuracy: −20.0 ± 5.8 points" in page.with_suffix(".md").read_text()
    (tmp_path / "empty").mkdir()
    result = invoke("compare", pruned, "--results", tmp_path / "empty", "--overwrite")
    assert_refused(result, 4, "empty holds no results of ddp-vllm bench or eval")


def write_size(
    folder: Path, dense: Path | str, loss: float, *, top1: float | None = None, widths: Any = HALF, **provenance: Any
) -> Path:
    """Write a pruned model whose loss on held-out blocks is higher by about `loss`."""
    losses = {"dense": [3.0, 3.2, 3.1], "pruned": [3.0 + loss, 3.21 + loss, 3.12 + loss]}
    quality = dict.fromkeys(losses, 20.0) | {"tokens": 48, "block_losses": losses}
    if top1 is not None:
        quality["agreement"] = {"pruned": {"kl": 0.1, "top1": top1}}
    write_model(folder, widths=widths, origin=str(dense))
    write_masks(folder, {}, {"recipe": {"model": str(dense)}, "perplexity": quality, **provenance})
    return folder


def test_a_family_of_sizes_draws_its_curve_and_says_which_to_take(tmp_path: Path) -> None:
    """Before anything was benchmarked: by the perplexity and the promise that each checkpoint carries."""
    sizes, work = list[Path](), {"phase": "decode", "batch": 8, "context": 1024}
    for speedup, loss in ((1.1, 0.05), (1.25, 0.15), (1.5, 0.5)):
        recipe = {"model": "owner/dense", "speedup": speedup, "budget": "latency"}
        latency = {"speedup": speedup, "low": speedup - 0.01, "high": speedup + 0.01, "workload": work, **MACHINE}
        folder = tmp_path / "sizes" / f"speedup-{speedup}"
        sizes.append(write_size(folder, "owner/dense", loss, recipe=recipe, latency=latency))
    arguments = ["compare", *map(str, sizes), "-o", str(tmp_path / "page.html"), "--tolerance"]
    result = passed(invoke(*arguments, "1.2"))
    assert "within 1.2 times: speedup-1.25: held-out perplexity 1.17× [" in result.output
    page = (tmp_path / "page.md").read_text()
    row = "| speed of a step, predicted (decode, 8 sequences of 1,024 tokens) | 1 |"
    assert f"{row} 1.10× [1.09, 1.11] | 1.25× [1.24, 1.26] | 1.50× [1.49, 1.51] |" in page
    html = (tmp_path / "page.html").read_text()
    assert "Held-out perplexity against speed" in html
    assert (
        "1.50× [1.49, 1.51] as fast, predicted (decode, 8 sequences of 1,024 tokens); held-out perplexity 1.6" in page
    )
    result = invoke(*arguments, "1.01", "--overwrite")
    assert result.exit_code == 9 and "none has a known perplexity of at most 1.01 times" in result.stdout
    assert result.stderr.endswith("; train for longer with ddp-vllm recover, or remove less\n")
    records = json.loads(passed(invoke(*arguments, "1.2", "--overwrite", "--json")).stdout)
    assert records["chosen"] == "speedup-1.25" and len(records["models"]) == 3
    assert records["models"][0]["speedup"] == pytest.approx([1.1, 1.09, 1.11], abs=0.005)
    shown = " ".join(invoke("inspect", sizes[0]).output.split())
    assert "1.10× [1.09, 1.11] the dense model's speed (decode, 8 sequences of 1,024 tokens;" in shown


def test_a_low_perplexity_alone_recommends_no_model(tmp_path: Path) -> None:
    """A model that repeats itself may read its own kind of text better than the dense one."""
    dense, sizes = write_dense(tmp_path / "base"), list[Path]()
    for name, top1, loss in (("echo", 0.4, -0.1), ("faithful", 0.9, 0.01), ("close", 0.8, 0.03), ("other", 0.0, -0.2)):
        sizes.append(write_size(tmp_path / name, dense, loss, top1=top1))
    for tolerance, least, chosen in (
        ("1.05", [], "faithful"), ("1.05", ["--min-agreement", "0"], "echo"),
        ("1.05", ["--min-agreement", "0.95"], None), ("1.5", [], "echo"),
    ):  # fmt: skip
        words = ["compare", *sizes, "-o", tmp_path / "page", "--overwrite", "--tolerance", tolerance, *least]
        result = invoke(*words, "--json")
        assert (result.exit_code == 9) == (chosen is None), result.output
        assert json.loads(result.stdout)["chosen"] == chosen
    unused = invoke("compare", *sizes, "-o", tmp_path / "unused", "--min-agreement", "0.95")
    assert_refused(unused, 2, "--min-agreement has no effect without a tolerance")
    ended = invoke(*words[:-1], "1.05", "--min-agreement", "0.95")
    assert "of at most 1.05 times the dense model's and 95% top-1 agreement" in ended.stderr


RUN = {"round": 0, "label": "dense", "load": "4 requests/s", "engine": {}}
RESULTS: dict[str, Any] = {
    "complete": True, "reason": None, "started": "2026", **MACHINE,
    "settings": {"mode": "serve", "pairs": 3, "seed": 0},
    "sample": {"conversations": 4, "prompt_tokens": 100, "output_tokens": 50},
    "models": [{"label": name, "model": name, "name": name, "pruned": name != "dense"} for name in ("dense", "small")],
}  # fmt: skip


def judged(*runs: tuple[int, str, str, float, float, str]) -> dict[str, Any]:
    """Return the verdict on runs of (round, label, load, requests/s, ms per token, why it is incomplete)."""
    names = ("round", "label", "load", "requests_per_second", "p50_tpot_ms", "incomplete")
    rows = [dict(zip(names, run, strict=True)) for run in runs]
    metrics = ("requests_per_second", "p50_tpot_ms")
    runs = [RUN | row | {"metrics": {name: row[name] for name in metrics}} for row in rows]
    (verdict,) = verdicts({**RESULTS, "runs": runs})
    return verdict


@pytest.mark.parametrize("left_out", [-1, 3])
def test_neither_the_warm_up_nor_unequal_work_is_in_a_verdict(left_out: int) -> None:
    """The warm-up is slower by the disk; a run that stopped early did less. Its pair is left out with it."""
    runs = [
        (turn, label, "offline", speed, 1.0, "vLLM finished 3 of 4 requests" * (turn == 3 and label == "small"))
        for turn in sorted({0, 1, 2, left_out})
        for label, speed in (("dense", 99.0 if turn == left_out else 2.0), ("small", 3.0))
    ]
    verdict = judged(*runs)
    assert (verdict["pairs"], verdict["metrics"]["requests_per_second"]["ratio"]) == (3, pytest.approx(1.5))


def test_less_time_per_token_is_faster() -> None:
    """At a fixed rate both finish equally many requests, so the verdict is on latency: time before over time after."""
    times = [
        (turn, label, time) for turn in range(3) for label, time in (("dense", 30.0), ("small", 20.0 + turn / 100))
    ]
    verdict = judged(*((turn, label, "4 requests/s", 4.0, time, "") for turn, label, time in times))
    assert verdict["sentence"] == "time per output token: 1.499× [1.497, 1.501] faster (only 3 pairs)"
    assert verdict["metrics"]["p50_tpot_ms"]["ratio"] == pytest.approx(1.5, abs=1e-3)
    slower = judged(*((turn, label, "4 requests/s", 4.0, 600 / time, "") for turn, label, time in times))
    assert ", slower" in slower["sentence"] and slower["metrics"]["p50_tpot_ms"]["ratio"] < 0.7


def test_models_with_different_tokens_are_judged_by_characters_and_by_answers() -> None:
    """Twice the tokens of half the length are the same speed; at a fixed rate the time of an answer decides."""
    metrics = {"requests_per_second": 4.0, "output_characters_per_second": 900.0, "p50_e2el_ms": 50.0}
    per_token = {"dense": {"output_tokens_per_second": 100.0, "p50_tpot_ms": 30.0}}
    per_token["small"] = {"output_tokens_per_second": 200.0, "p50_tpot_ms": 15.0}
    for load, main in (("offline", "requests_per_second"), ("4 requests/s", "p50_e2el_ms")):
        runs = [
            RUN | {"round": turn, "label": label, "load": load, "metrics": metrics | per_token[label]}
            for turn in range(3) for label in per_token
        ]  # fmt: skip
        (verdict,) = verdicts({**RESULTS, "runs": runs})
        assert verdict["metrics"].keys() == metrics.keys() and verdict["metrics"][main]["ratio"] == 1
        assert ("time per answer: " in verdict["sentence"]) == (main == "p50_e2el_ms")


def test_what_cannot_be_told_names_both_ends() -> None:
    assert in_points(-0.02, 0.05) == "cannot tell: between 7.0 points worse and 3.0 better; use more rows"
    assert in_points(0.02, 0.05) == "cannot tell: between 3.0 points worse and 7.0 better; use more rows"
    assert in_points(-0.005, 0.01) == "no measurable difference (−0.5 ± 1.0 points)"
    assert in_points(-0.1, 0.05) == "−10.0 ± 5.0 points"


def test_compare_shows_the_saturating_load_of_the_latest_complete_benchmark(dense: Path, pruned: Path) -> None:
    latest = [(2.0, speed) for speed in (4.0, 4.1, 3.9, 4.0, 4.05)]
    write_bench(pruned / "later.json", dense, pruned, latest)
    edit_json(pruned / "later.json", started="2027")
    assert collect([pruned]).pruned[0].speed.verdict.main.ratio == pytest.approx(2.0, abs=0.02)
    edit_json(pruned / "later.json", complete=False, reason="killed")  # then that of 2026, which is complete
    assert collect([pruned]).pruned[0].speed.verdict.main.ratio == pytest.approx(1.5, abs=0.02)
    loads = {"served.json": "4 requests/s", "all.json": "all at once, 8 in flight"}
    for name, load in loads.items():
        content = json.loads(write_bench(pruned / name, dense, pruned, SPEEDS).read_text())
        for run in content["runs"]:
            run |= {"load": load, "metrics": {**run["metrics"], "p50_tpot_ms": 9.0}}
        edit_json(pruned / name, runs=content["runs"], verdicts=verdicts(content), started="2025")
    (pruned / "sharegpt.json").unlink()
    (pruned / "later.json").unlink()
    assert {speed.verdict.load for speed in collect([pruned]).pruned[0].speeds} == {*loads.values()}
    assert collect([pruned]).pruned[0].speed.verdict.load == "all at once, 8 in flight"


def test_compare_shows_the_evaluation_with_most_tasks_then_most_rows_then_the_latest(pruned: Path) -> None:
    def accuracy() -> float:
        return collect([pruned]).pruned[0].evaluation.score("piqa")[0]

    edit_json(write_evaluation(pruned, 0.5, name="later"), date=9.0)
    assert accuracy() == 0.5
    more_rows = {"n-samples": {"piqa": {"effective": 10}}}
    edit_json(write_evaluation(pruned, 0.4, name="rows"), **more_rows)
    assert accuracy() == 0.4
    file = write_evaluation(pruned, 0.3, name="tasks")
    scores = json.loads(file.read_text())["results"]
    edit_json(file, results=scores | {"rte": {"acc,none": 0.3}})
    assert accuracy() == 0.3


def test_of_equally_fast_models_the_smallest_is_recommended(tmp_path: Path) -> None:
    dense, widths = write_dense(tmp_path / "base"), {"large": [(2, 15)] * 2, "small": HALF, "middle": [(2, 9)] * 2}
    sizes = [write_size(tmp_path / name, dense, 0.0, widths=width) for name, width in widths.items()]
    best, _ = choice(collect(sizes), 1.1)
    assert best and best.name == "small"  # none was measured


@pytest.mark.parametrize("less_is_better", [False, True])
def test_the_dashed_line_joins_models_that_no_other_beats_in_both(less_is_better: bool) -> None:
    sign = -1 if less_is_better else 1
    places = {"dense": (1.0, 9.0), "beaten": (1.2, 5.0), "good": (1.3, 8.0), "fast": (2.0, 3.0), "slow": (0.9, 8.5)}
    points = [
        Point(name, name == "dense", (speed,) * 3, (sign * value,) * 3) for name, (speed, value) in places.items()
    ]
    figure = Figure()
    draw_points(figure, points=points, quality="q", less_is_better=less_is_better)
    line = next(line for line in figure.axes[0].lines if line.get_linestyle() == "--")
    front = [places[name] for name in ("dense", "good", "fast")]
    assert [(x, sign * y) for x, y in zip(*line.get_data(), strict=True)] == front


def quality_of(**losses: int) -> dict[str, Any]:
    known = {name: [1.0] * count for name, count in losses.items()}
    return {"dense": 9.0, "pruned": 9.0, "tokens": 4, "block_losses": known}


@pytest.mark.parametrize("provenance", [
    {"perplexity": quality_of(dense=3, pruned=2)}, {"perplexity": quality_of(dense=0, pruned=0)},
    {"perplexity": quality_of(dense=2, pruned=2) | {"block_tokens": [4, 4, 4]}},
    {"watched": {"a.txt": quality_of(dense=3, pruned=2)}},
    {"recovery": {"watched": {"a.txt": quality_of(dense=2, pruned=2, recovered=3)}}},
])  # fmt: skip
def test_models_that_read_unequal_numbers_of_blocks_are_not_compared(provenance: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"its provenance.*: the losses are not of the same blocks for each model"):
        Provenance.of(provenance)
    Provenance.of({"perplexity": quality_of(dense=2, pruned=2) | {"block_tokens": [4, 4]}})


@pytest.mark.parametrize(("num_bytes", "is_copied"), [(200_000_000, True), (200_000_001, False)])
def test_large_files_are_not_copied_along(num_bytes: int, is_copied: bool, tmp_path: Path) -> None:
    with open(tmp_path / "vocab.txt", "wb") as file:
        file.truncate(num_bytes)  # no bytes on the disk
    assert [path.name for path in tokenizer_and_config_files(tmp_path)] == ["vocab.txt"] * is_copied


def test_damaged_results_are_one_line(pruned: Path, tmp_path: Path) -> None:
    """They have our marker, and are not what we write."""
    results = json.loads((pruned / "sharegpt.json").read_text())
    infinite = json.loads((pruned / "sharegpt.json").read_text())
    infinite["verdicts"][0]["metrics"]["requests_per_second"]["ratio"] = math.nan
    for damaged in (results | {"models": []}, infinite):
        (pruned / "sharegpt.json").write_text(json.dumps(damaged))
        assert_refused(invoke("compare", pruned, "-o", tmp_path / "page.html"), 4, "sharegpt.json", "is damaged")


def test_a_tolerance_judges_every_text(tmp_path: Path) -> None:
    """Text on which another model stood in for the dense one says nothing, and neither do figures of its own pages."""
    dense, other = write_dense(tmp_path / "the base"), write_dense(tmp_path / "other")
    edit_json(other / "config.json", rms_norm_eps=1e-3)  # so it is another model
    pruned = write_pruned(tmp_path / "half", dense)
    words = ["compare", pruned, "--dense", dense, "--tolerance", "1.1", "--overwrite", "-o", tmp_path / "page.md"]
    result = invoke(*words)
    assert result.exit_code == 9 and "none has a known perplexity of at most 1.1 times" in result.stderr
    assert result.stderr.endswith(f"; measure half with ddp-vllm eval FOLDER --against '{dense}' --text FILE\n")
    assert (tmp_path / "page.html").exists() and (tmp_path / "page.md").exists()
    for text, loss, against in (("chats", 0.05, dense), ("prose", 0.08, dense), ("poems", 0.5, other)):
        write_text(pruned / f"{text}.json", pruned, against, texts={text: text_quality(loss)})
    chosen = passed(invoke(*words)).output
    assert "within 1.1 times: half: perplexity 1.0833× [1.0833, 1.0833] the dense model's on prose" in chosen
    words[5] = "1.07"
    assert invoke(*words).stderr.endswith("; train for longer with ddp-vllm recover, or remove less\n")
    quality = {"dense": 20.0, "pruned": 20.0, "tokens": 48, "block_losses": {"dense": [3.0], "pruned": [3.0]}}
    write_masks(pruned, {}, {"recipe": {"model": str(dense)}, "perplexity": quality})
    assert "half: held-out perplexity 1.0" in passed(invoke(*words)).output  # results of the model before are left out
    write_text(pruned / "prose.json", pruned, dense, texts={"prose": text_quality(0.08)})
    assert invoke(*words).exit_code == 9
    compared = collect([pruned], dense=str(other))
    assert compared.pruned[0].heldout is None and f"half was made from {dense}" in " ".join(compared.notes)
    edit_json(pruned / "config.json", quantization_config={"quant_method": "compressed-tensors"})
    compared = collect([pruned], dense=str(dense))
    assert compared.pruned[0].heldout is None
    assert "the figures of half's own pages were measured before quantization and are left out" in compared.notes


def test_texts_of_one_name_that_were_read_differently_have_rows_of_their_own(dense: Path, tmp_path: Path) -> None:
    folders = [write_pruned(tmp_path / name, dense) for name in ("a", "b")]
    for folder, sha256, length in zip(folders, ("1" * 32, "2" * 32), (2048, 16), strict=True):
        texts = {"test.jsonl": text_quality(0.1, sha256=sha256), "same.jsonl": text_quality(0.1)}
        write_text(folder / "text.json", folder, dense, length, texts=texts)
    comparison = collect(folders)
    (note,) = [note for note in comparison.notes if "test.jsonl" in note]
    page = pages(comparison)[1]
    assert "rows of their own" in note and "test.jsonl (48 of file 11111111, 2,048 at once)" in page
    assert "same.jsonl (48, 16 at once)" in page  # of another length
    write_text(
        folders[1] / "text.json", folders[1], dense, 2048, texts={"test.jsonl": text_quality(0.2, sha256="1" * 32)}
    )
    (row,) = [line for line in pages(collect(folders))[1].split("\n") if "perplexity on test.jsonl" in line]
    assert "1.11× [1.11, 1.11]" in row.replace("1.1052", "1.11") and "1.22× [1.22, 1.22]" in row.replace(
        "1.2214", "1.22"
    )


def test_results_against_another_model_are_left_out_where_the_dense_model_is_not_here(tmp_path: Path) -> None:
    """And bits per byte stay, which say by themselves that the tokens differ."""
    folder, sibling = write_pruned(tmp_path / "half", "owner/base"), write_dense(tmp_path / "sibling")
    write_text(folder / "text.json", folder, sibling, texts={"prose": text_quality(-0.3)})
    comparison = collect([folder])
    assert not comparison.pruned[0].texts
    assert f"half was compared on text with {sibling}, not owner/base" in comparison.notes
    bits = {name: {"dense": 1.0, "pruned": 1.1} for name in ("bits_per_byte", "tokens_per_byte")}
    bits |= {"excerpt_bits": {"dense": [8.0, 9.0], "pruned": [8.8, 9.9]}, "excerpt_bytes": [8, 9]}
    write_text(folder / "bits.json", folder, sibling, bits={"chats": bits}, texts={})
    edit_json(folder / "bits.json", lambda c: c["against"].update(model="owner/base", name="owner/base"))
    assert "bits per byte of chats" in pages(collect([folder]))[1]


def test_other_weights_and_other_predictions_are_noted(tmp_path: Path) -> None:
    sizes = list[Path]()
    for name, phase in (("a", "decode"), ("b", "prefill")):
        work = {"phase": phase, "batch": 8, "context": 1024}
        latency = {"speedup": 1.2, "low": 1.1, "high": 1.3, "workload": work, **MACHINE}
        fingerprint = {"weights": [["model.safetensors", 9, name]]}
        sizes.append(write_size(tmp_path / name, "owner/dense", 0.05, latency=latency, fingerprint=fingerprint))
    comparison = collect(sizes)
    notes = " ".join(comparison.notes)
    assert "pruned from different weights" in notes and "predicted for different conditions: decode, 8" in notes
    rows = [line for line in pages(comparison)[1].split("\n") if "speed of a step, predicted (" in line]
    assert len(rows) == 2


def test_page_says_what_the_results_say(dense: Path, pruned: Path) -> None:
    comparison = collect([pruned])
    assert comparison.notes == []
    assert [model.facts.kv_bytes_per_token for model in comparison.models] == [2 * 2 * 4 * 4, 2 * 2 * 4 * 2]
    assert difference(comparison.pruned[0], comparison.dense) == pytest.approx((-0.2, 0.0577), abs=1e-4)
    for text in pages(comparison):
        assert "1.50× [1.45, 1.55] faster, offline" in text
        assert "accuracy: −20.0 ± 5.8 points" in text and "same questions, 95 %" in text
        assert "50.0 % less KV cache per token" in text
        assert "30.00" in text  # the perplexity
    assert "| requests per second, offline | 1 | 1.50× [1.45, 1.55] |" in pages(comparison)[1]
    reader = PageReader(page := pages(comparison)[0])
    assert reader.loaded == reader.links == [] and not re.search(r"url\((?!#)", page) and "<svg" in page


def test_different_rows_are_not_compared(dense: Path, pruned: Path) -> None:
    (pruned / "eval" / "results.json").unlink()
    write_evaluation(pruned, 0.9, limit=10)
    comparison = collect([pruned])
    assert difference(comparison.pruned[0], comparison.dense) is None
    assert "not evaluated on the same rows" in comparison.notes[0]
    write_evaluation(dense, 0.9, limit=10, name="again")
    comparison = collect([pruned])
    assert "points" in pages(comparison)[1] and "the first 10 rows of each task" in pages(comparison)[1]


def test_every_evaluated_task_has_a_row(dense: Path, pruned: Path) -> None:
    """One that is not among the paper's, a group, and one of a paper's name with another metric."""
    scores = {
        "mmlu": {"acc,none": 0.4, "acc_stderr,none": 0.01},
        "my_tasks": {"f1,strict": 0.5, "f1_stderr,strict": 0.01},
        "boolq": {"exact_match,none": 0.25, "exact_match_stderr,none": "N/A"},
        "prose": {"bits_per_byte,none": 1.5},
    }
    for folder in (dense, pruned):
        file = folder / "eval" / "results.json"
        content = json.loads(file.read_text())
        content["higher_is_better"] = {"prose": {"bits_per_byte": False}}
        file.write_text(json.dumps(content | {"results": content["results"] | scores}))
    _, markdown = pages(collect([pruned]))
    for row in (
        "| mmlu (acc) | 40.00 ± 1.00 | 40.00 ± 1.00 |",
        "| my_tasks (f1) | 50.00 ± 1.00 | 50.00 ± 1.00 |",
        "| BoolQ (exact match) | 25.00 | 25.00 |",
        "| prose (bits per byte) | 1.50 | 1.50 |",
        "| PIQA (acc norm) | 80.00 ± 1.00 | 60.00 ± 1.00 |",
    ):
        assert row in markdown


def test_a_model_that_was_evaluated_on_text_is_not_said_to_be_unmeasured(dense: Path, tmp_path: Path) -> None:
    (dense / "eval" / "results.json").unlink()
    folder = write_pruned(tmp_path / "new", dense)
    assert "new was not evaluated; ddp-vllm eval does that" in collect([folder]).notes
    quality = text_quality(0.1, agreement={"pruned": {"kl": 0.1, "top1": 0.8}})
    write_text(folder / "eval" / "text.json", folder, dense, texts={"chats.jsonl": quality})
    comparison = collect([folder])
    assert "perplexity on chats.jsonl" in pages(comparison)[1]
    said = [note for note in comparison.notes if "evaluated" in note]
    assert said == ["new was not evaluated on tasks; ddp-vllm eval does that"]


def test_unmeasured_models_are_named(tmp_path: Path, dense: Path) -> None:
    folder, other = (write_pruned(tmp_path / name, dense) for name in ("new", "<b>a&b"))
    comparison = collect([folder, other])
    assert "new was not evaluated; ddp-vllm eval does that" in comparison.notes
    page, _ = pages(comparison)
    assert str(tmp_path) not in page
    assert "<svg" not in page  # one point is no picture
    assert "new was not measured" in page
    assert "&lt;b&gt;a&amp;b" in page and "<b>" not in page


def test_what_a_cell_holds_stays_in_the_cell() -> None:
    table = Table(headings=["a"], rows=[["<img src=x>\n| b"], ["\x1b]0;evil\x07"]])
    assert markdown_table(table).splitlines()[2:] == ["| &lt;img src=x> \\| b |", r"| \\x1b]0;evil\\x07 |"]
    table = Table(headings=["", "a|b"], rows=[["x", "1|2"]])
    assert markdown_table(table) == "|  | a\\|b |\n|---|--:|\n| x | 1\\|2 |"
    assert markdown_table(Table(headings=["a", "b"], rows=[], is_text=True)) == "| a | b |\n|---|---|"
