"""Profiles of a machine in real vLLM: models without weights are built and timed, and what was measured is kept."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from latency_profiles import written

from ddp_benchmarks import cli, profile
from ddp_benchmarks.profile import ProfileSettings, describe, run_profile
from ddp_benchmarks.side_by_side import StepSettings, compare_steps
from ddp_prune.recipe import Recipe
from ddp_vllm.cli import main
from ddp_vllm.errors import ServingError, SettingError
from ddp_vllm.latency import Workload, shapes_of

ENGINE = ("--enforce-eager", "--dtype", "float32")
DEEPSEEK_MOE = {  # as deepseek-ai/deepseek-moe-16b-base publishes it, but small
    "architectures": ["DeepseekForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekConfig",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekForCausalLM",
    },
    "model_type": "deepseek",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "norm_topk_prob": False,
    "scoring_func": "softmax",
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rope_scaling": None,
    "rope_theta": 10000,
    "torch_dtype": "bfloat16",
}
COUNT_OUTPUTS = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from ddp_benchmarks.steps import WARM_UP, Batch
from vllm import EngineArgs, LLMEngine
batch, prompt, steps = map(int, sys.argv[2:])
engine = LLMEngine.from_engine_args(EngineArgs(
    model=sys.argv[1], skip_tokenizer_init=True, max_num_seqs=batch, max_model_len=256, max_num_batched_tokens=1024,
    enforce_eager=True, dtype="float32", enable_prefix_caching=True,
))
step, counts = engine.step, []
engine.step = lambda: counts.append(step()) or counts[-1]
timed = Batch(engine)
for _ in range(2):
    counts.clear()
    timed.prefill(batch, prompt, steps)
    prefill = [sum(map(len, counts[:-WARM_UP])), len(counts) - WARM_UP]
    timed.step(steps)
    print("counted", json.dumps([prefill, [len(each) for each in counts[-WARM_UP - steps:]]]))
    timed.end()
"""


@pytest.mark.vllm
def test_models_without_weights_are_timed_and_kept(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the shapes: an engine takes 12 s to start. The second begins where an interruption left the first."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setattr(
        profile, "shapes_of", lambda *given: {name: shapes_of(*given)[name] for name in ("mlp 0", "attention once")}
    )
    settings = ProfileSettings(
        model=str(tiny), batches=(1, 3), contexts=(32,), steps=24, rounds=2, engine_arguments=ENGINE
    )
    said: list[str] = []

    def interrupt(line: str) -> None:
        said.append(line)
        if len(said) == 3:
            raise KeyboardInterrupt

    output = tmp_path / "machine.json"
    with pytest.raises(KeyboardInterrupt):
        run_profile(settings, output, overwrite=False, say=interrupt)
    first = json.loads(output.read_text())
    assert not first["complete"] and [run["shape"] for run in first["times"]] == ["mlp 0"] * 2
    run_profile(settings, output, overwrite=False, say=said.append)
    start = "starting the engine of the dense model"
    assert said == [start, "1 of 2: mlp 0", "2 of 2: attention once", start, "2 of 2: attention once"]
    found = json.loads(output.read_text())
    assert found["complete"] and not found["compiled"] and found["times"][:2] == first["times"]
    assert [run["round"] for run in found["times"]] == [0, 1, 0, 1]
    for cells in (run[key] for run in found["times"] for key in ("cells", "beside")):
        assert [(cell["batch"], cell["context"]) for cell in cells] == [(1, 32), (3, 32)]
        assert all(0 < cell[phase] < 10 for cell in cells for phase in ("decode", "prefill"))


@pytest.mark.vllm
def test_steps_of_two_models_are_compared_side_by_side(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How fast each is, is no matter of a test beside others. One that cannot start is named with the reason."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    work = Workload(phase="decode", batch=2, context=48)
    settings = StepSettings(
        dense=str(tiny), pruned=(str(other),), workload=work, rounds=3, steps=24, engine_arguments=ENGINE
    )
    found = compare_steps(settings, say=lambda line: None)
    assert all(len(each) == 3 and min(each) > 0 for each in found["seconds"].values())
    assert found["settings"]["workload"] == {"phase": "decode", "batch": 2, "context": 48}
    broken = dataclasses.replace(settings, dense=str(tmp_path / "nothing"))
    with pytest.raises(ServingError, match=r"the engine of .*nothing ended with code 1"):
        compare_steps(broken, say=lambda line: None)


@pytest.mark.vllm
def test_every_timed_step_decodes_the_whole_batch_and_prefill_decodes_nothing(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 prompts of 128 tokens are eight steps of prefill; the second round meets prompts it has seen before."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    command = [sys.executable, "-c", COUNT_OUTPUTS, str(tiny), "64", "128", "24"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rounds = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("counted")]
    assert rounds == [[[64, 8], [64] * 27]] * 2, done.stderr[-2000:]


@pytest.mark.vllm
def test_a_batch_that_the_kv_cache_does_not_hold_is_refused(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence needs one block of 128 tokens."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    work = Workload(phase="decode", batch=8, context=96)
    arguments = (*ENGINE, "--num-gpu-blocks-override", "5")
    settings = StepSettings(
        dense=str(tiny), pruned=("other",), workload=work, rounds=1, steps=24, engine_arguments=arguments
    )
    with pytest.raises(
        SettingError, match=r"holds 5 sequences of 120 tokens, below the batch of 8 to be timed; choose"
    ):
        compare_steps(settings, say=lambda line: None)
    many = dataclasses.replace(settings, engine_arguments=(*ENGINE, "--max-num-seqs", "4"))
    with pytest.raises(SettingError, match="limit vLLM to 4 sequences, below the batch of 8"):
        compare_steps(many, say=lambda line: None)


@pytest.mark.vllm
def test_deepseek_moe_of_the_paper_is_profiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM has its model class, and neither vLLM nor transformers has its configuration. One of the shapes."""
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setattr(profile, "shapes_of", lambda *given: {"experts 16": shapes_of(*given)["experts 16"]})
    folder = tmp_path / "deepseek-moe"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(DEEPSEEK_MOE))
    settings = ProfileSettings(model=str(folder), batches=(2,), contexts=(24,), steps=12, engine_arguments=ENGINE)
    run_profile(settings, tmp_path / "machine.json", overwrite=False, say=lambda line: None)
    found = json.loads((tmp_path / "machine.json").read_text())
    assert found["complete"] and [run["shape"] for run in found["times"]] == ["experts 16"] * 2


def test_a_profile_says_what_it_holds_and_if_it_is_unsure(tmp_path: Path) -> None:
    """The second round of `written` is a tenth slower, the dense model beside it too."""
    first, *_ = describe(path := written(tmp_path))
    assert first.startswith("decode, 1 sequences of 256 tokens:") and "at most 2.78×" in first
    assert not any("unsure" in line or "note:" in line for line in describe(path))
    content = json.loads(path.read_text())
    content["times"][-1]["cells"][0]["decode"] *= 1.5
    path.write_text(json.dumps(content))
    assert "note: rounds differ by up to 40%" in describe(path)[1]


def test_what_is_measured_by_default_is_what_prune_asks_for_by_default() -> None:
    """Also by `bench steps`: the commands of the documentation go together as they stand."""
    given = {name: cli.profile.make_context("profile", ["m"]).params[name] for name in ("batches", "contexts")}
    asked = Recipe(model="m", speedup=1.2, budget="latency").workload
    assert given == {"batches": str(asked.batch), "contexts": str(asked.context)}
    timed = cli.steps.make_context("steps", ["--dense", "m", "--pruned", "p"]).params
    assert Workload(**{name: timed[name] for name in ("phase", "batch", "context")}) == asked


def test_what_cannot_be_measured_is_refused(tiny: Path, tmp_path: Path) -> None:
    arguments = ["profile", str(tiny), "-o", str(tmp_path / "machine.json")]
    for more, said in (
        (["--batch", "0"], "--batch 0 has a value below 1"),
        (["--context", "10"], "--context 10 has a value below 96"),
        (["--rounds", "0"], "--rounds 0 is below 1"),
        (["--steps", "8"], "--steps 8 is below 12"),
        (["--batch", "many"], "not a list of numbers"),
    ):
        result = CliRunner().invoke(main, [*arguments, *more])
        assert result.exit_code == SettingError.exit_code and said in result.stderr, result.stderr
    (tmp_path / "machine.json").write_text("mine")
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 5 and "exists" in result.stderr and (tmp_path / "machine.json").read_text() == "mine"
