"""Copies and writes the files of a model's folder other than its weights: config, tokenizer, code.

Nothing here imports torch.
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_vllm.remote_code import code_of

# copied along with the weights: data files known by name, never code
TOKENIZER_AND_CONFIG_FILES = (
    *("config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tokenizer.model.v3", "tekken.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("LICENSE", "LICENSE.md", "LICENSE.txt", "LICENSE-CODE", "LICENSE-MODEL", "NOTICE", "NOTICE.md", "NOTICE.txt"),
)


def tokenizer_and_config_files(folder: Path) -> list[Path]:
    """Return the files that are copied along with a model's weights. `check_links` must have
    checked the folder."""
    return [file for pattern in TOKENIZER_AND_CONFIG_FILES for file in sorted(folder.glob(pattern)) if file.is_file()]


def write_model_files(folder: Path, source: Path, config: Mapping[str, Any]) -> None:
    """Write the config, and copy the tokenizer and other data files of `source`. A pruned model
    also gets its code."""
    for file in tokenizer_and_config_files(source):
        if file.name != "config.json":
            copy = folder / file.relative_to(source)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy)
    tokenizer = folder / "tokenizer_config.json"
    settings = _tokenizer_settings(tokenizer)
    if settings.pop("auto_map", None) is not None:  # it would name code, which is not copied
        write_json(settings, tokenizer)
    write_json(config, folder / "config.json")
    for file in code_of(config):
        shutil.copyfile(file, folder / file.name)


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _tokenizer_settings(path: Path) -> dict[str, Any]:
    """Return the content of a tokenizer_config.json; {} if it cannot be read, in which case
    transformers fails too."""
    with suppress(OSError, ValueError, RecursionError):
        settings = json.loads(path.read_text(encoding="utf-8"))
        return settings if isinstance(settings, dict) else {}
    return {}


def state_tokenizer_class(source: Path, target: Path) -> None:
    """State in tokenizer_config.json the class by which transformers loads the dense model's
    tokenizer.

    transformers sometimes chooses the class by model type, whatever tokenizer_config.json states.
    The pruned model has a type of its own, for which transformers would choose another class.
    """
    from transformers import AutoTokenizer

    if not any(target.glob("tokenizer*")):
        return
    try:
        name = type(AutoTokenizer.from_pretrained(source, trust_remote_code=False)).__name__
    except Exception:  # a tokenizer that does not load for the dense model need not load for the pruned one
        return
    # the name in transformers 4
    name = "PreTrainedTokenizerFast" if name == "TokenizersBackend" else name
    path = target / "tokenizer_config.json"
    settings = _tokenizer_settings(path)
    if settings.get("tokenizer_class") != name:
        write_json(settings | {"tokenizer_class": name}, path)
