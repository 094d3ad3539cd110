"""Compares a model with the dense one on text of the user: perplexity, KL divergence and top-1
agreement, or bits per byte if the models have different tokens."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from ddp_prune.devices import describe_device, explained, make_accelerator
from ddp_prune.export import warn_of_other_weights
from ddp_prune.models.evaluation import Evaluation, bits_of
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import Source, open_pruned, open_source
from ddp_prune.settings import FidelitySettings
from ddp_prune.text.blocks import check_vocabulary, load_blocks
from ddp_prune.text.documents import read_excerpts
from ddp_prune.text.messages import Notes
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.cache import sha256
from ddp_vllm.checkpoint import read_checkpoint, read_config
from ddp_vllm.dimensions import check_length
from ddp_vllm.errors import ModelError, Printer, SettingError, TextError
from ddp_vllm.evaluations import FIDELITY_FORMAT
from ddp_vllm.families import register_pruned
from ddp_vllm.masks import MASKS_FILE, Provenance
from ddp_vllm.model_facts import describe_model, is_pruned, local_folder, tokens_differ
from ddp_vllm.names import bare_name
from ddp_vllm.output import make_folder
from ddp_vllm.provenance import local_provenance
from ddp_vllm.remote_code.widths import states_widths
from ddp_vllm.results import new_results, write_new_results

MIN_BLOCKS = 8  # per text, even of long blocks: confidence intervals are over blocks
CHARACTERS_PER_TOKEN = 4  # of English, about


def compare_on_text(settings: FidelitySettings, output: Path, *, print_line: Printer) -> dict[str, Any]:
    """Evaluate both models on every text; return the results, which are also written into the
    folder `output`.

    Raises: SettingError if the model to compare with is unknown; ModelError, CheckpointError,
        TextError; TrainingError if a device runs out of memory.
    """
    dense = open_source(settings.against or dense_of(settings.model), to_prune=False)
    differing = tokens_differ(dense.tokenizer, settings.model)
    source = open_model(settings.model, dense, same_tokens=not differing)
    if not settings.against:
        warn_of_other_weights(source.folder, dense)
    check_length("max_length", settings.max_length, settings.model, source.text_config)
    tokenizer, size = load_tokenizer(source.tokenizer), dense.vocab_size
    if differing:
        print_line(f"{differing}, so bits per byte are compared")
        excerpts = {name: _load_excerpts(name, settings, tokenizer, print_line) for name in settings.texts}
    else:
        blocks = {name: _load_blocks(name, settings, tokenizer, size, print_line) for name in settings.texts}
    make_folder(output)
    accelerator = make_accelerator(output, None)
    device = accelerator.device
    print_line(describe_device(accelerator))
    too_large = (
        f"{settings.model}, its dense model and a block of {settings.max_length:,} tokens do not fit into the "
        "memory of the device; free it of other processes, or lower --max-length"
    )
    results = new_results(FIDELITY_FORMAT, asdict(settings)) | {
        "model": describe_model(settings.model).to_json(),
        "against": describe_model(dense.tokenizer).to_json(),
        "texts": {},
    }

    def loaded() -> Iterator[tuple[str, Source, Any]]:
        """Yield both models, one at a time in memory."""
        for who, model in (("dense", dense), ("pruned", source)):
            print_line(f"evaluating {bare_name(model.tokenizer)} on {', '.join(map(bare_name, settings.texts))}")
            yield who, model, load_model(model, settings.dtype, device)

    with explained(too_large):
        if differing:
            measured = _bits(excerpts, loaded(), settings.max_length)
        else:
            tokens, loss_masks = ({name: pair[part] for name, pair in blocks.items()} for part in (0, 1))
            evaluation = Evaluation(tokens, tokenizer, loss_masks)
            for who, _, model in loaded():
                evaluation.evaluate_texts(who, model)
                del model  # before the next one is loaded
            measured = {name: evaluation.perplexity(name) for name in blocks}
    results["bits" if differing else "texts"] = {
        bare_name(name): ({"sha256": sha256(Path(name))[:32]} if Path(name).is_file() else {}) | values
        for name, values in measured.items()
    }
    write_new_results(results, output, "text")
    return results


def _bits(
    texts: Mapping[str, Sequence[str]], models: Iterable[tuple[str, Source, Any]], max_length: int
) -> dict[str, dict[str, Any]]:
    """Return the results of both models on each text, `Bits` as results files have it."""
    results: dict[str, dict[str, Any]] = {
        name: {"excerpt_bytes": [], "bits_per_byte": {}, "tokens_per_byte": {}, "excerpt_bits": {}} for name in texts
    }
    for who, source, model in models:
        tokenizer = load_tokenizer(source.tokenizer)
        for name, result in results.items():
            bits, num_tokens = bits_of(model, tokenizer, texts[name], max_length)
            result["excerpt_bytes"] = [len(text.encode()) for text in texts[name]]
            num_bytes = sum(result["excerpt_bytes"])
            result["bits_per_byte"][who] = sum(bits) / num_bytes
            result["tokens_per_byte"][who] = num_tokens / num_bytes
            result["excerpt_bits"][who] = bits
        del model  # before the next one is loaded
    return results


def dense_of(model: str) -> str:
    """Return the path or hub name of the dense model that a pruned or trimmed folder was made from.
    Raises: SettingError."""
    folder = local_folder(model)
    provenance = local_provenance(folder / MASKS_FILE) if folder else {}
    if not (dense := Provenance.of(provenance).dense_model):
        raise SettingError(f"{model} does not name the model it was made from; pass that model with --against")
    try:
        local_folder(dense)
    except ModelError:
        raise SettingError(
            f"{model} was made from {dense}, which is not on this machine; pass it with --against"
        ) from None
    return dense


def open_model(model: str, dense: Source, *, same_tokens: bool = True) -> Source:
    """Return a dense, pruned or quantized model as a source. Raises: ModelError,
    CheckpointError."""
    folder = local_folder(model)
    config = read_config(folder) if folder else {}
    quantization = config.get("quantization_config")
    if folder is None or not (quantization or is_pruned(folder)):
        return open_source(model, to_prune=False)
    if is_pruned(folder):
        checkpoint = read_checkpoint(folder)
        if not quantization or states_widths(config):
            return open_pruned(checkpoint, dense, same_tokens=same_tokens)
        register_pruned(config)
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method != "compressed-tensors":
        raise ModelError(
            f"{model} is quantized ({method}); supported is compressed-tensors, as ddp-vllm quantize writes"
        )
    return Source(folder=folder, config=config, sizes=dense.sizes, shapes=dense.shapes)


def _load_excerpts(name: str, settings: FidelitySettings, tokenizer: Any, print_line: Printer) -> list[str]:
    """Return excerpts of a text, each of about `max_length` tokens, or shorter documents: in short contexts a pruned
    model loses less. Of conversations all turns. Raises: TextError."""
    notes, chosen, left = Notes(), list[str](), CHARACTERS_PER_TOKEN * settings.tokens
    for excerpt in read_excerpts(name, tokenizer, CHARACTERS_PER_TOKEN * settings.max_length, notes):
        chosen.append(excerpt)
        left -= len(excerpt)
        if left <= 0 and len(chosen) >= MIN_BLOCKS:
            break
    for note in notes.lines(name):
        print_line(note)
    return chosen


def _load_blocks(
    name: str, settings: FidelitySettings, tokenizer: Any, vocab_size: int, print_line: Printer
) -> tuple[Tensor, Tensor]:
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
        raise TextError(
            f"{name} has no block of {length:,} tokens to evaluate, in conversations those of an assistant; give more "
            "text, or lower --max-length"
        )
    check_vocabulary(blocks, vocab_size, settings.model)
    return blocks.train[evaluated], blocks.loss_mask[evaluated]
