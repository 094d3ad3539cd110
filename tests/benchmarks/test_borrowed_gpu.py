"""The kit for a borrowed GPU and `make gpu`: all steps run on a CPU in tiny sizes, and the runner keeps promises."""

import json
import lzma
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
KIT = ROOT / "benchmarks" / "borrowed_gpu"
sys.path.insert(0, str(KIT))  # the kit is scripts that import each other


def run(call: str, out: Path, *options: object, code: int = 0, **environment: str) -> dict[str, Any]:
    """Run steps of a call and return them by name."""
    settings = {"LEASE_DRY": "1", "LEASE_HOME": str(out / "home"), "LEASE_SECONDS": "5000", "OUT": str(out)}
    settings |= {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    command = [sys.executable, str(KIT / "run.py"), call, *map(str, options)]
    result = subprocess.run(command, env={**os.environ, **settings, **environment}, capture_output=True, text=True)
    log = out / f"{call}.log"
    assert result.returncode == code, result.stdout + result.stderr + (log.read_text()[-3000:] if log.exists() else "")
    steps: dict[str, Any] = json.loads((out / f"{call}.json").read_text())["steps"]
    return steps


@pytest.mark.nightly
def test_the_steps_without_vllm(tmp_path: Path) -> None:
    steps = run("1", tmp_path, "--only", "probe,tiles")
    assert steps["probe"]["result"]["copy_tb_s"] > 0
    rows = steps["tiles"]["result"]["rows"]
    assert [row["today"] for row in rows] == [True, False] and all(row["right"] for row in rows)
    assert "NARROW, four launches" in (tmp_path / "README.md").read_text()
    began = steps["probe"]["seconds"]
    assert run("1", tmp_path, "--only", "probe")["probe"]["seconds"] == began, "a finished step ran again"


def test_the_runner_ends_a_step_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import run as runner

    kit = runner.Runner("1", tmp_path / "home", tmp_path, seconds=500.0)
    monkeypatch.setattr(runner, "DRY", False)  # limits are for real runs
    (tmp_path / "home/results/slow.json").write_text('{"rows": [{"us": 1.5}]}')

    def step(name: str, code: str, **options: Any) -> Any:
        return runner.Step(name=name, words=[sys.executable, "-c", code], **options)

    kit.run(
        [
            step("slow", "import time; time.sleep(600)", limit=5.5),
            step("broken", "raise SystemExit('no such GPU')"),
            step("early", "import sys; import os; assert 'LEASE_GO' in os.environ", is_early=True),
        ]
    )
    steps = json.loads((tmp_path / "1.json").read_text())["steps"]
    assert [steps[name]["code"] for name in ("slow", "broken", "early")] == ["out of time", 1, 0]
    assert steps["slow"]["result"]["rows"] == [{"us": 1.5}]
    page = (tmp_path / "README.md").read_text()
    assert "| slow | badly: out of time |" in page and "no such GPU" in page and "| 1.5 |" in page


@pytest.mark.nightly
def test_training_kernels_and_a_whole_third_call(tmp_path: Path, tiny: Path) -> None:
    from safetensors.torch import load_file

    import weights

    assert "9 passed" in run("1", tmp_path, "--only", "training,kernel-tests")["training"]["tail"]
    home = tmp_path / "home"
    tensors = {
        name: ("F32", list(value.shape), value.float().numpy().tobytes())
        for name, value in load_file(tiny / "model.safetensors").items()
    }
    files = {name: (tiny / name).read_bytes() for name in weights.FILES if (tiny / name).exists()}
    weights.write_codes(home / "smol.codes", files, tensors)
    ids = np.random.default_rng(0).integers(3, 280, 64 * 40).astype(np.uint16)
    (home / "tokens.xz").write_bytes(lzma.compress(ids.tobytes()))
    steps = run("3", tmp_path)
    assert {step["code"] for step in steps.values()} == {0} and steps["table8"]["result"]["complete"]
    for name in ("paper", "joint"):
        assert (tmp_path / f"{name}.masks.safetensors").exists()
        assert steps[name]["result"]["rows"][0]["perplexity"] and steps[name]["result"]["steps"] == 3


@pytest.mark.nightly
@pytest.mark.vllm
def test_a_whole_second_call_and_make_gpu(tmp_path: Path, tiny: Path, talks: Path) -> None:
    steps = run("2", tmp_path)
    assert {step["code"] for step in steps.values()} == {0}
    assert steps["qwen3-30b-a3b"]["result"]["verdicts"][0]["prefill"]["ratio"] > 0
    command = [
        "make",
        "gpu",
        "GPU=cpu",
        f"PYTHON={sys.executable}",
        f"MODEL={tiny}",
        f"DATA={talks}",
        f"OUT={tmp_path}/gpu",
    ]
    environment = {"TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)
    page = (tmp_path / "gpu/README.md").read_text()
    assert done.returncode == 0, done.stdout + page[-3000:]
    assert "11 passed, 3 skipped" in json.loads((tmp_path / "gpu/gpu.json").read_text())["steps"]["correct"]["tail"]
    assert "| sharegpt | well |" in page and "CPU" in page
