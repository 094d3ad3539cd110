"""Rows of every common format: the document equals what transformers renders of the whole message.

What is dropped, unknown or changed is printed once per source. A wrong value names its row and turn.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import PUBLISHED, tokenizer_of
from test_documents import GEMMA, LENIENT, MISTRAL, document, in_loss

from ddp_prune.text.documents import Document, read_documents
from ddp_prune.text.messages import Notes
from ddp_prune.text.rows import open_rows
from ddp_prune.text.templates import ChatTemplate
from ddp_prune.text.tokens import tokenize
from ddp_vllm.errors import TextError

AGENT = (  # in the manner of Qwen3: tools in front, thoughts and calls of an assistant, results
    "{%- if tools %}{{- '<|im_start|>system\n<tools>' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}"
    "{{- '</tools><|im_end|>\n' }}{%- endif %}"
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' }}"
    "{%- if m.reasoning_content %}{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{%- endif %}"
    "{{- m.content or '' }}"
    """{%- for call in m.tool_calls or [] %}{{- '<tool_call>\n{"name": "' + call.function.name }}"""
    """{{- '", "arguments": ' }}"""
    "{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}"
    "{{- '}\n</tool_call>' }}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
CALL = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}}
PACKED = {"name": "get_weather", "arguments": {"city": "Oslo", "days": 2}}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "look", "parameters": {"default": None}}}
]
QUESTION = {"role": "user", "content": "weather in Oslo?"}
AGENT_TURNS: list[dict[str, Any]] = [
    QUESTION,
    {"role": "assistant", "content": None, "reasoning_content": "I need the tool.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "21 degrees"},
    {"role": "assistant", "content": "It is 21 degrees.", "reasoning_content": "Warm."},
]
GENERATED = [
    '<think>\nI need the tool.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": '
    '{"city": "Oslo", "days": 2}}\n</tool_call>',
    "<think>\nWarm.\n</think>\n\nIt is 21 degrees.",
]


def notes_of(rows: list[Any], tokenizer: Any, tmp_path: Path) -> list[str]:
    """Return the lines that reading these rows prints."""
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    notes = Notes()
    for _ in range(2):  # a row that is read twice is counted once
        list(read_documents(open_rows(str(tmp_path / "chat.jsonl")), ChatTemplate(tokenizer), notes))
    return [line.removeprefix(f"{tmp_path / 'chat.jsonl'}: ") for line in notes.lines(str(tmp_path / "chat.jsonl"))]


@pytest.mark.parametrize("form", ["messages", "list", "packed", "share-gpt", "arguments are a string"])
def test_the_turns_of_an_agent_are_what_transformers_renders(form: str, tokenizer: Any, tmp_path: Path) -> None:
    """And the loss of an assistant is on its thoughts and calls, with the markup that it generates."""
    tokenizer.chat_template = AGENT
    turns, row = AGENT_TURNS, {"messages": AGENT_TURNS, "tools": TOOLS}
    if form == "list":
        row = turns  # type: ignore[assignment]
    elif form == "packed":
        row = {"conversations": json.dumps(turns), "tools": json.dumps(TOOLS)}  # type: ignore[dict-item]
    elif form == "share-gpt":
        spoken = [("human", QUESTION["content"]), ("function_call", json.dumps(PACKED)), ("observation", "21 degrees"),
                  ("gpt", "It is 21 degrees.")]  # fmt: skip
        row = {"conversations": [{"from": speaker, "value": words} for speaker, words in spoken], "tools": TOOLS}
        turns = [{**turn, "reasoning_content": None} for turn in turns]
    elif form == "arguments are a string":
        packed = json.dumps(CALL["function"]["arguments"])
        turns = [
            *turns[:1],
            {**turns[1], "tool_calls": [{"function": {**CALL["function"], "arguments": packed}}]},
            *turns[2:],
        ]
        row = {"messages": turns, "tools": TOOLS}
    written = document(row, tokenizer)
    tools = None if form == "list" else TOOLS
    assert written.text == tokenizer.apply_chat_template(turns, tools=tools, tokenize=False)
    generated = [text for text in in_loss(written).split("|") if text.strip()]
    thoughtless = [text.partition("</think>\n\n")[2] for text in GENERATED]
    assert "".join(generated).count("It is 21 degrees.") == 1
    expected = thoughtless if form == "share-gpt" else GENERATED
    mask = written.loss_mask
    assert mask is not None
    for words in expected:
        start = written.text.index(words)
        assert mask[start : start + len(words)].all()
    assert mask.sum() <= sum(map(len, expected)) + 2 * len(expected)  # blanks after a turn at most


ONE_CALL = (  # in the manner of Mistral-Nemo: a call stands instead of the turn's words, so the roles still alternate
    "{%- set ns = namespace(index=0) %}{%- for m in messages %}"
    "{%- if m.role != 'tool' and not m.tool_calls %}"
    "{%- if (m.role == 'user') != (ns.index % 2 == 0) %}{{- raise_exception('roles must alternate') }}{%- endif %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}"
    "{%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{{- '[RESULT]' + m.content }}"
    "{%- elif m.tool_calls %}{{- '[CALL] ' + m.tool_calls[0].function.name + '</s>' }}"
    "{%- else %}{{- ' ' + m.content + '</s>' }}{%- endif %}{%- endfor %}"
)


def test_a_call_that_later_turns_depend_on_is_in_the_loss(tokenizer: Any) -> None:
    """To replace the call by words would make the template reject the conversation."""
    tokenizer.chat_template = ONE_CALL
    in_mask = in_loss(document({"messages": AGENT_TURNS}, tokenizer))
    assert [text for text in in_mask.split("|") if text] == ["[CALL] get_weather", " It is 21 degrees."]


@pytest.mark.parametrize("zero", [{"weight": 0}, {"weight": "0"}, {"weight": 0.0}, {"train": False}, {"train": 0},
                                  {"train": "False"}, {"weight": 1, "train": "0"}])  # fmt: skip
def test_a_turn_of_weight_0_is_not_in_the_loss(zero: dict[str, Any], tokenizer: Any) -> None:
    tokenizer.chat_template = AGENT
    turns = [QUESTION, {"role": "assistant", "content": "no words"}, QUESTION]
    turns += [{"role": "assistant", "content": "yes", "weight": "1", "train": True}]
    written = document({"messages": [turns[0], turns[1] | zero, *turns[2:]]}, tokenizer)
    assert in_loss(written).strip("|").strip() == "yes"
    assert written.text == tokenizer.apply_chat_template(turns, tokenize=False)


def test_a_joined_turn_of_weight_0_is_not_in_the_loss(tokenizer: Any) -> None:
    tokenizer.chat_template = MISTRAL
    turns = [QUESTION, {"role": "assistant", "content": "no", "weight": 0}, {"role": "assistant", "content": "words"}]
    written = document({"messages": [*turns, QUESTION, {"role": "assistant", "content": "yes"}]}, tokenizer)
    assert in_loss(written).strip("|") == "yes" and "no\n\nwords" in written.text


def test_other_weights_count_in_full_and_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = LENIENT
    turns = [QUESTION, {"role": "assistant", "content": "half", "weight": 0.5}, {"role": "assistant", "content": "yes"}]
    assert in_loss(document({"messages": turns}, tokenizer)).replace("|", "") == "halfyes"
    assert notes_of([{"messages": turns}], tokenizer, tmp_path) == [
        "turns with a weight other than 0 and 1, which count in full: 0.5 (1)"
    ]


THOUGHTFUL = [
    [QUESTION, {"role": "assistant", "content": "a", "reasoning": "one"}, QUESTION,
     {"role": "assistant", "content": "b", "reasoning": "two"}],
    [QUESTION, {"role": "assistant", "content": "<think>\none\n</think>\n\na"}, QUESTION,
     {"role": "assistant", "content": "<think>two</think>b"}],
]  # fmt: skip


@pytest.mark.parametrize("turns", THOUGHTFUL, ids=["key", "words"])
def test_answers_whose_thoughts_a_template_leaves_out_are_counted_and_not_in_the_loss(
    turns: list[Any], tmp_path: Path
) -> None:
    """Nothing is counted if the thoughts of all answers are there, or if the template knows of none."""
    tokenizer = tokenizer_of("qwen3")
    left_out = "answers whose thoughts the chat template leaves out, so they are not in the loss of assistants"
    assert notes_of([{"messages": turns}, {"messages": turns[:2]}], tokenizer, tmp_path) == [f"1 {left_out}"]
    words = in_loss(document({"messages": turns}, tokenizer)).replace("|", "").strip()
    assert words == "<think>\ntwo\n</think>\n\nb"
    tokenizer.chat_template = LENIENT
    assert not any(left_out in line for line in notes_of([{"messages": turns}], tokenizer, tmp_path))
    assert len(in_loss(document({"messages": turns}, tokenizer)).strip("|").split("|" * 5)) > 1  # both answers


def test_parts_that_a_template_renders_apart_are_not_counted(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endfor %}"
    )
    row = {"messages": [{"role": "user", "content": [{"type": "text", "text": word} for word in ("nine", "foxes")]}]}
    assert document(row, tokenizer).text == "<nine><foxes>" and notes_of([row], tokenizer, tmp_path) == []


def test_words_that_a_template_leaves_out_of_an_answer_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = ONE_CALL
    turns = [QUESTION, {"role": "assistant", "content": "I look.", "tool_calls": [CALL]}, *AGENT_TURNS[2:]]
    lines = notes_of([{"messages": turns}], tokenizer, tmp_path)
    assert "turns that the chat template leaves out or changes: assistant (1)" in lines


@pytest.mark.parametrize("content", ["nine foxes", [{"type": "text", "text": "nine foxes"}]], ids=["text", "parts"])
def test_chats_without_a_template_say_why_they_are_plain_text(content: Any, tokenizer: Any, tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "jump"}]}
    assert document(row, tokenizer) == Document("nine foxes\n\njump")
    assert notes_of([row, row], tokenizer, tmp_path) == [
        "2 conversations read as plain text, because the tokenizer has no chat template; put chat_template.jinja into "
        "the model's folder"
    ]


UNREAD_FORMS: dict[str, tuple[dict[str, Any], str, str]] = {  # a row, its text, the columns that are not read
    "text beside messages": ({"text": "fox", "messages": [QUESTION]}, "fox", "messages (1)"),
    "text beside a question": ({"text": "fox", "prompt": "a", "answer": "b"}, "fox", "prompt (1), answer (1)"),
    "text beside others": ({"text": "fox", "url": "a", "id": 1, "messages": [], "system": ""}, "fox", ""),
    "two questions": ({"prompt": "c", "instruction": "a", "response": "b"}, "<user>a<assistant>b", "prompt (1)"),
    "two answers": ({"question": "a", "output": "b", "answer": "c"}, "<user>a<assistant>b", "answer (1)"),
    "two systems": ({"system": "s", "system_prompt": "t", "messages": [QUESTION]}, "<system>s<user>weather in Oslo?",
                    "system_prompt (1)"),
    "two forms": ({"messages": [QUESTION], "conversations": [QUESTION], "prompt": "a"}, "<user>weather in Oslo?",
                  "conversations (1), prompt (1)"),
    "input beside messages": ({"messages": [QUESTION], "input": "c", "context": "d"}, "<user>weather in Oslo?",
                              "input (1), context (1)"),
}  # fmt: skip


@pytest.mark.parametrize("form", UNREAD_FORMS)
def test_columns_of_another_form_that_are_not_read_are_counted(form: str, tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = LENIENT
    row, text, columns = UNREAD_FORMS[form]
    assert document(row, tokenizer).text == text
    lines = [f"columns that are not read, with their rows: {columns}"] if columns else []
    assert notes_of([row], tokenizer, tmp_path) == lines


ROLES = [("GPT", "assistant"), ("gpt-4o-mini", "assistant"), ("Human", "user"), ("developer", "system"),
         ("observation", "tool"), ("function_call", "assistant")]  # fmt: skip


@pytest.mark.parametrize(("speaker", "role"), ROLES)
def test_speakers_are_known_by_their_names_of_any_case(speaker: str, role: str, tokenizer: Any) -> None:
    tokenizer.chat_template = LENIENT
    written = document({"conversations": [{"from": speaker, "value": "nine foxes"}]}, tokenizer)
    assert written.text == f"<{role}>nine foxes" and (written.loss_mask is not None) == (role == "assistant")


ALPACA = {
    "instruction": "purse?",
    "input": "",
    "output": "two pockets",
    "system": "Be brief.",
    "history": [["hello", "hi"]],
}
USER = {"role": "user", "content": "a"}
AB = "<user>a<assistant>b"
FORMS: dict[str, tuple[Any, str]] = {
    "share-gpt": ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, AB),
    "dolly": ({"instruction": "a", "context": "c", "response": "b", "category": "sums"}, "<user>a\n\nc<assistant>b"),
    "alpaca": ({"instruction": "a", "input": "c", "output": "b"}, "<user>a\n\nc<assistant>b"),
    "alpaca without input": ({"instruction": "a", "input": "", "output": "b"}, AB),
    "completion": ({"prompt": "a", "completion": "b"}, AB),
    "alpaca with history": (ALPACA, "<system>Be brief.<user>hello<assistant>hi<user>purse?<assistant>two pockets"),
    "openorca": ({"id": 1, "system_prompt": "s", "question": "a?", "response": "b"}, "<system>s<user>a?<assistant>b"),
    "system beside turns": ({"system": "s", "conversations": [{"from": "human", "value": "a"}]}, "<system>s<user>a"),
    "trl": ({"prompt": [USER], "completion": [{"role": "assistant", "content": "b"}]}, AB),
    "trl, words": ({"prompt": [USER], "completion": "b"}, AB),
    "input and output": ({"input": "a", "output": "b"}, AB),
    "empty text": ({"text": "", "messages": [USER]}, "<user>a"),
    "lists": ([USER], "<user>a"),
    "context of messages": ({"context": [USER, {"role": "assistant", "content": "b"}], "question": "c", "answer": "d"},
                            "<user>a<assistant>b<user>c<assistant>d"),
    "context of passages": ({"context": ["c", "d"], "question": "a", "answer": "b"}, "<user>a\n\nc\nd<assistant>b"),
    "trl with a context": ({"prompt": [{"role": "system", "content": "s"}, USER], "context": "c", "completion": "b"},
                           "<system>s<user>a\n\nc<assistant>b"),
    "history of messages": ({"history": [USER, {"role": "assistant", "content": "b"}], "prompt": "c", "response": "d"},
                            "<user>a<assistant>b<user>c<assistant>d"),
    "half a history": ({"history": [["a", None]], "prompt": "c", "response": "d"}, "<user>a<user>c<assistant>d"),
    "wildchat": ({"conversation": [{"role": "user", "content": "a", "toxic": False}]}, "<user>a"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_common_format_is_a_conversation(form: str, tokenizer: Any) -> None:
    """And without a template a text of the same words."""
    tokenizer.chat_template = LENIENT
    row, expected = FORMS[form]
    rendered, words = document(row, tokenizer), re.split(r"<\w+>", expected)[1:]
    assert rendered.text == expected
    if "<assistant>" in expected:
        assert in_loss(rendered).strip("|").split("|")[-1] == words[-1]
    tokenizer.chat_template = None
    assert document(row, tokenizer) == Document("\n\n".join(words))


MESSAGES = [{"role": "user", "content": "nine foxes"}, {"role": "assistant", "content": "jump"}]


def talk(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"nine foxes {number}"}, {"role": "assistant", "content": "jump"}]


@pytest.mark.parametrize("packed", [False, True])
def test_a_named_column_may_hold_conversations(
    packed: bool, load: Callable[..., Any], tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.chat_template = LENIENT
    rows = [{"id": number, "talk": json.dumps(talk(number)) if packed else talk(number)} for number in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    blocks = load(tmp_path / "a.jsonl", tokenizer, text_column="talk")
    assert "<user>nine foxes 8<assistant>jump" in tokenizer.decode(blocks.train.flatten())
    assert blocks.notes == (f"{tmp_path / 'a.jsonl'}: columns that are not read, with their rows: id (60)",)
    again = load(tmp_path / "a.jsonl", tokenizer, text_column="talk")
    assert again.notes == blocks.notes  # from the cache


ANSWER = {"role": "assistant", "content": "a"}
WRONG: dict[str, tuple[Any, str]] = {  # rows, what the line says
    "number": ({"messages": [QUESTION, {"role": "assistant", "content": 17}]}, "turn 2 has a number under content"),
    "null turn": ({"messages": [QUESTION, None]}, "turn 2 is null"),
    "no role": ({"messages": [{"content": "a"}]}, "turn 1 has no role"),
    "dict of turns": ({"messages": {"role": "user"}}, "messages holds an object"),
    "text is a number": ({"text": 5}, "text holds a number"),
    "tools": ({"messages": [QUESTION], "tools": "no"}, "a string under tools"),
    "history of one": ({"history": [["a", "b"], ["c"]], "prompt": "c", "response": "d"}, "history, entry 2 is no pair"),
    "history of three": ({"history": [["a", "b", "c"]], "prompt": "c", "response": "d"}, "history, entry 1 is no pair"),
    "history of texts": ({"history": ["a", "b"], "prompt": "c", "response": "d"}, "history, turn 1 is a string"),
    "weight": ({"messages": [{**ANSWER, "weight": "x"}]}, "turn 1 has 'x' under weight"),
    "train": ({"messages": [{**ANSWER, "train": [0]}]}, "turn 1 has [0] under train"),
    "calls": ({"messages": [{**ANSWER, "tool_calls": "look"}]}, "turn 1 has a string under tool_calls"),
    "other calls": ({"messages": [{**ANSWER, "tool_calls": [{"type": "x"}]}]}, "a list of objects under tool_calls"),
    "thoughts": ({"messages": [{**ANSWER, "reasoning": {"a": 1}}]}, "turn 1 has an object under reasoning"),
    "own columns": ({"id": 1, "chosen": "a", "rejected": "b"}, "only id, chosen, rejected"),
    "list of strings": (["a", "b"], "turn 1 is a string"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_value_names_source_row_turn_and_type(case: str, load: Callable[..., Any], tmp_path: Path) -> None:
    row, words = WRONG[case]
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "fox " * 99}) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(TextError) as caught:
        load(tmp_path / "a.jsonl")
    message = str(caught.value)
    assert "a.jsonl, line 2" in message and words in message and ";" in message and "\n" not in message


def test_whatever_is_dropped_or_unknown_is_counted_with_names(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = LENIENT
    row: Any = {"id": 1, "messages": [
        {"role": "alice", "content": "a"},
        {"role": "Bob", "content": [{"type": "image_url"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "reasoning_content": "d", "name": "e"}, {"role": "user", "content": ""},
    ], "tools": TOOLS}  # fmt: skip
    lines = notes_of([row, row, {"text": ""}, {"text": "half \ud83d"}], tokenizer, tmp_path)
    unread = "parts of conversations that the chat template does not read, with their turns: "
    assert sorted(lines) == [
        "1 rows with half a character (a lone surrogate), which is replaced",
        "1 rows without text",
        "columns that are not read, with their rows: id (2)",
        unread + "reasoning_content (2), name (2), tools (2)",
        "parts of turns that are no text, which are dropped: image_url (2)",
        "turns without words, which are dropped: user (2)",
        "unknown speakers, read as the user, with their turns: alice (2), Bob (2)",
    ]


def test_conversations_that_a_template_rejects_or_shortens_are_counted(tokenizer: Any, tmp_path: Path) -> None:
    system = [{"role": "system", "content": "be brief"}, *MESSAGES]
    tokenizer.chat_template = GEMMA
    assert notes_of([{"messages": system}], tokenizer, tmp_path) == [
        "conversations read as plain text, because the chat template rejects them: System role not supported (1)"
    ]
    tokenizer.chat_template = MISTRAL
    (line,) = notes_of([{"messages": [*MESSAGES, {"role": "tool", "content": "21"}]}] * 2, tokenizer, tmp_path)
    assert line.startswith("conversations rearranged so that user and assistant alternate") and line.endswith("(2)")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}{% endif %}{% endfor %}"
    )
    assert notes_of([{"messages": system}], tokenizer, tmp_path) == [
        "turns that the chat template leaves out or changes: system (1)"
    ]


def test_a_template_that_fails_names_the_row(load: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.content + 1 }}{% endfor %}"
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": MESSAGES}) + "\n")
    with pytest.raises(TextError, match=r"chat template of .* fails on .*a\.jsonl, line 1 .*; repair"):
        load(tmp_path / "a.jsonl", tokenizer)


TALKS = [talk(number) for number in range(60)]
SHAPES = {
    "array of lists": json.dumps(TALKS),
    "lists": "\n".join(map(json.dumps, TALKS)),
    "array": json.dumps([{"messages": turns} for turns in TALKS], indent=1),
    "one object": json.dumps({"messages": TALKS[0] * 60}, indent=1),
    "one conversation": "\ufeff" + json.dumps(TALKS[0] * 60),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_json_of_every_shape_is_read(shape: str, load: Callable[..., Any], tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = LENIENT
    (tmp_path / "a.json").write_text(SHAPES[shape])
    blocks = load(tmp_path / "a.json", tokenizer)
    assert re.search("<user>nine foxes [0-9]+<assistant>jump", tokenizer.decode(blocks.train.flatten()))


@pytest.mark.parametrize("family", PUBLISHED)
def test_parts_and_tables_are_rendered_as_by_transformers(family: str, tmp_path: Path) -> None:
    """A Parquet file fills every message with the keys of all others."""
    import pyarrow
    import pyarrow.parquet

    tokenizer = tokenizer_of(family)
    turns = [QUESTION, {"role": "assistant", "content": "21 degrees", "name": "bot"}, QUESTION]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"messages": turns}]), tmp_path / "a.parquet")
    (written,) = read_documents(open_rows(str(tmp_path / "a.parquet")), ChatTemplate(tokenizer), Notes())
    assert written.text == tokenizer.apply_chat_template(turns, tokenize=False)
    (tokens,) = tokenize([written], tokenizer)
    assert tokens.loss_mask.any() and not tokens.loss_mask.all()
