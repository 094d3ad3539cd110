"""Rows of every common format: the document, its loss mask, and what is printed of it.

What is dropped, unknown or changed is printed once per source; a wrong value names its row and turn. The templates are
short forms of published ones, with the conditions that raise.
"""

import gzip
import json
import lzma
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import seams
import torch
from chat_templates import PARTS, PUBLISHED, STRICT, tokenizer_of
from runs import small_files
from seams import Blocks, ChatTemplate, DocumentReader, Notes, document, open_rows

from ddp_vllm.errors import OutputError, TextError

Load = Callable[..., Any]
LENIENT = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
GEMMA = (  # Gemma-2-it
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}"
    "{{ '<' + m['role'] + '>' + m['content'] + '\n' }}{% endfor %}"
)
AGENT = (  # in the manner of Qwen3: thoughts and calls of an assistant
    "{%- for m in messages %}{{- '<' + m.role + '>' }}"
    "{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}"
    "{{- m.content or '' }}{%- for call in m.tool_calls or [] %}{{- '[' + call.function.name + ' ' }}"
    "{{- call.function.arguments | tojson + ']' }}{%- endfor %}{%- endfor %}"
)
SPOKEN_ONLY = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}{% endif %}{% endfor %}"
TWICE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.content }}{% endfor %}"
A = {"role": "user", "content": "a"}
B = {"role": "assistant", "content": "b"}
SYSTEM = {"role": "system", "content": "s"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"city": "Oslo"}}}
ASKED = [
    A, {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "21"}, {**B, "reasoning_content": "ah"},
]  # fmt: skip
UNREAD = "columns that are not read, with their rows: {}"
PLAIN = "conversations read as plain text: {} (2)"
REARRANGED = "conversations rearranged so that user and assistant alternate: Roles must alternate (2)"
LEFT_OUT = "parts of conversations that the chat template leaves out or changes: {}"
UNLOCATED = (
    "answers that are not in the loss of assistants, because: they cannot be located where the chat template "
    "repeats or hides words (2)"
)


def said(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in turns]}


def turns(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), **more}


# template, row, text, characters in the loss with | for runs of others; None: all; notes of two such rows, in part
ROWS: dict[str, tuple[str | None, Any, str, str | None, list[str]]] = {
    "share-gpt": (LENIENT, said(("human", "a"), ("gpt", "b")), "<user>a<assistant>b", "|b", []),
    "speakers of other names": (
        LENIENT, said(("developer", "c"), ("Human", "a"), ("GPT-4o-mini", "d"), ("observation", "e")),
        "<system>c<user>a<assistant>d<tool>e", "|d|", []),
    "a template that knows developers": (  # others read them as the system
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'developer' %}{{ m.content }}{% endif %}{% endfor %}",
        turns({"role": "developer", "content": "c"}), "<developer>c", "|", []),
    "unknown speakers": (LENIENT, turns({"role": "alice", "content": "a"}, B), "<user>a<assistant>b", "|b",
                         ["unknown speakers, read as the user, with their turns: alice (2)"]),
    "dolly": (LENIENT, {"instruction": "a", "context": "c", "response": "b"}, "<user>a\n\nc<assistant>b", "|b", []),
    "alpaca": (LENIENT, {"instruction": "a", "input": "c", "output": "b"}, "<user>a\n\nc<assistant>b", "|b", []),
    "history": (
        LENIENT, {"instruction": "a", "output": "b", "history": [["c", "d"]]}, "<user>c<assistant>d<user>a<assistant>b",
        "|d|b", [],
    ),
    "openorca": (LENIENT, {"id": 1, "system_prompt": "s", "question": "a", "response": "b"},
                 "<system>s<user>a<assistant>b", "|b", [UNREAD.format("id (2)")]),
    "system beside turns": (LENIENT, said(("human", "a")) | {"system": "s"}, "<system>s<user>a", "|", []),
    "trl": (LENIENT, {"prompt": [A], "completion": [B]}, "<user>a<assistant>b", "|b", []),
    "text beside messages": (LENIENT, turns(A, text="fox", id=1, input=""), "fox", None,
                             [UNREAD.format("messages (2)")]),
    "two forms": (LENIENT, turns(SYSTEM, A, conversations=[A], input="c", system="x"), "<system>s<user>a", "|",
                  [UNREAD.format("conversations (2), input (2), system (2)")]),
    "parts of a turn": (  # joined as vLLM joins them; those that are no text are dropped
        LENIENT, turns({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"},
                                                    {"type": "text", "text": "b"}]}), "<user>a\nb", "|",
        ["parts of turns that are no text, which are dropped: image_url (2)"]),
    "parts rendered apart": (PARTS, turns({"role": "user", "content": [{"type": "text", "text": "a"}]}),
                             "<|im_user|><text>a<|im_end|>", "|", []),
    "parts not rendered apart": ("{{ messages[0].content | tojson }}", turns({"role": "user", "content": ["a"]}),
                                 '"a"', "|", []),
    "what is not read": (
        LENIENT, turns(A, {**B, "reasoning_content": "d", "name": "e"}, {"role": "user", "content": ""}, tools=TOOLS),
        "<user>a<assistant>b<user>", "|b|", [LEFT_OUT.format("tools (2), reasoning (2)")]),
    "no words at all": (LENIENT, turns({**A, "content": ""}, {**B, "content": None}), "", None,
                        ["2 answers without words, which are not in the loss", "2 rows without text"]),
    "an answer without words": (LENIENT, turns(A, {**B, "content": ""}, A, B),
                                "<user>a<assistant><user>a<assistant>b", "|b",
                                ["2 answers without words, which are not in the loss"]),
    "two systems": (LENIENT, turns(SYSTEM, A, {"role": "developer", "content": "d"}, B),
                    "<system>s\n\nd<user>a<assistant>b", "|b", []),
    "keys that are not read": (
        LENIENT, turns({**A, "masked": True}, {**B, "train_on_turn": False, "id": None, "tags": []}),
        "<user>a<assistant>b", "|b",
        ["keys of messages that are not read, with their messages: masked (2), train_on_turn (2)"]),
    "a call of no form": (
        AGENT, said(("human", "a"), ("function_call", "I call {it")), "<user>a<assistant>I call {it", "|I call {it",
        ["2 calls that are neither JSON nor Python, which are read as words"]),
    "a call that is cut off": (
        AGENT, said(("human", "a"), ("function_call", '{"name": "f", "arguments": {}}\n{"name":')),
        '<user>a<assistant>{"name": "f", "arguments": {}}\n{"name":', '|{"name": "f", "arguments": {}}\n{"name":',
        ["2 calls that are neither JSON nor Python, which are read as words"]),
    "half a character, packed": (LENIENT, {"messages": json.dumps([A, {**B, "content": "b \ud83d"}])},
                                 "<user>a<assistant>b ?", "|b ?", []),
    "half a character in arguments": (
        AGENT, turns(A, {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": "\\ud83d"}'}}),
        '<user>a<assistant>[f {"x": "?"}]', '|[f {"x": "?"}]', []),
    "half a character in tools": (
        "{% for t in tools %}{{ t.function.description }}{% endfor %}{{ messages[0].content }}",
        turns(A, tools=json.dumps([{"name": "f", "description": "\ud83d"}])), "?a", "|",
        [LEFT_OUT.format("tools (2)")]),
    "half a character, spoken": (
        AGENT, said(("human", "a"), ("function_call", "{'name': 'f', 'arguments': {'x': '\\ud83d'}}")),
        '<user>a<assistant>[f {"x": "?"}]', '|[f {"x": "?"}]', []),
    "an agent": (AGENT, turns(*ASKED), '<user>a<assistant><think>hm</think>[look {"city": "Oslo"}]<tool>21'
                 "<assistant><think>ah</think>b", '|<think>hm</think>[look {"city": "Oslo"}]|<think>ah</think>b',
                 []),
    "an agent, packed": (AGENT, {"conversations": json.dumps(ASKED)},
                         '<user>a<assistant><think>hm</think>[look {"city": "Oslo"}]<tool>21'
                         "<assistant><think>ah</think>b",
                         '|<think>hm</think>[look {"city": "Oslo"}]|<think>ah</think>b', []),
    "a call that later turns depend on": (
        STRICT, turns(*ASKED), '<s>[INST]a[/INST][TOOL_CALLS][{"arguments": {"city": "Oslo"}, "name": "look", '
        '"id": "1"}]</s>[TOOL_RESULTS]{"content": 21, "call_id": "1"}b</s>',
        '|[TOOL_CALLS][{"arguments": {"city": "Oslo"}, "name": "look", "id": "1"}]|b|',
        [LEFT_OUT.format("reasoning (4)")]),
    "weights": (LENIENT, turns(A, {**B, "weight": 0}, {**B, "weight": "1", "train": True}, {**B, "train": "False"}),
                "<user>a<assistant>b<assistant>b<assistant>b", "|b|", []),
    "weights of others": (
        LENIENT, turns(A, {**B, "loss": False}, {**B, "training": False}, {**B, "loss": 1, "training": True}),
        "<user>a<assistant>b<assistant>b<assistant>b", "|b", []),
    "assistant first": (
        GEMMA, said(("gpt", "x"), ("human", "a"), ("gpt", "b"), ("tool", "21")), "<user>a\n<assistant>b\n<user>21\n",
        "|b\n|", [REARRANGED, LEFT_OUT.format("assistant (2)")]),
    "neighbors": (GEMMA, turns(A, A, B, B, A, {**B, "weight": 0}, B),
                  "<user>a\n\na\n<assistant>b\n\nb\n<user>a\n<assistant>b\n\nb\n", "|b\n\nb\n|",
                  [REARRANGED]),
    "system refused": (GEMMA, turns(SYSTEM, A, B), "s\n\na\n\nb", None,
                       [PLAIN.format("System role not supported")]),
    "system left out": (SPOKEN_ONLY, turns(SYSTEM, A, B), "ab", "|b",
                        [LEFT_OUT.format("system (2)")]),
    "no template": (None, turns(A, B), "a\n\nb", None,
                    [PLAIN.format("the tokenizer has no chat template; put chat_template.jinja into the model's "
                                  "folder")]),
    "words twice": (TWICE, turns(A, B), "<user>aa<assistant>bb", "|", [UNLOCATED]),
}  # fmt: skip


def notes_of(rows: list[Any], tokenizer: Any, folder: Path) -> list[str]:
    """Return the lines that reading these rows prints."""
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = Notes()
    list(DocumentReader("chat.jsonl", ChatTemplate(tokenizer), notes).read(open_rows(str(folder / "chat.jsonl")).read))
    return [line.removeprefix(f"{folder / 'chat.jsonl'}: ") for line in notes.lines(str(folder / "chat.jsonl"))]


@pytest.mark.parametrize("case", ROWS)
def test_a_row_is_a_document_with_a_loss_mask_and_notes(case: str, tokenizer: Any, tmp_path: Path) -> None:
    """Without a template it is a text of the same words."""
    tokenizer.chat_template, row, text, mask, notes = ROWS[case]
    found = document(row, tokenizer)
    assert found.text == text
    assert (None if found.loss_mask is None else re.sub(r"\|+", "|", seams.in_loss(found))) == mask
    lines = notes_of([row, row], tokenizer, tmp_path)
    assert sorted(lines) == sorted(notes)
    if tokenizer.chat_template == LENIENT and "tool" not in text:
        tokenizer.chat_template = None
        words = [word for word in re.split(r"<\w+>", text) if word]
        assert document(row, tokenizer) == seams.Document("\n\n".join(words))


@pytest.mark.parametrize("file", ["chat_template.json", "processor_config.json"])
def test_the_template_of_a_processor_is_for_requests_without_tools(file: str, tiny_model: Path, tmp_path: Path) -> None:
    """As vLLM takes them; a chat_template.jinja is of both."""
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    (folder / file).write_text(json.dumps({"chat_template": LENIENT}))
    row = turns(A, B)
    assert document(row, seams.load_tokenizer(str(folder))).text == "<user>a<assistant>b"
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": SPOKEN_ONLY}))
    tokenizer = seams.load_tokenizer(str(folder))
    assert document(row, tokenizer).text == "<user>a<assistant>b"
    assert document(row | {"tools": TOOLS}, tokenizer).text == "ab"
    (folder / "chat_template.jinja").write_text(TWICE)
    assert document(row, seams.load_tokenizer(str(folder))).text == "<user>aa<assistant>bb"


REASONED = [
    ("user", "how many foxes jump"), ("assistant", "<think>\nthey are red\n</think>\n\nnine foxes"),
    ("user", "why"), ("assistant", "<think>\nof them\n</think>\n\n42 foxes do."),
]  # fmt: skip
ANSWERED = [("user", "how many"), ("assistant", " nine foxes\n"), ("user", "why"), ("assistant", "42 foxes do.")]
WHOLE = ["<think>\nthey are red\n</think>\n\nnine foxes", "<think>\nof them\n</think>\n\n42 foxes do."]
STRIPPED = ["nine foxes", "42 foxes do."]
GENERATED = {  # family: text in the loss without the token that ends a turn, for REASONED and for ANSWERED; that token
    "qwen3": ([WHOLE[1]], [" nine foxes\n", "42 foxes do."], "<|im_end|>"),
    "r1": ([], [" nine foxes\n", "42 foxes do."], "<｜end▁of▁sentence｜>"),
    "llama2": ([f" {words} " for words in WHOLE], [f" {words} " for words in STRIPPED], "</s>"),
}


@pytest.mark.parametrize("family", PUBLISHED)
def test_under_published_templates_the_loss_is_on_what_the_assistant_generates(family: str) -> None:
    """R1 drops the thoughts of every turn, Qwen3 those of earlier turns: no server generates these answers. Other
    templates keep or strip the words."""
    tokenizer = tokenizer_of(family)
    *expected, end = GENERATED[family]
    for spoken, answers in zip((REASONED, ANSWERED), expected, strict=True):
        messages = [{"role": role, "content": words} for role, words in spoken]
        read = document(turns(*messages), tokenizer)
        assert read.text == tokenizer.apply_chat_template(messages, tokenize=False)
        (tokens,) = seams.tokenize([read], tokenizer)
        assert not tokens.loss_mask[-1]  # the EOS between documents
        names = tokenizer.convert_ids_to_tokens(tokens.ids.tolist())
        generated = "".join(name if mask else "\0" for name, mask in zip(names, tokens.loss_mask, strict=True))
        generated = generated.translate({ord("Ġ"): " ", ord("Ċ"): "\n"}).replace("<0x0A>", "\n")
        generated = generated if family == "r1" else re.sub("▁+", " ", generated)
        if end == "</s>":  # such a tokenizer begins parts with a blank
            generated = re.sub("(\n|</?think>) ", r"\1", generated)
        assert [run for run in generated.split("\0") if run] == [answer + end for answer in answers]


def test_a_table_adds_no_keys(tokenizer: Any, tmp_path: Path) -> None:
    """A Parquet file fills every message and every argument of a call with the keys of all others."""
    import pyarrow
    import pyarrow.parquet

    tokenizer.chat_template = AGENT
    call = {"type": "function", "function": {"name": "look", "arguments": {"days": 2}}}
    chats = [ASKED, [A, {"role": "assistant", "content": "", "tool_calls": [call]}]]
    table = pyarrow.Table.from_pylist([{"text": "no", "chat": chat} for chat in chats])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    rows = open_rows(str(tmp_path / "a.parquet"), "chat")
    found = [read.text for read in DocumentReader("a", ChatTemplate(tokenizer), Notes(), "chat").read(rows.read)]
    assert found == [document(turns(*chat), tokenizer).text for chat in chats]


def talk(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"nine foxes {number}"}, {"role": "assistant", "content": "jump"}]


TALKS = [talk(number) for number in range(60)]
SHAPES = {
    "lists": "\n".join(map(json.dumps, TALKS)),
    "array": json.dumps([{"messages": messages} for messages in TALKS], indent=1),
    "half of a character": "\n".join(json.dumps([*talk, {"role": "user", "content": "\ud83d"}]) for talk in TALKS),
    "one conversation": "\ufeff" + json.dumps(TALKS[0] * 60),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_json_of_every_shape_is_read(shape: str, load: Load, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = LENIENT
    (tmp_path / "a.json").write_text(SHAPES[shape])
    blocks = load(tmp_path / "a.json", tokenizer)
    assert re.search("<user>nine foxes [0-9]+<assistant>jump", tokenizer.decode(blocks.train.flatten()))


def second_line(row: Any) -> bytes:
    """A file with a text of brackets, which is text, and then a row."""
    line = row if isinstance(row, str) else json.dumps(row)
    return f"{json.dumps({'text': '[' * 500 + ' fox' * 99})}\n{line}\n".encode()


BAD: dict[str, tuple[str, bytes, str]] = {  # file name, content, words of the line
    "number": ("a.jsonl", second_line(turns(A, {"role": "assistant", "content": 17})),
               "a.jsonl, line 2: messages: turn 2: the content is a number"),
    "no turns": ("a.jsonl", second_line({"messages": "a"}), "line 2: messages: a string, not a list of messages"),
    "no role": ("a.jsonl", second_line({"messages": [{"content": "a"}]}), "line 2: messages: turn 1: no role"),
    "weight": ("a.jsonl", second_line(turns({**B, "weight": 0.5})), "turn 1: '0.5' as weight; write 0 or 1"),
    "loss": ("a.jsonl", second_line(turns({**B, "loss": 1.7})), "turn 1: '1.7' as loss; write 0 or 1"),
    "UTF-16": ("a.jsonl", json.dumps(turns(A, B)).encode("utf-16"), "line 1: not UTF-8 (invalid start byte); convert "
               "the file: iconv -f UTF-16 -t UTF-8"),
    "UTF-16 without a mark": ("a.txt", "füchse".encode("utf-16-le"), "a.txt: not UTF-8"),
    "Latin-1": ("a.jsonl", '{"text": "Füchse"}\n'.encode("latin1"), "line 1: not UTF-8 (invalid start byte); convert "
                "the file: iconv -f LATIN1"),
    "Latin-1 text": ("a.txt", "Füchse".encode("latin1"), "a.txt: not UTF-8 (invalid start byte); convert the file"),
    "Latin-1, packed": ("a.jsonl.gz", gzip.compress('{"text": "Füchse"}\n'.encode("latin1")), "not UTF-8"),
    "own columns": ("a.jsonl", second_line({"id": 1, "chosen": "a", "rejected": "b"}), "only id, chosen, rejected"),
    "nested too deeply": ("a.jsonl", second_line(f'{{"text": {"[" * 10**6}{"]" * 10**6}}}'),
                          "line 2: not JSON (maximum recursion"),
    "empty": ("a.txt", b"", "a.txt: 1 rows without text"),
    "cut gzip": ("a.jsonl.gz", gzip.compress(b'{"text": "plain"}\n' * 999)[:40], "a.jsonl.gz cannot be read"),
    "too short": ("a.jsonl", b'{"text": "a few words"}\n', "require 80; give more text or lower --batch-size"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_text_is_one_line_with_place_and_remedy(case: str, load: Load, tmp_path: Path, cache: Path) -> None:
    name, content, words = BAD[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TextError, match=r"^[^\n]*;[^\n]*$") as caught:
        load(tmp_path / name)
    assert words in str(caught.value) and not (cache / "tokens").exists()


@pytest.mark.parametrize("turns", ["0", "1.5", "100", "-1", "x", ""])
def test_a_file_may_have_1_to_99_turns(turns: str, load: Load, tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", DOCUMENTS)
    with pytest.raises(TextError, match=f"'{turns}' is not a number of turns; give 1 to 99, as in {file}:3"):
        load(f"{file}:{turns}")
    with pytest.raises(TextError, match="is not a number of turns"):
        seams.check_sources(f"{file},{file}:{turns}")


DOCUMENTS = [f"document {number} says fox {number * number} twice: fox {number * number}." for number in range(60)]


def compress_zst(data: bytes) -> bytes:
    import zstandard

    return zstandard.compress(data)


def write(path: Path, texts: list[str], **more: Any) -> Path:
    """Write texts in the format and compression that the name asks for."""
    compress = {".gz": gzip.compress, ".xz": lzma.compress, ".zst": compress_zst}.get(path.suffix, bytes)
    kind = Path(path.name.removesuffix(path.suffix)).suffix if compress is not bytes else path.suffix
    rows = [{"text": text, **more} for text in texts]
    if kind == ".parquet":
        import pyarrow
        import pyarrow.parquet

        sink = pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
        data = sink.getvalue().to_pybytes()
    elif kind == ".json":
        data = json.dumps(rows).encode()
    else:
        data = "\n".join(texts if kind == ".txt" else map(json.dumps, rows)).encode()
    path.write_bytes(compress(data))
    return path


def same_blocks(one: Blocks, other: Blocks) -> bool:
    return torch.equal(one.train, other.train) and torch.equal(one.heldout, other.heldout)


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.json.xz", "a.parquet.gz", "a.txt", "plain [v2].jsonl"])
def test_every_format_gives_one_text(name: str, load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without network. A text file is one document, also where paragraphs are apart, which `datasets` splits. A file
    name is no pattern: the file that it would match is in the same folder."""
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: pytest.fail("no network in this test"))
    texts = ["\n\n".join(DOCUMENTS)] if name == "a.txt" else DOCUMENTS
    write(tmp_path / "plain v.jsonl", ["of somebody else"] * 60)
    expected, blocks = load(write(tmp_path / "plain.jsonl", texts)), load(write(tmp_path / name, texts))
    assert same_blocks(blocks, expected)
    assert blocks.num_tokens == expected.num_tokens == expected.train.numel() + expected.heldout.numel()


def test_text_may_be_in_another_column(load: Load, tmp_path: Path) -> None:
    """Of several files, every one that has columns must have it; a .txt has none."""
    named, plain = tmp_path / "named.jsonl", write(tmp_path / "plain.jsonl", DOCUMENTS)
    named.write_text("".join(json.dumps({"body": text, "text": "no"}) + "\n" for text in DOCUMENTS))
    blocks = load(named, text_column="body")
    assert same_blocks(blocks, load(plain))
    book = write(tmp_path / "book.txt", DOCUMENTS)
    assert load(f"{book},{named}", text_column="body").num_tokens > blocks.num_tokens
    with pytest.raises(TextError, match=r"plain.jsonl, line \d+: no column body, only text; name another with --text"):
        load(f"{named},{plain}", text_column="body")


def test_an_unwritable_cache_is_not_blamed_on_the_text(load: Load, tmp_path: Path, cache: Path) -> None:
    """On a full disk, and where a file is in the place of a folder."""
    write(tmp_path / "a.jsonl", DOCUMENTS * 9)
    with small_files(9_000), pytest.raises(OutputError, match=f"the cache {cache} cannot be written .*; make room"):
        load(tmp_path / "a.jsonl")
    shutil.rmtree(cache)
    for place in (cache, cache / "tokens"):
        place.parent.mkdir(exist_ok=True)
        place.write_text("a file where the folder should be")
        with pytest.raises(OutputError, match=f"the cache {cache} cannot be written .*DDP_VLLM_CACHE"):
            load(tmp_path / "a.jsonl")
        place.unlink()


def test_the_loss_is_on_all_of_other_text_and_of_conversations_without_a_template(
    load: Load, tokenizer: Any, tmp_path: Path
) -> None:
    """With a template under which no answer is located there is nothing to learn from."""
    mixed, chats, lines = tmp_path / "mixed.jsonl", tmp_path / "chats.jsonl", list[str]()
    chats.write_text("".join(json.dumps({"messages": [*talk(number), A]}) + "\n" for number in range(60)))
    mixed.write_text(write(tmp_path / "text.jsonl", DOCUMENTS).read_text() + "\n" + chats.read_text())
    blocks = load(mixed)
    assert blocks.loss_mask.all()
    assert seams.select_loss_mask(blocks, "assistant", "mixed.jsonl", lines.append) is None
    assert lines[0].endswith("model's folder (60)"), "rows are read twice, and counted once"
    assert lines[1].startswith("no turns of an assistant were found in mixed.jsonl, so the loss covers all tokens")
    tokenizer.chat_template = TWICE
    with pytest.raises(TextError, match=r"chats\.jsonl holds no words of an assistant; try --learn-from all"):
        seams.select_loss_mask(load(chats), "assistant", "chats.jsonl", lines.append)
