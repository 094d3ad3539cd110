"""The page: what it says, that it loads nothing, and that it never mixes what can't be compared."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ddp_benchmarks.compare import collect, retained
from ddp_benchmarks.models import describe_model
from ddp_benchmarks.page import write_html, write_markdown
from ddp_benchmarks.paper import paper_model
from ddp_benchmarks.results import FORMAT, verdicts
from ddp_vllm.errors import CheckpointError, TextError

HIDDEN, HEAD_DIM, VOCAB = 8, 4, 16
MACHINE = {"hardware": {"gpus": [], "cores": 2, "cpu": "a CPU"}, "versions": {"torch": "2.13"}}


def write_model(
    folder: Path, *, widths: list[tuple[int, int]], origin: str | None, asked: dict[str, Any] | None = None
) -> Path:
    """Write a tiny model, pruned to (KV heads, MLP channels) a layer; dense if there is no origin."""
    folder.mkdir(parents=True)
    config: dict[str, Any] = {"hidden_size": HIDDEN, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"num_hidden_layers": 2, "intermediate_size": 16, "head_dim": HEAD_DIM, "dtype": "bfloat16"}
    if origin is not None:
        config["ddp_layers"] = [{"query_heads_per_kv_head": [2] * kv, "intermediate_size": mlp} for kv, mlp in widths]
        masks = {"z": np.zeros(1, np.float32)}
        recipe = json.dumps({"recipe": {"model": origin, **(asked or {"sparsity": 0.5})}})
        save_file(masks, folder / "ddp_masks.safetensors", {"ddp": recipe})
    tensors = {"model.embed_tokens.weight": np.zeros((VOCAB, HIDDEN), np.float32)}
    for layer, (kv, mlp) in enumerate(widths):
        for name, rows in (("q", 2 * kv), ("k", kv), ("v", kv)):
            path = f"model.layers.{layer}.self_attn.{name}_proj.weight"
            tensors[path] = np.zeros((rows * HEAD_DIM, HIDDEN), np.float32)
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] = np.zeros((HIDDEN, 2 * kv * HEAD_DIM), np.float32)
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = np.zeros((HIDDEN, mlp), np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_evaluation(
    folder: Path, accuracy: float, *, limit: int | None = None, name: str = "results", answers: bool = False
) -> Path:
    """Write results as `eval` does: two accuracies and a perplexity; with `answers`, those of 100 rows."""
    results = {
        "results": {
            "piqa": {"acc_norm,none": accuracy, "acc_norm_stderr,none": 0.01},
            "boolq": {"acc,none": accuracy, "acc_stderr,none": 0.01},
            "wikitext": {"word_perplexity,none": 30.0, "word_perplexity_stderr,none": "N/A"},
        },
        "n-samples": {"piqa": {"original": 9, "effective": 9}},
        "date": 1.0,
        "ddp_vllm": {
            "model": describe_model(str(folder)).to_json(),
            "settings": {"limit": limit, "max_length": 2048, "backend": "hf"},
            "data": "hub",
            **MACHINE,
        },
    }
    if answers:
        rows = [float(row < 100 * accuracy) for row in range(100)]
        results["ddp_vllm"]["answers"] = {"piqa": rows, "boolq": rows}
    path = folder / "eval" / f"{name}.json"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(results))
    return path


def write_bench(
    path: Path, dense: Path, pruned: Path, speeds: list[tuple[float, float]], load: str = "offline"
) -> Path:
    """Write results as `bench sharegpt` does, from (dense, pruned) requests/s; tokens come half as fast again."""
    engine = {"peak_memory_bytes": 2**30, "weights_gib": 0.25, "kv_cache_tokens": 46592.0}
    runs = [
        {
            "round": turn,
            "label": label,
            "load": load,
            "metrics": {"requests_per_second": value}
            | ({"p50_tpot_ms": 30 if label == "dense" else 20} if load != "offline" else {}),
            "engine": engine,
        }
        for turn, pair in enumerate(speeds)
        for label, value in zip(("dense", pruned.name), pair, strict=True)
    ]
    models = [{"label": "dense", **describe_model(str(dense)).to_json()}]
    models += [{"label": pruned.name, **describe_model(str(pruned)).to_json()}]
    results: dict[str, Any] = {"format": FORMAT, "complete": True, "reason": None, "started": "2026", **MACHINE}
    results |= {"settings": {"mode": "offline", "pairs": len(speeds), "seed": 0}, "models": models, "runs": runs}
    results["sample"] = {"conversations": 4, "prompt_tokens": 100, "output_tokens": 50}
    results["verdicts"] = verdicts(results)
    path.write_text(json.dumps(results))
    return path


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    folder = write_model(tmp_path / "base", widths=[(2, 16), (2, 16)], origin=None)
    write_evaluation(folder, 0.8)
    return folder


@pytest.fixture
def pruned(tmp_path: Path, dense: Path) -> Path:
    folder = write_model(tmp_path / "half", widths=[(1, 5), (1, 9)], origin=str(dense))
    write_evaluation(folder, 0.6)
    write_bench(folder / "sharegpt.json", dense, folder, [(1, 1.5), (2, 3.1), (1, 1.45), (1, 1.52), (3, 4.4)])
    return folder


def test_page_says_whether_the_difference_is_real(dense: Path, pruned: Path) -> None:
    write_evaluation(dense, 0.8, answers=True)
    for accuracy, sentence in ((0.6, "−20.0 ± 5.8 points"), (0.79, "no measurable difference (−1.0 ± 2.3 points)")):
        write_evaluation(pruned, accuracy, answers=True)
        comparison = collect([pruned])
        for text in (write_html(comparison), write_markdown(comparison)):
            assert f"accuracy {sentence}" in text and "same questions, 95 %" in text


def test_page_says_what_the_results_say(dense: Path, pruned: Path) -> None:
    comparison = collect([pruned])
    assert comparison.notes == ()
    assert [entry.facts.kv_bytes_per_token for entry in comparison.entries] == [2 * 2 * 4 * 4, 2 * 2 * 4 * 2]
    assert retained(comparison.pruned[0], comparison.dense) == pytest.approx(0.75)
    for text in (write_html(comparison), write_markdown(comparison)):
        assert "1.50× [1.45, 1.55] faster, offline" in text
        assert "75.0 % of the dense accuracy" in text
        assert "50.0 % less KV cache a token" in text
        assert "30.00" in text  # the perplexity
        assert "arXiv" not in text  # the paper did not prune this model


def test_at_a_rate_the_page_tells_the_time_per_token(pruned: Path, dense: Path) -> None:
    """There requests/s are what arrives; in the picture offline goes first, then all at once."""
    (pruned / "sharegpt.json").unlink()
    served = pruned / "sharegpt-serve.json"
    write_bench(served, dense, pruned, [(0.25, 0.25)] * 3, "0.25 requests/s")
    text = write_markdown(collect([pruned]))
    assert "time per output token: 1.5000× [1.5000, 1.5000] faster (only 3 pairs), 0.25 requests/s" in text
    assert "| time per output token, 0.25 requests/s | 1 | 1.5000× [1.5000, 1.5000] |" in text
    assert "<svg" in (page := write_html(collect([pruned]))) and "time per output token, times better" in page
    write_bench(pruned / "burst.json", dense, pruned, [(1, 1.2)] * 3, "all at once, 4 in flight")
    served.rename(pruned / "a.json")  # read before it
    (entry,) = collect([pruned]).pruned
    assert [speed["load"] for speed in entry.speeds] == ["0.25 requests/s", "all at once, 4 in flight"]
    assert entry.speed and entry.speed["load"] == "all at once, 4 in flight"


@pytest.mark.parametrize(("gpus", "shown"), [([], True), (["NVIDIA H100"], False)])
def test_memory_that_vllm_reserves_on_a_gpu_is_not_the_models(pruned: Path, gpus: list[str], shown: bool) -> None:
    file = pruned / "sharegpt.json"
    content = json.loads(file.read_text())
    content["hardware"]["gpus"] = gpus
    file.write_text(json.dumps(content))
    text = write_markdown(collect([pruned]))
    assert ("| peak memory, GiB | 1.00 | 1.00 |" in text) == shown == ("peak memory" in text)
    assert "| weights in memory, GiB | 0.25 | 0.25 |" in text
    assert "| tokens the KV cache holds | 46,592 | 46,592 |" in text


def test_page_is_well_formed_and_loads_nothing(pruned: Path) -> None:
    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open_tags: list[str] = []
            self.loads: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            if tag not in ("meta", "br", "use", "path", "rect", "circle"):
                self.open_tags.append(tag)
            self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]

        def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]

        def handle_endtag(self, tag: str) -> None:
            if tag in self.open_tags:
                while self.open_tags.pop() != tag:
                    pass

    page = write_html(collect([pruned]))
    reader = Reader()
    reader.feed(page)
    assert reader.open_tags == []
    assert all(value.startswith("#") for value in reader.loads)
    assert "<script" not in page
    assert not re.search(r"url\((?!#)|@import", page)
    assert "<svg" in page


def test_names_are_escaped(tmp_path: Path, dense: Path) -> None:
    folder = write_model(tmp_path / "<b>a&b", widths=[(1, 5), (1, 9)], origin=str(dense))
    page = write_html(collect([folder]))
    assert "&lt;b&gt;a&amp;b" in page
    assert "<b>" not in page


def test_different_rows_are_not_compared(dense: Path, pruned: Path) -> None:
    (pruned / "eval" / "results.json").unlink()
    write_evaluation(pruned, 0.9, limit=10)
    comparison = collect([pruned])
    assert retained(comparison.pruned[0], comparison.dense) is None
    assert "not evaluated on the same rows" in comparison.notes[0]
    write_evaluation(dense, 0.9, limit=10, name="again")
    comparison = collect([pruned])
    assert retained(comparison.pruned[0], comparison.dense) == pytest.approx(1)
    assert "100.0 % of the dense accuracy (first 10 rows of each task)" in write_markdown(comparison)


def test_unmeasured_models_are_named(tmp_path: Path, dense: Path) -> None:
    folder = write_model(tmp_path / "new", widths=[(1, 5), (1, 9)], origin=str(dense))
    comparison = collect([folder])
    assert f"new was not evaluated: ddp-vllm eval {folder}" in comparison.notes
    assert f"new was not measured: ddp-vllm bench sharegpt --dense {dense} --pruned {folder}" in comparison.notes
    page = write_html(comparison)
    assert "<svg" not in page  # one point is no picture
    assert "new was not measured" in page


def test_a_dense_model_of_the_hub_is_found_where_eval_puts_it(
    tmp_path: Path, pruned: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`eval DIR --against org/base` writes the dense model's results to ./eval-org--base."""
    monkeypatch.chdir(tmp_path)
    results = json.loads((tmp_path / "base" / "eval" / "results.json").read_text())
    results["ddp_vllm"]["model"] = {"model": "org/base", "name": "org/base", "pruned": False}
    (tmp_path / "eval-org--base").mkdir()
    (tmp_path / "eval-org--base" / "results.json").write_text(json.dumps(results))
    comparison = collect([pruned], dense="org/base")
    assert retained(comparison.pruned[0], comparison.dense) == pytest.approx(0.75)


@pytest.mark.parametrize("asked", [{"target": 1e6, "budget": "params"}, {"sparsity": 0.2, "budget": "params"}])
def test_a_run_that_counted_no_units_removed_no_share_of_them(tmp_path: Path, asked: dict[str, Any]) -> None:
    folder = write_model(tmp_path / "q", widths=[(1, 5), (1, 9)], origin="Qwen/Qwen3-4B", asked=asked)
    comparison = collect([folder])
    assert comparison.pruned[0].sparsity is None
    assert "| units removed | – | – |" in write_markdown(comparison)


def test_paper_stands_beside_its_own_models_only(tmp_path: Path) -> None:
    assert paper_model("Qwen/Qwen3-4B") is not None
    assert paper_model("meta-llama/Llama-2-7b-hf") is paper_model("./models/llama-2-7b/")
    assert paper_model("Qwen/Qwen3-4B-Instruct-2507") is None
    folder = write_model(tmp_path / "q", widths=[(1, 5), (1, 9)], origin="Qwen/Qwen3-4B")
    markdown = write_markdown(collect([folder]))
    assert "| 50 % | 47.63 | – |" in markdown


def test_bad_input(tmp_path: Path, dense: Path, pruned: Path) -> None:
    with pytest.raises(CheckpointError, match="not a pruned checkpoint"):
        collect([dense])
    with pytest.raises(CheckpointError, match="two folders are called half"):
        collect([pruned, pruned])
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(TextError, match="no results file"):
        collect([pruned], results=[tmp_path / "other.json"])
    with pytest.raises(TextError, match="cannot be read"):
        collect([pruned], results=[tmp_path / "missing.json"])
