"""The demo: its result does not depend on how fast the machine is."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import invoke, passed
from latency_profiles import written
from safetensors.torch import load_file

import demo
from ddp_vllm.checkpoint import read_config


def eight_times_as_fast(clock: Callable[[], float]) -> Callable[[], float]:
    began = clock()
    return lambda: began + 8 * (clock() - began)


@pytest.mark.slow
@pytest.mark.usefixtures("short_answers", "no_pictures")
def test_the_same_model_comes_out_of_a_machine_that_is_eight_times_slower(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose clocks run eight times as fast meanwhile. The command is the demo's, of a smaller model."""
    monkeypatch.setattr(demo, "LENGTH", 16)
    monkeypatch.setattr(demo, "CONTEXT", 256)
    profile = written(tmp_path, read_config(tiny), 16)
    text = tmp_path / "chats.jsonl"
    text.write_text(
        "".join(f'{{"text": "{" ".join(["ice", "melts", "in", "the", "sun"] * 9)} {n}"}}\n' for n in range(99))
    )
    masks = []
    for name in ("usual", "fast"):
        monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path / name))
        with monkeypatch.context() as patch:
            for clock in ("perf_counter", "monotonic", "time") if name == "fast" else ():
                patch.setattr(time, clock, eight_times_as_fast(getattr(time, clock)))
            passed(invoke(*demo.pruning(tiny, text, profile, tmp_path / f"{name}-out")))
        masks.append(load_file(tmp_path / f"{name}-out" / "ddp_masks.safetensors"))
    one, other = masks
    assert one.keys() == other.keys() and all(one[key].equal(other[key]) for key in one)


def test_the_demo_states_what_a_larger_cut_costs() -> None:
    """By a file of results that is in the repository."""
    line = demo.larger_cut()
    assert line.startswith(
        "a larger cut costs more: at 1.25× its perplexity on chats is 1.37 × dense, after 20 minutes"
    )
    assert "benchmarks/results/speed/smollm2-135m-joint-0.json" in line
    assert "--minutes" not in map(str, demo.pruning(Path("m"), Path("t"), Path("p"), Path("o")))
