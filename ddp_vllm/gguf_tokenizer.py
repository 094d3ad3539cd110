"""The tokenizer of a Hugging Face folder in GGUF's fields: tokens, merges, special tokens and the chat template.

A tokenizer cuts text into words before it merges bytes. llama.cpp knows the ways of cutting by name, and its own
converter guesses the name from what a test sentence becomes. Here the rules in `tokenizer.json` themselves say it.
"""

import re
from pathlib import Path
from typing import Any

import gguf

from ddp_vllm.checkpoint import read_json
from ddp_vllm.errors import ModelError

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTE_LEVEL = {  # the rules that cut, in order, and whether merges are skipped for words of the vocabulary -> name
    (("GPT-2",), False): "gpt-2",
    (("digits", "GPT-2"), False): "smollm",
    ((_WORDS % r"\p{N}",), False): "qwen2",
    ((_WORDS % r"\p{N}{1,3}",), True): "llama-bpe",
}
SENTENCEPIECE = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
"""What Llama 2's tokenizer does to text, and llama.cpp's of the same kind."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> None:
    """Add all that turns text into tokens and back. Raises: ModelError if llama.cpp would do it differently."""
    if not (folder / "tokenizer.json").exists():
        raise ModelError(f"{folder} has no tokenizer.json; save its tokenizer there with transformers' save_pretrained")
    tokenizer = read_json(folder / "tokenizer.json")
    model = tokenizer["model"]
    if model.get("type") != "BPE":
        raise _refusal(folder, f"is of type {model.get('type')}")
    tokens, kinds = _tokens(folder, tokenizer, vocab_size)
    if model.get("byte_fallback"):
        _check_sentencepiece(folder, tokenizer)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, model["merges"]))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_name_of_cuts(folder, tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    special = gguf.SpecialVocab(folder, load_merges=not model.get("byte_fallback"), n_vocab=vocab_size)
    unsaid = {"bos": False, "eos": False}  # llama.cpp would add some by itself
    special.add_special_token = unsaid | special.add_special_token
    special.add_to_gguf(writer, quiet=True)


def _refusal(folder: Path, what: str) -> ModelError:
    return ModelError(f"{folder / 'tokenizer.json'} {what}, which no tokenizer of llama.cpp known here does; use vLLM")


def _name_of_cuts(folder: Path, tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name for how words are cut. Unicode's NFC, which it does not do, changes little: let it be."""
    model, normalizer = tokenizer["model"], (tokenizer.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise _refusal(folder, f"normalises text by {normalizer}")
    rules = tokenizer.get("pre_tokenizer") or {}
    cuts = tuple(filter(None, map(_cut, rules.get("pretokenizers", [rules]))))
    name = BYTE_LEVEL.get((cuts, bool(model.get("ignore_merges"))))
    if name is None:
        raise _refusal(folder, f"cuts words by {cuts}, ignore_merges {bool(model.get('ignore_merges'))}")
    return name


def _cut(rule: dict[str, Any]) -> str | None:
    """Return the pattern that a pre-tokenizer cuts by, or None if it only turns bytes into letters."""
    match rule:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}:
            return None
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "GPT-2"
        case {"type": "Digits", "individual_digits": True}:
            return "digits"
        case {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False}:
            return regex
    return str(rule)


def _check_sentencepiece(folder: Path, tokenizer: dict[str, Any]) -> None:
    steps = (tokenizer.get("normalizer") or {}).get("normalizers")
    if steps != SENTENCEPIECE or tokenizer.get("pre_tokenizer"):
        raise _refusal(folder, "puts spaces before words in another way than Llama 2")


def _tokens(folder: Path, tokenizer: dict[str, Any], vocab_size: int) -> tuple[list[str], list[gguf.TokenType]]:
    """Return the text and the kind of each row of the embeddings; rows without a token are unused."""
    model = tokenizer["model"]
    found = {index: (token, gguf.TokenType.NORMAL) for token, index in model["vocab"].items()}
    if model.get("byte_fallback"):
        found |= {i: (token, gguf.TokenType.BYTE) for i, (token, _) in found.items() if _BYTE.fullmatch(token)}
    for token in tokenizer.get("added_tokens", []):
        kind = gguf.TokenType.CONTROL if token["special"] else gguf.TokenType.USER_DEFINED
        found[token["id"]] = (token["content"], kind)
    if max(found) >= vocab_size:
        raise ModelError(f"{folder} has token {max(found)}, but embeddings of {vocab_size}; copy it whole again")
    rows = [found.get(index, (f"[PAD{index}]", gguf.TokenType.UNUSED)) for index in range(vocab_size)]
    return [token for token, _ in rows], [kind for _, kind in rows]


def _scores(tokens: list[str], merges: list[str | list[str]]) -> list[float]:
    """Return SentencePiece's scores, by which pieces are merged: here the order of the merges says it."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]
