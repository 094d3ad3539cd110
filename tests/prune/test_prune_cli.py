"""The verbs prune, apply and inspect from end to end, and every bad input as one line that leaves nothing behind."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ddp_prune.export import read_masks
from ddp_prune.recipe import Recipe
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.cli import main
from ddp_vllm.tensor_parallel import tensor_parallel_sizes

SMALL = ["--steps", "6", "--batch-size", "2", "--seq-len", "16"]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path_factory.mktemp("cache")))


def _prune(model: Path | str, text: Path | str, output: Path, *more: str, sparsity: str = "0.4") -> Result:
    arguments = ["prune", str(model), "--sparsity", sparsity, "--data", str(text), "-o", str(output)]
    return CliRunner().invoke(main, [*arguments, *SMALL, *more])


def _refused(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, (result.output, result.exception)
    assert result.stderr.startswith("ddp-vllm: ") and result.stderr.count("\n") == 1, result.stderr
    assert "Traceback" not in result.output
    for word in words:
        assert word in result.stderr, result.stderr


@pytest.fixture(scope="module")
def pruned(tiny_model: Path, tiny_text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDP_VLLM_CACHE", str(folder / "cache"))
        (folder / "models").mkdir()
        return folder / "models" / "pruned", _prune(tiny_model, tiny_text, folder / "models" / "pruned")


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


def test_aligned_widths_reach_the_checkpoint(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    result = _prune(tiny_model, tiny_text, tmp_path / "out", "--align", "32")
    assert result.exit_code == 0, result.output
    assert "173 of 288 mlp units stay, rounded down to 160 in blocks of 32" in result.stdout
    widths = [layer.intermediate_size for layer in read_checkpoint(tmp_path / "out").layers]
    assert sum(widths) == 160 and not any(width % 32 for width in widths)


def test_the_checkpoint_knows_how_it_was_made(pruned: tuple[Path, Result], tiny_model: Path) -> None:
    output, _ = pruned
    provenance = read_checkpoint(output).provenance
    assert Recipe(**provenance["recipe"]).model == str(tiny_model)
    assert provenance["recipe"]["steps"] == 6 and provenance["head_unit"] == "kv-group"
    assert provenance["perplexity"]["dense"] > 1 and set(provenance["rounding"]) == {"attn", "mlp"}
    gates, _ = read_masks(output / "ddp_masks.safetensors")
    assert int((gates["attn"] > 0).sum()) == 7 and int((gates["mlp"] > 0).sum()) == 173
    assert {"attn.z", "mlp.z"} <= load_file(output / "ddp_masks.safetensors").keys()
    lines = (output / "ddp_metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def test_the_measured_perplexity_is_that_of_the_exported_model(pruned: tuple[Path, Result], tiny_text: Path) -> None:
    from ddp_prune.tokens import load_blocks, load_tokenizer

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
    assert (
        "\nother with structure removed" in card and f"Measured on {tiny_model}, where the masks were learned" in card
    )


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
    _refused(apply("97"), 2, "align is 97", "1 to 96")
    _refused(apply("0"), 2, "align is 0")
    provenance = json.dumps(read_checkpoint(pruned[0]).provenance)
    save_file({name: before[name] for name in ("attn.gates", "mlp.gates")}, tmp_path / "bare", {"ddp": provenance})
    _refused(apply("32", tmp_path / "bare"), 7, "no mlp.saliency", "prune again with --align")
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
        _refused(CliRunner().invoke(main, [verb, str(folder)]), 7, "model_type 'ddp_newlm' is unknown")


def test_an_interrupted_prune_goes_on(
    pruned: tuple[Path, Result], tiny_model: Path, tiny_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "r.toml").write_text("save_every = 2\n")
    from ddp_prune.pipeline import _Progress

    def stop(self: Any, metrics: dict[str, float]) -> None:
        if metrics["step"] == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(_Progress, "report", stop)
        result = _prune(tiny_model, tiny_text, tmp_path / "out", "--recipe", str(tmp_path / "r.toml"))
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.run", "r.toml"]
    result = _prune(tiny_model, tiny_text, tmp_path / "out", "--recipe", str(tmp_path / "r.toml"))
    assert result.exit_code == 0 and "search 1/6" not in result.stdout and "polish 5/6" in result.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "r.toml"]
    same = [(folder / "model.safetensors").read_bytes() for folder in (tmp_path / "out", pruned[0])]
    assert same[0] == same[1]


@pytest.mark.parametrize("head_unit", ["kv-group", "query-head"])
def test_a_target_in_parameters_is_that_of_the_checkpoint(
    head_unit: str, tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    arguments = ["prune", str(tiny_model), "--target-params", "70K", "--data", str(tiny_text), "-o"]
    options = [*SMALL, "--head-unit", head_unit, "--group", "layer", "--controller", "alm"]
    result = CliRunner().invoke(main, [*arguments, str(tmp_path / "out"), *options])
    assert result.exit_code == 0, (result.output, result.exception)
    checkpoint = read_checkpoint(tmp_path / "out")
    gone = sum(2 - bool(layer.num_kv_heads) - bool(layer.intermediate_size) for layer in checkpoint.layers)
    assert 70_000 - 3 * 64 - gone * 64 < checkpoint.num_parameters <= 70_000
    assert checkpoint.provenance["recipe"]["budget"] == "params"
    page, card = ((tmp_path / "out" / name).read_text() for name in ("report.html", "README.md"))
    for text in (result.stdout, page, card):  # all four, always
        for words in ("KV heads", "MLP channels", "parameters", "FLOPs a token at 2,048", "KV-cache bytes a token"):
            assert words in text, words
    curves = page.partition('<figure id="curves">')[2].partition("</figure>")[0]
    assert ">sparsity<" in curves and ">target<" not in curves  # no line at 0 %: the recipe states no share
    row = next(line for line in result.stdout.splitlines() if "KV-cache bytes a token" in line)
    kv_heads = sum(layer.num_kv_heads for layer in checkpoint.layers)
    assert f"{kv_heads * 2 * 8 * 2:,} of" in row and f"{12 * 2 * 8 * 2:,}" in row


def test_widths_that_split_over_devices(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    result = _prune(tiny_model, tiny_text, tmp_path / "out", "--tp", "2")
    assert result.exit_code == 0, (result.output, result.exception)
    checkpoint = read_checkpoint(tmp_path / "out")
    assert 2 in tensor_parallel_sizes(checkpoint.layers, checkpoint.config)
    assert re.search(r"without padding: 1, 2", (tmp_path / "out" / "README.md").read_text())


def test_apply_refuses_masks_that_do_not_split(pruned: tuple[Path, Result], tiny_model: Path, tmp_path: Path) -> None:
    masks = str(pruned[0] / "ddp_masks.safetensors")
    arguments = ["apply", str(tiny_model), "--masks", masks, "-o", str(tmp_path / "out"), "--tp", "8"]
    _refused(CliRunner().invoke(main, [*arguments[:-1], "0"]), 2, "tp is 0", "at least 1")
    _refused(
        CliRunner().invoke(main, arguments), 2, "tp is 8, over which layer", "KV heads", "valid sizes: 1", "--tp 8"
    )
    assert list(tmp_path.iterdir()) == []


SETTINGS: dict[str, tuple[list[str], list[str]]] = {  # options, what the line must name
    "sparsity 0": (["--sparsity", "0"], ["sparsity is 0.0", "between 0 and 1"]),
    "sparsity 1": (["--sparsity", "1"], ["sparsity is 1.0", "between 0 and 1"]),
    "sparsity negative": (["--sparsity", "-0.2"], ["sparsity is -0.2"]),
    "sparsity in percent": (["--sparsity", "20"], ["sparsity is 20.0"]),
    "sparsity not a number": (["--sparsity", "nan"], ["sparsity is nan"]),
    "sparsity removes nothing": (["--sparsity", "0.001"], ["keeps 12 of 12"]),
    "sparsity removes all": (["--sparsity", "0.99"], ["keeps 0 of 12"]),
    "target and sparsity": (["--target-params", "50K"], ["target is 50000.0 and sparsity 0.4", "give one"]),
    "two targets": (["--target-params", "50K", "--target-flops", "1G"], ["params", "flops", "give one"]),
    "target of another budget": (["--target-params", "50K", "--budget", "flops"], ["params", "flops", "give one"]),
    "target no number": (["--target-params", "many"], ["target is 'many'", "5.5B"]),
    "devices that do not divide": (["--tp", "3"], ["tp is 3", "layer 0", "valid sizes: 1, 2, 4, 8"]),
    "two alignments": (["--quant-friendly", "--align", "64"], ["--align 128", "--align 64"]),
    "no steps": (["--steps", "0"], ["steps is 0", "at least 1"]),
    "no sequences": (["--batch-size", "0"], ["batch_size is 0", "at least 1"]),
    "sequences too short": (["--seq-len", "7"], ["seq_len is 7", "at least 8"]),
    "sequences too long": (["--seq-len", "2049"], ["seq_len is 2049", "2,048 positions", "lower --seq-len"]),
    "seed too large": (["--seed", "5000000000"], ["seed is 5000000000", "below 2^32"]),
    "align not positive": (["--align", "0"], ["align is 0", "at least 1"]),
    "align wider than a layer": (["--align", "128"], ["align is 128", "3 × 96", "smaller"]),
    "recipe missing": (["--recipe", "none.toml"], ["none.toml", "cannot be read"]),
    "tracker unknown": (["--tracker", "clipboard"], ["'clipboard'", "installed"]),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_out_of_range(case: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    options, words = SETTINGS[case]
    _refused(_prune(tiny_model, tiny_text, tmp_path / "out", *options), 2, *words)
    assert list(tmp_path.iterdir()) == []


def test_settings_are_checked_before_torch_is_loaded(tmp_path: Path) -> None:
    code = "import sys\nfrom ddp_vllm.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    arguments = ["prune", "model", "--sparsity", "2", "-o", str(tmp_path / "out")]
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (2, "False\n")


def _copy(model: Path, folder: Path) -> Path:
    return Path(shutil.copytree(model, folder))


def _config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


MODELS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "unsupported family": (_config(model_type="gpt2"), ["'gpt2'", "supported: llama"]),
    "quantised": (_config(quantization_config={"quant_method": "awq"}), ["quantised"]),
    "tokenizer missing": (_no_tokenizer, ["no tokenizer", "tokenizer.json"]),
    "weights missing": (lambda folder: (folder / "model.safetensors").unlink(), [".safetensors"]),
    "index missing": (
        lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors"),
        ["model-00001-of-00002.safetensors", "neither model.safetensors nor model.safetensors.index.json"],
    ),
    "config broken": (lambda folder: (folder / "config.json").write_text("{"), ["config.json"]),
}


@pytest.mark.parametrize("case", MODELS)
def test_models_that_cannot_be_pruned(case: str, tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    edit, words = MODELS[case]
    model = _copy(tiny_model, tmp_path / "model")
    edit(model)
    _refused(_prune(model, tiny_text, tmp_path / "out"), 3, str(model), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_unknown_model_folder(tiny_text: Path, tmp_path: Path) -> None:
    for verb in (
        lambda: _prune(tmp_path / "none", tiny_text, tmp_path / "out"),
        lambda: CliRunner().invoke(main, ["apply", str(tmp_path / "none"), "--masks", "m", "-o", str(tmp_path / "o")]),
    ):
        _refused(verb(), 3, str(tmp_path / "none"), "check the path")
    assert list(tmp_path.iterdir()) == []


TEXTS: dict[str, tuple[str, bytes | None, list[str]]] = {
    "empty": ("a.jsonl", b"", ["is empty"]),
    "binary": ("a.jsonl", b"\x00\xff\xfe{\x9d" * 50, ["cannot be read"]),
    "no parquet": ("a.parquet", b"PAR1 but no more", ["cannot be read"]),
    "too short": ("a.txt", b"a few words", ["tokens", "need", "--seq-len"]),
    "missing": ("a.jsonl", None, ["not a file"]),
    "no text column": ("a.jsonl", b'{"body": "x"}\n', ["body"]),
}


@pytest.mark.parametrize("case", TEXTS)
def test_texts_that_cannot_be_used(
    case: str, tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    name, content, words = TEXTS[case]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    _refused(_prune(tiny_model, tmp_path / name, tmp_path / "out"), 4, name, *words)
    assert [path.name for path in tmp_path.iterdir()] == [name] * (content is not None)
    assert capfd.readouterr().err == ""  # libraries add nothing to the one line


def test_an_output_that_exists(pruned: tuple[Path, Result], tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    output = _copy(pruned[0], tmp_path / "out")
    _refused(_prune(tiny_model, tiny_text, output), 5, str(output), "--overwrite")
    masks = str(pruned[0] / "ddp_masks.safetensors")
    result = CliRunner().invoke(main, ["apply", str(tiny_model), "--masks", masks, "-o", str(output)])
    _refused(result, 5, str(output), "--overwrite")
    (output / "old").write_text("")
    assert _prune(tiny_model, tiny_text, output, "--overwrite").exit_code == 0
    assert not (output / "old").exists() and [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_output_that_is_no_model_or_cannot_be_written(tiny_model: Path, tiny_text: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    _refused(_prune(tiny_model, tiny_text, tmp_path, "--overwrite"), 5, str(tmp_path), "leaves it alone")
    _refused(_prune(tiny_model, tiny_text, tmp_path / "thesis.txt" / "out"), 5, "thesis.txt", "cannot be written")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_the_dense_model_is_no_output(
    pruned: tuple[Path, Result], tiny_model: Path, tiny_text: Path, tmp_path: Path
) -> None:
    model = _copy(tiny_model, tmp_path / "model")
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    masks = str(pruned[0] / "ddp_masks.safetensors")
    for output in (model, tmp_path / "." / "model"):
        _refused(_prune(model, tiny_text, output, "--overwrite"), 5, "dense model", "choose another folder")
        arguments = ["apply", str(model), "--masks", masks, "-o", str(output), "--overwrite"]
        _refused(CliRunner().invoke(main, arguments), 5, "dense model")
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_checkpoints_and_masks_that_contradict_themselves(
    pruned: tuple[Path, Result], tiny_model: Path, tmp_path: Path
) -> None:
    """Every way a checkpoint can be corrupted is in tests/test_checkpoint.py."""
    folder = _copy(pruned[0], tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["ddp_layers"][0]["intermediate_size"] = -3
    (folder / "config.json").write_text(json.dumps(config))
    _refused(CliRunner().invoke(main, ["inspect", str(folder)]), 7, "ddp_layers[0].intermediate_size is -3")
    _refused(CliRunner().invoke(main, ["inspect", str(tiny_model)]), 7, "not a pruned checkpoint")
    masks = str(folder / "model.safetensors")
    result = CliRunner().invoke(main, ["apply", str(tiny_model), "--masks", masks, "-o", str(tmp_path / "out")])
    _refused(result, 7, "no masks file")
    _refused(_prune(folder, "a.jsonl", tmp_path / "out"), 3, "pruned already")
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
