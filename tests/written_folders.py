"""Folders as `prune`, `eval` and `bench` leave them, written by hand: tiny, and with the results a test asks for."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
from commands import write_lines
from safetensors.numpy import save_file

from ddp_vllm.dimensions import widths_of
from ddp_vllm.families import pruned_config
from ddp_vllm.model_facts import describe_model
from ddp_vllm.results import FORMAT, verdicts

MACHINE = {"hardware": {"gpus": [], "cores": 2, "cpu": "a CPU"}, "versions": {"torch": "2.13"}}
Layer = Mapping[str, Any]
"""An entry of `ddp_layers`."""


def _write_weights(folder: Path, config: Mapping[str, Any], layers: Sequence[Layer]) -> None:
    """Write config and zero weights of a model of these widths, of Llama's or Qwen3-MoE's tensors."""
    folder.mkdir(parents=True)
    known_by = {"_name_or_path": str(folder)}  # models of the same sizes are different models
    (folder / "config.json").write_text(json.dumps({**config, **known_by, "tie_word_embeddings": True}))
    tensors = {"model.embed_tokens": (16, config["hidden_size"]), "model.norm": (config["hidden_size"],)}
    for index, layer in enumerate(layers):
        tensors |= {f"model.layers.{index}.{name}": shape for name, shape in _shapes(config, layer)}
    arrays = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in tensors.items()}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})


def _shapes(config: Mapping[str, Any], layer: Layer) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    if heads := layer["query_heads_per_kv_head"]:
        yield "input_layernorm", (hidden,)
        for name, units in (("q", sum(heads)), ("k", len(heads)), ("v", len(heads))):
            yield f"self_attn.{name}_proj", (units * head_dim, hidden)
        yield "self_attn.o_proj", (hidden, sum(heads) * head_dim)
        if config["model_type"] == "qwen3_moe":
            yield from ((f"self_attn.{name}_norm", (head_dim,)) for name in "qk")
    mlps = {"mlp": layer["intermediate_size"]}
    if experts := layer.get("expert_intermediate_sizes"):
        yield "mlp.gate", (len(experts), hidden)
        mlps |= {f"mlp.experts.{expert}": width for expert, width in enumerate(experts)}
    if any(mlps.values()):
        yield "post_attention_layernorm", (hidden,)
    for name, width in mlps.items():
        if width:
            yield from ((f"{name}.{part}_proj", (width, hidden)) for part in ("gate", "up"))
            yield f"{name}.down_proj", (hidden, width)


def write_model(folder: Path, *, widths: list[tuple[int, int]], origin: str | None) -> Path:
    """Write a tiny model, pruned to (KV heads, MLP channels) a layer; dense if there is no origin."""
    config: dict[str, Any] = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 4, "head_dim": 4}
    config |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16, "dtype": "bfloat16"}
    config |= {"vocab_size": 16}
    layers = [{"query_heads_per_kv_head": [2] * kv, "intermediate_size": mlp} for kv, mlp in widths]
    if origin is None:
        _write_weights(folder, config, layers)
        return folder
    _write_weights(folder, config | {"model_type": "ddp_llama", "ddp_layers": layers}, layers)
    write_masks(folder, {}, {"recipe": {"model": origin, "sparsity": 0.5}})
    return folder


def write_mixture(folder: Path, sizes: Sequence[Sequence[int] | None]) -> Path:
    """Write a Qwen3-MoE whose 8 experts have these widths of 24 in each layer; None: a layer without experts."""
    config = {"model_type": "qwen3_moe", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"head_dim": 8, "intermediate_size": 40, "moe_intermediate_size": 24, "num_hidden_layers": len(sizes)}
    config |= {"num_experts": 8, "num_experts_per_tok": 2}
    config |= {"mlp_only_layers": [layer for layer, row in enumerate(sizes) if row is None]}
    dense = widths_of(config)
    layers = [
        replace(layer, expert_intermediate_sizes=row and tuple(row))
        for layer, row in zip(dense.dense_layers, sizes, strict=True)
    ]
    pruned = pruned_config(config, replace(dense, layers=tuple(layers)))
    rows = [layer.to_json() for layer in layers]
    for row, stated in zip(rows, sizes, strict=True):
        row["intermediate_size"] = 40 if stated is None else 0  # of the dense MLP, which is not pruned
    _write_weights(folder, pruned, rows)
    return folder


def write_masks(folder: Path, gates: Mapping[str, Any], provenance: Mapping[str, Any]) -> None:
    """Write a masks file with the gates of each module type."""
    masks = {f"{kind}.gates": np.asarray(values, np.float32) for kind, values in gates.items()}
    masks = masks or {"attn.saliency": np.zeros(1, np.float32)}
    save_file(masks, folder / "ddp_masks.safetensors", {"ddp": json.dumps(provenance)})


def write_trained(folder: Path) -> Path:
    """Write a checkpoint as `prune` leaves it, with the evidence of a short run.

    3 layers, of 8 query heads in 4 KV heads and of 96 channels; 14 heads and 173 channels stay, layer 2 has no
    attention.
    """
    generator = np.random.default_rng(0)
    heads, channels = np.zeros((3, 8)), np.zeros((3, 96))
    heads[0], heads[1, 1:7] = generator.uniform(0.8, 1.3, 8), generator.uniform(0.5, 1.1, 6)
    for layer, width in enumerate((93, 57, 23)):
        channels[layer, generator.permutation(96)[:width]] = generator.uniform(0.3, 1.6, width)
    layers = [
        {
            "query_heads_per_kv_head": [count for count in (heads[layer] > 0).reshape(4, 2).sum(1).tolist() if count],
            "intermediate_size": int((channels[layer] > 0).sum()),
        }
        for layer in range(3)
    ]
    config = {"model_type": "ddp_llama", "hidden_size": 16, "num_attention_heads": 8, "num_key_value_heads": 4}
    config |= {"head_dim": 8, "intermediate_size": 96, "num_hidden_layers": 3, "ddp_layers": layers}
    _write_weights(folder, config, layers)
    losses = {name: generator.normal(mean, 0.3, 16).tolist() for name, mean in (("dense", 6.5), ("pruned", 6.6))}
    quality = {name: float(np.exp(np.mean(values))) for name, values in losses.items()}
    provenance = {
        "ddp_vllm": "0.1.0",
        "head_unit": "query-head",
        "recipe": {"model": "owner/tiny", "sparsity": 0.4, "context_length": 2048, "data": "a.jsonl", "alm": {"mu": 1}},
        "search_steps": 6,
        "targets": {"attn": 0.5, "mlp": 0.4},
        "texts": ["/mine/a.jsonl"],
        "perplexity": {**quality, "tokens": 256, "block_losses": losses},
    }
    write_masks(folder, {"attn": heads, "mlp": channels}, provenance)
    names = ("loss", "ce", "kl", "attn_sparsity", "mlp_sparsity", "mu", "attn_lambda1", "mlp_lambda1")
    write_lines(folder / "ddp_metrics.jsonl", [
        {"step": step, **{name: float(generator.uniform(0.1, 1)) for name in names}, "tokens": 32.0}
        for step in range(1, 11)
    ])  # fmt: skip
    return folder


def write_evaluation(folder: Path, accuracy: float, *, limit: int | None = None, name: str = "results") -> Path:
    """Write results as `eval` does: two accuracies with the answers to 100 rows, and a perplexity."""
    rows = [float(row < 100 * accuracy) for row in range(100)]
    scores = {
        "piqa": {"acc_norm,none": accuracy, "acc_norm_stderr,none": 0.01},
        "boolq": {"acc,none": accuracy, "acc_stderr,none": 0.01},
        "wikitext": {"word_perplexity,none": 30.0, "word_perplexity_stderr,none": "N/A"},
    }
    stated = {"model": describe_model(str(folder)).to_json(), "data": "hub", "answers": {"piqa": rows, "boolq": rows}}
    stated |= {"settings": {"limit": limit, "max_length": 2048, "backend": "hf"}, **MACHINE}
    samples = {"piqa": {"original": 9, "effective": 9}}
    path = folder / "eval" / f"{name}.json"
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps({"results": scores, "n-samples": samples, "date": 1.0, "ddp_vllm": stated}))
    return path


def write_bench(path: Path, dense: Path, pruned: Path, speeds: list[tuple[float, float]]) -> Path:
    """Write results as `bench sharegpt` does offline, from (dense, pruned) requests/s."""
    engine = {"weights_gib": 0.25, "kv_cache_tokens": 46592.0}
    runs = [
        {"round": turn, "label": label, "load": "offline", "metrics": {"requests_per_second": value}, "engine": engine}
        for turn, pair in enumerate(speeds)
        for label, value in zip(("dense", pruned.name), pair, strict=True)
    ]
    models = [
        {"label": label, **describe_model(str(folder)).to_json()}
        for label, folder in (("dense", dense), (pruned.name, pruned))
    ]
    results: dict[str, Any] = {"format": FORMAT, "complete": True, "reason": None, "started": "2026", **MACHINE}
    results |= {"settings": {"mode": "offline", "pairs": len(speeds), "seed": 0}, "models": models, "runs": runs}
    results["sample"] = {"conversations": 4, "prompt_tokens": 100, "output_tokens": 50}
    path.write_text(json.dumps(results | {"verdicts": verdicts(results)}))
    return path


class PageReader(HTMLParser):
    """What a browser would load of a page, and what it would show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.figures, self.links, self.loaded, self.open = list[str](), list[str](), list[str](), list[str]()
        self.text = ""
        self.feed(text)
        assert not self.open and "<script" not in text and "@import" not in text

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "figure":
            self.figures.append(values["id"])
        sources = [values[name] for name in ("src", "href", "xlink:href") if name in values]
        if tag == "a":
            self.links += sources
        else:
            self.loaded += [source for source in sources if not source.startswith("#")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
