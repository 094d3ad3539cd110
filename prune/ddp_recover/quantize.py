"""Quantise a model by llm-compressor, after saying which widths a kernel of vLLM will not take.

Weights are rounded to the nearest, and activations token by token while the model runs, so no text is needed.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from ddp_prune.export import copy_companions, stored, write_config, write_weights
from ddp_prune.model import open_source
from ddp_vllm.checkpoint import Checkpoint, read_checkpoint, read_json
from ddp_vllm.errors import CheckpointError, DdpError, SettingError
from ddp_vllm.facts import is_pruned
from ddp_vllm.families import pruned_config, register_pruned
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.output import atomic_folder, check_output
from ddp_vllm.pages.card import model_card
from ddp_vllm.pages.evidence import METRICS_FILE
from ddp_vllm.remote_code.tensors import LAYERS, dense_type

UNTOUCHED = "lm_head"  # the output head stays as it is, like the embedding it may be tied to


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """What weights and activations are rounded to."""

    preset: str
    """llm-compressor's name."""
    block: int
    """Inputs and outputs of a layer have to be a multiple of this for vLLM's faster kernels, or for any."""
    is_strict: bool = False
    """No kernel takes anything else."""
    groups: tuple[int, ...] = ()
    """Weights that may share a scale, the largest number that divides all inputs; else it is one scale an output."""


SCHEMES = {
    "W8A8": Scheme(preset="W8A8", block=16),
    "FP8": Scheme(preset="FP8_DYNAMIC", block=16),
    "W4A16": Scheme(preset="W4A16", block=32, is_strict=True, groups=(128, 64, 32)),
}


def quantize(folder: Path, scheme: str, output: Path, *, overwrite: bool, say: Callable[[str], None]) -> None:
    """Write the model in `folder`, pruned or dense, with quantised weights; all else is copied.

    say: is told first which layers a kernel takes more slowly, a line each.
    Raises: CheckpointError if it is quantised already; SettingError for routed experts, and for widths that no
        kernel takes; OutputError as `atomic_folder`; ModuleNotFoundError without llm-compressor; DdpError if that
        fails.
    """
    check_output(output, overwrite=overwrite)
    checkpoint = _open(folder)
    group = choose_group(checkpoint, scheme)
    for note in slower_kernels(checkpoint, scheme):
        say(note)
    with atomic_folder(output, overwrite=overwrite) as new, tempfile.TemporaryDirectory(dir=new) as work:
        _compress(checkpoint, scheme, group, Path(work))
        _write(checkpoint, Path(work), new, output.name)


def _open(folder: Path) -> Checkpoint:
    """Read and check a model. Raises: CheckpointError, SettingError, and ModelError for a dense one of no family."""
    checkpoint = read_checkpoint(folder, dense=True)
    if checkpoint.config.get("quantization_config"):
        raise CheckpointError(f"{folder} is quantised already; quantise the folder it was made of")
    if checkpoint.widths.table.has_experts:
        if checkpoint.stock or not is_pruned(folder):  # transformers keeps its experts in one tensor, no module
            raise SettingError(
                f"{folder} has routed experts, which quantize would leave as they are: it rounds linear layers alone. "
                f"It is a stock {dense_type(checkpoint.config)} checkpoint, so let vLLM quantize it when it loads: "
                f"vllm serve {folder} --quantization fp8"
            )
        raise SettingError(
            f"{folder} has experts of different widths, which are served unquantized only; prune the dense model with "
            "--whole-experts, which leaves a stock checkpoint"
        )
    return checkpoint


def linear_sizes(checkpoint: Checkpoint) -> Iterator[tuple[int, str, int, int]]:
    """Yield layer, module, outputs and inputs of every projection."""
    for layer in range(len(checkpoint.layers)):
        for projection in checkpoint.widths.table.projections:
            shape = checkpoint.shapes.get(f"{LAYERS}.{layer}.{projection.name}.weight")
            if shape is not None:
                yield layer, projection.name, shape[0], shape[1]


def choose_group(checkpoint: Checkpoint, scheme: str) -> int | None:
    """Return how many weights share a scale, None for those of an output.

    Raises: SettingError if a projection has a width that no kernel takes, naming the layers and the cure.
    """
    chosen, sizes = SCHEMES[scheme], list(linear_sizes(checkpoint))
    if chosen.is_strict:
        odd = [each for each in sizes if each[2] % chosen.block or each[3] % chosen.block]
        if odd:
            layer, name, outputs, inputs = odd[0]
            raise SettingError(
                f"no kernel takes {scheme} weights of {_layers(each[0] for each in odd)}: {name} of layer {layer} is "
                f"{outputs} × {inputs}, and both must be multiples of {chosen.block}; {_cure(odd, chosen.block)}"
            )
    return next((group for group in chosen.groups if not any(inputs % group for *_, inputs in sizes)), None)


def slower_kernels(checkpoint: Checkpoint, scheme: str) -> Iterator[str]:
    """Yield a line on the layers whose widths vLLM's faster kernels do not take, if there are any.

    Read in vLLM 0.32: `cutlass_scaled_mm` hands them to Triton, and its FP8 kernel pads what it is given at every call.
    """
    block = SCHEMES[scheme].block
    if odd := [each for each in linear_sizes(checkpoint) if each[2] % block or each[3] % block]:
        yield (
            f"{_layers(each[0] for each in odd)} have widths that are no multiples of {block}, which vLLM's {scheme} "
            f"kernels on GPUs want, so they go a slower way there; {_cure(odd, block)}"
        )


def _cure(odd: Iterable[tuple[int, str, int, int]], block: int) -> str:
    if all(name.startswith("mlp.") for _, name, *_ in odd):
        return f"ddp-vllm apply or prune with --align {block} cures it, before this"
    return "no --align cures heads of this size; leave the model as it is"


def _layers(numbers: Iterable[int]) -> str:
    found = sorted(set(numbers))
    shown = ", ".join(map(str, found[:8])) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return f"layer {shown}" if len(found) == 1 else f"layers {shown}"


def _compress(checkpoint: Checkpoint, scheme: str, group: int | None, work: Path) -> None:
    """Let llm-compressor write weights and a config into `work`. Raises: ModuleNotFoundError, DdpError."""
    os.environ.setdefault("LLM_COMPRESSOR_LOG_DISABLED", "true")
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier

    what: dict[str, Any] = {"scheme": SCHEMES[scheme].preset}
    if group is not None:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=group)
        what = {"config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}}
    model = _load(checkpoint)
    try:
        oneshot(model=model, recipe=QuantizationModifier(targets=["Linear"], ignore=[UNTOUCHED], **what))
        model.save_pretrained(work, save_compressed=True)
    except Exception as error:  # of a library that we know at one version
        raise DdpError(f"llm-compressor failed ({type(error).__name__}: {error})") from error


def _load(checkpoint: Checkpoint) -> Any:
    """Load the model by the installed classes, in the format it is stored in."""
    if is_pruned(checkpoint.folder):
        register_pruned(checkpoint.config)
    else:
        open_source(str(checkpoint.folder))
    return AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype="auto", trust_remote_code=False).eval()


def _write(checkpoint: Checkpoint, work: Path, folder: Path, name: str) -> None:
    """Write into `folder`, to be called `name`, what llm-compressor made of the weights, and all else as it was."""
    source = checkpoint.folder
    state = {"quantization_config": read_json(work / "config.json")["quantization_config"]}
    copy_companions(source, folder)
    write_weights(stored(work), folder)
    if not is_pruned(source):
        config = read_json(source / "config.json") | state
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        return
    dense = {**checkpoint.config, "model_type": dense_type(checkpoint.config)}
    write_config(pruned_config(dense, checkpoint.layers) | state, folder)
    for file in (MASKS_FILE, METRICS_FILE):
        if (source / file).exists():
            shutil.copyfile(source / file, folder / file)
    (folder / "README.md").write_text(model_card(read_checkpoint(folder), name), encoding="utf-8")
