"""The text of a conversation equals what vLLM's /v1/chat/completions renders of the same messages.

vLLM is the oracle, with its own functions: what it renders is what the served model will read. Three chat templates in
the manner of published ones differ in what they read of a message; where vLLM rejects a request, nothing is compared.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_templates import PARTS, QWEN3, STRICT
from seams import document

CALLS = "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}{% endfor %}"
DEVELOPERS = (
    "{% for m in messages %}<{{ m['role'] }}{% if m['role'] == 'developer' %}!{% endif %}>{{ m.content }}" + CALLS
)
THINKING = (  # LFM2.5
    "{% for m in messages %}<{{ m.role }}>{{ m.thinking }}|{{ m.reasoning }}|{{ m.content }}" + CALLS
)
KIMI_K2 = (  # writes parts, but by a variable that vLLM does not follow
    "{% macro render(msg) %}{% set c = msg.get('content') %}{% if c is string %}{{ c }}{% elif c is not none %}"
    "{% for content in c %}[{{ content['text'] }}]{% endfor %}{% endif %}{% endmacro %}"
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ render(m) }}" + CALLS
)
MACRO = (  # of which vLLM follows the parameter, Qwen3.5
    "{% macro render(words, count=1) %}{% if words is string %}{{ words }}{% else %}"
    "{% for item in words %}[{{ item.text }}]{% endfor %}{% endif %}{% endmacro %}"
    "{% for m in messages[0:] %}<{{ m.role }}>{{ render(words=m.content) | trim }}" + CALLS
)
SLICED = (
    "{% set loop_messages = messages[1:] %}{% for m in loop_messages %}"
    "{% for p in m['content'] %}[{{ p }}]{% endfor %}" + CALLS
)
TEMPLATES = {
    "last thoughts": QWEN3, "strict": STRICT, "parts": PARTS, "developers": DEVELOPERS, "thinking": THINKING,
    "parts by a variable": KIMI_K2, "parts by a macro": MACRO, "parts of a slice": SLICED,
}  # fmt: skip

ARGUMENTS = {"city": 'Ålesund "north"', "days": 2, "deep": {"a": [1, None, True], "b": 1.5}}
TEXT = json.dumps(ARGUMENTS)


def user(content: Any = "weather in Oslo?") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any = "It is 21 degrees.", **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(arguments: Any = TEXT, name: str = "get_weather", identity: str = "c00000001") -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any = "21", identity: str = "c00000001", **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def called(*calls: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    return [user(), {"role": "assistant", "content": None, "tool_calls": list(calls), **more}, result(), assistant()]


SYSTEM = {"role": "system", "content": "Be brief."}
DEVELOPER = {"role": "developer", "content": "Name it."}
OTHER_CALL = call("", "other", "c")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
TOOL = {"name": "get_weather", "description": "look", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": TOOL}]
AGENT = [
    SYSTEM, user(), assistant("", reasoning="I need the tool.", tool_calls=[call()]), result("21"),
    assistant("Now the other.", reasoning="One more.", tool_calls=[call('{"city": "Rome"}', identity="c00000002")]),
    result("", "c00000002"), assistant(reasoning="Warm."), user("And Bergen?"), assistant("No idea.", reasoning="Hm."),
]  # fmt: skip
SAME: dict[str, Any] = {  # the messages of a row are those of the request
    "plain": [user(), assistant()],
    "several turns": [SYSTEM, user(), assistant(), user("why"), assistant("Because.")],
    "parts of text": [user(parts("a", "b")), assistant(parts("c", "d"))],
    "a refusal": [user(), assistant([{"type": "refusal", "refusal": "No."}])],
    "parts of thinking": [user(), assistant([{"type": "thinking", "thinking": "hm"}, *parts("b")])],
    "reasoning": [user(), assistant(reasoning="Look.")],
    "thoughts of every turn": [user(), assistant(reasoning="one"), user("why"), assistant("b", reasoning="two")],
    "thoughts among words": [user(), assistant("<think>\none\n</think>\n\na"), user(), assistant("<think>2</think>b")],
    "a call": called(call()),
    "a call with words": [user(), assistant("I look.", tool_calls=[call()]), result(), assistant()],
    "two calls": [user(), assistant(None, tool_calls=[call(), OTHER_CALL]), result(), result("b", "c"), assistant()],
    "no arguments": called(call("")),
    "a result of parts": [user(), assistant("", tool_calls=[call()]), result(parts("a", "b")), assistant()],
    "two parts": [user(parts("a", "b", "c")), assistant("d")],
    "an empty part": [SYSTEM, user(parts("a", "", "b")), assistant(parts("", "c"))],
    "an empty system": [{"role": "system", "content": ""}, user(), assistant()],
    "empty turns": [SYSTEM, user(""), assistant(), user(), assistant(""), user(), assistant()],
    "nothing said": [SYSTEM, user(), assistant(None), user("why"), assistant()],
    "an empty result": [user(), assistant("", tool_calls=[call()]), result(""), assistant()],
    "system and developer": [SYSTEM, DEVELOPER, user(), assistant()],
    "developer and system": [DEVELOPER, SYSTEM, user(), assistant()],
    "a later developer": [SYSTEM, user(), assistant(), DEVELOPER, user(), assistant()],
    "a first developer later": [user(), {**DEVELOPER, "content": parts("Now", "in Norse.")}, user(), assistant()],
    "two systems": [SYSTEM, user(), SYSTEM, assistant()],
    "developer": [{"role": "developer", "content": "Be brief."}, user(), assistant()],
    "unknown keys": [user(), assistant(weight=1, refusal=None, thought="x", metadata={"a": 1}, audio=None)],
    "an agent": AGENT,
}  # fmt: skip
ASKED = {"messages": called(call())}
PACKED = json.dumps({"id": "c00000001", "name": "get_weather", "arguments": ARGUMENTS})
TEXT_OF_ARGUMENTS = {"id": "c00000001", "name": "get_weather", "arguments": json.dumps(ARGUMENTS)}
SPOKEN = {"messages": [user(), assistant(None, tool_calls=[call()]), {"role": "tool", "content": "21"}, assistant()]}


def share_gpt(words: str) -> dict[str, Any]:
    speakers = {"human": "weather in Oslo?", "function_call": words, "observation": "21", "gpt": "It is 21 degrees."}
    return {"conversations": [{"from": speaker, "value": value} for speaker, value in speakers.items()]}


SECOND = json.dumps({"id": "c", "name": "other", "arguments": {}})
TAGGED, THOUGHT = f"<tool_call>{PACKED}</tool_call><tool_call>{SECOND}</tool_call>", "<think>\nI look.\n</think>"
TOOL_OF_ANTHROPIC = {"name": "get_weather", "description": "look", "input_schema": SCHEMA}


def after(words: str | None, *more: dict[str, Any]) -> dict[str, Any]:
    """The request of a spoken call after some words."""
    spoken = assistant(words, tool_calls=[call(), *more])
    return {"messages": [user(), spoken, {"role": "tool", "content": "21"}, assistant()]}


TWO_CALLS = after(None, OTHER_CALL)
OTHER: dict[str, tuple[Any, dict[str, Any]]] = {  # a row, and the request of the same meaning
    "arguments are an object": ({"messages": called(call(ARGUMENTS))}, ASKED),
    "function_call": ({"messages": [user(), assistant(None, function_call=TEXT_OF_ARGUMENTS), *called()[2:]]}, ASKED),
    "spoken call": (share_gpt(PACKED), SPOKEN),
    "bare calls": ({"messages": called({"id": "c00000001", "name": "get_weather", "parameters": ARGUMENTS})}, ASKED),
    "thinking": ({"messages": [user(), assistant(thinking="Look.")]}, {"messages": SAME["reasoning"]}),
    "thinking of two turns": (
        {"messages": [user(), assistant(thinking="one"), user("why"), assistant("b", thinking="two")]},
        {"messages": SAME["thoughts of every turn"]}),
    "two calls on two lines": (share_gpt(f"{PACKED}\n{SECOND}"), TWO_CALLS),
    "two calls, one after the other": (share_gpt(TAGGED), TWO_CALLS),
    "a list of calls": (share_gpt(f"[{PACKED}, {SECOND}]"), TWO_CALLS),
    "calls in Python": (share_gpt(repr([json.loads(PACKED), json.loads(SECOND)])), TWO_CALLS),
    "a call after a thought": (share_gpt(f"{THOUGHT}\n\n{PACKED}"), after(THOUGHT)),
    "a call after words": (share_gpt(f"I look.\n{PACKED}"), after("I look.")),
    "tools of others": ({"messages": AGENT, "tools": [TOOL_OF_ANTHROPIC]}, {"messages": AGENT, "tools": TOOLS}),
    "tools of MCP": (
        {"messages": AGENT, "tools": [{**TOOL_OF_ANTHROPIC, "inputSchema": SCHEMA, "input_schema": None}]},
        {"messages": AGENT, "tools": TOOLS}),
    "tools": ({"messages": AGENT, "tools": TOOLS}, {"messages": AGENT, "tools": TOOLS}),
    "bare tools": ({"messages": AGENT, "tools": json.dumps([TOOL])}, {"messages": AGENT, "tools": TOOLS}),
    "columns": ({"system": "Be brief.", "prompt": "why", "response": "Because."},
                {"messages": [SYSTEM, user("why"), assistant("Because.")]}),
}  # fmt: skip
ROWS = {name: ({"messages": messages}, {"messages": messages}) for name, messages in SAME.items()} | OTHER


@pytest.fixture(scope="module")
def rendered(
    run_in_vllm: Callable[..., str], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[Any, str]:
    """What vLLM renders, by template and conversation; null if it rejects the request."""
    folder, script = tmp_path_factory.mktemp("rendered"), Path(__file__).with_name("render_in_vllm.py")
    jobs = {(template, name): (TEMPLATES[template], ROWS[name][1]) for template in TEMPLATES for name in ROWS}
    (folder / "jobs.json").write_text(json.dumps(list(jobs.values())))
    run_in_vllm(script, tiny_model, folder / "jobs.json", folder / "texts.json")
    return dict(zip(jobs, json.loads((folder / "texts.json").read_text()), strict=True))


@pytest.mark.vllm
@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_as_vllm(template: str, rendered: dict[Any, str | None], tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATES[template]
    expected = {name: text for name in ROWS if (text := rendered[template, name]) is not None}
    assert len(expected) >= (20 if template == "strict" else len(ROWS) - 6)
    assert {name: document(ROWS[name][0], tokenizer).text for name in expected} == expected
    assert len(set(expected.values())) > len(expected) / 3, "the conversations are alike"
