"""The demo: its result does not depend on how fast the machine is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from latency_profiles import written
from safetensors.torch import load_file

import demo
from ddp_vllm.checkpoint import read_config

FASTER = """
import time
for name in ("perf_counter", "monotonic", "time"):
    def clock(real=getattr(time, name), began=getattr(time, name)()):
        return began + 8 * (real() - began)
    setattr(time, name, clock)
"""


@pytest.mark.slow
def test_the_same_model_comes_out_of_a_machine_that_is_eight_times_slower(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose clock runs eight times as fast meanwhile. The command is the demo's, of a smaller model."""
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(FASTER)
    monkeypatch.setattr(demo, "LENGTH", 16)
    monkeypatch.setattr(demo, "CONTEXT", 256)
    profile = written(tmp_path, read_config(tiny), 1)
    text = tmp_path / "chats.jsonl"
    text.write_text(
        "".join(f'{{"text": "{" ".join(["ice", "melts", "in", "the", "sun"] * 9)} {n}"}}\n' for n in range(99))
    )
    masks = []
    for name, folders in (("usual", []), ("fast", [str(tmp_path / "clock")])):
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*folders, os.environ["PYTHONPATH"]]), "DDP_VLLM_CACHE": str(tmp_path / name)
        }  # fmt: skip
        words = [str(word) for word in demo.pruning(tiny, text, profile, tmp_path / f"{name}-out")]
        subprocess.run([sys.executable, "-m", "ddp_vllm", *words], env=environment, check=True)
        masks.append(tmp_path / f"{name}-out" / "ddp_masks.safetensors")
    one, other = (load_file(path) for path in masks)
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def test_the_demo_states_what_a_larger_cut_costs() -> None:
    """By a file of results that is in the repository."""
    line = demo.larger_cut()
    assert line.startswith(
        "a larger cut costs more: at 1.25× its perplexity on chats is 1.37 × dense, after 20 minutes"
    )
    assert "benchmarks/results/speed/smollm2-135m-joint-0.json" in line
    assert "--minutes" not in map(str, demo.pruning(Path("m"), Path("t"), Path("p"), Path("o")))
