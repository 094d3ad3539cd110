"""lm-eval on a tiny model and two made-up rows: written as lm-eval writes, kept, and not run twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_benchmarks.evaluate import mean_difference, run_alone

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from ddp_vllm.cli import main; main()", "eval"]


def run(*arguments: str, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HOME": str(home), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, env=environment, cwd=home.parent)


@pytest.fixture
def piqa(tmp_path: Path) -> Path:
    file = tmp_path / "data" / "piqa_val.jsonl"
    file.parent.mkdir()
    row = {"goal": "melt ice", "sol1": "the sun", "sol2": "down the hill", "label": 0}
    file.write_text("".join(json.dumps({**row, "label": label}) + "\n" for label in (0, 1)))
    return file


def test_a_task_is_evaluated_once(tiny: Path, piqa: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    arguments = [str(tiny), "--tasks", "piqa", "--data", str(piqa.parent), "-o", str(tmp_path / "out")]
    first = run(*arguments, home=tmp_path / "hf")
    assert first.returncode == 0, first.stderr[-2000:]
    assert "PIQA" in first.stdout
    assert "50.00 ± 50.00" in first.stdout  # the rows differ in nothing but the answer: one of them is right
    results = json.loads(next((tmp_path / "out").glob("results_*.json")).read_text())
    assert results["results"]["piqa"]["acc_norm,none"] == 0.5
    assert results["n-samples"]["piqa"]["effective"] == 2
    cached = list((tmp_path / "out" / "tasks").iterdir())
    again = run(*arguments, "--against", str(tiny), home=tmp_path / "hf")
    assert again.returncode == 0, again.stderr[-2000:]
    assert "1 of 1 tasks were evaluated before" in again.stdout
    assert "100.0 %" in again.stdout and "no measurable difference (+0.0 ± 0.0 points)" in again.stdout
    assert sorted(results["ddp_vllm"]["answers"]["piqa"]) == [0.0, 1.0] and "answers" not in results
    assert "fatal" not in first.stderr  # git, outside a repository
    assert list((tmp_path / "out" / "tasks").iterdir()) == cached


def test_the_difference_of_means_is_that_of_pairs() -> None:
    """Two tasks; in one 3 of 100 rows changed for the worse, in the other 1 for the better and 1 for the worse."""
    first, second = [1.0] * 60 + [0.0] * 40, [1.0] * 50 + [0.0] * 50
    dense = {"ddp_vllm": {"answers": {"a": first, "b": second}}}
    pruned = {"ddp_vllm": {"answers": {"a": [0.0] * 3 + first[3:], "b": [0.0, *second[1:99], 1.0]}}}
    difference, half_width = mean_difference(pruned, dense) or (0.0, 0.0)
    assert difference == pytest.approx((-0.03 + 0.0) / 2)
    errors = [(0.03 - 0.03**2) / 99, 0.02 / 99]  # of the mean of differences −1, 0 and 1
    assert half_width == pytest.approx(1.96 * sum(errors) ** 0.5 / 2)
    assert mean_difference(pruned, {"ddp_vllm": {"answers": {"a": first}}}) is None
    assert mean_difference(pruned, {"ddp_vllm": {}}) is None


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
