"""The kit for a borrowed GPU and `make gpu`: every step runs on a CPU in tiny sizes. The runner keeps its promises."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import VLLM_SETTINGS
from lm_eval_tasks import write_tasks

ROOT = Path(__file__).parents[2]
KIT = ROOT / "benchmarks" / "borrowed_gpu"
sys.path.insert(0, str(KIT))  # the kit is scripts that import each other
DRY = VLLM_SETTINGS | {"LEASE_DRY": "1", "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


def run(out: Path, *command: object) -> dict[str, Any]:
    """Run steps and return them by name. All must end well."""
    environment = {"LEASE_HOME": str(out / "home"), "LEASE_SECONDS": "5000", "OUT": str(out)}
    subprocess.run([*map(str, command)], cwd=ROOT, env=os.environ | DRY | environment, capture_output=True)
    (results,) = out.glob("*.json")
    steps = json.loads(results.read_text())["steps"]
    failed = [step for step in steps.values() if step["code"]]
    assert steps and not failed, failed
    return steps


def call(number: int, out: Path, *steps: str) -> dict[str, Any]:
    return run(out, sys.executable, KIT / "run.py", number, "--only", ",".join(steps))


def test_the_runner_ends_a_step_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import run as runner

    kit = runner.Runner("1", tmp_path / "home", tmp_path, seconds=500.0)
    monkeypatch.setattr(runner, "DRY", False)  # limits are for real runs
    (tmp_path / "home/results/slow.json").write_text('{"rows": [{"us": 1.5}]}')
    codes = {"slow": "import time; time.sleep(600)", "broken": "raise SystemExit('no such GPU')", "good": ""}
    steps = [runner.Step(name=name, words=[sys.executable, "-c", code], limit=5.5) for name, code in codes.items()]
    kit.run(steps)
    kit.run(steps[2:])
    ended = json.loads((tmp_path / "1.json").read_text())["steps"]
    assert [ended[name]["code"] for name in codes] == ["out of time", 1, 0]
    assert ended["slow"]["result"]["rows"] == [{"us": 1.5}]
    assert "no such GPU" in (tmp_path / "1.log").read_text()


def test_the_rehearsal_decides_the_steps_also_if_it_was_interrupted(tmp_path: Path) -> None:
    import run as runner

    assert runner.steps_within(tmp_path, 60) == 60  # unknown: a second
    for folder, name, seconds, steps in (
        ("rehearsal.run", "metrics.jsonl", 0.6, 60), ("rehearsal", "ddp_metrics.jsonl", 0.14, 400)
    ):  # fmt: skip
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_text(f'{{"step": 1, "seconds": {seconds}}}\n' * 3)
        assert runner.steps_within(tmp_path, 60) == steps


@pytest.mark.nightly
def test_steps_without_vllm(tmp_path: Path, tiny: Path, talks: Path) -> None:
    home = tmp_path / "home"
    for folder, text in (("train", "talks"), ("heldout", "others")):
        (home / folder).mkdir(parents=True)
        (home / folder / f"{text}.jsonl").write_bytes(talks.read_bytes())
    shutil.copytree(tiny, home / "smollm2")
    import quality

    write_tasks(home / "tasks", *(f"{name}_local" for name in quality.TASKS))
    assert call(1, tmp_path, "probe", "random", "rehearsal")["probe"]["result"]["copy_gb_per_s"] > 0
    (tmp_path / "1.json").unlink()
    steps = call(2, tmp_path, "joint", "masks", "quality")
    for name in ("joint", "masks"):
        assert (tmp_path / f"{name}.masks.safetensors").exists() and steps[name]["result"]["metrics"]
    assert len(steps["quality"]["result"]["rows"]) == 5


@pytest.mark.nightly
@pytest.mark.vllm
def test_steps_with_vllm(tmp_path: Path) -> None:
    steps = call(3, tmp_path, "configs", "qwen3-8b", "qwen3-30b-a3b")
    for name, removed in (("qwen3-8b", {"20", "40"}), ("qwen3-30b-a3b", {"40"})):
        assert set(steps[name]["result"]["rows"][0]["decode"]) == removed


@pytest.mark.nightly
@pytest.mark.vllm
def test_make_gpu(tmp_path: Path, tiny: Path, talks: Path) -> None:
    words = [f"PYTHON={sys.executable}", f"MODEL={tiny}", f"DATA={talks}", f"OUT={tmp_path}"]
    steps = run(tmp_path, "make", "gpu", "GPU=cpu", *words)
    assert "6 passed" in steps["correct"]["tail"] and "9 passed" in steps["training"]["tail"]
    assert steps["sharegpt"]["result"]["hardware"]["cpu"] and steps["step"]["result"]["complete"]
