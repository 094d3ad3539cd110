"""Writes small folders as every command writes them, for `fuzz.py` to damage and to compare with."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, MixtralConfig

import ddp_vllm
from ddp_models import writing
from ddp_prune.recipe import Recipe
from ddp_text.blocks import save_blocks
from ddp_text.tokens import Tokens
from ddp_training.run_state import RunState
from ddp_vllm.latency import FORMAT as PROFILE_FORMAT
from ddp_vllm.latency import dimensions_in, shapes_of
from ddp_vllm.machine import hardware, versions
from ddp_vllm.manifest import MANIFEST, manifest_of
from ddp_vllm.model_facts import describe_model
from ddp_vllm.results import FORMAT, verdicts
from random_models import SENTENCES, write_models

STEM = "model"
"""Name of the damaged and the intact folder; equal, because pages show it."""
SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "eos_token_id": 0, "bos_token_id": None, "initializer_range": 0.2, "max_position_embeddings": 256,
}  # fmt: skip
FINGERPRINT = {"text": "a", "weights": [["model.safetensors", 1, 2, "b"]], "config": ["c"], "tokenizer": [["d", "e"]]}


@dataclass(frozen=True, kw_only=True)
class Sound:
    """Paths of the intact folders."""

    folder: Path

    def folder_of(self, target: str) -> Path:
        """Return the folder of a target of the fuzz."""
        homes = {"checkpoint": "pruned", "masks": "pruned", "experts": "pruned-experts"}
        return self.folder / homes.get(target, target) / STEM

    @property
    def dense(self) -> Path:
        return self.folder_of("dense")

    @property
    def pruned(self) -> Path:
        return self.folder_of("checkpoint")

    def run_state(self, folder: Path) -> RunState:
        """Return the saved run of a folder."""
        recipe = Recipe(model="m", sparsity=0.4, steps=9)
        return RunState(folder / "out", recipe, fingerprint=FINGERPRINT)


def write_sound(folder: Path) -> Sound:
    """Prune, recover and measure tiny models."""
    sound = Sound(folder=folder)
    lines, watched = folder / "text.jsonl", folder / "watched.jsonl"
    folder.mkdir(parents=True)
    lines.write_text("".join(json.dumps({"text": f"{one} {one}"}) + "\n" for one in SENTENCES))
    watched.write_text("".join(json.dumps({"text": one.upper()}) + "\n" for one in SENTENCES))
    _write_dense(sound)
    small: dict[str, Any] = {"data": str(lines), "seq_len": 16, "batch_size": 2}
    shard, writing.MAX_SHARD_BYTES = writing.MAX_SHARD_BYTES, 40_000  # several files
    try:
        for kind in ("", "-experts"):
            masked = folder / f"masked{kind}" / STEM
            dense = sound.folder_of(f"dense{kind}")
            ddp_vllm.prune(str(dense), output=masked, sparsity=0.4, steps=6, train="weights", **small)
            if kind:
                shutil.copytree(masked, sound.folder_of("experts"))
            else:
                ddp_vllm.recover(masked, output=sound.pruned, tokens=64, watch=str(watched), **small)
    finally:
        writing.MAX_SHARD_BYTES = shard
    for one in (sound.pruned, sound.folder_of("experts")):
        shutil.rmtree(one / "report")
        (one / "report.html").unlink()
        (one / MANIFEST).write_text(manifest_of(one))
    _write_foreign(sound)
    _write_results(sound)
    _write_runs(sound)
    return sound


def _write_dense(sound: Sound) -> None:
    llama = LlamaConfig(**SIZES, intermediate_size=48, num_hidden_layers=2, tie_word_embeddings=True)
    mixtral = MixtralConfig(
        **SIZES, intermediate_size=16, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2
    )
    write_models({sound.folder_of("dense"): llama, sound.folder_of("dense-experts"): mixtral})


def _write_foreign(sound: Sound) -> None:
    """Write the pruned model as NVIDIA's tools would: their formats in the dense model's config, no code, no masks."""
    config = json.loads((sound.pruned / "config.json").read_text())
    layers = [(len(each["query_heads_per_kv_head"]), each["intermediate_size"]) for each in config["ddp_layers"]]
    blocks = [
        {"attention": {"no_op": not heads, "num_key_value_heads": heads, "num_query_heads": 2 * heads},
         "ffn": {"no_op": not width, "intermediate_size": width, "hidden_act": "silu", "sparsify": None}}
        for heads, width in layers
    ]  # fmt: skip
    own = {
        str(index): {"num_attention_heads": 2 * heads, "num_key_value_heads": heads, "intermediate_size": width}
        | {"skip": [*["attention"] * (not heads), *["mlp"] * (not width)]}
        for index, (heads, width) in enumerate(layers)
    }
    dense = json.loads((sound.dense / "config.json").read_text())
    for target, keys in (("blocks", {"block_configs": blocks}), ("per-layer", {"per_layer_config": own})):
        folder = sound.folder_of(target)
        folder.mkdir(parents=True)
        for path in (*sound.pruned.glob("tokenizer*"), *sound.pruned.glob("model*")):
            shutil.copy(path, folder)
        (folder / "config.json").write_text(json.dumps({**dense, **keys}))


def _write_results(sound: Sound) -> None:
    """Write results of `bench` and `eval` with made-up numbers."""
    folder = sound.folder_of("results")
    shutil.copytree(sound.pruned, folder)
    (folder / MANIFEST).unlink()
    facts = {"dense": describe_model(str(sound.dense)).to_json(), STEM: describe_model(str(folder)).to_json()}
    place = {"hardware": hardware(), "versions": versions()}
    runs = [
        {
            "round": turn,
            "label": label,
            "load": load,
            "metrics": {"requests_per_second": speed + turn / 10, "p50_tpot_ms": 30 / speed + turn},
            "engine": {"peak_memory_bytes": 2**30, "weights_gib": 0.25, "kv_cache_tokens": 46592.0},
        }
        for load in ("all at once", "2 requests/s")
        for turn in range(3)
        for label, speed in (("dense", 1.0), (STEM, 1.3))
    ]
    bench: dict[str, Any] = {"format": FORMAT, "complete": True, "reason": None, "started": "2026", **place}
    bench |= {"settings": {"mode": "serve", "pairs": 3, "seed": 0}, "runs": runs}
    bench |= {"models": [{"label": label, **each} for label, each in facts.items()]}
    bench["sample"] = {"conversations": 4, "prompt_tokens": 100, "output_tokens": 50}
    (folder / "sharegpt.json").write_text(json.dumps(bench | {"verdicts": verdicts(bench)}))
    for home, model, share in ((folder, STEM, 0.6), (sound.dense, "dense", 0.8)):
        rows = [float(row < 50 * share) for row in range(50)]
        evaluation = {
            "results": {
                "piqa": {"acc_norm,none": share, "acc_norm_stderr,none": 0.01},
                "wikitext": {"word_perplexity,none": 30.0, "word_perplexity_stderr,none": "N/A"},
            },
            "n-samples": {"piqa": {"original": 50, "effective": 50}},
            "date": 1.0,
            "ddp_vllm": place
            | {"model": facts[model], "data": {"piqa": "ab"}, "answers": {"piqa": rows}}
            | {"settings": {"limit": 50, "max_length": 2048, "backend": "hf"}},
        }
        (home / "eval").mkdir()
        (home / "eval" / "results.json").write_text(json.dumps(evaluation))


def _write_runs(sound: Sound) -> None:
    """Write an interrupted run, cached tokens and a profile."""
    run = sound.run_state(sound.folder_of("state"))
    tensors = {"attn.z": torch.rand(2, 2), "mlp.z": torch.rand(2, 48), "rng": torch.arange(99, dtype=torch.uint8)}
    run.save(4, tensors, {"loss": [1.0, 0.5], "pools": {"attn": {"kept": 3}}})
    for step in range(1, 5):
        run.log({"step": step, "loss": 1.0 / step})
    tokens = sound.folder_of("tokens")
    tokens.mkdir(parents=True)
    ids = np.arange(320, dtype=np.int32).reshape(20, 16)
    save_blocks(tokens / "blocks.tokens", Tokens(ids, np.ones(ids.shape, bool)))
    config = json.loads((sound.dense / "config.json").read_text())
    cells = [
        {"batch": batch, "context": context, "decode": 1e-3 * batch + 1e-6 * context, "prefill": 5e-3 * batch}
        for batch in (1, 8)
        for context in (256, 512)
    ]
    shapes = shapes_of(config, 1)
    times = [{"round": turn, "shape": name, "cells": cells, "beside": cells} for turn in (0, 1) for name in shapes]
    profile = {"format": PROFILE_FORMAT, "complete": True, "multiple": 1, "model": dimensions_in(config)}
    profile |= {"config": config, "shapes": list(shapes), "times": times}
    path = sound.folder_of("profile") / "machine.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(profile | {"hardware": hardware(), "versions": versions()}))
