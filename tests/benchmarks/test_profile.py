"""Profiles of a machine: models without weights are built and timed in turns. And the demo, which uses one."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import pytest
from commands import edit_json, invoke, passed, write_lines
from latency_profiles import MIXTURE, written
from safetensors.torch import load_file
from written_folders import write_masks

import ddp_vllm
import demo
from ddp_benchmarks import profile, side_by_side, verbs
from ddp_benchmarks.profile import ProfileSettings, run_profile
from ddp_vllm.checkpoint import read_config, read_stock_config
from ddp_vllm.dimensions import widths_of
from ddp_vllm.errors import OutputError, SettingError
from ddp_vllm.latency import Workload, read_profile, shapes_of
from ddp_vllm.machine import hardware
from ddp_vllm.remote_code.widths import LayerWidths

COUNT_OUTPUTS = """
import json, sys
from ddp_benchmarks.steps import WARM_UP, Batch
from vllm import EngineArgs, LLMEngine

def batch_of(**options):
    return Batch(LLMEngine.from_engine_args(EngineArgs(
        model=sys.argv[1], skip_tokenizer_init=True, max_model_len=256, enforce_eager=True, dtype="float32",
        kv_cache_memory_bytes=1 << 28, **options,
    )))

print("LIMITS", json.dumps(batch_of(max_num_seqs=4, num_gpu_blocks_override=5).limits(120)))
timed = batch_of(max_num_seqs=64, max_num_batched_tokens=1024, enable_prefix_caching=True)
step, counts = timed.engine.step, []
timed.engine.step = lambda: counts.append(step()) or counts[-1]
for _ in range(2):
    counts.clear()
    timed.prefill(64, 128, 24)
    prefill = [sum(map(len, counts[:-WARM_UP])), len(counts) - WARM_UP]
    timed.step(24)
    print("COUNTED", json.dumps([prefill, [len(each) for each in counts[-WARM_UP - 24:]]]))
    timed.end()
"""
ROOT = Path(__file__).parents[2]


class KnownEngine:
    """An engine of known speed: a step takes 2 s with all MLPs, and 1 s where a folder is called otherwise."""

    def __init__(self, model: str, arguments: Sequence[str], **_: Any) -> None:
        self.model_facts = {"compiled": True, "multiple": 1, "dtype": "float32"}
        self.seconds = 2.0 if Path(model).name in ("dense", "tiny-llama") else 1.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def wait_for_model(self) -> Self:
        return self

    def ask(self, command: str, *numbers: int) -> Any:
        return {"read": 10 * self.seconds, "step": [self.seconds] * numbers[-1] if numbers else None}.get(command)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (profile, side_by_side):
        monkeypatch.setattr(module, "StepEngine", KnownEngine)
        monkeypatch.setattr(module, "vllm_command", list)


def only(*names: str) -> Callable[..., Any]:
    """Return `shapes_of` with only these of the shapes."""
    return lambda *given: {name: shapes_of(*given)[name] for name in names}


@pytest.mark.vllm
@pytest.mark.nightly
def test_a_model_without_weights_is_timed(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "1")
    monkeypatch.setattr(profile, "shapes_of", only("attention 0"))
    engine = ("--enforce-eager", "--dtype", "float32")
    settings = ProfileSettings(
        model=str(tiny), concurrency=(3,), context_length=(32,), steps=12, engine_arguments=engine
    )
    run_profile(settings, tmp_path / "machine.json", overwrite=False, print_line=lambda line: None)
    content = json.loads((tmp_path / "machine.json").read_text())
    assert content["complete"] and not content["compiled"]
    for cell in (cell for run in content["times"] for key in ("cells", "dense") for cell in run[key]):
        assert all(cell[phase] > 0 for phase in ("decode", "prefill"))


@pytest.mark.usefixtures("known")
def test_an_interrupted_profile_resumes(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "shapes_of", only("mlp 0", "attention 0"))
    settings = ProfileSettings(model=str(tiny), concurrency=(1, 3), context_length=(32,), steps=24, rounds=2)
    lines: list[str] = []

    def interrupt(line: str) -> None:
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    output = tmp_path / "machine.json"
    with pytest.raises(KeyboardInterrupt):
        run_profile(settings, output, overwrite=False, print_line=interrupt)
    first = json.loads(output.read_text())
    assert not first["complete"] and [run["shape"] for run in first["times"]] == ["mlp 0"] * 2
    gpus = first["hardware"] | {"gpus": ["another"]}
    elsewhere = edit_json(Path(shutil.copy(output, tmp_path / "elsewhere.json")), hardware=gpus)
    with pytest.raises(OutputError, match="--overwrite"):  # with the same processor
        run_profile(settings, elsewhere, overwrite=False, print_line=lines.append)
    run_profile(settings, output, overwrite=False, print_line=lines.append)
    start = "starting the engine of the dense model"
    assert lines == [start, "1 of 2: mlp 0", "2 of 2: attention 0", start, "2 of 2: attention 0"]
    resumed = json.loads(output.read_text())
    assert resumed["complete"] and resumed["times"][:2] == first["times"]
    assert [run["round"] for run in resumed["times"]] == [0, 1, 0, 1]
    prefill = 10 * 32 / (32 - 24 // 2)
    cells = [{"batch": batch, "context": 32, "decode": 1.0, "prefill": prefill} for batch in (1, 3)]
    assert all(run["cells"] == cells for run in resumed["times"])
    assert all(cell["decode"] == 2.0 for run in resumed["times"] for cell in run["dense"])


@pytest.mark.usefixtures("known")
def test_a_model_without_whole_experts_is_timed_with_the_experts_that_it_has(tmp_path: Path) -> None:
    dense = widths_of(MIXTURE)
    kept = replace(dense.dense, expert_intermediate_sizes=(768,) * 6 + (0,) * 2)
    stated = replace(dense, layers=(kept,) * 4).to_json()
    (tmp_path / "config.json").write_text(json.dumps(MIXTURE | {"num_experts": 6, "ddp_widths": stated}))
    settings = ProfileSettings(model=str(tmp_path), context_length=(32,), steps=24, rounds=1)
    run_profile(settings, tmp_path / "machine.json", overwrite=False, print_line=lambda line: None)
    profile = read_profile(tmp_path / "machine.json")
    assert profile.times(Workload(phase="decode", batch=8, context=32)).sizes.num_experts == 6
    profile.check_fits(read_stock_config(tmp_path), {})


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(("cpu", "argument"), [("", ""), ("a CPU", ""), ("", "--enforce-eager")])
def test_a_prediction_for_another_place_says_so(
    cpu: str, argument: str, tiny: Path, halved: Path, tmp_path: Path
) -> None:
    folder, here = Path(shutil.copytree(halved, tmp_path / "halved")), hardware()
    latency = {"speedup": 1.2, "low": 1.1, "high": 1.3, "workload": {"phase": "decode", "batch": 2, "context": 48}}
    latency |= {"hardware": here | {"cpu": cpu or here["cpu"]}, "versions": {}}
    latency |= {"engine_arguments": [argument] * bool(argument)}
    write_masks(folder, {}, {"latency": latency})
    options = ["--concurrency=2", "--context-length=48", "--rounds=3", "--steps=24"]
    printed = passed(invoke("bench", "steps", f"--dense={tiny}", f"--pruned={folder}", *options)).stdout
    (line,) = [line for line in printed.splitlines() if line.startswith("predicted")]
    assert (line == "predicted 1.20×") == (not cpu and not argument) and cpu in line and argument in line


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("key", ["vocab_size", "quantization_config"])
@pytest.mark.parametrize("other", ["dense", "pruned"])
def test_a_prediction_over_another_model_is_left_out(
    key: str, other: str, tiny: Path, halved: Path, tmp_path: Path
) -> None:
    """As of a model that was trimmed before it was pruned, or quantized after, with the first model as dense."""
    models = {name: Path(shutil.copytree(one, tmp_path / name)) for name, one in (("dense", tiny), ("pruned", halved))}
    latency = {"speedup": 1.2, "low": 1.1, "high": 1.3, "workload": {"phase": "decode", "batch": 2, "context": 48}}
    latency |= {"hardware": hardware(), "versions": {}, "engine_arguments": []}
    write_masks(models["pruned"], {}, {"latency": latency})
    sizes: dict[str, Any] = {"concurrency": 2, "context_length": 48, "rounds": 3, "steps": 24}
    (before,) = ddp_vllm.bench_steps(models["dense"], [models["pruned"]], **sizes)["verdicts"]
    change = {"vocab_size": 128, "quantization_config": {"quant_method": "compressed-tensors"}}[key]
    edit_json(models[other] / "config.json", **{key: change})
    (verdict,) = ddp_vllm.bench_steps(models["dense"], [models["pruned"]], **sizes)["verdicts"]
    assert before["predicted"] == 1.2 and "predicted" not in verdict


@pytest.mark.usefixtures("known")
def test_steps_are_compared_from_python_and_by_the_command(tiny: Path, halved: Path, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"concurrency": 2, "context_length": 48, "rounds": 3, "steps": 24}
    results = ddp_vllm.bench_steps(tiny, [halved], output=str(tmp_path / "steps.json"), **sizes)
    assert results["seconds"] == {str(tiny): [2.0] * 3, str(halved): [1.0] * 3}
    (verdict,) = results["verdicts"]
    assert verdict["ratio"] == verdict["prefill"]["ratio"] == pytest.approx(2)
    assert json.loads((tmp_path / "steps.json").read_text())["verdicts"] == results["verdicts"]
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    result = invoke("bench", "steps", f"--dense={tiny}", f"--pruned={halved}", "--json", *options)
    heading, sentence, prefill, line = result.stdout.splitlines()[-4:]
    assert heading == "decode, 2 sequences of 48 tokens:" and sentence == verdict["sentence"]
    assert prefill == f"prefill {verdict['prefill']['sentence']}"
    assert json.loads(line)["verdicts"] == results["verdicts"]
    with pytest.raises(SettingError, match="context_length is 48; it must be at least the 60 steps"):
        ddp_vllm.bench_steps(tiny, halved, context_length=48, steps=60)
    with pytest.raises(SettingError, match="name each once"):
        ddp_vllm.bench_steps(tiny, tiny)


@pytest.mark.usefixtures("known")
def test_steps_of_models_with_different_tokens_are_compared_by_characters(
    tiny: Path, halved: Path, talks: Path, tmp_path: Path
) -> None:
    """A step that is twice as fast, with tokens of half as many characters, is no faster."""
    other = Path(shutil.copytree(halved, tmp_path / "other"))
    document = json.loads((other / "tokenizer.json").read_text())
    document["model"]["merges"] = []  # single bytes
    document["model"]["vocab"] = {token: at for token, at in document["model"]["vocab"].items() if len(token) == 1}
    (other / "tokenizer.json").write_text(json.dumps(document))
    words = ("--concurrency", 2, "--context-length", 48, "--rounds", 3, "--steps", 24)
    command = ("bench", "steps", "--dense", tiny, "--pruned", other, *words, "--json")
    assert "pass --text FILE to compare characters" in (plain := passed(invoke(*command)).stdout)
    assert "characters" not in json.loads(plain.splitlines()[-1])["verdicts"][0]
    same = passed(invoke(*(halved if word == other else word for word in command), "--text", talks)).stdout
    assert "the models have the same tokens, so --text is not read" in same and "by characters" not in same
    printed = passed(invoke(*command, "--text", talks)).stdout
    (verdict,) = json.loads(printed.splitlines()[-1])["verdicts"]
    by_text, lengths = verdict["characters"], {}
    for who in ("dense", "pruned"):
        lengths[who] = by_text[who]["characters_per_second"] / by_text[who]["tokens_per_second"]
    assert lengths["pruned"] < 1.01 < lengths["dense"] and by_text["dense"]["tokens_per_second"] == 1
    assert by_text["ratio"] == pytest.approx(verdict["ratio"] * lengths["pruned"] / lengths["dense"])
    assert f"by characters {by_text['sentence']}" in printed and "characters/s" in printed


@pytest.mark.usefixtures("known")
def test_a_stopped_comparison_keeps_its_rounds(
    tiny: Path, halved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped in round 3 of 3 once, and nothing was left of nine minutes."""
    printed = list[str]()

    def interrupt(line: str) -> None:
        printed.append(line)
        if line.startswith("round 2"):
            raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "line_printer", lambda verbose: interrupt)
    output = tmp_path / "steps.json"
    with pytest.raises(KeyboardInterrupt):
        ddp_vllm.bench_steps(tiny, halved, output=output, concurrency=2, context_length=48, rounds=3, steps=24)
    assert printed[-1] == "round 2 of 3: 2.00× so far"
    saved = json.loads(output.read_text())
    assert saved["seconds"] == {str(tiny): [2.0] * 2, str(halved): [1.0] * 2} and saved["verdicts"][0]["ratio"] == 2.0


@pytest.mark.vllm
def test_every_timed_step_decodes_the_whole_batch_and_prefill_decodes_nothing(
    tiny: Path, run_in_vllm: Callable[..., str]
) -> None:
    """64 prompts of 128 tokens are eight steps of prefill; the second round meets prompts it has seen before."""
    lines = run_in_vllm(COUNT_OUTPUTS, tiny).splitlines()
    assert [json.loads(line[8:]) for line in lines if line.startswith("COUNTED")] == [[[64, 8], [64] * 27]] * 2
    (limits,) = (json.loads(line[7:]) for line in lines if line.startswith("LIMITS"))
    assert limits == {"kv_cache": 5, "max_num_seqs": 4}  # a sequence needs one block of 128 tokens


@pytest.mark.parametrize("dtype", ["avx2-float32", "avx512-bfloat16"])
def test_the_demo_has_a_profile_of_each_class_of_processor(dtype: str) -> None:
    """A step gets faster with every head and channel that is left out, to a speed that the demo asks for."""
    profile = read_profile(ROOT / "benchmarks/profiles" / f"{dtype}.json")
    workload = Workload(phase="decode", batch=8, context=512)
    by_heads = [LayerWidths(query_heads_per_kv_head=(3,) * n, intermediate_size=512 * n) for n in (3, 2, 1)]
    thirds = [profile.speedup([layer] * 30, workload)[0] for layer in by_heads]
    assert thirds == sorted(thirds) and thirds[0] == pytest.approx(1.0)
    without_attention = LayerWidths(intermediate_size=1536)
    assert profile.speedup([by_heads[0]] * 17 + [without_attention] * 13, workload)[0] > 1.25


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
    times = written(tmp_path, read_config(tiny), 16)
    text = write_lines(tmp_path / "chats.jsonl", ({"text": f"{'ice melts in the sun ' * 9}{n}"} for n in range(99)))
    masks = []
    for name in ("usual", "fast"):
        monkeypatch.setenv("DDP_VLLM_CACHE", str(tmp_path / name))
        with monkeypatch.context() as patch:
            for clock in ("perf_counter", "monotonic", "time") if name == "fast" else ():
                patch.setattr(time, clock, eight_times_as_fast(getattr(time, clock)))
            passed(invoke(*demo.pruning(tiny, text, times, tmp_path / f"{name}-out")))
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
