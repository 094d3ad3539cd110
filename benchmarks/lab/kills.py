"""Does a command that is killed at any moment write, when it is run again, what it would have written undisturbed?

Every command that writes a model runs on a tiny Llama, is killed by SIGKILL, and is run again as a user would, with the
same words. Half of the kills come right before or right after a file event of the process, which opens a file for
writing, truncates, renames or removes one, or makes or removes a folder. The other kills come at a random moment, and a
quarter of all runs is killed a second time before it may finish. Then all files must be, bit for bit, those of an
undisturbed run, and there must be no others: no temporary file, no lock, no saved run, no older folder.

Not compared are the numbers that say how long something took or when it was: the fields and columns of `TIMES` in logs,
provenance and tables, and the checksums of the files that hold them, in manifests and in the masks file. Every manifest
must be true nevertheless. A second run may also answer that its output exists, if the first had written all of it and
the second only clears. A run that is killed when all its files are as they should be is done, and not run again.

The parent process imports all modules once and never starts a thread; each run is a fork of it that calls the command
line's function. Pictures are replaced by an empty one each, because to draw them takes longer than everything else.

    python benchmarks/lab/kills.py --kills 400 --seed 0 --minutes 35 -o kills.json

The file is written after every kill. The same command goes on from it, unless its seed is another.
"""

import argparse
import contextlib
import csv
import hashlib
import importlib
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # tests that import this keep their own
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

from safetensors import safe_open

from ddp_benchmarks.protocol import result_line, script_parser
from ddp_vllm.cli import main
from ddp_vllm.manifest import MANIFEST, differences
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.output import write_text
from ddp_vllm.pages.page import Picture

QUANTIZE = Path(sys.prefix) / "quantize"  # llm-compressor, by `make install`
MODULES = (  # what the commands import when they run
    *(f"ddp_prune.{name}" for name in ("cli", "pipeline", "masks_file", "read_recipe", "alm")),
    *(f"ddp_recover.{name}" for name in ("recover", "quantize")),
    *("ddp_vllm.gguf.export", "ddp_vllm.gguf.file", "ddp_vllm.pages.report", "datasets", "gguf", "filelock"),
    *("transformers.models.llama.modeling_llama", "transformers.models.auto.tokenization_auto"),
    *("transformers.models.auto.modeling_auto", "ddp_vllm.remote_code.modeling_ddp", "torch._dynamo", "llmcompressor"),
)
SMALL = "--data {text} --seq-len 16 --batch-size 2"
COMMANDS = {
    "prune": f"prune {{dense}} --sparsity 0.4 --steps 8 --train masks {SMALL} -o {{case}}/out",
    "joint training": f"prune {{dense}} --sparsity 0.4 --steps 8 --train weights {SMALL} -o {{case}}/out",
    "recover": f"recover {{pruned}} --teacher {{dense}} --tokens 256 {SMALL} -o {{case}}/out",
    "recover in place": f"recover {{own}} --teacher {{dense}} --tokens 256 {SMALL} -o {{own}} --overwrite",
    "family": f"prune {{dense}} --sparsity 0.1,0.2,0.3 --steps 40 {SMALL} -o {{case}}/out",
    "export": "export {pruned} -o {case}/model.gguf",
    "apply": "apply {dense} --masks {pruned}/ddp_masks.safetensors -o {case}/out",
    "quantize": "quantize {pruned} --scheme W8A8 -o {case}/out",
}
SHARES = {"prune": 2, "joint training": 2, "recover": 2, "recover in place": 3, "family": 4}  # of the kills; else 1
TIMES = {"seconds", "started", "ended"}
FILE_EVENTS = {
    "open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink", "ctypes.dlsym"
}  # fmt: skip
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

    def __str__(self) -> str:
        if self.event is None:
            return f"after {self.seconds:.3f} s"
        return f"{'after' if self.after else 'before'} file event {self.event}"


class Watch:
    """Counts the file events of this process in a folder, and kills it at one of them."""

    def __init__(self, folder: Path, kill: Kill | None) -> None:
        self.folder, self.kill, self.events = str(folder), kill, list[str]()
        self.is_due = False

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.kill":  # our own
            return
        if self.is_due:
            os.kill(os.getpid(), signal.SIGKILL)
        if event in FILE_EVENTS and self.is_counted(event, arguments):
            if self.kill and self.kill.event == len(self.events):
                self.is_due = True
                if not self.kill.after:
                    os.kill(os.getpid(), signal.SIGKILL)
            names = (os.fsdecode(each) for each in arguments[:2] if isinstance(each, str | bytes | os.PathLike))
            said = " ".join([event, *(name.replace(f"{self.folder}/", "") for name in names)])
            self.events.append(re.sub(r"\.[0-9a-f]{8}\.", ".*.", said))

    def is_counted(self, event: str, arguments: tuple[Any, ...]) -> bool:
        if event == "ctypes.dlsym":  # the one way to exchange two names
            return arguments[1] == "renameat2"
        if event == "open" and not arguments[2] & WRITING:
            return False
        path = os.fsdecode(arguments[0]) if isinstance(arguments[0], str | bytes | os.PathLike) else ""
        inside_one = event in ("os.remove", "os.rmdir", "os.mkdir") and arguments[-1] != -1  # a folder by its number
        return inside_one or path.startswith(self.folder)


class Bench:
    """Sound folders, a folder in which commands run and are killed, and what undisturbed ones leave there."""

    def __init__(self, scratch: Path, commands: list[str], *, draws: bool = False) -> None:
        for module in MODULES:
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(module)
        if not draws:
            for name in ("pictures", "compare"):
                vars(importlib.import_module(f"ddp_vllm.pages.{name}"))["render"] = _not_drawn
        self.sound, self.case, self.log = scratch / "sound", scratch / "case", scratch / "said.txt"
        self.own = self.case / "own"
        self.events: dict[str, list[str]] = {}
        self.seconds: dict[str, float] = {}
        self.expected: dict[str, dict[str, str]] = {}
        self.sound.mkdir()
        self.must(_write_dense, self.sound)
        self.case.mkdir()
        words = self.words("prune")
        self.must(main, [*words[:-1], str(self.sound / "pruned")])
        for name in commands:
            self.lay_out(name)
            began = time.monotonic()
            code, self.events[name] = self.run(self.words(name))
            self.seconds[name] = time.monotonic() - began
            if code:
                raise RuntimeError(f"{name} ends with {code} undisturbed: {self.log.read_text()[-2000:]}")
            self.expected[name] = contents(self.case)

    def words(self, name: str) -> list[str]:
        places = {"dense": self.sound / "dense", "text": self.sound / "text.jsonl", "pruned": self.sound / "pruned"}
        return [word.format(**places, case=self.case, own=self.own) for word in COMMANDS[name].split()]

    def lay_out(self, name: str) -> None:
        """Make the folder as it is before a command."""
        shutil.rmtree(self.case, ignore_errors=True)
        self.case.mkdir()
        if "{own}" in COMMANDS[name]:
            shutil.copytree(self.sound / "pruned", self.own)

    def must(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call a function in a fork, whose threads are not ours. Raises: RuntimeError."""
        if self._wait(self._fork(function, *arguments)):
            raise RuntimeError(self.log.read_text()[-2000:])

    def run(self, words: list[str], kill: Kill | None = None) -> tuple[int, list[str]]:
        """Run a command, and kill it; return its exit code, of a killed one -9, and its file events if it ended."""
        events = self.log.with_suffix(".events")
        events.unlink(missing_ok=True)
        child = self._fork(_call, words, Watch(self.case, kill), events)
        if kill and kill.event is None:
            time.sleep(kill.seconds)
            os.killpg(child, signal.SIGKILL)
        code = self._wait(child)
        return code, json.loads(events.read_text()) if events.exists() else []

    def _fork(self, function: Callable[..., Any], *arguments: Any) -> int:
        sys.stdout.flush()
        child = os.fork()
        if child:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # both do it, whoever comes first
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

    def _wait(self, child: int) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def try_kill(self, name: str, kills: list[Kill]) -> dict[str, Any]:
        """Kill a command, the next run too if there are several kills, run it again, and return what came of it."""
        self.lay_out(name)
        words = self.words(name)
        codes, code = list[int](), 0
        for kill in kills:
            codes.append(self.run(words, kill)[0])
            if is_done := not unequal(contents(self.case), self.expected[name]):
                break
        left = sorted(contents(self.case))
        if not is_done:
            code, _ = self.run(words)
        faults = unequal(contents(self.case), self.expected[name])
        faults += [
            f"a run that was to be killed ends with {each}"
            for each in codes
            if each not in (0, -signal.SIGKILL, EXISTS)
        ]
        if code not in (0, EXISTS) or (code and faults):
            faults.insert(0, f"the second run ends with {code}: {self.log.read_text().strip()[-400:]}")
        event = self.events[name][kills[0].event] if kills[0].event is not None else None
        found = {"command": name, "kills": [str(each) for each in kills], "event": event}
        return found | {"killed": codes.count(-signal.SIGKILL), "code": code, "left": left, "faults": faults}


def _call(words: list[str], watch: Watch, events: Path) -> None:
    """Run the command line under a watch, and note the events."""
    sys.addaudithook(watch)
    try:
        main(words)
    finally:
        events.write_text(json.dumps(watch.events))


def _write_dense(folder: Path) -> None:
    """Write a tiny Llama with a tokenizer trained on the spot, and text."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    lines = [f"The quick brown fox number {n} jumps over {n * 7} lazy dogs while clouds drift by." for n in range(300)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": f"{each} {each}"}) + "\n" for each in lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        lines, trainers.BpeTrainer(vocab_size=320, special_tokens=["<eos>"], initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder / "dense")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=4, head_dim=4, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
        initializer_range=0.2, max_position_embeddings=256,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder / "dense")


def _not_drawn(_draw: Any, *, name: str, title: str, caption: str, height: float) -> Picture:
    return Picture(name=name, title=title, caption=f"{caption} {height:.3f}", svg="", png=b"")


def contents(folder: Path) -> dict[str, str]:
    """Return what a folder holds, without times: of each file, by its name, what must be the same every time."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or path.is_dir():
            found[name] = "a link" if path.is_symlink() else "a folder"
        elif path.name == MANIFEST:
            found[name] = _manifest(path)
        elif path.name == MASKS_FILE:
            found[name] = _masks(path)
        elif path.suffix in (".json", ".jsonl"):
            found[name] = _digest(_without_times(path.read_text(encoding="utf-8")))
        elif path.suffix == ".csv":
            with open(path, encoding="utf-8", newline="") as file:
                found[name] = _digest([_without(row) for row in csv.DictReader(file)])
        else:
            found[name] = _digest(path.read_bytes())
    return found


def _digest(content: Any) -> str:
    raw = content if isinstance(content, bytes) else json.dumps(content, sort_keys=True).encode()
    return hashlib.sha256(raw).hexdigest()


def _manifest(path: Path) -> str:
    """Say whether a manifest is true."""
    try:
        wrong = list(differences(path.parent))
    except ValueError as error:
        wrong = [str(error)]
    return "; ".join(wrong) or "true"


def _masks(path: Path) -> str:
    """Return the digest of tensors and provenance of a masks file."""
    with safe_open(path, framework="numpy") as file:
        said = json.loads((file.metadata() or {}).get("ddp", "{}"))
        tensors = [[name, _digest(file.get_tensor(name).tobytes())] for name in sorted(file.keys())]
    said.pop("checksums", None)
    return _digest([tensors, _without(said)])


def _without_times(text: str) -> Any:
    """Return the objects of JSON, or of lines of it, without times; the text as it is where it is none."""
    try:
        return [_without(json.loads(part)) for part in ([text] if "\n{" not in text else text.splitlines())]
    except ValueError:
        return text


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without(each) for name, each in value.items() if name not in TIMES}
    return [_without(each) for each in value] if isinstance(value, list) else value


def unequal(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Return what is not as after an undisturbed run, a phrase a file; of a whole folder, one."""
    faults = []
    for here, there, fault in ((expected, found, "is missing"), (found, expected, "was left behind")):
        more = here.keys() - there.keys()
        faults += [f"{name} {fault}" for name in sorted(more) if str(Path(name).parent) not in more]
    for name in sorted(found.keys() & expected.keys()):
        if found[name] != expected[name]:
            detail = f": {found[name]}" if name.endswith(MANIFEST) else ""
            faults.append(f"{name} is another{detail}")
    return faults


def plan(bench: Bench, commands: list[str], seed: int) -> Iterator[tuple[str, list[Kill]]]:
    """Yield commands and their kills without end, the same for a seed.

    Of each command's file events those that are unlike the ones before come first, and none comes again before all have
    come; every second kill comes at a random moment.
    """
    rng, sweeps = random.Random(seed), {name: list[Kill]() for name in commands}
    for turn in itertools.count():
        for name in itertools.chain(*([each] * SHARES.get(each, 1) for each in commands)):
            if not sweeps[name]:
                sweeps[name] = _sweep(bench.events[name], rng)
            moment, again = (Kill(seconds=rng.uniform(0, bench.seconds[name])) for _ in range(2))
            yield name, [moment if turn % 2 else sweeps[name].pop(0), *([again] if rng.random() < 0.25 else [])]


def _sweep(events: list[str], rng: random.Random) -> list[Kill]:
    """Return a kill before and one after each event, in a random order, but those of a new kind first."""
    seen, times = Counter[str](), list[int]()
    for event in events:
        times.append(seen[event])
        seen[event] += 1
    kills = [Kill(event=number, after=after) for number in range(len(events)) for after in (False, True)]
    rng.shuffle(kills)
    return sorted(kills, key=lambda kill: times[kill.event or 0])


def run(
    kills: int, seed: int, minutes: float, commands: list[str], output: Path | None, say: Callable[[str], None]
) -> dict[str, Any]:
    """Return how the kills ended, from those that a file holds on."""
    home = "/dev/shm" if Path("/dev/shm").is_dir() else None
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ddp-vllm-kills-", dir=home) as scratch:
        bench = Bench(Path(scratch), commands)
        say(
            ", ".join(
                f"{name}: {len(bench.events[name])} file events, {bench.seconds[name]:.1f} s" for name in commands
            )
        )
        cases = _cases_before(output, seed, commands)
        for number, (name, chosen) in enumerate(plan(bench, commands, seed)):
            if number < len(cases):
                continue
            if number >= kills or time.monotonic() - began > 60 * minutes:
                break
            case = bench.try_kill(name, chosen)
            cases.append(case)
            if case["faults"]:
                say(json.dumps({"kill": number, **{key: case[key] for key in ("command", "kills", "event", "faults")}}))
            if output:
                write_text(json.dumps(_summary(bench, cases, seed, commands), indent=1) + "\n", output)
        return _summary(bench, cases, seed, commands)


def _cases_before(output: Path | None, seed: int, commands: list[str]) -> list[dict[str, Any]]:
    """Return the cases of an interrupted run of the same seed and commands."""
    if not output or not output.exists():
        return []
    found = json.loads(output.read_text(encoding="utf-8"))
    return list(found["cases"]) if (found["seed"], found["commands"]) == (seed, commands) else []


def _summary(bench: Bench, cases: list[dict[str, Any]], seed: int, commands: list[str]) -> dict[str, Any]:
    counts = {}
    for name in commands:
        own = [case for case in cases if case["command"] == name]
        reached = {(case["event"], case["kills"][0]) for case in own if case["event"]}
        counts[name] = {
            "kills": len(own), "failed": sum(bool(case["faults"]) for case in own), "events": len(bench.events[name]),
            "events_killed_at": len(reached), "seconds": round(bench.seconds[name], 2),
        }  # fmt: skip
    kinds = Counter(_kind(fault) for case in cases for fault in case["faults"])
    whole = {
        "kills": len(cases),
        "killed": sum(case["killed"] > 0 for case in cases),
        "failed": sum(bool(case["faults"]) for case in cases),
        "faults": dict(kinds),
    }
    return {"seed": seed, "commands": commands, **whole, "by_command": counts, "cases": cases}


def _kind(fault: str) -> str:
    """Return a fault without what differs from case to case."""
    return re.sub(r"\.[0-9a-f]{8}\.|\b[0-9a-f]{64}\b", ".*.", fault.partition(":")[0])


def _main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--kills", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=35, help="stop after so many")
    parser.add_argument("--commands", help="some of the commands, by commas; all that run here")
    parser.add_argument("-o", "--output", type=Path, help="where results are kept, and gone on from")
    arguments: argparse.Namespace = parser.parse_args()
    sys.path.insert(0, str(QUANTIZE))
    commands = arguments.commands.split(",") if arguments.commands else list(COMMANDS)
    if not importlib.util.find_spec("llmcompressor"):
        commands = [name for name in commands if name != "quantize"]
    found = run(
        arguments.kills, arguments.seed, arguments.minutes, commands, arguments.output,
        lambda line: print(line, file=sys.stderr, flush=True),
    )  # fmt: skip
    del found["cases"], found["seed"]
    print(result_line(__doc__, vars(arguments), seed=arguments.seed, **found))
    sys.exit(bool(found["failed"]))


if __name__ == "__main__":
    _main()
