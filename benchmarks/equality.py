"""Are the results of pruning the same to the bit before and after a change of the code?

    python benchmarks/equality.py -o before.json          # at the commit before
    python benchmarks/equality.py --against before.json   # at the commit after

Prunes tiny random models (a Llama and a Mixtral) in short runs: every budget, both controllers,
every train mode, every scope and head unit, several sizes, expert channels, whole experts,
recovery, and a run that is killed and resumed. Of each result it hashes gates, z and saliency, the
metrics of every step and the weights. Sums in floating point differ between machines and thread
counts, so both calls must run on the same machine. The last line on stdout is JSON; the exit code
is 1 where a hash differs.
"""

import argparse
import hashlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import LlamaConfig, MixtralConfig
from transformers.utils import logging

import ddp_vllm
from ddp_prune.run_folder import METRICS
from ddp_vllm.dimensions import widths_of
from ddp_vllm.latency import FORMAT, dimensions_in, shapes_of
from ddp_vllm.machine import hardware
from random_models import SENTENCES, write_models
from scripts import script_parser

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
    "eos_token_id": 0, "bos_token_id": None, "initializer_range": 0.2, "max_position_embeddings": 256,
}  # fmt: skip
SMALL: dict[str, Any] = {"steps": 12, "batch_size": 4, "seq_len": 32, "heldout_blocks": 4}
RATE = 2e-4  # of trained weights
ALM = {"learning_rate": 0.1}  # the paper's rate moves little in eight steps
DENSE_CASES: dict[str, dict[str, Any]] = {
    "units": {"sparsity": 0.4, "train": "masks"},
    "joint training": {"sparsity": 0.4, "train": "weights"},
    "low-rank additions": {"sparsity": 0.4, "train": "lora"},
    "no distillation": {"sparsity": 0.4, "train": "weights", "distillation": 0.0},
    "paper's search": {"sparsity": 0.4, "controller": "alm", "alm": ALM, "train": "masks"},
    "paper's search by layer": {"sparsity": 0.4, "controller": "alm", "alm": ALM, "scope": "layer", "polish": 0.0},
    "params": {"sparsity": 0.4, "budget": "params", "train": "masks"},
    "params, query heads": {"sparsity": 0.4, "budget": "params", "head_unit": "query-head", "train": "masks"},
    "flops by layer": {"sparsity": 0.4, "budget": "flops", "scope": "layer", "train": "weights"},
    "kv-bytes": {"sparsity": 0.4, "budget": "kv-bytes", "train": "masks"},
    "target": {"target": "100K", "budget": "params", "train": "masks"},
    "by layer": {"sparsity": 0.4, "scope": "layer", "train": "masks"},
    "query heads": {"sparsity": 0.4, "head_unit": "query-head", "train": "masks"},
    "aligned for two devices": {"sparsity": 0.4, "align": 8, "tp": 2, "train": "weights"},
}
EXPERT_CASES: dict[str, dict[str, Any]] = {
    "expert channels": {"sparsity": 0.4, "train": "masks"},
    "expert channels, joint training": {"sparsity": 0.4, "train": "weights"},
    "by expert": {"sparsity": 0.4, "scope": "expert", "train": "masks"},
    "expert channels, paper's search": {"sparsity": 0.4, "controller": "alm", "alm": ALM, "train": "masks"},
    "expert channels by flops": {"sparsity": 0.4, "budget": "flops", "train": "masks"},
    "whole experts": {"sparsity": 0.4, "whole_experts": True, "train": "weights"},
}


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--against", type=Path, help="Result of an earlier call to compare with.")
    parser.add_argument("-o", "--output", type=Path, help="File to write the hashes to.")
    parser.add_argument("--only", default="", help="Run the cases whose name contains this.")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DDP_VLLM_CACHE"] = f"{folder}/cache"
        hashes = run_cases(Path(folder), arguments)
    if arguments.output:
        arguments.output.write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")
    before = json.loads(arguments.against.read_text(encoding="utf-8")) if arguments.against else {}
    differing = {
        case: [part for part in found if before[case].get(part) != found[part]]
        for case, found in hashes.items()
        if case in before and before[case] != found
    }
    missing = sorted(before.keys() - hashes.keys()) if not arguments.only else []
    print(json.dumps({"cases": len(hashes), "compared": len(hashes.keys() & before.keys()), "differing": differing,
                      "missing": missing}))  # fmt: skip
    sys.exit(bool(differing or missing))


def run_cases(folder: Path, arguments: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return the hashes of every case; `folder` is scratch space."""
    dense, experts, data = write_inputs(folder)
    profile = write_profile(dense, folder / "profile.json")
    cases: dict[str, Callable[[Path], list[Path]]] = {}
    for model, settings_of in ((dense, DENSE_CASES), (experts, EXPERT_CASES)):
        for case, settings in settings_of.items():
            cases[case] = partial(prune, model, data, **settings)
    cases["speedup"] = partial(prune, dense, data, speedup=1.15, profile=str(profile), train="weights")
    cases["latency"] = partial(prune, dense, data, sparsity=0.3, budget="latency", profile=str(profile), align=8)
    cases["several sizes"] = partial(prune_sizes, dense, data, sparsity=[0.2, 0.4], train="weights")
    cases["recovered"] = partial(recover, dense, data, train="weights")
    cases["recovered by low rank"] = partial(recover, dense, data, train="lora")
    cases["killed and resumed"] = partial(resumed, dense, data, sparsity=0.4, train="weights")
    hashes = {}
    for number, (case, run) in enumerate(cases.items()):
        if arguments.only in case:
            print(case, file=sys.stderr, flush=True)
            folders = run(folder / f"case-{number}")
            hashes[case] = {f"{each.name} {part}": value for each in folders for part, value in hashes_of(each).items()}
    return hashes


def write_inputs(folder: Path) -> tuple[Path, Path, Path]:
    """Write a tiny Llama, a tiny Mixtral and a text; return their paths."""
    dense, experts, data = folder / "dense", folder / "experts", folder / "text.jsonl"
    llama = LlamaConfig(**SIZES, intermediate_size=96, num_hidden_layers=3, tie_word_embeddings=True)
    mixtral = MixtralConfig(
        **SIZES, intermediate_size=32, num_hidden_layers=2, num_local_experts=5, num_experts_per_tok=2
    )
    write_models({dense: llama, experts: mixtral})
    data.write_text("".join(json.dumps({"text": f"{one} {one}"}) + "\n" for one in SENTENCES), encoding="utf-8")
    return dense, experts, data


def write_profile(dense: Path, path: Path) -> Path:
    """Write a latency profile whose times follow the widths exactly; return its path."""
    config = json.loads((dense / "config.json").read_text(encoding="utf-8"))

    def cells(layers: Any) -> list[dict[str, float]]:
        seconds = 3e-3
        for layer in layers:
            seconds += (1e-4 + 2e-4 * layer.num_kv_heads) * bool(layer.num_kv_heads)
            seconds += (3e-4 + 1e-5 * layer.intermediate_size) * bool(layer.intermediate_size)
        return [
            {"batch": batch, "context": context, "decode": seconds * batch, "prefill": 50 * seconds * batch}
            for batch in (1, 8)
            for context in (256, 2048)
        ]

    shapes = shapes_of(config, 8)
    times = [
        {"round": turn, "shape": name, "cells": cells(layers), "dense": cells(widths_of(config).dense_layers)}
        for turn in (0, 1)
        for name, layers in shapes.items()
    ]
    content = {"format": FORMAT, "complete": True, "multiple": 8, "model": dimensions_in(config), "config": config}
    content |= {"shapes": list(shapes), "times": times, "hardware": hardware(), "versions": {}}
    content["settings"] = {"engine_arguments": []}
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def prune(model: Path, data: Path, output: Path, **settings: Any) -> list[Path]:
    rate = None if settings.get("train") == "masks" else RATE
    ddp_vllm.prune(str(model), output=output, data=str(data), proof=False, learning_rate=rate, **SMALL | settings)
    return [output]


def prune_sizes(model: Path, data: Path, output: Path, **settings: Any) -> list[Path]:
    settings = SMALL | {"steps": 30, "learning_rate": RATE} | settings
    ddp_vllm.prune_sizes(str(model), output=output, data=str(data), proof=False, **settings)
    return sorted(path.parent for path in output.glob("*/config.json"))


def recover(model: Path, data: Path, output: Path, **settings: Any) -> list[Path]:
    (pruned,) = prune(model, data, output.with_name(f"{output.name}-pruned"), sparsity=0.4, train="masks")
    ddp_vllm.recover(pruned, output=output, tokens=10 * 4 * 32, proof=False, **settings)
    return [output]


def resumed(model: Path, data: Path, output: Path, **settings: Any) -> list[Path]:
    """Kill a run after some of its steps, and let the same call finish it."""
    child = os.fork()
    if not child:
        prune(model, data, output, **settings)
        os._exit(0)
    folder = output.with_name(f"{output.name}.run")

    def num_steps() -> int:
        return sum(path.read_bytes().count(b"\n") for path in folder.glob(METRICS))

    while num_steps() < 5 and not os.waitpid(child, os.WNOHANG)[0]:
        time.sleep(0.001)
    assert not output.exists(), "the run ended before it was killed"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return prune(model, data, output, **settings)


def hashes_of(folder: Path) -> dict[str, str]:
    """Return a hash of each tensor of a folder's masks and weights, and one of the metrics without
    their seconds."""
    hashes = {}
    for path in sorted(folder.glob("*.safetensors")):
        digest = hashlib.sha256()
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                value = file.get_tensor(name).contiguous()
                content = f"{name} {value.dtype} {list(value.shape)}".encode()
                content += value.flatten().view(torch.uint8).numpy().tobytes()
                if "masks" in path.name:
                    hashes[name] = hashlib.sha256(content).hexdigest()[:16]
                digest.update(content)
        if "masks" not in path.name:
            hashes[path.name] = digest.hexdigest()[:16]
    for path in sorted(folder.glob("*.jsonl")):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        kept = [{name: value for name, value in line.items() if name != "seconds"} for line in lines]
        hashes[path.name] = hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]
    return hashes


if __name__ == "__main__":
    main()
