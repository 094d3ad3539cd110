"""The model card of a pruned or trimmed checkpoint: what was removed, the cost in quality, and how to
serve it."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from shlex import quote

from huggingface_hub import ModelCardData

from ddp_vllm import __version__
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint
from ddp_vllm.gguf.graphs import missing_parts
from ddp_vllm.masks import Trimmed
from ddp_vllm.names import bare_name, is_hub_name
from ddp_vllm.output import write_text
from ddp_vllm.pages.page import REPORT_FILE, Page, to_html, to_markdown
from ddp_vllm.pages.summary import QUANTIZED, dense_name, lead, sections, trimming
from ddp_vllm.remote_code.widths import states_widths

TEXT = """# {name}

{made}

## Load it

{loading}

## What was removed, and what it cost

{statements}"""

TRIMMED = """# {name}

{source} with fewer tokens, a stock model that ddp-vllm made. Every program that runs {source} also runs it, without
ddp-vllm:

```bash
vllm serve ./{quoted}
```

## What was trimmed, and what it cost

{statements}"""

LEARNED = """{dense}, pruned by ddp-vllm: {units} whose learned masks closed (Deterministic Differentiable Pruning,
arXiv:2603.08065) were removed, and the scales of the kept units are folded into the weights."""
CONVERTED = "Another tool pruned {dense}. ddp-vllm converted its folder {source} and copied the tensors."
ORDINARY = """This is a stock checkpoint with fewer experts. Every program that runs the dense model also runs it,
without ddp-vllm:

```bash
vllm serve {quoted}
```"""
PLUGIN = """In vLLM with ddp-vllm installed, which is the fastest way:

```bash
vllm serve {quoted}
```"""
STOCK = """In vLLM without ddp-vllm (0.32 was tested):

```bash
vllm serve {quoted} --trust-remote-code --model-impl transformers
```"""
TRANSFORMERS = """In plain transformers, without ddp-vllm:
`AutoModelForCausalLM.from_pretrained("{place}", trust_remote_code=True)`. Pass the same argument to `AutoTokenizer`: it
loads the config first, and the config class is part of this folder."""
LLAMA_CPP = """In llama.cpp, from a file that ddp-vllm makes from the downloaded folder:

```bash
ddp-vllm export {quoted} --outtype q8_0 -o {file}
llama-server -m {file}
```"""


_UNITS_OF = {  # block -> its units, and the width of a layer that counts them
    "attn": ("attention heads", "query_heads_per_kv_head"),
    "mlp": ("MLP channels", "intermediate_size"),
    "experts": ("channels of the routed experts", "expert_intermediate_sizes"),
}


def model_card(
    checkpoint: Checkpoint,
    name: str,
    place: str = "",
    *,
    license_name: str | None = None,
    base_model: str | None = None,
) -> str:
    """Return the card in Markdown.

    name: the name of the folder. place: the folder or hub name to load it from, by default the
    folder here.
    """
    dense = dense_name(checkpoint)
    base = base_model or (dense if is_hub_name(dense) else None)
    data = ModelCardData(
        library_name="transformers", tags=["ddp", "pruning", "vllm"], pipeline_tag="text-generation",
        license=license_name, base_model=base,
    )  # fmt: skip
    place = place or f"./{name}"
    pairs = [*zip(checkpoint.widths.layers, checkpoint.widths.dense_layers, strict=True)]
    fewer = (
        _UNITS_OF[block][0]
        for block in checkpoint.widths.blocks
        if any(getattr(kept, _UNITS_OF[block][1]) != getattr(dense, _UNITS_OF[block][1]) for kept, dense in pairs)
    )
    units = " and ".join(fewer) or "units"
    if checkpoint.is_stock:
        units = "whole experts, equally many of each layer,"
    converted = checkpoint.history.converted
    made = (CONVERTED if converted else LEARNED).format(
        dense=bare_name(dense), units=units, source=converted and converted.source
    )
    page = Page(title=name, lead=[*lead(checkpoint)], sections=[*sections(checkpoint)], footer=[])
    text = TEXT.format(
        name=name,
        made=made,
        loading="\n\n".join(_loading(checkpoint)).format(place=place, quoted=quote(place), file=quote(f"{name}.gguf")),
        statements=to_markdown(page),
    )
    return f"---\n{data.to_yaml()}\n---\n\n{text}"


def write_trimmed_pages(folder: Path, name: str, trimmed: Trimmed, *, is_quantized: bool = False) -> None:
    """Write the model card and the report of a model with a smaller vocabulary into `folder`, which will
    have this name."""
    statements = [*trimming(trimmed), *[QUANTIZED] * is_quantized]
    title = f"{trimmed.name}, trimmed: {name}"
    page = Page(title=title, lead=statements, sections=[], footer=[f"ddp-vllm {__version__} measured it."])
    data = ModelCardData(library_name="transformers", tags=["ddp", "vllm"], pipeline_tag="text-generation")
    text = TRIMMED.format(name=name, source=trimmed.name, quoted=quote(name), statements=to_markdown(page))
    (folder / "README.md").write_text(f"---\n{data.to_yaml()}\n---\n\n{text}", encoding="utf-8")
    write_text(to_html(page), folder / REPORT_FILE)


def write_card(folder: Path, output: Path) -> Checkpoint:
    """Check a folder that will become `output`, write its model card, and return it as the
    checkpoint at `output`."""
    checkpoint = read_checkpoint(folder)
    (folder / "README.md").write_text(model_card(checkpoint, output.name), encoding="utf-8")
    return replace(checkpoint, folder=output)


def _loading(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield a paragraph for each runtime that loads the folder, with its command."""
    if checkpoint.is_stock:
        yield ORDINARY
        return
    yield PLUGIN
    is_described = states_widths(checkpoint.config)
    if not is_described:
        yield STOCK
    is_quantized = "quantization_config" in checkpoint.config and not is_described
    yield TRANSFORMERS + " It also requires the package compressed-tensors." * is_quantized
    if not missing_parts(checkpoint.config) and not is_quantized:
        yield LLAMA_CPP
