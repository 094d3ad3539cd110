"""The model card that a pruned checkpoint carries: what was removed, what it cost, how to serve it."""

from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from ddp_prune.source import Source
from ddp_prune.summary import footprint, routing_notes, totals
from ddp_prune.tokens import sources_of
from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.remote_code.widths import dense_expert_size, tensor_parallel_sizes

TEXT = """# {name}

{dense} with structure removed by ddp-vllm: {units} that
learned masks (Deterministic Differentiable Pruning, arXiv:2603.08065) found dispensable are gone, the scales of the
rest are folded into the weights. Weights were frozen throughout.

```bash
pip install ".[serve]"  # in a clone of ddp-vllm
vllm serve ./{name} --trust-remote-code
```

In plain transformers, with no ddp-vllm installed:
`AutoModelForCausalLM.from_pretrained("./{name}", trust_remote_code=True)`. `AutoTokenizer` wants the same argument: it
reads the config first, whose class is in this folder, and without it asks on stdin.

| | dense | pruned | removed |
|---|---|---|---|
{rows}

{quality}

Tensor-parallel sizes that split every layer without padding: {tp}.

## Widths

{layers}
"""


def model_card(checkpoint: Checkpoint, source: Source, name: str) -> str:
    """Return the Markdown of the card; `name` is the folder's."""
    counts = totals(checkpoint)
    rows = [_row(*row) for row in (*counts.rows, *footprint(checkpoint))]
    data = ModelCardData(
        library_name="transformers", tags=["ddp", "pruning", "vllm"], pipeline_tag="text-generation", license=None
    )
    provenance = checkpoint.provenance
    dense = str(provenance.get("applied_to") or provenance.get("recipe", {}).get("model") or source.folder.name)
    if dense.count("/") == 1 and not dense.startswith((".", "/", "~")) and not Path(dense).exists():  # a hub name
        data.base_model = dense
    text = TEXT.format(
        name=name,
        dense=dense.rstrip("/").rsplit("/", 1)[-1],
        rows="\n".join(rows),
        units="channels of the routed experts" if counts.dense_experts else "attention heads and MLP channels",
        quality="\n\n".join([_quality(checkpoint), *(f"Note: {note}." for note in routing_notes(checkpoint))]),
        tp=", ".join(map(str, tensor_parallel_sizes(checkpoint.layers, checkpoint.config))),
        layers="\n".join(_expert_rows(checkpoint) if counts.dense_experts else _layer_rows(checkpoint)),
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"))


def _row(label: str, dense: int, kept: int) -> str:
    return f"| {label} | {dense:,} | {kept:,} | {1 - kept / dense:.1%} |"


def _layer_rows(checkpoint: Checkpoint) -> list[str]:
    return ["| layer | query heads for each KV head | MLP channels |", "|---|---|---|"] + [
        f"| {index} | {' '.join(map(str, layer.query_heads_per_kv_head)) or '–'} | {layer.intermediate_size or '–'} |"
        for index, layer in enumerate(checkpoint.layers)
    ]


def _expert_rows(checkpoint: Checkpoint) -> list[str]:
    heading = f"| layer | channels left of {dense_expert_size(checkpoint.config):,}, expert by expert |"
    return [heading, "|---|---|"] + [
        f"| {index} | {' '.join(map(str, layer.expert_intermediate_sizes))} |"
        for index, layer in enumerate(checkpoint.layers)
        if layer.expert_intermediate_sizes is not None
    ]


def _quality(checkpoint: Checkpoint) -> str:
    quality = checkpoint.provenance.get("perplexity")
    if not quality:
        return "Quality was not measured when this checkpoint was written."
    recipe = checkpoint.provenance.get("recipe", {})
    where = ""
    if "applied_to" in checkpoint.provenance:
        where = f" Measured on {recipe.get('model', 'another model')}, where the masks were learned."
    names = [name.rsplit("/", 1)[-1] for name in sources_of(recipe.get("data", "unknown origin"))]
    return (
        f"Perplexity on held-out text of {', '.join(dict.fromkeys(names))} "
        f"({quality['tokens']:,} tokens): dense {quality['dense']:.2f}, pruned {quality['pruned']:.2f}.{where}"
    )
