"""What does each way of pruning cost in quality at which speed, by one protocol, in cells that can
be interrupted?

    python benchmarks/reference.py --prepare FOLDER --data DATA     # once: texts to train and to evaluate on
    python benchmarks/reference.py --data DATA --minutes 40 --models smollm2-135m=PATH,qwen0.5b=PATH

benchmarks/protocol.toml has the tables. A row is a list of ddp-vllm commands that ends in a model;
a cell is a row for a model and a seed. Each call computes missing cells, seed by seed, until the
minutes are over, and writes benchmarks/results/TABLE/MODEL-ROW-SEED.json: the commands, versions,
hardware, seconds, peak memory, size, perplexity, KL divergence and top-1 agreement with the dense
model. An interrupted call resumes. Once all models of a table with `speed` exist, or those of
`--rows`, one more cell measures their speed in turns; with `tasks`, another one the answers of each
model, and of the dense one, to the questions of lm-eval.

FOLDER has sharegpt.jsonl, openstax.jsonl, c4_sample.jsonl and wiki.test.raw; conversations are held
out by hash, and the text of Python is the standard library of the running interpreter: its modules to
evaluate on, its packages to train on.
"""

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddp_vllm.machine import hardware, now, versions
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import describe_model
from ddp_vllm.provenance import local_provenance
from scripts import script_parser

HERE = Path(__file__).parent
PROTOCOL, RESULTS = HERE / "protocol.toml", HERE / "results"
HELD_OUT = 20  # one conversation in so many is held out
DOCUMENTS = 200  # of C4
PYTHON_CHARACTERS = 400_000
# models, and the dense one: nine engines fill 24 GB, and then W8A8 loses more speed than bf16
TIMED_TOGETHER = 3
STUDY = HERE / "study" / "study.py"
QUANTIZE = Path(sys.prefix) / "quantize"  # llm-compressor, by `make install`


class Cell(NamedTuple):
    """One row of a table for a model and a seed."""

    table: str
    model: str
    row: str
    seed: int
    commands: Sequence[str] = ()
    """Templates, as protocol.toml describes them; none for a row that evaluates another dense
    model."""
    evaluates: str = ""
    """Name of that model."""
    after: str = ""
    """Name of the row whose model the commands start from, and with which the result is compared: it has the same
    tokens."""
    tasks: str = ""
    """Further options of `eval --tasks` for its model."""

    @property
    def name(self) -> str:
        return f"{self.model}-{self.row.replace(' ', '-')}-{self.seed}"

    @property
    def file(self) -> Path:
        """Where its result is kept."""
        return RESULTS / self.table / f"{self.name}.json"

    def folder(self, work: Path) -> Path:
        """Return the folder of its models."""
        return work / self.table / self.name

    def against(self, model: str, work: Path) -> str:
        """Return the model that the result is compared with. model: the dense one."""
        return str(self._replace(row=self.after).folder(work) / "0") if self.after else model

    def outputs(self, work: Path) -> list[Path]:
        """Return the folder that each command writes; the last one is the model to evaluate."""
        return [self.folder(work) / str(number) for number in range(len(self.commands))]


class Command(NamedTuple):
    """Runs commands of ddp-vllm in the folder of the texts, until the call has used up its
    minutes."""

    data: Path
    deadline: float

    def __call__(self, arguments: list[str]) -> tuple[float, float]:
        """Run a command; return its seconds and its peak bytes. Raises: SystemExit if it fails or
        time is up."""
        began = time.monotonic()
        paths = [str(QUANTIZE)] if arguments[0] == "quantize" else []
        paths += filter(None, [os.environ.get("PYTHONPATH")])
        is_study = arguments[0] == "study"  # a script; all others are verbs
        command = [sys.executable, *([STUDY] if is_study else ["-m", "ddp_vllm"]), *arguments[is_study:]]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        process = subprocess.Popen(command, cwd=self.data, env=environment, stdout=sys.stderr)
        while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
            if time.monotonic() > self.deadline:
                process.send_signal(signal.SIGINT)
                ended = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(ended[1])
                if ended[1]:
                    raise SystemExit("the minutes are over; the same command resumes")
                break
            time.sleep(0.2)
        process.returncode = os.waitstatus_to_exitcode(ended[1])
        if process.returncode:
            raise SystemExit(f"ddp-vllm {shlex.join(arguments)} ended with {process.returncode}")
        return time.monotonic() - began, ended[2].ru_maxrss * 1024.0


def main() -> None:
    # a shell lets what runs in the background ignore it, and commands would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="Folder of the texts.")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="Make the texts from the files in this folder.")
    parser.add_argument("--models", default="", help="Names and folders, as NAME=PATH,NAME=PATH.")
    parser.add_argument("--tables", default="", help="Only these tables, by commas.")
    parser.add_argument("--rows", default="", help="Only these rows, by commas.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=40.0, help="The call is interrupted after these.")
    parser.add_argument("--work", type=Path, help="Folder for pruned models.")
    parser.add_argument("--without", default="", help="Of a table, leave out speed or tasks, or both by commas.")
    parser.add_argument("--include-path", type=Path, help="lm-eval's task files that read local data, under its names.")
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare, arguments.data)
    models = dict(pair.split("=", 1) for pair in arguments.models.split(",") if pair)
    models = {name: str(Path(path).resolve()) if Path(path).exists() else path for name, path in models.items()}
    protocol = tomllib.loads(PROTOCOL.read_text(encoding="utf-8"))
    work = (arguments.work or arguments.data / "runs").resolve()
    ddp_vllm = Command(arguments.data, time.monotonic() + 60.0 * arguments.minutes)
    for name, table in protocol["tables"].items():
        if arguments.tables and name not in arguments.tables.split(","):
            continue
        if rows := list(filter(None, arguments.rows.split(","))):
            table["rows"] = [row for row in table["rows"] if row["name"] in rows]
        of_table = {model: path for model, path in models.items() if model in table.get("models", models)}
        for cell in cells(name, table, list(of_table), arguments.seeds):
            if not cell.file.exists() and cell.evaluates in ("", *models):
                print(f"{now()} {cell.table}: {cell.name}", flush=True)
                run(cell, models, ddp_vllm, work, table)
        table = {part: content for part, content in table.items() if part not in arguments.without.split(",")}
        timed = {**table, "rows": [row for row in table["rows"] if row.get("timed", True)]}
        for model, path in of_table.items() if "speed" in table and timed["rows"] else ():
            measure_speed(list(cells(name, timed, [model], 1)), path, ddp_vllm, work, table["speed"])
        local = ["--include-path", str(arguments.include_path.resolve())] if arguments.include_path else []
        for model, path in of_table.items() if "tasks" in table else ():
            measure_accuracy(list(cells(name, table, [model], 1)), path, ddp_vllm, work, table["tasks"], local)


def cells(name: str, table: dict[str, Any], models: list[str], num_seeds: int) -> Iterator[Cell]:
    """Yield the cells of a table: first every row with the first seed."""
    for seed in range(num_seeds):
        for model in models:
            for row in table["rows"]:
                if seed < row.get("seeds", num_seeds):
                    more = {part: row[part] for part in ("commands", "evaluates", "after", "tasks") if part in row}
                    yield Cell(name, model, row["name"], seed, **more)


def run(cell: Cell, models: Mapping[str, str], ddp_vllm: Command, work: Path, table: dict[str, Any]) -> None:
    """Make the model of a cell, evaluate it, and write the result. models: names and folders."""
    model, folder, outputs = models[cell.model], cell.folder(work), cell.outputs(work)
    folder.mkdir(parents=True, exist_ok=True)
    if is_study := "study" in table:  # all tables of a study share their cells
        outputs = [work / cell.table / cell.model]
    commands, seconds, peak = list[str](), 0.0, 0.0
    for command, output in zip(cell.commands, outputs, strict=True):
        names = {"model": model, "seed": cell.seed, "repository": HERE.parent, **table["names"]}
        names["cells"] = work / cell.table / cell.model
        while "{" in command:  # names may contain names
            command = command.format(*outputs, **names)
        words = [*shlex.split(command), "-o", str(output)]
        short = shlex.join(words).replace(f"{folder}/", "").replace(f"{work}/{cell.table}/", "")
        short = f"benchmarks/study/study.py {short[6:]}" if words[0] == "study" else f"ddp-vllm {short}"
        commands.append(short.replace(model, Path(model).name).replace(f"{HERE.parent}/", ""))
        done = folder / f"{len(commands)}.done"
        if (output / "config.json").exists() and not Path(f"{output}.run").exists() and not done.exists():
            # an earlier call was killed, its command was not
            done.write_text(json.dumps([0.0, 0.0]), encoding="utf-8")
        if not done.exists():
            spent, most = ddp_vllm(words)
            done.write_text(json.dumps([spent, most]), encoding="utf-8")
        spent, most = json.loads(done.read_text(encoding="utf-8"))
        seconds, peak = seconds + spent, max(peak, most)
    evaluated = outputs[-1] if outputs else Path(models[cell.evaluates])
    result = {
        "commands": commands,
        "versions": versions(),
        "hardware": hardware(),
        "date": now(),
        "seconds": round(seconds, 1),  # of the last call, if the cell was interrupted
        "peak_gb": round(peak / 1e9, 2),
    }
    if is_study:
        page = (evaluated / f"{cell.row}.md").read_text(encoding="utf-8")
        write_result(result | {"page": page.partition("### Sources")[0].strip()}, cell.file)
        return
    result |= {
        "weights_mb": round(sum(path.stat().st_size for path in evaluated.glob("model*.safetensors")) / 1e6, 1),
        "kv_bytes_per_token": describe_model(str(evaluated)).kv_bytes_per_token,
        **(training_facts(evaluated) if (evaluated / MASKS_FILE).exists() else {}),
        **evaluate(evaluated, cell.against(model, work), ddp_vllm, work / "eval" / cell.name, table),
    }
    write_result(result, cell.file)
    if "speed" not in table:
        shutil.rmtree(folder)


def training_facts(folder: Path) -> dict[str, Any]:
    """Return what the masks file and the metrics of a pruned folder report about its training."""
    provenance, metrics = local_provenance(folder / MASKS_FILE), folder / "ddp_metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    seconds = sorted(json.loads(line)["seconds"] for line in lines)
    return {
        "step_seconds": seconds[len(seconds) // 2] if seconds else None,
        "learning_rate": provenance.get("learning_rate", {}),
    }


def evaluate(folder: Path, model: str, ddp_vllm: Command, output: Path, table: dict[str, Any]) -> dict[str, Any]:
    """Return `texts`, perplexity, KL divergence and top-1 agreement on each text of the table, or `bits`, where the
    tokens are not the dense model's."""
    texts, options = ",".join(table["texts"]), shlex.split(table["eval"])
    ddp_vllm(["eval", str(folder), "--against", model, "--text", texts, *options, "-o", str(output)])
    *_, path = sorted(output.glob("text*.json"))
    quality: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {kind: quality[kind] for kind in ("texts", "bits") if quality.get(kind)}


def measure_speed(row_cells: list[Cell], model: str, ddp_vllm: Command, work: Path, options: str) -> None:
    """Measure the rows that were not yet measured, a few models and the dense one in turns, once
    all models exist."""
    folders = {cell.row: cell.outputs(work)[-1] for cell in row_cells}
    first = row_cells[0]
    file = RESULTS / first.table / f"{first.model}-steps.json"
    measured = json.loads(file.read_text(encoding="utf-8"))["speedups"] if file.exists() else {}
    if missing := [row for row in folders if row not in measured and not folders[row].exists()]:
        print(f"no speeds of {first.model}: there are no folders of {', '.join(missing)}")
        return
    measurement = work / f"{first.model}-steps.json"
    before, separator, engine = options.partition(" -- ")
    while rows := [row for row in folders if row not in measured][:TIMED_TOGETHER]:
        words = ["bench", "steps", "--dense", model, "--pruned", ",".join(str(folders[row]) for row in rows)]
        ddp_vllm(
            [*words, *shlex.split(before), "-o", str(measurement), "--overwrite", *shlex.split(separator + engine)]
        )
        results = json.loads(measurement.read_text(encoding="utf-8"))
        verdicts = [
            {name: value for name, value in verdict.items() if name != "pruned"} for verdict in results["verdicts"]
        ]
        kept = {name: results[name] for name in ("versions", "hardware", "started")}
        measured |= dict(zip(rows, verdicts, strict=True))
        write_result({"options": options, **kept, "speedups": measured}, file)


def measure_accuracy(
    row_cells: list[Cell], model: str, ddp_vllm: Command, work: Path, options: str, local: list[str]
) -> None:
    """Let the dense model, and each row whose model exists, answer the questions that it has not yet
    answered.

    local: options that say where the questions are, if not on the Hub.
    """
    first = row_cells[0]
    file = RESULTS / first.table / f"{first.model}-answers.json"
    folders = {"dense": Path(model), **{cell.row: cell.outputs(work)[-1] for cell in row_cells}}
    further = {cell.row: shlex.split(cell.tasks) for cell in row_cells}

    def read() -> dict[str, Any]:
        return dict(json.loads(file.read_text(encoding="utf-8"))["answers"]) if file.exists() else {}

    for row, folder in folders.items():
        if row in read() or not (folder / "config.json").exists():
            continue
        output = work / f"{first.model}-{row.replace(' ', '-')}-tasks"
        ddp_vllm(["eval", str(folder), *shlex.split(options), *further.get(row, []), *local, "-o", str(output)])
        *_, path = sorted(output.glob("results*.json"))
        answers = json.loads(path.read_text(encoding="utf-8"))["ddp_vllm"]["answers"]
        # 1 for a right answer, in the order of the questions
        strings = {task: "".join(str(round(right)) for right in rights) for task, rights in answers.items()}
        answered = read() | {row: strings}  # another process may have answered meanwhile
        write_result({"options": options, "versions": versions(), "hardware": hardware(), "answers": answered}, file)


def write_result(result: dict[str, Any], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def prepare(folder: Path, data: Path) -> None:
    """Write the texts to train and to evaluate on."""
    data.mkdir(parents=True, exist_ok=True)
    lines = (folder / "sharegpt.jsonl").read_text(encoding="utf-8").split("\n")
    held_out = [line for line in lines if line and int(hashlib.sha256(line.encode()).hexdigest(), 16) % HELD_OUT == 0]
    chosen = set(held_out)
    write(data / "chats-heldout.jsonl", held_out)
    write(data / "chats.jsonl", [line for line in lines if line and line not in chosen])
    write(data / "c4.jsonl", (folder / "c4_sample.jsonl").read_text(encoding="utf-8").split("\n")[:DOCUMENTS])
    shutil.copyfile(folder / "openstax.jsonl", data / "openstax.jsonl")
    shutil.copyfile(folder / "wiki.test.raw", data / "wikitext2.txt")
    library = Path(sysconfig.get_path("stdlib"))
    packages = [path for path in sorted(library.glob("*/**/*.py")) if "site-packages" not in path.parts]
    texts = (path.read_text(encoding="utf-8", errors="ignore") for path in packages)
    write(data / "code.jsonl", [json.dumps({"text": text}) for text in texts if text.strip()])
    modules = sorted(library.glob("*.py"))
    code = "\n\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in modules)
    (data / "python.txt").write_text(code[:PYTHON_CHARACTERS], encoding="utf-8")


def write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(line for line in lines if line) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
