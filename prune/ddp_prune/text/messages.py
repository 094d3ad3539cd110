"""Turns of any format in, messages in the form in which vLLM hands them to the chat template out.

What `/v1/chat/completions` renders of the same messages is what the served model will read. So
arguments of calls are objects, thoughts have every key that templates read, and keys that vLLM
does not hand on are left out. The rules are in `vllm/renderers/chat_utils.py`.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ddp_prune.text.templates import THOUGHTS, ChatTemplate
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
WEIGHTS = ("weight", "train")
"""Keys with which an author excludes a message from the loss: OpenAI's and Axolotl's."""
IS_INCLUDED = dict.fromkeys(("none", "", "1", "1.0", "true"), True) | dict.fromkeys(("0", "0.0", "false"), False)

Message = dict[str, Any]


class Notes:
    """Counts what was dropped, unknown or changed in the rows of one source."""

    def __init__(self) -> None:
        self.counts = defaultdict[str, Counter[str]](Counter)

    def add(self, statement: str, name: str = "") -> None:
        """Count one case of a statement about a name."""
        self.counts[statement][name] += 1

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
        return list(filter(None, messages))

    def _message(self, turn: Any) -> Message | None:
        """Return the message of a turn; None if it is empty. Raises: TextError."""
        if not isinstance(turn, dict):
            raise TextError(f"{kind_of(turn)}, not an object; write {EXAMPLE}")
        speaker = turn.get(first(turn, ("role", "from")))
        if not isinstance(speaker, str):
            raise TextError("no role; name the speaker under role")
        name = speaker.strip().lower()
        # `gpt-4o` has a version, `assistant_1` an ordinal
        role = SPEAKERS.get(re.split("[^a-z_]", name)[0].rstrip("_"), "")
        if name == "developer" and re.search("""["']developer["']""", self.template.source):
            role = name
        texts = list(self._texts(turn.get(first(turn, ("content", "value")) or "content")))
        generated = self._generated(turn, name, texts) if role == "assistant" else {}
        if not any(texts) and not any(generated.values()) and role != "tool":
            self.notes.add("turns without words, which are dropped", speaker)
            return None
        if not role:
            self.notes.add("unknown speakers, read as the user, with their turns", speaker)
        message: Message = {"role": role or "user", "content": "\n".join(texts)} | generated
        if role != "tool" and self.template.reads_parts:
            message["content"] = [{"type": "text", "text": text} for text in texts]
        if _is_excluded(turn):
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
        key = first(turn, ("tool_calls", "function_call"))
        calls = self._calls(turn[key]) if key else []
        if calls is None:
            raise TextError(f"{kind_of(turn[key])} under {key}; write calls with name and arguments")
        is_call = "call" in name and "tool_calls" in self.template.source
        if is_call and not calls and (calls := self._calls("".join(texts))):
            texts.clear()
        thoughts = next((turn[key] for key in THOUGHTS if turn.get(key) is not None), None)
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
    try:
        return not all(IS_INCLUDED[str(turn.get(key)).lower()] for key in WEIGHTS)
    except KeyError as error:
        raise TextError(f"{error} as weight; write 0 or 1") from None


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
        return json.loads(value)
    except (RecursionError, ValueError):
        return None


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
