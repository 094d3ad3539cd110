"""What do the modes of pruning cost in quality, by one protocol, in cells that can be interrupted?

    python benchmarks/reference.py --prepare FOLDER --data DATA     # once: texts to train and to evaluate on
    python benchmarks/reference.py --data DATA --minutes 40 --models smollm2-135m=PATH,qwen0.5b=PATH

benchmarks/protocol.toml lists the cells. Each call runs missing cells, seed by seed, until the minutes are over, and
writes benchmarks/results/TABLE/MODEL-ROW-SEED.json: the command, versions, hardware, seconds, peak memory, perplexity,
KL divergence and top-1 agreement with the dense model. A run that was interrupted resumes. FOLDER has sharegpt.jsonl,
openstax.jsonl, c4_sample.jsonl and wiki.test.raw; conversations are held out by hash, and the text of Python is the
standard library of the running interpreter.
"""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ddp_benchmarks.protocol import script_parser
from ddp_vllm.machine import hardware, today, versions
from ddp_vllm.masks import MASKS_FILE, read_provenance

HERE = Path(__file__).parent
HELD_OUT = 20  # one conversation in so many is held out
DOCUMENTS = 200  # of C4
PYTHON_CHARACTERS = 400_000


class Cell(NamedTuple):
    """One run of a row on a model with a seed."""

    table: str
    model: str
    row: str
    seed: int
    options: list[str]

    @property
    def file(self) -> Path:
        """Where its result is kept."""
        return HERE / "results" / self.table / f"{self.model}-{self.row.replace(' ', '-')}-{self.seed}.json"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="Folder of the texts.")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="Make the texts from the files in this folder.")
    parser.add_argument("--models", default="", help="Names and folders, as NAME=PATH,NAME=PATH.")
    parser.add_argument("--rows", default="", help="Only these rows, by commas.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=40.0, help="No cell is begun after these.")
    parser.add_argument("--work", type=Path, help="Folder for pruned models; they are deleted after their evaluation.")
    arguments = parser.parse_args()
    if arguments.prepare:
        prepare(arguments.prepare, arguments.data)
    models = dict(pair.split("=", 1) for pair in arguments.models.split(",") if pair)
    protocol = tomllib.loads((HERE / "protocol.toml").read_text(encoding="utf-8"))
    began, work = time.monotonic(), arguments.work or arguments.data / "runs"
    for cell in cells(protocol, list(models), arguments.seeds):
        wanted = not arguments.rows or cell.row in arguments.rows.split(",")
        if wanted and not cell.file.exists():
            if time.monotonic() - began > 60.0 * arguments.minutes:
                break
            print(f"{today()} {cell.file.stem}", flush=True)
            run(cell, models[cell.model], arguments.data, work, protocol)
    print_tables(protocol)


def cells(protocol: dict[str, Any], models: list[str], num_seeds: int) -> Iterator[Cell]:
    """Yield all cells: first every row with the first seed."""
    for table, content in protocol["tables"].items():
        for seed in range(num_seeds):
            for model in models:
                for row in content["rows"]:
                    options = shlex.split(content["options"]) + shlex.split(row["options"])
                    yield Cell(table, model, row["name"], seed, options)


def run(cell: Cell, model: str, data: Path, work: Path, protocol: dict[str, Any]) -> None:
    """Prune, evaluate and write the result of a cell."""
    output = (work / cell.file.stem).resolve()
    command = ["prune", model, *cell.options, "--seed", str(cell.seed), "-o", str(output)]
    seconds, peak = 0.0, 0.0
    if not output.exists() or Path(f"{output}.run").exists():
        seconds, peak = ddp_vllm(command, data)
    texts = [word for text in protocol["texts"] for word in ("--text", text)]
    evaluate = ["eval", str(output), "--against", model, "--max-length", str(protocol["window"]), *texts]
    ddp_vllm([*evaluate, "-o", str(output / "eval")], data)
    (found,) = (output / "eval").glob("text*.json")
    evaluation = json.loads(found.read_text(encoding="utf-8"))
    provenance = read_provenance(output / MASKS_FILE)
    metrics = [json.loads(line) for line in (output / "ddp_metrics.jsonl").read_text().splitlines()]
    result = {
        "command": ["ddp-vllm", *command[:1], Path(model).name, *cell.options, "--seed", str(cell.seed)],
        "versions": versions(),
        "hardware": hardware(),
        "date": today(),
        "seconds": round(seconds, 1),
        "step_seconds": sorted(each["seconds"] for each in metrics)[len(metrics) // 2],
        "peak_gb": round(peak / 1e9, 2),
        "learning_rate": provenance.get("learning_rate", {}),
        "own_text": provenance["perplexity"],
        "texts": evaluation["texts"],
    }
    cell.file.parent.mkdir(parents=True, exist_ok=True)
    cell.file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(output)


def ddp_vllm(arguments: list[str], data: Path) -> tuple[float, float]:
    """Run a command of ddp-vllm in the folder of the texts; return its seconds and its peak bytes."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "ddp_vllm", *arguments], cwd=data, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"ddp-vllm {shlex.join(arguments)} ended with {os.waitstatus_to_exitcode(status)}")
    return time.monotonic() - began, usage.ru_maxrss * 1024.0


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
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    code = "\n\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in modules)
    (data / "python.txt").write_text(code[:PYTHON_CHARACTERS], encoding="utf-8")


def write(path: Path, lines: list[str]) -> None:
    path.write_text("\n".join(line for line in lines if line) + "\n", encoding="utf-8")


def print_tables(protocol: dict[str, Any]) -> None:
    """Print a line per finished cell: perplexity, KL and top-1 agreement on each text, seconds per step and memory."""
    for table in protocol["tables"]:
        for path in sorted((HERE / "results" / table).glob("*.json")):
            result = json.loads(path.read_text(encoding="utf-8"))
            texts = (
                f"{name.split('.')[0]} {text['pruned']:.2f} (dense {text['dense']:.2f}) KL "
                f"{text['agreement']['pruned']['kl']:.3f} top-1 {text['agreement']['pruned']['top1']:.1%}"
                for name, text in result["texts"].items()
            )
            cost = f"{result['step_seconds']:.2f} s a step, {result['peak_gb']} GB"
            rate = result["learning_rate"].get("highest", 0)
            print(f"{path.stem}: {'; '.join(texts)}; {cost}, learning rate {rate:g}")


if __name__ == "__main__":
    main()
