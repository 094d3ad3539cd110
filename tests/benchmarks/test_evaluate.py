"""lm-eval on a tiny model and made-up rows of a folder of tasks: written as lm-eval writes, compared, refused."""

import importlib
import json
import multiprocessing
import os
import re
import shutil
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from commands import assert_refused, invoke, passed
from lm_eval_tasks import write_tasks

from ddp_benchmarks import evaluate, verbs
from ddp_benchmarks.evaluate import EvalSettings
from ddp_vllm.errors import LimitError
from ddp_vllm.evaluations import Evaluation, judge_retained, mean_accuracy, mean_difference, retained

pytestmark = pytest.mark.slow

STATED = {
    "model": {"model": "m", "name": "m", "pruned": True}, "data": "hub", "versions": {},
    "settings": {"limit": None, "max_length": 16, "backend": "hf"}, "hardware": {"cpu": "", "cores": 2, "gpus": []},
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A task piqa of two rows, of which a model answers one, `riddles` of the same kind, and `words`."""
    for name, value in {"HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, value)  # lm-eval runs in a process of its own
    monkeypatch.chdir(tmp_path)
    return write_tasks(tmp_path / "tasks", "piqa", "riddles", words=("words",))


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """lm-eval runs in forks of this process, which imports it once, and reads none of its own 14,000 task files."""
    with warnings.catch_warnings(action="ignore"):
        importlib.import_module("lm_eval.evaluator")
        tasks = importlib.import_module("lm_eval.tasks")
    monkeypatch.setattr(tasks, "TaskManager", partial(tasks.TaskManager, include_defaults=False))
    fork = multiprocessing.get_context("fork")
    monkeypatch.setattr(multiprocessing, "get_context", lambda _: fork)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf")  # that package was imported before


@pytest.mark.usefixtures("forked")
def test_local_tasks_count_and_are_compared_with_the_dense_model(
    tiny: Path, halved: Path, tasks: Path, tmp_path: Path, cache: Path
) -> None:
    """With --output nothing is written into either model's folder. Only known tasks are among the mean's."""
    dense = shutil.copytree(tiny, tmp_path / "dense")
    options = ["--tasks", "piqa,riddles,words", "--include-path", tasks, "-o", "out", "--against", dense]
    assert_refused(invoke("eval", halved, *options), 2, "is 2048, but", "takes 256; lower --max-length")
    options += ["--max-length", 256]
    result = invoke("eval", halved, *options, "--min-retained", "0.97", "--json")
    assert result.exit_code == 9 and "retains 0 of words" in result.stderr  # the dense model has no right answer
    printed, records = result.stderr, json.loads(result.stdout)
    assert "PIQA" in printed and "riddles" in printed and "exact match" in printed
    assert "50.00 ± 50.00" in printed  # the rows differ in nothing but the answer: one of them is right
    assert "100.0 %" in printed and "cannot tell: between 69.3 points worse and 69.3 better" in printed
    (file,) = (tmp_path / "out").glob("results_*.json")
    results = json.loads(file.read_text())
    assert results["results"].keys() == results["n-samples"].keys() == {"piqa", "riddles", "words"}
    assert results["results"]["piqa"]["acc_norm,none"] == results["ddp_vllm"]["mean_accuracy"]["value"] == 0.5
    assert results["ddp_vllm"]["mean_accuracy"]["tasks"] == ["piqa"] and "samples" not in results
    assert sorted(results["ddp_vllm"]["answers"].pop("piqa")) == [0.0, 1.0] and not results["ddp_vllm"]["answers"]
    other = json.loads(next((tmp_path / "out" / "against-dense").glob("results_*.json")).read_text())
    assert other["ddp_vllm"]["model"]["model"] == str(dense)
    assert records["dense"]["results"] == other["results"] and records["results"] == results["results"]
    assert other["ddp_vllm"]["data"] == results["ddp_vllm"]["data"]
    assert not (dense / "eval").exists() and not (halved / "eval").exists()
    assert list((cache / "eval").iterdir()) == []  # no responses of evaluations that ended


@pytest.mark.usefixtures("forked")
def test_a_group_of_tasks_in_which_the_model_writes_uses_the_chat_template(
    tiny: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tasks / "both.yaml").write_text("group: both\ntask: [words]\n")

    def simple_evaluate(*, tasks: list[str], apply_chat_template: bool, **_: object) -> dict[str, dict[str, bool]]:
        return {"config": {}, "results": dict.fromkeys(tasks, apply_chat_template)}

    monkeypatch.setattr("lm_eval.evaluator.simple_evaluate", simple_evaluate)
    model = SimpleNamespace(tokenizer=SimpleNamespace(chat_template="x"))
    monkeypatch.setattr(evaluate, "_load_model", lambda _: (model, {}))
    settings = EvalSettings(model=str(tiny), tasks=("piqa", "both"), include_path=tasks)
    assert evaluate.run_alone(evaluate._evaluate_tasks, settings)["results"] == {"piqa": False, "both": True}


def test_the_difference_of_means_is_that_of_pairs() -> None:
    """Two tasks; in one 3 of 100 rows changed for the worse, in the other 1 for the better and 1 for the worse."""
    first, second = [1.0] * 60 + [0.0] * 40, [1.0] * 50 + [0.0] * 50
    dense = {"piqa": first, "boolq": second}
    pruned = {"piqa": [0.0] * 3 + first[3:], "boolq": [0.0, *second[1:99], 1.0]}
    difference, half_width = mean_difference(pruned, dense) or (0.0, 0.0)
    assert difference == pytest.approx((-0.03 + 0.0) / 2)
    lost, won, rows = [4 / 102, 2 / 102], [1 / 102, 2 / 102], 102  # with one more of each
    errors = [(down + up - (up - down) ** 2) / rows for down, up in zip(lost, won, strict=True)]
    assert half_width == pytest.approx(1.96 * sum(errors) ** 0.5 / 2)
    assert mean_difference(pruned, {"piqa": first}) is None
    assert mean_difference(pruned, {}) is None


def test_retained_accuracy_is_that_of_the_mean_and_of_each_task_in_which_the_model_writes() -> None:
    """The mean of piqa and boolq is 0.72 of 0.80; ifeval rises while gsm8k falls."""

    def results(piqa: float, boolq: float, gsm8k: float, ifeval: float) -> Evaluation:
        of_tasks = {"piqa": {"acc_norm,none": piqa}, "boolq": {"acc,none": boolq}}
        written = {"exact_match,flexible-extract": gsm8k}, {"prompt_level_loose_acc,none": ifeval}
        scores = of_tasks | dict(zip(("gsm8k", "ifeval"), written, strict=True))
        return msgspec.convert({"results": scores, "ddp_vllm": STATED}, Evaluation)

    pruned, dense = results(0.64, 0.80, 0.30, 0.6), results(0.70, 0.90, 0.40, 0.5)
    fractions = retained(pruned, dense)
    assert fractions == pytest.approx({"mean accuracy": 0.9, "GSM8K": 0.75, "IFEval": 1.2})
    judge_retained(pruned, dense, 0.75)
    with pytest.raises(LimitError, match=r"retains 0\.75 of GSM8K, below --min-retained 0\.8;"):
        judge_retained(pruned, dense, 0.8)
    with pytest.raises(LimitError, match="retains 0 of GSM8K"):
        judge_retained(results(1, 1, 0.3, 0.5), results(1, 1, 0, 0.5), 0.5)


def test_a_limit_that_judges_nothing_is_missed() -> None:
    """A local task of the paper's name may have another accuracy, and a task of one's own none."""

    def result(**scores: dict[str, float]) -> Evaluation:
        return msgspec.convert({"results": scores, "ddp_vllm": STATED}, Evaluation)

    before, after = result(piqa={"acc,none": 0.8}), result(piqa={"acc,none": 0.6})
    with pytest.raises(LimitError, match=r"retains 0\.75 of PIQA"):
        judge_retained(after, before, 0.97)
    with pytest.raises(LimitError, match="no task has an accuracy"):
        judge_retained(result(own={"alias": 1.0}), result(own={"alias": 1.0}), 0.97)


def test_mean_is_unweighted_and_uses_the_papers_metrics() -> None:
    scores = {
        "boolq": {"acc,none": 0.8, "acc_stderr,none": 0.03},
        "piqa": {"acc,none": 0.1, "acc_norm,none": 0.6, "acc_norm_stderr,none": 0.04},
        "wikitext": {"word_perplexity,none": 20.0},
    }
    mean = mean_accuracy(scores)
    assert mean == {"value": pytest.approx(0.7), "stderr": pytest.approx(0.025), "tasks": ["boolq", "piqa"]}


def test_a_task_of_a_papers_name_may_have_another_metric(
    tiny: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"doc_hash": number, "filter": "none", "acc": 1.0} for number in range(2)]
    raw = {"results": {"piqa": {"acc,none": 0.5, "acc_stderr,none": 0.5}}, "samples": {"piqa": rows}}
    monkeypatch.setattr(evaluate, "run_alone", lambda *_: raw)
    done = passed(invoke("eval", tiny, "--tasks", "piqa", "--max-length", 256, "-o", tmp_path / "out"))
    assert re.search(r"PIQA \(acc\) +│ 50\.00", done.stdout)
    (file,) = (tmp_path / "out").glob("results_*.json")
    assert json.loads(file.read_text())["ddp_vllm"]["answers"] == {}


RAW = {"results": {"piqa": {"acc_norm,none": 1.0}}, "samples": {"piqa": [{"doc_hash": 1, "filter": "none"}]}}


def test_results_are_written_before_anything_is_derived_from_them(
    tiny: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So no defect of ours costs an evaluation, and the responses stay for the next."""
    settings = EvalSettings(model=str(tiny), tasks=("piqa",), output=tmp_path / "out")
    responses = evaluate._responses(settings)
    assert responses
    responses.with_name(f"{responses.name}_rank0.db").write_text("")
    monkeypatch.setattr(evaluate, "run_alone", lambda *_: json.loads(json.dumps(RAW)))

    def defect(_: object) -> None:
        raise KeyError("acc_norm")

    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(evaluate, "mean_accuracy", defect)
        evaluate.evaluate(settings)
    (file,) = (tmp_path / "out").glob("results_*.json")
    assert json.loads(file.read_text()) == RAW and len(list(responses.parent.iterdir())) == 1
    file.unlink()
    evaluate.evaluate(settings)
    (file,) = (tmp_path / "out").glob("results_*.json")
    assert "samples" not in json.loads(file.read_text()) and not list(responses.parent.iterdir())


def test_pickled_responses_of_others_are_not_read(
    tiny: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = EvalSettings(model=str(tiny), tasks=("piqa",))
    responses = evaluate._responses(settings)
    assert responses and responses.parent.stat().st_mode & 0o777 == 0o700
    planted = responses.with_name(f"{responses.name}_rank0.db")
    planted.symlink_to(tiny / "config.json")
    assert evaluate._responses(settings) is None
    planted.unlink()
    responses.parent.chmod(0o777)  # others may have written it
    assert evaluate._responses(settings) is None
    responses.parent.chmod(0o700)
    monkeypatch.setattr(evaluate, "local_folder", lambda _: None)  # not downloaded yet: nothing to tell versions apart
    assert evaluate._responses(EvalSettings(model="owner/name", tasks=("piqa",))) is None


@pytest.mark.parametrize(("fault", "offline"), [("", None), ("no network", "1")])
def test_tasks_of_a_folder_leave_those_of_the_hub_readable(
    fault: str, offline: str | None, tiny: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class EndedError(Exception):
        pass

    def ended() -> None:
        raise EndedError

    for name in (names := ("HF_DATASETS_OFFLINE", "HF_HUB_OFFLINE")):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(evaluate, "hub_fault", lambda: fault)
    monkeypatch.setattr(evaluate, "quiet_libraries", ended)
    with pytest.raises(EndedError):
        evaluate._evaluate_tasks(EvalSettings(model=str(tiny), tasks=("mine", "arc_easy"), include_path=tasks))
    assert [os.environ.get(name) for name in names] == [offline] * 2


def test_results_of_both_models_go_into_the_folder_of_the_evaluated_one(
    tiny: Path, halved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = list[EvalSettings]()
    monkeypatch.setattr(verbs, "_evaluate", lambda models, _: chosen.extend(models) or [])
    monkeypatch.setattr(verbs, "_print_quality", lambda *_: None)
    for words in ([], ["-o", "out"]):
        invoke("eval", halved, "--against", tiny, *words)
        invoke("eval", halved, "--against", "owner/dense", *words)
    assert [str(settings.output) for settings in chosen] == [
        f"{folder}{name}"
        for folder in (f"{halved}/eval", "out")
        for name in ("/against-tiny-llama", "", "/against-owner--dense", "")
    ]


@pytest.mark.nightly
def test_what_lm_eval_does_not_find_is_one_line(tiny: Path, tasks: Path) -> None:
    words = ("eval", tiny, "--max-length", 256, "--include-path", tasks, "--tasks")
    assert_refused(invoke(*words, "arc"), 2, "lm-eval has no task arc")
    (tasks / "rows.jsonl").unlink()
    assert_refused(invoke(*words, "words"), 4, "the rows of words cannot be read")
