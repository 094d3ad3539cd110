"""The verb trim: write a dense model with fewer tokens, as a stock model of the same class.

Tokens that text does not use are removed from a BPE tokenizer, and their rows from the embedding and
the head. The kept set is closed under merges: a token stays only with every token that BPE makes on the
way to it. So text whose tokens are all kept is tokenized as before, and the logits of kept tokens are
the dense model's. Other text is cut into shorter tokens, down to single bytes.
"""

import itertools
import json
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ddp_prune.models.evaluation import bits_per_byte
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import open_source
from ddp_prune.text.blocks import cut
from ddp_prune.text.documents import DocumentReader
from ddp_prune.text.messages import Notes
from ddp_prune.text.rows import open_rows, reading_text, sources_of
from ddp_prune.text.templates import ChatTemplate
from ddp_prune.text.tokens import load_tokenizer
from ddp_vllm.checkpoint import read_config
from ddp_vllm.costs import TABLE, numbers_read
from ddp_vllm.errors import ModelError, SettingError, reading
from ddp_vllm.families import check_dense
from ddp_vllm.masks import MASKS_FILE
from ddp_vllm.model_facts import is_pruned, local_folder
from ddp_vllm.model_files import TOKENIZERS, stored_tensors, write_json, write_model_files, write_weights
from ddp_vllm.names import bare_name
from ddp_vllm.output import atomic_folder
from ddp_vllm.proof import MOST_TOKENS, ODD, PROSE, Reference, prove, read_back
from ddp_vllm.provenance import provenance_of, write_provenance
from ddp_vllm.remote_code.files import checked_tensors, file_tensors, weight_files

MULTIPLE = 128  # of rows in the table, which kernels of heads and a split over devices prefer
COUNTED = 30_000_000  # characters of all sources together
EXCERPT, HELD_OUT_EVERY, MOST_HELD_OUT = 3000, 16, 64  # characters; excerpts; excerpts of each source
READ, SHOWN = 8, 10  # excerpts of each source that both models read; words
RANDOM_TEXTS, SAMPLED_TOKENS = 1000, 2000  # texts of the proof
SAME = {"float32": 1e-5, "bfloat16": 1e-3}
"""Number format -> the largest distance of logits. The rows are the same to the bit, but a matrix product
with fewer rows may add in another order: 3e-8 of a small model in float32, 8e-7 of SmolLM2-135M in bfloat16."""
ROW_COUNTS = ("vocab_size", "vocab_size_per_layer_input")
TOKEN_ID = re.compile(r".*_token_(id|ids|index)|(begin_)?suppress_tokens|bad_words_ids|pad_id")
OTHER_VOCABULARIES = ("vision_config", "audio_config")
LONGER = "text in languages or notations that were not counted becomes longer: it is cut into shorter tokens"

Json = dict[str, Any]
Renumber = Callable[[int, str], int]
"""Takes a token id and the setting that names it, returns the new id."""


class Texts(NamedTuple):
    """Text by source, in excerpts."""

    counted: dict[str, list[str]]
    held_out: dict[str, list[str]]


def trim(
    model: str,
    data: str,
    keep: str,
    output: Path,
    *,
    num_tokens: int,
    overwrite: bool,
    proof: bool,
    print_line: Callable[[str], None],
) -> None:
    """Write the dense `model` with at most `num_tokens` tokens.

    data: texts that are counted, as in `load_blocks`. keep: further texts, whose tokens stay before
        those of `data`, or "".
    print_line: prints a line of the summary.
    Raises: ModelError if the model is not dense, its tokenizer is no BPE that can write any text, or
        a setting names an id that the tokenizer lacks; SettingError if `num_tokens` is too low or
        leaves nothing to remove; TextError; OutputError and CheckpointError as `atomic_folder`.
    """
    folder = local_folder(model)
    if folder is None:
        raise ModelError(f"{model} is not on this machine; run: hf download {model}")
    config, document = _checked(folder), read_document(folder)
    table = table_of(folder, config)
    tokenizer, num_rows = load_tokenizer(model), _text_config(config)["vocab_size"]
    ids = ids_of(document)
    target = num_tokens // MULTIPLE * MULTIPLE
    if not target or target >= sum(number < num_rows for number in ids.values()):
        raise SettingError(
            "tokens",
            f"is {num_tokens:,}; it must be at least {MULTIPLE} and below the {len(ids):,} tokens of {model}",
        )
    required = required_ids(folder, document, ids) | set(template_ids(tokenizer))
    texts, further = read_texts(data, tokenizer, print_line), read_texts(keep, tokenizer, print_line) if keep else None
    orders = [_by_count(further, tokenizer)] if further else []
    kept = choose(document, ids, required, [*orders, _by_count(texts, tokenizer)], target, num_rows)
    new_ids = {old: new for new, old in enumerate(kept)}
    small, rows = trimmed_document(document, new_ids), [old for old in kept if old < num_rows]
    with atomic_folder(output, overwrite=overwrite) as writing:
        write_model_files(writing, folder, trimmed_config(config, new_ids))
        _write_settings(writing, small, new_ids)
        write_weights(_trimmed_tensors(folder, table, rows), writing)
        proved = _prove(writing, folder, tokenizer, texts, new_ids, num_rows) if proof else {"proof": {}}
        costs = _costs((folder, writing), texts, (document, small))
        trimmed = {"from": folder.resolve().name, "tokens": len(rows), **costs}
        write_provenance(writing / MASKS_FILE, {"trimmed": trimmed, **proved})
        for line in _summary(costs, len(ids), len(rows)):
            print_line(line)


def _checked(folder: Path) -> Json:
    """Return the config of a dense model. Raises: ModelError."""
    config = read_config(folder)
    if is_pruned(folder) or ((folder / MASKS_FILE).exists() and "trimmed" not in provenance_of(folder)):
        raise ModelError(f"{folder} is pruned or converted already; trim the dense model first, then prune the result")
    check_dense(config)
    if not isinstance(_text_config(config).get("vocab_size"), int):
        raise ModelError(f"{folder}/config.json has no vocab_size; download the model again")
    if "vocab_offset" in json.dumps(config):
        raise ModelError(f"{folder} has a second vocabulary (vocab_offset), which trim does not move; prune it instead")
    return config


def _text_config(config: Json) -> Json:
    return config.get("text_config", config)


def read_document(folder: Path) -> Json:
    """Return tokenizer.json. Raises: ModelError if it is missing, or no BPE that writes any text in
    single bytes."""
    path, remedy = folder / "tokenizer.json", "choose a model with byte-level BPE or byte fallback, or prune this one"
    if not path.is_file():
        raise ModelError(f"{folder} has no tokenizer.json, and trim reads no other tokenizer; {remedy}")
    if (folder / "tokenizer_config.json").is_file() and "auto_map" in _read(folder / "tokenizer_config.json"):
        raise ModelError(f"the tokenizer of {folder} requires code of its own (auto_map); {remedy}")
    document: Json = _read(path)
    bpe = document["model"]
    if bpe.get("type") != "BPE":
        raise ModelError(f"the tokenizer of {folder} is {bpe.get('type')}, but trim supports BPE only; {remedy}")
    if affix := bpe.get("continuing_subword_prefix") or bpe.get("end_of_word_suffix"):
        raise ModelError(f"the tokenizer of {folder} marks parts of words by {affix!r}; {remedy}")
    if not (bpe.get("byte_fallback") or _is_byte_level(document)):
        raise ModelError(f"the tokenizer of {folder} has no tokens for single bytes; {remedy}")
    return document


def _read(path: Path) -> Any:
    """Return a JSON file, whose numbers may be of any size. Raises: ModelError."""
    with reading(path, ModelError, "download the model again"):
        return json.loads(path.read_text(encoding="utf-8"))


def _is_byte_level(document: Json) -> bool:
    parts = json.dumps([document.get("pre_tokenizer"), document.get("normalizer")])
    return '"type": "ByteLevel"' in parts


def ids_of(document: Json) -> dict[str, int]:
    """Return all tokens of tokenizer.json with their ids, added tokens included."""
    return document["model"]["vocab"] | {token["content"]: token["id"] for token in document["added_tokens"]}


def table_of(folder: Path, config: Json) -> list[str]:
    """Return the names of tensors whose first axis is the vocabulary. Raises: ModelError if a tensor
    of another name is as long."""
    checked_tensors(folder)
    sizes = {_text_config(config)[key] for key in ROW_COUNTS if key in _text_config(config)}
    tensors = [(name, shape) for path in weight_files(folder) for name, shape, _ in file_tensors(path)]
    names = [name for name, shape in tensors if shape and shape[0] in sizes and TABLE.fullmatch(name)]
    for name, shape in tensors:
        if (name not in names and shape[:1] == [max(sizes)]) or (name in names) != bool(TABLE.fullmatch(name)):
            raise ModelError(
                f"{folder}: {name} has {shape[0] if shape else 1:,} rows and vocab_size is {max(sizes):,}; trim knows "
                "embeddings and heads with one row per token only, so prune this model instead"
            )
    if not names:
        raise ModelError(f"{folder} has no embedding that trim knows (embed_tokens, wte, embed_in); prune it instead")
    return names


def required_ids(folder: Path, document: Json, ids: Mapping[str, int]) -> set[int]:
    """Return the ids that always stay: added tokens, single bytes, the alphabet and ids in files of
    settings. Raises: ModelError for an id that the tokenizer lacks."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = [*ByteLevel.alphabet()] if _is_byte_level(document) else [*map(chr, range(0x20, 0x7F)), "▁"]
    tokens = [*alphabet, *(f"<0x{byte:02X}>" for byte in range(256)), document["model"].get("unk_token")]
    required = {ids[token] for token in tokens if token in ids} | {token["id"] for token in document["added_tokens"]}
    known = set(ids.values())

    def note(number: int, place: str) -> int:
        if number not in known:
            raise ModelError(f"{place} is {number}, but the tokenizer of {folder} has no such token; correct it there")
        required.add(number)
        return number

    for path in folder.glob("*config.json"):
        renumber(_read(path), note, path.name)
    renumber_tokenizer(document, note)
    return required


def renumber(content: Any, new_id: Renumber, place: str) -> Any:
    """Return settings with new token ids. place: names the setting in errors."""
    if isinstance(content, list):
        return [renumber(value, new_id, place) for value in content]
    if not isinstance(content, dict):
        return content
    return {
        key: _moved(value, new_id, f"{place}: {key}")
        if TOKEN_ID.fullmatch(key)
        else value
        if key in OTHER_VOCABULARIES
        else renumber(value, new_id, place)
        for key, value in content.items()
    }


def _moved(value: Any, new_id: Renumber, place: str) -> Any:
    """Return one id or nested lists of ids; a negative id stands for none."""
    if isinstance(value, list):
        return [_moved(part, new_id, place) for part in value]
    is_id = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return new_id(value, place) if is_id else value


def renumber_tokenizer(document: Json, new_id: Renumber) -> Json:
    """Return tokenizer.json with new ids in its post-processor and padding."""

    def processor(content: Any) -> Any:
        if isinstance(content, list):
            return [processor(part) for part in content]
        if not isinstance(content, dict):
            return content
        moved = {key: processor(value) for key, value in content.items()}
        for name, token in content.get("special_tokens", {}).items():  # of a template
            ids = [new_id(number, f"tokenizer.json: {name}") for number in token["ids"]]
            moved["special_tokens"][name] = token | {"ids": ids}
        for key in {"sep", "cls"} & content.keys():  # of BERT and RoBERTa
            moved[key] = [content[key][0], new_id(content[key][1], f"tokenizer.json: {key}")]
        return moved

    moved = {"post_processor": processor(document.get("post_processor"))}
    return document | moved | {"padding": renumber(document.get("padding"), new_id, "tokenizer.json: padding")}


def template_ids(tokenizer: Any) -> Iterator[int]:
    """Yield the tokens of what the chat template writes: its constants, and a conversation."""
    from jinja2 import Environment, TemplateSyntaxError, nodes

    template = ChatTemplate(tokenizer)
    sources = tokenizer.chat_template or {}
    texts = list[str]()
    for source in sources.values() if isinstance(sources, dict) else [sources]:
        try:
            tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(
                re.sub(r"{%-? *(end)?generation", "", source)
            )
        except TemplateSyntaxError:  # of another dialect; its conversation follows
            continue
        texts += [node.data for node in tree.find_all(nodes.TemplateData)]
        texts += [node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)]
    roles = ("system", "user", "assistant", "user")
    for messages in ([{"role": role, "content": "."} for role in roles[start:]] for start in (0, 1)):
        rendered = template.render(messages)
        texts += [] if isinstance(rendered, Exception) else [rendered.text]
    for text in [*texts, template.prompt]:
        yield from tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


def read_texts(data: str, tokenizer: Any, print_line: Callable[[str], None]) -> Texts:
    """Read up to COUNTED characters, of each source a share by its turns, and hold out one excerpt in
    HELD_OUT_EVERY. Raises: TextError."""
    turns, template = Counter(sources_of(data)), ChatTemplate(tokenizer)
    texts = Texts({}, {})
    for name, count in turns.items():
        left, notes = COUNTED * count // turns.total(), Notes()
        counted, held_out = texts.counted.setdefault(name, []), texts.held_out.setdefault(name, [])
        with reading_text(name):
            documents = DocumentReader(name, template, notes).read(partial(open_rows(name).shuffled, 0))
            excerpts = (part.text for document in documents for part in cut(document, EXCERPT))
            for number, text in enumerate(excerpts, 1):
                is_held_out = number % HELD_OUT_EVERY == 0 and len(held_out) < MOST_HELD_OUT
                (held_out if is_held_out else counted).append(text)
                left -= len(text)
                if left <= 0:
                    break
        for line in notes.lines(name):
            print_line(line)
    return texts


def _by_count(texts: Texts, tokenizer: Any) -> list[int]:
    """Return the ids that occur in counted text, most frequent first."""
    counts = Counter[int]()
    for excerpts in texts.counted.values():
        for start in range(0, len(excerpts), 1000):
            for ids in tokenizer(excerpts[start : start + 1000], add_special_tokens=False, verbose=False)["input_ids"]:
                counts.update(ids)
    return [number for number, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]


def pairs_of(document: Json) -> list[tuple[str, str]]:
    """Return the merges, lowest rank first, in either form of tokenizer.json."""
    merges = (merge.split(" ") if isinstance(merge, str) else merge for merge in document["model"]["merges"])
    return [(first, second) for first, second in merges]


def parts_of(token: str, ranks: Mapping[tuple[str, str], int]) -> set[str]:
    """Return every token that BPE makes on the way to `token`; none if merges do not lead to it."""
    symbols, parts = [*token], {*token}
    while len(symbols) > 1:
        pairs = enumerate(itertools.pairwise(symbols))
        rank, index = min((ranks.get(pair, math.inf), index) for index, pair in pairs)
        if rank == math.inf:
            return set()
        symbols[index : index + 2] = [symbols[index] + symbols[index + 1]]
        parts.add(symbols[index])
    return parts


def choose(
    document: Json, ids: Mapping[str, int], required: set[int], orders: Iterable[list[int]], size: int, num_rows: int
) -> list[int]:
    """Return the kept ids, ascending: required ones, those of each order, then by rank of the merges.

    size: kept ids below `num_rows`, at most; an added token above it has no row.
    Raises: SettingError if the required ones are more.
    """
    pairs, tokens = pairs_of(document), {number: token for token, number in ids.items()}
    ranks = {pair: rank for rank, pair in reversed([*enumerate(pairs)])}
    added = {token["id"] for token in document["added_tokens"]}

    def closure(number: int) -> set[int]:
        parts = set() if number in added else parts_of(tokens[number], ranks)
        return {number, *(ids[part] for part in parts if part in ids)}

    kept = set[int]().union(*map(closure, required))
    unkept, free = set(ids.values()) - kept, size - sum(number < num_rows for number in kept)
    if free < 0:
        least = math.ceil((size - free) / MULTIPLE) * MULTIPLE
        raise SettingError("tokens", f"is {size:,}; special tokens, bytes and the chat template require {least:,}")
    by_rank = (ids[first + second] for first, second in pairs if first + second in ids)
    for number in itertools.chain(*orders, by_rank, sorted(unkept)):
        if free and number in unkept and len(added_ids := closure(number) & unkept) <= free:
            unkept -= added_ids
            free -= len(added_ids)
    return sorted(set(ids.values()) - unkept)


def trimmed_document(document: Json, new_ids: Mapping[int, int]) -> Json:
    """Return tokenizer.json with the kept tokens and the merges among them."""
    bpe = document["model"]
    vocab = {token: new_ids[number] for token, number in bpe["vocab"].items() if number in new_ids}
    kept = [{first, second, first + second} <= vocab.keys() for first, second in pairs_of(document)]
    merges = [merge for merge, is_kept in zip(bpe["merges"], kept, strict=True) if is_kept]
    added = [token | {"id": new_ids[token["id"]]} for token in document["added_tokens"]]
    return renumber_tokenizer(document, lambda number, _: new_ids[number]) | {
        "added_tokens": added,
        "model": bpe | {"vocab": vocab, "merges": merges},
    }


def trimmed_config(config: Json, new_ids: Mapping[int, int]) -> Json:
    """Return config.json with the new ids and numbers of rows."""
    config = renumber(config, lambda number, _: new_ids[number], "config.json")
    sizes = {key: _text_config(config)[key] for key in ROW_COUNTS if key in _text_config(config)}
    for part in (config, _text_config(config)):
        part |= {key: sum(old < size for old in new_ids) for key, size in sizes.items() if part.get(key) == size}
    return config


def _write_settings(folder: Path, document: Json, new_ids: Mapping[int, int]) -> None:
    """Write the tokenizer, renumber files of settings, and delete other copies of the vocabulary."""
    for pattern in TOKENIZERS:
        for path in folder.glob(pattern):
            path.unlink()
    text = json.dumps(document, ensure_ascii=False, indent=2)
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    for path in folder.glob("*config.json"):
        if path.name != "config.json":
            settings = renumber(_read(path), lambda number, _: new_ids[number], path.name)
            if added := settings.get("added_tokens_decoder"):
                settings["added_tokens_decoder"] = {str(new_ids[int(old)]): token for old, token in added.items()}
            write_json(settings, path)
    if (path := folder / "added_tokens.json").is_file():
        write_json({token: new_ids[old] for token, old in _read(path).items()}, path)


def _trimmed_tensors(folder: Path, table: Sequence[str], rows: Sequence[int]) -> Iterator[tuple[str, Any]]:
    """Yield all tensors, those of the table with the kept rows."""
    for name, tensor in stored_tensors(folder):
        yield name, tensor[[row for row in rows if row < len(tensor)]] if name in table else tensor


def random_texts(seed: int = 0) -> list[str]:
    """Return RANDOM_TEXTS strings of characters from all planes of Unicode, half of them below U+3000."""
    choice = random.Random(seed)
    planes = ((0x20, 0x2FF), (0x20, 0x2FFF), (0x20, 0xD7FF), (0xE000, 0x10FFFF))
    sizes = (choice.randint(1, 40) for _ in range(RANDOM_TEXTS))
    return ["".join(chr(choice.randint(*choice.choice(planes))) for _ in range(size)) for size in sizes]


def _prove(
    written: Path, dense: Path, tokenizer: Any, texts: Texts, new_ids: Mapping[int, int], num_rows: int
) -> dict[str, Any]:
    """Return the proof of a written folder, read by fresh processes: text of kept tokens has the same
    tokens and, but for rounding, the same logits of kept tokens; any text is decoded as by the dense model."""
    held_out = [*itertools.chain(*texts.held_out.values())]
    lines = [line for text in held_out for line in text.splitlines(keepends=True)]
    sample = random.Random(0).sample(sorted(new_ids), min(len(new_ids), SAMPLED_TOKENS))
    candidates = [*lines, PROSE, *(tokenizer.decode([number]) for number in sample), ODD, *random_texts(), *held_out]
    ids = [tokenizer(text, verbose=False)["input_ids"] for text in candidates]
    block = [*itertools.chain(*(one for one in ids if new_ids.keys() >= set(one)))][:MOST_TOKENS]
    block = [number for number in block if number < num_rows]
    before, logits = read_back(dense, candidates, block)
    if error := before.get("error"):
        raise ModelError(f"{dense} cannot be loaded by transformers ({error}); download it again")
    read = before["texts"]
    same = [index for index, one in enumerate(read["tokens"]) if new_ids.keys() >= set(one)]
    reference = Reference(
        texts=[candidates[index] for index in same],
        read={
            "tokens": [[new_ids[number] for number in read["tokens"][index]] for index in same],
            "texts": [read["texts"][index] for index in same],
            "templates": read["templates"],
        },
        tokens=[new_ids[number] for number in block],
        logits=logits[:, [number for number in new_ids if number < num_rows]],
        dtype=before["dtype"],
    )
    proved = prove(written, reference)
    after, _ = read_back(written, candidates, [])
    decoded = after.get("texts", {}).get("texts", [])
    proof = proved["proof"]
    pairs = zip(read["texts"], decoded, strict=True)
    if not proof["fault"] and (wrong := [one for one, other in pairs if one != other]):
        proof["fault"] = f"its tokenizer does not return {wrong[0][:40]!r}, which the dense model's returns"
    limit = SAME.get(before["dtype"], SAME["bfloat16"])
    if not proof["fault"] and proof["logits"] > limit:
        proof["fault"] = (
            f"logits of kept tokens are {proof['logits']:.1g} away from the dense model's; a product with fewer rows "
            f"explains {limit:g}"
        )
    return proved


def _costs(folders: tuple[Path, Path], texts: Texts, documents: tuple[Json, Json]) -> Json:
    """Return what the smaller vocabulary saves and costs, before and after: numbers that a step
    reads, and by text the tokens and the bits per byte; and the words that became longest."""
    from tokenizers import Tokenizer

    shapes = ({name: shape for path in weight_files(one) for name, shape, _ in file_tensors(path)} for one in folders)
    costs: Json = {"read": [numbers_read(stored)[0] for stored in shapes], "texts": {}}
    before, after = (Tokenizer.from_str(json.dumps(document)) for document in documents)
    held_out = {name: excerpts for name, excerpts in texts.held_out.items() if any(excerpts)}
    bits = dict[str, list[float]]()
    for folder in folders:  # one model in memory at a time
        model, tokenizer = load_model(open_source(str(folder)), "auto"), load_tokenizer(str(folder))
        for name, excerpts in held_out.items():
            bits.setdefault(name, []).append(bits_per_byte(model, tokenizer, excerpts[:READ]))
        del model
    for name, excerpts in held_out.items():
        num_bytes = sum(len(text.encode()) for text in excerpts)
        counts = [sum(len(one.ids) for one in tool.encode_batch(excerpts)) for tool in (before, after)]
        known = bare_name(name) if bare_name(name) not in costs["texts"] else name  # of another folder
        costs["texts"][known] = {"tokens": [count / num_bytes for count in counts], "bits": bits[name]}
    words = {f" {word}" for excerpts in texts.held_out.values() for text in excerpts for word in text.split()}
    lengths = {word.strip(): (len(before.encode(word).ids), len(after.encode(word).ids)) for word in sorted(words)}
    longer = sorted(lengths, key=lambda word: lengths[word][0] - lengths[word][1])
    costs["words"] = {word: lengths[word] for word in longer[:SHOWN] if lengths[word][1] > lengths[word][0]}
    return costs


def _summary(costs: Json, known: int, kept: int) -> Iterator[str]:
    """Yield what changed, in lines."""
    first, second = costs["read"]
    yield (
        f"tokens: {known:,} → {kept:,}; numbers that a decode step reads: {first:,} → {second:,} "
        f"({second / first - 1:+.0%})"
    )
    for name, values in costs["texts"].items():
        parts = ((what, *values[what], values[what][1] / values[what][0]) for what in ("tokens", "bits"))
        described = ", ".join(
            f"{what} per byte {old:.4f} → {new:.4f} ({ratio:.3f}×)" for what, old, new, ratio in parts
        )
        yield f"held-out text of {name}: {described}"
    if costs["words"]:
        words = ", ".join(f"{word} ({old} → {new})" for word, (old, new) in costs["words"].items())
        yield f"words that became longest, in tokens: {words}"
    yield LONGER
