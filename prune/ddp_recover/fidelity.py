"""How near a model is to the dense one on text of the user's own: perplexity, KL and agreement, token by token."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ddp_prune.devices import make_accelerator
from ddp_prune.documents import content_of
from ddp_prune.exam import Exam
from ddp_prune.model import Source, load_model, open_pruned, open_source
from ddp_prune.text import Blocks, check_vocabulary, load_blocks, load_tokenizer
from ddp_vllm.checkpoint import read_checkpoint
from ddp_vllm.errors import ModelError, SettingError, TextError, TrainingError
from ddp_vllm.evaluations import FIDELITY_FORMAT
from ddp_vllm.facts import describe_model, is_pruned, local_folder
from ddp_vllm.machine import hardware, today, versions
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.origins import bare_name, local_provenance
from ddp_vllm.results import write_new_results

TOKENS, FEWEST = 16_384, 8  # of each text, in at least so many blocks: intervals are over these


@dataclass(frozen=True, kw_only=True)
class FidelitySettings:
    """What is read by which models."""

    model: str
    texts: tuple[str, ...]
    """Files or hub datasets as `prune` takes them; in conversations only what an assistant says counts."""
    against: str = ""
    """The model to compare with; empty: the dense model that a pruned folder was cut from."""
    max_length: int = 2048
    """Tokens of a block; a model sees no further back."""
    dtype: str = "auto"

    def check(self) -> None:
        """Raises: SettingError."""
        if self.max_length < 16:
            raise SettingError(f"--max-length {self.max_length} is below 16")
        if not self.texts:
            raise SettingError("--text names no text; give a file or a hub dataset")
        names = list(map(bare_name, self.texts))
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise SettingError(f"two texts are called {repeated}; rename one, or results cannot tell them apart")


def compare_on_text(settings: FidelitySettings, output: Path, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Let both models read every text, and return what came of it, which is written into the folder `output` too.

    Raises: SettingError if no model to compare with is known; ModelError, CheckpointError, TextError; TrainingError if
        a device runs out of memory.
    """
    settings.check()
    dense = open_source(settings.against or _dense_of(settings.model))
    own = _open(settings.model, dense)
    tokenizer = load_tokenizer(str(own.folder))
    read = {name: _read(name, tokenizer, settings.max_length) for name in settings.texts}
    for blocks in read.values():
        check_vocabulary(blocks, dense.config["vocab_size"], settings.model)
    texts = {name: blocks.train for name, blocks in read.items()}
    exam = Exam(texts, tokenizer, {name: blocks.scored for name, blocks in read.items()})
    device = make_accelerator(output, None).device
    try:
        for who, source in (("dense", dense), ("pruned", own)):
            say(f"{source.folder.name} reads")
            model = load_model(source, settings.dtype, device)
            exam.read(who, model)
            del model
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"{settings.model}, its dense model and a block of {settings.max_length:,} tokens do not fit into the "
            "memory of the device; free it of other processes, or lower --max-length"
        ) from error
    found: dict[str, Any] = {
        "format": FIDELITY_FORMAT,
        "started": today(),
        "settings": asdict(settings),
        "hardware": hardware(),
        "versions": versions(),
        "model": describe_model(settings.model).to_json(),
        "against": describe_model(str(dense.folder)).to_json(),
        "texts": {
            bare_name(name): exam.perplexity(name)
            | ({"sha256": content_of(Path(name))} if Path(name).is_file() else {})
            for name in settings.texts
        },
    }
    write_new_results(found, output, "text", found["started"])
    return found


def _dense_of(model: str) -> str:
    """Return where the dense model of a pruned folder is. Raises: SettingError."""
    folder = local_folder(model)
    made = local_provenance(folder / MASKS_FILE) if folder and is_pruned(folder) else {}
    if not (dense := made.get("applied_to") or made.get("recipe", {}).get("model")):
        raise SettingError(f"{model} does not say which model it was pruned from; name one with --against")
    try:
        local_folder(dense)
    except ModelError:
        raise SettingError(f"{model} was pruned from {dense}, which is not here; name it with --against") from None
    return str(dense)


def _open(model: str, dense: Source) -> Source:
    folder = local_folder(model)
    return open_pruned(read_checkpoint(folder), dense) if folder and is_pruned(folder) else open_source(model)


def _read(name: str, tokenizer: Any, length: int) -> Blocks:
    """Return blocks of a text in which something counts. Raises: TextError."""
    wanted = max(FEWEST, TOKENS // length)
    sizes: dict[str, Any] = {"seq_len": length, "train_blocks": wanted, "heldout_blocks": 0, "min_train_blocks": 0}
    blocks = load_blocks(name, tokenizer, **sizes, seed=0)
    counts = blocks.scored[:, 1:].any(1)
    if not counts.any():
        raise TextError(f"{name} has no block of {length:,} tokens that counts; give more text, or lower --max-length")
    return Blocks(train=blocks.train[counts], scored=blocks.scored[counts], heldout=blocks.heldout, found=blocks.found)
