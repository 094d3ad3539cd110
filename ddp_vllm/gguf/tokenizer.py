"""Writes a tokenizer into GGUF's fields: tokens, merges, special tokens and the chat template.

The file gets the tokenizer that transformers and vLLM load. They take more than `tokenizer.json`:
added tokens and their flags from other files, the rules that cut words from the class that
tokenizer_config.json names, and the chat template from one of several files. So the tokenizer is
loaded, saved again into one `tokenizer.json`, and read there.

A tokenizer cuts text into words before it merges bytes. llama.cpp has a name for each set of
cutting rules, and its own converter guesses the name from the tokens of a test sentence. This
module finds it by the rules in `tokenizer.json`.
"""

import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf

from ddp_vllm.checkpoint import read_json
from ddp_vllm.errors import ModelError
from ddp_vllm.remote_code.files import short

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# the rules that cut, in order, and whether merges are skipped for words of the vocabulary -> name
BYTE_LEVEL = {
    (("GPT-2",), False): "gpt-2",
    (("digits", "GPT-2"), False): "smollm",
    ((_WORDS % r"\p{N}",), False): "qwen2",
    ((_WORDS % r"\p{N}{1,3}",), True): "llama-bpe",
}
SENTENCEPIECE = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]
"""The normalization of text in Llama 2's tokenizer, and in llama.cpp's of the same kind."""
METASPACE = {"type": "Metaspace", "replacement": "▁", "split": False}
"""The rule of transformers' class LlamaTokenizer in its place; its key `prepend_scheme` has several
values."""
# of an added token: the text around it decides or is removed
_FLAGS = ("lstrip", "rstrip", "single_word")
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


def add_tokenizer(writer: gguf.GGUFWriter, folder: Path, vocab_size: int) -> list[str]:
    """Add the tokenizer to the file; return notes about it for the user.

    Raises: ModelError if llama.cpp would tokenize differently.
    """
    if not (folder / "tokenizer.json").exists():
        raise ModelError(f"{folder} has no tokenizer.json; save its tokenizer there with transformers' save_pretrained")
    with TemporaryDirectory() as saved:
        loaded = _load(folder)
        loaded.save_pretrained(saved)
        shutil.copyfile(folder / "config.json", Path(saved) / "config.json")
        tokenizer, notes = read_json(Path(saved) / "tokenizer.json"), list[str]()
        if (model := tokenizer["model"])["type"] != "BPE":
            raise _refusal(folder, f"is of type {short(model['type'])}")
        tokens, kinds = _tokens(folder, tokenizer, vocab_size)
        special = gguf.SpecialVocab(saved, load_merges=not model.get("byte_fallback"), n_vocab=vocab_size)
    if odd := [token["content"] for token in tokenizer.get("added_tokens") or () if any(map(token.get, _FLAGS))]:
        raise _refusal(folder, f"strips spaces around {short(odd[0])}, or requires a word's end there")
    if model.get("byte_fallback"):
        notes += _add_prefix(writer, folder, tokenizer)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, model["merges"]))
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(_name_of_cuts(folder, tokenizer))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    special.add_special_token = _added_to_texts(folder, loaded)
    special.add_to_gguf(writer, quiet=True)
    return notes


def _load(folder: Path) -> Any:
    """Return the tokenizer of a dense or pruned model. No code of its folder runs."""
    from transformers import AutoConfig, AutoTokenizer

    from ddp_vllm.remote_code.configuration_ddp import CONFIGS

    for kind in CONFIGS:  # some tokenizers are found by the type of the model
        AutoConfig.register(kind.model_type, kind, exist_ok=True)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def _added_to_texts(folder: Path, loaded: Any) -> dict[str, bool]:
    """Return whether the tokenizer puts BOS before a text, and EOS after it. Raises: ModelError for
    other tokens."""
    plain, full = (list(loaded("x", add_special_tokens=special)["input_ids"]) for special in (False, True))
    start = next((at for at in range(len(full)) if full[at : at + len(plain)] == plain), 0)
    ends = {"bos": (full[:start], loaded.bos_token_id), "eos": (full[start + len(plain) :], loaded.eos_token_id)}
    for tokens, expected in ends.values():
        if tokens not in ([], [expected]):
            raise _refusal(folder, f"adds the tokens {tokens} to every text")
    return {name: bool(tokens) for name, (tokens, _) in ends.items()}


def _refusal(folder: Path, fault: str) -> ModelError:
    return ModelError(f"{folder / 'tokenizer.json'} {fault}, unlike the tokenizers of llama.cpp known here; use vLLM")


def _name_of_cuts(folder: Path, tokenizer: dict[str, Any]) -> str:
    """Return llama.cpp's name of the rules that cut words. It lacks Unicode's NFC, which changes
    little text."""
    model, normalizer = tokenizer["model"], (tokenizer.get("normalizer") or {}).get("type")
    if normalizer not in (None, "NFC"):
        raise _refusal(folder, f"normalizes text by {normalizer}")
    rules = tokenizer.get("pre_tokenizer") or {}
    cuts = tuple(filter(None, map(_cut, rules.get("pretokenizers", [rules]))))
    name = BYTE_LEVEL.get((cuts, bool(model.get("ignore_merges"))))
    if name is None:
        raise _refusal(folder, f"cuts words by {cuts}, ignore_merges {bool(model.get('ignore_merges'))}")
    return name


def _cut(rule: dict[str, Any]) -> str | None:
    """Return the pattern that a pre-tokenizer cuts by, or None if it only turns bytes into
    letters."""
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


def _add_prefix(writer: gguf.GGUFWriter, folder: Path, tokenizer: dict[str, Any]) -> list[str]:
    """Add how spaces are put before texts; return a note if llama.cpp puts more of them. Raises:
    ModelError."""
    steps, rule = (tokenizer.get("normalizer") or {}).get("normalizers"), tokenizer.get("pre_tokenizer")
    if steps == SENTENCEPIECE and not rule:
        return []
    scheme = (rule or {}).get("prepend_scheme")
    if tokenizer.get("normalizer") or rule != {**METASPACE, "prepend_scheme": scheme}:
        raise _refusal(folder, "puts spaces before words in another way than Llama 2")
    writer.add_add_space_prefix(scheme != "never")
    if scheme == "never":
        return []
    also = ", or that follows a special token" if scheme == "first" else ""
    return [f"llama.cpp also puts a space before text that begins with one{also}; transformers does not"]


def _tokens(folder: Path, tokenizer: dict[str, Any], vocab_size: int) -> tuple[list[str], list[gguf.TokenType]]:
    """Return the text and the kind of each row of the embeddings; rows without a token are
    unused."""
    model = tokenizer["model"]
    added = {token["content"]: token for token in tokenizer.get("added_tokens") or ()}
    numbers: dict[str, int] = model["vocab"] | {text: token["id"] for text, token in added.items()}
    texts = {number: text for text, number in numbers.items()}
    if (largest := max(texts)) >= vocab_size:
        raise ModelError(f"{folder} has token {largest}, but embeddings of {vocab_size}; copy it whole again")
    rows, kinds = [texts.get(index, f"[PAD{index}]") for index in range(vocab_size)], list[gguf.TokenType]()
    for text in rows:
        kind = gguf.TokenType.NORMAL if text in numbers else gguf.TokenType.UNUSED
        if text in added:
            kind = gguf.TokenType.CONTROL if added[text]["special"] else gguf.TokenType.USER_DEFINED
        elif model.get("byte_fallback") and text in numbers and _BYTE.fullmatch(text):
            kind = gguf.TokenType.BYTE
        kinds.append(kind)
    return rows, kinds


def _scores(tokens: list[str], merges: list[str | list[str]]) -> list[float]:
    """Return SentencePiece's scores, which decide the order of merging, from the list of merges."""
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair.split(" ") if isinstance(pair, str) else pair), rank)
    return [-float(ranks.get(token, len(merges))) for token in tokens]
