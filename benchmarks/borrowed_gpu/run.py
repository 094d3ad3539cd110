#!/usr/bin/env python3
"""Runs the kit on a machine with a GPU: steps with time limits, each with a log, and results after
every step.

    python benchmarks/borrowed_gpu/run.py 1|2|3            # a borrowed machine without a network; pack first
    python benchmarks/borrowed_gpu/run.py gpu [--only correct,kernel] [--model DIR] [--data FILE]      # `make gpu`

Standard library only. A step that fails or runs out of time does not stop the others, and a step
that ended well is not run again. $OUT, by default `gpu-results`, gets one JSON file and one log.
`LEASE_DRY=1` tries every step on a CPU in tiny sizes. `LEASE_SECONDS` overrides the
seconds of a call.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO, KERNELS = HERE.parents[1], HERE.parent / "kernels"
DRY = bool(os.environ.get("LEASE_DRY"))
CALL_SECONDS = {"1": 120, "2": 420, "3": 220, "gpu": 10**6}
STOPPING = 3.0  # seconds to end a step that ran out of time
# of the runs: steps whose tokens travel, sequences of a step, their tokens, and held-out sequences
STEPS, BATCH, LENGTH, HELDOUT = (8, 30, 60, 120, 250, 400, 700, 1000), 16, 2048, 16
TEXTS = "sharegpt,openstax"
RATE = 1.6e-4  # what trials of four rates chose on an H100, in 45 seconds
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PRODUCT = [sys.executable, "-m", "ddp_vllm"]
TESTS, SERVING, TRAINING = "tests", "tests/gpu/test_serving.py", "tests/gpu/test_training_kernels.py"
TINY_RUN = ["--seq-len", 64, "--batch-size", 2, "--steps", 4] if DRY else []
PROFILE = REPO / "benchmarks/profiles/avx512-bfloat16.json"  # whose speed the masks promise


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command with its limit. `{out}` in a word is the file of its results."""

    name: str
    words: Sequence[object]
    limit: float = 10**6
    """Seconds."""
    share: float = 1.0
    """Of the call's seconds that are left."""
    folder: Path | None = None
    """The model that it prunes; the masks come home."""


def script(name: str, *words: object) -> list[object]:
    return [sys.executable, HERE / name, *words]


def kernel_speed(*words: object) -> list[object]:
    tiny = ["--shape", "qwen3-30b-a3b", "--scale", 0.05, "--experts", 8, "--device", "cpu", "--rounds", 2]
    tiny += ["--tokens", 1, "--sparsity", 40]
    return [sys.executable, KERNELS / "kernel_speed.py", "-o", "{out}", *(tiny if DRY else words)]


def pytest(*words: object) -> list[object]:
    """Run tests marked `gpu`, with what they print in the log."""
    plain = ["--no-header", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    return [sys.executable, "-m", "pytest", "-q", "-rA", "-m", "gpu", *plain, *words]


def prune(home: Path, name: str, steps: int, train: str, share: float = 1.0) -> Step:
    """Prune SmolLM2 to 1.25 times the speed of two CPU cores."""
    texts = ",".join(map(str, (home / "train").glob("*"))) if DRY else TEXTS
    sizes = TINY_RUN or ["--steps", steps, "--batch-size", BATCH, "--seq-len", LENGTH]
    speed = ["--sparsity", 0.35] if DRY else ["--speedup", 1.25, "--context-length", 512, "--profile", PROFILE]
    command = [*PRODUCT, "prune", home / "smollm2", *speed, *([] if DRY else ["--other-machine"]), *sizes]
    command += ["--train", train, *(["--learning-rate", RATE] if train == "weights" else [])]
    command += ["--data", texts, "--overwrite", "-o", home / name]
    return Step(name=name, words=command, share=share, folder=home / name)


def steps_within(home: Path, seconds: float) -> int:
    """Return the most steps whose tokens travelled and that end in time, by the steps of the
    rehearsal."""
    times = sorted(row["seconds"] for row in metrics_of(home / "rehearsal")) or [1.0]
    usual = times[len(times) // 2]
    return max(steps for steps in STEPS if steps == STEPS[0] or steps * usual <= seconds)


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of each step of a run, finished or interrupted; [] if it took none."""
    files = [folder / "ddp_metrics.jsonl", *folder.with_name(f"{folder.name}.run").glob("metrics*.jsonl")]
    lines = next((path.read_text().splitlines() for path in files if path.exists()), [])
    return [json.loads(line) for line in lines]


def first_call(home: Path) -> list[Step]:
    """Is the machine what it is said to be, and does a whole run end well?"""
    return [
        Step(name="probe", words=script("machine.py", "{out}"), limit=40),
        Step(name="random", words=script("machine.py", "random", home / "smollm2"), limit=40),
        prune(home, "rehearsal", STEPS[0], "weights"),
    ]


def second_call(home: Path) -> list[Step]:
    """What do the default and its 33 million tokens give, or as many as there is time for?"""
    quality = script("quality.py", "{out}", home / "joint", home / "masks", home)
    return [
        Step(name="weights", words=script("machine.py", "weights", home / "smollm2"), limit=90),
        prune(home, "joint", steps_within(home, 150), "weights", share=0.55),
        prune(home, "masks", steps_within(home, 60), "masks", share=0.5),
        Step(name="quality", words=quality),
    ]


def third_call(home: Path) -> list[Step]:
    """How much faster are pruned models of billions in vLLM, and is the rest of what it does right?"""
    work, sizes = home / "work", (2, 2) if DRY else (0, 24)
    return [
        Step(
            name="configs", words=script("machine.py", work, "qwen3-8b", sizes[0], "qwen3-30b-a3b", sizes[1]), limit=30
        ),
        Step(name="qwen3-8b", words=script("decode.py", "{out}", work, "qwen3-8b", 0, 20, 40), limit=170),
        Step(name="qwen3-30b-a3b", words=script("decode.py", "{out}", work, "qwen3-30b-a3b", 0, 40), limit=130),
        Step(name="correct", words=pytest(SERVING)),
    ]


def all_of_a_gpu(model: str, data: str, out: Path) -> list[Step]:
    """Return the steps of `make gpu`, without limits."""
    pruned = out / "pruned"
    text = ["--data", data] if data else []
    talks = ["--dataset-path", data] if data else []  # else ShareGPT of the Hub
    few = [*TINY_RUN, "--train", "masks"] if DRY else []
    fewer = ["--num-prompts", 4, "--pairs", 2, "--", "--enforce-eager", "--dtype", "float32"] if DRY else []
    bench = [*PRODUCT, "bench", "sharegpt", "--overwrite", "-o", "{out}"]
    return [
        Step(name="probe", words=script("machine.py", "{out}")),
        Step(name="tests", words=pytest(TESTS, "--ignore=tests/gpu", *["--collect-only"] * DRY)),
        Step(name="correct", words=pytest(SERVING)),
        Step(name="training", words=pytest(TRAINING)),
        Step(name="kernel", words=kernel_speed("--shape", "all")),
        Step(name="step", words=script("step_cost.py", "{out}")),
        Step(
            name="prune", words=[*PRODUCT, "prune", model, "--sparsity", 0.5, *text, "--overwrite", "-o", pruned, *few]
        ),
        Step(name="sharegpt", words=[*bench, "--dense", model, "--pruned", pruned, *talks, *fewer]),
    ]


class Runner:
    """Runs the steps of a call one after the other and notes how each ended."""

    def __init__(self, call: str, home: Path, out: Path, seconds: float) -> None:
        self.call, self.home, self.out = call, home, out
        self.ends = time.monotonic() + seconds
        for folder in (out, home / "results", home / "logs", home / "work", home / "pieces"):
            folder.mkdir(parents=True, exist_ok=True)
        self.state_file = home / f"{call}.json"
        self.state: dict[str, Any] = {"call": call, "dry": DRY, "steps": {}}
        if self.state_file.exists():
            before = json.loads(self.state_file.read_text())
            self.state["steps"] = {name: step for name, step in before["steps"].items() if step["code"] == 0}
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=REPO, capture_output=True, text=True)
        self.commit = commit.stdout.strip()

    def environment(self, seconds: float) -> dict[str, str]:
        """Return the environment of a step that should end within `seconds`."""
        paths = [REPO, REPO / "prune", REPO / "plugins", REPO / "benchmarks", KERNELS, HERE]
        paths += [
            self.home / name for name in ("site", "product_site", "vllm", "vllm_site") if (self.home / name).exists()
        ]
        path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
        facts = {"LEASE_ENDS": str(time.time() + seconds), "PYTHONUNBUFFERED": "1", "PYTHONPATH": path}
        if self.call == "gpu":
            return os.environ | facts
        # keeps a borrowed machine's steps away from the network and in one folder
        folders = {"PIP_FIND_LINKS": "wheels", "DDP_VLLM_CACHE": "cache", "TRITON_CACHE_DIR": "triton"}
        folders |= {"VLLM_CACHE_ROOT": "vllm_cache"}
        return os.environ | facts | {name: str(self.home / folder) for name, folder in folders.items()} | {
            "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        }  # fmt: skip

    def run(self, steps: Sequence[Step]) -> None:
        """Run the steps that have not ended well yet."""
        for step in steps:
            if step.name in self.state["steps"]:
                continue
            left = self.ends - time.monotonic() - STOPPING
            limit = left if DRY else min(step.limit, left * step.share)  # a busy CPU is slow
            if limit < 5:
                self.note(step, "no time left", 0.0)
                continue
            began, code = time.monotonic(), self.wait(step, limit)
            self.note(step, code, time.monotonic() - began)

    def wait(self, step: Step, limit: float) -> int | str:
        """Run a step and return its exit code. One that is out of time is interrupted, so that it
        saves what it has, then killed."""
        out = self.home / "results" / f"{step.name}.json"
        words = [str(out if word == "{out}" else word) for word in step.words]
        with open(self.home / "logs" / f"{step.name}.log", "w") as log:
            process = subprocess.Popen(
                words, stdout=log, stderr=log, env=self.environment(limit - STOPPING), cwd=REPO, start_new_session=True
            )
        with suppress(subprocess.TimeoutExpired):
            return process.wait(limit)
        for number in (signal.SIGINT, signal.SIGKILL):
            with suppress(OSError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(STOPPING)
        return "out of time"

    def note(self, step: Step, code: int | str, seconds: float) -> None:
        """Save how a step ended, with its results: its file, else the last line of its log if that
        is JSON."""
        log, file = (
            self.home / folder / f"{step.name}.{end}" for folder, end in (("logs", "log"), ("results", "json"))
        )
        text = log.read_text(errors="replace") if log.exists() else ""
        noted = {"code": code, "seconds": round(seconds, 1), "commit": self.commit, "tail": text[-1200:]}
        for source in (file.read_text() if file.exists() else "", (text.strip().splitlines() or [""])[-1]):
            with suppress(ValueError):
                noted.setdefault("result", json.loads(source))
        if step.folder:
            if (masks := step.folder / "ddp_masks.safetensors").exists():
                shutil.copy(masks, self.out / f"{step.name}.masks.safetensors")
            if rows := metrics_of(step.folder):
                noted["result"] = rows[-1] | {"metrics": rows[:: len(rows) // 100 + 1]}
        self.state["steps"][step.name] = noted
        self.state_file.write_text(json.dumps(self.state, indent=1))
        print(f"== {step.name}: {'done' if code == 0 else code}, {seconds:.1f} s", flush=True)
        self.bring_home()

    def bring_home(self) -> None:
        """Write the results and the logs to the folder that is carried home."""
        (self.out / f"{self.call}.json").write_text(json.dumps(self.state, indent=1))
        logs = sorted((self.home / "logs").glob("*.log"))
        parts = [f"\n===== {log.name}\n{log.read_text(errors='replace')[-60_000:]}" for log in logs]
        (self.out / f"{self.call}.log").write_text("".join(parts))

    def unpack(self) -> None:
        """Extract every archive whose last piece travelled in this call."""
        carried = REPO / ".gpu" / self.call
        for piece in carried.glob("*.piece"):
            shutil.copy(piece, self.home / "pieces")
        plan = json.loads((carried / "plan.json").read_text()) if carried.exists() else {}
        for name, number in plan.items():
            pieces = [self.home / "pieces" / f"{name}.{i}.piece" for i in range(number)]
            joined = self.home / name
            joined.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
            with tarfile.open(joined) as archive:
                archive.extractall(self.home, filter="data")
        for tasks in (self.home / "tasks").glob("*.yaml"):
            tasks.write_text(tasks.read_text().replace("{home}", str(self.home)))


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
    if not DRY:
        runner.unpack()
    plans = {"1": first_call, "2": second_call, "3": third_call}
    plan = plans[args.call](home) if args.call in plans else all_of_a_gpu(args.model, args.data, out)
    steps = [step for step in plan if not args.only or step.name in args.only.split(",")]
    if not steps:
        parser.error(f"--only {args.only}: choose from {', '.join(step.name for step in plan)}")
    runner.run(steps)
    sys.exit(any(runner.state["steps"][step.name]["code"] != 0 for step in steps))


if __name__ == "__main__":
    main()
