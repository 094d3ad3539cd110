"""Which tokens of a BPE or Unigram tokenizer stay, and tokenizer.json without the others.

Text whose tokens are all kept is tokenized as before, and other text is cut into shorter tokens, down
to single bytes. BPE requires for that that a token stays only with every token that it makes on the
way to it. Unigram takes the pieces with the highest sum of scores, so any subset will do; the lowest
score must stay, from which that of unknown text follows.
"""

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_prune.text.templates import UNREADABLE
from ddp_prune.text.tokens import load_tokenizer, token_ids
from ddp_vllm.errors import ModelError, SettingError, reading

MULTIPLE = 128  # of rows in the table, which kernels of heads and a split over devices prefer
TOKEN_ID = re.compile(
    r".*_token_(id|ids|index)|(begin_)?suppress_tokens|(bad|force)_words_ids|"
    r"((im|image|slice)_(start|end|newline)|newline|pad)_id"
)
PAIRS = {"sequence_bias": 0, "forced_decoder_ids": 1}
"""Setting of generation_config.json that is a list of pairs -> the part of a pair that holds ids."""
TOKENIZER_ID = re.compile(r"pad_id|ids|sep|cls")  # of padding and post-processors in tokenizer.json
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))  # tokens of byte fallback
OTHER_VOCABULARIES = ("vision_config", "audio_config")

Json = dict[str, Any]
Renumber = Callable[[int, str], int]
"""Takes a token id and the setting that names it, returns the new id."""


def load_document(model: str, folder: Path) -> tuple[Any, Json]:
    """Return the tokenizer of a model, and tokenizer.json as transformers reads it: with the added tokens of other
    files, such as tokenizer_config.json, and with repairs, which depend on names and on the number of tokens.
    Raises: ModelError if it is missing, or neither BPE nor Unigram that can write any text in single bytes."""
    path, remedy = folder / "tokenizer.json", "choose a model with byte-level BPE or byte fallback, or prune this one"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json, and trim reads no other tokenizer; {remedy}")
    if (folder / "tokenizer_config.json").is_file() and "auto_map" in read_settings(folder / "tokenizer_config.json"):
        raise ModelError(f"the tokenizer of {folder} requires code of its own (auto_map); {remedy}")
    tokenizer = load_tokenizer(model)
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is None:
        raise ModelError(
            f"transformers reads the tokenizer of {model} by {type(tokenizer).__name__} and not from "
            "tokenizer.json; remove its other files, such as tekken.json, or prune this model instead"
        )
    stored = read_settings(path)
    # each call of the tokenizer sets them anew
    document: Json = json.loads(backend.to_str()) | {name: stored.get(name) for name in ("truncation", "padding")}
    part = document["model"]
    if (kind := part["type"]) not in ("BPE", "Unigram"):
        raise ModelError(f"the tokenizer of {folder} is {kind}, but trim supports BPE and Unigram only; {remedy}")
    if dropout := part.get("dropout"):
        raise ModelError(
            f"the tokenizer of {folder} cuts words at random (dropout {dropout}); set dropout to null in "
            "tokenizer.json, as for serving"
        )
    if affix := part.get("continuing_subword_prefix") or part.get("end_of_word_suffix"):
        raise ModelError(f"the tokenizer of {folder} marks parts of words by {affix!r}; {remedy}")
    has_bytes = part.get("byte_fallback") and ids_of(document).keys() >= {*BYTES}
    if not (has_bytes or _is_byte_level(document)):
        raise ModelError(f"the tokenizer of {folder} has no tokens for single bytes; {remedy}")
    return tokenizer, document


def read_settings(path: Path) -> Any:
    """Return a JSON file, whose numbers may be of any size. Raises: ModelError."""
    with reading(path, ModelError, "download the model again"):
        return json.loads(path.read_text(encoding="utf-8"))


def _is_byte_level(document: Json) -> bool:
    return '"type": "ByteLevel"' in json.dumps([document.get("pre_tokenizer"), document.get("normalizer")])


def ids_of(document: Json) -> dict[str, int]:
    """Return all tokens of tokenizer.json with their ids, added tokens included."""
    vocab = document["model"]["vocab"]
    if isinstance(vocab, list):  # of Unigram: [[piece, score], …]
        vocab = {token: number for number, (token, _) in enumerate(vocab)}
    return vocab | {token["content"]: token["id"] for token in document["added_tokens"]}


def required_ids(folder: Path, config: Json, document: Json, tokenizer: Any) -> set[int]:
    """Return the ids that always stay: added tokens, single bytes, the alphabet, the lowest score of
    Unigram, ids in files of settings, and the tokens of what the chat template writes. config: config.json
    with the ids of its class. Raises: ModelError for an id that the tokenizer lacks."""
    from tokenizers.pre_tokenizers import ByteLevel

    ids, model = ids_of(document), document["model"]
    alphabet = ByteLevel.alphabet() if _is_byte_level(document) else [*map(chr, range(0x20, 0x7F)), "▁"]
    tokens = [*alphabet, *BYTES, model.get("unk_token")]
    if isinstance(pieces := model["vocab"], list):
        tokens += [piece for piece, _ in (min(pieces, key=lambda piece: piece[1]), pieces[model.get("unk_id") or 0])]
    required = {ids[token] for token in tokens if token in ids} | {token["id"] for token in document["added_tokens"]}
    known = set(ids.values())

    def note(number: int, place: str) -> int:
        if number not in known:
            raise ModelError(f"{place} is {number}, but the tokenizer of {folder} has no such token; correct it there")
        required.add(number)
        return number

    settings = {path.name: read_settings(path) for path in folder.glob("*config.json")} | {"config.json": config}
    for name, content in settings.items():
        renumber(content, note, name)
    renumber([document.get("post_processor"), document.get("padding")], note, "tokenizer.json", TOKENIZER_ID)
    for text in template_texts(tokenizer):
        required.update(token_ids(tokenizer, text))
    return required


def renumber(
    content: Any, new_id: Renumber, place: str, names: re.Pattern[str] = TOKEN_ID, *, are_ids: bool = False
) -> Any:
    """Return settings with new token ids.

    place: names the setting in errors. names: of settings that hold ids. are_ids: the numbers in `content` are ids,
    also 513.0 and "513"; a negative one stands for none. Raises: ModelError for a setting of pairs that holds none.
    """
    if isinstance(content, list):
        return [renumber(part, new_id, place, names, are_ids=are_ids) for part in content]
    if not isinstance(content, dict):
        stated = str(content).removesuffix(".0") if are_ids and type(content) in (int, float, str) else ""
        return new_id(int(stated), place) if re.fullmatch(r"[0-9]{1,18}", stated) else content
    settings = dict(content)
    for key, value in content.items():
        if key in PAIRS and value:
            settings[key] = _moved_pairs(value, new_id, f"{place}: {key}", PAIRS[key])
        elif not are_ids and names.fullmatch(key):
            settings[key] = renumber(value, new_id, f"{place}: {key}", names, are_ids=True)
        elif key not in OTHER_VOCABULARIES:
            settings[key] = renumber(value, new_id, place, names, are_ids=are_ids)
    return settings


def _moved_pairs(value: Any, new_id: Renumber, place: str, index: int) -> Any:
    """index: of the part of a pair that holds ids."""
    if isinstance(value, dict):  # whose keys are the ids, such as "[1, 2]"
        return {re.sub(r"\d+", lambda digits: str(new_id(int(digits[0]), place)), key): value[key] for key in value}
    if not isinstance(value, list) or not all(isinstance(pair, list) for pair in value):
        raise ModelError(f"{place} is no list of pairs; correct it there")
    moved = []
    for pair in value:
        ids = renumber(pair[index : index + 1], new_id, place, are_ids=True)
        moved.append([*pair[:index], *ids, *pair[index + 1 :]])
    return moved


def template_texts(tokenizer: Any) -> Iterator[str]:
    """Yield what each chat template writes, that of a processor too: its constants, and conversations."""
    from jinja2 import Environment, TemplateSyntaxError

    templates = (tokenizer.chat_template or {}, tokenizer.stored_chat_template or {})
    sources = (given.values() if isinstance(given, dict) else [given] for given in templates)
    roles = ("system", "user", "assistant", "user")
    for template in dict.fromkeys(itertools.chain(*sources)):
        with suppress(TemplateSyntaxError):  # of another dialect
            tokens = [*Environment().lexer.tokenize(template)]
            yield from (token.value for token in tokens if token.type in ("data", "string"))
        for first, prompt in itertools.product((0, 1), (False, True)):
            turns = [{"role": role, "content": "."} for role in roles[first:]]
            options = {"chat_template": template, "tokenize": False, "add_generation_prompt": prompt}
            with suppress(*UNREADABLE, LookupError, AttributeError):  # some require tools or documents
                yield tokenizer.apply_chat_template(turns, **options)


def by_count(excerpts: Iterable[str], tokenizer: Any) -> list[int]:
    """Return the ids that occur in text, most frequent first."""
    counts, rest = Counter[int](), iter(excerpts)
    while batch := [*itertools.islice(rest, 1000)]:
        for ids in token_ids(tokenizer, batch):
            counts.update(ids)
    return sorted(counts, key=lambda number: (-counts[number], number))


def _pairs(document: Json) -> list[tuple[str, str]]:
    """Return the merges, lowest rank first; none of Unigram."""
    return [(first, second) for first, second in document["model"].get("merges", ())]


def choose(document: Json, required: set[int], orders: Iterable[list[int]], size: int, num_rows: int) -> list[int]:
    """Return the kept ids, ascending: required ones, those of each order, then by rank of the merges,
    or of Unigram's pieces, which are sorted by score.

    size: kept ids below `num_rows`, at most; an added token above it has no row.
    Raises: SettingError if the required ones are more.
    """
    ids, pairs = ids_of(document), _pairs(document)
    tokens, ranks = {number: token for token, number in ids.items()}, dict[tuple[str, str], int]()
    for rank, pair in enumerate(pairs):
        ranks.setdefault(pair, rank)

    def closure(number: int) -> set[int]:
        """Return the id of a token, with those of all tokens that BPE makes on the way to it."""
        symbols = [*tokens[number]]
        made = {*symbols}
        while len(symbols) > 1:
            neighbors = enumerate(itertools.pairwise(symbols))
            rank, index = min((ranks.get(pair, math.inf), index) for index, pair in neighbors)
            if rank == math.inf:  # merges do not lead to it
                return {number}
            symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
            made.add(symbols[index])
        return {number, *(ids[part] for part in made if part in ids)}

    kept = set[int]().union(*map(closure, required))
    unkept, free = set(tokens) - kept, size - sum(number < num_rows for number in kept)
    if free < 0:
        least = math.ceil((size - free) / MULTIPLE) * MULTIPLE
        raise SettingError("tokens", f"is {size:,}; special tokens, bytes and the chat template require {least:,}")
    by_rank = (ids[first + second] for first, second in pairs if first + second in ids)
    for number in itertools.chain(*orders, by_rank, sorted(unkept)):
        if free and number in unkept and len(further := closure(number) & unkept) <= free:
            unkept -= further
            free -= len(further)
    return sorted(set(tokens) - unkept)


def trimmed_document(document: Json, new_ids: Mapping[int, int]) -> Json:
    """Return tokenizer.json with the kept tokens and the merges among them."""
    model: Json = dict(document["model"])
    if isinstance(pieces := model["vocab"], list):
        model["vocab"] = [piece for number, piece in enumerate(pieces) if number in new_ids]
        model["unk_id"] = new_ids.get(model.get("unk_id", -1))
    else:
        vocab = {token: new_ids[number] for token, number in model["vocab"].items() if number in new_ids}
        model["merges"] = [pair for pair in _pairs(document) if {*pair, "".join(pair)} <= vocab.keys()]
        model["vocab"] = vocab
    parts = {key: document.get(key) for key in ("post_processor", "padding")}
    moved = renumber(parts, lambda number, _: new_ids[number], "tokenizer.json", TOKENIZER_ID)
    added = [token | {"id": new_ids[token["id"]]} for token in document["added_tokens"]]
    return {**document, **moved, "added_tokens": added, "model": model}
