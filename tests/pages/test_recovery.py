"""What the pages say of a recovery: three models side by side, and one line for provenance that is not ours."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import invoke, passed
from safetensors.numpy import load_file, save_file

from ddp_vllm.checkpoint import read_checkpoint

MODELS = ("dense", "pruned", "recovered")
LOSSES = {"dense": [2.0, 2.2], "pruned": [2.5, 2.9], "recovered": [2.3, 2.4]}


def quality() -> dict[str, Any]:
    found: dict[str, Any] = {name: math.exp(sum(losses) / 2) for name, losses in LOSSES.items()}
    return found | {"tokens": 32, "block_losses": LOSSES}


def recovery() -> dict[str, Any]:
    return {
        "recipe": {"method": "full", "tokens": 960, "learning_rate": 2e-4},
        "texts": ["/mine/chats.jsonl"],
        "seconds": 61.0,
        "watched": {"/mine/b<ooks.jsonl": quality()},
        "prompts": ["Who?", "What?"],
        "answers": {name: [f"{name} says <b>", f"{name}\nagain"] for name in MODELS},
    }


def rewrite(folder: Path, output: Path, **parts: Any) -> Path:
    """Copy a pruned folder with other provenance."""
    shutil.copytree(folder, output)
    masks = output / "ddp_masks.safetensors"
    provenance = read_checkpoint(folder).provenance | parts
    save_file(load_file(masks), masks, {"ddp": json.dumps(provenance)})
    steps = [{"step": step, "loss": 3.0 / step, "ce": 2.0 / step, "kl": 0.5 / step} for step in range(1, 9)]
    (output / "ddp_recovery.jsonl").write_text("".join(json.dumps(each) + "\n" for each in steps))
    return output


@pytest.fixture
def recovered(trained: Path, tmp_path: Path) -> Path:
    return rewrite(trained, tmp_path / "recovered", perplexity=quality(), recovery=recovery())


def test_the_report_shows_the_three_models_side_by_side(recovered: Path) -> None:
    passed(invoke("report", recovered))
    page = (recovered / "report.html").read_text()
    for text in (
        "dense says &lt;b&gt;",
        "recovered\nagain",
        "recovered / dense",
        "Perplexity on b&lt;ooks.jsonl",
        "960 tokens",
    ):
        assert text in page, text
    assert "/mine/" not in page.partition("<summary>")[0]
    assert page.index("dense says") < page.index("<h2>Size")  # answers come first
    assert 'id="recovery"' in page


BROKEN: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "answers no lists": lambda r, q: r["answers"].update(dense=3),
    "watched without numbers": lambda r, q: r.update(watched={"a": {}}),
    "recovered no number": lambda r, q: q.update(recovered="good"),
    "a loss out of bounds": lambda r, q: q["block_losses"].update(recovered=[1.0, 1e9]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_ours_is_refused_in_one_line(case: str, trained: Path, tmp_path: Path) -> None:
    parts = {"recovery": json.loads(json.dumps(recovery())), "perplexity": json.loads(json.dumps(quality()))}
    BROKEN[case](parts["recovery"], parts["perplexity"])
    result = invoke("report", rewrite(trained, tmp_path / "out", **parts))
    assert result.exit_code == 7 and result.stderr.count("\n") == 1, (result.output, result.exception)
