"""Does a damaged file make ddp-vllm end with a traceback, hang, or continue with wrong weights?

The script prunes, recovers and measures tiny models. Each seed then changes one file: bytes, a value in its JSON, the
header of its tensors, or the file itself. The commands and functions that read it run in this process, with two seconds
of a core. Each must fail with one line, or go on with the weights that are on disk; a damaged state of a run
must be ignored. Another plausible value (`rope_theta`, a seed, a result) is accepted.

    python tests/nightly/fuzz.py --first 0 --last 20000
"""

import contextlib
import json
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # tests that import this keep their own
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

import torch
from accelerate import Accelerator
from click.testing import CliRunner
from safetensors.torch import load_file
from transformers import LlamaConfig

import ddp_vllm
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import open_pruned, open_source
from ddp_prune.recipe import Recipe
from ddp_prune.run_folder import RunFolder
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.cli import main
from ddp_vllm.errors import DdpError
from ddp_vllm.pages import compare, pictures
from ddp_vllm.pages.page import Picture
from random_models import SENTENCES, write_models
from scripts import result_line, script_parser

RECIPE = Recipe(model="m", sparsity=0.4, steps=9)
SECONDS = 2.0  # processor time limit per reader
CONFIG = LlamaConfig(
    vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=8,
    num_key_value_heads=4, head_dim=4, tie_word_embeddings=True, eos_token_id=0, bos_token_id=None,
    initializer_range=0.2, max_position_embeddings=256,
)  # fmt: skip
OF_A_MODEL = ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "model*.safetensors")
TARGETS = {  # target -> files to damage
    "pruned": (*OF_A_MODEL, "model.safetensors.index.json", "ddp_*"),
    "dense": OF_A_MODEL,
    "run": ("out.run/run.json", "out.run/metrics-*.jsonl", "out.run/state-0-4/*"),
}
NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1, 7, 2**31, 2**63, 10**30, 0.5, 1e308, float("inf"), float("nan"), "", "x", "-1", "../x",
    "/etc/passwd", "\x1b]0;a", "[red]", "<b>", "a" * 100_000, "\ud800", [], {}, [None], {"": 0}, [1] * 50,
    {"a": {"b": {}}}, "{{ 9 ** 9 }}",
)  # fmt: skip


class HangError(BaseException):
    """A reader took too long."""


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    data, at = bytearray(content), rng.randrange(max(1, len(content)))
    length = rng.choice((1, 2, 8, 64, len(data) // 4 + 1))
    way = rng.choice(("bit", "bit", "cut", "drop", "repeat", "noise", "empty", "more"))
    if way == "bit" and data:
        data[at] ^= 1 << rng.randrange(8)
    elif way in ("cut", "drop", "empty"):
        del data[{"empty": 0}.get(way, at) : at + length if way == "drop" else None]
    elif way in ("repeat", "more"):
        data[at:at] = data[at : at + length] if way == "repeat" else rng.randbytes(length)
    else:
        data[at : at + length] = rng.randbytes(length)
    return bytes(data)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value inside."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inside in parts:
        yield (*path, key)
        yield from places(inside, (*path, key))


def damaged_json(value: Any, rng: random.Random) -> str:
    paths = list(places(value))
    if not paths:
        return json.dumps(rng.choice(NASTY))
    *outer, key = rng.choice(paths)
    parent = value
    for name in outer:
        parent = parent[name]
    way = rng.choice(("nasty", "nasty", "near", "drop", "wrap", "nest"))
    if way == "drop":
        del parent[key]
    elif way == "near" and type(parent[key]) in (int, float):
        parent[key] = rng.choice((parent[key] + 1, -parent[key], parent[key] * 2, parent[key] / 2))
    elif way == "wrap":
        parent[key] = [parent[key]]
    elif way == "nest":
        for _ in range(rng.choice((90, 900))):
            parent[key] = [parent[key]]
    else:
        parent[key] = rng.choice(NASTY)
    return json.dumps(value)


def damaged_tensors(content: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with a damaged header or metadata; without its checksum, as after editing by hand."""
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    if "ddp" in header.get("__metadata__", {}) and rng.random() < 0.6:
        provenance = json.loads(header["__metadata__"]["ddp"])
        provenance.pop("checksums", None)
        header["__metadata__"]["ddp"] = damaged_json(provenance, rng)
        text = json.dumps(header).encode()
    else:
        text = damaged_json(header, rng).encode("utf-8", "surrogatepass")
    stated = len(text) if rng.random() < 0.97 else rng.choice((0, len(text) + 1, 2**40, 2**63))
    return struct.pack("<Q", stated) + text + data


def damage(path: Path, rng: random.Random) -> str:
    """Damage a file, and return how."""
    content, chance = path.read_bytes(), rng.random()
    if chance < 0.03:
        path.unlink()
        kind = rng.choice(("missing", "folder", "pipe", "endless"))
        if kind == "folder":
            path.mkdir()
        elif kind == "pipe":
            os.mkfifo(path)
        elif kind == "endless":
            path.symlink_to("/dev/zero")
        return kind
    if chance < 0.7 and path.suffix == ".safetensors":
        path.write_bytes(damaged_tensors(content, rng))
        return "tensors"
    if chance < 0.7 and path.suffix in (".json", ".jsonl"):
        lines = content.decode().splitlines() if path.suffix == ".jsonl" else [content.decode()]
        number = rng.randrange(len(lines))
        lines[number] = damaged_json(json.loads(lines[number]), rng)
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
        return "JSON"
    path.write_bytes(damaged_bytes(content, rng))
    return "bytes"


def command(*words: object) -> None:
    """Run a command. Raises: DdpError with its line; AssertionError for any other kind of failure."""
    result = CliRunner().invoke(main, [*map(str, words)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    if result.exit_code:
        lines = result.stderr.splitlines()
        assert len(lines) == 1 and lines[0].isprintable() and len(lines[0]) < 3000, result.stderr[:3000]
        raise DdpError(lines[0])


class Fuzz:
    """Intact folders, and cases by their seeds."""

    def __init__(self, scratch: Path) -> None:
        draw_nothing()
        self.intact, self.folder, self.out = scratch / "intact", scratch / "case" / "model", scratch / "out"
        self.intact.mkdir(parents=True)
        write_dense(self.intact)
        small: dict[str, Any] = {"data": str(self.intact / "text.jsonl"), "seq_len": 16, "batch_size": 2}
        small["proof"] = False
        masked = self.intact / "masked"
        ddp_vllm.prune(self.intact / "dense", output=masked, sparsity=0.4, steps=6, train="weights", **small)
        ddp_vllm.recover(masked, output=self.intact / "pruned", tokens=64, **small)
        run = RunFolder(self.intact / "run" / "out", Accelerator(cpu=True))
        with run.open([RECIPE], overwrite=False):
            run.begin({}, {}, shared_by=1)
            run.save(4, {"mlp.z": torch.rand(2, 48)}, {"loss": [1.0, 0.5]})
            run.log({"step": 4, "loss": 0.5})

    def readers(self, target: str) -> dict[str, Callable[[], Any]]:
        """Return what reads a target's files, by name."""
        folder, dense, page = self.folder, self.intact / "dense", f"{self.out}.html"
        if target == "pruned":
            return {
                "inspect": lambda: command("inspect", folder),
                "report": lambda: command("report", folder, "-o", self.out),
                "compare": lambda: command("compare", folder, "--dense", dense, "-o", page, "--overwrite"),
                "export": lambda: command("export", folder, "-o", f"{self.out}.gguf", "--overwrite"),
                "apply": lambda: command("apply", dense, "--masks", folder / "ddp_masks.safetensors", "-o", self.out),
                "recover": lambda: self.load(open_pruned(read_checkpoint(folder), open_source(str(dense)))),
            }
        if target == "dense":
            dry = ("--sparsity", "0.4", "--seq-len", "16", "--dry-run", "-o", self.out)
            return {
                "prune": lambda: command("prune", folder, *dry),
                "load": lambda: self.load(open_source(str(folder))),
            }
        return {"resume": self.resume}

    def load(self, source: Any) -> None:
        """Load a model, and compare each weight with its file."""
        stored: dict[str, torch.Tensor] = {}
        for path in self.folder.glob("model*.safetensors"):
            stored |= load_file(path)
        for name, value in load_model(source, "auto").named_parameters():
            on_disk = stored[name].to(value.dtype)
            assert torch.equal(on_disk.view(torch.uint8), value.detach().view(torch.uint8)), f"wrong weights: {name}"

    def resume(self) -> None:
        saved, expected = (self.run_in(folder).resume(lambda _: None) for folder in (self.folder, self.intact / "run"))
        if saved and expected:
            assert torch.equal(saved.tensors["mlp.z"], expected.tensors["mlp.z"]), "another state"

    def run_in(self, folder: Path) -> RunFolder:
        run = RunFolder(folder / "out", Accelerator(cpu=True))
        with run.open([RECIPE], overwrite=False):
            return run

    def case(self, seed: int) -> tuple[str, list[str], int]:
        """Damage one file at random and let every reader read it.

        Return a description of the damage, the faults, and the number of refusals.
        """
        rng = random.Random(seed)
        target = rng.choice(list(TARGETS))
        shutil.rmtree(self.folder.parent, ignore_errors=True)
        shutil.rmtree(self.out, ignore_errors=True)
        shutil.copytree(self.intact / target, self.folder)
        path = rng.choice(sorted(self.folder.glob(rng.choice(TARGETS[target]))))
        how = damage(path, rng)
        readers, faults, refused = self.readers(target), list[str](), 0
        for name, read in readers.items():
            try:
                with limited():
                    read()
            except DdpError:
                refused += 1
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/ddp_" in frame.filename]
                where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
                faults.append(f"{name}: {type(error).__name__} at {where}: {str(error)[:300]}")
        return f"{target}, {path.name}: {how}", faults, refused


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Raise HangError if the block exceeds its processor time, or waits long."""

    def stop(number: int, _frame: Any) -> None:
        raise HangError(f"signal {number}")

    timers = {signal.ITIMER_PROF: (signal.SIGPROF, SECONDS), signal.ITIMER_REAL: (signal.SIGALRM, 15 * SECONDS)}
    before = {number: signal.signal(number, stop) for number, _ in timers.values()}
    for timer, (_, seconds) in timers.items():
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for timer in timers:
            signal.setitimer(timer, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def draw_nothing() -> None:
    """A page of pictures takes a second."""

    def render(_draw: Any, *, name: str, title: str, caption: str, **_: Any) -> Picture:
        return Picture(name=name, title=title, caption=caption, svg="")

    for module in (pictures, compare):
        vars(module)["render"] = render


def write_dense(folder: Path) -> None:
    """Write a text and a random model."""
    rows = [{"text": f"{sentence} {sentence}"} for sentence in SENTENCES]
    (folder / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_models({folder / "dense": CONFIG})


def run(first: int, last: int) -> dict[str, Any]:
    """Run the cases of these seeds; print and return the faults."""
    faults, refusals, targets = list[dict[str, Any]](), 0, Counter[str]()
    with tempfile.TemporaryDirectory(prefix="ddp-vllm-fuzz-") as scratch:
        fuzz, start = Fuzz(Path(scratch)), time.monotonic()
        for seed in range(first, last):
            what, wrong, refused = fuzz.case(seed)
            refusals += refused
            targets[what.partition(",")[0]] += 1
            if wrong:
                faults.append({"seed": seed, "what": what, "faults": wrong})
                print(json.dumps(faults[-1]), file=sys.stderr, flush=True)
            if (seed + 1) % 1000 == 0:
                print(f"{seed + 1 - first:,} cases in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)
    return {"cases": last - first, "targets": dict(targets), "refused": refusals, "faults": faults}


if __name__ == "__main__":
    parser = script_parser(__doc__)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--last", type=int, default=20_000, help="End of the range of seeds, exclusive.")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    results = run(arguments.first, arguments.last)
    print(result_line(__doc__, vars(arguments), seed=arguments.first, **results))
    sys.exit(bool(results["faults"]))
