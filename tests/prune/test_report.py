"""The report of a pruned checkpoint: its numbers are the checkpoint's, its pictures are there, nothing is fetched."""

import csv
import io
import json
import math
import shutil
import statistics
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from matplotlib.image import imread
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ddp_prune.export import export
from ddp_prune.pictures import render, smooth, widths
from ddp_prune.source import open_source
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.cli import main

FIGURES = ["heads", "widths", "gates", "curves"]


class _Page(HTMLParser):
    """What a browser would load, and what it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures: list[str] = []
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attributes}
        if tag == "figure":
            self.figures.append(values["id"])
        if tag == "a":
            self.links.append(values["href"])
        elif tag != "use":
            self.loaded += [values[name] for name in ("src", "href", "xlink:href") if name in values]
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def pruned(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "r.toml").write_text('controller = "alm"\nhead_unit = "query-head"\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_VLLM_CACHE", str(folder / "cache"))
        result = CliRunner().invoke(
            main,
            [
                "prune", str(tiny_model), "--sparsity", "0.4", "--data", str(tiny_text), "-o", str(folder / "a<b"),
                "--steps", "10", "--batch-size", "2", "--seq-len", "16", "--recipe", str(folder / "r.toml"),
            ],
        )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert str(folder / "a<b" / "report.html") in result.stdout.replace("\n", "")
    return folder / "a<b"


def _table(folder: Path, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO((folder / "report" / f"{name}.csv").read_text())))


def test_the_page_holds_every_picture_and_loads_nothing(pruned: Path) -> None:
    text = (pruned / "report.html").read_text()
    page = _Page(text)
    assert page.open == [] and page.figures == FIGURES
    assert "http" not in text and "@import" not in text and "<script" not in text and "url(#" in text
    assert all(source.startswith(("data:", "#")) for source in page.loaded) and page.loaded
    assert {link.removeprefix("report/") for link in page.links} == {
        path.name for path in (pruned / "report").iterdir()
    }
    assert "a<b: what was removed" in page.text  # names are escaped
    for label in ("layer", "query head", "MLP channels", "λ1", "target", "KL, nats a token"):
        assert label in page.text
    for name in FIGURES:
        pixels = imread(pruned / "report" / f"{name}.png")
        assert pixels.shape[1] > 800 and 0.01 < (pixels[..., :3].mean(-1) < 0.5).mean() < 0.6  # neither empty nor black
        assert abs(pixels[..., 0] - pixels[..., 1]).max() < 0.02  # no colour carries meaning


def test_numbers_are_those_of_the_checkpoint(pruned: Path) -> None:
    checkpoint = read_checkpoint(pruned)
    rows = _table(pruned, "widths")
    for row, layer in zip(rows, checkpoint.layers, strict=True):
        assert int(row["intermediate_size"]) == layer.intermediate_size
        assert (int(row["kv_heads"]), int(row["query_heads"])) == (layer.num_kv_heads, layer.num_query_heads)
    masks = load_file(pruned / "ddp_masks.safetensors")
    heads = torch.tensor([[float(row[f"unit_{unit}"]) for unit in range(8)] for row in _table(pruned, "heads")])
    torch.testing.assert_close(heads, masks["attn.gates"], rtol=1e-5, atol=0)
    counts = dict.fromkeys(("attn", "mlp"), 0)
    for row in _table(pruned, "gates"):
        counts[row["module_type"]] += int(row["units"])
    assert counts == {"attn": 14, "mlp": 173}  # round(0.6·3·8) and round(0.6·3·96): nothing falls outside the bins
    metrics = [json.loads(line) for line in (pruned / "ddp_metrics.jsonl").read_text().splitlines()]
    curves = _table(pruned, "curves")
    assert [float(row["mlp_lambda1"]) for row in curves] == [row["mlp_lambda1"] for row in metrics]
    rounding = {row["module_type"]: row for row in _table(pruned, "rounding")}
    assert int(rounding["mlp"]["dropped"]) == checkpoint.provenance["rounding"]["mlp"]["dropped"]


def test_perplexities_come_with_the_noise_over_blocks(pruned: Path) -> None:
    rows = _table(pruned, "perplexity")
    assert len(rows) == 16
    dense, kept = ([float(row[f"{name}_loss"]) for row in rows] for name in ("dense", "pruned"))
    quality = read_checkpoint(pruned).provenance["perplexity"]
    assert quality["pruned"] == pytest.approx(math.exp(statistics.fmean(kept)))
    ratio = quality["pruned"] / quality["dense"]
    error = ratio * statistics.stdev(b - a for a, b in zip(dense, kept, strict=True)) / 4
    text = _Page((pruned / "report.html").read_text()).text
    assert f"{ratio:.2f}± {error:.2f}" in text
    assert f"{quality['dense']:.2f}± {quality['dense'] * statistics.stdev(dense) / 4:.2f}" in text


def test_report_of_applied_masks_shows_what_there_is(pruned: Path, tiny_model: Path, tmp_path: Path) -> None:
    gates = {kind: torch.ones(shape) for kind, shape in (("attn", (3, 4)), ("mlp", (3, 96)))}
    gates["attn"][1] = 0.0
    gates["mlp"][0, 5:] = 0.0
    export(open_source(str(tiny_model)), gates, tmp_path / "cut", head_unit="kv-group", provenance={})
    before = {path.name for path in (tmp_path / "cut").iterdir()}
    result = CliRunner().invoke(main, ["report", str(tmp_path / "cut"), "-o", str(tmp_path / "elsewhere")])
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "cut").iterdir()} == before
    page = _Page((tmp_path / "elsewhere" / "report.html").read_text())
    assert page.figures == ["heads", "widths", "gates"]
    assert [row["intermediate_size"] for row in _table(tmp_path / "elsewhere", "widths")] == ["5", "96", "96"]
    assert "KV groups of 2 query heads" in page.text and "perplexity" not in page.text.lower()


def test_report_of_experts_shows_widths_and_use(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    """Layers 0 and 2 have routed experts, layer 1 has none."""
    model = tmp_path / "moe"
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=64, intermediate_size=40, moe_intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
        mlp_only_layers=[1], eos_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(config).save_pretrained(model)
    for file in tiny_model.glob("tokenizer*"):
        shutil.copy(file, model)
    arguments = ["prune", str(model), "--sparsity", "0.5", "--data", str(tiny_text), "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(main, [*arguments, "--steps", "6", "--batch-size", "2", "--seq-len", "16"])
    assert result.exit_code == 0, result.output
    checkpoint = read_checkpoint(tmp_path / "out")
    page = _Page((tmp_path / "out" / "report.html").read_text())
    assert page.figures == ["experts", "gates", "curves"] and "× even share" in page.text
    rows = _table(tmp_path / "out", "experts")
    assert [row["layer"] for row in rows] == ["0"] * 8 + ["2"] * 8
    for row in rows:
        layer, expert = int(row["layer"]), int(row["expert"])
        assert int(row["intermediate_size"]) == (checkpoint.layers[layer].expert_intermediate_sizes or ())[expert]
        counts = checkpoint.provenance["routing"]["chosen"][str(layer)]
        assert float(row["times_even_share"]) == pytest.approx(counts[expert] * 8 / sum(counts), rel=1e-5)


def test_report_refuses_masks_of_other_widths_and_unwritable_places(pruned: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pruned, tmp_path / "copy"))
    result = CliRunner().invoke(main, ["report", str(folder), "-o", str(folder / "config.json")])
    assert result.exit_code == 5 and "cannot be written" in result.stderr and result.stderr.count("\n") == 1
    masks = load_file(folder / "ddp_masks.safetensors")
    masks["mlp.gates"][2, masks["mlp.gates"][2].argmax()] = 0.0
    save_file(masks, folder / "ddp_masks.safetensors", {"ddp": "{}"})
    result = CliRunner().invoke(main, ["report", str(folder)])
    assert result.exit_code == 7 and "different checkpoints" in result.stderr
    for line in ("{", "[1]", '{"loss": 1}'):
        (folder / "ddp_metrics.jsonl").write_text(line)
        result = CliRunner().invoke(main, ["report", str(folder)])
        assert result.exit_code == 7 and "cannot be read" in result.stderr, line


def test_pictures_repeat_to_the_byte() -> None:
    first, second = (render(widths([3, 0, 7], 8), "widths", 2.0) for _ in range(2))
    assert first == second


def test_running_mean_keeps_constants_and_length() -> None:
    import numpy as np

    assert smooth(np.full(50, 3.0)).tolist() == pytest.approx([3.0] * 50)
    assert smooth(np.array([1.0])).tolist() == [1.0]
