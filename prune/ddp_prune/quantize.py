"""Quantizes a model with llm-compressor, after reporting which widths vLLM's kernels do not
support.

Weights are rounded to nearest, and activations are quantized per token at run time, so no
calibration text is needed.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any

from transformers import AutoModelForCausalLM

from ddp_prune.export import copy_masks
from ddp_prune.models.evaluation import reference_of
from ddp_prune.models.source import open_source
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint, read_json
from ddp_vllm.errors import CheckpointError, DdpError, Printer, SettingError
from ddp_vllm.families import config_of_copy, register_pruned
from ddp_vllm.masks import MASKS_FILE, METRICS_FILE, RECOVERY_FILE, Provenance
from ddp_vllm.model_facts import is_pruned
from ddp_vllm.model_files import has_tokenizer, stored_tensors, write_model
from ddp_vllm.output import atomic_folder
from ddp_vllm.pages.card import write_card, write_trimmed_pages
from ddp_vllm.proof import Reference, prove
from ddp_vllm.provenance import local_provenance, write_provenance
from ddp_vllm.remote_code.tensors import LAYERS, dense_type
from ddp_vllm.remote_code.widths import states_widths

UNQUANTIZED = "lm_head"  # the output head keeps its dtype, like the embedding it may be tied to


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How vLLM runs one of llm-compressor's preset schemes."""

    block: int
    """vLLM's faster kernels require the inputs and outputs of a layer to be multiples of this."""
    is_strict: bool = False
    """vLLM has no kernel for other widths."""
    tolerance: float = 0.25
    """Largest distance of logits (`proof.distance`) that rounding explains. On English text 8-bit
    weights of SmolLM2-135M are 0.12 away, and 4-bit ones 0.47: larger models are closer."""
    groups: tuple[int, ...] = ()
    """Possible numbers of weights per scale; the largest that divides all inputs is used, else one
    scale per output."""


SCHEMES = {  # by llm-compressor's names
    "W8A8": Scheme(block=16),
    "FP8_DYNAMIC": Scheme(block=16),
    "W4A16": Scheme(block=32, is_strict=True, tolerance=0.7, groups=(128, 64, 32)),
}


def quantize(folder: Path, scheme: str, output: Path, *, overwrite: bool, proof: bool, print_line: Printer) -> None:
    """Write the model in `folder`, pruned or dense, with quantized weights; all other files are
    copied.

    scheme: of SCHEMES. proof: compare the written folder with the unquantized model.
    print_line: prints a line on the layers that a kernel runs more slowly, if there are any.
    Raises: CheckpointError if the model is quantized already; SettingError for routed experts, and for
        widths that no kernel supports; OutputError as `atomic_folder`; SettingError without
        llm-compressor; DdpError if llm-compressor fails.
    """
    checkpoint = _open(folder)
    if note := kernel_note(checkpoint, scheme):
        print_line(note)
    if find_spec("llmcompressor") is None:
        raise SettingError(
            "llm-compressor is not installed; install it in a separate environment, because it replaces packages that "
            'vLLM requires: python -m venv quantize && quantize/bin/pip install ".[prune,quantize]" in a clone'
        )
    with atomic_folder(output, overwrite=overwrite) as new, tempfile.TemporaryDirectory(dir=new) as work:
        reference = _compress(checkpoint, scheme, Path(work), proof=proof)
        _write(checkpoint, Path(work), new, output, reference)


def _open(folder: Path) -> Checkpoint:
    """Read and check a model. Raises: CheckpointError, SettingError; ModelError for a dense model
    of no family."""
    checkpoint = read_checkpoint(folder, dense=True)
    if checkpoint.is_stock:  # transformers keeps its experts in one tensor, no module
        raise SettingError(
            f"{folder} has routed experts, which quantize would skip: it quantizes linear layers only. "
            f"It is a stock {dense_type(checkpoint.config)} checkpoint, so let vLLM quantize it when it loads: "
            f"vllm serve {quote(str(folder))} --quantization fp8_per_tensor"
        )
    if states_widths(checkpoint.config):
        raise SettingError(
            f"{folder} has MLPs or experts of different widths in a stock class, which vLLM quantizes when it loads "
            f"them: vllm serve {quote(str(folder))} --quantization fp8_per_channel"
        )
    if checkpoint.config.get("quantization_config"):
        raise CheckpointError(f"{folder} is quantized already; quantize the folder that it was made from")
    return checkpoint


def kernel_note(checkpoint: Checkpoint, scheme: str) -> str:
    """Return a line on the layers that vLLM's faster kernels for a scheme do not support; "" if
    there are none.

    In vLLM 0.32 `cutlass_scaled_mm` passes such layers to Triton, and the FP8 kernel pads their
    inputs at every call.
    Raises: SettingError if no kernel supports them; it names the layers and the remedy.
    """
    block = SCHEMES[scheme].block
    odd = [sizes for sizes in linear_sizes(checkpoint) if sizes[2] % block or sizes[3] % block]
    if not odd:
        return ""
    numbers = sorted({layer for layer, *_ in odd})
    layers = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    layers = f"layer{'s' * (len(numbers) > 1)} {layers}"
    remedy = "--align does not change the size of heads, so leave the model unquantized"
    if all(name.startswith("mlp.") for _, name, *_ in odd):
        remedy = f"prune the dense model again with --align {block}"
    if SCHEMES[scheme].is_strict:
        layer, name, outputs, inputs = odd[0]
        raise SettingError(
            f"vLLM has no {scheme} kernel for {layers}: {name} of layer {layer} is {outputs} × {inputs}, and both must "
            f"be multiples of {block}; {remedy}"
        )
    return (
        f"{layers} have widths that are not multiples of {block}, as vLLM's faster {scheme} kernels on GPUs require, "
        f"so they run more slowly there; {remedy}"
    )


def linear_sizes(checkpoint: Checkpoint) -> Iterator[tuple[int, str, int, int]]:
    """Yield layer, module, outputs and inputs of every projection."""
    for layer in range(len(checkpoint.layers)):
        for projection in checkpoint.widths.table.projections:
            shape = checkpoint.shapes.get(f"{LAYERS}.{layer}.{projection.name}.weight")
            if shape is not None:
                yield layer, projection.name, shape[0], shape[1]


def _compress(checkpoint: Checkpoint, scheme: str, work: Path, *, proof: bool) -> Reference | None:
    """Let llm-compressor write weights and a config into `work`; return what the result must repeat
    of the unquantized model, with `proof`. Raises: ModuleNotFoundError, DdpError."""
    os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    formats: dict[str, Any] = {"scheme": scheme}
    inputs = [inputs for *_, inputs in linear_sizes(checkpoint)]
    if group_size := next((size for size in SCHEMES[scheme].groups if not any(width % size for width in inputs)), None):
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group_size)
        formats = {"config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}}
    model, reference = _load(checkpoint), None
    if proof:
        tokenizer = load_tokenizer(str(checkpoint.folder)) if has_tokenizer(checkpoint.folder) else None
        reference = reference_of(model, tokenizer, tolerance=SCHEMES[scheme].tolerance)
    try:
        oneshot(model=model, recipe=QuantizationModifier(targets=["Linear"], ignore=[UNQUANTIZED], **formats))
        model.save_pretrained(work, save_compressed=True)
    except Exception as error:  # llm-compressor's exceptions differ between versions
        raise DdpError(f"llm-compressor failed ({type(error).__name__}: {error})") from error
    return reference


def _load(checkpoint: Checkpoint) -> Any:
    """Load the model with the installed classes, in the dtype it is stored in."""
    if is_pruned(checkpoint.folder):
        register_pruned(checkpoint.config)
    else:
        open_source(str(checkpoint.folder))
    return AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype="auto", trust_remote_code=False).eval()


def _write(checkpoint: Checkpoint, work: Path, folder: Path, output: Path, reference: Reference | None) -> None:
    """Write the weights in `work` into `folder`, which will become `output`, and copy all other
    files."""
    source = checkpoint.folder
    pruned = is_pruned(source)
    config = config_of_copy(checkpoint.config, checkpoint.widths) if pruned else read_json(source / "config.json")
    quantized = {"quantization_config": read_json(work / "config.json")["quantization_config"]}
    write_model(folder, source, config | quantized, stored_tensors(work))
    provenance = local_provenance(source / MASKS_FILE) | prove(folder, reference)
    if pruned and (source / MASKS_FILE).exists():
        copy_masks(source, folder, provenance)
    else:
        write_provenance(folder / MASKS_FILE, provenance)
    for name in (METRICS_FILE, RECOVERY_FILE):
        if (source / name).exists():
            shutil.copyfile(source / name, folder / name)
    if pruned:
        write_card(folder, output)
    elif trimmed := Provenance.of(provenance).trimmed:
        write_trimmed_pages(folder, output.name, trimmed, is_quantized=True)
