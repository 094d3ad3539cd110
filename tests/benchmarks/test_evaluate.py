"""lm-eval on a tiny model and two made-up rows: written as lm-eval writes, kept, and not run twice."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ddp_benchmarks import evaluate
from ddp_benchmarks.evaluate import EvalSettings, run_alone
from ddp_vllm.evaluations import mean_difference
from ddp_vllm.results import write_results

COMMAND = [sys.executable, "-c", "from ddp_vllm.cli import main; main()", "eval"]


def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment, cwd=home.parent)


@pytest.fixture
def piqa(tmp_path: Path) -> Path:
    file = tmp_path / "data" / "piqa_val.jsonl"
    file.parent.mkdir()
    row = {"goal": "melt ice", "sol1": "the sun", "sol2": "down the hill", "label": 0}
    file.write_text("".join(json.dumps({**row, "label": label}) + "\n" for label in (0, 1)))
    return file


def test_a_task_is_evaluated_once_and_compared_with_the_dense_model(tiny: Path, piqa: Path, tmp_path: Path) -> None:
    """With --output nothing is written into either model's folder."""
    pytest.importorskip("lm_eval")
    arguments = [str(tiny), "--tasks", "piqa", "--data", str(piqa.parent), "-o", str(tmp_path / "out")]
    first = run(*arguments, home=tmp_path / "hf")
    assert first.returncode == 0, first.stderr[-2000:]
    assert "PIQA" in first.stdout
    assert "50.00 ± 50.00" in first.stdout  # the rows differ in nothing but the answer: one of them is right
    (file,) = (tmp_path / "out").glob("results_*.json")
    results = json.loads(file.read_text())
    assert results["results"]["piqa"]["acc_norm,none"] == 0.5
    assert results["n-samples"]["piqa"]["effective"] == 2
    assert sorted(results["ddp_vllm"]["answers"]["piqa"]) == [0.0, 1.0] and "answers" not in results
    assert "fatal" not in first.stderr  # git, outside a repository
    cached = list((tmp_path / "out" / "tasks").iterdir())
    dense = shutil.copytree(tiny, tmp_path / "dense")
    again = run(*arguments, "--against", str(dense), home=tmp_path / "hf")
    assert again.returncode == 0, again.stderr[-2000:]
    assert "reusing 1 of 1 tasks" in again.stdout and list((tmp_path / "out" / "tasks").iterdir()) == cached
    assert "100.0 %" in again.stdout and "cannot tell: between 69.3 points worse and 69.3 better" in again.stdout
    results = json.loads(next((tmp_path / "out" / "against-dense").glob("results_*.json")).read_text())
    assert results["ddp_vllm"]["model"]["model"] == str(dense)
    assert not (dense / "eval").exists() and not (tiny / "eval").exists()


def test_as_many_rows_at_once_as_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM sets how torch may look for a GPU when it is imported; until then nobody looks."""
    torch = pytest.importorskip("torch")

    def choose(**settings: Any) -> int | str:
        return evaluate._batch_size(EvalSettings(model="m", tasks=("piqa",), **settings))

    for there, wanted in ((True, "auto"), (False, 8)):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert choose() == wanted and choose(batch_size=3) == 3
    monkeypatch.delattr(torch.cuda, "is_available")
    for on_cpu, wanted in ((True, 8), (False, "auto")):
        monkeypatch.setattr(evaluate, "runs_on_cpu", lambda on_cpu=on_cpu: on_cpu)
        assert choose(backend="vllm") == wanted


def test_a_task_of_a_hub_model_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it brings its weights to this machine; the name of the cache file depends on them."""
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / "abc"

    def evaluate_tasks(_: object, settings: EvalSettings, *__: object) -> None:
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        save_file({"w": np.zeros(1, np.float32)}, snapshot / "model.safetensors")
        (snapshot.parents[1] / "refs").mkdir()
        (snapshot.parents[1] / "refs" / "main").write_text("abc")
        part = {"results": {"piqa": {"acc_norm,none": 1.0}}, "config": {}, "answers": {"piqa": [1.0]}}
        write_results(part, evaluate._cache_file(settings, "piqa", None))

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(evaluate, "run_alone", evaluate_tasks)
    said: list[str] = []
    for _ in range(2):
        results = evaluate.evaluate(
            EvalSettings(model="org/tiny", tasks=("piqa",), output=tmp_path / "out"), say=said.append
        )
        assert results["results"] == {"piqa": {"acc_norm,none": 1.0}}
    assert said == ["org/tiny: reusing 1 of 1 tasks from the cache"]


def test_the_difference_of_means_is_that_of_pairs() -> None:
    """Two tasks; in one 3 of 100 rows changed for the worse, in the other 1 for the better and 1 for the worse."""
    first, second = [1.0] * 60 + [0.0] * 40, [1.0] * 50 + [0.0] * 50
    dense = {"ddp_vllm": {"answers": {"a": first, "b": second}}}
    pruned = {"ddp_vllm": {"answers": {"a": [0.0] * 3 + first[3:], "b": [0.0, *second[1:99], 1.0]}}}
    difference, half_width = mean_difference(pruned, dense) or (0.0, 0.0)
    assert difference == pytest.approx((-0.03 + 0.0) / 2)
    lost, won, rows = [4 / 102, 2 / 102], [1 / 102, 2 / 102], 102  # with one more of each
    errors = [(down + up - (up - down) ** 2) / rows for down, up in zip(lost, won, strict=True)]
    assert half_width == pytest.approx(1.96 * sum(errors) ** 0.5 / 2)
    assert mean_difference(pruned, {"ddp_vllm": {"answers": {"a": first}}}) is None
    assert mean_difference(pruned, {"ddp_vllm": {}}) is None


@pytest.mark.parametrize(
    ("dense", "pruned"),
    [
        ([1.0], [0.0]),  # --limit 1
        ([1.0], [1.0]),
        ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
        ([1.0, 0.0] * 15, [1.0, 0.0] * 15),  # a model against itself
    ],
)
def test_few_rows_prove_little(dense: list[float], pruned: list[float]) -> None:
    """Rows that all changed alike, or not at all, have no spread of their own."""
    results = [{"ddp_vllm": {"answers": {"a": rows}}} for rows in (pruned, dense)]
    difference, half_width = mean_difference(*results) or (0.0, 0.0)
    assert difference == pruned[0] - dense[0]
    assert 1.96 / (len(dense) + 2) < half_width < 3.0 / len(dense) ** 0.5


def test_an_unwritable_output_is_refused_before_any_model_is_loaded(tiny: Path, piqa: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    dense = shutil.copytree(tiny, tmp_path / "dense")
    (dense / "eval").touch()
    arguments = [str(tiny), "--against", str(dense), "--tasks", "piqa", "--data", str(piqa)]
    for more, unwritable in (["-o", str(tmp_path / "file")], tmp_path / "file"), ([], dense / "eval"):
        output = run(*arguments, *more, home=tmp_path / "hf")
        assert (output.returncode, output.stderr.count("\n")) == (5, 1), output.stderr
        assert str(unwritable) in output.stderr and "choose another output" in output.stderr


_LOAD = """
import sys
from ddp_benchmarks.evaluate import EvalSettings, _load_model
for folder in sys.argv[1:]:
    settings = EvalSettings(model=folder, tasks=("piqa",), max_length=64, model_args=(("trust_remote_code", "True"),))
    print("RESULT", _load_model(settings)[0].model.config._attn_implementation)
"""


def test_how_a_model_is_loaded(tiny: Path, piqa: Path, tmp_path: Path) -> None:
    """transformers' sdpa leaves Gemma-2's cap out, and code of a dense folder runs only if `--model-args` says so."""
    pytest.importorskip("lm_eval")
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    for name, cap in (("capped", 50.0), ("plain", None)):
        shutil.copytree(tiny, tmp_path / name)
        config = transformers.Gemma2Config(
            **sizes, num_key_value_heads=1, head_dim=8, vocab_size=300, attn_logit_softcapping=cap
        )
        transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path / name)
    folder, ran = shutil.copytree(tiny, tmp_path / "own-code"), tmp_path / "ran"
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"open({str(ran)!r}, 'w').close()\n"
        "class C(LlamaConfig):\n    model_type = 'own'\n"
        "class M(LlamaForCausalLM):\n    config_class = C\n"
    )
    output = run(str(folder), "--tasks", "piqa", "--data", str(piqa), home=tmp_path / "hf")
    assert output.returncode == 3 and "--model-args trust_remote_code=True" in output.stderr, output.stderr[-2000:]
    assert not ran.exists()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    command = [sys.executable, "-c", _LOAD, *(str(tmp_path / name) for name in ("capped", "plain", "own-code"))]
    output = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert output.returncode == 0, output.stderr[-2000:]
    lines = [line for line in output.stdout.splitlines() if line.startswith("RESULT")]
    assert lines == ["RESULT eager", "RESULT sdpa", "RESULT sdpa"] and ran.exists()


def use_a_missing_package() -> None:
    import package_that_is_missing  # noqa: F401


def test_a_missing_package_is_named_by_the_process_that_wanted_it() -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        run_alone(use_a_missing_package)
    assert caught.value.name == "package_that_is_missing"  # `ddp_vllm.cli` makes its remedy of that


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["--tasks", "arc"], 2, "unknown task 'arc'"),
        (["--limit", "0"], 2, "--limit 0 is below 1"),
        (["--batch-size", "0"], 2, "--batch-size 0 is below 1"),
        (["--model-args", "x"], 2, "name=value"),
        (["--data", "{data}", "--tasks", "rte"], 4, "no local file for rte (rte_val.jsonl)"),
        (["--data", "{data}/missing"], 4, "does not exist"),
    ],
)
def test_bad_input_has_its_exit_code(
    tiny: Path, piqa: Path, tmp_path: Path, arguments: list[str], code: int, reason: str
) -> None:
    filled = [argument.format(data=piqa.parent) for argument in arguments]
    output = run(str(tiny), *filled, home=tmp_path / "hf")
    assert (output.returncode, output.stderr.count("\n")) == (code, 1)
    assert reason in output.stderr


def test_refused_rows_leave_no_folder_behind(tiny: Path, tmp_path: Path) -> None:
    """They are read in the process that evaluates, after the folder of the results was made."""
    pytest.importorskip("lm_eval")
    file = tmp_path / "data" / "piqa_val.jsonl"
    file.parent.mkdir()
    file.write_text("{}\n")
    for more in ([], ["-o", str(tmp_path / "new" / "out")]):
        output = run(str(tiny), "--tasks", "piqa", "--data", str(file), *more, home=tmp_path / "hf")
        assert output.returncode == 4 and "no field 'goal'" in output.stderr, output.stderr[-2000:]
    assert not (tiny / "eval").exists() and not (tmp_path / "new").exists()


def test_answers_in_words(tiny: Path, tmp_path: Path) -> None:
    """They count by lm-eval's filter, and not among the nine tasks of the mean."""
    pytest.importorskip("immutabledict")
    file = tmp_path / "data" / "gsm8k_test.jsonl"
    file.parent.mkdir()
    rows = [{"question": f"What is {n} + {n}?", "answer": f"#### {2 * n}"} for n in range(7)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = run(str(tiny), "--tasks", "gsm8k", "--limit", "2", "--data", str(file), "-o", str(tmp_path / "out"),
               "--against", str(tiny), home=tmp_path / "hf")  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "GSM8K" in done.stdout
    both = [json.loads(each.read_text()) for each in (tmp_path / "out").glob("results_*.json")]
    assert len(both) == 2  # of MODEL and of --against, which are one model here and share a folder
    for results in both:
        assert len(results["ddp_vllm"]["answers"]["gsm8k"]) == 2 and results["ddp_vllm"]["mean_accuracy"] is None
