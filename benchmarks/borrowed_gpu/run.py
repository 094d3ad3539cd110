#!/usr/bin/env python3
"""Runs the kit on a machine with a GPU: steps with time limits, each with a log, and results after
every step.

    python benchmarks/borrowed_gpu/run.py 1|2|3            # a borrowed machine without a network; pack first
    python benchmarks/borrowed_gpu/run.py gpu [--only correct,kernel] [--model DIR] [--data FILE]      # `make gpu`

Standard library only. A step that fails or runs out of time does not stop the others, and a step
that ended well is not run again. $OUT, by default `gpu-results`, gets one JSON file, one log and
one page. `LEASE_DRY=1` tries every step on a CPU in tiny sizes. `LEASE_SECONDS` overrides the
seconds of a call.
"""

import argparse
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from page import write_page

HERE = Path(__file__).resolve().parent
REPO, KERNELS = HERE.parents[1], HERE.parent / "kernels"
STEP_COST = HERE / "step_cost.py"
DRY = bool(os.environ.get("LEASE_DRY"))
CALL_SECONDS = {"1": 150, "2": 230, "3": 270, "gpu": 10**6}
STOPPING = 3.0  # seconds to end a step that ran out of time
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PLAIN = ("--no-header", "-p", "no:cacheprovider", "-o", "filterwarnings=default")
IMPORTS = "import torch, vllm; from vllm import LLM; import ddp_plugins.register as r; r.register_models()"


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command with its limit. `{out}` in a word is the file of its results."""

    name: str
    words: Sequence[object]
    limit: float = 10**6
    """Seconds."""
    share: float = 1.0
    """Of the call's seconds that are left."""
    is_early: bool = False
    """It starts with the call, imports, and waits for the file $LEASE_GO until its turn."""


def script(name: str, *words: object) -> list[object]:
    return [sys.executable, HERE / name, *words]


def kernel_speed(*words: object) -> list[object]:
    tiny = ["--shape", "qwen3-30b-a3b", "--scale", 0.05, "--experts", 8, "--device", "cpu", "--rounds", 2]
    tiny += ["--tokens", 1, "--sparsity", 40]
    return [sys.executable, KERNELS / "kernel_speed.py", "-o", "{out}", *(tiny if DRY else words)]


def pytest(*words: object) -> list[object]:
    """Run tests marked `gpu`, with what they print in the log."""
    return [sys.executable, "-m", "pytest", "-q", "-rA", "-m", "gpu", *PLAIN, *words]


def bench_steps(model: str, batch: int, work: Path) -> list[object]:
    """Compare decode steps and prefill of the dense and the pruned model, with dummy weights."""
    dense, pruned = (work / f"{model}-{removed}" for removed in (0, 40))
    sizes = ["--concurrency", batch, "--context-length", 512, "--rounds", 3]
    graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [batch]}
    engine = ["--compilation-config", json.dumps(graphs)]
    if DRY:
        sizes = ["--concurrency", 2, "--context-length", 48, "--rounds", 1, "--steps", 12]
        engine = ["--enforce-eager"]
    command = [sys.executable, "-m", "ddp_vllm", "bench", "steps", "--dense", dense, "--pruned", pruned]
    return [*command, *sizes, "--overwrite", "-o", "{out}", "--", "--load-format", "dummy", *engine]


def first_call() -> list[Step]:
    parallel = [] if DRY else ["-n", "8"]
    tests = pytest("--noconftest", *parallel, *["--collect-only"] * DRY, "tests/plugins/test_moe_kernel.py")
    return [
        Step(name="probe", words=script("machine.py", "{out}"), limit=40),
        Step(name="kernel-tests", words=tests, limit=60),
        Step(name="training", words=pytest("tests/gpu/test_training_kernels.py"), limit=60, share=0.6),
        Step(name="tiles", words=script("tiles.py", "{out}")),
    ]


def second_call(work: Path) -> list[Step]:
    kernel = kernel_speed(
        "--shape", "qwen3-30b-a3b", "--tokens", "1,32,128,512,4096", "--sparsity", "40,0", "--rounds", 5
    )
    serving = pytest("tests/gpu/test_serving.py")
    # half of the mixture's layers, since both engines share the GPU
    models = {"qwen3-30b-a3b": 2 if DRY else 24, "qwen3-8b": 0}
    return [
        Step(name="import", words=[sys.executable, "-c", IMPORTS], limit=60),
        Step(name="kernel", words=kernel, limit=60),
        Step(name="correct", words=serving, share=0.5, is_early=True),
        *(Step(name=f"{model}-configs", words=script("machine.py", model, n), limit=60) for model, n in models.items()),
        *(Step(name=model, words=bench_steps(model, 32, work), share=0.6) for model in models),
    ]


def third_call(home: Path) -> list[Step]:
    model, tokens = home / "smollm2-135m", home / "tokens.xz"
    train = [*script("train.py", model, tokens), "--out", "{out}"]
    return [
        Step(name="weights", words=script("weights.py", home / "smol.codes", model), limit=60),
        Step(name="table8", words=[sys.executable, STEP_COST, "{out}"], limit=75),
        Step(name="paper", words=[*train, home / "paper", "--recipe", REPO / "docs/paper.toml"], share=0.55),
        Step(name="joint", words=[*train, home / "joint", "--set", "train=weights"]),
    ]


def all_of_a_gpu(model: str, data: str, out: Path) -> list[Step]:
    """Return the steps of `make gpu`, without limits."""
    vllm = [sys.executable, "-m", "ddp_vllm"]
    pruned = out / "pruned"
    text = ["--data", data] if data else []
    talks = ["--dataset-path", data] if data else []  # else ShareGPT of the Hub
    few = ["--seq-len", 64, "--batch-size", 2, "--steps", 4, "--train", "masks"] if DRY else []
    fewer = ["--num-prompts", 4, "--pairs", 2, "--", "--enforce-eager", "--dtype", "float32"] if DRY else []
    bench = [*vllm, "bench", "sharegpt", "--overwrite", "-o", "{out}"]
    return [
        Step(name="probe", words=script("machine.py", "{out}")),
        Step(name="tests", words=pytest("tests", "--ignore=tests/gpu", *["--collect-only"] * DRY)),
        Step(name="correct", words=pytest("tests/gpu/test_serving.py")),
        Step(name="training", words=pytest("tests/gpu/test_training_kernels.py")),
        Step(name="kernel", words=kernel_speed("--shape", "all")),
        Step(name="step", words=[sys.executable, STEP_COST, "{out}"]),
        Step(name="prune", words=[*vllm, "prune", model, "--sparsity", 0.5, *text, "--overwrite", "-o", pruned, *few]),
        Step(name="sharegpt", words=[*bench, "--dense", model, "--pruned", pruned, *talks, *fewer]),
    ]


class Runner:
    """Runs the steps of a call one after the other and notes how each ended."""

    def __init__(self, call: str, home: Path, out: Path, seconds: float) -> None:
        self.call, self.home, self.out = call, home, out
        self.ends = time.monotonic() + seconds
        self.carried = REPO / ".gpu" / call
        for folder in (out, home / "results", home / "logs", home / "work"):
            folder.mkdir(parents=True, exist_ok=True)
        self.state_file = home / f"{call}.json"
        self.state: dict[str, Any] = {"call": call, "dry": DRY, "steps": {}}
        if self.state_file.exists():
            before = json.loads(self.state_file.read_text())
            self.state["steps"] = {name: step for name, step in before["steps"].items() if step["code"] == 0}
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True)
        self.commit = commit.stdout.strip()

    def environment(self, ends: float) -> dict[str, str]:
        """Return the environment of a step that should end at `ends`, in seconds of the wall
        clock."""
        packages = [REPO, REPO / "prune", REPO / "plugins", REPO / "benchmarks", KERNELS]
        packages += [self.home / name for name in ("site", "vllm", "vllm_site") if (self.home / name).exists()]
        before = [path for path in [os.environ.get("PYTHONPATH", "")] if path]
        facts = {"LEASE_WORK": str(self.home / "work"), "LEASE_ENDS": str(ends), "PYTHONUNBUFFERED": "1"}
        return os.environ | facts | {"PYTHONPATH": os.pathsep.join([*map(str, packages), *before])} | self.isolated()

    def isolated(self) -> dict[str, str]:
        """Return what keeps a borrowed machine's steps away from the network and in one folder."""
        if self.call == "gpu":
            return {}
        caches = {"DDP_VLLM_CACHE": "cache", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm_cache"}
        return {name: str(self.home / folder) for name, folder in caches.items()} | {
            "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "MPLBACKEND": "Agg",
            "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        }  # fmt: skip

    def left(self) -> float:
        return self.ends - time.monotonic() - STOPPING

    def result_file(self, step: Step) -> Path:
        return self.home / "results" / f"{step.name}.json"

    def start(self, step: Step, seconds: float) -> subprocess.Popen:
        words = [str(word).replace("{out}", str(self.result_file(step))) for word in step.words]
        go = {"LEASE_GO": str(self.home / f"go-{step.name}")} if step.is_early else {}
        with open(self.home / "logs" / f"{step.name}.log", "w") as log:
            environment = self.environment(time.time() + seconds - STOPPING) | go
            return subprocess.Popen(
                words, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=REPO, start_new_session=True
            )

    def run(self, steps: Sequence[Step]) -> None:
        """Run the steps that have not ended well yet."""
        open_steps = [step for step in steps if step.name not in self.state["steps"]]
        for step in open_steps:
            (self.home / f"go-{step.name}").unlink(missing_ok=True)
        early = {step.name: self.start(step, self.left()) for step in open_steps if step.is_early}
        try:
            for step in open_steps:
                # a busy CPU is slow
                limit = min(step.limit, self.left() * step.share) if not DRY else self.left()
                if limit < 5:
                    self.note(step, "no time left", 0.0)
                    continue
                began, process = time.monotonic(), early.pop(step.name, None) or self.start(step, limit)
                (self.home / f"go-{step.name}").touch()
                try:
                    code: int | str = process.wait(limit)
                except subprocess.TimeoutExpired:
                    stop(process)
                    code = "out of time"
                self.note(step, code, time.monotonic() - began)
        finally:
            for process in early.values():
                stop(process)

    def note(self, step: Step, code: int | str, seconds: float) -> None:
        """Save how a step ended, with its results: its file, else the last line of its log if that
        is JSON."""
        log, file = self.home / "logs" / f"{step.name}.log", self.result_file(step)
        text = log.read_text(errors="replace") if log.exists() else ""
        noted = {"code": code, "seconds": round(seconds, 1), "commit": self.commit, "tail": text[-1200:]}
        for source in (file.read_text() if file.exists() else "", (text.strip().splitlines() or [""])[-1]):
            try:
                noted.setdefault("result", json.loads(source))
            except ValueError:
                continue
        self.state["steps"][step.name] = noted
        self.state_file.write_text(json.dumps(self.state, indent=1))
        print(f"== {step.name}: {'done' if code == 0 else code}, {seconds:.1f} s", flush=True)
        self.bring_home()

    def bring_home(self) -> None:
        """Write the results, the logs and the page to the folder that is carried home."""
        (self.out / f"{self.call}.json").write_text(json.dumps(self.state, indent=1))
        logs = sorted((self.home / "logs").glob("*.log"))
        parts = [f"\n===== {log.name}\n{log.read_text(errors='replace')[-60_000:]}" for log in logs]
        (self.out / f"{self.call}.log").write_text("".join(parts))
        for masks in (self.home / "results").glob("*.safetensors"):
            shutil.copy(masks, self.out / masks.name)
        write_page(self.state, self.out / "README.md")

    def unpack(self) -> None:
        """Put the parts that travelled in this call where the steps expect them; lzma releases the
        lock."""
        jobs: list[tuple[Path, Path]] = []
        for part in self.carried.glob("*.so.xz"):
            library = "vllm/vllm/vllm_flash_attn" if "vllm_fa" in part.name else "vllm/vllm"
            jobs.append((part, self.home / library / part.name.removesuffix(".xz")))
        jobs += [(part, self.home / part.name.removesuffix(".tar.xz")) for part in self.carried.glob("*.tar.xz")]
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(unpack_part, *zip(*jobs, strict=True)) if jobs else [])
        (self.home / "pieces").mkdir(exist_ok=True)
        for piece in self.carried.glob("*.piece"):
            shutil.copy(piece, self.home / "pieces" / piece.name)
        plan = self.carried / "plan.json"
        for name, expected in (json.loads(plan.read_text())["pieces"] if plan.exists() else {}).items():
            pieces = [self.home / "pieces" / f"{name}.{number}.piece" for number in range(expected)]
            if all(piece.exists() for piece in pieces):  # the last call has them all
                (self.home / name).write_bytes(b"".join(piece.read_bytes() for piece in pieces))


def unpack_part(part: Path, target: Path) -> None:
    if part.name.endswith(".tar.xz"):
        with tarfile.open(part) as archive:
            return archive.extractall(target, filter="data")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(lzma.decompress(part.read_bytes()))
    return None


def stop(process: subprocess.Popen) -> None:
    """End a step's processes, first by an interrupt, at which it saves what it has."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(STOPPING)
        except (OSError, subprocess.TimeoutExpired):
            continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", choices=CALL_SECONDS)
    parser.add_argument("--only", help="some steps, with commas between")
    parser.add_argument("--model", default=MODEL, help="of the steps that prune and serve: a folder needs no network")
    parser.add_argument("--data", default="", help="file of conversations to prune and serve with; else from the hub")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    args = parser.parse_args()
    out = args.out.resolve()
    home = out if args.call == "gpu" else Path(os.environ.get("LEASE_HOME", Path.home() / "lease"))
    runner = Runner(args.call, home, out, float(os.environ.get("LEASE_SECONDS", CALL_SECONDS[args.call])))
    unpacking = threading.Thread(target=runner.unpack)
    unpacking.start()
    if args.call != "1":  # whose steps do not need what it carries for the next call
        unpacking.join()
    plans = {"1": first_call, "2": lambda: second_call(home / "work"), "3": lambda: third_call(home)}
    plan = plans.get(args.call, lambda: all_of_a_gpu(args.model, args.data, out))
    steps = [step for step in plan() if not args.only or step.name in args.only.split(",")]
    if not steps:
        parser.error(f"--only {args.only}: choose from {', '.join(step.name for step in plan())}")
    runner.run(steps)
    unpacking.join()
    runner.bring_home()
    sys.exit(any(runner.state["steps"][step.name]["code"] != 0 for step in steps))


if __name__ == "__main__":
    main()
