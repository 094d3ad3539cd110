"""The scripts in benchmarks/kernels: the widths they draw, the work they count, one small run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import kernel_speed


@pytest.mark.vllm
@pytest.mark.nightly
def test_a_small_run_measures_every_way(tmp_path: Path) -> None:
    """The real command in a process of its own, with vLLM's kernel as the baseline that must agree with ours."""
    command = [sys.executable, kernel_speed.__file__, "--shape", "olmoe-1b-7b", "--experts", "8"]
    command += ["--scale", "0.25", "--tokens", "1,70", "--sparsity", "0,40", "--rounds", "2", "-o", "k.json"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["complete"] and line["seed"] == 0 and line["versions"]["torch"] and line["hardware"]["cores"]
    assert [(row["sparsity"], row["tokens"]) for row in line["rows"]] == [(0, 1), (0, 70), (40, 1), (40, 70)]
    kept = json.loads((tmp_path / "k.json").read_text())["rows"]
    for row in kept:
        assert row["seconds"].keys() == {"ragged", *kernel_speed.BASELINES}
        assert row["speedup_over"].keys() == {*kernel_speed.BASELINES}
        assert row["share_kept"] == 1 if row["sparsity"] == 0 else 0.3 < row["share_kept"] < 0.9
        assert row["gb_per_s"] > 0 and row["vllm"].keys() == {"dense", "padded", "vllm_uniform"}
        pages = {name: num_bytes > 0 for name, num_bytes in row["huge_page_bytes"].items()}
        if row["sparsity"] == 0:  # at 40 % a weight may be smaller than a page
            assert len(set(pages.values())) == 1, f"only some variants are in huge pages: {pages}"
    assert "smaller than the real ones" in result.stdout
