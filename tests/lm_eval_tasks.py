"""Tasks of lm-eval in a folder, whose rows are made up here."""

from pathlib import Path

from commands import write_lines

TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
{more}
"""
CHOICE = """output_type: multiple_choice
doc_to_text: "{{goal}}"
doc_to_choice: "{{[sol1, sol2]}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]"""
WORDS = """output_type: generate_until
doc_to_text: "{{goal}}"
doc_to_target: "{{sol1}}"
generation_kwargs: {max_gen_toks: 4}
metric_list: [{metric: exact_match, higher_is_better: true}]"""


def write_tasks(folder: Path, *choices: str, words: tuple[str, ...] = (), num_rows: int = 2) -> Path:
    """Write tasks of these names, in which a model chooses or writes; every other row has the other answer."""
    folder.mkdir(parents=True)
    row = {"goal": "melt ice", "sol1": "the sun", "sol2": "down the hill"}
    file = write_lines(folder / "rows.jsonl", (row | {"label": number % 2} for number in range(num_rows)))
    for name in (*choices, *words):
        more = WORDS if name in words else CHOICE
        (folder / f"{name}.yaml").write_text(TASK.format(name=name, file=file, more=more))
    return folder
