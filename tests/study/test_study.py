"""The study: budgets that are equal and exact, and cells that are measured once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from seams import read_masks

import study
from findings import CELLS
from rows import METHODS
from scores import Score


def run(table: str, model: Path, text: Path, output: Path, *options: str, code: int = 0) -> str:
    test = output.parent / "test.txt"
    test.write_text("The quick brown fox jumps over lazy clouds. " * 200)
    words = [table, model, "--data", text, "--test", test, "-o", output, "--steps", "4", "--batch-size", "2"]
    words += ["--seq-len", "16", "--samples", "3", "--sparsity", "0.4", *options]
    result = subprocess.run([sys.executable, study.__file__, *map(str, words)], capture_output=True, text=True)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_every_method_keeps_the_same_number_and_is_measured_once(
    kind: str, tiny_model: Path, tiny_experts: Path, tiny_text: Path, tmp_path: Path
) -> None:
    """Trained or scored; with trained scales; from a file. What cannot be computed gives the reason."""
    model, other, extra = (tiny_model, "camera", "lorap+scales") if kind == "dense" else (tiny_experts, "flap", "")
    unfit = "mixtures" if kind == "dense" else "dense"
    names = [name for name, method in METHODS.items() if method.suits != unfit]
    if kind == "experts":
        names = ["ours", "paper", *(name for name in names if METHODS[name].suits == "mixtures")]
    out = tmp_path / "out"
    run("methods", model, tiny_text, out, "--methods", ",".join(filter(None, [*names, other, extra])))
    expected = {"attn": 7, "mlp": 173} if kind == "dense" else {"experts": 192}
    for name in names:
        masks = read_masks(out / CELLS / f"{name}_0.4_0.safetensors")[0]
        assert {part: int((gates > 0).sum()) for part, gates in masks.items()} == expected, name
        ones = all(set(gates.unique().tolist()) <= {0.0, 1.0} for gates in masks.values())
        assert ones == isinstance(METHODS[name], Score) or name.startswith("hard-concrete"), name
    assert "reason" in json.loads((out / CELLS / f"{other}_0.4_0.json").read_text())
    if extra:
        support, scales = (read_masks(out / CELLS / f"{name}_0.4_0.safetensors")[0] for name in ("lorap", extra))
        for part, gates in scales.items():
            assert torch.equal(gates > 0, support[part] > 0) and gates.unique().numel() > 2
    path = out / CELLS / f"{names[0]}_0.4_0.json"
    again = run("methods", model, tiny_text, out, "--methods", f"{names[-1]},{path.with_suffix('.safetensors')}")
    assert f"{names[-1]} at 40 %, seed 0: measured before" in again
    first, read = (json.loads(file.read_text()) for file in (path, *(out / CELLS).glob("row-*.json")))
    assert first["perplexity"] == read["perplexity"]
    refused = run("methods", model, tiny_text, out, "--methods", names[0], "--steps", "5", code=2)
    assert "has a study with another steps" in refused
    unknown = run("methods", model, tiny_text, tmp_path / "none", "--methods", "magic", code=2)
    assert "method 'magic' is unknown" in unknown and not (tmp_path / "none").exists()
