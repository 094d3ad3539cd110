"""The verb trim: write a dense model with fewer tokens, as a stock model of the same class.

Tokens that text does not use are removed from the tokenizer (`text/vocabulary.py`), and their rows
from the embedding and the head. The logits of kept tokens are the dense model's, on text of kept
tokens.
"""

import itertools
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from msgspec import convert
from transformers import AutoTokenizer

from ddp_prune.models.evaluation import bits_of
from ddp_prune.models.loading import load_model
from ddp_prune.models.source import Source, open_source, stock_config
from ddp_prune.text.documents import read_excerpts
from ddp_prune.text.messages import Notes
from ddp_prune.text.rows import sources_of
from ddp_prune.text.tokens import load_tokenizer, token_ids
from ddp_prune.text.vocabulary import (
    MULTIPLE,
    OTHER_VOCABULARIES,
    TOKEN_ID,
    Json,
    by_count,
    choose,
    ids_of,
    load_document,
    read_settings,
    renumber,
    required_ids,
    trimmed_document,
)
from ddp_vllm import read_back as reading
from ddp_vllm.checkpoint import read_config
from ddp_vllm.costs import numbers_read
from ddp_vllm.dimensions import TABLE, is_copied_head, longest_context, text_config
from ddp_vllm.errors import ModelError, Printer, SettingError
from ddp_vllm.families import check_dense
from ddp_vllm.masks import MASKS_FILE, Trimmed
from ddp_vllm.model_facts import is_pruned, local_folder
from ddp_vllm.model_files import (
    TOKENIZERS,
    state_class,
    stored_tensors,
    tokenizer_class,
    write_json,
    write_model_files,
    write_weights,
)
from ddp_vllm.names import bare_name
from ddp_vllm.output import atomic_folder
from ddp_vllm.pages.card import write_trimmed_pages
from ddp_vllm.pages.summary import trimming
from ddp_vllm.proof import MOST_TOKENS, ODD, PROSE, Reference, difference, distance, read_back
from ddp_vllm.provenance import provenance_of, write_provenance

COUNTED = 100_000_000  # characters of all sources together; of a large table 30 million show too few tokens
EXCERPT, HELD_OUT_EVERY, MOST_HELD_OUT = 3000, 16, 64  # characters; excerpts; excerpts of each source
READ, SHOWN = 8, 10  # excerpts of each source that both models read; words
RANDOM_TEXTS, SAMPLED_TOKENS = 1000, 2000  # texts of the proof
PLANES = ((0x20, 0x2FF), (0x20, 0x2FFF), (0x20, 0xD7FF), (0xE000, 0x10FFFF))  # of Unicode, in equal shares
SAME = {"float32": 1e-5, "bfloat16": 1e-3}
"""Number format -> the largest distance of logits. The rows are the same to the bit, but a matrix product
with fewer rows may add in another order: 3e-8 of a small model in float32, 8e-7 of SmolLM2-135M in bfloat16."""
WORD = re.compile(r"[^\W\d_]+")  # no addresses, which grow most and tell least
SECOND_VOCABULARY = re.compile(  # of Gemma 3n; of Chameleon and Emu3; the n-grams of ids of Qwen4
    r'"(vocab_offset|vocabulary_map|ple_layer_ids)": (?!null|\[\])'
)
ROW_COUNTS = ("vocab_size", "vocab_size_per_layer_input")


class Texts(NamedTuple):
    """Text in excerpts."""

    counted: list[str]
    held_out: dict[str, list[str]]
    """By source."""


def trim(
    model: str,
    data: str,
    keep: str,
    output: Path,
    *,
    num_tokens: int,
    overwrite: bool,
    proof: bool,
    print_line: Printer,
) -> None:
    """Write the dense `model` with at most `num_tokens` tokens.

    data: texts that are counted, as in `load_blocks`. keep: further texts, whose tokens stay before
        those of `data`, or "".
    print_line: prints a line of the summary.
    Raises: ModelError if the model is not dense, its tokenizer is neither BPE nor Unigram that can
        write any text, or a setting names an id that the tokenizer lacks; SettingError if `num_tokens` is too low or
        leaves nothing to remove; TextError; OutputError and CheckpointError as `atomic_folder`.
    """
    folder = local_folder(model)
    if folder is None:
        raise ModelError(f"{model} is not on this machine; run: hf download {model}")
    config = _checked(folder)
    tokenizer, document = load_document(model, folder)
    source, ids = open_source(model, to_prune=False), ids_of(document)
    of_class = json.loads(stock_config(folder).to_json_string(use_diff=False))
    config = _with_defaults(config, of_class, {*ids.values()})
    table, num_rows = table_of(source, config), text_config(config)["vocab_size"]
    target = num_tokens // MULTIPLE * MULTIPLE
    if not target or target >= sum(number < num_rows for number in ids.values()):
        raise SettingError(
            "tokens",
            f"is {num_tokens:,}; it must be at least {MULTIPLE} and below the {len(ids):,} tokens of {model}",
        )
    required = required_ids(folder, config, document, tokenizer)
    counted, held_out = read_texts(data, tokenizer, print_line)
    further = read_texts(keep, tokenizer, print_line, most_held_out=0).counted if keep else []
    drop_counted(held_out, [*counted, *further])
    for name, excerpts in held_out.items():
        if not excerpts:
            print_line(f"every excerpt of {name} is counted, so its cost is not measured; give more such text")
    orders = [by_count(excerpts, tokenizer) for excerpts in (further, counted)]
    kept = choose(document, required, orders, target, num_rows)
    new_ids, rows = {old: new for new, old in enumerate(kept)}, [old for old in kept if old < num_rows]
    occur, characters = len({*itertools.chain(*orders)}), sum(map(len, [*counted, *further]))
    print_line(f"{len(rows):,} of {len(ids):,} tokens stay; {occur:,} occur in the {characters:,} counted characters")

    def kept_rows() -> Iterator[tuple[str, Any]]:
        """Yield all tensors but a copied head, those of the table with the kept rows."""
        for name, tensor in stored_tensors(folder):
            if not is_copied_head(config, name):
                yield name, tensor[[row for row in rows if row < len(tensor)]] if name in table else tensor

    with atomic_folder(output, overwrite=overwrite) as writing:
        write_model_files(writing, folder, trimmed_config(config, new_ids))
        _write_settings(writing, trimmed_document(document, new_ids), new_ids)
        state_class(writing, tokenizer_class(tokenizer))
        write_weights(kept_rows(), writing)
        if proof:
            print_line("comparing tokens and logits with the dense model's, in fresh processes")
        proved = _prove(writing, source, held_out, new_ids, rows) if proof else {}
        print_line("evaluating both models on held-out text")
        costs = _costs((source, open_source(str(writing), to_prune=False)), held_out)
        name = folder.resolve().name if Path(model).is_dir() else model  # not the hash of a snapshot
        entry = {"name": name, "tokens": (len(ids), len(rows)), **costs}
        write_provenance(writing / MASKS_FILE, {"trimmed": entry, "applied_to": model, "proof": proved})
        trimmed = convert(entry, Trimmed)
        write_trimmed_pages(writing, output.name, trimmed)
    for topic, statement in trimming(trimmed):
        print_line(f"{topic}: {statement}")


def _checked(folder: Path) -> Json:
    """Return the config of a dense model. Raises: ModelError."""
    config = read_config(folder)
    if trimmed := provenance_of(folder).get("trimmed"):
        raise ModelError(
            f"{folder} is trimmed already, and its pages would state the cost of the second time only; trim "
            f"{trimmed['name']} to as many tokens in one go"
        )
    if is_pruned(folder) or (folder / MASKS_FILE).exists():
        raise ModelError(f"{folder} is pruned or converted already; trim the dense model first, then prune the result")
    check_dense(config, to_prune=False)
    if second := SECOND_VOCABULARY.search(json.dumps(config)):
        raise ModelError(
            f"{folder} has a second vocabulary ({second[1]}), which trim does not move; choose another model"
        )
    return config


def _with_defaults(config: Json, usual: Json, known: set[int]) -> Json:
    """Return config.json with the numbers of rows and the token ids that it leaves to its class, as Gemma 3 with
    images. usual: all settings of the class. known: ids of the tokenizer; a default that is none of them stays out."""
    stated = dict(config)
    for key, value in usual.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict) and key not in OTHER_VOCABULARIES:
            stated[key] = _with_defaults(config[key], value, known)
        elif key in config:
            continue
        elif key in ROW_COUNTS or (
            TOKEN_ID.fullmatch(key) and known.issuperset(value if isinstance(value, list) else [value])
        ):
            stated[key] = value
    return stated


def _row_counts(config: Json) -> dict[str, int]:
    return {key: text_config(config)[key] for key in ROW_COUNTS if key in text_config(config)}


def table_of(source: Source, config: Json) -> list[str]:
    """Return the names of tensors whose first axis is the vocabulary. Raises: ModelError if a tensor
    of another name is as long, or the output head is not known."""
    sizes, names = {*_row_counts(config).values()}, list[str]()
    if source.structure:
        load_model(source, "auto", torch.device("cpu"))  # refuses an output head that it does not know
    if not sizes:
        raise ModelError(f"{source.folder}/config.json has no vocab_size; download the model again")
    for name, shape in source.shapes.items():
        is_table = bool(TABLE.fullmatch(name))
        if is_table != (shape[0] in sizes if shape else False) and (is_table or shape[0] == max(sizes)):
            raise ModelError(
                f"{source.folder}: {name} has {shape[0] if shape else 1:,} rows and vocab_size is {max(sizes):,}; trim "
                "knows embeddings and heads with one row per token only, so prune this model instead"
            )
        names += [name] * is_table
    if not names:
        raise ModelError(
            f"{source.folder} has no embedding that trim knows, such as embed_tokens or wte; prune it instead"
        )
    return names


def read_texts(data: str, tokenizer: Any, print_line: Printer, most_held_out: int = MOST_HELD_OUT) -> Texts:
    """Read up to COUNTED characters, of each source a share by its turns.

    most_held_out: excerpts of each source that are held out: the second of HELD_OUT_EVERY. Raises: TextError.
    """
    turns, texts = Counter(sources_of(data)), Texts([], {})
    for name, count in turns.items():
        left, notes, held_out = COUNTED * count // turns.total(), Notes(), texts.held_out.setdefault(name, [])
        for number, text in enumerate(read_excerpts(name, tokenizer, EXCERPT, notes)):
            is_held_out = number % HELD_OUT_EVERY == 1 and len(held_out) < most_held_out
            (held_out if is_held_out else texts.counted).append(text)
            left -= len(text)
            if left <= 0:
                break
        for line in notes.lines(name):
            print_line(line)
    return texts


def drop_counted(held_out: dict[str, list[str]], counted: Iterable[str]) -> None:
    """Remove the held-out excerpts that are counted, as parts of any text, too."""
    searched = bytearray()  # a string with one emoji takes four bytes per character, and as much longer to search
    for excerpt in counted:
        searched += excerpt.encode()
    for excerpts in held_out.values():
        excerpts[:] = [excerpt for excerpt in excerpts if excerpt.encode() not in searched]


def trimmed_config(config: Json, new_ids: Mapping[int, int]) -> Json:
    """Return config.json with the new ids and numbers of rows."""
    config = renumber(config, lambda number, _: new_ids[number], "config.json")
    sizes = _row_counts(config)
    for part in (config, config.get("text_config", config)):
        part |= {key: sum(old < size for old in new_ids) for key, size in sizes.items() if part.get(key) == size}
    return config


def _write_settings(folder: Path, document: Json, new_ids: Mapping[int, int]) -> None:
    """Write the tokenizer, renumber files of settings, and delete other copies of the vocabulary."""
    for path in itertools.chain(*map(folder.glob, TOKENIZERS)):
        path.unlink()
    ids, text = ids_of(document), json.dumps(document, ensure_ascii=False, indent=2)
    (folder / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    for path in {*folder.glob("*config.json")} - {folder / "config.json"}:
        settings = renumber(read_settings(path), lambda number, _: new_ids[number], path.name)
        if isinstance(settings, dict) and (added := settings.get("added_tokens_decoder")):
            settings["added_tokens_decoder"] = {
                str(ids[token["content"]]): token for token in added.values() if token["content"] in ids
            }
        write_json(settings, path)
    if (path := folder / "added_tokens.json").is_file():
        write_json({token: ids[token] for token in read_settings(path) if token in ids}, path)


def _prove(
    written: Path, dense: Source, texts: Mapping[str, list[str]], new_ids: Mapping[int, int], rows: Sequence[int]
) -> Json:
    """Return the proof of a written folder, as `proof.prove` does. Fresh processes read both models:
    text of kept tokens has the same tokens and, but for rounding, the same logits of kept tokens, and
    any text is decoded as by the dense model."""
    tokenizer, chance = AutoTokenizer.from_pretrained(dense.tokenizer, trust_remote_code=False), random.Random(0)
    held_out = [*itertools.chain(*texts.values())]
    lines = itertools.chain(*(text.splitlines(keepends=True) for text in held_out))
    sample = chance.sample(sorted(new_ids), min(len(new_ids), SAMPLED_TOKENS))
    odd = ["".join(chr(chance.randint(*chance.choice(PLANES))) for _ in range(20)) for _ in range(RANDOM_TEXTS)]
    candidates = [*lines, PROSE, *map(tokenizer.decode, sample), ODD, *odd, *held_out]
    natural = itertools.chain(*reading.read_texts(tokenizer, [PROSE, ODD, *held_out[:READ]])["tokens"])
    longest = longest_context(dense.config) or MOST_TOKENS
    have_row = {*rows}
    block = [number for number in natural if number in have_row][: min(longest, MOST_TOKENS)]
    before, logits = read_back(dense.folder, (), block)
    if error := before.get("error"):
        raise ModelError(f"{dense.tokenizer} cannot be loaded by transformers ({error}); download it again")
    after, new_logits = read_back(written, candidates, [new_ids[number] for number in block])
    if error := after.get("error"):
        return {"fault": f"transformers cannot load it ({error})"}
    read, again = reading.read_texts(tokenizer, candidates), after["texts"]
    same = [pair for pair in zip(read["tokens"], again["tokens"], strict=True) if new_ids.keys() >= {*pair[0]}]
    read["tokens"] = [[new_ids[number] for number in ids] for ids, _ in same]
    again["tokens"] = [ids for _, ids in same]
    far = distance(new_logits, logits[:, rows])
    limit = SAME.get(before["dtype"], SAME["bfloat16"])
    fault = difference(Reference(read=read), after)
    if not fault and not far <= limit:
        fault = f"logits of kept tokens are {far:.1g} away from the dense model's, of which rounding explains {limit:g}"
    return {"tokens": sum(map(len, again["tokens"])), "logits": far, "tolerance": limit, "fault": fault}


def _costs(sources: Sequence[Source], held_out: Mapping[str, list[str]]) -> Json:
    """Return what the smaller vocabulary saves and costs (`Trimmed` in masks.py). sources: the dense model and the
    trimmed one."""
    known = dict[str, list[str]]()  # text by the name that pages show
    for name, excerpts in held_out.items():
        if excerpts:
            known[bare_name(name) if bare_name(name) not in known else name] = excerpts  # of another folder
    texts: Json = {name: {"tokens": [], "bits": []} for name in known}
    words = sorted({word for excerpts in known.values() for text in excerpts for word in WORD.findall(text)})
    sizes, read = {word: list[int]() for word in words}, list[int]()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # without it, "auto" may emulate bfloat16
    for source in sources:  # one model in memory at a time
        tokenizer, model = load_tokenizer(source.tokenizer), load_model(source, "auto", device)
        read.append(round(numbers_read(source.config, source.shapes)[0]))
        for name, excerpts in known.items():
            num_tokens = sum(map(len, token_ids(tokenizer, excerpts)))
            texts[name]["tokens"].append(num_tokens / len("".join(excerpts).encode()))
            bits, _ = bits_of(model, tokenizer, excerpts[:READ])
            texts[name]["bits"].append(sum(bits) / len("".join(excerpts[:READ]).encode()))
        for word in words:
            sizes[word].append(len(token_ids(tokenizer, f" {word}")))
        del model
    longest = sorted(words, key=lambda word: sizes[word][0] - sizes[word][1])[:SHOWN]
    longer = {word: sizes[word] for word in longest if sizes[word][0] < sizes[word][1]}
    return {"read": read, "texts": texts, "words": longer}
