"""Turns of any format in, messages in the form in which vLLM hands them to the chat template out.

What `/v1/chat/completions` renders of the same messages is what the served model will read. So
arguments of calls are objects, thoughts have every key that templates read, and keys that vLLM
does not hand on are left out. The rules are in `vllm/renderers/chat_utils.py`.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_prune.text.templates import THOUGHTS, ChatTemplate
from ddp_vllm.errors import TextError

MAX_NAMES = 6  # in a printed note
UNREAD = "parts of conversations that the chat template does not read, with their turns"
EXAMPLE = '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'

CALLS = ("function_call", "tool_call", "functioncall", "tool_calls")
_NAMES = {
    "user": "user human prompter customer instruction",
    "assistant": "assistant gpt chatgpt bing bard model ai bot chatbot agent llm claude gemini llama output",
    "system": "system developer system_prompt",
    "tool": "tool observation function ipython environment tool_response tool_result tool_output "
    "function_response function_result function_output",
}
SPEAKERS = dict.fromkeys(CALLS, "assistant")
"""The role of each speaker, in lower case; versions such as gpt-4 are known by their beginning."""
for _role, _speakers in _NAMES.items():
    SPEAKERS |= dict.fromkeys(_speakers.split(), _role)
VERSIONED = ("gpt-", "gpt4", "gpt3", "chatgpt-", "claude-", "gemini-", "llama-", "assistant_")

WEIGHTS = ("weight", "train")
"""Keys with which an author excludes a message from the loss: OpenAI's and Axolotl's."""
CALL_KEYS = ("tool_calls", "function_call")
READ_AS: dict[str, tuple[str, ...]] = dict.fromkeys(THOUGHTS, THOUGHTS) | dict.fromkeys(CALL_KEYS, CALL_KEYS[:1])
"""What an assistant generates besides words, and the keys under which a template may read it."""
HANDED_ON = {"assistant": tuple(READ_AS), "tool": ("tool_call_id",), "developer": ("tools",)}
"""Keys of a role's messages that vLLM hands on, next to `name` and `task`."""

Message = dict[str, Any]


class Notes:
    """Counts what was dropped, unknown or changed in the rows of one source, each row once."""

    def __init__(self) -> None:
        self.counts = defaultdict[str, Counter[str]](Counter)
        self.seen = bytearray()
        self.row_is_new = True

    def begin(self, row: int) -> None:
        """State the number of the next row; rows that were read before are not counted."""
        self.seen.extend(bytes(max(0, row + 1 - len(self.seen))))
        self.row_is_new, self.seen[row] = not self.seen[row], 1

    def add(self, statement: str, name: str = "") -> None:
        """Count one case of a statement about a name."""
        if self.row_is_new:
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


@dataclass(frozen=True)
class TurnReader:
    """Reads the turns of one source."""

    notes: Notes
    template: ChatTemplate | None = None
    """Decides on names of roles, on contents that are lists, and on what is noted as unread."""

    def read(self, turns: Any, place: str) -> list[Message]:
        """Return the messages of a list of turns. Raises: TextError."""
        if not isinstance(turns, list):
            raise TextError(f"{place} holds {kind_of(turns)}, not a text or a list of messages; write {EXAMPLE}")
        messages = (self._message(turn, f"{place}, turn {number}") for number, turn in enumerate(turns, 1))
        return list(filter(None, messages))

    def content(self, texts: list[str], role: str = "user") -> Any:
        """Return the content that the template reads: parts, or texts joined by line breaks."""
        if role != "tool" and self.template and self.template.reads_parts:
            return [{"type": "text", "text": text} for text in texts]
        return "\n".join(texts)

    def one_system(self, messages: list[Message]) -> list[Message]:
        """Join developers with the system in front, unless the template knows developers."""
        system = [message for message in messages if message["role"] in ("developer", "system")]
        is_known = self.template and self.template.knows("developer")
        if is_known or all(message["role"] == "system" for message in system):
            return messages
        content = "\n\n".join(filter(None, map(words_of, system)))
        if system == messages[:1]:
            content = system[0]["content"]
        rest = [message for message in messages if message["role"] not in ("developer", "system")]
        return [{"role": "system", "content": content}, *rest]

    def _message(self, turn: Any, place: str) -> Message | None:
        """Return the message of a turn; None if it is empty. Raises: TextError."""
        if not isinstance(turn, dict):
            raise TextError(f"{place} is {kind_of(turn)}, not an object; write {EXAMPLE}")
        speaker_key = first(turn, ("role", "from")) or "role"
        content_key = first(turn, ("content", "value")) or "content"
        speaker = turn.get(speaker_key)
        if not isinstance(speaker, str) or not speaker.strip():
            has = f"{kind_of(speaker)} under {speaker_key}" if speaker_key in turn else "no role"
            raise TextError(f"{place} has {has}; name the speaker under role")
        role = self._role(speaker)
        texts = list(self._texts(turn.get(content_key), f"{place} has", content_key))
        generated = self._generated(turn, texts, place) if role == "assistant" else {}
        has_content = bool({"content", "value"} & turn.keys())
        is_result = has_content and SPEAKERS.get(speaker.strip().lower()) == "tool"
        if any(texts) or any(generated.values()) or is_result:
            if not role:
                statement = "unknown speakers, read as the user, with their turns"
                self.notes.add(statement, speaker)
            content = self.content(texts, role)
            message = {"role": role or "user", "content": content} | generated
            if role == "assistant" and self._is_excluded(turn, place):
                message["weight"] = 0
            return message | self._handed_on(turn, role)
        if not has_content and turn.keys() - {"role", "from", *WEIGHTS}:
            raise TextError(f"{place} has no content, only {', '.join(turn)}; name it content")
        self.notes.add("turns without words, which are dropped", speaker)
        return None

    def _role(self, speaker: str) -> str:
        """Return the role of a speaker that the chat template knows; "" if nobody knows it."""
        name = speaker.strip().lower()
        role = SPEAKERS.get(name) or ("assistant" if name.startswith(VERSIONED) else "")
        knows = self.template.knows if self.template else lambda _: False
        is_known = role == "tool" and knows(name) and not knows(role)  # such as GLM's observation
        return name if is_known or name == "developer" else role

    def _texts(self, content: Any, has: str, key: str) -> Iterator[str]:
        """Yield the texts of a content. Raises: TextError."""
        if not isinstance(content, str | list | None):
            raise TextError(f"{has} {kind_of(content)} under {key}; write it as a string")
        for value in [content] if isinstance(content, str) else content or []:
            part = {"type": "text", "text": value} if isinstance(value, str) else value
            if not isinstance(part, dict):
                raise TextError(f"{has} {kind_of(part)} among the parts of its {key}; write it as a string")
            kind = str(part.get("type", "unnamed"))
            text = part.get(kind if kind in ("refusal", "thinking") else "text")
            if isinstance(text, str):
                yield text
            else:
                self.notes.add("parts of turns that are no text, which are dropped", kind)

    def _generated(self, turn: Message, texts: list[str], place: str) -> Message:
        """Return an assistant's calls and thoughts; calls are taken out of its words. Raises: TextError."""
        key = first(turn, CALL_KEYS)
        calls = self._calls(turn[key]) if key else []
        if calls is None:
            raise TextError(f"{place} has {kind_of(turn[key])} under {key}; write calls with name and arguments")
        speaker = str(turn[first(turn, ("role", "from"))]).strip().lower()
        is_call = speaker in CALLS and self.template and self.template.reads("tool_calls")
        if is_call and not calls and (calls := self._calls("".join(texts))):
            texts.clear()
        key = next((key for key in THOUGHTS if turn.get(key) is not None), "")
        thoughts = turn.get(key)
        if not isinstance(thoughts, str | None):
            raise TextError(f"{place} has {kind_of(thoughts)} under {key}; write it as a string")
        generated = {} if thoughts is None else dict.fromkeys(THOUGHTS, thoughts)
        return generated | ({"tool_calls": calls} if calls else {})

    def _calls(self, packed: Any) -> list[Any] | None:
        """Return the calls that an object, a list or a JSON text holds; None if it holds others."""
        calls, values = [], parsed(packed)
        if values is None:
            values = [parsed(line) for line in packed.splitlines() if line.strip()]
        for value in values if isinstance(values, list) else [values]:
            call = parsed(value)
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                return None
            given = function.get(first(function, ("arguments", "parameters")))
            arguments = parsed(given)
            if given and not isinstance(arguments, dict):
                self.notes.add("calls whose arguments are no object, without which they are read")
            read = {"arguments": arguments if isinstance(arguments, dict) else {}}
            identity = {"id": call["id"]} if call.get("id") is not None else {}
            read["name"] = function["name"]
            calls.append(identity | {"function": read, "type": "function"})
        return calls

    def _is_excluded(self, turn: Message, place: str) -> bool:
        """Tell whether a turn is excluded from the loss. Raises: TextError."""
        weights = []
        for key in WEIGHTS:
            value = turn.get(key)
            weight = parsed(value.lower()) if isinstance(value, str) else value
            if not is_empty(value) and not isinstance(weight, int | float):
                raise TextError(f"{place} has {value!r} under {key}; write 0 or 1")
            if weight not in (None, 0, 1):
                statement = "turns with a weight other than 0 and 1, which count in full"
                self.notes.add(statement, str(value))
            weights.append(weight)
        return 0 in weights

    def _handed_on(self, turn: Message, role: str) -> Message:
        """Return other keys that vLLM hands on, and count those that it or the template drops."""
        names = ("name", "task", *HANDED_ON.get(role, ()))
        read = ("role", "from", "content", "value", *WEIGHTS)
        held = [name for name, value in turn.items() if not is_empty(value)]
        for name in (name for name in held if name not in read):
            keys = READ_AS.get(name, (name,))
            if self.template and not (name in names and any(map(self.template.reads, keys))):
                self.notes.add(UNREAD, name)
        return {k: turn[k] for k in names if k not in READ_AS and turn.get(k) is not None}


def texts_of(message: Message) -> list[str]:
    """Return the texts of the parts of a message."""
    content = message["content"]
    return [part["text"] for part in content] if isinstance(content, list) else [content]


def words_of(message: Message) -> str:
    """Return the text of a message."""
    return "\n".join(texts_of(message))


def first(row: Mapping[str, Any], names: tuple[str, ...]) -> str:
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


def kind_of(value: Any) -> str:
    """Return the type of a JSON value in words."""
    if isinstance(value, list):
        kinds = {type(item) for item in value}
        return f"a list of {_PLURALS.get(kinds.pop(), 'values')}" if len(kinds) == 1 else "a list"
    return _KINDS.get(type(value), f"a {type(value).__name__}")


_KINDS = {str: "a string", bool: "true or false", int: "a number", float: "a number", dict: "an object"}
_KINDS |= {type(None): "null"}
_PLURALS = {str: "strings", int: "numbers", float: "numbers", dict: "objects", list: "lists"}
