"""Mixtures with dense layers or shared experts: what is trained is written, with every kind of trained weights."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import passed
from runs import assert_written_as_evaluated, prune, recover, weights

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cache", "no_pictures")]
LORA, IN_8_BITS = ["--train", "lora"], ["--train", "weights", "--optimizer", "adamw-8bit"]
WHOLE = ["--whole-experts"]  # a stock folder, which transformers' own classes read
NIGHTLY = [
    ("qwen3_moe", IN_8_BITS, WHOLE), ("qwen2_moe", IN_8_BITS, []), ("deepseek", LORA, []), ("mixtral", LORA, WHOLE),
]  # fmt: skip
CASES = [
    ("qwen3_moe", LORA, []),  # its middle layer is dense
    ("mixtral", ["--train", "weights"], []),  # other names and shapes on disk
    ("deepseek_v2", LORA, WHOLE),  # a dense layer and shared experts
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY),
]


@pytest.mark.parametrize(("family", "options", "more"), CASES, ids=str)
def test_what_was_trained_is_written(
    family: str, options: list[str], more: list[str], dense: Callable[[str], Path], tiny_text: Path, tmp_path: Path
) -> None:
    with torch.compiler.set_stance("force_eager"):
        rate = ["--learning-rate", "5e-3"]
        passed(prune(dense(family), tiny_text, tmp_path / "pruned", *options, *more, *rate))
        assert_written_as_evaluated(tmp_path / "pruned", tiny_text, distance=2e-4)
        passed(recover(tmp_path / "pruned", tmp_path / "out", *options, "--tokens", "96", *rate))
    assert_written_as_evaluated(tmp_path / "out", tiny_text, "recovered", distance=2e-4)
    before, after = weights(tmp_path / "pruned"), weights(tmp_path / "out")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("self_attn" in name for name in moved)
    routed = ("mlp.experts.", "block_sparse_moe.experts.")
    assert moved.issuperset(
        name for name in before if name.endswith("_proj.weight") and not any(map(name.count, routed))
    )
