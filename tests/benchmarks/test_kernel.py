"""The scripts in benchmarks/kernels: the widths they draw, the work they count, one small run."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import kernel_speed
from expert_layers import SHAPES, draw_widths


def test_the_modeled_kernel_reads_every_kept_weight_once_and_is_near_its_bound() -> None:
    """Qwen3-30B-A3B on an H200, 40 % removed; 384 tokens are where narrow tiles would wait for L2."""
    pytest.importorskip("triton")
    import moe_traffic

    shape, card = SHAPES["qwen3-30b-a3b"], moe_traffic.CARDS["h200"]
    for tokens, most, dtype in ((8, 1.3, torch.bfloat16), (384, 1.2, torch.bfloat16), (32, 1.5, torch.float8_e4m3fn)):
        widths, counts = draw_widths(shape, 40, 0), moe_traffic.draw_counts(shape, tokens, 1)
        assert counts.sum() == tokens * shape.num_experts_per_tok
        experts = [(int(count), width, 2048) for count, width in zip(counts, widths, strict=True)]
        item = dtype.itemsize
        launch = moe_traffic.list_product(experts, 16, 64, 64, 2, programs=4, stages=4, item=item)
        chosen = sum(width for count, width, _ in experts if count)
        assert launch.hbm_bytes.sum() == item * 2 * 2048 * chosen <= launch.l2_bytes.sum()
        tiles = moe_traffic.choose_tiles(tokens * 8, 128, dtype, 9)
        predicted = moe_traffic.predict(shape, tokens, widths, counts, card, tiles, item)
        assert 1 < predicted["us"] / moe_traffic.bound(shape, tokens, widths, counts, card, item) < most


ORACLE = f"""
import sys
import torch
sys.path.append({str(Path(kernel_speed.__file__).parent)!r})
from expert_layers import Shape, draw_batch, draw_experts
from fused_experts import build_vllm, by_oracle
generator = torch.Generator().manual_seed(0)
shape = Shape(hidden_size=64, intermediate_size=64, num_experts=8, num_experts_per_tok=2)
experts = draw_experts(shape, torch.bfloat16, "cpu", generator)
batch = draw_batch(shape, 5, torch.bfloat16, "cpu", generator, torch.zeros(8))
w13 = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
chosen = by_oracle(w13, torch.stack([down for _, _, down in experts]), 2)
torch.testing.assert_close(chosen(*batch), build_vllm(experts, 2)(*batch), atol=2e-2, rtol=2e-2)
print(chosen)
"""


@pytest.mark.vllm
def test_the_oracles_kernel_computes_the_same_and_is_named(run_in_vllm: Callable[..., str]) -> None:
    """As on a GPU, where vLLM's oracle chooses the baseline; here it chooses among kernels for CPUs."""
    assert "CPU (CPUUnquantizedExperts), no tile sizes tuned for it" in run_in_vllm(ORACLE)


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
