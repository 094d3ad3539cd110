"""The verbs prune, apply and inspect from end to end."""

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from runs import SMALL, assert_refused, prune
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ddp_prune.masks_file import read_masks
from ddp_prune.recipe import load_recipe
from ddp_text.blocks import load_blocks
from ddp_text.tokens import load_tokenizer
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.cli import main
from ddp_vllm.tensor_parallel import tensor_parallel_sizes

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture(scope="module")
def pruned(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_VLLM_CACHE", str(folder / "cache"))
        (folder / "models").mkdir()
        return folder / "models" / "pruned", prune(tiny_model, tiny_text, folder / "models" / "pruned")


def test_prune_writes_a_model_that_generates(pruned: tuple[Path, Result]) -> None:
    output, result = pruned
    assert result.exit_code == 0, (result.output, result.exception)
    assert [path.name for path in output.parent.iterdir()] == ["pruned"]  # no run folder, nothing temporary
    layers = read_checkpoint(output).layers
    assert sum(layer.num_kv_heads for layer in layers) == 7  # round(0.6·3·4)
    assert sum(layer.intermediate_size for layer in layers) == 173  # round(0.6·3·96)
    model = AutoModelForCausalLM.from_pretrained(output, trust_remote_code=True)
    tokens = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, min_new_tokens=4, pad_token_id=0)
    assert tokens.shape == (1, 7)


def test_prune_says_what_it_read_did_and_what_to_do_next(pruned: tuple[Path, Result]) -> None:
    text = pruned[1].stdout
    assert re.search(r"text: [\d,]+ tokens of .*held out", text.replace("\n", " "))
    assert "search 1/6" in text and "polish 6/6" in text and "173 of" in text
    assert re.search(r"held-out perplexity\s+dense \d+\.\d+ → pruned \d+\.\d+", text)
    assert "vllm serve" in text and "ddp-vllm bench sharegpt" in text
    assert pruned[1].stderr == ""


@pytest.mark.usefixtures("no_pictures")
def test_aligned_widths_reach_the_checkpoint(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    result = prune(tiny_model, tiny_text, tmp_path / "out", "--align", "32")
    assert result.exit_code == 0, result.output
    assert "budget: keep 173 of 288 mlp units (60.1%), mlp in blocks of 32" in result.stdout
    widths = [layer.intermediate_size for layer in read_checkpoint(tmp_path / "out").layers]
    assert sum(widths) == 160 and not any(width % 32 for width in widths)


@pytest.mark.parametrize("train", ["masks", "weights"])
def test_attention_that_is_not_pruned_stays_whole(
    train: str, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    result = prune(tiny_model, tiny_text, tmp_path / "out", "--attention-sparsity", "0", "--train", train)
    assert result.exit_code == 0, (result.output, result.exception)
    assert "budget: keep 12 of 12 attn units" in result.stdout
    checkpoint = read_checkpoint(tmp_path / "out")
    assert [layer.query_heads_per_kv_head for layer in checkpoint.layers] == [(2, 2, 2, 2)] * 3
    assert sum(layer.intermediate_size for layer in checkpoint.layers) == 173  # round(0.6·3·96)
    assert checkpoint.provenance["recipe"]["attention_sparsity"] == 0.0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert re.search(r"attention_sparsity</t[dh]>\s*<td[^>]*>0(\.0)?<", page)


def test_the_checkpoint_knows_how_it_was_made(pruned: tuple[Path, Result], tiny_model: Path) -> None:
    output, _ = pruned
    provenance = read_checkpoint(output).provenance
    assert load_recipe(None, provenance["recipe"]).model == tiny_model.name
    assert provenance["recipe"]["steps"] == 6 and provenance["head_unit"] == "kv-group"
    assert provenance["perplexity"]["dense"] > 1 and set(provenance["rounding"]) == {"attn", "mlp"}
    gates, _ = read_masks(output / "ddp_masks.safetensors")
    assert int((gates["attn"] > 0).sum()) == 7 and int((gates["mlp"] > 0).sum()) == 173
    assert {"attn.z", "mlp.z"} <= load_file(output / "ddp_masks.safetensors").keys()
    lines = (output / "ddp_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_the_measured_perplexity_is_that_of_the_exported_model(pruned: tuple[Path, Result], tiny_text: Path) -> None:
    output, _ = pruned
    blocks = load_blocks(
        str(tiny_text), load_tokenizer(str(output)), seq_len=16, train_blocks=12, heldout_blocks=16,
        min_train_blocks=2, seed=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(output, trust_remote_code=True)
    with torch.no_grad():
        loss = model(blocks.heldout, labels=blocks.heldout).loss
    measured = read_checkpoint(output).provenance["perplexity"]["pruned"]
    assert loss.exp().item() == pytest.approx(measured, rel=1e-4)


def test_apply_cuts_the_same_model_from_the_masks(
    pruned: tuple[Path, Result], tiny_model: Path, tmp_path: Path
) -> None:
    masks = str(pruned[0] / "ddp_masks.safetensors")
    result = CliRunner().invoke(main, ["apply", str(tiny_model), "--masks", masks, "-o", str(tmp_path / "again")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (pruned[0] / "model.safetensors").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    other = shutil.copytree(tiny_model, tmp_path / "other")  # the same masks on another model: quality is not its own
    result = CliRunner().invoke(main, ["apply", str(other), "--masks", masks, "-o", str(tmp_path / "cut")])
    assert result.exit_code == 0, result.output
    card = (tmp_path / "cut" / "README.md").read_text()
    assert "\nother with structure removed" in card and "not measured; ddp-vllm eval" in card


def test_apply_aligns_by_the_saliency_of_the_masks(
    pruned: tuple[Path, Result], tiny_model: Path, tmp_path: Path
) -> None:
    masks = pruned[0] / "ddp_masks.safetensors"

    def apply(align: str, path: Path = masks) -> Result:
        arguments = ["apply", str(tiny_model), "--masks", str(path), "-o", str(tmp_path / "out"), "--align", align]
        return CliRunner().invoke(main, arguments)

    result = apply("32")
    assert result.exit_code == 0, result.output
    checkpoint = read_checkpoint(tmp_path / "out")
    widths = [layer.intermediate_size for layer in checkpoint.layers]
    assert sum(widths) == 160 and not any(width % 32 for width in widths)
    assert "perplexity" not in checkpoint.provenance  # it was that of other widths
    before, after = load_file(masks), load_file(tmp_path / "out" / "ddp_masks.safetensors")
    assert torch.equal(before["attn.gates"], after["attn.gates"])
    stayed = (before["mlp.gates"] > 0) & (after["mlp.gates"] > 0)
    assert torch.equal(before["mlp.gates"][stayed], after["mlp.gates"][stayed])
    assert (after["mlp.gates"][(before["mlp.gates"] == 0) & (after["mlp.gates"] > 0)] == 1).all()
    shutil.rmtree(tmp_path / "out")
    assert_refused(apply("97"), 2, "align is 97", "1 to 96")
    assert_refused(apply("0"), 2, "align is 0")
    provenance = json.dumps(read_checkpoint(pruned[0]).provenance)
    save_file({name: before[name] for name in ("attn.gates", "mlp.gates")}, tmp_path / "bare", {"ddp": provenance})
    assert_refused(apply("32", tmp_path / "bare"), 7, "no mlp.saliency", "prune again with --align")
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_inspect_shows_widths_totals_and_quality(pruned: tuple[Path, Result]) -> None:
    result = CliRunner().invoke(main, ["inspect", str(pruned[0])])
    assert result.exit_code == 0, result.output
    for layer in read_checkpoint(pruned[0]).layers:
        assert f" {layer.intermediate_size} " in result.stdout
    assert "held-out perplexity" in result.stdout and "rounding of mlp" in result.stdout


def test_inspect_names_a_folder_as_it_is(pruned: tuple[Path, Result], tmp_path: Path) -> None:
    """rich takes what is in brackets for a style."""
    folder = Path(shutil.copytree(pruned[0], tmp_path / "out[v2]"))
    assert "out[v2]: what is left" in CliRunner().invoke(main, ["inspect", str(folder)]).stdout


def test_inspect_and_report_refuse_a_family_without_a_row(pruned: tuple[Path, Result], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(pruned[0], tmp_path / "newer"))
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "ddp_newlm"}
    (folder / "config.json").write_text(json.dumps(config))
    for verb in ("inspect", "report"):
        assert_refused(CliRunner().invoke(main, [verb, str(folder)]), 7, "model_type 'ddp_newlm' is unknown")


@pytest.mark.usefixtures("no_pictures")
def test_an_interrupted_prune_goes_on(
    pruned: tuple[Path, Result], tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.toml").write_text("save_every = 2\n")
    from ddp_vllm.pages.progress import StepProgress

    def stop(self: Any, metrics: dict[str, float]) -> None:
        if metrics["step"] == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StepProgress, "report", stop)
        result = prune(tiny_model, tiny_text, tmp_path / "out", "--recipe", str(tmp_path / "r.toml"))
    assert result.exit_code == 130 and result.stderr == "\nddp-vllm: stopped\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.run", "r.toml"]
    result = prune(tiny_model, tiny_text, tmp_path / "out", "--recipe", str(tmp_path / "r.toml"))
    assert result.exit_code == 0 and "search 1/6" not in result.stdout and "polish 5/6" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "r.toml"]
    same = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "out", pruned[0])]
    assert same[0] == same[1]


@pytest.fixture
def heard() -> Iterator[None]:
    """Python's own answer to Ctrl-C, which a job in the background does not inherit."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("no_pictures", "heard")
def test_ctrl_c_lets_the_step_end_and_saves_it(
    pruned: tuple[Path, Result],
    tiny_model: Path,
    tiny_text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Before the first regular save; a second one ends the run at once."""
    from ddp_prune.trainer import Trainer

    step = Trainer.step

    def interrupted(times: int) -> Callable[..., dict[str, float]]:
        def take(self: Trainer, number: int) -> dict[str, float]:
            for _ in range(times if number == 3 else 0):
                signal.raise_signal(signal.SIGINT)
            return step(self, number)

        return take

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted(1))
        result = prune(tiny_model, tiny_text, tmp_path / "out")
        assert result.exit_code == 130 and "stopping after this step" in capfd.readouterr().err
        assert result.stderr == "\nddp-vllm: stopped at step 4 of 6; the same command resumes\n"
        patch.setattr(Trainer, "step", interrupted(2))
        result = prune(tiny_model, tiny_text, tmp_path / "other")
        assert result.exit_code == 130 and result.stderr == "\nddp-vllm: stopped\n"
    result = prune(tiny_model, tiny_text, tmp_path / "out")
    assert result.exit_code == 0 and "resuming after step 4" in result.stdout
    same = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "out", pruned[0])]
    assert same[0] == same[1]


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
def test_a_target_in_parameters_is_that_of_the_checkpoint(
    head_unit: str, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    arguments = ["prune", str(tiny_model), "--target-params", "70K", "--data", str(tiny_text), "-o"]
    options = [*SMALL, "--head-unit", head_unit, "--scope", "layer", "--controller", "alm"]
    result = CliRunner().invoke(main, [*arguments, str(tmp_path / "out"), *options])
    assert result.exit_code == 0, (result.output, result.exception)
    checkpoint = read_checkpoint(tmp_path / "out")
    gone = sum(2 - bool(layer.num_kv_heads) - bool(layer.intermediate_size) for layer in checkpoint.layers)
    assert 70_000 - 3 * 64 - gone * 64 < checkpoint.num_parameters <= 70_000
    assert checkpoint.provenance["recipe"]["budget"] == "params"
    page, card = ((tmp_path / "out" / name).read_text() for name in ("report.html", "README.md"))
    for text in (result.stdout, page, card):  # all four, always
        for words in ("KV heads", "MLP channels", "parameters", "FLOPs per token at 2,048", "KV-cache bytes per token"):
            assert words in text, words
    curves = page.partition('<figure id="curves">')[2].partition("</figure>")[0]
    assert ">sparsity<" in curves and ">target<" not in curves  # no line at 0 %: the recipe states no share
    row = next(line for line in result.stdout.splitlines() if "KV-cache bytes per token" in line)
    kv_heads = sum(layer.num_kv_heads for layer in checkpoint.layers)
    assert f"{kv_heads * 2 * 8 * 2:,} of" in row and f"{12 * 2 * 8 * 2:,}" in row


@pytest.mark.usefixtures("no_pictures")
def test_widths_that_split_over_devices(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    result = prune(tiny_model, tiny_text, tmp_path / "out", "--tp", "2")
    assert result.exit_code == 0, (result.output, result.exception)
    checkpoint = read_checkpoint(tmp_path / "out")
    assert 2 in tensor_parallel_sizes(checkpoint.config, checkpoint.layers)
    assert re.search(r"--tensor-parallel-size 1, 2", (tmp_path / "out" / "README.md").read_text())


def test_apply_refuses_masks_that_do_not_split(pruned: tuple[Path, Result], tiny_model: Path, tmp_path: Path) -> None:
    masks = str(pruned[0] / "ddp_masks.safetensors")
    arguments = ["apply", str(tiny_model), "--masks", masks, "-o", str(tmp_path / "out"), "--tp", "8"]
    assert_refused(CliRunner().invoke(main, [*arguments[:-1], "0"]), 2, "tensor-parallel size is 0", "at least 1")
    words = ["tensor-parallel size 8 does not split layer", "KV heads", "valid sizes: 1", "prune with --tp 8"]
    assert_refused(CliRunner().invoke(main, arguments), 2, *words)
    assert list(tmp_path.iterdir()) == []
