"""Turns of any format in, messages in the form in which vLLM hands them to the chat template out.

What `/v1/chat/completions` renders of the same messages is what the served model will read. So
arguments of calls are objects, thoughts have every key that templates read, and keys that vLLM
does not hand on are left out. The rules are in `vllm/renderers/chat_utils.py`.
"""

import ast
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from ddp_prune.text.templates import THOUGHTS, ChatTemplate, texts_of, words_of
from ddp_vllm.errors import TextError

MAX_NAMES = 6  # in a printed note
EXAMPLE = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'

_NAMES = {
    "user": "user human prompter customer instruction",
    "assistant": "assistant gpt chatgpt bing bard model ai bot chatbot agent llm claude gemini llama output "
    "function_call tool_call functioncall tool_calls",
    "system": "system developer system_prompt",
    "tool": "tool observation function ipython environment tool_response tool_result tool_output "
    "function_response function_result function_output",
}
SPEAKERS = {speaker: role for role, speakers in _NAMES.items() for speaker in speakers.split()}
"""The role of each speaker, in lower case and without a version: gpt-4o is gpt."""
LOSS_WEIGHTS = ("weight", "train", "training", "loss")
"""Keys with which an author excludes a message from the loss: OpenAI's, Axolotl's and ms-swift's."""
SPEAKER, CONTENT, CALLS = ("role", "from"), ("content", "value"), ("tool_calls", "function_call")
REASONING = (*THOUGHTS, "thinking")
READ = {*SPEAKER, *CONTENT, *CALLS, *REASONING, *LOSS_WEIGHTS, "name", "tool_call_id"}
"""The keys of a message that are read."""
IS_INCLUDED = dict.fromkeys(("none", "", "1", "1.0", "true"), True) | dict.fromkeys(("0", "0.0", "false"), False)

Message = dict[str, Any]


class Notes:
    """Counts what was dropped, unknown or changed in the rows of one source."""

    def __init__(self) -> None:
        self.counts = defaultdict[str, Counter[str]](Counter)

    def add(self, statement: str, name: str = "", count: int = 1) -> None:
        """Count cases of a statement about a name."""
        if count:
            self.counts[statement][name] += count

    def lines(self, source: str) -> Iterator[str]:
        """Yield a line per statement, with the most frequent names."""
        for statement, names in self.counts.items():
            if set(names) == {""}:
                yield f"{source}: {names['']:,} {statement}"
                continue
            listed = [f"{name} ({count:,})" for name, count in names.most_common(MAX_NAMES)]
            more = len(names) - len(listed)
            yield f"{source}: {statement}: {', '.join(listed)}{f' and {more:,} more' * bool(more)}"


@contextmanager
def at(place: str) -> Iterator[None]:
    """Name the place of a TextError that the block raises."""
    try:
        yield
    except TextError as error:
        raise TextError(f"{place}: {error}") from error.__cause__


@dataclass(frozen=True)
class TurnReader:
    """Reads the turns of one source."""

    notes: Notes
    template: ChatTemplate
    """Decides on contents that are lists, and on roles that not all templates know."""

    def read(self, turns: Any) -> list[Message]:
        """Return the messages of a list of turns. Raises: TextError."""
        if not isinstance(turns, list):
            raise TextError(f"{kind_of(turns)}, not a list of messages; write {EXAMPLE}")
        messages = []
        for number, turn in enumerate(turns, 1):
            with at(f"turn {number}"):
                messages.append(self._message(turn))
        has_words = any(any(texts_of(message)) or message.keys() & {*CALLS, *THOUGHTS} for message in messages)
        return messages if has_words else []

    def _message(self, turn: Any) -> Message:
        """Return the message of a turn. Raises: TextError."""
        if not isinstance(turn, dict):
            raise TextError(f"{kind_of(turn)}, not an object; write {EXAMPLE}")
        speaker = turn.get(first(turn, SPEAKER))
        if not isinstance(speaker, str):
            raise TextError("no role; name the speaker under role")
        name = speaker.strip().lower()
        # `gpt-4o` has a version, `assistant_1` an ordinal
        role = SPEAKERS.get(re.split("[^a-z_]", name)[0].rstrip("_"), "")
        role = name if name == "developer" else role
        texts = list(self._texts(turn.get(first(turn, CONTENT) or "content")))
        generated = self._generated(turn, name, texts) if role == "assistant" else {}
        is_empty_answer = role == "assistant" and not any(texts) and not any(generated.values())
        if is_empty_answer:
            self.notes.add("answers without words, which are not in the loss")
        for key in turn.keys() - READ:
            if not is_empty(turn[key]):
                self.notes.add("keys of messages that are not read, with their messages", key)
        if not role:
            self.notes.add("unknown speakers, read as the user, with their turns", speaker)
        message: Message = {"role": role or "user", "content": "\n".join(filter(None, texts))} | generated
        if role != "tool" and self.template.reads_parts:
            message["content"] = [{"type": "text", "text": text} for text in texts]
        if is_empty_answer or _is_excluded(turn):
            message["weight"] = 0
        return message | {key: turn[key] for key in ("name", "tool_call_id") if turn.get(key) is not None}

    def _texts(self, content: Any) -> Iterator[str]:
        """Yield the texts of a content. Raises: TextError."""
        if not isinstance(content, str | list | None):
            raise TextError(f"the content is {kind_of(content)}; write it as a string")
        for part in [content] if isinstance(content, str) else content or []:
            named = part if isinstance(part, dict) else {"type": kind_of(part), "text": part}
            kind = str(named.get("type", "unnamed"))
            text = named.get(kind if kind in ("refusal", "thinking") else "text")
            if isinstance(text, str):
                yield text
            else:
                self.notes.add("parts of turns that are no text, which are dropped", kind)

    def _generated(self, turn: Message, name: str, texts: list[str]) -> Message:
        """Return an assistant's calls and thoughts; calls are taken out of its words.

        name: of the speaker. Raises: TextError.
        """
        key = first(turn, CALLS)
        calls = self._calls(turn[key]) if key else []
        if calls is None:
            raise TextError(f"{kind_of(turn[key])} under {key}; write calls with name and arguments")
        is_call = "call" in name and "tool_calls" in self.template.source
        if is_call and not calls:
            before, values = _spoken("".join(texts))
            if calls := self._calls(values):
                texts[:] = filter(None, [before])
            elif any(texts):
                self.notes.add("calls that are neither JSON nor Python, which are read as words")
        thoughts = next((turn[key] for key in REASONING if turn.get(key) is not None), None)
        if not isinstance(thoughts, str | None):
            raise TextError(f"the reasoning is {kind_of(thoughts)}; write it as a string")
        generated = {} if thoughts is None else dict.fromkeys(THOUGHTS, thoughts)
        return generated | ({"tool_calls": calls} if calls else {})

    def _calls(self, packed: Any) -> list[Any] | None:
        """Return the calls that an object, a list or a JSON text holds; None if it holds others."""
        calls, values = [], parsed(packed)
        for value in values if isinstance(values, list) else [values]:
            function = value.get("function", value) if isinstance(value, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return None
            given = function.get(first(function, ("arguments", "parameters")))
            arguments = parsed(given)
            if given and not isinstance(arguments, dict):
                self.notes.add("calls whose arguments are no object, without which they are read")
            read = {"arguments": arguments if isinstance(arguments, dict) else {}, "name": function["name"]}
            identity = {"id": value["id"]} if value.get("id") is not None else {}
            calls.append(identity | {"function": read, "type": "function"})
        return calls


def _is_excluded(turn: Message) -> bool:
    """Tell whether a turn is excluded from the loss. Raises: TextError."""
    flags = {key: str(turn.get(key)).lower() for key in LOSS_WEIGHTS}
    for key, flag in flags.items():
        if flag not in IS_INCLUDED:
            raise TextError(f"{flag!r} as {key}; write 0 or 1")
    return not all(map(IS_INCLUDED.__getitem__, flags.values()))


def _spoken(text: str) -> tuple[str, list[Any]]:
    """Return the words before the calls that a text ends with, and the values of the calls: JSON or
    Python, one after the other. Without calls at its end, there are no values."""
    text = re.sub("</?tool_call>", "\n", text)
    start = min((place for mark in "{[" if (place := text.find(mark)) >= 0), default=len(text))
    rest, values = text[start:].strip(), list[Any]()
    with suppress(ValueError, SyntaxError, RecursionError):
        while rest:
            try:
                value, stop = json.JSONDecoder().raw_decode(rest)
            except ValueError:
                line = rest.partition("\n")[0]
                value, stop = ast.literal_eval(line), len(line)
            values += value if isinstance(value, list) else [value]
            rest = rest[stop:].lstrip(" \n\r\t,;")
        return text[:start].strip(), _cleaned(values)
    return text, []


def with_one_system_message(messages: list[Message], template: ChatTemplate) -> list[Message]:
    """Return the messages with those of developers as the system's, all in the first message, if the
    template knows no developers, as vLLM does."""
    if re.search("""["']developer["']""", template.source) or all(turn["role"] != "developer" for turn in messages):
        return messages
    system = [turn for turn in messages if turn["role"] in ("system", "developer")]
    merged = system[0] | {"role": "system"}
    if system != messages[:1]:
        merged = {"role": "system", "content": "\n\n".join(filter(None, map(words_of, system)))}
    return [merged, *(turn for turn in messages if turn not in system)]


def first(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the first name under which a row holds anything; "" if none."""
    return next((name for name in names if not is_empty(row.get(name))), "")


def is_empty(value: Any) -> bool:
    return value in (None, "", [], {})


def parsed(value: Any) -> Any:
    """Return the value of a JSON text, None if it is none; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return load_json(value)
    except (RecursionError, ValueError):
        return None


def load_json(text: str) -> Any:
    """Return the value of a JSON text, without halves of characters, which no tokenizer takes.
    Raises: ValueError, RecursionError."""
    value = json.loads(text)
    return _cleaned(value) if re.search(r"\\u[dD]", text) else value


def _cleaned(value: Any) -> Any:
    """Return a value of JSON with ? in the place of half a character, which is a lone surrogate."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))


def are_turns(value: Any) -> bool:
    """Tell whether a value is a list of turns."""
    return isinstance(value, list) and all(
        isinstance(turn, dict) and bool(turn.keys() & {"role", "from"}) for turn in value
    )


_KINDS = {
    str: "a string",
    bool: "true or false",
    int: "a number",
    float: "a number",
    dict: "an object",
    type(None): "null",
}


def kind_of(value: Any) -> str:
    """Return the type of a JSON value in words."""
    return _KINDS.get(type(value), f"a {type(value).__name__}")
