"""Compares a model with the dense one on text of the user: perplexity, KL divergence and top-1
agreement."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ddp_prune.devices import describe_device, explained, make_accelerator
from ddp_prune.models.evaluation import Evaluation
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import Source, open_pruned, open_source
from ddp_prune.settings import FidelitySettings, check_length
from ddp_prune.text.blocks import check_vocabulary, load_blocks
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.cache import sha256
from ddp_vllm.checkpoint import read_checkpoint, read_config
from ddp_vllm.errors import ModelError, SettingError, TextError
from ddp_vllm.evaluations import FIDELITY_FORMAT
from ddp_vllm.families import register_pruned
from ddp_vllm.machine import hardware, today, versions
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import describe_model, is_pruned, local_folder
from ddp_vllm.names import bare_name
from ddp_vllm.output import make_folder
from ddp_vllm.provenance import dense_model, local_provenance
from ddp_vllm.remote_code.widths import states_widths
from ddp_vllm.results import write_new_results

MIN_BLOCKS = 8  # per text, even of long blocks: confidence intervals are over blocks


def compare_on_text(settings: FidelitySettings, output: Path, *, print_line: Callable[[str], None]) -> dict[str, Any]:
    """Evaluate both models on every text; return the results, which are also written into the
    folder `output`.

    Raises: SettingError if the model to compare with is unknown; ModelError, CheckpointError,
        TextError; TrainingError if a device runs out of memory.
    """
    dense = open_source(settings.against or dense_of(settings.model))
    source = open_model(settings.model, dense)
    check_length("max_length", settings.max_length, settings.model, source.text_config)
    pruned_size, dense_size = (model.text_config.get("vocab_size") for model in (source, dense))
    tokenizer = load_tokenizer(source.tokenizer)
    if pruned_size != dense_size or tokenizer.get_vocab() != load_tokenizer(dense.tokenizer).get_vocab():
        raise ModelError(
            f"{settings.model} and {dense.folder} have different tokens ({pruned_size} and {dense_size}), so "
            "perplexity per token, KL and agreement cannot be compared; pass the model that it was made from, after "
            "ddp-vllm trim the trimmed one, which states bits per byte"
        )
    texts = {
        name: _load_text(name, settings, tokenizer, int(dense_size or sys.maxsize), print_line)
        for name in settings.texts
    }
    make_folder(output)
    blocks, loss_masks = ({name: pair[part] for name, pair in texts.items()} for part in (0, 1))
    evaluation = Evaluation(blocks, tokenizer, loss_masks)
    accelerator = make_accelerator(output, None)
    device = accelerator.device
    print_line(describe_device(accelerator))
    too_large = (
        f"{settings.model}, its dense model and a block of {settings.max_length:,} tokens do not fit into the "
        "memory of the device; free it of other processes, or lower --max-length"
    )
    results: dict[str, Any] = {
        "format": FIDELITY_FORMAT,
        "started": today(),
        "settings": asdict(settings),
        "hardware": hardware(),
        "versions": versions(),
        "model": describe_model(settings.model).to_json(),
        "against": describe_model(str(dense.folder)).to_json(),
        "texts": {
            bare_name(name): {"sha256": sha256(Path(name))[:32]} if Path(name).is_file() else {}
            for name in settings.texts
        },
    }
    with explained(too_large):
        for name, model in (("dense", dense), ("pruned", source)):
            print_line(f"evaluating {model.folder.name} on {sum(map(len, blocks.values())):,} sequences")
            evaluation.evaluate_texts(name, load_model(model, settings.dtype, device))
    for name in settings.texts:
        results["texts"][bare_name(name)] |= evaluation.perplexity(name)
    write_new_results(results, output, "text")
    return results


def dense_of(model: str) -> str:
    """Return the path or hub name of the dense model that a pruned folder was made from.
    Raises: SettingError."""
    folder = local_folder(model)
    provenance = local_provenance(folder / MASKS_FILE) if folder and is_pruned(folder) else {}
    if not (dense := dense_model(provenance)):
        raise SettingError(f"{model} does not name the model it was pruned from; pass that model with --against")
    try:
        local_folder(dense)
    except ModelError:
        raise SettingError(
            f"{model} was pruned from {dense}, which is not on this machine; pass it with --against"
        ) from None
    return dense


def open_model(model: str, dense: Source) -> Source:
    """Return a dense, pruned or quantized model as a source. Raises: ModelError,
    CheckpointError."""
    folder = local_folder(model)
    config = read_config(folder) if folder else {}
    quantization = config.get("quantization_config")
    if folder is None or not (quantization or is_pruned(folder)):
        return open_source(model)
    if is_pruned(folder):
        checkpoint = read_checkpoint(folder)
        if not quantization or states_widths(config):
            return open_pruned(checkpoint, dense)
        register_pruned(config)
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method != "compressed-tensors":
        raise ModelError(
            f"{model} is quantized ({method}); supported is compressed-tensors, as ddp-vllm quantize writes"
        )
    return Source(folder=folder, config=config, sizes=dense.sizes, shapes=dense.shapes)


def _load_text(
    name: str, settings: FidelitySettings, tokenizer: Any, vocab_size: int, print_line: Callable[[str], None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the blocks of a text that have tokens to evaluate, int64 [num_blocks, max_length], and
    their loss mask.

    Raises: TextError; ModelError if the tokenizer makes tokens that the model lacks.
    """
    length = settings.max_length
    blocks = load_blocks(
        name, tokenizer, seq_len=length, train_blocks=max(MIN_BLOCKS, settings.tokens // length), heldout_blocks=0,
        min_train_blocks=0, seed=0,
    )  # fmt: skip
    for note in blocks.notes:
        print_line(note)
    evaluated = blocks.loss_mask[:, 1:].any(1)
    if not evaluated.any():
        raise TextError(f"{name} has no block of {length:,} tokens to evaluate; give more text, or lower --max-length")
    check_vocabulary(blocks, vocab_size, settings.model)
    return blocks.train[evaluated], blocks.loss_mask[evaluated]
