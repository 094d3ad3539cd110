"""Does a command that is killed at any moment write, when it is run again, what it would have written undisturbed?

Each of COMMANDS runs on a tiny Llama, is killed by SIGKILL, and is run again with the same words. Half of the kills
come right before or right after a file event of the process, which opens a file for writing, truncates, renames or
removes one, or makes or removes a folder; each event of a command once before any comes again. The other kills come at
a random moment. Then all files must be, bit for bit, those of an undisturbed run, and there must be no others: no
temporary file, no lock, no saved run. Not compared are the numbers that say how long something took. A second run may
answer that its output exists, if the first had written all of it.

The parent process imports all modules once and never starts a thread; each run is a fork of it that calls the command
line's function. Pictures are empty, because to draw them takes longer than everything else.

    python tests/nightly/kills.py --kills 400 --seed 0
"""

import contextlib
import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # tests that import this keep their own
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

from fuzz import draw_nothing, write_dense
from safetensors import SafetensorError, safe_open

from ddp_vllm.cli import main
from ddp_vllm.masks import MASKS_FILE
from scripts import result_line, script_parser

MODULES = (  # what the commands import when they run
    *("ddp_prune.verbs", "ddp_prune.jobs", "ddp_prune.core.alm", "ddp_prune.recover", "ddp_vllm.gguf.file"),
    *("ddp_vllm.pages.report", "datasets", "gguf", "filelock", "transformers.models.llama.modeling_llama"),
    *("transformers.models.auto.tokenization_auto", "ddp_vllm.remote_code.modeling_ddp", "torch._dynamo"),
)
SMALL = "--data {text} --seq-len 16 --batch-size 2"
COMMANDS = {
    "prune": f"prune {{dense}} --sparsity 0.4 --steps 8 --train masks {SMALL} --no-proof -o {{case}}/out",
    "joint training": f"prune {{dense}} --sparsity 0.4 --steps 8 --train weights {SMALL} --no-proof -o {{case}}/out",
    "recover": f"recover {{pruned}} --teacher {{dense}} --tokens 256 {SMALL} --no-proof -o {{case}}/out",
    "family": f"prune {{dense}} --sparsity 0.1,0.2,0.3 --steps 40 {SMALL} --no-proof -o {{case}}/out",
    "export": "export {pruned} -o {case}/model.gguf",
    "apply": "apply {dense} --masks {pruned}/ddp_masks.safetensors --no-proof -o {case}/out",
}
TIMES = {"seconds", "started", "ended", "run_id", "file_id"}  # which differ between equal runs
FILE_EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
EXISTS = 5  # the exit code of a command whose output is there


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When a run is killed: at a file event, or after some seconds."""

    event: int | None = None
    """Number of the file event, from 0."""
    after: bool = False
    """Right after that event, which is at the next event of any kind, rather than right before it."""
    seconds: float = 0.0


class Watch:
    """Counts the file events of this process in a folder, and kills it at one of them."""

    def __init__(self, folder: Path, kill: Kill | None) -> None:
        self.folder, self.kill, self.count, self.is_due = str(folder), kill, 0, False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.is_due and event != "os.kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if event in FILE_EVENTS and self.is_counted(event, arguments):
            if self.kill and self.kill.event == self.count:
                self.is_due = True
                if not self.kill.after:
                    os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1

    def is_counted(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "open" and not arguments[2] & WRITING:
            return False
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        in_open_folder = event in ("os.remove", "os.rmdir", "os.mkdir") and arguments[-1] != -1
        return in_open_folder or path.startswith(self.folder)


class Bench:
    """Intact folders, a folder in which commands run and are killed, and what undisturbed ones leave there."""

    def __init__(self, scratch: Path, commands: list[str]) -> None:
        for module in MODULES:
            importlib.import_module(module)
        draw_nothing()
        self.intact, self.case, self.log = scratch / "intact", scratch / "case", scratch / "printed.txt"
        self.events, self.seconds, self.expected = dict[str, int](), dict[str, float](), dict[str, dict[str, str]]()
        self.intact.mkdir()
        self.case.mkdir()
        self.must(write_dense, self.intact)
        self.must(main, [*self.words("prune")[:-1], str(self.intact / "pruned")])
        for name in commands:
            self.clear()
            began = time.monotonic()
            code, self.events[name] = self.run(self.words(name))
            self.seconds[name] = time.monotonic() - began
            if code:
                raise RuntimeError(f"{name} ends with {code} undisturbed: {self.log.read_text()[-2000:]}")
            self.expected[name] = contents(self.case)

    def words(self, name: str) -> list[str]:
        places = {"dense": self.intact / "dense", "text": self.intact / "text.jsonl", "pruned": self.intact / "pruned"}
        return [word.format(**places, case=self.case) for word in COMMANDS[name].split()]

    def clear(self) -> None:
        shutil.rmtree(self.case, ignore_errors=True)
        self.case.mkdir()

    def must(self, *call: Any) -> None:
        """Call a function in a fork, whose threads are not ours. Raises: RuntimeError."""
        if os.waitpid(self._fork(*call), 0)[1]:
            raise RuntimeError(self.log.read_text()[-2000:])

    def run(self, words: list[str], kill: Kill | None = None) -> tuple[int, int]:
        """Run a command, and kill it; return its exit code, of a killed one -9, and its number of file events."""
        counted = self.log.with_suffix(".count")
        counted.write_text("0")
        child = self._fork(_call, words, Watch(self.case, kill), counted)
        if kill and kill.event is None:
            time.sleep(kill.seconds)
            os.killpg(child, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return code, int(counted.read_text() or 0)  # empty if the command was killed while it wrote the number

    def _fork(self, function: Any, *arguments: Any) -> int:
        sys.stdout.flush()
        child = os.fork()
        if child:
            # both do it, whoever comes first
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.setpgid(child, child)
            return child
        code = 1
        try:
            os.setpgid(0, 0)
            output = os.open(self.log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ["DDP_VLLM_CACHE"] = str(self.case / "cache")
            function(*arguments)
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def faults(self, name: str, kill: Kill) -> list[str]:
        """Kill a command and run it again; return what is not as after an undisturbed run."""
        self.clear()
        words, code = self.words(name), 0
        killed, _ = self.run(words, kill)
        wrong = [] if killed in (0, -signal.SIGKILL) else [f"a run that was to be killed ends with {killed}"]
        if unequal(contents(self.case), self.expected[name]):
            code, _ = self.run(words)
        wrong += unequal(contents(self.case), self.expected[name])
        if code not in (0, EXISTS) or (code and wrong):
            wrong.insert(0, f"the second run ends with {code}: {self.log.read_text().strip()[-400:]}")
        return wrong


def _call(words: list[str], watch: Watch, counted: Path) -> None:
    """Run the command line under a watch, and note the number of events."""
    sys.addaudithook(watch)
    try:
        main(words)
    finally:
        counted.write_text(str(watch.count))


def contents(folder: Path) -> dict[str, str]:
    """Return what a folder holds, without times: of each file, by its name, what must be the same every time.

    Files of the cache are named by hashes of masks files, which hold times.
    """
    by_name = {path.relative_to(folder).as_posix(): _content(path) for path in sorted(folder.rglob("*"))}
    return {f"cache/origins/{value}" if "cache/origins/" in name else name: value for name, value in by_name.items()}


def _content(path: Path) -> str:
    if path.is_symlink() or path.is_dir():
        return "a link" if path.is_symlink() else "a folder"
    content = path.read_bytes()
    with contextlib.suppress(ValueError, SafetensorError):  # half of a file, right after a kill
        if path.name == MASKS_FILE:
            with safe_open(path, framework="numpy") as file:
                provenance = json.loads((file.metadata() or {}).get("ddp", "{}")) | {"checksums": None}
                tensors = [[name, hashlib.sha256(file.get_tensor(name).tobytes()).hexdigest()] for name in file.keys()]  # noqa: SIM118 (no mapping)
            content = json.dumps([sorted(tensors), _without_times(provenance)]).encode()
        elif path.suffix in (".json", ".jsonl"):
            lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
            content = json.dumps([_without_times(json.loads(line)) for line in lines]).encode()
    return hashlib.sha256(content).hexdigest()


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(inside) for name, inside in value.items() if name not in TIMES}
    return [_without_times(inside) for inside in value] if isinstance(value, list) else value


def unequal(present: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Return what is not as after an undisturbed run, a phrase per file."""
    names = sorted(present.keys() | expected.keys())
    wrong = [name for name in names if present.get(name) != expected.get(name)]
    return [f"{name} is {present.get(name, 'missing')}, not {expected.get(name, 'there')}" for name in wrong]


def plan(bench: Bench, commands: list[str], seed: int) -> Iterator[tuple[str, Kill]]:
    """Yield commands and their kills without end, the same for a seed; every second kill at a random moment."""
    rng, left = random.Random(seed), {name: list[Kill]() for name in commands}
    while True:
        for name in commands:
            if not left[name]:
                left[name] = [Kill(event=n, after=after) for n in range(bench.events[name]) for after in (False, True)]
                rng.shuffle(left[name])
            yield name, left[name].pop()
            yield name, Kill(seconds=rng.uniform(0, bench.seconds[name]))


def run(kills: int, seed: int, commands: list[str]) -> dict[str, Any]:
    """Kill commands; print and return the faults."""
    faults, counts = list[dict[str, Any]](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="ddp-vllm-kills-") as scratch:
        bench = Bench(Path(scratch), commands)
        for number, (name, kill) in enumerate(plan(bench, commands, seed)):
            if number == kills:
                break
            counts[name] += 1
            if wrong := bench.faults(name, kill):
                faults.append({"kill": number, "command": name, "when": str(kill), "faults": wrong})
                print(json.dumps(faults[-1]), file=sys.stderr, flush=True)
    return {"kills": kills, "by_command": dict(counts), "events": bench.events, "faults": faults}


if __name__ == "__main__":
    parser = script_parser(__doc__)
    parser.add_argument("--kills", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commands", default=",".join(COMMANDS), help="Some of the commands, separated by commas.")
    arguments = parser.parse_args()
    results = run(arguments.kills, arguments.seed, arguments.commands.split(","))
    print(result_line(__doc__, vars(arguments), seed=arguments.seed, **results))
    sys.exit(bool(results["faults"]))
