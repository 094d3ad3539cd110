"""Local tasks are lm-eval's own tasks on other rows: checked against the files of the installed lm-eval."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_benchmarks.tasks import write_task
from ddp_vllm.evaluations import TASKS, mean_accuracy

pytest.importorskip("lm_eval")
ROWS: dict[str, dict[str, Any]] = {  # made up here, in the form of each task
    "boolq": {"passage": "Ice floats.", "question": "does ice float", "label": 1},
    "openbookqa": {
        "question_stem": "Ice is", "choices": {"text": [*"hcrl"], "label": [*"ABCD"]}, "answerKey": "B",
    },
    "rte": {"sentence1": "Ice is cold.", "sentence2": "Ice is cold.", "label": 0},
    "winogrande": {"sentence": "Ice met the fire and _ melted.", "option1": "ice", "option2": "fire", "answer": "1"},
    "hellaswag": {"query": "Ice: It", "choices": ["melts.", "sings.", "reads.", "runs."], "label": "0", "gold": 0},
    "piqa": {"goal": "make ice", "sol1": "freeze water", "sol2": "boil water", "label": 0},
    "mathqa": {"Problem": "1 + 1 ?", "options": "a ) 1 , b ) 2 , c ) 3 , d ) 4 , e ) 5", "correct": "b"},
    "arc_easy": {"question": "Ice is", "choices": {"text": ["hot", "cold"], "label": ["A", "B"]}, "answerKey": "B"},
    "wikitext": {"page": " = Ice = \n \n Ice is cold . \n"},
    "c4": {"text": "Ice is cold."},
    "gsm8k": {"question": "What is 1 + 1?", "answer": "It is 1 + 1 = 2. #### 2"},
    "ifeval": {"key": 1, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]},
}  # fmt: skip
ROWS["arc_challenge"] = ROWS["arc_easy"]
SPLITS = {"training_split", "validation_split", "test_split", "fewshot_split"}
DATA_KEYS = {"dataset_path", "dataset_name", "dataset_kwargs", *SPLITS}

_BUILD = """
import json, logging, sys
from lm_eval.tasks import TaskManager
names = sys.argv[2:]
built = TaskManager(include_path=sys.argv[1], include_defaults=False).load(names)["tasks"]
answer = {}
for name, task in built.items():
    docs = list(task.eval_docs)
    answer[name] = {"text": task.doc_to_text(docs[0]), "rows": len(docs), "target": task.doc_to_target(docs[0])}
    answer[name]["choices"] = task.doc_to_choice(docs[0]) if task.OUTPUT_TYPE == "multiple_choice" else None
print("RESULT" + json.dumps(answer))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "data [v1]"  # `datasets` reads names as globs, in which [v1] is a letter
    folder.mkdir()
    for name, row in ROWS.items():
        (folder / f"{TASKS[name].file}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    return folder


def test_only_the_data_source_is_replaced(data: Path, tmp_path: Path) -> None:
    script = "import json, sys; from lm_eval.tasks._yaml_loader import load_yaml; "
    script += "print(json.dumps([load_yaml(p, resolve_func=False) for p in sys.argv[1:]]))"
    written = [write_task(name, data / f"{TASKS[name].file}.jsonl", tmp_path) for name in TASKS]
    stock_paths = [json.loads(file.read_text())["include"] for file in written]
    output = subprocess.run([sys.executable, "-c", script, *written, *stock_paths], capture_output=True, check=True)
    loaded = json.loads(output.stdout.splitlines()[-1])
    for name, ours, stock in zip(TASKS, loaded[: len(TASKS)], loaded[len(TASKS) :], strict=True):
        expected = {key: value for key, value in stock.items() if key not in DATA_KEYS}
        if name == "hellaswag":  # the rows are prepared already
            assert ours.pop("process_docs") is None
            del expected["process_docs"]
        assert {key: value for key, value in ours.items() if key not in DATA_KEYS} == expected
        assert ours[f"{'test' if TASKS[name].split == 'test' else 'validation'}_split"] == TASKS[name].split
        on_hub = "train" if name == "ifeval" else TASKS[name].split
        assert stock[f"{TASKS[name].split}_split"] == on_hub  # lm-eval scores the same split of the hub's data


def build(folder: Path, *names: str, home: Path) -> dict[str, Any]:
    """Return what lm-eval makes of the tasks written into a folder."""
    environment = {"HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "HF_HOME": str(home), "PATH": ""}
    command = [sys.executable, "-c", _BUILD, str(folder), *names]
    output = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert output.returncode == 0, output.stderr[-2000:]
    line = next(line for line in output.stdout.splitlines() if line.startswith("RESULT"))
    return dict(json.loads(line.removeprefix("RESULT")))


def test_lm_eval_reads_local_rows_with_its_own_prompts(data: Path, tmp_path: Path) -> None:
    for name in TASKS:
        write_task(name, data / f"{TASKS[name].file}.jsonl", tmp_path)
    built = build(tmp_path, *TASKS, home=tmp_path / "hf")
    assert {name: task["rows"] for name, task in built.items()} == dict.fromkeys(TASKS, 2)
    assert built["arc_easy"]["text"] == "Question: Ice is\nAnswer:"
    assert built["boolq"]["text"] == "Ice floats.\nQuestion: does ice float?\nAnswer:"
    assert built["rte"]["choices"] == ["True", "False"]
    assert built["mathqa"]["choices"] == ["1", "2", "3", "4", "5"]
    assert built["winogrande"]["choices"] == ["Ice met the fire and ice", "Ice met the fire and fire"]
    assert built["openbookqa"]["target"] in (1, "1")


def test_mean_is_unweighted_and_uses_the_papers_metrics() -> None:
    found = {
        "boolq": {"acc,none": 0.8, "acc_stderr,none": 0.03},
        "piqa": {"acc,none": 0.1, "acc_norm,none": 0.6, "acc_norm_stderr,none": 0.04},
        "wikitext": {"word_perplexity,none": 20.0},
    }
    mean = mean_accuracy({"results": found})
    assert mean == {"value": pytest.approx(0.7), "stderr": pytest.approx(0.025), "tasks": ["boolq", "piqa"]}
