"""Does a damaged file make ddp-vllm end with a traceback, hang, or continue with wrong weights?

The script prunes, recovers and exports tiny models and writes made-up measurements. Each seed then changes one file:
bytes, a value in its JSON, the header of its tensors, or the file itself. The functions and commands that read it run
in this process, with two seconds of a core. Each must fail with one line, or return the result of the intact file.
Three cases are not faults:

- Another plausible value (`rope_theta`, a seed, a result) is accepted, and weights are loaded as the file has them.
  `verify` must report it if the file is in a manifest.
- Another library (transformers) reports its own error where users call that library.
- Damaged saved runs and cached tokens are ignored rather than refused.

    python benchmarks/lab/fuzz.py --first 0 --last 20000
"""

import argparse
import contextlib
import faulthandler
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

if __name__ == "__main__":  # tests that import this keep their own
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

from ddp_benchmarks.protocol import result_line, script_parser
from ddp_vllm.checkpoint import read_config
from ddp_vllm.cli import main
from ddp_vllm.errors import DdpError
from ddp_vllm.families import register_pruned
from ddp_vllm.formats import opened_in_place
from ddp_vllm.manifest import MANIFEST
from ddp_vllm.pages import compare, pictures
from ddp_vllm.pages.page import Picture
from fuzz_folders import STEM, Sound, write_sound
from fuzz_mutations import is_sealed, mutate

SECONDS = 2.0  # processor time limit per reader
MEMORY = 2 * 2**30  # limit in bytes, in addition to the memory at the start


class Hang(BaseException):
    """A reader took too long."""


@dataclass
class Case:
    """One mutation and its outcome."""

    seed: int
    target: str
    what: str = ""
    faults: list[str] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)


class Readers:
    """The functions and commands that read a damaged folder."""

    def __init__(self, sound: Sound, scratch: Path) -> None:
        self.sound, self.scratch, self.folder = sound, scratch, scratch / "case" / STEM
        self.out = scratch / "out"

    def lay_out(self, source: Path) -> None:
        """Copy an intact folder to the place where it is damaged."""
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        shutil.copytree(source, self.folder)

    def readers(self, target: str) -> dict[str, Callable[[], Any]]:
        """Return the readers of a target's files, by name."""
        folder, dense = str(self.folder), str(self.sound.dense)
        of_pruned = {
            "inspect": lambda: self.cli("inspect", folder),
            "inspect --json": lambda: self.cli("inspect", folder, "--json"),
            "report": lambda: self.cli("report", folder, "-o", str(self.out)),
            "push": lambda: self.cli("push", folder, "me/x", "--dry-run"),
            "compare": lambda: self.cli("compare", folder, "--dense", dense, "-o", f"{self.out}.html", "--overwrite"),
            "transformers": self.load_pruned,
            "recover": lambda: self.open_pruned("dense-experts" if target == "experts" else "dense"),
        }
        masks = str(self.folder / "ddp_masks.safetensors")
        applied = {"apply": lambda: self.cli("apply", dense, "--masks", masks, "-o", str(self.out))}
        exported = {"export": lambda: self.cli("export", folder, "-o", f"{self.out}.gguf", "--overwrite")}
        converted = {
            "convert": lambda: self.cli("convert", folder, "-o", str(self.out)),
            "open in place": lambda: opened_in_place(read_config(self.folder)),
        }
        every: dict[str, dict[str, Callable[[], Any]]] = {
            "checkpoint": of_pruned | {"tokenizer": self.tokenizer} | exported,
            "experts": of_pruned,
            "masks": {name: of_pruned[name] for name in ("inspect", "inspect --json", "report", "push", "compare")}
            | applied,
            "dense": {
                "prune --dry-run": lambda: self.plan(folder),
                "load": self.load_dense,
                "tokenizer": self.tokenizer_for_prune,
                "bench": self.bench_reads,
                "eval": lambda: _describe(folder),
            },
            **dict.fromkeys(("blocks", "per-layer"), converted),
            "state": {"resume": self.resume},
            "tokens": {"tokens": self.tokens},
            "results": {"compare": of_pruned["compare"], "bench": self.read_bench},
            "profile": {"profile": self.profile},
        }
        return every[target]

    def cli(self, *words: str) -> str:
        """Return a command's output and the hashes of its files. Raises: DdpError with its line; AssertionError."""
        shutil.rmtree(self.out, ignore_errors=True)
        result = CliRunner().invoke(main, list(words))
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        if result.exit_code:
            lines = result.stderr.splitlines()
            assert len(lines) == 1 and lines[0].startswith("ddp-vllm: ") and lines[0].isprintable(), result.stderr
            assert len(lines[0]) < 3000, "a very long line"
            raise DdpError(lines[0])
        written = [path for path in sorted(self.out.rglob("*")) if path.is_file() and path.name != MANIFEST]
        return result.stdout + "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in written)

    def plan(self, folder: str) -> str:
        text = self.cli("prune", folder, "--sparsity", "0.4", "--seq-len", "16", "--dry-run", "-o", str(self.out))
        return text.partition("memory:")[0]  # free memory changes

    def load_pruned(self) -> dict[str, torch.Tensor]:
        from transformers import AutoModelForCausalLM

        with contextlib.redirect_stderr(None):
            try:
                model = AutoModelForCausalLM.from_pretrained(self.folder, trust_remote_code=False)
            except Exception as error:  # the user calls transformers: any of its errors is allowed
                raise DdpError(str(error)) from error
        return self.checked_weights(model)

    def open_pruned(self, dense: str) -> dict[str, torch.Tensor]:
        from ddp_models.loading import load_model
        from ddp_models.source import open_pruned, open_source
        from ddp_vllm.checkpoint import read_checkpoint

        source = open_pruned(read_checkpoint(self.folder), open_source(str(self.sound.folder_of(dense))))
        return self.checked_weights(load_model(source, "auto"))

    def load_dense(self) -> dict[str, torch.Tensor]:
        from ddp_models.loading import load_model
        from ddp_models.source import open_source

        return self.checked_weights(load_model(open_source(str(self.folder)), "auto"))

    def checked_weights(self, model: Any) -> dict[str, torch.Tensor]:
        """Return the weights of a model after checking that each equals its tensor on disk."""
        stored: dict[str, torch.Tensor] = {}
        for path in sorted(self.folder.glob("*.safetensors")):
            if path.name.startswith("model"):
                stored |= {name.replace("block_sparse_moe", "mlp"): value for name, value in load_file(path).items()}
        found = {name: value.detach() for name, value in model.named_parameters()}
        for name, value in found.items():
            assert name in stored, f"wrong weights: {name} is not in any file"
            on_disk = stored[name].to(value.dtype)
            equal = torch.equal(on_disk.view(torch.uint8), value.view(torch.uint8))
            assert equal, f"wrong weights: {name} differs from its file"
        return found

    def tokenizer(self) -> list[int]:
        from transformers import AutoTokenizer

        try:
            return list(AutoTokenizer.from_pretrained(self.folder, trust_remote_code=False)("some text")["input_ids"])
        except Exception as error:
            raise DdpError(str(error)) from error

    def tokenizer_for_prune(self) -> list[int]:
        from ddp_text.documents import Document
        from ddp_text.tokens import load_tokenizer, tokenize

        documents = map(Document, ["some text", "and more"])
        return [int(each) for part in tokenize(documents, load_tokenizer(str(self.folder))) for each in part.ids]

    def bench_reads(self) -> Any:
        from ddp_benchmarks.models import check_vocabularies, max_model_len, token_counter

        check_vocabularies(str(self.folder), str(self.sound.pruned))
        return token_counter(str(self.folder))("some text"), max_model_len(str(self.folder))

    def resume(self) -> Any:
        from ddp_training.run_state import saved_header

        state = self.sound.run_state(self.folder)
        loaded, header = state.load(), saved_header(self.folder / "out")
        if loaded is None:
            raise DdpError("starts again")
        return [loaded, header]

    def tokens(self) -> Any:
        from ddp_text.blocks import saved_blocks

        found = saved_blocks(self.folder / "blocks.tokens")
        if found is None:
            raise DdpError("tokenizes again")
        return found

    def read_bench(self) -> Any:
        from ddp_benchmarks.tables import json_line, plain_console, print_report
        from ddp_vllm.results import read_results, verdicts

        results = read_results(self.folder / "sharegpt.json")
        console = plain_console()
        with console.capture() as captured:
            print_report({"verdicts": [], **results}, console)
        return captured.get(), json_line({"verdicts": [], **results}), verdicts(results)

    def profile(self) -> Any:
        from ddp_benchmarks.profile import describe
        from ddp_vllm.latency import Workload, read_profile

        path = self.folder / "machine.json"
        profile = read_profile(path)
        profile.check_suits(profile.content["config"])
        work = Workload(phase="decode", batch=8, context=256)
        return describe(path), profile.times(work).max_speedup, profile.spread(work), profile.each_round(work)[0].dense


def _describe(folder: str) -> Any:
    from ddp_benchmarks.evaluate import EvalSettings
    from ddp_vllm.model_facts import describe_model

    EvalSettings(model=folder, tasks=("piqa",)).check()
    return describe_model(folder).to_json()


def same(one: Any, other: Any) -> bool:
    """Return whether two results are equal to the bit."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


OF_A_MODEL = ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")
WRITTEN = ("model.safetensors.index.json", MANIFEST, "ddp_metrics.jsonl", "ddp_recovery.jsonl")
TARGETS = {  # target -> (share of the cases, files to damage)
    "checkpoint": (30, (*OF_A_MODEL, *WRITTEN, "model-*.safetensors", "model-*.safetensors")),
    "experts": (8, ("config.json", "model*.safetensors", "ddp_masks.safetensors")),
    "masks": (14, ("ddp_masks.safetensors",)),
    "dense": (14, (*OF_A_MODEL, "model.safetensors")),
    **dict.fromkeys(("blocks", "per-layer"), (5, ("config.json", "config.json", "model*.safetensors", WRITTEN[0]))),
    "state": (10, ("out.run/state.safetensors", "out.run/state.safetensors", "out.run/metrics.jsonl")),
    "tokens": (4, ("blocks.tokens",)),
    "results": (14, ("sharegpt.json", "eval/results.json")),
    "profile": (6, ("machine.json",)),
}
DROPPED = ("state", "tokens")  # targets whose damaged files must be ignored: any other result is a fault


def _not_drawn(_draw: Any, *, name: str, title: str, caption: str, height: float) -> Picture:
    return Picture(name=name, title=title, caption=f"{caption} {height:.3f}", svg="", png=b"")


class Fuzz:
    """Runs cases by their seeds."""

    def __init__(self, scratch: Path, *, draws: bool = False) -> None:
        if not draws:  # a page of pictures takes a second
            for module in (pictures, compare):
                vars(module)["render"] = _not_drawn
        for family in ("llama", "mixtral"):
            register_pruned({"model_type": f"ddp_{family}"})
        self.sound = write_sound(scratch / "sound")
        self.readers = Readers(self.sound, scratch)
        self.expected: dict[tuple[str, str], Any] = {}
        for target in TARGETS:
            self.readers.lay_out(self.sound.folder_of(target))
            for name, read in self.readers.readers(target).items():
                self.expected[target, name] = read()

    def case(self, seed: int) -> Case:
        """Damage one file by a seed, and read it."""
        rng = random.Random(seed)
        target = rng.choices(list(TARGETS), [share for share, _ in TARGETS.values()])[0]
        case = Case(seed=seed, target=target)
        self.readers.lay_out(self.sound.folder_of(target))
        path = rng.choice(sorted(self.readers.folder.glob(rng.choice(TARGETS[target][1]))))
        before = path.read_bytes()
        case.what = f"{path.name}: {mutate(path, rng)}"
        changed = not path.is_file() or path.is_symlink() or path.read_bytes() != before
        damaged = False
        if (self.readers.folder / MANIFEST).exists() or path.name == MANIFEST:
            answer = self.read(case, "verify", lambda: self.readers.cli("verify", str(self.readers.folder)))
            damaged = answer is None
            if changed and not damaged and path.name != MANIFEST and path.parent.name != "eval":
                case.faults.append("verify: found nothing")
        readers = self.readers.readers(target)
        first, *rest = readers
        always = {first} | ({"transformers"} & readers.keys() if path.name.startswith(("config", "model")) else set())
        for name in sorted(always | set(rng.sample(rest, min(1, len(rest))))):
            read = readers[name]
            answer = self.read(case, name, read)
            if answer is None:
                continue
            if same(answer, self.expected[target, name]):
                case.seen["the same"] += 1
            elif target in DROPPED or (name in ("transformers", "recover") and not damaged):
                case.faults.append(f"{name}: another answer")
            elif target == "masks" and name == "apply" and is_sealed(path):
                case.faults.append(f"{name}: wrong weights, from masks that contradict their checksum")
            else:
                case.seen["another value"] += 1
        return case

    def read(self, case: Case, name: str, read: Callable[[], Any]) -> Any:
        """Return a reader's result, or None if it refused the file; faults are added to the case."""
        start = time.process_time()
        try:
            with _limited():
                answer = read()
        except DdpError:
            case.seen["refused"] += 1
            answer = None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            where = [frame for frame in traceback.extract_tb(error.__traceback__) if "/ddp_" in frame.filename]
            last = f"{Path(where[-1].filename).name}:{where[-1].lineno}" if where else "?"
            case.faults.append(f"{name}: {type(error).__name__} at {last}: {str(error)[:300]}")
            answer = None
        if (spent := time.process_time() - start) > SECONDS and not case.faults:
            case.faults.append(f"{name}: took {spent:.1f} s")
        return answer


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Raise Hang if the block exceeds its processor time or waits too long."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Hang(f"signal {number}")

    before = {number: signal.signal(number, stop) for number in (signal.SIGPROF, signal.SIGALRM)}
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.setitimer(signal.ITIMER_REAL, 15 * SECONDS)
    faulthandler.dump_traceback_later(60, exit=True)  # if signals are blocked
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def limit_memory() -> None:
    """Make large allocations fail."""
    now = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))


def run(first: int, last: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Run the cases of these seeds; return their outcomes and the faults."""
    home = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.TemporaryDirectory(prefix="ddp-vllm-fuzz-", dir=home) as scratch:
        fuzz = Fuzz(Path(scratch))
        limit_memory()
        seen, faults, targets = Counter[str](), list[dict[str, Any]](), Counter[str]()
        start = time.monotonic()
        for seed in range(first, last):
            case = fuzz.case(seed)
            seen += case.seen
            targets[case.target] += 1
            if case.faults:
                faults.append({"seed": seed, "target": case.target, "what": case.what, "faults": case.faults})
                say(json.dumps(faults[-1]))
            if (seed + 1) % 1000 == 0:
                say(f"{seed + 1 - first:,} cases in {time.monotonic() - start:.0f} s, {len(faults)} with faults")
    return {"cases": last - first, "targets": dict(targets), "answers": dict(seen), "faults": faults}


def _main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=20_000, help="End of the range of seeds, exclusive.")
    arguments: argparse.Namespace = parser.parse_args()
    warnings.simplefilter("ignore")
    found = run(arguments.first, arguments.last, lambda line: print(line, file=sys.stderr, flush=True))
    print(result_line(__doc__, vars(arguments), seed=arguments.first, **found))
    sys.exit(bool(found["faults"]))


if __name__ == "__main__":
    _main()
