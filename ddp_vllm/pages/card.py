"""The model card that a pruned checkpoint carries: what was removed, what it cost, how to serve it."""

import importlib.metadata
from collections.abc import Iterator
from contextlib import suppress

from huggingface_hub import ModelCard, ModelCardData

from ddp_vllm.checkpoint import Checkpoint
from ddp_vllm.pages.evidence import block_losses
from ddp_vllm.pages.page import Table, markdown_table
from ddp_vllm.pages.summary import (
    adaptation,
    has_experts,
    learning,
    perplexities,
    perplexity_table,
    prediction,
    routing_notes,
    size_table,
    texts_of,
)
from ddp_vllm.provenance import is_hub_name
from ddp_vllm.remote_code.tensors import dense_type
from ddp_vllm.remote_code.widths import dense_expert_size
from ddp_vllm.tensor_parallel import tensor_parallel_sizes

TEXT = """# {name}

{dense} with structure removed by ddp-vllm: {units} that
learned masks (Deterministic Differentiable Pruning, arXiv:2603.08065) found dispensable are gone, the scales of the
rest are folded into the weights. {learned}

{loading}

{sizes}

{quality}

Tensor-parallel sizes that split every layer without padding: {tp}.

## Widths

{layers}
"""

ORDINARY = """This is a stock checkpoint with fewer experts. What runs the dense model runs it, with no code of ours:

```bash
vllm serve {place}
```"""
PLUGIN = """With ddp-vllm installed beside vLLM, the fastest way:

```bash
{install}vllm serve {place}
```"""
STOCK = """In vLLM 0.30 or newer without ddp-vllm:

```bash
vllm serve {place} --trust-remote-code --model-impl transformers
```"""
TRANSFORMERS = """In plain transformers, with no ddp-vllm installed:
`AutoModelForCausalLM.from_pretrained("{place}", trust_remote_code=True)`. `AutoTokenizer` wants the same argument: it
reads the config first, whose class is in this folder, and without it asks on stdin."""
LLAMA_CPP = """In llama.cpp, from a file that ddp-vllm writes of the downloaded folder:

```bash
ddp-vllm export {place} --type Q8_0 -o {name}.gguf
llama-server -m {name}.gguf
```"""
IN_LLAMA_CPP = ("llama", "mistral", "qwen2")  # as in `gguf_file`, which wants the package gguf


def model_card(
    checkpoint: Checkpoint,
    name: str,
    place: str = "",
    *,
    license_name: str | None = None,
    base_model: str | None = None,
) -> str:
    """Return the Markdown of the card; `name` is the folder's, `place` where it is loaded from, here if not given."""
    data = ModelCardData(
        library_name="transformers", tags=["ddp", "pruning", "vllm"], pipeline_tag="text-generation",
        license=license_name, base_model=base_model,
    )  # fmt: skip
    provenance = checkpoint.provenance
    dense = str(provenance.get("applied_to") or provenance.get("recipe", {}).get("model") or "its dense model")
    if not base_model and is_hub_name(dense):
        data.base_model = dense
    experts = has_experts(checkpoint)
    text = TEXT.format(
        name=name,
        loading="\n\n".join(_loading(checkpoint)).format(name=name, place=place or f"./{name}", install=_install()),
        dense=dense.rstrip("/").rsplit("/", 1)[-1],
        sizes=markdown_table(size_table(checkpoint)),
        learned=learning(provenance),
        units=_removed(checkpoint),
        quality="\n\n".join(_quality(checkpoint, place or f"./{name}")),
        tp=", ".join(map(str, tensor_parallel_sizes(checkpoint.config, checkpoint.layers))),
        layers=markdown_table(_expert_widths(checkpoint) if experts else _layer_widths(checkpoint)),
    )
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}"))


def _install() -> str:
    """Return the line that installs ddp-vllm, if it says where its source is."""
    with suppress(importlib.metadata.PackageNotFoundError):
        for url in importlib.metadata.metadata("ddp-vllm").get_all("Project-URL") or ():
            if url.startswith("Source, "):
                return f'pip install "ddp-vllm[serve] @ git+{url.removeprefix("Source, ")}"\n'
    return ""


def _loading(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a paragraph for each runtime that loads the folder, with its command."""
    if checkpoint.stock:
        yield ORDINARY
        return
    yield PLUGIN
    if not has_experts(checkpoint):
        yield STOCK
    if is_quantised := "quantization_config" in checkpoint.config:
        yield TRANSFORMERS + " The package compressed-tensors is needed too."
    else:
        yield TRANSFORMERS
    if dense_type(checkpoint.config) in IN_LLAMA_CPP and not is_quantised:
        yield LLAMA_CPP


def _removed(checkpoint: Checkpoint) -> str:
    """Say what kind of unit went."""
    if checkpoint.stock:
        return "whole experts, equally many of each layer,"
    return "channels of the routed experts" if has_experts(checkpoint) else "attention heads and MLP channels"


def _layer_widths(checkpoint: Checkpoint) -> Table:
    rows = [
        [index, " ".join(map(str, layer.query_heads_per_kv_head)) or "–", layer.intermediate_size or "–"]
        for index, layer in enumerate(checkpoint.layers)
    ]
    return Table(headings=["layer", "query heads for each KV head", "MLP channels"], rows=rows, is_text=True)


def _expert_widths(checkpoint: Checkpoint) -> Table:
    rows = [
        [index, " ".join(map(str, layer.expert_intermediate_sizes))]
        for index, layer in enumerate(checkpoint.layers)
        if layer.expert_intermediate_sizes is not None
    ]
    if checkpoint.stock:
        stay = checkpoint.provenance["experts"]["stay"]
        rows = [[index, " ".join(map(str, stay[str(index)]))] for index, _ in rows]
        return Table(headings=["layer", "experts that stay, as the dense model numbers them"], rows=rows, is_text=True)
    heading = f"channels left of {dense_expert_size(checkpoint.config):,}, expert by expert"
    return Table(headings=["layer", heading], rows=rows, is_text=True)


def _quality(checkpoint: Checkpoint, place: str) -> Iterator[str]:
    """Yield a paragraph on perplexity, on how it is quantised, on the speed that was asked for, and for each note."""
    yield _perplexity(checkpoint, place)
    if text_hash := checkpoint.provenance.get("learned_from", {}).get("text"):
        yield f"The tokens that the masks were learned on, and those held out, have the SHA-256 `{text_hash}`."
    if quantised := checkpoint.config.get("quantization_config"):
        how = quantised.get("format", "an own format")
        yield f"Then weights were quantised ({how} of compressed-tensors). What that cost is not in these figures."
    if promised := prediction(checkpoint.provenance):
        yield f"A step of vLLM is predicted to run at {promised}."
    yield from (f"Note: {note}." for note in routing_notes(checkpoint))


def _perplexity(checkpoint: Checkpoint, place: str) -> str:
    provenance = checkpoint.provenance
    quality = provenance.get("perplexity")
    if not quality:
        return f"Quality was not measured when this checkpoint was written; `ddp-vllm eval {place} --text FILE` does."
    stated = (
        f"Perplexity of a token on held-out text of {texts_of(provenance)} ({quality['tokens']:,} tokens): "
        f"{perplexities(quality)}."
    )
    stated = " ".join([stated, *adaptation(quality)])
    try:
        losses = block_losses(quality)
    except ValueError:  # of another's making
        return stated
    how = (
        f"All models read the same {len(losses['dense'])} blocks, on which nothing was "
        "learned, when this folder was written. Errors are standard errors over the blocks, those of a ratio over the "
        "blocks' differences."
    )
    return f"{stated} {how}\n\n{markdown_table(perplexity_table(losses, quality))}"
